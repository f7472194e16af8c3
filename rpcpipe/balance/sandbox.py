"""A sandbox lets a module run, and leaves it exactly as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["alias", "cuda_devices", "preserved_rng", "sandbox", "storages"]


def alias(tensor: Tensor) -> Tensor:
    """A leaf on the same memory: it has no hooks, and its gradient is its own."""
    return tensor.detach()


@contextmanager
def sandbox(module: nn.Module, stand_in: Callable[[Tensor], Tensor] = alias) -> Iterator[None]:
    """Runs the module within the ``with`` on stand-ins for all its tensors.

    Afterwards, also after an exception, every attribute of every submodule (parameters, buffers,
    mode, hooks, plain values) is the object it was, lists, dicts and sets have their contents
    back, and the bytes of all tensors are what they were. Gradients and hooks of the parameters
    are never touched, since backward passes end in the stand-ins.

    Args:
        stand_in: makes a tensor's stand-in, which needs no gradient yet. The default shares its
            memory, which is copied meanwhile; the copy is as large as the module.
    """
    attributes = [(part.__dict__, dict(part.__dict__)) for part in module.modules()]
    containers = [
        (value, type_(value))
        for _, kept in attributes
        for value in kept.values()
        for type_ in (dict, list, set)
        if isinstance(value, type_)
    ]
    originals = list(_tensors([kept for _, kept in attributes] + [kept for _, kept in containers]))
    stand_ins = {id(t): _like(t, stand_in(t)) for t in originals}
    # Bytes, not tensors: tensors may overlap, and a copy by the tensor would count as a change
    # of a tensor that a graph outside has saved.
    shared = storages(originals).keys() & storages(stand_ins.values()).keys()
    copies = [(s, deepcopy(s)) for key, s in storages(originals).items() if key in shared]
    try:
        for target, kept in attributes + containers:
            _substitute(target, kept, stand_ins)
        yield
    finally:
        for target, kept in attributes + containers:
            _refill(target, kept)
        for storage, copy in copies:
            storage.copy_(copy)


def _tensors(collections: Iterable[Any]) -> Iterator[Tensor]:
    for collection in collections:
        for value in collection.values() if isinstance(collection, dict) else collection:
            if isinstance(value, Tensor):
                yield value


def _like(original: Tensor, tensor: Tensor) -> Tensor:
    """Make ``tensor`` a parameter if the original is, and let it need a gradient if that does."""
    if not isinstance(original, nn.Parameter):
        return tensor.requires_grad_(original.requires_grad)
    parameter = nn.Parameter(tensor, original.requires_grad)
    parameter.__dict__.update(original.__dict__)
    return parameter


def _substitute(target: Any, kept: Any, stand_ins: dict[int, Tensor]) -> None:
    if isinstance(target, dict):
        target.update({k: stand_ins[id(v)] for k, v in kept.items() if id(v) in stand_ins})
    elif isinstance(target, list):
        target[:] = [stand_ins.get(id(v), v) for v in kept]


def _refill(target: Any, kept: Any) -> None:
    target.clear()
    if isinstance(target, list):
        target.extend(kept)
    else:
        target.update(kept)


def storages(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """The distinct memories behind the tensors, by an identity valid while they are held."""
    found = [t.untyped_storage() for t in tensors if t.layout is torch.strided]
    return {storage._cdata: storage for storage in found}


def cuda_devices(tensors: Iterable[Tensor]) -> list[torch.device]:
    """The GPUs the tensors are on."""
    return sorted({t.device for t in tensors if t.is_cuda}, key=str)


@contextmanager
def preserved_rng(devices: list[torch.device]) -> Iterator[None]:
    """Puts the random number generators of the CPU and these GPUs back afterwards."""
    with torch.random.fork_rng([device.index for device in devices], device_type="cuda"):
        yield
