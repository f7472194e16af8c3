"""Trees: nested values as torch's pytree sees them, with a short way for the plain kinds.

torch's own (2.13) is Python: some 20 us a traversal of a single tensor in a tuple, several times a
micro-batch. Tuples, lists and dicts are walked here; what else is registered with pytree, there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["map_tensors", "nbytes", "others", "register", "tensors"]

Children = Callable[[Any], tuple[Any, ...]]
Rebuild = Callable[..., Any]

_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})
_NODES: dict[type, tuple[Children, Rebuild]] = {}


def register(cls: type, children: Children, rebuild: Rebuild, name: str) -> None:
    """Make ``cls`` a node of pytrees: ``rebuild(*children(value))`` is the value again."""
    _NODES[cls] = children, rebuild
    pytree.register_pytree_node(
        cls,
        lambda value: (list(children(value)), None),
        lambda given, _: rebuild(*given),
        serialized_type_name=name,
    )


def map_tensors(fn: Callable[[Tensor], Any], value: Any) -> Any:
    """The same structure with ``fn(tensor)`` for each tensor; called in the order of `tensors`."""
    kind = type(value)
    if isinstance(value, Tensor):
        return fn(value)
    if kind in _ATOMS:
        return value
    if kind is tuple:
        return tuple([map_tensors(fn, child) for child in value])
    if kind is list:
        return [map_tensors(fn, child) for child in value]
    if kind is dict:
        return {key: map_tensors(fn, child) for key, child in value.items()}
    if kind in _NODES:
        children, rebuild = _NODES[kind]
        return rebuild(*[map_tensors(fn, child) for child in children(value)])
    return pytree.tree_map_only(Tensor, fn, value)


def tensors(value: Any) -> list[Tensor]:
    """All tensors in it, in the order of pytree's leaves."""
    found: list[Tensor] = []
    _sort(value, found, [])
    return found


def nbytes(value: Any) -> int:
    """Bytes of all tensors in it."""
    return sum(tensor.nbytes for tensor in tensors(value))


def others(value: Any) -> list[Any]:
    """All leaves that are neither tensors nor plain values."""
    found: list[Any] = []
    _sort(value, [], found)
    return found


def _sort(value: Any, found: list[Tensor], rest: list[Any]) -> None:
    kind = type(value)
    if isinstance(value, Tensor):
        found.append(value)
    elif kind in _ATOMS:
        return
    elif kind is tuple or kind is list:
        for child in value:
            _sort(child, found, rest)
    elif kind is dict:
        for child in value.values():
            _sort(child, found, rest)
    elif kind in _NODES:
        for child in _NODES[kind][0](value):
            _sort(child, found, rest)
    else:
        leaves = pytree.tree_leaves(value)
        if len(leaves) == 1 and leaves[0] is value:
            rest.append(value)
        else:
            for leaf in leaves:
                _sort(leaf, found, rest)
