"""Prediction: results in order and without gaps, whatever goes wrong on the way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import all_grads, await_equal, check_equal, grads, mlp

import rpcpipe
from benchmarks.emulated import chain
from rpcpipe import World
from rpcpipe.stage import Stage

three = pytest.mark.parametrize("world", [3], indirect=True)


def batches(count: int = 9) -> list[Tensor]:
    """Of different sizes, also fewer rows than chunks."""
    torch.manual_seed(1)
    return [torch.randn(1 + k % 5, 4) for k in range(count)]


def left(stage: Stage) -> tuple[int, int]:
    return len(stage._runs), len(stage._mailbox._open)


def left_everywhere(pipe: rpcpipe.Pipe) -> list[Any]:
    return [len(pipe._port._open), *pipe._everywhere("count", left)]


NOTHING = [0, (0, 0), (0, 0), (0, 0)]


@three
@pytest.mark.parametrize(("chunks", "in_flight"), [(3, None), (1, None), (4, 1), (2, 20)])
def test_results_come_in_order(world: World, chunks: int, in_flight: int | None) -> None:
    plain = mlp()
    pipe = rpcpipe.Pipe(plain, world, balance=[2, 2, 2], chunks=chunks)
    found = list(pipe.predict(iter(batches()), in_flight=in_flight))
    assert len(found) == 9
    for result, x in zip(found, batches(), strict=True):
        assert not result.requires_grad
        torch.testing.assert_close(result, plain(x).detach())
    assert list(pipe.predict([])) == []
    assert left_everywhere(pipe) == NOTHING


class Two(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"sum": x + y, "x": x}


class Sum(nn.Module):
    def forward(self, value: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**value, "twice": 2 * value["sum"]}


@three
def test_tuple_is_several_arguments(world: World) -> None:
    pipe = rpcpipe.Pipe(nn.Sequential(Two(), Sum(), nn.Identity()), world, balance=[1, 1, 1])
    x, y = torch.randn(3, 2), torch.randn(3, 2)
    for result in pipe.predict([(x, y), (x, y)]):
        torch.testing.assert_close(result["twice"], 2 * (x + y))


@three
def test_no_more_is_read_than_may_be_in_flight(world: World) -> None:
    pipe = rpcpipe.Pipe(mlp(), world, balance=[2, 2, 2], chunks=2)
    read, ahead = 0, []

    def source() -> Iterator[Tensor]:
        nonlocal read
        for x in batches(12):
            read += 1
            yield x

    for k, _ in enumerate(pipe.predict(source(), in_flight=4)):
        ahead.append(read - k)
    assert read == 12
    assert max(ahead) == 4


@three
def test_stages_do_not_drain_between_mini_batches(world: World) -> None:
    module = chain(3, width=4, rows=4, seconds=0.06)
    pipe = rpcpipe.Pipe(module, world, balance=[1, 1, 1], chunks=2)
    with pipe.record() as timeline:
        list(pipe.predict([torch.randn(4, 4)] * 6))
    first, last = timeline.events[0], timeline.events[-1]
    assert len(first) == len(last) == 12
    for k in range(5):
        # By its end of one mini-batch the first stage has begun on two more.
        assert first[2 * (k + 1)].start < last[2 * k + 1].end


@three
def test_closed_midway_it_drops_what_is_under_way(world: World) -> None:
    plain = mlp()
    pipe = rpcpipe.Pipe(plain, world, balance=[2, 2, 2], chunks=3)
    results = pipe.predict(batches())
    next(results)
    results.close()
    for _ in pipe.predict(batches()):
        break  # forgotten, not closed
    x = torch.randn(5, 4)
    pipe(x).sum().backward()
    plain(x).sum().backward()
    check_equal(all_grads(pipe), grads(plain))
    await_equal(lambda: left_everywhere(pipe), NOTHING)


class Picky(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if (x > 100).any():
            raise ZeroDivisionError("too large")
        return x


@three
def test_failed_mini_batch_raises_in_its_turn(world: World) -> None:
    plain = nn.Sequential(nn.Linear(4, 4), Picky(), nn.Linear(4, 4))
    pipe = rpcpipe.Pipe(plain, world, balance=[1, 1, 1], chunks=2)
    given = batches()
    given[3] = torch.full((4, 4), 1e6) * torch.sign(torch.randn(4, 1))
    with torch.no_grad():
        plain[0].weight.fill_(1.0)
    pipe.load_state_dict(plain.state_dict())
    found: list[Tensor] = []
    with pytest.raises(rpcpipe.StageError, match="too large") as caught:
        found.extend(pipe.predict(given))
    assert (caught.value.stage, caught.value.phase) == (1, "forward")
    assert len(found) == 3
    torch.testing.assert_close(found[2], plain(given[2]).detach())
    await_equal(lambda: left_everywhere(pipe), NOTHING)
    assert len(list(pipe.predict(batches()))) == 9


@three
def test_errors_of_the_source_and_of_bad_batches_come_in_their_turn(world: World) -> None:
    pipe = rpcpipe.Pipe(mlp(), world, balance=[2, 2, 2], chunks=2)

    def source() -> Iterator[Tensor]:
        yield from batches(3)
        raise LookupError("no more data")

    for given, kind, message in [
        (source(), LookupError, "no more data"),
        ([*batches(3), torch.randn(0, 4), *batches(3)], ValueError, "no rows"),
        ([*batches(3), "text"], TypeError, "at least one tensor"),
    ]:
        found = []
        with pytest.raises(kind, match=message):
            found.extend(pipe.predict(given))
        assert len(found) == 3
    for wrong in (0, True, 2.5):
        with pytest.raises(ValueError, match="in_flight="):
            pipe.predict([], in_flight=wrong)  # type: ignore[arg-type]
    assert left_everywhere(pipe) == NOTHING


@three
def test_training_between_two_results(world: World) -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4))
    pipe = rpcpipe.Pipe(plain, world, balance=[1, 1, 1], chunks=2)
    plain.eval()
    wanted = [plain(x).detach() for x in batches()]
    pipe.eval()
    for k, result in enumerate(pipe.predict(batches())):
        torch.testing.assert_close(result, wanted[k])
        pipe.zero_grad()
        x = torch.randn(5, 4)
        pipe(x).pow(2).sum().backward()
        plain.zero_grad()
        plain(x).pow(2).sum().backward()
        check_equal(all_grads(pipe), grads(plain))
    pipe.train()
    assert any((a != b).any() for a, b in zip(pipe.predict(batches()), wanted, strict=True))


@three
def test_modes_of_the_driver_hold(world: World) -> None:
    pipe = rpcpipe.Pipe(mlp(), world, balance=[2, 2, 2], chunks=2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert {y.dtype for y in pipe.predict(batches(2))} == {torch.bfloat16}
    with torch.inference_mode():
        assert len(list(pipe.predict(batches(2)))) == 2
    assert torch.is_grad_enabled()
