"""What was recorded: as text, as a trace, as a picture, in one clock, and what it costs."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from toys import mlp
from trace_rules import read_strictly

import rpcpipe
from benchmarks.emulated import Emulated
from rpcpipe import World, advice, clock, recorder, schedule, trace
from rpcpipe.advice import Measured
from rpcpipe.clock import Clock, Reading, Seen
from rpcpipe.recorder import Event, Recorder
from rpcpipe.schedule import Costs, Task
from rpcpipe.timeline import Timeline

two = pytest.mark.parametrize("world", [2], indirect=True)

M = 4


def recorded(world: World, seconds: tuple[float, ...], balance: list[int]) -> Timeline:
    """Two steps of layers that sleep."""
    module = nn.Sequential(*(Emulated(4, s / 2) for s in seconds))
    pipe = rpcpipe.Pipe(module, world, balance=balance, chunks=M)
    x = torch.ones(2 * M, 4)
    pipe(x).sum().backward()
    with pipe.record() as timeline:
        for _ in range(2):
            pipe(x).sum().backward()
    return timeline


@two
def test_text_has_a_row_a_stage_the_bubble_and_what_would_be_better(world: World) -> None:
    text = str(recorded(world, (0.02, 0.02, 0.02, 0.001), [3, 1]))
    lines = text.splitlines()
    assert lines[0].startswith("step 2: ")
    assert "median of 2 such steps" in lines[0]
    assert lines[1].startswith("stage 0 | F0")
    assert all(str(task) in lines[1] for task in schedule.gpipe(M, 2, "except_last")[0])
    assert lines[2].startswith("stage 1 |")  # its tasks may be too short to be drawn
    assert lines[3].startswith("bubble ")
    assert "at best" in lines[3]
    assert "slowest: stage 0, +" in text
    assert "suggestion: balance=[2, 2]" in text


@two
def test_every_second_step_is_recorded_and_a_step_that_failed_is_not(world: World) -> None:
    pipe = rpcpipe.Pipe(mlp(), world, balance=[3, 3], chunks=2)
    x = torch.ones(4, 4)
    with pipe.record(every=2) as timeline:
        for _ in range(3):
            pipe(x).sum().backward()
        pipe(x).sum().backward()
        with pytest.raises(rpcpipe.StageError):  # the fifth
            pipe(torch.ones(4, 3))
        pipe(x)
        with torch.no_grad():  # the seventh
            pipe(x)
    numbers = {event.step for stage in timeline.events for event in stage}
    assert {0, 2, 6} <= numbers <= {0, 2, 4, 6}
    assert len(timeline.steps()) == 3
    assert str(timeline).startswith("step 2: ")


@two
def test_recording_twice_at_once_and_every_0th_are_refused(world: World) -> None:
    pipe = rpcpipe.Pipe(mlp(), world, balance=[3, 3])
    with pytest.raises(ValueError, match=r"every= is a whole number of at least 1, got 0"):
        pipe.record(every=0).__enter__()
    with (
        pipe.record(),
        pytest.raises(ValueError, match="the pipe is recording"),
        pipe.record(),
    ):
        pass
    with pipe.record() as timeline:
        pipe(torch.ones(1, 4))
    assert len(timeline.steps()) == 1


# ---------------------------------------------------------------------------------- the trace


@two
def test_trace_has_a_row_for_each_process_and_an_arrow_for_each_hop(
    world: World, tmp_path: Path
) -> None:
    timeline = recorded(world, (0.002, 0.002), [1, 1])
    timeline.save(tmp_path / "trace.json")
    entries = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rows = {e["pid"]: e["args"]["name"] for e in entries if e["name"] == "process_name"}
    assert [name.split(" (")[0] for name in rows.values()] == ["driver", "stage 0", "stage 1"]
    assert list(rows) == [1, 2, 3]
    slices = [e for e in entries if e["ph"] == "X"]
    assert all(e["ts"] >= 0 and e["dur"] >= 0 for e in slices)
    tasks = {(e["pid"], e["name"], e["args"]["step"]) for e in slices if e["pid"] > 1}
    programs = schedule.gpipe(M, 2, "except_last")
    assert tasks == {(2 + j, str(t), s) for j in (0, 1) for t in programs[j] for s in (1, 2)}
    starts = {e["id"]: e for e in entries if e["ph"] == "s"}
    ends = {e["id"]: e for e in entries if e["ph"] == "f"}
    assert starts.keys() == ends.keys()
    hops = {(name_at(slices, starts[k]), name_at(slices, ends[k])) for k in starts}
    assert hops == {
        *(((2, f"F{i}", s), (3, f"F{i}", s)) for i in range(M) for s in (1, 2)),
        *(((3, f"B{i}", s), (2, f"B{i}", s)) for i in range(M) for s in (1, 2)),
    }
    assert all(starts[k]["ts"] <= ends[k]["ts"] for k in starts)
    assert read_strictly(entries) == sorted(hops)


def name_at(slices: list[dict[str, Any]], arrow: dict[str, Any]) -> tuple[int, str, int]:
    """The one task in which an arrow starts or ends."""
    (found,) = [
        e for e in slices
        if e["pid"] == arrow["pid"] and e["ts"] <= arrow["ts"] <= e["ts"] + e["dur"]
    ]  # fmt: skip
    return found["pid"], found["name"], found["args"]["step"]


def test_arrows_stay_within_tasks_shorter_than_a_microsecond() -> None:
    third = 1e-7 / 3  # starts and ends are no whole nanoseconds
    events = [
        [Event(0, Task("F", i), (7 * i + 1) * third, (7 * i + 3) * third) for i in range(5)],
        [Event(0, Task("F", i), (7 * i + 4) * third, (7 * i + 6) * third) for i in range(5)],
    ]
    entries = trace.trace(events, [], ["here", "here"], "here")["traceEvents"]
    assert read_strictly(entries) == [((2, f"F{i}", 0), (3, f"F{i}", 0)) for i in range(5)]


@two
def test_the_driver_has_a_row_around_what_the_stages_do(world: World) -> None:
    timeline = recorded(world, (0.002, 0.002), [1, 1])
    assert [(m.step, m.name) for m in timeline.moments] == [
        (1, "forward"), (1, "backward"), (2, "forward"), (2, "backward"),
    ]  # fmt: skip
    spans = {(m.step, m.name): m for m in timeline.moments}
    for event in (e for stage in timeline.events for e in stage):
        moment = spans[event.step, "forward" if event.task.kind == "F" else "backward"]
        assert moment.start <= event.start <= event.end <= moment.end


# ------------------------------------------------------------------------------------- clocks


def test_the_fastest_round_trip_tells_how_far_a_clock_is_ahead() -> None:
    # Ahead by 100; the way there takes 1, 3 and 2, the way back 1, 9 and 4.
    readings = [Reading(t, t + there + 100, t + there + back)
                for t, there, back in [(0, 3, 9), (20, 1, 1), (30, 2, 4)]]  # fmt: skip
    assert clock.compare(readings) == Seen(121, 100)


def test_a_clock_that_drifts_is_told_in_ours() -> None:
    their = Clock(Seen(1000, 900), Seen(2000, 901))  # they showed 1000 at our 100, 2000 at 1099
    assert their.here(1000) == pytest.approx(100)
    assert their.here(2000) == pytest.approx(1099)
    assert their.here(1500) == pytest.approx(599.5)
    assert Clock(Seen(5, 5), Seen(5, 5)).here(7) == 2


SHIFT = 5000.0


def shift(_: nn.Module) -> None:
    """Let this process show another time, as one on another host does."""
    shifted = SimpleNamespace(monotonic=lambda: time.monotonic() + SHIFT)
    recorder.time = clock.time = shifted  # type: ignore[attr-defined]
    clock.identity = lambda: "of another host"


def unshift(_: nn.Module) -> None:
    import importlib

    recorder.time = time  # type: ignore[attr-defined]
    importlib.reload(clock)


@two
def test_a_stage_whose_clock_is_shifted_is_recorded_in_the_drivers(world: World) -> None:
    pipe = rpcpipe.Pipe(mlp(), world, balance=[3, 3], chunks=2)
    pipe(torch.ones(4, 4)).sum().backward()
    pipe.apply_to_stage(1, shift)
    try:
        begin = time.monotonic()
        with pipe.record() as timeline:
            pipe(torch.ones(4, 4)).sum().backward()
        end = time.monotonic()
    finally:
        pipe.apply_to_stage(1, unshift)
    # By no more than half of a round trip, and the round trips were within these as well.
    slack = (end - begin) / 2
    for event in timeline.events[1]:
        assert begin - slack <= event.start <= event.end <= end + slack
    at = [{str(e.task): e for e in stage} for stage in timeline.events]
    assert at[1]["F0"].start > at[0]["F0"].start
    assert at[0]["B1"].end > at[1]["B1"].start


# -------------------------------------------------------------------------------- the picture


@two
def test_picture_is_drawn(world: World, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    timeline = recorded(world, (0.002, 0.002), [1, 1])
    timeline.plot(tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    timeline.plot(tmp_path / "timeline.svg")
    assert "stage 1" in (tmp_path / "timeline.svg").read_text()


@two
def test_picture_without_matplotlib_says_what_to_install(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeline = recorded(world, (0.001, 0.001), [1, 1])
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'rpcpipe\[plot\]'"):
        timeline.plot(tmp_path / "timeline.png")


# ------------------------------------------------------------------------------------- advice


def ideal(costs: list[Costs], m: int, checkpoint: str = "never", overhead: float = 0) -> float:
    costs = [Costs(*(t + overhead for t in cost)) for cost in costs]
    return schedule.simulate(schedule.gpipe(m, len(costs), checkpoint), costs).makespan


def test_a_better_balance_is_suggested_with_its_time() -> None:
    costs = [Costs(0.003, 0.006, 0), Costs(0.001, 0.002, 0)]  # of 3 and 1 equal layers
    found = Measured(costs, 8, "never", [3, 1], ideal(costs, 8), 0, True)
    lines = list(advice.describe(found))
    better = 1e3 * ideal([Costs(0.002, 0.004, 0)] * 2, 8)
    assert f"suggestion: balance=[2, 2], {better:.1f} ms a step (28% less)" in lines[3]


def test_more_chunks_are_suggested_where_they_cost_little_and_not_where_they_do() -> None:
    costs = [Costs(0.01, 0.02, 0)] * 4
    cheap = Measured(costs, 4, "never", [1] * 4, ideal(costs, 4), 0, True)
    (line,) = [x for x in advice.describe(cheap) if x.startswith("suggestion")]
    assert line.startswith("suggestion: chunks=16, ")
    dear = Measured(costs, 4, "never", [1] * 4, ideal(costs, 4, overhead=0.02), 0, True)
    (line,) = [x for x in advice.describe(dear) if x.startswith("suggestion")]
    assert line.startswith("suggestion: none")


def test_what_the_loss_takes_is_no_overhead() -> None:
    costs = [Costs(0.01, 0.02, 0)] * 2
    found = Measured(costs, 4, "never", [1, 1], ideal(costs, 4, overhead=0.001) + 0.5, 0.5, True)
    assert found.overhead() == pytest.approx(0.001, rel=0.01)


# --------------------------------------------------------------------------------------- cost


def test_recording_takes_less_than_a_hundredth_of_a_task_of_two_milliseconds() -> None:
    found = Recorder(torch.device("cpu"))

    def seconds(times: int = 2000) -> float:
        start = time.perf_counter()
        for i in range(times):
            with found.task(0, Task("F", i)):
                pass
        return (time.perf_counter() - start) / times

    assert min(seconds() for _ in range(5)) < 0.01 * 0.002
    assert len(found.events()) == 10_000
