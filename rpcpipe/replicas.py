"""Replicas: the pipelines that train the same model on different data, as one driver sees them."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rpcpipe import groups, log, transport
from rpcpipe.averaging import Averaging, Reduced, averaging_of
from rpcpipe.stage import Stage
from rpcpipe.world import World

if TYPE_CHECKING:
    from rpcpipe.pipe import Pipe

__all__ = ["Plan", "Replicas", "average", "gather"]

PATIENCE = 10.0  # seconds to wait for the other drivers without a word

WrapStage = Callable[[nn.Module, World, int], nn.Module]


@dataclass(frozen=True)
class Plan:
    """How each stage is wrapped; goes to all of them.

    Attributes:
        ddp: whether stages that are not wrapped by ``wrap_stage`` are averaged.
        ranks: by stage, those of the script's own groups; ``None`` for the groups of the run.
        wrap_stage: the user's function.
    """

    world: World
    ddp: bool
    ranks: list[list[int]] | None
    wrap_stage: WrapStage | None

    @staticmethod
    def of(world: World, ddp: Any, wrap_stage: WrapStage | None) -> Plan:
        """From the arguments of a `Pipe`.

        Raises:
            TypeError, ValueError: they are not as described there.
        """
        if wrap_stage is not None:
            _check_importable(wrap_stage)
        if ddp is False or (isinstance(ddp, str) and ddp == "auto"):
            return Plan(world.in_stage(), ddp == "auto" and world.replicas > 1, None, wrap_stage)
        if world.replicas == 1:
            raise ValueError(
                f"ddp={ddp!r} averages over replicas, and this run has one: call "
                "run(fn, replicas=2), or leave ddp= out"
            )
        ranks = _ranks_in_mesh(ddp) if hasattr(ddp, "mesh_dim_names") else _ranks(ddp, world)
        _check_ranks(ranks, world)
        return Plan(world.in_stage(), True, ranks, wrap_stage)

    def group(self, j: int) -> dist.ProcessGroup:
        """That of stage ``j``, in its process."""
        return groups.of_stage(j) if self.ranks is None else groups.find(self.ranks[j])


def _check_importable(wrap_stage: WrapStage) -> None:
    try:
        pickle.dumps(wrap_stage)
    except Exception as exc:
        raise TypeError(
            f"wrap_stage= is called in the stages, which import it; this cannot be sent: {exc}. "
            "Give a function defined at the top level of a file"
        ) from exc


def _ranks_in_mesh(mesh: Any) -> list[list[int]]:
    """Those of each stage, in a mesh with the axes ``"dp"`` and ``"pp"``."""
    names = tuple(mesh.mesh_dim_names or ())
    if sorted(names) != ["dp", "pp"]:
        raise ValueError(
            f'ddp= takes a DeviceMesh with mesh_dim_names=("dp", "pp"), got names {names}'
        )
    rows: list[list[int]] = (mesh.mesh if names[1] == "dp" else mesh.mesh.T).tolist()
    return rows


def _ranks(ddp: Any, world: World) -> list[list[int]]:
    """Those of each stage, in a list of process groups or of their ranks."""
    if not isinstance(ddp, Sequence) or isinstance(ddp, str):
        raise TypeError(
            'ddp= is "auto", False, a list with a process group or its ranks for each stage, or '
            f"a DeviceMesh; got {ddp!r}"
        )
    if len(ddp) != world.stages:
        raise ValueError(f"ddp= names a group for each of {world.stages} stages, got {len(ddp)}")
    return [_ranks_of(group, world.ranks(j)) for j, group in enumerate(ddp)]


def _ranks_of(group: Any, ours: list[int]) -> list[int]:
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        return ours  # all that new_group tells the driver of a group it is not in
    if isinstance(group, dist.ProcessGroup):
        return dist.get_process_group_ranks(group)
    return [int(rank) for rank in group]


def _check_ranks(ranks: list[list[int]], world: World) -> None:
    for j, found in enumerate(ranks):
        if sorted(found) != world.ranks(j):
            raise ValueError(
                f"ddp= says that stage {j} is in the processes of ranks {sorted(found)}, but in "
                f"this run those are {world.ranks(j)}: give groups of these"
            )
    if len(ranks) != world.stages:
        raise ValueError(f"ddp= has a pp axis of {len(ranks)}, and there are {world.stages} stages")


# ------------------------------------------------------------------------------- in each stage


def wrap(stage: Stage, plan: Plan) -> str:
    """Wrap the stage; returns the kind of its averaging."""
    if plan.wrap_stage is not None:
        module: Any = plan.wrap_stage(stage.partition, plan.world, stage.index)
        if not isinstance(module, nn.Module):
            raise TypeError(f"wrap_stage= returns the module to call, got {module!r}")
        stage.module = module
    found = averaging_of(stage.module)
    if found is None and plan.ddp and stage.trainable():
        found = Reduced.of(stage.partition, plan.group(stage.index))
    stage.averaging = found or Averaging()
    return stage.averaging.kind


def make_up(stage: Stage, step: int) -> None:
    stage.averaging.make_up(step)


# ------------------------------------------------------------------------------ in each driver


class Replicas:
    """The pipes of all replicas, whose steps end well in all of them or in none.

    A step that fails in one replica is made up for by it: its stages still average what they
    have, so that the others are not left waiting. Then the drivers agree, and the step has failed
    in all of them; the next one works.
    """

    def __init__(self, pipe: Pipe[Any], world: World, sharded: bool) -> None:
        self._everywhere, self._world = pipe._everywhere, world
        self._broken: str | None = None
        self._sharded = sharded

    @staticmethod
    def of(pipe: Pipe[Any], world: World, kinds: Sequence[str]) -> Replicas | None:
        """Those of a pipe, if its stages are averaged at all.

        Args:
            kinds: of the stages' averaging.

        Raises:
            ValueError: a sharded pipe has parameters tied across stages.
        """
        sharded = "fsdp" in kinds
        if sharded and pipe._ties:
            raise ValueError(
                "parameters tied across stages cannot be sharded over replicas: change balance= "
                "so that the layers that share them are in one stage, or use "
                "DistributedDataParallel"
            )
        averaged = world.replicas > 1 and set(kinds) != {"none"}
        return Replicas(pipe, world, sharded) if averaged else None

    def require_whole(self, what: str) -> None:
        """Raise ``ValueError`` where each replica holds a part of each parameter."""
        if self._sharded:
            raise ValueError(
                f"{what} takes stages that hold whole parameters, and these are sharded over "
                "replicas: gather the weights by pipe.state_dict(), called by all drivers, and "
                "save those"
            )

    def require_unbroken(self) -> None:
        """Raise ``RuntimeError`` if the replicas have lost each other."""
        if self._broken is not None:
            raise RuntimeError(
                "the replicas of this pipe are not in step any more, since an earlier step failed "
                f"in a way that cannot be made up for ({self._broken}): end this run, and start "
                "again from what was saved"
            )

    def succeed(self, step: int) -> None:
        """The step has ended well here.

        Raises:
            RuntimeError: it has failed in another replica.
        """
        try:
            failed = self._agree(False)
        except RuntimeError as exc:
            self.lose(str(exc))
            raise
        if failed:
            raise RuntimeError(
                f"step {step} failed in replica {failed[0]}, whose driver says why; its gradients "
                "are of no use in this replica either: zero them, and go on with the next step"
            )

    def fail(self, step: int, why: str) -> None:
        """The step has failed here."""
        try:
            self._everywhere("make up for a failed step", make_up, step)
            self._agree(True)
        except RuntimeError as exc:  # a StageError, or that of a replica that is gone
            self.lose(f"{why}; {exc}")

    def lose(self, why: str) -> None:
        """The step has ended here in a way that cannot be made up for."""
        self._broken = why

    def _agree(self, failed: bool) -> list[int]:
        """The replicas whose step has failed; called by all drivers at the end of a step."""
        flags = torch.zeros(self._world.replicas, dtype=torch.int32)
        flags[self._world.replica] = failed
        group = groups.current().steps
        assert group is not None
        _all_reduce(flags, group)
        return flags.nonzero().flatten().tolist()


def average(value: Any, replicas: int) -> Any:
    """See `World.all_reduce`."""
    if replicas == 1:
        return value
    tensor = value.detach() if isinstance(value, Tensor) else torch.tensor(value)
    dtype = tensor.dtype if tensor.is_floating_point() or tensor.is_complex() else torch.float64
    number = not isinstance(value, Tensor)
    total = tensor.to("cpu", torch.float64 if number else dtype, copy=True).contiguous()
    group = groups.current().drivers
    if group is None:
        raise RuntimeError("world.all_reduce averages over the drivers: call it in the driver")
    _all_reduce(total, group)
    total.div_(replicas)
    return total.item() if number else total.to(tensor.device)


def gather(data: bytes, replicas: int, what: str) -> list[bytes]:
    """What each driver has given, by replica; called by all of them.

    Args:
        what: they are to do; told if they do not for some time.
    """
    group = groups.current().drivers
    assert group is not None
    given = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    with _telling_after(PATIENCE, f"this driver waits for those of the other replicas to {what}"):
        sizes = _all_gather(torch.tensor([len(data)]), replicas, group)
        longest = int(max(sizes))
        padded = torch.nn.functional.pad(given, (0, longest - len(data)))
        found = _all_gather(padded, replicas, group)
    return [bytes(t[: int(n)].numpy().tobytes()) for t, n in zip(found, sizes, strict=True)]


@contextmanager
def _telling_after(seconds: float, what: str) -> Iterator[None]:
    timer = threading.Timer(seconds, log.logger.warning, [what])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _all_gather(tensor: Tensor, replicas: int, group: dist.ProcessGroup) -> list[Tensor]:
    found = [torch.empty_like(tensor) for _ in range(replicas)]
    work: Any = dist.all_gather(found, tensor, group=group, async_op=True)
    transport.wait(work.get_future(), "the drivers of the other replicas")
    return found


def _all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> None:
    work: Any = dist.all_reduce(tensor, group=group, async_op=True)
    transport.wait(work.get_future(), "the drivers of the other replicas")
