"""Pipe: the driver's nn.Module, whose layers live in the stages."""

from __future__ import annotations

import functools
import io
import itertools
import logging
import pickle
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.futures import Future
from torch.utils import _pytree as pytree

from rpcpipe import balance as balances
from rpcpipe import boundary, microbatch, schedule, tied, transport
from rpcpipe.batchnorm import has_batch_norm
from rpcpipe.build import Part, build
from rpcpipe.checkpoint import AutocastState
from rpcpipe.errors import Failure
from rpcpipe.mailbox import Mailbox, Name, Parcel, require_picklable
from rpcpipe.optim import PipeOptimizer
from rpcpipe.skip.layout import SkipLayout
from rpcpipe.stage import Order, Stage
from rpcpipe.timeline import Timeline
from rpcpipe.world import World

__all__ = ["Pipe"]

logger = logging.getLogger("rpcpipe")


class _Port(Mailbox):
    """The driver, as the stages see it: the source of micro-batches, and who hears of failures."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: weakref.WeakValueDictionary[int, _Step] = weakref.WeakValueDictionary()

    def report(self, number: int, failure: Failure) -> None:
        """A stage failed in the backward pass."""
        step = self.steps.get(number)
        if step is not None:
            step.reported.append(failure)


class Pipe(nn.Module):
    """A sequential module divided into stages, each in its own process.

    Calling it runs the GPipe schedule (arXiv 1811.06965; torchgpipe, arXiv 2004.09910): the
    mini-batch is divided along dimension 0 into micro-batches, stage ``j`` works on micro-batch
    ``i`` while stage ``j + 1`` works on ``i - 1``. The result is what the module itself would
    give for the micro-batches one after the other, bit for bit; its backward pass leaves the
    gradients in ``.grad`` of the parameters, in the stages.

    The pipe itself has no parameters. Its ``train()`` and ``eval()``, and the driver's grad mode
    and autocast, hold in the stages for each call.

    Inside of the caller's own ``torch.distributed.autograd.context()``, gradients go to the
    context: call ``torch.distributed.autograd.backward`` and step a ``DistributedOptimizer`` made
    of `parameter_rrefs`.

    Args:
        module: an ``nn.Sequential`` whose layers can be pickled. Layers on the ``meta`` device are
            materialised in their stage by their modules' ``reset_parameters``, seeded by the
            layer's index and ``torch.initial_seed()``: initial weights do not depend on the
            balance.
        world: what ``run`` called the training function with.
        balance: number of layers of each stage.
        chunks: number of micro-batches a mini-batch is divided into; fewer if it has fewer rows.
        checkpoint: ``"always"``, ``"except_last"`` (the last micro-batch keeps its activations) or
            ``"never"``: which micro-batches keep only what their stage was given, and are
            computed a second time for the backward pass.
        deferred_batch_norm: update running statistics of batch norm as the undivided mini-batch
            would, and once.
        seed: makes what layers draw (dropout masks) depend on this, the number of the call, the
            micro-batch and the layer, and not on how the layers are divided. Without it each
            stage draws from a stream of its own.
        sample: a micro-batch by which to measure the balance, if none is given: what the first
            layer takes.
        devices: where each stage computes; by default ``world.device(j)``.

    Raises:
        TypeError: ``module`` is no ``nn.Sequential``, or cannot be pickled.
        BalanceError: ``balance`` does not fit.
        ValueError: ``chunks``, ``checkpoint`` or ``devices`` is not as described.
    """

    _stage_class = Stage  # an experiment may put a subclass here

    def __init__(
        self,
        module: nn.Sequential,
        world: World,
        *,
        balance: Sequence[int] | None = None,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
        seed: int | None = None,
        sample: Any = None,
        devices: Sequence[torch.device | str] | None = None,
    ) -> None:
        super().__init__()
        _check_module(module)
        if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
            raise ValueError(f"chunks= is a whole number of at least 1, got {chunks!r}")
        schedule.checkpointed(1, checkpoint)
        if devices is not None and len(devices) != world.stages:
            raise ValueError(f"devices= names one for each of {world.stages} stages: {devices}")
        if balance is None and sample is not None:
            balance = balances.by_time(world.stages, module, sample)
        balances.validate(balance, len(module), world.stages)
        self.balance = list(balance or [])
        if checkpoint != "never" and not deferred_batch_norm and has_batch_norm(module):
            logger.warning(
                "running statistics of batch norm are updated once per micro-batch; "
                "deferred_batch_norm=True updates them as the undivided mini-batch would"
            )
        self.chunks = chunks
        self.checkpoint = checkpoint
        self.training = module.training
        self._world = world
        self._devices = [
            str(devices[j]) if devices else str(world.device(j)) for j in range(world.stages)
        ]
        self._numbers = itertools.count()
        self._port = _Port()
        self._collecting: tuple[int | None, list[Tensor]] = (None, [])
        self._remote_port = transport.publish(self._port)
        parts = _partition(module, self.balance)
        blobs = [_serialize(part) for part in parts]
        skips = SkipLayout([list(part.values()) for part in parts])
        self._ties = tied.find(parts)
        self._stages = [
            transport.create(
                world.worker(j), self._stage_class, j, device, world.process(j).threads
            )
            for j, device in enumerate(self._devices)
        ]
        self._connect(skips)
        firsts = itertools.accumulate(self.balance, initial=0)
        start = torch.initial_seed()
        self._build(
            [
                Part(blob, first, start, seed, deferred_batch_norm, self.training)
                for blob, first in zip(blobs, firsts, strict=False)
            ]
        )

    # ---------------------------------------------------------------------------- construction

    def _connect(self, skips: SkipLayout) -> None:
        # The pipe alone keeps them alive. Those that hold each other would stay for ever.
        port, stages = self._remote_port.borrowed(), [s.borrowed() for s in self._stages]
        answers = []
        for j, stage in enumerate(self._stages):
            sources: dict[Name, transport.Remote] = {None: stages[j - 1] if j else port}
            sources.update({key: stages[k] for key, k in skips.imports(j)})
            exports = [key for key, _ in skips.exports(j)]
            ties = tied.Ties(j, self._ties, stages)
            answers.append(stage.call("connect", port, sources, exports, ties))
        self._collect(answers, "connect the stages")

    def _build(self, parts: Sequence[Part]) -> None:
        answers = [
            stage.call("perform", build, part)
            for stage, part in zip(self._stages, parts, strict=True)
        ]
        self._collect(answers, "build the stages")
        for tie in self._ties:  # made of meta, each copy was initialised by another layer
            others = {j: name for j, name in tie.names.items() if j != tie.owner}
            owner = self._stages[tie.owner].call("perform", _parameter, tie.names[tie.owner])
            (value,) = self._collect([owner], "give a tied parameter")
            answers = [
                self._stages[j].call("perform", _set_parameter, name, value)
                for j, name in others.items()
            ]
            self._collect(answers, "set a tied parameter")

    # ------------------------------------------------------------------------ calls to stages

    def _collect(self, answers: Sequence[Future[Any]], what: str) -> list[Any]:
        """Wait for one answer of each stage; raise the first failure."""
        values = [
            transport.wait(answer, f"stage {j} to {what}") for j, answer in enumerate(answers)
        ]
        for value in values:
            if isinstance(value, Failure):
                value.raise_()
        return values

    def _everywhere(self, what: str, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``fn(stage, *args)`` on the compute thread of every stage."""
        return self._collect([s.call("perform", fn, *args) for s in self._stages], what)

    def _sum_tied(self, step: int) -> None:
        if self._ties:
            self._everywhere("add up tied gradients", _exchange_ties, step)

    # ------------------------------------------------------------------------------- training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on a mini-batch.

        Args:
            args: what the first layer takes: tensors and pytrees of tensors, with equal sizes
                along dimension 0, of any dtype.
            kwargs: likewise.

        Returns:
            The last layer's result on the driver's host memory, tensors concatenated along
            dimension 0.

        Raises:
            TypeError, ValueError: the input cannot be divided; nothing was sent.
            StageError: a layer raised; the step is dropped and the pipe can be used on.
            StageLost: a process of the pipeline is gone.
        """
        require_picklable((args, kwargs))
        batches = microbatch.scatter((args, kwargs), self.chunks)
        order = self._order(len(batches))
        if not order.grad:
            step = _Step(self, order, batches, None)
            return microbatch.gather(step.forward())
        if order.context is not None and torch.get_num_interop_threads() < 2:
            raise RuntimeError(
                "inside of a distributed autograd context the driver takes two inter-op threads, "
                "one for the caller's backward pass and one for the pipe's, and has 1: call "
                "torch.set_num_interop_threads(2) before anything else"
            )
        if order.context is not None and self._ties:
            raise ValueError(
                "parameters tied across stages have no place in a distributed autograd context, "
                "which keeps a gradient for each copy; call loss.backward() outside of it, or "
                "change balance= so that the layers that share them are in one stage"
            )
        return _Step(self, order, batches, transport.Tape()).attach((args, kwargs))

    def _order(self, m: int) -> Order:
        grad = torch.is_grad_enabled()
        return Order(
            step=next(self._numbers),
            m=m,
            program=[],
            grad=grad,
            inference=torch.is_inference_mode_enabled(),
            context=transport.current_tape() if grad else None,
            training=self.training,
            autocast=AutocastState.capture(),
        )

    def _collectors(self, context: int | None) -> list[Tensor]:
        """What a step is tied to for its gradients to go to the caller's autograd context.

        Once for each context, and with nothing in it for each step: its backward pass waits for
        all that was sent inside of it, also by steps the loss does not use.
        """
        if context is not None and self._collecting[0] != context:
            answers = [s.call("collect", context, boundary.first_token()) for s in self._stages]
            tokens = self._collect(answers, "join the autograd context")
            self._collecting = (context, boundary.received(tokens))
        return self._collecting[1] if context is not None else []

    def optimizer(self, cls: Callable[..., torch.optim.Optimizer], **kwargs: Any) -> PipeOptimizer:
        """Make an optimizer of class ``cls`` in each stage, for its parameters.

        Args:
            cls: such as ``torch.optim.AdamW``.
            kwargs: its options, such as ``lr``.
        """
        return PipeOptimizer(self, cls, kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of all parameters."""
        self._everywhere("zero the gradients", _zero_grad, set_to_none)

    def parameter_rrefs(self) -> list[Any]:
        """RRefs of all parameters that require grad, for ``DistributedOptimizer``."""
        transport.reference(None)  # refused here, if at all
        found = self._everywhere("name its parameters", _parameter_rrefs)
        return [rref for rrefs in found for rref in rrefs]

    # ------------------------------------------------------------------------------ inspection

    def apply_to_stage(self, j: int, fn: Callable[[nn.Module], Any]) -> Any:
        """Return ``fn(stage_module)``, called in stage ``j`` between mini-batches.

        Args:
            fn: an importable function. What it returns must not be large; tensors are copied.

        Raises:
            IndexError: there is no stage ``j``.
            StageError: ``fn`` raised.
        """
        self._world.process(j)
        answer = self._stages[j].call("perform", _apply, fn)
        (value,) = self._collect([answer], f"call {getattr(fn, '__name__', fn)}")
        return value

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """All parameters and buffers on the driver, under the unpartitioned module's names."""
        found = self._everywhere("give its state", _state_dict)
        merged = {name: tensor for state in found for name, tensor in state.items()}
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        destination = kwargs.get("destination", args[0] if args else None)
        result = {} if destination is None else destination
        result.update({prefix + name: tensor for name, tensor in merged.items()})
        return result

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load parameters and buffers by the unpartitioned module's names.

        Raises:
            RuntimeError: as ``nn.Module.load_state_dict``, before anything has changed.
        """
        if assign:
            raise ValueError("assign=True would replace parameters that optimizers hold")
        shapes = self._everywhere("name its state", _state_shapes)
        known = {name: shape for stage in shapes for name, shape in stage.items()}
        missing = [name for name in known if name not in state_dict]
        unexpected = [name for name in state_dict if name not in known]
        wrong = [
            f"size mismatch for {name}: the checkpoint has {tuple(state_dict[name].shape)}, "
            f"the model {shape}"
            for name, shape in known.items()
            if name in state_dict and shape is not None and tuple(state_dict[name].shape) != shape
        ]
        if strict and (missing or unexpected):
            wrong.append(f"missing keys: {missing}; unexpected keys: {unexpected}")
        if wrong:
            raise RuntimeError("cannot load this state dict into the pipe: " + "\n  ".join(wrong))
        answers = [
            stage.call(
                "perform", _load_state_dict, {k: state_dict[k] for k in own if k in state_dict}
            )
            for stage, own in zip(self._stages, shapes, strict=True)
        ]
        self._collect(answers, "load its state")
        return nn.modules.module._IncompatibleKeys(missing, unexpected)

    @contextmanager
    def record(self) -> Iterator[Timeline]:
        """Record when each stage runs which task; complete once the ``with`` is left."""
        timeline = Timeline(self.checkpoint)
        self._everywhere("start recording", _start_recording)
        try:
            yield timeline
        finally:
            timeline.events = self._everywhere("give its record", _stop_recording)

    def parameters(self, recurse: bool = True) -> NoReturn:
        """Not to be had on the driver: parameters live in the stages."""
        raise TypeError(
            "a pipe's parameters live in its stages: use pipe.optimizer(cls, **options), "
            "pipe.state_dict() or pipe.apply_to_stage(j, fn)"
        )

    def extra_repr(self) -> str:
        rows = [
            f"(stage {j}): {count} layers on {device} at {self._world.process(j).host}"
            for j, (count, device) in enumerate(zip(self.balance, self._devices, strict=True))
        ]
        return "\n".join([f"chunks={self.chunks}, checkpoint={self.checkpoint!r}", *rows])

    def __len__(self) -> int:
        """Number of layers."""
        return sum(self.balance)


class _Step:
    """One mini-batch, as its driver sees it, until its backward pass is done or impossible."""

    def __init__(
        self, pipe: Pipe, order: Order, batches: list[Any], tape: transport.Tape | None
    ) -> None:
        self.order = order
        self.reported: list[Failure] = []
        self._stages = pipe._stages
        self._port = pipe._port
        self._collectors = pipe._collectors
        self._finish = functools.partial(pipe._sum_tied, order.step)
        self._programs = schedule.gpipe(
            order.m, len(self._stages), pipe.checkpoint, backward=order.grad
        )
        self._tape = tape
        self._leaves: list[list[Tensor]] = []  # per micro-batch, those of the input
        self._ends: list[list[Tensor]] = []  # per micro-batch, received tensors with a gradient
        self._live = False
        self._batches = [self._outgoing(batch) for batch in batches]

    # ------------------------------------------------------------------------------- forward

    def _outgoing(self, batch: Any) -> Parcel:
        """A micro-batch as it is sent: without grad, or as leaves for its gradient."""

        def send(tensor: Tensor) -> Tensor:
            grad = self.order.grad and tensor.requires_grad
            tensor = tensor.detach()
            if tensor.untyped_storage().nbytes() > tensor.nbytes:
                tensor = tensor.clone()
            return tensor.to("cpu").requires_grad_(grad)

        args, kwargs = pytree.tree_map_only(Tensor, send, batch)
        leaves = pytree.tree_leaves((args, kwargs))
        self._leaves.append([t for t in leaves if isinstance(t, Tensor) and t.requires_grad])
        return Parcel(args, kwargs)

    def forward(self) -> list[Any]:
        """Run the forward programs; returns the last stage's value for each micro-batch."""
        number, m = self.order.step, self.order.m
        self._port.steps[number] = self
        self._live = True
        try:
            parcels = self._tape.run(self._exchange) if self._tape else self._exchange()
        except BaseException as exc:
            self.drop(Failure.capture(exc))
            raise
        failures = [(i, p) for i, p in enumerate(parcels) if isinstance(p, Failure)]
        if failures:
            # The first in the order of the schedule: micro-batch i is in stage j at cycle i + j.
            first = min(failures, key=lambda found: (found[0] + found[1].stage, found[0]))[1]
            self.drop(first)
            first.raise_()
        assert len(parcels) == m
        if self.order.grad:
            tensors = [pytree.tree_leaves(parcel) for parcel in parcels]
            self._ends = [
                boundary.received([t for t in row if isinstance(t, Tensor)]) for row in tensors
            ]
        else:
            self._live = False
        return [parcel.args[0] for parcel in parcels]

    def _exchange(self) -> list[Any]:
        """Start every stage, and ask the last one for all micro-batches."""
        number = self.order.step
        for i, parcel in enumerate(self._batches):
            self._port.put(number, i, None, parcel)
        self._batches = []
        begun = [
            stage.call("begin", _with_program(self.order, program))
            for stage, program in zip(self._stages, self._programs, strict=True)
        ]
        answers = [self._stages[-1].call("take", number, i, None) for i in range(self.order.m)]
        for j, answer in enumerate(begun):
            failure = transport.wait(answer, f"stage {j} to begin step {number}")
            if isinstance(failure, Failure):
                return [failure.at(j, None, "begin")]
        return [
            transport.wait(answer, f"micro-batch {i} of step {number}")
            for i, answer in enumerate(answers)
        ]

    # ------------------------------------------------------------------------------ backward

    def attach(self, inputs: Any) -> Any:
        """Forward, as one node in the caller's own graph.

        The distributed graph is in a context of the step's own, also inside of the caller's: what
        fails in there is raised here, and no other backward pass waits for it.
        """
        sources = [t for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor)]
        sources = [t for t in sources if t.requires_grad]
        values = self.forward()
        tokens = [boundary.first_token(), *self._collectors(self.order.context)]

        def spread(gradients: boundary.Gradients) -> list[Tensor | None]:
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

    def _backward(self, gradients: boundary.Gradients) -> list[Tensor | None]:
        """Run the backward programs; returns the gradients of the inputs."""
        if not self._live:
            raise RuntimeError(
                "the pipe's backward pass can run once for each forward pass: what it needs has "
                "been freed, whether or not retain_graph was given; call the pipe again"
            )
        assert self._tape is not None
        self._live = False
        self._announce()
        ends = [end for row in self._ends for end in row]
        seeds = [g for row in self._divide(gradients) for g in row]
        leaves = [leaf for row in self._leaves for leaf in row]
        try:
            found = self._tape.backward([boundary.root(ends, seeds)], leaves)
        except BaseException as exc:
            self.drop(Failure.capture(exc))
            raise
        finally:
            self._tape.close()
            self._ends = []
        if self.reported:
            self._raise_reported()
        self._finish()
        return self._input_gradients(found)

    def _input_gradients(self, found: list[Tensor | None]) -> list[Tensor | None]:
        """Those of the micro-batches put together; ``None`` where no micro-batch has any."""
        gradients = map(boundary.unmark, found)
        rows = [[(next(gradients), leaf) for leaf in row] for row in self._leaves]
        return [
            torch.cat([torch.zeros_like(leaf) if g is None else g for g, leaf in column])
            if any(g is not None for g, _ in column)
            else None
            for column in zip(*rows, strict=True)
        ]

    def _announce(self) -> None:
        """Tell the stages that the backward pass begins; not waited for."""
        self.tell_stages("announce", self.order.step)

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

        first = min(self.reported, key=position)
        self.drop(first)
        first.raise_()

    # ----------------------------------------------------------------------------------- end

    def tell_stages(self, method: str, *args: Any) -> list[Future[Any]]:
        return [stage.call(method, *args) for stage in self._stages]

    def drop(self, why: Failure) -> None:
        """Have the step forgotten everywhere, and wait until it is."""
        self._live = False
        number = self.order.step
        self._port.drop(number, why)
        for j, answer in enumerate(self.tell_stages("drop", number, why)):
            transport.wait(answer, f"stage {j} to drop step {number}")
        if self._tape is not None:
            self._tape.close()

    def __del__(self) -> None:
        if self._live:  # the output is gone, and with it any way to a backward pass
            why = Failure("the output of the step was dropped", "", "", b"")
            number, stages = self.order.step, self._stages
            transport.later(lambda: [stage.call("drop", number, why) for stage in stages])


