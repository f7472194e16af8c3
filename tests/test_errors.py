"""Exceptions in stages reach the driver whole, and the next step works; bad input goes nowhere."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import all_grads, check_equal, check_step, grads, mlp

import rpcpipe
from rpcpipe import BalanceError, StageError, World

two = pytest.mark.parametrize("world", [2], indirect=True)
three = pytest.mark.parametrize("world", [3], indirect=True)

PHASES = ("forward", "recompute", "backward")


class CustomError(Exception):
    """Pickles, and does not come back: ``__init__`` takes other arguments than ``args``."""

    def __init__(self, code: int, hint: str) -> None:
        super().__init__(f"code {code}: {hint}")


class LockedError(Exception):
    """Cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


class FaultyStrError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


KINDS: dict[str, tuple[Callable[[], BaseException], type[BaseException]]] = {
    "value": (lambda: ValueError("boom"), ValueError),
    "exit": (lambda: SystemExit(3), SystemExit),
    "interrupt": (KeyboardInterrupt, KeyboardInterrupt),
    "stop": (lambda: StopIteration("boom"), StopIteration),
    "generator": (GeneratorExit, GeneratorExit),
    "custom": (lambda: CustomError(7, "boom"), RuntimeError),
    "locked": (LockedError, RuntimeError),
    "text": (FaultyStrError, FaultyStrError),
}


class _Bomb(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str) -> Tensor:
        ctx.kind = kind
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise KINDS[ctx.kind][0]()


