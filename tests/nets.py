"""Two hosts on one machine: network namespaces with a cable between them that can be cut."""

from __future__ import annotations

import os
import shutil
import subprocess

__all__ = ["INTERFACE", "Cable", "why_not"]

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


class Cable:
    """Two hosts, 0 and 1, with addresses ``10.77.0.1`` and ``10.77.0.2``, and a cable."""

    ADDRESSES = ("10.77.0.1", "10.77.0.2")

    def __enter__(self) -> Cable:
        self.hosts = [f"rpcpipe-{os.getpid()}-{h}" for h in (0, 1)]
        for host in self.hosts:
            _ip("netns", "add", host)
            _ip("-n", host, "link", "set", "lo", "up")
        peer = ("peer", "name", INTERFACE, "netns", self.hosts[1])
        _ip("-n", self.hosts[0], "link", "add", INTERFACE, "type", "veth", *peer)
        for host, address in zip(self.hosts, self.ADDRESSES, strict=True):
            _ip("-n", host, "addr", "add", f"{address}/24", "dev", INTERFACE)
            _ip("-n", host, "link", "set", INTERFACE, "up")
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts:
            _ip("netns", "del", host)

    def on(self, host: int, *command: str) -> tuple[str, ...]:
        """The command that runs this one on a host."""
        return ("ip", "netns", "exec", self.hosts[host], *command)

    def cut(self) -> None:
        _ip("-n", self.hosts[1], "link", "set", INTERFACE, "down")
