"""Randomness: the states of a process's random number generators, as plain values."""

from __future__ import annotations

import contextlib
import random
import sys
from typing import Any

import torch

__all__ = ["capture", "restore"]


def capture() -> dict[str, Any]:
    """Those of torch (CPU), Python, and NumPy if it is imported."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        state["numpy"] = (str(name), keys.tolist(), *rest)
    return state


def restore(state: dict[str, Any]) -> None:
    """Those that ``state`` has."""
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "numpy" not in state:
        return
    with contextlib.suppress(ImportError):  # then nothing draws from it
        import numpy

        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))
