"""The balance is the best there is, measured without a trace; bad ones are explained."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rpcpipe import balance
from rpcpipe.balance.profile import layer_sizes, layer_times
from rpcpipe.errors import BalanceError
from rpcpipe.skip import Namespace, pop, skippable, stash
from rpcpipe.skip.store import current_store

# ---- partition


def members(costs: Sequence[float], boundary: Sequence[float], split: Sequence[int]) -> list[float]:
    """Cost of every stage and link of a split."""
    ends = list(itertools.accumulate(split))
    stages = [sum(costs[end - size : end]) for end, size in zip(ends, split, strict=True)]
    return stages + [boundary[end - 1] for end in ends[:-1]]


def brute_force(costs: Sequence[float], boundary: Sequence[float], n: int) -> list[int]:
    def rank(split: list[int]) -> tuple[Any, ...]:
        cost = members(costs, boundary, split)
        return max(cost), sum(c * c for c in cost), [-size for size in split]

    size = len(costs)
    cuts = itertools.combinations(range(1, size), n - 1)
    return min(([b - a for a, b in itertools.pairwise([0, *cut, size])] for cut in cuts), key=rank)


@st.composite
def problems(draw: st.DrawFn, costs: st.SearchStrategy[Any]) -> tuple[list[Any], list[Any], int]:
    layers = draw(st.lists(costs, min_size=1, max_size=8))
    links = draw(st.lists(costs, min_size=len(layers) - 1, max_size=len(layers) - 1))
    return layers, links, draw(st.integers(1, len(layers)))


@given(problems(st.integers(0, 6)))
def test_partition_is_the_most_even_of_the_best(problem: tuple[list[int], list[int], int]) -> None:
    costs, _, n = problem
    assert balance.partition(costs, n) == brute_force(costs, [0] * len(costs), n)


@given(problems(st.integers(0, 12)))
def test_partition_with_links_is_the_best(problem: tuple[list[int], list[int], int]) -> None:
    costs, boundary, n = problem
    assert balance.partition(costs, n, boundary=boundary) == brute_force(costs, boundary, n)


@given(problems(st.floats(0, 1e300, allow_subnormal=False)))
def test_bottleneck_is_minimal_whatever_the_scale(
    problem: tuple[list[float], list[float], int],
) -> None:
    costs, boundary, n = problem
    split = balance.partition(costs, n, boundary=boundary)
    best = max(members(costs, boundary, brute_force(costs, boundary, n)))
    assert len(split) == n
    assert sum(split) == len(costs)
    assert min(split) >= 1
    assert max(members(costs, boundary, split)) == pytest.approx(best)


@pytest.mark.parametrize(
    ("costs", "n", "boundary", "expected"),
    [
        ([1] * 8, 3, None, [3, 3, 2]),
        ([1, 2, 3, 4, 5, 6], 2, None, [4, 2]),
        ([9, 1, 1, 1], 2, None, [1, 3]),
        ([5], 1, None, [1]),
        ([1e308] * 4, 2, None, [2, 2]),
        ([3, 3, 3, 3], 2, [0, 5, 0], [2, 2]),  # 5 is sent while 6 is computed
        ([3, 3, 3, 3], 2, [0, 10, 0], [3, 1]),  # 10 would be the slowest member, now 9 is
        ([4, 1, 1, 1, 4, 10], 3, [0, 2, 1, 0, 0], [3, 2, 1]),  # equally even: the cheaper cut
    ],
)
def test_partition_picture(
    costs: list[float], n: int, boundary: list[float] | None, expected: list[int]
) -> None:
    assert balance.partition(costs, n, boundary=boundary) == expected


def test_partition_of_thousand_layers() -> None:
    split = balance.partition([1.0] * 1000, 64)
    assert split == [16] * 40 + [15] * 24


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_partition_rejects_costs_that_are_none(bad: float) -> None:
    with pytest.raises(ValueError, match=r"costs must be finite and not negative; got costs\[1\]"):
        balance.partition([1.0, bad], 2)
    with pytest.raises(ValueError, match=r"boundary must be finite .* boundary\[0\]"):
        balance.partition([1.0, 1.0], 2, boundary=[bad])


def test_partition_rejects_boundary_of_another_length() -> None:
    with pytest.raises(ValueError, match="between each two of 3 layers, 2 in all; got 3"):
        balance.partition([1, 1, 1], 2, boundary=[1, 1, 1])


@pytest.mark.parametrize(
    ("num_layers", "n", "message"),
    [(2, 3, "3 stages for 2 layers: use at most 2 stages"), (2, 0, "at least one stage; got 0")],
)
def test_stages_that_layers_cannot_fill_are_rejected(num_layers: int, n: int, message: str) -> None:
    with pytest.raises(BalanceError, match=message):
        balance.partition([1] * num_layers, n)
    with pytest.raises(BalanceError, match=message):
        balance.validate([1] * n, num_layers, n)
    with pytest.raises(BalanceError, match=message):
        balance.by_time(n, linears(num_layers), torch.randn(1, 4))
    with pytest.raises(BalanceError, match=message):
        balance.by_size(n, linears(num_layers), torch.randn(1, 4))


# ---- validate


@pytest.mark.parametrize("good", [[3, 3, 2], (1, 1, 6)])
def test_balance_of_all_layers_over_all_stages_is_valid(good: Sequence[int]) -> None:
    balance.validate(good, 8, 3)


@pytest.mark.parametrize(
    ("bad", "fault"),
    [
        (3, "int is not a sequence"),
        (None, "NoneType is not a sequence"),
        ({3: 3}, "dict is not a sequence"),
        (torch.tensor([3, 3, 2]), "Tensor is not a sequence"),
        ("332", r"balance\[0\] = '3' is not an int"),
        ([3, 3, 2.0], r"balance\[2\] = 2\.0 is not an int"),
        ([True, 5, 2], r"balance\[0\] = True is not an int"),
        ([8, 0, 0], r"balance\[1\] = 0 leaves stage 1 without a layer"),
        ([9, -2, 1], r"balance\[1\] = -2 leaves stage 1 without a layer"),
        ([4, 4], "it has 2 stages"),
        ([], "it has 0 stages"),
        ([3, 3, 3], "its sum is 9"),
    ],
)
def test_bad_balance_is_told_what_to_change(bad: object, fault: str) -> None:
    rule = r"one positive int for each of 3 stages, 8 \(the number of layers\) in sum; got"
    with pytest.raises(
        BalanceError, match=rf"{rule} .*: {fault}\. Change it to balance=\[3, 3, 2\]"
    ):
        balance.validate(bad, 8, 3)


def test_balance_of_halves_is_rejected_though_its_sum_fits() -> None:
    with pytest.raises(BalanceError, match=r"got \[1\.5, 1\.5\].*Change it to balance=\[2, 1\]"):
        balance.validate([1.5, 1.5], 3, 2)


# ---- what is profiled


def linears(num_layers: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_layers)))


class Work(nn.Module):
    """Takes time in proportion to ``amount``, forward and backward."""

    def __init__(self, amount: int) -> None:
        super().__init__()
        self.amount = amount
        self.weight = nn.Parameter(torch.eye(128))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.amount):
            x = x @ self.weight
        return x


class WorkBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (grad,) = grads
        for _ in range(200):
            grad = grad @ torch.eye(128)
        return grad


class SlowBackward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return WorkBackward.apply(x)  # type: ignore[no-any-return,no-untyped-call]


@skippable(stash=["skip"])
class Down(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Any:
        x = self.fc(x)
        yield stash("skip", x)
        return torch.tanh(x)


@skippable(pop=["skip"])
class Up(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Any:
        skip = yield pop("skip")
        return self.fc(x) * skip.relu_()  # in place: a pop has the tensor to itself


def with_skips() -> nn.Sequential:
    outer, inner = Namespace(), Namespace()
    return nn.Sequential(
        Down().isolate(outer),
        nn.Sequential(Down().isolate(inner), nn.Tanh(), Up().isolate(inner)),
        nn.Tanh(),
        Up().isolate(outer),
    )


class Pair(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"values": (x, x.argmax(1)), "note": "not a tensor"}


class Unpair(nn.Module):
    def forward(self, both: dict[str, Any]) -> Tensor:
        values, index = both["values"]
        assert both["note"] == "not a tensor"
        return values * index[:, None]  # type: ignore[no-any-return]


class Selfish(nn.Linear):
    """Changes all that a forward pass can change of its module."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__(4, 4)
        self.fails = fails
        self.calls = 0
        self.history: list[Tensor] = []
        self.by_name = {"first": torch.zeros(2)}
        self.plain = torch.zeros(3)
        self.register_buffer("rows", torch.zeros(1).expand(4))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.new = self.calls
        self.history.append(x)
        self.by_name["first"] += 1
        self.plain += 1
        self.rows = torch.ones(4)
        self.weight.data.mul_(0.5)
        self.bias.requires_grad_(False)
        if self.fails:
            raise LookupError("a layer's own error")
        return super().forward(x)


