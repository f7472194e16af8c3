"""Replicas: pipelines of the same model, whose gradients are averaged once a mini-batch."""

from __future__ import annotations

import gc
import logging
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.nn.functional as F
from team import Ending, Team, await_true
from test_saving import empty_the_disk, fill_the_disk
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from toys import all_grads, await_equal, check_equal, grads, mlp

import rpcpipe
from rpcpipe import replicas
from rpcpipe.microbatch import sizes
from rpcpipe.skip import pop, skippable, stash

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_ddp.py"
R, N = 2, 2
ROWS = (8, 5)  # of each replica: other micro-batches, and other numbers of them


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    team = Team(N, R)
    try:
        yield team
        for code, err in team.close():
            assert (code, err) == (0, "")
    finally:
        team.kill()


def data(replica: int, step: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + replica)
    return torch.randn(ROWS[replica], 4, generator=generator)


def loss_of(out: Tensor) -> Tensor:
    return out.pow(2).mean()


def plain_step(model: nn.Module, step: int = 0) -> None:
    """The average over replicas, in one process."""
    for replica in range(R):
        (loss_of(model(data(replica, step))) / R).backward()


def count_reductions(stage: Any) -> None:
    # The reducer keeps the hook where no collector of garbage sees it: it may not hold the stage.
    counts = stage.extras["reductions"] = [0]

    def hook(_, bucket):  # type: ignore[no-untyped-def]  # DDP looks at annotations
        counts[0] += 1
        work: Any = dist.all_reduce(bucket.buffer().div_(R), async_op=True, group=group)
        return work.get_future().then(lambda future: future.value()[0])

    group = stage.averaging._ddp.process_group
    stage.averaging._ddp.register_comm_hook(None, hook)


def reductions(stage: Any) -> int:
    return stage.extras["reductions"][0]


def make(world: rpcpipe.World, build: Callable[[], nn.Sequential], **options: Any) -> rpcpipe.Pipe:
    model = build()
    half = len(model) // 2
    return rpcpipe.Pipe(model, world, balance=[half, len(model) - half], **options)


# ------------------------------------------------------------------------------- averaging


def counted_steps(world: rpcpipe.World, mode: str) -> Any:
    pipe = make(world, mlp, chunks=4, checkpoint=mode)
    pipe._everywhere("count", count_reductions)
    for step in range(3):  # they add up
        loss_of(pipe(data(world.replica, step))).backward()
    return all_grads(pipe), pipe._everywhere("count", reductions)


@pytest.mark.parametrize("mode", ["always", "except_last", "never"])
def test_gradients_are_averaged_once_a_mini_batch(team: Team, mode: str) -> None:
    plain = mlp()
    for step in range(3):
        plain_step(plain, step)
    (first, counts), (second, _) = team.do(counted_steps, mode)
    assert counts == [3, 3]
    check_equal(first, grads(plain))
    assert_same(first, second)


def step_with_the_loss_in_the_last_stage(world: rpcpipe.World) -> dict[str, Tensor]:
    pipe, x = make(world, mlp, chunks=4), data(world.replica)
    pipe.loss(x, torch.zeros(len(x), 2), F.mse_loss).backward()
    return all_grads(pipe)


def test_the_loss_may_be_in_the_last_stage(team: Team) -> None:
    plain = mlp()
    plain_step(plain)
    first, second = team.do(step_with_the_loss_in_the_last_stage)
    check_equal(first, grads(plain))
    assert_same(first, second)


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


# ---------------------------------------------------------------------- kinds of models


class TwoWays(nn.Module):
    """Uses one of two layers, by the sign of what a row says; a third one never."""

    def __init__(self) -> None:
        super().__init__()
        self.plus, self.minus, self.idle = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.plus(x) if x.sum() > 0 else self.minus(x)


def two_ways() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), TwoWays(), TwoWays(), nn.Linear(4, 2))


def nothing_to_train() -> nn.Sequential:
    model = mlp()
    model[:3].requires_grad_(False)
    return model


def partly_frozen() -> nn.Sequential:
    model = mlp()
    model[0].requires_grad_(False)
    model[5].weight.requires_grad_(False)
    return model


def tied() -> nn.Sequential:
    model = mlp()
    model[4].weight = model[2].weight
    return model


@skippable(stash=["x"])
class Stash(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("x", x)
        return x


@skippable(pop=["x"])
class Pop(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x + (yield pop("x"))


def skipping() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 4), Stash(), nn.Linear(4, 4), nn.Tanh(), Pop(), nn.Linear(4, 2)
    )


