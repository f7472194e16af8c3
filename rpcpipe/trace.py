"""Trace: what was recorded, as JSON in Chrome's trace event format."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rpcpipe.recorder import Event

if TYPE_CHECKING:
    from rpcpipe.timeline import Moment

__all__ = ["trace", "write"]

PHASES = {"F": "forward", "R": "recompute", "B": "backward"}
INSIDE = 1e-6  # seconds: an arrow belongs to the task it starts or ends in

Entry = dict[str, Any]


def write(
    path: str | PathLike[str],
    events: Sequence[Sequence[Event]],
    moments: Sequence[Moment],
    places: Sequence[str],
    driver: str,
) -> None:
    Path(path).write_text(json.dumps(trace(events, moments, places, driver)))


def trace(
    events: Sequence[Sequence[Event]],
    moments: Sequence[Moment],
    places: Sequence[str],
    driver: str,
) -> Entry:
    """The trace; its process 1 is the driver, process ``2 + j`` is stage ``j``.

    For a reader that goes by the letter: numbers of processes and threads begin at 1, since 0 is
    the idle task's; a thread's number is its process's, and so no two are equal; times are whole
    nanoseconds; events are in the order of time, and a task comes before the arrows in it.
    """
    times = [event.start for stage in events for event in stage]
    zero = min([*times, *(moment.start for moment in moments)])
    names = [f"driver ({driver})", *(f"stage {j} ({place})" for j, place in enumerate(places))]
    rows = [entry for pid, name in enumerate(names, 1) for entry in _row(pid, name)]
    entries = []
    for step, name, start, end in moments:
        entries.append(_slice(1, name, "driver", start - zero, end - zero, {"step": step}))
    for j, stage in enumerate(events):
        for event in stage:
            where = {"step": event.step, "micro-batch": event.task.i, "stage": j}
            name, phase = str(event.task), PHASES[event.task.kind]
            start, end = event.start - zero, event.end - zero
            entries.append(_slice(2 + j, name, phase, start, end, where))
    entries += _arrows(events, zero)
    return {"traceEvents": rows + sorted(entries, key=lambda e: e["ts"]), "displayTimeUnit": "ms"}


def _row(pid: int, name: str) -> Iterator[Entry]:
    common = {"ph": "M", "pid": pid, "tid": pid}
    yield {**common, "name": "process_name", "args": {"name": name}}
    yield {**common, "name": "process_sort_index", "args": {"sort_index": pid}}
    thread = "training loop" if pid == 1 else "compute thread"
    yield {**common, "name": "thread_name", "args": {"name": thread}}


def _slice(pid: int, name: str, phase: str, start: float, end: float, where: Entry) -> Entry:
    common = {"ph": "X", "pid": pid, "tid": pid, "name": name, "cat": phase, "args": where}
    return {**common, "ts": _us(start), "dur": _us(_us(end) / 1e6 - _us(start) / 1e6)}


def _us(seconds: float) -> float:
    """Microseconds, to the nanosecond."""
    return round(seconds * 1e6, 3)


def _arrows(events: Sequence[Sequence[Event]], zero: float) -> Iterator[Entry]:
    """From F(i,j) to F(i,j+1), and from B(i,j+1) to B(i,j)."""
    at = {(e.step, e.task, j): e for j, stage in enumerate(events) for e in stage}
    number = 0
    for (step, task, j), event in at.items():
        to = {"F": j + 1, "B": j - 1}.get(task.kind)
        target = None if to is None else at.get((step, task, to))
        if target is None or to is None:
            continue
        number += 1
        what = "activation" if task.kind == "F" else "gradient"
        common = {"name": what, "cat": "sent", "id": number}
        leaves = max((event.start + event.end) / 2, event.end - INSIDE) - zero
        comes = min((target.start + target.end) / 2, target.start + INSIDE) - zero
        yield {**common, "ph": "s", "pid": 2 + j, "tid": 2 + j, "ts": _us(leaves)}
        yield {**common, "ph": "f", "bp": "e", "pid": 2 + to, "tid": 2 + to, "ts": _us(comes)}
