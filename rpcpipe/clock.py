"""Clock: the monotonic clock of another process, told in the time of this one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Clock", "Reading", "Seen", "compare", "identity", "read"]

READINGS = 16  # the fastest round trip of these counts: what delays a message makes it no faster


class Reading(NamedTuple):
    """One round trip: the clock here when asked, there when answered, here when heard."""

    asked: float
    there: float
    heard: float


class Seen(NamedTuple):
    """How far the clock there was ahead of the one here, when it showed ``there``; seconds."""

    there: float
    ahead: float


class Clock(NamedTuple):
    """Another clock, seen at the start and at the end of a recording.

    Two quartz clocks drift apart by some microseconds a second: in between, and beyond, how far
    one is ahead changes evenly.
    """

    first: Seen
    last: Seen

    def here(self, there: float) -> float:
        """What the clock here showed when the other one showed ``there``."""
        (start, ahead), (end, later) = self
        part = (there - start) / (end - start) if end > start else 0.0
        return there - (ahead + part * (later - ahead))


def compare(readings: Sequence[Reading]) -> Seen:
    """How far a clock is ahead, by the fastest of some round trips (as NTP does).

    The error is at most half of that round trip: the answer may have been given right after the
    question, or right before it was heard.
    """
    asked, there, heard = min(readings, key=lambda reading: reading.heard - reading.asked)
    return Seen(there, there - (asked + heard) / 2)


def look(ask: Callable[[], float]) -> Seen:
    """Compare with the clock that ``ask`` tells the time of."""
    return compare([Reading(time.monotonic(), ask(), time.monotonic()) for _ in range(READINGS)])


def identity() -> str:
    """Equal in processes that share one monotonic clock: the boot, and the time namespace.

    Where the kernel does not tell, no two processes are taken to share one.
    """
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/time')}"
    return f"process {os.getpid()} {id(time)}"


def read(stage: Any) -> float:
    """The time there; called in the stage."""
    return time.monotonic()
