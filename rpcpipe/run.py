"""run: call the training function in each driver, and serve in every other process."""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from datetime import timedelta
from multiprocessing import spawn
from types import FrameType
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std, start_processes
from torch.distributed.elastic.multiprocessing.api import PContext, SubprocessContext

from rpcpipe import groups, liveness, saving, transport
from rpcpipe.errors import StageLost, StageTimeout
from rpcpipe.liveness import Care, Limits
from rpcpipe.world import Layout, Process, World, check_counts, worker_name

__all__ = ["run"]

T = TypeVar("T")

logger = logging.getLogger("rpcpipe")

JOIN_TIMEOUT = 300.0  # seconds, for all processes of a job to come up
END_TIMEOUT = 5  # seconds, for a stage process to end by itself, or by SIGTERM
ENGINE_THREADS = 16  # at least two: one waits for the compute thread while another hands it work
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

_launched_runs = itertools.count()
_running = threading.Lock()
_importing_main = False  # in a stage process, while it imports the script


def run(
    fn: Callable[..., T],
    *args: Any,
    stages: int | None = None,
    replicas: int = 1,
    driver: str = "auto",
    heartbeat: float | None = None,
    timeout: float | None = None,
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
        heartbeat: seconds, at least 1, within which a process that is frozen or cut off from the
            network is noticed by all others; one that has ended is noticed at once. By default
            ``$RPCPIPE_HEARTBEAT`` or 10. A process that is only slow is never taken for lost.
        timeout: seconds the driver waits for anything; then every process prints its stacks and
            what it waits for, and the run ends. By default ``$RPCPIPE_TIMEOUT`` or no limit.

    Returns:
        What ``fn`` returned, in a driver; ``None`` elsewhere.

    Raises:
        ValueError: the numbers do not fit each other or the launcher.
        StageLost: a process of the job ended, froze, cannot be reached or could not be started.
        StageTimeout: something took longer than ``timeout``.
    """
    if _importing_main:
        raise RuntimeError(
            "run() was reached while a stage process imports this script: call it under "
            'if __name__ == "__main__":'
        )
    check_counts(stages, replicas, driver)
    limits = Limits.of(heartbeat, timeout)
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if launched:
        layout = Layout.of(int(os.environ["WORLD_SIZE"]), stages, replicas, driver)
    else:
        layout = Layout(_count_stages(stages, replicas), 1, dedicated=True)
    if not _running.acquire(blocking=False):
        raise RuntimeError("run() is under way in this process; it can be in one run at a time")
    try:
        return (_run_launched if launched else _run_here)(fn, args, layout, limits)
    finally:
        _running.release()


def _count_stages(stages: int | None, replicas: int) -> int:
    if replicas != 1:
        raise ValueError(
            f"replicas={replicas} takes a launcher, which starts the other drivers: "
            f"torchrun --nproc-per-node {replicas * ((stages or 1) + 1)} {sys.argv[0]}"
        )
    stages = stages or torch.cuda.device_count()
    if not stages:
        raise ValueError("without a GPU to count, say how many stages: run(fn, stages=2)")
    return stages


# ------------------------------------------------------------------------ under a launcher


def _run_launched(
    fn: Callable[..., T], args: tuple[Any, ...], layout: Layout, limits: Limits
) -> T | None:
    rank, world_size = int(os.environ["RANK"]), layout.world_size
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"rpcpipe/{attempt}/{next(_launched_runs)}", _launchers_store())
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    local_stages = max(1, local - local // layout.ranks_per_pipeline * layout.dedicated)
    if rank == 0:
        store.set("job", uuid.uuid4().hex)
    process = Process.here(rank, max(0, local_rank - layout.dedicated), local_stages)
    # One host: nothing outside it has to reach any process.
    single_host = local == world_size
    network = transport.loopback() if single_host else nullcontext()
    in_groups = groups.joined(layout, rank, dist.PrefixStore("groups", store))
    with network, in_groups, _joined(layout, process, store, Care(limits)) as world:
        return None if world is None else fn(world, *args)


@functools.cache
def _launchers_store() -> dist.Store:
    """One for all runs: where no launcher holds it, the first process does, on a fixed port."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store: dist.Store = next(dist.rendezvous("env://", rank, world_size))[0]
    return store


# ----------------------------------------------------------------------------- a plain script


def _run_here(fn: Callable[..., T], args: tuple[Any, ...], layout: Layout, limits: Limits) -> T:
    transport.renew("the driver", limits.timeout)
    with ExitStack() as stack:
        stack.enter_context(_terminating_by_exception())
        processes = stack.enter_context(_stage_processes(layout))
        stack.enter_context(transport.loopback())
        with processes.explaining():
            store = processes.store()
            store.set("job", uuid.uuid4().hex)
            processes.await_told(store)
            process = Process.here(0, 0, layout.stages)
            care = Care(limits, processes.last_words, processes.folder)
            joined = _joined(layout, process, store, care, processes.let_go)
            world = stack.enter_context(joined)
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


def _connect(port: int) -> dist.TCPStore:
    timeout = timedelta(seconds=JOIN_TIMEOUT)
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)


