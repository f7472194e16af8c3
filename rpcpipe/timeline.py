"""Timeline: when every stage ran which task, as recorded."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from rpcpipe import schedule
from rpcpipe.schedule import Costs, Simulation, Span
from rpcpipe.stage import Event

__all__ = ["Timeline"]


class Timeline:
    """What was recorded by ``with pipe.record() as timeline``; complete when that is left.

    ``str(timeline)`` draws the last recorded step, one row a stage.
    """

    def __init__(self, checkpoint: str) -> None:
        self._checkpoint = checkpoint
        self.events: list[list[Event]] = []
        """For each stage its tasks, in the order in which they were executed."""

    def steps(self) -> list[Simulation]:
        """Each recorded step in the form of the schedule's simulation; times from its start on."""
        numbers = sorted({event.step for stage in self.events for event in stage})
        return [self._step(number) for number in numbers]

    @property
    def bubble(self) -> float:
        """The fraction of the stages' time that was idle within the steps, 0 to 1.

        Raises:
            ValueError: no step was recorded.
        """
        steps = self._recorded()
        total = sum(step.makespan for step in steps)
        return sum(step.bubble * step.makespan for step in steps) / total

    @property
    def ideal_bubble(self) -> float:
        """The bubble the schedule has at best, with each stage's measured median task times."""
        steps = self._recorded()
        m = max(span.task.i for span in steps[-1].spans[0]) + 1
        backward = any(e.task.kind == "B" for e in self.events[0])
        programs = schedule.gpipe(m, len(self.events), self._checkpoint, backward=backward)
        return schedule.simulate(programs, [_costs(stage) for stage in self.events]).bubble

    def __str__(self) -> str:
        steps = self._recorded()
        return (
            f"{schedule.draw(steps[-1])}\nbubble {self.bubble:.1%}, at best {self.ideal_bubble:.1%}"
        )

    def _recorded(self) -> list[Simulation]:
        steps = self.steps()
        if not steps:
            raise ValueError("no step was recorded: run the pipe inside of `with pipe.record()`")
        return steps

    def _step(self, number: int) -> Simulation:
        stages = [[e for e in stage if e.step == number] for stage in self.events]
        begin = min(event.start for stage in stages for event in stage)
        return Simulation(
            [[Span(e.task, e.start - begin, e.end - begin) for e in stage] for stage in stages]
        )


def _costs(events: Sequence[Event]) -> Costs:
    def typical(kind: str) -> float:
        times = [event.end - event.start for event in events if event.task.kind == kind]
        return median(times) if times else 0.0

    return Costs(typical("F"), typical("B"), typical("R"))
