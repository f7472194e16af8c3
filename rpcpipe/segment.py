"""Segment: a stage of a traced module, whose names are those of the module it was cut out of."""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from rpcpipe import checkpoint
from rpcpipe.skip.namespace import Namespace
from rpcpipe.skip.skippable import Skips
from rpcpipe.skip.store import current_store
from rpcpipe.stage import Partition

__all__ = ["Code", "Entry", "Held", "Pass", "Plan", "Segment", "numbered"]


class Code:
    """The Python function of a graph, which can be pickled.

    A ``GraphModule`` is traced again when it is unpickled, and that computes once and for all
    whatever does not depend on an input.
    """

    def __init__(self, graph: fx.Graph) -> None:
        code = graph.python_code("self")
        self.source, self.globals = code.src, dict(code.globals)
        self.device = torch.device("cpu")
        self._compile()

    def _compile(self) -> None:
        space = dict(self.globals)
        if "device" in space:  # devices in the graph are those of the trace
            space["device"] = lambda *_, **__: self.device
        exec(self.source, space)
        self._function: Callable[..., Any] = space["forward"]

    def __call__(self, *values: Any) -> Any:
        return self._function(None, *values)

    def __getstate__(self) -> tuple[str, dict[str, Any]]:
        return self.source, {name: _reference(value) for name, value in self.globals.items()}

    def __setstate__(self, state: tuple[str, dict[str, Any]]) -> None:
        self.source, found = state
        self.device = torch.device("cpu")
        self.globals = {name: _resolve(value) for name, value in found.items()}
        self._compile()


@dataclass(frozen=True)
class _Module:
    name: str


def _reference(value: Any) -> Any:
    return _Module(value.__name__) if isinstance(value, types.ModuleType) else value


def _resolve(value: Any) -> Any:
    return importlib.import_module(value.name) if isinstance(value, _Module) else value


@dataclass(frozen=True)
class Held:
    """A parameter or buffer that a segment holds.

    Attributes:
        names: all it has in the whole module.
        persistent: whether it is in the state dict.
    """

    tensor: Tensor
    names: tuple[str, ...]
    persistent: bool


@dataclass(frozen=True)
class Pass:
    """What a segment does in one mode.

    The code is given, in this order, what the segment before hands on, the skips, the held tensors
    and the constants; it returns what the next segment is handed, and the skips it stashes.

    Attributes:
        changed: the buffers among ``held`` that the code changes in place.
        outputs: number of values for the next segment.
    """

    code: Code
    popped: tuple[str, ...]
    stashed: tuple[str, ...]
    held: tuple[str, ...]
    changed: frozenset[str]
    constants: tuple[Any, ...]
    outputs: int


@dataclass(frozen=True)
class Entry:
    """How the first segment finds the inputs of the trace in what it is called with.

    Attributes:
        names: of the module's parameters, in order.
        given: those of them that the sample gave.
        mapping: whether the sample was a dict of them.
        form: the list of values under ``given``, with numbers for its leaves.
        like: for each leaf what it was in the sample: shape and dtype, or the value.
    """

    names: tuple[str, ...]
    given: tuple[str, ...]
    mapping: bool
    form: list[Any]
    like: tuple[Any, ...]

    @staticmethod
    def of(sample: dict[str, Any], names: Iterable[str], mapping: bool) -> Entry:
        leaves, spec = pytree.tree_flatten(list(sample.values()))
        like = tuple(_likeness(leaf) for leaf in leaves)
        return Entry(tuple(names), tuple(sample), mapping, numbered(spec), like)

    def leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        if self.mapping and len(args) == 1 and not kwargs and isinstance(args[0], dict):
            kwargs, args = args[0], ()
        found = {**dict(zip(self.names, args, strict=False)), **kwargs}
        if len(args) > len(self.names) or found.keys() != set(self.given):
            raise TypeError(
                f"the module was traced with the arguments {', '.join(self.given)}, and got "
                f"{', '.join(found) or 'none'}: give from_module a sample with those you use"
            )
        leaves, spec = pytree.tree_flatten([found[name] for name in self.given])
        like = tuple(_likeness(leaf) for leaf in leaves)
        if spec != pytree.tree_structure(self.form) or like != self.like:
            raise ValueError(
                f"the module was traced with inputs like {list(self.like)}, of any number of rows, "
                f"and got {list(like)}: give from_module a sample like what you mean to use"
            )
        return leaves


