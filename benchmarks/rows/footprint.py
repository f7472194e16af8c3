"""Footprint: the peak memory of each stage beside what arithmetic says it needs."""

from __future__ import annotations

import os
from unittest.mock import patch

import psutil
import torch
from torch import Tensor, nn

import rpcpipe
from benchmarks.harness import even
from benchmarks.memory import ALLOCATOR, peak, settle
from benchmarks.record import Result
from benchmarks.workloads import partition

M, MIB = 8, 2**20


def model(width: int, layers: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers))
    )


def activations(part: nn.Module, x: Tensor) -> int:
    """Bytes that the graph of one micro-batch keeps, beside parameters and what it was given."""
    known = {p.untyped_storage().data_ptr() for p in part.parameters()}
    known.add(x.untyped_storage().data_ptr())
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = part(x)
    kept[output.untyped_storage().data_ptr()] = output.untyped_storage().nbytes()
    return sum(kept.values())


def arithmetic(whole: nn.Sequential, n: int, j: int, x: Tensor) -> dict[str, int]:
    """Bytes of one stage, for a micro-batch ``x`` of the model."""
    with torch.no_grad():
        for k in range(j):
            x = partition(whole, n, k)(x)
    part = partition(whole, n, j)
    parameters = sum(p.nbytes for p in part.parameters())
    return {
        "parameters": parameters,
        "gradients": parameters,
        "optimizer": 2 * parameters,  # Adam's two moments
        "boundary inputs": M * x.nbytes,
        "activations": activations(part, x.requires_grad_(j > 0)),
    }


def _rss(_: nn.Module) -> float:
    return psutil.Process().memory_info().rss / MIB


def measure(world: rpcpipe.World, quick: bool) -> list[Result]:
    n, width, layers, rows = world.stages, *((256, 8, 64) if quick else (1024, 24, 1024))
    empty = rpcpipe.Pipe(
        nn.Sequential(*(nn.Linear(8, 8) for _ in range(n))), world, balance=[1] * n
    )
    first = empty.optimizer(torch.optim.Adam, lr=1e-3)
    empty(torch.ones(8, 8)).sum().backward()  # loads code that is loaded on first use
    first.step()
    baseline = [empty.apply_to_stage(j, settle) for j in range(n)]
    seen = [empty.apply_to_stage(j, _rss) for j in range(n)]

    whole, x = model(width, layers), torch.randn(M * rows, width)
    pipe = rpcpipe.Pipe(whole, world, balance=even(layers, n), chunks=M, checkpoint="always")
    optimizer = pipe.optimizer(torch.optim.Adam, lr=1e-3)
    for _ in range(2):
        pipe(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = [pipe.apply_to_stage(j, peak) for j in range(n)]
    made = []
    for j in range(n):
        needs = {k: v / MIB for k, v in arithmetic(whole, n, j, x[:rows]).items()}
        took, wanted = found[j] - baseline[j], sum(needs.values())
        detail = {"peak_mib": took, "arithmetic_mib": wanted, "baseline_mib": seen[j]}
        detail |= {f"{k}_mib": v for k, v in needs.items()}
        made.append(Result(f"stage {j}: peak / arithmetic", took / wanted, 1.1, detail=detail))
    return made


def run(quick: bool) -> list[Result]:
    with patch.dict(os.environ, ALLOCATOR):
        return rpcpipe.run(measure, quick, stages=2) or []
