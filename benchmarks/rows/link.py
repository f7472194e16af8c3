"""Link: a step over a 1 Gbit/s network, between two hosts emulated by network namespaces.

Both hosts share this machine's kernel. What would betray that is closed: each has its own PID, IPC
and UTS namespaces, so that TensorPipe's `cma` channel, which copies between processes, sees that it
cannot; and the bytes that went over the link are counted by its interfaces.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import rpcpipe
from benchmarks import workloads
from benchmarks.children import Commands, Group, free_port
from benchmarks.harness import even
from benchmarks.peers.pipelining import Pipelining
from benchmarks.record import Result, Row, Skipped
from rpcpipe.schedule import Costs, ideal_time

BITS = 1e9  # a second
MODE = "never"
ADDRESSES = "10.213.77.1", "10.213.77.2"


# --------------------------------------------------------------------------------- the two hosts


def _ip(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


class Hosts:
    """Two namespaces, each with one end of a cable."""

    def __init__(self) -> None:
        tag = f"{os.getpid() % 100000}"
        self.names = f"rpb{tag}a", f"rpb{tag}b"

    def build(self) -> None:
        a, b = self.names
        for name in self.names:
            _ip("ip", "netns", "add", name)
        _ip("ip", "link", "add", a, "netns", a, "type", "veth", "peer", "name", b, "netns", b)
        for name, address in zip(self.names, ADDRESSES, strict=True):
            _ip("ip", "-n", name, "addr", "add", f"{address}/24", "dev", name)
            _ip("ip", "-n", name, "link", "set", name, "up")
            _ip("ip", "-n", name, "link", "set", "lo", "up")
            rate = ("rate", f"{BITS:.0f}bit", "burst", "256kb", "latency", "50ms")
            _ip("tc", "-n", name, "qdisc", "add", "dev", name, "root", "tbf", *rate)

    def destroy(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def prefixes(self) -> list[list[str]]:
        """What a command line on each host begins with."""
        alone = ["unshare", "--pid", "--ipc", "--uts", "--fork", "--kill-child", "--mount-proc"]
        return [
            ["ip", "netns", "exec", name, *alone, "sh", "-c", f'hostname {name}; exec "$@"', "-"]
            for name in self.names
        ]

    def environment(self) -> list[dict[str, str]]:
        """What a launcher would set, for a world of one process on each host."""
        port = str(free_port())
        return [
            {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": ADDRESSES[0],
                "MASTER_PORT": port,
                "TP_SOCKET_IFNAME": name,
                "GLOO_SOCKET_IFNAME": name,
                "OMP_NUM_THREADS": "1",
            }
            for rank, name in enumerate(self.names)
        ]

    def sent(self) -> int:
        """Bytes that both ends have sent so far."""
        total = 0
        for name in self.names:
            file = f"/sys/class/net/{name}/statistics/tx_bytes"
            command = ["ip", "netns", "exec", name, "cat", file]
            total += int(subprocess.run(command, check=True, capture_output=True).stdout)
        return total


def obstacle() -> str | None:
    """Why there can be no such hosts here, if so."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces take root on Linux"
    missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    return f"there is no {', '.join(missing)} here" if missing else None


@contextmanager
def hosts() -> Iterator[Hosts]:
    made = Hosts()
    try:
        made.build()
        yield made
    finally:
        made.destroy()


# ------------------------------------------------------------------------------- who is measured


def model(wide: int) -> nn.Sequential:
    """Two stages with little to compute, and ``4 wide`` bytes a row between them."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, wide), nn.Tanh(), nn.Linear(wide, 32), nn.Linear(32, 8)
    )  # fmt: skip


def batch(rows: int) -> Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(1))


def _one_thread(_: nn.Module) -> None:
    """Each host sees two cores and gives its stage two threads; there are two for both hosts."""
    torch.set_num_threads(1)


class Ours:
    """A process of ours; the first host's holds the driver as well."""

    def __init__(self, rank: int, n: int, port: int) -> None:
        self.rank = rank

    def serve(self, commands: Commands) -> None:
        commands.ready()
        rpcpipe.run(self._drive, commands, stages=2, driver="shared")

    def _drive(self, world: rpcpipe.World, commands: Commands) -> None:
        self.world = world
        commands.follow(self)

    def load(self, wide: int, rows: int) -> None:
        whole = model(wide)
        self.pipe = rpcpipe.Pipe(
            whole, self.world, balance=even(4, 2), chunks=workloads.M, checkpoint=MODE
        )
        for j in range(2):
            self.pipe.apply_to_stage(j, _one_thread)
        self.x = batch(rows)

    def time(self) -> float:
        start = time.perf_counter()
        workloads.loss(self.pipe(self.x)).backward()
        return time.perf_counter() - start

    def gradients(self) -> dict[str, Tensor]:
        each = [self.pipe.apply_to_stage(j, workloads.gradients) for j in range(2)]
        self.pipe.zero_grad()
        return {name: gradient for stage in each for name, gradient in stage.items()}

    def costs(self) -> list[tuple[float, float]]:
        """Seconds of F and B in each stage, as recorded in a step."""
        with self.pipe.record() as timeline:
            self.time()
        return [
            (
                median(e.end - e.start for e in stage if e.task.kind == "F"),
                median(e.end - e.start for e in stage if e.task.kind == "B"),
            )
            for stage in timeline.events
        ]


