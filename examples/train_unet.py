"""Train a U-Net to take the noise off photographs: its skips pass stages by.

    python examples/train_unet.py --stages 3

Each level of the U-Net stashes what it has on its way down and pops it on its way up again; the
pipe sends it straight from the one stage to the other. The two photographs come with scikit-learn.
"""

import argparse
import sys
from collections.abc import Generator

import torch
import torch.nn.functional as F
from sklearn.datasets import load_sample_images
from torch import Tensor, nn

import rpcpipe
from rpcpipe.skip import Namespace, pop, skippable, stash


def convolutions(before: int, after: int) -> nn.Sequential:
    first, second = nn.Conv2d(before, after, 3, padding=1), nn.Conv2d(after, after, 3, padding=1)
    return nn.Sequential(first, nn.GELU(), second, nn.GELU())


@skippable(stash=["across"])
class Down(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.body = convolutions(before, after)

    def forward(self, x: Tensor) -> Generator[stash, None, Tensor]:
        x = self.body(x)
        yield stash("across", x)
        return F.max_pool2d(x, 2)


@skippable(pop=["across"])
class Up(nn.Module):
    def __init__(self, before: int, across: int) -> None:
        super().__init__()
        self.body = convolutions(before + across, across)

    def forward(self, x: Tensor) -> Generator[pop, Tensor, Tensor]:
        across = yield pop("across")
        return self.body(torch.cat([F.interpolate(x, scale_factor=2), across], dim=1))


def unet(width: int, depth: int) -> nn.Sequential:
    widths = [width << k for k in range(depth)]
    levels = [Namespace() for _ in widths]  # keep skips of one name apart
    down = [Down(a, b).isolate(s) for a, b, s in zip([3, *widths], widths, levels, strict=False)]
    deepest = convolutions(widths[-1], 2 * widths[-1])
    up = [Up(2 * c, c).isolate(s) for c, s in zip(reversed(widths), reversed(levels), strict=True)]
    return nn.Sequential(*down, deepest, *up, nn.Conv2d(width, 3, 1))


def pieces(photographs: Tensor, count: int, side: int) -> Tensor:
    """Random squares of the photographs, shape (count, 3, side, side)."""
    which = torch.randint(len(photographs), (count,)).tolist()
    tops = torch.randint(photographs.shape[2] - side, (count,)).tolist()
    lefts = torch.randint(photographs.shape[3] - side, (count,)).tolist()
    return torch.stack(
        [
            photographs[k, :, y : y + side, x : x + side]
            for k, y, x in zip(which, tops, lefts, strict=True)
        ]
    )


def train(world: rpcpipe.World, args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    images = torch.stack([torch.tensor(image) for image in load_sample_images().images])
    photographs = images.permute(0, 3, 1, 2).float() / 255  # (2, 3, 427, 640)
    model = unet(args.width, args.depth)
    sample = pieces(photographs, max(1, args.batch // args.chunks), args.side)
    pipe = rpcpipe.Pipe(model, world, sample=sample, chunks=args.chunks, checkpoint="always")
    print(pipe)
    opt = pipe.optimizer(torch.optim.AdamW, lr=2e-3)

    losses = []
    for step in range(args.steps):
        clean = pieces(photographs, args.batch, args.side)
        noisy = clean + 0.2 * torch.randn_like(clean)
        loss = F.mse_loss(pipe(noisy), clean)
        loss.backward()
        opt.step(max_norm=1.0)
        opt.zero_grad()
        losses.append(loss.item())
        if (step + 1) % 20 == 0:
            print(f"step {step + 1:3} of {args.steps}, loss {loss.item():.4f}", flush=True)
    first, last = losses[0], sum(losses[-5:]) / len(losses[-5:])
    noise = F.mse_loss(noisy, clean).item()
    print(f"squared error {first:.4f} -> {last:.4f}; that of the noisy pictures is {noise:.4f}")
    if last >= 0.5 * first:
        sys.exit("the loss is not below half of its first value")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--chunks", type=int, default=4, help="micro-batches in a step")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16, help="pieces in a step")
    parser.add_argument("--side", type=int, default=64, help="pixels of a piece's side")
    parser.add_argument("--width", type=int, default=16, help="channels of the first level")
    parser.add_argument("--depth", type=int, default=3, help="levels")
    args = parser.parse_args()
    rpcpipe.run(train, args, stages=args.stages)
