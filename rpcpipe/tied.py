"""Tied parameters: one ``nn.Parameter`` of layers in different stages, one value and gradient.

Each stage holds a copy. At the end of a backward pass the holders exchange what this pass has
given them and add it up in the same order; with equal gradients, equal optimizers keep the copies
equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rpcpipe import transport

__all__ = ["Tie", "Ties", "find"]

Put = Callable[[int, int, tuple[None, str], Any], None]


@dataclass(frozen=True)
class Tie:
    """One parameter under its name in each stage that holds it."""

    names: dict[int, str]

    @property
    def owner(self) -> int:
        """The stage that speaks for all, where only one may."""
        return min(self.names)


def find(parts: Sequence[Mapping[str, nn.Module]]) -> list[Tie]:
    """The parameters that more than one stage would hold."""
    holders: dict[int, dict[int, str]] = {}
    for j, part in enumerate(parts):
        for prefix, layer in part.items():
            for name, parameter in layer.named_parameters(prefix=prefix):
                holders.setdefault(id(parameter), {}).setdefault(j, name)
    return [Tie(names) for names in holders.values() if len(names) > 1]


class Ties:
    """The tied parameters of one stage.

    Args:
        index: of the stage.
        ties: all of the pipe's; those of other stages are left out.
        stages: all stages.
    """

    def __init__(self, index: int, ties: Sequence[Tie], stages: Sequence[transport.Remote]) -> None:
        self._index = index
        self._ties = {k: tie for k, tie in enumerate(ties) if index in tie.names}
        self._stages = stages
        self._before: dict[int, Tensor | None] = {}
        self._step = -1  # whose backward pass is under way
        self._pending = False  # whether there are gradients that replicas have not averaged

    def counted_elsewhere(self) -> set[str]:
        """The names of parameters that another stage speaks for."""
        return {t.names[self._index] for t in self._ties.values() if t.owner != self._index}

    def set_aside(self, module: nn.Module, step: int) -> None:
        """Before a backward pass: put away the gradients of earlier ones."""
        self._step = step
        for k, parameter in self._parameters(module):
            self._before[k], parameter.grad = parameter.grad, None

    def restore(self, module: nn.Module, step: int) -> None:
        """After a backward pass that failed: as if it had not been."""
        if step == self._step:
            for k, parameter in self._parameters(module):
                parameter.grad = self._before.pop(k)
            self._step = -1

    def exchange(
        self, module: nn.Module, step: int, put: Put, average: Callable[[Tensor], Tensor] | None
    ) -> None:
        """After a backward pass, at the same time in all stages: add up what it gave them.

        Args:
            average: over replicas. What this pass gave is averaged already; what passes before it
                gave may not be. ``None`` for a pass whose gradients are not averaged.
        """
        own = {k: _on_host(parameter.grad) for k, parameter in self._parameters(module)}
        peers = [(k, j) for k, tie in self._ties.items() for j in tie.names if j != self._index]
        for k, j in peers:
            put(step, 0, _name(k, j), own[k])
        answers = [
            (k, j, self._stages[j].call("take", step, 0, _name(k, self._index))) for k, j in peers
        ]
        given: dict[int, dict[int, Tensor | None]] = {k: {self._index: own[k]} for k in own}
        for k, j, answer in answers:
            given[k][j] = transport.value_of(answer, f"the tied gradients of stage {j}")
        for k, parameter in self._parameters(module):
            # As in one process: what was used last in the forward pass is added first.
            total = _sum([given[k][j] for j in sorted(given[k], reverse=True)])
            before = self._before.pop(k)
            if average is not None and self._pending:
                # By all replicas or none: whether this one used the parameter, others do not know.
                before = average(torch.zeros_like(parameter) if before is None else before)
            total = _sum([before, total])
            parameter.grad = None if total is None else total.to(parameter.device)
        self._pending = average is None
        self._step = -1

    def _parameters(self, module: nn.Module) -> list[tuple[int, nn.Parameter]]:
        return [(k, module.get_parameter(t.names[self._index])) for k, t in self._ties.items()]


def _name(k: int, receiver: int) -> tuple[None, str]:
    return None, f"gradient of tied parameter {k} for stage {receiver}"


def _on_host(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.to("cpu")


def _sum(values: Sequence[Tensor | None]) -> Tensor | None:
    """Of those that are there, as a tensor of its own: what was sent is not changed."""
    there = [value for value in values if value is not None]
    if not there:
        return None
    total = there[0].to("cpu", copy=True)
    for value in there[1:]:
        total.add_(value.to("cpu"))
    return total
