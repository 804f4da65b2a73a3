"""`vmap`: what it means, lane by lane, alone and with gradients, captures and control flow."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import (
    AttributeRefused,
    AxisRefused,
    CaptureError,
    CheckFailed,
    DTypeError,
    GradientError,
    MlvmError,
    PositionRefused,
    ShapeError,
)
from mlvm.core.types import Array
from mlvm.eager.control.state import as_tree
from mlvm.eager.tensor.tensor import Tensor
from tests.brief import cases, refuses

X = np.array([[0.5, -1.0, 2.0], [1.5, 0.25, -0.5], [-0.75, 3.0, 0.0], [0.1, 0.2, 0.3]])
W = np.array([[1.0, 0.5, -0.25], [0.0, 2.0, 1.0], [-1.0, 0.75, 0.5]])
Lane = Callable[[Tensor, Tensor], Any]


def _power(x: Tensor, n: Tensor) -> Tensor:
    """x^n, by squares."""
    half = ml.function(
        lambda x, n: ml.cond(
            n < 1.0, lambda x, n: ml.ones_like(x), lambda x, n: x * half(x, n - 1.0), x, n
        )
    )
    return half(x, n)


def _tree(x: Tensor, w: Tensor) -> Tensor:
    """A recursion with two calls, whose depth is a lane's own."""
    node = ml.function(
        lambda x, depth: ml.cond(
            depth < 0.5,
            lambda x, depth: ml.sin(x),
            lambda x, depth: ml.tanh(node(w @ x, depth - 1.0) - node(x * 0.5, depth - 1.5)),
            x,
            depth,
        )
    )
    return node(x, ml.stop_gradient(ml.round(ml.abs(x[0]) * 2.0)))


def _even(x: Tensor, w: Tensor) -> Tensor:
    """Two functions that call each other."""
    even = ml.function(
        lambda n: ml.cond(n < 1.0, lambda n: n + w[0, 0], lambda n: odd(n - 1.0) * 2.0, n)
    )
    odd = ml.function(
        lambda n: ml.cond(n < 1.0, lambda n: n - w[1, 1], lambda n: even(n - 1.0) * 3.0, n)
    )
    return even(ml.abs(x[1]) * 3.0)


def _updated(x: Tensor, w: Tensor) -> Tensor:
    y = ml.zeros(3, dtype=ml.float64)
    y[1] = x[0]
    y += w[0]
    x[2] = 5.0
    return y * x