@contextmanager
def _stage_processes(layout: Layout) -> Iterator[_StageProcesses]:
    """The stage processes of a plain script; gone when this is left."""
    with ExitStack() as stack:
        folder, logs = None, os.environ.get("RPCPIPE_LOG_DIR")
        if logs is None:
            logs = stack.enter_context(tempfile.TemporaryDirectory(prefix="rpcpipe-"))
            folder = logs
        processes = _StageProcesses(layout, DefaultLogsSpecs(log_dir=logs, tee=Std.ALL), folder)
        stack.callback(processes.end)
        processes.start()
        yield processes


class _StageProcesses:
    """The stage processes, from start to end in the hands of a thread.

    Signals are handled on the main thread: however often Ctrl-C is pressed, none is left half
    started or half ended. And elastic installs signal handlers of its own for good, except where
    it is used by another thread.
    """

    PERIOD = 0.05  # seconds between two looks

    def __init__(self, layout: Layout, logs: DefaultLogsSpecs, folder: str | None) -> None:
        self.folder = folder  # temporary
        self._may_end = False
        self._layout = layout
        self._logs = logs
        self._lost: Exception | None = None
        self._stderrs: dict[int, str] = {}
        # While it serves, somebody may wait for a process that has died; nobody once it is closed.
        self._server: dist.TCPStore | None
        self._server, self._port = _listen()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="rpcpipe stages", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def let_go(self) -> None:
        """The driver needs them no more; before this, one that ends is lost."""
        self._may_end = True

    def end(self) -> None:
        """Have them end, by force unless they were let go; returns when they are gone."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()

    def store(self) -> dist.TCPStore:
        return _connect(self._port)

    def await_told(self, store: dist.Store) -> None:
        """Wait until all have said who they are."""
        deadline = time.monotonic() + JOIN_TIMEOUT
        while not store.check([f"process/{1 + j}" for j in range(self._layout.stages)]):
            if time.monotonic() > deadline:
                raise StageLost(f"the stages did not come up within {JOIN_TIMEOUT:.0f} s")
            time.sleep(0.01)

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Raise `StageLost` if any was lost meanwhile, instead of what came of that."""
        try:
            yield
        except RuntimeError as exc:
            if self._lost is not None:
                raise self._lost from exc
            raise
        if self._lost is not None:
            raise self._lost

    def last_words(self, j: int) -> str:
        """What a stage printed last as an error, as the end of a sentence."""
        try:
            with open(self._stderrs[j], errors="replace") as file:
                last = "".join(file.readlines()[-20:]).strip()
        except (KeyError, OSError):
            return ""
        return f"; the last it printed:\n{last}\n" if last else ""

    # ---------------------------------------------------------------------------- on the thread

    def _keep(self) -> None:
        with _elastic_is_silent():
            try:
                children = self._start()
                try:
                    self._watch(children)
                finally:
                    # One that is frozen would sleep through a request.
                    end = signal.SIGTERM if transport.lost() is None else signal.SIGKILL
                    watchers = liveness.watchers(children.pids().values())
                    children.close(end, END_TIMEOUT)
                    psutil.wait_procs(watchers, END_TIMEOUT)
                    _close_logs(children)
            except Exception as exc:
                self._lost = StageLost(f"the stage processes could not be started: {exc!r}")
            finally:
                self._server = None

    def _start(self) -> PContext:
        main = _preparation()
        lives = {
            j: {
                "main": main,
                "stages": self._layout.stages,
                "rank": j + self._layout.dedicated,
                "port": self._port,
                "driver": os.getpid(),
            }
            for j in range(self._layout.stages)
        }
        return start_processes(
            name="stage",
            entrypoint=sys.executable,
            args={j: ("-c", _STAGE_PROGRAM, json.dumps(life)) for j, life in lives.items()},
            envs={j: {} for j in lives},
            logs_specs=self._logs,
            log_line_prefixes={j: f"[stage {j}] " for j in lives},
        )

    def _watch(self, children: PContext) -> None:
        pids = children.pids()
        self._stderrs = children.stderrs
        while not self._over.wait(self.PERIOD):
            for j, pid in pids.items():
                how = _how_it_ended(pid)
                if how is not None and not self._may_end and transport.lost() is None:
                    transport.declare_lost(self._obituary(j, pid, how))
            self._lost = transport.lost()
            if self._lost is not None:
                return
        deadline = time.monotonic() + END_TIMEOUT * self._may_end
        while not all(map(_how_it_ended, pids.values())) and time.monotonic() < deadline:
            if transport.lost() is not None:
                return
            time.sleep(0.01)

    def _obituary(self, j: int, pid: int, how: str) -> StageLost:
        host, step = socket.gethostname(), transport.last_step()
        text = f"the process of stage {j} (pid {pid}, host {host}) {how}"
        text += "" if step is None else f"; the last completed step is {step}"
        text += self.last_words(j)
        return StageLost(text, stage=j, host=host, pid=pid, step=step, how=how)


