"""Nothing stays behind: after a step, after a failed one, after a pipe; and the pipe's manners."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import psutil
import pytest
import torch
import torch.distributed.autograd as dist_autograd
from test_errors import M, clean, mark, trips
from torch import Tensor, nn
from toys import all_grads, await_equal, check_equal, check_step, grads, held_everywhere, mlp

import rpcpipe
from rpcpipe import StageError, World

two = pytest.mark.parametrize("world", [2], indirect=True)


def trips_pipe(world: World) -> rpcpipe.Pipe:
    return rpcpipe.Pipe(trips(2), world, balance=[2, 1], chunks=M, checkpoint="always")


# ------------------------------------------------------------------------------- counters


def plain_step(pipe: rpcpipe.Pipe) -> None:
    pipe(*clean())[0].sum().backward()


def step_with_input_gradient(pipe: rpcpipe.Pipe) -> None:
    x, marks = clean()
    pipe(x.requires_grad_(), marks)[0].sum().backward()


def forward_without_backward(pipe: rpcpipe.Pipe) -> None:
    pipe(*clean())


def forward_without_grad(pipe: rpcpipe.Pipe) -> None:
    with torch.no_grad():
        pipe(*clean())


def step_in_context(pipe: rpcpipe.Pipe) -> None:
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [pipe(*clean())[0].sum()])


def forward_in_context(pipe: rpcpipe.Pipe) -> None:
    with dist_autograd.context():
        pipe(*clean())


def failing_step(phase: str, i: int) -> Callable[[rpcpipe.Pipe], None]:
    def step(pipe: rpcpipe.Pipe) -> None:
        with pytest.raises(StageError, match=phase):
            pipe(*mark((i % 2, i, phase)))[0].sum().backward()

    step.__name__ = f"{phase} fails in {i}"
    return step


def failing_step_in_context(pipe: rpcpipe.Pipe) -> None:
    with dist_autograd.context() as context:
        output = pipe(*mark((0, 1, "backward")))[0]
        with pytest.raises(RuntimeError, match="backward"):
            dist_autograd.backward(context, [output.sum()])


STEPS = [
    plain_step,
    step_with_input_gradient,
    forward_without_backward,
    forward_without_grad,
    step_in_context,
    forward_in_context,
    failing_step("forward", 0),
    failing_step("forward", 3),
    failing_step("recompute", 1),
    failing_step("backward", 2),
    failing_step_in_context,
]


@two
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_counters_of_rpc_and_autograd_return_to_idle(
    world: World, step: Callable[[rpcpipe.Pipe], None]
) -> None:
    pipe = trips_pipe(world)
    plain_step(pipe)
    idle: list[dict[str, int]] = []

    def settled() -> bool:
        gc.collect()
        before, idle[:] = list(idle), held_everywhere(pipe)
        return before == idle and all(not h["num_current_backward_passes"] for h in idle)

    await_equal(settled, True)
    assert all(h["num_autograd_contexts"] == 0 for h in idle)
    for _ in range(3):
        step(pipe)
    await_equal(lambda: gc.collect() * 0 or held_everywhere(pipe), idle)


# ------------------------------------------------------------------------ memory and threads


def footprint(module: nn.Module) -> tuple[int, int]:
    """Resident bytes and number of Python threads."""
    gc.collect()
    return psutil.Process().memory_info().rss, threading.active_count()


def footprints(pipe: rpcpipe.Pipe) -> list[tuple[int, int]]:
    return [footprint(pipe), *(pipe.apply_to_stage(j, footprint) for j in range(2))]


def check_flat(pipe: rpcpipe.Pipe, step: Callable[[int], None], warm: int, count: int) -> None:
    """``count`` steps after ``warm`` need neither more memory nor more threads."""
    for k in range(warm):
        step(k)
    before = footprints(pipe)
    for k in range(count):
        step(k)
    await_equal(lambda: [a[1] <= b[1] for a, b in zip(footprints(pipe), before, strict=True)],
                [True] * 3)  # fmt: skip
    grown = [a[0] - b[0] for a, b in zip(footprints(pipe), before, strict=True)]
    assert max(grown) < 8 * 2**20, f"bytes more in driver and stages: {grown}"


@two
def test_500_steps_leave_memory_and_threads_flat(world: World) -> None:
    """Were one micro-batch's input kept, it would be 128 KiB a step: 64 MiB."""
    pipe = rpcpipe.Pipe(mlp(), world, balance=[3, 3], chunks=2)
    x = torch.randn(2**14, 4)
    check_flat(pipe, lambda _: pipe(x).sum().backward(), 100, 500)


