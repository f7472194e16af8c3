"""Train two replicas of a pipeline of two stages on one machine: a classifier of noisy spirals.

    rpcpipe-run --standalone --stages 2 --replicas 2 examples/train_ddp.py
    torchrun --standalone --nproc-per-node 4 examples/train_ddp.py    # the same

`fit` is the training loop of a single process. Each replica's driver runs it on its own part of
the data, as `DistributedSampler` divides it; stage j of one replica and stage j of the other
average their gradients. With six processes, each driver has one of its own.
"""

import argparse
import math
import sys
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import rpcpipe


def spirals(size: int, classes: int = 3, seed: int = 0) -> TensorDataset:
    """Points (x, y) on arms that start in the middle, and the index of the arm each is on."""
    generator = torch.Generator().manual_seed(seed)
    arm = torch.randint(classes, (size,), generator=generator)
    radius = torch.rand(size, generator=generator)
    angle = 2 * math.pi * arm / classes + 5 * radius
    angle += 0.2 * torch.randn(size, generator=generator)
    points = radius[:, None] * torch.stack([angle.cos(), angle.sin()], 1)
    return TensorDataset(points, arm)


def perceptron(width: int = 64, depth: int = 4, classes: int = 3) -> nn.Sequential:
    hidden = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)]
    return nn.Sequential(nn.Linear(2, width), nn.GELU(), *hidden, nn.Linear(width, classes))


def fit(pipe: rpcpipe.Pipe, opt: torch.optim.Optimizer, loader: DataLoader) -> Iterator[float]:
    for x, y in loader:
        loss = F.cross_entropy(pipe(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        yield loss.item()


def accuracy(pipe: rpcpipe.Pipe, x: Tensor, y: Tensor) -> float:
    pipe.eval()
    with torch.no_grad():
        found = (pipe(x).argmax(1) == y).float().mean().item()
    pipe.train()
    return found


def train(world: rpcpipe.World, args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    data, model = spirals(4096), perceptron()
    sampler = DistributedSampler(data, world.replicas, world.replica)
    loader = DataLoader(data, batch_size=args.batch, sampler=sampler)
    half = len(model) // 2
    pipe = rpcpipe.Pipe(model, world, balance=[half, len(model) - half], chunks=args.chunks)
    opt = pipe.optimizer(torch.optim.AdamW, lr=3e-3)
    unseen = spirals(1024, seed=1 + world.replica).tensors

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        losses = list(fit(pipe, opt, loader))
        # Both are averages over what the drivers have seen: all of them call this.
        loss = world.all_reduce(sum(losses) / len(losses))
        right = world.all_reduce(accuracy(pipe, *unseen))
        if world.replica == 0:
            steps = f"{len(losses)} steps of {world.replicas} x {args.batch}"
            print(f"epoch {epoch}: {steps}, loss {loss:.3f}, {right:.1%} right on unseen points")
    if right < 0.9:
        sys.exit("less than 90 % of unseen points are put on the right arm")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--chunks", type=int, default=4, help="micro-batches in a step")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64, help="points in a step of one replica")
    args = parser.parse_args()
    rpcpipe.run(train, args, stages=2, replicas=args.replicas)
