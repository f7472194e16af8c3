"""Checkpoints: what is saved comes back, anywhere, or is refused before anything has changed."""

from __future__ import annotations

import itertools
import logging
import os
import pickle
import random
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from toys import check_equal, mlp

import rpcpipe
from rpcpipe import World, folder

three = pytest.mark.parametrize("world", [3], indirect=True)

# torch.distributed.checkpoint says so when it is used in one process, as it is here by the tests.
alone = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def model(width: int = 4) -> nn.Sequential:
    return nn.Sequential(*mlp(width)[:5], nn.BatchNorm1d(width), nn.Dropout(0.5), mlp(width)[5])


def make(world: World, balance: list[int], **options: Any) -> rpcpipe.Pipe:
    return rpcpipe.Pipe(model(), world, balance=balance, checkpoint="never", **options)


def adam(pipe: rpcpipe.Pipe) -> tuple[Any, Any]:
    def groups(name: str) -> dict[str, Any]:
        return {"weight_decay": 0.0} if name.endswith("bias") else {}

    opt = pipe.optimizer(torch.optim.AdamW, groups=groups, lr=0.1)
    return opt, torch.optim.lr_scheduler.StepLR(opt, 2)


def train(pipe: Any, opt: Any, scheduler: Any, data: torch.Generator, steps: int = 3) -> None:
    for _ in range(steps):
        pipe(torch.rand(4, 4, generator=data)).pow(2).mean().backward()
        opt.step()
        opt.zero_grad()
        scheduler.step()


def bitwise(pipe: rpcpipe.Pipe, opt: Any) -> dict[str, Tensor]:
    state = {f"{k} {key}": t for k, s in opt.state_dict()["state"].items() for key, t in s.items()}
    return {**pipe.state_dict(), **state}


def require_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def draw() -> list[float]:
    """From all that a script on the driver may draw from."""
    numpy = pytest.importorskip("numpy")
    return [random.random(), float(torch.rand(())), float(numpy.random.rand())]


@three
@pytest.mark.parametrize("seed", [None, 5])
def test_training_goes_on_exactly_where_it_was_saved(
    world: World, tmp_path: Path, seed: int | None
) -> None:
    draw()
    first = make(world, [3, 3, 2], seed=seed)
    opt, scheduler = adam(first)
    data = torch.Generator()
    train(first, opt, scheduler, data)
    saved = first.save(tmp_path, optimizer=opt, scheduler=scheduler, data=data, epoch=7)
    drawn = draw()
    train(first, opt, scheduler, data)

    second = make(world, [3, 3, 2], seed=seed)
    opt2, scheduler2 = adam(second)
    data2 = torch.Generator()
    rest = second.load(tmp_path, optimizer=opt2, scheduler=scheduler2, data=data2)
    assert rest == {"epoch": 7}
    assert saved == rpcpipe.latest(tmp_path) == tmp_path / "checkpoint-000001"
    assert drawn == draw()
    train(second, opt2, scheduler2, data2)
    require_same(bitwise(second, opt2), bitwise(first, opt))
    assert scheduler2.state_dict() == scheduler.state_dict()
    assert opt2.state_dict()["param_groups"] == opt.state_dict()["param_groups"]


@three
def test_loads_under_another_balance(world: World, tmp_path: Path) -> None:
    """By layer, where ``seed=`` gives them, also what layers draw is the same."""
    first = make(world, [3, 3, 2], seed=5)
    opt, scheduler = adam(first)
    data = torch.Generator()
    train(first, opt, scheduler, data)
    first.save(tmp_path, optimizer=opt, scheduler=scheduler, data=data)
    train(first, opt, scheduler, data)
    second = make(world, [1, 6, 1], seed=5)
    opt2, scheduler2 = adam(second)
    data2 = torch.Generator()
    second.load(tmp_path, optimizer=opt2, scheduler=scheduler2, data=data2)
    train(second, opt2, scheduler2, data2)
    require_same(bitwise(second, opt2), bitwise(first, opt))


