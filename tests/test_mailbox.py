"""The mailbox, and how many messages micro-batches travel in."""

from __future__ import annotations

import gc
import random
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from test_order import Slow
from torch import Tensor, nn
from toys import all_grads, check_equal, grads

import rpcpipe
from rpcpipe import World, transport
from rpcpipe.errors import Failure
from rpcpipe.mailbox import WORTH, Mailbox, Parcel, groups
from rpcpipe.stage import AHEAD, Stage

two = pytest.mark.parametrize("world", [2], indirect=True)

LARGE = WORTH // 4  # elements, of four bytes


def parcel(elements: int = 1) -> Parcel:
    return Parcel((torch.zeros(elements),))


# ------------------------------------------------------------------------------- the mailbox


@pytest.mark.parametrize("early", [0, 2, 4])
def test_small_values_are_taken_together(early: int) -> None:
    """Whether they were there before they were asked for, or came later, or some of both."""
    box = Mailbox()
    values = [parcel() for _ in range(5)]
    for i in range(early):
        box.put(0, i, None, values[i])
    answer = box.take_several(0, 0, 4)
    for i in range(early, 5):
        assert answer.done() == (i == 4)
        box.put(0, i, None, values[i])
    found = answer.value()
    assert len(found) == 4
    assert all(a is b for a, b in zip(found, values, strict=False))
    assert box.take(0, 4).value() is values[4]


def test_large_values_are_taken_alone_and_a_group_ends_with_one() -> None:
    box = Mailbox()
    for i, elements in enumerate([LARGE, 1, LARGE, 1, 1]):
        box.put(0, i, None, parcel(elements))
    assert len(box.take_several(0, 0, 5).value()) == 1
    assert len(box.take_several(0, 1, 5).value()) == 2
    assert len(box.take_several(0, 3, 5).value()) == 2
    assert not box._open


@pytest.mark.parametrize("seed", range(5))
def test_who_knows_the_sizes_makes_the_same_groups(seed: int) -> None:
    rng = random.Random(seed)
    elements = [rng.choice([0, 1, LARGE // 3, LARGE // 2, LARGE, 2 * LARGE]) for _ in range(12)]
    box = Mailbox()
    for i, count in enumerate(elements):
        box.put(0, i, None, parcel(count))
    found, first = {}, 2
    while first < len(elements):
        found[first] = len(box.take_several(0, first, len(elements)).value())
        first += found[first]
    assert groups([4 * count for count in elements], 2) == found


def test_a_thousand_that_are_there_are_taken_together() -> None:
    box = Mailbox()
    for i in range(2000):
        box.put(0, i, None, None)
    assert box.take_several(0, 0, 2000).value() == [None] * 2000


def test_a_dropped_step_answers_for_each_that_has_not_come() -> None:
    box = Mailbox()
    box.put(0, 0, None, 7)
    answer = box.take_several(0, 0, 3)
    why = Failure("dropped", "", "", b"")
    box.drop(0, why)
    assert answer.value() == [7, why, why]
    assert not box._open


@pytest.mark.parametrize("early", [True, False])
def test_values_that_were_taken_are_let_go(early: bool) -> None:
    """Without the garbage collector, which comes when it likes: outputs are large."""
    box = Mailbox()
    values = [parcel() for _ in range(2)]
    refs = [weakref.ref(value.args[0]) for value in values]
    gc.disable()
    try:
        answer = None if early else box.take_several(0, 0, 2)
        for i in range(2):
            box.put(0, i, None, values[i])
        answer = answer or box.take_several(0, 0, 2)
        assert len(answer.value()) == 2
        del answer, values
        assert [ref() for ref in refs] == [None, None]
    finally:
        gc.enable()


# ------------------------------------------------------------------------------ what travels


class Few(nn.Module):
    """Uses two columns of an input of any size."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :2]


class Widen(nn.Module):
    """Outputs of any size."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements = elements

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :1].expand(len(x), self.elements).contiguous()


M = 6


@two
@pytest.mark.parametrize(
    ("elements", "inputs", "outputs"), [(2, 0, 1), (LARGE // 2, 3, 3), (LARGE, M - 1, M - 1)]
)
def test_micro_batches_travel_in_messages_that_are_worth_it(
    world: World, monkeypatch: pytest.MonkeyPatch, elements: int, inputs: int, outputs: int
) -> None:
    """But for the first input, which goes with the order, and the last output, which is urgent."""
    torch.manual_seed(0)
    plain = nn.Sequential(Few(), nn.Linear(2, 2), Widen(elements))
    pipe = rpcpipe.Pipe(plain, world, balance=[2, 1], chunks=M)
    calls: Counter[str] = Counter()
    call, take = transport.Remote.call, pipe._port.take

    def counted_call(self: transport.Remote, method: str, *args: Any) -> Any:
        calls[method] += 1
        return call(self, method, *args)

    def counted_take(step: int, i: int, name: Any = None) -> Any:
        calls["inputs"] += 1
        return take(step, i, name)

    monkeypatch.setattr(transport.Remote, "call", counted_call)
    monkeypatch.setattr(pipe._port, "take", counted_take)
    x = torch.randn(M, elements, requires_grad=True)
    pipe(x).square().mean().backward()
    assert (calls["inputs"], calls["take_several"], calls["take"]) == (inputs, outputs, 1)
    found, x.grad = x.grad, None
    plain(x).square().mean().backward()
    assert found is not None
    assert x.grad is not None
    torch.testing.assert_close(found, x.grad)
    check_equal(all_grads(pipe), grads(plain))


def watch(stage: Stage) -> None:
    """Count gradients that wait while a backward pass is computed."""
    stage.extras["most"] = 0
    differentiate = stage._differentiate

    def counted(run: Any, *args: Any) -> None:
        differentiate(run, *args)
        waiting = sum(not slot._full.locked() for slot in run.gradients)
        stage.extras["most"] = max(stage.extras["most"], waiting)

    stage._differentiate = counted  # type: ignore[method-assign]


def most(stage: Stage) -> int:
    return int(stage.extras["most"])


@two
@pytest.mark.parametrize(("elements", "waiting"), [(1, M - 1), (3 * LARGE, AHEAD)])
def test_large_gradients_come_when_they_are_soon_needed(
    world: World, elements: int, waiting: int
) -> None:
    """And small ones all at once: a message more for each would cost more than they take."""
    plain = nn.Sequential(Slow(), Slow(0.0, 0.3), Widen(elements))
    pipe = rpcpipe.Pipe(plain, world, balance=[1, 2], chunks=M)
    pipe._everywhere("watch", watch)
    x = torch.zeros(M, 2)
    pipe(x).square().sum().backward()
    assert pipe._everywhere("count", most)[1] == waiting
