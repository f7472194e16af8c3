"""Memory: the largest U-Net (B, C) for a memory limit in each stage, as in the paper's table."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import torch
from torch import nn

import rpcpipe
from benchmarks import models
from benchmarks.harness import Narrow, Table, experiment, step

LIMIT = 64  # MiB in each stage, over what its process takes without a model
ROWS, SIDE, DEPTH, CHANNELS, MICRO = 16, 64, 3, 8, 8  # C is fixed and B is searched

# glibc, in the stage processes: one heap, and tensors outside of it, so that what is freed is free.
ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(32 << 10)}

# torchgpipe 0.0.5 on Tesla P40, from its benchmarks/unet-memory.
PUBLISHED = {
    "baseline": "(6, 72), 362.2M, 20.3 GiB",
    "pipeline-1": "(11, 128), 2.21B, 20.5 GiB",
    "pipeline-2": "(24, 128), 4.99B, 43.4 GiB",
    "pipeline-4": "(24, 160), 7.80B, 79.1 GiB",
}


def _status(name: str) -> float:
    """A line of the kernel's account of this process, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def settle(_: nn.Module) -> float:
    """Give free memory back and start a new peak; return what is in use."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc's
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak(_: nn.Module) -> float:
    """The peak since `settle`. That of getrusage would count the parent's past as well."""
    return _status("VmHWM")


class Probe:
    """Measures what one experiment of the table takes in each stage."""

    def __init__(self, world: rpcpipe.World, n: int, m: int, checkpoint: str) -> None:
        self.world, self.m, self.checkpoint = Narrow(world, n), m, checkpoint
        self.x = torch.randn(ROWS, 3, SIDE, SIDE)
        self.peaks: dict[int, list[float]] = {}
        self.step(1)  # loads code that is loaded on first use
        empty = nn.Sequential(*(nn.Identity() for _ in range(n)))
        pipe = rpcpipe.Pipe(empty, self.world, balance=[1] * n)
        self.idle = [pipe.apply_to_stage(j, settle) for j in range(n)]

    def step(self, b: int) -> list[float]:
        """Train U-Net (b, C) for one step; return each stage's peak."""
        model, n = models.unet(DEPTH, b, CHANNELS), self.world.stages
        kept = self.m if self.checkpoint == "never" else 1
        balance = rpcpipe.balance.by_size(n, model, self.x[: ROWS // self.m], chunks=kept)
        pipe = rpcpipe.Pipe(
            model, self.world, balance=balance, chunks=self.m, checkpoint=self.checkpoint
        )
        for j in range(n):
            pipe.apply_to_stage(j, settle)
        step(pipe, self.x)()
        return [pipe.apply_to_stage(j, peak) for j in range(n)]

    def fits(self, b: int) -> bool:
        self.peaks[b] = [p - q for p, q in zip(self.step(b), self.idle, strict=True)]
        return max(self.peaks[b]) <= LIMIT


def largest(fits: Callable[[int], bool], start: int, limit: int) -> int:
    """The largest size that fits, to an eighth: by doubling, then by halving the rest."""
    low, high = 0, start
    while high <= limit and fits(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 8) and high <= limit:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def memory(world: rpcpipe.World, lengths: Sequence[int], limit: int) -> Table:
    table = Table(
        f"U-Net (B, {CHANNELS}) of {DEPTH} levels, {ROWS} images of {SIDE} x {SIDE}: the largest B "
        f"for {LIMIT} MiB a stage; pipelines have {MICRO} micro-batches and recompute",
        ["Experiment", "U-Net (B, C)", "Parameters", "Memory usage", "Each stage", "torchgpipe"],
    )
    b = 1
    for n in (0, *lengths):
        probe = Probe(world, n or 1, MICRO if n else 1, "except_last" if n else "never")
        b = largest(probe.fits, max(b, 1), limit)  # a longer pipeline holds at least as much
        name = f"pipeline-{n}" if n else "baseline"
        if not b:
            table.add(name, "none", "", "", "", PUBLISHED[name])
            continue
        count = sum(p.numel() for p in models.unet(DEPTH, b, CHANNELS).parameters())
        peaks = probe.peaks[b]
        each = " ".join(f"{p:.0f}" for p in peaks)
        row = f"{count / 1e6:.2f}M", f"{sum(peaks):.0f} MiB", each, PUBLISHED[name]
        table.add(name, f"({b}, {CHANNELS})", *row)
    return table


def measure(world: rpcpipe.World, quick: bool) -> list[Table]:
    return [memory(world, [1, 2], 2) if quick else memory(world, [1, 2, 4], 128)]


def main(argv: Sequence[str] | None = None) -> list[Table]:
    with patch.dict(os.environ, ALLOCATOR):
        return experiment(measure, 4, __doc__, argv)


if __name__ == "__main__":
    main()
