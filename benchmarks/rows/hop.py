"""Hop: what one more micro-batch costs in one more stage, when no layer computes anything."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median

import psutil
import torch
import torch.distributed.rpc as rpc
from torch import Tensor, nn

import rpcpipe
from benchmarks.cpu import seconds_used
from benchmarks.harness import Narrow
from benchmarks.record import Result

KIB = 256  # float32 in one row
Size = tuple[int, int]  # n, m


class Empty(nn.Module):
    """Hands on what it is given; there is nothing to compute in either direction."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def slope(times: Mapping[Size, float]) -> dict[str, float]:
    """The least-squares ``a + stage n + microbatch m + hop n m`` of these times."""
    rows = torch.tensor([[1, n, m, n * m] for n, m in times], dtype=torch.float64)
    wanted = torch.tensor(list(times.values()), dtype=torch.float64).unsqueeze(1)
    found = torch.linalg.lstsq(rows, wanted).solution.squeeze(1).tolist()
    return dict(zip(("constant", "stage", "microbatch", "hop"), found, strict=True))


def _receive(_: Tensor) -> None:
    """What the bare call does with the tensor: nothing."""


def bare_call(worker: str, x: Tensor, times: int) -> float:
    """Seconds of an ``rpc_sync`` that carries the tensor one way: the median of many."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        rpc.rpc_sync(worker, _receive, args=(x,))
        found.append(time.perf_counter() - start)
    return median(found)


class Empties:
    """Pipes of empty layers, by n and m."""

    def __init__(self, world: rpcpipe.World, lengths: list[int], counts: list[int]) -> None:
        self.world = world
        self.pipes: dict[Size, rpcpipe.Pipe] = {}
        self.inputs: dict[Size, Tensor] = {}
        for n in lengths:
            for m in counts:
                layers = nn.Sequential(*(Empty() for _ in range(n)))
                narrow = Narrow(world, n)
                self.pipes[n, m] = rpcpipe.Pipe(
                    layers,
                    narrow,  # type: ignore[arg-type]
                    balance=[1] * n,
                    chunks=m,
                    checkpoint="never",
                )
                self.inputs[n, m] = torch.ones(m, KIB, requires_grad=True)

    def forward(self, size: Size) -> None:
        with torch.no_grad():
            self.pipes[size](self.inputs[size])

    def both(self, size: Size) -> None:
        """The input requires grad, so that a gradient comes back through every stage."""
        self.pipes[size](self.inputs[size]).sum().backward()

    def times(
        self, run: Callable[[Size], None], rounds: int, between: Callable[[], None] = lambda: None
    ) -> dict[Size, list[tuple[float, float]]]:
        """By size, for each round: seconds that passed, and of the driver's processor."""
        found: dict[Size, list[tuple[float, float]]] = {size: [] for size in self.pipes}
        for size in self.pipes:
            run(size)
        me = psutil.Process().pid
        for _ in range(rounds):
            between()
            for size in self.pipes:
                start, used = time.perf_counter(), seconds_used(me)
                run(size)
                passed = time.perf_counter() - start
                found[size].append((passed, seconds_used(me) - used))
        return found


def measure(world: rpcpipe.World, quick: bool) -> list[Result]:
    counts = [2, 8] if quick else [4, 16, 64]
    empties = Empties(world, [1, 2] if world.stages < 4 else [1, 2, 4], counts)
    x, calls = torch.ones(KIB), []

    def call() -> None:
        calls.append(bare_call(world.worker(world.stages - 1), x, 50))

    made = []
    for name, run, messages in [
        ("forward", empties.forward, 1),
        ("forward and backward", empties.both, 2),
    ]:
        calls.clear()
        found = empties.times(run, 3 if quick else 15, call)
        fit = slope({size: median(t for t, _ in each) for size, each in found.items()})
        bare = median(calls)
        made.append(
            Result(
                f"{name}: hop / {messages} bare rpc_sync",
                fit["hop"] / (messages * bare),
                1.0,
                detail={
                    "hop_us": fit["hop"] * 1e6,
                    "rpc_sync_us": bare * 1e6,
                    "per_microbatch_us": fit["microbatch"] * 1e6,
                    "per_stage_us": fit["stage"] * 1e6,
                    "constant_us": fit["constant"] * 1e6,
                },
            )
        )
    return made


def run(quick: bool) -> list[Result]:
    return rpcpipe.run(measure, quick, stages=2 if quick else 4) or []


# ---------------------------------------------------------------------------- the driver's part


def overhead(world: rpcpipe.World, quick: bool) -> list[Result]:
    """What the driver spends on a step; with its fit, which shows in what it grows."""
    counts, lengths = ([2, 8], [1, 2]) if quick else ([1, 8, 32], [2, 4, 8])
    found = Empties(world, lengths, counts)
    times = found.times(found.both, 3 if quick else 15)
    driver = {size: median(used for _, used in each) for size, each in times.items()}
    passed = {size: median(t for t, _ in each) for size, each in times.items()}
    fit, size = slope(driver), (max(lengths), 8)
    largest = max(driver)
    share = fit["hop"] * largest[0] * largest[1] / driver[largest]
    return [
        Result(
            f"driver's processor time a step, n={size[0]}, m={size[1]}",
            driver[size] * 1e3,
            unit=" ms",
            detail={"step_ms": passed[size] * 1e3},
        ),
        Result(
            f"of it in proportion to n*m, at n={largest[0]}, m={largest[1]}",
            share,
            0.1,
            detail={f"us_per_{k}": v * 1e6 for k, v in fit.items()}
            | {f"ms n={n} m={m}": v * 1e3 for (n, m), v in driver.items()},
        ),
    ]


def run_overhead(quick: bool) -> list[Result]:
    return rpcpipe.run(overhead, quick, stages=2 if quick else 8) or []