def steps_of(
    world: rpcpipe.World, build: Callable[[], nn.Sequential], accumulate: bool, mode: str
) -> dict[str, Tensor]:
    """Three mini-batches, of which those before the last may be left without an average."""
    pipe = make(world, build, chunks=3, checkpoint=mode)
    for step in range(3):
        with pipe.no_sync() if accumulate and step < 2 else nullcontext():
            loss_of(pipe(data(world.replica, step))).backward()
    if accumulate:
        loss_of(pipe(data(world.replica, 3))).backward()
    return all_grads(pipe)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("build", [two_ways, nothing_to_train, partly_frozen, tied, skipping])
def test_any_model(team: Team, build: Callable[[], nn.Sequential], accumulate: bool) -> None:
    plain = build()
    for step in range(4 if accumulate else 3):
        for replica in range(R):
            for rows in data(replica, step).split(sizes(ROWS[replica], 3)):
                loss = plain(rows).pow(2).sum() / ROWS[replica] / 2
                (loss / R).backward()
    first, second = team.do(steps_of, build, accumulate, "except_last")
    check_equal(first, grads_of_copies(plain))
    assert_same(first, second)


def grads_of_copies(plain: nn.Module) -> dict[str, Tensor]:
    """Under all the names of a parameter that two stages hold."""
    wanted = dict(plain.named_parameters(remove_duplicate=False))
    return {name: p.grad for name, p in wanted.items() if p.grad is not None}


# ------------------------------------------------------------------------------- training


def train(world: rpcpipe.World, mode: str) -> Any:
    torch.manual_seed(world.replica)  # as layers on meta are: replica 0's are everybody's
    with torch.device("meta"):
        model = mlp()
    pipe = make(world, lambda: model, chunks=4, checkpoint=mode)
    start = pipe.state_dict()
    opt = pipe.optimizer(torch.optim.Adam, lr=0.01)
    norms = []
    for step in range(20):
        loss_of(pipe(data(world.replica, step))).backward()
        norms.append(opt.step(max_norm=1.0))
        opt.zero_grad()
    return start, pipe.state_dict(), norms


def test_training_is_that_of_one_process_on_all_data(team: Team) -> None:
    (start, first, norms), (_, second, _) = team.do(train, "except_last")
    assert_same(first, second)
    plain = mlp()
    plain.load_state_dict(start)
    opt = torch.optim.Adam(plain.parameters(), lr=0.01)
    for step in range(20):
        plain_step(plain, step)
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        torch.testing.assert_close(norms[step].float(), norm)
        opt.step()
        opt.zero_grad()
    assert not torch.equal(first["0.weight"], start["0.weight"])
    check_equal(first, plain.state_dict())


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
    )


def two_steps_at_a_time(world: rpcpipe.World) -> Any:
    pipe = make(world, normed, chunks=2, deferred_batch_norm=True)
    outs = [pipe(data(world.replica, step)) for step in range(2)]
    for out in reversed(outs):
        loss_of(out).backward()
    return pipe.state_dict()


def test_buffers_are_those_of_the_first_replica(team: Team) -> None:
    first, second = team.do(two_steps_at_a_time)
    assert_same(first, second)
    plain = normed()
    for step in range(2):
        plain(data(0, step))
    # Those of the second batch norm depend on how the first one's micro-batches were divided.
    keys = [key for key in first if key.startswith("1.")]
    check_equal({k: first[k] for k in keys}, {k: plain.state_dict()[k] for k in keys})


# ------------------------------------------------------------------------------- failures


class Fragile(nn.Module):
    """A linear layer that fails where a row is marked by its index and the phase."""

    PHASES = ("forward", "backward", "recompute")

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k, self.linear = k, nn.Linear(4, 4)

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, marks = pair
        here = [phase for p, phase in enumerate(self.PHASES) if (marks == 10 * self.k + p).any()]
        if "forward" in here or ("recompute" in here and rpcpipe.is_recomputing()):
            raise ArithmeticError("of a layer")
        out = self.linear(x)
        if "backward" in here and out.requires_grad:
            out.register_hook(self.fail)
        return out, marks

    @staticmethod
    def fail(gradient: Tensor) -> None:
        raise ArithmeticError("of a layer")


def fragile() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*map(Fragile, range(6)))


