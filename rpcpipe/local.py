"""Local: the optimizer of one stage, and what a pipe's optimizer has it do there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from rpcpipe.averaging import whole
from rpcpipe.stage import Stage

__all__ = [
    "Group",
    "Local",
    "Share",
    "State",
    "as_given",
    "copy",
    "misfits",
    "options_of",
]

Group = dict[str, Any]  # the options of a parameter group, without its parameters
State = dict[str, dict[str, Any]]  # of each parameter by its name in the whole model
Share = list[tuple[str, str]]  # of a group: names in the whole model, and in this stage


def misfits(cls: type, name: str, shape: tuple[int, ...], state: Mapping[str, Any]) -> list[str]:
    """What is wrong with a parameter's state, if ``cls`` is one of torch's.

    Its tensors have the same shape, or less of it: a count of steps, a row or a column. What other
    classes keep is not known.
    """
    if not cls.__module__.startswith("torch.optim"):
        return []
    return [
        f"size mismatch for {key} of {name}: the checkpoint has {tuple(value.shape)}, the "
        f"parameter {shape}"
        for key, value in state.items()
        if isinstance(value, Tensor)
        and len(value.shape) == len(shape)
        and any(found not in (1, wanted) for found, wanted in zip(value.shape, shape, strict=True))
    ]


def options_of(group: Mapping[str, Any]) -> Group:
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}


def as_given(groups: Sequence[tuple[Group, list[Any]]]) -> list[Any]:
    """What a class is called with: parameters alone, where there are no groups to tell apart."""
    if len(groups) == 1 and not groups[0][0]:
        return groups[0][1]
    return [{**options, "params": parameters} for options, parameters in groups]


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
        cls = type(self.optimizer)
        wrong = [line for name, s in state.items() for line in misfits(cls, name, shapes[name], s)]
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


def make(
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
    optimizer = cls(as_given(given), **kwargs)
    names = [name for k in groups for name, _ in share[k]]
    received = [options_of(group) for group in optimizer.param_groups]
    stage.extras[key] = Local(optimizer, names, groups, received)


def remove(stage: Stage, key: str) -> None:
    stage.extras.pop(key, None)


def _dense(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def measure(stage: Stage, key: str, norm_type: float) -> float:
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
    norms = [float(whole(part)) for part in parts]
    if math.isinf(norm_type):
        return max(norms, key=lambda norm: (math.isnan(norm), norm), default=0.0)
    return float(sum(norm**norm_type for norm in norms))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def step(
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


def unscale(stage: Stage, key: str, factor: float) -> bool:
    """Multiply all gradients, and say whether any of them is not finite."""
    local: Local | None = stage.extras[key]
    if local is None:
        return False
    inverse, found = (torch.tensor(v, device=stage.device) for v in (factor, 0.0))
    scaler = torch.amp.GradScaler(stage.device.type)
    seen = scaler._unscale_grads_(local.optimizer, inverse, found, False)
    return any(bool(value) for value in seen.values())


def zero_grad(stage: Stage, key: str, set_to_none: bool) -> None:
    if stage.extras[key] is not None:
        stage.extras[key].optimizer.zero_grad(set_to_none=set_to_none)


def changed_options(stage: Stage, key: str) -> dict[int, Group]:
    local: Local | None = stage.extras[key]
    if local is None:
        return {}
    return {
        g: {o: v for o, v in options_of(group).items() if o not in sent or not _same(sent[o], v)}
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
