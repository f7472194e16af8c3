"""Network: where the sockets of a job listen: stores, and the interface of RPC and gloo."""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import psutil
import torch.distributed as dist

__all__ = [
    "ask",
    "connect",
    "interface_towards",
    "is_own",
    "resolve",
    "serve",
    "sign",
    "soon",
    "using",
]

T = TypeVar("T")

ANSWER = 3.0  # seconds for the store to answer one that has nothing more to ask it

INTERFACE_VARIABLES = ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def serve(host: str, port: int, timeout: float) -> dist.TCPStore:
    """A store that listens on the address of ``host`` alone; ``port`` 0 is any free one.

    Given an address, torch's store (2.13) would listen on all interfaces; handed a socket that
    listens, it uses that. Where ``host`` is no address of this machine (a name that stands for a
    service, say) there is nothing to bind to, and the store does listen on all of them.
    """
    address = resolve(host)
    if not is_own(address):
        return _store(host, port, timeout, is_master=True)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family, backlog=1024)
    port = listener.getsockname()[1]
    return _store(address, port, timeout, is_master=True, master_listen_fd=listener.detach())


def connect(host: str, port: int, timeout: float) -> dist.TCPStore:
    """A client of a store; waits until there is one.

    Raises:
        DistError: there was none within ``timeout`` seconds.
    """
    return _store(host, port, timeout, is_master=False)


def _store(host: str, port: int, timeout: float, **how: Any) -> dist.TCPStore:
    limit = timedelta(seconds=timeout)
    return dist.TCPStore(host, port, timeout=limit, wait_for_workers=False, **how)


def ask(request: Callable[[], T], ended: Callable[[], bool]) -> T | None:
    """What a store answers; ``None`` if it has not when ``ended`` becomes true.

    The host of the store may be cut off, and nothing ends a request that is not answered. So it is
    made on a thread, which is left alone then.

    Raises:
        Exception: what the request has raised.
    """
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(request())
        except BaseException as exc:
            answer.set_exception(exc)

    threading.Thread(target=run, name="rpcpipe store", daemon=True).start()
    while not ended():
        if wait([answer], 0.05).done:
            return answer.result()
    return None


def sign(store: dist.Store, key: str) -> int:
    """Count this process, which is about to leave, under a key; returns the number so far.

    It is 0 if the store has gone or does not answer within `ANSWER` seconds: then nobody counts.
    """
    with suppress(RuntimeError):  # it has gone
        return ask(lambda: store.add(key, 1), soon()) or 0
    return 0


def soon() -> Callable[[], bool]:
    """Whether `ANSWER` seconds have passed since now."""
    deadline = time.monotonic() + ANSWER
    return lambda: time.monotonic() > deadline


def resolve(host: str) -> str:
    """The address of a host's name; an address is its own.

    Raises:
        ValueError: the name does not resolve.
    """
    try:
        return str(socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as exc:
        raise ValueError(
            f"the name of the rendezvous host {host!r} does not resolve on "
            f"{socket.gethostname()} ({exc}): give its address instead, by --rdzv-endpoint or "
            "--master-addr (MASTER_ADDR)"
        ) from exc


def is_own(address: str) -> bool:
    """Whether an address is one of this machine's."""
    if ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return True
    return any(address == own for _, own in _addresses())


def _addresses() -> list[tuple[str, str]]:
    """The name of an interface and an address, for all of them."""
    families = (socket.AF_INET, socket.AF_INET6)
    return [
        (name, found.address)
        for name, entries in psutil.net_if_addrs().items()
        for found in entries
        if found.family in families
    ]


def interface_towards(host: str, port: int) -> tuple[str, str]:
    """The name of the interface that reaches ``host``, and this machine's address on it.

    Raises:
        ValueError: none does.
    """
    address = resolve(host)
    source = address if is_own(address) else _source(address, port)
    for name, own in _addresses():
        if own.partition("%")[0] == source.partition("%")[0]:
            return name, own
    raise ValueError(f"no interface of {socket.gethostname()} has the address {source}")


def _source(address: str, port: int) -> str:
    """The address that this machine would call ``address`` from; nothing is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, port or 1))
        except OSError as exc:
            raise ValueError(
                f"{socket.gethostname()} has no route to the rendezvous host at {address} ({exc})"
            ) from exc
        return str(probe.getsockname()[0])


def _chosen(towards: tuple[str, int] | None) -> str:
    """The interface: loopback, or the one the user has named, or the one that reaches the host."""
    if towards is None:
        return "lo"
    named = {os.environ[name] for name in INTERFACE_VARIABLES if os.environ.get(name)}
    if not named:
        return interface_towards(*towards)[0]
    if len(named) > 1:
        raise ValueError(
            f"{' and '.join(INTERFACE_VARIABLES)} name different interfaces "
            f"({', '.join(sorted(named))}): name one, or unset both"
        )
    name = named.pop()
    known = {name for name, _ in _addresses()}
    if name not in known:  # TensorPipe would silently take loopback
        raise ValueError(
            f"{' or '.join(INTERFACE_VARIABLES)} names the interface {name!r}, which "
            f"{socket.gethostname()} does not have or which has no address; there are "
            f"{', '.join(sorted(known))}"
        )
    return name


@contextmanager
def using(towards: tuple[str, int] | None) -> Iterator[None]:
    """Have RPC and gloo use one interface while this is entered.

    Args:
        towards: host and port of the rendezvous; ``None`` for a job on one machine, which is to
            be reached through loopback alone.

    Raises:
        ValueError: the interface named by the user does not exist, or no interface reaches the
            rendezvous host.
    """
    before = {name: os.environ.get(name) for name in INTERFACE_VARIABLES}
    os.environ.update(dict.fromkeys(INTERFACE_VARIABLES, _chosen(towards)))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
