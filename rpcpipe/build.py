"""Build: how a stage gets its layers, and layers on the meta device their first values."""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from rpcpipe import checkpoint
from rpcpipe.stage import Partition, Stage

__all__ = ["build", "materialize"]


def build(stage: Stage, blob: Tensor, first: int, seed: int) -> None:
    """Load the pickled layers, materialise those on ``meta``, and have the stage adopt them.

    Args:
        blob: pickle of ``{name: layer}``, uint8, shape ``(bytes,)``.
        first: index of the first of the layers in the whole model.
        seed: of the whole model; layers and stages derive theirs from it.
    """
    part: dict[str, nn.Module] = torch.load(
        io.BytesIO(blob.numpy().data), map_location=None, weights_only=False
    )
    before = checkpoint.RngState.capture(stage.device)
    for k, (name, layer) in enumerate(part.items()):
        torch.manual_seed(_derive(seed, first + k))
        materialize(layer, name, stage.device)
    torch.manual_seed(_derive(seed, -1 - stage.index))
    own = checkpoint.RngState.capture(stage.device)
    before.restore()
    training = any(layer.training for layer in part.values())
    partition = Partition(OrderedDict(part))
    partition.training = training
    stage.adopt(partition, own)


def _derive(seed: int, k: int) -> int:
    """Another seed for each ``k``, far from those of other seeds."""
    return (seed * 0x9E3779B97F4A7C15 + k * 0xBF58476D1CE4E5B9 + 1) % 2**63


def materialize(layer: nn.Module, name: str, device: torch.device) -> None:
    """Give memory to what ``layer`` holds on ``meta``, and values by ``reset_parameters``.

    Raises:
        TypeError: a parameter or buffer has got no value that way.
    """
    # Children first: a parent's reset_parameters may set its children's otherwise.
    for path, module in reversed(list(layer.named_modules(prefix=name))):
        held = {**module._parameters, **module._buffers}
        if any(t is not None and t.is_meta for t in held.values()):
            module.to_empty(device=device, recurse=False)
            for tensor in _held(module).values():
                _mark(tensor)
            reset = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
            if reset is not None:
                reset()
            _require_values(path, module)


def _held(module: nn.Module) -> dict[str, Tensor]:
    held: dict[str, Any] = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in held.items() if tensor is not None}


@torch.no_grad()
def _mark(tensor: Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype != torch.bool and not tensor.is_complex():
        tensor.fill_(torch.iinfo(tensor.dtype).max)


def _require_values(path: str, module: nn.Module) -> None:
    for name, tensor in _held(module).items():
        if tensor.is_floating_point():
            unset = bool(tensor.isnan().any())
        elif tensor.dtype != torch.bool and not tensor.is_complex():
            unset = bool((tensor == torch.iinfo(tensor.dtype).max).any())
        else:
            unset = False
        if unset:
            raise TypeError(
                f"{path}.{name} ({type(module).__name__}) is on the meta device and has no value "
                "after reset_parameters(): define reset_parameters so that it fills every "
                "parameter and buffer of the module, or build this layer on the CPU"
            )
