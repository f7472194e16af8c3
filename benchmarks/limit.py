"""The limit: what n stages on n cores can reach at best.

The n partitions run at the same time in n processes that do not talk to each other. Their times go
into the schedule's ideal. So the limit contains the bubble, and what the cores share: memory
bandwidth, caches, clock; nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import torch
from torch import Tensor, nn

from benchmarks import workloads
from benchmarks.children import Commands, Group
from rpcpipe.schedule import Costs, gpipe, ideal_time

Times = dict[str, list[float]]


class Alone:
    """One partition in its own process."""

    def __init__(self, rank: int, n: int, port: int) -> None:
        self.j, self.n = rank, n

    def serve(self, commands: Commands) -> None:
        commands.ready()
        commands.follow(self)

    def load(self, workload: str, n: int, mode: str, quick: bool, slowed: int | None) -> None:
        work = workloads.ALL[workload]
        model, x = work.model(), work.batch(quick)
        x = x[: len(x) // workloads.M]
        with torch.no_grad():
            for j in range(self.j):
                x = workloads.partition(model, n, j)(x)
        self.part: nn.Module = workloads.partition(model, n, self.j)
        if slowed == self.j:
            self.part = nn.Sequential(self.part, Slow(0.05))
        self.x, self.program = x, gpipe(workloads.M, n, mode)[self.j]

    def run(self, seconds: float) -> Times:
        """Run the program again and again for this long; seconds of each task."""
        times: Times = {"F": [], "R": [], "B": []}
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._once(times)
        return times

    def _once(self, times: Times) -> None:
        spared = {i for kind, i in self.program if kind == "R"}
        graphs: dict[int, Tensor] = {}
        for kind, i in self.program:
            start = time.perf_counter()
            if kind == "B":
                output = graphs.pop(i)
                gradient = torch.ones_like(output)
                start = time.perf_counter()
                output.backward(gradient)
                del output
            else:
                # A stage behind the first computes the gradient of its input as well.
                x = self.x.detach().requires_grad_(self.j > 0)
                with torch.set_grad_enabled(kind == "R" or i not in spared):
                    graphs[i] = self.part(x)
            times[kind].append(time.perf_counter() - start)


class Slow(nn.Module):
    """Takes longer, by so many seconds: a stage slowed on purpose."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return x


class Limit:
    """The limit of a workload in ``n`` stages, from as many samples as are taken."""

    def __init__(
        self,
        group: Group,
        workload: str,
        n: int,
        mode: str,
        quick: bool = False,
        slowed: int | None = None,
    ) -> None:
        self._group, self.n, self.mode = group, n, mode
        self._times: list[Times] = [{"F": [], "R": [], "B": []} for _ in range(n)]
        group.call("load", workload, n, mode, quick, slowed)
        group.call("run", 0.1)  # not counted: first uses allocate

    def sample(self, seconds: float) -> None:
        for total, found in zip(self._times, self._group.call("run", seconds), strict=True):
            for kind, times in found.items():
                total[kind] += times

    def costs(self) -> list[Costs]:
        return [
            Costs(*(median(times[kind]) if times[kind] else 0.0 for kind in "FBR"))
            for times in self._times
        ]

    def seconds(self) -> float:
        return ideal_time(workloads.M, self.n, self.costs(), self.mode)


def limits(n: int) -> Group:
    return Group(Alone, n)


def describe(costs: Sequence[Costs]) -> str:
    """Each stage's milliseconds of F, B and R."""
    return ", ".join(f"{c.f * 1e3:.1f}/{c.b * 1e3:.1f}/{c.r * 1e3:.1f}" for c in costs)
