"""Peers: other ways to do the same step, each in processes of its own that wait for their turn.

Each has the same model, the same micro-batches and the same loss as ours; `benchmarks.rows.steps`
refuses to time one whose gradients differ.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor

from benchmarks import workloads
from benchmarks.children import Commands


class Peer(ABC):
    """One process of a peer."""

    def __init__(self, rank: int, n: int, port: int) -> None:
        self.rank, self.n, self.port = rank, n, port
        self.start()

    def serve(self, commands: Commands) -> None:
        commands.ready()
        commands.follow(self)
        self.end()

    def time(self) -> float:
        """Seconds of one forward and backward pass, as this process sees it."""
        start = time.perf_counter()
        self.step()
        return time.perf_counter() - start

    # --------------------------------------------------------------------- what a peer defines

    processes = 1  # beyond one for each stage, or all of them where stages are threads

    def start(self) -> None:  # noqa: B027, not every peer has others
        """Meet the others."""

    @abstractmethod
    def load(self, workload: str, n: int, mode: str, quick: bool) -> None:
        """Make the model of a workload, in ``n`` stages, recomputing by our ``mode``."""

    @abstractmethod
    def step(self) -> Any:
        """One forward and backward pass."""

    @abstractmethod
    def gradients(self) -> dict[str, Tensor]:
        """Those this process holds, by the names of the whole model; cleared thereafter."""

    def end(self) -> None:  # noqa: B027
        """Leave the others."""


def take_gradients(module: Any) -> dict[str, Tensor]:
    found = {k: g.clone() for k, g in workloads.gradients(module).items()}
    module.zero_grad()
    return found
