"""Finite: finding the first value that is none of the numbers a model computes with."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

__all__ = ["require_finite"]


def require_finite(named: Iterable[tuple[str, Tensor | None]]) -> None:
    """Raise for the first tensor that holds a NaN or an infinity.

    Raises:
        FloatingPointError: names the tensor, and tells how many of its values are not finite.
    """
    for name, tensor in named:
        if tensor is None or not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        bad = int((~tensor.detach().isfinite()).sum())
        if bad:
            raise FloatingPointError(
                f"{bad} of {tensor.numel()} values of {name} are not finite "
                f"(shape {tuple(tensor.shape)}, {tensor.dtype})"
            )
