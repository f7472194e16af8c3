"""PipeOptimizer: one local optimizer a stage, stepped together from the driver."""

from __future__ import annotations

import functools
import inspect
import math
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rpcpipe import transport
from rpcpipe.inside import ParameterInfo
from rpcpipe.placeholder import Placeholder, RemoteGradients
from rpcpipe.stage import Stage

if TYPE_CHECKING:
    from rpcpipe.pipe import Pipe

__all__ = ["Group", "Local", "PipeOptimizer", "copy", "give_state", "load_state"]

Group = dict[str, Any]  # the options of a parameter group, without its parameters
Grouping = Callable[[str], Mapping[str, Any] | None]
State = dict[str, dict[str, Any]]  # of each parameter by its name in the whole model


class PipeOptimizer(torch.optim.Optimizer):
    """An optimizer whose state lives with the parameters, in the stages.

    On the driver it is a ``torch.optim.Optimizer`` over placeholders of the parameters: the
    options in ``param_groups`` may be read and edited, ``torch.optim.lr_scheduler`` and
    ``torch.amp.GradScaler`` work on it. Each step takes the options along.

    Like ``cls(model.parameters())``, it holds all parameters, and leaves alone those that have no
    gradient: frozen ones may be thawed later.

    Args:
        pipe: whose parameters are optimized.
        cls: a class of ``torch.optim``, or any importable one with its interface.
        kwargs: its options, such as ``lr``.
        groups: called with each parameter's name in the whole model; returns the options in which
            it differs, or ``None`` if it is not to be optimized. Parameters with equal options
            are one group.

    Raises:
        TypeError, ValueError: the options are not those of ``cls``, or it takes a closure;
            before any stage has heard of it.
    """

    def __init__(
        self,
        pipe: Pipe,
        cls: Callable[..., torch.optim.Optimizer],
        kwargs: Group,
        groups: Grouping | None = None,
    ) -> None:
        self._pipe = pipe
        self._key = f"optimizer {uuid.uuid4().hex}"
        divided = _divide(pipe.named_parameters_info(), groups)
        # Made here once as well: wrong options are refused, and its defaults become visible.
        local = _on_meta(cls, divided, kwargs)
        _require_no_closure(local)
        self.name = type(local).__name__
        itself = weakref.ref(self)  # a cycle would keep the pipe until it is collected

        def unscale(factor: float) -> bool:
            optimizer = itself()
            assert optimizer is not None
            return any(optimizer._everywhere("unscale the gradients", _unscale, factor))

        gradients = RemoteGradients.of(unscale)
        self._complete = False
        super().__init__(
            [
                {**_options(group), "params": _placeholders(infos, gradients)}
                for group, (_, infos) in zip(local.param_groups, divided, strict=True)
            ],
            local.defaults,
        )
        self._complete = True
        options = [options for options, _ in divided]
        answers = [
            stage.call("perform", _make, self._key, cls, kwargs, share, options)
            for stage, share in zip(pipe._stages, self._shares(), strict=True)
        ]
        pipe._collect(answers, "make the optimizer")
        forget = functools.partial(_forget, list(pipe._stages), self._key)
        weakref.finalize(self, transport.later, forget).atexit = False

    def _shares(self) -> list[list[Share]]:
        """For each stage and group, the parameters that are there."""
        homes = {info.name: info.stage for info in self._pipe.named_parameters_info()}
        copies = {tie.names[tie.owner]: tie.names for tie in self._pipe._ties}
        shares: list[list[Share]] = [[[] for _ in self.param_groups] for _ in self._pipe._stages]
        for k, group in enumerate(self.param_groups):
            for name in group["param_names"]:
                for j, own in copies.get(name, {homes[name]: name}).items():
                    shares[j][k].append((name, own))
        return shares

    def _everywhere(self, what: str, fn: Callable[..., Any], *args: Any) -> list[Any]:
        return self._pipe._everywhere(what, fn, self._key, *args)

    # ------------------------------------------------------------------------------- training

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        max_value: float | None = None,
    ) -> Tensor | None:
        """Update all parameters by their ``.grad``: one message a stage, two with ``max_norm``.

        Args:
            closure: not supported.
            max_norm: scale all gradients down so that their norm, over all stages together, is
                at most this, as ``torch.nn.utils.clip_grad_norm_`` does. ``inf`` only measures.
            norm_type: which norm: of order 1, 2, ..., or ``inf``.
            max_value: limit each element of the gradients to ``[-max_value, max_value]``, as
                ``torch.nn.utils.clip_grad_value_`` does.

        Returns:
            The norm before scaling, shape ``()`` float64, if ``max_norm`` was given.

        Raises:
            ValueError: a closure is given, or both limits.
            StageError: the optimizer raised in a stage.
        """
        if closure is not None:
            raise ValueError("a pipe's optimizer takes no closure: run the pipe before the step")
        if max_norm is not None and max_value is not None:
            raise ValueError("step() limits the norm or the values: give max_norm= or max_value=")
        norm, scale = None, 1.0
        if max_norm is not None:
            found = self._everywhere("measure the gradients", _measure, norm_type)
            norm = _total_norm(found, norm_type)
            scale = max_norm / (float(norm) + 1e-6)
        options = [_options(group) for group in self.param_groups]
        self._everywhere("step the optimizer", _step, options, scale, max_value)
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of its parameters."""
        self._everywhere("zero the gradients", _zero_grad, set_to_none)

    def add_param_group(self, param_group: Group) -> None:
        """Not to be had: which parameters there are is known from the start."""
        if self._complete:
            raise TypeError(
                "the groups of a pipe's optimizer are made once: give pipe.optimizer(cls, "
                "groups=fn), and edit the options in opt.param_groups"
            )
        super().add_param_group(param_group)

    # ---------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """What ``cls(model.named_parameters())`` would give for the unpartitioned model.

        Gathered from the stages; a plain optimizer over the same groups loads it.
        """
        self.named_groups()
        held = self._held()
        for found in self._everywhere("give its state", give_state):
            self.state.update({held[name]: state for name, state in found.items()})
        try:
            return super().state_dict()
        finally:
            self.state.clear()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` has returned, or that of a plain optimizer.

        Args:
            state_dict: its groups have as many parameters as here. Where it has their names
                (``param_names``), the state goes by these.

        Raises:
            ValueError: groups, names or shapes do not fit; nothing has changed.
        """
        ordered = _by_name(state_dict, self.param_groups)
        self._check_shapes(ordered)
        super().load_state_dict(ordered)
        held = {id(p): name for name, p in self._held().items()}
        state = {held[id(p)]: s for p, s in self.state.items()}
        self.state.clear()
        self._distribute(state)

    def _distribute(self, state: State) -> None:
        """Give the stages the state of their parameters, and the groups' options."""
        options = [_options(group) for group in self.param_groups]
        answers = []
        for stage, share in zip(self._pipe._stages, self._shares(), strict=True):
            own = {name for names in share for name, _ in names}
            part = {name: s for name, s in state.items() if name in own}
            answers.append(stage.call("perform", load_state, self._key, part, options))
        self._pipe._collect(answers, "load the optimizer's state")

    def named_groups(self) -> list[tuple[list[str], Group]]:
        """The parameters' names and the options of each group."""
        for options, group in zip(self._grown(), self.param_groups, strict=True):
            group.update(options)
        return [(list(group["param_names"]), _options(group)) for group in self.param_groups]

    def fit_groups(self, saved: Sequence[Group], source: str) -> list[Group]:
        """The options of our groups by those of a checkpoint, whose parameters are names.

        Raises:
            ValueError: they are not of the same parameters.
        """
        if len(saved) != len(self.param_groups):
            raise ValueError(
                f"{source} has {len(saved)} groups, the optimizer {len(self.param_groups)}"
            )
        for k, (group, own) in enumerate(zip(saved, self.param_groups, strict=True)):
            differing = set(group["params"]) ^ set(own["param_names"])
            if differing:
                raise ValueError(
                    f"group {k} of {source} and of the optimizer differ in {sorted(differing)}"
                )
        return [
            {**_options(own), **_options(group)}
            for group, own in zip(saved, self.param_groups, strict=True)
        ]

    def set_options(self, groups: Sequence[Group]) -> None:
        """Take over the options; the parameters stay."""
        for group, options in zip(self.param_groups, groups, strict=True):
            group.update(options)

    def _grown(self) -> list[Group]:
        """For each group, the options that the local optimizers have changed by themselves."""
        changed: list[Group] = [{} for _ in self.param_groups]
        for found in self._everywhere("give its options", _changed_options):
            for k, options in found.items():
                changed[k].update(options)
        return changed

    def _held(self) -> dict[str, Placeholder]:
        return {
            name: p
            for group in self.param_groups
            for name, p in zip(group["param_names"], group["params"], strict=True)
        }

    def _check_shapes(self, state_dict: Mapping[str, Any]) -> None:
        held = list(self._held().items())
        wrong = []
        for k, state in state_dict["state"].items():
            if isinstance(k, int) and k < len(held):
                name, p = held[k]
                wrong += _misfits(name, tuple(p.shape), state)
        if wrong:
            raise ValueError("cannot load this optimizer state: " + "\n  ".join(wrong))


