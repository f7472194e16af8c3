"""Stacks: what this process waits for and what its threads do, as text."""

from __future__ import annotations

import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from typing import Protocol

__all__ = ["Busy", "Waits", "describe", "tellers"]


class Busy(Protocol):
    """Something that can say what it is doing."""

    def doing(self) -> Iterator[str]:
        """Sentences such as ``stage 2 waits for micro-batch 5 of step 41 from stage 1``."""


tellers: weakref.WeakSet[Busy] = weakref.WeakSet()


class Waits:
    """Who waits in this process for what, and since when."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._begun: dict[threading.Event, tuple[str, float]] = {}
        tellers.add(self)

    def add(self, done: threading.Event, what: str) -> None:
        self._begun[done] = what, time.monotonic()

    def discard(self, done: threading.Event) -> None:
        self._begun.pop(done, None)

    def __iter__(self) -> Iterator[threading.Event]:
        return iter(list(self._begun))

    def doing(self) -> Iterator[str]:
        for what, since in list(self._begun.values()):
            yield f"{self.name} waits for {what} since {time.monotonic() - since:.1f} s"


def describe() -> str:
    """What this process waits for, and the Python stacks of all its threads but this one."""
    lines = [f"  {sentence}\n" for teller in list(tellers) for sentence in teller.doing()]
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            stack = [f for f in traceback.extract_stack(frame) if f.filename != threading.__file__]
            lines.append(f"  thread {names.get(ident, ident)!r}:\n")
            lines += traceback.format_list(stack)
    return "".join(lines)
