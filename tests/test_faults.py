"""A process dies, freezes or is cut off, whatever it is doing: it is named in time, and all ends.

`faulty.py` is what runs. ``make test-faults`` runs every combination and random ones; otherwise
there is a choice that has each role, each phase and each way to fail.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hosts import RUN, Hosts
from nets import INTERFACE, Cables, why_not
from test_nodes import REASON
from test_run import TORCHRUN, Ended, Lab, await_true, lab
from torch import nn
from toys import digest, mlp

import rpcpipe
from rpcpipe import liveness
from rpcpipe.liveness import Limits

__all__ = ["lab"]

SCRIPT = Path(__file__).with_name("faulty.py")
PHASES = (
    "construction", "idle", "forward", "backward", "optimizer", "save", "writing", "shutdown"
)  # fmt: skip
AFTER_THE_STEP = ("idle", "optimizer", "save", "writing", "completing", "renaming", "renamed")
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
    replica: int | None = None  # the pipeline, where there are two

    def __str__(self) -> str:
        who = "driver" if self.stage is None else f"stage{self.stage}"
        pipeline = "" if self.replica is None else f"-of{self.replica}"
        return f"{who}{pipeline}-{self.phase}-{self.how}"

    @property
    def role(self) -> str:
        """What others say of the process."""
        if self.replica is None:
            return "the driver" if self.stage is None else f"stage {self.stage}"
        return (
            f"{'the driver and ' * (self.stage == 0)}stage {self.stage} of pipeline {self.replica}"
        )

    @property
    def limit(self) -> float:
        """Seconds until all know."""
        return 1.0 if self.how == "SIGKILL" else HEARTBEAT


def fail_at(
    stage: int | None, phase: str, how: str = "SIGKILL", step: int = 2, replica: int | None = None
) -> Fault:
    return Fault(stage, step, phase, how, replica)


class Case:
    """One run of the script, and the notes its processes have left."""

    def __init__(self, lab: Lab, fault: Fault, kept: Path | None = None, **env: str) -> None:
        self.lab, self.fault = lab, fault
        self.notes_file, self.kept = lab.folder / "notes", kept or lab.folder / "kept"
        self.first = steps_kept(self.kept)
        self.shared_memory = set(os.listdir("/dev/shm"))
        self.env = {
            "FAULT": json.dumps(vars(fault)),
            "FAULT_NOTES": str(self.notes_file),
            "FAULT_KEPT": str(self.kept),
            "RPCPIPE_HEARTBEAT": str(HEARTBEAT),
            "OMP_NUM_THREADS": "1",
            **env,
        }

    def run(self, *launcher: str) -> Ended:
        return self.lab.run(*(launcher or (sys.executable, "-u")), str(SCRIPT), **self.env)

    def start_ranks(self, size: int, cables: Cables | None = None) -> list[subprocess.Popen[str]]:
        """Start all processes as a launcher would, here or each on a host of its own."""
        common = {**self.env, "WORLD_SIZE": str(size)}
        if cables is None:
            address, port = "127.0.0.1", free_port()
            places = {"LOCAL_WORLD_SIZE": str(size), "GROUP_RANK": "0"}
        else:
            address, port = cables.addresses[0], 29400
            places = {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
            common |= dict.fromkeys(("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"), INTERFACE)
        common |= {"MASTER_ADDR": address, "MASTER_PORT": str(port), **places}
        own = "LOCAL_RANK" if cables is None else "GROUP_RANK"
        command = (sys.executable, "-u", str(SCRIPT))
        return [
            self.lab.start(
                *(command if cables is None else cables.on(rank, *command)),
                **{**common, "RANK": str(rank), own: str(rank)},
            )
            for rank in range(size)
        ]

    def notes(self, what: str) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in self.notes_file.read_text().splitlines()]
        return [n for n in found if n["what"] == what]

    def await_failed(self) -> dict[str, Any]:
        await_true(lambda: self.notes_file.exists() and bool(self.notes("failed")), 60.0)
        return self.notes("failed")[0]

    def check_noticed(self, least: int, since: float | None = None) -> None:
        """The others have noticed in time, and whom.

        Some may have been ended by the driver before.
        """
        (failed,) = self.notes("failed")
        noticed = [n for n in self.notes("noticed") if n["pid"] != failed["pid"]]
        assert len({n["pid"] for n in noticed}) >= least, noticed
        for note in noticed:  # nothing else is lost, not even one's own watcher at the end
            who = f"{self.fault.role} (pid {failed['pid']}, host {socket.gethostname()})"
            assert who in note["text"], note
        last = float(max(n["time"] for n in noticed) - (since or failed["time"]))
        assert last < self.fault.limit + SLACK, f"noticed after {last:.2f} s"
        TIMES[self.fault.how].append(last)

    def check_raised(self) -> None:
        """The driver has raised `StageLost` with its attributes."""
        if self.fault.stage is None:
            return
        (failed,), (raised,) = self.notes("failed"), self.notes("ended")
        assert (raised["stage"], raised["gone"]) == (self.fault.stage, failed["pid"])
        if self.fault.phase not in ("construction", "shutdown"):
            (raised,) = self.notes("raised")
            # Steps are counted from where this process has begun; one may be beside a saving.
            done = self.fault.step - self.first - 1 + (self.fault.phase in AFTER_THE_STEP)
            ahead = "FAULT_BESIDE" in self.env
            assert raised["step"] in (done if done >= 0 else None, done + ahead)
            took = raised["time"] - failed["time"]
            assert took < self.fault.limit + liveness.BREAK_OFF + SLACK, (
                f"raised after {took:.2f} s"
            )

    def check_nothing_is_left(self) -> None:
        await_true(lambda: not self.lab.processes(), 20.0)
        ports = {port for note in self.notes("ports") for port in note["ports"]}
        assert ports, "somebody has listened"
        ends = psutil.net_connections("tcp")
        assert not ports & {end.laddr.port for end in ends if end.status == psutil.CONN_LISTEN}
        assert set(os.listdir("/dev/shm")) <= self.shared_memory
        assert not self.lab.left()


def steps_kept(kept: Path) -> int:
    newest = rpcpipe.latest(kept)
    return int(newest.name.removeprefix("checkpoint-")) if newest else 0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def check_ends(case: Case) -> None:
    """A plain script with this fault: all learn of it, and nothing is left."""
    ended = case.run()
    assert ended.code not in (0, None), ended
    case.check_nothing_is_left()
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
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The weights after each step of a run in which nothing fails."""
    return train_undisturbed(Lab(tmp_path_factory.mktemp("undisturbed")), 5)


