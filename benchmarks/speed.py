"""Speed: throughput by number of stages and micro-batches, as in the papers' tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

import rpcpipe
from benchmarks import emulated, models
from benchmarks.harness import Narrow, Table, even, experiment, medians, step
from rpcpipe.schedule import ideal_time

ROWS, WIDTH = 64, 4096  # of the emulated mini-batch

# Speed-ups published for AmoebaNet-D (18, 256) by (n, m): torchgpipe 0.0.5 on Tesla P40
# (its benchmarks/amoebanetd-speed), and GPipe on TPU (arXiv 1811.06965, table 2).
AMOEBANET = {
    (2, 1): (1.0, 1.0),
    (2, 4): (1.546, 1.07),
    (2, 32): (1.780, 1.21),
    (4, 1): (1.006, 1.13),
    (4, 4): (1.680, 1.26),
    (4, 32): (2.711, 1.84),
    (8, 1): (0.932, 1.38),
    (8, 4): (2.625, 1.72),
    (8, 32): (4.966, 3.48),
}
# For U-Net (5, 64) and ResNet-101 by n, over one device without a pipeline, n = 0:
# torchgpipe 0.0.5, benchmarks/unet-speed and benchmarks/resnet101-speed.
UNET = {0: 1.0, 1: 0.858, 2: 1.246, 4: 2.352, 8: 3.105}
RESNET = {0: 1.0, 1: 0.853, 2: 1.414, 4: 2.774, 8: 4.294}


def grid(
    world: rpcpipe.World, sizes: Sequence[tuple[int, int]], rounds: int, seconds: float
) -> Table:
    """Emulated stages by (n, m)."""
    x = torch.ones(ROWS, WIDTH)
    pipes = {(n, m): _pipe(world, emulated.chain(n, WIDTH, ROWS, seconds), n, m) for n, m in sizes}
    found = medians({size: step(pipe, x) for size, pipe in pipes.items()}, rounds)
    ideal = {
        (n, m): ideal_time(m, n, emulated.costs(n, m, seconds), "except_last") for n, m in sizes
    }
    table = Table(
        f"Emulated stages ({seconds:g} s forward and {2 * seconds:g} s backward a mini-batch of "
        f"{ROWS} rows), n stages and m micro-batches",
        ["Experiment", "Throughput", "rpcpipe", "Ideal", "torchgpipe", "Huang et al."],
    )
    for size in sizes:
        theirs = [f"{value:.3g}x" for value in AMOEBANET[size]]
        row = _times(found, size), _times(ideal, size), *theirs
        table.add("n={}, m={}".format(*size), f"{ROWS / found[size]:.1f}/s", *row)
    return table


def skips(
    world: rpcpipe.World, lengths: Sequence[int], rounds: int, seconds: float, m: int = 8
) -> Table:
    """Emulated stages with the skips of a U-Net, by n."""
    x = torch.ones(ROWS, WIDTH)
    model = emulated.hourglass(8, WIDTH, ROWS, seconds)
    pipes: dict[int, nn.Module] = {n: _pipe(world, model, n, m) for n in lengths}
    found = medians({n: step(pipe, x) for n, pipe in {0: model, **pipes}.items()}, rounds)
    ideal = {0: 3 * seconds}
    ideal |= {n: ideal_time(m, n, emulated.costs(n, m, seconds), "except_last") for n in lengths}
    table = Table(
        f"Emulated stages with the skips of a U-Net, {m} micro-batches",
        ["Experiment", "Throughput", "Speed up", "Ideal", "torchgpipe, U-Net (5, 64)"],
    )
    for n in (0, *lengths):
        row = _times(found, n), _times(ideal, n), f"{UNET[n]:.3f}x"
        table.add(_name(n), f"{ROWS / found[n]:.1f}/s", *row)
    return table


Small = tuple[str, Callable[[], nn.Sequential], dict[int, float]]
SMALL: list[Small] = [
    ("U-Net (2, 16)", lambda: models.unet(3, 2, 16), UNET),
    ("AmoebaNet-D (3, 64)", lambda: models.amoebanetd(10, 3, 64), {}),
    ("ResNet, 4 blocks", lambda: models.resnet([1, 1, 1, 1], 32, 10), RESNET),
]


def small_models(
    world: rpcpipe.World, chosen: Sequence[Small], rounds: int, rows: int, m: int = 8
) -> Table:
    """The papers' models at a size for two cores, one thread a stage."""
    x = torch.randn(rows, 3, 64, 64)
    table = Table(
        f"Small models, {rows} images of 64 x 64, {m} micro-batches, one thread a stage",
        ["Model", "Experiment", "Balance", "Throughput", "Speed up", "torchgpipe, full size"],
    )
    for name, build, published in chosen:
        plain = build()
        sample = x[: rows // m]
        pipes = {n: _pipe(world, build(), n, m, sample) for n in (1, 2)}
        found = medians({n: step(p, x) for n, p in {0: plain, **pipes}.items()}, rounds)
        for n in found:
            balance = "+".join(map(str, pipes[n].balance)) if n else len(plain)
            theirs = f"{published[n]:.3f}x" if n in published else ""
            speed = f"{rows / found[n]:.1f}/s"
            table.add(name, _name(n), balance, speed, _times(found, n), theirs)
    return table


def _pipe(
    world: rpcpipe.World, model: nn.Sequential, n: int, m: int, sample: torch.Tensor | None = None
) -> rpcpipe.Pipe:
    balance = even(len(model), n) if sample is None else None
    return rpcpipe.Pipe(
        model, Narrow(world, n), balance=balance, sample=sample, chunks=m, deferred_batch_norm=True
    )


def _times(seconds: dict, size: object) -> str:
    """Speed-up over the first."""
    return f"{next(iter(seconds.values())) / seconds[size]:.2f}x"


def _name(n: int) -> str:
    return f"pipeline-{n}" if n else "baseline"


def measure(world: rpcpipe.World, quick: bool) -> list[Table]:
    if quick:
        sizes, lengths, chosen, rounds, seconds = [(2, 1), (2, 4)], [1, 2], SMALL[:1], 1, 0.1
    else:
        sizes, lengths, chosen, rounds, seconds = list(AMOEBANET), [1, 2, 4, 8], SMALL, 3, 1.0
    return [
        grid(world, sizes, rounds, seconds),
        skips(world, lengths, rounds, seconds),
        small_models(world, chosen, rounds, 16 if quick else 64),
    ]


def main(argv: Sequence[str] | None = None) -> list[Table]:
    return experiment(measure, 8, __doc__, argv)


if __name__ == "__main__":
    main()
