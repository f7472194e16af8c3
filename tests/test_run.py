"""Whole processes: how a script starts its stages, and that nothing is left when it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import rpcpipe

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--log-dir=logs")

IMPORTS = """
import json, os, signal, sys, threading, time
import psutil, torch
from torch import nn
import rpcpipe
"""


class Lab:
    """Runs scripts, and knows which processes and temporary files they have left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tmp = folder / "tmp"
        self.tmp.mkdir()
        self._mark = uuid.uuid4().hex
        self._env = {**os.environ, "RPCPIPE_TEST": self._mark, "TMPDIR": str(self.tmp)}
        self._started: list[subprocess.Popen[str]] = []

    def script(self, body: str) -> Path:
        path = self.folder / "train.py"
        path.write_text(IMPORTS + textwrap.dedent(body))
        return path

    def start(self, *command: str | Path, **env: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-u", *command] if isinstance(command[0], Path) else command,
            env={**self._env, **env},
            cwd=self.folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(process)
        return process

    def run(self, *command: str | Path, stdin: str = "", **env: str) -> Ended:
        return Ended(self.start(*command, **env), stdin)

    def processes(self) -> set[int]:
        """All that a script of this lab has started, and that are still there."""
        return {p.pid for p in psutil.process_iter() if self._is_ours(p)}

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            ours = process.environ().get("RPCPIPE_TEST") == self._mark
            return ours and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    def left(self) -> list[Path]:
        """Temporary files; torch's own cache stays for the next process."""
        return [path for path in self.tmp.iterdir() if not path.name.startswith("torchinductor_")]

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate()


class Ended:
    """A process that has ended: its exit status, and what it printed."""

    def __init__(self, process: subprocess.Popen[str], stdin: str = "") -> None:
        self.out, self.err = process.communicate(stdin)
        self.code = process.returncode

    def __repr__(self) -> str:
        return f"exit status {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"


def await_true(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)


def await_line(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdout is not None
    line = next((line for line in process.stdout if text in line), None)
    assert line is not None, Ended(process)
    return line


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path)
    try:
        yield lab
        await_true(lambda: not lab.processes(), 10.0)
    finally:
        lab.close()
    assert not lab.left(), "temporary files were left"


# -------------------------------------------------------------------------------- clean runs

TRAIN = """
class Announce(nn.Module):
    def forward(self, x):
        print("inside of a layer")
        return x


def descend(stage):  # torch.optim would import torch._dynamo in each process: seconds
    for parameter in stage.parameters():
        parameter.data -= 0.1 * parameter.grad
        parameter.grad = None


def who(stage):
    return os.getpid(), torch.get_num_threads()


def foreign(pid):
    local = ("127.0.0.1", "::1", "::ffff:127.0.0.1")
    ends = psutil.Process(pid).net_connections()
    return [str(end) for end in ends if end.laddr and end.laddr.ip not in local]


def train(world, factor):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Announce(), nn.Linear(4, 2))
    pipe = rpcpipe.Pipe(model, world, balance=[2, 1], chunks=2)
    x, losses = torch.randn(8, 4), []
    for _ in range(3):
        loss = pipe(x).pow(2).mean()
        loss.backward()
        for j in range(2):
            pipe.apply_to_stage(j, descend)
        losses.append(loss.item())
    stages = [pipe.apply_to_stage(j, who) for j in range(2)]
    print("facts", json.dumps({
        "driver": os.getpid(),
        "main": threading.current_thread() is threading.main_thread(),
        "stages": [pid for pid, _ in stages],
        "threads": [count for _, count in stages],
        "losses": losses,
        "foreign": sum([foreign(pid) for pid in {os.getpid(), *(s[0] for s in stages)}], []),
        "hosts": world.hosts(),
    }))
    return 21 * factor


if __name__ == "__main__":
    before = dict(os.environ)
    answer = rpcpipe.run(train, 2, stages=2)
    assert dict(os.environ) == before
    sys.stdout.write(f"returned {answer}\\n")  # in one piece, also beside other processes
"""


def facts(ended: Ended) -> dict[str, Any]:
    lines = [line for line in ended.out.splitlines() if line.startswith("facts ")]
    assert len(lines) == 1, ended
    found: dict[str, Any] = json.loads(lines[0].removeprefix("facts "))
    return found


def check_trained(found: dict[str, Any]) -> None:
    assert found["losses"] == sorted(found["losses"], reverse=True)
    assert found["main"], "the driver is not on its process's main thread"
    assert len(set(found["stages"])) == 2
    assert found["threads"] == [max(1, len(os.sched_getaffinity(0)) // 2)] * 2
    assert not found["foreign"], "a job on one host is reachable from others"


def test_plain_script_is_the_driver_of_stages_it_starts(lab: Lab) -> None:
    process = lab.start(lab.script(TRAIN))
    ended = Ended(process)
    assert ended.code == 0, ended
    assert ended.err == ""
    assert "returned 42\n" in ended.out
    assert ended.out.count("[stage 0] inside of a layer\n") >= 6
    found = facts(ended)
    check_trained(found)
    assert found["driver"] == process.pid
    assert process.pid not in found["stages"]
    host = socket.gethostname()
    assert found["hosts"] == [
        f"pipe 0: driver {host}:0, stage 0 {host}:1 cpu, stage 1 {host}:2 cpu"
    ]


@pytest.mark.parametrize(("processes", "shared"), [(2, True), (3, False)])
def test_same_script_under_torchrun(lab: Lab, processes: int, shared: bool) -> None:
    count, script = f"--nproc-per-node={processes}", str(lab.script(TRAIN))
    ended = lab.run(*TORCHRUN, count, script, OMP_NUM_THREADS="1", PYTHONUNBUFFERED="")
    assert ended.code == 0, ended
    assert ended.err == ""
    assert ended.out.count("returned 42\n") == 1
    assert ended.out.count("returned None\n") == processes - 1
    found = facts(ended)
    check_trained(found)
    assert (found["driver"] == found["stages"][0]) is shared


PLAIN = """
import torch, rpcpipe
from torch import nn
def train(world):
    pipe = rpcpipe.Pipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), world, balance=[1, 1])
    return pipe(torch.ones(2, 4)).shape
print(rpcpipe.run(train, stages=2))
"""


@pytest.mark.parametrize(("command", "stdin"), [(("-c", PLAIN), ""), (("-",), PLAIN)])
def test_a_program_without_a_file(lab: Lab, command: tuple[str, ...], stdin: str) -> None:
    logs = lab.folder / "logs"
    ended = lab.run(sys.executable, *command, stdin=stdin, RPCPIPE_LOG_DIR=str(logs))
    assert (ended.code, ended.out, ended.err) == (0, "torch.Size([2, 4])\n", ""), ended
    assert len(list(logs.rglob("stderr.log"))) == 2, "logs are kept where RPCPIPE_LOG_DIR says"


def test_run_may_be_called_again_and_again(lab: Lab) -> None:
    ended = lab.run(
        lab.script("""
        KEPT = []  # a pipe and an output that outlive their run

        def model():
            return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

        def pid(stage):
            return os.getpid()

        def train(world, how):
            pipe = rpcpipe.Pipe(model(), world, balance=[3 - world.stages + 1, 1, 1][:world.stages])
            out = pipe(torch.randn(2, 4))
            KEPT[:] = [pipe, out]
            if how == "raise":
                raise LookupError("of the training function")
            if how == "kill":
                os.kill(pipe.apply_to_stage(1, pid), signal.SIGKILL)
                while True:
                    pipe(torch.randn(2, 4))
            if how == "nest":
                rpcpipe.run(train, "ok", stages=2)
            pipe(torch.randn(2, 4)).sum().backward()
            return how

        def raised(kind, text, fn, *args, **kwargs):
            try:
                fn(*args, **kwargs)
            except kind as exc:
                assert text in str(exc), exc
            else:
                raise AssertionError(f"did not raise {kind}")

        def usage():
            me = psutil.Process()
            return me.num_fds(), me.num_threads(), me.memory_info().rss

        def on_terminate(signum, frame):
            pass

        if __name__ == "__main__":
            signal.signal(signal.SIGTERM, on_terminate)
            handlers = [signal.getsignal(s) for s in signal.valid_signals()]
            for how in ("ok", "raise", "kill", "nest"):
                if how == "ok":
                    assert rpcpipe.run(train, how, stages=2) == how
                else:
                    kinds = {"raise": LookupError, "kill": rpcpipe.StageLost, "nest": RuntimeError}
                    texts = {"raise": "of the training", "kill": "SIGKILL", "nest": "one run at a"}
                    raised(kinds[how], texts[how], rpcpipe.run, train, how, stages=2)
                assert not psutil.Process().children(), how
                pipe, out = KEPT
                raised(RuntimeError, "is over", pipe, torch.randn(2, 4))
                raised(RuntimeError, "is over", out.sum().backward)
                with torch.no_grad():
                    raised(RuntimeError, "is over", pipe, torch.randn(2, 4))
            rows = []
            for count in range(8):
                thread = threading.Thread(target=lambda: rpcpipe.run(train, "ok", stages=1))
                thread.start()
                thread.join()
                rows.append(usage())
            (fds, threads, memory), last = rows[1], rows[-1]
            assert last[0] <= fds and last[1] < threads + 3, rows  # torch's pools fill by and by
            assert last[2] < memory + 16e6, rows
            assert rpcpipe.run(train, "ok", stages=3) == "ok"
            assert handlers == [signal.getsignal(s) for s in signal.valid_signals()]
            print("end of script")
        """)
    )
    assert ended.code == 0, ended
    assert ended.out.endswith("end of script\n"), ended


# ------------------------------------------------------------------------------------- misuse


def test_wrong_numbers_are_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(world: rpcpipe.World) -> None:
        raise AssertionError

    with pytest.raises(ValueError, match="stages= is at least 1, got 0"):
        rpcpipe.run(never, stages=0)
    with pytest.raises(ValueError, match=r"stages= is a whole number, got 2\.0"):
        rpcpipe.run(never, stages=2.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="driver= is one of auto, shared, dedicated"):
        rpcpipe.run(never, stages=2, driver="own")
    with pytest.raises(ValueError, match="replicas=2 takes a launcher"):
        rpcpipe.run(never, stages=2, replicas=2)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="but not MASTER_ADDR and MASTER_PORT"):
        rpcpipe.run(never, stages=2)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(ValueError, match=r"3 stages and 1 replicas take 3 .* or 4 .* started 2"):
        rpcpipe.run(never, stages=3)
    with pytest.raises(ValueError, match="driver='dedicated'"):
        rpcpipe.run(never, stages=2, driver="dedicated")


def test_run_without_a_main_guard_says_so(lab: Lab) -> None:
    ended = lab.run(lab.script("rpcpipe.run(print, stages=2)"))
    assert ended.code == 1
    assert "StageLost: the process of stage" in ended.err
    assert 'call it under if __name__ == "__main__"' in ended.err.split("StageLost")[-1]


def test_script_that_fails_when_a_stage_imports_it(lab: Lab) -> None:
    ended = lab.run(
        lab.script("""
        if __name__ == "__main__":
            rpcpipe.run(print, stages=2)
        else:
            import a_module_that_nobody_has
        """)
    )
    assert ended.code == 1
    lost = ended.err.split("StageLost: ")[-1]
    assert "exited with code 1; the last it printed:" in lost
    assert "No module named 'a_module_that_nobody_has'" in lost


# -------------------------------------------------------------------------------------- death

KEPT = """
def train(world):
    global pipe, out
    pipe = rpcpipe.Pipe(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), world, balance=[1, 1])
    out = pipe(torch.ones(4, 3)).sum()


if __name__ == "__main__":
    rpcpipe.run(train, stages=2)
    for use in (lambda: pipe(torch.ones(4, 3)), out.backward):
        try:
            use()
        except RuntimeError as exc:
            print(exc)
"""


def test_a_pipe_at_module_level_does_not_keep_the_script_from_ending(lab: Lab) -> None:
    ended = lab.run(lab.script(KEPT))
    assert ended.code == 0
    assert ended.err == ""
    lines = ended.out.splitlines()
    assert len(lines) == 2
    assert all("the world this pipe belongs to is over" in line for line in lines)


LONG = """
class Long(nn.Module):
    def forward(self, x):
        print("computing", flush=True)
        a = torch.randn(300, 300)
        while True:
            torch.mm(a, a)


def pid(stage):
    return os.getpid()


def train(world):
    pipe = rpcpipe.Pipe(nn.Sequential(nn.Linear(4, 4), Long()), world, balance=[1, 1], chunks=2)
    print("pids", *[pipe.apply_to_stage(j, pid) for j in range(2)])
    try:
        pipe(torch.randn(4, 4))
    except BaseException as exc:
        print("seen", type(exc).__name__, time.monotonic(), exc)
        raise


if __name__ == "__main__":
    rpcpipe.run(train, stages=2)
"""


def start_computing(lab: Lab) -> tuple[subprocess.Popen[str], list[int]]:
    process = lab.start(lab.script(LONG))
    pids = [int(pid) for pid in await_line(process, "pids").split()[1:]]
    await_line(process, "computing")
    return process, pids


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_everything(lab: Lab, signum: signal.Signals) -> None:
    before = signal.signal(signum, signal.SIG_DFL)  # under nohup it is ignored, and stays so
    try:
        process, _ = start_computing(lab)
    finally:
        signal.signal(signum, before)
    start = time.monotonic()
    process.send_signal(signum)
    ended = Ended(process)
    assert time.monotonic() - start < 3.0, ended
    assert ended.code == -signum
    assert ("KeyboardInterrupt" in ended.err) is (signum == signal.SIGINT)
    assert "tensorpipe" not in ended.err
    assert not lab.processes()


def test_a_stage_that_is_killed_is_named_within_a_second(lab: Lab) -> None:
    process, pids = start_computing(lab)
    start = time.monotonic()
    os.kill(pids[1], signal.SIGKILL)
    seen = await_line(process, "seen")
    assert f"the process of stage 1 (pid {pids[1]}," in seen
    assert "was ended by SIGKILL" in seen
    assert float(seen.split()[2]) - start < 1.0
    assert Ended(process).code == 1
    assert not lab.processes()


def test_stages_do_not_outlive_a_driver_that_is_killed(lab: Lab) -> None:
    process, _ = start_computing(lab)
    process.kill()
    process.wait()
    await_true(lambda: not lab.processes(), 10.0)
    for folder in lab.tmp.iterdir():  # nobody was left to remove the logs
        subprocess.run(["rm", "-r", folder], check=True)


def test_ctrl_c_while_the_stages_start(lab: Lab) -> None:
    process = lab.start(
        lab.script("""
        if __name__ == "__main__":
            rpcpipe.run(print, stages=2)
        else:
            print("importing", flush=True)
            threading.Event().wait()
        """)
    )
    await_line(process, "importing")
    process.send_signal(signal.SIGINT)
    ended = Ended(process)
    assert ended.code == -signal.SIGINT, ended
    assert not lab.processes()


def test_a_stage_that_dies_while_the_others_wait_for_it(lab: Lab) -> None:
    ended = lab.run(
        lab.script("""
        from rpcpipe import transport

        if __name__ == "__main__":
            start = time.monotonic()
            try:
                rpcpipe.run(print, stages=2)
            finally:
                assert time.monotonic() - start < 15.0
        else:
            transport.join = lambda *args: os.kill(os.getpid(), signal.SIGABRT)
        """)
    )
    assert ended.code == 1
    assert "was ended by SIGABRT" in ended.err.split("StageLost")[-1], ended
