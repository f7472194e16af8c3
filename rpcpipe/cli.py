"""rpcpipe-run: torchrun's flags and a few more, made into a LaunchConfig for torch's elastic."""

from __future__ import annotations

import argparse
import os
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.argparse_util import check_env, env
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from rpcpipe import counts, rendezvous
from rpcpipe.launched import Wishes
from rpcpipe.world import DRIVERS, Replicas

__all__ = ["main", "parser"]


def parser() -> argparse.ArgumentParser:
    """torchrun's own parser, with what a pipeline adds."""
    made: argparse.ArgumentParser = torchrun.get_args_parser()
    made.prog = "rpcpipe-run"
    made.description = (
        "Start a script that calls rpcpipe.run(). All flags of torchrun, and those of pipelines; "
        "each may also be given as an environment variable PET_<FLAG>."
    )
    if "PET_NPROC_PER_NODE" not in os.environ:
        made.set_defaults(nproc_per_node=None)  # torchrun's default is one; here it follows
    new = made.add_argument_group("pipelines")
    new.add_argument("--stages", action=env, type=int, help="stages of each pipeline")
    new.add_argument(
        "--replicas",
        action=env,
        type=number_or_auto,
        help="number of pipelines, or auto for as many as the nodes that are there have processes "
        "for (default: 1)",
    )
    new.add_argument(
        "--layout",
        action=env,
        default="pipe-inner",
        choices=("pipe-inner", "dp-inner"),
        help="what shares a host first: a pipeline's stages, or a stage's replicas",
    )
    new.add_argument(
        "--driver",
        action=env,
        default="auto",
        choices=DRIVERS,
        help="whether a driver shares the first stage's process or has its own (default: what "
        "fits the number of processes, and shared where both do)",
    )
    new.add_argument(
        "--no-pin", "--no_pin", action=check_env, help="leave it to the kernel where stages run"
    )
    new.add_argument("--share-gpu", "--share_gpu", action=check_env, help="let stages share a GPU")
    return made


def number_or_auto(text: str) -> Replicas:
    return "auto" if text == "auto" else int(text)


def _check(args: argparse.Namespace) -> counts.Nodes:
    """Refuse what does not fit, and fill in what follows; returns the numbers of nodes."""
    for name in ("stages", "replicas"):
        value = getattr(args, name)
        if value not in (None, "auto") and value < 1:
            raise ValueError(f"--{name} is at least 1, got {value}")
    nodes = _nodes(args)
    given = None
    if args.nproc_per_node is not None:
        given = torchrun.determine_local_world_size(args.nproc_per_node)
    replicas = args.replicas or 1
    count = counts.processes_per_node(args.stages, replicas, args.driver, nodes, given)
    if args.stages is not None and replicas == "auto" and nodes[0] < nodes[1]:
        args.driver = counts.driver_for_all(args.stages, args.driver, nodes, count)
    args.nproc_per_node = str(count)
    return nodes


def _nodes(args: argparse.Namespace) -> counts.Nodes:
    """The least and the most nodes, by ``--nnodes``."""
    least, _, most = args.nnodes.partition(":")
    most = most or least
    if not (least.isdecimal() and most.isdecimal() and 0 < int(least) <= int(most)):
        raise ValueError(
            "--nnodes is a number of at least 1, or MIN:MAX with MIN of at most MAX; got "
            f"{args.nnodes!r}"
        )
    if args.standalone and int(most) > 1:
        raise ValueError(f"--standalone is for one node, got --nnodes {args.nnodes}")
    if least != most and args.rdzv_backend == "static":
        raise ValueError(
            f"--nnodes {args.nnodes} takes a rendezvous that nodes join and leave: give "
            "--rdzv-backend c10d, and by --rdzv-endpoint a host that stays"
        )
    return int(least), int(most)


@contextmanager
def _own_threads() -> Iterator[None]:
    """Have torchrun leave OMP_NUM_THREADS alone: ``run`` sets threads in each stage."""
    if "OMP_NUM_THREADS" in os.environ:
        yield
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]


def configure(args: argparse.Namespace) -> tuple[LaunchConfig, Any, list[str]]:
    """What elastic is to launch: its configuration, the command and its arguments.

    Sets the environment that the processes are to have.

    Raises:
        ValueError: the flags do not fit each other, or this machine's network.
    """
    one_node = _check(args)[1] == 1
    unaddressed = args.rdzv_backend == "static" and not args.rdzv_endpoint
    if args.standalone or (one_node and unaddressed and args.master_port is None):
        args.rdzv_backend, args.rdzv_endpoint = "static", f"{rendezvous.LOOPBACK}:0"
        args.rdzv_id, args.node_rank = uuid.uuid4().hex, 0
    if args.master_port is None:
        args.master_port = 29500
    wishes = Wishes(
        args.stages, args.replicas, args.driver, args.layout, not args.no_pin, args.share_gpu
    )
    os.environ.update(wishes.to_env())
    # The stores warn of each peer whose name does not resolve.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with _own_threads():
        config, command, command_args = torchrun.config_from_args(args)
    rendezvous.adopt(config)
    return config, command, command_args


def main(argv: Sequence[str] | None = None) -> None:
    """The console script."""
    made = parser()
    args = made.parse_args(argv)
    # Errors of processes go through files, and torch would leave the folder.
    with tempfile.TemporaryDirectory(prefix="rpcpipe-run-") as errors:
        if (args.log_dir, args.redirects, args.tee) == (None, "0", "0"):
            args.log_dir = errors
        try:
            config, command, command_args = configure(args)
        except ValueError as exc:
            made.exit(2, f"rpcpipe-run: {exc}\n")
        _launch(config, command, command_args)


@record
def _launch(config: LaunchConfig, command: Any, command_args: list[str]) -> None:
    elastic_launch(config, command)(*command_args)


if __name__ == "__main__":
    main()
