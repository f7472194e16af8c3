"""A process dies, freezes or is cut off, whatever it is doing: it is named in time, and all ends.

`faulty.py` is what runs. ``make test-faults`` runs every combination and random ones; otherwise
there is a choice that has each role, each phase and each way to fail.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hosts import RUN, Hosts
from nets import INTERFACE, Cable, why_not
from test_nodes import REASON
from test_run import TORCHRUN, Ended, Lab, await_true, lab
from toys import mlp

import rpcpipe
from rpcpipe import liveness
from rpcpipe.liveness import Limits

__all__ = ["lab"]

SCRIPT = Path(__file__).with_name("faulty.py")
PHASES = ("construction", "idle", "forward", "backward", "optimizer", "save", "shutdown")
HEARTBEAT = 2.0
SLACK = 1.5  # seconds for a loaded machine to run what was woken in time
FULL = "RPCPIPE_FAULTS" in os.environ  # the number of random failures
TIMES: dict[str, list[float]] = {"SIGKILL": [], "SIGSTOP": [], "cut": []}  # until all knew


@dataclass(frozen=True)
class Fault:
    stage: int | None  # None: the driver
    step: int
    phase: str
    how: str

    def __str__(self) -> str:
        who = "driver" if self.stage is None else f"stage{self.stage}"
        return f"{who}-{self.phase}-{self.how}"


def fail_at(stage: int | None, phase: str, how: str = "SIGKILL", step: int = 2) -> Fault:
    return Fault(stage, step, phase, how)


class Case:
    """One run of the script, and the notes its processes have left."""

    def __init__(self, lab: Lab, fault: Fault) -> None:
        self.lab, self.fault = lab, fault
        self.notes_file, kept = lab.folder / "notes", lab.folder / "kept"
        self.env = {
            "FAULT": json.dumps(vars(fault)),
            "FAULT_NOTES": str(self.notes_file),
            "FAULT_KEPT": str(kept),
            "RPCPIPE_HEARTBEAT": str(HEARTBEAT),
            "OMP_NUM_THREADS": "1",
        }

    def run(self, *launcher: str) -> Ended:
        return self.lab.run(*(launcher or (sys.executable, "-u")), str(SCRIPT), **self.env)

    def notes(self, what: str) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in self.notes_file.read_text().splitlines()]
        return [n for n in found if n["what"] == what]

    def check_noticed(self, least: int) -> None:
        """The others have noticed in time, and whom.

        Some may have been ended by the driver before.
        """
        (failed,) = self.notes("failed")
        noticed = [n for n in self.notes("noticed") if n["pid"] != failed["pid"]]
        assert len({n["pid"] for n in noticed}) >= least, noticed
        limit = 1.0 if self.fault.how == "SIGKILL" else HEARTBEAT
        role = "the driver" if self.fault.stage is None else f"stage {self.fault.stage}"
        for note in noticed:  # nothing else is lost, not even one's own watcher at the end
            assert role in note["text"], note
            assert f"(pid {failed['pid']}, host {socket.gethostname()})" in note["text"]
        last = float(max(n["time"] for n in noticed) - failed["time"])
        assert last < limit + SLACK, f"noticed after {last:.2f} s"
        TIMES[self.fault.how].append(last)

    def check_raised(self) -> None:
        """The driver has raised `StageLost` with its attributes."""
        if self.fault.stage is None:
            return
        (failed,), (raised,) = self.notes("failed"), self.notes("ended")
        assert (raised["stage"], raised["pid"]) == (self.fault.stage, failed["pid"])
        if self.fault.phase not in ("construction", "shutdown"):
            (raised,) = self.notes("raised")
            done = self.fault.phase in ("idle", "optimizer", "save")
            assert raised["step"] == self.fault.step - 1 + done


@pytest.fixture(scope="module")
def shared_memory() -> Iterator[None]:
    before = set(os.listdir("/dev/shm"))
    yield
    assert set(os.listdir("/dev/shm")) <= before


def check_ends(case: Case) -> None:
    """A plain script with this fault: all learn of it, and nothing is left."""
    ended = case.run()
    assert ended.code not in (0, None), ended
    await_true(lambda: not case.lab.processes(), 20.0)
    case.check_noticed(least=2 if case.fault.stage is None else 1)
    case.check_raised()
    if case.fault.stage is not None:
        first = next(line for line in ended.err.splitlines() if line.strip())
        named = f"rpcpipe: the process of stage {case.fault.stage} (pid"  # by its watcher
        assert first.startswith("Traceback") or named in first, ended


CHOICE = [
    fail_at(1, "construction", "SIGSTOP"),
    fail_at(None, "idle", "SIGKILL"),
    fail_at(1, "forward", "SIGSTOP"),
    fail_at(None, "backward", "SIGSTOP"),
    fail_at(0, "optimizer", "SIGKILL"),
    fail_at(1, "save", "SIGKILL"),
    fail_at(0, "shutdown", "SIGSTOP"),
]
MATRIX = [
    fail_at(stage, phase, how)
    for stage in (None, 0, 1)
    for phase in PHASES
    for how in ("SIGKILL", "SIGSTOP")
]


@pytest.mark.usefixtures("shared_memory")
@pytest.mark.parametrize("fault", MATRIX if FULL else CHOICE, ids=str)
def test_every_other_process_learns_of_it_and_ends(lab: Lab, fault: Fault) -> None:
    check_ends(Case(lab, fault))


@pytest.mark.parametrize(
    ("processes", "fault"),
    [(2, fail_at(1, "forward", "SIGSTOP")), (3, fail_at(None, "backward", "SIGSTOP"))]
    + FULL * [(2, fail_at(0, "forward", "SIGSTOP")), (3, fail_at(0, "save", "SIGSTOP"))],
    ids=str,
)
def test_a_frozen_process_under_torchrun(lab: Lab, processes: int, fault: Fault) -> None:
    case = Case(lab, fault)
    ended = case.run(*TORCHRUN, f"--nproc-per-node={processes}")
    assert ended.code == 1, ended
    case.check_noticed(least=processes - 1)
    # Where elastic looks first: the one that froze, or the driver that says so, and no other.
    telling = [n["pid"] for n in case.notes("noticed") if "the last completed step" in n["text"]]
    roots = [f"(pid: {pid})" for pid in (case.notes("failed")[0]["pid"], *telling)]
    assert any(root in ended.err.partition("Root Cause")[2] for root in roots), ended


# ------------------------------------------------------------------------------- restarted jobs


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The weights of a run in which nothing fails."""
    lab = Lab(tmp_path_factory.mktemp("undisturbed"))
    case = Case(lab, fail_at(None, "never"))
    ended = case.run()
    assert ended.code == 0, ended
    lab.close()
    return case.notes("final")[0]["weights"]


