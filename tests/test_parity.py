"""What torchgpipe offers, across processes, and what its users missed."""

from __future__ import annotations

import logging
import time

import pytest
import torch
from torch import Tensor, nn
from toys import all_grads, check_equal, grads

import rpcpipe
from rpcpipe import BalanceError, World
from rpcpipe.schedule import MODES

two = pytest.mark.parametrize("world", [2], indirect=True)
three = pytest.mark.parametrize("world", [3], indirect=True)
four = pytest.mark.parametrize("world", [4], indirect=True)
every_mode = pytest.mark.parametrize("mode", MODES)

# ----------------------------------------------------------------------------------------- names


@two
def test_a_checkpoint_of_torchgpipe_loads(world: World) -> None:
    """Its names tell the partition, the wrapper of a skippable, and unfinished statistics."""
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 4)))
    plain = {name: torch.full_like(t, 2) for name, t in module.state_dict().items()}
    theirs = {
        **{f"partitions.0.{name}": t for name, t in plain.items() if name[0] == "0"},
        **{f"partitions.1.{name}": t for name, t in plain.items() if name[0] == "1"},
        **{f"partitions.1.2.module.{name[2:]}": t for name, t in plain.items() if name[0] == "2"},
        "partitions.1.1.sum": torch.zeros(4),
        "partitions.1.1.sum_squares": torch.zeros(4),
    }
    pipe = rpcpipe.Pipe(module, world, balance=[2, 1])
    pipe.load_state_dict(theirs)
    check_equal(pipe.state_dict(), plain)
    with pytest.raises(RuntimeError, match=r"unexpected keys.*nonsense"):
        pipe.load_state_dict({**theirs, "partitions.0.nonsense": torch.zeros(1)})


@two
def test_layers_and_parameters_can_be_looked_up(world: World) -> None:
    pipe = rpcpipe.Pipe(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), world, balance=[1, 1])
    assert pipe[1] == ("1", "ReLU", 1)
    assert [layer.stage for layer in pipe] == [0, 1]
    infos = pipe.named_parameters_info()
    assert [(i.name, i.shape, i.stage) for i in infos] == [
        ("0.weight", (3, 4), 0),
        ("0.bias", (3,), 0),
    ]


# ------------------------------------------------------------------------------------ batch norm


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.ReLU(), nn.BatchNorm2d(3, momentum=None)
    )


@two
@every_mode
def test_deferred_statistics_are_those_of_the_mini_batch(world: World, mode: str) -> None:
    first = nn.Sequential(*list(normed())[:2])
    pipe = rpcpipe.Pipe(
        normed(), world, balance=[2, 2], chunks=4, checkpoint=mode, deferred_batch_norm=True
    )
    for _ in range(3):
        x = torch.randn(6, 2, 3, 3)
        pipe(x).sum().backward()
        first(x)
    state = pipe.state_dict()
    assert state.keys() == normed().state_dict().keys()
    assert state["1.num_batches_tracked"] == state["3.num_batches_tracked"] == 3
    for name, value in first.state_dict().items():
        torch.testing.assert_close(state[name], value)


@two
def test_plain_batch_norm_is_warned_of_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "rpcpipe"):
        rpcpipe.Pipe(normed(), world, balance=[2, 2], chunks=2)
        rpcpipe.Pipe(normed(), world, balance=[2, 2], chunks=2, checkpoint="never")
    (record,) = caplog.records
    assert "deferred_batch_norm=True" in record.message


# --------------------------------------------------------------------------------------- balance


