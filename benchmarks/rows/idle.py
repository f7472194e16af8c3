"""Idle: the processor time of those who have nothing to do but wait."""

from __future__ import annotations

import os
import time

import torch

import rpcpipe
from benchmarks import emulated
from benchmarks.cpu import seconds_used
from benchmarks.record import Result


def _share(pid: int, before: float, passed: float) -> float:
    return (seconds_used(pid) - before) / passed * 100


def measure(world: rpcpipe.World, seconds: float) -> list[Result]:
    n = world.stages
    model = emulated.chain(n, 256, 1, n * seconds / 2)
    pipe = rpcpipe.Pipe(model, world, balance=[1] * n, chunks=2, checkpoint="never")
    x = torch.ones(2, 256)
    pipe(x[:1]).sum().backward()
    made = []

    time.sleep(0.5)
    pids = [world.process(j).pid for j in range(n)]
    before = [seconds_used(pid) for pid in pids]
    start = time.monotonic()
    time.sleep(seconds * 2)
    passed = time.monotonic() - start
    for j, (pid, used) in enumerate(zip(pids, before, strict=True)):
        share = _share(pid, used, passed)
        made.append(Result(f"stage {j}, idle", share, 0.1, " %", detail={"seconds": passed}))

    used, start = seconds_used(os.getpid()), time.monotonic()
    pipe(x).sum().backward()
    passed = time.monotonic() - start
    share = _share(os.getpid(), used, passed)
    made.append(
        Result("driver, while a step runs", share, 3, " %", detail={"step_seconds": passed})
    )
    return made


def run(quick: bool) -> list[Result]:
    return rpcpipe.run(measure, 0.2 if quick else 2.0, stages=2) or []
