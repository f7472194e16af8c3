"""The optimizer of a pipe does what the same optimizer of the plain model does."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from toys import await_equal, check_equal, mlp

import rpcpipe
from rpcpipe import World

three = pytest.mark.parametrize("world", [3], indirect=True)


def no_decay(name: str) -> dict[str, Any]:
    return {"weight_decay": 0.0, "lr": 0.02} if name.endswith("bias") else {}


def only_matrices(name: str) -> dict[str, Any] | None:
    return {} if name.endswith("weight") else None


def plain_groups(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [
        {"params": [(n, p) for n, p in named if not n.endswith("bias")]},
        {"params": [(n, p) for n, p in named if n.endswith("bias")], **no_decay("bias")},
    ]


def train(model: Any, opt: torch.optim.Optimizer, steps: int = 3, seed: int = 1) -> None:
    torch.manual_seed(seed)
    for _ in range(steps):
        model(torch.rand(4, 4)).pow(2).mean().backward()
        opt.step()
        opt.zero_grad()


def flat(state: dict[str, Any]) -> dict[str, Tensor]:
    return {f"{k} {key}": t for k, s in state["state"].items() for key, t in s.items()}


CLASSES: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "fused": True}),
    (torch.optim.Adam, {"lr": 0.1, "amsgrad": True}),
    (torch.optim.AdamW, {"lr": 0.1, "foreach": True}),
    (torch.optim.AdamW, {"lr": torch.tensor(0.1), "fused": True}),
    (torch.optim.Adagrad, {"lr": 0.1}),
    (torch.optim.Adagrad, {"lr": 0.1, "fused": True}),
    (torch.optim.RMSprop, {"lr": 0.1, "momentum": 0.5}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.Rprop, {}),
    (torch.optim.Adafactor, {}),
]


@three
def test_every_class_of_torch_updates_as_it_does_alone(world: World) -> None:
    plain = mlp()
    pipe = rpcpipe.Pipe(mlp(), world, balance=[2, 2, 2])
    start = pipe.state_dict()
    for cls, options in CLASSES:
        for model in (pipe, plain):
            model.load_state_dict(start)
        opts = pipe.optimizer(cls, **options), cls(plain.parameters(), **options)
        train(pipe, opts[0])
        train(plain, opts[1])
        check_equal(pipe.state_dict(), plain.state_dict())
        found, wanted = opts[0].state_dict(), opts[1].state_dict()
        check_equal(flat(found), flat(wanted))
        opts[1].load_state_dict(found)
        opts[0].load_state_dict(wanted)
        train(pipe, opts[0], 1)
        train(plain, opts[1], 1)
        check_equal(pipe.state_dict(), plain.state_dict())


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9")
@three
def test_muon_takes_the_matrices_and_another_optimizer_the_rest(world: World) -> None:
    plain = mlp()
    pipe = rpcpipe.Pipe(mlp(), world, balance=[2, 2, 2])
    with pytest.raises(ValueError, match="2D"):
        pipe.optimizer(torch.optim.Muon)
    weights = [p for n, p in plain.named_parameters() if n.endswith("weight")]
    train(pipe, pipe.optimizer(torch.optim.Muon, groups=only_matrices))
    train(plain, torch.optim.Muon(weights))
    check_equal(pipe.state_dict(), plain.state_dict())


@three
def test_groups_by_name_are_those_of_a_plain_optimizer(world: World) -> None:
    plain = mlp()
    pipe = rpcpipe.Pipe(mlp(), world, balance=[2, 2, 2])
    opt = pipe.optimizer(torch.optim.AdamW, groups=no_decay, lr=0.1, weight_decay=0.5)
    wanted = torch.optim.AdamW(plain_groups(plain), lr=0.1, weight_decay=0.5)
    assert [[tuple(p.shape) for p in g["params"]] for g in opt.param_groups] == [
        [tuple(p.shape) for p in g["params"]] for g in wanted.param_groups
    ]
    train(pipe, opt)
    train(plain, wanted)
    for group in (opt.param_groups[1], wanted.param_groups[1]):
        group["lr"] = 0.5
    train(pipe, opt)
    train(plain, wanted)
    check_equal(pipe.state_dict(), plain.state_dict())
    assert opt.state_dict()["param_groups"] == wanted.state_dict()["param_groups"]


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda opt: lr_scheduler.StepLR(opt, 2),
    "MultiStepLR": lambda opt: lr_scheduler.MultiStepLR(opt, [1, 3]),
    "ExponentialLR": lambda opt: lr_scheduler.ExponentialLR(opt, 0.8),
    "LinearLR": lambda opt: lr_scheduler.LinearLR(opt, total_iters=3),
    "ConstantLR": lambda opt: lr_scheduler.ConstantLR(opt, total_iters=2),
    "PolynomialLR": lambda opt: lr_scheduler.PolynomialLR(opt, 4, 2.0),
    "LambdaLR": lambda opt: lr_scheduler.LambdaLR(opt, [lambda k: 1 / (1 + k)] * 2),
    "MultiplicativeLR": lambda opt: lr_scheduler.MultiplicativeLR(opt, lambda k: 0.9),
    "CosineAnnealingLR": lambda opt: lr_scheduler.CosineAnnealingLR(opt, 3),
    "Restarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 2),
    "CyclicLR": lambda opt: lr_scheduler.CyclicLR(opt, 0.01, 0.1, step_size_up=2),
    "OneCycleLR": lambda opt: lr_scheduler.OneCycleLR(opt, [0.2, 0.1], total_steps=5),
    "ReduceLROnPlateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, patience=0),
    "SequentialLR": lambda opt: lr_scheduler.SequentialLR(
        opt,
        [lr_scheduler.LinearLR(opt, total_iters=2), lr_scheduler.ExponentialLR(opt, 0.5)],
        [2],
    ),
    "ChainedScheduler": lambda opt: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(opt, 0.1, 2), lr_scheduler.ExponentialLR(opt, 0.9)]
    ),
    "SWALR": lambda opt: torch.optim.swa_utils.SWALR(opt, [0.05, 0.01], anneal_epochs=2),
}


@three
def test_every_scheduler_of_torch_does_to_a_pipe_what_it_does_to_a_plain_model(
    world: World,
) -> None:
    plain = mlp()
    pipe = rpcpipe.Pipe(mlp(), world, balance=[2, 2, 2])
    start = pipe.state_dict()
    sgd = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    for name, schedule in SCHEDULERS.items():
        for model in (pipe, plain):
            model.load_state_dict(start)
        opts = (
            pipe.optimizer(torch.optim.SGD, groups=no_decay, **sgd),
            torch.optim.SGD(plain_groups(plain), **sgd),
        )
        schedules = [*map(schedule, opts)]
        rates = set()
        for _ in range(4):
            train(pipe, opts[0], 1)
            train(plain, opts[1], 1)
            for each in schedules:
                each.step(*[1.0] * (name == "ReduceLROnPlateau"))
            for ours, theirs in zip(*(opt.param_groups for opt in opts), strict=True):
                assert (ours["lr"], ours["momentum"]) == (theirs["lr"], theirs["momentum"]), name
            rates.add(opts[0].param_groups[0]["lr"])
        assert len(rates) > 1, f"{name} changes nothing"
        check_equal(pipe.state_dict(), plain.state_dict())
        assert schedules[0].state_dict().keys() == schedules[1].state_dict().keys()


@three
def test_state_goes_by_names_where_they_are_known(world: World) -> None:
    plain = mlp()
    pipe = rpcpipe.Pipe(mlp(), world, balance=[2, 2, 2])
    opt = pipe.optimizer(torch.optim.Adam)
    reverse = torch.optim.Adam(list(plain.named_parameters())[::-1])
    train(pipe, opt)
    train(plain, reverse)
    before = opt.state_dict()
    opt.load_state_dict(reverse.state_dict())
    check_equal(flat(opt.state_dict()), flat(before))


@three
def test_wrong_state_is_refused_before_anything_has_changed(world: World) -> None:
    pipe = rpcpipe.Pipe(mlp(), world, balance=[2, 2, 2])
    opt = pipe.optimizer(torch.optim.Adam, lr=0.25)
    train(pipe, opt)
    before = opt.state_dict()
    wider = mlp(5)
    other = torch.optim.Adam(wider.parameters())
    train(wider, other)
    with pytest.raises(ValueError, match=r"exp_avg of 0.weight: the checkpoint has \(5, 4\)"):
        opt.load_state_dict(other.state_dict())
    renamed = {**before, "param_groups": [dict(before["param_groups"][0])]}
    renamed["param_groups"][0]["param_names"] = ["x", *opt.param_groups[0]["param_names"][1:]]
    with pytest.raises(ValueError, match=r"lacks \['0.weight'\] and has \['x'\]"):
        opt.load_state_dict(renamed)
    with pytest.raises(ValueError, match="number of parameter groups"):
        opt.load_state_dict({"state": {}, "param_groups": []})
    after = opt.state_dict()
    assert after["param_groups"] == before["param_groups"]
    check_equal(flat(after), flat(before))


@three
def test_what_cannot_be_is_refused_before_a_stage_hears_of_it(world: World) -> None:
    pipe = rpcpipe.Pipe(mlp(), world, balance=[2, 2, 2])
    with pytest.raises(ValueError, match="LBFGS takes a closure"):
        pipe.optimizer(torch.optim.LBFGS)
    with pytest.raises(TypeError, match=r"returned 0\.1"):
        pipe.optimizer(torch.optim.SGD, groups=lambda name: 0.1)  # type: ignore[arg-type,return-value]
    with pytest.raises(ValueError, match="left out all"):
        pipe.optimizer(torch.optim.SGD, groups=lambda name: None)
    opt = pipe.optimizer(torch.optim.SGD, lr=0.1)
    with pytest.raises(TypeError, match="groups=fn"):
        opt.add_param_group({"params": []})
    with pytest.raises(TypeError, match="live in its stages"):
        torch.nn.utils.clip_grad_norm_(opt.param_groups[0]["params"], 1.0)
    with pytest.raises(ValueError, match="max_norm= or max_value="):
        opt.step(max_norm=1.0, max_value=1.0)


@three
def test_clipping_is_that_of_torch_over_all_stages(world: World) -> None:
    plain = mlp()
    pipe = rpcpipe.Pipe(mlp(), world, balance=[2, 2, 2])
    opt = pipe.optimizer(torch.optim.SGD, lr=0.1)
    wanted = torch.optim.SGD(plain.parameters(), lr=0.1)
    x = torch.rand(4, 4)
    for norm_type in (2.0, 1.0, 3.0, float("inf")):
        for model in (pipe, plain):
            model.zero_grad()
            model(x).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01, norm_type)
        wanted.step()
        found = opt.step(max_norm=0.01, norm_type=norm_type)
        torch.testing.assert_close(found, norm.double(), rtol=1e-5, atol=0)
        check_equal(pipe.state_dict(), plain.state_dict())
    for model in (pipe, plain):
        model.zero_grad()
        model(x).sum().backward()
    torch.nn.utils.clip_grad_value_(plain.parameters(), 0.01)
    wanted.step()
    assert opt.step(max_value=0.01) is None
    check_equal(pipe.state_dict(), plain.state_dict())


class Output(nn.Module):
    """A projection by the embedding's weight."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