def _misfits(name: str, shape: tuple[int, ...], state: Mapping[str, Any]) -> list[str]:
    """What is wrong with a parameter's state: its tensors have the same shape, or less of it.

    Less is a count of steps, a row or a column.
    """
    return [
        f"size mismatch for {key} of {name}: the checkpoint has {tuple(value.shape)}, the "
        f"parameter {shape}"
        for key, value in state.items()
        if isinstance(value, Tensor)
        and len(value.shape) == len(shape)
        and any(found not in (1, wanted) for found, wanted in zip(value.shape, shape, strict=True))
    ]


def _by_name(state_dict: Mapping[str, Any], groups: Sequence[Group]) -> dict[str, Any]:
    """With the parameters of each group in our order, where their names are known."""
    saved = state_dict["param_groups"]
    if len(saved) != len(groups) or any("param_names" not in group for group in saved):
        return dict(state_dict)
    ordered = []
    for k, (group, own) in enumerate(zip(saved, groups, strict=True)):
        where = dict(zip(group["param_names"], group["params"], strict=True))
        missing = [name for name in own["param_names"] if name not in where]
        unexpected = [name for name in where if name not in own["param_names"]]
        if missing or unexpected:
            raise ValueError(
                f"cannot load this optimizer state: group {k} lacks {missing} and has "
                f"{unexpected}, which are not in the pipe's"
            )
        names = list(own["param_names"])
        ordered.append({**group, "params": [where[n] for n in names], "param_names": names})
    # Numbered anew, in the order they now have.
    numbers = {old: k for k, old in enumerate(k for group in ordered for k in group["params"])}
    state = {numbers[k]: s for k, s in state_dict["state"].items() if k in numbers}
    for group in ordered:
        group["params"] = [numbers[k] for k in group["params"]]
    return {"state": state, "param_groups": ordered}


