"""Models as they come: traced, cut, and the same as before in every respect."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toys import all_grads, check_equal, grads

import rpcpipe
from rpcpipe import Pipe, World
from rpcpipe.cut import cut
from rpcpipe.schedule import MODES

three = pytest.mark.parametrize("world", [3], indirect=True)


def check_state(pipe: Pipe, plain: nn.Module) -> None:
    found, wanted = pipe.state_dict(), plain.state_dict()
    assert found.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], msg=lambda m, n=name: f"{n}: {m}")


def check_training(
    pipe: Pipe, plain: nn.Module, batch: Any, loss: Callable[[Any], Tensor], parts: list[Any]
) -> None:
    """Two optimizer steps like those of the plain module on the same micro-batches."""
    optimizers = pipe.optimizer(torch.optim.SGD, lr=0.1), torch.optim.SGD(plain.parameters(), 0.1)
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss(pipe(*batch) if isinstance(batch, tuple) else pipe(batch)).backward()
        for part in parts:
            loss(plain(**part) if isinstance(part, dict) else plain(part)).backward()
        check_equal(all_grads(pipe), grads(plain))
        for optimizer in optimizers:
            optimizer.step()
    check_state(pipe, plain)


# -------------------------------------------------------------------------- models as they come


@three
@pytest.mark.timeout(300)
def test_gpt2_of_hugging_face(world: World) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 4, "n_head": 2, "n_embd": 16, "vocab_size": 50, "n_positions": 16}
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(0)
    plain = GPT2LMHeadModel(GPT2Config(use_cache=False, **sizes, **none, **ends)).train()
    ids = torch.randint(0, 50, (7, 8))
    pipe = Pipe.from_module(plain, world, {"input_ids": ids}, chunks=3)
    assert {info.stage for info in pipe.named_parameters_info()} == {0, 1, 2}

    def loss(out: Any) -> Tensor:
        return out.logits.pow(2).sum() / 100

    parts = [{"input_ids": part} for part in ids.split([3, 2, 2])]
    for mode in MODES:
        pipe.checkpoint = mode
        check_training(pipe, plain, {"input_ids": ids}, loss, parts)
    pipe.eval()
    plain.eval()
    (found,) = pipe.predict([{"input_ids": ids[:5]}])
    torch.testing.assert_close(found.logits, plain(ids[:5]).logits.detach())


@three
@pytest.mark.timeout(300)
def test_vit_of_hugging_face(world: World) -> None:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = ViTConfig(intermediate_size=32, image_size=16, patch_size=8, num_labels=3, **sizes)
    plain = ViTForImageClassification(config).train()
    images = torch.randn(5, 3, 16, 16)
    blocks = [name for name, m in plain.named_modules() if type(m).__name__ == "ViTLayer"]
    pipe = Pipe.from_module(plain, world, images, split=blocks[1:], chunks=2)

    def loss(out: Any) -> Tensor:
        return out.logits.pow(2).sum() / 100

    for mode in MODES:
        pipe.checkpoint = mode
        check_training(pipe, plain, images, loss, list(images.split([3, 2])))


class BasicBlock(nn.Module):
    """As torchvision has it."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.downsample = None
        if stride != 1 or inside != outside:
            conv = nn.Conv2d(inside, outside, 1, stride, bias=False)
            self.downsample = nn.Sequential(conv, nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(2)
        self.layer1 = nn.Sequential(BasicBlock(4, 4, 1), BasicBlock(4, 4, 1))
        self.layer2 = nn.Sequential(BasicBlock(4, 8, 2), BasicBlock(8, 8, 1))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.avgpool(self.layer2(self.layer1(x)))
        return self.fc(torch.flatten(x, 1))


@three
@pytest.mark.parametrize("checkpoint", MODES)
def test_resnet_counts_each_micro_batch_once(world: World, checkpoint: str) -> None:
    torch.manual_seed(0)
    plain = ResNet()
    images = torch.randn(6, 3, 8, 8)
    pipe = Pipe.from_module(plain, world, images, chunks=2, checkpoint=checkpoint)
    check_training(pipe, plain, images, lambda out: out.pow(2).sum(), list(images.split([3, 3])))


# ------------------------------------------------------------------------------------ the cut


class Far(nn.Module):
    """A skip over two stages, of a tensor and of a size; a tied weight; a mask that is no layer's;
    parts that differ in training; and a layer that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.drop = nn.Dropout(0.5)
        self.first = self.seed = nn.Linear(2, 2)  # nothing uses it, and a stage has these names
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(6), persistent=False)

    def forward(self, ids: Tensor, scale: Tensor, *, cut: int = 0) -> dict[str, Any]:
        early = x = self.embed(ids)
        for block in self.blocks:
            x = block(x).relu_()
        if self.training:
            x = self.drop(x) + 1
        with torch.no_grad():
            far = early.mean() * x.shape[0]
        y = self.head(x + early * self.mask + far) * scale
        return {"y": y[:, cut:], "width": x.shape[1]}


def far() -> Far:
    torch.manual_seed(0)
    return Far()


FAR = (torch.arange(6) % 9, torch.ones(6, 1))
SPLIT = ["blocks.1", "blocks.2"]


@three
def test_skips_ties_and_modes(world: World) -> None:
    plain = far()
    pipe = Pipe.from_module(plain, world, FAR, split=SPLIT, chunks=2, seed=1)
    check_state(pipe, plain)
    a, b = pipe(*FAR)["y"], pipe(*FAR)["y"]
    assert (a != b).any()
    pipe.eval()
    plain.eval()
    for rows, chunks in ((6, 2), (5, 5), (1, 2)):
        ids, scale = torch.arange(rows), torch.rand(rows, 1, requires_grad=True)
        pipe.chunks = chunks
        out = pipe(ids, scale=scale)
        assert out["width"] == 6
        pipe.zero_grad()
        plain.zero_grad()
        sizes = [len(part) for part in ids.tensor_split(min(rows, chunks))]
        parts = zip(ids.split(sizes), scale.split(sizes), strict=True)
        wanted = [plain(*part)["y"] for part in parts]
        torch.testing.assert_close(out["y"], torch.cat(wanted))
        (found,) = torch.autograd.grad(out["y"].pow(2).sum(), scale)
        pipe(ids, scale.detach())["y"].pow(2).sum().backward()
        torch.cat(wanted).pow(2).sum().backward()
        torch.testing.assert_close(found, scale.grad)


@three
def test_loss_on_the_last_stage_of_a_traced_module(world: World) -> None:
    plain = far().eval()
    pipe = Pipe.from_module(plain, world, FAR, split=SPLIT)
    targets = torch.arange(6) % 9
    found = pipe.loss(FAR, targets, logits_loss)
    torch.testing.assert_close(found, logits_loss(plain(*FAR), targets))
    found.backward()
    logits_loss(plain(*FAR), targets).backward()
    tied = "embed.weight"
    torch.testing.assert_close(all_grads(pipe)[tied], grads(plain)[tied])


def logits_loss(out: dict[str, Tensor], targets: Tensor) -> Tensor:
    return F.cross_entropy(out["y"], targets)


@three
def test_what_a_traced_module_is_not_given(world: World) -> None:
    pipe = Pipe.from_module(far(), world, FAR, split=SPLIT)
    ids, scale = FAR
    for args, kwargs, message in [
        ((ids,), {}, "traced with the arguments ids, scale, and got ids"),
        ((ids, scale), {"cut": 1}, "got ids, scale, cut"),
        ((ids, scale.expand(6, 9)), {}, "of any number of rows"),
        ((ids.float(), scale), {}, "of any number of rows"),
    ]:
        with pytest.raises(rpcpipe.StageError, match=message):
            pipe(*args, **kwargs)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x))) if x.sum() > 0 else x


class InPlace(Branches):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        row = y.view(-1)
        row += self.b(x).view(-1)
        return self.c(x) + y


class Counted(Branches):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x))).reshape(6, 2)


def test_what_cannot_be_cut_says_what_to_do() -> None:
    x = torch.randn(6, 2)
    with pytest.raises(ValueError, match=r"cannot trace Branches.*\n?[\s\S]*nn.Sequential"):
        cut(Branches(), x, 2)
    with pytest.raises(ValueError, match=r"cannot trace Counted"):
        cut(Counted(), x, 2)
    with pytest.raises(ValueError, match="in place"):
        cut(InPlace(), x, 3, ["b", "c"])
    with pytest.raises(ValueError, match="at least two rows"):
        cut(far(), (FAR[0][:1], FAR[1][:1]), 2)
    with pytest.raises(ValueError, match="2 for 3 stages"):
        cut(far(), FAR, 3, ["blocks.1"])
    with pytest.raises(ValueError, match="there is no 'layer'"):
        cut(far(), FAR, 2, ["layer"])
    with pytest.raises(ValueError, match="'seed' does nothing"):
        cut(far(), FAR, 2, ["seed"])
    with pytest.raises(ValueError, match="in the order"):
        cut(far(), FAR, 3, ["blocks.2", "blocks.1"])
    with pytest.raises(ValueError, match="use fewer stages"):
        cut(far(), FAR, 9)
    with pytest.raises(TypeError, match="sample="):
        cut(far(), (FAR[0],), 2)


def test_tracing_is_told_of_with_the_cut_that_was_found(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "rpcpipe"):
        cut(far(), FAR, 2)
    found = [r.getMessage() for r in caplog.records if r.name == "rpcpipe"]
    assert len(found) == 1
    assert re.search(r"traced Far in \d+\.\d s; stages begin with \['[\w.]+'\]", found[0])


def test_model_is_left_as_it_was() -> None:
    plain = far()
    plain.drop.eval()
    before = copy.deepcopy(plain)
    cut(plain, FAR, 2)
    assert [m.training for m in plain.modules()] == [m.training for m in before.modules()]
    for name, value in before.state_dict().items():
        assert torch.equal(plain.state_dict()[name], value)


@three
def test_options_that_do_not_go_with_a_trace(world: World) -> None:
    images = torch.randn(2, 3, 8, 8)
    with pytest.raises(ValueError, match="cuts by split="):
        Pipe.from_module(ResNet(), world, images, balance=[1, 1, 1])
    with pytest.raises(ValueError, match="deferred_batch_norm"):
        Pipe.from_module(ResNet(), world, images, deferred_batch_norm=True)
