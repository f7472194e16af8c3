"""Hosts made of namespaces: network, host name, processes and /etc/hosts of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

# Within a host: names that resolve are those in its file alone.
_ENTER = """
hostname "$1"
mount --bind "$2" /etc/hosts
shift 2
exec "$@"
"""


class Hosts:
    """Machines on one switch, and maybe on a second that leads nowhere.

    Host ``i`` is ``node-<i>``, with the address ``10.77.0.<i>`` (or ``fd77::<i>``) on ``eth0``.
    Its name does not resolve anywhere, except on ``dead_end`` hosts: there, as with some
    installers, it is the address of the interface ``eth1``, from which nobody is reached.
    """

    def __init__(self, folder: Path, count: int, *, ipv6: bool = False, dead_end: bool = False):
        self._folder, self._ipv6, self._dead_end = folder, ipv6, dead_end
        mark = uuid.uuid4().hex[:6]
        self._names = [f"rpcpipe-{mark}-{i}" for i in range(count + 1)]
        self._started: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Hosts:
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self) -> None:
        for name in self._names:
            _ip("netns", "add", name)
        switch = self._names[0]
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for i in range(1, len(self._names)):
            self._plug(i)

    def _plug(self, i: int) -> None:
        switch, name = self._names[0], self._names[i]
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", f"port{i}", "netns", switch)
        _ip("-n", switch, "link", "set", f"port{i}", "master", "br0", "up")
        if self._ipv6:
            _ip("-n", name, "addr", "add", f"fd77::{i}/64", "dev", "eth0", "nodad")
        else:
            _ip("-n", name, "addr", "add", f"10.77.0.{i}/24", "dev", "eth0")
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        if self._dead_end:
            end = ("peer", f"nowhere{i}", "netns", switch)
            _ip("-n", name, "link", "add", "eth1", "type", "veth", *end)
            _ip("-n", switch, "link", "set", f"nowhere{i}", "up")
            _ip("-n", name, "addr", "add", f"10.99.{i}.1/24", "dev", "eth1")
            _ip("-n", name, "link", "set", "eth1", "up")
            lines.append(f"10.99.{i}.1 node-{i}")
        _ip("-n", name, "link", "set", "eth0", "up")
        (self._folder / f"hosts-{i}").write_text("\n".join(lines) + "\n")

    def address(self, i: int) -> str:
        return f"fd77::{i}" if self._ipv6 else f"10.77.0.{i}"

    def start(
        self, i: int, *command: str | Path, name: str = "", **env: str
    ) -> subprocess.Popen[str]:
        """Start a command on host ``i``; all its processes end with it."""
        namespaces = ("--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
        inside = ("sh", "-c", _ENTER, "sh", name or f"node-{i}", str(self._folder / f"hosts-{i}"))
        process = subprocess.Popen(
            ["ip", "netns", "exec", self._names[i], "unshare", *namespaces, *inside, *command],
            env={**os.environ, "TMPDIR": str(self._folder), **env},
            cwd=self._folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(process)
        return process

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            process.kill()
            process.communicate()
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], check=False)


def _ip(*command: str) -> None:
    subprocess.run(["ip", *command], check=True)


RUN = (sys.executable, "-m", "rpcpipe.cli")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
RECIPES = Path(__file__).parent.parent / "launch"


def put_on_path(folder: Path, **programs: str) -> dict[str, str]:
    """The environment in which these are found first; and ``rpcpipe-run``, installed or not."""
    found = folder / "bin"
    found.mkdir()
    shim = f'#!/bin/sh\nexec "{sys.executable}" -m rpcpipe.cli "$@"\n'
    for name, text in {"rpcpipe-run": shim, **programs}.items():
        (found / name).write_text(text)
        (found / name).chmod(0o755)
    here = os.path.dirname(sys.executable)
    return {"PATH": os.pathsep.join([str(found), here, os.environ["PATH"]])}
