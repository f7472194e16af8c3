"""Ablation: each component of the pipeline switched off alone, to show what it buys.

The switches are subclasses of the stage and a rewritten model. They live here, not in the library.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import rpcpipe
from benchmarks import emulated
from benchmarks.harness import Table, even, experiment, medians, step
from rpcpipe import boundary
from rpcpipe.schedule import Task, ideal_time
from rpcpipe.skip.namespace import Key
from rpcpipe.skip.skippable import pop_keys, skips_of, stash_keys
from rpcpipe.skip.store import SkipStore, use_store
from rpcpipe.stage import Order, Stage, Values, _Run

# torchgpipe 0.0.5 adds its components one by one: U-Net (5, 64) on 4 Tesla P40, from its
# benchmarks/unet-timeline: throughput and utilization.
PUBLISHED = [
    ("baseline", "30.662/s", "44%"),
    ("+ dependency (backward order)", "41.306/s", "59%"),
    ("+ streams", "55.191/s", "71%"),
    ("+ portals (direct skips)", "58.477/s", "75%"),
]

# ------------------------------------------------------------------------------- the switches


class LateRecompute(Stage):
    """Recomputes a micro-batch when its gradient has come, not before."""

    def _execute(self, run: _Run, task: Task) -> None:
        if task.kind == "R":
            run.gradients[task.i].result()
        super()._execute(run, task)


class LateFetch(Stage):
    """Asks for a micro-batch when it is about to compute it, not ahead."""

    def begin(self, order: Order, brought: Sequence[Values] = ()) -> None:
        self._wanted: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._unasked: dict[int, tuple[_Run, int]] = {}
        super().begin(order, brought)
        for _ in range(order.m):  # on this thread, which is in the step's autograd context
            super()._ask(*self._unasked[self._wanted.get(timeout=60)])

    def _ask(self, run: _Run, i: int) -> None:
        self._unasked[i] = run, i

    def _execute(self, run: _Run, task: Task) -> None:
        if task.kind == "F":
            self._wanted.put(task.i)
        super()._execute(run, task)


class _Unchained(Stage):
    """Leaves out the token that orders a stage's boundaries (see rpcpipe.boundary)."""

    def _cross(self, run: _Run, i: int, *values: Any) -> Values:
        run.token = boundary.first_token()
        return super()._cross(run, i, *values)


class ByArrival(_Unchained):
    """Runs backward in the order in which gradients come; recomputes ahead the likely next one."""

    def begin(self, order: Order, brought: Sequence[Values] = ()) -> None:
        super().begin(order, brought)
        run = self._runs[order.step]
        self._arrived: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._recomputed: set[int] = set()
        arrive = run.arrive

        def note(i: int, gradients: boundary.Gradients) -> None:
            arrive(i, gradients)
            self._arrived.put(i)

        run.arrive = note  # type: ignore[method-assign]

    def _execute(self, run: _Run, task: Task) -> None:
        if task.kind == "F":
            super()._execute(run, task)
            return
        i = task.i if task.kind == "R" else self._arrived.get()
        if i in run.recomputed - self._recomputed:
            self._recomputed.add(i)
            super()._execute(run, Task("R", i))
        if task.kind == "B":
            super()._execute(run, Task("B", i))


class AtOnce(_Unchained):
    """Runs backward on the engine's threads, all micro-batches that have a gradient at once."""

    def begin(self, order: Order, brought: Sequence[Values] = ()) -> None:
        super().begin(order, brought)
        run = self._runs[order.step]
        arrive = run.arrive

        def compute(i: int, gradients: boundary.Gradients) -> None:
            arrive(i, gradients)
            with torch.enable_grad():
                if i in run.recomputed:
                    super(AtOnce, self)._execute(run, Task("R", i))
                super(AtOnce, self)._execute(run, Task("B", i))

        run.arrive = compute  # type: ignore[method-assign]
        self._departures = list(run.departures)  # the run lets go of each once it has left

    def _execute(self, run: _Run, task: Task) -> None:
        if task.kind == "F":
            super()._execute(run, task)
        if task.kind == "B":  # another thread does it
            self._departures[task.i].result()


class Carry(nn.Module):
    """A layer that gets skips with its input and hands those on that later layers pop."""

    def __init__(self, layer: nn.Module, live: Sequence[Key]) -> None:
        super().__init__()
        self.live = list(live)
        self.weights = nn.ParameterList(layer.parameters())
        self.hidden = [layer]  # not a submodule: the pipe would see its skips and send them itself

    def forward(self, value: Any) -> Any:
        x, skips = value if isinstance(value, tuple) else (value, {})
        store = SkipStore(skips)
        with use_store(store):
            x = self.hidden[0](x)
        skips = {key: store.take(key) for key in self.live}
        return (x, skips) if skips else x


