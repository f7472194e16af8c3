"""Stage-local checkpointing: what a second forward pass needs to repeat the first exactly."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

__all__ = ["AutocastState", "RngState", "derive", "is_checkpointing", "is_recomputing", "phase"]


class _Phase(threading.local):
    checkpointing = False
    recomputing = False


_phase = _Phase()


def is_checkpointing() -> bool:
    """Whether this forward pass keeps nothing and will be run again before its backward pass.

    For use inside a layer's ``forward``. False outside a pipe.
    """
    return _phase.checkpointing


def is_recomputing() -> bool:
    """Whether this forward pass repeats an earlier one for the backward pass.

    For use inside a layer's ``forward``, to skip side effects such as counting. False outside a
    pipe.
    """
    return _phase.recomputing


@contextmanager
def phase(*, checkpointing: bool = False, recomputing: bool = False) -> Iterator[None]:
    before = _phase.checkpointing, _phase.recomputing
    _phase.checkpointing, _phase.recomputing = checkpointing, recomputing
    try:
        yield
    finally:
        _phase.checkpointing, _phase.recomputing = before


@dataclass(frozen=True)
class RngState:
    """The state of the random number generators a layer on ``device`` draws from."""

    cpu: torch.Tensor
    device: torch.device
    accelerator: torch.Tensor | None

    @staticmethod
    def capture(device: torch.device) -> RngState:
        on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return RngState(torch.get_rng_state(), device, on_device)

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.accelerator is not None:
            torch.cuda.set_rng_state(self.accelerator, self.device)


def derive(seed: int, *numbers: int) -> int:
    """Another seed for each sequence of numbers; 64-bit mixing after SplitMix64."""
    state = seed % 2**64
    for number in numbers:
        state = (state + (number + 1) * 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
        state ^= state >> 31
    return state % 2**63


@dataclass(frozen=True)
class AutocastState:
    """The autocast settings of a thread, to be entered on another one or a second time."""

    settings: tuple[tuple[str, bool, torch.dtype], ...]
    cache: bool

    @staticmethod
    def capture(devices: tuple[str, ...] = ("cpu", "cuda")) -> AutocastState:
        settings = tuple(
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in devices
        )
        return AutocastState(settings, torch.is_autocast_cache_enabled())

    @contextmanager
    def enter(self) -> Iterator[None]:
        with ExitStack() as stack:
            for device, enabled, dtype in self.settings:
                if enabled != torch.is_autocast_enabled(device) or enabled:
                    stack.enter_context(
                        torch.autocast(
                            device, dtype=dtype, enabled=enabled, cache_enabled=self.cache
                        )
                    )
            yield