class Trip(nn.Module):
    """A linear layer that raises where the rows of its input are marked: see `mark`."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.stage = stage
        self.linear = nn.Linear(3, 3)

    def forward(self, value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, marks = value
        x = self.linear(x)
        for stage, phase, kind in {tuple(row.tolist()) for row in marks}:
            if stage == self.stage:
                raised = KINDS[list(KINDS)[kind]][0]
                if PHASES[phase] == "forward" and not rpcpipe.is_recomputing():
                    raise raised()
                if PHASES[phase] == "recompute" and rpcpipe.is_recomputing():
                    raise raised()
                if PHASES[phase] == "backward":
                    x = _Bomb.apply(x, list(KINDS)[kind])
        return x, marks


class Pair(nn.Module):
    def forward(self, x: Tensor, marks: Tensor) -> tuple[Tensor, Tensor]:
        return x, marks


def trips(stages: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Pair(), *(Trip(j) for j in range(stages)))


M = 4


def clean() -> tuple[Tensor, Tensor]:
    return torch.randn(M, 3), torch.full((M, 3), -1)


def mark(*wheres: tuple[int, int, str], kind: str = "value") -> tuple[Tensor, Tensor]:
    """A mini-batch of `M` rows, one a micro-batch, that trips at each (stage, row, phase)."""
    x, marks = clean()
    for stage, i, phase in wheres:
        marks[i] = torch.tensor([stage, PHASES.index(phase), list(KINDS).index(kind)])
    return x, marks


def fail(pipe: rpcpipe.Pipe, batch: tuple[Tensor, Tensor]) -> StageError:
    with pytest.raises(StageError) as caught:
        pipe(*batch)[0].sum().backward()
    return caught.value


def where(error: StageError) -> tuple[int, int | None, str]:
    return error.stage, error.microbatch, error.phase


def check_next_step(pipe: rpcpipe.Pipe, plain: nn.Sequential) -> None:
    x, marks = clean()
    pipe.zero_grad()
    plain.zero_grad()
    pipe(x, marks)[0].pow(2).sum().backward()
    plain[1:](plain[0](x, marks))[0].pow(2).sum().backward()
    check_equal(all_grads(pipe), grads(plain))


# ------------------------------------------------------------------------ one stage raises


@three
def test_each_stage_phase_and_micro_batch_is_named_and_next_step_works(world: World) -> None:
    plain = trips()
    pipe = rpcpipe.Pipe(plain, world, balance=[2, 1, 1], chunks=M, checkpoint="always")
    for stage in range(3):
        for phase in PHASES:
            for i in (0, M - 1):
                error = fail(pipe, mark((stage, i, phase)))
                assert where(error) == (stage, i, phase)
                assert error.host == socket.gethostname()
                assert "in forward" in error.remote_traceback or phase == "backward"
                assert "test_errors.py" in error.remote_traceback
                assert f"stage {stage}, micro-batch {i}, {phase}" in str(error)
                assert isinstance(error.__cause__, ValueError)
                check_next_step(pipe, plain)


@two
@pytest.mark.parametrize("checkpoint", ["never", "except_last"])
def test_other_checkpoint_modes_report_as_well(world: World, checkpoint: str) -> None:
    plain = trips(2)
    pipe = rpcpipe.Pipe(plain, world, balance=[2, 1], chunks=M, checkpoint=checkpoint)
    for stage in range(2):
        for phase in ("forward", "backward"):
            for i in (0, M - 1):
                assert where(fail(pipe, mark((stage, i, phase)))) == (stage, i, phase)
    check_next_step(pipe, plain)


class Widen(nn.Module):
    def forward(self, value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, marks = value
        return x.repeat(1, 2**21), marks


@two
@pytest.mark.parametrize("i", range(M))
@pytest.mark.parametrize("stage", range(2))
def test_failures_are_reported_while_large_gradients_wait_for_their_turn(
    world: World, stage: int, i: int
) -> None:
    plain = trips(2).append(Widen())
    pipe = rpcpipe.Pipe(plain, world, balance=[2, 2], chunks=M, checkpoint="always")
    for phase in PHASES[1:]:
        assert where(fail(pipe, mark((stage, i, phase)))) == (stage, i, phase)
    pipe.zero_grad()
    x, marks = clean()
    pipe(x, marks)[0].sum().backward()
    plain[1:](plain[0](x, marks))[0].sum().backward()
    check_equal(all_grads(pipe), grads(plain))


@two
@pytest.mark.parametrize("kind", KINDS)
def test_cause_is_the_original_or_names_it(world: World, kind: str) -> None:
    plain = trips(2)
    pipe = rpcpipe.Pipe(plain, world, balance=[2, 1], chunks=M, checkpoint="always")
    for phase in PHASES:
        error = fail(pipe, mark((1, 2, phase), kind=kind))
        assert where(error) == (1, 2, phase)
        assert type(error.__cause__) is KINDS[kind][1]
        name = type(KINDS[kind][0]()).__name__
        assert name in str(error)
        assert name in error.remote_traceback
    check_next_step(pipe, plain)


@three
def test_no_grad_forward_reports_too(world: World) -> None:
    plain = trips()
    pipe = rpcpipe.Pipe(plain, world, balance=[2, 1, 1], chunks=M)
    with torch.no_grad(), pytest.raises(StageError) as caught:
        pipe(*mark((1, 1, "forward")))
    assert where(caught.value) == (1, 1, "forward")
    check_next_step(pipe, plain)


# --------------------------------------------------------------------- several stages raise


@three
@pytest.mark.parametrize(
    ("wheres", "first"),
    [
        # Forward: micro-batch i is in stage j at cycle i + j, lower i first within a cycle.
        ([(0, 1, "forward"), (2, 0, "forward")], (0, 1, "forward")),
        ([(0, 2, "forward"), (1, 0, "forward")], (1, 0, "forward")),
        ([(1, 0, "forward"), (0, 1, "forward")], (1, 0, "forward")),
        ([(0, 2, "forward"), (1, 1, "forward"), (2, 0, "forward")], (2, 0, "forward")),
        # Backward is the mirror image: the last micro-batch in the last stage is first.
        ([(2, 2, "backward"), (1, 3, "backward")], (1, 3, "backward")),
        ([(2, 1, "backward"), (1, 2, "backward"), (0, 3, "backward")], (0, 3, "backward")),
        ([(0, 3, "backward"), (2, 0, "backward")], (0, 3, "backward")),
        ([(0, 3, "recompute"), (2, 2, "backward")], (2, 2, "backward")),
        ([(0, 3, "recompute"), (1, 2, "recompute")], (0, 3, "recompute")),
    ],
)
def test_first_failure_in_schedule_order_wins(
    world: World, wheres: list[tuple[int, int, str]], first: tuple[int, int, str]
) -> None:
    plain = trips()
    pipe = rpcpipe.Pipe(plain, world, balance=[2, 1, 1], chunks=M, checkpoint="always")
    assert [where(fail(pipe, mark(*wheres))) for _ in range(5)] == [first] * 5
    check_next_step(pipe, plain)


# ------------------------------------------------------------------------- outside of a step


def raise_value_error(module: nn.Module) -> None:
    raise ValueError("asked to")


def exit_process(module: nn.Module) -> None:
    raise SystemExit(2)


def return_lock(module: nn.Module) -> Any:
    return threading.Lock()


class FailingSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if any(p.shape == (4, 4) for group in self.param_groups for p in group["params"]):
            raise ArithmeticError("no step today")
        super().step()


class FailingInit(torch.optim.SGD):
    def __init__(self, params: Any, **kwargs: Any) -> None:
        params = list(params)
        if not all(p.is_meta for p in params):  # as it is tried on the driver
            raise ArithmeticError("no optimizer today")
        super().__init__(params, **kwargs)


@two
def test_failure_in_apply_to_stage_names_the_stage(world: World) -> None:
    plain = mlp()
    pipe = rpcpipe.Pipe(plain, world, balance=[2, 4], chunks=2)
    with pytest.raises(StageError, match="asked to") as caught:
        pipe.apply_to_stage(1, raise_value_error)
    assert caught.value.stage == 1
    assert caught.value.microbatch is None
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(StageError) as caught:
        pipe.apply_to_stage(0, exit_process)
    assert isinstance(caught.value.__cause__, SystemExit)
    check_step(pipe, plain, torch.randn(4, 4))


@two
def test_failure_in_the_optimizer_names_the_stage(world: World) -> None:
    plain = mlp()
    pipe = rpcpipe.Pipe(plain, world, balance=[1, 5], chunks=2)
    with pytest.raises(StageError, match="no optimizer today"):
        pipe.optimizer(FailingInit, lr=0.1)
    opt = pipe.optimizer(FailingSGD, lr=0.1)
    pipe(torch.randn(4, 4)).sum().backward()
    with pytest.raises(StageError, match="no step today") as caught:
        opt.step()
    assert isinstance(caught.value.__cause__, ArithmeticError)
    check_step(pipe, plain, torch.randn(4, 4)) if caught.value.stage == 0 else None


# --------------------------------------------------------------------- what cannot be sent


class Bad(nn.Module):
    """Hands on what a message cannot carry, if asked to."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor) -> Any:
        if x[0, 0] < 1000:
            return x
        return {
            "sparse": lambda: x.to_sparse(),
            "meta": lambda: x.to("meta"),
            "function": lambda: (x, lambda: None),
            "lock": lambda: (x, threading.Lock()),
        }[self.what]()


