"""Start-up: from `run` to the end of the first step, beyond what importing torch takes."""

from __future__ import annotations

import subprocess
import sys
import time
from statistics import median

from benchmarks.children import ROOT
from benchmarks.record import Result

TARGETS = {2: 1.5, 8: 4.0}  # seconds, by number of stages

PROGRAM = """
import sys, time
import torch
from torch import nn
import rpcpipe

def train(world):
    n = world.stages
    pipe = rpcpipe.Pipe(nn.Sequential(*(nn.Linear(8, 8) for _ in range(n))), world,
                        balance=[1] * n, chunks=8)
    pipe(torch.ones(8, 8)).sum().backward()
    return time.perf_counter()

if __name__ == "__main__":
    start = time.perf_counter()
    print(rpcpipe.run(train, stages=int(sys.argv[1])) - start)
"""


def first_step(n: int) -> float:
    """Seconds from the call of `run` to the end of the first step, torch being imported before."""
    command = [sys.executable, "-c", PROGRAM, str(n)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def imports(n: int) -> float:
    """Seconds until ``n`` processes, started at once, have imported torch and ended."""
    start = time.perf_counter()
    processes = [subprocess.Popen([sys.executable, "-c", "import torch"]) for _ in range(n)]
    for process in processes:
        process.wait()
    return time.perf_counter() - start


def run(quick: bool) -> list[Result]:
    made = []
    for n, target in list(TARGETS.items())[: 1 if quick else 2]:
        pairs = [(first_step(n), imports(n)) for _ in range(1 if quick else 3)]
        whole, alone = median(a for a, _ in pairs), median(b for _, b in pairs)
        detail = {"run_to_first_step_s": whole, f"{n}_times_import_torch_s": alone}
        beyond = median(a - b for a, b in pairs)
        made.append(Result(f"n={n}: beyond importing torch", beyond, target, " s", detail=detail))
    return made
