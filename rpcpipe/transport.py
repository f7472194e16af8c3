"""Transport: the one door to torch.distributed.rpc and to distributed autograd.

Everything torch keeps private or in maintenance mode is named here and nowhere else.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import Tensor
from torch.futures import Future

from rpcpipe.errors import Failure, StageLost

__all__ = [
    "Remote",
    "Tape",
    "chosen",
    "completed",
    "create",
    "current_tape",
    "debug_info",
    "declare_lost",
    "dismiss",
    "join",
    "later",
    "leave",
    "prioritize",
    "publish",
    "reference",
    "serve",
    "value_of",
    "wait",
]

T = TypeVar("T")

VARIABLE = "RPCPIPE_TRANSPORT"

_SCHEME = "rpcpipe"
_THREAD = "rpcpipe transport"
_OVER = "the world this pipe belongs to is over: run() has returned"
_FIRST = 2**62  # a sequence number no forward operation reaches

_objects: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_kept: dict[str, Any] = {}  # what is not kept by an RRef
_store: dist.Store | None = None
_rrefs_work = True  # whether the RRef context of this process belongs to the world it is in
_dismissed = threading.Event()
_remotes: weakref.WeakSet[Remote] = weakref.WeakSet()
_tapes: weakref.WeakSet[Tape] = weakref.WeakSet()
_chores: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()


class _Loss:
    """The first process this world lost, and everybody who has to hear of it."""

    def __init__(self) -> None:
        self.known = threading.Event()
        self.reason: str | None = None
        self.lock = threading.Lock()
        self.waiting: set[threading.Event] = set()


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
    global _loss, _rrefs_work, _store
    if rpc._is_current_rpc_agent_set():
        raise RuntimeError(
            "this process is in an RPC world already (torch.distributed.rpc.init_rpc was called, "
            "or run() inside of run()); a process can be in one at a time: shut that down first"
        )
    _store = store
    _rrefs_work = rpc._init_counter == 0
    # Keys in the store are prefixed by a counter of the process; a process that joins its second
    # world would wait for ever for peers that join their first. The store is ours alone.
    rpc._init_counter = 0
    try:
        with _without_device_maps():
            rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=_options())
    except BaseException:  # Ctrl-C may come when the agent is there already
        if rpc._is_current_rpc_agent_set():
            rpc.shutdown(graceful=False)
        raise
    finally:
        _store = None
    _loss = _Loss()
    _dismissed.clear()
    threading.Thread(target=_do_chores, name=_THREAD, daemon=True).start()
    # The timeout would bound a whole backward pass, however long the stages compute. Given to
    # init_rpc, 0 would time out at once.
    rpc._set_rpc_timeout(0)


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
    # Shared memory, which torch takes where it can, polls: up to a core for every idle process.
    transports = {"uv": ["uv"], "shm": ["shm", "uv"]}[os.environ.get(VARIABLE) or "uv"]
    try:
        return rpc.TensorPipeRpcBackendOptions(
            _transports=transports, _channels=["cma", "basic"], **common
        )
    except TypeError:
        return rpc.TensorPipeRpcBackendOptions(**common)


@contextmanager
def chosen(name: str | None) -> Iterator[None]:
    """Have worlds that are joined meanwhile, and processes started meanwhile, use a transport.

    Args:
        name: ``"uv"`` or ``"shm"``; ``None`` for what ``RPCPIPE_TRANSPORT`` says.

    Raises:
        ValueError: there is none of this name.
    """
    before = os.environ.get(VARIABLE)
    wanted = name if name is not None else before or "uv"
    if wanted not in ("uv", "shm"):
        raise ValueError(f"transport= (or {VARIABLE}) is 'uv' or 'shm', got {wanted!r}")
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
            ``None`` when they will not. The agents report each connection that is closed to
            them, and their own: no process closes any until all have stopped listening to that.
    """
    if not rpc._is_current_rpc_agent_set():
        return
    _chores.put(None)
    for remote in list(_remotes):
        remote.close()
    _kept.clear()
    if meet is None:
        with _silence():
            _end_threads(0.2)
            rpc.shutdown(graceful=False)
            _end_threads(2.0)
        return
    _end_threads(2.0)
    meet("everybody leaves")
    with _silence():
        meet("everybody is silent")
        rpc.shutdown(graceful=False)
        meet("everybody has left")


def _end_threads(seconds: float) -> None:
    """Wait for threads that call torch: the interpreter cannot end while one is in there."""
    for tape in list(_tapes):
        tape.close()
    deadline = time.monotonic() + seconds
    for thread in threading.enumerate():
        if thread.name == _THREAD and thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))


@contextmanager
def _silence() -> Iterator[None]:
    """Nothing that is written to the standard error stream is shown."""
    sys.stderr.flush()
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)


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


def _do_chores() -> None:
    while chore := _chores.get():
        with contextlib.suppress(RuntimeError):  # the world may have ended before
            chore()
        del chore


# --------------------------------------------------------------------------------------- calls


def _require_world() -> None:
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
            raise RuntimeError(_OVER)
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


def wait(future: Future[Any], what: str) -> Any:
    """Wait for an answer in a way Ctrl-C can interrupt, and return it, a `Failure` too.

    Raises:
        StageLost: a process of this world is gone.
    """
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    _wait(done, what)
    try:
        return future.value()
    except RuntimeError as exc:
        # Torn connections are noticed here first; whoever watches the process knows its name.
        if _loss.known.wait(1.0):
            raise StageLost(f"{_loss.reason}, while waiting for {what}") from exc
        raise StageLost(f"while waiting for {what}: {exc}") from exc


def value_of(answer: Future[Any], what: str) -> Any:
    """Wait for an answer as `wait` does; raise what it failed by."""
    value = wait(answer, what)
    if isinstance(value, Failure):
        value.raise_()
    return value


def _wait(done: threading.Event, what: str) -> None:
    with _loss.lock:
        _loss.waiting.add(done)
        if _loss.reason is not None:
            done.set()
    loss, completed = _loss, False
    try:
        completed = done.wait()
    finally:
        with loss.lock:
            loss.waiting.discard(done)
            lost = loss.reason
    if completed and lost is not None:
        raise StageLost(f"{lost}, while waiting for {what}")


def declare_lost(reason: str) -> None:
    """Let every wait of this process raise `StageLost`, now and from now on."""
    with _loss.lock:
        if _loss.reason is None:
            _loss.reason = reason
            _loss.known.set()
        for done in _loss.waiting:
            done.set()


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
        self.context_id = self.run(_current_id)

    def run(self, fn: Callable[..., T], *args: Any) -> T:
        """Call ``fn(*args)`` with the context current; return or raise what it does."""
        done = threading.Event()
        outcome: list[Any] = []

        def job() -> None:
            try:
                outcome.extend((fn(*args), None))
            except BaseException as exc:
                outcome.extend((None, exc))
            done.set()

        self._jobs.put(job)
        _wait(done, "the stages")
        value, error = outcome
        if error is not None:
            raise error
        return value  # type: ignore[no-any-return]

    def backward(self, roots: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor | None]:
        """Run the distributed backward pass; return the gradients of ``leaves``."""
        return self.run(_backward, self.context_id, roots, leaves)

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


def _backward(
    context_id: int, roots: Sequence[Tensor], leaves: Sequence[Tensor]
) -> list[Tensor | None]:
    dist_autograd.backward(context_id, list(roots))
    gradients = dist_autograd.get_gradients(context_id)
    return [gradients.get(leaf) for leaf in leaves]


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