@two
@pytest.mark.parametrize("what", ["sparse", "meta", "function", "lock"])
@pytest.mark.parametrize("stage", [0, 1])
def test_output_that_cannot_be_sent_is_an_error(world: World, what: str, stage: int) -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 4), nn.Identity())
    plain[2 * stage + 1] = Bad(what)
    pipe = rpcpipe.Pipe(plain, world, balance=[2, 2], chunks=2)
    big = torch.full((4, 4), 0.1)
    with torch.no_grad():
        plain[0].weight.copy_(torch.eye(4))
        plain[2].weight.copy_(torch.eye(4))
        big[2:] = 1e6
    pipe.load_state_dict(plain.state_dict())
    with pytest.raises(StageError) as caught:
        pipe(big)
    assert caught.value.stage == stage
    check_step(pipe, plain, torch.full((4, 4), 0.1))


@two
def test_result_of_apply_to_stage_that_cannot_be_sent_is_an_error(world: World) -> None:
    pipe = rpcpipe.Pipe(mlp(), world, balance=[2, 4])
    with pytest.raises(StageError, match="pickle"):
        pipe.apply_to_stage(1, return_lock)


# ------------------------------------------------------------------------ refused by the driver


@pytest.fixture(scope="module")
def pair_pipe(world: World) -> tuple[rpcpipe.Pipe, nn.Sequential]:
    plain = trips(2)
    return rpcpipe.Pipe(plain, world, balance=[2, 1], chunks=M), plain


