"""The classic style of torch.distributed.rpc: your own autograd context, DistributedOptimizer.

    python examples/dist_autograd_style.py --stages 2

A program written for distributed autograd keeps its loop. Gradients go to the context, not to
`.grad`; the optimizer takes RRefs of the parameters. Beside the pipe, the driver trains a layer of
its own in the same context.
"""

import argparse
import sys

import torch
import torch.distributed.autograd as dist_autograd
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef

import rpcpipe


def layers(width: int, depth: int) -> nn.Sequential:
    body = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), *body)


def train(world: rpcpipe.World, args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)

    model = layers(args.width, args.depth)
    pipe = rpcpipe.Pipe(
        model, world, sample=images[: args.batch // args.chunks], chunks=args.chunks
    )
    head = nn.Linear(args.width, 10)  # in the driver's process
    parameters = pipe.parameter_rrefs() + [RRef(p) for p in head.parameters()]
    opt = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1, momentum=0.9)

    losses = []
    for step in range(args.steps):
        rows = torch.randint(len(images), (args.batch,))
        with dist_autograd.context() as context:
            loss = F.cross_entropy(head(pipe(images[rows])), labels[rows])
            dist_autograd.backward(context, [loss])
            opt.step(context)
        losses.append(loss.item())
        if (step + 1) % 20 == 0:
            print(f"step {step + 1:3} of {args.steps}, loss {loss.item():.3f}", flush=True)
    first, last = losses[0], sum(losses[-5:]) / len(losses[-5:])
    print(f"loss {first:.3f} -> {last:.3f}")
    if last >= 0.7 * first:
        sys.exit("the loss is not below 70 % of its first value")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--chunks", type=int, default=4, help="micro-batches in a step")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=64, help="images in a step")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=3, help="hidden layers")
    args = parser.parse_args()
    torch.set_num_interop_threads(
        2
    )  # the caller's backward pass and the pipe's wait for each other
    rpcpipe.run(train, args, stages=args.stages)
