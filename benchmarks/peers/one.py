"""One process on one core, which takes the same micro-batches one after the other."""

from __future__ import annotations

from torch import Tensor

from benchmarks import workloads
from benchmarks.peers import Peer, take_gradients


class One(Peer):
    def load(self, workload: str, n: int, mode: str, quick: bool) -> None:
        work = workloads.ALL[workload]
        self.model = work.model()
        self.parts = work.batch(quick).chunk(workloads.M)

    def step(self) -> None:
        for x in self.parts:
            workloads.loss(self.model(x)).backward()

    def gradients(self) -> dict[str, Tensor]:
        return take_gradients(self.model)