def carried(model: nn.Sequential) -> nn.Sequential:
    """The same model with skips that travel through all layers between their ends."""
    live: list[Key] = []
    layers = []
    for layer in model:
        popped = pop_keys(layer) if skips_of(layer) else []
        live = [key for key in live if key not in popped] + stash_keys(layer)
        layers.append(Carry(layer, live))
    return nn.Sequential(*layers)


# ------------------------------------------------------------------------------- measurements

SECONDS, ROWS, M = 0.8, 64, 8
VARIANTS: dict[str, tuple[type[Stage], bool, bool | None]] = {  # stage, direct skips, early
    "everything on": (Stage, True, True),
    "backward order off: as gradients arrive": (ByArrival, True, True),
    "backward order off: all at once": (AtOnce, True, None),
    "early recomputation off": (LateRecompute, True, False),
    "direct skips off": (Stage, False, True),
    "fetching ahead off": (LateFetch, True, True),
}


def pipe_of(
    world: rpcpipe.World, stage: type[Stage], model: nn.Sequential, chunks: int = M
) -> rpcpipe.Pipe:
    kind = type("Pipe", (rpcpipe.Pipe,), {"_stage_class": stage})
    return kind(model, world, balance=even(len(model), world.stages), chunks=chunks)


def gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]


def same_gradients(world: rpcpipe.World, variant: str, times: int, width: int = 4096) -> str:
    """In how many steps gradients are, bit for bit, those of the unpartitioned model."""
    stage, direct, _ = VARIANTS[variant]
    model = emulated.hourglass(8, width, ROWS, 0.04)
    pipe = pipe_of(world, stage, model if direct else carried(model))
    x = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(0))
    torch.cat([model(part) for part in x.chunk(M)]).pow(2).sum().backward()
    equal = 0
    for _ in range(times):
        pipe.zero_grad()
        pipe(x).pow(2).sum().backward()
        found = [g for j in range(world.stages) for g in pipe.apply_to_stage(j, gradients)]
        equal += all(map(torch.equal, found, gradients(model)))
    return f"{equal} of {times}"


def ablation(world: rpcpipe.World, seconds: float, width: int, rounds: int) -> Table:
    n, x = world.stages, torch.ones(ROWS, width)
    model = emulated.hourglass(8, width, ROWS, seconds)
    pipes = {
        name: pipe_of(world, stage, model if direct else carried(model))
        for name, (stage, direct, _) in VARIANTS.items()
    }
    found = medians({name: step(pipe, x) for name, pipe in pipes.items()}, rounds)
    table = Table(
        f"Emulated stages with the skips of a U-Net, n={n}, m={M}, {seconds:g} s forward; a "
        f"mini-batch's activations, and each of its 4 skips, are {4 * ROWS * width >> 20} MB",
        ["Experiment", "Throughput", "Relative", "Ideal", "Utilization", "Same gradients"],
    )
    costs, busy = emulated.costs(n, M, seconds), (4 - 1 / M) * seconds / n
    best = ideal_time(M, n, costs, "except_last")
    for name, (_, _, early) in VARIANTS.items():
        ideal = "none"  # there is no schedule
        if early is not None:
            ideal = f"{best / ideal_time(M, n, costs, 'except_last', early):.2f}x"
        relative = found["everything on"] / found[name]
        row = f"{ROWS / found[name]:.1f}/s", f"{relative:.2f}x", ideal
        table.add(name, *row, f"{busy / found[name]:.0%}", same_gradients(world, name, rounds))
    return table


def published() -> Table:
    title = "torchgpipe 0.0.5, components added one by one (U-Net (5, 64), n=4)"
    table = Table(title, ["Experiment", "Throughput", "Relative", "Utilization"])
    full = float(PUBLISHED[-1][1].removesuffix("/s"))
    for name, speed, busy in PUBLISHED:
        table.add(name, speed, f"{float(speed.removesuffix('/s')) / full:.2f}x", busy)
    return table


def measure(world: rpcpipe.World, quick: bool) -> list[Table]:
    size = (0.1, 4096, 2) if quick else (SECONDS, 65536, 7)
    return [ablation(world, *size), published()]


def main(argv: Sequence[str] | None = None) -> list[Table]:
    return experiment(measure, 4, __doc__, argv)


if __name__ == "__main__":
    main()
