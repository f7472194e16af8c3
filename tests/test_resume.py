"""A job that is killed and started again ends with the weights of one that was not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "resume.py"


@pytest.mark.timeout(300)
def test_weights_after_a_kill_at_a_random_moment_are_equal_bit_for_bit() -> None:
    result = subprocess.run(
        [sys.executable, EXAMPLE],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "killed after step" in result.stdout
    assert "goes on after step" in result.stdout
    assert result.stdout.endswith("the weights are equal, bit for bit\n")


def test_a_process_waits_for_what_is_being_saved_before_it_ends(tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLE, "--directory", tmp_path, "--steps", "5"]
    subprocess.run(command, check=True, capture_output=True, timeout=110)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000001"]


REPLICAS = """
import torch
import rpcpipe
from torch import nn

def train(world):
    torch.manual_seed(world.replica)
    pipe = rpcpipe.Pipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), world, balance=[1, 1])
    opt = pipe.optimizer(torch.optim.Adam, lr=0.1)
    before = rpcpipe.latest("saved")
    if before is None:
        pipe(torch.rand(2, 4)).sum().backward()
        opt.step()
        assert (pipe.save("saved", optimizer=opt, block=False) is None) == (world.replica == 1)
        return
    pipe.load("saved", optimizer=opt)
    total = sum(float(value.double().abs().sum()) for value in pipe.state_dict().values())
    count = opt.state_dict()["state"][0]["step"].item()
    print(f"loaded {count} {total!r}", flush=True)

rpcpipe.run(train, stages=2, replicas=2)
"""


@pytest.mark.timeout(240)
def test_the_first_replica_saves_and_all_load(tmp_path: Path) -> None:
    """Under torchrun, where the drivers share the processes of the first stages."""
    (tmp_path / "train.py").write_text(REPLICAS)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    command = [sys.executable, *launcher, "train.py"]
    for _ in range(2):
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110)
        assert result.returncode == 0, result.stdout + result.stderr
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["checkpoint-000001"]
    first, second = [line for line in result.stdout.splitlines() if line.startswith("loaded")]
    assert first == second
    assert first.startswith("loaded 1.0 ")
