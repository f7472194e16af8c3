"""The loss in the last stage: that of the undivided mini-batch, while only scalars travel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.autograd as dist_autograd
import torch.nn.functional as F
from torch import Tensor, nn
from toys import all_grads, check_equal, grads

import rpcpipe
from rpcpipe import NoChunk, World

two = pytest.mark.parametrize("world", [2], indirect=True)
three = pytest.mark.parametrize("world", [3], indirect=True)

CLASSES = 3
WEIGHT = torch.tensor([0.5, 2.0, 0.25])


def classifier() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, CLASSES))


def labels(rows: int = 7) -> Tensor:
    """Ignored ones are not equally many in each micro-batch."""
    targets = torch.arange(rows) % CLASSES
    targets[:2] = -100
    return targets


def check(pipe: rpcpipe.Pipe, plain: nn.Module, targets: Any, fn: Any, **options: Any) -> Tensor:
    """The loss and all gradients are those of ``fn`` on the undivided mini-batch."""
    x = torch.randn(7, 4)
    pipe.zero_grad()
    plain.zero_grad()
    found = pipe.loss(x, targets, fn, **options)
    wanted = fn(plain(x), targets)
    torch.testing.assert_close(found, wanted)
    found.backward()
    wanted.backward()
    check_equal(all_grads(pipe), grads(plain))
    return found


BUILT_IN: dict[str, tuple[Any, Tensor]] = {
    "cross_entropy": (F.cross_entropy, labels()),
    "sum": (functools.partial(F.cross_entropy, reduction="sum"), labels()),
    "module": (nn.CrossEntropyLoss(), labels()),
    "module sum": (nn.CrossEntropyLoss(reduction="sum"), labels()),
    "ignore_index": (nn.CrossEntropyLoss(ignore_index=1), torch.arange(7) % CLASSES),
    "weighted": (nn.CrossEntropyLoss(weight=WEIGHT), labels()),
    "smoothed": (functools.partial(F.cross_entropy, label_smoothing=0.1, weight=WEIGHT), labels()),
    "probabilities": (nn.CrossEntropyLoss(weight=WEIGHT), torch.rand(7, CLASSES)),
    "mse": (F.mse_loss, torch.randn(7, CLASSES)),
    "mse sum": (nn.MSELoss(reduction="sum"), torch.randn(7, CLASSES)),
    "bce": (nn.BCEWithLogitsLoss(pos_weight=WEIGHT), torch.rand(7, CLASSES)),
    "batchmean": (nn.KLDivLoss(reduction="batchmean"), torch.rand(7, CLASSES)),
    "margin": (nn.MultiMarginLoss(weight=WEIGHT), torch.arange(7) % CLASSES),
}


@three
def test_torch_s_losses_are_those_of_the_undivided_mini_batch(world: World) -> None:
    plain = classifier()
    pipe = rpcpipe.Pipe(plain, world, balance=[2, 1, 1], chunks=3)
    for fn, targets in BUILT_IN.values():
        check(pipe, plain, targets, fn)


@two
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("chunks", [1, 3, 8])
def test_micro_batch_without_a_target_contributes_nothing(
    world: World, checkpoint: str, chunks: int
) -> None:
    plain = classifier()
    pipe = rpcpipe.Pipe(plain, world, balance=[2, 2], chunks=chunks, checkpoint=checkpoint)
    targets = torch.tensor([-100, -100, -100, 0, 1, -100, 2])  # smoothing makes it 0 / 0
    check(pipe, plain, targets, functools.partial(F.cross_entropy, label_smoothing=0.1))


@two
def test_mini_batch_without_a_target_is_not_a_number_as_without_a_pipe(world: World) -> None:
    pipe = rpcpipe.Pipe(classifier(), world, balance=[2, 2], chunks=2)
    nothing = torch.full((4,), -100)
    assert pipe.loss(torch.randn(4, 4), nothing, F.cross_entropy).isnan()


def masked(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
    each = (output - targets["y"]).pow(2).sum(1)
    return (each * targets["mask"]).sum() / targets["mask"].sum()


def mask_sum(targets: dict[str, Tensor]) -> Tensor:
    return targets["mask"].sum()


def total(output: Tensor, y: Tensor) -> Tensor:
    return (output - y).abs().sum()


@two
def test_rule_for_a_loss_of_one_s_own(world: World) -> None:
    plain = classifier()
    pipe = rpcpipe.Pipe(plain, world, balance=[2, 2], chunks=3)
    mask = torch.tensor([0.0, 0, 0, 1, 0.5, 1, 1])  # the first micro-batch: 0 / 0
    check(pipe, plain, {"y": torch.randn(7, CLASSES), "mask": mask}, masked, weight=mask_sum)
    check(pipe, plain, torch.randn(7, CLASSES), total, reduction="sum")


def per_row(output: Tensor, center: Tensor) -> Tensor:
    return (output - center).pow(2).mean()


@two
def test_target_for_every_micro_batch(world: World) -> None:
    plain = classifier()
    pipe = rpcpipe.Pipe(plain, world, balance=[2, 2], chunks=3)
    x, center = torch.randn(7, 4), torch.randn(CLASSES)
    found = pipe.loss(x, NoChunk(center), per_row)
    torch.testing.assert_close(found, per_row(plain(x), center))


@two
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_gradients_are_bitwise_those_of_the_micro_batches_in_turn(
    world: World, checkpoint: str
) -> None:
    plain = classifier()
    pipe = rpcpipe.Pipe(plain, world, balance=[3, 1], chunks=3, checkpoint=checkpoint)
    x, y = torch.randn(7, 4), torch.arange(7) % CLASSES
    (2 * pipe.loss(x, y, F.cross_entropy)).backward()
    sizes = [3, 2, 2]
    parts = zip(x.split(sizes), y.split(sizes), strict=True)
    losses = [F.cross_entropy(plain(a), b) for a, b in parts]
    for loss, rows in reversed(list(zip(losses, sizes, strict=True))):
        loss.backward(2 * torch.tensor(rows / 7))
    found, wanted = all_grads(pipe), grads(plain)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


class Affine(nn.Module):
    def forward(self, x: Tensor, w: Tensor, *, shift: Tensor) -> Tensor:
        return x * w + shift


def distil(output: Tensor, teacher: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = (output - teacher).pow(2).mean()
    return loss, {"output": output, "worst": (output - teacher).abs().max()}


@two
def test_gradients_reach_inputs_and_targets_and_aux_has_none(world: World) -> None:
    plain = nn.Sequential(Affine(), nn.Linear(4, 2))
    pipe = rpcpipe.Pipe(plain, world, balance=[1, 1], chunks=3)
    x, w, shift, teacher = (torch.randn(5, k, requires_grad=True) for k in (4, 4, 4, 2))
    found, aux = pipe.loss((x, w), teacher, distil, kwargs={"shift": shift})
    wanted, expected = distil(plain[1](plain[0](x, w, shift=shift)), teacher)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(aux["output"], expected["output"])
    torch.testing.assert_close(aux["worst"].max(), expected["worst"])
    assert not aux["output"].requires_grad
    assert len(aux["worst"]) == 3
    leaves = [x, w, shift, teacher]
    for a, b in zip(
        torch.autograd.grad(found, leaves), torch.autograd.grad(wanted, leaves), strict=True
    ):
        torch.testing.assert_close(a, b)


@two
def test_loss_adds_up_with_others_and_scales(world: World) -> None:
    plain = classifier()
    pipe = rpcpipe.Pipe(plain, world, balance=[2, 2], chunks=2)
    x, y = torch.randn(5, 4, requires_grad=True), labels(5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    loss = 0.5 * pipe.loss(x, y, F.cross_entropy) + pipe(x).pow(2).mean() + x.square().sum()
    scaler.scale(loss).backward()
    found, x.grad = x.grad, None
    wanted = 0.5 * F.cross_entropy(plain(x), y) + plain(x).pow(2).mean() + x.square().sum()
    torch.testing.assert_close(loss, wanted)
    (8 * wanted).backward()
    assert found is not None
    torch.testing.assert_close(found, x.grad)
    check_equal(all_grads(pipe), grads(plain))


@two
def test_evaluation_and_training_in_one_epoch(world: World) -> None:
    plain = nn.Sequential(nn.Linear(4, 6), nn.Dropout(), nn.Linear(6, CLASSES))
    pipe = rpcpipe.Pipe(plain, world, balance=[2, 1], chunks=3)
    x, y = torch.randn(7, 4), labels()
    for _ in range(2):
        pipe.train()
        pipe.loss(x, y, F.cross_entropy).backward()
        pipe.eval()
        plain.eval()
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                loss = pipe.loss(x, y, F.cross_entropy)
            assert not loss.requires_grad
            torch.testing.assert_close(loss, F.cross_entropy(plain(x), y).detach())


@two
def test_loss_of_the_callers_autograd_context(world: World) -> None:
    plain = classifier()
    pipe = rpcpipe.Pipe(plain, world, balance=[2, 2], chunks=3)
    x, y = torch.randn(7, 4), labels()
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [pipe.loss(x, y, F.cross_entropy)])
        assert all_grads(pipe) == {}


def seen_dtypes(output: Tensor, y: Tensor) -> tuple[Tensor, str]:
    return F.linear(output, torch.ones(1, CLASSES)).mean(), str(
        F.linear(output, torch.ones(1, CLASSES)).dtype
    )


@two
def test_autocast_of_the_driver_holds_for_the_loss(world: World) -> None:
    pipe = rpcpipe.Pipe(classifier(), world, balance=[2, 2], chunks=2)
    x = torch.randn(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, dtype = pipe.loss(x, torch.zeros(4), seen_dtypes)
    assert dtype == "torch.bfloat16"
    assert pipe.loss(x, torch.zeros(4), seen_dtypes)[1] == "torch.float32"


class Smooth(nn.Module):
    """A loss with something to move, and to unpickle once."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.ones(CLASSES))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        type(self).made += 1

    def forward(self, output: Tensor, y: Tensor) -> tuple[Tensor, int]:
        return (output - self.center).abs().mean(), self.made


