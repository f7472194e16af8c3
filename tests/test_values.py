"""What may pass from stage to stage: any dtype, structure, view, and work in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_transparency import (
    check,
    close,
    every_mode,
    input_grads,
    mlp,
    pipe_step,
    plain_step,
    same,
    squares,
    three,
    two,
)
from torch import Tensor, nn
from toys import all_grads

import rpcpipe
from rpcpipe import World


class Cast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


class Apart(nn.Module):
    """A structure of tensors of many kinds, from the first layer to the others."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {
            "x": x,
            "pair": (x[:, :1] * 2, [x.detach() > 0]),
            "count": torch.arange(x.shape[0]),
            "flag": True,
            "none": None,
        }


class Scale(nn.Module):
    """Works on one value of a structure and hands the rest on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0, 3.0, 4.0]))

    def forward(self, value: dict[str, Any]) -> dict[str, Any]:
        a, (mask,) = value["pair"]
        assert value["flag"] is True
        assert value["none"] is None
        y = value["x"] * self.weight + a * mask + value["count"].unsqueeze(1)
        return {**value, "x": y, "best": y.argmax(1)}


class Identity(nn.Module):
    """Returns what it is given: its output is its input."""

    def forward(self, *args: Any) -> Any:
        return args if len(args) > 1 else args[0]


class Transpose(nn.Module):
    """Neither contiguous nor new memory."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


class Views(nn.Module):
    """Several views of one memory, one of them expanded."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x, x[:, 1:], x.t().t(), x.mean(1, keepdim=True).expand(-1, 5), x.new_ones(len(x), 2)


class Sum(nn.Module):
    def forward(self, values: tuple[Tensor, ...]) -> Tensor:
        return torch.cat([v * (k + 1) for k, v in enumerate(values)], 1)


class Both(nn.Module):
    """Two heads, and a number a micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 2), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.a(x), self.b(x), x.pow(2).mean(), self.a(x).argmax(1)


class MaskedMean(nn.Module):
    def forward(self, x: Tensor, mask: Tensor, *, scale: float = 1.0) -> Tensor:
        return (x * mask.unsqueeze(2)).sum(1) * scale


class Joined(nn.Module):
    """Token ids and a mask, the mask handed on beside the embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4, padding_idx=0)

    def forward(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.embedding(ids), mask, ids


class Attend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, value: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        x, mask, ids = value
        return self.linear(x).masked_fill(~mask.unsqueeze(2), 0.0), mask, ids


class SquareInPlace(nn.Module):
    """Overwrites what it is given; no gradient is asked through it."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(x)


class InPlaceIfPositive(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp_() if bool((x > 0).all()) else x


class InPlaceInTraining(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp_() if self.training else x


class AddInPlace(nn.Module):
    def forward(self, value: dict[str, Any]) -> Tensor:
        return value["x"].add_(value["pair"][0]).relu_()


def linears(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4, dtype=dtype) for _ in range(3)))


DTYPES = [torch.float64, torch.bfloat16, torch.float16, torch.complex64]


@three
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_pass(world: World, dtype: torch.dtype) -> None:
    x = torch.randn(7, 4).to(dtype).requires_grad_()
    found = check(world, lambda: linears(dtype), (x,), [1, 1, 1])
    assert found.outputs.dtype == dtype


@three
def test_dtype_may_change_from_stage_to_stage(world: World) -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(4, 4, dtype=torch.float64), Cast(torch.bfloat16),
            nn.Linear(4, 4, dtype=torch.bfloat16), Cast(torch.float32), nn.Linear(4, 2),
        )  # fmt: skip

    x = torch.randn(7, 4, dtype=torch.float64).requires_grad_()
    check(world, build, (x,), [2, 2, 1])


@three
@every_mode
def test_token_ids_and_masks_pass_beside_the_embeddings(world: World, mode: str) -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(Joined(), Attend(), Attend())

    ids = torch.randint(0, 9, (7, 5))
    found = check(world, build, (ids, ids != 0), [1, 1, 1], mode=mode)
    assert [t.dtype for t in found.outputs] == [torch.float32, torch.bool, torch.int64]
    assert not found.grads["0.embedding.weight"][0].any()