@two
@pytest.mark.parametrize(
    ("args", "error", "says"),
    [
        ((torch.randn(4, 3), torch.full((3, 3), -1)), ValueError, r"same leading size.*\(3, 3\)"),
        ((torch.randn(0, 3), torch.full((0, 3), -1)), ValueError, r"no rows.*\(0, 3\)"),
        ((torch.tensor(1.0), torch.full((1, 3), -1)), ValueError, "no dimensions"),
        ((), TypeError, "at least one tensor.*nothing"),
        ((1, "two"), TypeError, "at least one tensor.*int, str"),
        ((torch.randn(4, 3), threading.Lock()), TypeError, "pickle.*lock"),
    ],
)
def test_bad_batch_is_refused_before_anything_is_sent(
    pair_pipe: tuple[rpcpipe.Pipe, nn.Sequential],
    args: tuple[Any, ...],
    error: type[Exception],
    says: str,
) -> None:
    pipe, plain = pair_pipe
    with pytest.raises(error, match=says):
        pipe(*args)
    check_next_step(pipe, plain)


class NotSequential(nn.Module):
    pass


class Overriding(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x


@two
@pytest.mark.parametrize(
    ("module", "kwargs", "error", "says"),
    [
        (NotSequential(), {}, TypeError, r"nn\.Sequential.*NotSequential"),
        (Overriding(), {}, TypeError, "Overriding overrides"),
        (None, {}, TypeError, "NoneType"),
        (mlp(), {"balance": [2, 3]}, BalanceError, r"\[2, 3\]"),
        (mlp(), {"balance": [6, 0]}, BalanceError, r"\[6, 0\]"),
        (mlp(), {"balance": [7, -1]}, BalanceError, r"\[7, -1\]"),
        (mlp(), {"balance": [3.0, 3.0]}, BalanceError, r"\[3\.0, 3\.0\]"),
        (mlp(), {"balance": [True, 5]}, BalanceError, r"\[True, 5\]"),
        (mlp(), {"balance": [2, 2, 2]}, BalanceError, r"\[2, 2, 2\]"),
        (mlp(), {"balance": 6}, BalanceError, "6"),
        (mlp(), {"balance": None}, BalanceError, "balance"),
        (nn.Sequential(), {"balance": [0, 0]}, BalanceError, "0 layers"),
        (mlp(), {"chunks": 0}, ValueError, "chunks= .* got 0"),
        (mlp(), {"chunks": -3}, ValueError, "chunks= .* got -3"),
        (mlp(), {"chunks": 2.0}, ValueError, r"chunks= .* got 2\.0"),
        (mlp(), {"chunks": True}, ValueError, "chunks= .* got True"),
        (mlp(), {"chunks": None}, ValueError, "chunks= .* got None"),
        (mlp(), {"checkpoint": "sometimes"}, ValueError, "checkpoint.*sometimes"),
        (mlp(), {"checkpoint": None}, ValueError, "checkpoint.*None"),
        (mlp(), {"devices": ["cpu"]}, ValueError, "devices= .* 2 stages"),
    ],
)  # fmt: skip
def test_bad_argument_is_refused_at_construction(
    world: World, module: Any, kwargs: dict[str, Any], error: type[Exception], says: str
) -> None:
    arguments = {"balance": [3, 3], **kwargs}
    with pytest.raises(error, match=says):
        rpcpipe.Pipe(module, world, **arguments)


@two
def test_layer_that_cannot_be_pickled_is_named(world: World) -> None:
    layer = nn.Identity()
    layer.fn = lambda x: x  # type: ignore[assignment]
    module = nn.Sequential(nn.Identity(), layer)
    with pytest.raises(TypeError, match=r"layer 1 \(Identity\)"):
        rpcpipe.Pipe(module, world, balance=[1, 1])


DTYPES = [torch.float64, torch.bfloat16, torch.complex64, torch.int8, torch.bool, torch.uint8]


@two
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_dtype_goes_through(world: World, dtype: torch.dtype) -> None:
    pipe = rpcpipe.Pipe(nn.Sequential(Pair(), nn.Identity()), world, balance=[1, 1], chunks=2)
    x = torch.tensor([[0, 1], [1, 1], [1, 0]]).to(dtype)
    first, second = pipe(x, marks=torch.arange(3))
    assert first.dtype == dtype
    assert torch.equal(first, x)
    assert torch.equal(second, torch.arange(3))
