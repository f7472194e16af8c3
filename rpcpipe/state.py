"""State: checkpoints of other layouts, under the names of the unpartitioned module."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

__all__ = ["from_torchgpipe", "misfits"]

_PARTITION = re.compile(r"partitions\.\d+\.")
_ACCUMULATORS = ("sum", "sum_squares")  # of torchgpipe's deferred batch norm, between mini-batches


def from_torchgpipe(state: Mapping[str, Any], known: Collection[str]) -> Mapping[str, Any]:
    """The state under plain names, if it is that of a ``torchgpipe.GPipe``; as it is otherwise.

    torchgpipe (0.0.7) puts ``partitions.3.`` in front of a layer's name, wraps skippable layers in
    a ``module``, and keeps what its deferred batch norm has added up.

    Args:
        known: the plain names.
    """
    if not state or not all(map(_PARTITION.match, state)):
        return state
    plain: dict[str, Any] = {}
    for name, value in state.items():
        short = _PARTITION.sub("", name, count=1)
        short = short if short in known else _unwrapped(short, known)
        if short in known or short.rpartition(".")[2] not in _ACCUMULATORS:
            plain[short] = value
    return plain


def _unwrapped(name: str, known: Collection[str]) -> str:
    words = name.split(".")
    unwrapped = ".".join(word for word in words if word != "module")
    return unwrapped if unwrapped in known else name


Shapes = Mapping[str, tuple[int, ...] | None]  # None for what is no tensor


def misfits(given: Shapes, known: Shapes, strict: bool) -> list[str]:
    """Why a state with these shapes is not one of the model's."""
    wrong = [
        f"size mismatch for {name}: the checkpoint has {given[name]}, the model {shape}"
        for name, shape in known.items()
        if name in given and shape is not None and given[name] != shape
    ]
    missing = [name for name in known if name not in given]
    unexpected = [name for name in given if name not in known]
    if strict and (missing or unexpected):
        wrong.append(f"missing keys: {missing}; unexpected keys: {unexpected}")
    return wrong
