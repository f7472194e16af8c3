"""How a job is launched on one machine: flags, roles, cores and GPUs, who may connect, recipes."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from hosts import RECIPES, RUN, put_on_path
from hypothesis import given
from hypothesis import strategies as st
from test_run import Ended, Lab, await_line, lab
from torch import nn

import rpcpipe
from rpcpipe import cli, counts, network
from rpcpipe.launched import Launched, Wishes, first_host
from rpcpipe.placement import Arrival, divide_cores, divide_gpus, quota, roles, seats
from rpcpipe.world import Layout

__all__ = ["lab"]  # a fixture


# --------------------------------------------------------------------------------------- roles


def arrive(*hosts: tuple[str, int], **same: Any) -> list[Arrival]:
    """Processes in the order of their ranks: a host's name and how many it has."""
    places = [(host, str(i), k) for i, (host, count) in enumerate(hosts) for k in range(count)]
    return [Arrival(r, host, node, k, **same) for r, (host, node, k) in enumerate(places)]


def describe(arrivals: list[Arrival], layout: Layout, inner: str = "pipe-inner") -> list[str]:
    """The processes by role, a word for each pipeline: ``a0a1 b0b1``."""
    found = dict(zip(roles(arrivals, layout, inner), arrivals, strict=True))
    words = [f"{found[role].host}{found[role].local_rank}" for role in range(layout.world_size)]
    n = layout.ranks_per_pipeline
    return ["".join(words[k : k + n]) for k in range(0, len(words), n)]


def test_roles_follow_hosts_and_not_ranks() -> None:
    shared = Layout(4, 1, dedicated=False)
    assert describe(arrive(("a", 2), ("b", 2)), shared) == ["a0a1b0b1"]
    assert describe(arrive(("b", 2), ("a", 2)), shared) == ["a0a1b0b1"]
    assert describe(arrive(("n10", 2), ("n9", 2)), shared) == ["n90n91n100n101"]
    assert describe(arrive(("a", 1), ("b", 2)), Layout(2, 1, dedicated=True)) == ["a0b0b1"]
    same_name = describe(arrive(("a", 1), ("a", 1)), Layout(2, 1, dedicated=False))
    assert same_name == ["a0a0"]


def test_the_order_of_hosts_that_the_user_has_given_counts() -> None:
    arrivals = [Arrival(0, "a", "0", 0, place=1), Arrival(1, "b", "1", 0, place=0)]
    assert describe(arrivals, Layout(2, 1, dedicated=False)) == ["b0a0"]


def test_ranks_are_kept_where_the_script_has_made_process_groups_by_them() -> None:
    arrivals = arrive(("b", 1), ("a", 1), grouped=True)
    assert describe(arrivals, Layout(2, 1, dedicated=False)) == ["b0a0"]