@two
def test_loss_function_is_unpacked_once(world: World) -> None:
    pipe = rpcpipe.Pipe(classifier(), world, balance=[2, 2], chunks=2)
    fn, x = Smooth(), torch.randn(4, 4)
    counts = {pipe.loss(x, torch.zeros(4), fn)[1] for _ in range(3)}
    assert len(counts) == 1
    fn.center.fill_(5.0)  # an edit arrives
    loss, _ = pipe.loss(x, torch.zeros(4), fn)
    torch.testing.assert_close(loss, fn(classifier()(x), None)[0])


class Refusing(nn.Module):
    """Fails where it is told to."""

    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        if y.min() < 0 or (rpcpipe.is_recomputing() and y.max() > 1):
            raise KeyError("no such class")
        return output.sum()


@two
@pytest.mark.parametrize("value", [-1.0, 2.0])
def test_error_of_the_loss_names_its_phase_and_the_next_step_works(
    world: World, value: float
) -> None:
    pipe = rpcpipe.Pipe(classifier(), world, balance=[2, 2], chunks=2, checkpoint="always")
    y = torch.tensor([1.0, 1.0, 1.0, value])

    def step(targets: Tensor) -> None:
        pipe.loss(torch.randn(4, 4), targets, Refusing()).backward()

    with pytest.raises(rpcpipe.StageError, match="no such class") as caught:
        step(y)
    error = caught.value
    assert (error.stage, error.microbatch, error.phase) == (1, 1, "loss")
    assert isinstance(error.__cause__, KeyError)
    assert "in forward" in error.remote_traceback
    pipe.zero_grad()
    step(torch.ones(4))
    assert all_grads(pipe)


