"""Predict: mini-batches that follow each other through the stages without a gap."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import torch

from rpcpipe import microbatch
from rpcpipe.step import Step

__all__ = ["predict"]


def predict(
    begin: Callable[[Any], Step], batches: Iterable[Any], in_flight: int
) -> Generator[Any, None, None]:
    """Yield each batch's result in order, while the next ones are on their way.

    Args:
        begin: starts on a batch.
        in_flight: at most so many batches are started and not yet yielded.
    """
    source = iter(batches)
    waiting: deque[Step] = deque()
    ended: BaseException | None = None
    try:
        while waiting or ended is None:
            while ended is None and len(waiting) < in_flight:
                ended = _start_next(begin, source, waiting)
            if waiting:
                yield _result(waiting.popleft())
    finally:
        for step in waiting:
            step.abandon()
    if not isinstance(ended, StopIteration):
        assert ended is not None
        raise ended


def _start_next(
    begin: Callable[[Any], Step], source: Iterator[Any], waiting: deque[Step]
) -> BaseException | None:
    """Start on one more batch; returns why there is none, for its turn to come."""
    try:
        waiting.append(begin(next(source)))
    except Exception as exc:
        return exc
    return None


@torch.no_grad()
def _result(step: Step) -> Any:
    return microbatch.gather(step.end())
