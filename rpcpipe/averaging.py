"""Averaging: how the gradients of a stage become the average over its replicas.

A mini-batch has one backward pass a micro-batch, and the gradients are averaged once: all but the
last pass leave them in ``.grad``; during the last one (micro-batch 0), each bucket of parameters
is sent as soon as it is complete, while the pass goes on. That is `DistributedDataParallel` with
``no_sync`` for all but the last, prepared right before the last as torch's own pipelining does
it (torch 2.13, ``_PipelineStageBase.backward_maybe_with_nosync``), so that it does not matter
whether what it sees was computed in the forward pass or again.

    B3          B2          B1          B0  touch ─┬─▶ every parameter
    .grad += g  .grad += g  .grad += g             └─▶ the input's gradient leaves the stage when
                                                       the pass is over, before the average is in

The *touch* is a node before all parameters that gives none of them a gradient. With it, every
parameter takes part in the last pass: those that micro-batch 0 does not use, and all of them
where no gradient reaches the stage, or the step has failed. So each replica averages once in each
step, whatever happens in it, and no replica waits for another for ever.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.parallel import DistributedDataParallel

__all__ = ["Averaging", "Reduced", "Sharded", "averaging_of", "like", "local", "whole"]


class Averaging:
    """Of a stage that has no replicas, or whose replicas are its user's concern: none."""

    kind = "none"

    def backward(
        self,
        step: int,
        outputs: Sequence[Tensor],
        gradients: Sequence[Tensor],
        last: bool,
        done: Callable[[], None],
    ) -> None:
        """The backward pass of one micro-batch.

        Args:
            outputs: those that a gradient reaches; there may be none.
            last: whether the gradients are averaged in it.
            done: called when gradients are where they belong, but for the average.
        """
        if outputs:
            torch.autograd.backward(outputs, gradients)
        done()

    def make_up(self, step: int) -> None:
        """Do for a step that has failed here what other replicas wait for."""

    def average(self, tensor: Tensor) -> Tensor:
        """The average of a tensor that all replicas have."""
        return tensor


class Reduced(Averaging):
    """By ``DistributedDataParallel``, whose hooks are on the parameters.

    What it does in its ``forward`` is left out: micro-batches may be more in one replica than in
    another. Buffers become those of the first replica after each averaged backward pass instead
    of before the next forward pass; with ``broadcast_buffers=False`` they do not.

    Args:
        ddp: takes no part in averaging by itself any more.
        leave_out: of its parameters, one that gets no gradient.
    """

    kind = "ddp"

    def __init__(self, ddp: DistributedDataParallel, leave_out: Tensor | None = None) -> None:
        if ddp.static_graph:
            raise ValueError(
                "DistributedDataParallel(static_graph=True) counts on one backward pass for each "
                "forward pass, and a stage runs several: leave static_graph out"
            )
        ddp.require_backward_grad_sync = False
        ddp.require_forward_param_sync = False
        _outlive(ddp.process_group, (ddp.reducer, ddp.logger))
        self._ddp = ddp
        self._parameters = [
            p for p in ddp._module_parameters if p.requires_grad and p is not leave_out
        ]
        with torch.enable_grad():
            self._ends = [p.view_as(p).grad_fn.next_functions[0][0] for p in self._parameters]
        buffers = getattr(ddp, "forward_sync_buffers", getattr(ddp, "broadcast_buffers", True))
        self._buffers = buffers and any(True for _ in ddp.module.buffers())
        self._reduced = -1  # the last step whose gradients are averaged
        self._lost = False  # whether a reduction was begun and cannot be ended

    @staticmethod
    def of(module: nn.Module, group: dist.ProcessGroup) -> Reduced:
        """That of a module that nobody has wrapped."""
        # A parameter that no replica has used is to keep no gradient: that takes finding those.
        # With none to find, each process would warn its user of that once. Hence the idle one.
        with_idle = nn.Module()
        with_idle.partition = module
        trainable = next(p for p in module.parameters() if p.requires_grad)
        with_idle.idle = nn.Parameter(trainable.detach().new_zeros(0))
        kwargs: Any = {"process_group": group, "find_unused_parameters": True}
        return Reduced(DistributedDataParallel(with_idle, **kwargs), leave_out=with_idle.idle)

    def backward(
        self,
        step: int,
        outputs: Sequence[Tensor],
        gradients: Sequence[Tensor],
        last: bool,
        done: Callable[[], None],
    ) -> None:
        if not last:
            super().backward(step, outputs, gradients, last, done)
            return
        self._reduced = step
        touch = _touch(self._parameters, done)
        roots, seeds = [*outputs, touch], [*gradients, torch.ones(())]
        self._ddp.reducer.prepare_for_backward(roots)
        with self._recording() as reached:
            try:
                torch.autograd.backward(roots, seeds)
            except BaseException:
                with suppress(Exception):  # what comes of the first failure; see `make_up`
                    self._complete(reached)
                raise
        if self._buffers:
            self._ddp._sync_buffers()

    @contextmanager
    def _recording(self) -> Iterator[set[int]]:
        """Of each parameter, whether its gradient has been handed over."""
        reached: set[int] = set()
        handles = [
            end.register_hook(lambda *_, k=k: reached.add(k)) for k, end in enumerate(self._ends)
        ]
        try:
            yield reached
        finally:
            for handle in handles:
                handle.remove()

    def _complete(self, reached: set[int]) -> None:
        """Hand over what a pass that has failed did not come to; others wait for that."""
        self._lost = True
        missing = [p for k, p in enumerate(self._parameters) if k not in reached]
        if missing:
            torch.autograd.backward(_touch(missing, _nothing))
        # If the pass has failed between the last parameter and its end, nobody waited.
        self._ddp.reducer._reset_state()
        if self._buffers:
            self._ddp._sync_buffers()
        self._lost = False

    def make_up(self, step: int) -> None:
        if self._lost:
            raise RuntimeError("the average over replicas was begun and cannot be ended")
        if self._reduced < step:
            with torch.enable_grad():
                self.backward(step, [], [], True, _nothing)

    def average(self, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total, group=self._ddp.process_group)
        return total.div_(dist.get_world_size(self._ddp.process_group))


