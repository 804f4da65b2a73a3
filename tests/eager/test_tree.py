"""Trees: paths, mapping, substitution, and loading by path."""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.arena.arena import Arena
from mlvm.core.collecting import uncollected
from mlvm.core.errors import DTypeError, StaleTensorError
from mlvm.eager import nn
from mlvm.eager.autodiff.grad import vjp
from mlvm.eager.functions.creation import asarray
from mlvm.eager.tensor.context import default_vm
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tree import (
    Buffer,
    Copies,
    Node,
    children,
    load,
    map_to_dicts,
    named_leaves,
    named_tensors,
    rebind_buffers,
    replace,
    substitute,
)
from tests.brief import refuses

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
    assert [path for path, _ in named_leaves(tree)] == ["a", "b/0", "b/1/0", "c/0"]


def test_paths_of_a_module_follow_its_fields_in_order() -> None:
    paths = [path for path, _ in named_leaves(Parent())]
    expected = ["Leaf_0/weight", "Leaf_2/weight", "lookup/a/0", "lookup/b/c", "last/weight"]
    assert paths == expected


def test_a_shared_tensor_is_named_once() -> None:
    x, y = tensor(), tensor()
    assert named_tensors({"a": x, "b": y, "c": [x]}) == {"a": x, "b": y}


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
        for walk in (
            named_leaves,
            named_tensors,
            ml.tree.leaves,
            lambda tree: ml.tree.map(abs, tree),
        ):
            refuses(DTypeError, message, walk, tree)
    twice = Leaf()
    assert len(list(named_leaves([twice, {"again": twice}]))) == 2


def test_two_fields_of_one_name() -> None:
    node = Leaf()
    vars(node).update(x=[tensor()], x_0=tensor())
    refuses(DTypeError, "expected distinct names, got weight, x_0, x_0", children, node)


def test_modules_become_dicts() -> None:
    mapped = map_to_dicts(float, {3: Pair(tensor(1), None), "m": [Leaf()]})
    assert mapped == {3: Pair(1.0, None), "m": [{"weight": 1.0}]}
    assert isinstance(mapped[3], Pair)


def test_substitute_copies_modules_and_keeps_what_is_no_tensor() -> None:
    parent = Parent()
    copied = substitute(lambda x: x + 1, parent)
    assert isinstance(copied, Parent)
    assert copied.name == "parent"
    assert copied.Leaf[1] is abs
    assert float(copied.last.weight) == 2
    assert float(parent.last.weight) == 1


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
    assert map_to_dicts(float, node) == {"a": {"weight": 1.0}}


def test_substitute_keeps_nothing_alive() -> None:
    x = asarray(1.0)
    with uncollected():
        copied = substitute(lambda x: x + 1, [x, {"a": x}])
        references = weakref.ref(x), weakref.ref(copied[0])
        del x, copied
        assert [reference() for reference in references] == [None, None]


def test_substitute_leaves_buffers_as_they_are() -> None:
    node = Stateful()
    copies: Copies = []
    copied = substitute(lambda x: x + 1, node, copies)
    assert (float(copied.weight), float(node.weight)) == (2, 1)
    assert copied.mean is node.mean
    assert copied.teacher is node.teacher
    assert copies == [(node, copied)]
    assert list(named_tensors(copied, buffers=True)) == list(named_tensors(node, buffers=True))


def test_substitute_keeps_shared_tensors_and_modules_shared() -> None:
    for node in (tensor(), Leaf()):
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


def test_what_a_copys_buffers_were_replaced_by_goes_to_the_module() -> None:
    node = Stateful()
    copies: Copies = []
    copied = substitute(lambda x: x, node, copies)
    before = dict(vars(node))
    copied.mean, copied.weight, copied.fresh = tensor(7), tensor(8), Buffer(tensor(9))
    rebind_buffers(copies)
    assert (float(node.mean), float(vars(node)["fresh"])) == (7, 9)
    assert list(named_tensors(node)) == ["weight"]
    assert node.weight is before["weight"]
    assert node.counts is before["counts"]


def test_a_buffer_in_a_container_is_refused() -> None:
    node = Leaf()
    vars(node).update(parts=[Buffer(tensor())])
    for tree in (node, {"parts_0": Buffer(tensor())}):
        refuses(DTypeError, "leaf, got a Buffer at parts_0", named_leaves, tree)


class TestLoad:
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
        with pytest.raises(StaleTensorError, match="the arena was reset"):
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
    result = replace(lambda x: x + 1, tree, (int, float))
    assert result == {"a": [2, "two", (4.0, module)], "b": Pair(None, 5)}
    assert result["a"][2][1] is module
    x = tensor()
    assert replace(id, [x, module]) == [id(x), module]


