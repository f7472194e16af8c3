"""Pipe: the driver's nn.Module, whose layers live in the stages."""

from __future__ import annotations

import functools
import itertools
import os
import socket
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, NoReturn, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.futures import Future
from torch.utils import _pytree as pytree

from rpcpipe import balance as balances
from rpcpipe import (
    boundary,
    clock,
    inside,
    loading,
    log,
    memory,
    microbatch,
    replicas,
    saving,
    schedule,
    tied,
    transport,
    weights,
)
from rpcpipe.batchnorm import has_batch_norm
from rpcpipe.build import Part, build, check_module, divide, serialize
from rpcpipe.checkpoint import AutocastState
from rpcpipe.clock import Clock, Seen
from rpcpipe.cut import cut
from rpcpipe.errors import Failure
from rpcpipe.finite import require_finite
from rpcpipe.loss import Loss, combine, reduction_of, shares
from rpcpipe.mailbox import Name, require_picklable
from rpcpipe.memory import Memory
from rpcpipe.optim import PipeOptimizer
from rpcpipe.predict import predict
from rpcpipe.shipping import require_sendable
from rpcpipe.skip.layout import SkipLayout
from rpcpipe.stage import Order, Stage
from rpcpipe.state import from_torchgpipe, misfits
from rpcpipe.step import Port, Step
from rpcpipe.timeline import Setting, Timeline, aligned
from rpcpipe.world import World

__all__ = ["Pipe"]

logger = log.logger

T = TypeVar("T")
if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    Out = TypeVarWithDefault("Out", default=Tensor)
else:
    Out = TypeVar("Out")


class Layer(NamedTuple):
    """What ``pipe[k]`` says of a layer."""

    name: str
    type: str
    stage: int


