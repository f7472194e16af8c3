"""A pipe gives what the module itself gives for the same micro-batches, bit for bit."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from toys import all_grads, await_equal, held_everywhere

import rpcpipe
from rpcpipe import World, microbatch
from rpcpipe.schedule import MODES

any_world = pytest.mark.parametrize("world", [1, 2, 3, 4], indirect=True)
two = pytest.mark.parametrize("world", [2], indirect=True)
three = pytest.mark.parametrize("world", [3], indirect=True)
every_mode = pytest.mark.parametrize("mode", MODES)
every_chunks = pytest.mark.parametrize("chunks", [1, 2, 3, 8])

Loss = Callable[[Any], Tensor]
Build = Callable[[], nn.Sequential]

# ------------------------------------------------------------------------- the module by itself


class Result(NamedTuple):
    """Everything a training step leaves."""

    outputs: Any
    loss: Tensor
    grads: dict[str, Tensor]
    input_grads: list[Tensor | None]
    state: dict[str, Tensor]


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def squares(value: Any) -> Tensor:
    """A loss of all outputs a gradient can reach."""
    found = [t for t in tensors(value) if t.requires_grad]
    return torch.stack([t.abs().pow(2).mean().float() for t in found]).sum()


def fresh(inputs: Any) -> Any:
    """Copies, which are leaves."""
    return pytree.tree_map_only(
        Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), inputs
    )


def input_grads(inputs: Any) -> list[Tensor | None]:
    return [t.grad for t in tensors(inputs) if t.requires_grad]


def joined(batches: list[Any]) -> list[Tensor | None]:
    """The gradients of all micro-batches' inputs as those of the mini-batch's."""
    wanted = [[t for t in tensors(batch) if t.requires_grad] for batch in batches]
    return [
        torch.cat([torch.zeros_like(t) if t.grad is None else t.grad for t in column])
        if any(t.grad is not None for t in column)
        else None
        for column in zip(*wanted, strict=True)
    ]


def applied(module: nn.Sequential, args: tuple[Any, ...]) -> Any:
    """As a pipe takes its arguments: all of them go to the first layer."""
    value = module[0](*args)
    for layer in module[1:]:
        value = layer(value)
    return value


def detached(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def plain_step(
    module: nn.Sequential, inputs: tuple[Any, ...], chunks: int, loss: Loss = squares
) -> Result:
    """The micro-batches one by one through ``module``, and from the last to the first back."""
    batches = [fresh(batch) for batch in microbatch.scatter(inputs, chunks)]
    values = [applied(module, batch) for batch in batches]
    outputs = microbatch.gather(pytree.tree_map_only(Tensor, torch.detach, values))
    columns = zip(*map(tensors, values), strict=True)
    gradients = []
    for output, column in zip(tensors(outputs), columns, strict=True):
        output.requires_grad_(any(t.requires_grad for t in column))
        gradients.append(lambda t=output, column=column: divide(t.grad, column))
    total = loss(outputs)
    total.backward()
    rows = list(zip(map(tensors, values), zip(*[g() for g in gradients], strict=True), strict=True))
    for row in reversed(rows):
        ends = [(t, g) for t, g in zip(*row, strict=True) if t.requires_grad and g is not None]
        if ends:
            torch.autograd.backward([t for t, _ in ends], [g for _, g in ends])
    return Result(
        outputs,
        total.detach(),
        {name: p.grad for name, p in module.named_parameters() if p.grad is not None},
        joined(batches),
        detached(module.state_dict()),
    )


def divide(gradient: Tensor | None, column: tuple[Tensor, ...]) -> list[Tensor | None]:
    """The gradient of the gathered output as those of each micro-batch's."""
    if gradient is None:
        return [None] * len(column)
    if column[0].dim() == 0:
        return list(gradient.unbind())
    return list(gradient.split([t.shape[0] for t in column]))


def pipe_step(pipe: rpcpipe.Pipe, inputs: tuple[Any, ...], loss: Loss = squares) -> Result:
    inputs = fresh(inputs)
    outputs = pipe(*inputs)
    total = loss(outputs)
    total.backward()
    state = detached(pipe.state_dict())
    return Result(outputs, total.detach(), all_grads(pipe), input_grads(inputs), state)


def same(found: Any, wanted: Any) -> None:
    """Equal to the bit, or both NaN."""
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    requires = [[t.requires_grad for t in tensors(value)] for value in (found, wanted)]
    assert requires[0] == requires[1]


def close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def cut(layers: int, stages: int) -> list[int]:
    """A balance in which later stages have no fewer layers."""
    return [(layers + j) // stages for j in range(stages)]


def check(
    world: World,
    build: Build,
    inputs: tuple[Any, ...],
    balance: list[int],
    *,
    chunks: int = 3,
    mode: str = "except_last",
    loss: Loss = squares,
    steps: int = 1,
) -> Result:
    """The same steps, whose gradients add up, by a pipe and by the module itself."""
    module = build()
    pipe = rpcpipe.Pipe(module, world, balance=balance, chunks=chunks, checkpoint=mode)
    torch.set_num_threads(world.process(0).threads)
    for _ in range(steps):
        found = pipe_step(pipe, inputs, loss)
        same(found, plain_step(module, inputs, chunks, loss))
    return found


# --------------------------------------------------------------------------------- whole models


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 16), nn.GELU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
    )


