"""A skippable is a module that declares what it stashes for later layers and pops from earlier."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn

from rpcpipe.skip.namespace import Key, Namespace
from rpcpipe.skip.store import current_store

__all__ = ["isolate", "pop", "pop_keys", "skippable", "skips_of", "stash", "stash_keys"]

M = TypeVar("M", bound=nn.Module)

_DECLARED = "_declared_skips"  # on the class
_NAMESPACES = "_skip_namespaces"  # on the instance, once isolated


class stash:
    """The command to stash a tensor: ``yield stash("name", tensor)`` in a skippable's forward.

    Args:
        name: one of the names that the layer declared.
        tensor: what the layer that pops ``name`` will get; may be ``None``.
    """

    __slots__ = ("name", "tensor")

    def __init__(self, name: str, tensor: Tensor | None) -> None:
        self.name = name
        self.tensor = tensor


class pop:
    """The command to pop a tensor: ``tensor = yield pop("name")`` in a skippable's forward.

    Args:
        name: one of the names that the layer declared.
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Skips(NamedTuple):
    stash: frozenset[str]
    pop: frozenset[str]


def skippable(stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Callable[[type[M]], type[M]]:
    """Decorates a module class whose ``forward`` stashes or pops skips.

    A ``forward`` that does so is a generator, which returns the output as ever::

        @skippable(stash=["skip"])
        class Down(nn.Module):
            def forward(self, x):
                yield stash("skip", x)
                return self.conv(x)

        @skippable(pop=["skip"])
        class Up(nn.Module):
            def forward(self, x):
                skip = yield pop("skip")
                return self.conv(x) + skip

    The class stays itself: only its ``forward`` is replaced by one that obeys the commands, and
    ``isolate(namespace, only=None)`` is added. Layers work in a pipeline, and as well in an
    ordinary ``nn.Sequential`` in one process. Each declared name must be used exactly once in a
    forward pass. A subclass that overrides ``forward`` must be decorated itself.

    Args:
        stash: names of the skips that the layer stashes.
        pop: names of the skips that the layer pops.

    Raises:
        TypeError: ``stash`` or ``pop`` is a string, not an iterable of names.
    """
    declared = Skips(_names("stash", stash), _names("pop", pop))

    def decorate(cls: type[M]) -> type[M]:
        setattr(cls, _DECLARED, declared)
        cls.isolate = isolate  # type: ignore[attr-defined]
        cls.forward = _obeying(cls.forward)
        return cls

    return decorate


def _names(argument: str, names: Iterable[str]) -> frozenset[str]:
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise TypeError(f"@skippable({argument}=...) takes a list of names, but got {names!r}")
    return frozenset(names)


def _obeying(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` as a plain function: commands that it yields are carried out."""
    if getattr(forward, "_obeys_skips", False):  # inherited from a skippable class
        return forward

    @functools.wraps(forward)
    def obeying(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        skips = _Pass(self)
        output = forward(self, *args, **kwargs)
        if isinstance(output, Generator):
            output = skips.drive(output)
        skips.finish()
        return output

    obeying._obeys_skips = True  # type: ignore[attr-defined]
    return obeying


class _Pass:
    """One forward pass of one skippable: carries out its commands and ticks them off."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.declared = skips_of(layer) or Skips(frozenset(), frozenset())
        self.to_stash = set(self.declared.stash)
        self.to_pop = set(self.declared.pop)

    def drive(self, generator: Generator[Any, Tensor | None, Any]) -> Any:
        answer = None
        try:
            while True:
                answer = self.obey(generator.send(answer))
        except StopIteration as end:
            return end.value
        finally:
            generator.close()

    def obey(self, command: object) -> Tensor | None:
        if isinstance(command, stash):
            self._tick(command.name, self.declared.stash, self.to_stash, "stashed")
            self._stash(command.name, command.tensor)
            return None
        if isinstance(command, pop):
            self._tick(command.name, self.declared.pop, self.to_pop, "popped")
            return self._pop(command.name)
        raise TypeError(
            f"forward of {_of(self.layer)} yielded {command!r}, "
            "but a skippable yields only stash(...) and pop(...)"
        )

    def finish(self) -> None:
        for left, done in (self.to_stash, "stashed"), (self.to_pop, "popped"):
            if left:
                names = ", ".join(f"'{name}'" for name in sorted(left))
                raise RuntimeError(f"{names} must be {done} but have not, by {_of(self.layer)}")

    def _tick(self, name: str, declared: frozenset[str], left: set[str], done: str) -> None:
        if name not in declared:
            able = done.replace("ed", "able")
            raise RuntimeError(f"'{name}' has not been declared as {able} by {_of(self.layer)}")
        if name not in left:
            raise RuntimeError(f"'{name}' has been {done} twice by {_of(self.layer)}")
        left.remove(name)

    def _stash(self, name: str, value: Tensor | None) -> None:
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(
                f"'{name}' must be stashed as a tensor or None, "
                f"but {_of(self.layer)} stashed {_of(value)}"
            )
        current_store().save(_key(self.layer, name), value)

    def _pop(self, name: str) -> Tensor | None:
        try:
            return current_store().load(_key(self.layer, name))
        except KeyError:
            raise RuntimeError(
                f"'{name}' has not been stashed when {_of(self.layer)} popped it"
            ) from None


def _of(instance: object) -> str:
    return type(instance).__name__


def isolate(layer: M, ns: Namespace, *, only: Iterable[str] | None = None) -> M:
    """Moves skips of a skippable layer into a namespace; every skippable has it as a method.

    Stashing and popping layers of one skip must be in the same namespace::

        inner, outer = Namespace(), Namespace()
        nn.Sequential(
            Down().isolate(outer), Down().isolate(inner),
            Up().isolate(inner), Up().isolate(outer),
        )

    Args:
        layer: the layer to change.
        ns: the namespace.
        only: names to isolate; all that the layer declares when omitted.

    Returns:
        The same layer.

    Raises:
        ValueError: ``only`` has a name that the layer did not declare.
    """
    declared = skips_of(layer) or Skips(frozenset(), frozenset())
    known = declared.stash | declared.pop
    names = known if only is None else _names("only", only)
    if names - known:
        raise ValueError(
            f"isolate(only=...) takes names that {_of(layer)} declared, {sorted(known)}, "
            f"but got {sorted(names)}"
        )
    isolated = {**getattr(layer, _NAMESPACES, {}), **dict.fromkeys(names, ns)}
    setattr(layer, _NAMESPACES, isolated)
    return layer


def skips_of(layer: nn.Module) -> Skips | None:
    """The declared names, or ``None`` for a module that is not skippable."""
    return getattr(layer, _DECLARED, None)


def stash_keys(layer: nn.Module) -> list[Key]:
    """The keys that this layer itself stashes, in the same order in every process."""
    skips = skips_of(layer)
    return [_key(layer, name) for name in sorted(skips.stash)] if skips else []


def pop_keys(layer: nn.Module) -> list[Key]:
    """The keys that this layer itself pops, in the same order in every process."""
    skips = skips_of(layer)
    return [_key(layer, name) for name in sorted(skips.pop)] if skips else []


def _key(layer: nn.Module, name: str) -> Key:
    namespaces: dict[str, Namespace] = getattr(layer, _NAMESPACES, {})
    return namespaces.get(name), name
