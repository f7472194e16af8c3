"""A partition is the best contiguous split of layers into stages, found exactly."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from rpcpipe.errors import BalanceError

__all__ = ["check_stages", "even", "partition", "validate"]


def partition(
    costs: Sequence[float], n: int, *, boundary: Sequence[float] | None = None
) -> list[int]:
    """Split the layers, in order, into ``n`` non-empty stages with the smallest bottleneck.

    A link between two stages works beside them: while a stage computes micro-batch ``i+1``,
    micro-batch ``i`` is sent. So the pace of the pipeline is that of its slowest member, be it
    a stage (the sum of its layers' costs) or a link (the boundary cost where the cut is), and
    that is the bottleneck. A transfer is never added to a stage's cost: it would count work
    done at the same time as if it were done in turn.

    Among splits of equal bottleneck the one with the smallest sum of squares over all stages and
    links wins (the most even, with the cheapest cuts), and among those the one whose earlier
    stages have more layers. The result is a function of the arguments alone.

    Method: dynamic programming over (first layer, stages left), once for the bottleneck and once
    for the squares under that bottleneck; O(n L^2) for L layers. Unlike the heuristic
    of torchgpipe (Bárány and Grinberg's block partitions) it returns an optimum.

    Args:
        costs: cost of each of the L layers, in any one unit (seconds, bytes); finite, >= 0.
        n: number of stages, 1 <= n <= L.
        boundary: ``boundary[k]`` is the cost of sending what goes from layer ``k`` to ``k + 1``,
            in the unit of ``costs``; length L - 1. None: sending is free.

    Returns:
        The balance: number of layers of each stage; length n, sum L.

    Raises:
        BalanceError: there are more stages than layers, or n < 1.
        ValueError: a cost is negative or not finite, or ``boundary`` has another length.
    """
    size = len(costs)
    check_stages(n, size)
    links = [0.0] * (size - 1) if boundary is None else list(boundary)
    if len(links) != size - 1:
        raise ValueError(
            f"boundary must have one cost between each two of {size} layers, {size - 1} in all; "
            f"got {len(links)}"
        )
    _check_costs("costs", costs)
    _check_costs("boundary", links)
    compute, link = _tables(costs, links)
    slowest = torch.maximum(compute, link)
    bottleneck, _ = _best_split(slowest, n, torch.maximum)
    squares = (compute**2 + link**2).masked_fill(slowest > bottleneck, math.inf)
    return _best_split(squares, n, torch.add)[1]


def _check_costs(name: str, costs: Sequence[float]) -> None:
    for k, cost in enumerate(costs):
        if not (math.isfinite(cost) and cost >= 0):
            raise ValueError(f"{name} must be finite and not negative; got {name}[{k}] = {cost}")


def _tables(costs: Sequence[float], links: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Cost [L, L] of the stage whose first layer is the row and whose end is the column, and
    cost [L] of the link behind it. Columns run from the last end (L) to the first (1)."""
    # A power of two changes no digit of a cost and keeps the squares in range.
    _, exponent = math.frexp(max([*costs, *links]))
    sums = [0.0, *accumulate(math.ldexp(cost, -exponent) for cost in costs)]
    prefix = torch.tensor(sums, dtype=torch.float64)
    ends = prefix[1:].flip(0)
    compute = ends - prefix[:-1, None]
    size = len(costs)
    rows = torch.arange(size)
    empty = rows[:, None] >= size - rows
    link = torch.tensor([*(math.ldexp(c, -exponent) for c in links), 0.0], dtype=torch.float64)
    return compute.masked_fill(empty, math.inf), link.flip(0)


def _best_split(
    cost: Tensor, n: int, combine: Callable[[Tensor, Tensor], Tensor]
) -> tuple[float, list[int]]:
    """Least combined cost of n stages, and their numbers of layers.

    ``rest[i]`` is the least combined cost of layers ``i..`` in the stages considered so far,
    from the last to the first. Of equal columns min takes the first: the longest stage.
    """
    size = cost.shape[0]
    rest = cost[:, 0]
    choices = []
    for _ in range(n - 1):
        # The layers behind a stage that ends at L are none: no split.
        behind = torch.cat([rest.new_tensor([math.inf]), rest[1:].flip(0)])
        rest, column = combine(cost, behind).min(dim=1)
        choices.append((size - column).tolist())
    cuts = [0]
    for end in reversed(choices):
        cuts.append(end[cuts[-1]])
    cuts.append(size)
    return float(rest[0]), [b - a for a, b in pairwise(cuts)]


def even(num_layers: int, n: int) -> list[int]:
    """The balance of ``n`` stages that differ by one layer at most, longer ones first."""
    return [num_layers // n + (j < num_layers % n) for j in range(n)]


def check_stages(n: int, num_layers: int) -> None:
    """Raise `BalanceError` unless ``num_layers`` layers can fill ``n`` stages."""
    if n < 1:
        raise BalanceError(f"there must be at least one stage; got {n}: change the stages")
    if n > num_layers:
        raise BalanceError(
            f"each stage needs at least one layer; got {n} stages for {num_layers} layers: "
            f"use at most {num_layers} stages or split the module into more layers"
        )


def validate(balance: object, num_layers: int, stages: int) -> None:
    """Check that ``balance`` distributes all layers over all stages.

    Args:
        balance: number of layers of each stage, whatever the user gave for it.
        num_layers: number of layers of the ``nn.Sequential``.
        stages: number of stages of the pipeline.

    Raises:
        BalanceError: ``balance`` is not a sequence of positive ints, one for each stage and
            ``num_layers`` in sum, or there are more stages than layers. The message proposes
            an even balance.
    """
    check_stages(stages, num_layers)
    fault = _fault(balance, num_layers, stages)
    if fault:
        raise BalanceError(
            f"balance must be one positive int for each of {stages} stages, {num_layers} "
            f"(the number of layers) in sum; got {balance!r}: {fault}. "
            f"Change it to balance={even(num_layers, stages)}, or let "
            f"rpcpipe.balance.by_time({stages}, module, sample) choose"
        )


def _fault(balance: object, num_layers: int, stages: int) -> str | None:
    if not isinstance(balance, Sequence):
        return f"{type(balance).__name__} is not a sequence"
    for j, length in enumerate(balance):
        if not isinstance(length, int) or isinstance(length, bool):
            return f"balance[{j}] = {length!r} is not an int"
    for j, length in enumerate(balance):
        if length < 1:
            return f"balance[{j}] = {length} leaves stage {j} without a layer"
    if len(balance) != stages:
        return f"it has {len(balance)} stages"
    if sum(balance) != num_layers:
        return f"its sum is {sum(balance)}"
    return None