def test_neighbours_share_a_host_when_they_can() -> None:
    pairs = Layout(2, 2, dedicated=False)
    assert describe(arrive(("a", 2), ("b", 2)), pairs) == ["a0a1", "b0b1"]
    assert describe(arrive(("a", 2), ("b", 2)), pairs, "dp-inner") == ["a0b0", "a1b1"]
    assert describe(arrive(("a", 1), ("b", 2), ("c", 1)), pairs) == ["a0c0", "b0b1"]
    assert describe(arrive(("a", 3), ("b", 3)), Layout(2, 3, dedicated=False)) == [
        "a0a1", "a2b2", "b0b1",
    ]  # fmt: skip


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=5),
    st.integers(1, 3),
    st.sampled_from(["pipe-inner", "dp-inner"]),
    st.randoms(use_true_random=False),
)
def test_each_role_is_taken_once_whatever_the_ranks(
    sizes: list[int], replicas: int, inner: str, random: Any
) -> None:
    sizes[-1] += -sum(sizes) % replicas
    hosts = [(f"host{i}", size) for i, size in enumerate(sizes)]
    layout = Layout(sum(sizes) // replicas, replicas, dedicated=False)
    arrivals = arrive(*hosts)
    found = roles(arrivals, layout, inner)
    assert sorted(found) == list(range(layout.world_size))
    shuffled = list(range(len(arrivals)))
    random.shuffle(shuffled)
    again = [
        Arrival(rank, arrivals[old].host, arrivals[old].node, arrivals[old].local_rank)
        for rank, old in enumerate(shuffled)
    ]
    assert roles(again, layout, inner) == [found[old] for old in shuffled]


# -------------------------------------------------------------------------- cores and devices


def stages_on(count: int, **same: Any) -> list[Arrival]:
    return arrive(("a", count), **same)


def test_cores_are_disjoint_and_stay_in_a_numa_node() -> None:
    numa = [[0, 1, 2, 3, 8, 9], [4, 5, 6, 7]]
    two = divide_cores(stages_on(2, cores=range(10), numa=numa))
    assert two == ([[0, 1, 2, 3, 8, 9], [4, 5, 6, 7]], None)
    three = divide_cores(stages_on(3, cores=range(10), numa=numa))
    assert three == ([[0, 1, 2], [3, 8, 9], [4, 5, 6, 7]], None)
    one = divide_cores(stages_on(1, cores=range(10), numa=numa))
    assert one == ([[0, 1, 2, 3, 8, 9, 4, 5, 6, 7]], None)
    taskset = divide_cores(stages_on(2, cores=[2, 5, 7], numa=numa))
    assert taskset == ([[2], [5, 7]], None)


def test_cores_that_a_launcher_has_given_are_kept() -> None:
    bound = [Arrival(0, "a", "0", 0, cores=[0, 4]), Arrival(1, "a", "0", 1, cores=[1, 5])]
    assert divide_cores(bound) == ([[0, 4], [1, 5]], None)
    partly = [Arrival(0, "a", "0", 0, cores=[0, 4]), Arrival(1, "a", "0", 1, cores=[4, 5])]
    found, warning = divide_cores(partly)
    assert found is None
    assert warning == "stages on host a are not pinned: their cores overlap partly"


def test_more_stages_than_cores_is_one_warning_and_no_pinning() -> None:
    found, warnings = seats(stages_on(3, cores=[0, 1]), Layout(3, 1, False), pin=True)
    assert [(s.cores, s.threads) for s in found] == [(None, 1)] * 3
    assert len(warnings) == 1
    assert warnings[0].startswith("host a has 3 stages for 2 cores: they take turns")
    _, (warning,) = seats(stages_on(3, cores=range(8), quota=2.0), Layout(3, 1, False), pin=True)
    assert "8 cores and a quota of 2" in warning
    assert seats(stages_on(3, cores=[0, 1]), Layout(3, 1, False))[1] == []


def test_threads_are_as_many_as_cores_or_as_the_quota_allows() -> None:
    layout = Layout(2, 1, dedicated=False)
    found, _ = seats(stages_on(2, cores=range(8)), layout, pin=True)
    assert [s.threads for s in found] == [4, 4]
    found, _ = seats(stages_on(2, cores=range(8), quota=5.0), layout, pin=True)
    assert [s.threads for s in found] == [2, 2]
    found, _ = seats(stages_on(3, cores=range(8)), Layout(2, 1, dedicated=True))
    assert [s.threads for s in found] == [8, 4, 4]


def test_the_quota_is_the_least_of_the_control_groups_around_a_process(tmp_path: Path) -> None:
    def groups(self: str, limits: dict[str, str]) -> float | None:
        root = tmp_path / str(len(list(tmp_path.iterdir())))
        for name, text in {"proc/self/cgroup": self, **limits}.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        return quota(root)

    v2, v1 = "sys/fs/cgroup", "sys/fs/cgroup/cpu"
    service = {f"{v2}/a.slice/cpu.max": "150000 100000", f"{v2}/a.slice/b/cpu.max": "max 100000"}
    assert groups("0::/a.slice/b\n", service) == 1.5
    assert groups("0::/\n", {f"{v2}/cpu.max": "50000 100000\n"}) == 0.5
    assert groups("0::/a.slice\n", {f"{v2}/cpu.max": "max 100000"}) is None
    container = {f"{v1}/cpu.cfs_quota_us": "300000", f"{v1}/cpu.cfs_period_us": "100000"}
    assert groups("5:cpu,cpuacct:/docker/17\n1:cpuset:/\n0::/\n", container) == 3.0
    unlimited = {**container, f"{v1}/cpu.cfs_quota_us": "-1\n"}
    assert groups("5:cpu,cpuacct:/\n", unlimited) is None


def test_each_stage_has_a_gpu_by_the_index_its_process_sees() -> None:
    assert divide_gpus(stages_on(2, gpus=["4", "6"]), share=False) == [0, 1]
    srun = [Arrival(0, "a", "0", 0, gpus=["4"]), Arrival(1, "a", "0", 1, gpus=["6"])]
    assert divide_gpus(srun, share=False) == [0, 0]
    overlapping = [Arrival(0, "a", "0", 0, gpus=["4"]), Arrival(1, "a", "0", 1, gpus=["4", "6"])]
    assert divide_gpus(overlapping, share=False) == [0, 1]
    assert divide_gpus(stages_on(2), share=False) == [None, None]
    with pytest.raises(ValueError, match=r"host a has 3 stages and 2 visible GPUs \(4, 6\)"):
        divide_gpus(stages_on(3, gpus=["4", "6"]), share=False)
    assert divide_gpus(stages_on(5, gpus=["4", "6"]), share=True) == [0, 1, 0, 1, 0]
    found, _ = seats(stages_on(3, gpus=["0", "1"]), Layout(2, 1, dedicated=True))
    assert [s.device for s in found] == ["cpu", "cuda:0", "cuda:1"]


def current_device(stage: nn.Module) -> int:
    return torch.cuda.current_device()


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="takes two NVIDIA GPUs")
@pytest.mark.parametrize("world", [2], indirect=True)
def test_a_layer_that_says_cuda_means_the_gpu_of_its_stage(world: rpcpipe.World) -> None:
    pipe = rpcpipe.Pipe(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), world, balance=[1, 1])
    wanted = [world.device(j).index for j in range(2)]
    assert [pipe.apply_to_stage(j, current_device) for j in range(2)] == wanted


