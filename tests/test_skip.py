"""Skip connections: the commands, their errors, verification, layout, and running in stages."""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys
import threading
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from rpcpipe.skip import Namespace, pop, skippable, stash, verify_skippables
from rpcpipe.skip.layout import SkipLayout
from rpcpipe.skip.skippable import isolate
from rpcpipe.skip.store import SkipStore, current_store, use_store


@skippable(stash=["skip"])
class Down(nn.Module):
    """Docstring of Down."""

    def __init__(self, width: int = 3) -> None:
        # The two-argument form: it looks the class up by its name, which is the decorated one.
        super(Down, self).__init__()  # noqa: UP008
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor):
        yield stash("skip", x)
        return self.linear(x)


@skippable(pop=["skip"])
class Up(nn.Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor):
        skip = yield pop("skip")
        return self.linear(x) + skip


class Between(nn.Sequential):
    """Runs its layers in another order than they are registered in."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self):
            x = layer(x)
        return x


class Block(nn.Module):
    """A plain module with a skippable inside."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x)


@pytest.fixture(autouse=True)
def store():
    with use_store(SkipStore()) as store:
        yield store


def stashing(*names):
    """A layer that only declares; for verification, which runs nothing."""
    return skippable(stash=names)(type("Stashing", (nn.Module,), {}))()


def popping(*names):
    return skippable(pop=names)(type("Popping", (nn.Module,), {}))()


def run_in_stages(partitions, x):
    """What the executor does with one micro-batch, without the processes."""
    layout = SkipLayout(partitions)
    sent = {}
    for j, partition in enumerate(partitions):
        store = SkipStore({key: sent.pop((start, j, key)) for key, start in layout.imports(j)})
        with use_store(store):
            x = partition(x)
        sent.update({(j, end, key): store.take(key) for key, end in layout.exports(j)})
        store.require_empty()
    assert not sent
    return x


# The commands


def test_skip_reaches_the_layer_that_pops_it():
    model = nn.Sequential(Down(), nn.Tanh(), Up())
    x = torch.randn(2, 3)
    assert torch.equal(model(x), model[2].linear(model[0].linear(x).tanh()) + x)


def test_gradient_flows_through_skip():
    model = nn.Sequential(Down(), nn.Tanh(), Up())
    x = torch.randn(2, 3, requires_grad=True)
    model(x).sum().backward()
    through_skip = torch.ones(2, 3)
    y = x.detach().clone().requires_grad_()
    model[2].linear(model[0].linear(y).tanh()).sum().backward()
    torch.testing.assert_close(x.grad, y.grad + through_skip)