@pytest.mark.parametrize(
    "launcher",
    [(*TORCHRUN, "--nproc-per-node=3"), (*RUN, "--stages=2")],
    ids=["torchrun", "rpcpipe-run"],
)
@pytest.mark.parametrize(
    "fault", [fail_at(1, "backward")] + FULL * [fail_at(None, "forward")], ids=str
)
def test_a_job_that_is_restarted_goes_on_from_its_checkpoint(
    lab: Lab, fault: Fault, launcher: tuple[str, ...], undisturbed: Any
) -> None:
    case = Case(lab, fault)
    ended = case.run(*launcher, "--max-restarts=1")
    assert ended.code == 0, ended
    assert "trained\n" in ended.out
    check_went_on(case, undisturbed)


def check_went_on(case: Case, undisturbed: Any) -> None:
    """By the first restart, from the last step that was saved; to the same weights, bit for bit."""
    (final,) = case.notes("final")
    assert (final["restarts"], final["first"]) == ("1", case.fault.step)
    assert final["weights"] == undisturbed


@pytest.mark.skipif(REASON is not None, reason=REASON or "")
def test_a_job_over_two_hosts_is_restarted_by_the_launchers_of_both(
    lab: Lab, undisturbed: Any
) -> None:
    case = Case(lab, fail_at(1, "backward"))
    env = {**case.env, "TMPDIR": str(lab.tmp)}
    with Hosts(lab.folder, 2) as hosts:
        address = f"--master-addr={hosts.address(1)}"
        command = (*RUN, "--nnodes=2", "--stages=2", "--max-restarts=1", address)
        nodes = [hosts.start(i, *command, f"--node-rank={i - 1}", SCRIPT, **env) for i in (1, 2)]
        ended = [Ended(node) for node in nodes]
    assert [node.code for node in ended] == [0, 0], ended
    assert "failed (exitcode: -9) local_rank: 0" in ended[1].err, "the stage on the second host"
    check_went_on(case, undisturbed)