# --------------------------------------------------------------------------------------- flags


ONE, TWO, ONE_OR_TWO = (1, 1), (2, 2), (1, 2)  # nodes


def test_processes_per_node_are_derived() -> None:
    assert counts.processes_per_node(4, 1, "auto", TWO, None) == 2
    assert counts.processes_per_node(3, 1, "auto", TWO, None) == 2  # with a driver of its own
    assert counts.processes_per_node(3, 2, "dedicated", ONE, None) == 8
    assert counts.processes_per_node(None, 1, "auto", TWO, 3) == 3
    assert counts.processes_per_node(2, 1, "auto", TWO, 1) == 1


def test_replicas_or_stages_follow_the_nodes_that_are_there() -> None:
    assert counts.processes_per_node(2, "auto", "auto", ONE_OR_TWO, None) == 2
    assert counts.processes_per_node(2, "auto", "dedicated", ONE_OR_TWO, None) == 3
    assert counts.processes_per_node(2, "auto", "auto", ONE_OR_TWO, 4) == 4
    assert counts.processes_per_node(4, "auto", "auto", TWO, 2) == 2  # each over both nodes
    assert counts.processes_per_node(None, 2, "auto", ONE_OR_TWO, 2) == 2
    assert counts.processes_per_node(None, "auto", "auto", ONE_OR_TWO, 3) == 3  # run(stages=) says
    for world_size, replicas in ((2, 1), (6, 3)):
        assert Layout.of(world_size, 2, "auto", "auto") == Layout(2, replicas, dedicated=False)
    assert Layout.of(3, 2, "auto", "auto") == Layout(2, 1, dedicated=True)
    assert Layout.of(6, 2, "auto", "dedicated") == Layout(2, 2, dedicated=True)
    with pytest.raises(ValueError, match=r"each pipeline of 2 stages takes 2 .* or 3 .* started 5"):
        Layout.of(5, 2, "auto", "auto")
    with pytest.raises(ValueError, match=r"replicas='auto' counts pipelines .* give stages="):
        Layout.of(4, None, "auto", "auto")


