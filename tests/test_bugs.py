"""Bugs that were found and mended: what went wrong, and why, each in its test."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.autograd as dist_autograd
from hosts import RUN
from test_errors import M, check_next_step, clean, fail, mark, trips, where
from test_run import Lab, lab
from torch import Tensor, nn
from torch.futures import Future
from toys import all_grads, check_equal, grads, mlp

import rpcpipe
from rpcpipe import StageError, World, transport
from rpcpipe.checkpoint import AutocastState
from rpcpipe.errors import Failure
from rpcpipe.stage import Order, Stage, _Run
from rpcpipe.tied import Tie, Ties

two = pytest.mark.parametrize("world", [2], indirect=True)

__all__ = ["lab"]  # a fixture


@two
def test_step_dropped_while_it_is_computed_leaves_the_stage_alive(world: World) -> None:
    """The thread that computed died, and everything after waited for ever.

    Dropping a step, on a thread of RPC, emptied what the compute thread was about to look into
    (``KeyError: 3``) and set a cursor that thread was counting up. Now what a run holds is
    touched by the compute thread alone; others settle futures and raise a flag.
    """
    plain = trips(2)
    pipe = rpcpipe.Pipe(plain, world, balance=[2, 1], chunks=M, checkpoint="always")
    for k in range(30):
        stage, i, phase = k % 2, k % M, ("recompute", "backward")[k % 3 % 2]
        assert where(fail(pipe, mark((stage, i, phase)))) == (stage, i, phase)
        step = pipe(*clean())
        del step  # dropped while the next one is computed
        check_next_step(pipe, plain)


@two
def test_failure_in_the_backward_pass_is_not_raised_inside_of_distributed_autograd(
    world: World,
) -> None:
    """A stage died of a segmentation fault a few failing steps later.

    An exception that leaves a function on the engine of a remote process makes torch (2.13)
    abandon that graph while gradients are still on their way to it. Now a stage that fails hands
    on "no gradients", the backward pass comes to its end, and the driver raises.
    """
    plain = trips(2)
    pipe = rpcpipe.Pipe(plain, world, balance=[2, 1], chunks=M, checkpoint="always")
    for k in range(20):
        stage, i, phase = k % 2, k % M, ("recompute", "backward")[k % 3 % 2]
        with dist_autograd.context() as context:
            loss = pipe(*mark((stage, i, phase)))[0].sum()
            with pytest.raises(RuntimeError, match=f"stage {stage}, micro-batch {i}, {phase}"):
                dist_autograd.backward(context, [loss])
        check_next_step(pipe, plain)


@two
def test_failure_of_a_later_micro_batch_does_not_hide_behind_an_earlier_one(world: World) -> None:
    """Stage 1 failed first, answered for all micro-batches, and stage 0's failure went unheard.

    Which of two failures in the backward pass was reported depended on who was faster. Now both
    passes are brought to their end and the first in the order of the schedule is raised.
    """
    pipe = rpcpipe.Pipe(trips(2), world, balance=[2, 1], chunks=M, checkpoint="always")
    for _ in range(10):
        error = fail(pipe, mark((0, 3, "recompute"), (1, 1, "backward")))
        assert where(error) == (0, 3, "recompute")


class Tied(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Lingering(Stage):
    """Hands a micro-batch on, and takes its time to come back from that."""

    def _forward(self, run: Any, i: int) -> None:
        super()._forward(run, i)
        time.sleep(0.02)


class LingeringPipe(rpcpipe.Pipe):
    _stage_class = Lingering


@two
def test_tied_gradients_are_set_aside_before_the_backward_pass_begins(world: World) -> None:
    """Two copies of one parameter drifted apart, in one of some hundred steps.

    The backward pass was announced by a flag, and by a job that puts the gradients of earlier
    passes away. A compute thread still at the end of its forward program saw the flag, went on,
    and the job put away what it had just computed. Now the job raises the flag.
    """
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(4, 4) / 2)
    pipe = LingeringPipe(
        nn.Sequential(Tied(weight), nn.Tanh(), Tied(weight)), world, balance=[2, 1]
    )
    for _ in range(5):
        pipe(torch.randn(5, 4)).sum().backward()
        found = all_grads(pipe)
        assert torch.equal(found["0.weight"], found["2.weight"])


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main, self.aux = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.main(x), self.aux(x)


@two
def test_parameter_without_gradient_is_left_alone_by_the_optimizer(world: World) -> None:
    """The weights of a head that the loss did not use decayed.

    Distributed autograd sends zeros in the place of no gradient; ``None`` and zeros are not the
    same to an optimizer with weight decay or momentum. Now "none" travels as a NaN of its own.
    """
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), TwoHeads())
    pipe = rpcpipe.Pipe(plain, world, balance=[1, 1], chunks=2)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.1, weight_decay=0.5)
    plain_opt = torch.optim.AdamW(plain.parameters(), lr=0.1, weight_decay=0.5)
    x = torch.randn(4, 4)
    for module, optimizer in ((pipe, opt), (plain, plain_opt)):
        module(x)[0].pow(2).sum().backward()
        optimizer.step()
    check_equal(pipe.state_dict(), plain.state_dict())


@two
def test_real_nan_gradient_stays_nan(world: World) -> None:
    """ "None" travels as a NaN: others are not to be taken for it."""
    plain = mlp()
    pipe = rpcpipe.Pipe(plain, world, balance=[3, 3], chunks=2)
    x = torch.randn(4, 4)
    for module in (pipe, plain):
        (module(x) * float("nan")).sum().backward()
    found, wanted = all_grads(pipe), grads(plain)
    assert found.keys() == wanted.keys()
    assert all(g.isnan().all() for g in found.values())


class GiveLambda(nn.Module):
    def forward(self, x: Tensor) -> object:
        return x, lambda: None


@two
def test_what_cannot_be_pickled_is_an_error_of_its_stage(world: World) -> None:
    """The driver reported a stage as lost that was well.

    The answer failed to be pickled on a thread of RPC, after the stage had handed it over, and
    came as a broken connection does.
    """
    pipe = rpcpipe.Pipe(nn.Sequential(nn.Identity(), GiveLambda()), world, balance=[1, 1])
    with pytest.raises(StageError, match="sent by pickle") as caught:
        pipe(torch.randn(2, 4))
    assert where(caught.value) == (1, 0, "forward")


ONE_THREAD = """
import torch, rpcpipe
import torch.distributed.autograd as dist_autograd