def test_unpartitioned_model_needs_no_store_and_threads_do_not_meet():
    model = nn.Sequential(Down(), nn.Tanh(), Up())
    inputs = [torch.randn(2, 3) for _ in range(4)]
    expected = [model(x) for x in inputs]
    got = [None] * 4
    stores = []

    def work(i):
        stores.append(current_store())
        got[i] = model(inputs[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(stores)) == 4
    assert all(len(store) == 0 for store in stores)
    assert all(map(torch.equal, got, expected))


def test_unpartitioned_model_runs_after_a_failed_pass():
    class Fail(nn.Module):
        fail = True

        def forward(self, x):
            if self.fail:
                raise ValueError("once")
            return x

    fail = Fail()
    model = nn.Sequential(Down(), fail, Up())
    outcomes = []

    def work():
        for fail.fail in (True, False):
            try:
                outcomes.append(model(torch.ones(1, 3)))
            except ValueError as error:
                outcomes.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert str(outcomes[0]) == "once"
    assert isinstance(outcomes[1], Tensor)


@pytest.mark.parametrize(
    "value", [torch.tensor([True, False]), torch.tensor([3]), torch.ones(1).half(), None]
)
def test_any_tensor_and_none_may_be_stashed(value):
    @skippable(stash=["a"])
    class Stash(nn.Module):
        def forward(self, x):
            yield stash("a", value)
            return x

    @skippable(pop=["a"])
    class Pop(nn.Module):
        def forward(self, x):
            self.got = yield pop("a")
            return x

    popped = Pop()
    x = torch.ones(1, requires_grad=True)
    run_in_stages([nn.Sequential(Stash()), nn.Sequential(popped)], x).sum().backward()
    assert popped.got is value


def test_layer_may_stash_and_pop_several_and_take_several_inputs():
    @skippable(stash=["a", "b"])
    class Stash(nn.Module):
        def forward(self, x, *, scale):
            yield stash("b", x * 2)
            yield stash("a", x * 3)
            return x * scale, x

    @skippable(pop=["a"], stash=["c"])
    class Swap(nn.Module):
        def forward(self, x, y):
            a = yield pop("a")
            yield from self.keep(x)
            return a + y

        def keep(self, x):
            yield stash("c", x)

    @skippable(pop=["b", "c"])
    class Pop(nn.Module):
        def forward(self, x):
            b = yield pop("b")
            c = yield pop("c")
            return x + b + c

    x = torch.ones(1)
    assert Pop()(Swap()(*Stash()(x, scale=5))) == 3 + 1 + 2 + 5


def test_skippables_of_one_layer_pass_skips_inside_it():
    @skippable(stash=["skip"])
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = Up()

        def forward(self, x):
            yield stash("skip", x)
            return self.up(x)

    layer = Outer()
    verify_skippables(nn.Sequential(layer))
    x = torch.ones(2, 3)
    assert torch.equal(layer(x), layer.up.linear(x) + x)


# The class stays itself


def test_decorated_class_stays_itself():
    assert inspect.isclass(Down)
    assert Down.__name__ == Down.__qualname__ == "Down"
    assert Down.__doc__ == "Docstring of Down."
    assert list(inspect.signature(Down.forward).parameters) == ["self", "x"]
    layer = Down()
    assert isinstance(layer, Down)
    assert set(layer.state_dict()) == {"linear.weight", "linear.bias"}
    assert layer.linear.in_features == 3
    assert repr(layer) == ("Down(\n  (linear): Linear(in_features=3, out_features=3, bias=True)\n)")


def test_forward_hooks_see_the_output():
    layer, seen = Down(), []
    layer.register_forward_hook(lambda module, args, output: seen.append(output))
    assert layer(torch.ones(1, 3)) is seen[0]


def test_subclass_inherits_forward_and_names():
    class Wider(Down):
        def __init__(self):
            super().__init__(5)

    @skippable(stash=["skip", "other"])
    class More(Down):
        def forward(self, x):
            yield stash("other", x)
            yield stash("skip", x)
            return x

    @skippable(stash=["skip"])
    class Again(Down):
        pass

    verify_skippables(nn.Sequential(Wider(), Up(5)))
    verify_skippables(nn.Sequential(More(), Up(), popping("other")))
    assert nn.Sequential(Wider(), Up(5))(torch.ones(2, 5)).shape == (2, 5)
    assert nn.Sequential(Again(), Up())(torch.ones(2, 3)).shape == (2, 3)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_and_pickles_still_match(duplicate):
    ns = Namespace()
    model = nn.Sequential(Down().isolate(ns), Down(), Up(), Up().isolate(ns))
    twin = duplicate(model)
    verify_skippables(twin)
    verify_skippables(nn.Sequential(model[0], twin[1], model[2], twin[3]))
    x = torch.ones(2, 3)
    assert torch.equal(twin(x), model(x))


def test_class_of_main_is_pickled_to_another_process(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(
        """
import multiprocessing, torch
from torch import nn
from rpcpipe.skip import Namespace, pop, skippable, stash, verify_skippables

@skippable(stash=["a"])
class Stash(nn.Module):
    def forward(self, x):
        yield stash("a", x)
        return x * 2

@skippable(pop=["a"])
class Pop(nn.Module):
    def forward(self, x):
        return x + (yield pop("a"))

def work(model):
    verify_skippables(model)
    assert isinstance(model[0], Stash)
    return model, model(torch.ones(1)).item()

if __name__ == "__main__":
    ns = Namespace()
    model = nn.Sequential(Stash().isolate(ns), Pop().isolate(ns))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        back, y = pool.apply(work, (model,))
    verify_skippables(nn.Sequential(model[0], back[1]))
    print(y)
"""
    )
    root = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, script],
        env={"PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "3.0\n", done.stderr


# Errors of a run


def test_declared_but_not_used():
    @skippable(stash=["b", "a"])
    class Stash(nn.Module):
        def forward(self, x):
            return x

    @skippable(pop=["a"])
    class Pop(nn.Module):
        def forward(self, x):
            return x

    with pytest.raises(RuntimeError, match="'a', 'b' must be stashed but have not"):
        Stash()(torch.ones(1))
    with pytest.raises(RuntimeError, match="'a' must be popped but have not"):
        Pop()(torch.ones(1))


def test_used_but_not_declared():
    @skippable()
    class Stash(nn.Module):
        def forward(self, x):
            yield stash("a", x)
            return x

    @skippable()
    class Pop(nn.Module):
        def forward(self, x):
            yield pop("a")
            return x

    with pytest.raises(RuntimeError, match="'a' has not been declared as stashable by Stash"):
        Stash()(torch.ones(1))
    with pytest.raises(RuntimeError, match="'a' has not been declared as poppable by Pop"):
        Pop()(torch.ones(1))


def test_popped_but_not_stashed():
    with pytest.raises(RuntimeError, match="'skip' has not been stashed"):
        Up()(torch.ones(1, 3))


def test_used_twice_in_one_pass(store):
    @skippable(stash=["a"])
    class Stash(nn.Module):
        def forward(self, x):
            yield stash("a", x)
            yield stash("a", x)
            return x

    @skippable(pop=["a"])
    class Pop(nn.Module):
        def forward(self, x):
            yield pop("a")
            yield pop("a")
            return x

    with pytest.raises(RuntimeError, match="'a' has been stashed twice by Stash"):
        Stash()(torch.ones(1))
    with pytest.raises(RuntimeError, match="'a' has been popped twice by Pop"):
        Pop()(torch.ones(1))


def test_layer_run_twice_before_pop():
    layer = Down()
    layer(torch.ones(1, 3))
    with pytest.raises(RuntimeError, match="'skip' has been stashed again before"):
        layer(torch.ones(1, 3))


@pytest.mark.parametrize("value", ["text", (torch.ones(1),)])
def test_only_tensors_are_stashed(value):
    @skippable(stash=["a"])
    class Stash(nn.Module):
        def forward(self, x):
            yield stash("a", value)
            return x

    with pytest.raises(TypeError, match=f"Stash stashed {type(value).__name__}"):
        Stash()(torch.ones(1))


def test_only_commands_are_yielded():
    closed = []

    @skippable()
    class Wrong(nn.Module):
        def forward(self, x):
            try:
                yield "something"
            finally:
                closed.append(True)

    with pytest.raises(TypeError, match="Wrong yielded 'something'"):
        Wrong()(torch.ones(1))
    assert closed


def test_error_of_the_layer_stays_itself():
    @skippable(stash=["a"])
    class Broken(nn.Module):
        def forward(self, x):
            yield stash("a", x)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        Broken()(torch.ones(1))


@pytest.mark.parametrize("names", ["skip", Down])
def test_names_are_a_list(names):
    with pytest.raises(TypeError, match="takes a list of names"):
        skippable(stash=names)


# Namespaces


def test_namespaces_differ_and_copies_are_equal():
    one, two = Namespace(), Namespace()
    twin = pickle.loads(pickle.dumps(one))
    assert one != two
    assert one == twin == copy.copy(one) == copy.deepcopy(one)
    assert len({one, two, twin}) == 2
    assert (one < two) != (two < one)
    assert not one < twin
    assert one != None  # noqa: E711


def test_isolated_skips_of_one_name_do_not_meet():
    inner, outer = Namespace(), Namespace()
    layers = [Down().isolate(outer), Down().isolate(inner), Up().isolate(inner)]
    model = nn.Sequential(*layers, isolate(Up(), outer))
    verify_skippables(model)
    x = torch.randn(2, 3)
    a, b, c, d = (layer.linear for layer in model)
    assert torch.equal(model(x), d(c(b(a(x))) + a(x)) + x)


def test_isolate_some_names_only():
    alice, bob = Namespace(), Namespace()
    one = stashing("a", "b", "c").isolate(alice, only=["a"]).isolate(bob, only=["b"])
    verify_skippables(
        nn.Sequential(
            one,
            popping("a", "c").isolate(alice, only=["a"]),
            popping("b").isolate(bob),
        )
    )
    with pytest.raises(TypeError, match="'1' declared 'a' as poppable but it was not stashed"):
        verify_skippables(nn.Sequential(one, popping("a", "b", "c")))


def test_isolate_refuses_undeclared_names():
    with pytest.raises(ValueError, match=r"\['a'\], but got \['b'\]"):
        stashing("a").isolate(Namespace(), only=["b"])


# Verification


@pytest.mark.parametrize(
    ("layers", "problems"),
    [
        ([stashing("a"), popping("a")], []),
        ([stashing("a")], ["no module declared 'a' as poppable but stashed"]),
        ([popping("a")], ["'0' declared 'a' as poppable but it was not stashed"]),
        (
            [popping("a"), stashing("a")],
            [
                "'0' declared 'a' as poppable but it was not stashed",
                "no module declared 'a' as poppable but stashed",
            ],
        ),
        (
            [stashing("a"), stashing("a"), popping("a")],
            ["'1' redeclared 'a' as stashable but not isolated by namespace"],
        ),
        (
            [stashing("a"), popping("a"), popping("a")],
            ["'2' redeclared 'a' as poppable but not isolated by namespace"],
        ),
        (
            [stashing("a"), popping("a"), stashing("a"), popping("a")],
            [
                "'2' redeclared 'a' as stashable but not isolated by namespace",
                "'3' redeclared 'a' as poppable but not isolated by namespace",
            ],
        ),
        (
            [skippable(["a"], ["a"])(type("Both", (nn.Module,), {}))()],
            ["'0' declared 'a' both as stashable and as poppable"],
        ),
        (
            [
                stashing("a"),
                skippable(["b"], ["a"])(type("Chain", (nn.Module,), {}))(),
                popping("b"),
            ],
            [],
        ),
    ],
)
def test_verification_lists_what_does_not_match(layers, problems):
    try:
        verify_skippables(nn.Sequential(*layers))
        found = []
    except TypeError as error:
        found = [line[2:] for line in str(error).splitlines() if line.startswith("* ")]
    assert found == problems


def test_verification_finds_a_layer_that_stands_twice():
    down = Down()
    with pytest.raises(TypeError, match="'1' redeclared 'skip' as stashable"):
        verify_skippables(nn.Sequential(down, down, Up()))


def test_verification_sees_any_depth():
    named = OrderedDict(down=Block(Block(Down())), up=Block(Up()))
    verify_skippables(nn.Sequential(named))
    with pytest.raises(TypeError, match=r"'up\.inside' declared 'skip' as poppable but it was not"):
        verify_skippables(nn.Sequential(OrderedDict(reversed(named.items()))))
    with pytest.raises(TypeError, match=r"'1\.0\.inside' redeclared 'skip' as stashable"):
        verify_skippables(nn.Sequential(Down(), nn.Sequential(Block(Down())), Up()))
    with pytest.raises(TypeError, match=r"'0\.0' declared 'skip' as poppable but it was not"):
        verify_skippables(nn.Sequential(nn.Sequential(Up(), Down())))


def test_verification_leaves_order_inside_a_layer_to_its_forward():
    model = nn.Sequential(Between(Up(), Down()))
    verify_skippables(model)
    model(torch.ones(1, 3))


# Layout and stages


def test_layout_tells_the_way_of_each_skip():
    ns = Namespace()
    layout = SkipLayout(
        [
            [stashing("far", "also"), stashing("here"), popping("here")],
            [Block(stashing("far").isolate(ns))],
            nn.Sequential(popping("also")),
            [Block(Block(popping("far").isolate(ns))), popping("far")],
        ]
    )
    assert [layout.exports(j) for j in range(4)] == [
        [((None, "also"), 2), ((None, "far"), 3)],
        [((ns, "far"), 3)],
        [],
        [],
    ]
    assert [layout.imports(j) for j in range(4)] == [
        [],
        [],
        [((None, "also"), 0)],
        [((None, "far"), 0), ((ns, "far"), 1)],
    ]
    assert [route.key[1] for route in layout.routes] == ["also", "far", "here", "far"]
    assert pickle.loads(pickle.dumps(layout)).routes == layout.routes


def test_order_of_names_is_the_same_in_every_process():
    layers = [stashing(*"fedcba")], [popping(*"abcdef")]  # sets of strings differ in order
    assert [key[1] for key, _ in SkipLayout(layers).exports(0)] == list("abcdef")


def test_layout_refuses_what_does_not_match():
    with pytest.raises(TypeError, match=r"'0\.0' declared 'skip' as poppable"):
        SkipLayout([[Up()], [Down()]])


@pytest.mark.parametrize("balance", [(5,), (1, 4), (2, 3), (1, 1, 3), (1, 1, 1, 1, 1)])
def test_stages_compute_what_the_whole_model_computes(balance):
    ns = Namespace()
    model = nn.Sequential(
        Block(Down()), Down().isolate(ns), nn.Tanh(), Up().isolate(ns), Block(Block(Up()))
    )
    x = torch.randn(4, 3)
    layers = iter(model)
    partitions = [nn.Sequential(*(next(layers) for _ in range(size))) for size in balance]
    assert torch.equal(run_in_stages(partitions, x), model(x))


def test_store_reports_what_goes_nowhere_and_what_is_missing():
    store = SkipStore({(None, "b"): torch.ones(1)})
    store.save((None, "a"), None)
    with pytest.raises(RuntimeError, match="'a', 'b' stashed or imported but not popped"):
        store.require_empty()
    assert store.take((None, "a")) is None
    with pytest.raises(RuntimeError, match="'a' must leave this stage but has not been stashed"):
        store.take((None, "a"))
    with pytest.raises(KeyError):
        store.load((None, "a"))


def test_store_is_current_only_within_its_with():
    before = current_store()
    with use_store(SkipStore()) as store:
        assert current_store() is store
    assert current_store() is before
