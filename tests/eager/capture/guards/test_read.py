"""A captured call looks at what its function reaches only if something there leads elsewhere."""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

import mlvm.eager as ml
from mlvm.eager import nn, optim
from mlvm.eager.capture.guards.changing import words_of
from mlvm.eager.capture.guards.guard_set import GuardSet
from mlvm.machines.native.extension import EXTENSION
from tests.brief import Patch, count_calls, refuses
from tests.eager.capture.guards.changes import OBJECTS, PARTS, Plain, built

Case = Callable[[], tuple[Callable[..., Any], Callable[[], object]]]

pytestmark = pytest.mark.usefixtures("weights")
CASES: dict[str, Case] = {}


def case(make: Case) -> Case:
    """A function, and a change after which another scan finds something else."""
    CASES[make.__name__] = make
    return make


@case
def an_imported_module(name: str = "signature_import") -> Any:
    for each in (first := types.ModuleType(name), second := types.ModuleType(name)):
        vars(each)["lr"] = 2.0
    sys.modules[name] = first

    def step(x: ml.Tensor) -> ml.Tensor:
        import signature_import  # type: ignore[import-not-found]

        return x * signature_import.lr

    return step, lambda: sys.modules.update({name: second})


class Layer(nn.Module):
    def __init__(self) -> None:
        self.w = ml.ones(2)
        self.count = 0
        self.history: list[Any] = []
        self.extra: Any = None
        self.mode = "a"

    def __call__(self, x: ml.Tensor) -> ml.Tensor:
        return x * self.w if self.mode else x


@case
def a_tensor_in_a_module() -> Any:
    layer = Layer()
    return layer, lambda: setattr(layer, "w", ml.ones(2))


@case
def an_unread_field_that_gets_a_tensor() -> Any:
    layer = Layer()
    return layer, lambda: setattr(layer, "extra", ml.ones(2))


@case
def an_unread_list_that_gets_a_tensor() -> Any:
    layer = Layer()
    return layer, lambda: layer.history.append(ml.ones(2))


@case
def an_unread_field_that_is_deleted_and_a_tensor_that_comes() -> Any:
    layer = Layer()

    def change() -> None:
        del layer.extra
        layer.another = ml.ones(2)  # type: ignore[attr-defined]

    return layer, change


@case
def a_number_of_another_class() -> Any:
    class Scaled(Layer):
        scale: float = 0.0

        def __call__(self, x: ml.Tensor) -> ml.Tensor:
            return x * self.scale

    layer = Scaled()
    layer.scale = 2.0
    return layer, lambda: setattr(layer, "scale", 2)


@case
def a_field_of_an_optimizer() -> Any:
    optimizer = optim.SGD(ml.ones(2), 0.5, momentum=0.5)
    return optimizer.update, lambda: setattr(optimizer, "nesterov", True)


@case
def a_schedule() -> Any:
    optimizer = optim.SGD(ml.ones(2), optim.constant(0.5))
    return optimizer.update, lambda: setattr(optimizer, "learning_rate", optim.constant(0.25))


@case
def a_field_that_is_only_assigned() -> Any:
    c: Any = Plain(rate=2.0)
    return lambda x: [x for c.rate in (2.0,)], lambda: setattr(c, "rate", 3.0)


SCANNED = {
    *("a dataclass as a dict", "a field of a mock", "a default that is changed"),
    *("a cached function of arguments", "a deque of another length", "an ordered dict", "proxy"),
    *("a list of a class of one's own", "weak reference", "ordered dict", "deque"),
    "a class pattern",
}
"""Rows with what no guard can compare, so that each call scans."""

NOTICED = {*OBJECTS, *PARTS} - {"Module", *[each for each in PARTS if "argument" in each]}
"""Rows, but for numbers of Modules and arguments, which are inputs."""