Case = tuple[int, int, str, int]  # replica, layer, phase, micro-batch
CASES: list[Case] = [
    (0, 1, "forward", 0), (1, 4, "forward", 2), (0, 4, "backward", 2), (1, 4, "backward", 0),
    (0, 3, "backward", 0), (1, 0, "backward", 0), (0, 1, "recompute", 1), (1, 1, "recompute", 0),
]  # fmt: skip


def failing_steps(world: rpcpipe.World) -> list[Any]:
    pipe = make(world, fragile, chunks=3, checkpoint="always")
    found: list[Any] = []
    for replica, k, phase, i in CASES:
        x = data(world.replica)
        marks = torch.full((len(x), 1), -1)
        if replica == world.replica:
            marks[sum(sizes(len(x), 3)[:i])] = 10 * k + Fragile.PHASES.index(phase)
        try:
            loss_of(pipe((x, marks))[0]).backward()
        except rpcpipe.StageError as exc:
            found.append((exc.stage, exc.microbatch, exc.phase))
        except RuntimeError as exc:
            found.append(str(exc))
        pipe.zero_grad()
        loss_of(pipe((x, torch.full_like(marks, -1)))[0]).backward()
        found.append(all_grads(pipe))
        pipe.zero_grad()
    return found


def test_a_step_that_fails_in_one_replica_fails_in_all_and_the_next_works(team: Team) -> None:
    plain = fragile()
    for replica in range(R):
        x = data(replica)
        (loss_of(plain((x, torch.full((len(x), 1), -1)))[0]) / R).backward()
    answers = team.do(failing_steps)
    for n, (replica, k, phase, i) in enumerate(CASES):
        (own, gradients), (others, same) = (
            answers[r][2 * n : 2 * n + 2] for r in (replica, 1 - replica)
        )
        assert own == (k // 3, i, phase), CASES[n]
        assert f"failed in replica {replica}" in others, CASES[n]
        check_equal(gradients, grads(plain))
        assert_same(gradients, same)


# ----------------------------------------------------------------------------- wrap_stage


def with_hook(module: nn.Module, world: rpcpipe.World, j: int) -> nn.Module:
    """Averages in half the bytes. (DDP refuses the hook itself where there is no GPU.)"""

    def hook(group, bucket):  # type: ignore[no-untyped-def]
        return default_hooks.bf16_compress_hook(group, bucket)

    group = world.data_parallel_group(j)
    ddp = DistributedDataParallel(module, process_group=group)
    ddp.register_comm_hook(group, hook)
    return ddp


def with_power_sgd(module: nn.Module, world: rpcpipe.World, j: int) -> nn.Module:
    group = world.data_parallel_group(j)
    ddp = DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=True)
    state = powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2, min_compression_rate=0.1)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    module.power_sgd = [state]
    return ddp


def sharded(module: nn.Module, world: rpcpipe.World, j: int) -> nn.Module:
    mesh = DeviceMesh.from_group(world.data_parallel_group(j), "cpu")
    for layer in module.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(module, mesh=mesh)  # type: ignore[no-any-return]


def compiled(module: nn.Module, world: rpcpipe.World, j: int) -> nn.Module:
    assert (world.replicas, world.is_driver) == (R, False)
    return torch.compile(module, backend="aot_eager")  # type: ignore[return-value]


def in_ddp(module: nn.Module, world: rpcpipe.World, j: int) -> nn.Module:
    return DistributedDataParallel(module, process_group=world.data_parallel_group(j))


def unused_in_ddp(world: rpcpipe.World) -> list[dict[str, Tensor]]:
    pipe, found = make(world, two_ways, chunks=3, wrap_stage=in_ddp), []
    for step in range(2):
        loss_of(pipe(data(world.replica, step))).backward()
        found.append(all_grads(pipe))
        pipe.zero_grad()
    return found


def test_parameters_that_no_row_uses_in_the_last_micro_batch(team: Team) -> None:
    first, second = team.do(unused_in_ddp)
    for step, found in enumerate(first):
        plain = two_ways()
        for replica in range(R):
            for rows in data(replica, step).split(sizes(ROWS[replica], 3)):
                (plain(rows).pow(2).sum() / ROWS[replica] / 2 / R).backward()
        # This DDP was not told to find parameters that no replica uses: they get zeros.
        wanted = {k: torch.zeros_like(p) for k, p in plain.named_parameters()} | grads(plain)
        check_equal(found, wanted)
        assert_same(found, second[step])


WRAPS = {
    "nothing": None,
    "hook": with_hook,
    "powersgd": with_power_sgd,
    "fsdp": sharded,
    "compile": compiled,
}