def train_undisturbed(lab: Lab, steps: int) -> dict[int, str]:
    """These weights, by a run that does not save either."""
    case = Case(lab, fail_at(None, "never"), lab.folder / "none", FAULT_STEPS=str(steps))
    ended = case.run()
    assert ended.code == 0, ended
    lab.close()
    found = {note["step"]: note["digest"] for note in case.notes("weights")}
    assert len(set(found.values())) == steps
    return found


@pytest.mark.parametrize(
    "launcher",
    [(*TORCHRUN, "--nproc-per-node=3"), (*RUN, "--stages=2")],
    ids=["torchrun", "rpcpipe-run"],
)
@pytest.mark.parametrize(
    "fault", [fail_at(1, "backward")] + FULL * [fail_at(None, "forward")], ids=str
)
def test_a_job_that_is_restarted_goes_on_from_its_checkpoint(
    lab: Lab, fault: Fault, launcher: tuple[str, ...], undisturbed: dict[int, str]
) -> None:
    case = Case(lab, fault)
    ended = case.run(*launcher, "--max-restarts=1")
    assert ended.code == 0, ended
    assert "trained\n" in ended.out
    check_went_on(case, undisturbed)


def check_went_on(case: Case, undisturbed: dict[int, str]) -> None:
    """By the first restart, from the last step that was saved; to the same weights, bit for bit."""
    (final,) = case.notes("final")
    assert (final["restarts"], final["first"]) == ("1", case.fault.step)
    assert final["digest"] == undisturbed[5]


