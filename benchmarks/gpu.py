"""GPU: a step of stages on one GPU or one each, beside the limit taken with CUDA events.

The limit: each partition alone on its GPU in one process, its F, B and R between CUDA events, in
the schedule's ideal time. Where several stages share a GPU, they share its processors as well, and
no schedule can be faster than all the work one after the other: the limit is the larger of both.
Micro-batches go from stage to stage through host memory; what that costs is in the ratio.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor, nn

import rpcpipe
from benchmarks import record
from benchmarks.harness import even
from benchmarks.record import Result, Row, Skipped
from benchmarks.workloads import M, Residual, loss, partition
from rpcpipe.schedule import Costs, ideal_time

MODES = ("never", "except_last")


def model(width: int, layers: int) -> nn.Sequential:
    torch.manual_seed(0)

    def layer() -> nn.Module:
        return Residual(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    return nn.Sequential(*(layer() for _ in range(layers)))


def _timed(run: Callable[[], object], times: int) -> float:
    """Seconds between two CUDA events round ``run``: the median."""
    found = []
    for _ in range(times + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1e3)
    return median(found[3:])


def costs_of(part: nn.Module, x: Tensor, times: int) -> Costs:
    """One partition alone on its GPU."""
    with torch.no_grad():
        f = _timed(lambda: part(x), times)
    gradient = torch.ones_like(part(x))
    r = _timed(lambda: part(x), times)
    both = _timed(lambda: part(x).backward(gradient), times)
    part.zero_grad()
    return Costs(f, max(0.0, both - r), r)


def limit(
    whole: nn.Sequential, devices: Sequence[torch.device], x: Tensor, times: int
) -> list[Costs]:
    """F, B and R of each stage for a micro-batch ``x``."""
    found, n = [], len(devices)
    for j, device in enumerate(devices):
        with torch.cuda.device(device):
            part, given = partition(whole, n, j).to(device), x.to(device)
            found.append(costs_of(part, given.detach().requires_grad_(j > 0), times))
            with torch.no_grad():
                x = part(given)
    return found


def bound(costs: Sequence[Costs], devices: Sequence[torch.device], mode: str) -> float:
    """The ideal time, or that of the work which shares one GPU."""
    recomputed = {"never": 0, "except_last": M - 1}[mode]
    busy: dict[torch.device, float] = {}
    for device, (f, b, r) in zip(devices, costs, strict=True):
        busy[device] = busy.get(device, 0.0) + M * (f + b) + recomputed * r
    return max(ideal_time(M, len(costs), costs, mode), *busy.values())


def _wait(module: nn.Module) -> None:
    torch.cuda.synchronize(next(module.parameters()).device)


def measure(world: rpcpipe.World, quick: bool) -> list[Result]:
    n, (width, rows, rounds) = world.stages, (512, 64, 3) if quick else (4096, 8192, 20)
    whole, x = model(width, 4 * n), torch.randn(rows, width)
    devices = [world.device(j) for j in range(n)]
    costs = limit(model(width, 4 * n), devices, x[: rows // M], rounds)
    made = []
    for mode in MODES:
        pipe = rpcpipe.Pipe(whole, world, balance=even(4 * n, n), chunks=M, checkpoint=mode)
        times = []
        for _ in range(rounds + 3):
            start = time.perf_counter()
            loss(pipe(x)).backward()
            for j in range(n):
                pipe.apply_to_stage(j, _wait)
            times.append(time.perf_counter() - start)
        step, best = median(times[3:]), bound(costs, devices, mode)
        detail = {"step_ms": step * 1e3, "limit_ms": best * 1e3, "devices": [*map(str, devices)]}
        with pipe.record() as timeline:
            loss(pipe(x)).backward()
        detail["bubble"] = timeline.bubble
        made.append(Result(f"n={n}, {mode}: step / limit", step / best, detail=detail))
    return made


def run(quick: bool) -> Row:
    if not torch.cuda.is_available():
        return Skipped("there is no GPU that torch can use here")
    made: list[Result] = []
    for stages in sorted({2, torch.cuda.device_count()}):
        made += rpcpipe.run(measure, quick, stages=stages) or []
    return made


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="less, to see that it works")
    quick = parser.parse_args(argv).quick
    before, start = record.machine(), time.monotonic()
    row = run(quick)
    if isinstance(row, Skipped):
        print(f"skipped: {row.reason}")
        return 0
    print(record.table("On GPUs", row))
    record.save("gpu", "On GPUs", row, quick, before, time.monotonic() - start)
    return 0


if __name__ == "__main__":
    sys.exit(main())
