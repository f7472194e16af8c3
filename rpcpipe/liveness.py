"""Liveness: this process's line to its watcher, and so to the life and death of all others."""

from __future__ import annotations

import faulthandler
import json
import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

import psutil
import torch.distributed as dist

from rpcpipe import stacks, transport, watcher
from rpcpipe.errors import StageLost
from rpcpipe.world import Layout, Process

__all__ = ["Care", "Limits", "Line", "await_ended", "watched", "watchers"]

GRACE = 3.0  # seconds for a driver to tell what was lost, before stages end because of it
BREAK_OFF = 2.0  # seconds for a driver to leave by itself, and not wait inside of torch
ANSWERS = 2.0  # seconds to wait for all processes to print their stacks


@dataclass(frozen=True)
class Limits:
    """How long a process may be silent, and how long anything may take, in seconds."""

    heartbeat: float = 10.0
    timeout: float | None = None

    @staticmethod
    def of(heartbeat: float | None, timeout: float | None) -> Limits:
        """What ``run`` was given, or else the environment.

        Raises:
            ValueError: it is no such number.
        """
        heartbeat = _seconds("heartbeat", heartbeat, "RPCPIPE_HEARTBEAT")
        timeout = _seconds("timeout", timeout, "RPCPIPE_TIMEOUT")
        if heartbeat is not None and heartbeat < 1:
            raise ValueError(f"heartbeat= is at least 1 second, got {heartbeat}")
        return Limits(Limits.heartbeat if heartbeat is None else heartbeat, timeout)


def _seconds(name: str, value: float | None, variable: str) -> float | None:
    given: Any = os.environ.get(variable) if value is None else value
    if given is None:
        return None
    try:
        seconds = float(given)
    except (TypeError, ValueError):
        seconds = math.nan
    if isinstance(given, bool) or not seconds > 0:
        where = variable if value is None else f"{name}="
        raise ValueError(f"{where} is a number of seconds above 0, got {given!r}")
    return None if name == "timeout" and seconds == math.inf else seconds


@dataclass
class Care:
    """What is to be taken care of beside the processes.

    Attributes:
        limits: of silence and of waits.
        last_words: of a stage that is lost; added to the message.
        folder: of temporary files, which the watcher removes if this process cannot.
        on_late_loss: called, on another thread, when a process is lost after this one has taken
            leave; it is not concerned, unless it still waits for all to leave.
    """

    limits: Limits = field(default_factory=Limits)
    last_words: Callable[[int], str] = lambda _: ""
    folder: str | None = None
    on_late_loss: Callable[[], None] = lambda: None


@contextmanager
def watched(
    layout: Layout, process: Process, store: dist.Store, token: str, care: Care
) -> Iterator[Line]:
    """Have this process watched, and hear of the others, until this is left."""
    line = Line(layout, process, care)
    transport.renew(_roles(layout, process.rank), care.limits.timeout, line.ask_for_stacks)
    try:
        line.start(store, token)
        yield line
    finally:
        line.close()