def test_drivers_stay_where_they_are_when_a_node_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six processes would be three pipelines whose drivers share the first stage's."""
    monkeypatch.setattr(os, "environ", os.environ.copy())  # which flags are put into
    flags = ("--stages=2", "--replicas=auto", "--nproc-per-node=3", "--nnodes=1:2")
    where = ("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "train.py")
    cli.configure(cli.parser().parse_args([*flags, *where]))
    wishes = Wishes.find(os.environ)
    assert (wishes.replicas, wishes.driver) == ("auto", "dedicated")
    assert wishes.merge(None, 1, "auto") == (2, "auto", "dedicated")
    with pytest.raises(ValueError, match=r"says run\(replicas=2\) and rpcpipe-run .* says 'auto'"):
        wishes.merge(None, 2, "auto")
    assert Wishes(replicas=2).merge(2, "auto", "auto") == (2, 2, "auto")


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((4, 1, "auto", (3, 3), None),
         "1 x 4 = 4 processes .* or 1 x (4 + 1) = 5 .* over 3 nodes"),
        ((2, 2, "shared", ONE, 3),
         "2 x 2 = 4 processes (drivers share the first stage's); 1 node(s) x 3 = 3 processes"),
        ((2, 1, "auto", TWO, 9), "2 node(s) x 9 = 18 processes"),
        ((None, 1, "auto", ONE, None), "give --stages, or --nproc-per-node"),
        ((2, 2, "auto", ONE_OR_TWO, 2), "2 pipeline(s) of 2 stages are the same number of "
         "processes on 1 node(s) as on 2, .* give --replicas auto .* or leave out --stages"),
        ((2, "auto", "auto", (1, 5), 5), "2 processes (drivers share the first stage's) or 2 + 1 = "
         "3 processes (drivers have their own); 1 node(s) x 5 = 5, 2 node(s) x 5 = 10, ..., "
         "5 node(s) x 5 = 25 processes"),
        ((4, "auto", "auto", (2, 4), 2), "2 node(s) x 2 = 4, 3 node(s) x 2 = 6, "),
        ((None, 2, "auto", ONE_OR_TWO, 3),
         "2 pipeline(s) have the same number each; 1 node(s) x 3 = 3, 2 node(s) x 3 = 6"),
        ((None, 1, "dedicated", ONE_OR_TWO, 1),
         "1 pipeline(s) have the same number each, a driver and at least one stage; 1 node(s) x 1"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_the_arithmetic(
    numbers: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message).replace(r"\.\*", ".*")):
        counts.processes_per_node(*numbers)


def test_flags_are_torchruns_and_may_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    theirs = cli.torchrun.get_args_parser()._option_string_actions
    ours = cli.parser()._option_string_actions
    assert theirs.keys() < ours.keys()
    added = {name.replace("_", "-") for name in ours.keys() - theirs.keys()}
    assert added == {"--stages", "--replicas", "--layout", "--driver", "--no-pin", "--share-gpu"}
    monkeypatch.setenv("PET_NNODES", "3")
    monkeypatch.setenv("PET_STAGES", "6")
    monkeypatch.setenv("PET_NO_PIN", "1")
    args = cli.parser().parse_args(["--node_rank", "2", "train.py", "--stages", "x"])
    assert (args.nnodes, args.stages, args.no_pin, args.node_rank) == ("3", 6, True, 2)
    assert args.training_script_args == ["--stages", "x"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--stages=0"], "--stages is at least 1, got 0"),
        (["--stages=2", "--nnodes=2:1"], "--nnodes is a number of at least 1, or MIN:MAX with"),
        (["--stages=2", "--nnodes=a:2"], "--nnodes is a number of at least 1, or MIN:MAX with"),
        (["--stages=2", "--nnodes=1:2", "--replicas=auto"], "--nnodes 1:2 takes a rendezvous that"),
        (["--stages=2", "--replicas=0"], "--replicas is at least 1, got 0"),
        (["--stages=2", "--nnodes=2", "--standalone"], "--standalone is for one node"),
        (["--stages=2", "--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=nobody.invalid:1"],
         "the name of the rendezvous host 'nobody.invalid' does not resolve"),
    ],
)  # fmt: skip
def test_wrong_flags_are_one_line(
    flags: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())  # which flags are put into
    with pytest.raises(SystemExit) as exit:
        cli.main([*flags, "train.py"])
    shown = capsys.readouterr().err
    assert exit.value.code == 2
    assert shown.startswith(f"rpcpipe-run: {message}")
    assert shown.count("\n") == 1