def wrapped(world: rpcpipe.World, wrap: str) -> Any:
    pipe = make(world, mlp, chunks=3, wrap_stage=WRAPS[wrap])
    opt = pipe.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    norms = []
    for step in range(4):
        loss_of(pipe(data(world.replica, step))).backward()
        norms.append(float(opt.step(max_norm=1.0)))
        opt.zero_grad()
    state = pipe.state_dict()
    pipe.load_state_dict({key: value + 1 for key, value in state.items()})
    assert_same(pipe.state_dict(), {key: value + 1 for key, value in state.items()})
    names = [info.name for info in pipe.named_parameters_info()]
    return state, norms, names, [pipe.apply_to_stage(j, type_of) for j in range(N)]


def save_weights(world: rpcpipe.World, path: Path) -> Any:
    from safetensors.torch import load_file  # which need not be there

    pipe = make(world, mlp, wrap_stage=sharded)
    saved = pipe.save(path)
    world.all_reduce(0)  # it is there
    pipe.load_state_dict({key: 0 * value for key, value in pipe.state_dict().items()})
    pipe.load_state_dict(load_file(path))
    return saved, pipe.state_dict()


def test_one_replica_saves_the_weights_of_all(team: Team, tmp_path: Path) -> None:
    pytest.importorskip("safetensors.torch")
    path = tmp_path / "weights.safetensors"
    (saved, first), (nothing, second) = team.do(save_weights, path)
    assert (saved, nothing) == (path, None)
    assert list(tmp_path.iterdir()) == [path]
    assert_same(first, dict(mlp().state_dict()))
    assert_same(first, second)


def with_dropout() -> nn.Sequential:
    return nn.Sequential(*mlp()[:3], nn.Dropout(0.5), *mlp()[3:5], nn.Dropout(0.5), mlp()[5])


def drawing(pipe: rpcpipe.Pipe, opt: Any, replica: int) -> list[Any]:
    """Two steps; what was drawn from all there is to draw from, and the weights after them."""
    drawn: list[Any] = []
    for step in range(2):
        x = data(replica, step)
        loss_of(pipe(x)).backward()
        opt.step()
        opt.zero_grad()
        drawn += [random.random(), float(torch.rand(())), pipe.apply_to_stage(1, draw)]
    with torch.no_grad():
        drawn.append(pipe(data(replica)))  # a mask of this replica alone, averaged with no other
    return [drawn, pipe.state_dict()]


def draw(module: nn.Module) -> float:
    return random.random()


def save_and_go_on(world: rpcpipe.World, folder: Path) -> list[list[Any]]:
    """What was drawn after a checkpoint, and once more after it was loaded."""
    random.seed(world.replica)
    torch.manual_seed(world.replica)
    first = make(world, with_dropout)
    opt = first.optimizer(torch.optim.AdamW, lr=0.1)
    before = drawing(first, opt, world.replica)
    first.save(folder, optimizer=opt)
    after = drawing(first, opt, world.replica)
    torch.manual_seed(7)
    second = make(world, with_dropout)
    opt = second.optimizer(torch.optim.AdamW)
    drawing(second, opt, world.replica)
    second.load(folder, optimizer=opt)
    return [before, after, drawing(second, opt, world.replica)]