def conv_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, stride=2), nn.BatchNorm2d(4, momentum=None), nn.ReLU(),
        nn.Flatten(), nn.Linear(36, 3),
    )  # fmt: skip


def transformer(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True) for _ in range(3)]
    return nn.Sequential(nn.Linear(4, 8), *blocks, nn.Linear(8, 4))


MODELS: dict[str, tuple[Build, tuple[int, ...]]] = {
    "mlp": (mlp, (13, 5)),
    "conv": (conv_net, (11, 2, 8, 8)),
    "transformer": (transformer, (7, 3, 4)),
}


@any_world
@every_mode
@every_chunks
@pytest.mark.parametrize("name", MODELS)
def test_steps_are_bitwise_those_of_the_module(
    world: World, name: str, mode: str, chunks: int
) -> None:
    build, shape = MODELS[name]
    x = torch.randn(shape).requires_grad_()
    balance = cut(len(build()), world.stages)
    found = check(world, build, (x,), balance, chunks=chunks, mode=mode, steps=2)
    if name != "conv":  # batch norm normalises by the micro-batch
        whole = build()
        plain_step(whole, (x,), 1)
        close(found, plain_step(whole, (x,), 1))


@any_world
@every_chunks
@pytest.mark.parametrize("seed", [None, 5])
def test_dropout_is_recomputed_with_the_same_masks(
    world: World, chunks: int, seed: int | None
) -> None:
    x = torch.randn(7, 3, 4).requires_grad_()
    balance = cut(5, world.stages)
    results = []
    for mode in MODES:
        module = transformer(dropout=0.4)
        pipe = rpcpipe.Pipe(
            module, world, balance=balance, chunks=chunks, checkpoint=mode, seed=seed
        )
        results.append([pipe_step(pipe, (x,)) for _ in range(2)])
    same(results[0], results[2])
    same(results[1], results[2])
    first, second = results[0]
    assert not torch.equal(first.outputs, second.outputs)


@two
@every_mode
def test_trains_to_the_same_parameters(world: World, mode: str) -> None:
    module = mlp()
    pipe = rpcpipe.Pipe(module, world, balance=[2, 3], chunks=4, checkpoint=mode)
    opt = pipe.optimizer(torch.optim.Adam, lr=0.01)
    reference = torch.optim.Adam(module.parameters(), lr=0.01)
    for rows in (8, 3, 9, 1, 6):
        x = torch.randn(rows, 5)
        pipe_step(pipe, (x,))
        plain_step(module, (x,), 4)
        opt.step()
        opt.zero_grad()
        reference.step()
        reference.zero_grad()
    same(detached(pipe.state_dict()), detached(module.state_dict()))


# ------------------------------------------------------------------------ what passes the stages


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


# ---------------------------------------------------------------------------------------- modes


class Report(nn.Module):
    """Remembers under which settings it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[bool, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(
            (
                self.training,
                torch.is_grad_enabled(),
                torch.is_inference_mode_enabled(),
                torch.is_autocast_enabled("cpu"),
            )
        )
        return x


def reports(module: nn.Module) -> list[tuple[bool, ...]]:
    (layer,) = (m for m in module if isinstance(m, Report))
    seen, layer.seen = layer.seen, []
    return seen


class Keep(nn.Module):
    """Knows which of its outputs are alive. The layer behind it needs them in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[weakref.ref[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        self.outputs.append(weakref.ref(y))
        return y


def alive(module: nn.Module) -> int:
    (layer,) = (m for m in module if isinstance(m, Keep))
    return sum(output() is not None for output in layer.outputs)


def keeping() -> nn.Sequential:
    layers = [m for _ in range(2) for m in (nn.Linear(4, 4), Keep(), nn.Linear(4, 4))]
    return nn.Sequential(*layers)


@two
def test_modes_of_the_driver_hold_on_the_stages(world: World) -> None:
    module = nn.Sequential(nn.Linear(4, 4), Report(), Report(), nn.Linear(4, 4))
    pipe = rpcpipe.Pipe(module, world, balance=[2, 2], chunks=1)
    x = torch.randn(2, 4)

    def seen() -> tuple[bool, ...]:
        (first,), (second,) = (pipe.apply_to_stage(j, reports) for j in range(2))
        assert first == second
        return first

    pipe(x)
    assert seen() == (True, True, False, False)
    pipe.eval()
    with torch.no_grad():
        pipe(x)
        assert seen() == (False, False, False, False)
    with torch.inference_mode():
        pipe(x)
        assert seen() == (False, False, True, False)
    pipe.train()
    with torch.autocast("cpu"):
        pipe(x)
        assert seen() == (True, True, False, True)
        with torch.autocast("cpu", enabled=False):
            pipe(x)
        assert seen() == (True, True, False, False)
    pipe(x)
    assert seen() == (True, True, False, False)


@two
@every_mode
def test_dropout_and_batch_norm_follow_eval(world: World, mode: str) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 4), nn.BatchNorm1d(4)
    )
    pipe = rpcpipe.Pipe(module, world, balance=[2, 3], chunks=3, checkpoint=mode)
    pipe.eval()
    module.eval()
    x = torch.randn(7, 5).requires_grad_()
    same(pipe_step(pipe, (x,)), plain_step(module, (x,), 3))


