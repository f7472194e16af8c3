"""PipeOptimizer: one local optimizer a stage, stepped together from the driver."""

from __future__ import annotations

import functools
import inspect
import math
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rpcpipe import local, transport
from rpcpipe.inside import ParameterInfo
from rpcpipe.local import Group, Share, State
from rpcpipe.placeholder import Placeholder, RemoteGradients

if TYPE_CHECKING:
    from rpcpipe.pipe import Pipe

__all__ = ["PipeOptimizer"]

Grouping = Callable[[str], Mapping[str, Any] | None]


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
        pipe: Pipe[Any],
        cls: Callable[..., torch.optim.Optimizer],
        kwargs: Group,
        groups: Grouping | None = None,
    ) -> None:
        self._pipe = pipe
        self._key = f"optimizer {uuid.uuid4().hex}"
        divided = _divide(pipe.named_parameters_info(), groups)
        # Made here once as well: wrong options are refused, and its defaults become visible.
        trial = _on_meta(cls, divided, kwargs)
        _require_no_closure(trial)
        self._local_class = type(trial)
        itself = weakref.ref(self)  # a cycle would keep the pipe until it is collected

        def unscale(factor: float) -> bool:
            optimizer = itself()
            assert optimizer is not None
            return any(optimizer._everywhere("unscale the gradients", local.unscale, factor))

        gradients = RemoteGradients.of(unscale)
        self._complete = False
        super().__init__(
            [
                {**local.options_of(group), "params": _placeholders(infos, gradients)}
                for group, (_, infos) in zip(trial.param_groups, divided, strict=True)
            ],
            trial.defaults,
        )
        self._complete = True
        options = [options for options, _ in divided]
        answers = [
            stage.call("perform", local.make, self._key, cls, kwargs, share, options)
            for stage, share in zip(pipe._stages, self._shares(), strict=True)
        ]
        pipe._collect(answers, "make the optimizer")
        forget = functools.partial(_forget, list(pipe._stages), self._key)
        weakref.finalize(self, transport.later, forget).atexit = False

    @property
    def name(self) -> str:
        """Of the class of the local optimizers."""
        return self._local_class.__name__

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
            found = self._everywhere("measure the gradients", local.measure, norm_type)
            norm = _total_norm(found, norm_type)
            scale = max_norm / (float(norm) + 1e-6)
        options = [local.options_of(group) for group in self.param_groups]
        self._everywhere("step the optimizer", local.step, options, scale, max_value)
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of its parameters."""
        self._everywhere("zero the gradients", local.zero_grad, set_to_none)

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
        self._pipe._require_whole("an optimizer's state_dict")
        self.named_groups()
        held = self._held()
        for found in self._everywhere("give its state", local.give_state):
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
        self._pipe._require_whole("an optimizer's load_state_dict")
        ordered = _by_name(state_dict, self.param_groups)
        self._check_shapes(ordered)
        super().load_state_dict(ordered)
        held = {id(p): name for name, p in self._held().items()}
        state = {held[id(p)]: s for p, s in self.state.items()}
        self.state.clear()
        self._distribute(state)

    def _distribute(self, state: State) -> None:
        """Give the stages the state of their parameters, and the groups' options."""
        options = [local.options_of(group) for group in self.param_groups]
        answers = []
        for stage, share in zip(self._pipe._stages, self._shares(), strict=True):
            own = {name for names in share for name, _ in names}
            part = {name: s for name, s in state.items() if name in own}
            answers.append(stage.call("perform", local.load_state, self._key, part, options))
        self._pipe._collect(answers, "load the optimizer's state")

    def named_groups(self) -> list[tuple[list[str], Group]]:
        """The parameters' names and the options of each group."""
        for options, group in zip(self._grown(), self.param_groups, strict=True):
            group.update(options)
        return [
            (list(group["param_names"]), local.options_of(group)) for group in self.param_groups
        ]

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
            {**local.options_of(own), **local.options_of(group)}
            for group, own in zip(saved, self.param_groups, strict=True)
        ]

    def set_options(self, groups: Sequence[Group]) -> None:
        """Take over the options; the parameters stay."""
        for group, options in zip(self.param_groups, groups, strict=True):
            group.update(options)

    def _grown(self) -> list[Group]:
        """For each group, the options that the local optimizers have changed by themselves."""
        changed: list[Group] = [{} for _ in self.param_groups]
        for found in self._everywhere("give its options", local.changed_options):
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
                wrong += local.misfits(self._local_class, name, tuple(p.shape), state)
        if wrong:
            raise ValueError("cannot load this optimizer state: " + "\n  ".join(wrong))


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
        local.as_given([(options, [*map(stand_in, infos)]) for options, infos in divided]), **kwargs
    )


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


def _forget(stages: Sequence[transport.Remote], key: str) -> None:
    """On the driver: its state may be larger than the model."""
    for stage in stages:
        stage.call("perform", local.remove, key)
