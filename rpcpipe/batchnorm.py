"""Batch norm in a pipeline: running statistics of the mini-batch, each micro-batch counted once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from rpcpipe.checkpoint import is_recomputing

__all__ = [
    "DeferredBatchNorm",
    "DeferredBatchNorm1d",
    "DeferredBatchNorm2d",
    "DeferredBatchNorm3d",
    "FrozenStatistics",
    "commit",
    "convert_deferred_batch_norm",
    "discard",
    "has_batch_norm",
]

M = TypeVar("M", bound=nn.Module)


class _Seen(NamedTuple):
    """The statistics of one micro-batch, per channel."""

    size: int  # values a channel
    mean: Tensor
    var: Tensor  # unbiased


class DeferredBatchNorm(_BatchNorm):
    """A batch norm whose running statistics are updated once a mini-batch.

    Each micro-batch is normalised by its own statistics. The running ones become, at
    :meth:`commit`, what ordinary batch norm would have made of the undivided mini-batch. Use
    :func:`convert_deferred_batch_norm` to get one; it is also still a ``BatchNorm1d``, ``2d`` or
    ``3d``. What it keeps between micro-batches is in no state dict.
    """

    _seen: list[_Seen]

    def forward(self, input: Tensor) -> Tensor:
        """Normalises a micro-batch and, unless it is recomputed, remembers its statistics."""
        if not (self.training and self.track_running_stats):
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        assert self.running_mean is not None
        assert self.running_var is not None
        # With momentum 1 the kernel writes the statistics it normalises by over these zeros.
        mean, var = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
        output = F.batch_norm(input, mean, var, self.weight, self.bias, True, 1.0, self.eps)
        if not is_recomputing():
            self._seen.append(_Seen(input.numel() // input.size(1), mean, var))
        return output

    @torch.no_grad()
    def commit(self) -> None:
        """Ends a mini-batch: updates the running statistics by all it has seen, if anything."""
        if not self._seen:
            return
        assert self.running_mean is not None
        assert self.running_var is not None
        mean, var = _combine(self._seen)
        factor = self._count_batch()
        self.running_mean.mul_(1 - factor).add_(mean.to(self.running_mean), alpha=factor)
        self.running_var.mul_(1 - factor).add_(var.to(self.running_var), alpha=factor)
        self.discard()

    def discard(self) -> None:
        """Forgets the micro-batches seen since the last :meth:`commit`, after a failed step."""
        self._seen = []

    def reset_running_stats(self) -> None:
        """Resets the running statistics, and forgets micro-batches not yet committed."""
        super().reset_running_stats()
        self.discard()

    def _count_batch(self) -> float:
        """Counts one mini-batch; returns its weight in the running statistics."""
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        return 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum


class DeferredBatchNorm1d(DeferredBatchNorm, nn.BatchNorm1d):
    """:class:`DeferredBatchNorm` for what ``nn.BatchNorm1d`` takes."""


class DeferredBatchNorm2d(DeferredBatchNorm, nn.BatchNorm2d):
    """:class:`DeferredBatchNorm` for what ``nn.BatchNorm2d`` takes."""


class DeferredBatchNorm3d(DeferredBatchNorm, nn.BatchNorm3d):
    """:class:`DeferredBatchNorm` for what ``nn.BatchNorm3d`` takes."""


_DEFERRED: dict[type[_BatchNorm], type[DeferredBatchNorm]] = {
    nn.BatchNorm1d: DeferredBatchNorm1d,
    nn.BatchNorm2d: DeferredBatchNorm2d,
    nn.BatchNorm3d: DeferredBatchNorm3d,
}


def _combine(seen: list[_Seen]) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance of the union, from deviations: nothing large is subtracted."""
    dtype = torch.promote_types(seen[0].mean.dtype, torch.float32)
    means = torch.stack([s.mean for s in seen]).to(dtype)
    vars = torch.stack([s.var for s in seen]).to(dtype)
    total = sum(s.size for s in seen)
    weights = [[s.size / total, s.size / (total - 1), (s.size - 1) / (total - 1)] for s in seen]
    columns = torch.tensor(weights, dtype=dtype, device=means.device).unsqueeze(2).unbind(1)
    of_mean, between, within = columns
    mean = (of_mean * means).sum(0)
    return mean, (within * vars + between * (means - mean).square()).sum(0)


