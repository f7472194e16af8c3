"""The schedule: which task each stage runs, in which order, and how long that takes at best.

Everything here is data about ``m`` micro-batches (index ``i``) on ``n`` stages (index ``j``);
nothing here knows of processes, tensors or devices. A mini-batch with fewer rows than chunks makes
fewer micro-batches: ``m`` is always the actual number.

GPipe, ``except_last``, m=4, n=3, f=1, b=2, r=1, as :func:`draw` shows it::

    stage 0 | F0 F1 F2 F3 .  .  .  .  .  .  B3--- R2 B2--- R1 B1--- R0 B0---
    stage 1 | .  F0 F1 F2 F3 .  .  .  B3--- R2 B2--- R1 B1--- R0 B0---
    stage 2 | .  .  F0 F1 F2 F3 B3--- R2 B2--- R1 B1--- R0 B0---
"""

from __future__ import annotations

import functools
from collections.abc import Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

MODES = ("always", "except_last", "never")


class Task(NamedTuple):
    """One step of one stage: ``"F"`` forward, ``"R"`` recompute or ``"B"`` backward of ``i``."""

    kind: str
    i: int

    def __str__(self) -> str:
        return f"{self.kind}{self.i}"


Program = list[Task]  # what one stage executes, in this order


class Costs(NamedTuple):
    """Seconds that one micro-batch takes in one stage: forward, backward, recompute."""

    f: float
    b: float
    r: float


# m=4, n=3     stage 0  stage 1  stage 2
#
# cycle 0       (0,0)
# cycle 1       (1,0)    (0,1)
# cycle 2       (2,0)    (1,1)    (0,2)
# cycle 3       (3,0)    (2,1)    (1,2)
# cycle 4                (3,1)    (2,2)
# cycle 5                         (3,2)
def clock_cycles(m: int, n: int) -> Iterator[list[tuple[int, int]]]:
    """The deterministic clock cycles of the paper: cycle k holds each (i, j) with i + j == k."""
    _check_counts(m, n)
    return (
        [(k - j, j) for j in range(max(k - m + 1, 0), min(k + 1, n))]  # 0 <= k - j < m
        for k in range(m + n - 1)
    )


def checkpointed(m: int, checkpoint: str) -> range:
    """The micro-batches that keep only their inputs, and so are recomputed before backward."""
    _check_counts(m, 1)
    if checkpoint not in MODES:
        raise ValueError(f"a mode is one of {', '.join(MODES)}: change checkpoint={checkpoint!r}")
    return range({"always": m, "except_last": m - 1, "never": 0}[checkpoint])


def gpipe(m: int, n: int, checkpoint: str, backward: bool = True) -> list[Program]:
    """One program a stage: the clock cycles forward, then the same cycles in reverse.

    In the reverse each B of a checkpointed micro-batch follows its R. The stage starts R(i) as soon
    as B(i+1) is done, before the gradient of i arrives (early recomputation).
    """
    recomputed = checkpointed(m, checkpoint)
    cycles = list(clock_cycles(m, n))
    programs: list[Program] = [[] for _ in range(n)]
    for cycle in cycles:
        for i, j in cycle:
            programs[j].append(Task("F", i))
    for cycle in reversed(cycles) if backward else ():
        for i, j in cycle:
            programs[j] += [Task("R", i)] * (i in recomputed) + [Task("B", i)]
    return programs


@functools.lru_cache(64)
def read(program: str) -> Program:
    """The program that `write` has written; the same list each time."""
    return [Task(word[0], int(word[1:])) for word in program.split()]


def write(program: Program) -> str:
    """A program as text, which is short to send: ``"F0 F1 B1 R0 B0"``.

    >>> write(gpipe(2, 1, "except_last")[0])
    'F0 F1 B1 R0 B0'
    """
    return " ".join(map(str, program))


class Span(NamedTuple):
    """One task and when it ran."""

    task: Task
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """When each task of each stage ran: ``spans[j]`` is in program order, time starts at 0."""

    spans: list[list[Span]]

    @property
    def makespan(self) -> float:
        return max(span.end for stage in self.spans for span in stage)

    @property
    def bubble(self) -> float:
        """The fraction of stage time that is idle, 0 to 1."""
        busy = sum(span.end - span.start for stage in self.spans for span in stage)
        return 1 - busy / (len(self.spans) * self.makespan)


def simulate(
    programs: Sequence[Program],
    costs: Sequence[Costs],
    *,
    early: bool = True,
    hop: float = 0,
    whole_batch_loss: bool = True,
) -> Simulation:
    """Run any programs, GPipe's or others, on paper; refuse those that would deadlock.

    A stage runs its program in order, one task at a time, each as soon as what it needs is done.

    Args:
        programs: one program a stage.
        costs: one :class:`Costs` a stage.
        early: recompute before the gradient arrives, not on its arrival.
        hop: seconds from one stage to any other.
        whole_batch_loss: no backward before all forwards, because the caller computes the loss from
            the whole output; ``False`` when each micro-batch has its own loss, as 1F1B needs.
    """
    if len(costs) != len(programs):
        raise ValueError(
            f"each stage has its costs: {len(programs)} stages but {len(costs)} costs; change costs"
        )
    needs = _needs(programs, early, whole_batch_loss)
    sorter = TopologicalSorter(needs)
    with suppress(CycleError):  # the sorter still hands out all that can run
        sorter.prepare()
    spans: list[list[Span]] = [[] for _ in programs]
    end: dict[_Node, float] = {}
    while ready := sorter.get_ready():
        for node in ready:
            if node not in needs:  # no program holds it, so who needs it waits for ever
                continue
            task, j = node
            start = max((end[x] + (hop if x.j != j else 0) for x in needs[node]), default=0)
            end[node] = start + getattr(costs[j], task.kind.lower())
            spans[j].append(Span(task, start, end[node]))
            sorter.done(node)
    if len(end) < sum(map(len, programs)):
        raise ValueError(f"programs may not deadlock: {_stuck(needs, end)}; change programs")
    return Simulation(spans)


