"""Build: how a stage gets its layers, and layers on the meta device their first values."""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rpcpipe import checkpoint, log, shipping
from rpcpipe.batchnorm import convert_deferred_batch_norm
from rpcpipe.stage import Partition, Stage

__all__ = ["Part", "build", "check_module", "divide", "materialize", "serialize"]


def check_module(module: Any) -> None:
    if not isinstance(module, nn.Sequential):
        raise TypeError(
            "a pipe divides an nn.Sequential between its layers; "
            f"got {type(module).__name__}: write the model as nn.Sequential(...), or let "
            "Pipe.from_module trace and cut it"
        )
    if type(module).forward is not nn.Sequential.forward:
        raise TypeError(
            f"{type(module).__name__} overrides nn.Sequential.forward, which a pipe does not "
            "call: give the layers in a plain nn.Sequential"
        )


def divide(module: nn.Sequential, balance: Sequence[int]) -> list[dict[str, nn.Module]]:
    """The layers of each stage by name; a layer used twice has two names."""
    layers = iter(module._modules.items())
    parts = [dict(itertools.islice(layers, count)) for count in balance]
    # A whole stage has no name of its own in the model it was cut out of.
    return [_unnamed(part) if _is_whole(part) else part for part in parts]


def _is_whole(part: dict[str, nn.Module]) -> bool:
    return any(isinstance(layer, Partition) for layer in part.values())


def _unnamed(part: dict[str, nn.Module]) -> dict[str, nn.Module]:
    (whole,) = part.values()
    return {"": whole}


def serialize(part: dict[str, nn.Module]) -> bytes:
    try:
        return shipping.dump(part)
    except shipping.REFUSALS:
        for name, layer in part.items():
            try:
                shipping.dump(layer)
            except shipping.REFUSALS as exc:
                raise TypeError(
                    f"layers are sent to their stage by pickle, which cannot take layer {name} "
                    f"({type(layer).__name__}): {exc}. Define its class and the functions it holds "
                    "at the top level of a file and import it; a lambda cannot be sent"
                ) from exc
        raise


@dataclass(frozen=True)
class Part:
    """What a stage is built from.

    Attributes:
        blob: pickle of ``{name: layer}``.
        first: index of the first of the layers in the whole model.
        initial_seed: of the whole model; layers and stages derive theirs from it.
        seed: of what layers draw while they run, see `Partition`.
        deferred: whether batch norm counts mini-batches and not micro-batches.
        training: the whole model's mode, from which single layers may differ.
    """

    blob: bytes
    first: int
    initial_seed: int
    seed: int | None
    deferred: bool
    training: bool


def build(stage: Stage, part: Part) -> None:
    """Load the pickled layers, materialise those on ``meta``, and have the stage adopt them."""
    layers: dict[str, nn.Module] = shipping.load(part.blob)
    before = checkpoint.RngState.capture(stage.device)
    shared: dict[int, Tensor] = {}
    begin = time.monotonic()
    work = log.progress(layers.items(), len(layers), "building layers")
    for k, (name, layer) in enumerate(work, part.first):
        torch.manual_seed(checkpoint.derive(part.initial_seed, 0, k))
        materialize(layer, name, stage.device, shared)
    torch.manual_seed(checkpoint.derive(part.initial_seed, 1, stage.index))
    own = checkpoint.RngState.capture(stage.device)
    before.restore()
    whole = layers.get("")
    partition = whole if isinstance(whole, Partition) else Partition(OrderedDict(layers))
    partition.first, partition.seed = part.first, part.seed
    partition.training = part.training  # only when the driver's changes, that of the layers does
    if part.deferred:
        convert_deferred_batch_norm(partition)
    stage.adopt(partition, own)
    log.logger.info(
        "built %d layers on %s in %.1f s", len(layers), stage.device, time.monotonic() - begin
    )


def materialize(
    layer: nn.Module, name: str, device: torch.device, shared: dict[int, Tensor] | None = None
) -> None:
    """Give memory to what ``layer`` holds on ``meta``, and values by ``reset_parameters``.

    Args:
        name: of the layer in the whole model.
        shared: what parameters became that layers before may share with this one; added to.

    Raises:
        TypeError: a parameter or buffer has got no value that way.
    """
    shared = {} if shared is None else shared
    # Children first: a parent's reset_parameters may set its children's otherwise.
    for path, module in reversed(list(layer.named_modules(prefix=name))):
        held = {**module._parameters, **module._buffers}
        if any(t is not None and t.is_meta for t in held.values()):
            _give_memory(module, device, shared)
            for tensor in _held(module).values():
                _mark(tensor)
            reset = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
            if reset is not None:
                reset()
            _require_values(path, module)


def _give_memory(module: nn.Module, device: torch.device, shared: dict[int, Tensor]) -> None:
    """As ``Module.to_empty``, which would untie parameters."""
    before = dict(module._parameters)
    module.to_empty(device=device, recurse=False)
    for name, old in before.items():
        if old is not None and old.is_meta:
            new = shared.setdefault(id(old), module._parameters[name])  # type: ignore[arg-type]
            module._parameters[name] = new  # type: ignore[assignment]
            shared[-id(old)] = old  # alive, or its id would be given to another


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
