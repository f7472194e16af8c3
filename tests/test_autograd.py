"""Gradients are those of the undivided module, in whatever way the caller asks for them."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.autograd as dist_autograd
import torch.nn.functional as F
from torch import Tensor, nn
from toys import all_grads, await_equal, check_equal, check_step, grads, mlp

import rpcpipe
from rpcpipe import StageError, World

two = pytest.mark.parametrize("world", [2], indirect=True)
three = pytest.mark.parametrize("world", [3], indirect=True)
every_mode = pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])


def pipe_of(plain: nn.Sequential, world: World, **kwargs: Any) -> rpcpipe.Pipe:
    """The layers spread over the stages, two each and the rest in the last."""
    n = world.stages
    balance = [2] * (n - 1) + [len(plain) - 2 * (n - 1)]
    return rpcpipe.Pipe(plain, world, **{"balance": balance, "chunks": 3, **kwargs})


# ------------------------------------------------------------------------- sparse graphs


class Fork(nn.Module):
    """Two outputs, each by parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x), self.two(x)


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.one(pair[0]), self.two(pair[1])


class First(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0]


class Detach(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


class Argmax(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.argmax(1)


class Ignore(nn.Module):
    """A partition that does not use what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.value.expand(len(x), 4)


class Frozen(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.requires_grad_(False)


class MixedTypes(nn.Module):
    """Hands on what a gradient can reach and what it cannot."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x, x.detach() * 2, x.argmax(1)


class Unmix(nn.Module):
    def forward(self, values: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, fixed, index = values
        return x * fixed + F.one_hot(index, 4)


def squared(out: Tensor) -> Tensor:
    return out.pow(2).mean()


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


SPARSE: dict[str, tuple[Callable[[], list[nn.Module]], Callable[[Any], Tensor]]] = {
    "output not used in the loss": (
        lambda: [linear(), Fork(), Both(), Both(), Both(), Both()],
        lambda out: squared(out[0]),
    ),
    "output detached in the loss": (
        lambda: [linear(), Fork(), Both(), Both(), Both(), Both()],
        lambda out: squared(out[0]) + out[1].detach().sum(),
    ),
    "element ignored by the last stage": (
        lambda: [linear(), Fork(), Both(), Both(), First(), linear()],
        squared,
    ),
    "partition ignores its input": (
        lambda: [linear(), nn.Tanh(), Ignore(), linear(), linear(), linear()],
        squared,
    ),
    "last partition ignores its input": (
        lambda: [linear(), nn.Tanh(), linear(), linear(), Ignore(), linear()],
        squared,
    ),
    "detached between stages": (
        lambda: [linear(), nn.Tanh(), linear(), Detach(), linear(), linear()],
        squared,
    ),
    "detached within a stage": (
        lambda: [linear(), nn.Tanh(), Detach(), linear(), linear(), linear()],
        squared,
    ),
    "index between stages": (
        lambda: [linear(), nn.Tanh(), linear(), Argmax(), nn.Embedding(4, 4), linear()],
        squared,
    ),
    "no gradient at two stages": (
        lambda: [linear(), Detach(), nn.Tanh(), Detach(), linear(), linear()],
        squared,
    ),
    "frozen first stage": (
        lambda: [Frozen(), nn.Tanh(), linear(), nn.Tanh(), linear(), linear()],
        squared,
    ),
    "frozen middle stage": (
        lambda: [linear(), nn.Tanh(), Frozen(), nn.Tanh(), linear(), linear()],
        squared,
    ),
    "frozen last stage": (
        lambda: [linear(), nn.Tanh(), linear(), nn.Tanh(), Frozen(), Frozen()],
        squared,
    ),
    "only the last stage trains": (
        lambda: [Frozen(), nn.Tanh(), Frozen(), nn.Tanh(), Frozen(), linear()],
        squared,
    ),
    "mixed types between stages": (
        lambda: [linear(), MixedTypes(), Unmix(), MixedTypes(), Unmix(), linear()],
        squared,
    ),
    "some micro-batches": (
        lambda: [linear(), nn.Tanh(), linear(), nn.Tanh(), linear(), linear()],
        lambda out: squared(out[:1]) + squared(out[5:]),
    ),
    "one row": (
        lambda: [linear(), nn.Tanh(), linear(), nn.Tanh(), linear(), linear()],
        lambda out: out[4, 0],
    ),
}


@three
@every_mode
@pytest.mark.parametrize("case", SPARSE)
def test_gradient_of_sparse_graph_is_right_and_nothing_waits(
    world: World, case: str, checkpoint: str
) -> None:
    torch.manual_seed(0)
    layers, loss = SPARSE[case]
    plain = nn.Sequential(*layers())
    pipe = pipe_of(plain, world, checkpoint=checkpoint)
    for _ in range(2):
        check_step(pipe, plain, torch.randn(6, 4), loss)
    xs = [torch.randn(6, 4, requires_grad=True) for _ in range(2)]
    xs[1].data.copy_(xs[0])
    loss(pipe(xs[0])).backward()
    if (wanted := loss(plain(xs[1]))).requires_grad:
        wanted.backward()
    check_input_gradients(xs[0].grad, xs[1].grad)


def check_input_gradients(found: Tensor | None, wanted: Tensor | None) -> None:
    assert (found is None) == (wanted is None)
    if found is not None:
        torch.testing.assert_close(found, wanted)


# ----------------------------------------------------------------------- the driver's own graph


@two
@every_mode
def test_input_and_modules_on_the_driver_get_their_gradients(world: World, checkpoint: str) -> None:
    plain = mlp()
    pipe = pipe_of(plain, world, checkpoint=checkpoint)
    before, after = nn.Linear(4, 4), nn.Linear(2, 1)
    x = torch.randn(7, 4, requires_grad=True)
    found, wanted = [
        torch.autograd.grad(
            after(middle(before(x))).pow(2).sum(), [x, *before.parameters(), *after.parameters()]
        )
        for middle in (pipe, plain)
    ]
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


@two
def test_leaf_input_accumulates_its_gradient(world: World) -> None:
    plain = mlp()
    pipe = pipe_of(plain, world)
    x = torch.randn(7, 4, requires_grad=True)
    pipe(x).sum().backward()
    (wanted,) = torch.autograd.grad(plain(x).sum(), x)
    torch.testing.assert_close(x.grad, wanted)
    pipe(x).sum().backward()
    torch.testing.assert_close(x.grad, 2 * wanted)


@two
def test_two_pipes_in_one_loss(world: World) -> None:
    plains = [mlp(), mlp(6)]
    pipes = [pipe_of(plain, world) for plain in plains]
    x = torch.randn(6, 4)
    (pipes[0](x) * pipes[1](x)).sum().backward()
    (plains[0](x) * plains[1](x)).sum().backward()
    for pipe, plain in zip(pipes, plains, strict=True):
        check_equal(all_grads(pipe), grads(plain))


@two
def test_pipe_of_a_pipe(world: World) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    pipe = pipe_of(plain, world)
    check_step(pipe, plain, torch.randn(6, 4))
    pipe.zero_grad()
    plain.zero_grad()
    x = torch.randn(6, 4)
    pipe(pipe(x)).pow(2).sum().backward()
    plain(plain(x)).pow(2).sum().backward()
    check_equal(all_grads(pipe), grads(plain))


@two
@every_mode
@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0,), (1,)])
def test_two_forwards_then_backwards_in_any_order(
    world: World, order: tuple[int, ...], checkpoint: str
) -> None:
    plain = mlp()
    pipe = pipe_of(plain, world, checkpoint=checkpoint)
    xs = [torch.randn(6, 4), torch.randn(4, 4)]
    found, wanted = [pipe(x) for x in xs], [plain(x) for x in xs]
    for k in order:
        found[k].pow(2).sum().backward()
        wanted[k].pow(2).sum().backward()
    check_equal(all_grads(pipe), grads(plain))