def ideal_time(
    m: int, n: int, costs: Sequence[Costs], checkpoint: str, early: bool = True
) -> float:
    """Seconds of one GPipe step, were there nothing but the stages' own work; any costs."""
    return simulate(gpipe(m, n, checkpoint), costs, early=early).makespan


def ideal_bubble(
    m: int, n: int, costs: Sequence[Costs], checkpoint: str, early: bool = True
) -> float:
    """The fraction of stage time that even such a step leaves idle."""
    return simulate(gpipe(m, n, checkpoint), costs, early=early).bubble


def closed_form(
    m: int, n: int, f: float, b: float, r: float, checkpoint: str, early: bool = True
) -> float:
    """:func:`ideal_time` for equal stages, as a formula.

    ============  =========================  ======================================
    mode          early                      on arrival of the gradient
    ============  =========================  ======================================
    always        (m+n-1)(f+b) + m r         (m+n-1)(f+b) + (m+n-1) r
    except_last   (m+n-1)(f+b) + (m-1) r     (m+n-1)(f+b) + (m+n-2) r, no r for m=1
    never         (m+n-1)(f+b)               (m+n-1)(f+b)
    ============  =========================  ======================================

    Early, the last stage alone pays for recomputing; on arrival each of the other n-1 stages adds
    one more r to the longest path.
    """
    _check_counts(m, n)
    recomputes = len(checkpointed(m, checkpoint))
    if recomputes and not early:
        recomputes += n - 1
    return (m + n - 1) * (f + b) + recomputes * r


def draw(simulation: Simulation, width: int = 100) -> str:
    """The simulation as text, one row a stage, ``.`` where it idles.

    Whole-number times get one cell a unit if that fits in ``width`` characters; others are scaled
    to that width, and tasks too short for it are left out.
    """
    spans, makespan = simulation.spans, simulation.makespan
    cell = max(len(str(span.task)) for stage in spans for span in stage) + 1
    cells = width // cell
    whole = all(span.end == int(span.end) for stage in spans for span in stage)
    unit = 1 if whole and makespan <= cells else makespan / cells
    digits = len(str(len(spans) - 1))
    rows = []
    for j, stage in enumerate(spans):
        row, at = f"stage {j:>{digits}} | ", 0
        for task, start, stop in stage:
            first, last = round(start / unit), round(stop / unit)
            if first < last:
                row += ".".ljust(cell) * (first - at)
                row += str(task).ljust((last - first) * cell - 1, "-").ljust((last - first) * cell)
                at = last
        rows.append(row.rstrip())
    return "\n".join(rows)


class _Node(NamedTuple):
    task: Task
    j: int

    def __str__(self) -> str:
        return f"{self.task} on stage {self.j}"


def _needs(
    programs: Sequence[Program], early: bool, whole_batch_loss: bool
) -> dict[_Node, list[_Node]]:
    """What must be done before each task: the task before it in its program, and

    F(i,j)  F(i,j-1)
    R(i,j)  F(i,j), the loss; and B(i,j+1) when not early
    B(i,j)  F(i,j), the loss, R(i,j) if there is one, and B(i,j+1)

    The loss of the whole mini-batch, from which the driver starts backward on every stage, is known
    after the last F of the last stage; without ``whole_batch_loss`` there is no such point.
    """
    last = len(programs) - 1
    forwards = [_Node(task, last) for task in programs[last] if task.kind == "F"]
    loss = forwards[-1:] if whole_batch_loss else []
    needs: dict[_Node, list[_Node]] = {}
    for j, program in enumerate(programs):
        recomputed = {i for kind, i in program if kind == "R"}
        for task, before in zip(program, [None, *program], strict=False):
            kind, i = task
            need = needs[_Node(task, j)] = [_Node(before, j)] if before else []
            if kind == "F":
                need += [_Node(task, j - 1)] if j > 0 else []
                continue
            need += [_Node(Task("F", i), j), *loss]
            if kind == "B" and i in recomputed:
                need.append(_Node(Task("R", i), j))
            if j < last and (kind == "B" or not early):
                need.append(_Node(Task("B", i), j + 1))
    return needs


def _stuck(needs: dict[_Node, list[_Node]], done: Container[_Node]) -> str:
    """For each stage that is stuck: the task it is at, and what that waits for."""
    at: dict[int, str] = {}
    for node, need in needs.items():
        if node not in done and node.j not in at:
            missing = dict.fromkeys(str(x) for x in need if x not in done)
            at[node.j] = f"{node} waits for {' and '.join(missing)}"
    return "; ".join(at.values())


def _check_counts(m: int, n: int) -> None:
    if m < 1:
        raise ValueError(f"there is at least one micro-batch: change m={m}")
    if n < 1:
        raise ValueError(f"there is at least one stage: change n={n}")