@two
def test_50_failing_steps_leave_memory_and_threads_flat(world: World) -> None:
    pipe = rpcpipe.Pipe(trips(2), world, balance=[2, 1], chunks=M, checkpoint="always")
    rows = 2**14  # of 36 bytes: were a step kept, 0.5 MiB
    phases = ("forward", "recompute", "backward")

    def step(k: int) -> None:
        x, marks = mark((k % 2, k % M, phases[k % 3]))
        batch = [t.repeat_interleave(rows // M, 0) for t in (x, marks)]
        with pytest.raises(StageError):
            pipe(*batch)[0].sum().backward()

    check_flat(pipe, step, 24, 50)


def stage_threads(module: nn.Module) -> list[str]:
    gc.collect()
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("stage"))


@two
@pytest.mark.parametrize("used", [False, True])
def test_deleted_pipe_frees_its_stages(world: World, used: bool) -> None:
    """Those with tied parameters, too, whose stages know each other."""
    witness = rpcpipe.Pipe(mlp(), world, balance=[3, 3])
    gc.collect()

    def alive() -> list[int]:
        return [len(witness.apply_to_stage(j, stage_threads)) for j in range(2)]

    await_equal(lambda: gc.collect() * 0 or alive(), [1, 1])
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    tied[2].weight = tied[0].weight
    pipes = [
        rpcpipe.Pipe(mlp(), world, balance=[3, 3], chunks=2),
        rpcpipe.Pipe(tied, world, balance=[1, 2], chunks=2),
    ]
    if used:
        for pipe in pipes:
            opt = pipe.optimizer(torch.optim.SGD, lr=0.1)
            pipe(torch.randn(4, 4)).sum().backward()
            opt.step()
        del opt, pipe
    assert alive() == [3, 3]
    del pipes
    await_equal(lambda: gc.collect() * 0 or alive(), [1, 1])


# ------------------------------------------------------------------------------- manners


@two
def test_state_dict_has_the_keys_of_the_undivided_module_and_comes_back(world: World) -> None:
    plain = mlp()
    pipe = rpcpipe.Pipe(plain, world, balance=[3, 3])
    state = pipe.state_dict()
    assert list(state) == list(plain.state_dict())
    check_equal(state, plain.state_dict())
    other = {name: torch.randn_like(value) for name, value in state.items()}
    result = pipe.load_state_dict(other)
    assert not result.missing_keys
    assert not result.unexpected_keys
    check_equal(pipe.state_dict(), other)
    plain.load_state_dict(other)
    check_step(pipe, plain, torch.randn(4, 4))
    assert list(pipe.state_dict(prefix="model.")) == [f"model.{name}" for name in state]
    assert list(nn.ModuleDict({"model": pipe}).state_dict()) == [f"model.{name}" for name in state]


@two
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s: s.pop("5.bias"), r"missing keys: \['5.bias'\]"),
        (lambda s: s.update(extra=torch.zeros(1)), r"unexpected keys: \['extra'\]"),
        (lambda s: s.update({"5.bias": torch.zeros(3)}), r"size mismatch for 5.bias.*\(3,\)"),
    ],
)
def test_state_dict_that_does_not_fit_changes_nothing(
    world: World, change: Callable[[dict[str, Tensor]], object], says: str
) -> None:
    pipe = rpcpipe.Pipe(mlp(), world, balance=[3, 3])
    before = pipe.state_dict()
    other = {name: torch.randn_like(value) for name, value in before.items()}
    change(other)
    with pytest.raises(RuntimeError, match=says):
        pipe.load_state_dict(other)
    check_equal(pipe.state_dict(), before)


