"""Partial training: adapters beside frozen layers, and stages with nothing to train."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toys import all_grads, check_equal, grads

import rpcpipe
from rpcpipe import World

three = pytest.mark.parametrize("world", [3], indirect=True)


class Adapted(nn.Module):
    """A frozen linear layer and a trainable one of low rank beside it (LoRA)."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def frozen(width: int) -> nn.Module:
    return nn.Linear(width, width).requires_grad_(False)


def model(kinds: str) -> nn.Sequential:
    """``a`` for an adapted layer, ``f`` for a frozen one."""
    torch.manual_seed(0)
    return nn.Sequential(*(Adapted(6, 2) if kind == "a" else frozen(6) for kind in kinds))


@three
@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("kinds", ["aaa", "faf", "afa", "ffa", "aff"])
def test_adapters_train_and_the_rest_stays(world: World, kinds: str, checkpoint: str) -> None:
    plain = model(kinds)
    pipe = rpcpipe.Pipe(plain, world, balance=[1, 1, 1], chunks=3, checkpoint=checkpoint)
    before = pipe.state_dict()
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    reference = torch.optim.AdamW((p for p in plain.parameters() if p.requires_grad), lr=0.05)
    for k in range(4):
        x, y = torch.randn(7, 6), torch.arange(7) % 6
        loss = pipe.loss(x, y, F.cross_entropy) if k % 2 else F.cross_entropy(pipe(x), y)
        loss.backward()
        F.cross_entropy(plain(x), y).backward()
        check_equal(all_grads(pipe), grads(plain))
        optimizer.step()
        optimizer.zero_grad()
        reference.step()
        reference.zero_grad()
    after = pipe.state_dict()
    for name, parameter in plain.named_parameters():
        assert torch.equal(before[name], after[name]) is not parameter.requires_grad
        torch.testing.assert_close(after[name], parameter.detach(), rtol=1e-4, atol=1e-5)


@three
def test_nothing_to_train_is_nothing_to_call_backward_on(world: World) -> None:
    pipe = rpcpipe.Pipe(model("fff"), world, balance=[1, 1, 1], chunks=2)
    x = torch.randn(4, 6)
    assert not pipe(x).requires_grad
    assert not pipe.loss(x, torch.arange(4), F.cross_entropy).requires_grad
    x.requires_grad_()
    pipe.loss(x, torch.arange(4), F.cross_entropy).backward()
    assert x.grad is not None
    assert all_grads(pipe) == {}
