"""Rendezvous: how the nodes of a job find each other, with stores that listen on one address.

torch's own backends (2.13) listen on all interfaces. These take their place in `rpcpipe-run`: the
static one counts nodes as ``--node-rank`` does, the c10d one leaves everything but the store to
torch.
"""

from __future__ import annotations

import os
import socket

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig

from rpcpipe import entry, network

__all__ = ["adopt"]

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 29400  # as torch's c10d backend has it


class StaticRendezvous(RendezvousHandler):
    """Nodes that know their number: that of rank 0 holds the store, also for the processes.

    On one node each attempt has a store of its own, on a port of its own unless one was given.
    """

    def __init__(self, params: RendezvousParameters) -> None:
        self._run_id = params.run_id
        self._address = parse_rendezvous_endpoint(params.endpoint, DEFAULT_PORT)
        self._rank, self._nodes = int(params.config["rank"]), params.max_nodes
        self._timeout = float(params.config.get("timeout", 600))
        self._store: dist.TCPStore | None = None
        self._attempts = 0

    def get_backend(self) -> str:
        return "rpcpipe-static"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        if self._nodes == 1:
            self._store = None  # closes that of the last attempt
        if self._store is None:
            self._store = self._open()
            self._enter(self._store)
        store = dist.PrefixStore(f"agents/{self._attempts}", self._store)
        self._attempts += 1
        reached = RendezvousStoreInfo(self._address[0], self._store.port)
        return RendezvousInfo(store, self._rank, self._nodes, reached)

    def _open(self) -> dist.TCPStore:
        if self._rank > 0:
            return network.connect(*self._address, self._timeout)
        return network.serve(*self._address, self._timeout)

    def _enter(self, store: dist.TCPStore) -> None:
        """Refuse to be in a store with another job's nodes."""
        door = dist.PrefixStore("nodes", store)
        badge = entry.Badge.of(self._run_id, self._nodes)
        name = f"a node called {socket.gethostname()}"
        entry.let_in(door, badge, self._rank, name, self._timeout)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


class _Backend(C10dRendezvousBackend):
    @property
    def name(self) -> str:
        return "rpcpipe-c10d"  # as it is registered


def _c10d(params: RendezvousParameters) -> RendezvousHandler:
    host, port = parse_rendezvous_endpoint(params.endpoint, DEFAULT_PORT)
    timeout = float(params.get_as_int("read_timeout", 60) or 60)
    hosting = params.get_as_bool("is_host")
    if hosting is None:
        # torch compares names, and fails where the host's own does not resolve.
        hosting = network.is_own(network.resolve(host))
    store = _serve_or_connect(host, port, timeout) if hosting else None
    store = store or network.connect(host, port, timeout)
    return create_handler(store, _Backend(store, params.run_id), params)


def _serve_or_connect(host: str, port: int, timeout: float) -> dist.TCPStore | None:
    try:
        return network.serve(host, port, timeout)
    except OSError:  # another agent on this machine does
        return None


rendezvous_handler_registry.register("rpcpipe-static", StaticRendezvous)
rendezvous_handler_registry.register("rpcpipe-c10d", _c10d)


def adopt(config: LaunchConfig) -> None:
    """Have a launch use these, and address its nodes by what reaches the rendezvous.

    Raises:
        ValueError: the rendezvous host's name does not resolve, or no interface reaches it.
    """
    if config.rdzv_backend not in ("static", "c10d"):
        return
    if config.rdzv_backend == "static" and config.max_nodes > 1:
        # The order of hosts is the user's.
        os.environ["RPCPIPE_NODE_RANK"] = str(config.rdzv_configs["rank"])
    if config.rdzv_backend == "c10d":
        # A store for each attempt: torch's agents would share theirs with the processes of all
        # attempts, and stale keys break the second (pytorch issue 135712).
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        if config.local_addr is None:  # torch would take the host's name, which need not resolve
            config.local_addr = _own_address(config)
    config.rdzv_backend = f"rpcpipe-{config.rdzv_backend}"


def _own_address(config: LaunchConfig) -> str:
    if config.max_nodes == 1:
        return LOOPBACK
    host, port = parse_rendezvous_endpoint(config.rdzv_endpoint, DEFAULT_PORT)
    return network.interface_towards(host, port)[1]
