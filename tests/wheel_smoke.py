"""Two stages trained with nothing but an installed rpcpipe; `.ci/wheel-smoke` runs it."""

import torch
from torch import nn

import rpcpipe


def train(world: rpcpipe.World) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 1))
    pipe = rpcpipe.Pipe(model, world, balance=[2, 2], chunks=4)
    opt = pipe.optimizer(torch.optim.SGD, lr=0.1)
    x = torch.randn(32, 8)
    y = x.sum(1, keepdim=True)

    losses = []
    for _ in range(10):
        loss = nn.functional.mse_loss(pipe(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0], losses
    print("wheel smoke: ok")


if __name__ == "__main__":
    rpcpipe.run(train, stages=2)
