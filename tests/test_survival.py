"""A pipe survives what a training loop may do to it: the next good step has the right gradients."""

from __future__ import annotations

import gc
import math
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import await_equal, check_step, held_everywhere

import rpcpipe
from rpcpipe import StageError, World

two = pytest.mark.parametrize("world", [2], indirect=True)
three = pytest.mark.parametrize("world", [3], indirect=True)


class Fickle(nn.Module):
    """Raises, or returns something else, for a micro-batch whose first value says so."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        first = float(x.detach().flatten()[0])
        if first == 777.0:
            raise ValueError("this micro-batch is bad")
        if first == 888.0:
            return {"other": y}
        return y


class Scale(nn.Module):
    """Multiplies by a constant: makes what is too large infinite, forward or backward."""

    def __init__(self, by: float, backward: bool = False) -> None:
        super().__init__()
        self.by, self.backward = by, backward

    def forward(self, x: Tensor) -> Tensor:
        if self.backward:
            if x.requires_grad:
                x.register_hook(lambda g: g * self.by)
            return x * 1
        return x * self.by


def fickle() -> nn.Sequential:
    """The first stage hands on what it is given: a marked row reaches `Fickle`."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Identity(), Fickle(), nn.Linear(4, 4))


def pipe_of(world: World, **options: Any) -> tuple[rpcpipe.Pipe, nn.Sequential]:
    return rpcpipe.Pipe(fickle(), world, balance=[1, 2], chunks=4, **options), fickle()


def bad(value: float) -> Tensor:
    """The third of four micro-batches of two rows makes the second stage do otherwise."""
    x = torch.randn(8, 4)
    x[4] = value
    return x


def loss_that_is_no_scalar(pipe: rpcpipe.Pipe) -> None:
    with pytest.raises(RuntimeError, match="scalar"):
        pipe(torch.randn(8, 4)).backward()


def backward_twice(pipe: rpcpipe.Pipe) -> None:
    loss = pipe(torch.randn(8, 4)).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match=r"once|second time"):
        loss.backward()


def step_without_backward(pipe: rpcpipe.Pipe) -> None:
    pipe.zero_grad()
    before = pipe.state_dict()
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.1)
    opt.step()
    assert opt.step(max_norm=1.0) == 0
    pipe(torch.randn(8, 4))
    opt.step()
    after = pipe.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def wrong_shape(pipe: rpcpipe.Pipe) -> None:
    with pytest.raises(StageError, match="shapes cannot be multiplied") as caught:
        pipe(torch.randn(8, 5))
    assert (caught.value.stage, caught.value.microbatch) == (1, 0)


def one_bad_micro_batch(pipe: rpcpipe.Pipe) -> None:
    with pytest.raises(StageError, match="this micro-batch is bad") as caught:
        pipe(bad(777.0)).sum().backward()
    assert (caught.value.stage, caught.value.microbatch) == (1, 2)


def another_structure(pipe: rpcpipe.Pipe) -> None:
    with pytest.raises(StageError):  # the layer behind takes no dict
        pipe(bad(888.0))


def generator_closed(pipe: rpcpipe.Pipe) -> None:
    def losses() -> Iterator[Tensor]:
        while True:
            out = pipe(torch.randn(8, 4))
            yield out.sum()
            out.sum().backward()

    steps = losses()
    next(steps)
    next(steps)
    pipe(torch.randn(8, 4))  # while one is open
    steps.close()


def output_dropped(pipe: rpcpipe.Pipe) -> None:
    pipe(torch.randn(8, 4))


def interrupted_hook(pipe: rpcpipe.Pipe) -> None:
    """A hook on the driver raises between the forward and the backward pass of the stages."""
    out = pipe(torch.randn(8, 4))
    out.register_hook(lambda _: (_ for _ in ()).throw(KeyboardInterrupt()))
    with suppress(KeyboardInterrupt):
        out.sum().backward()


DEEDS: list[Callable[[rpcpipe.Pipe], None]] = [
    loss_that_is_no_scalar,
    backward_twice,
    step_without_backward,
    wrong_shape,
    one_bad_micro_batch,
    another_structure,
    generator_closed,
    output_dropped,
    interrupted_hook,
]


@two
@pytest.mark.parametrize("deed", DEEDS, ids=lambda deed: deed.__name__)
def test_next_step_is_right_and_nothing_is_held(world: World, deed: Any) -> None:
    pipe, plain = pipe_of(world)
    for _ in range(3):
        check_step(pipe, plain, torch.randn(8, 4))
    gc.collect()  # pipes of tests before
    await_equal(lambda: [held["num_owner_rrefs"] for held in held_everywhere(pipe)], [0, 1, 1])
    idle = held_everywhere(pipe)
    deed(pipe)
    check_step(pipe, plain, torch.randn(8, 4))
    await_equal(lambda: held_everywhere(pipe), idle)


@two
def test_a_structure_that_changes_at_the_end_is_refused(world: World) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Identity(), Fickle())
    pipe = rpcpipe.Pipe(plain, world, balance=[1, 1], chunks=4)
    with pytest.raises(ValueError, match="micro-batch 2 gave"):
        pipe(bad(888.0))
    check_step(pipe, plain, torch.randn(8, 4))


