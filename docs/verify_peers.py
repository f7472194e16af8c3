"""What docs/comparison.md says of peers, tried out: `python docs/verify_peers.py`.

Takes torchgpipe (pip install torchgpipe) beside torch. Prints one line a check.
"""

from __future__ import annotations

import datetime
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, SplitPoint, pipeline
from torch.distributed.pipelining.stage import PipelineStage

TIMEOUT = 6  # seconds


class Count(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Count.calls += 1
        return x * 1.0


class Pid(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.full_like(x, os.getpid())


class ToDict(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"x": x}


class FromDict(nn.Module):
    def forward(self, d: dict[str, Tensor]) -> Tensor:
        return d["x"]


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("a layer fails")


class Branches(nn.Module):
    """No sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) + x


def outcome(check: Callable[[], Any]) -> str:
    try:
        return str(check())
    except Exception as error:
        exc: BaseException = error
        while exc.__cause__ is not None:
            exc = exc.__cause__
        lines = [line for line in str(exc).splitlines() if line.strip()]
        return f"raises {type(exc).__name__}: {(lines or [''])[0][-100:]}"


def tied() -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    first, last = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    last.weight = first.weight
    return first, last


def wanted_tied_gradient(x: Tensor) -> float:
    model = nn.Sequential(*tied())
    model(x).sum().backward()
    return float(model[0].weight.grad[0, 0])


# --------------------------------------------------------------------------------- torchgpipe


def of_torchgpipe() -> None:
    import torchgpipe.pipeline
    from torchgpipe import GPipe

    def gpipe(*layers: nn.Module, chunks: int = 2) -> Any:
        half = len(layers) // 2
        balance = [half, len(layers) - half]
        return GPipe(nn.Sequential(*layers), balance, devices=["cpu", "cpu"], chunks=chunks)

    def loop() -> str:
        model = gpipe(nn.Linear(4, 4), nn.Linear(4, 4))
        model(torch.ones(4, 4)).sum().backward()
        return f"gradient on every parameter: {all(p.grad is not None for p in model.parameters())}"

    def micro_batches() -> str:
        Count.calls = 0
        with torch.no_grad():
            gpipe(Count(), nn.Identity(), chunks=4)(torch.ones(6, 4))
        return f"{Count.calls} micro-batches of 6 rows and chunks=4"

    def processes() -> str:
        out = gpipe(nn.Identity(), Pid())(torch.ones(2, 1, dtype=torch.float64))
        return f"second stage in the driver's process: {int(out[0]) == os.getpid()}"

    def names() -> str:
        return str(list(gpipe(nn.Linear(4, 4), nn.Linear(4, 4)).state_dict())[:1])

    def error() -> str:
        gpipe(nn.Identity(), Fails())(torch.ones(4, 4))
        return "nothing raised"

    def values() -> str:
        gpipe(ToDict(), FromDict())(torch.ones(4, 4))
        return "accepted"

    def seeing() -> str:
        words = re.compile("record|trace|timeline|gantt", re.IGNORECASE)
        modules = [m for name, m in sys.modules.items() if name.startswith("torchgpipe")]
        return (
            f"names that sound like it: {[n for m in modules for n in dir(m) if words.search(n)]}"
        )

    checks = {
        "schedules": lambda: list(torchgpipe.pipeline.clock_cycles(3, 2)), "seeing": seeing,
        "loop": loop, "processes": processes, "uneven": micro_batches, "dict": values,
        "tied": lambda: gpipe(*tied())(torch.ones(4, 4)).shape, "names": names, "error": error,
        "any module": lambda: GPipe(Branches(), [1, 1], devices=["cpu", "cpu"]),
    }  # fmt: skip
    for name, check in checks.items():
        print(f"torchgpipe | {name}: {outcome(check)}", flush=True)


# ------------------------------------------------------------------- torch.distributed.pipelining


def run(
    rank: int, layers: list[nn.Module], rows: int, m: int, schedule: Any = ScheduleGPipe
) -> Any:
    stage = PipelineStage(layers[rank], rank, 2, torch.device("cpu"))
    step = schedule(stage, n_microbatches=m, loss_fn=lambda y, t: (y * t).sum())
    x, t = torch.ones(rows, 4), torch.ones(rows, 4)
    return step.step(x) if rank == 0 else step.step(target=t, losses=[])


def linears() -> list[nn.Module]:
    return [nn.Linear(4, 4), nn.Linear(4, 4)]


def tie(rank: int) -> str:
    pair = tied()
    run(rank, list(pair), 4, 1)
    mine, whole = pair[rank].weight.grad[0, 0], wanted_tied_gradient(torch.ones(4, 4))
    return f"gradient {float(mine):.3f}, of the plain module {whole:.3f}"


def traced(rank: int) -> str:
    cut = pipeline(Branches(), (torch.ones(2, 4),), split_spec={"b": SplitPoint.BEGINNING})
    return f"{cut.num_stages} stages"


def seen(rank: int) -> list[str]:
    """What a profiler is told of a step."""
    with torch.profiler.profile() as profile:
        run(rank, linears(), 4, 2)
    return sorted({e.name for e in profile.events() if e.name.startswith(("Forward", "Backward"))})


def drawn(rank: int) -> str:
    from torch.distributed.pipelining._schedule_visualizer import (
        get_schedule_ops,
        visualize_schedule,
    )

    ops = get_schedule_ops("GPipe", pp_degree=2, num_microbatches=2, num_stages_per_rank=1)
    return f"{callable(visualize_schedule)}, {len(ops)} ranks, the first: {ops[0]}"


PIPELINING: dict[str, Callable[[int], Any]] = {
    "loop": lambda rank: type(run(rank, linears(), 4, 2)).__name__,
    "1F1B": lambda rank: type(run(rank, linears(), 4, 2, Schedule1F1B)).__name__,
    "schedules": lambda rank: [name for name in dir(pipelining) if name.startswith("Schedule")],
    "uneven": lambda rank: run(rank, linears(), 6, 4),
    "dict": lambda rank: run(rank, [ToDict(), FromDict()], 4, 2),
    "tied": tie,
    "any module": traced,
    "names": lambda rank: list(linears()[rank].state_dict()),
    "seeing": seen,
    "drawing": drawn,
    "error": lambda rank: run(rank, [nn.Linear(4, 4), Fails()], 4, 2),
}


def of_pipelining(rank: int, name: str, folder: str) -> None:
    timeout = datetime.timedelta(seconds=TIMEOUT)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/{name}", rank=rank, world_size=2, timeout=timeout
    )
    begin = time.monotonic()
    text = outcome(lambda: PIPELINING[name](rank))
    seconds = time.monotonic() - begin
    print(f"pipelining | {name}, rank {rank}: {text} ({seconds:.0f} s)", flush=True)
    time.sleep(TIMEOUT if name in ("error", "uneven", "dict") and rank else 0)  # let the other wait
    os._exit(0)


if __name__ == "__main__":
    print(f"torch {torch.__version__}")
    of_torchgpipe()
    with tempfile.TemporaryDirectory() as folder:
        for name in PIPELINING:
            mp.spawn(of_pipelining, (name, folder), nprocs=2)
