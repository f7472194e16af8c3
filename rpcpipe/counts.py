"""Counts: how many processes a node starts, and what follows from the number of nodes."""

from __future__ import annotations

from rpcpipe.world import Replicas

__all__ = ["Nodes", "driver_for_all", "processes_per_node"]

Nodes = tuple[int, int]  # the least and the most that a job runs on


def processes_per_node(
    stages: int | None, replicas: Replicas, driver: str, nodes: Nodes, given: int | None
) -> int:
    """How many processes a node starts.

    Args:
        given: ``--nproc-per-node``, or ``None`` to have it derived.

    Raises:
        ValueError: the numbers do not fit, for all numbers of nodes; the message has the
            arithmetic.
    """
    if stages is None:
        if given is None:
            raise ValueError("how many processes? give --stages, or --nproc-per-node")
        if replicas != "auto" and _vary(nodes):
            _check_stages_follow(replicas, driver, nodes, given)
        return given
    if replicas == "auto":
        given = stages + (driver == "dedicated") if given is None else given
        driver_for_all(stages, driver, nodes, given)
        return given
    if _vary(nodes):
        raise ValueError(_one_has_to_follow(stages, replicas, nodes))
    return _divided(stages, replicas, driver, nodes[1], given)


def driver_for_all(stages: int, driver: str, nodes: Nodes, per_node: int) -> str:
    """Where drivers are that follow the nodes: in the same place for any number of them.

    Of six processes, three pipelines of two stages could be made, and of three one with a driver of
    its own: a job that loses a node of two must not change from one to the other.

    Raises:
        ValueError: there is a number of nodes without whole pipelines.
    """
    sizes = {"shared": stages, "dedicated": stages + 1}
    for kind, size in sizes.items():
        totals = [count * per_node for count in range(nodes[0], nodes[1] + 1)]
        if driver in ("auto", kind) and not any(total % size for total in totals):
            return kind
    shared = f"{stages} processes (drivers share the first stage's)"
    dedicated = f"{stages} + 1 = {stages + 1} processes (drivers have their own)"
    takes = {"shared": shared, "dedicated": dedicated}.get(driver, f"{shared} or {dedicated}")
    raise ValueError(
        f"with --replicas auto there are whole pipelines alone, and each takes {takes}; "
        f"{_products(nodes, per_node)}: change --nproc-per-node, --stages or --driver, or leave "
        "--nproc-per-node out to have one pipeline on each node"
    )


def _vary(nodes: Nodes) -> bool:
    return nodes[0] < nodes[1]


def _products(nodes: Nodes, per_node: int) -> str:
    """The arithmetic, ``1 node(s) x 3 = 3, 2 node(s) x 3 = 6 processes``."""
    counts = range(nodes[0], nodes[1] + 1)
    shown = [f"{count} node(s) x {per_node} = {count * per_node}" for count in counts]
    if len(shown) > 3:
        shown[2:-1] = ["..."]
    return ", ".join(shown) + " processes"


def _check_stages_follow(replicas: int, driver: str, nodes: Nodes, given: int) -> None:
    """As many stages as the processes of the nodes that are there make up."""
    own = driver == "dedicated"
    if given % replicas or nodes[0] * given // replicas - own < 1:
        also = ", a driver and at least one stage" if own else ""
        raise ValueError(
            f"without --stages they follow from the processes, of which {replicas} pipeline(s) "
            f"have the same number each{also}; {_products(nodes, given)}: change --nproc-per-node "
            "or --replicas"
        )


def _one_has_to_follow(stages: int, replicas: int, nodes: Nodes) -> str:
    least, most = nodes
    return (
        f"{replicas} pipeline(s) of {stages} stages are the same number of processes on {least} "
        f"node(s) as on {most}, and with --nnodes {least}:{most} there are fewer on fewer nodes: "
        "give --replicas auto to have fewer pipelines then, or leave out --stages to have fewer "
        "stages"
    )


def _divided(stages: int, replicas: int, driver: str, nodes: int, given: int | None) -> int:
    totals = {"shared": replicas * stages, "dedicated": replicas * (stages + 1)}
    allowed = [total for kind, total in totals.items() if driver in ("auto", kind)]
    if given is None:
        fitting = [total for total in allowed if total % nodes == 0]
        if fitting:
            return fitting[0] // nodes
    elif given * nodes in allowed or (nodes > 1 and given + nodes - 1 <= max(allowed)):
        return given  # nodes may start different numbers; the world will count all of them
    raise ValueError(_arithmetic(stages, replicas, driver, nodes, given))


def _arithmetic(stages: int, replicas: int, driver: str, nodes: int, given: int | None) -> str:
    total, more = replicas * stages, replicas * (stages + 1)
    shared = f"{replicas} x {stages} = {total} processes (drivers share the first stage's)"
    dedicated = f"{replicas} x ({stages} + 1) = {more} processes (drivers have their own)"
    takes = {"shared": shared, "dedicated": dedicated}.get(driver, f"{shared} or {dedicated}")
    question = f"{replicas} pipeline(s) of {stages} stages take {takes}; "
    if given is None:
        return question + (
            f"that does not divide over {nodes} nodes: change --nnodes, --stages, --replicas or "
            "--driver, or give --nproc-per-node on each node"
        )
    return question + (
        f"{nodes} node(s) x {given} = {nodes * given} processes: change --nproc-per-node, "
        "--stages, --replicas or --driver, or leave --nproc-per-node out to have it derived"
    )
