"""What stages hold: parameters, gradients, optimizer state, and the peak of activations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import rpcpipe
from rpcpipe import World
from rpcpipe.memory import MIB, Memory, StageMemory

two = pytest.mark.parametrize("world", [2], indirect=True)


def weights(module: nn.Module) -> int:
    return sum(t.nbytes for t in [*module.parameters(), *module.buffers()])


def model() -> nn.Sequential:
    """A wide second half, whose parameters take 8 MiB and their activations little."""
    return nn.Sequential(nn.Linear(8, 1024), nn.BatchNorm1d(1024), nn.Linear(1024, 2048))


@two
def test_bytes_are_those_of_the_tensors(world: World) -> None:
    module = model()
    pipe = rpcpipe.Pipe(module, world, balance=[2, 1], chunks=2, checkpoint="never")
    opt = pipe.optimizer(torch.optim.Adam, lr=1e-3)
    parts = [weights(module[:2]), weights(module[2:])]
    before = pipe.memory()
    assert [row.parameters for row in before.stages] == parts
    assert [row.gradients for row in before.stages] == [0, 0]
    assert [row.optimizer for row in before.stages] == [0, 0]
    pipe(torch.ones(4, 8)).sum().backward()
    opt.step()
    after = pipe.memory()
    grads = [sum(p.nbytes for p in half.parameters()) for half in (module[:2], module[2:])]
    assert [row.gradients for row in after.stages] == grads
    steps = [4 * len(list(half.parameters())) for half in (module[:2], module[2:])]  # one number
    state = [2 * g + s for g, s in zip(grads, steps, strict=True)]
    assert [row.optimizer for row in after.stages] == state
    assert [row.device for row in after.stages] == ["cpu", "cpu"]
    assert all(row.total > row.peak > row.parameters for row in after.stages)


class Wide(nn.Module):
    """Keeps four tensors of 1024 times its input for the backward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.repeat(1, 1024)
        for _ in range(4):
            wide = wide.sin()
        return wide.sum(1, keepdim=True).expand_as(x).clone()


@two
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are not reset here")
def test_peak_of_activations_is_that_of_the_mode_and_begins_anew(world: World) -> None:
    # Each tensor is larger than the 32 MiB up to which glibc may serve it from its heap. There a
    # freed hole is not found again for a tensor of the same size, and resident memory says several
    # times what is in use.
    rows, m = 3 * 144, 3
    one = rows // m * 64 * 1024 * 4  # bytes of a tensor of one micro-batch: 36 MiB
    x = torch.ones(rows, 64, requires_grad=True)
    peaks = {}
    for checkpoint in ("never", "always"):
        pipe = rpcpipe.Pipe(
            nn.Sequential(Wide(), nn.Linear(64, 64)), world, balance=[1, 1], chunks=m,
            checkpoint=checkpoint,
        )  # fmt: skip
        pipe(x).sum().backward()
        pipe.memory()
        pipe(x).sum().backward()
        peaks[checkpoint] = pipe.memory().stages[0].activations
        assert pipe.memory().stages[0].activations < one / 2  # nothing happened
    assert 4 * m * one <= peaks["never"] < (4 * m + 3) * one
    assert 4 * one <= peaks["always"] < (4 + 3) * one


def test_table_is_in_mebibytes() -> None:
    row = StageMemory(0, "a-host", "cpu", 3 * MIB, MIB // 2, 0, 10 * MIB, 200 * MIB, 1024 * MIB)
    lines = str(Memory([row])).splitlines()
    assert lines[0].split() == [
        "stage", "host", "device", "parameters", "gradients", "optimizer", "activations", "peak",
        "total",
    ]  # fmt: skip
    assert lines[1].split() == [
        "0", "a-host", "cpu", "3.0", "0.5", "0", "10.0", "200.0", "1024.0"
    ]  # fmt: skip
