"""Step: one mini-batch as its driver sees it, from its micro-batches to their gradients."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import compress
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.futures import Future
from torch.utils import _pytree as pytree

from rpcpipe import boundary, microbatch, schedule, transport, trees
from rpcpipe.errors import Failure, StageLost, StageTimeout
from rpcpipe.loss import TARGETS
from rpcpipe.mailbox import WORTH, Mailbox, Name, Parcel, groups
from rpcpipe.slot import Slot
from rpcpipe.stage import AHEAD, Order, Values
from rpcpipe.timeline import shown

if TYPE_CHECKING:
    from rpcpipe.pipe import Pipe
    from rpcpipe.replicas import Replicas

__all__ = ["Port", "Step"]

_LARGE = 2**24  # bytes of gradients that do not go to the last stage all at once
_SMALL = 2**16  # bytes of micro-batches that go along with the order, if there are more than one


class Port(Mailbox):
    """The driver, as the stages see it: the source of micro-batches, and who hears of failures."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: weakref.WeakValueDictionary[int, Step] = weakref.WeakValueDictionary()

    def report(self, number: int, failure: Failure) -> None:
        """A stage failed in the backward pass."""
        step = self.steps.get(number)
        if step is not None:
            step.reported.append(failure)


@functools.lru_cache(64)
def _programs(m: int, n: int, checkpoint: str, backward: bool) -> list[str]:
    return [schedule.write(program) for program in schedule.gpipe(m, n, checkpoint, backward)]


class _Returned:
    """The gradients of the input, by micro-batch, as they come back to the driver."""

    def __init__(self, m: int) -> None:
        self.answers: list[Future[boundary.Gradients]] = [Future() for _ in range(m)]

    def arrive(self, i: int, gradients: boundary.Gradients) -> None:
        self.answers[i].set_result(gradients)


