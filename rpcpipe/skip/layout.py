"""A skip layout says which stage each skip travels from, and to which."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import nn

from rpcpipe.skip.namespace import Key
from rpcpipe.skip.skippable import pop_keys, stash_keys
from rpcpipe.skip.verify import verify_skippables

__all__ = ["Route", "SkipLayout"]


class Route(NamedTuple):
    """The way of one skip: ``key`` is stashed at stage ``start`` and popped at stage ``end``."""

    key: Key
    start: int
    end: int


class SkipLayout:
    """The routes of all skips between partitions, in the order in which they are stashed.

    Args:
        partitions: the layers of each stage: an ``nn.Sequential`` or a list of modules each.

    Attributes:
        routes: every skip, also those whose two ends are in the same stage.

    Raises:
        TypeError: stashes and pops do not match (see :func:`rpcpipe.skip.verify_skippables`).
    """

    routes: tuple[Route, ...]

    def __init__(self, partitions: Sequence[Iterable[nn.Module]]) -> None:
        stages = [nn.Sequential(*layers) for layers in partitions]
        verify_skippables(nn.Sequential(*stages))
        end = {key: j for j, part in _parts(stages) for key in pop_keys(part)}
        self.routes = tuple(
            Route(key, j, end[key]) for j, part in _parts(stages) for key in stash_keys(part)
        )

    def exports(self, j: int) -> list[tuple[Key, int]]:
        """What stage ``j`` stashes for later stages: ``(key, stage that pops it)``."""
        return [(r.key, r.end) for r in self.routes if r.start == j != r.end]

    def imports(self, j: int) -> list[tuple[Key, int]]:
        """What stage ``j`` pops from earlier stages: ``(key, stage that stashed it)``."""
        return [(r.key, r.start) for r in self.routes if r.end == j != r.start]


def _parts(stages: Sequence[nn.Module]) -> Iterator[tuple[int, nn.Module]]:
    for j, stage in enumerate(stages):
        for part in stage.modules():
            yield j, part