@two
def test_state_dict_that_is_not_strict_loads_what_fits(world: World) -> None:
    pipe = rpcpipe.Pipe(mlp(), world, balance=[3, 3])
    state = pipe.state_dict()
    result = pipe.load_state_dict({"0.bias": torch.ones(4), "extra": torch.ones(1)}, strict=False)
    assert result.unexpected_keys == ["extra"]
    assert "0.weight" in result.missing_keys
    check_equal(pipe.state_dict(), {**state, "0.bias": torch.ones(4)})


@two
def test_parameters_are_refused_with_what_to_use_instead(world: World) -> None:
    pipe = rpcpipe.Pipe(mlp(), world, balance=[3, 3])
    with pytest.raises(TypeError, match=r"pipe\.optimizer"):
        torch.optim.SGD(pipe.parameters(), lr=0.1)


@two
def test_repr_shows_the_stages(world: World) -> None:
    pipe = rpcpipe.Pipe(mlp(), world, balance=[2, 4], chunks=3)
    assert "chunks=3, checkpoint='except_last'" in repr(pipe)
    assert "(stage 0): 2 layers on cpu" in repr(pipe)
    assert "(stage 1): 4 layers on cpu" in repr(pipe)
    assert len(pipe) == 6


@two
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_reaches_every_stage(world: World, set_to_none: bool) -> None:
    pipe = rpcpipe.Pipe(mlp(), world, balance=[3, 3])
    opt = pipe.optimizer(torch.optim.SGD, lr=0.1)
    for zero_grad in (pipe.zero_grad, opt.zero_grad):
        pipe(torch.randn(4, 4)).sum().backward()
        zero_grad(set_to_none=set_to_none)
        found = all_grads(pipe)
        assert len(found) == (0 if set_to_none else 8)
        assert not any(g.any() for g in found.values())


@two
def test_max_norm_is_that_of_the_whole_module(world: World) -> None:
    plain = mlp()
    pipe = rpcpipe.Pipe(plain, world, balance=[3, 3])
    opts = [cls.optimizer(torch.optim.SGD, lr=0.1) for cls in (pipe,)]
    plain_opt = torch.optim.SGD(plain.parameters(), lr=0.1)
    for max_norm in (0.1, 1e6):
        x = torch.randn(4, 4)
        for module, opt in ((pipe, opts[0]), (plain, plain_opt)):
            opt.zero_grad()
            module(x).pow(2).sum().backward()
        found = opts[0].step(max_norm=max_norm)
        wanted = nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
        plain_opt.step()
        torch.testing.assert_close(found.float(), wanted)
        check_equal(all_grads(pipe), grads(plain))
        check_equal(pipe.state_dict(), plain.state_dict())


@two
def test_learning_rate_schedulers_work_on_the_pipes_optimizer(world: World) -> None:
    plain = mlp()
    pipe = rpcpipe.Pipe(plain, world, balance=[3, 3])
    opts = [
        pipe.optimizer(torch.optim.AdamW, lr=0.1, weight_decay=0.1),
        torch.optim.AdamW(plain.parameters(), lr=0.1, weight_decay=0.1),
    ]
    schedulers = [torch.optim.lr_scheduler.OneCycleLR(opt, 0.2, total_steps=6) for opt in opts]
    for _ in range(5):
        x = torch.randn(4, 4)
        for module, opt, scheduler in zip((pipe, plain), opts, schedulers, strict=True):
            opt.zero_grad()
            module(x).pow(2).sum().backward()
            opt.step()
            scheduler.step()
        assert opts[0].param_groups[0]["lr"] == opts[1].param_groups[0]["lr"]
        check_equal(pipe.state_dict(), plain.state_dict())
