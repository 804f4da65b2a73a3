"""What a captured function returns besides tensors: each call returns objects of its own, as the
eager call does, and objects from outside as they are."""

from __future__ import annotations

import array
import collections
import copy
import dataclasses
import functools
import io
import json
import pickle
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import CaptureError
from mlvm.eager import nn
from tests.brief import cases, refuses

pytestmark = pytest.mark.usefixtures("weights")


@dataclasses.dataclass
class Stats:
    seen: Any = 0
    of: Any = None


class Pair(tuple[Any, ...]):
    def __new__(cls, first: Any, second: Any) -> Pair:
        return super().__new__(cls, (first, second))


class Config(dict[str, Any]):
    __getattr__ = dict.__getitem__


class Growing(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        return self.setdefault(name, Growing())


class Numbers(list[Any]):
    """A list with fields."""


def numbers() -> Numbers:
    result = Numbers([1])
    result.seen = [0]  # type: ignore[attr-defined]
    return result


MAKERS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "dataclass": (Stats, lambda r: setattr(r, "seen", 1)),
    "namespace": (lambda: types.SimpleNamespace(n=0), lambda r: setattr(r, "n", 1)),
    "deque": (lambda: collections.deque([0]), lambda r: r.append(1)),
    "UserDict": (lambda: collections.UserDict(a=0), lambda r: r.update(b=1)),
    "array of Python": (lambda: array.array("d", [0.0]), lambda r: r.append(1.0)),
    "array": (lambda: np.zeros(2), lambda r: r.fill(1.0)),
    "array in a dataclass": (lambda: Stats(np.zeros(2)), lambda r: r.seen.fill(1.0)),
    "a list with a field": (numbers, lambda r: r.seen.append(1)),
    "bound method": (lambda: Stats([0]).__repr__, lambda r: r.__self__.seen.append(1)),
    "set in a dataclass": (lambda: Stats({0}), lambda r: r.seen.add(1)),
    "dict in an object in a list": (
        lambda: [Stats({"a": [1]})],
        lambda r: r[0].seen["a"].append(2),
    ),
}


def described(value: Any) -> str:
    if isinstance(value, types.MethodType):
        value = value()
    return f"{value!r} {getattr(value, 'seen', '')}"


@pytest.mark.parametrize("name", MAKERS)
def test_each_call_returns_a_new_object(name: str) -> None:
    make, change = MAKERS[name]
    step = ml.capture(lambda x: (x * 2.0, make()))
    expected = described(make())
    for _ in range(3):
        result = step(ml.ones(2))[1]
        assert described(result) == expected
        change(result)
        assert described(result) != expected
    assert step.signatures == 1


def test_parts_of_a_result_share_what_they_share_eagerly() -> None:
    outside = types.SimpleNamespace(seen=[1])

    def step(x: ml.Tensor, given: list[int]) -> Any:
        items = [x]
        return items, (items,), Stats(items), Stats(outside.seen, given), np.zeros(4)[1:]

    captured = ml.capture(step)
    for _ in range(3):
        given, outside.seen = [2], [1]
        for fn in (step, captured):
            first, [second], third, fourth, _ = fn(ml.ones(2), given)
            assert first is second is third.seen
            assert fourth.seen is outside.seen
            assert fourth.of is given
    array = np.zeros(4)
    assert np.shares_memory(ml.capture(lambda x: (x, array[1:]))(ml.ones(2))[1], array)


def counts() -> Any:
    count = 0

    def counter() -> int:
        nonlocal count
        count += 1
        return count

    return counter


@cases(
    "make",
    counts,
    lambda: lambda x, seen=[]: seen.append(x),
    lambda: [].append,
    lambda: type("Local", (), {"seen": []}),
    lambda: Stats(counts()),
    lambda: functools.cache(counts()),
    lambda: (array := np.zeros(3), array[1:]),
)
def test_objects_that_later_calls_would_share_are_refused(make: Callable[[], Any]) -> None:
    refuses(CaptureError, "later calls", ml.capture(lambda x: (x, make())), ml.ones(2))
    step: Any = ml.capture(lambda x: (x, lambda y: y + 1.0))
    assert step(ml.ones(2))[1](1.0) == 2.0


def test_a_tensor_is_a_key_of_a_result_as_in_the_eager_call() -> None:
    step: Any = ml.capture(lambda x: [{x * 2.0: x.shape[0], "x": x}, {x * 3.0}], check=1)
    for n in (2, 3, 2):
        table, [member] = step(ml.ones(n))
        [key, name] = table
        assert (key.tolist(), table[key], name) == ([2.0] * n, n, "x")
        assert member.tolist() == [3.0] * n


def test_a_type_in_a_result_is_that_of_the_call() -> None:
    step = ml.capture(lambda x: (x, [x.type]))
    for n in (2, 3, 4, 5):
        x = ml.ones(n)
        assert step(x)[1][0] is x.type


def test_a_weak_reference_to_a_result_is_refused() -> None:
    def step(x: ml.Tensor) -> Any:
        y = x * 2.0
        return y, weakref.ref(y)

    refuses(CaptureError, "returns a ReferenceType that it creates", ml.capture(step), ml.ones(2))