@pytest.mark.parametrize("name", [*sorted(NOTICED), *CASES])
def test_a_change_is_noticed(name: str) -> None:
    fn, change, *_ = CASES[name]() if name in CASES else built(name)
    guards = GuardSet(fn)
    assert (guards.values() is None) == (name in SCANNED)
    assert GuardSet(fn).key == guards.key
    words = dict(words_of(guards))
    change()
    assert GuardSet(fn).key != guards.key
    assert guards.values() is None
    assert name in {*SCANNED, "default"} or dict(words_of(GuardSet(fn))) != words


# --- what leads to the same, and what cannot be told --------------------------------------------


def test_steady_calls_look_once(monkeypatch: Patch) -> None:
    layer = Layer()
    optimizer = optim.AdamW(layer, 0.1)
    options: dict[str, Any] = {"scale": 2.0, "names": ["a", "b"]}

    @ml.capture
    def step(x: ml.Tensor, model: Any, how: Any = None) -> ml.Tensor:
        _, gradients = ml.value_and_grad(lambda m: ml.sum(m(x) * options["scale"]))(model)
        optimizer.update(gradients)
        return x * len(options["names"])

    def same(i: int) -> None:
        layer.count = i  # which nothing reads
        layer.history.append(i)
        optimizer.learning_rate = 0.1 / (i + 1)
        step(ml.ones((1 + i % 2, 2)), layer, how={"i": i, "name": "ab"[i % 2]})

    for i in range(6):
        same(i)
    scans = count_calls(monkeypatch, GuardSet, "__init__")
    for i in range(6, 20):
        same(i)
    assert scans["__init__"] == 0
    options["names"].append("c")
    same(20)
    assert scans["__init__"] >= 1


def test_random_changes_are_told_from_none() -> None:
    """Whenever a watch holds, another look finds the same."""
    draw = random.Random(12)
    noticed = unnoticed = 0
    for _ in range(60):
        leaf: Any = draw.choice([1, 2.0, "a", None, (1, 2)])
        layer = Layer()
        nodes: list[Any] = [{}, [], Plain(), types.SimpleNamespace(), layer, {"k": leaf}]
        nodes[0]["b"], nodes[2].a, nodes[3].b = nodes[1], nodes[0], nodes[5]
        nodes[1].append(layer)
        layer.extra = nodes[2]

        def step(x: Any, nodes: Any = nodes, layer: Any = layer) -> Any:
            layer(x)
            return nodes[2].a, nodes[3].b, layer.extra, nodes[0].get("c")

        guards = GuardSet(step)
        assert guards.values() is not None
        for _ in range(4):
            change(draw, draw.choice(nodes), nodes)
            fresh = GuardSet(step)
            if guards.values() is None:
                noticed += 1
            else:
                unnoticed += 1
                assert fresh.key == guards.key
            guards = fresh
    assert noticed > 50
    assert unnoticed > 20


def change(draw: random.Random, node: Any, nodes: list[Any]) -> None:
    value = draw.choice([1, 2.0, "b", None, (1, 2), ml.ones(1), [3], draw.choice(nodes[:2])])
    name = draw.choice(["a", "b", "c", "count", "extra"])
    if isinstance(node, list):
        if draw.random() < 0.5:
            node.append(value)
        elif node:
            node[0] = node[0]
    elif isinstance(node, dict):
        if draw.random() < 0.3:
            node.pop(name, None)
        else:
            node[name] = value
    elif draw.random() < 0.3 and name in vars(node) and name != "extra":
        delattr(node, name)
    elif not (name == "extra" and isinstance(value, (list, dict))):
        setattr(node, name, value)


@pytest.mark.skipif(EXTENSION is None, reason="the extension is not here")
def test_reads_that_are_none_are_refused() -> None:
    assert EXTENSION is not None
    for name, owner in (("item", []), ("nothing", {}), ("keys", {})):
        refuses(TypeError, "", EXTENSION.Checklist, object(), ((name, owner, "x", 1),))
