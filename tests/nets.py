"""Hosts on one machine: network namespaces, each with a cable to a switch that can be cut."""

from __future__ import annotations

import os
import shutil
import subprocess

__all__ = ["INTERFACE", "Cables", "why_not"]

INTERFACE = "cable0"  # its name on both hosts


def why_not() -> str | None:
    """Why there can be no hosts here, if so."""
    if os.geteuid() != 0:
        return "network namespaces take root"
    if shutil.which("ip") is None:
        return "network namespaces take the command ip (iproute2)"
    name = f"rpcpipe-try-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode:
        return f"network namespaces cannot be made here: {tried.stderr.strip()}"
    _ip("netns", "del", name)
    return None


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, text=True)


class Cables:
    """Hosts 0, 1, ... with addresses ``10.77.0.1``, ``10.77.0.2``, ... and a cable each."""

    def __init__(self, count: int) -> None:
        self.addresses = [f"10.77.0.{1 + host}" for host in range(count)]
        *self._hosts, self._switch = [f"rpcpipe-{os.getpid()}-{h}" for h in range(count + 1)]

    def __enter__(self) -> Cables:
        for name in (self._switch, *self._hosts):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "br0", "up")
        for host, address in enumerate(self.addresses):
            self._plug(host, address)
        return self

    def _plug(self, host: int, address: str) -> None:
        name, port = self._hosts[host], f"port{host}"
        end = ("peer", "name", port, "netns", self._switch)
        _ip("-n", name, "link", "add", INTERFACE, "type", "veth", *end)
        _ip("-n", name, "addr", "add", f"{address}/24", "dev", INTERFACE)
        _ip("-n", name, "link", "set", INTERFACE, "up")
        _ip("-n", self._switch, "link", "set", port, "master", "br0", "up")

    def __exit__(self, *_: object) -> None:
        for name in (*self._hosts, self._switch):
            _ip("netns", "del", name)

    def on(self, host: int, *command: str) -> tuple[str, ...]:
        """The command that runs this one on a host."""
        return ("ip", "netns", "exec", self._hosts[host], *command)

    def cut(self, host: int) -> None:
        """What it sends is lost from now on, and it hears nothing."""
        _ip("-n", self._switch, "link", "set", f"port{host}", "down")

    def listening(self, host: int) -> list[str]:
        """Where something listens on a host."""
        files = ("/proc/net/tcp", "/proc/net/tcp6")
        shown = subprocess.run(self.on(host, "cat", *files), capture_output=True, text=True)
        rows = [line.split() for line in shown.stdout.splitlines()]
        return [row[1] for row in rows if row[3] == "0A"]
