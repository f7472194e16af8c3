"""A profile is the cost of each layer, in seconds or bytes, found by running them in order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import add
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from rpcpipe import log
from rpcpipe.balance.partition import check_stages, partition
from rpcpipe.balance.sandbox import alias, cuda_devices, preserved_rng, sandbox, storages
from rpcpipe.skip.namespace import Key
from rpcpipe.skip.skippable import pop_keys, stash_keys
from rpcpipe.skip.store import SkipStore, use_store
from rpcpipe.skip.verify import verify_skippables

__all__ = [
    "by_size",
    "by_time",
    "check",
    "layer_activations",
    "layer_sizes",
    "layer_times",
    "pass_times",
    "weight_bytes",
    "whole_times",
]

_WARM_UPS = 2  # the first run loads and tunes kernels, the second allocates what the rest reuse

Skips = dict[Key, Tensor | None]


def by_time(
    n: int,
    module: nn.Sequential,
    sample: Any,
    *,
    repeats: int = 5,
    bandwidth: float | None = None,
) -> list[int]:
    """Balance by the time each layer takes for its forward and backward pass.

    Layers run one at a time and in order, in training mode, on the devices they are on: all of
    them twice to warm up and then ``repeats`` times, of which the median counts. A layer whose
    output needs no gradient is timed forward only. Skips work; a stashed tensor's gradient counts
    where it was stashed. The module, its gradients and the random number generators are exactly
    as before when the call returns or raises. Besides the module there is memory in use for one
    layer (a copy of it, its gradients, its activations) and for skips.

    Method: torchgpipe's ``balance_by_time`` (arXiv 2004.09910), with an exact partition.

    Args:
        n: number of stages.
        module: the layers.
        sample: one micro-batch: what the first layer is called with, a tensor or a pytree with
            tensors of shape (rows of the micro-batch, ...) on the device of that layer.
        repeats: timed runs of each layer.
        bandwidth: bytes per second between stages. When given, a link between two stages counts
            beside them with the bytes of what crosses it and of the gradient that comes back.
            What skips carry does not count: they go straight to where they are popped.

    Returns:
        The balance: number of layers of each stage; length n.

    Raises:
        BalanceError: there are more stages than layers, or n < 1.
        TypeError: ``module`` is not an ``nn.Sequential``, or its skips do not match.
        ValueError: parts of the module are on the meta device or not initialised yet, or
            ``repeats`` or ``bandwidth`` is not positive.
    """
    check(n, module)
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1; got {repeats}")
    if bandwidth is not None and not bandwidth > 0:
        raise ValueError(f"bandwidth must be positive, in bytes per second; got {bandwidth}")
    if any(t.is_meta for t in _tensors_of(module, sample)):
        raise ValueError(
            "by_time runs the layers, so that module and sample must be on a real device, not "
            "on meta; use rpcpipe.balance.by_size, which needs no memory for them"
        )
    seconds, sent = layer_times(module, sample, repeats)
    if bandwidth is None:
        return partition(seconds, n)
    return partition(seconds, n, boundary=[size / bandwidth for size in sent[:-1]])


def by_size(
    n: int,
    module: nn.Sequential,
    sample: Any,
    *,
    param_factor: float = 2.0,
    chunks: int = 1,
) -> list[int]:
    """Balance by the memory each layer takes for training.

    A layer costs the bytes of its parameters times ``param_factor`` (frozen ones and buffers
    once) and those of its activations: the distinct memory its operations save for the backward
    pass, and its output. Memory that an earlier layer was charged for is not charged again.

    Nothing is computed: the layers run on fake tensors, which have a shape and a device but no
    memory. So it works for modules that fit on no device, also on the meta device, which then
    stands for the device of the sample. A module that needs values (such as ``x.nonzero()``)
    runs for real, at the cost of its whole forward pass. The module is exactly as before when
    the call returns or raises.

    Method: torchgpipe's ``balance_by_size`` (arXiv 2004.09910), which measures allocated
    GPU memory, and so on GPUs only; with an exact partition.

    Args:
        n: number of stages.
        module: the layers.
        sample: one micro-batch: what the first layer is called with, a tensor or a pytree with
            tensors of shape (rows of the micro-batch, ...); may be on the meta device.
        param_factor: bytes held for each byte of parameters: 2 for SGD (parameter, gradient), 3
            with momentum, 4 for Adam (two moments).
        chunks: micro-batches whose activations are held at once: 1 when the pipe checkpoints,
            else the pipe's ``chunks``.

    Returns:
        The balance: number of layers of each stage; length n.

    Raises:
        BalanceError: there are more stages than layers, or n < 1.
        TypeError: ``module`` is not an ``nn.Sequential``, or its skips do not match.
        ValueError: parts of the module are not initialised yet, or it is on the meta device and
            needs values.
    """
    check(n, module)
    return partition(layer_sizes(module, sample, param_factor, chunks), n)


def check(n: int, module: nn.Sequential) -> None:
    """Raise for what cannot be profiled or divided, before anything runs."""
    if not isinstance(module, nn.Sequential):
        raise TypeError(f"module must be an nn.Sequential; got {type(module).__name__}")
    check_stages(n, len(module))
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if nn.parameter.is_lazy(tensor):
            raise ValueError(f"{name} is not initialised; call the lazy module once before")
    verify_skippables(module)


def _tensors_of(module: nn.Module, sample: Any) -> list[Tensor]:
    return [*module.parameters(), *module.buffers(), *_tensors(sample)]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _on_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    return pytree.tree_map_only(Tensor, function, tree)


@contextmanager
def _training(module: nn.Module, stand_in: Callable[[Tensor], Tensor] = alias) -> Iterator[None]:
    """A sandbox in which the module is in training mode, whatever mode the caller is in."""
    with torch.inference_mode(False), torch.enable_grad(), sandbox(module, stand_in):
        module.train()
        yield


# ---- seconds


class _Run(NamedTuple):
    """One run of one layer: how long it took, and what it made, detached."""

    forward: float
    backward: float
    output: Any
    skips: Skips


class _Times(NamedTuple):
    """Of one layer in one run: seconds, and bytes exchanged behind it."""

    forward: float
    backward: float
    sent: int
    skips: dict[Key, int]  # bytes of what it stashes


class PassTimes(NamedTuple):
    """A list of one value a layer each."""

    forward: list[float]
    backward: list[float]
    sent: list[int]
    skips: list[dict[Key, int]]


def layer_times(module: nn.Sequential, sample: Any, repeats: int) -> tuple[list[float], list[int]]:
    """Seconds of each layer, and bytes exchanged behind it: forward, and back as a gradient."""
    times = pass_times(module, sample, repeats)
    return list(map(add, times.forward, times.backward)), times.sent


def pass_times(module: nn.Sequential, sample: Any, repeats: int) -> PassTimes:
    """The same with the seconds of each layer's forward and backward pass apart."""
    devices = cuda_devices(_tensors_of(module, sample))
    with preserved_rng(devices):
        # Sweeps over all layers, so that a busy moment of the machine falls on one run of many
        # layers, and not on all runs of one.
        times = _WARM_UPS + repeats
        work = log.progress(range(times), times, f"timing {len(module)} layers")
        sweeps = [_sweep(module, sample, devices) for _ in work]
    counted = sweeps[_WARM_UPS:]
    log.logger.info("timed %d layers, %d times each", len(module), len(sweeps))
    forward = [median(run.forward for run in runs) for runs in zip(*counted, strict=True)]
    backward = [median(run.backward for run in runs) for runs in zip(*counted, strict=True)]
    last = counted[-1]
    return PassTimes(forward, backward, [run.sent for run in last], [run.skips for run in last])


