"""Plan: step time and memory as predicted by rpcpipe.plan, beside what is measured."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from unittest.mock import patch

import torch
from torch import Tensor, nn

import rpcpipe
from benchmarks import models
from benchmarks.emulated import chain, hourglass
from benchmarks.harness import Table, experiment, medians, step
from benchmarks.memory import ALLOCATOR
from rpcpipe.memory import MIB

Case = tuple[Callable[[], nn.Sequential], Tensor]


def cases(quick: bool) -> dict[str, Case]:
    """Models with a mini-batch each; emulated layers sleep, and so do not compete for cores."""
    found: dict[str, Case] = {
        "emulated chain": (lambda: chain(8, 64, 32, 0.4), torch.randn(32, 64)),
    }
    if quick:
        return found
    images = torch.randn(16, 3, 128, 128)
    return {
        **found,
        "emulated hourglass": (lambda: hourglass(8, 64, 32, 0.4), torch.randn(32, 64)),
        "ResNet": (lambda: models.resnet([2, 2, 2, 2], 10, 16), images),
        "U-Net (2, 16)": (lambda: models.unet(3, 2, 16), images),
        "AmoebaNet-D (3, 32)": (lambda: models.amoebanetd(10, 3, 32), images),
    }


def chosen(plan: rpcpipe.Plan) -> list[rpcpipe.Candidate]:
    """The best, and the best of each checkpoint mode."""
    modes = dict.fromkeys(c.checkpoint for c in plan.candidates)
    best = [next(c for c in plan.candidates if c.checkpoint == mode) for mode in modes]
    return list(dict.fromkeys([plan.best, *best]))


def plans(world: rpcpipe.World, quick: bool) -> Iterator[tuple[str, Case, rpcpipe.Candidate]]:
    for name, case in cases(quick).items():
        torch.manual_seed(0)
        counts = [4] if quick else [4, 8]
        plan = rpcpipe.plan(case[0](), case[1], world.stages, param_factor=2, chunks=counts)
        for candidate in chosen(plan)[: 1 if quick else None]:
            yield name, case, candidate


def pipe_of(world: rpcpipe.World, case: Case, c: rpcpipe.Candidate) -> rpcpipe.Pipe:
    options = {"balance": c.balance, "chunks": c.chunks, "checkpoint": c.checkpoint}
    return rpcpipe.Pipe(case[0](), world, deferred_batch_norm=True, **options)


def times(world: rpcpipe.World, quick: bool) -> list[Table]:
    columns = ["Model", "Balance", "m", "Checkpoint", "Predicted", "Measured", "Ratio"]
    table = Table("Step time; the ratio is measured / predicted", columns)
    for name, case, c in plans(world, quick):
        variants = {"": step(pipe_of(world, case, c), case[1])}
        (seconds,) = medians(variants, 2 if quick else 7).values()
        row = [f"{1e3 * c.seconds:.1f} ms", f"{1e3 * seconds:.1f} ms", f"{seconds / c.seconds:.2f}"]
        table.add(name, list(c.balance), c.chunks, c.checkpoint, *row)
    return [table]


def memories(world: rpcpipe.World, quick: bool) -> list[Table]:
    table = Table(
        "The most any stage holds in parameters, gradients and activations, in MiB",
        ["Model", "Balance", "m", "Checkpoint", "Predicted", "Measured", "Ratio"],
    )
    for name, case, c in plans(world, quick):
        if name.startswith("emulated"):
            continue  # of some bytes
        pipe = pipe_of(world, case, c)
        for _ in range(3):
            pipe.memory()
            step(pipe, case[1])()
        held = max(s.parameters + s.gradients + s.activations for s in pipe.memory().stages)
        predicted = max(c.memory)
        row = [f"{predicted / MIB:.1f}", f"{held / MIB:.1f}", f"{held / predicted:.2f}"]
        table.add(name, list(c.balance), c.chunks, c.checkpoint, *row)
    return [table]


def main(argv: Sequence[str] | None = None) -> list[Table]:
    found = experiment(times, 2, __doc__, argv)
    with patch.dict(os.environ, ALLOCATOR):  # memory is that of tensors, and time another
        return found + experiment(memories, 2, __doc__, argv)


if __name__ == "__main__":
    main()
