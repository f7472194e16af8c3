"""Train, be killed at a random moment, go on from the last checkpoint: the weights are the same.

    python examples/resume.py

trains a small network with dropout twice: once without a stop, and once ended by SIGKILL and
started again. `train` loads the newest checkpoint if there is one, and saves while it trains on.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rpcpipe

ROWS, BATCH = 640, 32


def build_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 128), nn.ReLU(), nn.Dropout(0.2),
        nn.Linear(128, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 4),
    )  # fmt: skip


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 16, generator=generator)
    return x, (x @ torch.randn(16, 4, generator=generator)).argmax(1)


def batch_of(step: int) -> Tensor:
    """Which rows are in a step's batch: known from its number, so that needs no saving."""
    epoch, k = divmod(step, ROWS // BATCH)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch))
    return order[k * BATCH : (k + 1) * BATCH]


def train(world: rpcpipe.World, directory: Path, steps: int) -> None:
    pipe = rpcpipe.Pipe(build_model(), world, balance=[3, 4], chunks=4)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
    start = 0
    if rpcpipe.latest(directory):
        start = pipe.load(directory, optimizer=opt, scheduler=scheduler)["step"]
        print(f"goes on after step {start}", flush=True)
    x, y = data()
    for step in range(start, steps):
        rows = batch_of(step)
        loss = F.cross_entropy(pipe(x[rows]), y[rows])
        loss.backward()
        opt.step(max_norm=1.0)
        opt.zero_grad()
        scheduler.step()
        print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)
        if (step + 1) % 5 == 0:
            pipe.save(
                directory, keep=2, block=False, optimizer=opt, scheduler=scheduler, step=step + 1
            )
    weights = torch.cat([w.flatten() for w in pipe.state_dict().values()]).tolist()
    print("weights", hashlib.sha256(repr(weights).encode()).hexdigest(), flush=True)


def start(directory: Path, steps: int) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--directory", str(directory), "--steps", str(steps)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def kill_at_random(job: subprocess.Popen[str], first: int, steps: int) -> None:
    """SIGKILL, which no process can prepare for, some time after a random step."""
    last = random.randint(first, steps - 2)
    assert job.stdout is not None
    for line in job.stdout:
        print("  " + line, end="")
        if line.startswith(f"step {last}:"):
            break
    time.sleep(random.uniform(0.0, 0.05))
    job.kill()
    job.communicate()
    print(f"  killed after step {last}")


def outcome(job: subprocess.Popen[str]) -> str:
    lines = job.communicate()[0].splitlines()
    print(*(f"  {line}" for line in lines if not line.startswith("step")), sep="\n")
    return lines[-1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--directory", type=Path, help="train here, once")
    given = parser.parse_args()
    if given.directory:
        rpcpipe.run(train, given.directory, given.steps, stages=2)
        sys.exit()
    with tempfile.TemporaryDirectory() as scratch:
        print("without a stop:")
        wanted = outcome(start(Path(scratch, "whole"), given.steps))
        print("with a stop:")
        kill_at_random(start(Path(scratch, "killed"), given.steps), 7, given.steps)
        found = outcome(start(Path(scratch, "killed"), given.steps))
    assert found.startswith("weights")
    if found != wanted:
        sys.exit("the weights differ")
    print("the weights are equal, bit for bit")
