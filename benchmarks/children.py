"""Children: processes that wait for commands, so that peers can take turns with ours in one run.

A child that has no command sleeps in a read. It is ended by its parent's end, however that comes.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import queue
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Protocol

import torch

START_TIMEOUT, CALL_TIMEOUT, END_TIMEOUT = 120.0, 300.0, 10.0  # seconds
ROOT = Path(__file__).parents[1]


class ChildError(RuntimeError):
    """A child raised, ended or said nothing in time."""


def _send(connection: Connection, value: Any) -> None:
    connection.send_bytes(pickle.dumps(value))  # torch's own way would share tensors' memory


def _receive(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())


class Actor(Protocol):
    """What runs in a child: made with its rank, their number and a free port; has the methods."""

    def serve(self, commands: Commands) -> None:
        """Answer all commands, then return."""


class Commands:
    """The commands of a child, as they come; what has read them answers them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                command = _receive(self._connection)
                self._inbox.put(command)
                if command is None:
                    return
        os._exit(1)  # the parent has gone

    def follow(self, target: object) -> None:
        """Call what is asked for until the end is."""
        while (command := self._inbox.get()) is not None:
            name, args = command
            try:
                answer = True, getattr(target, name)(*args)
            except Exception:
                answer = False, traceback.format_exc()
            _send(self._connection, answer)

    def ready(self) -> None:
        _send(self._connection, (True, None))


class Group:
    """``n`` children that each run one actor.

    Args:
        actor: a class, by which a child makes its actor: ``actor(rank, n, port)``.
        prefixes: for each rank what stands before its command line, ``ip netns exec`` for example.
        environment: for each rank what is added to its environment.
    """

    def __init__(
        self,
        actor: type,
        n: int,
        *,
        prefixes: Sequence[Sequence[str]] | None = None,
        environment: Sequence[Mapping[str, str]] | None = None,
    ) -> None:
        port = free_port()
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(n):
                prefix = prefixes[rank] if prefixes else []
                self._start(actor, rank, n, port, prefix, environment[rank] if environment else {})
            self._answers(range(n), START_TIMEOUT)
        except BaseException:
            self.close(by_force=True)
            raise

    def _start(
        self,
        actor: type,
        rank: int,
        n: int,
        port: int,
        prefix: Sequence[str],
        extra: Mapping[str, str],
    ) -> None:
        ours, theirs = Pipe()
        where = f"{actor.__module__}:{actor.__qualname__}"
        command = [sys.executable, "-m", __name__, where, *map(str, (rank, n, port))]
        path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
        self._connections.append(ours)
        with theirs:
            process = subprocess.Popen(
                [*prefix, *command, str(theirs.fileno())],
                env={"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ, "PYTHONPATH": path, **extra},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._processes.append(process)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def call(self, name: str, *args: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        """Have all (or these) ranks call their actor's method at once; their answers by rank."""
        chosen = range(len(self._connections)) if ranks is None else ranks
        self.send(name, *args, ranks=chosen)
        return self.answers(chosen)

    def send(self, name: str, *args: Any, ranks: Sequence[int]) -> None:
        for rank in ranks:
            _send(self._connections[rank], (name, args))

    def answers(self, ranks: Sequence[int]) -> list[Any]:
        return self._answers(ranks, CALL_TIMEOUT)

    def _answers(self, ranks: Sequence[int], seconds: float) -> list[Any]:
        """One answer of each; the first failure is raised, though others may wait for it."""
        deadline = time.monotonic() + seconds
        found: dict[int, Any] = {}
        while len(found) < len(ranks):
            if time.monotonic() > deadline:
                silent = sorted(set(ranks) - found.keys())
                raise ChildError(f"children {silent} said nothing for {seconds:.0f} s")
            for rank in ranks:
                if rank not in found and self._connections[rank].poll(0.02):
                    found[rank] = self._receive(rank)
        return [found[rank] for rank in ranks]

    def _receive(self, rank: int) -> Any:
        try:
            good, value = _receive(self._connections[rank])
        except (EOFError, OSError, pickle.UnpicklingError) as exc:
            raise ChildError(f"child {rank} has ended") from exc
        if not good:
            raise ChildError(f"child {rank} raised:\n{value}")
        return value

    def close(self, by_force: bool = False) -> None:
        """End all children and wait for them."""
        if not by_force:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    _send(connection, None)
        deadline = time.monotonic() + END_TIMEOUT * (not by_force)
        for process in self._processes:
            try:
                process.wait(max(0.01, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for connection in self._connections:
            connection.close()

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(by_force=kind is not None)


@contextlib.contextmanager
def closing(*groups: Group) -> Iterator[None]:
    """End all of the groups, whatever happens."""
    with contextlib.ExitStack() as stack:
        for group in groups:
            stack.enter_context(group)
        yield


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def main(argv: Sequence[str]) -> None:
    where, rank, n, port, fd = argv
    module, name = where.split(":")
    torch.set_num_threads(1)
    commands = Commands(Connection(int(fd)))
    actor = getattr(importlib.import_module(module), name)(int(rank), int(n), int(port))
    actor.serve(commands)
    sys.stdout.flush()
    os._exit(0)  # whatever threads of other libraries still do


if __name__ == "__main__":
    main(sys.argv[1:])
