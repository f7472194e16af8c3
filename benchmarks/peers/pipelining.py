"""torch.distributed.pipelining: ScheduleGPipe over gloo, one process a stage."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from benchmarks import workloads
from benchmarks.peers import Peer, take_gradients


class Pipelining(Peer):
    def start(self) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        address = os.environ.get("MASTER_ADDR", "127.0.0.1")
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{address}:{os.environ.get('MASTER_PORT', self.port)}",
            rank=self.rank,
            world_size=self.n,
            timeout=timedelta(minutes=30),
        )

    def load(self, workload: str, n: int, mode: str, quick: bool) -> None:
        work = workloads.ALL[workload]
        self.use(work.model(), work.batch(quick), mode)

    def use(self, model: nn.Sequential, x: Tensor, mode: str) -> None:
        m, self.part = workloads.M, workloads.partition(model, self.n, self.rank)
        self.module = workloads.Recomputing(self.part, m, mode)
        # Its first step passes messages to find out what shapes it sends.
        stage = PipelineStage(self.module, self.rank, self.n, torch.device("cpu"))
        self.x = x
        self.schedule = ScheduleGPipe(
            stage, m, loss_fn=lambda output, _: workloads.loss(output), scale_grads=False
        )

    def step(self) -> None:
        self.module.calls = 0
        given = (self.x,) if self.rank == 0 else ()
        target = self.x if self.rank == self.n - 1 else None  # it wants one; the loss does not
        losses: list[Tensor] = []
        self.schedule.step(*given, target=target, losses=losses, return_outputs=False)

    def gradients(self) -> dict[str, Tensor]:
        return take_gradients(self.part)

    def end(self) -> None:
        dist.destroy_process_group()
