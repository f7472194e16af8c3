"""Timeline: when every stage ran which task, as recorded."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from statistics import median
from typing import Any, NamedTuple, TypeVar

from rpcpipe import advice, chart, schedule, trace
from rpcpipe.clock import Clock
from rpcpipe.recorder import Event
from rpcpipe.schedule import Costs, Simulation, Span

__all__ = ["Moment", "Setting", "Timeline", "aligned", "shown"]

F = TypeVar("F", bound=Callable[..., Any])


class Moment(NamedTuple):
    """What the driver did: ``"forward"`` or ``"backward"`` of a step; times as those of events."""

    step: int
    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Setting:
    """How the pipe is set up that is recorded."""

    checkpoint: str
    balance: Sequence[int]
    places: Sequence[str]  # for each stage, where it runs
    driver: str = ""  # and where the driver does


class Timeline:
    """What was recorded by ``with pipe.record() as timeline``; complete when that is left.

    ``str(timeline)`` draws the last recorded step, one row a stage: ``F3`` is the forward pass of
    micro-batch 3, ``R3`` its recomputation, ``B3`` its backward pass. Below it stand the bubble
    beside the one the schedule has at best, each stage's share of the work, and what the measured
    times suggest for ``balance=`` and ``chunks=``.
    """

    def __init__(self, setting: Setting, every: int = 1) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every= is a whole number of at least 1, got {every!r}")
        self.setting = setting
        self.events: list[list[Event]] = []
        """For each stage its tasks, in the order in which they were executed; all times are those
        of the driver's monotonic clock, in seconds."""
        self.moments: list[Moment] = []
        self._every = every
        self._seen = 0

    def wants_next(self) -> bool:
        """Whether the step that begins now is to be recorded: the first is, then each k-th."""
        self._seen += 1
        return (self._seen - 1) % self._every == 0

    def steps(self) -> list[Simulation]:
        """Each recorded step in the form of the schedule's simulation; times from its start on.

        A step that failed is left out.
        """
        return [step for _, step in self._numbered()]

    @property
    def bubble(self) -> float:
        """The fraction of the stages' time that was idle within the steps, 0 to 1.

        Raises:
            ValueError: no step was recorded.
        """
        steps = [step for _, step in self._recorded()]
        total = sum(step.makespan for step in steps)
        return sum(step.bubble * step.makespan for step in steps) / total

    @property
    def ideal_bubble(self) -> float:
        """The bubble the schedule has at best, with each stage's measured median task times."""
        _, last = self._recorded()[-1]
        kinds = {span.task.kind for span in last.spans[0]}
        programs = schedule.gpipe(
            _count(last), len(last.spans), self.setting.checkpoint, backward="B" in kinds
        )
        return schedule.simulate(programs, self.costs()).bubble

    def costs(self) -> list[Costs]:
        """For each stage, the median seconds of its tasks; 0 for those it did not have.

        Raises:
            ValueError: no step was recorded.
        """
        self._recorded()
        return [_costs(stage) for stage in self.events]

    def __str__(self) -> str:
        """Draw the last step that has a backward pass, or else the last one."""
        steps = self._recorded()
        number, last = next(
            (s for s in reversed(steps) if any(span.task.kind == "B" for span in s[1].spans[0])),
            steps[-1],
        )
        times = [1e3 * s.makespan for _, s in steps if _kinds(s) == _kinds(last)]
        title = (
            f"step {number}: {1e3 * last.makespan:.1f} ms; "
            f"median of {len(times)} such steps: {median(times):.1f} ms"
        )
        bubble = f"bubble {self.bubble:.1%}, at best {self.ideal_bubble:.1%}"
        measured = advice.Measured(
            self.costs(),
            _count(last),
            self.setting.checkpoint,
            self.setting.balance,
            median(times) / 1e3,
            self._pause(),
            "B" in _kinds(last),
        )
        return "\n".join([title, schedule.draw(last), bubble, *advice.describe(measured)])

    def save(self, path: str | PathLike[str]) -> None:
        """Write all that was recorded as a trace for https://ui.perfetto.dev or chrome://tracing.

        One process row for the driver and for each stage, an arrow wherever a micro-batch or its
        gradient went from one to the next. The file is JSON in Chrome's trace event format.

        Raises:
            ValueError: no step was recorded.
        """
        self._recorded()
        trace.write(path, self.events, self.moments, self.setting.places, self.setting.driver)

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw the same step as ``str(timeline)`` into an image; its suffix says which kind.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: no step was recorded.
        """
        chart.plot(path, self._recorded()[-1][1], self.bubble, self.ideal_bubble)

    # ------------------------------------------------------------------------------------------

    def _recorded(self) -> list[tuple[int, Simulation]]:
        steps = self._numbered()
        if not steps:
            raise ValueError("no step was recorded: run the pipe inside of `with pipe.record()`")
        return steps

    def _numbered(self) -> list[tuple[int, Simulation]]:
        by_step: dict[int, list[list[Event]]] = {}
        for j, stage in enumerate(self.events):
            for event in stage:
                stages = by_step.setdefault(event.step, [[] for _ in self.events])
                stages[j].append(event)
        return [(number, _step(by_step[number])) for number in sorted(by_step)
                if _is_complete(by_step[number])]  # fmt: skip

    def _pause(self) -> float:
        """Median seconds between a step's forward and backward pass, in the driver."""
        ends = {moment.step: moment.end for moment in self.moments if moment.name == "forward"}
        pauses = [
            moment.start - ends[moment.step]
            for moment in self.moments
            if moment.name == "backward" and moment.step in ends
        ]
        return median(pauses) if pauses else 0.0


def aligned(events: Sequence[Event], clock: Clock) -> list[Event]:
    """The events of another process in the time of this one."""
    return [replace(e, start=clock.here(e.start), end=clock.here(e.end)) for e in events]


def shown(name: str) -> Callable[[F], F]:
    """Have a method of `Step` appear in the driver's row, if its pipe is recording."""

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def call(step: Any, *args: Any) -> Any:
            start = time.monotonic()
            try:
                return method(step, *args)
            finally:
                if step.timeline is not None:
                    moment = Moment(step.order.step, name, start, time.monotonic())
                    step.timeline.moments.append(moment)

        return call  # type: ignore[return-value]

    return decorate


def _is_complete(stages: Sequence[Sequence[Event]]) -> bool:
    """Whether every stage has run forward, and backward if any did, for the same micro-batches."""
    tasks = [{(e.task.kind, e.task.i) for e in stage if e.task.kind != "R"} for stage in stages]
    counts = [sum(kind == which for kind, _ in tasks[0]) for which in "FB"]
    return all(own == tasks[0] for own in tasks) and counts[0] > 0 and counts[1] in (0, counts[0])


def _step(stages: Sequence[Sequence[Event]]) -> Simulation:
    begin = min(event.start for stage in stages for event in stage)
    return Simulation(
        [[Span(e.task, e.start - begin, e.end - begin) for e in stage] for stage in stages]
    )


def _kinds(step: Simulation) -> set[str]:
    return {span.task.kind for span in step.spans[0]}


def _count(step: Simulation) -> int:
    return max(span.task.i for span in step.spans[0]) + 1


def _costs(events: Sequence[Event]) -> Costs:
    def typical(kind: str) -> float:
        times = [event.end - event.start for event in events if event.task.kind == kind]
        return median(times) if times else 0.0

    return Costs(typical("F"), typical("B"), typical("R"))
