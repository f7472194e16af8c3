"""Jobs over several hosts, which are network namespaces here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from hosts import RECIPES, RUN, TORCHRUN, Hosts, put_on_path


def missing() -> str | None:
    """Why there can be no hosts here."""
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    if shutil.which("ip") is None:
        return "takes iproute2"
    probe = subprocess.run(["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "true"])
    return "this container may not make namespaces" if probe.returncode else None


REASON = missing()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")

IMPORTS = """
import json, os, socket, subprocess, sys, time
import psutil, torch
from torch import nn
import rpcpipe
"""

TRAIN = """
WIDTH = 256


def sent(stage):
    with open("/sys/class/net/eth0/statistics/tx_bytes") as file:
        return int(file.read())


def listening(stage):
    # all processes of this host
    ends = [e for p in psutil.process_iter() for e in p.net_connections(kind="tcp")]
    return sorted({e.laddr.ip for e in ends if e.status == psutil.CONN_LISTEN})


def descend(stage):
    for parameter in stage.parameters():
        parameter.data -= 0.01 * parameter.grad
        parameter.grad = None


def train(world):
    torch.manual_seed(0)
    n = world.stages
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(n)])
    pipe = rpcpipe.Pipe(model, world, balance=[1] * n, chunks=2)
    before = [pipe.apply_to_stage(j, sent) for j in range(n)]
    x, losses = torch.randn(1024, WIDTH), []
    for _ in range(3):
        loss = pipe(x).pow(2).mean()
        loss.backward()
        for j in range(n):
            pipe.apply_to_stage(j, descend)
        losses.append(loss.item())
    after = [pipe.apply_to_stage(j, sent) for j in range(n)]
    line = json.dumps({
        "replica": world.replica,
        "hosts": world.hosts(),
        "losses": losses,
        "listening": [pipe.apply_to_stage(j, listening) for j in range(n)],
        "sent": [b - a for a, b in zip(before, after)],
    })
    sys.stdout.write(f"facts {line}\\n")


if __name__ == "__main__":
    rpcpipe.run(train)
"""


def script(folder: Path, body: str = TRAIN) -> Path:
    path = folder / "train.py"
    path.write_text(IMPORTS + textwrap.dedent(body))
    return path


def finish(*nodes: subprocess.Popen[str]) -> tuple[list[dict[str, Any]], str]:
    """The facts that drivers have printed when all nodes have succeeded; and what else is shown."""
    outputs = [node.communicate() for node in nodes]
    shown = "".join(out + err for out, err in outputs)
    assert [node.returncode for node in nodes] == [0] * len(nodes), shown
    lines = [line for out, _ in outputs for line in out.splitlines() if line.startswith("facts ")]
    facts = [json.loads(line.removeprefix("facts ")) for line in lines]
    for found in facts:
        assert found["losses"] == sorted(found["losses"], reverse=True)
    return sorted(facts, key=lambda found: found["replica"]), shown


def test_two_hosts_by_names_that_are_dead_ends(tmp_path: Path) -> None:
    """Four stages; the host without the store is there first, by ten seconds."""
    with Hosts(tmp_path, 2, dead_end=True) as hosts:
        train = script(tmp_path)
        recipe = ("bash", RECIPES / "two_hosts.sh")
        env = {"STAGES": "4", **put_on_path(tmp_path)}
        second = hosts.start(2, *recipe, "1", hosts.address(1), train, **env)
        time.sleep(10.0)  # what is tested is the order, and that it may be long
        first = hosts.start(1, *recipe, "0", hosts.address(1), train, **env)
        (found,), shown = finish(first, second)
    assert found["hosts"] == [
        "pipe 0: driver node-1:0, stage 0 node-1:0 cpu, stage 1 node-1:1 cpu, "
        "stage 2 node-2:0 cpu, stage 3 node-2:1 cpu"
    ]
    assert "Warning" not in shown
    assert found["listening"] == [["10.77.0.1"], ["10.77.0.1"], ["10.77.0.2"], ["10.77.0.2"]]
    crossed = 3 * 1024 * 256 * 4  # bytes of activations in three steps
    assert found["sent"][1] > crossed < found["sent"][2]


def test_three_hosts_come_in_any_order(tmp_path: Path) -> None:
    """Six stages over the c10d backend, whose ranks follow addresses: stages follow names."""
    with Hosts(tmp_path, 3) as hosts:
        train = script(tmp_path)
        command = (
            *RUN, "--nnodes=3", "--stages=6", "--rdzv-backend=c10d", "--rdzv-id=a",
            f"--rdzv-endpoint={hosts.address(2)}:29400", train,
        )  # fmt: skip
        nodes = [hosts.start(i, *command, name=f"gpu-{11 - i}") for i in (1, 2, 3)]
        (found,), _ = finish(*nodes)
    places = [f"gpu-{i}:{k}" for i in (8, 9, 10) for k in (0, 1)]
    stages = [f"stage {j} {place} cpu" for j, place in enumerate(places)]
    assert found["hosts"] == [f"pipe 0: driver gpu-8:0, {', '.join(stages)}"]


def test_the_driver_has_a_host_of_its_own_under_torchrun(tmp_path: Path) -> None:
    with Hosts(tmp_path, 2) as hosts:
        train = script(tmp_path)
        command = (
            *TORCHRUN,
            "--nnodes=2",
            f"--master-addr={hosts.address(1)}",
            "--master-port=29500",
        )
        quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", "RPCPIPE_STAGES": "2"}
        first = hosts.start(1, *command, "--node-rank=0", "--nproc-per-node=1", train, **quiet)
        second = hosts.start(2, *command, "--node-rank=1", "--nproc-per-node=2", train, **quiet)
        (found,), _ = finish(first, second)
    assert found["hosts"] == ["pipe 0: driver node-1:0, stage 0 node-2:0 cpu, stage 1 node-2:1 cpu"]


def test_hosts_that_have_ipv6_alone(tmp_path: Path) -> None:
    """The host with the store is there first, by ten seconds."""
    with Hosts(tmp_path, 2, ipv6=True) as hosts:
        train = script(tmp_path)
        command = (
            *RUN, "--nnodes=2", "--stages=2", "--rdzv-backend=c10d", "--rdzv-id=a",
            f"--rdzv-endpoint=[{hosts.address(1)}]:29400", train,
        )  # fmt: skip
        first = hosts.start(1, *command)
        time.sleep(10.0)
        (found,), _ = finish(first, hosts.start(2, *command))
    assert found["hosts"] == ["pipe 0: driver node-1:0, stage 0 node-1:0 cpu, stage 1 node-2:0 cpu"]


def test_the_replicas_of_a_stage_share_a_host(tmp_path: Path) -> None:
    """Two pipelines of two stages over two hosts, each through the network; both train."""
    with Hosts(tmp_path, 2) as hosts:
        train = script(tmp_path)
        command = (
            *RUN, "--nnodes=2", "--stages=2", "--replicas=2", "--layout=dp-inner",
            f"--master-addr={hosts.address(1)}",
        )  # fmt: skip
        nodes = [hosts.start(i, *command, f"--node-rank={i - 1}", train) for i in (1, 2)]
        found, _ = finish(*nodes)
    assert [f["hosts"] for f in found] == [[
        "pipe 0: driver node-1:0, stage 0 node-1:0 cpu, stage 1 node-2:0 cpu",
        "pipe 1: driver node-1:1, stage 0 node-1:1 cpu, stage 1 node-2:1 cpu",
    ]] * 2  # fmt: skip


# ------------------------------------------------------------------------------------ slow links

SLOW = """
from functools import partial