@two
def test_two_threads_may_call_the_pipe(world: World) -> None:
    pipe, plain = pipe_of(world)
    batches = [torch.randn(8, 4) for _ in range(12)]
    found: list[tuple[int, Tensor]] = []
    errors: list[BaseException] = []

    def train(numbers: range) -> None:
        try:
            for k in numbers:
                out = pipe(batches[k])
                out.sum().backward()
                found.append((k, out.detach()))
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=train, args=(range(k, 12, 2),)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert sorted(k for k, _ in found) == list(range(12))
    for k, out in found:
        torch.testing.assert_close(out, plain(batches[k]))
    plain(torch.cat(batches)).sum().backward()
    wanted = plain[1].linear.weight.grad
    got = pipe.apply_to_stage(1, weight_grad)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def weight_grad(module: nn.Module) -> Tensor:
    gradient = module[0].linear.weight.grad  # type: ignore[index, union-attr]
    assert gradient is not None
    return gradient


# ------------------------------------------------------------------------------- check_finite


def overflowing(where: int, backward: bool) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)]
    mixed = [m for k, m in enumerate(layers) for m in ([m, Scale(1e30, backward)] if k == where
             else [m, Scale(1.0)])]  # fmt: skip
    return nn.Sequential(*mixed)


@three
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_first_value_that_is_not_finite_is_named(world: World, stage: int) -> None:
    module = overflowing(stage, backward=False)
    pipe = rpcpipe.Pipe(module, world, balance=[2, 2, 2], chunks=4, check_finite=True)
    x = torch.randn(8, 4) * 1e-3
    x[5] *= 1e22  # times 1e30 is too large; it is in micro-batch 2
    with pytest.raises(
        StageError, match=r"values of an output of this stage are not fin"
    ) as caught:
        pipe(x)
    error = caught.value
    assert (error.stage, error.microbatch, error.phase) == (stage, 2, "forward")
    assert isinstance(error.__cause__, FloatingPointError)
    check_step(pipe, module, torch.randn(8, 4) * 1e-3, lambda out: (out * 1e-30).sum())


@three
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_first_gradient_that_is_not_finite_is_named(world: World, stage: int) -> None:
    module = overflowing(stage, backward=True)
    pipe = rpcpipe.Pipe(module, world, balance=[2, 2, 2], chunks=4, check_finite=True)
    weight = torch.ones(8, 1)
    weight[5] = 1e20
    with pytest.raises(StageError, match=r"the gradient of \d.weight are not finite") as caught:
        (pipe(torch.randn(8, 4)) * weight).sum().backward()
    assert (caught.value.stage, caught.value.microbatch) == (stage, 2)
    assert caught.value.phase == "backward"


@two
def test_an_input_that_is_not_finite_is_named_and_not_sent(world: World) -> None:
    pipe, plain = pipe_of(world, check_finite=True)
    x = torch.randn(8, 4)
    x[7, 1] = math.nan
    with pytest.raises(FloatingPointError, match="1 of 8 values of the input of micro-batch 3"):
        pipe(x)
    check_step(pipe, plain, torch.randn(8, 4))


@two
def test_nan_passes_where_nobody_asked(world: World) -> None:
    pipe, plain = pipe_of(world)
    x = torch.full((8, 4), math.nan)
    assert pipe(x).isnan().all()
    check_step(pipe, plain, torch.randn(8, 4))


# ------------------------------------------------------------------------ what cannot be sent


AT_A_PROMPT = """
import torch, rpcpipe
from torch import nn
class Net(nn.Module):
    def forward(self, x): return x * 2
def probe(module): return 3
def refused(fn, *args, **kwargs):
    try: fn(*args, **kwargs)
    except TypeError as exc: print("refused:", " ".join(str(exc).split()))
def train(world):
    refused(rpcpipe.Pipe, nn.Sequential(nn.Linear(2, 2), Net()), world, balance=[1, 1])
    pipe = rpcpipe.Pipe(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), world, balance=[1, 1])
    refused(pipe.apply_to_stage, 0, probe)
    refused(pipe.apply_to_stage, 0, lambda module: 3)
    refused(pipe.optimizer, type("Mine", (torch.optim.SGD,), {}), lr=1.0)
    pipe(torch.ones(2, 2)).sum().backward()
    print("works")
rpcpipe.run(train, stages=2)
"""


def test_what_is_defined_at_a_prompt_is_refused_with_the_way_out() -> None:
    done = subprocess.run(
        [sys.executable, "-"], input=AT_A_PROMPT, capture_output=True, text=True, timeout=100
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 5, done.stderr
    for line, name in zip(lines, ["layer 1 (Net)", "probe", "<lambda>", "Mine"], strict=False):
        assert line.startswith("refused: "), line
        assert name in line, line
        assert "at the top level of a file and import it" in line, line
    assert "notebook or at a prompt" in lines[0]
    assert lines[-1] == "works"


IN_A_SCRIPT = """
import torch, rpcpipe
from torch import nn
class Net(nn.Module):
    def forward(self, x): return x * 2
def probe(module): return len(module)
def train(world):
    pipe = rpcpipe.Pipe(nn.Sequential(nn.Linear(2, 2), Net()), world, balance=[1, 1])
    print(pipe.apply_to_stage(1, probe))
if __name__ == "__main__":
    rpcpipe.run(train, stages=2)
"""


@pytest.mark.parametrize("how", ["file", "module"])
def test_what_a_script_defines_works(tmp_path: Path, how: str) -> None:
    (tmp_path / "script.py").write_text(IN_A_SCRIPT)
    start = ["script.py"] if how == "file" else ["-m", "script"]
    done = subprocess.run(
        [sys.executable, *start], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert done.stdout.strip() == "1", done.stderr