class Theirs(Pipelining):
    """torch.distributed.pipelining with the same model."""

    def prepare(self, wide: int, rows: int) -> None:
        self.use(model(wide), batch(rows), MODE)


class Wire:
    """One end of a bare socket, to see what the link gives."""

    def __init__(self, rank: int, n: int, port: int) -> None:
        self.rank, self.port = rank, port

    def serve(self, commands: Commands) -> None:
        commands.ready()
        commands.follow(self)

    def carry(self, count: int) -> float:
        """Seconds in which ``count`` bytes come from the first host to the second."""
        if self.rank == 1:
            with socket.create_server((ADDRESSES[1], self.port)) as server:
                connection, _ = server.accept()
                return _read(connection, count)
        with _dial(ADDRESSES[1], self.port) as connection:
            connection.sendall(bytes(count))
        return 0.0


def _dial(address: str, port: int) -> socket.socket:
    for _ in range(500):
        try:
            return socket.create_connection((address, port))
        except ConnectionRefusedError:
            threading.Event().wait(0.01)
    raise TimeoutError(f"nobody listens at {address}:{port}")


def _read(connection: socket.socket, count: int) -> float:
    start, buffer = time.perf_counter(), bytearray(1 << 20)
    while count > 0:
        count -= connection.recv_into(buffer)
    return time.perf_counter() - start


# ------------------------------------------------------------------------------------- the row


def measure(where: Hosts, quick: bool) -> list[Result]:
    wide, rows, rounds = (4096, 64, 1) if quick else (16384, 512, 5)
    payload = 2 * rows * wide * 4  # forward and backward
    prefixes = where.prefixes()
    with ExitStack() as stack:

        def group(actor: type, environment: Any = None) -> Group:
            made = Group(actor, 2, prefixes=prefixes, environment=environment)
            return stack.enter_context(made)

        wire = group(Wire)
        ours, theirs = group(Ours, where.environment()), group(Theirs, where.environment())
        ours.call("load", wide, rows, ranks=[0])
        theirs.call("prepare", wide, rows)
        variants = {
            "ours": lambda: float(ours.call("time", ranks=[0])[0]),
            "theirs": lambda: float(max(theirs.call("time"))),
        }
        for once in variants.values():
            once()  # not counted
        ours.call("gradients", ranks=[0])
        theirs.call("gradients")
        times: dict[str, list[float]] = {name: [] for name in variants}
        bytes_sent: dict[str, list[int]] = {name: [] for name in variants}
        bare = []
        for _ in range(rounds):
            for name, once in variants.items():
                before = where.sent()
                times[name].append(once())
                bytes_sent[name].append(where.sent() - before)
            bare.append(max(wire.call("carry", payload // 2)) * 2)
        same(ours, theirs)
        (costs,) = ours.call("costs", ranks=[0])
    found = {name: median(t) for name, t in times.items()}
    compute = ideal_time(workloads.M, 2, [Costs(f, b, 0) for f, b in costs], MODE)
    least = max(compute, payload * 8 / BITS)
    detail = {
        "step_ms": found["ours"] * 1e3,
        "compute_limit_ms": compute * 1e3,
        "bytes/bandwidth_ms": payload * 8e3 / BITS,
        "bare_socket_ms": median(bare) * 1e3,
        "payload_mb": payload / 1e6,
        "seen on the link_mb": median(bytes_sent["ours"]) / 1e6,
    }
    on_wire = min(b for each in bytes_sent.values() for b in each) / payload
    return [
        Result(
            "step / max(compute limit, bytes/bandwidth)", found["ours"] / least, 1.1, detail=detail
        ),
        Result(
            "torch pipelining: the same",
            found["theirs"] / least,
            detail={"step_ms": found["theirs"] * 1e3},
        ),
        Result("step / torch pipelining", found["ours"] / found["theirs"], 1.0),
        Result("bytes on the link / payload, least of all steps", on_wire, 1.0, atmost=False),
    ]


def same(ours: Group, theirs: Group) -> None:
    """Both have done the same number of steps since their gradients were taken."""
    from benchmarks.rows.steps import check_same, gradients_of

    (wanted,) = ours.call("gradients", ranks=[0])
    check_same("torch pipelining", gradients_of(theirs), wanted)


def run(quick: bool) -> Row:
    reason = obstacle()
    if reason is not None:
        return Skipped(reason)
    try:
        with hosts() as where:
            return measure(where, quick)
    except subprocess.CalledProcessError as exc:
        return Skipped(f"`{' '.join(exc.cmd)}` failed: {exc.stderr.strip()}")
