"""Transport: the one door to torch.distributed.rpc and to distributed autograd.

Everything torch keeps private or in maintenance mode is named here and nowhere else.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import queue
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import Tensor
from torch.futures import Future

from rpcpipe.errors import Failure, StageLost, StageTimeout
from rpcpipe.stacks import Waits

__all__ = [
    "Remote",
    "Tape",
    "WorldOver",
    "abandon",
    "chosen",
    "completed",
    "completed_step",
    "create",
    "current_tape",
    "debug_info",
    "declare_lost",
    "dismiss",
    "join",
    "last_step",
    "later",
    "leave",
    "lost",
    "prioritize",
    "publish",
    "quiet_agents",
    "raise_failure",
    "reference",
    "renew",
    "serve",
    "value_of",
    "wait",
]

T = TypeVar("T")

VARIABLE = "RPCPIPE_TRANSPORT"
# TensorPipe's transports for messages and channels for tensors, by the name users know them by.
# Shared memory, which torch takes where it can, polls: up to a core for every idle process.
_CHOICES = {
    "uv": (["uv"], ["cma", "basic"]),
    "shm": (["shm", "uv"], ["cma", "basic"]),
    "sockets": (["uv"], ["basic"]),
}

_SCHEME = "rpcpipe"
_THREAD = "rpcpipe transport"
_OVER = "the world this pipe belongs to is over: run() has returned"
EXPLAINED = 2.0  # seconds in which a torn connection is explained by who watches the process
ERROR, FATAL = 2, 3  # severities of torch's C++ log
_FIRST = 2**62  # a sequence number no forward operation reaches

_objects: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_kept: dict[str, Any] = {}  # what is not kept by an RRef
_store: dist.Store | None = None
_rrefs_work = True  # whether the RRef context of this process belongs to the world it is in
_inside = False  # whether this process has joined a world and not left it
_ending = threading.Lock()
_dismissed = threading.Event()
_remotes: weakref.WeakSet[Remote] = weakref.WeakSet()
_tapes: weakref.WeakSet[Tape] = weakref.WeakSet()
_chores: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()


class WorldOver(RuntimeError):
    """What is called belongs to a world this process has left."""


class _Loss:
    """The first thing that ended this world, and everybody who has to hear of it."""

    def __init__(
        self,
        name: str = "the driver",
        timeout: float | None = None,
        on_timeout: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.timeout = timeout
        self.on_timeout = on_timeout
        self.known = threading.Event()
        self.error: StageLost | StageTimeout | None = None
        self.lock = threading.Lock()
        self.waiting = Waits(name)
        self.step: int | None = None  # the last that was completed

    def declare(self, error: StageLost | StageTimeout) -> None:
        _quiet(FATAL)  # what follows from it would be printed above it
        with self.lock:
            if self.error is None:
                self.error = error
                self.known.set()
            for done in self.waiting:
                done.set()


_loss = _Loss()


def _rendezvous(url: str, rank: int = -1, world_size: int = -1, **_: Any) -> Iterator[Any]:
    yield _store, rank, world_size


dist.register_rendezvous_handler(_SCHEME, _rendezvous)


def join(name: str, rank: int, world_size: int, store: dist.Store) -> None:
    """Enter the RPC world of one pipeline; returns when all its processes have.

    Args:
        name: unique over all worlds a process of this one was ever part of.
        store: used by this world alone (a ``PrefixStore``).

    Raises:
        RuntimeError: this process is in an RPC world already.
    """
    global _chores, _inside, _rrefs_work
    if rpc._is_current_rpc_agent_set():
        raise RuntimeError(
            "this process is in an RPC world already (torch.distributed.rpc.init_rpc was called, "
            "or run() inside of run()); a process can be in one at a time: shut that down first"
        )
    _rrefs_work = rpc._init_counter == 0
    # Keys in the store are prefixed by a counter of the process; a process that joins its second
    # world would wait for ever for peers that join their first. The store is ours alone.
    rpc._init_counter = 0
    _Joining(name, rank, world_size, store).wait()
    _inside = True
    _dismissed.clear()
    _chores = queue.SimpleQueue()
    threading.Thread(target=_do_chores, args=(_chores,), name=_THREAD, daemon=True).start()
    # The timeout would bound a whole backward pass, however long the stages compute. Given to
    # init_rpc, 0 would time out at once.
    rpc._set_rpc_timeout(0)


class _Joining:
    """``init_rpc`` on a thread: in there, nothing hears of Ctrl-C or of the loss of a process."""

    def __init__(self, *args: Any) -> None:
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._abandoned = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._join, args=args, name=_THREAD, daemon=True)
        self._thread.start()

    def _join(self, name: str, rank: int, world_size: int, store: dist.Store) -> None:
        global _store
        _store = store
        try:
            with _without_device_maps():
                rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=_options())
        except BaseException as exc:
            self._error = exc
        finally:
            _store = None
        with self._lock:
            self._done.set()
            if self._abandoned or self._error is not None:
                abandon()

    def wait(self) -> None:
        try:
            _wait(self._done, "all processes to join", deadline=False)
        except BaseException:
            with self._lock:
                self._abandoned = True
                if self._done.is_set():
                    abandon()
            self._thread.join(1.0)
            raise
        if self._error is not None:
            raise self._error


@contextmanager
def _without_device_maps() -> Iterator[None]:
    """Have init_rpc not exchange device maps: there are none.

    In torch 2.13 the exchange warns of its own call (pytorch issue 149393) and takes NumPy.
    """
    name = "_tensorpipe_exchange_and_check_all_device_maps"
    exchange = getattr(rpc.backend_registry, name)
    setattr(rpc.backend_registry, name, lambda *_: ({}, []))
    try:
        yield
    finally:
        setattr(rpc.backend_registry, name, exchange)


def _options() -> rpc.TensorPipeRpcBackendOptions:
    common: dict[str, Any] = {"init_method": f"{_SCHEME}://", "num_worker_threads": 16}
    transports, channels = _CHOICES[os.environ.get(VARIABLE) or "uv"]
    try:
        return rpc.TensorPipeRpcBackendOptions(_transports=transports, _channels=channels, **common)
    except TypeError:
        return rpc.TensorPipeRpcBackendOptions(**common)


@contextmanager
def chosen(name: str | None) -> Iterator[None]:
    """Have worlds that are joined meanwhile, and processes started meanwhile, use a transport.

    Args:
        name: ``"uv"``, ``"shm"`` or ``"sockets"``; ``None`` for what ``RPCPIPE_TRANSPORT`` says.

    Raises:
        ValueError: there is none of this name.
    """
    before = os.environ.get(VARIABLE)
    wanted = name if name is not None else before or "uv"
    if wanted not in _CHOICES:
        names = ", ".join(map(repr, _CHOICES))
        raise ValueError(f"transport= (or {VARIABLE}) is one of {names}, got {wanted!r}")
    os.environ[VARIABLE] = wanted
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def leave(meet: Callable[[str], None] | None) -> None:
    """Leave the RPC world.

    Args:
        meet: waits for all processes of the world to come to the point it is given the name of;
            ``None`` when they will not. No process closes a connection another may still use, or
            goes on to where a warning of one that was closed would be seen.
    """
    global _inside
    if not _inside:
        return
    _chores.put(None)
    for remote in list(_remotes):
        remote.close()
    _kept.clear()
    with quiet_agents(FATAL):
        if meet is None:
            _end_threads(0.2)
            abandon()
            _end_threads(2.0)
        else:
            _end_threads(2.0)
            meet("everybody leaves")
            abandon()
            meet("everybody has left")
    _inside = False


def abandon() -> None:
    """Break off all calls: also those that are waited for inside of torch end with an error."""
    _loss.known.set()  # nobody needs to wait for an explanation
    with _ending:
        if rpc._is_current_rpc_agent_set():
            rpc.shutdown(graceful=False)


def _end_threads(seconds: float) -> None:
    """Wait for threads that call torch: the interpreter cannot end while one is in there."""
    for tape in list(_tapes):
        tape.close()
    deadline = time.monotonic() + seconds
    for thread in threading.enumerate():
        if thread.name == _THREAD and thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))


@contextmanager
def quiet_agents(severity: int = ERROR) -> Iterator[None]:
    """torch's C++ code logs nothing below this: the agents warn of every connection that is closed.

    ``TORCH_CPP_LOG_LEVEL`` says the same, but only before torch is imported; who set it is obeyed.
    """
    before = _log_level().value
    _quiet(severity)
    try:
        yield
    finally:
        _log_level().value = before


def _quiet(severity: int) -> None:
    if "TORCH_CPP_LOG_LEVEL" not in os.environ:
        _log_level().value = max(_log_level().value, severity)


@functools.cache
def _log_level() -> ctypes.c_int:
    """The least severity that torch's C++ code logs; not found (torch 2.13 has it), it warns."""
    with contextlib.suppress(OSError, ValueError):
        core = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so"))
        return ctypes.c_int.in_dll(core, "FLAGS_caffe2_log_level")
    return ctypes.c_int()


