"""Fixtures: a running pipeline that tests share, and a check that none leaves anything behind."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest
import torch

import rpcpipe


@contextmanager
def cluster(stages: int) -> Iterator[rpcpipe.World]:
    """The world of real stage processes; ``run`` sits on a thread, the test is the driver."""
    worlds: queue.Queue[rpcpipe.World | BaseException] = queue.Queue()
    over = threading.Event()

    def train(world: rpcpipe.World) -> None:
        worlds.put(world)
        over.wait()

    def start() -> None:
        try:
            rpcpipe.run(train, stages=stages)
        except BaseException as exc:
            worlds.put(exc)

    thread = threading.Thread(target=start)
    thread.start()
    world = worlds.get(timeout=60)
    if isinstance(world, BaseException):
        raise world
    try:
        yield world
    finally:
        over.set()
        thread.join()


@pytest.fixture(scope="session")
def world(request: pytest.FixtureRequest) -> Iterator[rpcpipe.World]:
    """A world that all tests with the same number of stages share, one number at a time.

    Use: ``@pytest.mark.parametrize("world", [2], indirect=True)``.
    """
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with cluster(request.param) as shared:
        yield shared
    after = {
        child.pid
        for child in psutil.Process().children(recursive=True)
        if "resource_tracker" not in " ".join(child.cmdline())
    }
    assert after <= before, "stage processes outlived their run"


@pytest.fixture(autouse=True)
def same_threads_as_a_stage() -> Iterator[None]:
    """Sums are in the same order only with the same number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