@pytest.fixture(scope="session")
def of_others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where some stages have saved after 3 steps, and what they had after 6."""
    return tmp_path_factory.mktemp("of_others")


@pytest.mark.parametrize("world", [2, 3], indirect=True)
def test_another_number_of_stages_goes_on(world: World, of_others: Path) -> None:
    """The test that runs first saves, for the other one."""
    pipe = make(world, {2: [3, 5], 3: [2, 4, 2]}[world.stages], seed=5)
    opt, scheduler = adam(pipe)
    data = torch.Generator()
    objects = {"optimizer": opt, "scheduler": scheduler, "data": data}
    if rpcpipe.latest(of_others) is None:
        train(pipe, opt, scheduler, data)
        pipe.save(of_others, **objects)
        train(pipe, opt, scheduler, data)
        torch.save(bitwise(pipe, opt), of_others / "after.pt")
    pipe.load(of_others, **objects)
    train(pipe, opt, scheduler, data)
    require_same(bitwise(pipe, opt), torch.load(of_others / "after.pt"))


@three
def test_another_balance_without_a_seed_is_warned_of(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(world, [3, 3, 2]).save(tmp_path)
    with caplog.at_level(logging.INFO, logger="rpcpipe"):
        make(world, [3, 3, 2]).load(tmp_path)
        assert "another random state" not in caplog.text
        make(world, [2, 4, 2]).load(tmp_path)
    assert "balance [3, 3, 2]" in caplog.text
    assert "another random state" in caplog.text


@alone
@three
def test_torch_itself_loads_it_into_the_plain_module_and_optimizer(
    world: World, tmp_path: Path
) -> None:
    pipe = make(world, [3, 3, 2])
    opt = pipe.optimizer(torch.optim.Adam, lr=0.25)
    train(pipe, opt, torch.optim.lr_scheduler.StepLR(opt, 100), torch.Generator())
    saved = pipe.save(tmp_path, optimizer=opt, epoch=7)

    plain = model()
    plain_opt = torch.optim.Adam(plain.parameters())
    weights, state = get_state_dict(plain, plain_opt)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=saved, no_dist=True)
    set_state_dict(plain, plain_opt, model_state_dict=weights, optim_state_dict=state)
    check_equal(dict(plain.state_dict()), pipe.state_dict())
    assert plain_opt.param_groups[0]["lr"] == 0.25
    wanted, found = opt.state_dict()["state"], plain_opt.state_dict()["state"]
    assert all(torch.equal(found[k]["exp_avg"], wanted[k]["exp_avg"]) for k in wanted)

    dcp_to_torch_save(saved, tmp_path / "one.pt")
    one = torch.load(tmp_path / "one.pt", weights_only=True)
    require_same(one["model"], pipe.state_dict())
    assert one["epoch"] is not None


@alone
@three
def test_what_torch_has_saved_of_the_plain_module_loads_into_the_pipe(
    world: World, tmp_path: Path
) -> None:
    plain = model()
    plain_opt = torch.optim.Adam(plain.parameters(), lr=0.25)
    plain(torch.rand(4, 4)).sum().backward()
    plain_opt.step()
    weights, state = get_state_dict(plain, plain_opt)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path / "plain", no_dist=True)
    pipe = make(world, [3, 3, 2])
    opt = pipe.optimizer(torch.optim.Adam)
    assert pipe.load(tmp_path / "plain", optimizer=opt) == {}
    require_same(pipe.state_dict(), dict(plain.state_dict()))
    wanted, found = plain_opt.state_dict()["state"], opt.state_dict()["state"]
    assert all(torch.equal(found[k]["exp_avg"], wanted[k]["exp_avg"]) for k in wanted)
    assert opt.param_groups[0]["lr"] == 0.25


@three
def test_the_newest_are_kept_and_what_a_crash_left_is_removed(world: World, tmp_path: Path) -> None:
    pipe = make(world, [3, 3, 2])
    for epoch in range(4):
        pipe.save(tmp_path, keep=2, epoch=epoch)
        if epoch == 2:  # as if the process had been killed while it wrote the next
            half = folder.begin(tmp_path)
            (half.path / ".metadata").write_bytes(b"half")
            assert rpcpipe.latest(tmp_path) == tmp_path / "checkpoint-000003"
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-000003", "checkpoint-000004"]
    assert pipe.load(tmp_path) == {"epoch": 3}
    assert pipe.load(tmp_path / "checkpoint-000003") == {"epoch": 2}
    assert rpcpipe.latest(tmp_path / "nowhere") is None


@three
def test_saving_beside_training_saves_what_there_was_at_the_call(
    world: World, tmp_path: Path
) -> None:
    pipe = make(world, [3, 3, 2])
    opt, scheduler = adam(pipe)
    train(pipe, opt, scheduler, torch.Generator())
    wanted = bitwise(pipe, opt)
    saved = pipe.save(tmp_path, optimizer=opt, block=False)
    train(pipe, opt, scheduler, torch.Generator())
    again = make(world, [3, 3, 2])
    opt2, _ = adam(again)
    pipe.save(tmp_path)  # waits for the one before
    again.load(saved, optimizer=opt2)
    require_same(bitwise(again, opt2), wanted)


def fill_the_disk(module: nn.Module) -> None:
    """As far as this process is concerned."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (256, resource.RLIM_INFINITY))