def test_a_script_may_not_contradict_the_launcher() -> None:
    wishes = Wishes.find({"RPCPIPE_STAGES": "3", "RPCPIPE_REPLICAS": "", "RPCPIPE_DRIVER": "auto"})
    assert wishes.merge(None, 2, "shared") == (3, 2, "shared")
    assert wishes.merge(3, 1, "auto") == (3, 1, "auto")
    with pytest.raises(ValueError, match=r"says run\(stages=2\) and rpcpipe-run .* says 3"):
        wishes.merge(2, 1, "auto")
    with pytest.raises(ValueError, match="RPCPIPE_STAGES is a whole number of at least 1"):
        Wishes.find({"RPCPIPE_STAGES": "two"})
    with pytest.raises(ValueError, match="RPCPIPE_LAYOUT is pipe-inner or dp-inner"):
        Wishes.find({"RPCPIPE_LAYOUT": "inner"})
    asked = Wishes(2, None, "shared", "dp-inner", True, False)
    assert Wishes.find(asked.to_env()) == asked


# ------------------------------------------------------------------------ the environment

SLURM = {
    "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
}  # fmt: skip


def test_slurms_variables_are_read_where_there_is_no_other_launcher() -> None:
    found = Launched.find(SLURM)
    assert found is not None
    assert (found.rank, found.world_size, found.local_rank, found.place) == (3, 4, 1, 1)
    assert (found.master, found.job, found.served, found.single_host) == (
        "gpu07",
        "4711.0",
        False,
        False,
    )
    assert 10000 <= found.port < 30000
    assert Launched.find({**SLURM, "SLURM_STEP_ID": "1"}).port != found.port  # type: ignore[union-attr]
    chosen = Launched.find({**SLURM, "MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "77"})
    assert chosen is not None
    assert (chosen.master, chosen.port) == ("10.0.0.9", 77)
    batch_script = {k: v for k, v in SLURM.items() if k != "SLURM_STEP_ID"}
    assert Launched.find(batch_script) is None
    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    found = Launched.find({**SLURM, **torchrun})
    assert found is not None
    assert (found.world_size, found.single_host) == (2, True)
    pod = Launched.find({**torchrun, "MASTER_ADDR": "10.0.0.1"})
    assert pod is not None
    assert not pod.single_host, "Kubeflow says nothing of other processes of the host"


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("gpu1", "gpu1"),
        ("gpu[003-004,7],login", "gpu003"),
        ("a,b[1-2]", "a"),
        ("rack[2-3]node[10,11]-ib", "rack2node10-ib"),
    ],
)
def test_first_host_of_a_node_list(nodelist: str, first: str) -> None:
    assert first_host(nodelist) == first


# ----------------------------------------------------------------------------------- processes

TRAIN = """
def whereabouts(stage):
    return os.getpid(), sorted(os.sched_getaffinity(0)), torch.get_num_threads()


def train(world, meanwhile=None):
    n = world.stages
    pipe = rpcpipe.Pipe(nn.Sequential(*[nn.Linear(4, 4) for _ in range(n)]), world, balance=[1] * n)
    first = pipe(torch.ones(2, 4)).sum()
    first.backward()
    line = json.dumps({
        "replica": world.replica,
        "hosts": world.hosts(),
        "stages": [pipe.apply_to_stage(j, whereabouts) for j in range(n)],
        "port": os.environ.get("MASTER_PORT"),
    })
    sys.stdout.write(f"facts {line}\\n")
    sys.stdout.flush()
    if meanwhile is not None:
        meanwhile()
    assert torch.equal(pipe(torch.ones(2, 4)).sum(), first)
"""

MAIN = """
if __name__ == "__main__":
    rpcpipe.run(train)
"""


def facts(out: str) -> list[dict[str, Any]]:
    """What drivers have printed, by replica."""
    lines = [line[line.index("facts ") + 6 :] for line in out.splitlines() if "facts {" in line]
    return sorted(map(json.loads, lines), key=lambda found: int(found["replica"]))


def train_ended(ended: Ended) -> list[dict[str, Any]]:
    assert ended.code == 0, ended
    return facts(ended.out)


def test_rpcpipe_run_pins_and_sets_threads(lab: Lab) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("takes two cores")
    ended = lab.run(*RUN, "--stages=2", "--driver=dedicated", str(lab.script(TRAIN + MAIN)))
    (found,) = train_ended(ended)
    assert ended.err == ""
    pinned = [set(own) for _, own, _ in found["stages"]]
    assert pinned[0] | pinned[1] <= set(cores)
    assert not pinned[0] & pinned[1]
    assert [threads for *_, threads in found["stages"]] == [len(own) for own in pinned]
    host = socket.gethostname()
    assert found["hosts"] == [
        f"pipe 0: driver {host}:0, stage 0 {host}:1 cpu, stage 1 {host}:2 cpu"
    ]


