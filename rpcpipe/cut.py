"""Cut: a module that is no Sequential, traced by torch.export and divided into segments.

The trace is a list of operations in the order in which the module does them. A cut is a position
in it, and what is used after a cut and made before goes to where it is used: to the next segment
as its input, further on as a skip. Modules do different things in training and in evaluation, so
there is a trace of each, and a segment has both.
"""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from rpcpipe import balance, log, microbatch
from rpcpipe.segment import Code, Entry, Held, Pass, Plan, Segment, numbered
from rpcpipe.skip.namespace import Namespace
from rpcpipe.skip.skippable import Skips

__all__ = ["cut"]

# What the trace asserts of its inputs, by the devices and sizes it has seen.
_ASSERTIONS = ("_assert", "sym_constrain_range", "_guards_fn")


def cut(model: nn.Module, sample: Any, n: int, split: Sequence[str] | None = None) -> list[Segment]:
    """Divide ``model`` into ``n`` segments, which do what it does one after the other.

    Args:
        sample: what it is called with, a tuple of arguments, a dict of keyword arguments or one
            argument; tensors of shape (rows, ...) with at least two rows.
        split: names of the modules that segments begin with, from the second on; by default
            where it makes the work of all about the same.

    Raises:
        TypeError: the sample does not fit.
        ValueError: the module cannot be traced, or not be cut there.
    """
    inputs = _named(model, sample)
    _check(model, sample, split, n)
    begin = time.monotonic()
    with log.lasting(f"tracing {type(model).__name__}"):
        traces = {training: _trace(model, inputs, training) for training in (True, False)}
        if split is None:
            split = _even(traces[False], inputs, n)
    log.logger.info(
        "traced %s in %.1f s; stages begin with %s",
        type(model).__name__, time.monotonic() - begin, list(split),
    )  # fmt: skip
    divisions = {mode: _Division(trace, split) for mode, trace in traces.items()}
    tensors = _Tensors(model, divisions)
    namespace = Namespace()
    names = list(inspect.signature(model.forward).parameters)
    plans = [
        Plan({mode: d.pass_of(j, tensors) for mode, d in divisions.items()}, tensors.of(j))
        for j in range(n)
    ]
    plans[0].entry = Entry.of(inputs, names, isinstance(sample, dict))
    plans[-1].result = {mode: numbered(trace.result) for mode, trace in traces.items()}
    for plan in plans:
        passes = plan.passes.values()
        stashed = frozenset(name for p in passes for name in p.stashed)
        plan.skips = Skips(stashed, frozenset(name for p in passes for name in p.popped))
    return [Segment(plan, namespace) for plan in plans]


# ------------------------------------------------------------------------------- the sample