def dismiss(workers: Sequence[str]) -> None:
    """Let `serve` return in other processes of this world."""
    for worker in workers:
        wait(rpc.rpc_async(worker, _dismiss), f"{worker} to leave")


def _dismiss() -> None:
    _dismissed.set()


def serve() -> None:
    """Stay while other threads do the work, until this process is dismissed."""
    _dismissed.wait()


def later(chore: Callable[[], Any]) -> None:
    """Call ``chore`` soon on a thread of its own. Unlike a remote call, safe in a finalizer."""
    _chores.put(chore)


def _do_chores(chores: queue.SimpleQueue[Callable[[], Any] | None]) -> None:
    while chore := chores.get():
        with contextlib.suppress(RuntimeError):  # the world may have ended before
            chore()
        del chore


# --------------------------------------------------------------------------------------- calls


def _require_world() -> None:
    if _inside and _loss.error is not None:
        raise _loss.error
    if not rpc._is_current_rpc_agent_set():
        raise RuntimeError(_OVER)


class Remote:
    """An object in a process of this world: its owner, its key there, and an RRef that keeps it.

    A call goes to the RRef's owner and names the object by the key. ``rref.rpc_async()`` sends
    the RRef itself with each call, and its owner confirms the fork by a message of its own: twice
    the messages for one micro-batch hop.

    There is no RRef in a process that is in its second world: torch's RRef context (2.13) stays
    with the first one's agent for good. The object then lives until its creator lets go of it.
    """

    def __init__(self, owner: str, key: str, rref: Any = None) -> None:
        self._owner, self._key, self._rref = owner, key, rref
        _remotes.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _remotes.add(self)

    def call(self, method: str, *args: Any) -> Future[Any]:
        """Call a method there without waiting; the answer is its value or a `Failure`.

        A method that returns a ``Future`` is answered when that completes.
        """
        if not self._key:
            raise WorldOver(_OVER)
        if _loss.error is not None:
            raise _loss.error
        answer: Future[Any] = rpc.rpc_async(self._owner, _dispatch, args=(self._key, method, args))
        return answer

    def borrowed(self) -> Remote:
        """The same object, without keeping it alive: for objects that know each other."""
        return Remote(self._owner, self._key)

    def close(self) -> None:
        """Let go: the world is over."""
        self._key, self._rref = "", None

    def __repr__(self) -> str:
        return f"Remote({self._owner}, {self._key})"


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def _dispatch(key: str, method: str, args: tuple[Any, ...]) -> Future[Any]:
    try:
        answer = getattr(_objects[key], method)(*args)
    except BaseException as exc:
        answer = Failure.capture(exc)
    return answer if isinstance(answer, Future) else completed(answer)


