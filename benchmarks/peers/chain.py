"""The plain RPC pipeline: RRefs from stage to stage, to_here, and distributed autograd.

In the style of PyTorch's tutorial on distributed pipeline parallelism with RPC: a master sends
each micro-batch along the stages, and concatenates what the last one returns. Kinder than the
original in one thing: transports that do not poll, since its idle processes would each burn a
core while another has its turn.
"""

from __future__ import annotations

import threading
import time
import warnings
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import Tensor, nn

from benchmarks import workloads
from benchmarks.peers import Peer


class Shard:
    """One stage."""

    def __init__(self, workload: str, n: int, j: int, mode: str) -> None:
        part = workloads.partition(workloads.ALL[workload].model(), n, j)
        self.part: nn.Module = part
        self.called = workloads.Recomputing(part, workloads.M, mode)
        self.lock = threading.Lock()  # as the tutorial: one micro-batch at a time

    def forward(self, x: Any) -> Tensor:
        value = x.to_here()
        with self.lock:
            return self.called(value)  # type: ignore[no-any-return]

    def gradients(self, context: int) -> dict[str, Tensor]:
        names = {parameter: name for name, parameter in self.part.named_parameters()}
        return {names[p]: g for p, g in dist_autograd.get_gradients(context).items() if p in names}


class Chain(Peer):
    processes = 2  # a master beside the stages

    def start(self) -> None:
        options: dict[str, Any] = {
            "num_worker_threads": 32,
            "init_method": f"tcp://127.0.0.1:{self.port}",
            "_transports": ["uv"],
            "_channels": ["cma", "basic"],
        }
        torch.set_num_interop_threads(16)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch 2.13's own (pytorch issue 149393)
            rpc.init_rpc(
                f"chain-{self.rank}",
                rank=self.rank,
                world_size=self.n,
                rpc_backend_options=rpc.TensorPipeRpcBackendOptions(**options),
            )

    def load(self, workload: str, n: int, mode: str, quick: bool) -> None:
        if self.rank:
            return
        self.x = workloads.ALL[workload].batch(quick)
        self.shards = [
            rpc.remote(f"chain-{1 + j}", Shard, args=(workload, n, j, mode)) for j in range(n)
        ]
        self.step()  # in the first backward pass of a process torch (2.13) loses gradients

    def time(self) -> float:
        return super().time() if self.rank == 0 else 0.0

    def _run(self, context: int) -> None:
        waiting = []
        for part in self.x.chunk(workloads.M):
            value = rpc.RRef(part)
            for shard in self.shards[:-1]:
                value = shard.remote().forward(value)
            waiting.append(self.shards[-1].rpc_async().forward(value))
        outputs = torch.cat([answer.wait() for answer in waiting])
        dist_autograd.backward(context, [workloads.loss(outputs)])

    def step(self) -> None:
        with dist_autograd.context() as context:
            self._run(context)

    def gradients(self) -> dict[str, Tensor]:
        if self.rank:
            return {}
        with dist_autograd.context() as context:
            self._run(context)
            return self._settled(context)

    def _settled(self, context: int) -> dict[str, Tensor]:
        """The gradients once they change no more.

        In torch 2.13 the first steps of this peer have had none, or not all of them, when its
        backward pass returned, for a cause we do not know. A step of it may be timed too short.
        """
        before: dict[str, Tensor] = {}
        for _ in range(20):
            time.sleep(0.5)
            each = [shard.rpc_sync().gradients(context) for shard in self.shards]
            found = {name: gradient for stage in each for name, gradient in stage.items()}
            if found and all(k in before and torch.equal(found[k], before[k]) for k in found):
                break
            before = found
        return found

    def end(self) -> None:
        rpc.shutdown(graceful=False)