def _sweep(module: nn.Sequential, sample: Any, devices: list[torch.device]) -> list[_Times]:
    times = []
    value, skips = sample, Skips()
    for layer in module:
        with _training(layer):
            run = _run(layer, value, skips, devices)
        value = run.output
        skips |= run.skips
        sent = sum(t.nbytes * (1 + t.requires_grad) for t in _tensors(value))
        stashed = {key: 0 if t is None else t.nbytes for key, t in run.skips.items()}
        times.append(_Times(run.forward, run.backward, sent, stashed))
    return times


def whole_times(
    module: nn.Sequential, sample: Any, repeats: int, held: int = 1
) -> tuple[float, float]:
    """Seconds of the whole module's forward and backward pass.

    Its layers one by one take longer, each with an engine to start, or less, where what a graph
    holds is memory that was not in use.

    Args:
        held: graphs there are at once: so many forward passes, then as many backward passes.
    """
    devices = cuda_devices(_tensors_of(module, sample))
    forward: list[float] = []
    backward: list[float] = []
    rounds = range(1 + -(-repeats // held))
    with preserved_rng(devices), _training(module):
        for _ in log.progress(rounds, len(rounds), "timing the whole model"):
            outputs = []
            for _ in range(held):
                given = _on_tensors(_received, sample)
                with use_store(SkipStore()):
                    output, seconds = _timed(lambda given=given: module(given), devices)  # type: ignore[misc]
                outputs.append(output)
                forward.append(seconds)
            del given, output
            while outputs:
                backward.append(_backward(_tensors(outputs.pop()), devices))
    return median(forward[held:]), median(backward[held:])  # without the first, which warms up


def _backward(tensors: list[Tensor], devices: list[torch.device]) -> float:
    ends = [t for t in tensors if t.requires_grad]
    grads = [torch.ones_like(t) for t in ends]
    return _timed(lambda: torch.autograd.backward(ends, grads), devices)[1] if ends else 0.0


def _run(layer: nn.Module, value: Any, skips: Skips, devices: list[torch.device]) -> _Run:
    popped = {key for part in layer.modules() for key in pop_keys(part)}
    stashed = {key for part in layer.modules() for key in stash_keys(part)} - popped
    store = SkipStore({key: _on_tensors(_received, skips[key]) for key in popped & skips.keys()})
    given = _on_tensors(_received, value)
    with use_store(store):
        output, forward = _timed(lambda: layer(given), devices)
    made = {key: store.take(key) for key in stashed}
    backward = _backward(_tensors([output, made]), devices)
    return _Run(forward, backward, _on_tensors(_detached, output), _on_tensors(_detached, made))


def _timed(call: Callable[[], Any], devices: list[torch.device]) -> tuple[Any, float]:
    _wait(devices)
    start = time.perf_counter()
    result = call()
    _wait(devices)
    return result, time.perf_counter() - start


def _wait(devices: list[torch.device]) -> None:
    for device in devices:
        torch.cuda.synchronize(device)


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _received(tensor: Tensor) -> Tensor:
    """A copy that is not a leaf, so that layers may change it in place."""
    return _detached(tensor).clone()


# ---- bytes


def layer_sizes(
    module: nn.Sequential, sample: Any, param_factor: float, chunks: int
) -> list[float]:
    """Bytes each layer holds in training: parameters by the factor, activations by the chunks."""
    with preserved_rng(cuda_devices(_tensors_of(module, sample))):
        activations = layer_activations(module, sample)
    return [
        weight_bytes(layer, param_factor) + chunks * size
        for layer, size in zip(module, activations, strict=True)
    ]


def weight_bytes(layer: nn.Module, param_factor: float) -> float:
    parameters = sum(
        p.nbytes * (param_factor if p.requires_grad else 1) for p in layer.parameters()
    )
    return parameters + sum(b.nbytes for b in layer.buffers())


def layer_activations(module: nn.Sequential, sample: Any) -> list[int]:
    """Bytes each layer adds to what is held for the backward pass, its output included."""
    return [holdings.added for holdings in layer_holdings(module, sample)]


class Holdings(NamedTuple):
    """Bytes one layer adds to what is held for the backward pass, each memory counted once."""

    added: int  # saved by its operations, or its result
    saved: int  # by its operations alone
    given: int  # of ``saved``, what it was given: no layer before had saved that


def layer_holdings(module: nn.Sequential, sample: Any) -> list[Holdings]:
    tensors = _tensors_of(module, sample)
    real = [t.device for t in tensors if not t.is_meta]
    home = real[-1] if real else torch.device("cpu")  # the sample's, if it has one

    def fake(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=home if tensor.is_meta else tensor.device)

    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            return _count(module, sample, fake)
    except Exception as error:
        if len(real) < len(tensors):
            raise ValueError(
                "by_size could not run the module without values, which module and sample on "
                f"the meta device do not have: {error}; pass the balance, or put them on a "
                "real device"
            ) from error
    return _count(module, sample, alias)


def _count(
    module: nn.Sequential, sample: Any, stand_in: Callable[[Tensor], Tensor]
) -> list[Holdings]:
    found = []
    with _training(module, stand_in), use_store(SkipStore()):
        weights = storages([*module.parameters(), *module.buffers()]).keys()
        held: dict[int, torch.UntypedStorage] = {}  # held, for else an identity may come again
        saved: set[int] = set()  # what of it operations have asked for

        def hold(tensor: Tensor) -> Tensor:
            held.update(storages([tensor]))
            return tensor

        def save(tensor: Tensor) -> Tensor:
            saved.update(storages([tensor]).keys() - weights)
            return hold(tensor)

        value = _on_tensors(
            lambda t: stand_in(t).requires_grad_(t.requires_grad).clone(),  # no leaf, no change
            sample,
        )
        for layer in module:
            before, saved_before = held.keys() | weights, set(saved)
            given = storages(_tensors(value))
            with saved_tensors_hooks(save, lambda tensor: tensor):
                value = layer(value)
            _on_tensors(hold, value)
            new = held.keys() - before, saved - saved_before, (saved - saved_before) & given.keys()
            found.append(Holdings(*(sum(held[key].nbytes() for key in keys) for keys in new)))
    return found
