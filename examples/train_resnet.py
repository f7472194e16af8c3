"""Train a small ResNet on scikit-learn's handwritten digits, with batch norm of whole mini-batches.

    python examples/train_resnet.py --stages 2

Shows a measured balance (`sample=`), deferred batch norm, a learning rate schedule of torch.optim
on the driver, and evaluation. The digits (1,797 of 8 x 8 pixels) come with scikit-learn.
"""

import argparse
import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import rpcpipe


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(conv_norm(width, width), nn.ReLU(), conv_norm(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


def conv_norm(before: int, after: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(after))


def resnet(width: int, blocks: int) -> nn.Sequential:
    """A flat list of layers: a pipe is cut between any two of them."""
    wide = 2 * width
    return nn.Sequential(
        conv_norm(1, width), nn.ReLU(),
        *(Residual(width) for _ in range(blocks)),
        conv_norm(width, wide, stride=2), nn.ReLU(),
        *(Residual(wide) for _ in range(blocks)),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(wide, 10),
    )  # fmt: skip


def read_digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images to train on and their labels, and 297 others to test on."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels, shuffled = torch.tensor(digits.target), torch.randperm(len(images))
    images, labels = images[shuffled], labels[shuffled]
    return images[:1500], labels[:1500], images[1500:], labels[1500:]


def train(world: rpcpipe.World, args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    images, labels, unseen, theirs = read_digits()
    pipe = rpcpipe.Pipe(
        resnet(args.width, args.blocks),
        world,
        sample=images[: args.batch // args.chunks],
        chunks=args.chunks,
        deferred_batch_norm=True,
    )
    print(pipe)
    opt = pipe.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-4)
    steps = args.epochs * (len(images) // args.batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)

    means = []
    for epoch in range(args.epochs):
        pipe.train()
        losses = []
        batches = torch.randperm(len(images)).split(args.batch)[: len(images) // args.batch]
        for rows in batches:
            loss = F.cross_entropy(pipe(images[rows]), labels[rows])
            loss.backward()
            opt.step()
            opt.zero_grad()
            schedule.step()
            losses.append(loss.item())
        means.append(sum(losses) / len(losses))
        pipe.eval()
        with torch.no_grad():
            right = (pipe(unseen).argmax(1) == theirs).float().mean()
        print(
            f"epoch {epoch}: loss {means[-1]:.3f}, {right:.1%} of unseen digits right", flush=True
        )
    if means[-1] >= 0.7 * means[0]:
        sys.exit("the loss is not below 70 % of the first epoch's")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--chunks", type=int, default=4, help="micro-batches in a step")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64, help="images in a step")
    parser.add_argument("--width", type=int, default=16, help="channels of the first blocks")
    parser.add_argument("--blocks", type=int, default=2, help="residual blocks of each width")
    args = parser.parse_args()
    rpcpipe.run(train, args, stages=args.stages)