def _options(group: Mapping[str, Any]) -> Group:
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}


def _divide(
    infos: Iterable[ParameterInfo], groups: Grouping | None
) -> list[tuple[Group, list[ParameterInfo]]]:
    """The parameters by what ``groups`` says of them, in the order of the first of each."""
    divided: list[tuple[Group, list[ParameterInfo]]] = []
    for info in infos:
        options = {} if groups is None else groups(info.name)
        if options is None:
            continue
        if not isinstance(options, Mapping):
            raise TypeError(
                "groups= is a function of a parameter's name that returns a dict of options or "
                f"None; for {info.name} it returned {options!r}"
            )
        for known, members in divided:
            if known == options:
                members.append(info)
                break
        else:
            divided.append((dict(options), [info]))
    if not divided:
        raise ValueError("an optimizer needs parameters: groups= left out all of the pipe's")
    return divided


def _on_meta(
    cls: Callable[..., torch.optim.Optimizer],
    divided: Sequence[tuple[Group, Sequence[ParameterInfo]]],
    kwargs: Group,
) -> torch.optim.Optimizer:
    def stand_in(info: ParameterInfo) -> nn.Parameter:
        tensor = torch.empty(info.shape, dtype=info.dtype, device="meta")
        return nn.Parameter(tensor, info.requires_grad)

    return cls(
        _as_given([(options, [*map(stand_in, infos)]) for options, infos in divided]), **kwargs
    )


