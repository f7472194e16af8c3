"""Loading: a checkpoint on its way back into a pipe.

All stages read their parts before any of them changes anything.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rpcpipe import checkpoint, folder, inside, local, log, randomness, state, transport, weights
from rpcpipe.optim import PipeOptimizer
from rpcpipe.saving import OURS, VERSION, forget
from rpcpipe.stage import Stage

if TYPE_CHECKING:
    from rpcpipe.pipe import Pipe
    from rpcpipe.shards import Checkpoint

__all__ = ["load"]

logger = logging.getLogger("rpcpipe")


def load(
    pipe: Pipe[Any], path: str | os.PathLike[str], objects: Mapping[str, Any]
) -> dict[str, Any]:
    if str(path).endswith(weights.SUFFIX):
        if objects:
            raise ValueError(f"a {weights.SUFFIX} file has weights alone, not {sorted(objects)}")
        _load_weights(pipe, Path(path).absolute())
        return {}
    from rpcpipe.shards import Checkpoint

    found = folder.locate(path)
    saved = Checkpoint(found)
    resuming = _Resuming(pipe, saved, found, objects)
    keys = {name: optimizer._key for name, optimizer in resuming.optimizers.items()}
    with log.lasting(f"loading {found}"), _Read(pipe) as read:
        read(_read_shard, found, keys)
        resuming.give_objects()
        read.commit({keys[name]: groups for name, groups in resuming.groups.items()})
    resuming.go_on()
    logger.info("loaded %s", found)
    return resuming.rest


class _Resuming:
    """What the driver takes from a checkpoint; constructed, it has checked and changed nothing."""

    def __init__(
        self, pipe: Pipe[Any], saved: Checkpoint, path: Path, objects: Mapping[str, Any]
    ) -> None:
        self._pipe, self._objects = pipe, objects
        names = saved.names()
        missing = sorted(objects.keys() - names)
        if missing:
            raise ValueError(f"{path} has no {missing}; it has {sorted(names - {OURS})}")
        for name, thing in objects.items():
            _require_loadable(name, thing, whole=_is_whole(saved, name))
        _require_fit(pipe, saved.shapes("model"), str(path))
        self.optimizers = {n: o for n, o in objects.items() if isinstance(o, PipeOptimizer)}
        self._values = {
            name: saved.read(name)
            for name in names
            if name != "model" and name not in self.optimizers and _is_whole(saved, name)
        }
        self._ours = self._values.pop(OURS, None)
        if self._ours is not None and self._ours["version"] != VERSION:
            raise ValueError(
                f"{path} is of version {self._ours['version']}, and this rpcpipe reads {VERSION}"
            )
        classes = (self._ours or {}).get("classes", {})
        for name, optimizer in self.optimizers.items():
            if classes.get(name, optimizer.name) != optimizer.name:
                raise ValueError(
                    f"{name} of {path} is the state of {classes[name]}, not of {optimizer.name}"
                )
        self.groups = {
            name: optimizer.fit_groups(saved.read(name, "param_groups"), f"{name} of {path}")
            for name, optimizer in self.optimizers.items()
        }
        self.rest = {name: v for name, v in self._values.items() if name not in objects}

    def give_objects(self) -> None:
        for name, thing in self._objects.items():
            if name not in self.optimizers:
                _take(thing, self._values[name])

    def go_on(self) -> None:
        """Continue where the random numbers, the count and the options were."""
        for name, optimizer in self.optimizers.items():
            optimizer.set_options(self.groups[name])
        if self._ours is None:
            return
        pipe, replica = self._pipe, self._pipe._world.replica
        pipe._set_count(self._ours["count"])
        randoms = [self._ours, *self._ours.get("others", [])]  # by replica
        own = randoms[replica] if replica < len(randoms) else None
        if own is not None:
            randomness.restore(own["driver"])
        same = own is not None and self._ours["balance"] == pipe.balance
        if not same and pipe._seed is None:
            logger.warning(
                "the checkpoint was saved with balance %s and %d replicas: what layers draw goes "
                "on from another random state; it would not differ with Pipe(..., seed=)",
                self._ours["balance"],
                len(randoms),
            )
        for j, stage in enumerate(pipe._stages):
            numbers = (self._ours["count"], 2, replica, j)
            seed = checkpoint.derive(self._ours["initial_seed"], *numbers)
            random_state = own["stages"][j] if own is not None and same else seed
            answer = stage.call("perform", _set_random_state, random_state)
            transport.value_of(answer, f"stage {j} to set its random state")


def _is_whole(saved: Checkpoint, name: str) -> bool:
    """Whether it is a value of the driver's, and not an optimizer that nobody asked for."""
    return list(saved.shapes(name)) == [""]


