"""Saving: a pipe's state on its way to a checkpoint, and back.

Of what is saved, the model and the optimizers' state are in the stages, each of which writes
and reads its own; the rest is the driver's.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rpcpipe import checkpoint, folder, inside, optim, randomness, state, transport, weights
from rpcpipe.errors import Failure
from rpcpipe.optim import PipeOptimizer
from rpcpipe.stage import Stage

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan
    from torch.distributed.checkpoint.storage import WriteResult

    from rpcpipe.pipe import Pipe
    from rpcpipe.shards import Checkpoint, Shard

__all__ = ["Saving", "finish_all", "load", "save"]

logger = logging.getLogger("rpcpipe")

# `rpcpipe.shards` is imported where it is used: torch.distributed.checkpoint takes half as long to
# import as torch itself, in every process of a job.

_OURS = "rpcpipe"  # the entry with what belongs to no object of the caller's
_VERSION = 1


# ----------------------------------------------------------------------------------------- save


def save(
    pipe: Pipe, directory: Path, keep: int | None, block: bool, values: Mapping[str, Any]
) -> Path | None:
    _check_names(values)
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise ValueError(f"keep= is a whole number of at least 1, got {keep!r}")
    if pipe._world.replica:
        return None  # its weights are those of replica 0
    draft = folder.begin(directory)
    try:
        saving = Saving(pipe, draft, keep, values, copy=not block)
    except BaseException:
        draft.discard()
        raise
    pipe._saving = saving
    if block:
        saving.wait()
    return draft.final


def _check_names(values: Mapping[str, Any]) -> None:
    for name in values:
        if name in ("model", _OURS) or not name.isidentifier():
            raise ValueError(f"{name!r} is no name for a value in a checkpoint: choose another")


class Saving:
    """One checkpoint on its way to the disk, by a thread here and one in each stage.

    When it is constructed, everything that is to be written is in memory that does not change
    (with ``copy``) or not before the caller goes on.
    """

    def __init__(
        self,
        pipe: Pipe,
        draft: folder.Draft,
        keep: int | None,
        values: Mapping[str, Any],
        copy: bool,
    ) -> None:
        from rpcpipe.shards import Shard

        self._start = time.monotonic()
        self._draft, self._keep = draft, keep
        self._stages = list(pipe._stages)
        self._key = f"saving {uuid.uuid4().hex}"
        optimizers = {name: v for name, v in values.items() if isinstance(v, PipeOptimizer)}
        keys = {name: optimizer._key for name, optimizer in optimizers.items()}
        self._own = Shard(draft.path, _options(optimizers), _of_driver(pipe, values))
        try:
            plans = pipe._everywhere("plan a checkpoint", _plan, self._key, draft, keys, copy)
            self._plans, self._metadata = self._own.put_together([*plans, self._own.plan()])
        except Exception:
            pipe._everywhere("forget a checkpoint", _forget, self._key)
            raise
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="rpcpipe saving", daemon=True)
        _unfinished.add(self)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as exc:
            self._error = exc
            self._draft.discard()

    def _write(self) -> None:
        *plans, own = self._plans
        answers = [
            stage.call("perform_aside", _write, self._key, plan)
            for stage, plan in zip(self._stages, plans, strict=True)
        ]
        own_results = self._own.write(own)
        results = [transport.wait(a, f"stage {j} to write") for j, a in enumerate(answers)]
        for result in results:  # all are done: nobody writes to what is discarded
            if isinstance(result, Failure):
                result.raise_()
        self._own.finish(self._metadata, [*results, own_results])
        final = self._draft.complete(self._keep)
        size = sum(file.stat().st_size for file in final.iterdir()) / 1e6
        seconds = time.monotonic() - self._start
        logger.info("saved %s: %.1f MB in %.2f s", final, size, seconds)

    def check(self) -> None:
        """Raise what it failed by, once; without waiting."""
        if not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait until it is on the disk; raise what it failed by, once."""
        self._thread.join()
        _unfinished.discard(self)
        error, self._error = self._error, None
        if error is not None:
            raise error


_unfinished: set[Saving] = set()


def finish_all() -> None:
    """Wait for all savings of this process; raise what the first failed one failed by."""
    for saving in list(_unfinished):
        saving.wait()


def _options(optimizers: Mapping[str, PipeOptimizer]) -> dict[str, Any]:
    return {
        name: {
            "param_groups": [
                {**options, "params": names} for names, options in optimizer.named_groups()
            ]
        }
        for name, optimizer in optimizers.items()
    }


def _of_driver(pipe: Pipe, values: Mapping[str, Any]) -> dict[str, Any]:
    found = {
        name: _give(value) for name, value in values.items() if not isinstance(value, PipeOptimizer)
    }
    return {
        **found,
        _OURS: {
            "version": _VERSION,
            "count": pipe._count(),
            "balance": list(pipe.balance),
            "classes": {n: v.name for n, v in values.items() if isinstance(v, PipeOptimizer)},
            "initial_seed": torch.initial_seed(),
            "driver": randomness.capture(),
            "stages": pipe._everywhere("give its random state", _random_state),
        },
    }


