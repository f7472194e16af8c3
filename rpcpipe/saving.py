"""Saving: a pipe's state on its way to a checkpoint.

The model and the optimizers' state are in the stages, each of which writes its own; the rest is the
driver's.
"""

from __future__ import annotations

import io
import logging
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rpcpipe import folder, local, log, randomness, replicas, transport
from rpcpipe.errors import Failure
from rpcpipe.optim import PipeOptimizer
from rpcpipe.stage import Stage

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan
    from torch.distributed.checkpoint.storage import WriteResult

    from rpcpipe.pipe import Pipe
    from rpcpipe.shards import Shard

__all__ = ["OURS", "VERSION", "Saving", "finish_all", "forget", "save"]

logger = logging.getLogger("rpcpipe")

# `rpcpipe.shards` is imported where it is used: torch.distributed.checkpoint takes half as long to
# import as torch itself, in every process of a job.

OURS = "rpcpipe"  # the entry with what belongs to no object of the caller's
VERSION = 1


# ----------------------------------------------------------------------------------------- save


def save(
    pipe: Pipe[Any], directory: Path, keep: int | None, block: bool, values: Mapping[str, Any]
) -> Path | None:
    _check_names(values)
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise ValueError(f"keep= is a whole number of at least 1, got {keep!r}")
    randoms = _random_states(pipe)
    if pipe._world.replica:
        return None  # its weights are those of replica 0
    # Not before: an error of the last saving, which one replica has, would leave others waiting.
    pipe._finish_saving()
    draft = folder.begin(directory)
    try:
        saving = Saving(pipe, draft, keep, values, randoms, copy=not block)
    except BaseException:
        draft.discard()
        raise
    pipe._saving = saving
    if block:
        saving.wait()
    return draft.final


def _check_names(values: Mapping[str, Any]) -> None:
    for name in values:
        if name in ("model", OURS) or not name.isidentifier():
            raise ValueError(f"{name!r} is no name for a value in a checkpoint: choose another")


class Saving:
    """One checkpoint on its way to the disk, by a thread here and one in each stage.

    When it is constructed, everything that is to be written is in memory that does not change
    (with ``copy``) or not before the caller goes on.
    """

    def __init__(
        self,
        pipe: Pipe[Any],
        draft: folder.Draft,
        keep: int | None,
        values: Mapping[str, Any],
        randoms: list[dict[str, Any]],
        copy: bool,
    ) -> None:
        from rpcpipe.shards import Shard

        self._start = time.monotonic()
        self._draft, self._keep = draft, keep
        self._stages = list(pipe._stages)
        self._key = f"saving {uuid.uuid4().hex}"
        optimizers = {name: v for name, v in values.items() if isinstance(v, PipeOptimizer)}
        keys = {name: optimizer._key for name, optimizer in optimizers.items()}
        self._own = Shard(draft.path, _options(optimizers), _of_driver(pipe, values, randoms))
        try:
            plans = pipe._everywhere("plan a checkpoint", _plan, self._key, draft, keys, copy)
            self._plans, self._metadata = self._own.put_together([*plans, self._own.plan()])
        except Exception:
            pipe._everywhere("forget a checkpoint", forget, self._key)
            raise
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="rpcpipe saving", daemon=True)
        _unfinished.add(self)
        self._thread.start()

    def _run(self) -> None:
        try:
            with log.lasting(f"saving {self._draft.final}"):
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
                transport.raise_failure(result)
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
    errors = []
    for saving in list(_unfinished):
        try:
            saving.wait()
        except Exception as exc:
            errors.append(exc)
    if errors:
        raise errors[0]


def _options(optimizers: Mapping[str, PipeOptimizer]) -> dict[str, Any]:
    return {
        name: {
            "param_groups": [
                {**options, "params": names} for names, options in optimizer.named_groups()
            ]
        }
        for name, optimizer in optimizers.items()
    }


def _of_driver(
    pipe: Pipe[Any], values: Mapping[str, Any], randoms: list[dict[str, Any]]
) -> dict[str, Any]:
    found = {
        name: _give(value) for name, value in values.items() if not isinstance(value, PipeOptimizer)
    }
    return {
        **found,
        OURS: {
            "version": VERSION,
            "count": pipe._count(),
            "balance": list(pipe.balance),
            "classes": {n: v.name for n, v in values.items() if isinstance(v, PipeOptimizer)},
            "initial_seed": torch.initial_seed(),
            **randoms[0],
            "others": randoms[1:],
        },
    }


def _random_states(pipe: Pipe[Any]) -> list[dict[str, Any]]:
    """Those of every process, by replica; called by all drivers."""
    own = {
        "driver": randomness.capture(),
        "stages": pipe._everywhere("give its random state", _random_state),
    }
    if pipe._world.replicas == 1:
        return [own]
    from rpcpipe.shards import dump

    sent = dump("the random state of a replica", own).getvalue()
    found = replicas.gather(sent, pipe._world.replicas, "call pipe.save, as all of them do")
    return [torch.load(io.BytesIO(data), weights_only=True) for data in found]


def _give(value: Any) -> Any:
    """The state of an object, or a value itself."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    return value.state_dict() if hasattr(value, "state_dict") else value


# ------------------------------------------------------------------------------- in each stage


def _plan(
    stage: Stage, key: str, draft: folder.Draft, optimizers: dict[str, str], copy: bool
) -> SavePlan:
    from rpcpipe.shards import Shard

    draft.require_seen()
    state: dict[str, Any] = {"model": stage.partition.state_dict()}
    for name, optimizer in optimizers.items():
        state[name] = {"state": local.give_state(stage, optimizer, copy)}
    if copy:
        state["model"] = local.copy(state["model"])
    shard = stage.extras[key] = Shard(draft.path, state)
    return shard.plan()


def _write(stage: Stage, key: str, plan: SavePlan) -> list[WriteResult]:
    shard: Shard = stage.extras.pop(key)
    begin = time.monotonic()
    results = shard.write(plan)
    size, seconds = sum(r.size_in_bytes for r in results) / 1e6, time.monotonic() - begin
    logger.info("wrote its part of a checkpoint: %.1f MB in %.2f s", size, seconds)
    return results


def _random_state(stage: Stage) -> dict[str, Any]:
    """Of the stage's own stream, and of the process for what layers draw by other means."""
    own = {"torch": stage._rng.cpu, "device": stage._rng.accelerator}
    return {**randomness.capture(), **own}


def forget(stage: Stage, key: str) -> None:
    stage.extras.pop(key, None)