def convert_deferred_batch_norm(module: M) -> M:
    """Makes the batch norm layers of ``module`` deferred, in place.

    ``BatchNorm1d``, ``2d``, ``3d`` that track running statistics are converted, and their
    subclasses unless these override ``forward``; any other layer, such as ``SyncBatchNorm``, is
    left alone. Layers stay the same objects with the same parameters, buffers, hooks and
    state-dict keys, also on the ``meta`` device. Converting twice changes nothing.

    Args:
        module: the model, or a batch norm layer itself.

    Returns:
        The same module.
    """
    for layer in module.modules():
        deferred = _deferred_class(layer)
        if deferred is not None:
            layer.__class__ = deferred
    discard(module)
    return module


def _deferred_class(layer: nn.Module) -> type[DeferredBatchNorm] | None:
    if type(layer).forward is not _BatchNorm.forward or not layer.track_running_stats:
        return None
    return next((new for old, new in _DEFERRED.items() if isinstance(layer, old)), None)


def commit(module: nn.Module) -> None:
    """Ends a mini-batch in every deferred batch norm of ``module``."""
    for layer in _deferred_layers(module):
        layer.commit()


def discard(module: nn.Module) -> None:
    """Drops the mini-batch that every deferred batch norm of ``module`` has begun."""
    for layer in _deferred_layers(module):
        layer.discard()


def _deferred_layers(module: nn.Module) -> Iterator[DeferredBatchNorm]:
    return (layer for layer in module.modules() if isinstance(layer, DeferredBatchNorm))


def has_batch_norm(module: nn.Module) -> bool:
    """Whether any layer of ``module`` normalises by statistics of the batch it is given."""
    return any(isinstance(layer, _BatchNorm) for layer in module.modules())


class FrozenStatistics:
    """Keeps running statistics still while a micro-batch is computed a second time::

        frozen = FrozenStatistics(module)  # once
        with frozen:                       # around each recomputation
            y = module(x)

    Within the ``with``, ordinary batch and instance norm layers in training mode update scratch
    buffers. They run the same kernels as the first time, so the output is bitwise the same, and
    the real buffers are not touched. Must not be entered twice at once.

    Args:
        module: what is recomputed; its layers are listed here once.
    """

    def __init__(self, module: nn.Module) -> None:
        self._layers = [
            _Scratch(layer)
            for layer in module.modules()
            if isinstance(layer, _NormBase) and not isinstance(layer, DeferredBatchNorm)
        ]

    def __enter__(self) -> None:
        for layer in self._layers:
            layer.swap_in()

    def __exit__(self, *exc_info: object) -> None:
        for layer in self._layers:
            layer.swap_out()


class _Scratch:
    """The scratch buffers of one layer.

    The real tensors are set aside, not written and written back: autograd would take that for
    a change of what backward needs.
    """

    NAMES = ("running_mean", "running_var", "num_batches_tracked")

    def __init__(self, layer: _NormBase) -> None:
        self.layer = layer
        self.scratch: dict[str, Tensor] = {}
        self.real: dict[str, Tensor] = {}

    def swap_in(self) -> None:
        if self.layer.training and self.layer.track_running_stats:
            buffers = self.layer._buffers
            self.real = {n: b for n in self.NAMES if (b := buffers.get(n)) is not None}
            buffers.update({name: self._like(name, b) for name, b in self.real.items()})

    def swap_out(self) -> None:
        self.layer._buffers.update(self.real)
        self.real = {}

    def _like(self, name: str, real: Tensor) -> Tensor:
        """Kept from one time to the next: copying costs a kernel a buffer."""
        kept = self.scratch.get(name)
        if kept is None or (kept.device, kept.dtype) != (real.device, real.dtype):
            kept = self.scratch[name] = real.clone()
        return kept