def numbered(spec: pytree.TreeSpec) -> Any:
    """A value of this structure whose leaves are their numbers: it can be pickled, specs cannot
    without a warning in torch 2.13."""
    return pytree.tree_unflatten(list(range(spec.num_leaves)), spec)


def _likeness(leaf: Any) -> Any:
    return (tuple(leaf.shape[1:]), leaf.dtype) if isinstance(leaf, Tensor) else leaf


@dataclass
class Plan:
    """All that a segment is made of."""

    passes: dict[bool, Pass]  # by ``training``
    held: Sequence[Held]
    entry: Entry | None = None  # of the first
    result: dict[bool, Any] | None = None  # of the last: its form, with numbers for its leaves
    skips: Skips = field(default_factory=lambda: Skips(frozenset(), frozenset()))


class Segment(Partition):
    """One stage of a traced module: straight-line code, and the tensors it uses.

    Its children hold parameters under their names in the whole module, and are never called. The
    skips have a namespace of their own in each module that is cut.
    """

    def __init__(self, plan: Plan, namespace: Namespace) -> None:
        super().__init__()
        self.plan, self.namespace = plan, namespace
        self._declared_skips = plan.skips
        self._skip_namespaces = dict.fromkeys(plan.skips.stash | plan.skips.pop, namespace)
        for held in plan.held:
            for name in held.names:
                _place(self, name, held)
        plan.held = ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.seed is not None:
            torch.manual_seed(checkpoint.derive(self.seed, *self.at, self.first))
        here, entry = self.plan.passes[self.training], self.plan.entry
        given = args[0] if entry is None else entry.leaves(args, kwargs)
        results = here.code(*given, *self._pop(here), *self._held(here), *here.constants)
        self._stash(here, results[here.outputs :])
        if self.plan.result is None:
            return results[: here.outputs]
        return pytree.tree_map(results.__getitem__, self.plan.result[self.training])

    def _pop(self, here: Pass) -> list[Tensor | None]:
        """What this mode uses of what both do."""
        names = sorted(self.plan.skips.pop)
        found = {name: current_store().load((self.namespace, name)) for name in names}
        return [found[name] for name in here.popped]

    def _stash(self, here: Pass, values: Sequence[Tensor]) -> None:
        found = dict(zip(here.stashed, values, strict=True))
        for name in sorted(self.plan.skips.stash):
            current_store().save((self.namespace, name), found.get(name))

    def _held(self, here: Pass) -> list[Tensor]:
        tensors = [(name, _find(self, name)) for name in here.held]
        if checkpoint.is_recomputing():  # counted the first time
            return [t.clone() if name in here.changed else t for name, t in tensors]
        return [t for _, t in tensors]

    def __setattr__(self, name: str, value: Any) -> None:
        # The model may have children of any name, and these are the stage's own.
        if name in ("first", "seed", "at", "plan", "namespace", "training"):
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def get_parameter(self, target: str) -> nn.Parameter:
        return _find(self, target)  # type: ignore[return-value]

    def _apply(self, fn: Any, recurse: bool = True) -> Segment:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for here in self.plan.passes.values():
            here.code.device = fn(torch.zeros(())).device
        return self


def _place(root: nn.Module, name: str, held: Held) -> None:
    *path, last = name.split(".")
    for part in path:
        root = root._modules.setdefault(part, nn.Module())  # type: ignore[assignment]
    if isinstance(held.tensor, nn.Parameter):
        root._parameters[last] = held.tensor
    else:
        root._buffers[last] = held.tensor
        if not held.persistent:
            root._non_persistent_buffers_set.add(last)


def _find(root: nn.Module, name: str) -> Tensor:
    *path, last = name.split(".")
    for part in path:
        root = root._modules[part]  # type: ignore[assignment]
    found = root._parameters.get(last)
    return root._buffers[last] if found is None else found  # type: ignore[return-value]