class NeedsValues(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[x.sum(1).nonzero()[:, 0]])


def everything(layers: Sequence[nn.Module] = ()) -> nn.Sequential:
    """A module with all kinds of state, in a state of its own."""
    module = nn.Sequential(
        nn.Embedding(10, 4, max_norm=0.1), nn.BatchNorm1d(4), nn.Dropout(), Selfish(), *layers
    )
    module[1].eval()
    module[1].weight.requires_grad_(False)
    module[0].weight.grad = torch.rand(10, 4)
    module[3].weight.register_hook(lambda grad: pytest.fail("the module's own hook was called"))
    module[3].weight.register_post_accumulate_grad_hook(
        lambda weight: pytest.fail("the module's own hook was called")
    )
    return module


TOKENS = torch.tensor([1, 2, 3, 3])


def state(module: nn.Module) -> Any:
    """All there is to compare of a module: which objects it has, and the values of its tensors."""
    attributes = [dict(part.__dict__) for part in module.modules()]
    values = [value for kept in attributes for value in kept.values()]
    contents = [
        list(v.values() if isinstance(v, dict) else v)
        for v in values
        if isinstance(v, (dict, list))
    ]
    found = [v for v in [*values, *itertools.chain(*contents)] if isinstance(v, Tensor)]
    return (
        [{name: id(value) for name, value in kept.items()} for kept in attributes],
        [[id(value) for value in content] for content in contents],
        [(t.detach().clone(), t.requires_grad, id(t.grad)) for t in found],
        [t.grad.clone() for t in found if t.grad is not None],
        torch.get_rng_state(),
    )


