"""Placement: which process takes which role, on what device and which cores."""

from __future__ import annotations

import itertools
import os
import re
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from rpcpipe.world import Layout

__all__ = ["Arrival", "Seat", "divide_cores", "divide_gpus", "keep_to", "quota", "roles", "seats"]


@dataclass(frozen=True)
class Arrival:
    """What a process tells of itself before it has a role.

    Attributes:
        rank: as the launcher numbers it.
        host: its host's name.
        node: what tells hosts apart that have the same name.
        local_rank: its index on the host, ``None`` where the launcher does not say.
        place: of its host in the order the user has given, if any.
        grouped: whether its script has initialised ``torch.distributed``.
        gpus: what it sees of them, in the order of its indices.
        cores: those it may run on.
        quota: how many cores' worth of time its control group may take.
        numa: the cores of each NUMA node.
    """

    rank: int
    host: str
    node: str
    local_rank: int | None = None
    place: int | None = None
    grouped: bool = False
    gpus: Sequence[str] = ()
    cores: Sequence[int] = ()
    quota: float | None = None
    numa: Sequence[Sequence[int]] = field(default=(), repr=False)

    @staticmethod
    def here(
        rank: int, node: str | None = None, local_rank: int | None = None, place: int | None = None
    ) -> Arrival:
        """This process."""
        host = socket.gethostname()
        return Arrival(
            rank,
            host,
            node or host,
            local_rank,
            place,
            grouped=dist.is_initialized(),
            gpus=_gpus(),
            cores=sorted(os.sched_getaffinity(0)),
            quota=quota(),
            numa=_numa_nodes(),
        )


@dataclass(frozen=True)
class Seat:
    """What a process is to be.

    Attributes:
        role: its index in the `Layout`.
        device: where its stage computes.
        cores: those it keeps to, ``None`` to leave that to the kernel.
        threads: of its stage's parallel regions.
    """

    role: int
    device: str
    cores: list[int] | None
    threads: int


def seats(
    arrivals: Sequence[Arrival],
    layout: Layout,
    inner: str = "pipe-inner",
    pin: bool = False,
    share_gpu: bool = False,
) -> tuple[list[Seat], list[str]]:
    """The seat of each rank, and warnings.

    Args:
        arrivals: one of each rank, in this order.
        inner: what shares a host first: a pipeline's stages (``"pipe-inner"``), or a stage's
            replicas (``"dp-inner"``).
        pin: whether stages keep to cores of their own.
        share_gpu: whether stages may share a GPU.

    Raises:
        ValueError: a host has fewer GPUs than stages.
    """
    role_of = roles(arrivals, layout, inner)
    found: dict[int, Seat] = {}
    warnings = []
    for host in _by_node(arrivals):
        stages = [a for a in host if layout.stage(role_of[a.rank]) is not None]
        gpus = divide_gpus(stages, share_gpu)
        cores, warning = divide_cores(stages) if pin else (None, None)
        warnings += [warning] if warning else []
        threads = _threads(stages, cores)
        for k, a in enumerate(stages):
            device = "cpu" if gpus[k] is None else f"cuda:{gpus[k]}"
            found[a.rank] = Seat(role_of[a.rank], device, cores[k] if cores else None, threads[k])
        for a in host:  # a driver of its own computes little, and where it likes
            found.setdefault(a.rank, Seat(role_of[a.rank], "cpu", None, len(a.cores) or 1))
    return [found[a.rank] for a in arrivals], warnings


# --------------------------------------------------------------------------------------- roles


def roles(arrivals: Sequence[Arrival], layout: Layout, inner: str = "pipe-inner") -> list[int]:
    """The role of each rank, by host and local rank, whatever ranks a rendezvous has given.

    Hosts are in the order the user has given, or else in that of their names. As many pipelines as
    possible are on one host each (with ``"dp-inner"``: as many stages with all their replicas);
    what remains is divided in order.

    A script that has made process groups before has made them by the launcher's ranks; those are
    kept then.
    """
    if any(a.grouped for a in arrivals):
        return list(range(len(arrivals)))
    pipe_inner = inner == "pipe-inner"
    per_pipeline, replicas = layout.ranks_per_pipeline, layout.replicas
    size = per_pipeline if pipe_inner else replicas
    found = {}
    for u, unit in enumerate(_units(_by_node(arrivals), size)):
        for k, a in enumerate(unit):
            replica, slot = (u, k) if pipe_inner else (k, u)
            found[a.rank] = replica * per_pipeline + slot
    return [found[a.rank] for a in arrivals]


def _by_node(arrivals: Iterable[Arrival]) -> list[list[Arrival]]:
    """The processes of each host in the order of their local ranks; hosts in their order.

    Hosts of the same name keep the order in which the launcher numbers them.
    """
    hosts: dict[tuple[str, str], list[Arrival]] = {}
    for a in arrivals:
        hosts.setdefault((a.host, a.node), []).append(a)
    for host in hosts.values():
        host.sort(key=lambda a: (a.rank if a.local_rank is None else a.local_rank, a.rank))
    return sorted(hosts.values(), key=_position)


def _position(host: list[Arrival]) -> tuple[int, list[tuple[int, str]], list[tuple[int, str]]]:
    first = host[0]
    return first.place or 0, _natural(first.host), _natural(first.node)


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts ``host-9`` before ``host-10``."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def _units(hosts: list[list[Arrival]], size: int) -> list[list[Arrival]]:
    whole, rest = [], []
    for host in hosts:
        cut = len(host) - len(host) % size
        whole += [host[k : k + size] for k in range(0, cut, size)]
        rest += host[cut:]
    order = {a.rank: k for k, a in enumerate(itertools.chain(*hosts))}
    units = whole + [rest[k : k + size] for k in range(0, len(rest), size)]
    return sorted(units, key=lambda unit: order[unit[0].rank])


