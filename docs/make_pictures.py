"""Draw the guide's pictures: `python -m docs.make_pictures` records real steps and plots them.

The layers sleep instead of computing (`benchmarks/emulated.py`), so that four stages need no four
devices; schedule, messages and autograd are real.
"""

from __future__ import annotations

from pathlib import Path

import torch

import rpcpipe
from benchmarks.emulated import chain

HERE = Path(__file__).parent / "pictures"

VARIANTS = {
    "uneven": {"balance": [4, 2, 1, 1], "chunks": 4, "checkpoint": "never"},
    "even": {"balance": [2, 2, 2, 2], "chunks": 4, "checkpoint": "never"},
    "more-chunks": {"balance": [2, 2, 2, 2], "chunks": 16, "checkpoint": "never"},
    "recomputed": {"balance": [2, 2, 2, 2], "chunks": 16, "checkpoint": "always"},
}


def draw(world: rpcpipe.World) -> None:
    x = torch.ones(16, 4)
    for name, options in VARIANTS.items():
        pipe = rpcpipe.Pipe(chain(8, 4, len(x), 0.64), world, **options)
        pipe(x).sum().backward()
        with pipe.record() as timeline:
            pipe(x).sum().backward()
        timeline.plot(HERE / f"{name}.png")
        print(f"{name}: {options}\n{timeline}\n")


if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    rpcpipe.run(draw, stages=4)