class Learned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        return (self.scale * output).mean()


def vector(output: Tensor, y: Tensor) -> Tensor:
    return output.mean(0)


def negative(targets: Tensor) -> float:
    return -1.0


BAD: list[tuple[Callable[[rpcpipe.Pipe, Tensor, Tensor], Any], type[Exception], str]] = [
    (lambda p, x, y: p.loss(x, y, lambda out, y: out.mean()), TypeError, "pickle"),
    (lambda p, x, y: p.loss(x, y, "mean"), TypeError, "called with"),
    (lambda p, x, y: p.loss(x, y, Learned()), ValueError, "parameters that require grad"),
    (lambda p, x, y: p.loss(x, y, nn.MSELoss(reduction="none")), ValueError, "got 'none'"),
    (lambda p, x, y: p.loss(x, y, total, reduction="max"), ValueError, "got 'max'"),
    (lambda p, x, y: p.loss(x, y, total, weight=negative), ValueError, "at least 0"),
    (lambda p, x, y: p.loss(x, y[:3], total), ValueError, "same leading size"),
    (lambda p, x, y: p.loss(x, y, vector), rpcpipe.StageError, "without dimensions"),
]


@two
def test_bad_arguments_are_refused(world: World) -> None:
    pipe = rpcpipe.Pipe(classifier(), world, balance=[2, 2], chunks=2)
    x, y = torch.randn(4, 4), torch.randn(4, CLASSES)
    for call, kind, message in BAD:
        with pytest.raises(kind, match=message):
            call(pipe, x, y)
    pipe.loss(x, y, F.mse_loss).backward()


class Bound:
    """An output that pickle cannot take."""

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self.get = lambda: value


class Bind(nn.Module):
    def forward(self, x: Tensor) -> Bound:
        return Bound(x)


def of_bound(output: Bound, y: Tensor) -> Tensor:
    return F.cross_entropy(output.get(), y)


@two
def test_outputs_stay_in_the_last_stage(world: World) -> None:
    plain = classifier()
    pipe = rpcpipe.Pipe(nn.Sequential(*plain, Bind()), world, balance=[2, 3], chunks=3)
    x, y = torch.randn(7, 4), labels()
    pipe.loss(x, y, of_bound, weight=classes).backward()
    F.cross_entropy(plain(x), y).backward()
    check_equal(all_grads(pipe), grads(plain))
    with pytest.raises(rpcpipe.StageError, match="pickle"):
        pipe(x)


def classes(targets: Tensor) -> Tensor:
    return (targets != -100).sum()