# --- `ml.tree.map` and `ml.tree.leaves` ----------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        self.name = "block"
        self.layers: list[Any] = [nn.Linear(2, 3), ml.relu, nn.Linear(3, 2, bias=False)]
        self.parts = {"scale": ml.ones(2)}
        self.sizes = {"rows": 2}
        self.mean = nn.buffer(ml.zeros(2))

    def __call__(self, x: ml.Tensor) -> ml.Tensor:
        first, activation, last = self.layers
        return last(activation(first(x))) * self.parts["scale"] - self.mean


def test_map_keeps_the_structure() -> None:
    tree = {"a": [1, (2.5, None)], "b": Pair(3, {}), "c": OrderedDict(z=4, y="five")}
    doubled = ml.tree.map(lambda x: x * 2, tree)
    assert doubled == {"a": [2, (5.0, None)], "b": Pair(6, {}), "c": OrderedDict(z=8, y="fivefive")}
    assert list(map(type, doubled.values())) == [list, Pair, OrderedDict]
    assert ml.tree.map(lambda x: x, defaultdict(list, a=1)).default_factory is list
    assert ml.tree.map(abs, -3) == 3
    assert ml.tree.map(abs, None) is None
    assert ml.tree.leaves(tree) == [1, 2.5, 3, 4, "five"]
    assert ml.tree.leaves(None) == []
    assert ml.tree.leaves([1, 1]) == [1, 1]


def test_a_module_becomes_one_of_its_class_with_other_tensors() -> None:
    model = Block()
    before = {path: x.numpy() for path, x in model.named_parameters().items()}
    doubled = ml.tree.map(lambda x: x * 2.0, model)
    assert type(doubled) is Block
    assert (doubled.name, doubled.sizes, doubled.layers[1]) == ("block", {"rows": 2}, ml.relu)
    assert doubled.mean is model.mean
    assert doubled.layers[0] is not model.layers[0]
    after = doubled.named_parameters()
    assert list(after) == list(before)
    for path, x in after.items():
        np.testing.assert_array_equal(x.numpy(), before[path] * 2)
        np.testing.assert_array_equal(model.named_parameters()[path].numpy(), before[path])
    assert ml.tree.leaves(model) == list(model.named_parameters().values())
    x = ml.ones((1, 2))
    np.testing.assert_allclose(doubled(x).numpy(), 8 * model(x).numpy(), rtol=1e-5)


def test_a_step_of_gradient_descent_over_a_module_and_its_gradients() -> None:
    model, x = Block(), ml.asarray(np.eye(2, dtype=np.float32))

    def loss(model: Block) -> ml.Tensor:
        return ml.mean_squared_error(model(x), x)

    value, gradients = ml.value_and_grad(loss)(model)
    stepped = ml.tree.map(lambda p, g: p - 0.01 * g, model, gradients)
    assert loss(stepped).item() < value.item()
    by_hand = model.parts["scale"].numpy() - 0.01 * gradients["parts"]["scale"].numpy()
    np.testing.assert_allclose(stepped.parts["scale"].numpy(), by_hand, rtol=1e-6)
    together = ml.tree.map(lambda p, q: (p + q) / 2.0, {"m": model}, {"m": model.parameters()})
    np.testing.assert_array_equal(
        together["m"].parts["scale"].numpy(), model.parts["scale"].numpy()
    )


def test_what_is_shared_stays_shared() -> None:
    model = Block()
    model.layers[2] = model.layers[0]
    w = ml.ones(2)
    calls: list[ml.Tensor] = []

    def copied(x: ml.Tensor) -> ml.Tensor:
        calls.append(x)
        return ml.copy(x)

    other, first, second = ml.tree.map(copied, (model, w, [w]))
    assert other.layers[0] is other.layers[2]
    assert first is second[0]
    assert len(calls) == 4
    assert len(ml.tree.leaves((model, w, [w]))) == 7
    different = ml.tree.map(lambda x, y: x * y, [w, w], [2.0, 3.0])
    assert [x.numpy().tolist() for x in different] == [[2.0, 2.0], [3.0, 3.0]]


def test_map_inside_a_gradient_and_a_captured_step() -> None:
    def norm(params: Any) -> ml.Tensor:
        squares = ml.tree.map(lambda x: ml.sum(x * x), params)
        return sum(ml.tree.leaves(squares), ml.zeros(()))

    params = {"a": ml.ones(2), "b": (ml.full(3, 2.0),)}
    gradient = ml.grad(norm)(params)
    assert ml.tree.map(np.ndarray.tolist, ml.tree.map(np.asarray, gradient)) == {
        "a": [2.0, 2.0],
        "b": ([4.0, 4.0, 4.0],),
    }
    captured = ml.capture(lambda params: ml.tree.map(lambda x: x + 1.0, params))
    for _ in range(2):
        assert captured(params)["b"][0].numpy().tolist() == [3.0, 3.0, 3.0]