def test_the_cores_of_taskset_and_the_log_files_of_torchrun(lab: Lab) -> None:
    """The script is a module; what the driver prints is in its file, and not shown."""
    last = max(os.sched_getaffinity(0))
    lab.script(TRAIN + MAIN)
    ended = lab.run(
        "taskset", "-c", str(last), *RUN, "--stages=1", "--driver=dedicated", "--log-dir=logs",
        "--tee=3", "--local-ranks-filter=1", "-m", "train",
    )  # fmt: skip
    assert train_ended(ended) == []
    (log,) = (lab.folder / "logs").glob("*/attempt_0/0/stdout.log")
    (found,) = facts(log.read_text())
    assert [own for _, *own in found["stages"]] == [[[last], 1]]


def test_more_processes_than_cores_warn_once(lab: Lab) -> None:
    """Two pipelines of as many stages as there are cores."""
    cores = sorted(os.sched_getaffinity(0))
    n = len(cores)
    script = str(lab.script(TRAIN + MAIN))
    ended = lab.run(*RUN, f"--stages={n}", "--replicas=2", "--standalone", script)
    found = train_ended(ended)
    assert [f["replica"] for f in found] == [0, 1]
    assert all(own == cores for f in found for _, own, _ in f["stages"])
    assert len({pid for f in found for pid, *_ in f["stages"]}) == 2 * n
    assert ended.err.count("they take turns and are not pinned") == 1, ended


@pytest.mark.timeout(300)
def test_24_processes_come_up(lab: Lab) -> None:
    """The polling transport that is torch's default gives up at about 18."""
    script = str(lab.script(TRAIN + MAIN))
    command = (*RUN, "--stages=12", "--replicas=2", "--no-pin", "--no-python")
    ended = lab.run(*command, sys.executable, script)
    found = train_ended(ended)
    assert len({pid for f in found for pid, *_ in f["stages"]}) == 24


# ------------------------------------------------------------------------------ who may connect

WAITING = """
def wait():
    while not os.path.exists("go"):
        time.sleep(0.05)


if __name__ == "__main__":
    rpcpipe.run(train, wait)
"""


def listening(lab: Lab) -> dict[int, list[tuple[str, int]]]:
    """Where the processes of a lab listen, by the kernel's socket table."""
    found = {}
    for pid in lab.processes():
        ends = psutil.Process(pid).net_connections(kind="tcp")
        found[pid] = [(e.laddr.ip, e.laddr.port) for e in ends if e.status == psutil.CONN_LISTEN]
    return found


@pytest.fixture
def waiting(lab: Lab) -> tuple[subprocess.Popen[str], dict[str, Any], Lab]:
    """A job of two processes that trains on when there is a file ``go``."""
    job = lab.start(*RUN, "--stages=2", str(lab.script(TRAIN + WAITING)))
    (found,) = facts(await_line(job, "facts"))
    return job, found, lab


def test_one_machine_listens_on_loopback_alone_and_shrugs_off_strangers(
    waiting: tuple[subprocess.Popen[str], dict[str, Any], Lab],
) -> None:
    job, found, lab = waiting
    sockets = listening(lab)
    assert {job.pid, *(pid for pid, *_ in found["stages"])} <= sockets.keys()
    ends = [end for own in sockets.values() for end in own]
    assert len(ends) >= 3, "the store and an RPC agent in each process"
    assert {ip for ip, _ in ends} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}

    for text in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b""):
        with socket.create_connection(("127.0.0.1", int(found["port"]))) as stranger:
            stranger.sendall(text)
    store = network.connect("127.0.0.1", int(found["port"]), 10.0)
    store.set("rpcpipe/0/1/badge", "of a stranger")
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": found["port"]}
    stray = {**master, "TORCHELASTIC_USE_AGENT_STORE": "True", "LOCAL_WORLD_SIZE": "2"}
    (run_id,) = {
        psutil.Process(pid).environ()["TORCHELASTIC_RUN_ID"] for pid, *_ in found["stages"]
    }
    for rank, size, name, message in (
        ("1", "2", "another", "another job's token"),
        ("0", "3", run_id, "2 processes; this one's has 3"),
        ("1", "2", run_id, "number 1 of 2 in this job is taken"),
    ):
        env = {**stray, "RANK": rank, "WORLD_SIZE": size, "TORCHELASTIC_RUN_ID": name}
        refused = lab.run(lab.folder / "train.py", **env)
        assert refused.code == 1
        assert "RuntimeError: refused: " in refused.err, refused
        assert message in refused.err, refused

    (lab.folder / "go").touch()
    ended = Ended(job)
    assert ended.code == 0, ended


