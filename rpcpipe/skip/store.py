"""A skip store keeps what one micro-batch has stashed and not yet popped."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from rpcpipe.skip.namespace import Key

__all__ = ["SkipStore", "current_store", "use_store"]


class SkipStore:
    """The skips of one micro-batch in one stage, each stashed once and popped once.

    Args:
        imported: what earlier stages stashed for this one to pop.
    """

    def __init__(self, imported: Mapping[Key, Tensor | None] | None = None) -> None:
        self._values: dict[Key, Tensor | None] = dict(imported or {})

    def save(self, key: Key, value: Tensor | None) -> None:
        """Keeps ``value`` until it is loaded.

        Raises:
            RuntimeError: a value of this key is still here.
        """
        if key in self._values:
            raise RuntimeError(
                f"'{key[1]}' has been stashed again before it was popped; "
                "isolate one of the two by a namespace"
            )
        self._values[key] = value

    def load(self, key: Key) -> Tensor | None:
        """Returns the value of ``key`` and forgets it.

        Raises:
            KeyError: nothing was saved under ``key``.
        """
        return self._values.pop(key)

    def take(self, key: Key) -> Tensor | None:
        """Like :meth:`load`, for the runtime that sends the value to the stage that pops it.

        Raises:
            RuntimeError: no layer of this stage stashed it.
        """
        if key not in self._values:
            raise RuntimeError(f"'{key[1]}' must leave this stage but has not been stashed in it")
        return self._values.pop(key)

    def require_empty(self) -> None:
        """Checks, at the end of a micro-batch, that every value went somewhere.

        Raises:
            RuntimeError: names what is left.
        """
        if self._values:
            names = ", ".join(sorted(f"'{name}'" for _, name in self._values))
            raise RuntimeError(f"{names} stashed or imported but not popped in this stage")

    def __len__(self) -> int:
        return len(self._values)


class _UnpartitionedStore(SkipStore):
    """The store of a thread that has set none: a failed pass may have left values behind."""

    def save(self, key: Key, value: Tensor | None) -> None:
        self._values[key] = value


class _Current(threading.local):
    def __init__(self) -> None:
        self.store: SkipStore = _UnpartitionedStore()


_current = _Current()


def current_store() -> SkipStore:
    """The store that skippable layers on this thread use now."""
    return _current.store


@contextmanager
def use_store(store: SkipStore) -> Iterator[SkipStore]:
    """Makes ``store`` the current one on this thread within the ``with``."""
    previous, _current.store = _current.store, store
    try:
        yield store
    finally:
        _current.store = previous
