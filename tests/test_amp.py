"""Mixed precision: torch's own GradScaler and bfloat16 parameters, on a pipe."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import check_equal, mlp

import rpcpipe
from rpcpipe import World

two = pytest.mark.parametrize("world", [2], indirect=True)


class Overflow(nn.Module):
    """Before a tanh: makes NaN of the gradient where its input is large; the output is not."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.where(x.abs() > 100, float("inf"), 1.0)


def model() -> nn.Sequential:
    return nn.Sequential(mlp()[0], Overflow(), *mlp()[1:])


def amp_step(model: Any, opt: Any, scaler: torch.amp.GradScaler, x: Tensor, clip: bool) -> None:
    opt.zero_grad()
    scaler.scale(model(x).pow(2).sum()).backward()
    if clip:
        scaler.unscale_(opt)
    scaler.step(opt)
    scaler.update()


@two
def test_grad_scaler_skips_the_step_of_all_stages_on_an_infinite_gradient(world: World) -> None:
    plain = model()
    pipe = rpcpipe.Pipe(model(), world, balance=[2, 5], chunks=2)
    opts = pipe.optimizer(torch.optim.Adam, lr=0.1), torch.optim.Adam(plain.parameters(), lr=0.1)
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) for _ in range(2)]
    x = torch.rand(4, 4)
    scales = []
    for step in range(6):
        with torch.no_grad():
            x[0, 0] = 1e6 if step in (1, 2) else 0.5
        before = pipe.state_dict()
        amp_step(pipe, opts[0], scalers[0], x, clip=step % 2 == 0)
        amp_step(plain, opts[1], scalers[1], x, clip=step % 2 == 0)
        if step in (1, 2):
            check_equal(pipe.state_dict(), before)
        check_equal(pipe.state_dict(), plain.state_dict())
        assert scalers[0].state_dict() == scalers[1].state_dict()
        scales.append(scalers[0].get_scale())
    assert scales == [8.0, 4.0, 2.0, 2.0, 4.0, 4.0]


@two
def test_unscaled_gradients_can_be_clipped_and_are_unscaled_once(world: World) -> None:
    plain = mlp()
    pipe = rpcpipe.Pipe(mlp(), world, balance=[2, 4])
    sgd = {"lr": 0.1, "fused": True}  # which scales by itself where a scaler knows it
    opts = pipe.optimizer(torch.optim.SGD, **sgd), torch.optim.SGD(plain.parameters(), **sgd)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
    x = torch.rand(4, 4)
    for m, opt, scaler in zip((pipe, plain), opts, scalers, strict=True):
        scaler.scale(m(x).sum()).backward()
        scaler.unscale_(opt)
        with pytest.raises(RuntimeError, match="already been called"):
            scaler.unscale_(opt)
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    scalers[1].step(opts[1])
    found = scalers[0].step(opts[0], max_norm=0.1)
    assert isinstance(found, Tensor)
    torch.testing.assert_close(found, norm.double(), rtol=1e-5, atol=0)
    check_equal(pipe.state_dict(), plain.state_dict())


@two
def test_autocast_on_the_driver_trains_as_it_does_alone(world: World) -> None:
    plain = mlp()
    pipe = rpcpipe.Pipe(mlp(), world, balance=[2, 4], checkpoint="always")
    opts = pipe.optimizer(torch.optim.SGD, lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0) for _ in range(2)]
    x = torch.rand(4, 4)
    for m, opt, scaler in zip((pipe, plain), opts, scalers, strict=True):
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.float16):
                out = m(x)
            assert out.dtype == torch.float16
            scaler.scale(out.float().pow(2).sum()).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
    check_equal(pipe.state_dict(), plain.state_dict())


@two
def test_bfloat16_parameters_train_bit_for_bit(world: World) -> None:
    plain = mlp().to(torch.bfloat16)
    pipe = rpcpipe.Pipe(mlp().to(torch.bfloat16), world, balance=[2, 4])
    opts = pipe.optimizer(torch.optim.AdamW, lr=0.1), torch.optim.AdamW(plain.parameters(), lr=0.1)
    x = torch.rand(4, 4, dtype=torch.bfloat16)
    for m, opt in zip((pipe, plain), opts, strict=True):
        for _ in range(3):
            m(x).pow(2).sum().backward()
            opt.step()
            opt.zero_grad()
    found, wanted = pipe.state_dict(), plain.state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    moments = opts[0].state_dict()["state"][0]["exp_avg"]
    assert moments.dtype == torch.bfloat16


@two
def test_half_precision_gradients_are_not_unscaled(world: World) -> None:
    pipe = rpcpipe.Pipe(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).half(), world, balance=[1, 1]
    )
    opt = pipe.optimizer(torch.optim.SGD, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(pipe(torch.rand(2, 4, dtype=torch.float16)).sum()).backward()
    with pytest.raises(rpcpipe.StageError, match="unscale FP16 gradients"):
        scaler.unscale_(opt)