class Busy(nn.Module):
    """Holds the interpreter, as Python does."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.rounds = rounds
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        total = 0
        for k in range(self.rounds):
            total += k
        return x * self.weight


@two
def test_balance_is_measured_with_a_sample(world: World) -> None:
    module = nn.Sequential(Busy(300_000), Busy(1), Busy(1), Busy(1))
    pipe = rpcpipe.Pipe(module, world, sample=torch.ones(1, 2))
    assert pipe.balance == [1, 3]
    with pytest.raises(BalanceError, match=r"\[2, 2\]"):
        rpcpipe.Pipe(module, world)


# ----------------------------------------------------------------------------- its limits, gone


@two
def test_stages_of_pure_python_overlap(world: World) -> None:
    """Threads of one process would take turns."""
    pipe = rpcpipe.Pipe(
        nn.Sequential(Busy(400_000), Busy(400_000)), world, balance=[1, 1], chunks=6
    )
    x = torch.ones(6, 2)
    shares = []
    for _ in range(5):
        with torch.no_grad(), pipe.record() as timeline:
            pipe(x)
        (step,) = timeline.steps()
        busy = sum(span.end - span.start for stage in step.spans for span in stage)
        shares.append(step.makespan / busy)
    assert min(shares) < 0.75, shares  # 7 of 12 at best


class Mixed(nn.Module):
    def forward(self, x: Tensor) -> dict[str, object]:
        return {"y": x * 2, "largest": x.argmax(1), "rest": [None, 3, "name", x.sum()]}


class Unmixed(nn.Module):
    def forward(self, given: dict[str, object]) -> dict[str, object]:
        assert given["rest"][:3] == [None, 3, "name"]
        return {**given, "y": given["y"] + given["largest"][:, None]}


@two
@every_mode
def test_nested_values_of_all_kinds_pass(world: World, mode: str) -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 3), Mixed(), Unmixed())

    pipe = rpcpipe.Pipe(build(), world, balance=[2, 1], chunks=2, checkpoint=mode)
    x, plain = torch.randn(5, 3), build()
    found, wanted = pipe(x), plain(x)
    assert found["rest"][:3] == [None, 3, "name"]
    torch.testing.assert_close(found["rest"][3].sum(), wanted["rest"][3])  # one a micro-batch
    assert torch.equal(found["largest"], wanted["largest"])
    (found["y"].sum() + found["rest"][3].sum()).backward()
    (wanted["y"].sum() + wanted["rest"][3]).backward()
    check_equal(all_grads(pipe), grads(plain))


@two
def test_pipes_in_turn_and_interleaved(world: World) -> None:
    plain = [nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)) for _ in range(3)]
    pipes = [rpcpipe.Pipe(module, world, balance=[1, 1], chunks=2) for module in plain]
    x = torch.randn(4, 3)
    losses = [pipe(x).pow(2).sum() for pipe in pipes]
    for loss in reversed(losses):
        loss.backward()
    for pipe, module in zip(pipes, plain, strict=True):
        module(x).pow(2).sum().backward()
        check_equal(all_grads(pipe), grads(module))


@two
def test_gradient_of_an_input_by_autograd_grad(world: World) -> None:
    plain = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    pipe = rpcpipe.Pipe(plain, world, balance=[1, 1], chunks=2)
    x = torch.randn(4, 3, requires_grad=True)
    (found,) = torch.autograd.grad(pipe(x).sum(), x)
    (wanted,) = torch.autograd.grad(plain(x).sum(), x)
    torch.testing.assert_close(found, wanted)


@two
def test_hooks_of_the_pipe_see_its_input_and_output(world: World) -> None:
    pipe = rpcpipe.Pipe(nn.Sequential(nn.Identity(), nn.Identity()), world, balance=[1, 1])
    seen = []
    pipe.register_forward_hook(lambda module, args, output: seen.append((args, output)))
    x = torch.ones(2, 2)
    pipe(x)
    ((args, output),) = seen
    assert args[0] is x
    assert torch.equal(output, x)


class Device(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.0


def device_of(module: nn.Module) -> str:
    return str(next(module.buffers(), torch.zeros(0)).device)


@two
def test_a_stage_without_parameters_and_moving_is_refused(world: World) -> None:
    module = nn.Sequential(nn.Linear(2, 2), Device())
    pipe = rpcpipe.Pipe(module, world, balance=[1, 1], chunks=2)
    opt = pipe.optimizer(torch.optim.SGD, lr=0.1)
    pipe(torch.ones(4, 2)).sum().backward()
    opt.step()
    opt.zero_grad()
    for move in (pipe.cuda, pipe.cpu, lambda: pipe.to("cpu"), pipe.half):
        with pytest.raises(TypeError, match="devices="):
            move()
    assert len(pipe) == 2
    assert "(stage 1): 1 layers on cpu" in repr(pipe)


@two
def test_idle_stages_use_no_processor(world: World) -> None:
    pipe = rpcpipe.Pipe(nn.Sequential(nn.Linear(2, 2), Device()), world, balance=[1, 1])
    pipe(torch.ones(4, 2)).sum().backward()
    before = [pipe.apply_to_stage(j, cpu_time) for j in range(2)]
    begin = time.monotonic()
    while time.monotonic() - begin < 1.0:  # the time that is measured
        time.sleep(0.1)
    after = [pipe.apply_to_stage(j, cpu_time) for j in range(2)]
    assert all(b - a < 0.1 for a, b in zip(before, after, strict=True))


def cpu_time(module: nn.Module) -> float:
    return time.process_time()
