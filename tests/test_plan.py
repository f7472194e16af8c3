"""Plans: what is predicted, what is chosen, and how near the prediction comes."""

from __future__ import annotations

from statistics import median

import pytest
import torch
from torch import Tensor, nn

import rpcpipe
from benchmarks import plan as benchmark
from benchmarks.emulated import chain
from benchmarks.harness import medians, step
from rpcpipe import BalanceError, Candidate, Plan, World, schedule
from rpcpipe.memory import MIB
from rpcpipe.plan import _in_a_row, _Layer, _memory, _predict, _Way
from rpcpipe.schedule import Costs

two = pytest.mark.parametrize("world", [2], indirect=True)


class Hungry(nn.Module):
    """Keeps ``times`` tensors of its input's size for the backward pass."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = x.sin()
        return x


def wide(width: int = 4096) -> nn.Sequential:
    return nn.Sequential(*(Hungry(4) for _ in range(4)), nn.Linear(width, 1))


# ------------------------------------------------------------------------------- predictions


def test_step_time_and_bubble_are_those_of_the_schedule() -> None:
    costs = [Costs(1, 2, 1), Costs(2, 3, 2)]
    for mode in schedule.MODES:
        seconds, bubble = _predict(costs, [0.0] * 3, 4, mode)
        simulation = schedule.simulate(schedule.gpipe(4, 2, mode), costs)
        assert seconds == simulation.makespan
        assert bubble == pytest.approx(simulation.bubble)


def test_a_slow_link_is_the_pace_of_the_pipeline() -> None:
    seconds, bubble = _predict([Costs(1, 1, 0)] * 2, [0, 10.0, 0], 8, "never")
    assert seconds == 2 * (1 + 8 * 10 + 1)
    assert bubble == pytest.approx(1 - 16 / seconds)
    assert _predict([Costs(1, 1, 0)] * 2, [0, 0.5, 0], 8, "never")[0] == 2 * (9 + 0.5)


def test_the_driver_is_a_link_away_at_both_ends_and_no_gradient_goes_back_to_it() -> None:
    fast = [Costs(1, 1, 0)] * 2
    assert _predict(fast, [0.25, 0, 0], 8, "never")[0] == 18 + 0.25
    assert _predict(fast, [0, 0, 0.25], 8, "never")[0] == 18 + 2 * 0.25
    way = _Way(bandwidth=100.0, latency=0.5, overhead=lambda size: size)
    assert way.seconds(50) == 1.0
    assert way._replace(bandwidth=None).seconds(50) == 0.5


def test_memory_is_of_weights_inputs_and_what_each_mode_keeps() -> None:
    stage = [_Layer(0, 0, sent=10, saved=100, given=7, weights=1000), _Layer(0, 0, 20, 50, 3, 500)]
    assert _memory(stage, 7, 4, "never") == 1500 + 4 * 7 + 4 * (150 - 7) + 2 * 20
    for mode in ("except_last", "always"):
        assert _memory(stage, 7, 4, mode) == 1500 + 4 * 7 + 150 - 7 + 2 * 20


class Large(nn.Module):
    """Has no memory left behind another layer of the same graph."""

    def forward(self, x: Tensor) -> Tensor:
        if x.grad_fn is not None and x.grad_fn.name() != "CloneBackward0":
            raise torch.OutOfMemoryError
        return x * 2


def test_times_of_layers_are_scaled_to_those_of_the_whole_model() -> None:
    model, x = chain(4, 4, 8, 0.04), torch.ones(8, 4)
    layers = [_Layer(0.1, 0.4, 0, 0, 0, 0), _Layer(0.3, 0.4, 0, 0, 0, 0)]
    first, second = _in_a_row(layers, model, x, repeats=1, graphs=2)
    assert first.forward + second.forward == pytest.approx(0.04, rel=0.3)
    assert first.backward + second.backward == pytest.approx(0.08, rel=0.3)
    assert second.forward == pytest.approx(3 * first.forward)
    model = nn.Sequential(nn.Linear(4, 4), Large())
    assert _in_a_row(layers, model, x, repeats=1, graphs=2) == layers


def test_overhead_may_be_told_by_the_bytes_that_a_task_is_given_and_sends() -> None:
    sizes: list[float] = []
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))

    def overhead(size: float) -> float:
        sizes.append(size)
        return 1.0

    found = rpcpipe.plan(model, torch.ones(4, 4), 2, chunks=[2], repeats=1, overhead=overhead)
    rows = 2
    assert set(sizes) == {0, 4 * rows * (4 + 8), 4 * rows * (8 + 2)}
    # Three turns of forward and backward, with nothing worth mentioning beside the overhead.
    never = next(c for c in found.candidates if c.checkpoint == "never")
    assert never.seconds == pytest.approx(6, rel=0.05)


# ------------------------------------------------------------------------------------ choice


def test_the_fastest_is_chosen_and_the_model_is_as_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 8))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    found = rpcpipe.plan(model, torch.randn(16, 64), 2, repeats=1)
    assert found.best is found.candidates[0]
    assert found.best.seconds == min(c.seconds for c in found.candidates)
    assert {c.chunks for c in found.candidates} == {1, 2, 4, 8}  # batch norm takes two rows
    assert "chunks=16 left out, the model raised ValueError('Expected more than 1" in caplog.text
    assert {c.checkpoint for c in found.candidates} == set(schedule.MODES)
    assert all(
        sum(c.balance) == 4 and len(c.balance) == len(c.memory) == 2 for c in found.candidates
    )
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_what_does_not_fit_is_not_chosen_and_the_table_says_why() -> None:
    x = torch.randn(64, 4096, requires_grad=True)
    free = rpcpipe.plan(wide(), x, 2, repeats=1, chunks=[4])
    never = min(max(c.memory) for c in free.candidates if c.checkpoint == "never")
    tight = rpcpipe.plan(wide(), x, 2, repeats=1, chunks=[4], memory=never - 1)
    assert tight.best.checkpoint != "never"
    assert max(tight.best.memory) < never
    text = str(Plan(tight.best, [free.candidates[0], *tight.candidates], tight.limit))
    assert text.splitlines()[0].split() == [
        "balance", "chunks", "checkpoint", "ms", "a", "step", "bubble", "MiB", "in", "a", "stage",
    ]  # fmt: skip
    assert f"with at most {(never - 1) / MIB:.1f} MiB in a stage" in text
    with pytest.raises(ValueError, match="no plan fits into memory=1000 bytes a stage"):
        rpcpipe.plan(wide(), x, 2, repeats=1, chunks=[4], memory=1000)


def test_the_table_marks_the_best_and_what_is_too_large() -> None:
    small = Candidate((2, 2), 4, "always", 0.2, 0.25, (10 * MIB, 20 * MIB))
    large = Candidate((3, 1), 4, "never", 0.1, 0.2, (90 * MIB, 20 * MIB))
    lines = str(Plan(small, [large, small], 64 * MIB)).splitlines()
    assert lines[1].split() == ["x", "[3,", "1]", "4", "never", "100.0", "20%", "90.0", "20.0"]
    assert lines[2].split() == ["->", "[2,", "2]", "4", "always", "200.0", "25%", "10.0", "20.0"]
    assert lines[3].startswith("-> balance=[2, 2], chunks=4, checkpoint='always': the fastest of 2")
    assert lines[4] == "x  the fastest of all takes 100.0 ms, but 90.0 MiB in stage 0"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"stages": 9}, BalanceError, "each stage needs at least one layer"),
        ({"chunks": [0]}, ValueError, "chunks= lists whole numbers of at least 1, got 0"),
        ({"chunks": [64]}, ValueError, "plan\\(\\) takes a whole mini-batch"),
        ({"memory": 0}, ValueError, "memory= is positive, got 0"),
        ({"bandwidth": -1.0}, ValueError, "bandwidth= is positive"),
        ({"latency": -1.0}, ValueError, "latency= is a number of seconds, not negative, got -1.0"),
        ({"overhead": lambda size: -size - 1}, ValueError, "overhead= is a number of seconds"),
    ],
)
def test_bad_argument_is_refused(options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        rpcpipe.plan(wide(), torch.randn(8, 4096), **{"stages": 2, **options})


def test_a_model_on_meta_is_refused() -> None:
    with pytest.raises(ValueError, match="put model and sample on a device, not on meta"):
        rpcpipe.plan(nn.Sequential(nn.Linear(2, 2, device="meta")), torch.ones(4, 2), 1)


# ------------------------------------------------------------------- predicted and measured


@two
def test_step_time_is_as_predicted(world: World) -> None:
    # Layers that sleep, since others may use the cores. On an idle machine the ratio is within
    # 0.1 of 1 (benchmarks/plan.py); messages take longer on a busy one, and nothing is faster.
    x = torch.ones(16, 4)
    model = chain(6, 4, len(x), 0.15)
    found = rpcpipe.plan(model, x, 2, chunks=[4], repeats=1)
    assert found.best.balance == (3, 3)
    ratios = []
    for mode in ("never", "always"):
        c = next(c for c in found.candidates if c.checkpoint == mode and c.balance == (3, 3))
        pipe = rpcpipe.Pipe(chain(6, 4, len(x), 0.15), world, **Plan(c, [c], None).options)
        (seconds,) = medians({"": step(pipe, x)}, 3).values()
        ratios.append(seconds / c.seconds)
    assert all(0.85 < ratio < 1.6 for ratio in ratios), ratios
    assert 0.5 < ratios[0] / ratios[1] < 2


@two
def test_memory_is_as_predicted(world: World) -> None:
    x = torch.randn(128, 4096, requires_grad=True)  # 2 MiB
    found = rpcpipe.plan(wide(), x, 2, chunks=[4], repeats=1, param_factor=2)
    c = next(c for c in found.candidates if c.checkpoint == "never" and c.balance == (2, 3))
    pipe = rpcpipe.Pipe(wide(), world, **Plan(c, [c], None).options)
    held = []
    for _ in range(3):
        pipe.memory()
        step(pipe, x)()
        held.append([s.parameters + s.gradients + s.activations for s in pipe.memory().stages])
    # What the allocator keeps comes on top, see Pipe.memory.
    for j in range(2):
        assert 0.9 < median(sizes[j] for sizes in held) / c.memory[j] < 1.7


@two
def test_benchmark_has_a_row_of_each(world: World) -> None:
    (times,) = benchmark.times(world, quick=True)
    assert times.column("Model") == ["emulated chain"]
    assert 0.8 < float(times.column("Ratio")[0]) < 3