def main(world):
    pipe = rpcpipe.Pipe(torch.nn.Sequential(torch.nn.Linear(1, 1)), world, balance=[1])
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [pipe(torch.ones(1, 1)).sum()])

if __name__ == "__main__":
    torch.set_num_interop_threads(1)
    rpcpipe.run(main, stages=1)
"""


def test_context_with_one_inter_op_thread_is_refused(tmp_path: Path) -> None:
    """The driver waited for itself, deaf to SIGTERM.

    Distributed autograd runs each local part of a backward pass on an inter-op thread. The
    caller's waits for the pipe's, which needs another one.
    """
    script = tmp_path / "train.py"
    script.write_text(ONE_THREAD)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=60
    )
    # Or it works, where run() could still provide a second thread.
    assert done.returncode == 0 or "two inter-op threads" in done.stderr


def test_a_dropped_step_leaves_the_tied_gradients_of_another_alone() -> None:
    """A step forgotten by the garbage collector undid the backward pass of the one under way.

    Gradients of tied parameters are set aside during a backward pass and put back if it fails;
    dropping any step put them back. Now they belong to the step they were set aside for.
    """
    module = nn.Linear(2, 2)
    ties = Ties(0, [Tie({0: "weight", 1: "weight"})], [])
    before, now = torch.ones(2, 2), torch.zeros(2, 2)
    module.weight.grad = before
    ties.set_aside(module, step=4)
    assert module.weight.grad is None
    module.weight.grad = now
    ties.restore(module, step=3)
    assert module.weight.grad is now
    ties.restore(module, step=4)
    assert module.weight.grad is before


class Reused(nn.Module):
    """Puts every result into the same buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("result", torch.zeros(2**18))

    def forward(self, x: Tensor) -> Tensor:
        return self.result.copy_(x[0].expand(2**18))[None]