def _as_given(groups: Sequence[tuple[Group, list[Any]]]) -> list[Any]:
    """What a class is called with: parameters alone, where there are no groups to tell apart."""
    if len(groups) == 1 and not groups[0][0]:
        return groups[0][1]
    return [{**options, "params": parameters} for options, parameters in groups]


def _require_no_closure(optimizer: torch.optim.Optimizer) -> None:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(optimizer).__name__} takes a closure, to run the model several times within a "
            "step, and a stage cannot do that alone: choose an optimizer whose step() needs none"
        )


def _placeholders(
    infos: Iterable[ParameterInfo], gradients: RemoteGradients
) -> list[tuple[str, Placeholder]]:
    return [(info.name, Placeholder(info.shape, info.dtype, gradients)) for info in infos]


def _total_norm(found: Sequence[float], norm_type: float) -> Tensor:
    parts = torch.tensor(found, dtype=torch.float64)
    return parts.max() if math.isinf(norm_type) else parts.sum().pow(1 / norm_type)


# ------------------------------------------------------------------------------- in each stage

Share = list[tuple[str, str]]  # of a group: names in the whole model, and in this stage


@dataclass
class Local:
    """The optimizer of one stage, if it has parameters to optimize.

    Attributes:
        names: those of its parameters in the whole model, in its own order.
        groups: for each of its groups, which of the driver's it is.
        received: for each of its groups, the options the driver has sent last.
    """

    optimizer: torch.optim.Optimizer
    names: list[str]
    groups: list[int]
    received: list[Group]

    def parameters(self) -> Iterator[Tensor]:
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters() if p.grad is not None]

    def require_fit(self, state: State) -> None:
        """Raise ``ValueError`` if that is no state of these parameters."""
        shapes = dict(zip(self.names, (tuple(p.shape) for p in self.parameters()), strict=True))
        wrong = [line for name, s in state.items() for line in _misfits(name, shapes[name], s)]
        if wrong:
            raise ValueError("this state does not fit the optimizer: " + "\n  ".join(wrong))

    def receive(self, options: Sequence[Group]) -> None:
        """Take what the driver has changed; the rest may have changed here."""
        for k, group in enumerate(self.optimizer.param_groups):
            new = options[self.groups[k]]
            before = self.received[k]
            group.update(
                {o: v for o, v in new.items() if o not in before or not _same(before[o], v)}
            )
            self.received[k] = new


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _make(
    stage: Stage,
    key: str,
    cls: Callable[..., torch.optim.Optimizer],
    kwargs: Group,
    share: list[Share],
    options: list[Group],
) -> None:
    groups = [k for k, names in enumerate(share) if names]
    if not groups:
        stage.extras[key] = None
        return
    given = [
        (options[k], [stage.partition.get_parameter(own) for _, own in share[k]]) for k in groups
    ]
    optimizer = cls(_as_given(given), **kwargs)
    names = [name for k in groups for name, _ in share[k]]
    received = [_options(group) for group in optimizer.param_groups]
    stage.extras[key] = Local(optimizer, names, groups, received)


