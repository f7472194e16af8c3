"""Stage: one partition of the model in its own process, and the one thread that computes it."""

from __future__ import annotations

import os
import queue
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import InvalidStateError
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future

from rpcpipe import batchnorm, boundary, checkpoint, stacks, transport, trees
from rpcpipe.averaging import Averaging, local
from rpcpipe.errors import Failure, StageLost
from rpcpipe.finite import require_finite
from rpcpipe.loss import TARGETS, Loss, LossFailed
from rpcpipe.mailbox import Mailbox, Name, Parcel, require_picklable
from rpcpipe.recorder import Event, Recorder
from rpcpipe.schedule import Task, read
from rpcpipe.skip.namespace import Key
from rpcpipe.skip.store import SkipStore, use_store
from rpcpipe.slot import Slot
from rpcpipe.tied import Ties

__all__ = ["AHEAD", "Event", "Order", "Partition", "Stage"]

AHEAD = 2  # micro-batches: how long before their gradients are needed large ones are sent

Values = dict[Name, Any]  # what a micro-batch receives or hands on


@dataclass(frozen=True)
class Order:
    """What a stage is to do with one mini-batch; everything the schedule decided is in here."""

    step: int
    count: int  # as `step`, but goes on where a checkpoint was saved: what layers draw is by this
    m: int
    program: str  # see `schedule.write`
    grad: bool  # a backward pass may follow
    inference: bool
    context: int | None  # autograd context that parameters' gradients go to, and not to .grad
    training: bool
    autocast: checkpoint.AutocastState
    check_finite: bool = False  # whether a value that is not finite is a failure
    average: bool = True  # gradients over the replicas, in the last backward pass
    loss: Loss | None = None  # for the last stage, which then also takes targets
    recorded: bool = True  # if the stage is recording
    # How many micro-batches come from the driver in a message, by the first of them.
    groups: Mapping[Name, Mapping[int, int]] = field(default_factory=dict)


class Partition(nn.Sequential):
    """The layers of one stage, under the names they have in the whole model.

    Attributes:
        first: index of the first layer in the whole model.
        seed: what all layers draw is determined by this, the mini-batch, the micro-batch
            and the layer's index; without it they go on where the stage's last one stopped.
        at: number of the mini-batch, and micro-batch.
    """

    first = 0
    seed: int | None = None
    at = (0, 0)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        value: Any = None
        for k, layer in enumerate(self._modules.values(), self.first):
            assert layer is not None
            if self.seed is not None:
                torch.manual_seed(checkpoint.derive(self.seed, *self.at, k))
            value = layer(*args, **kwargs) if k == self.first else layer(value)
        return value


class _Dropped(RuntimeError):
    """The step has been dropped, by this process or another."""


@dataclass
class _Kept:
    """What a micro-batch leaves for its backward pass: what it was given, and its graph."""

    given: Values  # its tensors are leaves of the stage's own graph
    rng: checkpoint.RngState | None  # where it is computed again
    outputs: list[Tensor] | None = None

    def inputs(self) -> list[Tensor]:
        return [t for t in trees.tensors(self.given) if t.requires_grad]


