"""Emulated layers take a given time on a device of their own, so that stages outnumber cores.

A pipeline of eight needs eight devices. These sleep instead of computing, while schedule, messages
and autograd are real. What is measured so is what the pipeline adds to the stages' own work.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from rpcpipe.schedule import Costs
from rpcpipe.skip import Namespace, pop, skippable, stash

_device = ThreadPoolExecutor(1)  # one in each process: what it is given runs in turn


def occupy(seconds: float) -> None:
    """Keep this process's device busy, and wait for it."""
    _device.submit(time.sleep, seconds).result()


class _Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, forward: float, backward: float) -> Tensor:
        ctx.save_for_backward(x, scale)
        ctx.seconds = backward * len(x)
        occupy(forward * len(x))
        return x * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, scale = ctx.saved_tensors
        occupy(ctx.seconds)
        return gradient * scale, (gradient * x).sum(0), None, None


class Emulated(nn.Module):
    """A layer with ``seconds`` of forward for each row, and twice as many of backward."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.scale = nn.Parameter(torch.linspace(0.9, 1.1, width))

    def forward(self, x: Tensor) -> Tensor:
        return _Work.apply(x, self.scale, self.seconds, 2 * self.seconds)


@skippable(stash=["skip"])
class Encode(Emulated):
    def forward(self, x: Tensor) -> Generator[stash, None, Tensor]:
        y = super().forward(x)
        yield stash("skip", y)
        return y


@skippable(pop=["skip"])
class Decode(Emulated):
    def forward(self, x: Tensor) -> Generator[pop, Tensor, Tensor]:
        skip = yield pop("skip")
        return super().forward(x + skip)


def chain(layers: int, width: int, rows: int, seconds: float) -> nn.Sequential:
    """Equal layers whose forward pass on ``rows`` rows takes ``seconds`` in all."""
    return nn.Sequential(*(Emulated(width, seconds / layers / rows) for _ in range(layers)))


def hourglass(layers: int, width: int, rows: int, seconds: float) -> nn.Sequential:
    """The same with the skips of a U-Net: from the first layer to the last, and so on inwards."""
    spaces = [Namespace() for _ in range(layers // 2)]
    each = seconds / layers / rows
    down = [Encode(width, each).isolate(space) for space in spaces]
    up = [Decode(width, each).isolate(space) for space in reversed(spaces)]
    return nn.Sequential(*down, *up)


def costs(n: int, m: int, seconds: float) -> list[Costs]:
    """What the schedule is told of either model, in ``n`` stages and ``m`` micro-batches."""
    f = seconds / n / m
    return [Costs(f, 2 * f, f)] * n