def _take(thing: Any, value: Any) -> None:
    if isinstance(thing, torch.Generator):
        thing.set_state(value)
    else:
        thing.load_state_dict(value)


def _require_loadable(name: str, thing: Any, whole: bool) -> None:
    if not isinstance(thing, torch.Generator) and not hasattr(thing, "load_state_dict"):
        raise TypeError(
            f"{name}={thing!r} has no load_state_dict(): leave it out, and pipe.load returns its "
            "value"
        )
    if isinstance(thing, PipeOptimizer) == whole:
        kind = "not of a pipe's optimizer" if whole else "that of a pipe's optimizer"
        raise ValueError(
            f"{name}= is {type(thing).__name__}; the state saved by this name is {kind}"
        )


def _require_fit(pipe: Pipe[Any], found: state.Shapes, source: str) -> None:
    """Raise ``ValueError`` unless these are the model's parameters and buffers."""
    stages = pipe._everywhere("name its state", inside.state_shapes)
    known = {name: shape for stage in stages for name, shape in stage.items()}
    wrong = state.misfits(found, known, strict=True)
    if wrong:
        raise ValueError(f"{source} does not fit the pipe: " + "\n  ".join(wrong))


class _Read:
    """What all stages read, before any of them changes anything."""

    def __init__(self, pipe: Pipe[Any]) -> None:
        self._pipe = pipe
        self._key = f"loading {uuid.uuid4().hex}"

    def __enter__(self) -> _Read:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe._everywhere("forget what it has read", forget, self._key)

    def __call__(self, fn: Callable[..., None], *args: Any) -> None:
        self._pipe._everywhere("read a checkpoint", fn, self._key, *args)

    def commit(self, groups: Mapping[str, list[local.Group]]) -> None:
        """Args: groups: for each optimizer, by its key, the options of its groups."""
        self._pipe._everywhere("load a checkpoint", _commit, self._key, groups)


def _load_weights(pipe: Pipe[Any], path: Path) -> None:
    _require_fit(pipe, weights.shapes(path), str(path))
    with log.lasting(f"loading {path}"), _Read(pipe) as read:
        read(_read_weights, path)
        read.commit({})
    logger.info("loaded the weights of %s", path)


# ------------------------------------------------------------------------------- in each stage


def _set_random_state(stage: Stage, state: dict[str, Any] | int) -> None:
    """Args: state: what `_random_state` has returned, or a seed."""
    if isinstance(state, int):
        before = checkpoint.RngState.capture(stage.device)
        torch.manual_seed(state)
        stage._rng = checkpoint.RngState.capture(stage.device)
        before.restore()
    else:
        stage._rng = checkpoint.RngState(state.pop("torch"), stage.device, state.pop("device"))
        randomness.restore(state)


def _read_shard(stage: Stage, key: str, path: Path, optimizers: dict[str, str]) -> None:
    from rpcpipe.shards import Checkpoint

    saved = Checkpoint(_seen(path))
    own = stage.partition.state_dict()
    found: dict[str, Any] = {"model": saved.read("model", only=own)}
    for name, optimizer in optimizers.items():
        here: local.Local | None = stage.extras[optimizer]
        if here is not None:
            found[optimizer] = saved.read(name, "state", only=here.names)
            here.require_fit(found[optimizer])
    stage.extras[key] = found


def _seen(path: Path) -> Path:
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is not there on this host: load from a file system that all hosts share"
        )
    return path


def _read_weights(stage: Stage, key: str, path: Path) -> None:
    stage.extras[key] = {"model": weights.read(_seen(path), stage.partition.state_dict())}


def _commit(stage: Stage, key: str, groups: dict[str, list[local.Group]]) -> None:
    found = stage.extras[key]
    stage.partition.load_state_dict(found["model"])
    for optimizer, options in groups.items():
        local.load_state(stage, optimizer, found.get(optimizer, {}), options)