class _Shape:
    """What is remembered of a received tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.rows = tensor.shape[0] if tensor.dim() else None
        self.requires_grad = tensor.requires_grad


def _split(gradient: Tensor | None, shapes: Sequence[_Shape]) -> Sequence[Tensor | None]:
    """The inverse of gathering, as tensors that own their memory: they are sent."""
    if gradient is None:
        return [None] * len(shapes)
    if shapes[0].rows is None:
        pieces = gradient.unbind()
    else:
        pieces = gradient.split([shape.rows or 0 for shape in shapes])
    return [p.clone() for p in pieces]


def _with_program(order: Order, program: schedule.Program) -> Order:
    return Order(**{**order.__dict__, "program": program})


# ---------------------------------------------------------------------------------- before sends


def _check_module(module: Any) -> None:
    if not isinstance(module, nn.Sequential):
        raise TypeError(
            "a pipe divides an nn.Sequential between its layers; "
            f"got {type(module).__name__}: write the model as nn.Sequential(...)"
        )
    if type(module).forward is not nn.Sequential.forward:
        raise TypeError(
            f"{type(module).__name__} overrides nn.Sequential.forward, which a pipe does not "
            "call: give the layers in a plain nn.Sequential"
        )


def _partition(module: nn.Sequential, balance: Sequence[int]) -> list[dict[str, nn.Module]]:
    """The layers of each stage by name; a layer used twice has two names."""
    layers = iter(module._modules.items())
    return [dict(itertools.islice(layers, count)) for count in balance]


def _serialize(part: dict[str, nn.Module]) -> bytes:
    try:
        return _dump(part)
    except (pickle.PicklingError, AttributeError, TypeError):
        for name, layer in part.items():
            try:
                _dump(layer)
            except (pickle.PicklingError, AttributeError, TypeError) as exc:
                raise TypeError(
                    f"layers are sent to their stage by pickle, which cannot take layer {name} "
                    f"({type(layer).__name__}): {exc}. Define its class and the functions it holds "
                    "at the top level of a file; a lambda cannot be sent"
                ) from exc
        raise


def _dump(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


# --------------------------------------------------------------------------------- in each stage


def _apply(stage: Stage, fn: Callable[[nn.Module], Any]) -> Any:
    value = fn(stage.module)
    require_picklable(value)
    return value


def _exchange_ties(stage: Stage, step: int) -> None:
    stage.exchange_ties(step)


def _parameter(stage: Stage, name: str) -> Tensor:
    return stage.module.get_parameter(name).detach().to("cpu")


@torch.no_grad()
def _set_parameter(stage: Stage, name: str, value: Tensor) -> None:
    stage.module.get_parameter(name).copy_(value)


def _zero_grad(stage: Stage, set_to_none: bool) -> None:
    stage.module.zero_grad(set_to_none)


def _parameter_rrefs(stage: Stage) -> list[Any]:
    return [transport.reference(parameter) for parameter in stage.trainable()]


def _state_dict(stage: Stage) -> dict[str, Any]:
    state = stage.module.state_dict()
    return {k: v.to("cpu") if isinstance(v, Tensor) else v for k, v in state.items()}


def _state_shapes(stage: Stage) -> dict[str, tuple[int, ...] | None]:
    return {
        name: tuple(value.shape) if isinstance(value, Tensor) else None
        for name, value in stage.module.state_dict().items()
    }


def _load_state_dict(stage: Stage, state: dict[str, Any]) -> None:
    stage.module.load_state_dict(state, strict=False)


def _start_recording(stage: Stage) -> None:
    stage.events = []


def _stop_recording(stage: Stage) -> Any:
    events, stage.events = stage.events, None
    return events