@pytest.mark.parametrize("world", [2], indirect=True)
def test_every_replica_goes_on_with_its_own_random_numbers(
    team: Team, world: rpcpipe.World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The states of all but the first replica were derived from a seed when they were loaded."""
    found = team.do(save_and_go_on, tmp_path)
    for before, after, again in found:
        assert after[0][:-1] == again[0][:-1]
        assert torch.equal(after[0][-1], again[0][-1])
        assert all(torch.equal(after[1][name], value) for name, value in again[1].items())
        assert after[0][0] != before[0][0]
    first, second = (after[0] for _, after, _ in found)
    assert first[0] != second[0], "each draws from its own"
    alone = make(world, with_dropout)  # with fewer replicas
    opt = alone.optimizer(torch.optim.AdamW)
    alone.load(tmp_path, optimizer=opt)
    assert "another random state" not in caplog.text
    assert first[:2] == drawing(alone, opt, 0)[0][:2]
    alone.save(tmp_path, optimizer=opt)
    (_, log0), (state, log1) = team.do(load_from_one, tmp_path)  # with more
    assert log0 == ""
    assert "with balance [4, 4] and 1 replicas: what layers draw goes on from another" in log1
    assert_same(state, alone.state_dict())


def load_from_one(world: rpcpipe.World, folder: Path) -> tuple[dict[str, Tensor], str]:
    with Warnings() as lines:
        pipe = make(world, with_dropout)
        pipe.load(folder, optimizer=pipe.optimizer(torch.optim.AdamW))
    return pipe.state_dict(), "".join(lines)


class Warnings(logging.Handler):
    """What rpcpipe warns of in this process, while it is entered."""

    def __init__(self, signal: Path | None = None) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        self._signal = signal

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        if self._signal is not None:
            self._signal.touch()

    def __enter__(self) -> list[str]:
        logging.getLogger("rpcpipe").addHandler(self)
        return self.lines

    def __exit__(self, *_: object) -> None:
        logging.getLogger("rpcpipe").removeHandler(self)


def save_when_told(world: rpcpipe.World, folder: Path) -> list[str]:
    """The second replica saves when the first one has said that it waits for that."""
    pipe = make(world, mlp)
    replicas.PATIENCE = 0.1
    told = folder / "told"
    if world.replica == 1:
        await_true(told.exists, 30.0)
    with Warnings(told) as lines:
        pipe.save(folder / "kept")
    return lines


def test_a_driver_that_waits_for_the_others_to_save_says_so(team: Team, tmp_path: Path) -> None:
    (line,), others = team.do(save_when_told, tmp_path)
    assert "waits for those of the other replicas to call pipe.save" in line
    assert others == []
    assert os.listdir(tmp_path / "kept") == ["checkpoint-000001"]


def save_after_a_failure(world: rpcpipe.World, folder: Path) -> tuple[str, Path | None]:
    pipe, said = make(world, mlp), ""
    if world.replica == 0:
        pipe.apply_to_stage(1, fill_the_disk)
    pipe.save(folder, block=False)
    try:
        pipe.save(folder)
    except rpcpipe.StageError as exc:
        said = exc.message
        pipe.apply_to_stage(1, empty_the_disk)
    loss_of(pipe(data(world.replica))).backward()
    return said, pipe.save(folder)


def test_a_replica_does_not_wait_for_one_whose_last_saving_has_failed(
    team: Team, tmp_path: Path
) -> None:
    first, second = team.do(save_after_a_failure, tmp_path)
    assert "File too large" in first[0]
    assert first[1] == tmp_path / "checkpoint-000001"
    assert second == ("", None)


def type_of(module: nn.Module) -> tuple[str, int]:
    sent = [state.iter for state in getattr(module, "power_sgd", [])]
    return type(module).__name__, sum(sent)


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_stage_wrapped_by_its_user(team: Team, wrap: str) -> None:
    (first, norms, names, kinds), (second, same_norms, _, _) = team.do(wrapped, wrap)
    assert_same(first, second)
    assert norms == same_norms
    tolerance = {"hook": 1e-2, "powersgd": 1e-1}.get(wrap, 1e-5)
    plain = mlp()
    assert names == list(first) == list(plain.state_dict())
    opt = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        plain_step(plain, step)
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        assert norms[step] == pytest.approx(float(norm), rel=tolerance)
        opt.step()
        opt.zero_grad()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(first[name], value, rtol=tolerance, atol=tolerance)
    assert kinds[0][1] == 0 if wrap != "powersgd" else kinds[0][1] == 4
    assert kinds[0][0] == ("FSDPPartition" if wrap == "fsdp" else "Partition")


class FirstIsDetached(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x.detach() if self.calls == 1 else x


def first_is_detached(world: rpcpipe.World, wrap: str) -> Any:
    model = nn.Sequential(*mlp(), FirstIsDetached())
    options = {"chunks": 3, "checkpoint": "never", "wrap_stage": WRAPS[wrap]}
    pipe = rpcpipe.Pipe(model, world, balance=[3, 4], **options)
    loss_of(pipe(data(world.replica))).backward()
    return all_grads(pipe)


def shards_without_a_gradient(world: rpcpipe.World) -> str:
    with pytest.raises(rpcpipe.StageError) as caught:
        first_is_detached(world, "fsdp")
    return caught.value.message


def test_no_gradient_reaches_the_stages_in_the_last_backward_pass(team: Team) -> None:
    plain = mlp()
    for replica in range(R):
        _, *others = data(replica).split(sizes(ROWS[replica], 3))
        out = plain(torch.cat(others))
        (out.pow(2).sum() / 2 / ROWS[replica] / R).backward()
    for found in team.do(first_is_detached, "nothing"):
        check_equal(found, grads(plain))
    for message in team.do(shards_without_a_gradient):
        assert "no gradient reaches a stage that is sharded" in message


# -------------------------------------------------------------------------------- overlap


class Log(nn.Module):
    """Notes when a gradient passes, and in a file when the last one of the second step does."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.seen: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(self.note)
        return x

    def note(self, _: Tensor) -> None:
        self.seen.append("backward")
        if self.seen.count("backward") == 2 * 3:
            self.last.touch()


def waits_for_the_stage_before(module: nn.Module, world: rpcpipe.World, j: int) -> nn.Module:
    """The average is not in before the stage before is through its last backward pass."""
    log, group = module[1], world.data_parallel_group(j)
    log.last = log.folder / f"replica {world.replica}, stage {j}"
    in_order = ThreadPoolExecutor(1)
    awaited = log.folder / f"replica {world.replica}, stage {max(0, j - 1)}"

    def hook(_, bucket):  # type: ignore[no-untyped-def]
        log.seen.append("average")
        future: torch.futures.Future[Tensor] = torch.futures.Future()

        def finish() -> None:
            if j > 0 and log.seen.count("backward") > 3:
                await_true(awaited.exists, 30.0)
            dist.all_reduce(bucket.buffer().div_(R), group=group)
            future.set_result(bucket.buffer())

        in_order.submit(finish)
        return future

    ddp = DistributedDataParallel(module, process_group=group, bucket_cap_mb=1e-6)
    ddp.register_comm_hook(None, hook)
    return ddp


def overlapping(world: rpcpipe.World, folder: Path) -> Any:
    layers = [nn.Linear(4, 4), Log(folder), nn.Linear(4, 4)]
    layers += [nn.Linear(4, 4), Log(folder), nn.Linear(4, 2)]
    options = {"chunks": 3, "wrap_stage": waits_for_the_stage_before}
    pipe = make(world, lambda: nn.Sequential(*layers), **options)
    for _ in range(2):  # DDP makes its buckets in the first
        loss_of(pipe(data(world.replica))).backward()
    return [pipe.apply_to_stage(j, events) for j in range(N)]


def events(module: nn.Module) -> list[str]:
    return module[1].seen  # type: ignore[no-any-return]


def test_the_average_overlaps_the_last_backward_pass(team: Team, tmp_path: Path) -> None:
    for logs in team.do(overlapping, tmp_path):
        for log in logs:
            second = log[log.index("average") + 1 :]
            # What comes after the log is averaged before a gradient passes it for the last time.
            assert second[:3] == ["backward", "backward", "average"]
            assert second.count("backward") == 3


# --------------------------------------------------------------------------- what one may ask


def averages(world: rpcpipe.World) -> Any:
    r = world.replica
    integers, found = torch.tensor([r, 3]), torch.full((2,), r, dtype=torch.bfloat16)
    numbers = world.all_reduce(r), world.all_reduce(r == 0)
    return [*numbers, world.all_reduce(integers), world.all_reduce(found), found]


def test_a_metric_is_averaged_over_drivers(team: Team) -> None:
    for r, (number, share, integers, halves, given) in enumerate(team.do(averages)):
        assert (number, share) == (0.5, 0.5)
        torch.testing.assert_close(integers, torch.tensor([0.5, 3], dtype=torch.float64))
        torch.testing.assert_close(halves, torch.full((2,), 0.5, dtype=torch.bfloat16))
        assert given.tolist() == [r, r]


def static(module: nn.Module, world: rpcpipe.World, j: int) -> nn.Module:
    group = world.data_parallel_group(j)
    return DistributedDataParallel(module, process_group=group, static_graph=True)


def forgotten(module: nn.Module, world: rpcpipe.World, j: int) -> None:
    pass


def flattened(module: nn.Module, world: rpcpipe.World, j: int) -> nn.Module:
    class FullyShardedDataParallel(nn.Module):
        pass

    return FullyShardedDataParallel()


def sharded_and_saved(world: rpcpipe.World) -> Any:
    pipe = make(world, mlp, wrap_stage=sharded)
    opt = pipe.optimizer(torch.optim.SGD, lr=0.1)
    asks: list[Callable[[], Any]] = [
        partial(pipe.save, "nowhere"), partial(pipe.load, "nowhere"), opt.state_dict
    ]  # fmt: skip
    for ask in asks:
        with pytest.raises(ValueError, match=r"gather the weights by pipe.state_dict\(\)"):
            ask()
    return opt.load_state_dict({})


def sharded_and_tied(world: rpcpipe.World) -> rpcpipe.Pipe:
    return make(world, tied, wrap_stage=sharded)


def in_context(world: rpcpipe.World) -> None:
    pipe = make(world, mlp)
    with dist_autograd.context():
        pipe(data(world.replica))


def with_a_lambda(world: rpcpipe.World) -> None:
    make(world, mlp, wrap_stage=lambda module, world, j: module)


def group_in_the_driver(world: rpcpipe.World) -> None:
    world.data_parallel_group(1)


def make_with(world: rpcpipe.World, **options: Any) -> None:
    make(world, mlp, **options)


@pytest.mark.parametrize(
    ("fn", "kind", "text"),
    [
        (with_a_lambda, TypeError, "wrap_stage= is called in the stages, which import it"),
        (group_in_the_driver, RuntimeError, "process group of stage 1 is in the processes of"),
        (in_context, ValueError, r"averaged over replicas have no place .* give ddp=False"),
        (sharded_and_saved, ValueError, "an optimizer's load_state_dict takes stages that hold"),
        (sharded_and_tied, ValueError, "tied across stages cannot be sharded"),
        (partial(make_with, wrap_stage=static), rpcpipe.StageError, "leave static_graph out"),
        (partial(make_with, wrap_stage=forgotten), rpcpipe.StageError, "returns the module to"),
        (partial(make_with, wrap_stage=flattened), rpcpipe.StageError, "fully_shard"),
        (partial(make_with, ddp=[[0, 1], [2, 3]]), ValueError, r"stage 0 .* \[0, 1\], .* \[0, 2\]"),
        (partial(make_with, ddp=[[0, 2]]), ValueError, "a group for each of 2 stages, got 1"),
        (partial(make_with, ddp=[[0, 2], [1, 3]]), rpcpipe.StageError, "no process group of ranks"),
        (partial(make_with, ddp=True), TypeError, 'ddp= is "auto", False, a list'),
    ],
)
def test_what_cannot_be_is_refused(
    team: Team, fn: Callable[..., Any], kind: type[Exception], text: str
) -> None:
    for answer in team.ask(fn):
        assert isinstance(answer, kind)
        assert re.search(text, str(answer), re.DOTALL), str(answer)


def test_a_job_on_one_host_is_on_the_loopback_interface_alone(team: Team) -> None:
    for process in team.processes:
        ends = psutil.Process(process.pid).net_connections()
        assert ends
        local = ("127.0.0.1", "::1", "::ffff:127.0.0.1")
        assert not [end for end in ends if end.laddr and end.laddr.ip not in local]


def wrappers(module: nn.Module) -> int:
    gc.collect()
    return sum(type(obj) is DistributedDataParallel for obj in gc.get_objects())


def pipes_that_are_gone(world: rpcpipe.World) -> list[int]:
    for _ in range(3):
        pipe = make(world, mlp)
        loss_of(pipe(data(world.replica))).backward()
    gc.collect()
    await_equal(lambda: [pipe.apply_to_stage(j, wrappers) for j in range(N)], [1, 1])
    return [pipe.apply_to_stage(j, wrappers) for j in range(N)]


def test_nothing_is_left_of_pipes_that_are_gone(team: Team) -> None:
    assert team.do(pipes_that_are_gone) == [[1, 1]] * R


def without_average(world: rpcpipe.World) -> dict[str, Tensor]:
    pipe = make(world, mlp, ddp=False)
    loss_of(pipe(data(world.replica))).backward()
    return all_grads(pipe)


def test_replicas_may_be_left_to_themselves(team: Team) -> None:
    for replica, found in enumerate(team.do(without_average)):
        plain = mlp()
        loss_of(plain(data(replica))).backward()
        check_equal(found, grads(plain))


# ---------------------------------------------------------- the script's own groups, and its end

OWN: dict[str, Any] = {}  # in each process
KEPT: dict[str, Any] = {}


def make_own_groups() -> None:
    dist.init_process_group("gloo")
    OWN["groups"] = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    OWN["mesh"] = init_device_mesh("cpu", (R, N), mesh_dim_names=("dp", "pp"))
    OWN["turned"] = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("pp", "dp"))


