"""Batch norm: running statistics of the mini-batch, and none counted twice by recomputation."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rpcpipe.batchnorm import (
    DeferredBatchNorm,
    DeferredBatchNorm1d,
    DeferredBatchNorm2d,
    FrozenStatistics,
    commit,
    convert_deferred_batch_norm,
    discard,
    has_batch_norm,
)
from rpcpipe.checkpoint import phase

KINDS = [
    (nn.BatchNorm1d, (3,)),
    (nn.BatchNorm1d, (3, 5)),
    (nn.BatchNorm2d, (3, 4, 4)),
    (nn.BatchNorm3d, (3, 2, 2, 2)),
]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def tilted(*shape):
    """Channels of different scale, rows of different mean: parts differ from the whole."""
    x = torch.randn(*shape)
    rows = torch.arange(shape[0]).reshape(-1, *[1] * (len(shape) - 1))
    return (x + rows) * torch.tensor([1.0, 10.0, 100.0]).reshape(3, *[1] * (len(shape) - 2))


def deferred(module):
    return convert_deferred_batch_norm(copy.deepcopy(module))


def buffers(module):
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def assert_same_buffers(module, expected):
    torch.testing.assert_close(dict(module.named_buffers()), expected)


def assert_equal_buffers(module, expected):
    torch.testing.assert_close(dict(module.named_buffers()), expected, rtol=0, atol=0)


# Deferred


@pytest.mark.parametrize("momentum", [0.1, 1.0, 0.0, None])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(("cls", "shape"), KINDS)
def test_running_statistics_are_those_of_the_undivided_batch(cls, shape, affine, momentum):
    plain = cls(3, momentum=momentum, affine=affine)
    layer = deferred(plain)
    for step in range(3):
        x = tilted(12 + step, *shape)
        plain(x)
        for part in x.tensor_split(4):
            layer(part)
        commit(layer)
        assert_same_buffers(layer, buffers(plain))
    assert layer.num_batches_tracked == 3


def test_uneven_micro_batches_and_any_number_of_them():
    plain = nn.BatchNorm1d(3)
    layer = deferred(plain)
    for rows, sizes in (6, (3, 3)), (7, (2, 2, 3)), (9, (9,)), (11, (2, 9)):
        x = tilted(rows, 3)
        plain(x)
        for part in x.split(sizes):
            layer(part)
        commit(layer)
        assert_same_buffers(layer, buffers(plain))


def test_six_rows_over_four_chunks():
    plain = nn.BatchNorm2d(3)
    layer = deferred(plain)
    x = tilted(6, 3, 4, 4)
    plain(x)
    for part in x.tensor_split(4):  # 2, 2, 1, 1 rows
        layer(part)
    commit(layer)
    assert_same_buffers(layer, buffers(plain))


def test_one_micro_batch_is_bitwise_plain():
    plain = nn.BatchNorm2d(3)
    layer = deferred(plain)
    x = tilted(6, 3, 4, 4)
    assert torch.equal(layer(x), plain(x))
    commit(layer)
    assert_equal_buffers(layer, buffers(plain))


@settings(deadline=None, max_examples=50)
@given(sizes=st.lists(st.integers(2, 9), min_size=1, max_size=8), offset=st.sampled_from([0, 1e4]))
def test_statistics_survive_a_large_mean(sizes, offset):
    x = torch.randn(sum(sizes), 3) + offset
    layer = deferred(nn.BatchNorm1d(3, momentum=1.0))
    for part in x.split(sizes):
        layer(part)
    commit(layer)
    exact = x.double()
    torch.testing.assert_close(layer.running_mean.double(), exact.mean(0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer.running_var.double(), exact.var(0), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 2e-2)])
def test_other_dtypes_are_kept(dtype, tolerance):
    plain = nn.BatchNorm1d(3).to(dtype)
    layer = deferred(plain)
    x = torch.randn(12, 3, dtype=dtype)
    plain(x)
    for part in x.split(4):
        layer(part)
    commit(layer)
    for name, expected in buffers(plain).items():
        torch.testing.assert_close(layer.get_buffer(name), expected, rtol=0, atol=tolerance)


def test_micro_batch_is_normalised_and_trained_as_by_plain_batch_norm():
    plain = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    layer = deferred(plain)
    x = tilted(8, 3, 4, 4)
    xs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [[m(part) for part in x.split(2)] for m, x in zip((plain, layer), xs, strict=True)]
    assert all(map(torch.equal, *outputs))
    for parts in outputs:
        torch.cat(parts).square().mean().backward()
    assert torch.equal(xs[0].grad, xs[1].grad)
    for a, b in zip(plain.parameters(), layer.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_micro_batch_is_counted_once_when_it_is_recomputed():
    plain = nn.BatchNorm1d(3)
    layer = deferred(plain)
    x = tilted(12, 3)
    plain(x)
    parts = x.split(4)
    with torch.no_grad(), phase(checkpointing=True):
        first = [layer(part) for part in parts]
    commit(layer)
    committed = buffers(layer)
    with phase(recomputing=True):
        again = [layer(part.clone().requires_grad_()) for part in parts]
    assert all(map(torch.equal, first, again))
    sum(y.square().sum() for y in again).backward()
    commit(layer)
    assert_equal_buffers(layer, committed)
    assert_same_buffers(layer, buffers(plain))


def test_recomputation_between_forward_passes_is_not_counted():
    plain = nn.BatchNorm1d(3)
    layer = deferred(plain)
    x = tilted(12, 3)
    plain(x)
    for part in x.split(4):
        layer(part)
        with phase(recomputing=True):
            layer(part)
    commit(layer)
    assert_same_buffers(layer, buffers(plain))


def test_failed_step_is_discarded():
    plain = nn.Sequential(nn.BatchNorm1d(3))
    layer = deferred(plain)
    layer(tilted(4, 3))
    discard(layer)
    commit(layer)
    assert layer[0].num_batches_tracked == 0
    x = tilted(8, 3)
    plain(x)
    for part in x.split(4):
        layer(part)
    commit(layer)
    assert_same_buffers(layer, buffers(plain))


def test_evaluation_is_that_of_plain_batch_norm_and_counts_nothing():
    plain = nn.BatchNorm1d(3)
    plain(tilted(8, 3))
    plain.eval()
    layer = deferred(plain)
    x = tilted(1, 3)
    assert not layer.training
    assert torch.equal(layer(x), plain(x))
    commit(layer)
    assert_equal_buffers(layer, buffers(plain))


def test_no_graph_is_kept_between_micro_batches():
    layer = deferred(nn.BatchNorm1d(3))
    layer(tilted(4, 3).requires_grad_())
    assert not any(seen.mean.requires_grad or seen.var.requires_grad for seen in layer._seen)


def test_errors_of_plain_batch_norm_stay():
    with pytest.raises(ValueError, match="expected 4D input"):
        deferred(nn.BatchNorm2d(3))(torch.ones(2, 3))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        deferred(nn.BatchNorm1d(3))(torch.ones(1, 3))


# Conversion


def test_conversion_keeps_everything_but_the_class():
    norm = nn.BatchNorm2d(3).eval()
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Sequential(norm), norm)
    keys, parameters = list(model.state_dict()), list(model.parameters())
    calls = []
    norm.register_forward_hook(lambda *_: calls.append(1))
    assert convert_deferred_batch_norm(model) is model
    assert type(norm) is DeferredBatchNorm2d
    assert isinstance(norm, nn.BatchNorm2d)
    assert model[1][0] is model[2] is norm
    assert not norm.training
    model.train()(tilted(4, 3, 2, 2))
    assert list(model.state_dict()) == keys
    assert list(map(id, model.parameters())) == list(map(id, parameters))
    assert len(calls) == 2
    assert len(list(model.buffers())) == 3


def test_conversion_of_one_layer_returns_it():
    layer = nn.BatchNorm1d(3)
    assert convert_deferred_batch_norm(convert_deferred_batch_norm(layer)) is layer
    assert isinstance(layer, DeferredBatchNorm)


def test_conversion_leaves_other_layers_alone():
    class Own(nn.BatchNorm1d):
        def forward(self, x):
            return x

    layers = [
        nn.BatchNorm1d(3, track_running_stats=False),
        nn.SyncBatchNorm(3),
        nn.InstanceNorm1d(3, track_running_stats=True),
        nn.LazyBatchNorm1d(),
        nn.LayerNorm(3),
        Own(3),
    ]
    types = list(map(type, layers))
    convert_deferred_batch_norm(nn.ModuleList(layers))
    assert list(map(type, layers)) == types


def test_subclass_that_only_sets_defaults_is_converted():
    class Tuned(nn.BatchNorm1d):
        def __init__(self, width):
            super().__init__(width, eps=1e-3, momentum=0.01)

    layer = convert_deferred_batch_norm(Tuned(3))
    assert isinstance(layer, DeferredBatchNorm)
    assert (layer.eps, layer.momentum) == (1e-3, 0.01)


def test_meta_layer_is_converted_then_materialised():
    with torch.device("meta"):
        layer = convert_deferred_batch_norm(nn.BatchNorm1d(3))
    layer(torch.ones(4, 3, device="meta"))
    layer.to_empty(device="cpu")
    layer.reset_parameters()
    plain = nn.BatchNorm1d(3)
    x = tilted(8, 3)
    plain(x)
    for part in x.split(4):
        layer(part)
    commit(layer)
    assert_same_buffers(layer, buffers(plain))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_and_pickles_work(duplicate):
    layer = duplicate(deferred(nn.BatchNorm1d(3)))
    layer(tilted(4, 3))
    commit(layer)
    assert layer.num_batches_tracked == 1


def test_deferred_layer_built_directly_may_track_nothing():
    layer = DeferredBatchNorm1d(3, track_running_stats=False)
    x = tilted(4, 3)
    assert torch.equal(layer(x), nn.BatchNorm1d(3)(x))
    commit(layer)


def test_has_batch_norm():
    assert has_batch_norm(nn.Sequential(nn.Sequential(nn.BatchNorm1d(3))))
    assert has_batch_norm(deferred(nn.BatchNorm1d(3)))
    assert not has_batch_norm(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)))


# Frozen


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d(3),
        nn.BatchNorm1d(3, momentum=None),
        nn.BatchNorm1d(3, affine=False),
        nn.BatchNorm1d(3, track_running_stats=False),
        nn.BatchNorm1d(3).eval(),
        nn.InstanceNorm1d(3, track_running_stats=True),
    ],
)
def test_recomputation_is_bitwise_the_first_pass_and_counts_nothing(norm):
    model = nn.Sequential(nn.Linear(5, 5), norm)
    frozen = FrozenStatistics(model)
    parts = tilted(8, 3, 5).split(2)
    first = [model(part) for part in parts]
    before, objects = buffers(model), [id(buffer) for buffer in model.buffers()]
    for part, y in reversed(list(zip(parts, first, strict=True))):
        with frozen:
            again = model(part)
        assert torch.equal(again, y)
        again.square().sum().backward()
    assert_equal_buffers(model, before)
    assert [id(buffer) for buffer in model.buffers()] == objects


def test_statistics_thaw_after_an_error_and_after_a_move():
    model = nn.Sequential(nn.BatchNorm1d(3))
    frozen = FrozenStatistics(model)
    with pytest.raises(ValueError, match="Expected more than 1 value"), frozen:
        model(torch.ones(1, 3))
    assert model[0].num_batches_tracked == 0
    model.double()
    x = torch.randn(4, 3, dtype=torch.float64)
    y = model(x)
    before = buffers(model)
    with frozen:
        assert torch.equal(model(x), y)
    assert_equal_buffers(model, before)
    model(x)
    assert model[0].num_batches_tracked == 2


def test_buffers_that_backward_needs_are_not_seen_as_changed():
    layer = nn.BatchNorm1d(3)
    frozen = FrozenStatistics(layer)
    x = tilted(4, 3)
    layer.eval()
    with frozen:
        y = layer(x.requires_grad_())
    y.sum().backward()
    layer.train()
    with frozen:
        ys = [layer(x), layer(x)]
    sum(y.square().sum() for y in ys).backward()


def test_evaluating_layer_uses_its_real_statistics():
    layer = nn.BatchNorm1d(3)
    frozen = FrozenStatistics(layer)
    for _ in range(2):
        layer.train()
        layer(tilted(4, 3))
        with frozen:
            layer(tilted(4, 3))
        layer.eval()
        x = tilted(4, 3)
        with frozen:
            again = layer(x)
        assert torch.equal(again, layer(x))
