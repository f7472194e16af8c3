"""Harness: variants side by side in one run, medians, and tables in the form of the papers."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import rpcpipe


@dataclass
class Table:
    """Rows under columns; as text it is Markdown."""

    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)

    def add(self, *cells: object) -> None:
        self.rows.append([str(cell) for cell in cells])

    def column(self, name: str) -> list[str]:
        return [row[list(self.columns).index(name)] for row in self.rows]

    def __str__(self) -> str:
        widths = [max(map(len, column)) for column in zip(self.columns, *self.rows, strict=True)]
        ruler = ["-" * width for width in widths]
        lines = [
            "| " + " | ".join(map(str.ljust, row, widths)) + " |"
            for row in (self.columns, ruler, *self.rows)
        ]
        return "\n".join([f"{self.title}\n", *lines])


class Narrow:
    """The first stages of a world, so that pipes of several lengths can run side by side."""

    def __init__(self, world: rpcpipe.World, stages: int) -> None:
        self._world, self.stages = world, stages

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world, name)


def medians(variants: Mapping[Any, Callable[[], Any]], rounds: int) -> dict[Any, float]:
    """Median seconds of each variant; they take turns, since other work comes and goes."""
    times: dict[Any, list[float]] = {name: [] for name in variants}
    for run in variants.values():
        run()  # not counted: first uses allocate
    for _ in range(rounds):
        for name, run in variants.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: median(found) for name, found in times.items()}


def step(model: nn.Module, x: Tensor) -> Callable[[], None]:
    """One forward and backward pass, to be timed."""
    return lambda: model(x).sum().backward()


def even(layers: int, stages: int) -> list[int]:
    """A balance of equal stages, as far as that goes."""
    cuts = [layers * j // stages for j in range(stages + 1)]
    return [b - a for a, b in itertools.pairwise(cuts)]


def experiment(
    measure: Callable[[rpcpipe.World, bool], list[Table]],
    stages: int,
    about: str | None,
    argv: Sequence[str] | None,
) -> list[Table]:
    """The command of one experiment: run it, print its tables."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--quick", action="store_true", help="fewer rows, to see that it works")
    quick = parser.parse_args(argv).quick
    torch.set_num_threads(1)  # what runs in the driver has one core, as a stage has
    tables = rpcpipe.run(measure, quick, stages=2 if quick else stages) or []
    print(*tables, sep="\n\n", flush=True)
    return tables
