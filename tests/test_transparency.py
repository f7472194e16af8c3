"""A pipe gives what the module itself gives for the same micro-batches, bit for bit."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from test_models import tiny_amoebanetd, tiny_resnet, tiny_unet
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from toys import all_grads, await_equal, held_everywhere

import rpcpipe
from rpcpipe import World, microbatch
from rpcpipe.schedule import MODES
from rpcpipe.skip import Namespace, pop, skippable, stash

any_world = pytest.mark.parametrize("world", [1, 2, 3, 4], indirect=True)
two = pytest.mark.parametrize("world", [2], indirect=True)
three = pytest.mark.parametrize("world", [3], indirect=True)
four = pytest.mark.parametrize("world", [4], indirect=True)
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


# ----------------------------------------------------------------------------------------- skips


@skippable(stash=["skip"])
class Stash(nn.Module):
    def forward(self, x: Tensor):
        yield stash("skip", x * 2)
        return x


@skippable(pop=["skip"])
class Pop(nn.Module):
    def forward(self, x: Tensor):
        skip = yield pop("skip")
        return x + skip


def one_to_three() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Stash(), nn.Linear(4, 4), nn.Tanh(), Pop())


@three
@every_mode
@pytest.mark.parametrize("balance", [[2, 1, 2], [1, 3, 1], [1, 1, 3], [3, 1, 1]])
def test_skip_goes_from_stage_to_stage(world: World, mode: str, balance: list[int]) -> None:
    check(world, one_to_three, (torch.randn(7, 4, requires_grad=True),), balance, mode=mode)


def twice() -> nn.Sequential:
    torch.manual_seed(0)
    outer, inner = Namespace(), Namespace()
    return nn.Sequential(
        nn.Linear(4, 4),
        Stash().isolate(outer),
        Stash().isolate(inner),
        nn.Linear(4, 4),
        Pop().isolate(inner),
        nn.Sequential(nn.Tanh(), Pop().isolate(outer)),
    )


@four
@every_mode
def test_skips_of_one_name_keep_apart_and_are_found_at_any_depth(world: World, mode: str) -> None:
    check(world, twice, (torch.randn(5, 4),), [2, 2, 1, 1], mode=mode)


@skippable(stash=["mask", "count", "nothing", "unused"])
class StashAll(nn.Module):
    def forward(self, x: Tensor):
        yield stash("mask", x > 0)
        yield stash("count", torch.arange(len(x)))
        yield stash("nothing", None)
        yield stash("unused", x + 1)
        return x


@skippable(pop=["mask", "count", "nothing", "unused"])
class PopAll(nn.Module):
    def forward(self, x: Tensor):
        mask = yield pop("mask")
        count = yield pop("count")
        nothing = yield pop("nothing")
        yield pop("unused")
        assert nothing is None
        assert mask.dtype == torch.bool
        return torch.where(mask, x, x * count[:, None])


def all_kinds() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), StashAll(), nn.Linear(4, 4), PopAll())


@three
@every_mode
def test_any_tensor_and_none_may_be_skipped(world: World, mode: str) -> None:
    check(world, all_kinds, (torch.randn(6, 4),), [2, 1, 1], mode=mode)


@two
@every_mode
@pytest.mark.parametrize("build", [tiny_amoebanetd, tiny_resnet])
def test_models_of_the_papers_are_bitwise_themselves(
    world: World, build: Callable[[], nn.Sequential], mode: str
) -> None:
    def seeded() -> nn.Sequential:
        torch.manual_seed(0)
        return build()

    x = torch.randn(5, 3, 32, 32)
    check(world, seeded, (x,), cut(len(build()), 2), chunks=2, mode=mode)


def unet_without_dropout() -> nn.Sequential:
    torch.manual_seed(0)
    return tiny_unet().apply(without_dropout)


def without_dropout(module: nn.Module) -> None:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        module.p = 0.0


@three
@every_mode
def test_unet_with_its_long_skips_is_bitwise_itself(world: World, mode: str) -> None:
    balance = cut(len(tiny_unet()), 3)
    check(world, unet_without_dropout, (torch.randn(4, 3, 32, 32),), balance, mode=mode)


# ----------------------------------------------------------- batch norm and parameters of several


@two
@every_mode
def test_deferred_batch_norm_changes_no_bit_but_its_statistics(world: World, mode: str) -> None:
    x = torch.randn(6, 2, 8, 8, requires_grad=True)
    options = {"balance": [4, 4], "chunks": 4, "checkpoint": mode}
    deferred = rpcpipe.Pipe(conv_net(), world, **options, deferred_batch_norm=True)
    found, wanted = pipe_step(deferred, (x,)), plain_step(conv_net(), (x,), 4)
    same(found[:-1], wanted[:-1])
    whole = nn.Sequential(*list(conv_net())[:2])
    whole(x.detach())
    close(found.state["1.running_var"], whole.state_dict()["1.running_var"])
    assert found.state["1.num_batches_tracked"] == 1


class Tied(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def tied() -> nn.Sequential:
    torch.manual_seed(0)
    first = Tied(nn.Parameter(torch.randn(4, 4) / 2))
    return nn.Sequential(first, nn.Tanh(), nn.Linear(4, 4), Tied(first.weight))


@three
@every_mode
def test_a_tied_parameter_trains_as_in_one_process(world: World, mode: str) -> None:
    plain = tied()
    pipe = rpcpipe.Pipe(tied(), world, balance=[1, 2, 1], chunks=1, checkpoint=mode)
    opt = pipe.optimizer(torch.optim.Adam, lr=0.01)
    reference = torch.optim.Adam(plain.parameters(), lr=0.01)
    for _ in range(3):
        x = torch.randn(5, 4)
        squares(pipe(x)).backward()
        squares(plain(x)).backward()
        for optimizer in (opt, reference):
            optimizer.step()
            optimizer.zero_grad()
    same(detached(pipe.state_dict()), detached(plain.state_dict()))


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