def assert_same(now: Any, before: Any) -> None:
    if isinstance(before, Tensor):
        assert torch.equal(now, before)
    elif isinstance(before, (list, tuple)):
        assert len(now) == len(before)
        for a, b in zip(now, before, strict=True):
            assert_same(a, b)
    else:
        assert now == before


@pytest.fixture
def _one_thread() -> Iterator[None]:
    """Threads that wait for each other on a busy machine make small layers slow."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


by = pytest.mark.parametrize("method", [balance.by_time, balance.by_size])

# ---- both


@by
def test_module_is_exactly_as_before(method: Any) -> None:
    module = everything()
    torch.manual_seed(1)
    before = state(module)
    assert sum(method(2, module, TOKENS)) == len(module)
    assert_same(state(module), before)


@by
def test_module_is_exactly_as_before_when_a_layer_raises(method: Any) -> None:
    module = everything([Selfish(fails=True)])
    before = state(module)
    with pytest.raises(LookupError, match="a layer's own error"):
        method(2, module, TOKENS)
    assert_same(state(module), before)


@by
def test_sample_is_not_changed(method: Any) -> None:
    module = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4), nn.ReLU(inplace=True))
    for requires_grad in (False, True):
        sample = torch.full((2, 4), -1.0, requires_grad=requires_grad)
        assert sum(method(2, module, sample)) == 3
        assert torch.equal(sample, torch.full((2, 4), -1.0))
        assert sample.grad is None
        assert sample.requires_grad is requires_grad


@by
def test_skips_are_understood(method: Any) -> None:
    kept = len(current_store())
    assert sum(method(3, with_skips(), torch.randn(2, 4))) == 4
    assert len(current_store()) == kept


@by
def test_layers_that_raise_leave_no_skip_behind(method: Any) -> None:
    module = nn.Sequential(Down(), Selfish(fails=True), Up())
    kept = len(current_store())
    with pytest.raises(LookupError, match="a layer's own error"):
        method(2, module, torch.randn(2, 4))
    assert len(current_store()) == kept


@by
def test_skips_that_do_not_match_are_rejected(method: Any) -> None:
    with pytest.raises(TypeError, match="no module declared 'skip' as poppable"):
        method(2, nn.Sequential(Down(), nn.Tanh()), torch.randn(2, 4))


@by
def test_layers_pass_on_pytrees(method: Any) -> None:
    module = nn.Sequential(nn.Linear(4, 4), Pair(), Unpair(), nn.Linear(4, 2))
    assert sum(method(2, module, torch.randn(3, 4))) == 4


@by
def test_reentrant_checkpoints_inside_a_layer_work(method: Any) -> None:
    class Checkpointed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=True)  # type: ignore[no-any-return]

    module = nn.Sequential(nn.Linear(4, 4), Checkpointed(4, 4))
    assert method(2, module, torch.randn(3, 4)) == [1, 1]


@by
def test_recurrent_and_parametrised_layers_work(method: Any) -> None:
    class First(nn.Module):
        def forward(self, outputs: tuple[Tensor, ...]) -> Tensor:
            return outputs[0]

    linear = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    module = nn.Sequential(nn.LSTM(4, 4), First(), linear)
    sample = torch.randn(3, 2, 4)
    before = state(module)
    assert sum(method(2, module, sample)) == 3
    assert_same(state(module), before)


@by
def test_tied_weights_stay_tied(method: Any) -> None:
    module = linears(3)
    module[2].weight = module[0].weight
    assert sum(method(2, module, torch.randn(2, 4))) == 3
    assert module[2].weight is module[0].weight


@by
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_mode_of_the_caller_does_not_matter(method: Any, mode: Any) -> None:
    class Trains(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            assert y.requires_grad
            assert self.training
            return y

    module = nn.Sequential(nn.Linear(4, 4), Trains(4, 4)).eval()
    with mode():
        assert method(2, module, torch.randn(2, 4)) == [1, 1]
    assert not module.training


@by
def test_graph_that_has_saved_the_weights_stays_valid(method: Any) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    loss = module(torch.randn(2, 4)).sum()
    method(2, module, torch.randn(2, 4))
    loss.backward()


@by
def test_module_that_is_no_sequential_is_rejected(method: Any) -> None:
    with pytest.raises(TypeError, match=r"must be an nn\.Sequential; got Linear"):
        method(1, nn.Linear(4, 4), torch.randn(2, 4))


@by
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
def test_lazy_layer_is_to_be_initialised_before(method: Any) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4))
    with pytest.raises(ValueError, match=r"1\.weight is not initialised"):
        method(2, module, torch.randn(2, 4))


# ---- by_time


@pytest.mark.usefixtures("_one_thread")
def test_slow_layer_gets_a_stage_of_its_own() -> None:
    module = nn.Sequential(Work(1), Work(1), Work(200), Work(1))
    assert balance.by_time(3, module, torch.ones(128, 128)) == [2, 1, 1]


@pytest.mark.usefixtures("_one_thread")
def test_backward_pass_counts() -> None:
    module = nn.Sequential(Work(1), Work(1), SlowBackward(), Work(1))
    assert balance.by_time(3, module, torch.ones(128, 128)) == [2, 1, 1]


@pytest.mark.usefixtures("_one_thread")
def test_backward_pass_of_a_stashed_tensor_counts_where_it_was_stashed() -> None:
    @skippable(stash=["skip"])
    class SlowSkip(nn.Module):
        def forward(self, x: Tensor) -> Any:
            yield stash("skip", SlowBackward()(x))
            return x

    @skippable(pop=["skip"])
    class Add(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x + (yield pop("skip"))

    module = nn.Sequential(Work(1), SlowSkip(), Work(1), Add())
    seconds, _ = layer_times(module, torch.ones(128, 128), 3)
    assert seconds.index(max(seconds)) == 1


def test_layers_without_gradient_run_forward_only() -> None:
    class Argmax(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.argmax(-1)

    module = nn.Sequential(nn.Linear(4, 4), Argmax(), nn.Embedding(4, 8).requires_grad_(False))
    seconds, sent = layer_times(module, torch.randn(3, 4), 1)
    assert len(seconds) == 3
    assert sent == [2 * 3 * 4 * 4, 3 * 8, 3 * 8 * 4]  # only the first gets a gradient back


def test_gradient_is_asked_for_only_where_training_would() -> None:
    seen = []

    class Spy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.requires_grad)
            return x

    frozen = nn.Linear(4, 4).requires_grad_(False)
    balance.by_time(
        2, nn.Sequential(Spy(), frozen, Spy(), nn.Linear(4, 4), Spy()), torch.ones(2, 4)
    )
    assert seen[:3] == [False, False, True]


def test_slow_link_is_cut_where_little_is_sent() -> None:
    widths = [4, 64, 64, 2, 64, 4]
    module = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))
    assert balance.by_time(2, module, torch.randn(8, 4), bandwidth=1.0) == [3, 2]


def test_by_time_refuses_meta_and_points_to_by_size() -> None:
    with pytest.raises(ValueError, match=r"not on meta; use rpcpipe\.balance\.by_size"):
        balance.by_time(2, linears(2).to("meta"), torch.randn(2, 4))


@pytest.mark.parametrize("wrong", [{"repeats": 0}, {"bandwidth": 0.0}, {"bandwidth": -1.0}])
def test_by_time_refuses_what_is_not_positive(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        balance.by_time(2, linears(2), torch.randn(2, 4), **wrong)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_time_on_a_gpu_is_that_of_its_kernels_and_its_generator_is_restored() -> None:
    module = nn.Sequential(Work(1), nn.Dropout(), Work(400), Work(1)).cuda()
    before = torch.cuda.get_rng_state()
    assert balance.by_time(3, module, torch.ones(4096, 128, device="cuda")) == [2, 1, 1]
    assert torch.equal(torch.cuda.get_rng_state(), before)


# ---- by_size


def test_size_is_that_of_weights_and_of_what_backward_needs() -> None:
    module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10), nn.Flatten())
    weights = [4 * (64 * 128 + 128), 0, 4 * (128 * 10 + 10), 0]
    # its input and its output, its output, its output (its input is the output before), a view
    activations = [4 * 32 * (64 + 128), 4 * 32 * 128, 4 * 32 * 10, 0]
    sizes = layer_sizes(module, torch.randn(32, 64), 3.0, 5)
    assert sizes == [3 * w + 5 * a for w, a in zip(weights, activations, strict=True)]


def test_frozen_weights_and_buffers_count_once() -> None:
    module = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.BatchNorm1d(4))
    assert layer_sizes(module, torch.randn(2, 4), 4.0, 0) == [80, 4 * 32 + 40]


def test_batch_norm_is_heavier_than_an_activation_in_place() -> None:
    module = nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), nn.ReLU(inplace=True))
    sizes = layer_sizes(module, torch.randn(32, 4), 0.0, 1)
    assert sizes[1] >= 4 * 32 * 64
    assert sizes[2] == 0


def test_heavy_layer_gets_a_stage_of_its_own() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1000), nn.Linear(1000, 4), nn.Linear(4, 4))
    assert balance.by_size(3, module, torch.randn(2, 4)) == [1, 1, 2]


@pytest.mark.parametrize("sample_on", ["cpu", "meta"])
def test_module_on_meta_has_the_size_of_the_real_one(sample_on: str) -> None:
    attention = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)  # fused, if on a CPU
    module = nn.Sequential(attention, nn.Linear(16, 16), with_skips_of(16))
    sample = torch.randn(2, 64, 16)
    expected = layer_sizes(module, sample, 2.0, 1)
    module.to("meta")
    assert layer_sizes(module, sample.to(sample_on), 2.0, 1) == expected
    assert all(p.is_meta for p in module.parameters())


def with_skips_of(width: int) -> nn.Sequential:
    return nn.Sequential(Down(width), nn.Tanh(), Up(width))


def test_module_larger_than_memory_is_balanced() -> None:
    with torch.device("meta"):
        module = nn.Sequential(*(nn.Linear(1 << 20, 1 << 20) for _ in range(4)))
    assert balance.by_size(2, module, torch.empty(2, 1 << 20)) == [2, 2]


def test_module_that_needs_values_runs_for_real() -> None:
    module = nn.Sequential(nn.Linear(4, 4), NeedsValues(4, 8))
    sizes = layer_sizes(module, torch.ones(3, 4), 0.0, 1)
    assert sizes[1] >= 4 * 3 * 8


def test_size_for_real_is_the_size_without_memory() -> None:
    layers = [nn.Linear(4, 64), nn.BatchNorm1d(64), nn.ReLU(inplace=True), nn.Dropout()]
    for_real = layer_sizes(nn.Sequential(*layers, NeedsValues(64, 4)), torch.ones(3, 4), 2.0, 1)
    assert for_real[:4] == layer_sizes(nn.Sequential(*layers), torch.ones(3, 4), 2.0, 1)


def test_module_on_meta_that_needs_values_is_told_so() -> None:
    module = nn.Sequential(nn.Linear(4, 4), NeedsValues(4, 8)).to("meta")
    with pytest.raises(ValueError, match=r"without values, .* put them on a real device"):
        balance.by_size(2, module, torch.ones(3, 4))