def completed(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def create(worker: str, cls: Callable[..., Any], *args: Any) -> Remote:
    """Construct ``cls(*args)`` on ``worker``; it lives as long as the `Remote`."""
    key, what = uuid.uuid4().hex, f"{worker} to construct {cls.__name__}"
    if _rrefs_work:
        rref = rpc.remote(worker, _construct, args=(key, cls, args))
        wait(rref._get_future(), what)
        return Remote(worker, key, rref)
    wait(rpc.rpc_async(worker, _construct_and_keep, args=(key, cls, args)), what)
    remote = Remote(worker, key)
    weakref.finalize(remote, later, lambda: rpc.rpc_async(worker, _let_go, args=(key,)))
    return remote


def _construct(key: str, cls: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    _objects[key] = made = cls(*args)
    return made


def _construct_and_keep(key: str, cls: Callable[..., Any], args: tuple[Any, ...]) -> None:
    _kept[key] = _construct(key, cls, args)


def _let_go(key: str) -> None:
    _kept.pop(key, None)


def publish(obj: Any) -> Remote:
    """Make a local object callable from other processes, while the caller keeps it."""
    _require_world()
    key = uuid.uuid4().hex
    _objects[key] = obj
    return Remote(rpc.get_worker_info().name, key, rpc.RRef(obj) if _rrefs_work else None)


def reference(value: Any) -> Any:
    """An RRef of a local object.

    Raises:
        RuntimeError: this process is in its second world.
    """
    if not _rrefs_work:
        raise RuntimeError(
            "torch keeps the RRefs of a process with the first RPC world it was in, and this is "
            "not the first: for a DistributedOptimizer, call run() once in a process"
        )
    return rpc.RRef(value)


def wait(future: Future[Any], what: str, unless: Future[None] | None = None) -> Any:
    """Wait for an answer in a way Ctrl-C can interrupt, and return it, a `Failure` too.

    Args:
        unless: the answer may not come if this fails; then its error is raised.

    Raises:
        StageLost: a process of this world is gone.
    """
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    if unless is not None:
        unless.add_done_callback(lambda other: done.set() if _error_of(other) else None)
    _wait(done, what)
    if unless is not None and not future.done():
        raise _reason(unless, what)
    try:
        return future.value()
    except RuntimeError as exc:
        raise _explain(exc, what) from exc


def _error_of(future: Future[None]) -> RuntimeError | None:
    try:
        future.value()
    except RuntimeError as exc:
        return exc
    return None


def _reason(failed: Future[None], what: str) -> Exception:
    """What failed inside of torch, or what it failed for: often a torn connection."""
    if (error := lost(within=EXPLAINED)) is not None:
        return error.during(what)
    exc = _error_of(failed)
    assert exc is not None
    return exc


def value_of(answer: Future[Any], what: str) -> Any:
    """Wait for an answer as `wait` does; raise what it failed by."""
    value = wait(answer, what)
    if isinstance(value, Failure):
        raise_failure(value)
    return value


def raise_failure(failure: Failure) -> NoReturn:
    """Raise what failed in a stage; what failed for a lost process, as `StageLost`."""
    cause = failure.original()
    if isinstance(cause, StageLost):
        raise lost(within=EXPLAINED) or cause
    failure.raise_()


def _explain(exc: RuntimeError, what: str) -> StageLost | StageTimeout:
    """Torn connections are noticed first by who uses them; whoever watches knows the process."""
    loss = _loss
    if loss.known.wait(EXPLAINED) and loss.error is not None:
        return loss.error.during(what)
    return StageLost(f"while waiting for {what}: {exc}", step=loss.step, how=str(exc))


def _wait(done: threading.Event, what: str, deadline: bool = True) -> None:
    loss, completed = _loss, False
    with loss.lock:
        loss.waiting.add(done, what)
        if loss.error is not None:
            done.set()
    try:
        completed = done.wait(loss.timeout if deadline else None)
        if not completed:
            _expire(loss, what)
    finally:
        with loss.lock:
            loss.waiting.discard(done)
            error = loss.error
    if completed and error is not None:
        raise error.during(what) if deadline else error


def _expire(loss: _Loss, what: str) -> NoReturn:
    assert loss.timeout is not None
    error = StageTimeout(
        f"waited {loss.timeout:g} s for {what}, and timeout={loss.timeout:g}; what each process "
        "was doing is on its standard error stream"
    )
    loss.on_timeout(f"{loss.waiting.name} waited {loss.timeout:g} s for {what}")
    loss.declare(error)
    raise error


def declare_lost(error: StageLost | StageTimeout) -> None:
    """Let every wait of this process raise this, now and until the next `renew`."""
    _loss.declare(error)


def renew(
    name: str, timeout: float | None = None, on_timeout: Callable[[str], None] = lambda _: None
) -> None:
    """Forget what was lost of an earlier world.

    Args:
        name: of this process, for sentences.
        timeout: seconds that any wait may take.
        on_timeout: called when one took longer, with the reason.
    """
    global _loss
    _loss = _Loss(name, timeout, on_timeout)


def lost(within: float = 0.0) -> StageLost | StageTimeout | None:
    """What ended this world, if anything has or does in so many seconds."""
    _loss.known.wait(within)
    return _loss.error


def completed_step(number: int) -> None:
    """Remember that the driver has completed this step."""
    _loss.step = number


def last_step() -> int | None:
    """The last step that was completed in this world."""
    return _loss.step


# ----------------------------------------------------------------------------------- autograd


class Tape:
    """A distributed autograd context on a thread of its own.

    torch ties a context to the thread that opened it until it is released; a thread for each
    lets several mini-batches be alive, and lets a backward pass be started from inside another.
    The context is released when the tape is closed or forgotten.
    """

    def __init__(self) -> None:
        _require_world()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        _tapes.add(self)
        threading.Thread(
            target=_hold_context, args=(self._jobs,), name=_THREAD, daemon=True
        ).start()

    def run(self, fn: Callable[..., T], *args: Any) -> T:
        """Call ``fn(*args)`` with the context current; return or raise what it does.

        It has waits of its own, which have their deadlines.
        """
        done = threading.Event()
        outcome: list[Any] = []

        def job() -> None:
            try:
                outcome.extend((fn(*args), None))
            except BaseException as exc:
                outcome.extend((None, exc))
            done.set()

        self._jobs.put(job)
        _wait(done, "its step", deadline=False)
        value, error = outcome
        if error is not None:
            raise error
        return value  # type: ignore[no-any-return]

    def backward(self, roots: Sequence[Tensor]) -> Future[None]:
        """Start the distributed backward pass.

        Done when torch says so, which in torch 2.13 can be too early: a process that gets two
        gradients at once can forget that it has to wait for others. And it is late, since the
        word of the first stage's end comes by way of all others.
        """
        over: Future[None] = Future()

        def job() -> None:
            try:
                dist_autograd.backward(_current_id(), list(roots))
            except BaseException as exc:
                over.set_exception(exc)  # type: ignore[arg-type]  # torch takes any
            else:
                over.set_result(None)

        self._jobs.put(job)
        return over

    def close(self) -> None:
        """Release the context on all processes. May be called at any time, from any thread."""
        self._jobs.put(None)  # reentrant: also safe in a finalizer

    def __del__(self) -> None:
        if hasattr(self, "_jobs"):
            self.close()


def _hold_context(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    # Leaving the context fails if the world has ended before.
    with contextlib.suppress(RuntimeError), dist_autograd.context():
        while job := jobs.get():
            job()
            del job


def current_tape() -> int | None:
    """The id of the distributed autograd context this thread is in, if any."""
    try:
        return _current_id()
    except RuntimeError:
        return None


def _current_id() -> int:
    return int(dist_autograd._current_context()._context_id())


def prioritize(received: Sequence[Tensor]) -> None:
    """Let the gradients of tensors received in this context leave before anything else runs.

    The engine runs what was created last first, and the function that sends a gradient was
    created when its tensor arrived.
    """
    for tensor in received:
        assert tensor.grad_fn is not None
        tensor.grad_fn._set_sequence_nr(_FIRST)  # type: ignore[attr-defined]


def debug_info() -> dict[str, int]:
    """What distributed autograd and the RRef context hold in this process."""
    found = {**dist_autograd._get_debug_info(), **rpc._rref_context_get_debug_info()}
    return {name: int(value) for name, value in found.items()}
