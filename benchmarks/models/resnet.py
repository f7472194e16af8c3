"""ResNet with bottleneck blocks (arXiv 1512.03385), flat: a cut may fall inside a block.

A block's shortcut is a skip in a namespace of its own. The stride is in the 3x3 convolution, as in
torchvision, whose parameter counts these are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Iterator, Sequence

from torch import Tensor, nn

from rpcpipe.skip import Namespace, pop, skippable, stash

__all__ = ["resnet", "resnet50", "resnet101"]

EXPANSION = 4


@skippable(stash=["shortcut"])
class Branch(nn.Module):
    def forward(self, x: Tensor) -> Generator[stash, None, Tensor]:
        yield stash("shortcut", x)
        return x


@skippable(pop=["shortcut"])
class Merge(nn.Module):
    """Adds the shortcut, projected where the block changes the shape."""

    def __init__(self, project: nn.Module) -> None:
        super().__init__()
        self.project = project

    def forward(self, x: Tensor) -> Generator[pop, Tensor, Tensor]:
        shortcut = yield pop("shortcut")
        projected: Tensor = self.project(shortcut)
        return x + projected


def shortcut_projection(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 1, stride, bias=False),
        nn.BatchNorm2d(out_channels),
    )


def bottleneck(in_channels: int, width: int, stride: int) -> Iterator[tuple[str, nn.Module]]:
    out_channels = EXPANSION * width
    shortcut = Namespace()
    yield "branch", Branch().isolate(shortcut)  # type: ignore[operator]
    yield "conv1", nn.Conv2d(in_channels, width, 1, bias=False)
    yield "bn1", nn.BatchNorm2d(width)
    yield "relu1", nn.ReLU()
    yield "conv2", nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
    yield "bn2", nn.BatchNorm2d(width)
    yield "relu2", nn.ReLU()
    yield "conv3", nn.Conv2d(width, out_channels, 1, bias=False)
    yield "bn3", nn.BatchNorm2d(out_channels)
    project = shortcut_projection(in_channels, out_channels, stride)
    yield "merge", Merge(project).isolate(shortcut)  # type: ignore[operator]
    yield "relu3", nn.ReLU()


def resnet(layers: Sequence[int], width: int = 64, num_classes: int = 1000) -> nn.Sequential:
    """A ResNet of ``layers[k]`` bottleneck blocks in group k, each group twice as wide."""
    flat: OrderedDict[str, nn.Module] = OrderedDict(
        conv=nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
        bn=nn.BatchNorm2d(width),
        relu=nn.ReLU(),
        maxpool=nn.MaxPool2d(3, stride=2, padding=1),
    )
    channels = width
    for group, num_blocks in enumerate(layers):
        for block in range(num_blocks):
            stride = 2 if group > 0 and block == 0 else 1
            for name, layer in bottleneck(channels, width << group, stride):
                flat[f"group{group + 1}_block{block + 1}_{name}"] = layer
            channels = EXPANSION * (width << group)
    flat["avgpool"] = nn.AdaptiveAvgPool2d(1)
    flat["flatten"] = nn.Flatten()
    flat["linear"] = nn.Linear(channels, num_classes)
    return nn.Sequential(flat)


def resnet50(num_classes: int = 1000) -> nn.Sequential:
    return resnet([3, 4, 6, 3], num_classes=num_classes)


def resnet101(num_classes: int = 1000) -> nn.Sequential:
    return resnet([3, 4, 23, 3], num_classes=num_classes)