@two
def test_gradients_of_mini_batches_add_up(world: World) -> None:
    plain = mlp()
    pipe = pipe_of(plain, world)
    for _ in range(3):
        x = torch.randn(5, 4)
        pipe(x).sum().backward()
        plain(x).sum().backward()
    check_equal(all_grads(pipe), grads(plain))


def num_runs(module: nn.Module) -> int:
    from rpcpipe.stage import Stage

    return sum(len(s._runs) for s in gc.get_objects() if isinstance(s, Stage))


def runs(pipe: rpcpipe.Pipe) -> list[int]:
    return [pipe.apply_to_stage(j, num_runs) for j in range(len(pipe.balance))]


@two
def test_output_dropped_without_backward_is_forgotten_everywhere(world: World) -> None:
    plain = mlp()
    pipe = pipe_of(plain, world)
    await_equal(lambda: runs(pipe), [0, 0])
    out = pipe(torch.randn(6, 4))
    assert runs(pipe) == [1, 1]
    del out
    await_equal(lambda: runs(pipe), [0, 0])
    check_step(pipe, plain, torch.randn(6, 4))
    await_equal(lambda: runs(pipe), [0, 0])


@two
def test_second_backward_is_refused(world: World) -> None:
    plain = mlp()
    pipe = pipe_of(plain, world)
    loss = pipe(torch.randn(6, 4)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once for each forward pass"):
        loss.backward()
    check_step(pipe, plain, torch.randn(6, 4))


@two
def test_double_backward_is_refused(world: World) -> None:
    pipe = pipe_of(mlp(), world)
    x = torch.randn(6, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(pipe(x).pow(2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@two
def test_no_grad_and_inference_mode_leave_nothing_to_differentiate(world: World) -> None:
    plain = mlp()
    pipe = pipe_of(plain, world)
    x = torch.randn(6, 4)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = pipe(x)
        assert not out.requires_grad
        torch.testing.assert_close(out, plain(x).detach())
    await_equal(lambda: runs(pipe), [0, 0])


# ---------------------------------------------------------------- the caller's autograd context


class _GradientsIn:
    """A function that finds the gradients of an autograd context in a stage."""

    def __init__(self, context: int) -> None:
        self.context = context

    def __call__(self, module: nn.Module) -> dict[str, Tensor]:
        found = dist_autograd.get_gradients(self.context)
        return {name: found[p] for name, p in module.named_parameters() if p in found}


def collected(pipe: rpcpipe.Pipe, context: int) -> dict[str, Tensor]:
    found = [pipe.apply_to_stage(j, _GradientsIn(context)) for j in range(len(pipe.balance))]
    return {name: grad for stage in found for name, grad in stage.items()}


@three
@every_mode
def test_context_collects_the_gradients(world: World, checkpoint: str) -> None:
    plain = mlp()
    pipe = pipe_of(plain, world, checkpoint=checkpoint)
    before = nn.Linear(4, 4)
    x = torch.randn(6, 4, requires_grad=True)
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [pipe(before(x)).pow(2).sum()])
        plain(before(x)).pow(2).sum().backward()
        check_equal(collected(pipe, context), grads(plain))
        here = dist_autograd.get_gradients(context)
        for leaf in (x, before.weight, before.bias):
            torch.testing.assert_close(here[leaf], leaf.grad)
    assert all_grads(pipe) == {}
    check_step(pipe, plain, torch.randn(6, 4))


CLASSIC = """
import torch, rpcpipe
import torch.distributed.autograd as dist_autograd
import torch.nn.functional as F
from torch.distributed.optim import DistributedOptimizer
from toys import check_equal, mlp

def main(world):
    plain = mlp()
    pipe = rpcpipe.Pipe(plain, world, balance=[2, 2, 2], chunks=3)
    opt = torch.optim.SGD(plain.parameters(), lr=0.1)
    remote_opt = DistributedOptimizer(torch.optim.SGD, pipe.parameter_rrefs(), lr=0.1)
    for _ in range(3):
        x, y = torch.randn(6, 4), torch.randn(6, 2)
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [F.mse_loss(pipe(x), y)])
            remote_opt.step(context)
        opt.zero_grad()
        F.mse_loss(plain(x), y).backward()
        opt.step()
    check_equal(pipe.state_dict(), plain.state_dict())
    print("equal")

if __name__ == "__main__":
    rpcpipe.run(main, stages=3)
"""


def test_distributed_optimizer_updates_as_plain_sgd(tmp_path: Path) -> None:
    """In a process of its own: RRefs work in the first world of a process only."""
    script = tmp_path / "train.py"
    script.write_text(CLASSIC)
    here = Path(__file__).parent
    env = {**os.environ, "PYTHONPATH": f"{here.parent}{os.pathsep}{here}"}
    done = subprocess.run(
        [sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines()[-1:] == ["equal"], done.stderr


@three
@pytest.mark.parametrize("used", [(0, 1), (0,), (1,)])
def test_context_with_two_forwards_waits_for_none_the_loss_does_not_use(
    world: World, used: tuple[int, ...]
) -> None:
    plain = mlp()
    pipe = pipe_of(plain, world)
    xs = [torch.randn(6, 4), torch.randn(4, 4)]
    with dist_autograd.context() as context:
        outs = [pipe(x) for x in xs]
        dist_autograd.backward(context, [torch.stack([outs[k].sum() for k in used]).sum()])
        for k in used:
            plain(xs[k]).sum().backward()
        check_equal(collected(pipe, context), grads(plain))


@two
def test_context_around_a_whole_loop_adds_up(world: World) -> None:
    plain = mlp()
    pipe = pipe_of(plain, world)
    with dist_autograd.context() as context:
        for _ in range(3):
            x = torch.randn(6, 4)
            dist_autograd.backward(context, [pipe(x).sum()])
            plain(x).sum().backward()
            check_equal(collected(pipe, context), grads(plain))


@two
def test_two_pipes_in_one_context(world: World) -> None:
    plains = [mlp(), mlp(6)]
    pipes = [pipe_of(plain, world) for plain in plains]
    x = torch.randn(6, 4)
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [(pipes[0](x) * pipes[1](x)).sum()])
        (plains[0](x) * plains[1](x)).sum().backward()
        for pipe, plain in zip(pipes, plains, strict=True):
            check_equal(collected(pipe, context), grads(plain))


@two
def test_many_forwards_in_one_context(world: World) -> None:
    plain = mlp()
    pipe = pipe_of(plain, world)
    xs = [torch.randn(3, 4) for _ in range(40)]
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [torch.stack([pipe(x).sum() for x in xs]).sum()])
        torch.stack([plain(x).sum() for x in xs]).sum().backward()
        check_equal(collected(pipe, context), grads(plain))


@two
def test_context_left_without_backward(world: World) -> None:
    plain = mlp()
    pipe = pipe_of(plain, world)
    with dist_autograd.context():
        out = pipe(torch.randn(6, 4))
    del out
    with dist_autograd.context(), torch.no_grad():
        assert not pipe(torch.randn(6, 4)).requires_grad
    await_equal(lambda: runs(pipe), [0, 0])
    check_step(pipe, plain, torch.randn(6, 4))


class Mines(nn.Module):
    """Raises in the backward pass of rows that hold a large value."""

    def forward(self, x: Tensor) -> Tensor:
        return _Mine.apply(x)  # type: ignore[no-any-return, no-untyped-call]


class _Mine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.armed = bool((x > 1e3).any())
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if ctx.armed:
            raise ArithmeticError("mine")
        return gradient


class Raise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if (x < -1e3).any():
            raise ArithmeticError("forward mine")
        return x


@three
def test_failure_inside_of_a_context_is_reported_and_the_context_goes_on(world: World) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Identity(), Raise(), Mines(), nn.Linear(4, 4))
    nn.init.eye_(plain[0].weight)
    pipe = pipe_of(plain, world)
    x = torch.randn(6, 4)
    with dist_autograd.context() as context:
        with pytest.raises(StageError, match="forward mine"):
            pipe(torch.full((6, 4), -1e6))
        # Distributed autograd turns what is raised in its engine into a RuntimeError.
        with pytest.raises(RuntimeError, match=r"stage 1, micro-batch 2, backward.*mine"):
            dist_autograd.backward(context, [pipe(torch.full((6, 4), 1e6)).sum()])
        dist_autograd.backward(context, [pipe(x).sum()])
        plain(x).sum().backward()
        check_equal(collected(pipe, context), grads(plain))
    check_step(pipe, plain, x)