class Sharded(Averaging):
    """By ``fully_shard`` (FSDP2): each replica holds a part of each parameter.

    Its layers gather their parameters in each forward pass (unless ``reshard_after_forward`` is
    false), hence all replicas need the same number of micro-batches, and none can make up for a
    step that failed.
    """

    kind = "fsdp"

    def __init__(self, modules: Sequence[Any]) -> None:
        self._modules = modules

    def backward(
        self,
        step: int,
        outputs: Sequence[Tensor],
        gradients: Sequence[Tensor],
        last: bool,
        done: Callable[[], None],
    ) -> None:
        if last and not outputs:
            raise RuntimeError(
                "no gradient reaches a stage that is sharded over its replicas in the last "
                "backward pass, in which they are averaged: freeze its parameters, or do not "
                "shard it"
            )
        for module in self._modules:
            module.set_requires_gradient_sync(last, recurse=False)
            module.set_reshard_after_backward(last, recurse=False)
            module.set_is_last_backward(last)
        super().backward(step, outputs, gradients, last, done)

    def make_up(self, step: int) -> None:
        raise RuntimeError("a stage that is sharded over its replicas cannot make up for a step")


def averaging_of(module: nn.Module) -> Averaging | None:
    """That of a module which its user has wrapped for it, ``None`` if he has not.

    Raises:
        TypeError: it is wrapped in something that has no place in a stage.
    """
    for part in module.modules():
        if isinstance(part, DistributedDataParallel):
            return Reduced(part)
        if type(part).__name__ == "FullyShardedDataParallel":
            raise TypeError(
                "FullyShardedDataParallel renames and flattens what a stage holds by name: use "
                "torch.distributed.fsdp.fully_shard"
            )
    fsdp = sys.modules.get("torch.distributed.fsdp")  # seconds to import, if nobody has
    sharded = [p for p in module.modules() if fsdp and isinstance(p, fsdp.FSDPModule)]
    return Sharded(sharded) if sharded else None


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor of which this replica may hold a part; all replicas ask at the same time."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def like(value: Tensor, held: Any) -> Tensor:
    """A whole tensor, as it is held here: of one that is sharded, the part of this replica."""
    if not hasattr(held, "full_tensor"):
        return value
    from torch.distributed.tensor import distribute_tensor

    value = value.to(held.device)  # each replica has all of it: nothing is sent
    return distribute_tensor(value, held.device_mesh, held.placements, src_data_rank=None)


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this replica holds."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _outlive(group: dist.ProcessGroup, others: Iterable[Any]) -> None:
    """Hold the group for longer than any of them, which hold it too.

    Whoever lets it go last waits for what is under way in it, whose thread may need the
    interpreter's lock then. A `ProcessGroup` gives that up before; torch's reducer (2.13) does not.
    """
    for other in others:
        weakref.finalize(other, _nothing, group).atexit = False


def _nothing(*_: Any) -> None:
    pass


def _touch(parameters: Iterable[Tensor], done: Callable[[], None]) -> Tensor:
    return _Touch.apply(done, *parameters)  # type: ignore[no-any-return, no-untyped-call]


class _Touch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, done: Callable[[], None], *parameters: Tensor) -> Tensor:
        ctx.done, ctx.n = done, len(parameters)
        return torch.zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> Any:
        # Every parameter waits for this node. So of what is called when the pass is over, this
        # comes before DDP's wait for the average.
        torch.autograd.Variable._execution_engine.queue_callback(ctx.done)
        return None, *[None] * ctx.n