class _Run:
    """One mini-batch on one stage, from its order until its last task is done."""

    def __init__(self, order: Order, names: Sequence[Name]) -> None:
        self.order = order
        self.program = read(order.program)
        self.recomputed = {i for kind, i in self.program if kind == "R"}
        self.cursor = 0
        self.announced = False
        self.over = False
        self.token = boundary.first_token() if order.grad else None
        self.kept: dict[int, _Kept] = {}
        self.collected: dict[Tensor, Tensor] = {}  # gradients that do not go to .grad
        self.parameters_memory: set[int] | None = None
        self.received: list[dict[Name, Slot[Any]]] = [
            {name: Slot() for name in names} for _ in range(order.m)
        ]
        self.gradients: list[Slot[Any]] = [Slot() for _ in range(order.m)]
        self.departures: list[Slot[Any]] = [Slot() for _ in range(order.m)]
        self.reached = order.m  # the micro-batch whose backward pass was the last to begin
        self.turns: dict[int, Future[None]] = {}  # asked for, and not reached
        self.turning = threading.Lock()
        self.done: Future[None] = Future()  # when the last task is, or none will follow

    def arrive(self, i: int, gradients: boundary.Gradients) -> None:
        _settle(self.gradients[i], gradients)

    def depart(self, i: int) -> boundary.Gradients | None:
        departing = self.departures[i].result()
        self.departures[i] = Slot()  # as large as the stage's input: not kept until all are done
        return departing  # type: ignore[no-any-return]

    def turn(self, i: int) -> Future[None]:
        """Answered when the gradients of micro-batch ``i`` will soon be needed."""
        with self.turning:
            if self.reached <= i + AHEAD:
                return transport.completed(None)
            return self.turns.setdefault(i, Future())

    def reach(self, i: int) -> None:
        with self.turning:
            self.reached = min(self.reached, i)  # also after `abort`, on another thread
            due = [self.turns.pop(k) for k in list(self.turns) if i <= k + AHEAD]
        for future in due:
            future.set_result(None)

    def abort(self, why: str) -> None:
        """Let everybody who waits for this run, now or later, have an exception instead.

        On any thread: what the compute thread may be working on is left to it, see `forget`.
        """
        self.over = True
        slots = [slot for slots in self.received for slot in slots.values()]
        for slot in [*slots, *self.gradients, *self.departures]:
            with suppress(InvalidStateError):
                slot.set_exception(_Dropped(why))
        self.reach(0)

    def give_up(self) -> None:
        """End the backward pass here; stages before this one have no gradients to expect."""
        self.over = True
        self.reach(0)
        for slot in self.departures:
            _settle(slot, None)

    def forget(self) -> None:
        """Release everything. On the compute thread."""
        self.kept.clear()
        self.collected = {}
        self.token = None
        if not self.done.done():
            self.done.set_result(None)


