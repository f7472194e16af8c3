"""The harness of `make bench`: peers do the same work, what is slow shows as slow, none stays."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from benchmarks import bench, record, workloads
from benchmarks.children import ChildError, Commands, Group
from benchmarks.limit import Limit, limits
from benchmarks.record import Result, Skipped
from benchmarks.rows import footprint, hop, link, steps
from benchmarks.rows.emulation import Emulation, recompute
from rpcpipe import World

two = pytest.mark.parametrize("world", [2], indirect=True)


@pytest.fixture(scope="module")
def others() -> Iterator[dict[str, Group]]:
    with steps.peers() as groups:
        yield groups


@two
@pytest.mark.parametrize("mode", steps.MODES)
def test_gradients_of_all_peers_are_ours(world: World, others: dict[str, Group], mode: str) -> None:
    torch.manual_seed(0)
    ours = steps.Ours(world, "mlp", mode, quick=True)
    plain, x = workloads.ALL["mlp"].model(), workloads.ALL["mlp"].batch(quick=True)
    for part in x.chunk(workloads.M):
        workloads.loss(plain(part)).backward()
    ours.step()
    wanted = ours.gradients()
    steps.check_same("in turn", workloads.gradients(plain), wanted)
    for name, group in others.items():
        group.call("load", "mlp", 2, mode, True)
        if name != "RPC chain":
            group.call("step")
        steps.check_same(name, steps.gradients_of(group), wanted)


def test_other_gradients_are_noticed() -> None:
    wanted = {"0.weight": torch.ones(2)}
    with pytest.raises(AssertionError, match=r"peer, 0\.weight"):
        steps.check_same("peer", {"0.weight": torch.tensor([1.0, 1.01])}, wanted)
    with pytest.raises(AssertionError, match=r"1\.weight"):
        steps.check_same("peer", {**wanted, "1.weight": torch.ones(1)}, wanted)


def test_a_slowed_stage_raises_the_limit() -> None:
    with limits(2) as alone:
        equal = Limit(alone, "mlp", 2, "except_last", quick=True)
        equal.sample(0.2)
        slowed = Limit(alone, "mlp", 2, "except_last", quick=True, slowed=1)
        slowed.sample(0.2)
    first, second = slowed.costs()
    assert second.f > first.f + 0.04
    assert second.r > first.r + 0.04
    # All its forward passes and recomputations, one after the other.
    assert slowed.seconds() > max(equal.seconds(), 0.04 * (2 * workloads.M - 1))


@two
def test_a_slowed_stage_shows_in_the_step(world: World) -> None:
    emulation = Emulation(world, [(2, 4)])
    emulation.measure(0.001, 1)
    fast = emulation.measure(0.001, 3)[2, 4]
    slow = emulation.measure(0.02, 3)[2, 4]
    assert slow.step >= slow.ideal * 0.99
    assert slow.step > 2 * fast.step


@two
def test_late_recomputation_shows_as_later(world: World) -> None:
    (saving,) = recompute(world, 0.05, 1, m=4)
    assert saving.detail["saved_ms"] > 0.3 * saving.detail["possible_ms"]


def test_slope_finds_what_a_hop_costs() -> None:
    times = {(n, m): 5 + 3 * n + 2 * m + 0.5 * n * m for n in (1, 2, 4) for m in (4, 16)}
    assert hop.slope(times) == pytest.approx(
        {"constant": 5, "stage": 3, "microbatch": 2, "hop": 0.5}
    )


def test_arithmetic_counts_what_a_layer_keeps() -> None:
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh())
    x = torch.zeros(2, 4)
    assert footprint.arithmetic(model, 1, 0, x) == {
        "parameters": 128,
        "gradients": 128,
        "optimizer": 256,
        "boundary inputs": 8 * 32,
        "activations": 64,  # tanh keeps its result, the linear layer what it was given
    }


class Bad:
    """An actor whose methods fail in each way."""

    def __init__(self, rank: int, n: int, port: int) -> None:
        pass

    def serve(self, commands: Commands) -> None:
        commands.ready()
        commands.follow(self)

    def fail(self) -> None:
        raise ValueError("of purpose")

    def exit(self) -> None:
        raise SystemExit(3)


def test_children_report_failures_and_end() -> None:
    with Group(Bad, 1) as group:
        (pid,) = group.pids
        with pytest.raises(ChildError, match="of purpose"):
            group.call("fail")
        with pytest.raises(ChildError, match="has ended"):
            group.call("exit")
    assert not psutil.pid_exists(pid)


def test_a_result_is_met_or_not() -> None:
    assert Result("a", 1.0, 1.05).met
    assert not Result("a", 0.8, 0.9, atmost=False).met
    assert Result("a", 1.0).met is None


def test_rows_are_chosen_by_name() -> None:
    assert bench.chosen("hop,limit") == ["limit", "hop"]
    assert bench.chosen(None) == list(bench.ROWS)
    with pytest.raises(SystemExit, match="nonsense"):
        bench.chosen("nonsense")


def test_a_row_is_saved_with_its_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    results = [Result("a", 1.0, 1.05, detail={"ms": 3.0})]
    path = record.save("row", "A row", results, False, record.machine(), 1.0)
    saved = json.loads(path.read_text())
    assert saved["machine"]["torch"] == torch.__version__
    assert saved["results"][0]["met"] is True
    skipped = record.save("row", "A row", Skipped("no root"), True, record.machine(), 1.0)
    assert json.loads(skipped.read_text())["skipped"] == "no root"


def test_a_link_carries_the_bytes_of_a_step() -> None:
    row = link.run(quick=True)
    if isinstance(row, Skipped):
        pytest.skip(row.reason)
    on_wire = row[-1]
    assert on_wire.met, on_wire