@two
def test_buffer_that_a_layer_returns_may_be_used_for_the_next_micro_batch(world: World) -> None:
    """Micro-batches arrived with the values of later ones.

    Sends read the memory they are given while they are under way. What belongs to the layers is
    copied now.
    """
    pipe = rpcpipe.Pipe(nn.Sequential(Reused(), nn.Identity()), world, balance=[1, 1], chunks=16)
    for _ in range(5):
        with torch.no_grad():
            out = pipe(torch.arange(16.0)[:, None])
        assert torch.equal(out, torch.arange(16.0)[:, None].expand(16, 2**18))


class SlowBackward(nn.Module):
    """Remembers when its last backward pass was over."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.over = 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight
        y.register_hook(self.work)
        return y

    def work(self, gradient: Tensor) -> None:
        time.sleep(0.3)
        self.over = time.monotonic()


def over(module: nn.Module) -> float:
    return module[0].over  # type: ignore[index, return-value]


@two
def test_backward_ends_when_every_stage_has_ended_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training loop stopped for ever, once in some hundred steps on a busy machine.

    The engine of a process (torch 2.13, ``executeSendFunctionAsync``) clears the list of messages
    it has to wait for after it has let a second thread begin to send some: two gradients that
    arrive at the same time were enough for ``backward`` to return before the stages further up
    had theirs. The context was released and the gradients under way to them were refused. Now
    each stage says itself when it is done, and the driver waits for what comes back to it. The
    race cannot be forced: here the engine returns before anything is done.
    """
    backward = transport.Tape.backward
    engines: list[Future[None]] = []

    def returns_early(tape: transport.Tape, roots: list[Tensor]) -> Future[None]:
        engines.append(backward(tape, roots))
        return transport.completed(None)

    monkeypatch.setattr(transport.Tape, "backward", returns_early)
    module = nn.Sequential(SlowBackward(), nn.Linear(4, 4))
    pipe = rpcpipe.Pipe(module, world, balance=[1, 1], chunks=2)
    x = torch.randn(4, 4, requires_grad=True)
    loss = pipe(x).sum()
    loss.backward()
    returned = time.monotonic()
    assert 0.0 < pipe.apply_to_stage(0, over) < returned
    assert x.grad is not None
    assert torch.equal(x.grad, module[1].weight.sum(0).expand(4, 4))
    engines[0].wait()


@pytest.mark.parametrize("world", [4], indirect=True)
def test_many_short_micro_batches_never_stop(world: World) -> None:
    """The same, by chance: this is what stopped."""
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    pipe = rpcpipe.Pipe(module, world, balance=[1] * 4, chunks=32)
    for _ in range(40):
        pipe(torch.randn(32, 4)).sum().backward()
    assert len(all_grads(pipe)) == 8


_alive: list[int] = []


