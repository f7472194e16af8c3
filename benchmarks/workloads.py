"""Workloads: models that really compute, 5 to 50 ms a micro-batch and stage on one core."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.harness import even
from rpcpipe.schedule import checkpointed

M = 8  # micro-batches


@dataclass(frozen=True)
class Workload:
    """A model, its mini-batch and a loss that adds up over micro-batches; made from seeds."""

    name: str
    rows: int
    quick_rows: int
    shape: tuple[int, ...]  # of one row
    build: Callable[[], nn.Sequential]

    def model(self) -> nn.Sequential:
        torch.manual_seed(0)
        return self.build()

    def batch(self, quick: bool = False) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        rows = self.quick_rows if quick else self.rows
        return torch.randn(rows, *self.shape, generator=generator)


def loss(output: Tensor) -> Tensor:
    return output.pow(2).sum() / 1000


def partition(model: nn.Sequential, n: int, j: int) -> nn.Sequential:
    """Stage ``j`` of ``n`` equal ones, with the names of the whole model."""
    balance = even(len(model), n)
    first = sum(balance[:j])
    names = [str(k) for k in range(first, first + balance[j])]
    part = nn.Sequential()
    for name in names:
        part.add_module(name, model.get_submodule(name))
    return part


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {k: p.grad for k, p in module.named_parameters() if p.grad is not None}


class Recomputing(nn.Module):
    """A partition that recomputes the micro-batches our mode of that name recomputes.

    Other runtimes have no such modes: torch's own checkpointing, once round the whole partition.
    """

    def __init__(self, inner: nn.Module, m: int, mode: str) -> None:
        super().__init__()
        self.inner, self.m, self.spared, self.calls = inner, m, checkpointed(m, mode), 0

    def forward(self, x: Tensor) -> Tensor:
        i = self.calls % self.m
        self.calls += 1
        if i in self.spared and torch.is_grad_enabled():
            return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]
        return self.inner(x)  # type: ignore[no-any-return]


class Residual(nn.Module):
    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*inner)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.project(x).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, c))  # type: ignore[no-any-return]


def _block(width: int) -> nn.Sequential:
    return nn.Sequential(
        Residual(nn.LayerNorm(width), Attention(width, 8)),
        Residual(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        ),
    )


def _transformer() -> nn.Sequential:
    return nn.Sequential(*(_block(256) for _ in range(4)))


def _mlp() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(8)))


def _conv() -> nn.Sequential:
    def layer() -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU())

    return nn.Sequential(*(layer() for _ in range(8)))


ALL = {
    w.name: w
    for w in (
        Workload("transformer", 16, 8, (128, 256), _transformer),
        Workload("mlp", 512, 64, (1024,), _mlp),
        Workload("conv", 64, 8, (32, 32, 32), _conv),
    )
}
