"""The schedule, tested as pictures and by its properties; nothing here starts a process."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from textwrap import dedent
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpcpipe.schedule import (
    MODES,
    Costs,
    Program,
    Simulation,
    Task,
    checkpointed,
    clock_cycles,
    closed_form,
    draw,
    gpipe,
    ideal_bubble,
    ideal_time,
    read,
    simulate,
    write,
)

# Fractions make every comparison of times exact.
amounts: Any = st.fractions(min_value=Fraction(1, 8), max_value=8, max_denominator=8)
counts = st.integers(1, 8)
modes = st.sampled_from(MODES)
stages = st.lists(st.builds(Costs, amounts, amounts, amounts), min_size=1, max_size=8)
unhurried = settings(deadline=None)


def picture(text: str) -> str:
    return dedent(text).strip("\n")


def one_f_one_b(m: int, n: int, checkpoint: str) -> list[Program]:
    """The order of 1F1B: each stage does its B as soon as it may, oldest micro-batch first."""
    recomputed = checkpointed(m, checkpoint)
    programs = []
    for j in range(n):
        ahead = min(n - 1 - j, m)
        tasks = [Task("F", i) for i in range(ahead)]
        for i in range(m):
            tasks += [Task("F", i + ahead)] * (i + ahead < m)
            tasks += [Task("R", i)] * (i in recomputed) + [Task("B", i)]
        programs.append(tasks)
    return programs


# Pictures


def test_clock_cycles_fill_and_drain() -> None:
    assert list(clock_cycles(m=4, n=3)) == [
        [(0, 0)],
        [(1, 0), (0, 1)],
        [(2, 0), (1, 1), (0, 2)],
        [(3, 0), (2, 1), (1, 2)],
        [(3, 1), (2, 2)],
        [(3, 2)],
    ]


def test_clock_cycles_with_fewer_microbatches_than_stages() -> None:
    assert list(clock_cycles(m=1, n=3)) == [[(0, 0)], [(0, 1)], [(0, 2)]]
    assert list(clock_cycles(m=3, n=1)) == [[(0, 0)], [(1, 0)], [(2, 0)]]


@pytest.mark.parametrize(
    ("checkpoint", "expected"),
    [
        ("always", "F0 F1 F2 F3 R3 B3 R2 B2 R1 B1 R0 B0"),
        ("except_last", "F0 F1 F2 F3 B3 R2 B2 R1 B1 R0 B0"),
        ("never", "F0 F1 F2 F3 B3 B2 B1 B0"),
    ],
)
def test_every_stage_runs_the_same_program(checkpoint: str, expected: str) -> None:
    assert [*map(write, gpipe(m=4, n=3, checkpoint=checkpoint))] == [expected] * 3


def test_without_backward_the_program_is_the_forwards() -> None:
    assert [*map(write, gpipe(m=3, n=2, checkpoint="always", backward=False))] == ["F0 F1 F2"] * 2


def test_the_only_microbatch_is_the_last_one() -> None:
    assert [*map(write, gpipe(m=1, n=1, checkpoint="except_last"))] == ["F0 B0"]


PICTURES = {
    ("always", True): """
        stage 0 | F0 F1 F2 F3 .  .  R3 .  .  .  .  B3--- R2 B2--- R1 B1--- R0 B0---
        stage 1 | .  F0 F1 F2 F3 .  R3 .  .  B3--- R2 B2--- R1 B1--- R0 B0---
        stage 2 | .  .  F0 F1 F2 F3 R3 B3--- R2 B2--- R1 B1--- R0 B0---
    """,
    ("always", False): """
        stage 0 | F0 F1 F2 F3 .  .  .  .  .  .  .  .  R3 B3--- R2 B2--- R1 B1--- R0 B0---
        stage 1 | .  F0 F1 F2 F3 .  .  .  .  R3 B3--- R2 B2--- R1 B1--- R0 B0---
        stage 2 | .  .  F0 F1 F2 F3 R3 B3--- R2 B2--- R1 B1--- R0 B0---
    """,
    ("except_last", True): """
        stage 0 | F0 F1 F2 F3 .  .  .  .  .  .  B3--- R2 B2--- R1 B1--- R0 B0---
        stage 1 | .  F0 F1 F2 F3 .  .  .  B3--- R2 B2--- R1 B1--- R0 B0---
        stage 2 | .  .  F0 F1 F2 F3 B3--- R2 B2--- R1 B1--- R0 B0---
    """,
    ("except_last", False): """
        stage 0 | F0 F1 F2 F3 .  .  .  .  .  .  B3--- .  .  R2 B2--- R1 B1--- R0 B0---
        stage 1 | .  F0 F1 F2 F3 .  .  .  B3--- .  R2 B2--- R1 B1--- R0 B0---
        stage 2 | .  .  F0 F1 F2 F3 B3--- R2 B2--- R1 B1--- R0 B0---
    """,
    ("never", True): """
        stage 0 | F0 F1 F2 F3 .  .  .  .  .  .  B3--- B2--- B1--- B0---
        stage 1 | .  F0 F1 F2 F3 .  .  .  B3--- B2--- B1--- B0---
        stage 2 | .  .  F0 F1 F2 F3 B3--- B2--- B1--- B0---
    """,
}


@pytest.mark.parametrize(("checkpoint", "early"), PICTURES)
def test_picture_of_gpipe(checkpoint: str, early: bool) -> None:
    simulation = simulate(gpipe(4, 3, checkpoint), [Costs(f=1, b=2, r=1)] * 3, early=early)
    assert draw(simulation) == picture(PICTURES[checkpoint, early])


def test_picture_of_unequal_stages_and_a_slow_wire() -> None:
    programs = gpipe(m=2, n=2, checkpoint="always")
    costs = [Costs(f=1, b=2, r=1), Costs(f=3, b=2, r=2)]
    assert draw(simulate(programs, costs, hop=1)) == picture("""
        stage 0 | F0 F1 .  .  .  .  .  .  .  R1 .  .  .  B1--- R0 .  B0---
        stage 1 | .  .  F0------ F1------ R1--- B1--- R0--- B0---
    """)


def test_picture_of_1f1b() -> None:
    simulation = simulate(
        one_f_one_b(4, 3, "never"), [Costs(f=1, b=2, r=1)] * 3, whole_batch_loss=False
    )
    assert draw(simulation) == picture("""
        stage 0 | F0 F1 F2 .  .  .  .  B0--- F3 B1--- .  B2--- .  B3---
        stage 1 | .  F0 F1 .  .  B0--- F2 B1--- F3 B2--- .  B3---
        stage 2 | .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3---
    """)


def test_picture_is_scaled_to_the_width() -> None:
    seconds = Costs(f=0.001, b=0.002, r=0.001)
    simulation = simulate(gpipe(2, 2, "never"), [seconds] * 2)
    assert draw(simulation, width=27) == picture("""
        stage 0 | F0 F1 .  .  .  B1--- B0---
        stage 1 | .  F0 F1 B1--- B0---
    """)
    assert draw(simulation, width=54) == picture("""
        stage 0 | F0--- F1--- .  .  .  .  .  .  B1--------- B0---------
        stage 1 | .  .  F0--- F1--- B1--------- B0---------
    """)


# Programs


@given(counts, counts, modes)
def test_each_task_is_planned_once_and_recompute_is_directly_before_its_backward(
    m: int, n: int, checkpoint: str
) -> None:
    programs = gpipe(m, n, checkpoint)
    assert len(programs) == n
    for tasks in programs:
        assert len(tasks) == len(set(tasks))
        assert [i for kind, i in tasks if kind == "F"] == list(range(m))
        assert [i for kind, i in tasks if kind == "B"] == list(reversed(range(m)))
        assert {i for kind, i in tasks if kind == "R"} == set(checkpointed(m, checkpoint))
        for task, following in zip(tasks, [*tasks[1:], None], strict=True):
            assert task.kind != "R" or following == Task("B", task.i)


@given(counts, counts)
def test_each_microbatch_meets_each_stage_once_in_the_cycles(m: int, n: int) -> None:
    cycles = list(clock_cycles(m, n))
    assert len(cycles) == m + n - 1
    assert all(i + j == k for k, cycle in enumerate(cycles) for i, j in cycle)
    flat = [pair for cycle in cycles for pair in cycle]
    assert sorted(flat) == [(i, j) for i in range(m) for j in range(n)]


# Simulation


def check_dependencies(simulation: Simulation, *, early: bool, hop: Any, whole: bool) -> None:
    """Every edge of the pipeline, written out once more and independently of the simulator."""
    n = len(simulation.spans)
    start = {(t.kind, t.i, j): s for j, spans in enumerate(simulation.spans) for t, s, _ in spans}
    end = {(t.kind, t.i, j): e for j, spans in enumerate(simulation.spans) for t, _, e in spans}
    loss = max(e for (kind, _, j), e in end.items() if kind == "F" and j == n - 1)
    for kind, i, j in start:
        at = start[kind, i, j]
        if kind == "F":
            assert j == 0 or at >= end["F", i, j - 1] + hop
            continue
        assert at >= end["F", i, j]
        assert not whole or at >= loss + (hop if j < n - 1 else 0)
        if j < n - 1 and (kind == "B" or not early):
            assert at >= end["B", i, j + 1] + hop
        if kind == "B" and ("R", i, j) in start:
            assert at >= end["R", i, j]


@unhurried
@given(counts, stages, modes, st.booleans(), amounts | st.just(0), st.booleans())
def test_simulation_respects_order_dependencies_and_costs(
    m: int, costs: list[Costs], checkpoint: str, early: bool, hop: Any, whole: bool
) -> None:
    order = gpipe if whole else one_f_one_b
    programs = order(m, len(costs), checkpoint)
    simulation = simulate(programs, costs, early=early, hop=hop, whole_batch_loss=whole)
    assert [[task for task, _, _ in spans] for spans in simulation.spans] == programs
    for spans, cost in zip(simulation.spans, costs, strict=True):
        for task, start, end in spans:
            assert end - start == {"F": cost.f, "B": cost.b, "R": cost.r}[task.kind]
        for before, after in pairwise(spans):
            assert before.end <= after.start
    check_dependencies(simulation, early=early, hop=hop, whole=whole)


@unhurried
@given(counts, stages, modes, st.booleans())
def test_no_task_waits_longer_than_it_must(
    m: int, costs: list[Costs], checkpoint: str, early: bool
) -> None:
    simulation = simulate(gpipe(m, len(costs), checkpoint), costs, early=early)
    spans = [span for stage in simulation.spans for span in stage]
    assert {span.start for span in spans} <= {0} | {span.end for span in spans}


@unhurried
@given(counts, stages)
def test_first_early_recompute_begins_when_backward_begins(m: int, costs: list[Costs]) -> None:
    spans = simulate(gpipe(m, len(costs), "always"), costs).spans
    assert {stage[m].task for stage in spans} == {Task("R", m - 1)}
    assert {stage[m].start for stage in spans} == {spans[-1][m - 1].end}


@unhurried
@given(counts, stages, modes)
def test_early_recompute_is_never_slower(m: int, costs: list[Costs], checkpoint: str) -> None:
    n = len(costs)
    early = ideal_time(m, n, costs, checkpoint)
    assert early <= ideal_time(m, n, costs, checkpoint, early=False)


@unhurried
@given(counts, counts, amounts, amounts, amounts)
def test_each_wire_delays_a_mini_batch_once_in_each_direction(
    m: int, n: int, f: Any, b: Any, hop: Any
) -> None:
    simulation = simulate(gpipe(m, n, "never"), [Costs(f, b, f)] * n, hop=hop)
    assert simulation.makespan == (m + n - 1) * (f + b) + 2 * (n - 1) * hop


# Ideal times


@unhurried
@given(counts, counts, amounts, amounts, amounts, modes, st.booleans())
def test_ideal_time_of_equal_stages_is_the_closed_form(
    m: int, n: int, f: Any, b: Any, r: Any, checkpoint: str, early: bool
) -> None:
    time = ideal_time(m, n, [Costs(f, b, r)] * n, checkpoint, early)
    assert time == closed_form(m, n, f, b, r, checkpoint, early)


@given(counts, counts, amounts, amounts, amounts)
def test_closed_forms_are_those_of_the_design(m: int, n: int, f: Any, b: Any, r: Any) -> None:
    fill = (m + n - 1) * f
    assert closed_form(m, n, f, b, r, "never") == (m + n - 1) * (f + b)
    assert closed_form(m, n, f, b, r, "always") == fill + m * (b + r) + (n - 1) * b
    assert closed_form(m, n, f, b, r, "always", early=False) == (m + n - 1) * (f + b + r)
    last, others = b, (m - 1) * (b + r)
    assert closed_form(m, n, f, b, r, "except_last") == fill + last + others + (n - 1) * b


@unhurried
@given(counts, counts, amounts, amounts, amounts, modes)
def test_early_recompute_saves_one_recompute_a_stage_but_the_last(
    m: int, n: int, f: Any, b: Any, r: Any, checkpoint: str
) -> None:
    costs = [Costs(f, b, r)] * n
    on_arrival = ideal_time(m, n, costs, checkpoint, early=False)
    saved = (n - 1) * r if checkpointed(m, checkpoint) else 0
    assert on_arrival - ideal_time(m, n, costs, checkpoint) == saved


@unhurried
@given(counts, counts, amounts, amounts)
def test_bubble_of_equal_stages(m: int, n: int, f: Any, b: Any) -> None:
    assert ideal_bubble(m, n, [Costs(f, b, f)] * n, "never") == Fraction(n - 1, m + n - 1)


@unhurried
@given(counts, stages, modes)
def test_the_slowest_stage_bounds_the_ideal_time(
    m: int, costs: list[Costs], checkpoint: str
) -> None:
    recomputes = len(checkpointed(m, checkpoint))
    bound = max(m * (c.f + c.b) + recomputes * c.r for c in costs)
    assert ideal_time(m, len(costs), costs, checkpoint) >= bound
    assert 0 <= ideal_bubble(m, len(costs), costs, checkpoint) < 1


# Other schedules


@unhurried
@given(counts, counts, amounts, amounts)
def test_1f1b_takes_as_long_as_gpipe_but_keeps_fewer_microbatches(
    m: int, n: int, f: Any, b: Any
) -> None:
    programs = one_f_one_b(m, n, "never")
    simulation = simulate(programs, [Costs(f, b, f)] * n, whole_batch_loss=False)
    assert simulation.makespan == closed_form(m, n, f, b, f, "never")
    for j, tasks in enumerate(programs):
        kept = [sum(1 if kind == "F" else -1 for kind, _ in tasks[:k]) for k in range(2 * m + 1)]
        assert max(kept) == min(m, n - j)


def test_stages_may_disagree_on_the_order_and_then_wait() -> None:
    programs = [read("F0 F1 B1 B0"), read("F0 F1 B0 B1"), read("F0 F1 B1 B0")]
    assert draw(simulate(programs, [Costs(1, 1, 1)] * 3)) == picture("""
        stage 0 | F0 F1 .  .  .  .  .  .  B1 B0
        stage 1 | .  F0 F1 .  .  .  B0 B1
        stage 2 | .  .  F0 F1 B1 B0
    """)


# Refusals


def refusal(programs: Sequence[Program], **options: Any) -> str:
    with pytest.raises(ValueError, match="may not deadlock") as error:
        simulate(programs, [Costs(1, 2, 1)] * len(programs), **options)
    return str(error.value)


def test_1f1b_deadlocks_when_the_loss_needs_the_whole_batch() -> None:
    assert refusal(one_f_one_b(2, 2, "never")) == (
        "programs may not deadlock: B0 on stage 0 waits for F1 on stage 1 and B0 on stage 1; "
        "B0 on stage 1 waits for F1 on stage 1; change programs"
    )


@pytest.mark.parametrize(
    ("programs", "stuck"),
    [
        (["B0 F0"], "B0 on stage 0 waits for F0 on stage 0"),
        (["F0 B0 R0"], "B0 on stage 0 waits for R0 on stage 0"),
        (["F0 F0"], "F0 on stage 0 waits for F0 on stage 0"),
        (["F0", "F0 F1"], "F1 on stage 1 waits for F1 on stage 0"),
        (["F0 B0", "F0"], "B0 on stage 0 waits for B0 on stage 1"),
    ],
    ids=["backward first", "recompute too late", "twice", "no forward", "no gradient"],
)
def test_a_program_that_cannot_finish_is_refused(programs: list[str], stuck: str) -> None:
    assert stuck in refusal([read(text) for text in programs], whole_batch_loss=False)


def test_refusals_say_which_argument_to_change() -> None:
    with pytest.raises(ValueError, match="at least one micro-batch: change m=0"):
        clock_cycles(0, 3)
    with pytest.raises(ValueError, match="at least one stage: change n=0"):
        gpipe(4, 0, "never")
    with pytest.raises(
        ValueError, match="one of always, except_last, never: change checkpoint='sometimes'"
    ):
        gpipe(4, 3, "sometimes")
    with pytest.raises(ValueError, match="at least one micro-batch: change m=-1"):
        closed_form(-1, 3, 1, 2, 1, "never")
    with pytest.raises(ValueError, match="3 stages but 2 costs; change costs"):
        ideal_time(4, 3, [Costs(1, 2, 1)] * 2, "never")


def test_a_program_can_be_written_and_read() -> None:
    for mode in MODES:
        for program in gpipe(12, 3, mode):
            assert read(write(program)) == program
