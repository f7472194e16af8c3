"""AmoebaNet-D (L, D): the evolved image classifier (arXiv 1802.01548) that GPipe was measured on.

Between cells travels a pair: what the last cell put out, and what it was given.

Drop path, dropout and the auxiliary head belong to a training recipe, not to the model that the
GPipe papers measure; they are left out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["amoebanetd"]

Op = Callable[[int, int], nn.Module]  # (channels, stride) -> layer that keeps the channels


def relu_conv_bn(
    in_channels: int,
    out_channels: int,
    kernel: tuple[int, int] = (1, 1),
    stride: tuple[int, int] = (1, 1),
) -> nn.Sequential:
    padding = (kernel[0] // 2, kernel[1] // 2)
    return nn.Sequential(
        nn.ReLU(),
        nn.Conv2d(in_channels, out_channels, kernel, stride, padding, bias=False),
        nn.BatchNorm2d(out_channels),
    )


class FactorizedReduce(nn.Module):
    """Halves height and width: one half of the channels sees even pixels, the other odd ones."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        half = out_channels // 2
        self.even = nn.Conv2d(in_channels, half, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(in_channels, out_channels - half, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(x)
        shifted = F.pad(x, (0, 1, 0, 1))[:, :, 1:, 1:]
        y: Tensor = self.norm(torch.cat([self.even(x), self.odd(shifted)], dim=1))
        return y


def identity(channels: int, stride: int) -> nn.Module:
    assert stride == 1  # neither cell reduces by it
    return nn.Identity()


def avg_pool_3x3(channels: int, stride: int) -> nn.Module:
    return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)


def max_pool_3x3(channels: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(3, stride, padding=1)


def max_pool_2x2(channels: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(2, stride, ceil_mode=True)  # odd sizes round up, as in the other operations


def conv_1x1(channels: int, stride: int) -> nn.Module:
    return relu_conv_bn(channels, channels, stride=(stride, stride))


def conv_3x3(channels: int, stride: int) -> nn.Module:
    narrow = channels // 4
    return nn.Sequential(
        relu_conv_bn(channels, narrow),
        relu_conv_bn(narrow, narrow, (3, 3), (stride, stride)),
        relu_conv_bn(narrow, channels),
    )


def conv_1x7_7x1(channels: int, stride: int) -> nn.Module:
    narrow = channels // 4
    return nn.Sequential(
        relu_conv_bn(channels, narrow),
        relu_conv_bn(narrow, narrow, (1, 7), (1, stride)),
        relu_conv_bn(narrow, narrow, (7, 1), (stride, 1)),
        relu_conv_bn(narrow, channels),
    )


class Genotype(NamedTuple):
    """What evolution found: node k sums two operations on earlier states and is state k + 2."""

    nodes: tuple[tuple[tuple[Op, int], tuple[Op, int]], ...]
    outputs: tuple[int, ...]  # the states that are concatenated


# States 0 and 1 are the last cell's output and its input. The AmoebaNet paper draws (4, 5, 6) as
# the normal cell's outputs; the published parameter counts follow its TensorFlow code, used here.
NORMAL = Genotype(
    nodes=(
        ((conv_1x1, 1), (max_pool_3x3, 1)),
        ((identity, 1), (conv_1x7_7x1, 0)),
        ((conv_1x1, 0), (conv_1x7_7x1, 0)),
        ((max_pool_3x3, 2), (identity, 2)),
        ((avg_pool_3x3, 1), (conv_1x1, 5)),
    ),
    outputs=(0, 3, 4, 6),
)
REDUCTION = Genotype(
    nodes=(
        ((max_pool_2x2, 0), (max_pool_3x3, 0)),
        ((identity, 2), (conv_3x3, 1)),
        ((conv_1x7_7x1, 2), (max_pool_3x3, 2)),
        ((identity, 3), (max_pool_2x2, 1)),
        ((avg_pool_3x3, 2), (conv_1x1, 3)),
    ),
    outputs=(4, 5, 6),
)


class Stem(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, image: Tensor) -> Tensor:
        y: Tensor = self.norm(self.conv(image))
        return y


class Cell(nn.Module):
    """One cell; a reducing one strides wherever it reads from the two states it was given."""

    def __init__(
        self, before: int, last: int, channels: int, *, reduces: bool, follows_reduction: bool
    ) -> None:
        super().__init__()
        genotype = REDUCTION if reduces else NORMAL
        edges = [edge for node in genotype.nodes for edge in node]
        self.sources = [state for _, state in edges]
        self.outputs = genotype.outputs
        self.out_channels = channels * len(genotype.outputs)

        self.fit_last = relu_conv_bn(last, channels)
        self.fit_before: nn.Module = nn.Identity()
        if follows_reduction:
            self.fit_before = FactorizedReduce(before, channels)
        elif before != channels:
            self.fit_before = relu_conv_bn(before, channels)
        self.operations = nn.ModuleList(
            op(channels, 2 if reduces and state < 2 else 1) for op, state in edges
        )

    def forward(self, given: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        last, before = given if isinstance(given, tuple) else (given, given)
        states = [self.fit_last(last), self.fit_before(before)]
        operations = iter(zip(self.operations, self.sources, strict=True))
        for (left, a), (right, b) in zip(operations, operations, strict=True):
            states.append(left(states[a]) + right(states[b]))
        return torch.cat([states[k] for k in self.outputs], dim=1), last


class Classify(nn.Module):
    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, num_classes)

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        last, _ = given
        logits: Tensor = self.linear(F.relu(last).mean(dim=(2, 3)))
        return logits


def amoebanetd(num_classes: int = 10, num_layers: int = 4, num_filters: int = 512) -> nn.Sequential:
    """AmoebaNet-D (L, D): ``num_layers`` normal cells in three sections, ``num_filters`` wide.

    Images are halved five times: by the stem, two reduction cells after it and one before each
    later section. Each reduction cell doubles the channels, which start at ``num_filters // 4``.
    """
    if num_layers < 1 or num_filters < 8:
        raise ValueError(
            "AmoebaNet-D needs at least 1 layer and 8 filters, got "
            f"num_layers={num_layers}, num_filters={num_filters}"
        )
    a, b = num_layers // 3, 2 * num_layers // 3
    plan = "RR" + "N" * a + "R" + "N" * (b - a) + "R" + "N" * (num_layers - b)

    before = last = channels = num_filters // 4
    layers: OrderedDict[str, nn.Module] = OrderedDict(stem=Stem(channels))
    follows_reduction = False
    for k, kind in enumerate(plan, start=1):
        reduces = kind == "R"
        channels *= 2 if reduces else 1
        cell = Cell(before, last, channels, reduces=reduces, follows_reduction=follows_reduction)
        layers[f"cell{k}_{'reduction' if reduces else 'normal'}"] = cell
        before, last, follows_reduction = last, cell.out_channels, reduces
    layers["classify"] = Classify(last, num_classes)
    return nn.Sequential(layers)
