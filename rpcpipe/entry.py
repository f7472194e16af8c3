"""Entry: who is let into a job by its store, and the seats that are given out there."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from rpcpipe.placement import Arrival, Seat

__all__ = ["Badge", "enter", "let_in"]

POLL = 0.02  # seconds
LATE = 5.0  # seconds, for those who were let in to hear of a refusal and to end


@dataclass(frozen=True)
class Badge:
    """What all processes of a job have in common.

    Attributes:
        job: a digest of the job's token, so that the token itself is not to be read in the store.
        world_size: number of processes, or of what else enters.
        torch: its version, without how it was built.
        rpcpipe: its version.
    """

    job: str
    world_size: int
    torch: str
    rpcpipe: str

    @staticmethod
    def of(job: str, world_size: int) -> Badge:
        """Of a process of the job that the launcher calls ``job``.

        ``RPCPIPE_TOKEN`` tells apart jobs that the launcher calls by the same name.
        """
        import rpcpipe  # which imports run, which imports this

        token = f"{job}/{os.environ.get('RPCPIPE_TOKEN', '')}"
        digest = hashlib.sha256(token.encode()).hexdigest()[:16]
        release = str(torch.__version__).partition("+")[0]
        return Badge(digest, world_size, release, rpcpipe.__version__)

    def same_job(self, other: Badge) -> bool:
        return (self.job, self.world_size) == (other.job, other.world_size)

    def versions(self) -> str:
        return f"torch {self.torch} and rpcpipe {self.rpcpipe}"


def let_in(store: dist.Store, badge: Badge, seat: int, name: str, timeout: float) -> None:
    """Show the badge at the door; returns when this process may enter as number ``seat``.

    Args:
        name: of this process, for messages to others.

    Raises:
        RuntimeError: it may not: the store is another job's, or the seat is taken.
    """
    ours = json.dumps(asdict(badge))
    if seat == 0:  # the first one is who the others are compared with
        shown = store.compare_set("badge", "", ours).decode()
    else:
        _await(store, ["badge"], timeout, "the first process of the job")
        shown = store.get("badge").decode()
    first = Badge(**json.loads(shown))
    if not badge.same_job(first):
        token = "" if badge.job == first.job else "another job's token, and "
        raise RuntimeError(
            f"refused: the store at this address belongs to another job ({token}"
            f"{first.world_size} processes; this one's has {badge.world_size}): give each job an "
            "endpoint or port of its own"
        )
    if store.add(f"taken/{seat}", 1) > 1:
        raise RuntimeError(
            f"refused: number {seat} of {badge.world_size} in this job is taken already, and "
            f"{name} claims it again: give each job a port, and each of its nodes a rank, of its "
            "own"
        )


def enter(
    store: dist.Store,
    badge: Badge,
    arrival: Arrival,
    give_out: Callable[[list[Arrival]], list[Seat]],
    timeout: float,
) -> Seat:
    """Enter a job; returns this process's seat when all have arrived.

    Args:
        store: of this run of the job alone.
        badge: what all have in common.
        arrival: this process.
        give_out: called in the first process with all arrivals; an error is raised in all.

    Raises:
        RuntimeError: this process is refused, versions differ, or somebody did not come.
        ValueError: what ``give_out`` raised.
    """
    let_in(store, badge, arrival.rank, f"a process on {arrival.host}", timeout)
    hello = {"badge": asdict(badge), "arrival": asdict(arrival)}
    store.set(f"hello/{arrival.rank}", json.dumps(hello))
    if arrival.rank == 0:
        store.set("seats", json.dumps(_decide(store, badge, give_out, timeout)))
    _await(store, ["seats"], timeout + LATE, "the first process of the job to give out seats")
    decided = json.loads(store.get("seats"))
    if "refused" in decided:
        if arrival.rank == 0:
            _await_heard(store, badge.world_size)
        else:
            store.add("heard", 1)
        raise {"ValueError": ValueError}.get(decided["kind"], RuntimeError)(decided["refused"])
    return Seat(**decided["seats"][arrival.rank])


def _decide(
    store: dist.Store,
    badge: Badge,
    give_out: Callable[[list[Arrival]], list[Seat]],
    timeout: float,
) -> dict[str, object]:
    try:
        arrivals = _hear_all(store, badge, timeout)
        return {"seats": [asdict(seat) for seat in give_out(arrivals)]}
    except (RuntimeError, ValueError) as exc:
        return {"refused": str(exc), "kind": type(exc).__name__}


def _hear_all(store: dist.Store, badge: Badge, timeout: float) -> list[Arrival]:
    names = [f"hello/{rank}" for rank in range(badge.world_size)]
    _await(store, names, timeout, "all processes of the job")
    hellos = [json.loads(store.get(name)) for name in names]
    for hello in hellos:
        other = Badge(**hello["badge"])
        if other.versions() != badge.versions():
            raise RuntimeError(
                f"refused: host {hellos[0]['arrival']['host']} runs {badge.versions()}, host "
                f"{hello['arrival']['host']} runs {other.versions()}: install the same on all"
            )
    return [Arrival(**hello["arrival"]) for hello in hellos]


def _await(store: dist.Store, names: list[str], timeout: float, whom: str) -> None:
    """Wait in slices, which Ctrl-C can interrupt. ``store.wait`` prints when it times out."""
    deadline = time.monotonic() + timeout
    while not store.check(names):
        if time.monotonic() > deadline:
            missing = [name for name in names if not store.check([name])]
            raise RuntimeError(f"{whom} did not come within {timeout:.0f} s; missing: {missing}")
        time.sleep(POLL)


def _await_heard(store: dist.Store, world_size: int) -> None:
    """The first process may hold the store, from which the others are yet to read."""
    deadline = time.monotonic() + LATE
    while store.add("heard", 0) < world_size - 1 and time.monotonic() < deadline:
        time.sleep(POLL)