def empty_the_disk(module: nn.Module) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@three
@pytest.mark.parametrize("following", ["forward", "save", "load"])
def test_what_fails_beside_training_is_raised_by_the_next_call(
    world: World, tmp_path: Path, following: str
) -> None:
    pipe = make(world, [3, 3, 2])
    pipe.save(tmp_path, epoch=0)
    pipe.apply_to_stage(1, fill_the_disk)
    try:
        pipe.save(tmp_path, block=False, epoch=1, keep=1)
        assert pipe._saving is not None
        pipe._saving._thread.join()
    finally:
        pipe.apply_to_stage(1, empty_the_disk)
    calls: dict[str, Callable[[], Any]] = {
        "forward": lambda: pipe(torch.rand(4, 4)),
        "save": lambda: pipe.save(tmp_path),
        "load": lambda: pipe.load(tmp_path),
    }
    with pytest.raises(rpcpipe.StageError, match=r"stage 1, write, .*File too large") as raised:
        calls[following]()
    assert isinstance(raised.value.__cause__, OSError)
    assert os.listdir(tmp_path) == ["checkpoint-000001"]
    pipe(torch.rand(4, 4)).sum().backward()
    assert pipe.load(tmp_path) == {"epoch": 0}


class Crash(BaseException):
    """In place of SIGKILL: nothing handles it."""


def test_a_crash_at_any_line_leaves_the_newest_checkpoint_whole(tmp_path: Path) -> None:
    def write(directory: Path, crash_at: int) -> bool:
        lines = 0

        def trace(frame: FrameType, event: str, _: object) -> Any:
            nonlocal lines
            if frame.f_code.co_filename != folder.__file__:
                return None
            if event == "line":
                lines += 1
                if lines == crash_at:
                    raise Crash
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            draft = folder.begin(directory)
            for name in ("__0_0.distcp", ".metadata"):
                (draft.path / name).write_text("whole")
            draft.complete(keep=1)
        except Crash:
            return False
        finally:
            sys.settrace(before)
        return True

    for crash_at in itertools.count(1):
        directory = tmp_path / str(crash_at)
        assert write(directory, 0)
        complete = write(directory, crash_at)
        newest = rpcpipe.latest(directory)
        assert newest is not None
        assert {file.name for file in newest.iterdir()} == {"__0_0.distcp", ".metadata"}
        assert write(directory, 0)
        assert len(os.listdir(directory)) == 1
        if complete:
            break
    assert newest.name == "checkpoint-000002"
    assert crash_at > 20


def test_a_directory_that_another_host_does_not_see_is_refused(tmp_path: Path) -> None:
    draft = folder.begin(tmp_path)
    draft.require_seen()
    with pytest.raises(ValueError, match="a file system that all hosts of the job share"):
        folder.Draft(draft.path, "written on another host").require_seen()


def damage_metadata(checkpoint: Path) -> None:
    (checkpoint / ".metadata").write_bytes(b"garbage")


class Evil:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("exit 1",)


def put_code_into_metadata(checkpoint: Path) -> None:
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Evil()))


def truncate(checkpoint: Path) -> None:
    os.truncate(checkpoint / "__1_0.distcp", 100)


def lose(checkpoint: Path) -> None:
    (checkpoint / "__2_0.distcp").unlink()


def overwrite(checkpoint: Path) -> None:
    size = (checkpoint / "__1_0.distcp").stat().st_size
    (checkpoint / "__1_0.distcp").write_bytes(b"x" * size)