def _forget(stages: Sequence[transport.Remote], key: str) -> None:
    """On the driver: its state may be larger than the model."""
    for stage in stages:
        stage.call("perform", _remove, key)


def _remove(stage: Stage, key: str) -> None:
    stage.extras.pop(key, None)


def _dense(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _measure(stage: Stage, key: str, norm_type: float) -> float:
    """This stage's part of the norm: the sum of powers, or the largest."""
    local: Local | None = stage.extras[key]
    if local is None:
        return 0.0
    elsewhere = {id(stage.partition.get_parameter(name)) for name in stage.ties.counted_elsewhere()}
    parts = [
        torch.linalg.vector_norm(_dense(p.grad).detach(), norm_type, dtype=_wide(p.grad.dtype))
        for p in local.parameters()
        if p.grad is not None and id(p) not in elsewhere
    ]
    norms = [float(part) for part in parts]
    if math.isinf(norm_type):
        return max(norms, key=lambda norm: (math.isnan(norm), norm), default=0.0)
    return float(sum(norm**norm_type for norm in norms))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def _step(
    stage: Stage, key: str, options: list[Group], scale: float, max_value: float | None
) -> None:
    local: Local | None = stage.extras[key]
    if local is None:
        return
    if not scale >= 1.0:  # NaN as well, as torch does
        for gradient in local.gradients():
            gradient.mul_(scale)
    if max_value is not None:
        for gradient in local.gradients():
            gradient.clamp_(-max_value, max_value)
    local.receive(options)
    local.optimizer.step()


def _unscale(stage: Stage, key: str, factor: float) -> bool:
    """Multiply all gradients, and say whether any of them is not finite."""
    local: Local | None = stage.extras[key]
    if local is None:
        return False
    inverse, found = (torch.tensor(v, device=stage.device) for v in (factor, 0.0))
    scaler = torch.amp.GradScaler(stage.device.type)
    seen = scaler._unscale_grads_(local.optimizer, inverse, found, False)
    return any(bool(value) for value in seen.values())


def _zero_grad(stage: Stage, key: str, set_to_none: bool) -> None:
    if stage.extras[key] is not None:
        stage.extras[key].optimizer.zero_grad(set_to_none=set_to_none)


def _changed_options(stage: Stage, key: str) -> dict[int, Group]:
    local: Local | None = stage.extras[key]
    if local is None:
        return {}
    return {
        g: {o: v for o, v in _options(group).items() if o not in sent or not _same(sent[o], v)}
        for g, group, sent in zip(
            local.groups, local.optimizer.param_groups, local.received, strict=True
        )
    }


def give_state(stage: Stage, key: str, copied: bool = True) -> State:
    """By names, a copy in host memory; without parameters that another stage speaks for."""
    local: Local | None = stage.extras[key]
    if local is None:
        return {}
    elsewhere = {id(stage.partition.get_parameter(name)) for name in stage.ties.counted_elsewhere()}
    return {
        name: copy(local.optimizer.state[p]) if copied else local.optimizer.state[p]
        for name, p in zip(local.names, local.parameters(), strict=True)
        if p in local.optimizer.state and id(p) not in elsewhere
    }


def load_state(stage: Stage, key: str, state: State, options: list[Group]) -> None:
    local: Local | None = stage.extras[key]
    if local is None:
        return
    numbers = {id(p): k for k, p in enumerate(local.parameters())}
    groups = [
        {**options[g], "params": [numbers[id(p)] for p in group["params"]]}
        for g, group in zip(local.groups, local.optimizer.param_groups, strict=True)
    ]
    found = {k: copy(state[name]) for k, name in enumerate(local.names) if name in state}
    local.optimizer.load_state_dict({"state": found, "param_groups": groups})
    local.received = [options[g] for g in local.groups]


def copy(state: Any) -> Any:
    """In host memory of its own: what the optimizer holds changes in place."""
    return pytree.tree_map_only(Tensor, lambda t: t.detach().to("cpu", copy=True), state)