# ------------------------------------------------------------------------------- the network


def start_on_hosts(case: Case, cable: Cable) -> list[subprocess.Popen[str]]:
    """Driver and stage 0 on one host, stage 1 on the other, as a launcher would start them."""
    common = {
        **case.env,
        **dict.fromkeys(("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"), INTERFACE),
        "MASTER_ADDR": cable.ADDRESSES[0],
        "MASTER_PORT": "29400",
        "WORLD_SIZE": "3",
    }
    ranks = ((0, "0", "2", 0), (1, "1", "2", 0), (2, "0", "1", 1))
    return [
        case.lab.start(
            *cable.on(host, sys.executable, "-u", str(SCRIPT)),
            **common, RANK=str(rank), LOCAL_RANK=local, LOCAL_WORLD_SIZE=size, GROUP_RANK=str(host),
        )
        for rank, local, size, host in ranks
    ]  # fmt: skip


@pytest.mark.parametrize(
    "fault",
    [fail_at(1, "backward", "cut")] + FULL * [fail_at(1, p, "cut") for p in PHASES],
    ids=str,
)
def test_a_host_that_is_cut_off(lab: Lab, fault: Fault) -> None:
    if reason := why_not():
        pytest.skip(reason)
    case = Case(lab, fault)
    with Cable() as cable:
        processes = start_on_hosts(case, cable)
        await_true(lambda: case.notes_file.exists() and bool(case.notes("failed")), 60.0)
        cable.cut()
        start = time.monotonic()
        ended = [Ended(process) for process in processes]
    assert [e.code for e in ended] == [1, 1, ended[2].code], ended
    assert ended[2].code != 0, ended
    noticed = {n["pid"]: n for n in case.notes("noticed")}
    assert len(noticed) == 3, (noticed, ended)
    TIMES["cut"].append(max(n["time"] for n in noticed.values()) - start)
    assert TIMES["cut"][-1] < HEARTBEAT + SLACK
    (raised,) = case.notes("ended")
    assert raised["stage"] == 1
    assert "has not been heard for" in raised["how"]
    cut_off = noticed[case.notes("failed")[0]["pid"]]
    assert "the process of the driver" in cut_off["text"], "it does not know that it is cut off"


# ------------------------------------------------------------------------- slow, and too slow

SLOW = """
import ctypes


class Holding(nn.Module):
    def forward(self, x):  # as a C extension that does not let go of the interpreter's lock
        ctypes.PyDLL(None).usleep(int(x[0, 0] * 1e6))
        return x


def train(world):
    model = nn.Sequential(nn.Identity(), Holding(), nn.Identity())
    pipe = rpcpipe.Pipe(model, world, balance=[1, 1, 1])
    pipe(torch.zeros(2, 1))
    print(pipe(torch.full((2, 1), float(os.environ["SECONDS_HELD"]))).shape)


if __name__ == "__main__":
    rpcpipe.run(train, stages=3, heartbeat=2.0)
"""


def test_a_stage_that_is_slow_and_holds_the_interpreter_is_not_lost(lab: Lab) -> None:
    ended = lab.run(lab.script(SLOW), SECONDS_HELD="5")
    assert (ended.code, ended.out, ended.err) == (0, "torch.Size([2, 1])\n", "")


def test_a_deadline_has_every_process_tell_what_it_does(lab: Lab) -> None:
    ended = lab.run(lab.script(SLOW), SECONDS_HELD="60", RPCPIPE_TIMEOUT="3")
    assert ended.code == 1
    told, _, raised = ended.err.partition("\nTraceback")
    assert "the driver waits for micro-batch 0 of step 1 since 3." in told, ended
    assert "in _exchange\n" in told, "the driver's stacks"
    assert "[stage 0]   stage 0 waits for the backward pass of step 1 to begin since" in told
    assert "[stage 2]   stage 2 waits for micro-batch 0 of step 1 from stage 1 since" in told
    assert "[stage 1] rpcpipe: the process of stage 1 does not get to answer" in told
    assert "in forward" in told, "the stack of the layer, whose thread holds the lock"
    assert "StageTimeout: waited 3 s for micro-batch 0 of step 1" in raised


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"heartbeat": 0.5}, "heartbeat= is at least 1 second, got 0.5"),
        ({"heartbeat": "soon"}, "heartbeat= is a number of seconds above 0, got 'soon'"),
        ({"heartbeat": True}, "heartbeat= is a number"),
        ({"timeout": 0}, "timeout= is a number of seconds above 0, got 0"),
        ({"timeout": float("nan")}, "timeout= is a number"),
    ],
)
def test_limits_that_are_none_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        rpcpipe.run(print, stages=2, **options)


