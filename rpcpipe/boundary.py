"""Boundaries: the autograd functions where a mini-batch's graph enters and leaves a process.

Distributed autograd carries gradients between processes and knows nothing of a stage's own
graph. Each stage adds two nodes a micro-batch; the arrows are the backward pass:

                 (1) gradients of the outputs                      (3) gradients of the inputs
    stage j+1 ───▶ SendRpc(i) ──▶ Arrive(i) ───────▶ Depart(i) ──▶ RecvRpc(i) ───▶ stage j-1
                                     ┊                   ┊▲
                                     ┊ (2) compute thread: B(i)
                                     └┄┄┄┄┄┄┄┄┄┄▶ ┄┄┄┄┄┄┄┄┘
    Depart(i+1) ──── token ────▶ Depart(i)

(1) Arrive hands the gradients over and is done: nothing blocks while they come in any order.
(2) The compute thread runs the local backward passes in the order of its program.
(3) Depart waits for its micro-batch and returns the gradients of what was received. The token
    runs through all micro-batches (the paper's fork/join dependency, section 3.2), so that of a
    mini-batch only one Depart at a time can wait, and so occupy one of the engine's threads.

Distributed autograd sends zeros where there is no gradient, and an optimizer does not do the same
with zeros as with ``None`` (weight decay, momentum). So "none" travels as a NaN of its own, and
is ``None`` again at its destination: see `mark`.

Every tensor received with a gradient passes through Depart and every micro-batch is on the
token's chain; hence every send takes part in the backward pass, whatever the loss used. FAST mode
waits for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rpcpipe import transport

__all__ = [
    "Arrivals",
    "Departures",
    "alias",
    "copy",
    "deliver",
    "enter",
    "first_token",
    "leave",
    "mark",
    "received",
    "root",
    "tie",
    "unmark",
]

Gradients = Sequence[Tensor | None]


class Arrivals(Protocol):
    """Where a boundary hands gradients over."""

    def arrive(self, i: int, gradients: Gradients) -> None:
        """Take the gradients of micro-batch ``i``'s outputs."""


class Departures(Protocol):
    """Where a stage's boundary gets gradients back."""

    def depart(self, i: int) -> Gradients | None:
        """Wait for the gradients of what ``enter`` was given for micro-batch ``i``, if any."""


def first_token() -> Tensor:
    """The token in front of the first micro-batch."""
    return torch.zeros(0, requires_grad=True)


def enter(run: Departures, i: int, token: Tensor, entering: Sequence[Tensor]) -> Tensor:
    """Put a ``Depart`` behind the tensors micro-batch ``i`` was given; return its token.

    Args:
        token: the one of micro-batch ``i - 1``.
        entering: received tensors that require grad.
    """
    return _Depart.apply(run, i, token, *entering)  # type: ignore[no-any-return, no-untyped-call]


def leave(
    run: Arrivals, i: int, token: Tensor, outputs: Sequence[Tensor], differentiable: Sequence[bool]
) -> tuple[Tensor, ...]:
    """Put an ``Arrive`` behind the outputs of micro-batch ``i``; return them, ready to be sent.

    The driver's are the micro-batches it sends.
    """
    return _Arrive.apply(run, i, tuple(differentiable), token, *outputs)  # type: ignore[no-any-return, no-untyped-call]


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Departures, i: int, token: Tensor, *entering: Tensor) -> Tensor:
        ctx.run, ctx.i, ctx.like = run, i, [(t.shape, t.dtype) for t in entering]
        ctx.set_materialize_grads(False)
        return token.new_zeros(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor | None) -> Any:
        gradients = ctx.run.depart(ctx.i)
        if gradients is None:
            gradients = [None] * len(ctx.like)
        return None, None, None, *map(mark, gradients, *zip(*ctx.like, strict=True))


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        run: Arrivals,
        i: int,
        differentiable: tuple[bool, ...],
        token: Tensor,
        *outputs: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.run, ctx.i, ctx.n = run, i, len(outputs)
        ctx.set_materialize_grads(False)
        # Detached and not returned as they are: the graph may not hold on to what it is sent.
        outputs = tuple(output.detach() for output in outputs)
        fixed = [out for out, yes in zip(outputs, differentiable, strict=True) if not yes]
        ctx.mark_non_differentiable(*fixed)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.run.arrive(ctx.i, [unmark(gradient) for gradient in gradients])
        return None, None, None, None, *[None] * ctx.n


