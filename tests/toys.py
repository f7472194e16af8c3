"""Toy layers that stages import, and what tests ask of a pipe."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import rpcpipe
from rpcpipe import transport


def grads(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def all_grads(pipe: rpcpipe.Pipe) -> dict[str, Tensor]:
    found = [pipe.apply_to_stage(j, grads) for j in range(len(pipe.balance))]
    return {name: grad for stage in found for name, grad in stage.items()}


def check_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(
            found[name], wanted[name], rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}"
        )


def check_step(
    pipe: rpcpipe.Pipe,
    plain: nn.Module,
    x: Any,
    loss: Callable[[Any], Tensor] = lambda out: out.pow(2).mean(),
) -> None:
    """One step through both from zero gradients: same loss, same gradients, ``None`` included."""
    pipe.zero_grad()
    plain.zero_grad()
    found, wanted = loss(pipe(x)), loss(plain(x))
    torch.testing.assert_close(found, wanted)
    found.backward()
    wanted.backward()
    check_equal(all_grads(pipe), grads(plain))


def mlp(width: int = 4) -> nn.Sequential:
    """Six layers; two for each of three stages."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(),
        nn.Linear(width, width), nn.Linear(width, 2),
    )  # fmt: skip


def await_equal(found: Callable[[], Any], wanted: Any, seconds: float = 10.0) -> None:
    """Poll: what other processes release, they release soon and not at once."""
    deadline = time.monotonic() + seconds
    while (last := found()) != wanted:
        assert time.monotonic() < deadline, f"after {seconds} s there is {last}, not {wanted}"
        time.sleep(0.01)


def held(module: nn.Module) -> dict[str, int]:
    """What RPC and distributed autograd hold in this process."""
    return transport.debug_info()


def held_everywhere(pipe: rpcpipe.Pipe) -> list[dict[str, int]]:
    n = len(pipe.balance)
    return [transport.debug_info(), *(pipe.apply_to_stage(j, held) for j in range(n))]


def digest(pipe: rpcpipe.Pipe) -> str:
    """Of all weights and buffers, bit for bit."""
    found = hashlib.sha256()
    for name, value in pipe.state_dict().items():
        found.update(name.encode() + value.numpy().tobytes())
    return found.hexdigest()