def by_own_groups(world: rpcpipe.World) -> Any:
    found = []
    for ddp in (OWN["groups"], [[0, 2], [1, 3]], OWN["mesh"], OWN["turned"]):
        pipe = make(world, mlp, ddp=ddp)
        loss_of(pipe(data(world.replica))).backward()
        found.append((all_grads(pipe), pipe._everywhere("ask", uses_own_group)))
    with pytest.raises(ValueError, match=r'names=\("dp", "pp"\), got names .*dp'):
        make(world, mlp, ddp=OWN["mesh"]["dp"])
    KEPT["pipe"] = pipe
    return found


def uses_own_group(stage: Any) -> bool:
    return stage.averaging._ddp.process_group is OWN["groups"][stage.index]


def ends_alone(world: rpcpipe.World) -> Tensor:
    with torch.no_grad():
        return KEPT["pipe"](data(0))  # type: ignore[no-any-return]


def with_a_hook_that_fails(module: nn.Module, world: rpcpipe.World, j: int) -> nn.Module:
    def hook(_, bucket):  # type: ignore[no-untyped-def]
        if (world.replica, j) == (1, 1):
            raise ArithmeticError("of a hook")
        return default_hooks.allreduce_hook(group, bucket)

    group = world.data_parallel_group(j)
    ddp = DistributedDataParallel(module, process_group=group)
    ddp.register_comm_hook(None, hook)
    return ddp