@two
@every_mode
@pytest.mark.parametrize("frozen", [slice(0, 2), slice(2, 4), slice(1, 2)], ids=str)
def test_layers_put_into_eval_before_stay_so(world: World, frozen: slice, mode: str) -> None:
    """The usual way to fine-tune: frozen layers keep their statistics."""

    def build() -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        )
        model[frozen].eval()
        return model

    check(world, build, (torch.randn(7, 5),), [2, 2], mode=mode, steps=2)


@two
def test_frozen_parameters_get_no_gradient(world: World) -> None:
    def build() -> nn.Sequential:
        model = mlp()
        model[:3].requires_grad_(False)
        return model

    found = check(world, build, (torch.randn(7, 5),), [2, 3])
    assert set(found.grads) == {"4.weight", "4.bias"}


@three
def test_a_stage_in_the_middle_may_cut_the_graph(world: World) -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), Detach(), nn.Linear(4, 2))

    x = torch.randn(7, 4).requires_grad_()
    found = check(world, build, (x,), [1, 1, 1], steps=2)
    assert set(found.grads) == {"2.weight", "2.bias"}
    assert found.input_grads == [None]


class Detach(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


@two
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_without_grad_nothing_is_recorded_or_kept(world: World, guard: Any) -> None:
    pipe = rpcpipe.Pipe(keeping(), world, balance=[3, 3], chunks=4)
    pipe.eval()
    before = held_everywhere(pipe)
    x = torch.randn(6, 4).requires_grad_()
    with guard():
        out = pipe(x)
        found = held_everywhere(pipe)
    assert not out.requires_grad
    assert out.is_inference() == (guard is torch.inference_mode)
    assert [info["num_autograd_contexts"] for info in found] == [0, 0, 0]
    await_equal(lambda: held_everywhere(pipe), before)
    await_equal(lambda: [pipe.apply_to_stage(j, alive) for j in range(2)], [0, 0])


@two
@pytest.mark.parametrize(("mode", "kept"), [("always", 0), ("except_last", 1), ("never", 4)])
def test_checkpointed_micro_batches_keep_no_activations(world: World, mode: str, kept: int) -> None:
    pipe = rpcpipe.Pipe(keeping(), world, balance=[3, 3], chunks=4, checkpoint=mode)
    loss = pipe(torch.randn(8, 4)).sum()
    assert [pipe.apply_to_stage(j, alive) for j in range(2)] == [kept, kept]
    loss.backward()
    assert [pipe.apply_to_stage(j, alive) for j in range(2)] == [0, 0]


@two
def test_an_output_that_is_dropped_takes_its_activations_along(world: World) -> None:
    pipe = rpcpipe.Pipe(keeping(), world, balance=[3, 3], chunks=4, checkpoint="never")
    before = held_everywhere(pipe)
    out = pipe(torch.randn(8, 4))
    assert [pipe.apply_to_stage(j, alive) for j in range(2)] == [4, 4]
    del out
    await_equal(lambda: [pipe.apply_to_stage(j, alive) for j in range(2)], [0, 0])
    await_equal(lambda: held_everywhere(pipe), before)


@any_world
@every_mode
def test_autocast_gives_the_same_bits(world: World, mode: str) -> None:
    torch.set_num_threads(world.process(0).threads)
    module = transformer()
    balance = cut(5, world.stages)
    pipe = rpcpipe.Pipe(module, world, balance=balance, chunks=3, checkpoint=mode)
    x = torch.randn(7, 3, 4).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = pipe(x)
    assert out.dtype == torch.bfloat16
    squares(out).backward()  # as it is to be called: outside of autocast
    batches = [b.detach().clone().requires_grad_() for b in x.split([3, 2, 2])]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        values = [module(b) for b in batches]
    whole = torch.cat([v.detach() for v in values]).requires_grad_()
    same(out, whole)
    squares(whole).backward()
    for value, grad in reversed(list(zip(values, whole.grad.split([3, 2, 2]), strict=True))):
        value.backward(grad)
    same(all_grads(pipe), {name: p.grad for name, p in module.named_parameters()})


@two
def test_gradients_under_different_autocast_settings_do_not_mix(world: World) -> None:
    pipe = rpcpipe.Pipe(mlp(), world, balance=[2, 3], chunks=2)
    x = torch.randn(4, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = pipe(x)
        with torch.autocast("cpu", enabled=False):
            inner = pipe(x)
    assert (low.dtype, inner.dtype) == (torch.bfloat16, torch.float32)
    same(inner, pipe(x))