class _Collector:
    """The gradients one autograd context is to get from this stage; as long-lived as that."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[Tensor, Tensor]] = {}

    def take(self, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        steps, self.steps = self.steps, {}
        total: dict[Tensor, Tensor] = {}
        for gradients in steps.values():
            _add(total, gradients)
        return [total.get(parameter) for parameter in parameters]


class Stage:
    """One partition, one thread that computes, and methods that other processes call.

    None of these blocks: it would hold a thread of the RPC pool, which the answer it waits for
    may need.

    Args:
        index: ``j``.
        device: where the partition's parameters live and its layers run.
        threads: of the compute thread's parallel regions.
    """

    def __init__(self, index: int, device: str, threads: int) -> None:
        self.index = index
        self.device = torch.device(device)
        self.partition: Partition  # the layers, by their names in the whole model
        self.module: nn.Module  # what is called: the partition, or what its user has wrapped it in
        self.averaging = Averaging()
        self.recorder: Recorder | None = None
        self.extras: dict[str, Any] = {}  # optimizers and the like, which belong to other rooms
        self._unpacked: tuple[bytes, Callable[..., Any]] | None = None  # the last loss function
        self._mailbox = Mailbox()
        self._runs: dict[int, _Run] = {}
        self._collectors: weakref.WeakValueDictionary[int, _Collector] = (
            weakref.WeakValueDictionary()
        )
        self._doing: tuple[str, _Run | None, int, float] = ("", None, 0, 0.0)
        stacks.tellers.add(self)
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(
            target=_compute,
            args=(self._jobs, self.device, threads),
            name=f"stage {index}",
            daemon=True,
        ).start()

    def __del__(self) -> None:
        self._jobs.put(None)

    # ------------------------------------------------------------- called by other processes

    def connect(
        self,
        driver: transport.Remote,
        sources: dict[Name, transport.Remote],
        exports: Sequence[Key],
        ties: Ties,
    ) -> None:
        """Learn where values come from: ``None`` from the predecessor, skips from their stash."""
        self._driver, self._sources, self._exports = driver, sources, exports
        self.ties = ties

    def take(self, step: int, i: int, name: Name) -> Future[Any]:
        """What micro-batch ``i`` hands on under ``name``, as soon as it is computed."""
        return self._mailbox.take(step, i, name)

    def take_several(self, step: int, first: int, end: int) -> Future[list[Any]]:
        """What micro-batches hand on, see `Mailbox.take_several`."""
        return self._mailbox.take_several(step, first, end)

    def begin(self, order: Order, brought: Sequence[Values] = ()) -> None:
        """Start on the program of a mini-batch, and ask for its inputs ahead of need.

        Args:
            brought: what the first micro-batches receive, as far as the driver has sent it along.
        """
        run = self._runs[order.step] = _Run(order, list(self._sources_for(order)))
        for slots, values in zip(run.received, brought, strict=False):
            for name, value in values.items():
                _settle(slots[name], value)
        self._jobs.put(lambda: self._advance(run))
        for i in range(order.m):
            self._ask(run, i)

    def _sources_for(self, order: Order) -> dict[Name, transport.Remote]:
        return self._sources if order.loss is None else {**self._sources, TARGETS: self._driver}

    def _ask(self, run: _Run, i: int) -> None:
        """Ask for the inputs of a micro-batch, but for those that come with others or the order."""
        order = run.order
        for name, source in self._sources_for(order).items():
            count = order.groups[name].get(i, 0) if name in order.groups else 1
            if count:
                slots = [run.received[k][name] for k in range(i, i + count)]
                answer = source.call("take", order.step, i, name)
                answer.add_done_callback(_forward_to(slots))

    def announce(self, step: int) -> Future[None]:
        """The backward pass has begun: what can be done before a gradient arrives may be.

        Answered when the last task of the step is done.
        """
        run = self._runs.get(step)
        if run is None:
            return transport.completed(None)
        self._jobs.put(lambda: self._begin_backward(run))
        return run.done

    def turn(self, step: int, i: int) -> Future[None]:
        """Answered when the gradients of micro-batch ``i`` are to be sent, if they are large.

        All at once, they would wait here, as large as the outputs of the whole mini-batch.
        """
        run = self._runs.get(step)
        return transport.completed(None) if run is None else run.turn(i)

    def collect(self, context: int, token: Tensor) -> Tensor:
        """Have the gradients of this context's steps delivered to it when it reaches the token.

        Called inside of the context. It keeps the node, and that keeps the collector.
        """
        collector = self._collectors[context] = _Collector()
        parameters = self.trainable()
        return boundary.deliver(token, parameters, lambda: collector.take(parameters))

    def drop(self, step: int, why: Failure) -> None:
        """Forget everything of a step."""
        run = self._runs.pop(step, None)
        if run is not None:
            run.abort(why.message)
            self._jobs.put(run.forget)
        for collector in list(self._collectors.values()):
            collector.steps.pop(step, None)
        self._mailbox.drop(step, why)
        self._jobs.put(self._discard)
        self._jobs.put(lambda: self.ties.restore(self.partition, step))

    def perform(self, fn: Callable[..., Any], *args: Any) -> Future[Any]:
        """Call ``fn(stage, *args)`` on the compute thread, after all it was given before."""
        future: Future[Any] = Future()

        def job() -> None:
            self._do(f"is to {fn.__name__.strip('_')}")
            try:
                answer = fn(self, *args)
            except BaseException as exc:
                answer = Failure.capture(exc).at(self.index, None, fn.__name__.strip("_"))
            self._do("")
            future.set_result(answer)

        self._jobs.put(job)
        return future

    def perform_aside(self, fn: Callable[..., Any], *args: Any) -> Future[Any]:
        """Call ``fn(stage, *args)`` on a thread of its own, beside what the stage computes."""
        future: Future[Any] = Future()

        def job() -> None:
            try:
                answer = fn(self, *args)
            except BaseException as exc:
                answer = Failure.capture(exc).at(self.index, None, fn.__name__.strip("_"))
            future.set_result(answer)

        threading.Thread(target=job, name=f"stage {self.index} aside", daemon=True).start()
        return future

    def doing(self) -> Iterator[str]:
        """What the compute thread is doing, as sentences."""
        what, run, i, since = self._doing
        if what and run is not None:
            before = f"stage {self.index - 1}" if self.index else "the driver"
            what = what.format(i=i, step=run.order.step, before=before)
        if what:
            yield f"stage {self.index} {what} since {time.monotonic() - since:.1f} s"
        else:
            yield f"stage {self.index} has nothing to do"

    # ------------------------------------------------------------------ on the compute thread

    def _do(self, what: str, run: _Run | None = None, i: int = 0) -> None:
        self._doing = what, run, i, time.monotonic()

    def adopt(self, module: Partition, rng: checkpoint.RngState) -> None:
        """Become the stage of this partition, whose layers draw from ``rng`` on."""
        self.module = self.partition = module.to(self.device)
        self._rng = rng
        self._training = module.training
        self._frozen = batchnorm.FrozenStatistics(module)
        # Layers of torch's own and of ours do not return their buffers.
        ours = ("torch.nn.modules.", "rpcpipe.")
        self._with_buffers = [
            m for m in module.modules() if m._buffers and not type(m).__module__.startswith(ours)
        ]
        self._works_in_place: bool | None = None

    @contextmanager
    def own_rng(self) -> Iterator[None]:
        """Draw from the stage's own random numbers; the driver may share this process."""
        theirs = checkpoint.RngState.capture(self.device)
        self._rng.restore()
        try:
            yield
        finally:
            self._rng = checkpoint.RngState.capture(self.device)
            theirs.restore()

    def exchange_ties(self, step: int, average: bool) -> None:
        """After the backward pass: add up the gradients of parameters that other stages hold."""
        over_replicas = self.averaging.average if average else None
        self.ties.exchange(self.partition, step, self._mailbox.put, over_replicas)

    def _begin_backward(self, run: _Run) -> None:
        if not run.over:
            # Here and not where it is announced: this thread may still be at the end of the
            # forward program, and would go on before the gradients are set aside.
            self.ties.set_aside(self.partition, run.order.step)
            run.announced = True
            self._advance(run)

    def _advance(self, run: _Run) -> None:
        """Execute the program up to its end, or to where it waits for the backward pass."""
        order = run.order
        modes = torch.inference_mode(order.inference), torch.set_grad_enabled(order.grad)
        with modes[0], modes[1], self.own_rng():
            while run.cursor < len(run.program) and not run.over:
                task = run.program[run.cursor]
                if task.kind != "F" and not run.announced:
                    self._do("waits for the backward pass of step {step} to begin", run)
                    return
                run.cursor += 1
                with suppress(_Dropped):
                    self._execute(run, task)
        run.forget()
        self._runs.pop(order.step, None)
        self._do("")

    def _execute(self, run: _Run, task: Task) -> None:
        kind, i = task
        kinds = {"F": self._forward, "R": self._recompute, "B": self._backward}
        phases = {"F": "forward", "R": "recompute", "B": "backward"}
        try:
            kinds[kind](run, i)
        except _Dropped:
            raise
        except BaseException as exc:
            phase = phases[kind]
            if isinstance(exc, LossFailed):
                exc, phase = exc.__cause__ or exc, "loss"
            failure = Failure.capture(exc).at(self.index, i, phase)
            if kind == "F":
                self._fail_forward(run, i, failure)
            else:
                self._fail_backward(run, failure)

    def _timed(self, run: _Run, kind: str, i: int) -> AbstractContextManager[None]:
        """Put a task into the record, without the time it waited."""
        if self.recorder is None or not run.order.recorded:
            return nullcontext()
        return self.recorder.task(run.order.step, Task(kind, i))

    def _forward(self, run: _Run, i: int) -> None:
        self._do("waits for micro-batch {i} of step {step} from {before}", run, i)
        received = {name: slot.result() for name, slot in run.received[i].items()}
        self._do("computes the forward pass of micro-batch {i} of step {step}", run, i)
        run.received[i] = {}
        for value in received.values():
            if isinstance(value, Failure):
                self._fail_forward(run, i, value)
                return
        with self._timed(run, "F", i):
            handed_on = self._forward_and_keep(run, i, received)
            if i == run.order.m - 1:
                batchnorm.commit(self.partition)
        for name, value in handed_on.items():
            self._mailbox.put(run.order.step, i, name, value)

    def _forward_and_keep(self, run: _Run, i: int, received: Values) -> Values:
        order = run.order
        if order.training != self._training:
            self.module.train(order.training)
            self._training = order.training
            self._works_in_place = None  # dropout may, and does not in eval
        spare = i in run.recomputed
        kept = _Kept(
            self._accept(received), checkpoint.RngState.capture(self.device) if spare else None
        )
        with checkpoint.phase(checkpointing=spare):
            results = self._compute_partition(order, i, kept, spare=spare)
        kept.outputs = trees.tensors(results)
        if order.check_finite:
            require_finite(("an output of this stage", t) for t in kept.outputs)
        sent = _pack(results, order.grad, self._own_memory(run))
        if order.grad:
            sent = self._cross(run, i, received, kept.outputs, sent)
            if spare and any(out.requires_grad for out in kept.outputs):
                kept.outputs = None  # and with them the graph
            run.kept[i] = kept
        return sent

    def _accept(self, received: Values) -> Values:
        """What was received, as leaves of a graph of this stage's own, on its device."""

        def leaf(tensor: Tensor) -> Tensor:
            local = tensor.detach().to(self.device, non_blocking=True)
            return local.requires_grad_(tensor.requires_grad)

        return trees.map_tensors(leaf, received)  # type: ignore[no-any-return]

    def _compute_partition(self, order: Order, i: int, kept: _Kept, *, spare: bool) -> Values:
        """Run the layers; with ``spare``, what was given stays as it is for another time.

        Layers may work in place on what they are given: they get an alias and not the leaf.
        Whether they do shows the first time in each mode, which therefore works on copies.
        """
        copy = spare and self._works_in_place is not False
        given = trees.map_tensors(boundary.copy if copy else boundary.alias, kept.given)
        versions = [t._version for t in trees.tensors(given)] if not order.inference else []
        parcel, targets = given.pop(None), given.pop(TARGETS, None)
        store = SkipStore(given)
        self.partition.at = (order.count, i)
        with order.autocast.enter(), use_store(store):
            value = self.module(*parcel.args, **parcel.kwargs)
            if order.loss is not None:
                value = order.loss.call(self._loss_fn(order.loss), i, value, *targets.args)
        results: Values = {**{key: store.take(key) for key in self._exports}, None: value}
        store.require_empty()
        if spare and not order.inference:
            changed = versions != [t._version for t in trees.tensors([parcel, given, targets])]
            if changed and not copy:
                raise RuntimeError(
                    "a layer changes in place what its stage was given, and did not do so for the "
                    "micro-batches before; what is to be recomputed would start from other values: "
                    "let it always work in place, or never, or give checkpoint='never'"
                )
            self._works_in_place = self._works_in_place or changed
        return results

    def _loss_fn(self, loss: Loss) -> Callable[..., Any]:
        """Unpacked once, as long as it is the same."""
        if self._unpacked is None or self._unpacked[0] != loss.blob:
            self._unpacked = loss.blob, loss.unpack(self.device)
        return self._unpacked[1]

    def _cross(
        self, run: _Run, i: int, received: Values, outputs: list[Tensor], sent: Values
    ) -> Values:
        """Put the stage's boundary between what was received and what is sent."""
        assert run.token is not None
        run.token = boundary.enter(run, i, run.token, boundary.received(trees.tensors(received)))
        leaving = trees.tensors(sent)
        differentiable = [out.requires_grad for out in outputs] + [True]  # the tail, if any
        crossed = boundary.leave(run, i, run.token, leaving, differentiable[: len(leaving)])
        each = iter(crossed)
        return trees.map_tensors(lambda _: next(each), sent)  # type: ignore[no-any-return]

    def _own_memory(self, run: _Run) -> set[int]:
        """Where the layers' parameters and buffers are, which may change while they are sent."""
        if run.parameters_memory is None:
            run.parameters_memory = {_memory(local(p)) for p in self.partition.parameters()}
        held = [b for module in self._with_buffers for b in module._buffers.values()]
        return run.parameters_memory.union(_memory(b) for b in held if b is not None)

    def trainable(self) -> list[Tensor]:
        return [p for p in self.partition.parameters() if p.requires_grad]

    def _fail_forward(self, run: _Run, i: int, failure: Failure) -> None:
        """Answer this micro-batch and those after it by the failure, and give the step up.

        A later one may bring the failure of a stage before, which may be earlier in the schedule:
        the driver is to hear of that as well.
        """
        for k in range(i, run.order.m):
            received = [slot.result() for slot in run.received[k].values()]
            answer = next((v for v in received if isinstance(v, Failure)), failure)
            for name in (None, *self._exports):
                self._mailbox.put(run.order.step, k, name, answer)
        run.abort(failure.message)
        self._discard()

    def _discard(self) -> None:
        batchnorm.discard(self.partition)

    def _recompute(self, run: _Run, i: int) -> None:
        self._do("recomputes micro-batch {i} of step {step}", run, i)
        kept = run.kept[i]
        if kept.outputs is not None:
            return  # no gradient reaches the stage: frozen, as all before it
        assert kept.rng is not None
        now = checkpoint.RngState.capture(self.device)
        kept.rng.restore()
        with self._timed(run, "R", i), self._frozen, checkpoint.phase(recomputing=True):
            kept.outputs = trees.tensors(self._compute_partition(run.order, i, kept, spare=False))
        now.restore()

    def _backward(self, run: _Run, i: int) -> None:
        self._do("waits for the gradient of micro-batch {i} of step {step}", run, i)
        gradients = run.gradients[i].result()
        run.reach(i)
        self._do("computes the backward pass of micro-batch {i} of step {step}", run, i)
        run.gradients[i] = Slot()  # as large as the stage's output: not kept until all are done
        kept = run.kept.pop(i)
        last = run.cursor == len(run.program)

        def depart() -> None:
            inputs = kept.inputs()
            if run.order.check_finite:
                require_finite(self._named_gradients(run, inputs))
            if run.order.context is not None and last:
                self._collectors[run.order.context].steps[run.order.step] = run.collected
            departing = [None if leaf.grad is None else _sendable(leaf.grad) for leaf in inputs]
            _settle(run.departures[i], departing)

        with self._timed(run, "B", i):
            self._differentiate(run, kept, gradients, last, depart)

    def _differentiate(
        self,
        run: _Run,
        kept: _Kept,
        gradients: boundary.Gradients,
        last: bool,
        depart: Callable[[], None],
    ) -> None:
        """The local backward pass; calls ``depart`` once it is through the layers."""
        assert kept.outputs is not None
        ends = [
            (output, gradient.to(self.device))
            for output, gradient in zip(kept.outputs, gradients, strict=False)  # a tail has none
            if output.requires_grad and gradient is not None
        ]
        outputs, seeds = [end[0] for end in ends], [end[1] for end in ends]
        if run.order.context is None:
            average = last and run.order.average
            self.averaging.backward(run.order.step, outputs, seeds, average, depart)
            return
        if outputs:
            leaves = [*self.trainable(), *kept.inputs()]
            found = torch.autograd.grad(outputs, leaves, seeds, allow_unused=True)
            _add(run.collected, dict(zip(self.trainable(), found, strict=False)))
        depart()

    def _named_gradients(
        self, run: _Run, inputs: list[Tensor]
    ) -> Iterator[tuple[str, Tensor | None]]:
        for name, parameter in self.partition.named_parameters():
            gradient = run.collected.get(parameter, parameter.grad)
            yield f"the gradient of {name}", gradient
        for leaf in inputs:
            yield "the gradient of an input of this stage", leaf.grad

    def _fail_backward(self, run: _Run, failure: Failure) -> None:
        """Tell the driver, then give the step up: the driver must know before the engine does.

        The backward pass of the others goes on, without gradients from here: one of them may
        fail earlier in the schedule. The driver raises when it is over. Nothing is raised inside
        of the engine: distributed autograd does not survive that well, see `test_bugs`.
        """
        with suppress(StageLost, transport.WorldOver):  # then the driver has left, for its reason
            transport.wait(self._driver.call("report", run.order.step, failure), "the driver")
        run.give_up()