@three
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_metadata, r"\.metadata is damaged"),
        (put_code_into_metadata, r"names posix\.system, which is not a checkpoint's"),
        (truncate, r"__1_0\.distcp is truncated, and with it model\.[345]"),
        (lose, r"__2_0\.distcp is missing, and with it model\."),
        (overwrite, r"model\.\S+ of \S+__1_0\.distcp cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_refused_before_anything_has_changed(
    world: World, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    pipe = make(world, [3, 3, 2])
    opt, scheduler = adam(pipe)
    saved = pipe.save(tmp_path, optimizer=opt)
    damage(saved)
    train(pipe, opt, scheduler, torch.Generator())
    before = bitwise(pipe, opt)
    with pytest.raises((ValueError, rpcpipe.StageError), match=message):
        pipe.load(saved, optimizer=opt)
    require_same(bitwise(pipe, opt), before)
    train(pipe, opt, scheduler, torch.Generator(), 1)


@alone
@three
def test_code_in_a_checkpoint_is_not_run(world: World, tmp_path: Path) -> None:
    weights = dict(model().state_dict())
    dcp.save({"model": weights, "evil": Evil()}, checkpoint_id=tmp_path / "evil", no_dist=True)
    with pytest.raises(ValueError, match=r"evil of \S+ cannot be read: Weights only load failed"):
        make(world, [3, 3, 2]).load(tmp_path / "evil")


@three
def test_a_checkpoint_of_something_else_is_refused_by_name(world: World, tmp_path: Path) -> None:
    pipe = make(world, [3, 3, 2])
    opt, scheduler = adam(pipe)
    train(pipe, opt, scheduler, torch.Generator())
    saved = pipe.save(tmp_path, optimizer=opt)
    before = bitwise(pipe, opt)

    wider = rpcpipe.Pipe(model(5), world, balance=[3, 3, 2], checkpoint="never")
    with pytest.raises(ValueError, match=r"0\.weight: the checkpoint has \(4, 4\), the model \(5"):
        wider.load(saved)
    longer = rpcpipe.Pipe(nn.Sequential(*model(), nn.Linear(2, 2)), world, balance=[3, 3, 3])
    with pytest.raises(ValueError, match=r"missing keys: \['8.weight', '8.bias'\]"):
        longer.load(saved)
    with pytest.raises(ValueError, match="state of AdamW, not of SGD"):
        pipe.load(saved, optimizer=pipe.optimizer(torch.optim.SGD))
    with pytest.raises(ValueError, match="has 2 groups, the optimizer 1"):
        pipe.load(saved, optimizer=pipe.optimizer(torch.optim.AdamW))
    with pytest.raises(ValueError, match=r"has no \['scaler'\]; it has \['model', 'optimizer'\]"):
        pipe.load(saved, scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match="the state saved by this name is that of a pipe's"):
        pipe.load(saved, optimizer=torch.optim.SGD(model().parameters()))
    with pytest.raises(TypeError, match=r"optimizer=7 has no load_state_dict"):
        pipe.load(saved, optimizer=7)
    with pytest.raises(FileNotFoundError, match="is no checkpoint and holds none"):
        pipe.load(tmp_path / "elsewhere")
    require_same(bitwise(pipe, opt), before)


@three
def test_what_cannot_be_saved_is_refused_and_leaves_nothing(world: World, tmp_path: Path) -> None:
    pipe = make(world, [3, 3, 2])
    with pytest.raises(TypeError, match="config cannot be saved"):
        pipe.save(tmp_path, config=Evil)
    with pytest.raises(ValueError, match="'model' is no name"):
        pipe.save(tmp_path, model=3)
    with pytest.raises(ValueError, match="keep="):
        pipe.save(tmp_path, keep=0)
    assert os.listdir(tmp_path) == []


@three
def test_tied_parameters_and_plain_values_come_back(world: World, tmp_path: Path) -> None:
    from test_optim import tied

    first = rpcpipe.Pipe(tied(), world, balance=[1, 1, 1])
    opt = first.optimizer(torch.optim.Adam)
    x = torch.arange(4)

    def step(pipe: rpcpipe.Pipe, opt: Any) -> None:
        pipe(x).pow(2).sum().backward()
        opt.step()
        opt.zero_grad()

    step(first, opt)
    values = {"best": float("inf"), "shape": (1, [2, {"a": None}]), "mean": torch.arange(3)}
    first.save(tmp_path, optimizer=opt, **values)
    second = rpcpipe.Pipe(tied(), world, balance=[1, 1, 1])
    opt2 = second.optimizer(torch.optim.Adam)
    rest = second.load(tmp_path, optimizer=opt2)
    assert torch.equal(rest.pop("mean"), torch.arange(3))
    assert rest == {"best": float("inf"), "shape": (1, [2, {"a": None}])}
    step(first, opt)
    step(second, opt2)
    require_same(bitwise(second, opt2), bitwise(first, opt))


@three
def test_weights_go_through_safetensors(world: World, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    pipe = make(world, [3, 3, 2])
    file = pipe.save(tmp_path / "model.safetensors")
    plain = model(4)
    nn.init.zeros_(plain[0].weight)
    plain.load_state_dict(safetensors.load_file(file))
    require_same(dict(plain.state_dict()), pipe.state_dict())
    nn.init.ones_(plain[0].weight)
    safetensors.save_file(dict(plain.state_dict()), tmp_path / "plain.safetensors")
    assert pipe.load(tmp_path / "plain.safetensors") == {}
    require_same(pipe.state_dict(), dict(plain.state_dict()))
    assert os.listdir(tmp_path).count("model.safetensors.tmp") == 0

    safetensors.save_file({"0.weight": torch.zeros(3)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"0\.weight: the checkpoint has \(3,\)"):
        pipe.load(tmp_path / "other.safetensors")
    os.truncate(tmp_path / "plain.safetensors", 300)
    with pytest.raises(ValueError, match=r"plain\.safetensors is damaged"):
        pipe.load(tmp_path / "plain.safetensors")
    with pytest.raises(ValueError, match="weights alone"):
        pipe.save(tmp_path / "model.safetensors", epoch=3)
    require_same(pipe.state_dict(), dict(plain.state_dict()))
