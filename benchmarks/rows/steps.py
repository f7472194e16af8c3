"""Steps: the time of a training step beside the limit of the machine and beside the peers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median

import torch
from torch import Tensor

import rpcpipe
from benchmarks import workloads
from benchmarks.children import Group
from benchmarks.harness import even
from benchmarks.limit import Limit, describe, limits
from benchmarks.peers import Peer
from benchmarks.peers.chain import Chain
from benchmarks.peers.gpipe import TorchGPipe
from benchmarks.peers.one import One
from benchmarks.peers.pipelining import Pipelining
from benchmarks.record import Result

N = 2
IN_STAGE = "ours, loss in the last stage"
MODES = ("never", "except_last")
TARGETS = {"limit": 1.05, "torch pipelining": 0.90, "torchgpipe": 0.65}


class Ours:
    """A pipe in the world of this process, with the interface of the peers."""

    def __init__(self, world: rpcpipe.World, workload: str, mode: str, quick: bool) -> None:
        work = workloads.ALL[workload]
        model = work.model()
        self.n, self.x = world.stages, work.batch(quick)
        self.pipe = rpcpipe.Pipe(
            model,
            world,
            balance=even(len(model), world.stages),
            chunks=workloads.M,
            checkpoint=mode,
        )

    def step(self) -> None:
        workloads.loss(self.pipe(self.x)).backward()

    def time(self) -> float:
        start = time.perf_counter()
        self.step()
        return time.perf_counter() - start

    def gradients(self) -> dict[str, Tensor]:
        each = [self.pipe.apply_to_stage(j, workloads.gradients) for j in range(self.n)]
        self.pipe.zero_grad()
        return {name: gradient for stage in each for name, gradient in stage.items()}


def step_with_loss_in_stage(ours: Ours) -> None:
    """The same step with the loss in the last stage, so that outputs do not travel."""
    nothing = ours.x[:, :0]  # a target for each row, and no bytes to send
    ours.pipe.loss(ours.x, nothing, _loss, reduction="sum").backward()


def time_with_loss_in_stage(ours: Ours) -> float:
    start = time.perf_counter()
    step_with_loss_in_stage(ours)
    return time.perf_counter() - start


def _loss(output: Tensor, _: Tensor) -> Tensor:
    return workloads.loss(output)


# ---------------------------------------------------------------------------------- the peers

PEERS: dict[str, tuple[type[Peer], int]] = {  # with the number of processes for n stages
    "torch pipelining": (Pipelining, N),
    "torchgpipe": (TorchGPipe, 1),
    "RPC chain": (Chain, N + 1),
    "one core": (One, 1),
}


@contextmanager
def peers(names: Sequence[str] = tuple(PEERS)) -> Iterator[dict[str, Group]]:
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(Group(actor, count))
            for name, (actor, count) in PEERS.items()
            if name in names
        }


def gradients_of(group: Group) -> dict[str, Tensor]:
    return {k: g for each in group.call("gradients") for k, g in each.items()}


def timed(group: Group) -> float:
    """Seconds of a peer's step: of its slowest process."""
    return float(max(group.call("time")))


def check_same(name: str, found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """The same work is timed only if the same gradients come of it."""
    assert found.keys() == wanted.keys(), f"{name}: {sorted(found.keys() ^ wanted.keys())}"
    for key in wanted:
        torch.testing.assert_close(
            found[key],
            wanted[key],
            rtol=1e-4,
            atol=1e-4 * wanted[key].abs().max().item(),
            msg=lambda m, key=key: f"{name}, {key}: {m}",
        )


# --------------------------------------------------------------------------------- the row


class Case:
    """One workload in one mode: everybody has it, and takes turns."""

    def __init__(
        self,
        world: rpcpipe.World,
        others: dict[str, Group],
        alone: Group,
        workload: str,
        mode: str,
        quick: bool,
    ) -> None:
        self.name = f"{workload}, {mode}"
        self.ours = Ours(world, workload, mode, quick)
        self.others = others
        for group in others.values():
            group.call("load", workload, world.stages, mode, quick)
        self.limit = Limit(alone, workload, world.stages, mode, quick)
        self._check()
        self.variants: dict[str, Callable[[], float]] = {"ours": self.ours.time}
        self.variants[IN_STAGE] = lambda: time_with_loss_in_stage(self.ours)
        self.variants |= {name: lambda g=group: timed(g) for name, group in others.items()}

    def _check(self) -> None:
        self.ours.step()
        wanted = self.ours.gradients()
        step_with_loss_in_stage(self.ours)
        check_same(IN_STAGE, self.ours.gradients(), wanted)
        for name, group in self.others.items():
            if name != "RPC chain":  # its gradients are in a context that only its step knows
                group.call("step")
            check_same(name, gradients_of(group), wanted)

    def measure(self, rounds: int) -> dict[str, float]:
        """Medians, in seconds; ``limit`` among them."""
        times: dict[str, list[float]] = {name: [] for name in self.variants}
        for once in self.variants.values():
            once()  # not counted
        for _ in range(rounds):
            self.limit.sample(0.25)
            for name, once in self.variants.items():
                times[name].append(once())
        return {**{k: median(v) for k, v in times.items()}, "limit": self.limit.seconds()}


def results(case: Case, found: dict[str, float]) -> list[Result]:
    best = found["limit"]
    ours = found["ours"]
    made = [
        Result(
            f"{case.name}: ours / limit",
            ours / best,
            TARGETS["limit"],
            detail={
                "ours_ms": ours * 1e3,
                "limit_ms": best * 1e3,
                "stages F/B/R ms": describe(case.limit.costs()),
            },
        )
    ]
    made += [
        Result(
            f"{case.name}: {name} / limit",
            seconds / best,
            TARGETS["limit"] if name == IN_STAGE else None,
            detail={"ms": seconds * 1e3},
        )
        for name, seconds in found.items()
        if name not in ("ours", "limit")
    ]
    for who, seconds in (("ours", ours), (IN_STAGE, found[IN_STAGE])):
        made += [
            Result(f"{case.name}: {who} / {name}", seconds / found[name], TARGETS.get(name))
            for name in case.others
        ]
    return made


def measure(world: rpcpipe.World, quick: bool) -> list[Result]:
    chosen = ["mlp"] if quick else list(workloads.ALL)
    rounds, made = (2 if quick else 7), []
    torch.set_num_threads(1)
    with peers() as others, limits(world.stages) as alone:
        for workload in chosen:
            for mode in MODES:
                case = Case(world, others, alone, workload, mode, quick)
                made += results(case, case.measure(rounds))
    return made


def run(quick: bool) -> list[Result]:
    return rpcpipe.run(measure, quick, stages=N) or []