def deliver(token: Tensor, parameters: Sequence[Tensor], take: Callable[[], Gradients]) -> Tensor:
    """A node that gives ``parameters`` their gradients by way of autograd; returns its token.

    Args:
        token: an empty tensor that requires grad.
        take: called in the backward pass; returns the gradients.
    """
    return _Deliver.apply(take, token, *parameters)  # type: ignore[no-any-return, no-untyped-call]


class _Deliver(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, take: Callable[[], Gradients], token: Tensor, *parameters: Tensor
    ) -> Tensor:
        ctx.take = take
        return token.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token: Tensor) -> Any:
        return None, token, *ctx.take()


def tie(
    compute: Callable[[], tuple[Tensor, ...]],
    spread: Callable[[Gradients], Gradients],
    differentiable: Sequence[bool],
    ends: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """One node for the whole mini-batch: results computed from ``ends``, all or none of which
    take part in the backward pass.

    Args:
        compute: returns the results.
        spread: called in the backward pass with their gradients; returns those of ``ends``.
        differentiable: for each result, whether a gradient can reach it.
        ends: tensors that require grad.
    """
    return _Tie.apply(compute, spread, tuple(differentiable), *ends)  # type: ignore[no-any-return, no-untyped-call]


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        compute: Callable[[], tuple[Tensor, ...]],
        spread: Callable[[Gradients], Gradients],
        differentiable: tuple[bool, ...],
        *ends: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.spread = spread
        ctx.set_materialize_grads(False)
        results = compute()
        fixed = [r for r, yes in zip(results, differentiable, strict=True) if not yes]
        ctx.mark_non_differentiable(*fixed)
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return None, None, None, *ctx.spread(gradients)


def root(ends: Sequence[Tensor], take: Callable[[], Gradients]) -> Tensor:
    """A scalar to start a distributed backward pass from, which gives ``ends`` their gradients.

    Args:
        take: called in the backward pass; returns the gradients.
    """
    like = [(end.shape, end.dtype) for end in ends]

    def spread(_: Gradients) -> Gradients:
        return [mark(g, *kind) for g, kind in zip(take(), like, strict=True)]

    with torch.enable_grad():  # also from within another backward pass
        (scalar,) = tie(lambda: (torch.zeros(()),), spread, (True,), ends)
    return scalar


def received(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Those of the tensors from another process that a gradient goes back through."""
    found = [t for t in tensors if t.requires_grad]
    transport.prioritize(found)
    return found


_NONE = {  # quiet NaNs with a payload that no arithmetic gives
    torch.float64: (torch.int64, 0x7FF8_0000_0000_DEAD),
    torch.float32: (torch.int32, 0x7FC0_DEAD),
    torch.float16: (torch.int16, 0x7EAD),
    torch.bfloat16: (torch.int16, 0x7FED),
}


def mark(gradient: Tensor | None, shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
    """The gradient, or for ``None`` what stands for it on its way to another process."""
    real = dtype.to_real() if dtype.is_complex else dtype
    if gradient is not None or real not in _NONE:
        return gradient
    bits, value = _NONE[real]
    if dtype.is_complex:
        return torch.view_as_complex(torch.full((*shape, 2), value, dtype=bits).view(real))
    return torch.full(shape, value, dtype=bits).view(dtype)


def unmark(gradient: Tensor | None) -> Tensor | None:
    """The inverse of `mark`."""
    if gradient is None or gradient.numel() == 0:
        return gradient
    first = gradient[(0,) * gradient.dim()]
    first = torch.view_as_real(first)[0] if first.is_complex() else first
    if first.dtype not in _NONE:
        return gradient
    bits, value = _NONE[first.dtype]
    return None if first.view(bits).item() == value else gradient


class _Alias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        ctx.leaf = leaf
        ctx.set_materialize_grads(False)
        return leaf.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> None:
        # Put there as it is. Accumulated, it would get the strides of the leaf, and the layers
        # before might add it up in another order.
        ctx.leaf.grad = gradient


def alias(leaf: Tensor) -> Tensor:
    """The same memory, not as a leaf, so that a layer may work on it in place.

    The backward pass replaces ``leaf.grad``.
    """
    if not leaf.requires_grad:
        return leaf
    return _Alias.apply(leaf)  # type: ignore[no-any-return, no-untyped-call]


def copy(leaf: Tensor) -> Tensor:
    """Other memory with the same values, for a layer to work on in place."""
    return leaf.clone()
