"""Trees: paths, mapping, substitution, and loading by path."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any, NamedTuple

import numpy as np
import pytest

from mlvm.arena.arena import Arena
from mlvm.core.errors import DTypeError, PathError, ShapeError, StaleTensor
from mlvm.eager.autodiff.grad import vjp
from mlvm.eager.functions.creation import asarray
from mlvm.eager.tensor.context import default_vm
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tree import (
    Buffer,
    Node,
    Twins,
    children,
    leaves,
    load,
    map_tree,
    named_tensors,
    rebind_buffers,
    replace,
    substitute,
)

ONE = np.ones(1, np.float32)


class Lender:
    """Values that are to be had by DLPack alone."""

    def __init__(self, values: list[float]) -> None:
        self.array = np.array(values, np.float32)

    def __dlpack__(self, **keywords: Any) -> Any:
        return self.array.__dlpack__(**keywords)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


def tensor(value: float = 0.0) -> Tensor:
    return asarray([float(value)])


class Pair(NamedTuple):
    left: Any
    right: Any


class Leaf(Node):
    def __init__(self) -> None:
        self.weight = tensor(1)
        self.size = 3
        self.nothing = None


class Parent(Node):
    def __init__(self) -> None:
        self.name = "parent"
        self.Leaf = [Leaf(), abs, Leaf()]
        self.lookup = {"a": [tensor(2)], "b": {"c": tensor(3)}}
        self.last = Leaf()


def test_paths_name_the_tensors_of_containers() -> None:
    tree = {"a": tensor(), "b": [tensor(), (tensor(), None)], "c": Pair(tensor(), {})}
    assert [path for path, _ in leaves(tree)] == ["a", "b/0", "b/1/0", "c/0"]


def test_paths_of_a_module_follow_its_fields_in_order() -> None:
    paths = [path for path, _ in leaves(Parent())]
    expected = ["Leaf_0/weight", "Leaf_2/weight", "lookup/a/0", "lookup/b/c", "last/weight"]
    assert paths == expected


def test_a_bare_tensor_is_a_tree() -> None:
    x = tensor()
    assert list(leaves(x)) == [("", x)]
    assert list(leaves(None)) == []


def test_a_shared_tensor_is_named_once() -> None:
    x, y = tensor(), tensor()
    assert named_tensors({"a": x, "b": y, "c": [x]}) == {"a": x, "b": y}


def test_two_tensors_of_one_path() -> None:
    with pytest.raises(DTypeError, match="two tensors have the path a/b"):
        named_tensors({"a/b": tensor(), "a": {"b": tensor()}})


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": [tensor(), 3]}, "a tree has tensors as leaves, not a int at a/1"),
        (np.zeros(2), "a tree has tensors as leaves, not a ndarray"),
        ({"a": {1: tensor(), "1": tensor()}}, "a name occurs twice among 1, 1 at a"),
    ],
)
def test_what_is_no_tree(tree: Any, message: str) -> None:
    with pytest.raises(DTypeError, match=f"^{message}$"):
        list(leaves(tree))


def test_a_tree_does_not_contain_itself() -> None:
    items: list[Any] = [tensor()]
    items.append(items)
    node = Leaf()
    vars(node).update(child=[Parent()])
    vars(node)["child"][0].up = node
    for tree, message in [
        (items, "this list contains itself at 1"),
        (node, "this Leaf contains itself at child_0/up"),
    ]:
        for walk in (leaves, named_tensors, lambda tree: map_tree(abs, tree)):
            with pytest.raises(DTypeError, match=message):
                walk(tree)
    twice = Leaf()
    assert len(list(leaves([twice, {"again": twice}]))) == 2


def test_two_fields_of_one_name() -> None:
    node = Leaf()
    vars(node).update(x=[tensor()], x_0=tensor())
    with pytest.raises(DTypeError, match="a name occurs twice among weight, x_0, x_0"):
        children(node)


def test_map_tree_keeps_containers_and_makes_modules_dicts() -> None:
    tree = {3: Pair(tensor(1), None), "m": [Leaf()]}
    mapped = map_tree(lambda x, y: float(x + y), tree, tree)
    assert mapped == {3: Pair(2.0, None), "m": [{"weight": 2.0}]}
    assert isinstance(mapped[3], Pair)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"a": [tensor()]}, r"two trees differ at a: \['0', '1'\] beside \['0'\]"),
        ({"a": [tensor(), None]}, "two trees differ at a/1: Tensor beside NoneType"),
        ({"a": tensor()}, "two trees differ at a: list beside Tensor"),
        ({"b": None}, r"two trees differ: \['a'\] beside \['b'\]"),
    ],
)
def test_trees_that_differ(other: Any, message: str) -> None:
    with pytest.raises(DTypeError, match=f"^{message}$"):
        map_tree(lambda x, _: x, {"a": [tensor(), tensor()]}, other)


def test_substitute_copies_modules_and_keeps_what_is_no_tensor() -> None:
    parent = Parent()
    twin = substitute(lambda x: x + 1, parent)
    assert isinstance(twin, Parent)
    assert twin.name == "parent"
    assert twin.Leaf[1] is abs
    assert float(twin.last.weight) == 2
    assert float(parent.last.weight) == 1


def test_substitute_keeps_shared_tensors_shared() -> None:
    x = tensor()
    first, second = substitute(lambda x: x + 1, [x, {"a": x}])
    assert first is second["a"]


class Stateful(Node):
    def __init__(self) -> None:
        self.weight = tensor(1)
        self.mean: Any = Buffer(tensor(2))
        self.teacher = Buffer(Leaf())
        self.counts: Any = Buffer([asarray([3]), {"n": asarray([4])}])


def test_buffers_are_beside_the_tree() -> None:
    node = {"a": Stateful()}
    assert list(named_tensors(node)) == ["a/weight"]
    every = ["weight", "mean", "teacher/weight", "counts_0", "counts_1/n"]
    assert list(named_tensors(node, buffers=True)) == [f"a/{path}" for path in every]
    assert map_tree(float, node) == {"a": {"weight": 1.0}}


def test_substitute_keeps_nothing_alive() -> None:
    x = asarray(1.0)
    gc.disable()
    try:
        twin = substitute(lambda x: x + 1, [x, {"a": x}])
        references = weakref.ref(x), weakref.ref(twin[0])
        del x, twin
        assert [reference() for reference in references] == [None, None]
    finally:
        gc.enable()


def test_substitute_leaves_buffers_as_they_are() -> None:
    node = Stateful()
    twins: Twins = []
    twin = substitute(lambda x: x + 1, node, twins)
    assert (float(twin.weight), float(node.weight)) == (2, 1)
    assert twin.mean is node.mean
    assert twin.teacher is node.teacher
    assert twins == [(node, twin)]
    assert list(named_tensors(twin, buffers=True)) == list(named_tensors(node, buffers=True))


def test_substitute_keeps_shared_modules_shared() -> None:
    node = Leaf()
    first, second = substitute(lambda x: x + 1, [node, {"a": node}])
    assert first is second["a"] is not node


def test_a_buffer_stays_one_until_it_is_deleted() -> None:
    node = Stateful()
    node.mean = tensor(5)
    assert list(named_tensors(node)) == ["weight"]
    assert float(named_tensors(node, buffers=True)["mean"]) == 5
    assert "mean" not in named_tensors(copy.copy(node))
    del node.mean
    node.mean = tensor(6)
    assert list(named_tensors(node)) == ["weight", "mean"]


def test_what_a_twins_buffers_were_replaced_by_goes_to_the_module() -> None:
    node = Stateful()
    twins: Twins = []
    twin = substitute(lambda x: x, node, twins)
    before = dict(vars(node))
    twin.mean, twin.weight, twin.fresh = tensor(7), tensor(8), Buffer(tensor(9))
    rebind_buffers(twins)
    assert (float(node.mean), float(vars(node)["fresh"])) == (7, 9)
    assert list(named_tensors(node)) == ["weight"]
    assert node.weight is before["weight"]
    assert node.counts is before["counts"]


def test_a_buffer_in_a_container_is_refused() -> None:
    node = Leaf()
    vars(node).update(parts=[Buffer(tensor())])
    for tree in (node, {"parts_0": Buffer(tensor())}):
        with pytest.raises(DTypeError, match="tensors as leaves, not a Buffer at parts_0"):
            leaves(tree)


class TestLoad:
    def test_writes_in_place(self) -> None:
        x, y = tensor(), tensor()
        load({"x": x, "y": y}, {"y": tensor(2), "x": ONE}, "value")
        assert (float(x), float(y)) == (1, 2)

    @pytest.mark.parametrize(
        ("arrays", "error", "message"),
        [
            ({}, PathError, "missing values 'x', 'y'"),
            (
                {"x": ONE, "z": ONE},
                PathError,
                "missing value 'y'; unknown value 'z'",
            ),
            (
                {"x": ONE, "y": np.zeros(1)},
                DTypeError,
                r"value 'y' is f32\[1\], given f64\[1\]: convert it with astype\('float32'\)",
            ),
            (
                {"x": ONE, "y": np.ones((1, 1), np.float32)},
                ShapeError,
                r"value 'y' is f32\[1\], given f32\[1,1\]",
            ),
            (
                {"x": ONE, "y": [1.0]},
                DTypeError,
                "value 'y' must be an array, not a li",
            ),
            ({"x": ONE, "y": np.array(["a"])}, DTypeError, "no dtype"),
            ([1], DTypeError, "arrays come by path, in a mapping, not in a list"),
        ],
    )
    def test_writes_nothing_unless_all_fits(
        self, arrays: Any, error: type[Exception], message: str
    ) -> None:
        tensors = {"x": tensor(), "y": tensor()}
        with pytest.raises(error, match=message):
            load(tensors, arrays, "value")
        assert float(tensors["x"]) == 0

    def test_takes_what_asarray_takes(self) -> None:
        tensors = {"x": tensor(), "y": tensor()}
        load(tensors, {"x": np.array([1.5], np.float16), "y": Lender([2.5])}, "value")
        assert (float(tensors["x"]), float(tensors["y"])) == (1.5, 2.5)

    def test_takes_parameters_of_torch(self) -> None:
        torch: Any = pytest.importorskip("torch")
        tensors = {"x": tensor(), "y": tensor()}
        half = torch.tensor([0.5], dtype=torch.bfloat16)
        load(tensors, {"x": torch.nn.Parameter(torch.ones(1)), "y": half}, "value")
        assert (float(tensors["x"]), float(tensors["y"])) == (1.0, 0.5)

    def test_refuses_a_tensor_that_has_ended(self) -> None:
        x = tensor()
        with Arena(default_vm(), "batch"):
            y = tensor()
        with pytest.raises(StaleTensor, match="its arena was reset"):
            load({"x": x, "y": y}, {"x": ONE, "y": ONE}, "value")
        assert float(x) == 0

    def test_what_a_tape_needs_is_kept(self) -> None:
        x = tensor(3)
        _, pullback = vjp(lambda x: x * x, x)
        load({"x": x}, {"x": ONE}, "value")
        assert x.tolist() == ONE.tolist()
        assert float(pullback(tensor(1))[0]) == 6


def test_replace_maps_parts_of_any_kind_and_keeps_the_rest() -> None:
    module = Leaf()
    tree = {"a": [1, "two", (3.0, module)], "b": Pair(None, 4)}
    found = replace(lambda x: x + 1, tree, (int, float))
    assert found == {"a": [2, "two", (4.0, module)], "b": Pair(None, 5)}
    assert found["a"][2][1] is module
    x = tensor()
    assert replace(id, [x, module]) == [id(x), module]
