"""Slot: where one thread waits for a value that another will have."""

from __future__ import annotations

import threading
from concurrent.futures import InvalidStateError
from typing import Any, Generic, TypeVar

__all__ = ["Slot"]

T = TypeVar("T")


class Slot(Generic[T]):
    """A ``concurrent.futures.Future`` with nothing but this; it costs a tenth of one.

    There is one for each gradient and each value a micro-batch is given in each stage.
    """

    __slots__ = ("_free", "_full", "_outcome")

    def __init__(self) -> None:
        self._free = threading.Lock()  # taken by who sets the slot
        self._full = threading.Lock()  # held until it is set
        self._full.acquire()
        self._outcome: tuple[Any, BaseException | None] = (None, None)

    def set_result(self, value: T) -> None:
        self._set((value, None))

    def set_exception(self, exc: BaseException) -> None:
        self._set((None, exc))

    def _set(self, outcome: tuple[Any, BaseException | None]) -> None:
        if not self._free.acquire(blocking=False):
            raise InvalidStateError("the slot is set already")
        self._outcome = outcome
        self._full.release()

    def result(self) -> T:
        """Wait for the value; raise the exception that is there instead."""
        with self._full:
            value, exc = self._outcome
        if exc is not None:
            raise exc
        return value  # type: ignore[no-any-return]
