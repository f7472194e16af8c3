"""Memory: what each stage holds, and the most it held since the last look."""

from __future__ import annotations

import ctypes
import resource
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from rpcpipe.local import Local
from rpcpipe.stage import Stage

__all__ = ["Memory", "StageMemory"]

MIB = 2**20
KEY = "memory"


@dataclass(frozen=True)
class StageMemory:
    """What one stage takes, in bytes."""

    stage: int
    host: str
    device: str
    parameters: int
    """Of its parameters and buffers."""
    gradients: int
    """Of its parameters' ``.grad``."""
    optimizer: int
    """Of the state of its optimizers."""
    activations: int
    """The most that was in use at once since the last look, beyond the three before and what the
    process holds without a model: activations, what is received and sent, the workspace of
    layers."""
    peak: int
    """The most memory in use at once since the last look: resident memory of the process, which
    counts code and libraries too, or what torch's allocator handed out on a GPU."""
    total: int
    """What the host or the GPU has."""


@dataclass(frozen=True)
class Memory:
    """A table of what every stage takes; ``str()`` shows it in MiB."""

    stages: list[StageMemory]

    def __str__(self) -> str:
        names = [field.name for field in fields(StageMemory)]
        rows = [[_cell(value) for value in astuple(stage)] for stage in self.stages]
        widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in [names, *rows]
        ]
        return "\n".join(
            [*lines, "MiB; activations and peak: the most at once since the last look"]
        )


def _cell(value: Any) -> str:
    return str(value) if isinstance(value, str) or value < MIB // 1024 else f"{value / MIB:.1f}"


@dataclass(frozen=True)
class _Start:
    """Where the interval since the last look began: memory in use, and what was held of it."""

    used: int
    held: int


def look(stage: Stage) -> StageMemory:
    """What there is now and was at most since the last look; the next one starts here."""
    parameters, gradients, optimizer = held = _held(stage)
    peak, start = _peak(stage.device), stage.extras[KEY]
    begin(stage)
    rest = start.used + max(0, sum(held) - start.held)
    return StageMemory(
        stage.index, socket.gethostname(), str(stage.device),
        parameters, gradients, optimizer, max(0, peak - rest), peak, _total(stage.device),
    )  # fmt: skip


def begin(stage: Stage) -> None:
    """Let a new peak begin, from what is in use now."""
    stage.extras[KEY] = _Start(_reset(stage.device), sum(_held(stage)))


def _held(stage: Stage) -> tuple[int, int, int]:
    parameters = list(stage.partition.parameters())
    optimizers = [v.optimizer for v in stage.extras.values() if isinstance(v, Local)]
    state = [optimizer.state for optimizer in optimizers]
    return (
        _bytes([*parameters, *stage.partition.buffers()]),
        _bytes(p.grad for p in parameters if p.grad is not None),
        _bytes(leaf for s in state for leaf in pytree.tree_leaves(list(s.values()))),
    )


def _bytes(leaves: Iterable[Any]) -> int:
    """Of the distinct memories behind tensors."""
    storages = {
        leaf.untyped_storage()._cdata: leaf.untyped_storage().nbytes()
        for leaf in leaves
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided
    }
    return sum(storages.values())


# ----------------------------------------------------------------- a GPU's allocator, or the kernel


def _reset(device: torch.device) -> int:
    """Start a new peak; returns what is in use."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return int(torch.cuda.memory_allocated(device))
    with suppress(OSError, AttributeError):  # glibc's: memory that is free but kept counts as used
        ctypes.CDLL(None).malloc_trim(0)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return int(psutil.Process().memory_info().rss)


def _peak(device: torch.device) -> int:
    """The most that was in use since `_reset`; since the process began, where none can be reset."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _total(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().total)