@pytest.mark.skipif(REASON is not None, reason=REASON or "")
def test_a_job_over_two_hosts_is_restarted_by_the_launchers_of_both(
    lab: Lab, undisturbed: dict[int, str]
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


# ---------------------------------------------------------------------- in the middle of a save


@pytest.mark.parametrize("world", [2], indirect=True)
@pytest.mark.parametrize(
    ("fault", "beside"),
    [(fail_at(1, "writing"), False), (fail_at(None, "completing"), True)]
    + FULL * [(fail_at(None, "writing"), False), (fail_at(1, "writing"), True)]
    + FULL * [(fail_at(None, p), b) for p in ("renaming", "renamed") for b in (False, True)],
    ids=str,
)
def test_a_checkpoint_that_is_broken_off_leaves_the_last_one_whole(
    lab: Lab, world: rpcpipe.World, fault: Fault, beside: bool
) -> None:
    """Some files are on the disk, one is half there, and the rest is missing."""
    case = Case(lab, fault, **({"FAULT_BESIDE": "yes"} if beside else {}))
    check_ends(case)
    left = sorted(path.name for path in case.kept.iterdir())
    whole = fault.step + (fault.phase == "renamed")
    assert rpcpipe.latest(case.kept) == case.kept / f"checkpoint-{whole:06}", left
    broken = [name for name in left if name.endswith(".tmp")]
    assert len(broken) == (fault.stage is None and fault.phase != "renamed"), left
    layers = [layer for _ in range(2) for layer in (nn.Linear(4, 4), nn.Dropout(), nn.Identity())]
    pipe = rpcpipe.Pipe(nn.Sequential(*layers), world, balance=[3, 3])
    assert pipe.load(case.kept) == {"step": whole}
    saved = {note["step"]: note["digest"] for note in case.notes("weights")}
    assert digest(pipe) == saved.get(whole, digest(pipe)) != saved[1]
    pipe.save(case.kept, keep=2)
    names = [f"checkpoint-{number:06}" for number in (whole, whole + 1)]
    assert sorted(path.name for path in case.kept.iterdir()) == names


# ------------------------------------------------------------------------------- with replicas

ROLES = ((0, 0), (0, 1), (1, 1))  # stage and pipeline; the driver is in the process of stage 0
OF_REPLICAS = [
    fail_at(stage, phase, how, replica=replica)
    for stage, replica in ROLES
    for phase in PHASES
    for how in ("SIGKILL", "SIGSTOP")
    if replica == 0 or phase != "writing"  # the first one writes
]


@pytest.mark.parametrize(
    "fault",
    OF_REPLICAS if FULL else [fail_at(1, "backward", replica=1)],
    ids=str,
)
def test_the_drivers_of_both_pipelines_learn_of_it(lab: Lab, fault: Fault) -> None:
    """Also the one that waits for the other pipeline in an average of gradients."""
    case = Case(lab, fault, FAULT_REPLICAS="2")
    ended = [Ended(process) for process in case.start_ranks(4)]
    case.check_nothing_is_left()
    check_all_have_learnt(case, ended)


def check_all_have_learnt(case: Case, ended: list[Ended], since: float | None = None) -> None:
    """Where they leave, those that are through are not concerned."""
    fault = case.fault
    leaving = fault.phase == "shutdown"
    drives = fault.stage is None if fault.replica is None else fault.stage == 0
    assert leaving or all(e.code not in (0, None) for e in ended), ended
    case.check_noticed(1 if leaving else len(ended) - 1, since)
    drivers = case.notes("ended")
    failed = case.notes("failed")[0]["pid"]
    told = {note["pid"]: (note["stage"], note["gone"]) for note in drivers if note["pid"] != failed}
    assert set(told.values()) <= {(fault.stage, failed)}, drivers
    assert leaving or len(told) == (1 if fault.replica is None else 2) - drives, drivers


# ------------------------------------------------------------------------------- the network

CUTS = [fail_at(None, "forward", "cut"), fail_at(1, "backward", "cut")]
CUTS_OF_REPLICAS = [fail_at(0, "optimizer", "cut", replica=1)]
if FULL:
    CUTS = [fail_at(stage, phase, "cut") for stage in (None, 0, 1) for phase in PHASES]
    CUTS_OF_REPLICAS = [
        fail_at(stage, phase, "cut", replica=replica)
        for stage, replica in ROLES
        for phase in PHASES
        if replica == 0 or phase != "writing"
    ]


@pytest.mark.parametrize("fault", CUTS + CUTS_OF_REPLICAS, ids=str)
def test_a_host_that_is_cut_off(lab: Lab, fault: Fault) -> None:
    """Each process has a host of its own: a driver and two stages, or two pipelines of two."""
    if reason := why_not():
        pytest.skip(reason)
    size = 3 if fault.replica is None else 4
    case = Case(lab, fault, FAULT_REPLICAS="1" if fault.replica is None else "2")
    rank = (0 if fault.stage is None else 1 + fault.stage) if size == 3 else (
        2 * (fault.replica or 0) + (fault.stage or 0))  # fmt: skip
    with Cables(size) as cables:
        processes = case.start_ranks(size, cables)
        failed = case.await_failed()
        cables.cut(rank)
        since = time.monotonic()
        ended = [Ended(process) for process in processes]
        assert [cables.listening(host) for host in range(size)] == [[]] * size
    await_true(lambda: not lab.processes(), 20.0)
    assert failed["pid"] in [note["pid"] for note in case.notes("noticed")], "it was not told"
    check_all_have_learnt(case, ended, since)
    for note in case.notes("noticed"):
        assert "has not been heard for" in note["text"]


# ------------------------------------------------------------------------- slow, and too slow

Holding = Callable[[int], AbstractContextManager[None]]


@contextmanager
def traced(pid: int) -> Iterator[None]:
    """All threads of the process are held, as by a debugger at a breakpoint."""
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    attach, detach, any_thread = 16, 17, 0x40000000  # of <sys/ptrace.h> and <sys/wait.h>
    held: list[int] = []
    while new := [int(t) for t in os.listdir(f"/proc/{pid}/task") if int(t) not in held]:
        for thread in new:
            assert ptrace(attach, thread, None, None) == 0, os.strerror(ctypes.get_errno())
            os.waitpid(thread, any_thread)
            held.append(thread)
    try:
        yield
    finally:
        for thread in held:
            ptrace(detach, thread, None, None)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


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


STEADY = """
def train(world):
    pipe = rpcpipe.Pipe(nn.Sequential(nn.Identity(), nn.Identity()), world, balance=[1, 1])
    print(world.process(1).pid, flush=True)
    while not os.path.exists("over"):
        pipe(torch.zeros(2, 1))
    print(pipe(torch.zeros(2, 1)).shape)


if __name__ == "__main__":
    rpcpipe.run(train, stages=2)
"""


@pytest.mark.parametrize(("hold", "heartbeat"), [(traced, "1"), (stopped, "inf")])
def test_a_stage_that_is_held_goes_on(lab: Lab, hold: Holding, heartbeat: str) -> None:
    """By a debugger for as long as it likes, by SIGSTOP where the heartbeat allows for it."""
    process = lab.start(lab.script(STEADY), RPCPIPE_HEARTBEAT=heartbeat)
    assert process.stdout is not None
    stage = int(process.stdout.readline())
    with hold(stage):
        time.sleep(1.5)
    (lab.folder / "over").touch()
    ended = Ended(process)
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
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    """One training, which fails again and again and goes on from its last checkpoint."""
    count, draw = int(os.environ["RPCPIPE_FAULTS"]), random.Random(0)
    lab = Lab(tmp_path_factory.mktemp("fault"))
    wanted, kept = train_undisturbed(lab, 2 * count + 2), lab.folder / "kept"
    for k in range(count):
        start = time.monotonic()
        where = draw.choice((None, 0, 1)), draw.choice(PHASES), draw.choice(("SIGKILL", "SIGSTOP"))
        fault = fail_at(*where, step=steps_kept(kept) + draw.randrange(2))
        case = Case(lab, fault, kept, FAULT_STEPS=str(fault.step + 1))
        case.notes_file.unlink(missing_ok=True)
        check_ends(case)
        check_weights(case, wanted)
        with capsys.disabled():
            print(f"\n{k + 1} of {count}: {fault} in step {fault.step} named, nothing left; "
                  f"{time.monotonic() - start:.1f} s", end="")  # fmt: skip
    case = Case(lab, fail_at(None, "none"), kept, FAULT_STEPS=str(steps_kept(kept) + 2))
    assert case.run().code == 0
    check_weights(case, wanted)
    lab.close()
    with capsys.disabled():
        print_summary(count, steps_kept(kept))


def check_weights(case: Case, wanted: dict[int, str]) -> None:
    """Those it has gone on from, and those after each of its steps."""
    for note in case.notes("weights"):
        assert note["digest"] == wanted[note["step"]], (case.fault, note)


def print_summary(count: int, steps: int) -> None:
    print(f"\n{count} failures in a training of {steps} steps: each named right, by stage and pid;")
    print("each time resumed bitwise; no process, port, shared memory or temporary file left")
    print("seconds until the last process knew, with those of the matrix:")
    for how, found in TIMES.items():
        spread = (min(found), statistics.median(found), max(found)) if found else ()
        print(f"{how:8s}{len(found):5d} times", *(f"{seconds:8.3f}" for seconds in spread))