def _collatz(x: Tensor, w: Tensor) -> Tensor:
    def turn(state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        n, steps = state
        return ml.where(n % 2 == 0, n // 2, 3 * n + 1), steps + 1

    first = ml.astype(ml.abs(x[1]) * 10.0, ml.int64) + 1
    return ml.while_loop(lambda s: s[0] > 1, turn, (first, ml.asarray(0)))[1]


def _turns(x: Tensor) -> Tensor:
    return ml.astype(ml.abs(x[1]) * 2.0, ml.int64)


SMOOTH: dict[str, Lane] = {
    "elementwise": lambda x, w: ml.sin(x) * w[1] + 2.0,
    "product": lambda x, w: ml.tanh(w @ x) @ w,
    "matrix": lambda x, w: (x[:, None] * w) @ (w.T * x),
    "indices": lambda x, w: w[ml.argsort(x)] * ml.sort(x),
    "own index": lambda x, w: x[ml.argmax(x)] * w[ml.argmin(x)],
    "reductions": lambda x, w: ml.softmax(x) * ml.std(w * x) + ml.logsumexp(x),
    "einsum": lambda x, w: ml.einsum("i,ij,j->ij", x, w, x),
    "solve": lambda x, w: ml.linalg.solve(w + ml.eye(3, dtype=ml.float64) * 3.0, x),
    "updated": _updated,
    "cond": lambda x, w: ml.cond(x[0] > 0.3, lambda x: ml.log(x[0]) * w[0], lambda x: x * 3.0, x),
    "switch": lambda x, w: ml.switch(
        ml.astype(x[2], ml.int64), [lambda x: x * w[0], ml.sin, lambda x: ml.exp(x) * w[1]], x
    ),
    "guarded index": lambda x, w: ml.cond(
        x[1] < 2.5, lambda x: ml.take(x, ml.astype(x[1], ml.int64), axis=0), lambda x: x[0] * 2.0, x
    ),
    "shared cond": lambda x, w: ml.cond(w[0, 0] > 0.0, lambda x: x * w[0], lambda x: w[1], x),
    "while": lambda x, w: ml.while_loop(
        lambda s: ml.sum(s * s) < 50.0, lambda s: s * 1.5 + ml.cos(s) * w[0], x
    ),
    "while of one": lambda x, w: ml.while_loop(
        lambda s: s[0] < 3.0, lambda s: (s[0] + 1.0, s[1] * ml.sin(s[1])), (w[0, 0], x)
    )[1],
    "while in cond": lambda x, w: ml.cond(
        x[0] > 0.0,
        lambda x: ml.while_loop(lambda s: s < 9.0, lambda s: s * 2.0 + w[0, 0], x[0]),
        lambda x: ml.fori_loop(0, 3, lambda i, s: s * w[0, 1] + x[1], x[2]),
        x,
    ),
    "fori": lambda x, w: ml.fori_loop(0, 3, lambda i, s: s * x[i] + w[i], x),
    "own turns": lambda x, w: ml.fori_loop(0, _turns(x), lambda i, s: s * 1.1 + w[0], x),
    "scan": lambda x, w: ml.scan(lambda s, r: (ml.tanh(w @ s + r), s[0]), x, x),
    "scan back": lambda x, w: ml.scan(lambda s, r: (s * r + w[0], s), x, w, reverse=True),
    "scan of lengths": lambda x, w: ml.scan(
        lambda s, r: (s * 0.5 + r, s), x, w, ml.minimum(_turns(x), ml.asarray(3))
    ),
    "function": lambda x, w: ml.function(lambda x: ml.sin(x) * w[0])(x),
    "power": lambda x, w: _power(x, ml.stop_gradient(ml.round(ml.abs(x[1])))) * w[0],
    "tree": _tree,
    "mutual": _even,
    "checkpoint": lambda x, w: ml.checkpoint(lambda x: ml.sin(ml.exp(x)) * w[0])(x),
    "checked": lambda x, w: ml.cond(
        x[0] > 0.0, lambda x: (ml.check(x[0] > 0.0, "positive"), x * w[0])[1], lambda x: x, x
    ),
    "shared": lambda x, w: (w * 2.0, x),
    "grad": lambda x, w: ml.grad(lambda y: ml.sum(ml.sin(w @ y) * y))(x),
    "vmap": lambda x, w: ml.vmap(lambda row, y: ml.sum(row) * y * x, (0, None))(w, x),
}
OTHERS: dict[str, Lane] = {
    "integers": _collatz,
    "dropout": lambda x, w: ml.dropout(x, 0.5, key=ml.random.key(3)),
    "own keys": lambda x, w: ml.random.normal(
        2, key=ml.random.fold_in(ml.random.key(1), ml.astype(x[1] * 4, ml.int64))
    ),
    "halves": lambda x, w: ml.softmax(ml.astype(x, ml.float16) * 2.0) @ ml.astype(w, ml.float16),
    "bf16": lambda x, w: ml.tanh(ml.astype(w, ml.bfloat16) @ ml.astype(x, ml.bfloat16)),
    "complex": lambda x, w: ml.fft.fft(x * 1j) * w[0],
    "numbers": lambda x, w: {"a": 1, "b": (None, 2.5, [True])},
}
BOTH = {**SMOOTH, **OTHERS}


def _inputs() -> tuple[Tensor, Tensor]:
    return ml.asarray(X), ml.asarray(W)


def _arrays(tree: Any) -> list[Array]:
    return [np.asarray(x) for x in ml.tree.leaves(tree)]


def _stacked(rows: list[Any]) -> list[Array]:
    return [np.stack(column) for column in zip(*map(_arrays, rows), strict=True)]


def _close(found: Any, expected: list[Array], rounded: float = 1e-12) -> None:
    arrays = _arrays(found)
    assert [(x.shape, x.dtype) for x in arrays] == [(y.shape, y.dtype) for y in expected]
    for x, y in zip(arrays, expected, strict=True):
        if x.dtype.itemsize == 2:
            x, y, rounded = x.astype(np.float64), y.astype(np.float64), 2e-2
        np.testing.assert_allclose(x, y, rounded, rounded)


def _same(one: Any, other: Any) -> None:
    assert [x.tobytes() for x in _arrays(one)] == [y.tobytes() for y in _arrays(other)]


@pytest.mark.parametrize("name", BOTH)
def test_it_is_the_function_in_each_lane(name: str) -> None:
    fn, (x, w) = BOTH[name], _inputs()
    rows = [ml.asarray(row) for row in X]  # as a function may update its argument
    batched = ml.vmap(fn, (0, None))
    made = batched(x, w)
    _close(made, _stacked([as_tree(fn(row, w)) for row in rows]))
    _same(ml.capture(batched)(x, w), made)
    _close(x, [X], 0.0)
    for n in (0, 1):
        few = batched(x[:n], w)
        _close(few, [y[:n] for y in _arrays(made)])
        assert [y.dtype for y in _arrays(few)] == [y.dtype for y in _arrays(made)]


def _total(tree: Any) -> Tensor:
    parts = [ml.sum(ml.sin(y)) for y in ml.tree.leaves(tree)]
    return sum(parts[1:], parts[0])


@pytest.mark.parametrize("name", SMOOTH)
def test_gradients_go_through_it_and_it_goes_over_gradients(name: str) -> None:
    fn, (x, w) = SMOOTH[name], _inputs()
    grads = ml.grad(lambda x, w: _total(fn(x, w)), argnums=(0, 1))
    each = [grads(ml.asarray(row), w) for row in X]
    over = ml.vmap(grads, (0, None))
    _close(over(x, w), _stacked(each), 1e-9)
    through = ml.grad(lambda x, w: _total(ml.vmap(fn, (0, None))(x, w)), argnums=(0, 1))
    of_x, of_w = _stacked(each)
    _close(through(x, w), [of_x, of_w.sum(0)], 1e-9)
    _same(ml.capture(over)(x, w), over(x, w))
    _close(ml.capture(through)(x, w), _arrays(through(x, w)), 1e-12)
