"""A training script of which one process fails at a given point; the test reads what was noticed.

``$FAULT`` says who, when and how, ``$FAULT_NOTES`` is the file of notes, and ``$FAULT_KEPT`` the
folder of checkpoints. What has failed once does not fail again: the script can be run another time.
There are ``$FAULT_STEPS`` steps (5), after each of which it saves, beside training with
``$FAULT_BESIDE``; and ``$FAULT_REPLICAS`` pipelines (1), the ranks of the second after the first's.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from toys import digest

import rpcpipe
from rpcpipe import transport

PLAN = json.loads(os.environ["FAULT"])
NOTES, KEPT = Path(os.environ["FAULT_NOTES"]), Path(os.environ["FAULT_KEPT"])
STEPS, M, STAGES = int(os.environ.get("FAULT_STEPS", "5")), 2, 2
REPLICAS = int(os.environ.get("FAULT_REPLICAS", "1"))
REPLICA = int(os.environ["RANK"]) // STAGES if REPLICAS > 1 else 0  # that of this process
LASTING = 0.5  # seconds of a phase in which the driver fails: it is sure to be in it


def note(what: str, **more: Any) -> None:
    line = {"what": what, "time": time.monotonic(), "pid": os.getpid(), **more}
    with NOTES.open("a") as file:
        file.write(json.dumps(line) + "\n")


def failed() -> bool:
    return NOTES.exists() and '"failed"' in NOTES.read_text()


def ports() -> list[int]:
    """Those on which this process and its watcher listen."""
    me, ends = psutil.Process(), []
    for process in (me, *me.children()):
        with suppress(psutil.Error):  # it has ended
            ends += process.net_connections("tcp")
    return sorted({end.laddr.port for end in ends if end.status == psutil.CONN_LISTEN})


failing = threading.Lock()  # several threads may write a checkpoint


def fail() -> None:
    with failing:
        if failed():
            return
        note("ports", ports=ports())
        note("failed")
    if PLAN["how"] == "cut":
        while transport.lost() is None:
            time.sleep(0.01)
        return
    os.kill(os.getpid(), signal.Signals[PLAN["how"]])
    time.sleep(60)


def due(stage: int | None, phase: str, step: int | None) -> bool:
    when = {"stage": stage, "phase": phase, "step": step}
    here = PLAN["replica"] in (None, REPLICA)
    return here and all(PLAN[key] == value for key, value in when.items() if value is not None)


def reach(stage: int, phase: str, step: int | None) -> None:
    """A stage is here: it fails, or the driver has its time for that."""
    if due(stage, phase, step):
        fail()
    elif stage == 0 and driver_is_due(phase, step):
        time.sleep(LASTING)


def driver_is_due(phase: str, step: int | None) -> bool:
    return PLAN["stage"] is None and due(None, phase, step) and not failed()


def driver_reaches(phase: str, step: int | None) -> None:
    if driver_is_due(phase, step):
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
        newest = rpcpipe.latest(KEPT)
        self.calls = M * number_of(newest) if newest else 0
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


def fail_in_leaving(module: nn.Module | None = None) -> None:
    leave = transport.leave

    def fail_and_leave(meet: Any) -> None:
        fail()
        leave(meet)

    transport.leave = fail_and_leave


fsync = os.fsync


def fsync_or_fail(handle: int) -> None:
    """Fails in the middle of a checkpoint, where a part of it is not yet on the disk."""
    path = Path(os.readlink(f"/proc/self/fd/{handle}"))
    driver = not Trip.here
    for phase, is_here in (
        ("writing", path.suffix == ".distcp"),
        ("completing", driver and path.name.startswith(".metadata")),
        ("renaming", driver and path.is_dir() and path.suffix == ".tmp"),
        ("renamed", driver and path == KEPT),
    ):
        stage = None if driver else Trip.here[0].stage
        if is_here and PLAN["stage"] == stage and due(stage, phase, number_of(path) - 1):
            if PLAN["how"] == "SIGKILL" and path.is_file():
                os.ftruncate(handle, os.fstat(handle).st_size // 2)
            fail()
    fsync(handle)


def number_of(path: Path) -> int:
    """That of the checkpoint this belongs to."""
    for part in (path, path.parent, rpcpipe.latest(path)):
        if part is not None and part.name.startswith("checkpoint-"):
            return int(part.name.split("-")[1].split(".")[0])
    return 0


os.fsync = fsync_or_fail


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
        note("weights", step=first, digest=digest(pipe))
    for step in range(first, STEPS):
        one_step(pipe, step)
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    note("final", digest=digest(pipe), first=first, restarts=restarts)
    if PLAN["phase"] == "shutdown" and PLAN["replica"] in (None, REPLICA) and not failed():
        if PLAN["stage"] is None:
            fail_in_leaving()
        else:
            pipe.apply_to_stage(PLAN["stage"], fail_in_leaving)


def one_step(pipe: rpcpipe.Pipe, step: int) -> None:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    driver_reaches("forward", step)
    loss = pipe(x).pow(2).mean()
    driver_reaches("backward", step)
    loss.backward()
    driver_reaches("optimizer", step)
    for j in range(STAGES):
        pipe.apply_to_stage(j, descend)
    driver_reaches("save", step)
    if PLAN["phase"] != "never":
        pipe.save(KEPT, keep=2, block="FAULT_BESIDE" not in os.environ, step=step + 1)
    note("weights", step=step + 1, digest=digest(pipe))
    if PLAN["phase"] == "idle" and due(PLAN["stage"], "idle", step) and not failed():
        idle(pipe)


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
        note("ports", ports=ports())

    return declare_lost


transport.declare_lost = noticing(transport.declare_lost)

if __name__ == "__main__":
    try:
        rpcpipe.run(train, stages=STAGES, replicas=REPLICAS)
    except rpcpipe.StageLost as exc:
        note("ended", stage=exc.stage, gone=exc.pid, how=exc.how)
        raise
    sys.stdout.write("trained\n")
