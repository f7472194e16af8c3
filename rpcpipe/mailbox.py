"""Mailbox: where a value and the request for it meet, in either order."""

from __future__ import annotations

import pickle
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.futures import Future

from rpcpipe import transport, trees
from rpcpipe.errors import Failure
from rpcpipe.skip.namespace import Key

__all__ = ["WORTH", "Mailbox", "Name", "Parcel", "groups", "require_picklable"]

# Bytes of tensors that are worth a message of their own. One costs half a millisecond of processor
# time in each of two processes, and so do as many bytes; a link of 1 Gbit/s takes 8 ms for them.
WORTH = 2**20

Name = Key | None  # of what a micro-batch hands on: None for the parcel, or the key of a skip


@dataclass(frozen=True)
class Parcel:
    """What one stage hands to the next for one micro-batch: the arguments of its first layer.

    ``tail`` is an empty tensor that requires grad, there when nothing else does: the backward
    pass must reach every process the forward pass went through.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    tail: Tensor | None = None


trees.register(
    Parcel,
    lambda parcel: (parcel.args, parcel.kwargs, parcel.tail),
    Parcel,
    "rpcpipe.Parcel",
)


def require_picklable(value: Any) -> None:
    """Refuse here what would fail in a thread of RPC, where nobody can say whose it was.

    Raises:
        TypeError: a leaf of the pytree ``value`` cannot be pickled.
    """
    for leaf in trees.others(value):
        try:
            pickle.dumps(leaf)
        except Exception as exc:
            raise TypeError(
                "what goes from one process to another is sent by pickle, which cannot take this "
                f"{type(leaf).__name__}: {exc}; give tensors or plain values instead"
            ) from exc


def groups(sizes: Sequence[int], first: int = 0) -> dict[int, int]:
    """Micro-batches from ``first`` on, of so many bytes each, in groups worth a message.

    Returns how many there are in each, by the first of them. `Mailbox.take_several` makes the same
    groups as values come.
    """
    found: dict[int, int] = {}
    total = WORTH
    for i, nbytes in enumerate(sizes[first:], first):
        if total >= WORTH:
            start, total = i, 0
        found[start] = found.get(start, 0) + 1
        total += nbytes
    return found


class Mailbox:
    """Values by step, micro-batch and name, each put once and taken once."""

    REMEMBERED = 256  # dropped steps that a late request may still ask for

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[tuple[int, int, Name], Future[Any]] = {}
        self._dropped: OrderedDict[int, Failure] = OrderedDict()

    def take(self, step: int, i: int, name: Name = None) -> Future[Any]:
        """The future of a value. Answers a call from another process."""
        return self._meet((step, i, name))

    def take_several(self, step: int, first: int, end: int) -> Future[list[Any]]:
        """The parcels of micro-batches from ``first`` on: all up to ``end``, or a message's worth.

        Answered when the last of them is there.
        """
        several = _Several(self, step, first, end)
        several.go_on(self.take(step, first))
        return several.answer

    def put(self, step: int, i: int, name: Name, value: Any) -> None:
        future = self._meet((step, i, name))
        if not future.done():
            future.set_result(value)

    def drop(self, step: int, why: Failure) -> None:
        """Forget the step's values; requests for them, also later ones, are answered by ``why``."""
        with self._lock:
            self._dropped[step] = why
            if len(self._dropped) > self.REMEMBERED:
                self._dropped.popitem(last=False)
            futures = [self._open.pop(key) for key in list(self._open) if key[0] == step]
        for future in futures:
            if not future.done():
                future.set_result(why)

    def _meet(self, key: tuple[int, int, Name]) -> Future[Any]:
        """Whoever comes first leaves a future, whoever comes second takes it along."""
        with self._lock:
            if key[0] in self._dropped:
                return transport.completed(self._dropped[key[0]])
            future = self._open.pop(key, None)
            if future is None:
                future = self._open[key] = Future()
            return future


class _Several:
    """Parcels that are put together. Not a closure: that would keep them, and itself."""

    def __init__(self, mailbox: Mailbox, step: int, first: int, end: int) -> None:
        self.answer: Future[list[Any]] = Future()
        self._mailbox, self._step, self._first, self._end = mailbox, step, first, end
        self._values: list[Any] = []
        self._nbytes = 0

    def go_on(self, parcel: Future[Any]) -> None:
        """Add a parcel that is there, or once it is, and those that follow."""
        while parcel.done():
            self._values.append(parcel.value())
            self._nbytes += trees.nbytes(self._values[-1])
            following = self._first + len(self._values)
            if following == self._end or self._nbytes >= WORTH:
                self.answer.set_result(self._values)
                return
            parcel = self._mailbox.take(self._step, following)
        parcel.add_done_callback(self.go_on)