class Line:
    """The channel to the watcher, and the thread that listens there."""

    def __init__(self, layout: Layout, process: Process, care: Care) -> None:
        self._layout, self._process, self._care = layout, process, care
        self._name = _roles(layout, process.rank)
        self._leads = layout.is_driver(process.rank)
        self._closing = False
        self._left = threading.Event()
        self._watcher: subprocess.Popen[bytes] | None = None
        self._answers = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._listen, name="rpcpipe liveness", daemon=True)

    def start(self, store: dist.Store, token: str) -> None:
        life = {
            "ward": os.getpid(),
            "who": _who(self._layout, self._process),
            "token": token,
            "leads": self._leads,
            "grace": GRACE,
        }
        if self._process.rank == 0:
            address = _own_address()
            self._spawn({**life, "heartbeat": self._care.limits.heartbeat, "bind": address})
            opened = next(self._messages(), None)
            if opened is None:
                raise RuntimeError(f"the watcher of this process cannot listen on {address}")
            known = {"hub": [address, opened["port"]], "heartbeat": self._care.limits.heartbeat}
            store.set("watch", json.dumps(known))
        else:
            known = json.loads(store.get("watch"))
            hub_is = _who(self._layout, Process.hear(store, 0))
            self._spawn({**life, **known, "hub_is": hub_is})
        faulthandler.register(watcher.STACKS, file=2, all_threads=True)
        if self._care.folder is not None:
            self._send("remove", folder=self._care.folder)
        self._thread.start()

    def _spawn(self, life: dict[str, Any]) -> None:
        self._socket, theirs = socket.socketpair()
        self._file = self._socket.makefile("r")
        with theirs:
            life["channel"] = theirs.fileno()
            self._watcher = subprocess.Popen(
                [sys.executable, "-I", "-S", watcher.__file__, json.dumps(life)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )

    def joined(self, processes: dict[int, Process]) -> None:
        """All processes are there; from now on one without a watcher is lost."""
        if self._process.rank == 0:
            others = [_who(self._layout, p) for p in processes.values() if p.rank != 0]
            self._send("joined", others=others)

    def bye(self) -> None:
        """This process leaves in order; it is not lost when it ends."""
        self._closing = True
        self._send("bye")

    def await_end(self) -> NoReturn:
        """Wait for the thread to end this process, which another's loss has left without work."""
        while True:
            time.sleep(GRACE)

    def close(self) -> None:
        """End the watcher; without `bye` before, the others take this process for lost.

        The first process's is the hub, and stays until the others have left.
        """
        self._left.set()
        if self._watcher is None:
            return
        # Before anything is said: the watcher may end at once, and is not lost.
        orderly, self._closing = self._closing, True
        patience = None if orderly else watcher.LINGER + 3.0
        if not orderly:
            self._send("quit")
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        try:
            self._watcher.wait(patience)
        except subprocess.TimeoutExpired:
            self._watcher.kill()
            self._watcher.wait()
        if self._thread.ident is not None:
            self._thread.join()
        self._file.close()
        self._socket.close()
        faulthandler.unregister(watcher.STACKS)

    def ask_for_stacks(self, why: str) -> None:
        """Have every process print what it is doing, and wait until they have."""
        self._send("dump", why=why)
        deadline = time.monotonic() + ANSWERS
        for _ in range(self._layout.world_size):
            self._answers.acquire(timeout=max(0.0, deadline - time.monotonic()))

    def _send(self, kind: str, **content: Any) -> None:
        with self._lock, suppress(OSError):
            self._socket.sendall(json.dumps({"kind": kind, **content}).encode() + b"\n")

    # ---------------------------------------------------------------------------- on the thread

    def _messages(self) -> Iterator[dict[str, Any]]:
        with suppress(OSError):
            for line in self._file:
                yield json.loads(line)

    def _listen(self) -> None:
        for message in self._messages():
            if message["kind"] == "lost" and not self._closing:
                self._lose(message["who"], message["how"])
            elif message["kind"] == "lost":
                self._care.on_late_loss()
            elif message["kind"] == "dump":
                self._print_stacks(message["why"])
                self._send("dumped")
                self._answers.release()
            elif message["kind"] == "dumped":
                self._answers.release()
        if not self._closing:
            self._lose(_who(self._layout, self._process), "has lost its watcher")

    def _print_stacks(self, why: str) -> None:
        me = self._process
        text = f"rpcpipe: {why}; {self._name} (pid {me.pid}, host {me.host}):\n{stacks.describe()}"
        with suppress(OSError, ValueError):
            sys.stderr.write(text)
            sys.stderr.flush()

    def _lose(self, who: dict[str, Any], how: str) -> None:
        step = transport.last_step()
        text = f"{who['name']} (pid {who['pid']}, host {who['host']}) {how}"
        text += "" if step is None else f"; the last completed step is {step}"
        text += self._care.last_words(who["stage"]) if who["stage"] is not None else ""
        where = {"stage": who["stage"], "host": who["host"], "pid": who["pid"]}
        error = StageLost(text, **where, step=step, how=how)
        transport.declare_lost(error)
        if not self._leads:
            self._end(str(error))
        if not self._left.wait(BREAK_OFF):
            transport.abandon()

    def _end(self, why: str) -> NoReturn:
        """End this process, which can do nothing more.

        Only after a while: what happened first is to be seen first, also by a launcher.
        """
        time.sleep(GRACE)
        sys.stderr.write(f"rpcpipe: {self._name} ends: {why}\n")
        sys.stderr.flush()
        os._exit(1)


def watchers(pids: Iterable[int]) -> list[psutil.Process]:
    """The watchers of these processes, which end when those do."""
    found = []
    for pid in pids:
        with suppress(psutil.Error):
            children = psutil.Process(pid).children()
            found += [child for child in children if watcher.__file__ in child.cmdline()]
    return found


def await_ended(processes: Iterable[psutil.Process], seconds: float) -> None:
    """Wait until they have ended; whether anybody has reaped them is not ours to see to."""
    deadline = time.monotonic() + seconds
    for process in processes:
        with suppress(psutil.Error):
            while process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
                time.sleep(0.005)


def _roles(layout: Layout, rank: int) -> str:
    j = layout.stage(rank)
    roles = ["the driver"] if layout.is_driver(rank) else []
    roles += [] if j is None else [f"stage {j}"]
    pipeline = f" of pipeline {layout.replica(rank)}" if layout.replicas > 1 else ""
    return " and ".join(roles) + pipeline


def _who(layout: Layout, process: Process) -> dict[str, Any]:
    """What others say of a process."""
    return {
        "rank": process.rank,
        "name": f"the process of {_roles(layout, process.rank)}",
        "stage": layout.stage(process.rank),
        "leads": layout.is_driver(process.rank),
        "host": process.host,
        "pid": process.pid,
    }


def _own_address() -> str:
    """Where the first process's watcher listens: as RPC does, by interface or by host name."""
    interface = os.environ.get("TP_SOCKET_IFNAME") or os.environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        found = psutil.net_if_addrs().get(interface, [])
        for family in (socket.AF_INET, socket.AF_INET6):
            for address in found:
                if address.family == family and "%" not in address.address:
                    return str(address.address)
    with suppress(OSError):
        return str(socket.getaddrinfo(socket.gethostname(), None)[0][4][0])
    return "127.0.0.1"
