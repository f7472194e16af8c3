"""World: who the processes of a job are, and which of them this one is."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from rpcpipe import groups

__all__ = ["Layout", "Process", "World"]

DRIVERS = ("auto", "shared", "dedicated")

Replicas = int | Literal["auto"]


@dataclass(frozen=True)
class Layout:
    """Which rank does what: pipelines are contiguous, the driver comes first in each.

    A rank is here the index of a role; which process of the launcher takes it, `placement` says.
    With ``dedicated`` the driver has a process of its own; otherwise it shares the first stage's.
    """

    stages: int
    replicas: int
    dedicated: bool

    @property
    def ranks_per_pipeline(self) -> int:
        return self.stages + self.dedicated

    @property
    def world_size(self) -> int:
        return self.replicas * self.ranks_per_pipeline

    def replica(self, rank: int) -> int:
        return rank // self.ranks_per_pipeline

    def stage(self, rank: int) -> int | None:
        """The stage that ``rank`` computes, ``None`` for a dedicated driver."""
        j = rank % self.ranks_per_pipeline - self.dedicated
        return None if j < 0 else j

    def is_driver(self, rank: int) -> bool:
        return rank % self.ranks_per_pipeline == 0

    @staticmethod
    def of(world_size: int, stages: int | None, replicas: Replicas, driver: str) -> Layout:
        """The layout a launcher's number of processes allows.

        Raises:
            ValueError: it allows none.
        """
        if stages is None:
            if replicas == "auto":
                raise ValueError(
                    "replicas='auto' counts pipelines of a known size: give stages=, or "
                    "rpcpipe-run --stages"
                )
            per_pipeline = world_size // replicas
            stages = max(1, per_pipeline - (driver == "dedicated"))
        for dedicated in (False, True):
            fitting = world_size // (stages + dedicated)
            layout = Layout(stages, fitting if replicas == "auto" else replicas, dedicated)
            wanted = driver in ("auto", "dedicated" if dedicated else "shared")
            if wanted and layout.world_size == world_size:
                return layout
        raise ValueError(_none_fits(world_size, stages, replicas, driver))


def _none_fits(world_size: int, stages: int, replicas: Replicas, driver: str) -> str:
    if replicas == "auto":
        count, take = 1, f"each pipeline of {stages} stages takes"
    else:
        count, take = replicas, f"{stages} stages and {replicas} replicas take"
    return (
        f"{take} {count * stages} processes (drivers share the first stage's) or "
        f"{count * (stages + 1)} (drivers have their own); the launcher started {world_size} and "
        f"driver={driver!r}: change its number of processes, stages= or driver="
    )


def check_counts(stages: int | None, replicas: Replicas, driver: str) -> None:
    """Raise ``ValueError`` for what ``run`` cannot be asked for."""
    for name, value in (("stages", stages), ("replicas", replicas)):
        if name == "replicas" and value == "auto":
            continue
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            other = " or 'auto'" if name == "replicas" else ""
            raise ValueError(f"{name}= is a whole number{other}, got {value!r}")
        if value is not None and value < 1:
            raise ValueError(f"{name}= is at least 1, got {value}")
    if driver not in DRIVERS:
        raise ValueError(f"driver= is one of {', '.join(DRIVERS)}; got {driver!r}")


@dataclass(frozen=True)
class Process:
    """What a process tells the others about itself."""

    rank: int  # its role
    host: str
    pid: int
    device: str  # where its stage computes
    threads: int  # of its stage's parallel regions
    local_rank: int = 0  # among the processes of its host

    def tell(self, store: dist.Store) -> None:
        store.set(f"process/{self.rank}", json.dumps(asdict(self)))

    @staticmethod
    def hear(store: dist.Store, rank: int) -> Process:
        """Wait for the process of this rank to tell."""
        return Process(**json.loads(store.get(f"process/{rank}")))


class World:
    """The processes of one pipeline, as its driver sees them.

    Attributes:
        stages: number of stages ``n``.
        replicas: number of pipelines that train the same model on different data.
        replica: index of this pipeline.
        is_driver: whether this process runs the training loop. True for the world that ``run``
            hands to its function, false for the one that ``wrap_stage`` is given.
    """

    def __init__(self, layout: Layout, rank: int, job: str, processes: Mapping[int, Process]):
        self.stages = layout.stages
        self.replicas = layout.replicas
        self.replica = layout.replica(rank)
        self.is_driver = layout.is_driver(rank)
        self._layout = layout
        self._job = job
        self._everybody = processes
        first = self.replica * layout.ranks_per_pipeline + layout.dedicated
        self._stage_processes = [processes[first + j] for j in range(self.stages)]
        self._driver = processes[self.replica * layout.ranks_per_pipeline]

    def device(self, j: int) -> torch.device:
        """The device stage ``j`` computes on, as its own process names it."""
        return torch.device(self.process(j).device)

    def process(self, j: int) -> Process:
        """The process of stage ``j``."""
        if not 0 <= j < self.stages:
            raise IndexError(f"stages are numbered 0 to {self.stages - 1}, got {j}")
        return self._stage_processes[j]

    def worker(self, j: int) -> str:
        """The name of stage ``j``'s process in the RPC world."""
        return worker_name(self._job, self.process(j).rank)

    def ranks(self, j: int) -> list[int]:
        """The ranks of stage ``j``'s processes in all replicas."""
        self.process(j)
        return groups.ranks_of_stage(self._layout, j)

    def data_parallel_group(self, j: int) -> dist.ProcessGroup:
        """The process group of stage ``j`` in all replicas: gloo for host tensors, nccl for GPUs.

        To be had in the processes of stage ``j``: in ``wrap_stage``, which is given a world.

        Raises:
            RuntimeError: this process is none of them, or there is one replica.
        """
        self.process(j)
        return groups.of_stage(j)

    def all_reduce(self, value: Any) -> Any:
        """The average of ``value`` over the drivers of all replicas, which all call this.

        Args:
            value: a number, or a tensor of the same shape in each. With one replica it is returned
                as it is.

        Returns:
            A ``float`` for a number; for a tensor another one on its device, of its dtype, or
            float64 if that is an integer or bool.

        Raises:
            StageLost: another driver is gone.
        """
        from rpcpipe import replicas  # which knows worlds

        return replicas.average(value, self.replicas)

    def in_stage(self) -> World:
        """This world as a stage may know it."""
        world = copy.copy(self)
        world.is_driver = False
        return world

    def hosts(self) -> list[str]:
        """Where everything runs, a line for each pipeline.

        Such as ``pipe 0: driver host-a:0, stage 0 host-a:0 cuda:0, stage 1 host-b:0 cuda:0``: the
        host, the process's index on it, and the device.
        """
        per_pipeline = len(self._everybody) // self.replicas
        pipelines = [
            [self._everybody[replica * per_pipeline + k] for k in range(per_pipeline)]
            for replica in range(self.replicas)
        ]
        return [_describe(r, found, self.stages) for r, found in enumerate(pipelines)]

    def __repr__(self) -> str:
        where = self.hosts()[self.replica]
        return f"World(stages={self.stages}, replica={self.replica}/{self.replicas}, {where})"


def _describe(replica: int, pipeline: Sequence[Process], n: int) -> str:
    places = [f"driver {pipeline[0].host}:{pipeline[0].local_rank}"]
    for j, p in enumerate(pipeline[-n:]):
        places.append(f"stage {j} {p.host}:{p.local_rank} {p.device}")
    return f"pipe {replica}: {', '.join(places)}"


def worker_name(job: str, rank: int) -> str:
    return f"{job}-{rank}"