def _give(value: Any) -> Any:
    """The state of an object, or a value itself."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    return value.state_dict() if hasattr(value, "state_dict") else value


# ----------------------------------------------------------------------------------------- load


def load(pipe: Pipe, path: str | os.PathLike[str], objects: Mapping[str, Any]) -> dict[str, Any]:
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
    with _Read(pipe) as read:
        read(_read_shard, found, keys)
        resuming.give_objects()
        read.commit({keys[name]: groups for name, groups in resuming.groups.items()})
    resuming.go_on()
    logger.info("loaded %s", found)
    return resuming.rest


class _Resuming:
    """What the driver takes from a checkpoint; constructed, it has checked and changed nothing."""

    def __init__(
        self, pipe: Pipe, saved: Checkpoint, path: Path, objects: Mapping[str, Any]
    ) -> None:
        self._pipe, self._objects = pipe, objects
        names = saved.names()
        missing = sorted(objects.keys() - names)
        if missing:
            raise ValueError(f"{path} has no {missing}; it has {sorted(names - {_OURS})}")
        for name, thing in objects.items():
            _require_loadable(name, thing, whole=_is_whole(saved, name))
        require_fit(pipe, saved.shapes("model"), str(path))
        self.optimizers = {n: o for n, o in objects.items() if isinstance(o, PipeOptimizer)}
        self._values = {
            name: saved.read(name)
            for name in names
            if name != "model" and name not in self.optimizers and _is_whole(saved, name)
        }
        self._ours = self._values.pop(_OURS, None)
        if self._ours is not None and self._ours["version"] != _VERSION:
            raise ValueError(
                f"{path} is of version {self._ours['version']}, and this rpcpipe reads {_VERSION}"
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
        pipe, world = self._pipe, self._pipe._world
        pipe._set_count(self._ours["count"])
        same = self._ours["balance"] == pipe.balance and world.replica == 0
        if not same and pipe._seed is None:
            logger.warning(
                "the checkpoint was saved with balance %s: what layers draw goes on from another "
                "random state; it would not differ with Pipe(..., seed=)",
                self._ours["balance"],
            )
        for j, stage in enumerate(pipe._stages):
            numbers = (self._ours["count"], 2, world.replica, j)
            seed = checkpoint.derive(self._ours["initial_seed"], *numbers)
            random_state = self._ours["stages"][j] if same else seed
            answer = stage.call("perform", _set_random_state, random_state)
            transport.value_of(answer, f"stage {j} to set its random state")
        if same:
            randomness.restore(self._ours["driver"])


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


def require_fit(
    pipe: Pipe, found: Mapping[str, tuple[int, ...] | None], source: str, strict: bool = True
) -> None:
    """Raise ``ValueError`` unless these are the model's parameters and buffers."""
    stages = pipe._everywhere("name its state", inside.state_shapes)
    known = {name: shape for stage in stages for name, shape in stage.items()}
    wrong = state.misfits(found, known, strict)
    if wrong:
        raise ValueError(f"{source} does not fit the pipe: " + "\n  ".join(wrong))


class _Read:
    """What all stages read, before any of them changes anything."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._key = f"loading {uuid.uuid4().hex}"

    def __enter__(self) -> _Read:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe._everywhere("forget what it has read", _forget, self._key)

    def __call__(self, fn: Callable[..., None], *args: Any) -> None:
        self._pipe._everywhere("read a checkpoint", fn, self._key, *args)

    def commit(self, groups: Mapping[str, list[optim.Group]]) -> None:
        """Args: groups: for each optimizer, by its key, the options of its groups."""
        self._pipe._everywhere("load a checkpoint", _commit, self._key, groups)


def _load_weights(pipe: Pipe, path: Path) -> None:
    require_fit(pipe, weights.shapes(path), str(path))
    with _Read(pipe) as read:
        read(_read_weights, path)
        read.commit({})
    logger.info("loaded the weights of %s", path)


# ------------------------------------------------------------------------------- in each stage


def _plan(
    stage: Stage, key: str, draft: folder.Draft, optimizers: dict[str, str], copy: bool
) -> SavePlan:
    from rpcpipe.shards import Shard

    draft.require_seen()
    state: dict[str, Any] = {"model": stage.partition.state_dict()}
    for name, optimizer in optimizers.items():
        state[name] = {"state": optim.give_state(stage, optimizer, copy)}
    if copy:
        state["model"] = optim.copy(state["model"])
    shard = stage.extras[key] = Shard(draft.path, state)
    return shard.plan()


def _write(stage: Stage, key: str, plan: SavePlan) -> list[WriteResult]:
    shard: Shard = stage.extras.pop(key)
    return shard.write(plan)


def _random_state(stage: Stage) -> dict[str, Any]:
    """Of the stage's own stream, and of the process for what layers draw by other means."""
    own = {"torch": stage._rng.cpu, "device": stage._rng.accelerator}
    return {**randomness.capture(), **own}


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
        local: optim.Local | None = stage.extras[optimizer]
        names = [] if local is None else local.names
        state = found[optimizer] = saved.read(name, "state", only=names)
        if local is not None:
            local.require_fit(state)
    stage.extras[key] = found


def _seen(path: Path) -> Path:
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is not there on this host: load from a file system that all hosts share"
        )
    return path


def _read_weights(stage: Stage, key: str, path: Path) -> None:
    stage.extras[key] = {"model": weights.read(_seen(path), stage.partition.state_dict())}


def _commit(stage: Stage, key: str, groups: dict[str, list[optim.Group]]) -> None:
    found = stage.extras[key]
    stage.partition.load_state_dict(found["model"])
    for optimizer, options in groups.items():
        optim.load_state(stage, optimizer, found[optimizer], options)


def _forget(stage: Stage, key: str) -> None:
    stage.extras.pop(key, None)
