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
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from multiprocessing import spawn
from types import FrameType
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std, start_processes
from torch.distributed.elastic.multiprocessing.api import PContext, SubprocessContext

from rpcpipe import entry, groups, liveness, log, network, placement, saving, transport
from rpcpipe.errors import StageLost, StageTimeout
from rpcpipe.launched import Launched, Wishes
from rpcpipe.liveness import Care, Limits
from rpcpipe.placement import Arrival, Seat
from rpcpipe.transport import chosen
from rpcpipe.world import Layout, Process, Replicas, World, check_counts, worker_name

__all__ = ["run"]

T = TypeVar("T")

logger = log.logger

JOIN_TIMEOUT = 300.0  # seconds, for all processes of a job to come up
LOOPBACK = "127.0.0.1"
LEAVE_TIMEOUT = 3.0  # seconds, for all processes of a launcher to be done with the store
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
    replicas: int | Literal["auto"] = 1,
    driver: str = "auto",
    heartbeat: float | None = None,
    timeout: float | None = None,
    transport: str | None = None,
) -> T | None:
    """Call ``fn(world, *args)`` in the driver of each pipeline; serve in every other process.

    Called by a plain script, the calling process is the driver and the stages are processes
    started here; they are gone when ``run`` returns or raises, also by Ctrl-C or SIGTERM. What
    they print is shown with a prefix, and kept in files below ``$RPCPIPE_LOG_DIR`` if that is set.
    Called in every process of a launcher (``rpcpipe-run``, ``torchrun``, ``srun``), the processes
    find their roles by host and local rank. May be called again and again.

    A script must call it under ``if __name__ == "__main__":``, since stages import the script to
    know its classes.

    Args:
        fn: the training function. It runs in the driver only and may be defined anywhere.
        args: given to it.
        stages: number of stages. The default is what ``rpcpipe-run --stages`` said; otherwise one
            for each GPU without a launcher, and with one what its number of processes allows.
        replicas: number of pipelines; more than one takes a launcher. ``"auto"`` makes as many as
            the launcher's processes allow, which may be fewer after a restart with fewer nodes.
        driver: ``"shared"`` (in the first stage's process), ``"dedicated"`` (in its own) or
            ``"auto"``, which fits the launcher's number of processes. A plain script's driver is
            always in a process of its own.
        heartbeat: seconds, at least 1, within which a process that is frozen or cut off from the
            network is noticed by all others; one that has ended is noticed at once. By default
            ``$RPCPIPE_HEARTBEAT`` or 10. A process that is only slow is never taken for lost.
        timeout: seconds the driver waits for anything; then every process prints its stacks and
            what it waits for, and the run ends. By default ``$RPCPIPE_TIMEOUT`` or no limit.
        transport: ``"uv"``, sockets and, within a host, copies from memory to memory;
            ``"sockets"``, these alone; or ``"shm"``, which takes shared memory within a host, where
            each process polls: that takes up to a core of its own. By default
            ``$RPCPIPE_TRANSPORT`` or ``"uv"``. The same in all processes.

    Returns:
        What ``fn`` returned, in a driver; ``None`` elsewhere.

    Raises:
        ValueError: the numbers do not fit each other or the launcher; a host has fewer GPUs than
            stages; no network interface reaches the others.
        RuntimeError: this process is refused: the store is another job's, or the hosts have
            different versions of torch or rpcpipe.
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
    wishes, launched = Wishes.find(), Launched.find()
    stages, replicas, driver = wishes.merge(stages, replicas, driver)
    check_counts(stages, replicas, driver)
    if launched is not None:
        layout = Layout.of(launched.world_size, stages, replicas, driver)
    else:
        layout = Layout(_count_stages(stages, replicas), 1, dedicated=True)
    if not _running.acquire(blocking=False):
        raise RuntimeError("run() is under way in this process; it can be in one run at a time")
    try:
        if launched is None:
            return _run_here(fn, args, layout, wishes, limits, transport)
        return _run_launched(fn, args, layout, wishes, limits, transport, launched)
    finally:
        _running.release()


def _count_stages(stages: int | None, replicas: Replicas) -> int:
    if replicas not in (1, "auto"):
        raise ValueError(
            f"replicas={replicas} takes a launcher, which starts the other drivers: "
            f"rpcpipe-run --stages {stages or 1} --replicas {replicas} {sys.argv[0]}"
        )
    stages = stages or torch.cuda.device_count()
    if not stages:
        raise ValueError("without a GPU to count, say how many stages: run(fn, stages=2)")
    return stages


# ------------------------------------------------------------------------ under a launcher


def _run_launched(
    fn: Callable[..., T],
    args: tuple[Any, ...],
    layout: Layout,
    wishes: Wishes,
    limits: Limits,
    transport_name: str | None,
    launched: Launched,
) -> T | None:
    # One host: nothing outside it has to reach any process.
    towards = None if launched.single_host else (launched.master, launched.port)
    with ExitStack() as stack:
        # In the environment, and so not for longer: fn may start processes of its own.
        with chosen(transport_name), network.using(towards):
            scope = f"rpcpipe/{launched.attempt}/{next(_launched_runs)}"
            store = dist.PrefixStore(scope, _launchers_store())
            process = _take_seat(layout, wishes, launched, store)
            if process.rank == 0:
                store.set("job", uuid.uuid4().hex)
            own_store = dist.PrefixStore("groups", store)
            stack.enter_context(groups.joined(layout, process.rank, own_store))
            care = Care(limits, on_late_loss=functools.partial(groups.leave_early, own_store))
            world = stack.enter_context(_joined(layout, process, store, care))
        result = None if world is None else fn(world, *args)
    _await_all_left(launched, store)
    return result


def _take_seat(layout: Layout, wishes: Wishes, launched: Launched, store: dist.Store) -> Process:
    arrival = Arrival.here(launched.rank, launched.node, launched.local_rank, launched.place)
    badge = entry.Badge.of(launched.job, launched.world_size)
    give_out = functools.partial(_give_out, layout, wishes)
    seat = entry.enter(store, badge, arrival, give_out, JOIN_TIMEOUT)
    return _sit(seat, layout, arrival)


def _give_out(layout: Layout, wishes: Wishes, arrivals: list[Arrival]) -> list[Seat]:
    how = (wishes.layout, wishes.pin, wishes.share_gpu)
    seats, warnings = placement.seats(arrivals, layout, *how)
    for warning in warnings:
        logger.warning("%s", warning)
    return seats


def _sit(seat: Seat, layout: Layout, arrival: Arrival) -> Process:
    """Take the device and the cores that are given."""
    if seat.cores is not None:
        placement.keep_to(seat.cores)
    if seat.device != "cpu":
        torch.cuda.set_device(seat.device)
    if layout.stage(seat.role) is not None:
        _set_threads(seat.threads)
    local_rank = arrival.rank if arrival.local_rank is None else arrival.local_rank
    return Process(seat.role, arrival.host, os.getpid(), seat.device, seat.threads, local_rank)


@functools.cache
def _launchers_store() -> dist.Store:
    """One for all runs: where no launcher holds it, the first process does."""
    launched = Launched.find()
    assert launched is not None
    open_store = network.connect
    if launched.rank == 0 and not launched.served:
        open_store = network.serve
    return open_store(launched.master, launched.port, JOIN_TIMEOUT)


def _await_all_left(launched: Launched, store: dist.Store) -> None:
    """Whoever holds the store goes last."""
    left, deadline = network.sign(store, "left"), time.monotonic() + LEAVE_TIMEOUT
    if launched.rank == 0 and not launched.served:
        while left < launched.world_size and time.monotonic() < deadline:
            time.sleep(0.01)
            left = store.add("left", 0)


# ----------------------------------------------------------------------------- a plain script


def _run_here(
    fn: Callable[..., T],
    args: tuple[Any, ...],
    layout: Layout,
    wishes: Wishes,
    limits: Limits,
    transport_name: str | None,
) -> T:
    transport.renew("the driver", limits.timeout)
    arrivals = [Arrival.here(rank, local_rank=rank) for rank in range(layout.world_size)]
    seats = _give_out(layout, wishes, arrivals)
    with ExitStack() as stack:
        stack.enter_context(_terminating_by_exception())
        with chosen(transport_name):
            processes = stack.enter_context(_stage_processes(layout, seats))
            world = stack.enter_context(_driving(processes, layout, seats, limits))
        return fn(world, *args)


@contextmanager
def _driving(
    processes: _StageProcesses, layout: Layout, seats: list[Seat], limits: Limits
) -> Iterator[World]:
    """Be the driver of stage processes that are coming up."""
    with ExitStack() as stack:
        with network.using(None), processes.explaining():
            store = processes.store()
            store.set("job", uuid.uuid4().hex)
            processes.await_told(store)
            process = _sit(seats[0], layout, Arrival.here(0, local_rank=0))
            care = Care(limits, processes.last_words, processes.folder)
            joined = _joined(layout, process, store, care, processes.let_go)
            world = stack.enter_context(joined)
        assert world is not None
        yield world


@contextmanager
def _stage_processes(layout: Layout, seats: list[Seat]) -> Iterator[_StageProcesses]:
    """The stage processes of a plain script; gone when this is left."""
    with ExitStack() as stack:
        folder, logs = None, os.environ.get("RPCPIPE_LOG_DIR")
        if logs is None:
            logs = stack.enter_context(tempfile.TemporaryDirectory(prefix="rpcpipe-"))
            folder = logs
        specs = DefaultLogsSpecs(log_dir=logs, tee=Std.ALL)
        processes = _StageProcesses(layout, seats, specs, folder)
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

    def __init__(
        self, layout: Layout, seats: list[Seat], logs: DefaultLogsSpecs, folder: str | None
    ) -> None:
        self.folder = folder  # temporary
        self._may_end = False
        self._layout = layout
        self._seats = seats
        self._logs = logs
        self._lost: Exception | None = None
        self._stderrs: dict[int, str] = {}
        # While it serves, somebody may wait for a process that has died; nobody once it is closed.
        self._server: dist.TCPStore | None
        self._server = network.serve(LOOPBACK, 0, JOIN_TIMEOUT)
        self._port = self._server.port
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
        return network.connect(LOOPBACK, self._port, JOIN_TIMEOUT)

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
                    liveness.await_ended(watchers, END_TIMEOUT)
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
                "seat": asdict(self._seats[j + self._layout.dedicated]),
                "port": self._port,
                "driver": os.getpid(),
                "log_level": logger.getEffectiveLevel(),
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


def _live(
    main: dict[str, Any],
    stages: int,
    seat: dict[str, Any],
    port: int,
    driver: int,
    log_level: int,
) -> None:
    """The life of a stage process."""
    threading.Thread(target=_die_with, args=(driver,), daemon=True).start()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    _import_main(main)
    log.show(log_level)  # after the script, which may set up logging its own way
    layout = Layout(stages, 1, dedicated=True)
    arrival = Arrival.here(seat["role"], local_rank=seat["role"])
    process = _sit(Seat(**seat), layout, arrival)
    store = network.connect(LOOPBACK, port, JOIN_TIMEOUT)
    with network.using(None), _joined(layout, process, store, Care()):
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
    log.be(rank, "driver" if layout.is_driver(rank) else f"stage {layout.stage(rank)}")
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
                world = World(layout, rank, job, processes)
                logger.info("%s", world.hosts()[replica])
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

    def lost() -> bool:
        return transport.lost() is not None

    def come() -> bool:
        if store.add(f"{point}/count", 1) == world_size:
            store.set(f"{point}/all", "")
        while not (met := store.check([f"{point}/all"])) and not lost():
            time.sleep(0.005)
        return met

    try:
        error = None if network.ask(come, lost) else transport.lost()
    except dist.DistError:  # whoever holds the store is gone
        error = transport.lost(within=2.0)
    if error is not None:
        raise error


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
