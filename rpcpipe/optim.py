"""PipeOptimizer: one local optimizer a stage, stepped together from the driver."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rpcpipe.averaging import whole
from rpcpipe.stage import Stage

if TYPE_CHECKING:
    from rpcpipe.pipe import Pipe

__all__ = ["PipeOptimizer"]

Group = dict[str, Any]  # the options of a parameter group, without its parameters


class PipeOptimizer(torch.optim.Optimizer):
    """An optimizer whose state lives with the parameters, in the stages.

    On the driver it is a ``torch.optim.Optimizer`` with one parameter group: its options may be
    read and edited, and ``torch.optim.lr_scheduler`` works on it. Each step takes them along.

    Args:
        pipe: whose parameters are optimized.
        cls: a class of ``torch.optim``, or any importable one with its interface.
        kwargs: its options, such as ``lr``.
    """

    def __init__(self, pipe: Pipe, cls: Callable[..., torch.optim.Optimizer], kwargs: Group):
        self._pipe = pipe
        self._key = f"optimizer {uuid.uuid4().hex}"
        # Made here once as well: wrong options are refused before any stage hears of them, and
        # its defaults are those of the group.
        local = cls([nn.Parameter(torch.zeros(0))], **kwargs)
        super().__init__(local.param_groups, local.defaults)
        pipe._everywhere("make the optimizer", _make, self._key, cls, kwargs)

    @torch.no_grad()
    def step(self, closure: None = None, max_norm: float | None = None) -> Tensor | None:  # type: ignore[override]
        """Update all parameters by their ``.grad``: one message a stage, two with ``max_norm``.

        Args:
            closure: not supported.
            max_norm: scale all gradients down so that their 2-norm, over all stages together, is
                at most this.

        Returns:
            The norm before scaling, shape ``()`` float64, if ``max_norm`` was given.

        Raises:
            ValueError: a closure is given.
            StageError: the optimizer raised in a stage.
        """
        if closure is not None:
            raise ValueError("a pipe's optimizer takes no closure: run the pipe before the step")
        norm, scale = None, 1.0
        if max_norm is not None:
            squares = self._pipe._everywhere("measure the gradients", _square_sum)
            norm = torch.tensor(squares, dtype=torch.float64).sum().sqrt()
            scale = min(1.0, max_norm / (float(norm) + 1e-6))
        group = {key: value for key, value in self.param_groups[0].items() if key != "params"}
        self._pipe._everywhere("step the optimizer", _step, self._key, group, scale)
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of all parameters."""
        self._pipe._everywhere("zero the gradients", _zero_grad, self._key, set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Not to be had here: the state is spread over the stages."""
        raise TypeError("the state of a pipe's optimizer lives in the stages and is not gathered")

    def load_state_dict(self, state_dict: Any) -> None:
        """Not to be had here: the state is spread over the stages."""
        raise TypeError("the state of a pipe's optimizer lives in the stages and is not loaded")


# ------------------------------------------------------------------------------- in each stage


def _make(stage: Stage, key: str, cls: Callable[..., Any], kwargs: Group) -> None:
    parameters = [p for p in stage.partition.parameters() if p.requires_grad]
    stage.extras[key] = cls(parameters, **kwargs) if parameters else None


def _square_sum(stage: Stage) -> float:
    elsewhere = stage.ties.counted_elsewhere()
    gradients = [p.grad for name, p in stage.partition.named_parameters() if name not in elsewhere]
    squares = [g.double().pow(2).sum() for g in gradients if g is not None]
    return sum(float(whole(square)) for square in squares)


def _step(stage: Stage, key: str, group: Group, scale: float) -> None:
    optimizer = stage.extras[key]
    if optimizer is None:
        return
    if scale < 1.0:
        for parameter in stage.partition.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
    optimizer.param_groups[0].update(group)
    optimizer.step()


def _zero_grad(stage: Stage, key: str, set_to_none: bool) -> None:
    if stage.extras[key] is not None:
        stage.extras[key].zero_grad(set_to_none=set_to_none)
