"""Emulation: stages that sleep, so that a pipeline of eight is honest on a machine with two cores.

What is left over the ideal time is what schedule, messages and autograd cost. A sleep is a little
longer than asked for; by how much is measured in the same stages between the steps, while nothing
else goes on in them, and is part of the ideal.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch import nn

import rpcpipe
from benchmarks import emulated
from benchmarks.ablation import LateRecompute
from benchmarks.harness import Narrow, Table, step
from benchmarks.record import Result
from benchmarks.speed import AMOEBANET
from rpcpipe.schedule import Costs, ideal_time

WIDTH = 256  # one row a micro-batch: 1 KiB a message
TARGETS = {0.01: 1.05, 0.05: 1.015}
Size = tuple[int, int]  # n, m


class _Set:
    """Gives the layers of a stage their seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, module: nn.Module) -> None:
        for layer in module.modules():
            if isinstance(layer, emulated.Emulated):
                layer.seconds = self.seconds


class _Overshoot:
    """How much longer than asked for a device is occupied, for F and for B: medians of a few."""

    def __init__(self, seconds: float, times: int) -> None:
        self.seconds, self.times = seconds, times

    def __call__(self, _: nn.Module) -> tuple[float, float]:
        return self._of(self.seconds), self._of(2 * self.seconds)

    def _of(self, seconds: float) -> float:
        found = []
        for _ in range(self.times):
            start = time.perf_counter()
            emulated.occupy(seconds)
            found.append(time.perf_counter() - start - seconds)
        return median(found)


class Emulation:
    """Pipes of several sizes in one world, whose tasks can be given any duration."""

    def __init__(self, world: rpcpipe.World, sizes: Sequence[Size]) -> None:
        self.world, self.sizes = world, sizes
        self.pipes = {size: self._pipe(*size) for size in sizes}
        self.inputs = {size: torch.ones(size[1], WIDTH) for size in sizes}

    def _pipe(self, n: int, m: int) -> rpcpipe.Pipe:
        model = emulated.chain(n, WIDTH, 1, 0.0)
        return rpcpipe.Pipe(model, Narrow(self.world, n), balance=[1] * n, chunks=m)  # type: ignore[arg-type]

    def overshoot(self, seconds: float, times: int) -> tuple[float, float]:
        any_pipe = self.pipes[max(self.sizes)]
        found = [
            any_pipe.apply_to_stage(j, _Overshoot(seconds, times))
            for j in range(max(self.sizes)[0])
        ]
        return median(f for f, _ in found), median(b for _, b in found)

    def measure(self, seconds: float, rounds: int) -> dict[Size, Times]:
        for size, pipe in self.pipes.items():
            for j in range(size[0]):
                pipe.apply_to_stage(j, _Set(seconds))
        found: dict[Size, list[float]] = {size: [] for size in self.sizes}
        extra = []
        for _ in range(rounds):
            extra.append(self.overshoot(seconds, 3))
            for size, pipe in self.pipes.items():
                once = step(pipe, self.inputs[size])
                start = time.perf_counter()
                once()
                found[size].append(time.perf_counter() - start)
        over = median(f for f, _ in extra), median(b for _, b in extra)
        return {size: Times(size, seconds, over, median(t)) for size, t in found.items()}


class Times:
    """One size's step beside its ideal."""

    def __init__(self, size: Size, seconds: float, over: tuple[float, float], step: float) -> None:
        (n, m), (f, b) = size, over
        costs = [Costs(seconds + f, 2 * seconds + b, seconds + f)] * n
        self.step, self.overshoot, self.work = step, f, n * m * seconds
        self.ideal = ideal_time(m, n, costs, "except_last")

    @property
    def speed(self) -> float:
        """Emulated forward work in a second: what compares pipelines of unlike size."""
        return self.work / self.step


def speedups(found: dict[Size, Times], seconds: float) -> Table:
    """In the form of the paper's AmoebaNet table: the same model by n and m."""
    base = found[min(found)]
    ideal = base.work / base.ideal
    table = Table(
        f"Emulated stages, tasks of {seconds * 1e3:.0f} ms forward: speed-up over n=2, m=1",
        ["Experiment", "rpcpipe", "Ideal", "torchgpipe", "Huang et al."],
    )
    for (n, m), times in found.items():
        theirs = [f"{x:.3g}x" for x in AMOEBANET.get((n, m), ())] or ["", ""]
        ours = times.speed / base.speed, times.work / times.ideal / ideal
        table.add(f"n={n}, m={m}", *(f"{x:.2f}x" for x in ours), *theirs)
    return table


def results(found: dict[Size, Times], seconds: float) -> list[Result]:
    return [
        Result(
            f"{seconds * 1e3:.0f} ms tasks, n={n}, m={m}: step / ideal",
            times.step / times.ideal,
            TARGETS[seconds],
            detail={
                "step_ms": times.step * 1e3,
                "ideal_ms": times.ideal * 1e3,
                "overshoot_us": times.overshoot * 1e6,
            },
        )
        for (n, m), times in found.items()
    ]


def measure(world: rpcpipe.World, quick: bool) -> list[Result]:
    lengths = [n for n in (2, 4, 8) if n <= world.stages]
    sizes = [(n, m) for n in lengths for m in ((1, 4) if quick else (1, 4, 8, 32))]
    emulation = Emulation(world, sizes)
    emulation.measure(0.001, 1)  # not counted
    made: list[Result] = []
    for seconds, rounds in [(0.01, 2)] if quick else [(0.01, 5), (0.05, 3)]:
        found = emulation.measure(seconds, rounds)
        made += results(found, seconds)
        print(speedups(found, seconds), end="\n\n", flush=True)
    return made


def run(quick: bool) -> list[Result]:
    return rpcpipe.run(measure, quick, stages=2 if quick else 8) or []


# ------------------------------------------------------------------------ early recomputation


def recompute(world: rpcpipe.World, seconds: float, rounds: int, m: int = 8) -> list[Result]:
    """What recomputing before the gradient's arrival saves, of the (n-1) r it can."""
    n, x = world.stages, torch.ones(m, WIDTH)
    late = type("Late", (rpcpipe.Pipe,), {"_stage_class": LateRecompute})
    kinds: dict[str, Any] = {"early": rpcpipe.Pipe, "late": late}
    pipes = {
        name: kind(emulated.chain(n, WIDTH, 1, n * seconds), world, balance=[1] * n, chunks=m)
        for name, kind in kinds.items()
    }
    for pipe in pipes.values():
        step(pipe, x)()
    savings, times = [], []
    for _ in range(rounds):
        took = {}
        for name, pipe in pipes.items():
            start = time.perf_counter()
            step(pipe, x)()
            took[name] = time.perf_counter() - start
        savings.append(took["late"] - took["early"])
        times.append(took["early"])
    possible = (n - 1) * seconds
    return [
        Result(
            f"n={n}, m={m}, r={seconds * 1e3:.0f} ms: saved / (n-1)r",
            median(savings) / possible,
            0.9,
            atmost=False,
            detail={
                "saved_ms": median(savings) * 1e3,
                "possible_ms": possible * 1e3,
                "early_step_ms": median(times) * 1e3,
            },
        )
    ]


def run_recompute(quick: bool) -> list[Result]:
    arguments = (0.02, 2) if quick else (0.03, 7)
    return rpcpipe.run(recompute, *arguments, stages=2 if quick else 8) or []