def test_a_module_is_a_result() -> None:
    model = nn.Linear(2, 2, key=ml.random.key(0))
    double = ml.capture(lambda m: ml.tree.map(lambda w: w * 2.0, m))
    first, second = double(model), double(model)
    assert type(first) is nn.Linear
    assert first.kernel is not second.kernel
    assert first.kernel.tolist() == (model.kernel * 2.0).tolist()


def test_what_is_outside_is_returned_itself() -> None:
    state: dict[str, Any] = {"calls": 0}
    array_outside = np.ones(2)
    step = ml.capture(lambda x: (x, state, [array_outside], {"made": 1}))
    for _ in range(3):
        _, first, [second], made = step(ml.ones(2))
        assert first is state
        assert second is array_outside
        made["more"] = 1
    state = {"calls": 0}  # an equal one
    assert step(ml.ones(2))[1] is state
    assert step.signatures == 2


def test_containers_among_the_arguments_are_returned_themselves() -> None:
    step = ml.capture(lambda d, *, k: (d, d["x"], d["x"][0] * 2.0, k))
    for _ in range(3):
        d: dict[str, Any] = {"x": [ml.ones(2)], "n": 3}
        k = [1, 2]
        result = step(d, k=k)
        assert result[0] is d
        assert result[1] is d["x"]
        assert result[3] is k
    assert step.signatures == 1


def test_what_has_no_copies_is_refused() -> None:
    step = ml.capture(lambda x: Stats((x, memoryview(b"a"))))
    refuses(
        CaptureError, "returns a Stats that it creates, but later calls cannot", step, ml.ones(2)
    )
    refuses(
        CaptureError,
        "StringIO, which would run after",
        ml.capture(lambda x: io.StringIO()),
        ml.ones(2),
    )


def test_placeholders_of_lengths_stay_nowhere() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            self.last: Any = ()
            self.sizes: dict[str, Any] = {}
            self.inner = [Stats()]
            self.others: dict[Any, Any] = {}

        def __call__(self, x: ml.Tensor, k: float) -> ml.Tensor:
            self.last = x.shape
            self.sizes = {"rows": x.shape[0], "all": [k, {x.shape[0]}]}
            self.inner[0].seen = collections.deque([(x.shape[0],)])
            n = x.shape[0]
            self.others = {n: slice(0, n), "f": lambda: n}
            return x * k

    counter = Counter()
    step = ml.capture(counter)
    for n, k in ((3, 1.0), (4, 2.0), (5, 3.0), (6, 4.0), (7, 5.0)):
        step(ml.ones(n), k)
        [row] = counter.inner[0].seen
        values = [*counter.last, counter.sizes["rows"], counter.sizes["all"][0], *row]
        others = next(iter(counter.others)), counter.others[n].stop, counter.others["f"]()
        values += [*counter.sizes["all"][1], *others]
        assert json.dumps(values) == json.dumps([n, n, k, n, n, n, n, n])


def test_classes_of_containers_are_not_constructed() -> None:
    pair = Pair(ml.ones(2), ml.ones(2))
    results = [
        ml.capture(lambda p: p[0] + p[1])(pair),
        ml.vmap(lambda p: p[0] + p[1])(pair),
        ml.tree.map(lambda x: x * 2.0, pair)[0],
        ml.grad(lambda p: ml.sum(p[0] * p[1]))(pair)[0] * 2.0,
    ]
    assert [y.tolist() for y in results] == [[2.0, 2.0]] * 4
    assert type(ml.capture(lambda x: Pair(x, x))(ml.ones(2))) is Pair
    assert ml.capture(lambda x, c: x * c.lr)(ml.ones(1), Config(lr=2.0)).tolist() == [2.0]
    growing = Growing(lr=2.0)
    ml.capture(lambda x, c: x * c.lr)(ml.ones(1), growing)
    assert [*growing] == ["lr"]


def double(x: ml.Tensor) -> ml.Tensor:
    return x * 2.0


@ml.capture
def tripled(x: ml.Tensor) -> ml.Tensor:
    return x * 3.0


class Trainer:
    def __init__(self) -> None:
        self.model = nn.Linear(2, 1, key=ml.random.key(0))
        self.step = ml.capture(self._step, fuse=False)

    def _step(self, x: ml.Tensor) -> Any:
        return self.model(x)


@cases("copied", copy.deepcopy, copy.copy, lambda x: pickle.loads(pickle.dumps(x)))
def test_captured_functions_are_copied(copied: Callable[[Any], Any]) -> None:
    assert copied(tripled) is tripled
    assert copied(ml.capture(double, check=2))(ml.ones(1)).tolist() == [2.0]
    trainer = copied(Trainer())
    assert trainer.step.fuse is False
    assert trainer.step(ml.ones((1, 2))).shape == (1, 1)
    if copied is not copy.copy:
        assert trainer.step.fn.__self__ is trainer


def test_a_class_whose_first_instance_is_copied_in_a_trace_is_the_same() -> None:
    """The first copy of an instance adds `__slotnames__` to its class. No guard sees this."""

    @dataclasses.dataclass
    class Twice:
        first: Any
        second: Any

    def double(x: ml.Tensor) -> Any:
        y = x * 2
        return Twice(y, y)

    captured = ml.capture(double)
    for _ in range(3):
        result = captured(ml.ones(2))
        assert result.first is result.second
        assert captured.explain().endswith("was traced once")
        copy.copy(result)
