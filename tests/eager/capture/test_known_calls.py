"""A call that matches a cache entry is recognised by one walk in C, which agrees with Python."""

from __future__ import annotations

import random
from typing import Any

import pytest

import mlvm.eager as ml
from mlvm.eager import nn, optim
from mlvm.eager.tensor.context import current_arena
from mlvm.machines.native.extension import EXTENSION
from tests.brief import refuses

pytestmark = [
    pytest.mark.usefixtures("weights"),
    pytest.mark.skipif(EXTENSION is None, reason="the extension is not here"),
    pytest.mark.local(reason="it is of the caller alone"),
]


def is_hit(captured: Any, *args: Any, **kwargs: Any) -> bool:
    """Return whether the call matches an entry in C. Python finds the same program and the same
    tensors then."""
    vm = current_arena().vm
    for call in captured._entries.matchers:
        match = call.match(vm, args, kwargs)
        if match is not None:
            feed, tensors, inputs = match
            signature, key = captured._signatures.of(vm, args, kwargs)
            entry, same_feed = captured._entries.find(key, signature)
            assert entry is call.entry
            assert same_feed is feed
            assert list(map(id, tensors)) == list(map(id, signature.tensors))
            assert list(map(id, inputs)) == list(map(id, signature.inputs))
            return True
    return False


def warmed(fn: Any, *args: Any, **kwargs: Any) -> Any:
    captured = ml.capture(fn)
    for _ in range(2):
        captured(*args, **kwargs)
    assert is_hit(captured, *args, **kwargs)
    return captured


def some(draw: random.Random, pool: list[Any], depth: int = 2) -> Any:
    kind = draw.choice(["leaf", "leaf", "list", "tuple", "dict"] if depth else ["leaf"])
    if kind == "leaf":
        return draw.choice(pool)
    items = [some(draw, pool, depth - 1) for _ in range(draw.randrange(4))]
    if kind == "dict":
        return dict(zip(draw.sample(["a", "b", "c", 1, object], len(items)), items, strict=True))
    return items if kind == "list" else tuple(items)


@pytest.mark.filterwarnings("ignore::mlvm.eager.capture.guards.changing.RecompilationWarning")
def test_random_calls_are_told_as_python_tells_them() -> None:
    draw = random.Random(5)
    x, y = ml.ones(2), ml.ones(2)
    view = ml.reshape(x, (2, 1))
    objects = [object(), nn.Linear(2, 2, key=ml.random.key(0))]
    pool = [x, y, view, ml.zeros(3), 1, 2, 1.5, True, "s", None, *objects]
    reached = ml.ones(4)
    captured = ml.capture(lambda *args: ml.sum(reached))
    pool.append(reached)
    hits = 0
    calls = [tuple(some(draw, pool) for _ in range(draw.randrange(1, 3))) for _ in range(120)]
    for args in calls:
        captured(*args)
        captured(*args)
        hits += is_hit(captured, *args)
        for other in draw.sample(calls, 4):
            is_hit(captured, *other)
    assert hits > 60


def test_numbers_and_fields_are_seen_each_time() -> None:
    x, rate = ml.ones(2), 0.5
    captured = warmed(lambda x, by: x * by, x, rate)
    assert not is_hit(captured, x, 0.25)
    assert captured(x, 0.25).tolist() == [0.25, 0.25]
    assert not is_hit(warmed(lambda **d: ml.sum(*d.values()), a=x), b=x)
    model = nn.Linear(2, 2, key=ml.random.key(1))
    optimizer = optim.SGD(model, 0.5)
    captured = warmed(lambda x: optimizer.update(ml.grad(lambda m: ml.sum(m(x)))(model)), x)
    optimizer.learning_rate = 0.25
    assert not is_hit(captured, x)
    scale = [2.0]
    captured = warmed(lambda x: x * scale[0], x)
    scale[0] = 3.0
    assert not is_hit(captured, x)
    assert captured(x).tolist() == [3.0, 3.0]


def test_what_is_updated_moves_where_somebody_needs_the_old_value() -> None:
    x, total = ml.ones(2), ml.zeros(2)

    def step(x: ml.Tensor) -> None:
        nonlocal total
        total += x

    captured = warmed(step, x)
    alias = ml.reshape(total, (2, 1))
    assert not is_hit(captured, x)
    captured(x)
    assert (total.tolist(), alias.tolist()) == ([3.0, 3.0], [[2.0], [2.0]])


def test_nothing_is_known_on_another_vm_or_inside_a_capture() -> None:
    x = ml.ones(2)
    captured = warmed(lambda x: x * 2.0, x)
    with ml.use(ml.VM("another")), ml.Arena(ml.VM("other"), "other").allocating():
        assert not is_hit(captured, x)
    outer = ml.capture(lambda x: captured(x) + 1.0)
    assert outer(x).tolist() == [3.0, 3.0]
    text = "capture the function that takes the gradient"
    refuses(ml.errors.GradientError, text, ml.grad(lambda x: ml.sum(captured(x))), x)


def test_reads_that_are_none_are_refused() -> None:
    assert EXTENSION is not None
    wrong: list[Any] = [
        (("item", [], "x", 1),),
        (("nothing", {}, "x", 1),),
        (("keys", {}, "x", 1),),
    ]
    for reads in wrong:
        refuses(TypeError, "", EXTENSION.Checklist, object(), reads)