def step_that_ends_one_replica(world: rpcpipe.World) -> Any:
    """A hook raises in replica 1, while replica 0 waits for it."""
    pipe = make(world, mlp, wrap_stage=with_a_hook_that_fails)
    with pytest.raises(rpcpipe.StageError) as caught:
        loss_of(pipe(data(world.replica))).backward()
    with pytest.raises(RuntimeError, match="not in step any more"):
        pipe(data(0))
    if world.replica == 1:
        raise Ending(caught.value.message)
    return caught.value


@pytest.mark.timeout(240)
def test_own_groups_and_ends_that_are_not_at_the_same_time() -> None:
    team = Team(N, R, runs=2, prepare="test_ddp:make_own_groups")
    try:
        plain = mlp()
        plain_step(plain)
        for answers in team.do(by_own_groups):
            for found, own in answers:
                assert own == [True, True]
                check_equal(found, grads(plain))
        # The first replica has the first process; the others go on without it.
        team.dismiss(0)
        torch.testing.assert_close(team.do(ends_alone), [plain(data(0))])
        team.dismiss(1)
        team.meet()
        waiting, failing = team.ask(step_that_ends_one_replica)
        assert (waiting.stage, waiting.phase) == (1, "backward")
        assert "Connection closed by peer" in waiting.message
        assert "of a hook" in str(failing)
        ends = team.close()
        assert [code for code, _ in ends] == [0, 0, 1, 0], ends
        assert "Ending" in ends[2][1]
    finally:
        team.kill()