def tied() -> nn.Sequential:
    torch.manual_seed(0)
    embedding = nn.Embedding(6, 4)
    return nn.Sequential(embedding, nn.Linear(4, 4), Output(embedding.weight))


@three
def test_state_of_a_tied_parameter_is_there_once_and_loads_into_each_copy(world: World) -> None:
    plain = tied()
    pipe = rpcpipe.Pipe(tied(), world, balance=[1, 1, 1])
    opt, wanted = pipe.optimizer(torch.optim.Adam), torch.optim.Adam(plain.parameters())

    def step(model: Any, opt: torch.optim.Optimizer) -> None:
        model(torch.arange(4)).pow(2).sum().backward()
        opt.step()
        opt.zero_grad()

    for _ in range(2):
        step(pipe, opt)
        step(plain, wanted)
    check_equal(flat(opt.state_dict()), flat(wanted.state_dict()))
    again = pipe.optimizer(torch.optim.Adam)
    again.load_state_dict(wanted.state_dict())
    step(pipe, again)
    step(plain, wanted)
    check_equal(pipe.state_dict(), plain.state_dict())
    state = pipe.state_dict()
    assert torch.equal(state["0.weight"], state["2.weight"])


class Counting(torch.optim.SGD):
    """An optimizer with options of its own that change."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        super().step()


@three
def test_options_that_an_optimizer_changes_itself_are_kept_and_saved(world: World) -> None:
    pipe = rpcpipe.Pipe(mlp(), world, balance=[2, 2, 2])
    opt = pipe.optimizer(Counting, lr=0.1)
    train(pipe, opt, 2)
    assert opt.state_dict()["param_groups"][0]["count"] == 2
    train(pipe, opt, 1)
    assert opt.state_dict()["param_groups"][0]["count"] == 3


def optimizers_held(stage: Any) -> int:
    return sum(key.startswith("optimizer") for key in stage.extras)


@three
def test_an_optimizer_nobody_holds_is_forgotten_by_the_stages(world: World) -> None:
    pipe = rpcpipe.Pipe(mlp(), world, balance=[2, 2, 2])
    opt = pipe.optimizer(torch.optim.Adam)
    train(pipe, opt)
    assert pipe._everywhere("count", optimizers_held) == [1, 1, 1]
    del opt
    gc.collect()
    await_equal(lambda: pipe._everywhere("count", optimizers_held), [0, 0, 0])


@three
def test_stages_without_parameters_to_optimize_take_part(world: World, tmp_path: Path) -> None:
    plain = mlp()
    pipe = rpcpipe.Pipe(mlp(), world, balance=[1, 1, 4])  # the second is a Tanh
    opt = pipe.optimizer(torch.optim.Adam, groups=lambda n: None if n[0] == "0" else {}, lr=0.1)
    wanted = torch.optim.Adam(plain[1:].parameters(), lr=0.1)
    train(pipe, opt)
    train(plain, wanted)
    check_equal(pipe.state_dict(), plain.state_dict())
    pipe.save(tmp_path, optimizer=opt)
    pipe.load(tmp_path, optimizer=opt)
    opt.load_state_dict(wanted.state_dict())
    train(pipe, opt)
    train(plain, wanted)
    check_equal(pipe.state_dict(), plain.state_dict())
