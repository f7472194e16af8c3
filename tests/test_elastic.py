"""Jobs over several hosts that lose one: they go on with fewer, from the last checkpoint."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from hosts import RUN, Hosts
from test_nodes import REASON, script
from test_run import await_true
from torch import Tensor, nn

pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")

STEPS = 5
MODEL = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
TRAIN = """
import signal, threading
from pathlib import Path


def descend(stage):
    for parameter in stage.parameters():
        parameter.data -= 0.1 * parameter.grad
        parameter.grad = None


def die(stage):
    Path("died").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def hang(stage):
    Path("hangs").touch()
    threading.Event().wait()


def fail(pipe, world, step):
    alone = world.stages * world.replicas == int(os.environ["LOCAL_WORLD_SIZE"])
    if alone and step == 1 and not Path("hangs").exists():
        Path("alone").touch()
        threading.Event().wait()  # until the other host joins
    # The last stage of the last pipeline, on the second host: its process, then its host.
    if not alone and world.replica == world.replicas - 1:
        if step == 1 and world.replicas == 1 and not Path("died").exists():
            pipe.apply_to_stage(world.stages - 1, die)
        if step == 3:
            pipe.apply_to_stage(world.stages - 1, hang)


def train(world):
    balance = rpcpipe.balance.partition([1, 0, 1], world.stages)
    model = torch.load("model.pt", weights_only=False)
    pipe = rpcpipe.Pipe(model, world, balance=balance, chunks=2)
    start = pipe.load("kept")["step"] if rpcpipe.latest("kept") else 0
    if world.replica == 0:
        tell("began", [start, world.stages, world.replicas])
    for step, batch in enumerate(torch.load("batches.pt")[start:], start):
        fail(pipe, world, step)
        pipe(batch[world.replica :: world.replicas]).pow(2).mean().backward()
        for j in range(world.stages):
            pipe.apply_to_stage(j, descend)
        pipe.save("kept", step=step + 1)
        world.all_reduce(0.0)  # the first replica has saved it
    tell("weights", {name: value.tolist() for name, value in pipe.state_dict().items()})


def tell(what, value):
    sys.stdout.write(json.dumps({what: value}) + "\\n")
    sys.stdout.flush()


if __name__ == "__main__":
    rpcpipe.run(train)
"""


def train_here(model: nn.Module, batches: list[Tensor]) -> dict[str, Tensor]:
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        model(batch).pow(2).mean().backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize(
    ("flags", "attempts", "losses"),
    [
        (("--stages=2", "--replicas=auto"), [(0, 2, 1), (1, 2, 2), (3, 2, 1)], 1),
        (("--nproc-per-node=1",), [(0, 2, 1), (1, 2, 1), (3, 1, 1)], 2),
    ],
    ids=["replicas-follow", "stages-follow"],
)
def test_a_job_goes_on_without_a_host_that_does_not_come_back(
    tmp_path: Path, flags: tuple[str, ...], attempts: list[tuple[int, int, int]], losses: int
) -> None:
    """Of each attempt: the step it began after, its stages and its replicas.

    With one pipeline on each host, the second host joins a job that has begun without it. In the
    pipeline over both, a process on the second is killed. In the end, all that is on it.
    """
    batches = [torch.randn(8, 4) for _ in range(STEPS)]
    torch.save(MODEL, tmp_path / "model.pt")
    torch.save(batches, tmp_path / "batches.pt")
    with Hosts(tmp_path, 2) as hosts:
        command = (
            *RUN, *flags, "--nnodes=1:2", "--max-restarts=3", "--rdzv-backend=c10d",
            "--rdzv-id=a", f"--rdzv-endpoint={hosts.address(1)}:29400",
            "--rdzv-conf=last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3",
            script(tmp_path, TRAIN),
        )  # fmt: skip
        first = hosts.start(1, *command)
        if attempts[0][1:] == attempts[-1][1:]:
            await_true((tmp_path / "alone").exists, 60.0)
        second = hosts.start(2, *command)
        await_true((tmp_path / "hangs").exists, 60.0)
        second.kill()
        out, err = first.communicate(timeout=60)
    assert first.returncode == 0, err
    *began, last = map(json.loads, out.splitlines())
    # One that comes late to a restart begins another: there may be more than these.
    found = iter(tuple(line["began"]) for line in began)
    assert all(attempt in found for attempt in attempts), (began, err)
    assert attempts[-1] == tuple(began[-1]["began"])
    assert err.count("StageLost: the process of ") == losses, err
    for name, value in train_here(MODEL, batches).items():
        torch.testing.assert_close(torch.tensor(last["weights"][name]), value)