class Pipe(nn.Module, Generic[Out]):
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

    To a type checker, calling a pipe gives a ``Tensor``. Where the last layer returns something
    else, say so: ``pipe: Pipe[tuple[Tensor, Tensor]] = Pipe(...)``.

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
        check_finite: look for NaNs and infinities in what every stage computes, forward and
            backward, and raise where the first one appears. Slow: for finding it.
        ddp: how gradients are averaged over ``world.replicas`` pipelines, once a mini-batch and
            during the last micro-batch's backward pass. ``"auto"`` puts each stage that has
            something to train into a ``DistributedDataParallel`` with the stage's group, if there
            is more than one replica; its weights and buffers become those of replica 0. ``False``
            does not. A list with the script's own process group for each stage, or the ranks of
            its processes, or a ``DeviceMesh`` with the axes ``("dp", "pp")``, says which groups
            are used: made by every process before ``run``, they are found in the stages by their
            ranks, the first made of several. All replicas run the same number of backward passes
            (their numbers of rows and micro-batches may differ); a pass that fails in one of them
            fails in all.
        wrap_stage: an importable function, called in each stage as ``wrap_stage(module, world, j)``
            with its layers as one module. It returns what is to be called in their place: the
            module in a ``DistributedDataParallel`` with a communication hook, after
            ``fully_shard``, compiled. Parameters keep the names they have without it. If the
            result is not data parallel by itself, ``ddp`` applies.

    Raises:
        TypeError: ``module`` is no ``nn.Sequential``, or cannot be pickled.
        BalanceError: ``balance`` does not fit.
        ValueError: ``chunks``, ``checkpoint``, ``devices`` or ``ddp`` is not as described.
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
        check_finite: bool = False,
        ddp: Any = "auto",
        wrap_stage: Callable[[nn.Module, World, int], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        check_module(module)
        _check_options(world, chunks, checkpoint, devices)
        if balance is None and sample is not None:
            balance = balances.by_time(world.stages, module, sample)
        balances.validate(balance, len(module), world.stages)
        plan = replicas.Plan.of(world, ddp, wrap_stage)
        self.balance = list(balance or [])
        if checkpoint != "never" and not deferred_batch_norm and has_batch_norm(module):
            logger.warning(
                "running statistics of batch norm are updated once per micro-batch; "
                "deferred_batch_norm=True updates them as the undivided mini-batch would"
            )
        self.chunks = chunks
        self.checkpoint = checkpoint
        self.check_finite = check_finite
        self.training = module.training
        self._world = world
        self._devices = [
            str(devices[j]) if devices else str(world.device(j)) for j in range(world.stages)
        ]
        self._numbers = itertools.count()
        self._turn = threading.RLock()  # of the threads that call the pipe
        self._counted_before = 0  # mini-batches, when a checkpoint was loaded
        self._seed = seed
        self._saving: saving.Saving | None = None
        self._average = True
        self._timeline: Timeline | None = None  # while recording
        self._port = Port()
        self._collecting: tuple[int | None, list[Tensor]] = (None, [])
        self._remote_port = transport.publish(self._port)
        self._construct(module, seed, deferred_batch_norm)
        kinds = self._everywhere("be wrapped", replicas.wrap, plan)
        self._replicas = replicas.Replicas.of(self, world, kinds)
        self._everywhere("measure its memory", memory.begin)

    # ---------------------------------------------------------------------------- construction

    def _construct(self, module: nn.Sequential, seed: int | None, deferred: bool) -> None:
        """Divide the module, and have each stage made of its part."""
        world = self._world
        parts = divide(module, self.balance)
        blobs = [serialize(part) for part in parts]
        for j, (count, blob) in enumerate(zip(self.balance, blobs, strict=True)):
            logger.info("stage %d gets %d layers, %.1f MiB", j, count, len(blob) / 2**20)
        skips = SkipLayout([list(part.values()) for part in parts])
        self._ties = tied.find(parts)
        self._stages = [
            transport.create(
                world.worker(j), self._stage_class, j, device, world.process(j).threads
            )
            for j, device in enumerate(self._devices)
        ]
        self._layers = [
            Layer(name, type(layer).__name__, j)
            for j, part in enumerate(parts)
            for name, layer in part.items()
        ]
        self._connect(skips)
        firsts = itertools.accumulate(self.balance, initial=0)
        start = torch.initial_seed()
        with log.lasting("building the stages"):
            self._build(
                [
                    Part(blob, first, start, seed, deferred, self.training)
                    for blob, first in zip(blobs, firsts, strict=False)
                ]
            )

    @classmethod
    def from_module(
        cls,
        model: nn.Module,
        world: World,
        sample: Any,
        *,
        split: Sequence[str] | None = None,
        **options: Any,
    ) -> Pipe[Out]:
        """Make a pipe of a module that is no ``nn.Sequential``.

        ``torch.export`` traces it, once in training and once in evaluation mode, and the trace is
        cut into the stages; values that a later stage needs go straight to it. Parameters and
        buffers keep their names. Inputs may have any number of rows, and must otherwise be like
        the sample, in shape, type and structure. What ``forward`` decides by the values it
        computes cannot be traced, and what it decides by anything else is settled by the trace.

        Args:
            model: on the CPU, in the mode the pipe is to begin with; it is not changed.
            world: what ``run`` called the training function with.
            sample: what the model is called with, with at least two rows: a tuple of arguments, a
                dict of keyword arguments (the pipe then takes them as a dict as well), or one
                argument.
            split: names, as in ``model.named_modules()``, of the modules that the second and
                later stages begin with; by default such that stages have about the same number of
                floating point operations.
            options: as of `Pipe`: ``chunks``, ``checkpoint``, ``seed``, ``devices`` and so on.

        Raises:
            TypeError: ``sample`` is not what the model takes.
            ValueError: the model cannot be traced, or cannot be cut there; or an option does not
                go with it.
        """
        for name in ("balance", "sample"):
            if name in options:
                raise ValueError(f"from_module cuts by split=, {name}= is for an nn.Sequential")
        if options.get("deferred_batch_norm") and has_batch_norm(model):
            raise ValueError(
                "deferred_batch_norm=True needs batch norm as layers, and a traced module has it "
                "as an operation: write the model as nn.Sequential(...), or leave it out"
            )
        segments = nn.Sequential(*cut(model, sample, world.stages, split))
        segments.training = model.training
        return cls(segments, world, balance=[1] * world.stages, **options)

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
            owner = self._stages[tie.owner].call("perform", inside.parameter, tie.names[tie.owner])
            (value,) = self._collect([owner], "give a tied parameter")
            answers = [
                self._stages[j].call("perform", inside.set_parameter, name, value)
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
                transport.raise_failure(value)
        return values

    def _everywhere(self, what: str, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``fn(stage, *args)`` on the compute thread of every stage."""
        return self._collect([s.call("perform", fn, *args) for s in self._stages], what)

    def _sum_tied(self, order: Order) -> None:
        if self._ties:
            args = order.step, order.average
            self._everywhere("add up tied gradients", inside.exchange_ties, *args)

    # ------------------------------------------------------------------------------- training

    if TYPE_CHECKING:

        def __call__(self, *args: Any, **kwargs: Any) -> Out: ...

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on a mini-batch.

        Args:
            args: what the first layer takes: tensors and pytrees of tensors, with equal sizes
                along dimension 0, of any dtype; marked by `NoChunk`, every micro-batch gets the
                whole.
            kwargs: likewise.

        Returns:
            The last layer's result on the driver's host memory, tensors concatenated along
            dimension 0.

        Raises:
            TypeError, ValueError: the input cannot be divided; nothing was sent.
            FloatingPointError: the input is not finite and ``check_finite`` was given.
            StageError: a layer raised; the step is dropped and the pipe can be used on.
            StageLost: a process of the pipeline is gone.
        """
        batches = microbatch.scatter((args, kwargs), self.chunks)
        return self._step((args, kwargs), batches, None)

    def _step(self, inputs: Any, batches: list[Any], loss: Loss | None) -> Any:
        self._require_sound(batches)
        with self._turn:
            return self._run(batches, inputs, loss)

    def _require_sound(self, batches: list[Any]) -> None:
        require_picklable(batches[0])
        if self._replicas is not None:
            self._replicas.require_unbroken()
        if self.check_finite:
            require_finite(
                (f"the input of micro-batch {i}", leaf)
                for i, batch in enumerate(batches)
                for leaf in pytree.tree_leaves(batch)
                if isinstance(leaf, Tensor)
            )

    def _run(self, batches: list[Any], inputs: Any, loss: Loss | None) -> Any:
        order = replace(self._order(len(batches)), loss=loss)
        if not order.grad:
            step = Step(self, order, batches, None)
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
        if order.context is not None and self._replicas is not None:
            raise ValueError(
                "stages that are averaged over replicas have no place in a distributed autograd "
                "context, where gradients do not pass DistributedDataParallel; call "
                "loss.backward() outside of it, or give ddp=False"
            )
        return Step(self, order, batches, transport.Tape()).attach(inputs)

    @overload
    def loss(
        self,
        inputs: Any,
        targets: Any,
        loss_fn: Callable[..., Tensor],
        *,
        reduction: str | None = None,
        weight: Callable[[Any], Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> Tensor: ...

    @overload
    def loss(
        self,
        inputs: Any,
        targets: Any,
        loss_fn: Callable[..., tuple[Tensor, T]],
        *,
        reduction: str | None = None,
        weight: Callable[[Any], Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[Tensor, T]: ...

    def loss(
        self,
        inputs: Any,
        targets: Any,
        loss_fn: Callable[..., Any],
        *,
        reduction: str | None = None,
        weight: Callable[[Any], Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return ``loss_fn(pipe(inputs), targets)``, computed in the last stage.

        The outputs stay there, and only the loss of each micro-batch comes to the driver. They are
        put together so that the result is that of the undivided mini-batch, up to rounding:

        - of means, ``sum(w[i] * l[i]) / sum(w)``, where ``w[i]`` is what micro-batch ``i``'s mean
          was divided by. That is its number of rows; for torch's ``cross_entropy`` and
          ``nll_loss``, and for a ``functools.partial`` or the module of one, the number of
          targets that are not ``ignore_index``, each counted by the ``weight`` of its class. For
          any other loss in which rows do not count the same, ``weight`` says it. A micro-batch
          of weight 0 contributes nothing.
        - of sums, ``sum(l[i])``.

        Each replica's loss is that of its own mini-batch; replicas average their gradients.

        Args:
            inputs: what the first layer takes: as in ``pipe(inputs)``, a tuple as in
                ``pipe(*inputs)``.
            targets: a pytree with tensors that have as many rows as the inputs, divided alike;
                sent to the last stage only. `NoChunk` holds here, too.
            loss_fn: called as ``loss_fn(output, targets)`` for each micro-batch, under the
                driver's autocast; returns a floating point tensor without dimensions, or a tuple
                of it and anything else for metrics. It is sent by pickle, and what it changes in
                itself stays there; it holds no parameters to train.
            reduction: ``"mean"`` or ``"sum"``; by default what ``loss_fn`` has as its
                ``reduction``, and ``"mean"`` if it has none.
            weight: called with each micro-batch's targets, on the driver; returns its ``w[i]``,
                a number of at least 0.
            kwargs: keyword arguments of the first layer.

        Returns:
            The loss, a tensor without dimensions on the driver's host memory, to call
            ``backward()`` on. If ``loss_fn`` returns ``(loss, aux)``, the loss and ``aux``, which
            is detached: tensors are concatenated along dimension 0, those without dimensions
            stacked to shape ``(m,)``, all else must be equal for all micro-batches.

        Raises:
            TypeError, ValueError: the arguments are not as described; nothing was sent.
            StageError: a layer or ``loss_fn`` (with phase ``"loss"``) raised; the pipe can be
                used on.
            StageLost: a process of the pipeline is gone.
        """
        args = inputs if isinstance(inputs, tuple) else (inputs,)
        whole = args, dict(kwargs or {}), targets
        batches = microbatch.scatter(whole, self.chunks)
        parts = None
        if reduction_of(loss_fn, reduction) == "mean":
            rows = microbatch.sizes(microbatch.check(whole), self.chunks)
            parts = shares(loss_fn, [batch[2] for batch in batches], rows, weight)
        packed = Loss.pack(loss_fn, parts or [])
        losses, *aux = self._step(whole, batches, packed)
        total = combine(losses, parts)
        return (total, *aux) if aux else total

    def predict(
        self, batches: Iterable[Any], *, in_flight: int | None = None
    ) -> Generator[Any, None, None]:
        """Run the module on one mini-batch after the other, without gradients.

        Mini-batches follow each other through the stages without a gap: the next ones are on
        their way while the caller works on a result. What is asked of the pipe between two
        results comes after those under way, which thus have seen parameters and mode
        (``eval()``), as they were when they were started.

        A failed mini-batch raises in its turn, after the results before it; so does what
        ``batches`` raises. Closing the generator drops what is under way.

        Args:
            batches: mini-batches, each as in ``pipe(batch)``, a tuple as in ``pipe(*batch)``;
                read up to ``in_flight`` ahead.
            in_flight: at most so many mini-batches are read and not yet yielded, which bounds
                memory; by default enough to keep every stage busy.

        Yields:
            What ``pipe`` returns for each, in order.

        Raises:
            TypeError, ValueError: ``in_flight`` is no positive whole number; or in its turn, a
                mini-batch cannot be divided.
            StageError: a layer raised.
            StageLost: a process of the pipeline is gone.
        """
        if in_flight is None:
            in_flight = 2 + -(-self._world.stages // self.chunks)
        if isinstance(in_flight, bool) or not isinstance(in_flight, int) or in_flight < 1:
            raise ValueError(f"in_flight= is a whole number of at least 1, got {in_flight!r}")
        return predict(self._begin, batches, in_flight)

    @torch.no_grad()
    def _begin(self, inputs: Any) -> Step:
        """Start on a mini-batch that no backward pass follows."""
        args = inputs if isinstance(inputs, tuple) else (inputs,)
        batches = microbatch.scatter((args, {}), self.chunks)
        self._require_sound(batches)
        with self._turn:
            step = Step(self, self._order(len(batches)), batches, None)
            step.begin()
        return step

    def _order(self, m: int) -> Order:
        if self._saving is not None:
            self._saving.check()
        grad, step = torch.is_grad_enabled(), next(self._numbers)
        return Order(
            step=step,
            count=step + self._counted_before,
            m=m,
            program="",
            grad=grad,
            inference=torch.is_inference_mode_enabled(),
            context=transport.current_tape() if grad else None,
            training=self.training,
            autocast=AutocastState.capture(),
            check_finite=self.check_finite,
            average=self._average,
            recorded=self._timeline is None or self._timeline.wants_next(),
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

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Mini-batches that are run in here leave their gradients as they are in this replica.

        They add up in ``.grad``, and are averaged over the replicas together with those of the
        next mini-batch that is run outside. As ``DistributedDataParallel.no_sync``.
        """
        before, self._average = self._average, False
        try:
            yield
        finally:
            self._average = before

    def optimizer(
        self,
        cls: Callable[..., torch.optim.Optimizer],
        *,
        groups: Callable[[str], Mapping[str, Any] | None] | None = None,
        **kwargs: Any,
    ) -> PipeOptimizer:
        """Make an optimizer of class ``cls`` in each stage, for its parameters.

        Args:
            cls: such as ``torch.optim.AdamW``; any class whose ``step()`` needs no closure.
            groups: makes parameter groups: called here with each parameter's name, it returns the
                options in which that differs, such as ``{"weight_decay": 0.0}``, or ``None`` if
                it is not to be optimized.
            kwargs: its options, such as ``lr``.

        Raises:
            TypeError, ValueError: ``cls`` refuses the options or parameters, takes a closure, or
                cannot be sent to another process.
        """
        require_sendable(cls, "the class of an optimizer")
        return PipeOptimizer(self, cls, kwargs, groups)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of all parameters."""
        self._everywhere("zero the gradients", inside.zero_grad, set_to_none)

    def parameter_rrefs(self) -> list[Any]:
        """RRefs of all parameters that require grad, for ``DistributedOptimizer``."""
        transport.reference(None)  # refused here, if at all
        found = self._everywhere("name its parameters", inside.parameter_rrefs)
        return [rref for rrefs in found for rref in rrefs]

    # ------------------------------------------------------------------------------ inspection

    def apply_to_stage(self, j: int, fn: Callable[[nn.Module], T]) -> T:
        """Return ``fn(stage_module)``, called in stage ``j`` between mini-batches.

        Args:
            fn: an importable function. What it returns must not be large; tensors are copied.

        Raises:
            IndexError: there is no stage ``j``.
            TypeError: ``fn`` cannot be sent to another process.
            StageError: ``fn`` raised.
        """
        self._world.process(j)
        require_sendable(fn, "what apply_to_stage calls")
        answer = self._stages[j].call("perform", inside.apply, fn)
        (value,) = self._collect([answer], f"call {getattr(fn, '__name__', fn)}")
        return value  # type: ignore[no-any-return]

    def named_parameters_info(self) -> list[inside.ParameterInfo]:
        """Name, shape, dtype, stage and device of each parameter, in the order of the layers.

        A parameter tied across stages is named once, where it comes first.
        """
        found = self._everywhere("name its parameters", inside.parameters_info)
        copies = {(j, name) for tie in self._ties for j, name in tie.names.items()}
        copies -= {(tie.owner, tie.names[tie.owner]) for tie in self._ties}
        return [info for infos in found for info in infos if (info.stage, info.name) not in copies]

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """All parameters and buffers on the driver, under the unpartitioned module's names.

        Where stages are sharded over replicas, all drivers call this at the same time.
        """
        found = self._everywhere("give its state", inside.state_dict)
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

        What a torchgpipe model has saved is taken as well: its names tell its partition.

        Raises:
            RuntimeError: as ``nn.Module.load_state_dict``, before anything has changed.
        """
        if assign:
            raise ValueError("assign=True would replace parameters that optimizers hold")
        shapes = self._everywhere("name its state", inside.state_shapes)
        known = {name: shape for stage in shapes for name, shape in stage.items()}
        state_dict = from_torchgpipe(state_dict, known.keys())
        wrong = misfits({name: _shape(v) for name, v in state_dict.items()}, known, strict)
        if wrong:
            raise RuntimeError("cannot load this state dict into the pipe: " + "\n  ".join(wrong))
        answers = [
            stage.call(
                "perform",
                inside.load_state_dict,
                {k: state_dict[k] for k in own if k in state_dict},
            )
            for stage, own in zip(self._stages, shapes, strict=True)
        ]
        self._collect(answers, "load its state")
        missing = [name for name in known if name not in state_dict]
        unexpected = [name for name in state_dict if name not in known]
        return nn.modules.module._IncompatibleKeys(missing, unexpected)

    def _count(self) -> int:
        """Number of mini-batches so far, also those before a checkpoint."""
        step = next(self._numbers)
        self._numbers = itertools.count(step)
        return step + self._counted_before

    def _set_count(self, count: int) -> None:
        self._counted_before += count - self._count()

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        keep: int | None = None,
        block: bool = True,
        **values: Any,
    ) -> Path | None:
        """Save a checkpoint: the model, and what ``values`` names.

        Each stage writes its own part at once. What comes of it is one checkpoint of
        ``torch.distributed.checkpoint`` under the unpartitioned module's names. It holds the
        random states of all processes and the number of mini-batches too. With several replicas,
        all drivers call this: the first one saves, with the random states of the others.

        Args:
            path: directory of the checkpoints, which all hosts share; or a file ``*.safetensors``
                for the weights alone.
            keep: how many checkpoints stay in the directory; all by default.
            block: whether to wait until it is on the disk. Otherwise everything is copied to host
                memory, and is written while the caller goes on; what fails is raised by the next
                call of the pipe, `save` or `load`, or at the end of ``run``, which waits for it.
            values: by names of the caller's choice, ``optimizer=opt`` and other objects with a
                ``state_dict()`` (schedulers, a ``GradScaler``), ``torch.Generator``, and anything
                made of tensors, numbers, strings, lists, tuples and dicts.

        Returns:
            The checkpoint: where it is now, or will be. ``None`` in all replicas but the first,
            which saves for all.

        Raises:
            TypeError, ValueError: a value or name cannot be saved; the checkpoints there are stay
                as they are, here and below.
            OSError: the driver cannot write.
            StageError: a stage cannot, or does not see the directory.
        """
        if str(path).endswith(weights.SUFFIX):
            self._finish_saving()
            if values or keep is not None:
                raise ValueError(f"a {weights.SUFFIX} file has weights alone, and there is one")
            state = self.state_dict()  # in all replicas, over which it may be spread
            return None if self._world.replica else weights.save(state, Path(path).absolute())
        self._require_whole("pipe.save to a directory")
        return saving.save(self, Path(path).absolute(), keep, block, values)

    def load(self, path: str | os.PathLike[str], **objects: Any) -> dict[str, Any]:
        """Load a checkpoint, and go on exactly where it was saved.

        The pipe may have another balance or number of stages. Nothing that a checkpoint contains
        is run.

        Args:
            path: a checkpoint, or the directory of which to take the newest; or a file
                ``*.safetensors``.
            objects: what was saved under these names: optimizers, and other objects with a
                ``load_state_dict()``.

        Returns:
            The other values that were saved, by their names.

        Raises:
            FileNotFoundError: there is no checkpoint.
            ValueError: it is damaged or does not fit; nothing has changed.
            StageError: a stage could not read its part, from one of these; likewise.
        """
        self._finish_saving()
        self._require_whole("pipe.load")
        return loading.load(self, path, objects)

    def _require_whole(self, what: str) -> None:
        if self._replicas is not None:
            self._replicas.require_whole(what)

    def _finish_saving(self) -> None:
        if self._saving is not None:
            last, self._saving = self._saving, None
            last.wait()

    @contextmanager
    def record(self, every: int = 1) -> Iterator[Timeline]:
        """Record when each stage runs which task; complete once the ``with`` is left.

        Recording takes some microseconds a task and may stay on: of a long run the last 100,000
        tasks of each stage are kept. Times of other hosts are told in the driver's clock, by round
        trips at the start and at the end.

        Args:
            every: record the first step and then each ``every``-th one.

        Raises:
            ValueError: ``every`` is no whole number of at least 1, or the pipe is recording.
        """
        timeline = Timeline(self._setting(), every)
        if self._timeline is not None:
            raise ValueError("the pipe is recording: a timeline inside of another has no steps")
        theirs = self._everywhere("start recording", inside.start_recording)
        first = self._clocks(theirs)
        self._timeline = timeline
        try:
            yield timeline
        finally:
            self._timeline = None
            found = self._everywhere("give its record", inside.stop_recording)
            last = self._clocks(theirs)
            timeline.events = [
                aligned(events, Clock(*seen))
                for events, *seen in zip(found, first, last, strict=True)
            ]

    def memory(self) -> Memory:
        """What each stage holds in parameters, gradients and optimizer state, and its peak.

        Peaks are those since the call before, or since the pipe was made: call it after a few
        steps. A stage on the CPU is measured by its process's resident memory (Linux starts a new
        peak each time; elsewhere it is the process's peak), one on a GPU by torch's allocator.
        Whatever else these processes do, another pipe too, counts as well: in the first step, the
        code it loads, and always what glibc's allocator keeps of freed memory. With
        ``MALLOC_MMAP_THRESHOLD_=32768`` in the environment that is nothing, and a step is slower.

        Returns:
            `Memory`: rows in bytes (``.stages``), and a table as ``str()``.
        """
        return Memory(self._everywhere("measure its memory", memory.look))

    def _setting(self) -> Setting:
        processes = [self._world.process(j) for j in range(self._world.stages)]
        places = [
            f"{process.host}, {device}"
            for process, device in zip(processes, self._devices, strict=True)
        ]
        return Setting(self.checkpoint, self.balance, places, socket.gethostname())

    def _clocks(self, theirs: Sequence[str]) -> list[Seen]:
        """How far each stage's clock is ahead of the driver's: not at all, if it is the same."""

        def ask(j: int) -> float:
            answer = self._stages[j].call("perform", clock.read)
            return float(transport.value_of(answer, f"stage {j} to tell the time"))

        ours = clock.identity()
        return [
            Seen(0.0, 0.0) if their == ours else clock.look(functools.partial(ask, j))
            for j, their in enumerate(theirs)
        ]

    def parameters(self, recurse: bool = True) -> NoReturn:
        """Not to be had on the driver: parameters live in the stages."""
        raise TypeError(
            "a pipe's parameters live in its stages: use pipe.optimizer(cls, **options), "
            "pipe.state_dict() or pipe.apply_to_stage(j, fn)"
        )

    def to(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not to be had: each stage has its device and type, and the driver holds nothing."""
        raise TypeError(
            "a pipe's layers live in its stages and are not moved or converted from the driver: "
            "say where by Pipe(..., devices=[...]), and convert the module before it is given"
        )

    cuda = cpu = half = float = double = bfloat16 = type = to

    def extra_repr(self) -> str:
        rows = [
            f"(stage {j}): {count} layers on {device} at {self._world.process(j).host}"
            for j, (count, device) in enumerate(zip(self.balance, self._devices, strict=True))
        ]
        return "\n".join([f"chunks={self.chunks}, checkpoint={self.checkpoint!r}", *rows])

    def __len__(self) -> int:
        """Number of layers."""
        return sum(self.balance)

    def __getitem__(self, k: int) -> Layer:
        """What and where layer ``k`` is; the layer itself is in its stage."""
        return self._layers[k]


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _check_options(world: World, chunks: Any, checkpoint: str, devices: Any) -> None:
    if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
        raise ValueError(f"chunks= is a whole number of at least 1, got {chunks!r}")
    schedule.checkpointed(1, checkpoint)
    if devices is not None and len(devices) != world.stages:
        raise ValueError(f"devices= names one for each of {world.stages} stages: {devices}")
