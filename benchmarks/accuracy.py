"""Accuracy: a pipe changes nothing. The same ResNet, with and without it, on handwritten digits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import mean, pstdev
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import rpcpipe
from benchmarks import models
from benchmarks.harness import Table, experiment

BATCH, CHUNKS, TEST = 64, 4, 360

# Top-1 error of ResNet-101 on ImageNet, batch size 256: torchgpipe, benchmarks/resnet101-accuracy.
PUBLISHED = [
    ("Goyal et al. (data parallel)", "22.08±0.06"),
    ("torchgpipe, nn.DataParallel", "22.02±0.11"),
    ("torchgpipe, pipeline", "21.99±0.13"),
]


class Digits(NamedTuple):
    """Images of 16 x 16 in three channels, split into two halves that share no image."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


def digits() -> Digits:
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    x = F.interpolate(images, scale_factor=2).expand(-1, 3, -1, -1).contiguous()
    y = torch.tensor(data.target)
    return Digits(x[TEST:], y[TEST:], x[:TEST], y[:TEST])


class Outcome(NamedTuple):
    error: float  # percent of the test images
    parameters: list[Tensor]


def fit(model: nn.Module, opt: Any, data: Digits, seed: int, epochs: int) -> None:
    order = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for batch in torch.randperm(len(data.x), generator=order).split(BATCH):
            loss = F.cross_entropy(model(data.x[batch]), data.y[batch])
            loss.backward()
            opt.step()
            opt.zero_grad()


def error(model: nn.Module, data: Digits) -> float:
    model.eval()
    with torch.no_grad():
        wrong = model(data.test_x).argmax(1) != data.test_y
    return 100 * wrong.float().mean().item()


class InTurn(nn.Module):
    """The model on one micro-batch after the other, in one process."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.model(part) for part in x.tensor_split(CHUNKS)])


def plain(wrap: Callable[[nn.Module], nn.Module], data: Digits, seed: int, epochs: int) -> Outcome:
    model = build(seed)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    fit(wrap(model), opt, data, seed, epochs)
    return Outcome(error(model, data), [p.detach() for p in model.parameters()])


def piped(world: rpcpipe.World, deferred: bool, data: Digits, seed: int, epochs: int) -> Outcome:
    model = build(seed)
    half = len(model) // 2
    pipe = rpcpipe.Pipe(
        model,
        world,
        balance=[half, len(model) - half],
        chunks=CHUNKS,
        deferred_batch_norm=deferred,
    )
    fit(pipe, pipe.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9), data, seed, epochs)
    state = pipe.state_dict()
    return Outcome(error(pipe, data), [state[name] for name, _ in model.named_parameters()])


def build(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return models.resnet([1, 1], width=16, num_classes=10)


def variants(world: rpcpipe.World) -> Iterator[tuple[str, Callable[..., Outcome]]]:
    yield "one process", lambda *a: plain(lambda model: model, *a)
    yield "one process, micro-batches in turn", lambda *a: plain(InTurn, *a)
    yield "pipeline-2", lambda *a: piped(world, False, *a)
    yield "pipeline-2, deferred batch norm", lambda *a: piped(world, True, *a)


def accuracy(world: rpcpipe.World, seeds: Sequence[int], epochs: int) -> Table:
    data = digits()
    title = (
        f"ResNet on digits: {len(data.x)} to train, {TEST} to test, {epochs} epochs, mini-batches "
        f"of {BATCH} in {CHUNKS} micro-batches, {len(seeds)} seeds"
    )
    table = Table(title, ["Experiment", "Top-1 error (%)", "Each seed", "Parameters as in turn"])
    found = {name: [train(data, seed, epochs) for seed in seeds] for name, train in variants(world)}
    reference = found["one process, micro-batches in turn"]
    for name, outcomes in found.items():
        errors = [outcome.error for outcome in outcomes]
        equal = sum(
            all(map(torch.equal, a.parameters, b.parameters))
            for a, b in zip(outcomes, reference, strict=True)
        )
        each = " ".join(f"{e:.2f}" for e in errors)
        spread = f"{mean(errors):.2f}±{pstdev(errors):.2f}"
        table.add(name, spread, each, f"{equal} of {len(seeds)} bitwise")
    return table


def published() -> Table:
    title = "ResNet-101 on ImageNet, batch size 256, as published by torchgpipe"
    return Table(title, ["Experiment", "Top-1 error (%)"], [list(row) for row in PUBLISHED])


def measure(world: rpcpipe.World, quick: bool) -> list[Table]:
    table = accuracy(world, [0], 1) if quick else accuracy(world, [0, 1, 2], 10)
    return [table, published()]


def main(argv: Sequence[str] | None = None) -> list[Table]:
    return experiment(measure, 2, __doc__, argv)


if __name__ == "__main__":
    main()
