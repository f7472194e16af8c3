"""A team: the processes of a run with replicas, whose drivers do what a test asks them to."""

from __future__ import annotations

import io
import os
import secrets
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import torch
import torch.distributed as dist

import rpcpipe

PROGRAM = "import sys, team; team.live(*sys.argv[1:])"


class Team:
    """``replicas`` pipelines of ``stages``, each rank a process, as a launcher would start them.

    Args:
        runs: how often each process calls ``run``.
        prepare: name of a function of a test module that each process calls before that.
    """

    def __init__(self, stages: int, replicas: int, *, runs: int = 1, prepare: str = "") -> None:
        self._key = secrets.token_bytes(16)
        self._listener = Listener(("127.0.0.1", 0), authkey=self._key)
        timeout = timedelta(seconds=60)
        # Here, so that no port is chosen twice, and no process has to be the last.
        self._store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout
        )
        size, numbers = stages * replicas, map(str, (stages, replicas, runs))
        args = *numbers, prepare
        self.processes = [self._start(rank, size, *args) for rank in range(size)]
        self._replicas = replicas
        self.meet()

    def meet(self) -> None:
        """Meet the drivers of a run."""
        links = [self._listener.accept() for _ in range(self._replicas)]
        self.drivers: dict[int, Connection[Any, Any]] = {link.recv(): link for link in links}

    def _start(self, rank: int, size: int, *args: str) -> subprocess.Popen[str]:
        env = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        address = str(self._listener.address[1]), self._key.hex()
        command = [sys.executable, "-c", PROGRAM, *address, *args]
        return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)

    def ask(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """What ``fn(world, *args)`` returned or raised in each driver, called at the same time."""
        for link in self.drivers.values():
            link.send((fn, args))
        return [self.answer(replica) for replica in sorted(self.drivers)]

    def do(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """What it returned in each driver."""
        answers = self.ask(fn, *args)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers

    def answer(self, replica: int) -> Any:
        link = self.drivers[replica]
        assert link.poll(100), f"replica {replica} does not answer"
        return _unpack(link.recv_bytes())

    def dismiss(self, replica: int) -> None:
        """Let the driver's training function return."""
        self.drivers.pop(replica).send(None)

    def close(self) -> list[tuple[int, str]]:
        """Dismiss all drivers; returns exit status and standard error of each process."""
        for replica in list(self.drivers):
            self.dismiss(replica)
        ends = [(process.communicate(timeout=60)[1], process) for process in self.processes]
        self._listener.close()
        return [(process.returncode, err) for err, process in ends]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()
        self._listener.close()


def live(port: str, key: str, stages: str, replicas: str, runs: str, prepare: str) -> None:
    """The life of a process of a team."""
    if prepare:
        module, _, name = prepare.partition(":")
        getattr(__import__(module), name)()
    for _ in range(int(runs)):
        args = int(port), bytes.fromhex(key)
        rpcpipe.run(_obey, *args, stages=int(stages), replicas=int(replicas))


def _obey(world: rpcpipe.World, port: int, key: bytes) -> None:
    with Client(("127.0.0.1", port), authkey=key) as link:
        link.send(world.replica)
        while (job := link.recv()) is not None:
            fn, args = job
            try:
                answer = fn(world, *args)
            except Ending as exc:
                link.send_bytes(_pack(exc))
                raise
            except Exception as exc:
                exc.add_note("".join(traceback.format_exception(exc)))
                answer = exc
            link.send_bytes(_pack(answer))


def _pack(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)  # the link itself would send tensors as file descriptors
    return buffer.getvalue()


def _unpack(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def await_true(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)


class Ending(Exception):
    """Raised by what a driver is asked to do: its training function raises it as well."""
