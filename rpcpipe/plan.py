"""Plan: balance, chunks and checkpoint mode, chosen by what they are predicted to take."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rpcpipe import log, microbatch, schedule, trees
from rpcpipe.balance.partition import even, partition
from rpcpipe.balance.profile import check, layer_holdings, pass_times, weight_bytes, whole_times
from rpcpipe.schedule import Costs
from rpcpipe.skip.skippable import pop_keys

__all__ = ["Candidate", "Plan", "plan"]

logger = log.logger

MIB = 2**20
SHOWN = 12  # candidates in the table
GRAPHS = 4  # held at once to see what that costs: more cost no more
BLENDS = (0.25, 0.5, 0.75)  # of time and memory, for balances in between


@dataclass(frozen=True)
class Candidate:
    """A way to set up the pipe, and what it is predicted to take."""

    balance: tuple[int, ...]
    chunks: int
    checkpoint: str
    seconds: float
    """Of a forward and backward pass of the mini-batch."""
    bubble: float
    """The fraction of the stages' time that is idle, 0 to 1."""
    memory: tuple[int, ...]
    """For each stage, bytes of tensors held at once at most: parameters, gradients, optimizer
    state, activations."""


@dataclass(frozen=True)
class Plan:
    """The fastest candidate that fits, and all others; ``Pipe(module, world, **plan.options)``."""

    best: Candidate
    candidates: list[Candidate]
    """All of them, the fastest first."""
    limit: int | None
    """Bytes a stage may hold."""

    @property
    def options(self) -> dict[str, Any]:
        """``balance``, ``chunks`` and ``checkpoint``, as `Pipe` takes them."""
        best = self.best
        return {
            "balance": list(best.balance),
            "chunks": best.chunks,
            "checkpoint": best.checkpoint,
        }

    def __str__(self) -> str:
        """A table of the fastest candidates, one for each chunks and checkpoint mode, and why."""
        chosen: dict[tuple[int, str], Candidate] = {}
        for c in [self.best, *self.candidates]:
            chosen.setdefault((c.chunks, c.checkpoint), c)
        rows = sorted(chosen.values(), key=lambda c: c.seconds)
        shown = [c for c in rows if c is self.best or rows.index(c) < SHOWN]
        head = ["", "balance", "chunks", "checkpoint", "ms a step", "bubble", "MiB in a stage"]
        table = [head, *(self._row(c) for c in shown)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
        return "\n".join([*lines, *self._reason()])

    def _row(self, c: Candidate) -> list[str]:
        mark = "->" if c is self.best else "" if _fits(c, self.limit) else "x"
        return [
            mark, str(list(c.balance)), str(c.chunks), c.checkpoint, f"{1e3 * c.seconds:.1f}",
            f"{c.bubble:.0%}", " ".join(f"{size / MIB:.1f}" for size in c.memory),
        ]  # fmt: skip

    def _reason(self) -> Iterator[str]:
        best, fastest = self.best, self.candidates[0]
        yield (
            f"-> balance={list(best.balance)}, chunks={best.chunks}, "
            f"checkpoint={best.checkpoint!r}: the fastest of {len(self.candidates)} candidates"
            + (f" with at most {self.limit / MIB:.1f} MiB in a stage" if self.limit else "")
        )
        if fastest is not best:
            j = max(range(len(fastest.memory)), key=fastest.memory.__getitem__)
            yield (
                f"x  the fastest of all takes {1e3 * fastest.seconds:.1f} ms, but "
                f"{fastest.memory[j] / MIB:.1f} MiB in stage {j}"
            )


def plan(
    model: nn.Sequential,
    sample: Any,
    stages: int,
    *,
    memory: int | None = None,
    bandwidth: float | None = None,
    chunks: Sequence[int] | None = None,
    param_factor: float = 4.0,
    overhead: float | Callable[[float], float] = 5e-4,
    latency: float = 1e-3,
    threads: int | None = None,
    repeats: int = 3,
) -> Plan:
    """Choose balance, chunks and checkpoint mode for a model, by measuring its layers here.

    For each number of micro-batches, every layer is timed on one of them, forward and backward,
    and the bytes it holds are counted (`balance.by_time` and `balance.by_size` say how). The whole
    model is timed, too, and the times of the layers are scaled to sum up to its. Balances by time,
    by memory, in between and even are then put through the schedule on paper, in every checkpoint
    mode. The model is left as it was. Takes about twenty times as long as a step without a pipe.

    What is predicted is the forward and backward pass, by stages as fast as this machine's; loss
    and optimizer are not in it, nor what processes of one machine take from each other (cores,
    memory bandwidth), but for what ``overhead`` says. Memory is that of tensors: what code and
    libraries take, what kernels work with, and what an allocator keeps come on top. Micro-batches
    of another size give batch norm other statistics: then compare losses, too.

    Args:
        model: the layers, on the device they are measured on; the ``meta`` device does not do.
        sample: a whole mini-batch: what the first layer is called with, tensors or a pytree of
            tensors, of shape (rows of the mini-batch, ...).
        stages: number of stages ``n``.
        memory: bytes that a stage may hold.
        bandwidth: bytes per second from one process to the next, each way, while both work on;
            without it, that takes no time.
        chunks: numbers of micro-batches to try; by default powers of two up to ``8 * stages``.
        param_factor: bytes held for each byte of parameters: 2 for SGD (parameter, gradient), 3
            with momentum, 4 for Adam (two moments).
        overhead: seconds a task takes in its stage beside its layers: messages, Python; or a
            function that tells them by the bytes that the task is given and sends.
        latency: seconds from one process to the next, also from the driver and back to it, however
            small a message is. ``benchmarks/plan.py`` measures both.
        threads: of a stage; by default what ``run`` gives each of ``stages`` on this host.
        repeats: timed runs of each layer.

    Returns:
        `Plan`: ``str()`` shows the candidates and the reason.

    Raises:
        BalanceError: there are more stages than layers, or ``stages`` is below 1.
        TypeError: ``model`` is not an ``nn.Sequential``, or its skips do not match.
        ValueError: nothing fits into ``memory``; ``model`` is on the meta device; an argument is
            not as described.
        Exception: what a layer raised for the largest micro-batch; smaller ones that it raises
            for are left out.
    """
    check(stages, model)
    rows = microbatch.check(sample)
    counts = _counts(chunks, rows, stages)
    _check_positive(memory=memory, bandwidth=bandwidth, repeats=repeats, threads=threads)
    beside = overhead if callable(overhead) else _constant(overhead)
    _check_not_negative(latency=latency, overhead=beside(0.0))
    held = [t for t in [*model.parameters(), *model.buffers()] if t.is_meta]
    if held or any(isinstance(t, Tensor) and t.is_meta for t in pytree.tree_leaves(sample)):
        raise ValueError("plan() times the layers: put model and sample on a device, not on meta")
    found: list[Candidate] = []
    with _as_in_a_stage(threads or max(1, len(os.sched_getaffinity(0)) // stages)):
        for m in counts:
            try:
                profile = _profile(model, sample, m, param_factor, repeats)
            except Exception as exc:
                # Batch norm, for one, refuses a micro-batch of one row; fewer may do.
                logger.warning("plan: chunks=%d left out, the model raised %r", m, exc)
                if not found:
                    raise
                break
            logger.info("plan: profiled %d layers for chunks=%d", len(model), m)
            found += _candidates(profile, m, stages, _Way(bandwidth, latency, beside))
    found.sort(key=lambda c: (c.seconds, max(c.memory)))
    best = next((c for c in found if _fits(c, memory)), None)
    if best is None:
        least = min(found, key=lambda c: max(c.memory))
        raise ValueError(
            f"no plan fits into memory={memory} bytes a stage: the smallest takes "
            f"{max(least.memory)}, with balance={list(least.balance)}, chunks={least.chunks}, "
            f"checkpoint={least.checkpoint!r}; give more stages or a larger limit"
        )
    return Plan(best, found, memory)


class _Layer(NamedTuple):
    """One layer on one micro-batch: seconds, and bytes."""

    forward: float
    backward: float
    sent: float  # one way
    saved: float  # from the forward to the backward pass
    given: float  # of that, what it was given
    weights: float


class _Skip(NamedTuple):
    """What one layer stashes and a later one pops; bytes of one micro-batch."""

    stashed: int
    popped: int
    size: float


class _Way(NamedTuple):
    """What it takes to get from one process to the next."""

    bandwidth: float | None
    latency: float
    overhead: Callable[[float], float]  # of a task in its stage, by bytes

    def seconds(self, size: float) -> float:
        return self.latency + (size / self.bandwidth if self.bandwidth else 0.0)


class _Profile(NamedTuple):
    layers: dict[str, list[_Layer]]  # by checkpoint mode
    skips: list[_Skip]
    given: float  # bytes of a micro-batch

    def entering(self, first: int, end: int) -> float:
        """Bytes that a stage of the layers from ``first`` to before ``end`` is given."""
        skips = sum(s.size for s in self.skips if s.stashed < first <= s.popped < end)
        return (self.layers["never"][first - 1].sent if first else self.given) + skips


def _profile(model: nn.Sequential, sample: Any, m: int, factor: float, repeats: int) -> _Profile:
    batch = microbatch.scatter(sample, m)[0]
    forward, backward, exchanged, stashed = pass_times(model, batch, repeats)
    holdings = layer_holdings(model, batch)
    weights = [weight_bytes(layer, factor) for layer in model]
    sent = [bytes_ / 2 for bytes_ in exchanged]
    saved, given = [h.saved for h in holdings], [h.given for h in holdings]
    one = list(map(_Layer, forward, backward, sent, saved, given, weights))
    layers = {
        mode: _in_a_row(one, model, batch, repeats, m if mode == "never" else 1)
        for mode in ("never", "always")
    }
    layers["except_last"] = layers["always"]
    entering = trees.nbytes(batch)
    popped = {
        key: k
        for k, layer in enumerate(model)
        for part in layer.modules()
        for key in pop_keys(part)
    }
    skips = [
        _Skip(k, popped[key], size)
        for k, sizes in enumerate(stashed)
        for key, size in sizes.items()
    ]
    return _Profile(layers, skips, entering)


def _in_a_row(
    layers: list[_Layer], model: nn.Sequential, batch: Any, repeats: int, graphs: int
) -> list[_Layer]:
    """The layers with times scaled to those of the whole model, with so many graphs at once."""
    size = sum(layer.saved for layer in layers)
    fitting = int(psutil.virtual_memory().available / 2 / (size or 1))
    held = max(1, min(graphs, GRAPHS, fitting))
    try:
        forward, backward = whole_times(model, batch, repeats, held)
    except torch.OutOfMemoryError:  # one layer at a time is all that fits
        return layers
    f = forward / (sum(layer.forward for layer in layers) or 1.0)
    b = backward / (sum(layer.backward for layer in layers) or 1.0)
    return [x._replace(forward=f * x.forward, backward=b * x.backward) for x in layers]


def _candidates(profile: _Profile, m: int, n: int, way: _Way) -> Iterator[Candidate]:
    for mode in schedule.MODES:
        for balance in _balances(profile, m, n, mode, way.bandwidth):
            cuts = list(pairwise(accumulate(balance, initial=0)))
            stages = [profile.layers[mode][a:b] for a, b in cuts]
            entering = [profile.entering(*cut) for cut in cuts]
            memory = tuple(_memory(*each, m, mode) for each in zip(stages, entering, strict=True))
            costs = [
                _costs(stage, way.overhead(size + stage[-1].sent))
                for stage, size in zip(stages, entering, strict=True)
            ]
            links = [*map(way.seconds, [profile.given, *(stage[-1].sent for stage in stages)])]
            yield Candidate(balance, m, mode, *_predict(costs, links, m, mode), memory)


def _balances(
    profile: _Profile, m: int, n: int, mode: str, bandwidth: float | None
) -> list[tuple[int, ...]]:
    """Distinct balances worth a look: the best by time, by memory and in between, an even one."""
    layers = profile.layers[mode]
    times = [x.forward * (1 + bool(schedule.checkpointed(m, mode))) + x.backward for x in layers]
    held = m if mode == "never" else 1
    sizes = [x.weights + held * x.saved for x in layers]
    links = [2 * x.sent / bandwidth for x in layers[:-1]] if bandwidth else None
    total, bytes_ = sum(times) or 1.0, sum(sizes) or 1.0
    blends = [
        [
            part * size / bytes_ + (1 - part) * t / total
            for t, size in zip(times, sizes, strict=True)
        ]
        for part in (*BLENDS, 1.0)
    ]
    found = [partition(times, n, boundary=links), *(partition(blend, n) for blend in blends)]
    return list(dict.fromkeys(map(tuple, [*found, even(len(layers), n)])))


def _costs(stage: Sequence[_Layer], overhead: float) -> Costs:
    forward = sum(layer.forward for layer in stage) + overhead
    return Costs(forward, sum(layer.backward for layer in stage) + overhead, forward)


def _memory(stage: Sequence[_Layer], entering: float, m: int, mode: str) -> int:
    """Bytes a stage holds at most.

    Its inputs of all micro-batches, skips too; what its layers keep of all of them, or when it
    recomputes, of the one that is at its backward pass; and there, the two gradients at one layer.
    """
    saved = sum(layer.saved for layer in stage) - stage[0].given
    graphs = m if mode == "never" else 1
    gradients = 2 * max(layer.sent for layer in stage)
    weights = sum(layer.weights for layer in stage)
    return int(weights + m * entering + graphs * saved + gradients)


def _predict(
    costs: Sequence[Costs], links: Sequence[float], m: int, mode: str
) -> tuple[float, float]:
    """Seconds of a step, and the bubble.

    A link is a stage of its own on paper: it has one micro-batch at a time, and nothing to
    recompute. The first one comes from the driver, to which no gradient goes back, and the last
    one leads to it.
    """
    first, *others = links
    members = [Costs(first, 0.0, 0.0)]
    for cost, link in zip(costs, others, strict=True):
        members += [cost, Costs(link, link, 0.0)]
    makespan = schedule.ideal_time(m, len(members), members, mode)
    recomputed = len(schedule.checkpointed(m, mode))
    busy = sum(m * (cost.f + cost.b) + recomputed * cost.r for cost in costs)
    return makespan, 1 - busy / (len(costs) * makespan)


def _fits(candidate: Candidate, limit: int | None) -> bool:
    return limit is None or max(candidate.memory) <= limit


def _counts(chunks: Sequence[int] | None, rows: int, stages: int) -> list[int]:
    counts = [2**k for k in range(11)] if chunks is None else sorted(set(chunks))
    for count in counts:
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"chunks= lists whole numbers of at least 1, got {count!r}")
    fitting = [count for count in counts if count <= rows]
    if not fitting:
        raise ValueError(
            f"the sample has {rows} rows, too few for any of chunks={counts}: plan() takes a whole "
            "mini-batch, not a micro-batch"
        )
    return fitting if chunks is not None else [c for c in fitting if c <= max(1, 8 * stages)]


def _check_positive(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not value > 0:
            raise ValueError(f"{name}= is positive, got {value}")


def _check_not_negative(**values: float) -> None:
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"{name}= is a number of seconds, not negative, got {value}")


def _constant(seconds: float) -> Callable[[float], float]:
    return lambda size: seconds


@contextmanager
def _as_in_a_stage(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
