"""A user's script, for `mypy --strict`: what the public interface looks like to a type checker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import assert_type

import rpcpipe
from rpcpipe.inside import ParameterInfo
from rpcpipe.optim import PipeOptimizer


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def train(world: rpcpipe.World, steps: int) -> float:
    assert_type(world.stages, int)
    assert_type(world.device(0), torch.device)
    assert_type(world.hosts(), list[str])
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    pipe = rpcpipe.Pipe(model, world, balance=[1, 1], chunks=2)
    assert_type(pipe, rpcpipe.Pipe[Tensor])
    opt = pipe.optimizer(torch.optim.AdamW, lr=1e-3)
    assert_type(opt, PipeOptimizer)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
    x, y = torch.ones(4, 4), torch.zeros(4, dtype=torch.long)
    with pipe.record(every=2) as timeline:
        for _ in range(steps):
            output = pipe(x)
            assert_type(output, Tensor)
            loss = F.cross_entropy(output, y)
            loss.backward()
            opt.step()
            opt.zero_grad()
            schedule.step()
    assert_type(timeline, rpcpipe.Timeline)
    assert_type(timeline.bubble, float)
    assert_type(pipe.memory(), rpcpipe.Memory)
    assert_type(pipe.apply_to_stage(0, count), int)
    assert_type(pipe.named_parameters_info(), list[ParameterInfo])
    return loss.item()


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def with_hits(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(output, target), output.argmax(1) == target


def more(world: rpcpipe.World, model: nn.Module, x: Tensor, y: Tensor, folder: Path) -> None:
    pipe: rpcpipe.Pipe[Tensor] = rpcpipe.Pipe.from_module(model, world, x)
    assert_type(world.replica, int)
    assert_type(world.replicas, int)
    assert_type(world.is_driver, bool)
    assert_type(pipe.loss(x, y, cross_entropy), Tensor)
    loss, hits = pipe.loss(x, y, with_hits)
    assert_type((loss, hits), tuple[Tensor, Tensor])
    opt = pipe.optimizer(torch.optim.SGD, groups=lambda name: {"lr": 0.1}, lr=0.2)
    assert_type(opt.step(max_norm=1.0), Tensor | None)
    assert_type(pipe.state_dict(), dict[str, Any])
    assert_type(pipe.save(folder, optimizer=opt), Path | None)
    assert_type(rpcpipe.latest(folder), Path | None)
    assert_type(len(pipe), int)
    with pipe.no_sync():
        pipe.zero_grad()


def two_outputs(world: rpcpipe.World, model: nn.Sequential) -> None:
    pipe: rpcpipe.Pipe[tuple[Tensor, Tensor]] = rpcpipe.Pipe(model, world, balance=[1, 1])
    both = pipe(torch.ones(4, 4))
    assert_type(both[1], Tensor)


def choose(model: nn.Sequential) -> None:
    found = rpcpipe.plan(model, torch.ones(4, 4), 2)
    assert_type(found, rpcpipe.Plan)
    assert_type(found.best.balance, tuple[int, ...])
    assert_type(rpcpipe.balance.by_time(2, model, torch.ones(4, 4)), list[int])


if __name__ == "__main__":
    result = rpcpipe.run(train, 3, stages=2)
    assert_type(result, float | None)
    rpcpipe.run(train, 3, stages="two")  # type: ignore[arg-type]
