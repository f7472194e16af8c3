"""The pipe as a user meets it: shapes, modes, styles of training, bad input."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import rpcpipe
from rpcpipe import World

two = pytest.mark.parametrize("world", [2], indirect=True)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))


def grads(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def all_grads(pipe: rpcpipe.Pipe) -> dict[str, Tensor]:
    found = [pipe.apply_to_stage(j, grads) for j in range(len(pipe.balance))]
    return {name: grad for stage in found for name, grad in stage.items()}


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def check_step(pipe: rpcpipe.Pipe, plain: nn.Module, x: Tensor) -> None:
    """One step through both: same output, same gradients."""
    pipe.zero_grad()
    plain.zero_grad()
    out, expected = pipe(x), plain(x)
    close(out, expected)
    out.pow(2).mean().backward()
    expected.pow(2).mean().backward()
    found, wanted = all_grads(pipe), grads(plain)
    assert found.keys() == wanted.keys()
    for name in wanted:
        close(found[name], wanted[name])


@two
@pytest.mark.parametrize(
    ("rows", "chunks"), [(6, 4), (3, 8), (1, 4), (1, 1), (8, 1), (7, 3), (16, 16), (40, 33)]
)
def test_any_batch_size_with_any_number_of_chunks(world: World, rows: int, chunks: int) -> None:
    module = mlp()
    pipe = rpcpipe.Pipe(module, world, balance=[2, 3], chunks=chunks)
    check_step(pipe, module, torch.randn(rows, 4))


@two
def test_except_last_counts_actual_micro_batches(world: World) -> None:
    module = nn.Sequential(nn.Linear(4, 4), Phases(), nn.Linear(4, 4))
    pipe = rpcpipe.Pipe(module, world, balance=[2, 1], chunks=4)
    pipe(torch.randn(3, 4)).sum().backward()
    forward = [(True, False), (True, False), (False, False)]
    assert pipe.apply_to_stage(0, phases) == [*forward, (False, True), (False, True)]


class Phases(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[bool, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append((rpcpipe.is_checkpointing(), rpcpipe.is_recomputing()))
        return x


def phases(module: nn.Module) -> list[tuple[bool, bool]]:
    return next(m.seen for m in module if isinstance(m, Phases))
