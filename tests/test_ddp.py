"""Replicas: pipelines of the same model, whose gradients are averaged once a mini-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from team import Team
from torch import Tensor, nn
from toys import all_grads, check_equal, grads, mlp

import rpcpipe

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
    stage.extras["reductions"] = 0

    def hook(_, bucket):  # type: ignore[no-untyped-def]  # DDP looks at annotations
        stage.extras["reductions"] += 1
        work: Any = dist.all_reduce(bucket.buffer().div_(R), async_op=True, group=group)
        return work.get_future().then(lambda future: future.value()[0])

    group = stage.averaging._ddp.process_group
    stage.averaging._ddp.register_comm_hook(None, hook)


def reductions(stage: Any) -> int:
    return stage.extras["reductions"]


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


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name
