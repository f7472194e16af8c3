"""Scattering a mini-batch into micro-batches, and gathering them again."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rpcpipe.microbatch import NoChunk, check, gather, scatter, sizes


@given(st.integers(1, 200), st.integers(1, 40))
def test_sizes_are_even_and_as_many_as_asked_for(rows: int, chunks: int) -> None:
    found = sizes(rows, chunks)
    assert sum(found) == rows
    assert len(found) == min(rows, chunks)
    assert max(found) - min(found) <= 1
    assert found == sorted(found, reverse=True)


@given(st.integers(1, 12), st.integers(1, 8))
def test_gather_undoes_scatter(rows: int, chunks: int) -> None:
    x, y = torch.randn(rows, 3), torch.arange(rows)
    batch = {"x": x, "rest": (y, [None, "name", 4])}
    again = gather(scatter(batch, chunks))
    assert torch.equal(again["x"], x)
    assert torch.equal(again["rest"][0], y)
    assert again["rest"][1] == [None, "name", 4]


def test_micro_batches_of_six_rows_over_four_chunks() -> None:
    assert [len(x) for x in scatter(torch.zeros(6), 4)] == [2, 2, 1, 1]


def test_marked_argument_is_given_whole() -> None:
    w = torch.ones(3)
    for x, whole in scatter((torch.zeros(4), NoChunk(w)), 2):
        assert len(x) == 2
        assert whole is w


def test_scalars_are_stacked() -> None:
    assert torch.equal(gather([torch.tensor(1.0), torch.tensor(2.0)]), torch.tensor([1.0, 2.0]))


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        ((), TypeError, "at least one tensor.*got nothing"),
        (("text", 3), TypeError, "got str, int"),
        (NoChunk(torch.ones(2)), TypeError, "at least one tensor"),
        (torch.tensor(1.0), ValueError, "has no dimensions"),
        ((torch.ones(2), torch.ones(3)), ValueError, r"same leading size.*\(2,\), \(3,\)"),
        (torch.ones(0, 2), ValueError, "no rows"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    batch: object, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        check(batch)


def test_micro_batches_must_agree() -> None:
    with pytest.raises(ValueError, match="same structure"):
        gather([(torch.ones(1),), torch.ones(1)])
    with pytest.raises(ValueError, match="must be the same in every micro-batch"):
        gather([(torch.ones(1), 1), (torch.ones(1), 2)])
