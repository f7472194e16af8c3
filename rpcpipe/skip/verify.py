"""Verification matches each stash of a sequential module with exactly one later pop."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from rpcpipe.skip.namespace import Key
from rpcpipe.skip.skippable import pop_keys, skips_of, stash_keys

__all__ = ["verify_skippables"]


def verify_skippables(module: nn.Sequential) -> None:
    """Checks that every skip is stashed by one layer and popped by one later layer.

    Skippables are found at any depth. Nested ``nn.Sequential`` modules run in order, so order is
    checked through them. Inside any other layer the order is known only to its ``forward``:
    there the pairs are checked here and their order when it runs.

    Args:
        module: the layers in the order in which they run.

    Raises:
        TypeError: lists each name that is stashed or popped twice, missing, or out of order.
    """
    matching = _Matching()
    for name, layer in _layers(module):
        matching.add(name, layer)
    problems = matching.problems + matching.unpopped()
    if problems:
        lines = "\n".join(f"* {problem}" for problem in problems)
        raise TypeError(f"one or more pairs of stash and pop do not match:\n\n{lines}")


def _layers(module: nn.Sequential, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The layers in running order; a layer that stands twice comes twice."""
    for name, layer in module._modules.items():
        assert layer is not None
        if isinstance(layer, nn.Sequential) and type(layer).forward is nn.Sequential.forward:
            yield from _layers(layer, f"{prefix}{name}.")
        else:
            yield prefix + name, layer


class _Matching:
    def __init__(self) -> None:
        self.stashed: dict[Key, None] = {}  # an ordered set
        self.popped: set[Key] = set()
        self.problems: list[str] = []

    def add(self, name: str, layer: nn.Module) -> None:
        skippables = [(n, part) for n, part in layer.named_modules(prefix=name) if skips_of(part)]
        for path, part in skippables:
            self._check_both(path, part)
        for path, part in skippables:
            self._stash(path, part)
        for path, part in skippables:
            self._pop(path, part)

    def unpopped(self) -> list[str]:
        return [
            f"no module declared '{key[1]}' as poppable but stashed"
            for key in self.stashed
            if key not in self.popped
        ]

    def _check_both(self, path: str, part: nn.Module) -> None:
        for _, name in sorted(_both(part), key=lambda key: key[1]):
            self.problems.append(f"'{path}' declared '{name}' both as stashable and as poppable")

    def _stash(self, path: str, part: nn.Module) -> None:
        for key in stash_keys(part):
            if key in _both(part):
                continue
            if key in self.stashed:
                self._redeclared(path, key, "stashable")
            self.stashed[key] = None

    def _pop(self, path: str, part: nn.Module) -> None:
        for key in pop_keys(part):
            if key in _both(part):
                continue
            if key in self.popped:
                self._redeclared(path, key, "poppable")
            elif key not in self.stashed:
                self.problems.append(
                    f"'{path}' declared '{key[1]}' as poppable but it was not stashed"
                )
            else:
                self.popped.add(key)

    def _redeclared(self, path: str, key: Key, role: str) -> None:
        self.problems.append(
            f"'{path}' redeclared '{key[1]}' as {role} but not isolated by namespace"
        )


def _both(part: nn.Module) -> set[Key]:
    return set(stash_keys(part)) & set(pop_keys(part))