@three
@every_mode
def test_structures_pass(world: World, mode: str) -> None:
    x = torch.randn(7, 3).requires_grad_()
    found = check(
        world, lambda: nn.Sequential(Apart(), Scale(), Scale()), (x,), [1, 1, 1], mode=mode
    )
    assert found.outputs["flag"] is True
    assert not found.outputs["best"].requires_grad


@two
@every_mode
@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2), (0, 1, 2)], ids=str)
def test_outputs_may_be_left_out_of_the_loss(
    world: World, used: tuple[int, ...], mode: str
) -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), Both())

    def loss(outputs: tuple[Tensor, ...]) -> Tensor:
        return torch.stack([outputs[k].pow(2).sum() for k in used]).sum()

    x = torch.randn(7, 4).requires_grad_()
    check(world, build, (x,), [1, 1], loss=loss, mode=mode)


@two
def test_loss_may_use_some_rows_only(world: World) -> None:
    x = torch.randn(13, 5).requires_grad_()
    check(world, mlp, (x,), [2, 3], loss=lambda out: out[3:5].pow(3).sum())


@three
@every_mode
@pytest.mark.parametrize("where", [0, 1, 2])
def test_a_stage_may_return_its_input(world: World, where: int, mode: str) -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Linear(4, 4), nn.Linear(4, 4)]
        layers.insert(where, Identity())
        return nn.Sequential(*layers)

    x = torch.randn(7, 4).requires_grad_()
    check(world, build, (x,), [1, 1, 1], mode=mode, steps=2)


@three
def test_nothing_but_identities(world: World) -> None:
    x, y = torch.randn(7, 4).requires_grad_(), torch.arange(7)
    found = check(
        world, lambda: nn.Sequential(Identity(), Identity(), Identity()), (x, y), [1, 1, 1]
    )
    assert found.grads == {}


@two
@every_mode
@pytest.mark.parametrize("requires_grad", [True, False])
def test_first_layer_of_a_stage_may_work_in_place(
    world: World, requires_grad: bool, mode: str
) -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.ReLU(inplace=True), nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)
        )

    x = torch.randn(7, 4).requires_grad_(requires_grad)
    module = build()
    pipe = rpcpipe.Pipe(module, world, balance=[2, 2], chunks=3, checkpoint=mode)
    for _ in range(3):  # the first step finds out that the stage works in place
        given = x.detach().clone().requires_grad_(requires_grad)
        out = pipe(given)
        squares(out).backward()
        same(given.detach(), x.detach())
        out_of_place = nn.Sequential(nn.ReLU(), *module[1:])  # a leaf must not be changed
        wanted = plain_step(out_of_place, (x,), 3)
        same(out, wanted.outputs)
        same(all_grads(pipe), wanted.grads)
        same(input_grads(given), wanted.input_grads)


@two
@every_mode
def test_in_place_work_without_gradients_is_done_once(world: World, mode: str) -> None:
    module = nn.Sequential(SquareInPlace(), SquareInPlace(), nn.Linear(4, 4))
    pipe = rpcpipe.Pipe(module, world, balance=[1, 2], chunks=3, checkpoint=mode)
    x = torch.randn(7, 4)
    before = x.clone()
    for _ in range(2):
        out = pipe(x)
        squares(out).backward()
        wanted = plain_step(module, (before,), 3)
        same(out, wanted.outputs)
        same(all_grads(pipe), wanted.grads)
    same(x, before)