def _add(total: dict[Tensor, Tensor], gradients: Mapping[Tensor, Tensor | None]) -> None:
    # Not in place: autograd may have given the same tensor to several parameters.
    for parameter, gradient in gradients.items():
        if gradient is not None:
            before = total.get(parameter)
            total[parameter] = gradient if before is None else before + gradient


def _compute(
    jobs: queue.SimpleQueue[Callable[[], None] | None], device: torch.device, threads: int
) -> None:
    torch.set_num_threads(threads)
    if device.type == "cuda":  # what layers mean by "cuda"; each thread begins with the first GPU
        torch.cuda.set_device(device)
    while job := jobs.get():
        try:
            job()
        except BaseException:
            # Every later job would wait for this thread. The loss of a process is noticed.
            traceback.print_exc()
            os._exit(1)
        del job  # a job holds its stage, which must be free to go while none is left


def _settle(slot: Slot[Any], value: Any) -> None:
    with suppress(InvalidStateError):  # aborted meanwhile
        slot.set_result(value)


def _forward_to(slots: Sequence[Slot[Any]]) -> Callable[[Future[Any]], None]:
    def forward(answer: Future[Any]) -> None:
        try:
            value = answer.value()
        except RuntimeError as exc:  # answers bring failures: this is a torn connection
            value = Failure.capture(StageLost(str(exc)))
        values = value if isinstance(value, list) else [value] * len(slots)
        for slot, each in zip(slots, values, strict=True):
            _settle(slot, each)

    return forward


def _pack(results: Values, grad: bool, own_memory: set[int]) -> Values:
    """Results as they are sent: the stage's value as the arguments of the next one."""

    def send(tensor: Tensor) -> Tensor:
        sent = _sendable(tensor)
        return sent.clone() if _memory(sent) in own_memory else sent

    require_picklable(results)
    sent = trees.map_tensors(send, results)
    value = sent.pop(None)
    bare = grad and not any(t.requires_grad for t in trees.tensors(results[None]))
    # Skips first: the tail is then the last tensor of all.
    return {**sent, None: Parcel((value,), {}, torch.zeros(0) if bare else None)}


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _sendable(tensor: Tensor) -> Tensor:
    """The same values in host memory that nothing else changes, and not more than needed.

    A send reads the whole storage, while it is under way.
    """
    if tensor.layout != torch.strided:
        raise TypeError(
            "what passes between stages must be a dense tensor; "
            f"got layout {tensor.layout}: convert it by to_dense()"
        )
    tensor = tensor.detach().to("cpu")
    if tensor.untyped_storage().nbytes() > tensor.nbytes:
        return tensor.clone()
    return tensor
