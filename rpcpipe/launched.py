"""Launched: what the launcher of this process has said, whichever it was."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rpcpipe.world import Replicas

__all__ = ["Launched", "Wishes", "first_host"]

T = TypeVar("T")

_PORTS = range(10000, 30000)  # below those that the kernel gives to outgoing connections


@dataclass(frozen=True)
class Launched:
    """A process among those that a launcher has started.

    Attributes:
        rank: index of the process, below ``world_size``.
        node: the host, as the launcher numbers or names it.
        local_rank: index on its host, ``None`` if the launcher does not say.
        place: of its host in the order the user has given, ``None`` for the order of their names.
        single_host: whether all processes are on one host.
        master: address of the host that has the store.
        port: of the store.
        served: whether the launcher holds the store; otherwise the process of rank 0 does.
        attempt: prefix of the keys, which are not those of another attempt in the same store.
        job: what the launcher calls the job, the same for all its processes.
    """

    rank: int
    world_size: int
    node: str | None
    local_rank: int | None
    place: int | None
    single_host: bool
    master: str
    port: int
    served: bool
    attempt: str
    job: str

    @staticmethod
    def find(env: Mapping[str, str] = os.environ) -> Launched | None:
        """What the environment says; ``None`` for a plain script."""
        if "RANK" in env and "WORLD_SIZE" in env:
            return _by_torchrun(env)
        # In a batch script itself there are the variables of the job, but none of a step.
        if "SLURM_STEP_ID" in env and int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
            return _by_srun(env)
        return None


def _by_torchrun(env: Mapping[str, str]) -> Launched:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
    if missing:
        raise ValueError(
            f"RANK and WORLD_SIZE are set, but not {' and '.join(missing)}: a launcher sets all of "
            "them; unset those two to run as a plain script"
        )
    served = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    local_size, size, master = env.get("LOCAL_WORLD_SIZE"), env["WORLD_SIZE"], env["MASTER_ADDR"]
    return Launched(
        rank=int(env["RANK"]),
        world_size=int(size),
        node=env.get("GROUP_RANK"),
        local_rank=int(env["LOCAL_RANK"]) if "LOCAL_RANK" in env else None,
        place=int(env["RPCPIPE_NODE_RANK"]) if env.get("RPCPIPE_NODE_RANK") else None,
        single_host=size == local_size if local_size else _is_loopback(master),
        master=master,
        port=int(env["MASTER_PORT"]),
        served=served,
        # Agents may disagree on the number of restarts; a store of their processes is a new one.
        attempt=env.get("TORCHELASTIC_RESTART_COUNT", "0") if served else "0",
        job=env.get("TORCHELASTIC_RUN_ID", "none"),
    )


def _by_srun(env: Mapping[str, str]) -> Launched:
    step = f"{env['SLURM_JOB_ID']}.{env['SLURM_STEP_ID']}"
    hosts = env.get("SLURM_STEP_NODELIST") or env["SLURM_NODELIST"]
    job = int(env["SLURM_JOB_ID"]) * 7 + int(env["SLURM_STEP_ID"])  # steps may run side by side
    return Launched(
        rank=int(env["SLURM_PROCID"]),
        world_size=int(env["SLURM_STEP_NUM_TASKS"]),
        node=env.get("SLURM_NODEID"),
        local_rank=int(env["SLURM_LOCALID"]),
        place=int(env.get("SLURM_NODEID", "0")),
        single_host=env.get("SLURM_STEP_NUM_NODES") == "1",
        master=env.get("MASTER_ADDR") or first_host(hosts),
        port=int(env.get("MASTER_PORT") or _PORTS[job % len(_PORTS)]),
        served=False,
        attempt=env.get("SLURM_RESTART_COUNT", "0"),
        job=step,
    )


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list such as ``gpu[003-004,7],login``."""
    head = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodelist)
    if head is None:
        raise ValueError(f"a Slurm node list begins with a host, got {nodelist!r}")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", head.group())


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True)
class Wishes:
    """What ``rpcpipe-run`` was asked for, on its way to ``run`` in the script's processes."""

    stages: int | None = None
    replicas: Replicas | None = None
    driver: str = "auto"
    layout: str = "pipe-inner"
    pin: bool = False
    share_gpu: bool = False

    def to_env(self) -> dict[str, str]:
        """The variables; those of other wishes are empty."""
        return {
            "RPCPIPE_STAGES": "" if self.stages is None else str(self.stages),
            "RPCPIPE_REPLICAS": "" if self.replicas is None else str(self.replicas),
            "RPCPIPE_DRIVER": self.driver,
            "RPCPIPE_LAYOUT": self.layout,
            "RPCPIPE_PIN": str(int(self.pin)),
            "RPCPIPE_SHARE_GPU": str(int(self.share_gpu)),
        }

    @staticmethod
    def find(env: Mapping[str, str] = os.environ) -> Wishes:
        layout = env.get("RPCPIPE_LAYOUT") or "pipe-inner"
        if layout not in ("pipe-inner", "dp-inner"):
            raise ValueError(f"RPCPIPE_LAYOUT is pipe-inner or dp-inner, got {layout!r}")
        replicas = env.get("RPCPIPE_REPLICAS")
        return Wishes(
            _count(env, "RPCPIPE_STAGES"),
            "auto" if replicas == "auto" else _count(env, "RPCPIPE_REPLICAS"),
            env.get("RPCPIPE_DRIVER") or "auto",
            layout,
            env.get("RPCPIPE_PIN", "0") not in ("", "0"),
            env.get("RPCPIPE_SHARE_GPU", "0") not in ("", "0"),
        )

    def merge(
        self, stages: int | None, replicas: Replicas, driver: str
    ) -> tuple[int | None, Replicas, str]:
        """The arguments of ``run``, where they leave it to the launcher filled in.

        Raises:
            ValueError: the script and the launcher contradict each other.
        """
        return (
            _agree("stages", stages, self.stages, [None]),
            _agree("replicas", replicas, self.replicas, [1, "auto"]),
            _agree("driver", driver, self.driver, ["auto"]),
        )


def _count(env: Mapping[str, str], name: str) -> int | None:
    value = env.get(name)
    if not value:
        return None
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"{name} is a whole number of at least 1, got {value!r}")
    return int(value)


def _agree(name: str, said: T, wished: T | None, unsaid: Sequence[T]) -> T:
    """``unsaid``: what leaves it to the other; the first of it is what nobody has to say."""
    if wished is None or wished == unsaid[0]:
        return said
    if said in unsaid or said == wished:
        return wished
    raise ValueError(
        f"the script says run({name}={said!r}) and rpcpipe-run (or RPCPIPE_{name.upper()}) says "
        f"{wished!r}: leave it to one of them"
    )