M, SECONDS = 8, 0.03  # micro-batches; of each pass of one of them through one stage


class Rest(torch.autograd.Function):
    # Computes on a device that leaves the cores alone.
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.seconds = nn.Parameter(torch.ones(())), 0.0

    def forward(self, x):
        return Rest.apply(x * self.scale, self.seconds)


def shape(stage, rate):
    least = ("burst", str(rate // 8 // 250), "latency", "1s")
    command = ["tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", f"{rate}bit", *least]
    subprocess.run(command, check=True)


def work(stage, seconds):
    stage[0].seconds = seconds


def sent(stage):
    with open("/sys/class/net/eth0/statistics/tx_bytes") as file:
        return int(file.read())


def mean(out, target):
    return out.mean()


def step(pipe, width, seconds):
    for j in range(2):
        pipe.apply_to_stage(j, partial(work, seconds=seconds))
    x = torch.ones(M, width)
    start = time.perf_counter()
    pipe.loss(x, x[:, :1], mean).backward()
    return time.perf_counter() - start


def train(world):
    model = nn.Sequential(Layer(), Layer())
    pipe = rpcpipe.Pipe(model, world, balance=[1, 1], chunks=M, checkpoint="never")
    step(pipe, 1, 0.0)
    for rate in (100_000_000, 1_000_000_000):
        for j in range(2):
            pipe.apply_to_stage(j, partial(shape, rate=rate))
        width = int(SECONDS * rate / 8 / 4)  # a micro-batch is as long on its way as in a stage
        before = [pipe.apply_to_stage(j, sent) for j in range(2)]
        rounds = [
            (step(pipe, 1, SECONDS), step(pipe, width, 0.0), step(pipe, width, SECONDS))
            for _ in range(3)
        ]
        after = [pipe.apply_to_stage(j, sent) for j in range(2)]
        line = json.dumps({
            "replica": 0, "losses": [], "rate": rate, "ideal": 2 * M * SECONDS,
            "payload": 6 * 4 * M * width, "sent": [b - a for a, b in zip(before, after)],
            "best": [min(times) for times in zip(*rounds)],
        })
        sys.stdout.write(f"facts {line}\\n")


if __name__ == "__main__":
    rpcpipe.run(train)
"""


def test_activations_and_gradients_travel_while_stages_compute(tmp_path: Path) -> None:
    """Over 100 Mbit/s and 1 Gbit/s, and in each micro-batch as long as a stage computes.

    One after the other, the two would take their sum; side by side, a step is hardly longer than
    with either alone: by one micro-batch on its way there and back.
    """
    with Hosts(tmp_path, 2) as hosts:
        train = script(tmp_path, SLOW)
        command = (*RUN, "--nnodes=2", "--stages=2", f"--master-addr={hosts.address(1)}")
        nodes = [hosts.start(i, *command, f"--node-rank={i - 1}", train) for i in (1, 2)]
        found, _ = finish(*nodes)
    assert [f["rate"] for f in found] == [100_000_000, 1_000_000_000]
    for f in found:
        compute, transfer, both = f["best"]
        assert min(f["sent"]) >= f["payload"], f  # there, and back
        assert min(compute, transfer) > 0.9 * f["ideal"], f
        assert both < 0.75 * (compute + transfer), f
        assert both < 1.4 * max(compute, transfer), f
