"""A training script of which one process fails at a given point; the test reads what was noticed.

``$FAULT`` says who, when and how, ``$FAULT_NOTES`` is the file of notes, and ``$FAULT_KEPT`` the
folder of checkpoints. What has failed once does not fail again: the script can be run another time.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import rpcpipe
from rpcpipe import transport

PLAN = json.loads(os.environ["FAULT"])
NOTES, KEPT = Path(os.environ["FAULT_NOTES"]), Path(os.environ["FAULT_KEPT"])
STEPS, M = 5, 2
LASTING = 0.5  # seconds of a phase in which the driver fails: it is sure to be in it


def note(what: str, **more: Any) -> None:
    line = {"what": what, "time": time.monotonic(), "pid": os.getpid(), **more}
    with NOTES.open("a") as file:
        file.write(json.dumps(line) + "\n")


def failed() -> bool:
    return NOTES.exists() and '"failed"' in NOTES.read_text()


def fail() -> None:
    if failed():
        return
    note("failed")
    if PLAN["how"] != "cut":
        os.kill(os.getpid(), signal.Signals[PLAN["how"]])
    time.sleep(60)  # whoever is to be cut off from the network waits for that


def due(stage: int | None, phase: str, step: int | None) -> bool:
    when = {"stage": stage, "phase": phase, "step": step}
    return all(PLAN[key] == value for key, value in when.items() if value is not None)


def reach(stage: int, phase: str, step: int | None) -> None:
    """A stage is here: it fails, or the driver has its time for that."""
    if due(stage, phase, step):
        fail()
    elif PLAN["stage"] is None and stage == 0 and due(None, phase, step) and not failed():
        time.sleep(LASTING)


def driver_reaches(phase: str, step: int | None) -> None:
    if PLAN["stage"] is None and due(None, phase, step) and not failed():
        threading.Timer(LASTING / 2, fail).start()


class Trip(nn.Module):
    """Lets its process fail in the forward pass, the backward pass, when it is made or saved."""

    here: list[Trip] = []  # noqa: RUF012 (the one of this process's stage)

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.stage = stage
        self.calls = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.here[:] = [self]
        reach(self.stage, "construction", None)

    def forward(self, x: Tensor) -> Tensor:
        step = self.calls // M
        self.calls += 1
        reach(self.stage, "forward", step)
        if x.requires_grad:
            x.register_hook(lambda _: reach(self.stage, "backward", step))
        return x

    def _save_to_state_dict(self, *args: Any) -> None:
        reach(self.stage, "save", self.calls // M - 1)
        super()._save_to_state_dict(*args)  # type: ignore[no-untyped-call]


def descend(module: nn.Module) -> None:
    """What an optimizer's step is to a stage; torch.optim would import torch._dynamo: seconds."""
    for trip in Trip.here:
        reach(trip.stage, "optimizer", trip.calls // M - 1)
    for parameter in module.parameters():
        assert parameter.grad is not None
        parameter.data -= 0.1 * parameter.grad
        parameter.grad = None


def fail_soon(module: nn.Module) -> None:
    threading.Timer(0.1, fail).start()


def fail_in_leaving(module: nn.Module) -> None:
    transport.leave = lambda meet: fail()


def train(world: rpcpipe.World) -> None:
    try:
        steps(world)
    except rpcpipe.StageLost as exc:
        told = {key: getattr(exc, key) for key in ("stage", "host", "pid", "step", "how")}
        note("raised", text=str(exc), **told)
        raise


def steps(world: rpcpipe.World) -> None:
    torch.manual_seed(0)
    layers = [
        layer for j in range(world.stages) for layer in (nn.Linear(4, 4), nn.Dropout(0.1), Trip(j))
    ]
    driver_reaches("construction", None)
    pipe = rpcpipe.Pipe(
        nn.Sequential(*layers), world, balance=[3] * world.stages, chunks=M, checkpoint="never"
    )
    first = 0
    if rpcpipe.latest(KEPT):
        first = pipe.load(KEPT)["step"]
    for step in range(first, STEPS):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        driver_reaches("forward", step)
        loss = pipe(x).pow(2).mean()
        driver_reaches("backward", step)
        loss.backward()
        driver_reaches("optimizer", step)
        for j in range(world.stages):
            pipe.apply_to_stage(j, descend)
        driver_reaches("save", step)
        pipe.save(KEPT, keep=2, step=step + 1)
        if PLAN["phase"] == "idle" and PLAN["step"] == step and not failed():
            idle(pipe)
    weights = {k: v.tolist() for k, v in pipe.state_dict().items()}
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    note("final", weights=weights, first=first, restarts=restarts)
    if PLAN["phase"] == "shutdown" and not failed():
        if PLAN["stage"] is None:
            transport.leave = lambda meet: fail()
        else:
            pipe.apply_to_stage(PLAN["stage"], fail_in_leaving)


def idle(pipe: rpcpipe.Pipe) -> None:
    """Nothing is under way; the loss shows by the next call."""
    fail() if PLAN["stage"] is None else pipe.apply_to_stage(PLAN["stage"], fail_soon)
    while transport.lost() is None:
        time.sleep(0.01)
    pipe.zero_grad()


def noticing(declare: Any) -> Any:
    def declare_lost(error: Any) -> None:
        note("noticed", text=str(error))
        declare(error)

    return declare_lost


transport.declare_lost = noticing(transport.declare_lost)

if __name__ == "__main__":
    try:
        rpcpipe.run(train, stages=2, driver=os.environ.get("FAULT_DRIVER", "auto"))
    except rpcpipe.StageLost as exc:
        note("ended", stage=exc.stage, pid=exc.pid, how=exc.how)
        raise
    sys.stdout.write("trained\n")
