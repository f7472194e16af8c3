"""Recording: what a step takes more when it is recorded."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import torch
from torch import nn

import rpcpipe
from benchmarks.emulated import chain
from benchmarks.harness import Table, experiment
from benchmarks.plan import Busy

M = 8  # micro-batches


def measure(world: rpcpipe.World, quick: bool) -> list[Table]:
    n, x = world.stages, torch.ones(M, 64)
    models = {
        "sleep, 5 ms forward a micro-batch": (chain(n, 64, M, 0.005 * n * M), 10 if quick else 100),
        "compute, some ms": (nn.Sequential(*(Busy() for _ in range(n))), 10 if quick else 200),
        "empty": (nn.Sequential(*(nn.Linear(64, 64) for _ in range(n))), 10 if quick else 1000),
    }
    table = Table(
        f"A step of {n} stages and {M} micro-batches; every second one is recorded",
        ["Layers", "Steps", "Not recorded", "Recorded", "More"],
    )
    for name, (model, count) in models.items():
        pipe = rpcpipe.Pipe(model, world, balance=[1] * n, chunks=M)
        recorded, others = _times(pipe, x, count)
        row = f"{1e3 * others:.2f} ms", f"{1e3 * recorded:.2f} ms", f"{recorded / others - 1:+.1%}"
        table.add(name, count, *row)
    return [table]


def _times(pipe: rpcpipe.Pipe, x: torch.Tensor, count: int) -> tuple[float, float]:
    """Median seconds of steps that are recorded, and of those between them."""
    for _ in range(3):
        pipe(x).sum().backward()
    times = []
    with pipe.record(every=2):
        for _ in range(count):
            start = time.perf_counter()
            pipe(x).sum().backward()
            times.append(time.perf_counter() - start)
    return median(times[::2]), median(times[1::2])


def main(argv: Sequence[str] | None = None) -> list[Table]:
    return experiment(measure, 2, __doc__, argv)


if __name__ == "__main__":
    main()