@contextmanager
def _elastic_is_silent() -> Iterator[None]:
    """Hide what elastic logs on this thread: that it is no main thread, whom it terminates."""
    thread = threading.get_ident()
    elastic = logging.getLogger(PContext.__module__)

    def is_other(record: logging.LogRecord) -> bool:
        return record.thread != thread

    elastic.addFilter(is_other)
    try:
        yield
    finally:
        elastic.removeFilter(is_other)


def _close_logs(children: PContext) -> None:
    """Close what elastic (torch 2.13) leaves open of processes that have ended by themselves."""
    assert isinstance(children, SubprocessContext)
    for handler in children.subprocess_handlers.values():
        for file in (handler._stdout, handler._stderr):
            if file is not None:
                file.close()


def _how_it_ended(pid: int) -> str | None:
    """What the kernel says of a child; it stays there to be reaped by whoever started it."""
    try:
        end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return "has ended"
    if end is None:
        return None
    if end.si_code == os.CLD_EXITED:
        return f"exited with code {end.si_status}"
    return f"was ended by {signal.Signals(end.si_status).name}"


# ------------------------------------------------------------- in a process that run started

_STAGE_PROGRAM = """
import json, sys
life = json.loads(sys.argv[1])
sys.path[:] = life["main"]["sys_path"]
from rpcpipe.run import _live
_live(**life)
"""


def _preparation() -> dict[str, Any]:
    """What another process needs to import the script, if there is one in a file."""
    main = spawn.get_preparation_data("stage")
    del main["authkey"]
    if not os.path.exists(main.get("init_main_from_path", "")):
        main.pop("init_main_from_path", None)
    return main


def _live(main: dict[str, Any], stages: int, rank: int, port: int, driver: int) -> None:
    """The life of a stage process."""
    threading.Thread(target=_die_with, args=(driver,), daemon=True).start()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    _import_main(main)
    layout = Layout(stages, 1, dedicated=True)
    process = Process.here(rank, rank - layout.dedicated, stages)
    with transport.loopback(), _joined(layout, process, _connect(port), Care()):
        pass


