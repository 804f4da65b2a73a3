"""`ml.tree.map` and `ml.tree.leaves`."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.eager import nn
from tests.brief import cases, refuses


class Pair(NamedTuple):
    left: Any
    right: Any


class Block(nn.Module):
    def __init__(self) -> None:
        self.name = "block"
        self.layers: list[Any] = [nn.Linear(2, 3), ml.relu, nn.Linear(3, 2, bias=False)]
        self.parts = {"scale": ml.ones(2)}
        self.sizes = {"rows": 2}
        self.mean = nn.buffer(ml.zeros(2))

    def __call__(self, x: ml.Tensor) -> ml.Tensor:
        first, activation, last = self.layers
        y: ml.Tensor = last(activation(first(x))) * self.parts["scale"] - self.mean
        return y


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


def test_map_takes_what_the_rest_has_at_the_leaves() -> None:
    tree, others = [1, {"a": 2}], [[3, {"a": 4}], [(5, 6), {"a": None}]]
    with pytest.raises(ml.errors.DTypeError, match="differ at 1/a: int beside NoneType"):
        ml.tree.map(lambda *xs: xs, tree, *others)
    assert ml.tree.map(lambda *xs: xs, tree, others[0], [(5, 6), {"a": [7]}]) == [
        (1, 3, (5, 6)),
        {"a": (2, 4, [7])},
    ]


def test_values_go_out_and_come_in() -> None:
    params = {"w": ml.ones((2, 2)), "b": [ml.zeros(2)]}
    arrays = ml.tree.map(np.asarray, params)
    assert isinstance(arrays["b"][0], np.ndarray)
    back = ml.tree.map(ml.asarray, arrays)
    assert [x.type for x in ml.tree.leaves(back)] == [x.type for x in ml.tree.leaves(params)]
    assert ml.tree.map(lambda x: x.shape, params) == {"w": (2, 2), "b": [(2,)]}


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


class Simple(nn.Module):
    def __init__(self) -> None:
        self.layers = [nn.Linear(2, 3), nn.Linear(3, 2)]
        self.scale = ml.ones(2)

    def __call__(self, x: ml.Tensor) -> ml.Tensor:
        return self.layers[1](self.layers[0](x)) * self.scale


def test_a_step_of_gradient_descent_over_a_module_and_its_gradients() -> None:
    model, x = Simple(), ml.asarray(np.eye(2, dtype=np.float32))

    def loss(model: Simple) -> ml.Tensor:
        return ml.mean_squared_error(model(x), x)

    value, gradients = ml.value_and_grad(loss)(model)
    stepped = ml.tree.map(lambda p, g: p - 0.01 * g, model, gradients)
    assert loss(stepped).item() < value.item()
    by_hand = model.scale.numpy() - 0.01 * gradients["scale"].numpy()
    np.testing.assert_allclose(stepped.scale.numpy(), by_hand, rtol=1e-6)
    together = ml.tree.map(lambda p, q: (p + q) / 2.0, {"m": model}, {"m": model.parameters()})
    np.testing.assert_array_equal(together["m"].scale.numpy(), model.scale.numpy())


def test_what_is_shared_stays_shared() -> None:
    model = Simple()
    model.layers[1] = model.layers[0]
    w = ml.ones(2)
    calls: list[ml.Tensor] = []

    def copied(x: ml.Tensor) -> ml.Tensor:
        calls.append(x)
        return ml.copy(x)

    twin, first, second = ml.tree.map(copied, (model, w, [w]))
    assert twin.layers[0] is twin.layers[1]
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


@cases(
    "tree, other, text",
    ([1, 2], [1], r"two trees differ: \['0', '1'\] beside \['0'\]"),
    ({"a": 1}, {"b": 1}, r"two trees differ: \['a'\] beside \['b'\]"),
    ({"a": [1]}, {"a": 1}, "differ at a: list beside int"),
    ([None], [1], "differ at 0: NoneType beside int"),
    ([1], [None], "differ at 0: int beside NoneType"),
)
def test_structures_that_differ(tree: Any, other: Any, text: str) -> None:
    refuses(ml.errors.DTypeError, text, ml.tree.map, lambda x, y: x, tree, other)


def test_a_tree_that_contains_itself() -> None:
    inside: list[Any] = [1]
    inside.append(inside)
    for function in (ml.tree.leaves, lambda tree: ml.tree.map(lambda x: x, tree)):
        refuses(ml.errors.DTypeError, "contains itself at 1", function, inside)
