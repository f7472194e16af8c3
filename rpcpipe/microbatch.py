"""Micro-batches: a mini-batch scattered along dimension 0, and gathered again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from rpcpipe import trees

__all__ = ["NoChunk", "check", "gather", "scatter", "sizes", "sources"]


@dataclass(frozen=True)
class NoChunk:
    """Marks an argument of a pipe that every micro-batch is given whole: ``pipe(x, NoChunk(w))``.

    Layers get ``value`` itself. Where it requires grad, the gradients of the micro-batches add up.
    """

    value: Any


def check(batch: Any) -> int:
    """Return the number of rows of ``batch``, a pytree with at least one tensor leaf.

    Raises:
        TypeError: there is no tensor to divide.
        ValueError: a tensor without dimensions, unequal leading sizes, or no rows.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    if not tensors:
        raise TypeError(
            "a pipe's input needs at least one tensor, which is divided along dimension 0; "
            f"got {_describe(batch)}"
        )
    shapes = [tuple(t.shape) for t in tensors]
    if any(len(shape) == 0 for shape in shapes):
        raise ValueError(
            "every input tensor is divided along dimension 0, but one has no dimensions: "
            f"shapes {shapes}; unsqueeze it, or make it part of the module"
        )
    rows = {shape[0] for shape in shapes}
    if len(rows) > 1:
        raise ValueError(
            "all input tensors must have the same leading size, since they are divided "
            f"along dimension 0 together; got shapes {shapes}"
        )
    if rows == {0}:
        raise ValueError(f"the batch has no rows: shapes {shapes}; give at least one")
    return shapes[0][0]


def sizes(rows: int, chunks: int) -> list[int]:
    """Rows of each micro-batch: ``min(rows, chunks)`` of them, differing by at most one row.

    >>> sizes(6, 4)
    [2, 2, 1, 1]
    """
    m = min(rows, chunks)
    return [rows // m + (i < rows % m) for i in range(m)]


def scatter(batch: Any, chunks: int) -> list[Any]:
    """Divide every tensor of the pytree ``batch`` along dimension 0; other leaves are repeated.

    What is marked by `NoChunk` is repeated as well, without the mark.

    Returns:
        ``min(rows, chunks)`` pytrees of the same structure. Their tensors are views.
    """
    rows = sizes(check(batch), chunks)
    if not any(isinstance(leaf, NoChunk) for leaf in trees.others(batch)):
        pieces = zip(*(tensor.split(rows) for tensor in trees.tensors(batch)), strict=True)
        return [_replaced(batch, iter(row)) for row in pieces]
    leaves, spec = pytree.tree_flatten(batch)
    columns = [_divide(leaf, rows) for leaf in leaves]
    return [pytree.tree_unflatten(row, spec) for row in zip(*columns, strict=True)]


def _replaced(batch: Any, tensors: Iterator[Tensor]) -> Any:
    return trees.map_tensors(lambda _: next(tensors), batch)


def _divide(leaf: Any, rows: list[int]) -> Sequence[Any]:
    if isinstance(leaf, Tensor):
        return leaf.split(rows)  # type: ignore[no-any-return]
    return [leaf.value if isinstance(leaf, NoChunk) else leaf] * len(rows)


def sources(batch: Any) -> Iterator[tuple[Tensor, bool]]:
    """The tensors of ``batch`` in the order of a micro-batch's, and whether each is divided."""
    for leaf in pytree.tree_leaves(batch):
        whole = isinstance(leaf, NoChunk)
        for tensor in pytree.tree_leaves(leaf.value) if whole else [leaf]:
            if isinstance(tensor, Tensor):
                yield tensor, not whole


def gather(batches: Sequence[Any]) -> Any:
    """Join the pytrees of all micro-batches: tensors are concatenated along dimension 0.

    Tensors without dimensions are stacked to shape ``(m,)``. Other leaves must be equal in all
    micro-batches and are returned once.

    Raises:
        ValueError: the structures differ, or a leaf that is not a tensor does.
    """
    flat = [pytree.tree_flatten(batch) for batch in batches]
    spec = flat[0][1]
    for i, (_, other) in enumerate(flat):
        if other != spec:
            raise ValueError(
                "every micro-batch must give the same structure; "
                f"micro-batch 0 gave {spec}, micro-batch {i} gave {other}"
            )
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return pytree.tree_unflatten([_join(list(column)) for column in columns], spec)


def _join(column: list[Any]) -> Any:
    if isinstance(column[0], Tensor):
        return torch.stack(column) if column[0].dim() == 0 else torch.cat(column)
    if any(type(leaf) is not type(column[0]) or leaf != column[0] for leaf in column):
        raise ValueError(
            "an output that is not a tensor must be the same in every micro-batch; "
            f"got {column}; return it as a tensor"
        )
    return column[0]


def _describe(batch: Any) -> str:
    return ", ".join(type(leaf).__name__ for leaf in pytree.tree_leaves(batch)) or "nothing"