def _named(model: nn.Module, sample: Any) -> dict[str, Any]:
    """The sample as keyword arguments of ``model.forward``."""
    signature = inspect.signature(model.forward)
    args, kwargs = (), {}
    if isinstance(sample, dict):
        kwargs = sample
    else:
        args = sample if isinstance(sample, tuple) else (sample,)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as exc:
        raise TypeError(f"sample= is what {type(model).__name__} is called with: {exc}") from exc
    named = dict(bound.arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            named.update(named.pop(name, {}))
        elif parameter.kind is parameter.VAR_POSITIONAL and name in named:
            raise TypeError(
                f"{type(model).__name__}.forward takes *{name}, which has no names to trace it by: "
                "give it parameters with names"
            )
    return named


def _check(model: nn.Module, sample: Any, split: Sequence[str] | None, n: int) -> None:
    if microbatch.check(sample) < 2:
        raise ValueError(
            "sample= needs at least two rows: of one, the trace would take the size for a constant"
        )
    if split is None:
        return
    if isinstance(split, str) or len(split) != n - 1:
        raise ValueError(
            f"split= names the modules that stages begin with, from the second on: {n - 1} for "
            f"{n} stages, got {split!r}"
        )
    known = dict(model.named_modules(remove_duplicate=False))
    unknown = [name for name in split if name not in known]
    if unknown:
        raise ValueError(f"split= names modules as in named_modules(); there is no {unknown[0]!r}")


# -------------------------------------------------------------------------------- the trace


@dataclass
class _Trace:
    """One mode of the module: all it does, in order."""

    module: fx.GraphModule
    inputs: list[fx.Node]
    work: list[fx.Node]
    outputs: list[Any]
    result: pytree.TreeSpec

    def first(self, name: str) -> int | None:
        """Where the module of this name begins, if it does anything."""
        return next((k for k, node in enumerate(self.work) if _is_in(node, name)), None)


def _is_in(node: fx.Node, name: str) -> bool:
    return any(path == name or path.startswith(f"{name}.") for path in _paths(node))


def _paths(node: fx.Node) -> list[str]:
    """Of the modules that a node is in, from the outermost on."""
    stack: Mapping[str, tuple[str, Any]] = node.meta.get("nn_module_stack") or {}
    return [path for path, _ in stack.values()]


def _trace(model: nn.Module, inputs: dict[str, Any], training: bool) -> _Trace:
    dynamic = pytree.tree_map(
        lambda leaf: {0: torch.export.Dim.DYNAMIC} if isinstance(leaf, Tensor) else None, inputs
    )
    parameters = inspect.signature(model.forward).parameters
    extra = {name: dynamic.pop(name) for name in inputs if name not in parameters}
    if extra:
        (name,) = (n for n, p in parameters.items() if p.kind is p.VAR_KEYWORD)
        dynamic[name] = extra
    with _mode(model, training):
        try:
            program = torch.export.export(model, (), inputs, dynamic_shapes=dynamic, strict=False)
        except Exception as exc:
            raise ValueError(
                f"torch.export cannot trace {type(model).__name__} with this sample and any number "
                f"of rows: {exc}\nWrite what it does as nn.Sequential(...) of its parts, with "
                "rpcpipe.skip where a value is needed further on, and give that to Pipe"
            ) from exc
    module = program.module()
    call = program.call_spec
    assert call.in_spec is not None
    assert call.out_spec is not None
    assert list(call.in_spec.child(1).context) == list(inputs)
    work = [n for n in module.graph.nodes if n.op.startswith("call") and not _asserts(n)]
    given = [n for n in module.graph.nodes if n.op == "placeholder"]
    (output,) = (n for n in module.graph.nodes if n.op == "output")
    return _Trace(module, given, work, list(output.args[0]), call.out_spec)


@contextmanager
def _mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Single layers may be in another mode than the model: they keep it in the model's."""
    before = {module: module.training for module in model.modules()}
    if training != model.training:
        model.train(training)
    try:
        yield
    finally:
        for module, mode in before.items():
            module.training = mode


def _asserts(node: fx.Node) -> bool:
    return not node.users and str(node.target).removeprefix("aten.").startswith(_ASSERTIONS)


# ------------------------------------------------------------------------------ where to cut


def _even(trace: _Trace, inputs: dict[str, Any], n: int) -> list[str]:
    """Names of modules to begin with, so that no stage has much more work than the others.

    Floating point operations, and one for each value: not measured, so that all replicas of a
    pipeline are cut alike.
    """
    costs = _Costs(trace.module).of(pytree.tree_leaves(inputs), trace)
    starts: dict[int, str] = {}
    _collect_parts(trace, costs, "", sum(costs) / n, starts)
    order = sorted(starts)
    if len(order) < n:
        raise ValueError(
            f"the module has {len(order)} parts to divide between {n} stages: use fewer stages, or "
            "name the modules to begin with by split="
        )
    ends = [*order[1:], len(costs)]
    order[0] = 0
    sums = [sum(costs[a:b]) for a, b in zip(order, ends, strict=True)]
    counts = balance.partition(sums, n)
    return [starts[sorted(starts)[k]] for k in itertools.accumulate(counts[:-1])]


def _collect_parts(
    trace: _Trace, costs: Sequence[float], name: str, share: float, starts: dict[int, str]
) -> None:
    """Modules with no more than a stage's share of the work, which are not divided further."""
    inside = [k for k, node in enumerate(trace.work) if not name or _is_in(node, name)]
    children = dict.fromkeys(
        path
        for k in inside
        for path in _paths(trace.work[k])
        if path.startswith(f"{name}." if name else "") and path not in ("", name)
    )
    nearest = [c for c in children if not any(c.startswith(f"{other}.") for other in children)]
    if name and (sum(costs[k] for k in inside) <= share or not nearest):
        starts.setdefault(inside[0], name)
        return
    for child in nearest:
        _collect_parts(trace, costs, child, share, starts)


class _Costs(fx.Interpreter):
    """Runs a trace, and counts."""

    def of(self, leaves: Sequence[Any], trace: _Trace) -> list[float]:
        self.costs: dict[fx.Node, float] = {}
        with torch.no_grad():
            super().run(*leaves, enable_io_processing=False)
        return [self.costs.get(node, 0.0) for node in trace.work]

    def run_node(self, n: fx.Node) -> Any:
        if _asserts(n):
            return None
        with FlopCounterMode(display=False) as counter:
            value = super().run_node(n)
        size = sum(t.numel() for t in pytree.tree_leaves(value) if isinstance(t, Tensor))
        self.costs[n] = counter.get_total_flops() + (size if n.op.startswith("call") else 0)
        return value


# ------------------------------------------------------------------------------- the division


class _Division:
    """One trace in segments: what each computes, is given and hands on."""

    def __init__(self, trace: _Trace, split: Sequence[str]) -> None:
        self.trace, self.n = trace, len(split) + 1
        bounds = [0, *(_position(trace, name) for name in split), len(trace.work)]
        if bounds != sorted(set(bounds)):
            raise ValueError(
                "split= names modules in the order in which they are used, each after something "
                f"has been computed; got {list(split)}"
            )
        self.parts = [trace.work[a:b] for a, b in itertools.pairwise(bounds)]
        self.stage = {node: j for j, part in enumerate(self.parts) for node in part}
        self.stage |= dict.fromkeys(trace.inputs, 0)
        self.uses = {node: self._uses(node) for node in self.stage}
        self._check_changes()

    def _uses(self, node: fx.Node) -> list[int]:
        """The segments that use a value."""
        stages = {self.stage[user] for user in node.users if user in self.stage}
        last = {self.n - 1} if node in self.trace.outputs else set()
        return sorted(stages | last)

    def _check_changes(self) -> None:
        """Stages have copies: what one changes in place, another must not use afterwards."""
        when = {node: k for k, node in enumerate(self.trace.work)}
        memory = {node: _memory(node) for node in self.stage}
        for node, j in self.stage.items():
            if not _changed(node):
                continue
            roots = {_memory(changed) for changed in _changed(node)}
            others = [o for o, root in memory.items() if root in roots and self.stage[o] < j]
            for other in others:
                own = j + 1 if other in _changed(node) else j  # its own copy it may change
                users = [u for u in other.users if self.stage.get(u, self.n - 1) >= own]
                if any(when.get(user, len(when)) > when[node] for user in users):
                    raise ValueError(
                        f"stage {j} changes in place ({node}) what stage {self.stage[other]} has "
                        f"computed ({other}) and what is used again: cut elsewhere by split=, or "
                        "change nothing in place"
                    )

    def received(self, j: int) -> list[fx.Node]:
        """What segment ``j`` is handed by the one before, in order."""
        return [
            node
            for node, made in self.stage.items()
            if made < j and self._goes_through(node, made, j)
        ]

    def _goes_through(self, node: fx.Node, made: int, j: int) -> bool:
        """The next segment's, and what is no tensor on its way to later ones: skips are tensors."""
        if j == made + 1 and j in self.uses[node]:
            return True
        return not _is_tensor(node) and any(k >= j for k in self.uses[node])

    def skips(self) -> Iterator[tuple[fx.Node, int, int]]:
        """Each value that goes past a segment: where from and where to."""
        for node, made in self.stage.items():
            if _is_tensor(node):
                yield from ((node, made, k) for k in self.uses[node] if k > made + 1)

    def attributes(self, j: int) -> list[fx.Node]:
        nodes = (arg for node in self.parts[j] for arg in node.all_input_nodes)
        last = self.trace.outputs if j == self.n - 1 else ()
        outputs = (out for out in last if isinstance(out, fx.Node))
        return [n for n in dict.fromkeys([*nodes, *outputs]) if n.op == "get_attr"]

    def pass_of(self, j: int, tensors: _Tensors) -> Pass:
        given = self.trace.inputs if j == 0 else self.received(j)
        popped = {_name(node, k): node for node, _, k in self.skips() if k == j}
        stashed = {_name(node, k): node for node, made, k in self.skips() if made == j}
        attributes = self.attributes(j)
        held = [a for a in attributes if _attribute(self.trace, a) is not None]
        constants = [a for a in attributes if a not in held]
        last = j == self.n - 1
        handed = self.trace.outputs if last else self.received(j + 1)
        changed = {tensors.name(a) for node in self.parts[j] for a in _changed(node) if a in held}
        inputs = [*given, *popped.values(), *held, *constants]
        return Pass(
            code=Code(self._graph(j, inputs, [*handed, *stashed.values()])),
            popped=tuple(popped),
            stashed=tuple(stashed),
            held=tuple(tensors.name(a) for a in held),
            changed=frozenset(changed),
            constants=tuple(_constant(self.trace, a) for a in constants),
            outputs=len(handed),
        )

    def _graph(self, j: int, given: Sequence[fx.Node], results: Sequence[Any]) -> fx.Graph:
        graph = fx.Graph()
        copies = {node: graph.placeholder(node.name) for node in given}
        for node in self.parts[j]:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[r] if isinstance(r, fx.Node) else r for r in results))
        return graph


