"""Prediction: how busy the slowest stage is, called batch by batch and by predict."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import rpcpipe
from benchmarks.emulated import Emulated
from benchmarks.harness import Table, experiment

ROWS, WIDTH = 32, 64


def measure(world: rpcpipe.World, quick: bool) -> list[Table]:
    chunks, count, seconds = ([2], 4, 0.02) if quick else ([1, 2, 4, 8], 24, 0.16)
    table = Table(
        f"{count} mini-batches of {ROWS} rows through {world.stages} emulated stages; the last but "
        f"one takes {seconds:g} s for each, the others three quarters of that",
        ["Micro-batches", "One by one", "predict", "Throughput of predict"],
    )
    for m in chunks:
        pipe = rpcpipe.Pipe(_model(world.stages, seconds), world, balance=[1] * world.stages)
        pipe.chunks = m
        batches = [torch.ones(ROWS, WIDTH)] * count
        shares = (_busy(pipe, way, batches) for way in (_one_by_one, _predict))
        table.add(m, *(f"{share:.1%}" for share in [*shares, _rate(pipe, batches) * seconds]))
    return [table]


def _model(stages: int, seconds: float) -> nn.Sequential:
    times = [0.75 * seconds] * stages
    times[stages - 2] = seconds
    return nn.Sequential(*(Emulated(WIDTH, each / ROWS) for each in times))


@torch.no_grad()
def _one_by_one(pipe: rpcpipe.Pipe, batches: Sequence[Tensor]) -> None:
    for x in batches:
        pipe(x)


def _predict(pipe: rpcpipe.Pipe, batches: Sequence[Tensor]) -> None:
    for _ in pipe.predict(batches):
        pass


def _busy(
    pipe: rpcpipe.Pipe,
    run: Callable[[rpcpipe.Pipe, Sequence[Tensor]], None],
    batches: Sequence[Tensor],
) -> float:
    """The fraction of time in which the slowest stage computes, from its first task to its last.

    Of its own times, which are longer than they should be on a machine with other work.
    """
    run(pipe, batches[:2])  # not counted: first uses allocate
    with pipe.record() as timeline:
        run(pipe, batches)
    works = [sum(event.end - event.start for event in events) for events in timeline.events]
    slowest = timeline.events[works.index(max(works))]
    return max(works) / (slowest[-1].end - slowest[0].start)


def _rate(pipe: rpcpipe.Pipe, batches: Sequence[Tensor]) -> float:
    """Results a second, from the first one to the last."""
    times = [time.perf_counter() for _ in pipe.predict(batches)]
    return (len(times) - 1) / (times[-1] - times[0])


def main(argv: Sequence[str] | None = None) -> list[Table]:
    return experiment(measure, 4, __doc__, argv)


if __name__ == "__main__":
    main()
