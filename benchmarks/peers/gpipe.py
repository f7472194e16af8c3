"""torchgpipe 0.0.7: one process, a thread for each stage, all on the CPU."""

from __future__ import annotations

import warnings

from torch import Tensor

from benchmarks import workloads
from benchmarks.harness import even
from benchmarks.peers import Peer, take_gradients


class TorchGPipe(Peer):
    def load(self, workload: str, n: int, mode: str, quick: bool) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its own imports
            from torchgpipe import GPipe

        work = workloads.ALL[workload]
        model = work.model()
        self.pipe = GPipe(
            model,
            even(len(model), n),
            devices=["cpu"] * n,
            chunks=workloads.M,
            checkpoint=mode,
        )
        self.model, self.x = model, work.batch(quick)

    def step(self) -> None:
        workloads.loss(self.pipe(self.x)).backward()

    def gradients(self) -> dict[str, Tensor]:
        return take_gradients(self.model)
