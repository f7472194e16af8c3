"""U-Net (B, C): the simplified U-Net (after arXiv 1505.04597) of the torchgpipe paper, flat.

    encode1 ──────────────── skip ────────────────▶ decode1 ── segment
       └▶ encode2 ────────── skip ──────────▶ decode2 ┘
             └▶ ...                        ... ┘
                  └────▶ bottleneck ────▶ ┘

Every skip has a namespace of its own and spans all the layers below it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rpcpipe.skip import Namespace, pop, skippable, stash

__all__ = ["unet"]


@skippable(stash=["skip"])
class Stash(nn.Module):
    def forward(self, x: Tensor) -> Generator[stash, None, Tensor]:
        yield stash("skip", x)
        return x


@skippable(pop=["skip"])
class PopCat(nn.Module):
    """Puts the skip behind the input, which halving may have cost a row or a column."""

    def forward(self, x: Tensor) -> Generator[pop, Tensor, Tensor]:
        skip = yield pop("skip")
        rows, columns = skip.shape[-2] - x.shape[-2], skip.shape[-1] - x.shape[-1]
        if rows or columns:
            x = F.pad(x, (0, columns, 0, rows))
        return torch.cat([x, skip], dim=1)


def convolutions(widths: list[int]) -> Iterator[tuple[str, nn.Module]]:
    for k, (in_channels, out_channels) in enumerate(pairwise(widths), start=1):
        yield f"conv{k}", nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
        yield f"dropout{k}", nn.Dropout2d(0.1)
        yield f"norm{k}", nn.InstanceNorm2d(out_channels)
        yield f"relu{k}", nn.LeakyReLU(0.01)


def unet(
    depth: int = 5,
    num_convs: int = 5,
    base_channels: int = 64,
    input_channels: int = 3,
    output_channels: int = 1,
) -> nn.Sequential:
    """U-Net (B, C): ``num_convs`` = B convolutions a level, ``base_channels`` = C at the top.

    The image is halved ``depth`` times. Its sides need not be divisible, but the lowest level must
    see more than one pixel (instance norm).
    """
    if min(depth, num_convs) < 1 or base_channels < 2:
        raise ValueError(
            "U-Net needs at least 1 level, 1 convolution a level and 2 channels, got "
            f"depth={depth}, num_convs={num_convs}, base_channels={base_channels}"
        )
    layers: OrderedDict[str, nn.Module] = OrderedDict()

    def add(name: str, in_channels: int, hidden: int, out_channels: int) -> None:
        widths = [in_channels] + [hidden] * (num_convs - 1) + [out_channels]
        layers.update((f"{name}_{part}", layer) for part, layer in convolutions(widths))

    skips = [Namespace() for _ in range(depth)]
    channels = [base_channels << k for k in range(depth)]
    for k, (c, skip) in enumerate(zip(channels, skips, strict=True), start=1):
        add(f"encode{k}", input_channels if k == 1 else c // 2, c, c)
        layers[f"encode{k}_stash"] = Stash().isolate(skip)  # type: ignore[operator]
        layers[f"encode{k}_down"] = nn.MaxPool2d(2)
    add("bottleneck", channels[-1], 2 * channels[-1], channels[-1])
    for k, c, skip in zip(range(depth, 0, -1), channels[::-1], skips[::-1], strict=True):
        layers[f"decode{k}_up"] = nn.Upsample(scale_factor=2)
        layers[f"decode{k}_pop"] = PopCat().isolate(skip)  # type: ignore[operator]
        add(f"decode{k}", 2 * c, c // 2, c // 2)
    layers["segment"] = nn.Conv2d(base_channels // 2, output_channels, 1, bias=False)
    return nn.Sequential(layers)
