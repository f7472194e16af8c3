"""Modules on the meta device, which get their first values in their stages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import rpcpipe
from rpcpipe import StageError, World
from rpcpipe.build import materialize

two = pytest.mark.parametrize("world", [2], indirect=True)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return x + self.attention(x, x, x, need_weights=False)[0]


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask


def model() -> nn.Sequential:
    layers = [nn.Embedding(7, 4, padding_idx=0), Nested(), nn.Linear(4, 4), nn.BatchNorm1d(3)]
    return nn.Sequential(*layers)


def state(world: World, balance: list[int], seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    with torch.device("meta"):
        module = model()
    pipe = rpcpipe.Pipe(module, world, balance=balance)
    assert all(p.is_meta for p in module.parameters())  # the driver never holds a weight
    assert pipe(torch.ones(2, 3, dtype=torch.long)).isfinite().all()
    return pipe.state_dict()


@two
def test_initial_weights_depend_on_the_seed_and_not_on_the_balance(world: World) -> None:
    one, other, third = (state(world, b, s) for b, s in [([1, 3], 5), ([3, 1], 5), ([1, 3], 6)])
    assert one.keys() == model().state_dict().keys()
    batch_norm = {name for name in one if name.startswith("3.")}  # its statistics have moved
    for name in one.keys() - batch_norm:
        assert torch.equal(one[name], other[name])
    assert not torch.equal(one["2.weight"], third["2.weight"])
    assert torch.equal(one["0.weight"][0], torch.zeros(4))
    assert one["1.attention.in_proj_weight"].std() > 0.1


@two
def test_equal_layers_start_with_different_weights(world: World) -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    found = rpcpipe.Pipe(module, world, balance=[1, 1]).state_dict()
    assert not torch.equal(found["0.weight"], found["1.weight"])


@two
def test_a_value_that_nothing_sets_is_named(world: World) -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(4, 4), Masked())
    with pytest.raises(StageError, match=r"1\.mask \(Masked\).*no value after reset_parameters"):
        rpcpipe.Pipe(module, world, balance=[1, 1])


def test_parameters_tied_within_a_layer_stay_tied() -> None:
    with torch.device("meta"):
        layer = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        layer[1].weight = layer[0].weight
    materialize(layer, "0", torch.device("cpu"))
    assert layer[1].weight is layer[0].weight
    assert layer[0].weight.isfinite().all()
