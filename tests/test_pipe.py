"""The pipe as a user meets it: shapes, modes, styles of training, bad input."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import rpcpipe
from rpcpipe import World

two = pytest.mark.parametrize("world", [2], indirect=True)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))


def grads(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def all_grads(pipe: rpcpipe.Pipe) -> dict[str, Tensor]:
    found = [pipe.apply_to_stage(j, grads) for j in range(len(pipe.balance))]
    return {name: grad for stage in found for name, grad in stage.items()}


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def check_step(pipe: rpcpipe.Pipe, plain: nn.Module, x: Tensor) -> None:
    """One step through both: same output, same gradients."""
    pipe.zero_grad()
    plain.zero_grad()
    out, expected = pipe(x), plain(x)
    close(out, expected)
    out.pow(2).mean().backward()
    expected.pow(2).mean().backward()
    found, wanted = all_grads(pipe), grads(plain)
    assert found.keys() == wanted.keys()
    for name in wanted:
        close(found[name], wanted[name])


@two
@pytest.mark.parametrize(
    ("rows", "chunks"), [(6, 4), (3, 8), (1, 4), (1, 1), (8, 1), (7, 3), (16, 16), (40, 33)]
)
def test_any_batch_size_with_any_number_of_chunks(world: World, rows: int, chunks: int) -> None:
    module = mlp()
    pipe = rpcpipe.Pipe(module, world, balance=[2, 3], chunks=chunks)
    check_step(pipe, module, torch.randn(rows, 4))


@two
def test_except_last_counts_actual_micro_batches(world: World) -> None:
    module = nn.Sequential(nn.Linear(4, 4), Phases(), nn.Linear(4, 4))
    pipe = rpcpipe.Pipe(module, world, balance=[2, 1], chunks=4)
    pipe(torch.randn(3, 4)).sum().backward()
    forward = [(True, False), (True, False), (False, False)]
    assert pipe.apply_to_stage(0, phases) == [*forward, (False, True), (False, True)]


class Phases(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[bool, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append((rpcpipe.is_checkpointing(), rpcpipe.is_recomputing()))
        return x


def phases(module: nn.Module) -> list[tuple[bool, bool]]:
    return next(m.seen for m in module if isinstance(m, Phases))


class Scale(nn.Module):
    def forward(self, x: Tensor, w: Tensor, *, shift: Tensor) -> Tensor:
        return x * w + shift


@two
def test_argument_that_is_not_divided_gets_the_sum_of_its_gradients(world: World) -> None:
    plain = nn.Sequential(Scale(), nn.Linear(4, 2))
    pipe = rpcpipe.Pipe(plain, world, balance=[1, 1], chunks=3)
    x, w, shift = torch.randn(5, 4), torch.randn(4, requires_grad=True), torch.randn(5, 4)
    pipe(x, rpcpipe.NoChunk(w), shift=shift).pow(2).sum().backward()
    found, w.grad = w.grad, None
    plain[1](plain[0](x, w, shift=shift)).pow(2).sum().backward()
    assert found is not None
    assert w.grad is not None
    close(found, w.grad)


class Tied(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def tied(device: str = "cpu") -> nn.Sequential:
    torch.manual_seed(0)
    first = Tied(nn.Parameter(torch.randn(4, 4) / 2))
    return nn.Sequential(first, nn.Tanh(), Tied(first.weight))


@two
def test_a_parameter_of_two_stages_stays_one_parameter(world: World) -> None:
    plain = tied()
    pipe = rpcpipe.Pipe(tied(), world, balance=[2, 1], chunks=3)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.01)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for _ in range(100):
        x = torch.randn(5, 4)
        pipe(x).pow(2).mean().backward()
        opt.step(max_norm=0.5)
        opt.zero_grad()
        plain(x).pow(2).mean().backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        reference.step()
        reference.zero_grad()
    state = pipe.state_dict()
    assert torch.equal(state["0.weight"], state["2.weight"])
    torch.testing.assert_close(state["0.weight"], plain.state_dict()["0.weight"])


@pytest.mark.parametrize("world", [1, 2, 4], indirect=True)
def test_losses_of_a_seeded_pipe_do_not_depend_on_the_stages(world: World) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4), nn.Dropout()]
    balance = {1: [4], 2: [2, 2], 4: [1, 1, 1, 1]}[world.stages]
    pipe = rpcpipe.Pipe(nn.Sequential(*layers), world, balance=balance, chunks=2, seed=7)
    opt = pipe.optimizer(torch.optim.Adam, lr=0.1)
    losses = []
    for _ in range(5):
        loss = pipe(torch.ones(4, 4)).pow(2).sum()
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    LOSSES.setdefault("seeded", losses)
    assert losses == LOSSES["seeded"]
    assert len(set(losses)) == 5


LOSSES: dict[str, list[float]] = {}