class _Census(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        tensors = [t for t in gc.get_objects() if type(t) is Tensor]
        _alive.append(sum(t.shape == gradient.shape for t in tensors))
        return gradient.clone()


class Census(nn.Module):
    """Counts, in each backward pass, the tensors of its shape that are alive in its process."""

    def forward(self, x: Tensor) -> Tensor:
        return _Census.apply(x)


def counted(_: nn.Module) -> list[int]:
    return _alive


@two
def test_gradients_of_micro_batches_that_are_done_are_not_kept(world: World) -> None:
    """A stage kept the gradients of its input and output of all micro-batches.

    They stayed in the slots in which threads hand them to each other, until the last task of the
    step was done. With recomputation that was most of what the stage held; the predictions of
    ``rpcpipe.plan`` were too low by it. A slot is now replaced once it is read.
    """
    m = 8
    pipe = rpcpipe.Pipe(
        nn.Sequential(nn.Identity(), Census()), world, balance=[1, 1], chunks=m, checkpoint="always"
    )
    pipe(torch.ones(3 * m, 77, requires_grad=True)).sum().backward()
    alive = pipe.apply_to_stage(1, counted)
    assert len(alive) == m
    # Inputs of micro-batches still to come go down by one a time; gradients do not replace them.
    assert alive[-1] <= max(alive) - (m - 2), alive


@two
def test_what_the_driver_starts_does_not_inherit_the_runs_network(world: World) -> None:
    """Jobs on two hosts failed that were started while a pipe of one host was open.

    ``run`` named its interface and transport in the environment for as long as it lasted, and
    the processes that its function started took them for theirs. They are there while processes
    join, and no longer.
    """
    names = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "RPCPIPE_TRANSPORT")
    assert not set(names) & os.environ.keys()
    pipe = rpcpipe.Pipe(mlp(), world, balance=[3, 3])
    assert pipe(torch.randn(2, 4)).shape == (2, 2)


def test_the_quota_of_the_control_group_a_process_is_in_counts() -> None:
    """In a service or a batch job of two cores' worth, stages had a thread for each core.

    Only the limit at the top of the tree of control groups was read: that is a container's own,
    and nobody's where there is no container. Now those of all groups around the process are.
    """
    group = Path(f"/sys/fs/cgroup/cpu/rpcpipe-{os.getpid()}")
    try:
        group.mkdir()
    except OSError as exc:
        pytest.skip(f"no control group (v1) can be made: {exc}")
    try:
        (group / "cpu.cfs_quota_us").write_text("150000")
        code = "from rpcpipe.placement import quota; print(quota())"
        enter = f'echo $$ > {group}/cgroup.procs; exec "$@"'
        command = ["sh", "-c", enter, "sh", sys.executable, "-c", code]
        assert float(subprocess.run(command, check=True, capture_output=True).stdout) == 1.5
    finally:
        group.rmdir()


def test_a_process_that_was_lost_is_named_also_when_the_driver_has_left() -> None:
    """A host with a replica was lost, and the other's driver ended without saying which.

    It had left the world because of the loss, when the stage in the same process, whose average had
    failed, wanted to tell the driver and heard that the world was over. That is a bug in a compute
    thread, which ends the process: before `StageLost` had come to the top and was printed. Now a
    stage gives the step up, whether or not there is a driver to tell.
    """
    stage, driver = Stage(0, "cpu", 1), transport.Remote("nobody", "step")
    stage.connect(driver, {}, [], Ties(0, [], []))
    driver.close()
    order = Order(0, 0, 1, "F0 B0", True, False, None, True, AutocastState.capture())
    run = _Run(order, [])
    stage._fail_backward(run, Failure("the average failed", "", "", b""))
    assert run.over
    assert run.depart(0) is None


LETS_GO = """
import datetime, threading
import torch, torch.distributed as dist
from torch import nn
from rpcpipe.averaging import Reduced

store = dist.HashStore()
replicas = [None, None]


def join(replica):
    gloo = dist.ProcessGroupGloo(store, replica, 2, datetime.timedelta(seconds=2))
    group = dist.ProcessGroup(store, replica, 2)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    replicas[replica] = Reduced.of(nn.Linear(1, 1), group)


threads = [threading.Thread(target=join, args=(replica,)) for replica in (0, 1)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
torch._C._stash_obj_in_tls("what a thread of the group lets go", object())
replicas[0]._ddp.process_group.allreduce([torch.zeros(1)])  # the other takes no part in it
torch._C._stash_obj_in_tls("what a thread of the group lets go", object())
del replicas[0]
"""