def test_different_versions_are_refused_by_name(lab: Lab) -> None:
    script = lab.script(
        TRAIN
        + """
if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        torch.__version__ = "2.6.0+cpu"
        rpcpipe.__version__ = "0.0.9"
    rpcpipe.run(train)
"""
    )
    ended = lab.run(*RUN, "--stages=2", str(script))
    assert ended.code == 1
    ours = f"torch {torch.__version__.partition('+')[0]} and rpcpipe {rpcpipe.__version__}"
    assert f"refused: host {socket.gethostname()} runs {ours}, host" in ended.err, ended
    assert "runs torch 2.6.0 and rpcpipe 0.0.9: install the same on all" in ended.err, ended


def test_an_interface_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    with pytest.raises(ValueError, match=r"names the interface 'eth77', which .* there are .*lo"):
        network.using(("127.0.0.1", 1)).__enter__()
    monkeypatch.setenv("TP_SOCKET_IFNAME", "lo")
    with pytest.raises(ValueError, match=r"name different interfaces \(eth77, lo\)"):
        network.using(("127.0.0.1", 1)).__enter__()
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    with network.using(("127.0.0.1", 1)):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in os.environ


# -------------------------------------------------------------------------------------- recipes

SRUN = """#!/usr/bin/env python3
# srun as far as the recipes use it: every task on this host, as if there were two.
import os, subprocess, sys
per_node = int(os.environ["SLURM_NTASKS_PER_NODE"])
command = sys.argv[1:]
while command[0].startswith("--"):
    flag, _, value = command.pop(0).partition("=")
    per_node = int(value) if flag == "--ntasks-per-node" else per_node
nodes = int(os.environ["SLURM_JOB_NUM_NODES"])
tasks = [subprocess.Popen(command, env={
    **os.environ, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(nodes * per_node),
    "SLURM_STEP_NUM_NODES": str(nodes), "SLURM_STEP_NODELIST": os.environ["SLURM_JOB_NODELIST"],
    "SLURM_PROCID": str(r), "SLURM_NODEID": str(r // per_node), "SLURM_LOCALID": str(r % per_node),
}) for r in range(nodes * per_node)]
sys.exit(max(task.wait() for task in tasks))
"""

SCONTROL = """#!/bin/sh
[ "$1 $2" = "show hostnames" ] && printf '%s\\n' "$3" | tr , '\\n'
"""


def test_slurm_recipes(lab: Lab) -> None:
    env = {
        **put_on_path(lab.folder, srun=SRUN, scontrol=SCONTROL),
        "SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "localhost",
        "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS_PER_NODE": "1", "STAGES": "2",
    }  # fmt: skip
    script = str(lab.script(TRAIN + MAIN))
    for recipe in ("slurm.sbatch", "slurm_rpcpipe_run.sbatch"):
        (found,) = train_ended(lab.run("bash", str(RECIPES / recipe), script, **env))
        assert len(found["stages"]) == 2, recipe


def test_torchrun_recipe(lab: Lab) -> None:
    script = str(lab.script(TRAIN + MAIN))
    # torch leaves its folder for logs where it is not told which.
    env = {**put_on_path(lab.folder), "PET_LOG_DIR": str(lab.folder / "logs")}
    (found,) = train_ended(lab.run("bash", str(RECIPES / "torchrun.sh"), script, STAGES="2", **env))
    assert len(found["stages"]) == 2


