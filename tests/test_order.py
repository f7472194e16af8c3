"""The order in which stages execute tasks, as recorded, while one of them is slow."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rpcpipe
from rpcpipe import World, schedule
from rpcpipe.stage import Event

three = pytest.mark.parametrize("world", [3], indirect=True)

M, N = 5, 3


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_time = backward
        time.sleep(forward * float(x[0, 0].detach()))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        time.sleep(ctx.backward_time)
        return gradient, None, None


class Slow(nn.Module):
    """Takes time: the forward pass a multiple of what the first element of its input says."""

    def __init__(self, forward: float = 0.0, backward: float = 0.0) -> None:
        super().__init__()
        self.times = forward, backward
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return _Slow.apply(x * self.weight, *self.times)


def recorded(world: World, layers: list[Slow], checkpoint: str) -> list[list[Event]]:
    pipe = rpcpipe.Pipe(
        nn.Sequential(*layers), world, balance=[1] * N, chunks=M, checkpoint=checkpoint
    )
    x = torch.ones(M, 2)
    x[::2] = 3  # every other micro-batch is slow: later ones are ready before they are asked for
    with pipe.record() as timeline:
        pipe(x).sum().backward()
    return timeline.events


@three
@pytest.mark.parametrize("checkpoint", schedule.MODES)
@pytest.mark.parametrize("slow", range(N))
def test_stages_execute_their_programs_whoever_is_slow(
    world: World, slow: int, checkpoint: str
) -> None:
    layers = [Slow(0.004, 0.01) if j == slow else Slow() for j in range(N)]
    events = recorded(world, layers, checkpoint)
    assert [[e.task for e in stage] for stage in events] == schedule.gpipe(M, N, checkpoint)
    check_dependencies(events)


def check_dependencies(events: list[list[Event]]) -> None:
    at = [{str(e.task): e for e in stage} for stage in events]
    for i in range(M):
        for j in range(1, N):
            assert at[j - 1][f"F{i}"].end <= at[j][f"F{i}"].start
            assert at[j][f"B{i}"].end <= at[j - 1][f"B{i}"].start
    for stage in events:
        assert all(a.end <= b.start for a, b in itertools.pairwise(stage))


@three
def test_recomputation_does_not_wait_for_the_gradient(world: World) -> None:
    events = recorded(world, [Slow(), Slow(), Slow(backward=0.05)], "always")
    at = [{str(e.task): e for e in stage} for stage in events]
    for i in range(M - 1):  # as soon as the one before is done, the last stage is still busy
        assert at[0][f"R{i}"].start < at[2][f"B{i}"].end


@three
def test_stages_overlap(world: World) -> None:
    layers = [Slow(0.03, 0.03) for _ in range(N)]
    pipe = rpcpipe.Pipe(
        nn.Sequential(*layers), world, balance=[1] * N, chunks=M, checkpoint="never"
    )
    with pipe.record() as timeline:
        pipe(torch.ones(M, 2)).sum().backward()
    (step,) = timeline.steps()
    busy = sum(span.end - span.start for stage in step.spans for span in stage)
    assert step.makespan < 0.7 * busy
    assert timeline.ideal_bubble == pytest.approx((N - 1) / (M + N - 1), abs=0.05)
    assert timeline.ideal_bubble <= timeline.bubble < timeline.ideal_bubble + 0.2
    assert "stage 2 |" in str(timeline)


@three
def test_a_timeline_without_steps_says_so(world: World) -> None:
    pipe = rpcpipe.Pipe(nn.Sequential(*[Slow() for _ in range(N)]), world, balance=[1] * N)
    with pipe.record() as timeline:
        pass
    with pytest.raises(ValueError, match="no step was recorded"):
        _ = timeline.bubble
