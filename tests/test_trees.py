"""The short way through nested values agrees with torch's pytree."""

from __future__ import annotations

import threading
from collections import OrderedDict, namedtuple
from concurrent.futures import InvalidStateError
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from rpcpipe import NoChunk, trees
from rpcpipe.mailbox import Parcel
from rpcpipe.slot import Slot

Pair = namedtuple("Pair", ["left", "right"])


def a(value: float) -> Tensor:
    return torch.tensor(float(value))


VALUES: dict[str, Any] = {
    "tensor": a(1),
    "nothing": None,
    "nested": (a(1), [a(2), {"x": a(3), "y": (None, 4, "five", a(6))}], ()),
    "parcel": Parcel((a(1), [a(2)]), {"mask": a(3)}, a(4)),
    "bare parcel": Parcel((a(1),)),
    "registered": OrderedDict(b=a(1), a=Pair(a(2), [a(3), Parcel((a(4),))])),
    "others": [a(1), NoChunk(a(2)), object(), torch.Size([2, 3]), torch.float32],
    "parameter": {"w": torch.nn.Parameter(a(1)), 3: a(2)},
}


@pytest.mark.parametrize("name", VALUES)
def test_tensors_are_those_of_pytree_in_its_order(name: str) -> None:
    value = VALUES[name]
    wanted = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    found = trees.tensors(value)
    assert len(found) == len(wanted)
    assert all(x is y for x, y in zip(found, wanted, strict=True))


@pytest.mark.parametrize("name", VALUES)
def test_map_keeps_the_structure(name: str) -> None:
    value = VALUES[name]
    order: list[float] = []

    def double(tensor: Tensor) -> Tensor:
        order.append(tensor.item())
        return tensor.detach() * 2

    found = trees.map_tensors(double, value)
    wanted = pytree.tree_map_only(Tensor, lambda t: t.detach() * 2, value)
    assert pytree.tree_structure(found) == pytree.tree_structure(wanted)
    for x, y in zip(pytree.tree_leaves(found), pytree.tree_leaves(wanted), strict=True):
        assert torch.equal(x, y) if isinstance(y, Tensor) else x is y
    assert order == [t.item() for t in trees.tensors(value)]


def test_others_are_what_pickle_has_to_be_asked_about() -> None:
    thing = object()
    assert trees.others([a(1), 2, "three", {"four": thing}, OrderedDict(five=[thing])]) == [
        thing,
        thing,
    ]


def test_a_slot_is_set_once_and_waited_for() -> None:
    slot: Slot[int] = Slot()
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(slot.result()))
    thread.start()
    slot.set_result(3)
    thread.join()
    assert found == [3]
    assert slot.result() == 3
    with pytest.raises(InvalidStateError):
        slot.set_exception(ValueError())
    failed: Slot[int] = Slot()
    failed.set_exception(ValueError("no"))
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            failed.result()