# ------------------------------------------------------------------------- beside other things


@pytest.mark.parametrize("world", [2], indirect=True)
def test_one_replica(world: rpcpipe.World) -> None:
    assert world.all_reduce(3) == 3
    with pytest.raises(RuntimeError, match="this run has one replica"):
        world.data_parallel_group(0)
    with pytest.raises(ValueError, match=r"averages over replicas, and this run has one"):
        make(world, mlp, ddp=[[0], [1]])
    pipe, plain = make(world, mlp, wrap_stage=counting), mlp()
    with pipe.no_sync():
        loss_of(pipe(data(0))).backward()
    loss_of(plain(data(0))).backward()
    check_equal(all_grads(pipe), grads(plain))
    assert [pipe.apply_to_stage(j, called) for j in range(2)] == [1, 1]


class Counting(nn.Module):
    """A wrapper whose names are not those of the pipe."""

    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__()
        self.wrapped = wrapped
        wrapped.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.wrapped.calls += 1
        return self.wrapped(x)


def counting(module: nn.Module, world: rpcpipe.World, j: int) -> nn.Module:
    return Counting(module)


def called(module: nn.Module) -> int:
    return module.calls  # type: ignore[return-value]


@pytest.mark.timeout(240)
def test_the_example_with_drivers_of_their_own() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=6"]
    options = ["--epochs=4", "--batch=64"]
    ended = subprocess.run(
        [*command, EXAMPLE, *options], capture_output=True, text=True, timeout=220
    )
    assert ended.returncode == 0, ended
    lines = ended.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"epoch {k}" for k in range(4)], ended
    assert "32 steps of 2 x 64" in lines[-1]
