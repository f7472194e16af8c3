"""Loss: what the last stage computes of its outputs and their targets, and what each part weighs.

The loss of a mini-batch is put together from those of its micro-batches on the driver::

    mean:  sum(w[i] * l[i]) / sum(w)        sum:  sum(l[i])

``w[i]`` is what ``l[i]`` has divided by: where every row counts the same, the number of rows.
"""

from __future__ import annotations

import functools
import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rpcpipe import shipping, trees

__all__ = ["TARGETS", "Loss", "LossFailed", "combine", "reduction_of", "shares"]

TARGETS = (None, "targets")  # the name under which the last stage takes them from the driver

Weight = Callable[[Any], Any]


class LossFailed(Exception):
    """The loss function raised the exception that is the cause of this one."""


@dataclass(frozen=True)
class Loss:
    """A loss function on its way to the last stage.

    Attributes:
        blob: the pickled function.
        empty: the micro-batches that weigh nothing, and so contribute nothing: their mean may
            be 0 / 0, of which not even the gradient times 0 is 0.
    """

    blob: bytes
    empty: frozenset[int]

    @staticmethod
    def pack(fn: Callable[..., Any], parts: Sequence[float]) -> Loss:
        empty = frozenset(i for i, part in enumerate(parts) if part == 0)
        return Loss(_dump(fn), empty)

    def unpack(self, device: torch.device) -> Callable[..., Any]:
        """The function, its tensors on ``device``."""
        return _moved(pickle.loads(self.blob), device)  # type: ignore[no-any-return]

    def call(self, fn: Callable[..., Any], i: int, output: Any, targets: Any) -> tuple[Any, ...]:
        """``(loss,)`` of micro-batch ``i``, or ``(loss, aux)`` if that is what ``fn`` returns."""
        try:
            value = fn(output, targets)
            loss, *aux = value if isinstance(value, tuple) else (value,)
            _require_scalar(loss, len(aux))
        except BaseException as exc:
            raise LossFailed from exc
        if i in self.empty:
            loss = torch.zeros_like(loss)
        return loss, *trees.map_tensors(Tensor.detach, aux)


def _dump(fn: Callable[..., Any]) -> bytes:
    if not callable(fn):
        raise TypeError(f"loss_fn is called with (output, targets), got {type(fn).__name__}")
    if isinstance(fn, nn.Module) and any(p.requires_grad for p in fn.parameters()):
        raise ValueError(
            f"loss_fn {type(fn).__name__} has parameters that require grad, and no optimizer: the "
            "last stage gets a copy for each step. Make it part of the pipe's last layer, or "
            "freeze it by requires_grad_(False)"
        )
    try:
        return shipping.dumps(fn)
    except shipping.REFUSALS as exc:
        raise TypeError(
            f"loss_fn runs in the last stage and is sent there by pickle, which cannot take it: "
            f"{exc}. Give a function defined at the top level of a file, functools.partial of "
            "one, or a module; a lambda cannot be sent"
        ) from exc


def _moved(fn: Any, device: torch.device) -> Any:
    if isinstance(fn, nn.Module):
        return fn.to(device)
    if isinstance(fn, functools.partial):
        args, kwargs = trees.map_tensors(lambda t: t.to(device), (fn.args, fn.keywords))
        return functools.partial(fn.func, *args, **kwargs)
    return fn


def _require_scalar(loss: Any, extras: int) -> None:
    if isinstance(loss, Tensor) and loss.dim() == 0 and loss.is_floating_point() and extras <= 1:
        return
    given = type(loss).__name__
    if isinstance(loss, Tensor):
        given = f"a tensor of shape {tuple(loss.shape)} and type {loss.dtype}"
    raise TypeError(
        "loss_fn returns the loss, a floating point tensor without dimensions, or (loss, aux); "
        f"got {given}{f' and {extras} other values' if extras else ''}: reduce it, by mean() for "
        "example, and put all else into one aux"
    )


# -------------------------------------------------------------------------------- its parts


def reduction_of(fn: Callable[..., Any], reduction: str | None) -> str:
    """What was given, or else what ``fn`` says itself; ``"mean"`` if it says nothing.

    Raises:
        ValueError: it is neither ``"mean"`` nor ``"sum"``.
    """
    found = _option(fn, "reduction", None) if reduction is None else reduction
    found = "mean" if found in (None, "batchmean") else found
    if found not in ("mean", "sum"):
        raise ValueError(
            "the loss of a mini-batch is put together from those of its micro-batches, which are "
            f'means or sums: reduction= is "mean" or "sum", got {found!r}'
        )
    return str(found)


def shares(
    fn: Callable[..., Any], targets: Sequence[Any], rows: Sequence[int], weight: Weight | None
) -> list[float]:
    """How much of a mean each micro-batch makes up; they add up to 1.

    Args:
        targets: of each micro-batch.
        rows: their number in each micro-batch.
        weight: the caller's, of the targets.

    Raises:
        ValueError: a weight is negative, infinite or not a number.
    """
    if weight is None:
        weight = _built_in(fn)
    weights = list(map(float, rows if weight is None else map(weight, targets)))
    if any(not math.isfinite(w) or w < 0 for w in weights):
        raise ValueError(f"weight(targets) is a finite number of at least 0, got {weights}")
    total = math.fsum(weights)
    # Nothing counts in the whole mini-batch: 0 / 0, as without a pipe.
    return [w / total if total else math.nan for w in weights]


def combine(losses: Tensor, parts: Sequence[float] | None) -> Tensor:
    """The loss of the mini-batch from those of its micro-batches.

    Args:
        losses: shape ``(m,)``.
        parts: each one's share of a mean; ``None`` for a sum.
    """
    exact = losses.to(torch.promote_types(losses.dtype, torch.float32))
    if parts is not None:
        exact = exact * torch.tensor(parts, dtype=exact.dtype)
    return exact.sum().to(losses.dtype)


def _built_in(fn: Callable[..., Any]) -> Weight | None:
    """What torch's own losses divide a mean by, where that is not the number of rows."""
    function = fn.func if isinstance(fn, functools.partial) else fn
    of_classes = isinstance(fn, (nn.CrossEntropyLoss, nn.NLLLoss)) or function in (
        F.cross_entropy,
        F.nll_loss,
    )
    if not of_classes:
        return None
    weight = _option(fn, "weight", None)
    return functools.partial(_class_weights, weight, _option(fn, "ignore_index", -100))


def _class_weights(weight: Tensor | None, ignore_index: int, targets: Tensor) -> Any:
    if targets.is_floating_point():  # class probabilities: each row counts the same
        return len(targets)
    counted = targets != ignore_index
    if weight is None:
        return counted.sum()
    return weight.detach().double()[targets[counted].to(weight.device)].sum()


def _option(fn: Any, name: str, default: Any) -> Any:
    if isinstance(fn, functools.partial):
        return fn.keywords.get(name, default)
    return getattr(fn, name, default) if isinstance(fn, nn.Module) else default