class Step:
    """One mini-batch, as its driver sees it, until its backward pass is done or impossible."""

    def __init__(
        self, pipe: Pipe[Any], order: Order, batches: list[Any], tape: transport.Tape | None
    ) -> None:
        self.order = order
        self.reported: list[Failure] = []
        self.timeline = pipe._timeline if order.recorded else None
        self._stages = pipe._stages
        self._port = pipe._port
        self._turn = pipe._turn
        self._collectors = pipe._collectors
        self._finish = functools.partial(pipe._sum_tied, order)
        self._replicas = pipe._replicas if order.grad and order.average else None
        self._programs = _programs(order.m, len(self._stages), pipe.checkpoint, order.grad)
        self._tape = tape
        self._leaves: list[list[Tensor]] = []  # per micro-batch, those with a gradient of the input
        self._returned = _Returned(order.m)
        self._ends: list[list[Tensor]] = []  # per micro-batch, received tensors with a gradient
        self._gates: list[Slot[None]] = []  # of the first micro-batches, shut until their turn
        self._live = False
        self._batches = batches

    # ------------------------------------------------------------------------------- forward

    def _outgoing(self, i: int, batch: Any) -> Values:
        """A micro-batch as it is sent: without grad, or such that its gradient comes back.

        Its targets, if there are any, go to the last stage straight away.
        """

        def send(tensor: Tensor) -> Tensor:
            tensor = tensor.detach()
            if tensor.untyped_storage().nbytes() > tensor.nbytes:
                tensor = tensor.clone()
            return tensor.to("cpu")

        differentiable = [self.order.grad and t.requires_grad for t in trees.tensors(batch)]
        sent = trees.map_tensors(send, batch)
        leaves = trees.tensors(sent)
        self._leaves.append(list(compress(leaves, differentiable)))
        self._differentiable = differentiable
        if any(differentiable):
            token = boundary.first_token()
            leaving = iter(boundary.leave(self._returned, i, token, leaves, differentiable))
            sent = trees.map_tensors(lambda _: next(leaving), sent)
        args, kwargs, *targets = sent
        inputs: Values = {None: Parcel(args, kwargs)}
        return {**inputs, TARGETS: Parcel(tuple(targets))} if targets else inputs

    @shown("forward")
    def forward(self) -> list[Any]:
        """Run the forward programs; returns the last stage's value for each micro-batch."""
        self._live = True
        try:
            parcels = self._tape.run(self._exchange) if self._tape else self._exchange()
        except BaseException as exc:
            self.drop(Failure.capture(exc))
            raise
        return self._values(parcels)

    def begin(self) -> None:
        """Start the forward programs, for `end` to return what `forward` would; without grad."""
        self._live = True
        try:
            self._answers = self._send()
        except BaseException as exc:
            self.drop(Failure.capture(exc))
            raise

    def end(self) -> list[Any]:
        try:
            parcels = self._receive(self._answers)
        except BaseException as exc:
            self.drop(Failure.capture(exc))
            raise
        return self._values(parcels)

    def _values(self, parcels: list[Any]) -> list[Any]:
        failures = [(i, p) for i, p in enumerate(parcels) if isinstance(p, Failure)]
        if failures:
            # The first in the order of the schedule: micro-batch i is in stage j at cycle i + j.
            self._give_up(min(failures, key=lambda found: (found[0] + found[1].stage, found[0]))[1])
        assert len(parcels) == self.order.m
        if self.order.grad:
            self._ends = [boundary.received(trees.tensors(parcel)) for parcel in parcels]
        else:
            self._live = False
            transport.completed_step(self.order.step)
        return [parcel.args[0] for parcel in parcels]

    def _exchange(self) -> list[Any]:
        return self._receive(self._send())

    def _send(self) -> list[Future[Any]]:
        """Start every stage, and ask the last one for all micro-batches.

        Returns when all have begun: calls overtake each other, mini-batches must not.
        """
        number = self.order.step
        self._port.steps[number] = self
        batches, self._batches = self._batches, []
        first = _first(batches)
        inputs = groups([trees.nbytes(batch[:2]) for batch in batches], first)
        targets = groups([trees.nbytes(batch[2:]) for batch in batches])
        orders = self._orders(inputs, targets)
        values = [self._outgoing(i, batch) for i, batch in enumerate(batches[:first])]
        brought = [{None: each[None]} for each in values]
        # The first stage can compute while the others' orders and the other inputs are made.
        begun = [self._stages[0].call("begin", orders[0], brought)]
        begun += [
            stage.call("begin", order)
            for stage, order in zip(self._stages[1:], orders[1:], strict=True)
        ]
        values += [self._outgoing(i, batch) for i, batch in enumerate(batches[first:], first)]
        self._lay_out(values, None, inputs)
        if self.order.loss is not None:
            self._lay_out(values, TARGETS, targets)
        last = self.order.m - 1
        answers = [self._take(0)] if last else []
        answers.append(self._stages[-1].call("take", number, last, None))
        for j, answer in enumerate(begun):
            failure = transport.wait(answer, f"stage {j} to begin step {number}")
            if isinstance(failure, Failure):
                return [transport.completed(failure.at(j, None, "begin"))]
        return answers

    def _orders(self, inputs: dict[int, int], targets: dict[int, int]) -> list[Order]:
        """Those of the stages; the driver's groups are of no concern to stages in between."""
        orders = [replace(self.order, program=program, loss=None) for program in self._programs]
        orders[0] = replace(orders[0], groups={None: inputs})
        theirs = {**orders[-1].groups, TARGETS: targets}
        orders[-1] = replace(orders[-1], groups=theirs, loss=self.order.loss)
        return orders

    def _take(self, first: int) -> Future[Any]:
        """Ask for outputs from a micro-batch on, a message's worth; not for the last one's."""
        return self._stages[-1].call("take_several", self.order.step, first, self.order.m - 1)

    def _lay_out(self, values: list[Values], name: Name, groups: dict[int, int]) -> None:
        """Leave what the stages ask for."""
        for i, count in groups.items():
            group = [each[name] for each in values[i : i + count]]
            self._port.put(self.order.step, i, name, group)

    def _receive(self, answers: list[Future[Any]]) -> list[Any]:
        """What the last stage hands on for each micro-batch, or the `Failure` that is there."""
        *several, last = answers
        parcels = list[Any]()
        while several:
            k = len(parcels)
            found = transport.wait(several.pop(), f"micro-batch {k} of step {self.order.step}")
            if isinstance(found, Failure):
                return [found]
            parcels += found
            if len(parcels) < self.order.m - 1:
                several.append(self._take(len(parcels)))
        what = f"micro-batch {len(parcels)} of step {self.order.step}"
        return [*parcels, transport.wait(last, what)]

    # ------------------------------------------------------------------------------ backward

    def attach(self, inputs: Any) -> Any:
        """Forward, as one node in the caller's own graph.

        The distributed graph is in a context of the step's own, also inside of the caller's: what
        fails in there is raised here, and no other backward pass waits for it.
        """
        found = [(t, divided) for t, divided in microbatch.sources(inputs) if t.requires_grad]
        sources = [t for t, _ in found]
        self._divided = [divided for _, divided in found]
        values = self.forward()
        tokens = [boundary.first_token(), *self._collectors(self.order.context)]

        def spread(gradients: boundary.Gradients) -> list[Tensor | None]:
            with self._turn:
                return [*map(torch.zeros_like, tokens), *self._backward(gradients)]

        return self._tie(values, spread, [*tokens, *sources])

    def _tie(
        self,
        values: list[Any],
        spread: Callable[[boundary.Gradients], boundary.Gradients],
        ends: list[Tensor],
    ) -> Any:
        with torch.no_grad():
            leaves, spec = pytree.tree_flatten(microbatch.gather(values))
        columns = [list(c) for c in zip(*map(pytree.tree_leaves, values), strict=True)]
        where = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self._columns = [columns[k] for k in where]
        differentiable = [any(t.requires_grad for t in column) for column in self._columns]
        self._columns = [[_Shape(t) for t in column] for column in self._columns]
        results = boundary.tie(
            lambda: tuple(leaves[k] for k in where), spread, differentiable, ends
        )
        for k, result in zip(where, results, strict=True):
            leaves[k] = result
        return pytree.tree_unflatten(leaves, spec)

    @shown("backward")
    def _backward(self, gradients: boundary.Gradients) -> list[Tensor | None]:
        """Run the backward programs; returns the gradients of the inputs."""
        if not self._live:
            raise RuntimeError(
                "the pipe's backward pass can run once for each forward pass: what it needs has "
                "been freed, whether or not retain_graph was given; call the pipe again"
            )
        assert self._tape is not None
        self._live = False
        try:
            found = self._differentiate(self._tape, self._roots(gradients))
        except BaseException as exc:
            if self._replicas is not None:
                self._replicas.lose(str(exc))
            self.drop(Failure.capture(exc))
            raise
        finally:
            self._tape.close()
            self._ends = []
        if self.reported:
            self._raise_reported()
        if self._replicas is not None:
            self._end_together(self._replicas)
        self._finish()
        transport.completed_step(self.order.step)
        return self._input_gradients(found)

    def _differentiate(self, tape: transport.Tape, roots: list[Tensor]) -> list[boundary.Gradients]:
        """Run the backward pass; returns the gradients that came back, by micro-batch.

        It is over when all stages say so, and what comes back has come: see `Tape.backward`.
        """
        engine = tape.backward(roots)
        # The last stage is the first to have a gradient.
        ended = [s.call("announce", self.order.step) for s in reversed(self._stages)]
        self._open_gates(engine)
        what = f"to end the backward pass of step {self.order.step}"
        for k, answer in enumerate(ended):
            transport.wait(answer, f"stage {len(ended) - 1 - k} {what}", unless=engine)
        if not any(self._leaves):
            return [()] * self.order.m
        return [
            transport.wait(answer, f"the input's gradient in step {self.order.step}", unless=engine)
            for answer in self._returned.answers
        ]

    def _open_gates(self, engine: Future[None]) -> None:
        """Let gradients go to the last stage when it will soon need them."""
        shut = list(self._gates)
        try:
            while shut:
                i = len(shut) - 1
                what = f"the turn of micro-batch {i} in step {self.order.step}"
                answer = self._stages[-1].call("turn", self.order.step, i)
                transport.wait(answer, what, unless=engine)
                shut.pop().set_result(None)
        finally:  # if the step ends otherwise, the engine is to end as well
            for gate in shut:
                gate.set_result(None)

    def _input_gradients(self, found: list[boundary.Gradients]) -> list[Tensor | None]:
        """Those of the micro-batches put together; ``None`` where no micro-batch has any."""
        rows = [
            list(zip(compress(row, self._differentiable), leaves, strict=True))
            for row, leaves in zip(found, self._leaves, strict=True)
        ]
        columns = zip(*rows, strict=True)
        return [
            _put_together(list(column), divided)
            for column, divided in zip(columns, self._divided, strict=True)
        ]

    def _roots(self, gradients: boundary.Gradients) -> list[Tensor]:
        """One for each micro-batch, so that the last one's gradients leave before others' are made.

        The engine takes first what was created last.
        """
        rows = self._divide(gradients)
        sizes = [trees.nbytes(row) for row in rows]
        large = sum(sizes) > _LARGE and min(sizes) >= WORTH  # then each is in a message of its own
        self._gates = [Slot() for _ in rows[:-AHEAD]] if large else []
        gates = [*self._gates, *[None] * (self.order.m - len(self._gates))]
        return [
            boundary.root(ends, functools.partial(_owned, row, gate))
            for ends, row, gate in zip(self._ends, rows, gates, strict=True)
        ]

    def _divide(self, gradients: boundary.Gradients) -> list[list[Tensor | None]]:
        """Gradients of the gathered outputs, as those of what was received, per micro-batch."""
        rows: list[list[Tensor | None]] = [[] for _ in range(self.order.m)]
        for shapes, gradient in zip(self._columns, gradients, strict=True):
            pieces = _split(gradient, shapes)
            for row, shape, piece in zip(rows, shapes, pieces, strict=True):
                if shape.requires_grad:
                    row.append(piece)
        for row, ends in zip(rows, self._ends, strict=True):
            row += [None] * (len(ends) - len(row))  # a tail
        return rows

    def _raise_reported(self) -> NoReturn:
        m, n = self.order.m, len(self._stages)

        def position(failure: Failure) -> tuple[int, int]:
            # The reverse of the forward cycles: the last micro-batch in the last stage is first.
            after = m - 1 - (failure.microbatch or 0)
            return after + n - 1 - failure.stage, after

        self._give_up(min(self.reported, key=position))

    def _give_up(self, first: Failure) -> NoReturn:
        self.drop(first)
        if self._replicas is not None:
            self._replicas.fail(self.order.step, first.message)
        transport.raise_failure(first)

    def _end_together(self, replicas: Replicas) -> None:
        try:
            replicas.succeed(self.order.step)
        except RuntimeError as exc:
            self.drop(Failure.capture(exc))
            raise

    # ----------------------------------------------------------------------------------- end

    def tell_stages(self, method: str, *args: Any) -> list[Future[Any]]:
        return [stage.call(method, *args) for stage in self._stages]

    def drop(self, why: Failure) -> None:
        """Have the step forgotten everywhere, and wait until it is."""
        self._live = False
        number = self.order.step
        self._port.drop(number, why)
        with suppress(StageLost, StageTimeout):  # of which the next call hears; this has its reason
            for j, answer in enumerate(self.tell_stages("drop", number, why)):
                transport.wait(answer, f"stage {j} to drop step {number}")
        if self._tape is not None:
            self._tape.close()

    def abandon(self) -> None:
        """Have the step forgotten, without waiting; may be called from anywhere."""
        self._live = False
        why = Failure("the output of the step was dropped", "", "", b"")
        number, stages, port = self.order.step, self._stages, self._port

        def drop() -> None:
            port.drop(number, why)
            for stage in stages:
                stage.call("drop", number, why)

        transport.later(drop)

    def __del__(self) -> None:
        if self._live:  # the output is gone, and with it any way to a backward pass
            self.abandon()