def test_kubernetes_recipe(lab: Lab) -> None:
    """It is what the operator reads; its command runs by the operator's variables."""
    job, policy = yaml.safe_load_all((RECIPES / "kubernetes.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert replicas.keys() == {"Master", "Worker"}
    pods = sum(spec["replicas"] for spec in replicas.values())
    pod = replicas["Master"]["template"]
    assert replicas["Worker"]["template"] == pod
    selected = policy["spec"]["podSelector"]["matchLabels"].items()
    assert selected <= pod["metadata"]["labels"].items()
    (container,) = pod["spec"]["containers"]
    assert container["name"] == "pytorch"

    lab.script(TRAIN + MAIN)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    env = {
        **put_on_path(lab.folder), "PET_NNODES": str(pods), "PET_MASTER_ADDR": "localhost",
        "PET_MASTER_PORT": str(port),
    }  # fmt: skip
    nodes = [lab.start(*container["command"], PET_NODE_RANK=str(i), **env) for i in range(pods)]
    ended = [Ended(node) for node in nodes]
    (found,) = [fact for end in ended for fact in train_ended(end)]
    assert len(found["stages"]) == 4


def test_torchx_recipe(lab: Lab) -> None:
    pytest.importorskip("torchx", reason="takes torchx")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    lab.script(TRAIN + MAIN)
    torchx = shutil.which("torchx", path=os.path.dirname(sys.executable))
    assert torchx is not None
    command = (torchx, "run", "--scheduler", "local_cwd", "--wait", "--log")
    component = (f"{RECIPES}/torchx_component.py:pipeline", "--script", "train.py", "--nodes", "2")
    ended = lab.run(*command, *component, "--port", str(port), **put_on_path(lab.folder))
    assert ended.code == 0, ended
    (found,) = facts(ended.out + ended.err)
    assert len(found["stages"]) == 2


# ------------------------------------------------------------------------------------ transport


def test_transports_that_poll_or_copy_between_processes_are_taken_where_that_is_wanted(
    lab: Lab,
) -> None:
    """Stages wait without processor time, between the passes of a step and after it.

    The last run is in a container, so to say, that forbids to read another process's memory.
    """
    ended = lab.run(
        lab.script("""
        import ctypes, struct

        def threads(stage):
            names = [f"/proc/self/task/{t}/comm" for t in os.listdir("/proc/self/task")]
            return {open(name).read().strip() for name in names}

        def busy(process, seconds=1.0):
            before, start = sum(process.cpu_times()[:2]), time.monotonic()
            threading.Event().wait(seconds)
            return (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - start)

        def train(world, shares=None):
            pipe = rpcpipe.Pipe(nn.Sequential(nn.Linear(4, 4)), world, balance=[1])
            x = torch.ones(1 << 16, 4)
            pipe(x).sum().backward()  # the first has much to import
            loss, stage = pipe(x).sum(), psutil.Process(world.process(0).pid)
            if shares is not None:
                shares.append(busy(stage))
            loss.backward()
            if shares is not None:
                shares.append(busy(stage))
            return {"TP_SHM_reactor", "TP_CMA_loop"} & pipe.apply_to_stage(0, threads)

        def forbid(syscall):
            # load its number; if it is this one, answer EPERM; otherwise allow it
            code = [
                (0x20, 0, 0, 0), (0x15, 0, 1, syscall), (6, 0, 0, 0x50001), (6, 0, 0, 0x7FFF0000)
            ]
            text = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *c) for c in code))
            program = struct.pack("HxxxxxxP", len(code), ctypes.addressof(text))
            PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
            prctl = ctypes.CDLL(None, use_errno=True).prctl
            assert prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            assert prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program) == 0, ctypes.get_errno()

        if __name__ == "__main__":
            idle, polling = [], []
            assert rpcpipe.run(train, idle, stages=1) == {"TP_CMA_loop"}
            assert max(idle) < 0.03, idle
            assert "TP_SHM_reactor" in rpcpipe.run(train, polling, stages=1, transport="shm")
            assert min(polling) > 0.1, polling
            assert rpcpipe.run(train, stages=1, transport="sockets") == set()
            assert os.environ.get("RPCPIPE_TRANSPORT") is None
            forbid({"x86_64": 310, "aarch64": 270}[os.uname().machine])  # process_vm_readv
            assert rpcpipe.run(train, stages=1) == set()
            os.environ["RPCPIPE_TRANSPORT"] = "tcp"
            try:
                rpcpipe.run(train, stages=1)
            except ValueError as exc:
                assert "is one of 'uv', 'shm', 'sockets', got 'tcp'" in str(exc)
                print("refused")
        """)
    )
    assert (ended.code, ended.out) == (0, "refused\n"), ended
