"""run: call the training function in each driver, and serve in every other process."""

from __future__ import annotations

import functools
import itertools
import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std, start_processes
from torch.distributed.elastic.multiprocessing.api import PContext, RunProcsResult

from rpcpipe import transport
from rpcpipe.errors import StageLost
from rpcpipe.world import Layout, Process, World, check_counts, worker_name

__all__ = ["run"]

T = TypeVar("T")

logger = logging.getLogger("rpcpipe")

JOIN_TIMEOUT = 300.0  # seconds, for all processes of a job to come up
MEET_TIMEOUT = 3.0  # seconds, for all to take leave: they have nothing else to do
ENGINE_THREADS = 16  # at least two: one waits for the compute thread while another hands it work
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

_launched_runs = itertools.count()


def run(
    fn: Callable[..., T],
    *args: Any,
    stages: int | None = None,
    replicas: int = 1,
    driver: str = "auto",
) -> T | None:
    """Call ``fn(world, *args)`` in the driver of each pipeline; serve in every other process.

    Called by a plain script, the calling process is the driver and the stages are processes
    started here; they are gone when ``run`` returns or raises, also by Ctrl-C or SIGTERM. What
    they print is shown with a prefix, and kept in files below ``$RPCPIPE_LOG_DIR`` if that is set.
    Called in every process of a launcher such as ``torchrun``, the processes find their roles by
    rank. May be called again and again.

    A script must call it under ``if __name__ == "__main__":``, since stages import the script to
    know its classes.

    Args:
        fn: the training function. It runs in the driver only and may be defined anywhere.
        args: given to it.
        stages: number of stages. Without a launcher the default is one for each GPU; with one,
            what its number of processes allows.
        replicas: number of pipelines; more than one takes a launcher.
        driver: ``"shared"`` (in the first stage's process), ``"dedicated"`` (in its own) or
            ``"auto"``, which fits the launcher's number of processes. A plain script's driver is
            always in a process of its own.

    Returns:
        What ``fn`` returned, in a driver; ``None`` elsewhere.

    Raises:
        ValueError: the numbers do not fit each other or the launcher.
        StageLost: a stage process ended or could not be started.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            "run() was reached while a stage process imports this script: call it under "
            'if __name__ == "__main__":'
        )
    check_counts(stages, replicas, driver)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _run_launched(fn, args, stages, replicas, driver)
    if replicas != 1:
        raise ValueError(
            f"replicas={replicas} takes a launcher, which starts the other drivers: "
            f"torchrun --nproc-per-node {replicas * ((stages or 1) + 1)} {sys.argv[0]}"
        )
    stages = stages or torch.cuda.device_count()
    if not stages:
        raise ValueError("without a GPU to count, say how many stages: run(fn, stages=2)")
    return _run_here(fn, args, stages)


# ------------------------------------------------------------------------ under a launcher


def _run_launched(
    fn: Callable[..., T], args: tuple[Any, ...], stages: int | None, replicas: int, driver: str
) -> T | None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    layout = Layout.of(world_size, stages, replicas, driver)
    base, _, _ = next(dist.rendezvous("env://", rank, world_size))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"rpcpipe/{attempt}/{next(_launched_runs)}", base)
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    local_stages = max(1, local - local // layout.ranks_per_pipeline * layout.dedicated)
    if rank == 0:
        store.set("job", uuid.uuid4().hex)
    process = Process.here(rank, max(0, local_rank - layout.dedicated), local_stages)
    # One host: nothing outside it has to reach any process.
    single_host = local == world_size
    with ExitStack() as stack:
        if single_host:
            stack.enter_context(transport.loopback())
        world = stack.enter_context(_joined(layout, process, store))
        return None if world is None else fn(world, *args)


# ----------------------------------------------------------------------------- a plain script


def _run_here(fn: Callable[..., T], args: tuple[Any, ...], stages: int) -> T:
    layout = Layout(stages, 1, dedicated=True)
    with ExitStack() as stack:
        stack.enter_context(_terminating_by_exception())
        store, port = _listen()
        store.set("job", uuid.uuid4().hex)
        children = stack.enter_context(_stage_processes(layout, port))
        stack.enter_context(transport.loopback())
        watch = stack.enter_context(_watch(children, stages))
        for j in range(stages):
            watch.until(functools.partial(store.check, [f"process/{layout.dedicated + j}"]), j)
        process = Process.here(0, 0, stages)
        world = stack.enter_context(_joined(layout, process, store))
        assert world is not None
        return fn(world, *args)


def _listen() -> tuple[dist.TCPStore, int]:
    """A store on the loopback interface: given an address, it would listen on all of them."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=JOIN_TIMEOUT),
        master_listen_fd=listener.detach(),
    )
    return store, port


@contextmanager
def _stage_processes(layout: Layout, port: int) -> Iterator[PContext]:
    """The stage processes, started by elastic's multiprocessing; gone when this is left."""
    with ExitStack() as stack:
        logs = os.environ.get("RPCPIPE_LOG_DIR")
        if logs is None:
            logs = stack.enter_context(tempfile.TemporaryDirectory(prefix="rpcpipe-"))
        handlers = _signal_handlers()
        children = start_processes(
            name="stage",
            entrypoint=_stage_main,
            args={j: (layout, layout.dedicated + j, port) for j in range(layout.stages)},
            envs={j: {} for j in range(layout.stages)},
            logs_specs=DefaultLogsSpecs(log_dir=logs, tee=Std.ALL),
            log_line_prefixes={j: f"[stage {j}] " for j in range(layout.stages)},
            start_method="spawn",
        )
        _restore(handlers)  # elastic has put its own in, which stay for good
        stack.callback(children.close, signal.SIGTERM, 5)
        yield children
        children.wait(timeout=5, period=0.02)  # they were told to leave