def test_an_average_that_is_broken_off_does_not_hold_the_interpreter() -> None:
    """A replica was lost, and another's driver stood still instead of raising `StageLost`.

    A stage was let go while its average was under way, and in it DDP's reducer, which was the last
    to hold the process group. That waits for its threads, with the interpreter's lock, and one of
    them needed the lock for what it had to let go. Now a reducer is never the last.
    """
    subprocess.run([sys.executable, "-c", LETS_GO], check=True, timeout=60)


SERVES = """
from rpcpipe import network

store = network.serve("127.0.0.1", 0, 30)
print(store.port, flush=True)
input()
"""
LEAVES = """
import os, signal, sys, threading
from rpcpipe import StageLost, groups, network, transport
from rpcpipe.run import _meet

pid, port = map(int, sys.argv[1:])
store = network.connect("127.0.0.1", port, 30)
os.kill(pid, signal.SIGSTOP)
threading.Timer(0.2, transport.declare_lost, [StageLost("it is cut off")]).start()
try:
    _meet(store, 2, "everybody leaves")
except StageLost as exc:
    print(exc)
print(network.sign(store, "left"))
groups.leave_early(store)
"""


def test_nobody_waits_for_a_store_that_does_not_answer() -> None:
    """A driver that was cut off from the first process while all left did not end.

    It had heard that it was cut off, and asked the store of that host how many have come to the
    point where all leave. torch's client waits for an answer for ever. Now what is asked when
    leaving is asked on a thread, which is left behind.
    """
    with subprocess.Popen(
        [sys.executable, "-c", SERVES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            port = server.stdout.readline().strip()
            command = [sys.executable, "-c", LEAVES, str(server.pid), port]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        finally:
            server.kill()
    assert (done.returncode, done.stdout) == (0, "it is cut off\n0\n"), done


NEVER_ENDS = """
from rpcpipe import groups

group = replicas[0]._ddp.process_group
replicas[0] = None
groups._never_end(groups.Groups(None, {0: group}, None, None))
del group
"""


def test_a_driver_ends_whatever_its_groups_wait_for() -> None:
    """A driver that had raised `StageLost` hung at the end of the interpreter.

    The host of another replica was cut off while it waited for that in an average. gloo goes on
    waiting for half an hour, and so does whoever lets the last reference to the process group go.
    """
    waits = LETS_GO.replace("seconds=2", "hours=1").replace("del replicas[0]", NEVER_ENDS)
    subprocess.run([sys.executable, "-c", waits], check=True, timeout=60)


LIVES_ON = """
def train(world):
    pipe = rpcpipe.Pipe(nn.Sequential(nn.Linear(4, 4)), world, balance=[1], chunks=2)
    for step in range(3):
        if world.replica == 1 and step == 1:
            raise ValueError("mine")
        pipe(torch.randn(4, 4)).sum().backward()


if __name__ == "__main__":
    try:
        rpcpipe.run(train, stages=1, replicas=2)
    except Exception as exc:
        print(type(exc).__name__, flush=True)
        while not os.path.exists("heard"):
            if os.environ["RANK"] == "0":
                open("heard", "w").close()
            time.sleep(0.01)
"""


def test_a_replica_that_fails_and_lives_on_is_noticed(lab: Lab) -> None:
    """A driver waited in an average for another that had left its run by an error.

    Its process went on, and with it the connections by which others would have noticed: a reference
    to its groups stayed, so that nobody waits for one whose host is cut off. Now one stays only
    where a process is lost.
    """
    ended = lab.run(*RUN, "--stages=1", "--replicas=2", str(lab.script(LIVES_ON)))
    assert sorted(ended.out.split()) == ["StageError", "ValueError"], ended