# ------------------------------------------------------------------------------------- devices


def divide_gpus(stages: Sequence[Arrival], share: bool) -> list[int | None]:
    """The GPU of each stage of a host, by the index its own process knows it by.

    Raises:
        ValueError: there are fewer than stages, and ``share`` is not set.
    """
    uses: dict[str, int] = {}
    found: list[int | None] = []
    for a in stages:
        if not a.gpus:
            found.append(None)
            continue
        gpu = min(a.gpus, key=lambda g: uses.get(g, 0))  # the first of those least used
        if uses.get(gpu) and not share:
            seen = sorted({g for b in stages for g in b.gpus})
            raise ValueError(
                f"host {a.host} has {len(stages)} stages and {len(seen)} visible GPUs "
                f"({', '.join(seen)}): start fewer processes there, or let stages share a GPU by "
                "--share-gpu (RPCPIPE_SHARE_GPU=1)"
            )
        uses[gpu] = uses.get(gpu, 0) + 1
        found.append(list(a.gpus).index(gpu))
    return found


def _gpus() -> list[str]:
    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(k) for k in range(count)]
    return [name.strip() for name in visible.split(",")][:count]


# --------------------------------------------------------------------------------------- cores


def divide_cores(stages: Sequence[Arrival]) -> tuple[list[list[int]] | None, str | None]:
    """Cores for each stage of a host, disjoint; ``None`` to leave them, and what to warn of.

    Where a launcher has given each process cores of its own, these are kept.
    """
    if not stages:
        return None, None
    allowed = [frozenset(a.cores) for a in stages]
    if len(stages) > 1 and len(frozenset().union(*allowed)) == sum(map(len, allowed)):
        return [sorted(cores) for cores in allowed], None
    if len(set(allowed)) > 1:
        return None, f"stages on host {stages[0].host} are not pinned: their cores overlap partly"
    first = stages[0]
    if len(stages) > min(len(first.cores), first.quota or len(first.cores)):
        quota = "" if first.quota is None else f" and a quota of {first.quota:g}"
        return None, (
            f"host {first.host} has {len(stages)} stages for {len(first.cores)} cores{quota}: they "
            "take turns and are not pinned; start fewer processes there, or more hosts"
        )
    return _shares(_in_numa_order(first), len(stages)), None


def _in_numa_order(arrival: Arrival) -> list[list[int]]:
    allowed = set(arrival.cores)
    nodes = [[core for core in node if core in allowed] for node in arrival.numa]
    known = set(itertools.chain(*nodes))
    return [node for node in (*nodes, sorted(allowed - known)) if node]


def _shares(nodes: list[list[int]], count: int) -> list[list[int]]:
    """``count`` disjoint shares; none reaches over two NUMA nodes if there are enough for that."""
    if count < len(nodes):
        cuts = [k * len(nodes) // count for k in range(count + 1)]
        return [list(itertools.chain(*nodes[a:b])) for a, b in itertools.pairwise(cuts)]
    counts = [1] * len(nodes)
    for _ in range(count - len(nodes)):  # to the node that has most for each
        counts[max(range(len(nodes)), key=lambda k: len(nodes[k]) / (counts[k] + 1))] += 1
    found = []
    for node, parts in zip(nodes, counts, strict=True):
        cuts = [k * len(node) // parts for k in range(parts + 1)]
        found += [node[a:b] for a, b in itertools.pairwise(cuts)]
    return found


def _threads(stages: Sequence[Arrival], cores: list[list[int]] | None) -> list[int]:
    """As many as a stage has cores, or as its part of all."""
    found = []
    for k, a in enumerate(stages):
        own = len(cores[k]) if cores else len(a.cores) // len(stages)
        quota = own if a.quota is None else int(a.quota / len(stages))
        found.append(max(1, min(own, quota)))
    return found


def quota(root: Path = Path("/")) -> float | None:
    """The least limit, in cores, of the control groups this process is in (cgroup v2 and v1).

    Args:
        root: where ``proc`` and ``sys`` are mounted.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # a kernel without
        return None
    limits: list[float] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            limits += _limits(root / "sys/fs/cgroup", path, "cpu.max")
        elif "cpu" in controllers.split(","):
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            limits += _limits(root / "sys/fs/cgroup/cpu", path, *names)
    return min(limits, default=None)


def _limits(mount: Path, path: str, *names: str) -> Iterator[float]:
    """The limits of a group and of those around it.

    A container may see its own group as the top of the tree, and still be told the path by which
    the host knows it: what is not there is passed over.
    """
    group = mount / path.lstrip("/")
    for folder in (group, *group.parents):
        with suppress(OSError):
            words = [word for name in names for word in (folder / name).read_text().split()]
            if words[0].isdecimal():  # neither max nor -1
                yield int(words[0]) / int(words[1])
        if folder == mount:
            return


def _numa_nodes() -> list[list[int]]:
    nodes = Path("/sys/devices/system/node").glob("node[0-9]*/cpulist")
    ordered = sorted(nodes, key=lambda path: int(path.parent.name.removeprefix("node")))
    return [_core_list(path.read_text()) for path in ordered]


def _core_list(text: str) -> list[int]:
    """``0-3,8`` as the kernel writes it."""
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def keep_to(cores: Sequence[int]) -> None:
    """Have all threads of this process run on these cores only, and those it starts."""
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)
