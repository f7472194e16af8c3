"""Advice: what measured times say about balance and chunks, and what a change would bring."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from rpcpipe import schedule
from rpcpipe.balance.partition import partition
from rpcpipe.schedule import Costs

__all__ = ["Measured", "describe"]

WORTH = 0.03  # of a step's time: smaller gains drown in what machines differ from day to day


class Measured(NamedTuple):
    """What is known of a pipe: its setting, and the median times of its tasks and its steps."""

    costs: Sequence[Costs]  # a stage each
    m: int
    checkpoint: str
    balance: Sequence[int]
    seconds: float  # of a step
    pause: float  # of the step, in which the driver computes the loss
    backward: bool

    def simulate(self, costs: Sequence[Costs], m: int | None = None, overhead: float = 0) -> float:
        """Seconds of a step of such stages and ``m`` micro-batches."""
        programs = schedule.gpipe(m or self.m, len(costs), self.checkpoint, self.backward)
        costs = [Costs(*(cost + overhead for cost in stage)) for stage in costs]
        return schedule.simulate(programs, costs).makespan + self.pause

    def overhead(self) -> float:
        """Seconds that each task would have to take longer for the simulation to be as measured."""
        return _solve(lambda x: self.simulate(self.costs, overhead=x) - self.seconds, self.seconds)


def describe(measured: Measured) -> Iterator[str]:
    """Each stage's work, the slowest, and suggestions where one of them is worth it."""
    yield from _work(measured)
    better = [line for line in (_balance(measured), _chunks(measured)) if line]
    yield from better or ["suggestion: none, other balances and chunks promise no more than 3 %"]


def _work(measured: Measured) -> Iterator[str]:
    work = [sum(stage) for stage in measured.costs]
    mean = sum(work) / len(work)
    for j, (cost, layers) in enumerate(zip(measured.costs, measured.balance, strict=True)):
        parts = ", ".join(f"{kind} {1e3 * t:.2f}" for kind, t in zip("FBR", cost, strict=True) if t)
        yield f"stage {j}: {layers} layers, ms a micro-batch: {parts}"
    slowest = max(range(len(work)), key=work.__getitem__)
    if mean > 0:
        yield f"slowest: stage {slowest}, {work[slowest] / mean - 1:+.0%} beside the mean"


def _balance(measured: Measured) -> str | None:
    """A better balance, if the layers within a stage were equal: that much alone is known."""
    layers = [
        Costs(*(t / count for t in cost))
        for cost, count in zip(measured.costs, measured.balance, strict=True)
        for _ in range(count)
    ]
    balance = partition([sum(layer) for layer in layers], len(measured.balance))
    cuts = accumulate(balance, initial=0)
    costs = [Costs(*map(sum, zip(*layers[a:b], strict=True))) for a, b in pairwise(cuts)]
    predicted = measured.simulate(costs, overhead=measured.overhead())
    gain = 1 - predicted / measured.seconds
    if balance == list(measured.balance) or gain < WORTH:
        return None
    return (
        f"suggestion: balance={balance}, {1e3 * predicted:.1f} ms a step ({gain:.0%} less) if the "
        "layers of a stage are equal; rpcpipe.plan measures each of them"
    )


def _chunks(measured: Measured) -> str | None:
    """A better number of micro-batches, if their work goes with their rows."""
    overhead = measured.overhead()

    def predict(m: int) -> float:
        costs = [Costs(*(t * measured.m / m for t in cost)) for cost in measured.costs]
        return measured.simulate(costs, m, overhead)

    m = min({max(1, measured.m * k // 4) for k in (1, 2, 4, 8, 16)}, key=predict)
    gain = 1 - predict(m) / measured.seconds
    if m == measured.m or gain < WORTH:
        return None
    return (
        f"suggestion: chunks={m}, {1e3 * predict(m):.1f} ms a step ({gain:.0%} less) if the "
        f"mini-batch has that many rows, a row takes as long in smaller micro-batches, and each "
        f"task {1e3 * overhead:.2f} ms beside them as here"
    )


def _solve(f: Callable[[float], float], high: float) -> float:
    """Where an increasing function crosses zero between 0 and ``high``; 0 if it is above."""
    low = 0.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if f(middle) > 0 else (middle, high)
    return low
