"""Step: one mini-batch as its driver sees it, from its micro-batches to their gradients."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.futures import Future
from torch.utils import _pytree as pytree

from rpcpipe import boundary, microbatch, schedule, transport, trees
from rpcpipe.errors import Failure, StageLost, StageTimeout
from rpcpipe.loss import TARGETS
from rpcpipe.mailbox import Mailbox, Name, Parcel
from rpcpipe.stage import Order
from rpcpipe.timeline import shown

if TYPE_CHECKING:
    from rpcpipe.pipe import Pipe
    from rpcpipe.replicas import Replicas

__all__ = ["Port", "Step"]


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
        self._programs = schedule.gpipe(
            order.m, len(self._stages), pipe.checkpoint, backward=order.grad
        )
        self._tape = tape
        self._leaves: list[list[Tensor]] = []  # per micro-batch, those of the input
        self._ends: list[list[Tensor]] = []  # per micro-batch, received tensors with a gradient
        self._live = False
        self._batches = [self._outgoing(batch) for batch in batches]

    # ------------------------------------------------------------------------------- forward

    def _outgoing(self, batch: Any) -> dict[Name, Parcel]:
        """A micro-batch as it is sent: without grad, or as leaves for its gradient.

        Its targets, if there are any, go to the last stage straight away.
        """

        def send(tensor: Tensor) -> Tensor:
            grad = self.order.grad and tensor.requires_grad
            tensor = tensor.detach()
            if tensor.untyped_storage().nbytes() > tensor.nbytes:
                tensor = tensor.clone()
            return tensor.to("cpu").requires_grad_(grad)

        args, kwargs, *targets = trees.map_tensors(send, batch)
        leaves = trees.tensors((args, kwargs, targets))
        self._leaves.append([t for t in leaves if t.requires_grad])
        inputs: dict[Name, Parcel] = {None: Parcel(args, kwargs)}
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
        for i, parcels in enumerate(self._batches):
            for name, parcel in parcels.items():
                self._port.put(number, i, name, parcel)
        self._batches = []
        orders = [replace(self.order, program=program, loss=None) for program in self._programs]
        orders[-1] = replace(orders[-1], loss=self.order.loss)
        begun = [
            stage.call("begin", order) for stage, order in zip(self._stages, orders, strict=True)
        ]
        answers = [self._stages[-1].call("take", number, i, None) for i in range(self.order.m)]
        for j, answer in enumerate(begun):
            failure = transport.wait(answer, f"stage {j} to begin step {number}")
            if isinstance(failure, Failure):
                return [transport.completed(failure.at(j, None, "begin"))]
        return answers

    def _receive(self, answers: list[Future[Any]]) -> list[Any]:
        return [
            transport.wait(answer, f"micro-batch {i} of step {self.order.step}")
            for i, answer in enumerate(answers)
        ]

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
        announced = self.tell_stages("announce", self.order.step)
        ends = [end for row in self._ends for end in row]
        seeds = [g for row in self._divide(gradients) for g in row]
        leaves = [leaf for row in self._leaves for leaf in row]
        try:
            found = self._tape.backward([boundary.root(ends, seeds)], leaves, self._name())
            # The engine may have returned too early (torch 2.13): a stage that gets two gradients
            # at once can forget that it has to wait for the stage before it.
            for j, answer in enumerate(announced):
                transport.wait(answer, f"stage {j} to end step {self.order.step}")
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

    def _name(self) -> str:
        return f"the backward pass of step {self.order.step}"

    def _input_gradients(self, found: list[Tensor | None]) -> list[Tensor | None]:
        """Those of the micro-batches put together; ``None`` where no micro-batch has any."""
        gradients = map(boundary.unmark, found)
        rows = [[(next(gradients), leaf) for leaf in row] for row in self._leaves]
        columns = zip(*rows, strict=True)
        return [
            _put_together(list(column), divided)
            for column, divided in zip(columns, self._divided, strict=True)
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
    """The inverse of gathering, as tensors that own their memory: they are sent."""
    if gradient is None:
        return [None] * len(shapes)
    if shapes[0].rows is None:
        pieces = gradient.unbind()
    else:
        pieces = gradient.split([shape.rows or 0 for shape in shapes])
    return [p.clone() for p in pieces]
