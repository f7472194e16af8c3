"""Groups: the process groups that the replicas of a stage, and their drivers, average over."""

from __future__ import annotations

import ctypes
import functools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from rpcpipe import network, transport

if TYPE_CHECKING:
    from rpcpipe.world import Layout

__all__ = ["current", "find", "joined", "leave_early", "of_stage", "ranks_of_stage"]


@dataclass(frozen=True)
class Groups:
    """The groups of one run that this process is in.

    Attributes:
        default: the default group, if it was made for this run.
        stages: those of the stages of this process, by ``j``.
        drivers: of all drivers, for the values they average.
        steps: of all drivers, to agree on how a step ended: another one, so that the two uses
            cannot meet each other.
    """

    default: dist.ProcessGroup | None
    stages: dict[int, dist.ProcessGroup]
    drivers: dist.ProcessGroup | None
    steps: dist.ProcessGroup | None

    def own(self) -> list[dist.ProcessGroup]:
        found = [self.default, *self.stages.values(), self.drivers, self.steps]
        return [group for group in found if group is not None]


_current: Groups | None = None  # a process is in one run at a time
_somebody_left_early = threading.Event()


@contextmanager
def joined(layout: Layout, rank: int, store: dist.Store) -> Iterator[None]:
    """Be in the process groups of a run, if it has replicas; called by all its processes.

    Where the script has initialised ``torch.distributed`` itself, its default group is used, and
    is left as it is in the end.

    Args:
        rank: of this process among all of the job.
        store: used for this alone.

    Raises:
        RuntimeError: the script's default group numbers the processes in another way.
    """
    global _current
    if layout.replicas == 1:
        yield
        return
    _somebody_left_early.clear()
    _current = _make(layout, rank, store)
    try:
        yield
        reached = network.sign(store, "left")
        if rank == 0 and reached:  # it may be in this process, and others still need it
            all_left = functools.partial(_await_all_left, store, layout.world_size)
            network.ask(all_left, _somebody_left_early.is_set)
    except BaseException:
        leave_early(store)
        if transport.lost() is not None:  # else connections end now, and others hear of that
            _never_end(_current)
        raise
    finally:
        groups, _current = _current, None
        _destroy(groups)


def _make(layout: Layout, rank: int, store: dist.Store) -> Groups:
    size, owned = layout.world_size, not dist.is_initialized()
    # gloo for host tensors everywhere: the drivers' values, and what DDP exchanges about itself.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if owned:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    elif (dist.get_rank(), dist.get_world_size()) != (rank, size):
        raise RuntimeError(
            f"torch.distributed is initialised as rank {dist.get_rank()} of "
            f"{dist.get_world_size()}, and this process has role {rank} of {size} in the run: "
            "leave initialising to run(), or number the processes as it does (by host, and a "
            "pipeline's next to each other)"
        )
    drivers = [r for r in range(size) if layout.is_driver(r)]
    # Each of them by every process, in this order, whether it is a member or not.
    stages = {
        j: dist.new_group(ranks_of_stage(layout, j), backend=backend, group_desc=f"stage {j}")
        for j in range(layout.stages)
    }
    of_drivers = [dist.new_group(drivers, backend="gloo", group_desc="drivers") for _ in range(2)]
    return Groups(
        dist.group.WORLD if owned else None,
        {j: group for j, group in stages.items() if j == layout.stage(rank)},
        *(of_drivers if layout.is_driver(rank) else (None, None)),
    )


def ranks_of_stage(layout: Layout, j: int) -> list[int]:
    """The processes of stage ``j`` in all replicas."""
    return [rank for rank in range(layout.world_size) if layout.stage(rank) == j]


def _await_all_left(store: dist.Store, count: int) -> None:
    # Not by store.wait, which complains on the standard error stream of each timeout.
    while store.add("left", 0) < count and not store.check(["someone left early"]):
        time.sleep(0.05)


def leave_early(store: dist.Store) -> None:
    """Let the process that waits for all to leave know that one does not, or is gone."""
    _somebody_left_early.set()  # should it be this one, whose store may be out of reach
    with suppress(RuntimeError):  # and so has whoever held the store
        network.ask(lambda: store.set("someone left early", ""), network.soon())


def _never_end(groups: Groups) -> None:
    """Have nobody wait for what is under way in them, which may be for a host that is cut off.

    A gloo group waits for that when the last reference goes: half an hour, and be it at the end of
    the interpreter. So one reference stays.
    """
    for group in groups.own():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _destroy(groups: Groups | None) -> None:
    """Their connections end: who waits for this process in one of them hears of it."""
    if groups is None:
        return
    if groups.default is not None:
        dist.destroy_process_group()
        return
    for group in groups.own():
        dist.destroy_process_group(group)


def current() -> Groups:
    """The groups of this run.

    Raises:
        RuntimeError: it has no replicas, or is over.
    """
    if _current is None:
        raise RuntimeError(
            "there are no process groups: this run has one replica, or is over; "
            "run(fn, replicas=2) makes them"
        )
    return _current


def of_stage(j: int) -> dist.ProcessGroup:
    """The group of stage ``j`` in all replicas, in a process of that stage.

    Raises:
        RuntimeError: this is not one.
    """
    group = current().stages.get(j)
    if group is None:
        raise RuntimeError(
            f"the process group of stage {j} is in the processes of that stage and not in this "
            "one: ask for it inside of wrap_stage, or of a function given to apply_to_stage"
        )
    return group


def find(ranks: Sequence[int]) -> dist.ProcessGroup:
    """The script's own group of these ranks, the first it has made.

    Raises:
        ValueError: there is none in this process.
    """
    own = current().own()
    # There is no public way to list a process's groups (torch 2.13).
    for group in dist.distributed_c10d._world.pg_map:
        if group not in own and sorted(dist.get_process_group_ranks(group)) == sorted(ranks):
            return group
    raise ValueError(
        f"there is no process group of ranks {list(ranks)} in this process: make it in every "
        "process before run(), by torch.distributed.new_group or init_device_mesh"
    )
