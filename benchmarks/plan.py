"""Plan: step time and memory as predicted by rpcpipe.plan, beside what is measured."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn

import rpcpipe
from benchmarks import models
from benchmarks.emulated import chain, hourglass
from benchmarks.harness import Table, experiment, medians, step
from benchmarks.memory import ALLOCATOR
from rpcpipe.balance.profile import pass_times
from rpcpipe.memory import MIB

Case = tuple[Callable[[], nn.Sequential], Tensor]


def cases(quick: bool) -> dict[str, Case]:
    """Models with a mini-batch each; emulated layers sleep, and so do not compete for cores."""
    seconds = 0.1 if quick else 0.4
    found: dict[str, Case] = {
        "emulated chain": (lambda: chain(8, 64, 32, seconds), torch.randn(32, 64)),
    }
    if quick:
        return found
    images = torch.randn(16, 3, 128, 128)
    return {
        **found,
        "emulated hourglass": (lambda: hourglass(8, 64, 32, 0.4), torch.randn(32, 64)),
        "ResNet": (lambda: models.resnet([2, 2, 2, 2], 32, 10), images),
        "U-Net (2, 16)": (lambda: models.unet(3, 2, 16), images),
        "AmoebaNet-D (3, 32)": (lambda: models.amoebanetd(10, 3, 32), images),
    }


def chosen(plan: rpcpipe.Plan) -> list[rpcpipe.Candidate]:
    """The best, and the best of each checkpoint mode."""
    modes = dict.fromkeys(c.checkpoint for c in plan.candidates)
    best = [next(c for c in plan.candidates if c.checkpoint == mode) for mode in modes]
    return list(dict.fromkeys([plan.best, *best]))


class _Burn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        _burn(1)
        return x * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, scale = ctx.saved_tensors
        _burn(2)
        return gradient * scale, (gradient * x).sum()


def _burn(times: int) -> None:
    """Work of some milliseconds that needs a core and nothing else."""
    x = torch.ones(128, 128)
    for _ in range(100 * times):
        x @ x


class Busy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return _Burn.apply(x, self.scale)


class Machine(NamedTuple):
    """What stages need beside their layers here, in seconds and bytes; as plan() takes it."""

    latency: float
    bandwidth: float | None  # not noticed beside the latency
    fixed: float
    byte: float

    def overhead(self, size: float) -> float:
        return self.fixed + self.byte * size

    def __str__(self) -> str:
        overhead = f"overhead {1e3 * self.fixed:.2f} ms and {1e3 * MIB * self.byte:.2f} ms a MiB"
        bandwidth = f", bandwidth {self.bandwidth / 1e9:.2f} GB/s" if self.bandwidth else ""
        return f"{overhead}, latency {1e3 * self.latency:.2f} ms{bandwidth}"


SMALL, LARGE = 1 << 10, 1 << 20  # bytes of a micro-batch
FEW, MANY = 4, 16  # micro-batches


def machine(world: rpcpipe.World, rounds: int = 7) -> Machine:
    """Measured with equal stages, which keep a core busy and send what they are given.

    A step takes ``(m + n - 1) (work + 2 overhead) + (2 n + 1) link``.
    """
    n = world.stages
    overheads, links = [], []
    for size in (SMALL, LARGE):
        model = nn.Sequential(*(Busy() for _ in range(n)))
        times = pass_times(model, torch.ones(1, size // 4), 7)
        work = (sum(times.forward) + sum(times.backward)) / n
        seconds = []
        for m in (FEW, MANY):
            pipe = rpcpipe.Pipe(model, world, balance=[1] * n, chunks=m, checkpoint="never")
            seconds += medians({"": step(pipe, torch.ones(m, size // 4))}, rounds).values()
        pace = (seconds[1] - seconds[0]) / (MANY - FEW)
        overheads.append(max(0.0, pace - work) / 2)
        links.append(max(1e-9, seconds[0] - (FEW + n - 1) * pace) / (2 * n + 1))
    return Machine(
        links[0],
        (LARGE - SMALL) / (links[1] - links[0]) if links[1] > links[0] else None,
        overheads[0],
        max(0.0, overheads[1] - overheads[0]) / (2 * (LARGE - SMALL)),
    )


def plans(
    world: rpcpipe.World, here: Machine, quick: bool
) -> Iterator[tuple[str, Case, rpcpipe.Candidate]]:
    given: dict[str, Any] = {"latency": here.latency, "bandwidth": here.bandwidth}
    given |= {"overhead": here.overhead, "repeats": 1 if quick else 9}
    for name, case in cases(quick).items():
        torch.manual_seed(0)
        counts = [4] if quick else [4, 8]
        plan = rpcpipe.plan(
            case[0](), case[1], world.stages, param_factor=2, chunks=counts, **given
        )
        for candidate in chosen(plan)[: 1 if quick else None]:
            yield name, case, candidate


def pipe_of(world: rpcpipe.World, case: Case, c: rpcpipe.Candidate) -> rpcpipe.Pipe:
    options = {"balance": c.balance, "chunks": c.chunks, "checkpoint": c.checkpoint}
    return rpcpipe.Pipe(case[0](), world, deferred_batch_norm=True, **options)


def times(world: rpcpipe.World, quick: bool) -> list[Table]:
    columns = ["Model", "Balance", "m", "Checkpoint", "Predicted", "Measured", "Ratio"]
    columns += ["Bubble, predicted", "Bubble, measured"]
    here = machine(world, 1 if quick else 9)
    table = Table(f"Step time; the ratio is measured / predicted, with {here}", columns)
    for name, case, c in plans(world, here, quick):
        pipe = pipe_of(world, case, c)
        run = step(pipe, case[1])
        for _ in range(3):  # until the allocator of each stage has seen its sizes
            run()
        (seconds,) = medians({"": run}, 2 if quick else 9).values()
        with pipe.record() as timeline:
            for _ in range(1 if quick else 5):
                run()
        row = [f"{1e3 * c.seconds:.1f} ms", f"{1e3 * seconds:.1f} ms", f"{seconds / c.seconds:.2f}"]
        row += [f"{c.bubble:.0%}", f"{timeline.bubble:.0%}"]
        table.add(name, list(c.balance), c.chunks, c.checkpoint, *row)
    return [table]


def memories(world: rpcpipe.World, quick: bool) -> list[Table]:
    table = Table(
        "The most any stage holds in parameters, gradients and activations, in MiB",
        ["Model", "Balance", "m", "Checkpoint", "Predicted", "Measured", "Ratio"],
    )
    for name, case, c in plans(world, Machine(0.0, None, 0.0, 0.0), quick):
        if name.startswith("emulated"):
            continue  # of some bytes
        pipe = pipe_of(world, case, c)
        run, looks = step(pipe, case[1]), []
        for _ in range(2 if quick else 9):
            run()
            stages = pipe.memory().stages
            looks.append(max(s.parameters + s.gradients + s.activations for s in stages))
        held, predicted = median(looks[1:]), max(c.memory)  # the first one allocates
        row = [f"{predicted / MIB:.1f}", f"{held / MIB:.1f}", f"{held / predicted:.2f}"]
        table.add(name, list(c.balance), c.chunks, c.checkpoint, *row)
    return [table]


def main(argv: Sequence[str] | None = None) -> list[Table]:
    found = experiment(times, 2, __doc__, argv)
    with patch.dict(os.environ, ALLOCATOR):  # memory is that of tensors, and time another
        return found + experiment(memories, 2, __doc__, argv)


if __name__ == "__main__":
    main()
