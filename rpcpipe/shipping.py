"""Shipping: layers and functions on their way to a stage, refused where none could load them."""

from __future__ import annotations

import io
import os
import pickle
import sys
from types import FunctionType, SimpleNamespace
from typing import Any

import torch

__all__ = ["REFUSALS", "dump", "dumps", "load", "require_sendable"]

REFUSALS = (pickle.PicklingError, AttributeError, TypeError)


class _Pickler(pickle.Pickler):
    """Refuses classes and functions that only this process has."""

    def reducer_override(self, value: Any) -> Any:
        named = isinstance(value, (type, FunctionType)) and "<" not in value.__qualname__
        if named and value.__module__ == "__main__":  # of lambdas and the like pickle itself tells
            _require_script(value.__qualname__)
        return NotImplemented


def _require_script(name: str) -> None:
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if getattr(main, "__spec__", None) is None and (file is None or not os.path.exists(file)):
        raise pickle.PicklingError(
            f"{name} is defined in a notebook or at a prompt, from where no other process can "
            "import it"
        )


def dump(value: Any) -> bytes:
    """Pickle what a stage is to have; tensors by their storage.

    Raises:
        PicklingError, AttributeError, TypeError: it cannot be pickled, or not be loaded there.
    """
    buffer = io.BytesIO()
    torch.save(
        value, buffer, pickle_module=SimpleNamespace(**{**vars(pickle), "Pickler": _Pickler})
    )
    return buffer.getvalue()


def dumps(value: Any) -> bytes:
    """As `dump`, for what is small and sent often; ``pickle.loads`` is the inverse."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def load(data: bytes) -> Any:
    """The inverse of `dump`."""
    return torch.load(io.BytesIO(data), weights_only=False)


def require_sendable(value: Any, what: str) -> None:
    """Refuse on the driver what would fail in a thread of RPC.

    Args:
        value: a function or class that a stage is to call.
        what: whose it is, in words.

    Raises:
        TypeError: it cannot be sent to another process.
    """
    try:
        dump(value)
    except REFUSALS as exc:
        raise TypeError(
            f"{what} is sent to the stages by pickle, which cannot take it: {exc}. Define it at "
            "the top level of a file and import it; a lambda or a local function cannot be sent"
        ) from exc