def _die_with(driver: int) -> None:
    while os.getppid() == driver:
        time.sleep(0.5)
    os._exit(1)


def _import_main(main: dict[str, Any]) -> None:
    """Import the script, so that classes it defines are known here."""
    global _importing_main
    _importing_main = True
    spawn.prepare(main)
    _importing_main = False


# --------------------------------------------------------------------------------------- roles


@contextmanager
def _joined(
    layout: Layout,
    process: Process,
    store: dist.Store,
    care: Care,
    before_leaving: Callable[[], None] = lambda: None,
) -> Iterator[World | None]:
    """Be in the RPC world of this process's pipeline.

    Yields the world to a driver. Elsewhere yields ``None``, once the driver needs nothing more.
    """
    rank = process.rank
    if layout.stage(rank) is not None:
        _set_threads(process.threads)
    process.tell(store)
    replica = layout.replica(rank)
    per_pipeline = layout.ranks_per_pipeline
    ours = range(replica * per_pipeline, (replica + 1) * per_pipeline)
    job = store.get("job").decode()
    own_store = dist.PrefixStore(f"rpc/{replica}", store)
    meet = functools.partial(_meet, own_store, per_pipeline)

    def take_leave() -> None:
        try:
            saving.finish_all()
        finally:
            before_leaving()
            transport.dismiss([worker_name(job, r) for r in ours if r != rank])
            transport.leave(meet)
            line.bye()

    watched = liveness.watched(layout, process, store, job, care)
    with transport.quiet_agents(), watched as line:
        try:
            transport.join(worker_name(job, rank), rank - ours[0], per_pipeline, own_store)
            if layout.is_driver(rank):
                processes = {r: Process.hear(store, r) for r in range(layout.world_size)}
                line.joined(processes)
                world = World(layout, rank, job, {r: processes[r] for r in ours})
                logger.info("%s", world)
                with _leading(take_leave):
                    yield world
            else:
                _warm_up()
                transport.serve()
                transport.leave(meet)
                line.bye()
                yield None
        except StageLost:
            if not layout.is_driver(rank):
                line.await_end()
            raise
        finally:
            transport.leave(None)


@contextmanager
def _leading(take_leave: Callable[[], None]) -> Iterator[None]:
    """Take leave of the other processes in the end, unless that is not the time for it."""
    try:
        yield
    except (StageLost, StageTimeout, KeyboardInterrupt, _Terminated):
        raise  # whoever started the others ends them
    except BaseException as exc:
        with suppress(StageLost, StageTimeout):
            if transport.lost() is None:
                take_leave()
        lost = transport.lost()
        if lost is not None and isinstance(exc, RuntimeError):
            raise lost from exc  # that is what torch made of it
        raise
    take_leave()


def _set_threads(threads: int) -> None:
    torch.set_num_threads(threads)
    with suppress(RuntimeError):  # parallel work has been done already: it stays as it is
        torch.set_num_interop_threads(max(ENGINE_THREADS, torch.get_num_interop_threads()))


def _warm_up() -> None:
    """Import what torch (2.13) does in the first backward pass that is given gradients.

    That is half a second; in a backward pass, the stages would spend it one after the other.
    """
    with suppress(ImportError):
        importlib.import_module("torch.fx.experimental.symbolic_shapes")


def _meet(store: dist.Store, world_size: int, point: str) -> None:
    """Wait until all processes have come to this point, or one is lost."""
    try:
        if store.add(f"{point}/count", 1) == world_size:
            store.set(f"{point}/all", "")
        while not store.check([f"{point}/all"]):
            if (error := transport.lost()) is not None:
                raise error
            time.sleep(0.005)
    except dist.DistError:  # whoever holds the store is gone
        if (error := transport.lost(within=2.0)) is not None:
            raise error from None


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