def test_limits_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RPCPIPE_HEARTBEAT", "4")
    monkeypatch.setenv("RPCPIPE_TIMEOUT", "inf")
    assert Limits.of(None, None) == Limits(4.0, None)
    assert Limits.of(2.0, 7.0) == Limits(2.0, 7.0)
    monkeypatch.setenv("RPCPIPE_TIMEOUT", "ever")
    with pytest.raises(ValueError, match="RPCPIPE_TIMEOUT is a number of seconds"):
        Limits.of(None, None)


# ------------------------------------------------------------------------------ small matters


def test_stage_lost_travels_whole() -> None:
    told = {"stage": 1, "host": "a", "pid": 7, "step": 41, "how": "exited with code 1"}
    lost = pickle.loads(pickle.dumps(rpcpipe.StageLost("the process of stage 1", **told)))
    assert (str(lost), vars(lost)) == ("the process of stage 1", told)
    assert vars(lost.during("its answer")) == told


@pytest.mark.parametrize("world", [2], indirect=True)
@pytest.mark.parametrize(
    "says",
    [
        b'{"kind": "hello", "token": "of another job", "who": {}}\n{"kind": "gone", "how": "?"}\n',
        b'{"kind": "gone", "how": "without a hello"}\n',
        b"GET / HTTP/1.1\r\n\r\n",
        b'[]\n{"kind":',
        b"x" * 2**21,
    ],
)
def test_a_stranger_on_the_watchers_port_is_turned_away(world: rpcpipe.World, says: bytes) -> None:
    pipe = rpcpipe.Pipe(mlp(), world, balance=[3, 3])
    (hub,) = liveness.watchers([os.getpid()])
    (port,) = {end.laddr.port for end in hub.net_connections() if end.status == "LISTEN"}
    connected = socket.create_connection(("127.0.0.1", port), timeout=10)
    with connected as stranger, suppress(ConnectionError):
        stranger.sendall(says)
        while stranger.recv(65536):
            pass
    pipe(torch.ones(2, 4)).sum().backward()


# ----------------------------------------------------------------------------------- the soak


def test_a_hundred_steps_hold_no_more_than_twenty() -> None:
    command = [sys.executable, "-m", "benchmarks.soak", "--steps", "100"]
    folder = SCRIPT.parent.parent
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, (ended.stdout, ended.stderr)
    assert ended.stdout.endswith("flat\n")
    assert len(ended.stdout.splitlines()) == 1 + 10 * 3 + 1


# ------------------------------------------------------------------------------ random failures


@pytest.mark.skipif(not FULL, reason="make test-faults runs it")
@pytest.mark.timeout(7200)
def test_random_failures_resume_bitwise(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str], undisturbed: Any
) -> None:
    count = int(os.environ["RPCPIPE_FAULTS"])
    draw = random.Random(0)
    for k in range(count):
        where = draw.choice((None, 0, 1)), draw.choice(PHASES), draw.choice(("SIGKILL", "SIGSTOP"))
        fault = fail_at(*where, step=draw.randrange(1, 5))
        lab = Lab(tmp_path_factory.mktemp("fault"))
        case = Case(lab, fault)
        check_ends(case)
        ended = case.run()
        assert ended.code == 0, (fault, ended)
        assert case.notes("final")[-1]["weights"] == undisturbed, fault
        assert not lab.processes()
        assert not list(lab.tmp.iterdir()), fault
        lab.close()
        with capsys.disabled():
            print(f"\n{k + 1} of {count}: {fault}-step{fault.step} named, resumed bitwise, "
                  "nothing left", end="")  # fmt: skip
    with capsys.disabled():
        print("\nseconds until the last process knew, with those of the matrix:")
        for how, found in TIMES.items():
            spread = (min(found), statistics.median(found), max(found)) if found else ()
            print(f"{how:8s}{len(found):5d} times", *(f"{seconds:8.3f}" for seconds in spread))