def _position(trace: _Trace, name: str) -> int:
    position = trace.first(name)
    if position is None:
        raise ValueError(f"split= names modules that do something, and {name!r} does nothing")
    return position


def _changed(node: fx.Node) -> list[fx.Node]:
    """The arguments that an operation changes in place."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return []
    given = {a.name: value for a, value in zip(schema.arguments, node.args, strict=False)}
    given |= node.kwargs
    changed: list[Any] = [
        given.get(a.name)
        for a in schema.arguments
        # Of batch norm the schema does not say it.
        if (a.alias_info and a.alias_info.is_write) or a.name in ("running_mean", "running_var")
    ]
    return [value for value in changed if isinstance(value, fx.Node)]


def _memory(node: fx.Node) -> fx.Node:
    """The value that a view, or a view of a view, looks at."""
    schema = getattr(node.target, "_schema", None)
    arguments = schema.arguments if schema is not None else []
    for argument, value in zip(arguments, node.args, strict=False):
        if argument.alias_info and isinstance(value, fx.Node):
            return _memory(value)
    return node


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _name(node: fx.Node, k: int) -> str:
    return f"{node.name} for stage {k}"


def _attribute(trace: _Trace, node: fx.Node) -> Tensor | None:
    found: Any = trace.module
    for part in str(node.target).split("."):
        found = getattr(found, part)
    return found if isinstance(found, Tensor) else None


def _constant(trace: _Trace, node: fx.Node) -> Code:
    """A graph within the graph, such as what is done without grad."""
    inner = trace.module.get_submodule(str(node.target))
    return Code(inner.graph)  # type: ignore[arg-type]


# --------------------------------------------------------------------- parameters and buffers


class _Tensors:
    """Which segment holds which parameters and buffers, under all their names in the module."""

    def __init__(self, model: nn.Module, divisions: Mapping[bool, _Division]) -> None:
        self._all: dict[str, Tensor] = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }
        self._kept = model.state_dict(keep_vars=True).keys()
        self._places: dict[int, set[int]] = {}
        n = next(iter(divisions.values())).n
        for division in divisions.values():
            for j in range(n):
                for node in division.attributes(j):
                    tensor = _attribute(division.trace, node)
                    if tensor is not None:
                        tensor = self._all.setdefault(str(node.target), tensor)
                        self._places.setdefault(id(tensor), set()).add(j)
        for division in divisions.values():
            for node, j in division.stage.items():
                self._check_changes(node, j)

    def _check_changes(self, node: fx.Node, j: int) -> None:
        for changed in _changed(node):
            tensor = self._all.get(str(changed.target)) if changed.op == "get_attr" else None
            others = self._places.get(id(tensor), {j}) - {j}
            if others:
                raise ValueError(
                    f"{changed.target} is changed in place in stage {j} and used in stage "
                    f"{min(others)}, which holds a copy of it: cut elsewhere by split="
                )

    def name(self, node: fx.Node) -> str:
        return str(node.target)

    def of(self, j: int) -> list[Held]:
        """In the module's order; what nothing uses is with what comes before it."""
        names: dict[int, list[str]] = {}
        for name, tensor in self._all.items():
            names.setdefault(id(tensor), []).append(name)
        found, places = [], {0}
        for name, tensor in self._all.items():
            places = self._places.get(id(tensor), {min(places)})
            if j in places and names[id(tensor)][0] == name:
                own = tuple(names[id(tensor)])
                found.append(Held(tensor, own, own[0] in self._kept))
        return found
