"""Soak: thousands of steps, during which no process may come to hold more of anything.

Sampled in each process: resident memory (its own, and that of its watcher), open files, threads,
RRefs, and autograd contexts. After a warm-up of a fifth of the steps, everything must be flat.

    python -m benchmarks.soak --steps 10000
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from typing import Any

import psutil
import torch
from torch import nn

import rpcpipe
from rpcpipe import transport

STAGES, CHUNKS, SAMPLES = 2, 4, 10
ALLOWED = 8.0  # MiB that memory may grow by: allocators go on to fill their pools for long
COLUMNS = ("memory", "watcher", "files", "threads", "rrefs", "contexts")


def sample(module: nn.Module | None = None) -> dict[str, float]:
    """What this process holds; memory in MiB."""
    gc.collect()
    me = psutil.Process()
    held = transport.debug_info()
    watchers = [p for p in me.children() if any("watcher.py" in word for word in p.cmdline())]
    return {
        "memory": me.memory_info().rss / 2**20,
        "watcher": sum(p.memory_info().rss for p in watchers) / 2**20,
        "files": me.num_fds(),
        "threads": me.num_threads(),
        "rrefs": held["num_owner_rrefs"] + held["num_pending_futures"],
        "contexts": held["num_autograd_contexts"],
    }


def descend(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.data -= 1e-3 * parameter.grad
            parameter.grad = None


def model(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(width, width), nn.Dropout(0.1), nn.Linear(width, width), nn.Tanh(),
        nn.Linear(width, width), nn.Linear(width, 1),
    )  # fmt: skip


def train(world: rpcpipe.World, steps: int) -> list[list[dict[str, float]]]:
    """Run the steps; returns the samples, each one row a process."""
    pipe = rpcpipe.Pipe(model(64), world, balance=[3, 3], chunks=CHUNKS)
    samples = []
    start = time.monotonic()
    for step in range(1, steps + 1):
        x = torch.randn(64, 64)
        pipe(x).pow(2).mean().backward()
        for j in range(world.stages):
            pipe.apply_to_stage(j, descend)
        if step % max(1, steps // SAMPLES) == 0:
            rows = [sample(), *(pipe.apply_to_stage(j, sample) for j in range(world.stages))]
            samples.append(rows)
            show(step, time.monotonic() - start, rows)
    return samples


def show(step: int, seconds: float, rows: list[dict[str, float]]) -> None:
    for name, row in zip(names(), rows, strict=True):
        values = "".join(f"{row[column]:10.1f}" for column in COLUMNS)
        print(f"{step:8d}{seconds:9.1f}  {name:8s}{values}", flush=True)


def names() -> list[str]:
    return ["driver", *(f"stage {j}" for j in range(STAGES))]


def grown(samples: list[list[dict[str, float]]]) -> list[str]:
    """What the last sample has more of than the one after the warm-up, as sentences."""
    found = []
    first, last = samples[max(0, SAMPLES // 5 - 1)], samples[-1]
    for name, before, after in zip(names(), first, last, strict=True):
        for column in COLUMNS:
            allowed = ALLOWED if column in ("memory", "watcher") else 0
            if after[column] > before[column] + allowed:
                found.append(f"{name}: {column} went from {before[column]:g} to {after[column]:g}")
    return found


def main(argv: list[str] | None = None) -> Any:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10_000)
    steps = parser.parse_args(argv).steps
    heads = "".join(f"{column:>10s}" for column in COLUMNS)
    print(f"{'step':>8s}{'seconds':>9s}  {'process':8s}{heads}")
    found = grown(rpcpipe.run(train, steps, stages=STAGES) or [])
    print("\n".join(found) or "flat")
    return len(found)


if __name__ == "__main__":
    sys.exit(main())