def _stage_main(layout: Layout, rank: int, port: int) -> None:
    """The life of a stage process that ``run`` started."""
    parent = os.getppid()

    def orphaned() -> bool:
        return os.getppid() != parent

    def interrupted(signum: int, frame: FrameType | None) -> None:
        # Ctrl-C reaches the whole foreground group; the driver decides what becomes of it. The
        # kernel sends the same signal when the driver has died.
        if orphaned():
            os._exit(1)

    signal.signal(signal.SIGINT, interrupted)
    timeout = timedelta(seconds=JOIN_TIMEOUT)
    base = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    j = layout.stage(rank)
    assert j is not None
    process = Process.here(rank, j, layout.stages)
    with transport.loopback(), _joined(layout, process, base, orphaned):
        pass


class _Watch:
    """Notices when a stage process ends before its time, by asking the kernel."""

    PERIOD = 0.05  # seconds

    def __init__(self, children: PContext) -> None:
        self._children = children
        self._leave = threading.Event()
        self.lost: str | None = None
        self._thread = threading.Thread(target=self._look, name="rpcpipe watch", daemon=True)

    def _look(self) -> None:
        pids = self._children.pids()
        while not self._leave.wait(self.PERIOD):
            ended = self._children.wait(timeout=-1)
            if ended is not None and ended.failures:
                self.lost = _obituary(ended, pids)
                transport.declare_lost(self.lost)
                return

    def until(self, reached: Callable[[], bool], j: int) -> None:
        """Wait for something a child does.

        Raises:
            StageLost: a child has ended, or it takes longer than `JOIN_TIMEOUT`.
        """
        deadline = time.monotonic() + JOIN_TIMEOUT
        while not reached():
            if self.lost is not None:
                raise StageLost(self.lost)
            if time.monotonic() > deadline:
                raise StageLost(f"stage {j} did not come up within {JOIN_TIMEOUT:.0f} s")
            time.sleep(0.01)


@contextmanager
def _watch(children: PContext, stages: int) -> Iterator[_Watch]:
    watch = _Watch(children)
    watch._thread.start()
    try:
        yield watch
    finally:
        watch._leave.set()
        watch._thread.join()


def _obituary(ended: RunProcsResult, pids: dict[int, int]) -> str:
    j, failure = min(ended.failures.items())
    how = (
        f"was ended by {signal.Signals(-failure.exitcode).name}"
        if failure.exitcode < 0
        else f"exited with code {failure.exitcode}"
    )
    text = f"the process of stage {j} (pid {pids[j]}, host {socket.gethostname()}) {how}"
    with suppress(OSError):
        with open(ended.stderrs[j], errors="replace") as file:
            last = "".join(file.readlines()[-20:]).strip()
        text += f"; the last it printed:\n{last}\n" if last else ""
    return text


# --------------------------------------------------------------------------------------- roles


@contextmanager
def _joined(
    layout: Layout,
    process: Process,
    store: dist.Store,
    orphaned: Callable[[], bool] = lambda: False,
) -> Iterator[World | None]:
    """Be in the RPC world of this process's pipeline.

    Yields the world to a driver. Elsewhere yields ``None``, once the driver needs nothing more.
    """
    rank = process.rank
    if layout.stage(rank) is not None:
        torch.set_num_threads(process.threads)
        with suppress(RuntimeError):  # parallel work has been done already: it stays as it is
            torch.set_num_interop_threads(max(ENGINE_THREADS, torch.get_num_interop_threads()))
    process.tell(store)
    replica = layout.replica(rank)
    per_pipeline = layout.ranks_per_pipeline
    ours = range(replica * per_pipeline, (replica + 1) * per_pipeline)
    job = store.get("job").decode()
    own_store = dist.PrefixStore(f"rpc/{replica}", store)
    transport.join(worker_name(job, rank), rank - ours[0], per_pipeline, own_store)
    meet = None
    try:
        if not layout.is_driver(rank):
            if transport.serve(orphaned):
                meet = functools.partial(_meet, own_store, per_pipeline)
            yield None
            return
        world = World(layout, rank, job, {r: Process.hear(store, r) for r in ours})
        logger.info("%s", world)
        try:
            yield world
        finally:
            transport.dismiss([worker_name(job, r) for r in ours if r != rank])
            meet = functools.partial(_meet, own_store, per_pipeline)
    finally:
        transport.leave(meet)


def _meet(store: dist.Store, world_size: int, point: str) -> None:
    """Wait until all processes have come to this point, or for long enough."""
    if store.add(f"{point}/count", 1) == world_size:
        store.set(f"{point}/all", "")
    with suppress(dist.DistError):
        store.wait([f"{point}/all"], timedelta(seconds=MEET_TIMEOUT))


# ------------------------------------------------------------------------------------- signals


def _signal_handlers() -> dict[signal.Signals, Any]:
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {signum: signal.getsignal(signum) for signum in SIGNALS}


def _restore(handlers: dict[signal.Signals, Any]) -> None:
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


class _Terminated(SystemExit):
    """A signal that would have ended this process at once asks it to end."""


@contextmanager
def _terminating_by_exception() -> Iterator[None]:
    """Unwind on a signal whose default action is to end the process, then let it be ended."""
    handlers = _signal_handlers()

    def terminate(signum: int, frame: FrameType | None) -> None:
        raise _Terminated(128 + signum)

    for signum, handler in handlers.items():
        if handler is signal.SIG_DFL:
            signal.signal(signum, terminate)
    try:
        yield
    except _Terminated as exc:
        _restore(handlers)
        os.kill(os.getpid(), int(str(exc.code)) - 128)
        raise
    finally:
        _restore(handlers)