def _first(batches: list[Any]) -> int:
    """How many micro-batches go along with the order.

    At least one, so that the first stage can start at once, and small ones, which cost more to ask
    for than to send.
    """
    total = 0
    for i, batch in enumerate(batches):
        total += trees.nbytes(batch[:2])
        if i and total > _SMALL:
            return i
    return len(batches)


class _Shape:
    """What is remembered of a received tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.rows = tensor.shape[0] if tensor.dim() else None
        self.requires_grad = tensor.requires_grad


def _put_together(column: list[tuple[Tensor | None, Tensor]], divided: bool) -> Tensor | None:
    """The gradient of an input, of those of what each micro-batch was given of it."""
    if all(gradient is None for gradient, _ in column):
        return None
    parts = [torch.zeros_like(leaf) if g is None else g for g, leaf in column]
    # The last micro-batch's backward pass is the first.
    return torch.cat(parts) if divided else functools.reduce(torch.add, reversed(parts))


def _split(gradient: Tensor | None, shapes: Sequence[_Shape]) -> Sequence[Tensor | None]:
    """The inverse of gathering, as views."""
    if gradient is None:
        return [None] * len(shapes)
    if shapes[0].rows is None:
        return gradient.unbind()
    return gradient.split([shape.rows or 0 for shape in shapes])  # type: ignore[no-any-return]


def _owned(row: list[Tensor | None], gate: Slot[None] | None) -> boundary.Gradients:
    """The same as tensors that own their memory: they are sent, once the gate is open."""
    if gate is not None:
        gate.result()
    return [None if gradient is None else gradient.clone() for gradient in row]