@two
@every_mode
def test_a_layer_may_come_to_work_in_place_later(world: World, mode: str) -> None:
    """As ``Dropout(inplace=True)``, which does nothing in ``eval``."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), InPlaceInTraining(), nn.Linear(4, 4)).eval()
    pipe = rpcpipe.Pipe(module, world, balance=[1, 2], chunks=3, checkpoint=mode)
    x = torch.randn(7, 4)
    for training in (False, True, False, True):
        pipe.train(training)
        module.train(training)
        same(pipe_step(pipe, (x,)), plain_step(module, (x,), 3))


@two
def test_a_layer_that_works_in_place_now_and_then_is_refused(world: World) -> None:
    pipe = rpcpipe.Pipe(nn.Sequential(Identity(), InPlaceIfPositive()), world, balance=[1, 1])
    pipe.chunks, pipe.checkpoint = 4, "always"
    x = torch.ones(4, 2).requires_grad_()
    pipe(x).sum().backward()  # always: each is copied
    pipe.eval()(-x).sum().backward()  # never: none will be
    with pytest.raises(rpcpipe.StageError, match="in place"):
        pipe(x)
    pipe.checkpoint = "never"
    pipe(x).sum().backward()


@two
@every_mode
def test_in_place_work_on_a_part_of_a_structure(world: World, mode: str) -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 3), Apart(), AddInPlace(), nn.Linear(3, 2))

    x = torch.randn(7, 4).requires_grad_()
    check(world, build, (x,), [2, 2], mode=mode, steps=2)


@two
@every_mode
def test_views_and_expanded_outputs_pass(world: World, mode: str) -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), Views(), Sum(), Views())

    x = torch.randn(7, 4).requires_grad_()
    check(world, build, (x,), [2, 2], mode=mode)


@two
@every_mode
def test_non_contiguous_inputs_and_outputs_pass(world: World, mode: str) -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), Transpose(), nn.Linear(5, 2), Transpose())

    x = torch.randn(3, 9, 5).permute(1, 2, 0).requires_grad_()
    found = check(world, build, (x,), [2, 2], mode=mode)
    assert found.outputs.shape == (9, 2, 4)


@two
@every_mode
def test_channels_last_stays_so(world: World, mode: str) -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        convs = [nn.Conv2d(4, 4, 3, padding=1) for _ in range(3)]
        model = nn.Sequential(IsChannelsLast(), *convs, IsChannelsLast())
        return model.to(memory_format=torch.channels_last)

    x = torch.randn(7, 4, 5, 5).to(memory_format=torch.channels_last).requires_grad_()
    found = check(world, build, (x,), [2, 3], mode=mode)
    assert found.outputs.is_contiguous(memory_format=torch.channels_last)


class IsChannelsLast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        assert x.is_contiguous(memory_format=torch.channels_last)
        return x


@two
def test_a_slice_of_a_large_tensor_travels_alone(world: World) -> None:
    """Else RPC would send the storage it is a view of."""
    pipe = rpcpipe.Pipe(nn.Sequential(Storage(), Identity()), world, balance=[1, 1], chunks=2)
    large = torch.randn(100, 1000)
    out = pipe(large[:4, :2])
    assert out.tolist() == [[16.0], [16.0], [16.0], [16.0]]  # two rows of two floats


class Storage(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.full((len(x), 1), float(x.untyped_storage().nbytes()))


@two
def test_arguments_by_keyword_and_values_that_are_no_tensors(world: World) -> None:
    pipe = rpcpipe.Pipe(nn.Sequential(MaskedMean(), nn.Linear(4, 2)), world, balance=[1, 1])
    pipe.chunks = 3
    x, mask = torch.randn(7, 5, 4), torch.rand(7, 5) > 0.5
    out = pipe(x, mask=mask, scale=0.5)
    reference = nn.Linear(4, 2)
    reference.load_state_dict({k[2:]: v for k, v in pipe.state_dict().items()})
    close(out.detach(), reference((x * mask.unsqueeze(2)).sum(1) * 0.5).detach())


@two
def test_gradient_flows_on_into_the_drivers_graph(world: World) -> None:
    module = mlp()
    pipe = rpcpipe.Pipe(module, world, balance=[2, 3], chunks=2)
    before, after = nn.Linear(5, 5), nn.Linear(3, 1)
    x = torch.randn(6, 5)
    after(pipe(before(x))).sum().backward()
    found = [p.grad for p in [*before.parameters(), *after.parameters()]]
    before.zero_grad()
    after.zero_grad()
    after(module(before(x))).sum().backward()
    close(found, [p.grad for p in [*before.parameters(), *after.parameters()]])
