"""What training loops do besides a plain step: accumulate, freeze, hook, average."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import all_grads, check_equal, check_step, grads, mlp

import rpcpipe
from rpcpipe import World

three = pytest.mark.parametrize("world", [3], indirect=True)


@three
def test_gradients_accumulate_over_mini_batches(world: World) -> None:
    plain = mlp()
    pipe = rpcpipe.Pipe(mlp(), world, balance=[2, 2, 2], chunks=2)
    opts = pipe.optimizer(torch.optim.Adam), torch.optim.Adam(plain.parameters())
    for _ in range(2):
        for rows in (4, 3, 2):
            x = torch.rand(rows, 4)
            for model in (pipe, plain):
                (model(x).pow(2).mean() / 3).backward()
        check_equal(all_grads(pipe), grads(plain))
        for opt in opts:
            opt.step()
            opt.zero_grad()
    check_equal(pipe.state_dict(), plain.state_dict())


@three
def test_gradients_are_forgotten_or_set_to_zero(world: World) -> None:
    pipe = rpcpipe.Pipe(mlp(), world, balance=[2, 2, 2])
    opt = pipe.optimizer(torch.optim.SGD, lr=0.1)
    for zero_grad in (pipe.zero_grad, opt.zero_grad):
        pipe(torch.rand(2, 4)).sum().backward()
        zero_grad(set_to_none=False)
        assert len(all_grads(pipe)) == 8
        assert all(not grad.any() for grad in all_grads(pipe).values())
        zero_grad()
        assert all_grads(pipe) == {}


class Watch(nn.Module):
    """Notes whether a gradient of what it was given is asked for."""

    asked = False

    def forward(self, x: Tensor) -> Tensor:
        self.asked = x.requires_grad
        return x * 1


def watched() -> nn.Sequential:
    layers = list(mlp())
    return nn.Sequential(*layers[:2], Watch(), *layers[2:4], Watch(), *layers[4:])


def freeze(module: nn.Module) -> None:
    module.requires_grad_(False)


def thaw(module: nn.Module) -> None:
    module.requires_grad_(True)


def asked(module: nn.Module) -> bool:
    return next(layer for layer in module if isinstance(layer, Watch)).asked  # type: ignore[attr-defined]


@three
def test_frozen_stages_recompute_nothing_and_are_sent_no_gradient(world: World) -> None:
    plain = watched()
    pipe = rpcpipe.Pipe(watched(), world, balance=[2, 3, 3], chunks=2, checkpoint="always")
    opts = pipe.optimizer(torch.optim.SGD, lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)
    for j in (0, 1):
        pipe.apply_to_stage(j, freeze)
    plain[:5].requires_grad_(False)
    x = torch.rand(4, 4)
    with pipe.record() as timeline:
        check_step(pipe, plain, x)
    recomputed = [{e.task.i for e in events if e.task.kind == "R"} for events in timeline.events]
    assert recomputed == [set(), set(), {0, 1}]
    assert [pipe.apply_to_stage(j, asked) for j in (1, 2)] == [False, False]
    for opt in opts:
        opt.step()
    check_equal(pipe.state_dict(), plain.state_dict())

    pipe.apply_to_stage(1, thaw)
    plain[2:5].requires_grad_(True)
    check_step(pipe, plain, x)
    assert [pipe.apply_to_stage(j, asked) for j in (1, 2)] == [False, True]
    for opt in opts:
        opt.step()
    check_equal(pipe.state_dict(), plain.state_dict())


@three
def test_gradient_goes_through_a_frozen_stage_to_those_before_it(world: World) -> None:
    plain = mlp()
    pipe = rpcpipe.Pipe(mlp(), world, balance=[2, 2, 2], chunks=2)
    pipe.apply_to_stage(1, freeze)
    plain[2:4].requires_grad_(False)
    check_step(pipe, plain, torch.rand(4, 4))
    assert all_grads(pipe).keys() == {
        "0.weight",
        "0.bias",
        "4.weight",
        "4.bias",
        "5.weight",
        "5.bias",
    }


def double(gradient: Tensor) -> Tensor:
    return gradient * 2


def count(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.add_(1)


def hook(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.register_hook(double)
        parameter.register_post_accumulate_grad_hook(count)


@three
def test_hooks_of_parameters_run_in_their_stage(world: World) -> None:
    plain = mlp()
    pipe = rpcpipe.Pipe(mlp(), world, balance=[2, 2, 2])
    for j in range(3):
        pipe.apply_to_stage(j, hook)
    hook(plain)
    check_step(pipe, plain, torch.rand(4, 4))


def average(module: nn.Module) -> dict[str, Tensor]:
    """Move a stage's averages towards its parameters; they stay with it."""
    parameters = dict(module.named_parameters())
    averages: dict[str, Tensor] = module.__dict__.setdefault("averages", {})
    for name, parameter in parameters.items():
        value = averages.setdefault(name, parameter.detach().clone())
        value.lerp_(parameter.detach(), 0.1)
    return averages


@three
def test_an_average_of_the_weights_is_kept_in_the_stages(world: World) -> None:
    plain = mlp()
    pipe = rpcpipe.Pipe(mlp(), world, balance=[2, 2, 2])
    opts = pipe.optimizer(torch.optim.SGD, lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)

    def step(model: Any, opt: Any, x: Tensor) -> None:
        model(x).pow(2).mean().backward()
        opt.step()
        opt.zero_grad()

    for _ in range(3):
        x = torch.rand(4, 4)
        step(pipe, opts[0], x)
        step(plain, opts[1], x)
        found = {k: v for j in range(3) for k, v in pipe.apply_to_stage(j, average).items()}
        check_equal(found, average(plain))
