"""Inside: what a pipe has its stages do between mini-batches, on their compute threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rpcpipe import clock, transport
from rpcpipe.averaging import like, whole
from rpcpipe.mailbox import require_picklable
from rpcpipe.recorder import Event, Recorder
from rpcpipe.stage import Stage


def apply(stage: Stage, fn: Callable[[nn.Module], Any]) -> Any:
    value = fn(stage.partition)
    require_picklable(value)
    return value


def exchange_ties(stage: Stage, step: int, average: bool) -> None:
    stage.exchange_ties(step, average)


def parameter(stage: Stage, name: str) -> Tensor:
    return stage.partition.get_parameter(name).detach().to("cpu")


@torch.no_grad()
def set_parameter(stage: Stage, name: str, value: Tensor) -> None:
    stage.partition.get_parameter(name).copy_(value)


def zero_grad(stage: Stage, set_to_none: bool) -> None:
    stage.partition.zero_grad(set_to_none)


def parameter_rrefs(stage: Stage) -> list[Any]:
    return [transport.reference(parameter) for parameter in stage.trainable()]


def state_dict(stage: Stage) -> dict[str, Any]:
    state = stage.partition.state_dict()
    return {k: whole(v).to("cpu") if isinstance(v, Tensor) else v for k, v in state.items()}


def state_shapes(stage: Stage) -> dict[str, tuple[int, ...] | None]:
    return {
        name: tuple(value.shape) if isinstance(value, Tensor) else None
        for name, value in stage.partition.state_dict().items()
    }


@dataclass(frozen=True)
class ParameterInfo:
    """What the driver can know of a parameter: its name in the whole module, and where it is."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    stage: int
    device: torch.device


def parameters_info(stage: Stage) -> list[ParameterInfo]:
    return [
        ParameterInfo(name, tuple(p.shape), p.dtype, p.requires_grad, stage.index, p.device)
        for name, p in stage.partition.named_parameters()
    ]


def load_state_dict(stage: Stage, state: dict[str, Any]) -> None:
    held = stage.partition.state_dict()
    placed = {k: like(v, held[k]) if isinstance(v, Tensor) else v for k, v in state.items()}
    stage.partition.load_state_dict(placed, strict=False)


def start_recording(stage: Stage) -> str:
    """Returns what identifies the stage's clock."""
    stage.recorder = Recorder(stage.device)
    return clock.identity()


def stop_recording(stage: Stage) -> list[Event]:
    recorder, stage.recorder = stage.recorder, None
    return recorder.events() if recorder is not None else []
