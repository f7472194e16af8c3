"""Placeholder: what stands on the driver for a parameter that lives in a stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Placeholder", "RemoteGradients"]

Unscale = Callable[[float], bool]


class Placeholder(nn.Parameter):
    """A parameter's shape and dtype without its memory.

    Its gradient is `RemoteGradients`, the same for all parameters of an optimizer.
    """

    gradients: RemoteGradients

    def __new__(
        cls, shape: tuple[int, ...], dtype: torch.dtype, gradients: RemoteGradients
    ) -> Placeholder:
        differentiable = dtype.is_floating_point or dtype.is_complex
        one = torch.zeros((), dtype=dtype).expand(shape)
        self: Placeholder = nn.Parameter.__new__(cls, one, differentiable)
        self.gradients = gradients
        return self

    def __init__(self, *_: Any) -> None:
        super().__init__()

    @property
    def grad(self) -> RemoteGradients:  # type: ignore[override]
        return self.gradients

    def __deepcopy__(self, memo: dict[int, Any]) -> Placeholder:
        return self


class RemoteGradients(Tensor):
    """All gradients of an optimizer, as ``torch.amp.GradScaler`` takes them.

    The scaler of torch 2.13 walks the parameters' ``.grad``, and has one function divide those of
    a dtype and a device and look for infinite values. Called with this, the function does so in
    the stages. Nothing else can be done with it.
    """

    unscale: Unscale

    @staticmethod
    def of(unscale: Unscale) -> RemoteGradients:
        """Args: unscale: multiplies all gradients by a number; whether any was not finite."""
        gradients = torch.zeros(0).as_subclass(RemoteGradients)
        gradients.unscale = unscale
        return gradients

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch._amp_foreach_non_finite_check_and_unscale_:
            ((gradients, *_), found_inf, inverse_scale) = args
            if gradients.unscale(float(inverse_scale)):
                found_inf.fill_(1.0)
            return None
        if getattr(func, "__name__", "") == "__get__":  # its device, dtype and the like
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise TypeError(
            f"{getattr(func, '__name__', func)} was called with the gradients of a pipe, which "
            "live in its stages: clip by opt.step(max_norm=...) or opt.step(max_value=...), look "
            "at them by pipe.apply_to_stage(j, fn)"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return "RemoteGradients()"
