"""The benchmark models have the published sizes, train, and may be cut anywhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from benchmarks.models import amoebanetd, resnet, resnet50, resnet101, unet
from rpcpipe.skip import verify_skippables

Builder = Callable[[], nn.Sequential]


def num_parameters(build: Callable[..., nn.Sequential], *args: int, **kwargs: int) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in build(*args, **kwargs).parameters())


def tiny_amoebanetd() -> nn.Sequential:
    return amoebanetd(num_classes=7, num_layers=4, num_filters=16)


def tiny_resnet() -> nn.Sequential:
    return resnet([1, 2], width=4, num_classes=7)


def tiny_unet() -> nn.Sequential:
    return unet(depth=2, num_convs=2, base_channels=4, output_channels=2)


TINY: list[tuple[Builder, tuple[int, ...]]] = [
    (tiny_amoebanetd, (2, 7)),
    (tiny_resnet, (2, 7)),
    (tiny_unet, (2, 2, 32, 32)),
]


@pytest.mark.parametrize(
    ("num_layers", "num_filters", "published"),
    [
        (18, 208, "81.5M"),
        (18, 416, "319.0M"),
        (18, 544, "542.7M"),
        (36, 544, "1.06B"),
        (72, 512, "1.84B"),
    ],
)
def test_amoebanetd_has_published_size(num_layers: int, num_filters: int, published: str) -> None:
    count = num_parameters(
        amoebanetd, num_classes=1000, num_layers=num_layers, num_filters=num_filters
    )
    assert published in (f"{count / 1e6:.1f}M", f"{count / 1e9:.2f}B")


@pytest.mark.parametrize(
    ("num_convs", "base_channels", "published"),
    [
        (6, 72, "362.2M"),
        (11, 128, "2.21B"),
        (24, 128, "4.99B"),
        (24, 160, "7.80B"),
        (48, 160, "15.82B"),
    ],
)
def test_unet_has_published_size(num_convs: int, base_channels: int, published: str) -> None:
    count = num_parameters(unet, num_convs=num_convs, base_channels=base_channels)
    assert published in (f"{count / 1e6:.1f}M", f"{count / 1e9:.2f}B")


def test_resnets_have_exactly_the_parameters_of_torchvisions() -> None:
    assert num_parameters(resnet50) == 25_557_032
    assert num_parameters(resnet101) == 44_549_160


def test_papers_balances_fit() -> None:
    with torch.device("meta"):
        assert len(amoebanetd(1000, num_layers=18, num_filters=208)) == 24
        assert len(unet(num_convs=11)) == 505
        assert len(unet(num_convs=24)) == 526 + 551
        assert len(resnet101()) == 370


@pytest.mark.parametrize(("build", "shape"), TINY)
def test_gradient_reaches_every_parameter(build: Builder, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = build()
    x = torch.randn(2, 3, 32, 32, requires_grad=True)
    y = model(x)
    assert y.shape == shape
    (y * torch.randn_like(y)).sum().backward()
    lost = [
        name
        for name, p in [("input", x), *model.named_parameters()]
        if p.grad is None or not p.grad.isfinite().all() or not p.grad.any()
    ]
    assert lost == []


@pytest.mark.parametrize(("build", "shape"), TINY)
def test_no_layer_changes_what_another_put_out(build: Builder, shape: tuple[int, ...]) -> None:
    model = build()
    seen: list[tuple[Tensor, Tensor]] = []

    def remember(module: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]) -> None:
        for t in output if isinstance(output, tuple) else (output,):
            seen.append((t, t.detach().clone()))

    for layer in model:
        layer.register_forward_hook(remember)
    model(torch.randn(2, 3, 32, 32))
    assert len(seen) >= len(model)
    assert all(torch.equal(now, then) for now, then in seen)


@pytest.mark.parametrize(("build", "shape"), TINY)
def test_between_layers_travels_a_tensor_or_a_tuple_of_tensors(
    build: Builder, shape: tuple[int, ...]
) -> None:
    value: Tensor | tuple[Tensor, ...] = torch.randn(2, 3, 32, 32)
    for layer in build():
        value = layer(value)
        assert all(type(v) is Tensor for v in (value if type(value) is tuple else (value,)))


@pytest.mark.parametrize(("build", "shape"), TINY)
def test_meta_model_materialises_layer_by_layer(build: Builder, shape: tuple[int, ...]) -> None:
    with torch.device("meta"):
        model = build()
    for module in model.modules():
        if [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            module.to_empty(device="cpu", recurse=False)
            module.reset_parameters()  # type: ignore[operator]
    y = model(torch.randn(2, 3, 32, 32))
    assert y.shape == shape
    assert y.isfinite().all()


@pytest.mark.parametrize("size", [33, 39, 47])
def test_sides_need_not_be_divisible(size: int) -> None:
    x = torch.randn(2, 3, size, size + 2)
    assert tiny_amoebanetd()(x).shape == (2, 7)
    assert tiny_resnet()(x).shape == (2, 7)
    assert tiny_unet()(x).shape == (2, 2, size, size + 2)


@pytest.mark.parametrize("num_layers", range(1, 8))
def test_amoebanetd_has_as_many_normal_cells_as_layers(num_layers: int) -> None:
    with torch.device("meta"):
        names = [name for name, _ in amoebanetd(num_layers=num_layers).named_children()]
    assert sum(name.endswith("normal") for name in names) == num_layers
    assert sum(name.endswith("reduction") for name in names) == 4


def test_every_skip_has_its_stash_and_its_pop() -> None:
    for model in (tiny_unet(), tiny_resnet()):
        verify_skippables(model)


def test_partitions_of_unet_run_in_turn_give_the_whole_models_output() -> None:
    model = tiny_unet().eval()
    x = torch.randn(2, 3, 32, 32)
    whole = model(x)
    for cut in (3, len(model) // 2, len(model) - 3):
        assert torch.equal(model[cut:](model[:cut](x)), whole)


def test_stash_without_its_pop_is_refused() -> None:
    layers = list(tiny_unet())
    half = layers[: len(layers) // 2]
    with pytest.raises(TypeError, match="no module declared 'skip' as poppable"):
        verify_skippables(nn.Sequential(*half))


@pytest.mark.parametrize(
    ("build", "given"),
    [
        (lambda: amoebanetd(num_layers=0), "num_layers=0"),
        (lambda: amoebanetd(num_filters=4), "num_filters=4"),
        (lambda: unet(depth=0), "depth=0"),
        (lambda: unet(num_convs=0), "num_convs=0"),
        (lambda: unet(base_channels=1), "base_channels=1"),
    ],
)
def test_impossible_size_says_what_was_given(build: Builder, given: str) -> None:
    with pytest.raises(ValueError, match=given):
        build()
