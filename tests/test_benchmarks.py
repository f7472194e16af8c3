"""The experiments: each runs, in a reduced form, and has the rows it should have."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from benchmarks import ablation, accuracy, memory, prediction, speed
from benchmarks.emulated import Emulated, chain, hourglass
from benchmarks.harness import Narrow, Table, even, medians, step
from rpcpipe import Pipe, World

two = pytest.mark.parametrize("world", [2], indirect=True)


@two
def test_speed_has_a_row_for_each_size_and_length(world: World) -> None:
    grid, skips, small = speed.measure(world, quick=True)
    assert grid.column("Experiment") == ["n=2, m=1", "n=2, m=4"]
    assert grid.column("torchgpipe") == ["1x", "1.55x"]
    assert skips.column("Experiment") == ["baseline", "pipeline-1", "pipeline-2"]
    assert small.column("Experiment") == ["baseline", "pipeline-1", "pipeline-2"]


@two
def test_ablation_has_a_row_for_each_component(world: World) -> None:
    table, _ = ablation.measure(world, quick=True)
    assert table.column("Experiment") == list(ablation.VARIANTS)
    same = dict(zip(ablation.VARIANTS, table.column("Same gradients"), strict=True))
    assert {name for name, equal in same.items() if equal != "2 of 2"} <= {
        "backward order off: as gradients arrive",
        "backward order off: all at once",
    }


@two
def test_memory_finds_a_model_that_fits_each_pipeline(world: World) -> None:
    (table,) = memory.measure(world, quick=True)
    assert table.column("Experiment") == ["baseline", "pipeline-1", "pipeline-2"]
    assert table.column("U-Net (B, C)")[1:] == ["(2, 8)", "(2, 8)"]
    assert all(float(p) <= memory.LIMIT for p in table.column("Each stage")[2].split())


@two
def test_accuracy_is_that_of_one_process(world: World) -> None:
    table, _ = accuracy.measure(world, quick=True)
    assert table.column("Parameters as in turn")[1:] == ["1 of 1 bitwise"] * 3
    _, in_turn, piped, _ = table.column("Top-1 error (%)")
    assert in_turn == piped


@two
def test_predict_keeps_the_slowest_stage_busier_than_calls_do(world: World) -> None:
    (table,) = prediction.measure(world, quick=True)
    (calls,), (predicted,) = table.column("One by one"), table.column("predict")
    assert float(calls.rstrip("%")) < float(predicted.rstrip("%"))


@two
def test_a_slowed_stage_shows_as_slower(world: World) -> None:
    x = torch.ones(8, 4)
    models = {"equal": chain(2, 4, len(x), 0.04), "slowed": chain(2, 4, len(x), 0.04)}
    slow = models["slowed"][1]
    assert isinstance(slow, Emulated)
    slow.seconds *= 4
    pipes = {name: Pipe(model, world, balance=[1, 1], chunks=4) for name, model in models.items()}
    found = medians({name: step(pipe, x) for name, pipe in pipes.items()}, 2)
    assert found["slowed"] > 2 * found["equal"]
    with pipes["slowed"].record() as timeline:
        step(pipes["slowed"], x)()
    busy = [sum(e.end - e.start for e in stage) for stage in timeline.events]
    assert busy[1] > 2 * busy[0]


@two
def test_a_narrow_world_has_fewer_stages(world: World) -> None:
    pipe = Pipe(chain(2, 4, 1, 0), Narrow(world, 1), balance=[2])  # type: ignore[arg-type]
    assert pipe(torch.ones(1, 4)).shape == (1, 4)


def test_carried_skips_give_the_same_results() -> None:
    model, x = hourglass(6, 4, 1, 0), torch.randn(2, 4)
    assert torch.equal(ablation.carried(model)(x), model(x))


def test_search_doubles_then_halves() -> None:
    asked: list[int] = []

    def fits(size: int) -> bool:
        asked.append(size)
        return size <= 21

    assert memory.largest(fits, 1, 64) == 20
    assert asked == [1, 2, 4, 8, 16, 32, 24, 20, 22]
    assert memory.largest(lambda _: False, 1, 64) == 0


def test_variants_take_turns() -> None:
    order: list[str] = []
    medians({name: lambda name=name: order.append(name) for name in "ab"}, 2)
    assert order == ["a", "b"] * 3


def test_layers_are_shared_out_evenly() -> None:
    assert even(8, 4) == [2, 2, 2, 2]
    assert sum(even(7, 3)) == 7


def test_table_is_markdown() -> None:
    table = Table("title", ["a", "long"])
    table.add(1.5, "x")
    assert str(table).splitlines()[2:] == ["| a   | long |", "| --- | ---- |", "| 1.5 | x    |"]


def test_commands_say_what_they_measure() -> None:
    command = [sys.executable, "-m", "benchmarks.speed", "--help"]
    assert "Speed" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_emulated_layers_differentiate_as_their_product() -> None:
    layer, x = Emulated(3, 0), torch.randn(2, 3, requires_grad=True)
    layer(x).sum().backward()
    assert torch.equal(x.grad, layer.scale.detach().expand(2, 3))
    assert torch.equal(nn.utils.parameters_to_vector([layer.scale.grad]), x.detach().sum(0))
