"""Recorder: writes down when a stage ran which task."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from rpcpipe.schedule import Task

__all__ = ["Event", "Recorder"]

KEPT = 100_000  # tasks: a recording may stay on for days, and keeps the last of them


@dataclass(frozen=True)
class Event:
    """One task as it was executed; times in seconds of the host's monotonic clock."""

    step: int
    task: Task
    start: float
    end: float


class Recorder:
    """The tasks of one stage since it was made, on the thread that computes them."""

    def __init__(self, device: torch.device) -> None:
        self._clock = _DeviceClock(device) if device.type == "cuda" else _HostClock()
        self._found: deque[tuple[int, Task, Any, Any]] = deque(maxlen=KEPT)

    @contextmanager
    def task(self, step: int, task: Task) -> Iterator[None]:
        """Note a task that is done while this is entered, unless it raises."""
        start = self._clock.now()
        yield
        self._found.append((step, task, start, self._clock.now()))

    def events(self) -> list[Event]:
        seconds = self._clock.seconds
        return [Event(step, task, seconds(a), seconds(b)) for step, task, a, b in self._found]


class _HostClock:
    def now(self) -> Any:
        return time.monotonic()

    def seconds(self, moment: Any) -> float:
        return float(moment)


class _DeviceClock(_HostClock):
    """When a GPU got to a point of its stream: the host is ahead of it, and does not wait."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._zero = self.now()
        torch.cuda.synchronize(device)
        self._at = time.monotonic()

    def now(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, moment: Any) -> float:
        moment.synchronize()
        return self._at + float(self._zero.elapsed_time(moment)) / 1e3
