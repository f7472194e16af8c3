"""torch.compile of each stage, through ``wrap_stage``."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from toys import all_grads, check_equal, grads, mlp

import rpcpipe
from rpcpipe import World

two = pytest.mark.parametrize("world", [2], indirect=True)


def compiled(module: nn.Module, world: World, j: int) -> nn.Module:
    return torch.compile(module, backend="aot_eager")  # type: ignore[return-value]


@two
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_compiled_stages_train_with_the_loss_in_the_last(world: World, checkpoint: str) -> None:
    plain = mlp()
    options = {"chunks": 3, "checkpoint": checkpoint, "wrap_stage": compiled}
    pipe = rpcpipe.Pipe(plain, world, balance=[3, 3], **options)
    for rows in (7, 6):  # shapes of micro-batches differ
        pipe.zero_grad()
        plain.zero_grad()
        x, y = torch.randn(rows, 4), torch.arange(rows) % 2
        found, wanted = pipe.loss(x, y, F.cross_entropy), F.cross_entropy(plain(x), y)
        torch.testing.assert_close(found, wanted)
        found.backward()
        wanted.backward()
        check_equal(all_grads(pipe), grads(plain))
    pipe.eval()
    (result,) = pipe.predict([x])
    torch.testing.assert_close(result, plain(x).detach())
    assert pipe.state_dict().keys() == plain.state_dict().keys()


def last_is_compiled(folder: Path, module: nn.Module, world: World, j: int) -> nn.Module:
    if j == 0:
        return module
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    return torch.compile(module)  # type: ignore[return-value]


@pytest.mark.skipif(shutil.which("g++") is None, reason="takes a C++ compiler")
@two
def test_the_default_compiler(world: World, tmp_path: Path) -> None:
    """Inductor makes machine code of a stage, which computes the same gradients."""
    plain, x = mlp(), torch.randn(6, 4)
    wrap = partial(last_is_compiled, tmp_path)
    options = {"chunks": 2, "checkpoint": "never", "wrap_stage": wrap}
    pipe = rpcpipe.Pipe(plain, world, balance=[3, 3], **options)
    pipe(x).pow(2).mean().backward()
    plain(x).pow(2).mean().backward()
    check_equal(all_grads(pipe), grads(plain))
    assert list(tmp_path.rglob("*.so"))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x + self.second(self.first(x).relu()))


@two
def test_compiled_stages_of_a_traced_module(world: World) -> None:
    torch.manual_seed(0)
    plain, x = Residual(), torch.randn(6, 4)
    options = {"split": ["second"], "chunks": 2, "wrap_stage": compiled}
    pipe = rpcpipe.Pipe.from_module(plain, world, x, **options)
    pipe(x).pow(2).mean().backward()
    plain(x).pow(2).mean().backward()
    check_equal(all_grads(pipe), grads(plain))
