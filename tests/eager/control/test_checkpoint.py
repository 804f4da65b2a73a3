"""Checkpoints in checkpoints, with what they use of each other, have the gradients of none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import GradientError
from tests.brief import refuses
from tests.trees import assert_close

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
Loss = Callable[[ml.Tensor], Any]


def _none(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn


def _uses(x: ml.Tensor, wrap: Wrap) -> ml.Tensor:
    """An inner function uses what this one makes."""
    a = ml.tanh(x)
    b = ml.sin(a)

    @wrap
    def inner(y: ml.Tensor) -> Any:
        c = ml.sin(y) * a
        innermost = wrap(lambda z: z * c + b * a)
        return innermost(c) * y

    return inner(x) * b


def _returns(x: ml.Tensor, wrap: Wrap) -> ml.Tensor:
    """An inner function returns what this one has made."""
    a = ml.tanh(x)
    p, q = wrap(lambda y: (ml.sin(y), a))(x)
    return p * q


def _second(loss: Callable[[ml.Tensor], ml.Tensor]) -> Loss:
    return ml.grad(lambda x: ml.sum(ml.grad(loss)(x) ** 2))


@pytest.mark.parametrize("wrap", [_none, ml.capture], ids=["eager", "captured"])
@pytest.mark.parametrize("order", [ml.grad, _second])
@pytest.mark.parametrize("nest", [_uses, _returns])
def test_a_checkpoint_in_another_uses_what_that_makes(nest: Any, order: Any, wrap: Wrap) -> None:
    def loss(inside: Wrap) -> Loss:
        return lambda x: ml.sum(inside(lambda x: nest(x, inside))(x) * x)

    x = ml.asarray([0.5, -0.8, 1.2], dtype="f64")
    expected = order(loss(_none))(x).numpy()
    got = wrap(order(loss(ml.checkpoint)))(x).numpy()
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_a_gradient_through_what_a_checkpoint_has_made_and_not_returned_is_refused() -> None:
    def loss(x: ml.Tensor) -> ml.Tensor:
        leaked = []

        @ml.checkpoint
        def inner(x: ml.Tensor) -> ml.Tensor:
            leaked.append(ml.tanh(x))
            return ml.sin(leaked[0])

        return ml.sum(inner(x) * leaked[0])

    refuses(GradientError, "return it", lambda: ml.grad(loss)(ml.ones((2,))))


def test_a_loop_of_no_turns_draws_no_keys() -> None:
    def loss(x: ml.Tensor, wrap: Wrap) -> ml.Tensor:
        @wrap
        def inner(x: ml.Tensor) -> ml.Tensor:
            rows = ml.zeros((0, 3))
            state, _ = ml.scan(lambda s, row: (s + ml.random.normal((3,)), row), x, rows)
            return ml.sin(state * ml.random.normal((3,)))

        return ml.sum(inner(x) * x)

    x, gradients = ml.asarray([0.5, -0.8, 1.2]), []
    for wrap in (_none, ml.checkpoint):
        ml.random.seed(5)
        gradients.append(ml.grad(loss)(x, wrap).numpy().tolist())
    assert gradients[0] == gradients[1]


def _noise() -> ml.Tensor:
    return ml.random.normal((3,), dtype="f64")


def _turned(body: Callable[[Any], Any], x: ml.Tensor) -> Any:
    return ml.fori_loop(0, 3, lambda i, s: body(s), x)


# Functions of x, w and a wrap: what is wrapped reaches tensors of a body, or draws keys in a loop.
IN_BODIES: dict[str, Callable[[Any, Any, Wrap], Any]] = {
    "of a body": lambda x, w, c: _turned(
        lambda s: (lambda t: c(lambda s: ml.sin(s * t))(s))(s * w), x),
    "state": lambda x, w, c: _turned(lambda s: c(lambda q: ml.sin(s * q))(w) + s, x),
    "view": lambda x, w, c: _turned(lambda s: (lambda t, u: c(
        lambda s: ml.sum(ml.sin(s * t * u), axis=0))(s))(*(lambda t: (t, t[None]))(s * w)), x),
    "constant": lambda x, w, c: _turned(
        lambda s: (lambda t: c(lambda s: ml.sin(s * t))(s))(ml.stop_gradient(w) + 1), x),
    "number": lambda x, w, c: ml.fori_loop(0, 3, lambda i, s: c(lambda s: ml.sin(s * i))(s), x),
    "row": lambda x, w, c: ml.scan(lambda s, r: (c(lambda s: ml.sin(s * r) * r)(s), s), x, w)[0],
    "branch": lambda x, w, c: ml.cond(
        ml.sum(x) > 0, lambda: (lambda t: c(lambda s: ml.sin(s * t))(x))(x * w), lambda: x),
    "of a body, in a branch": lambda x, w, c: _turned(lambda s: (lambda t: ml.cond(
        ml.sum(s) > 0, lambda: c(lambda s: ml.sin(s * t))(s), lambda: s))(s * w), x),
    "a loop": lambda x, w, c: _turned(lambda s: (lambda t: c(lambda s: _turned(
        lambda q: ml.sin(q * t) + s, s))(s))(s * w), x),
    "another": lambda x, w, c: _turned(lambda s: (lambda t: c(
        lambda s: (lambda v: c(lambda u: u * t * v)(s))(s * t))(s))(s * w), x),
    "while": lambda x, w, c: ml.while_loop(lambda s: ml.sum(s * s) < 40, lambda s: (
        lambda t: c(lambda s: s * 1.5 + t)(s))(s * s * w * w + 1), x),
    "function": lambda x, w, c: ml.subroutine(
        lambda x: (lambda t: c(lambda s: ml.sin(s * t))(x))(x * w))(x),
    "keys": lambda x, w, c: _turned(c(lambda s: ml.sin(s * _noise()) * _noise()), x),
    "keys in a loop": lambda x, w, c: c(
        lambda x: _turned(lambda s: ml.sin(s * _noise()) + s, x) * _noise())(x) * _noise(),
    "keys in two": lambda x, w, c: _turned(lambda s: c(lambda x: _turned(
        lambda s: ml.sin(s * _noise()) + s, x))(s) * _noise(), x),
    "keys in another": lambda x, w, c: c(lambda x: x * c(lambda y: _turned(
        lambda s: ml.sin(s * _noise()), y))(x) * _noise())(x),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_BODIES)
def test_a_checkpoint_in_a_captured_body_reaches_what_that_makes(name: str) -> None:
    x, w = (ml.asarray(values, dtype="f64") for values in ([0.3, 0.6, 0.9], [0.5, 0.2, 0.4]))

    first = ml.grad(lambda x, w, wrap: ml.sum(ml.sin(IN_BODIES[name](x, w, wrap))), (0, 1))

    def of_first(x: ml.Tensor, w: ml.Tensor, wrap: Wrap) -> Any:
        return sum(ml.sum(ml.sin(g)) for g in first(x, w, wrap))

    second = ml.grad(of_first, (0, 1))
    for step in (first, second):
        ml.random.seed(3)
        expected, state = step(x, w, _none), ml.random.state().tolist()
        ml.random.seed(3)
        assert_close(ml.capture(step)(x, w, ml.checkpoint), expected, 1e-10)
        assert ml.random.state().tolist() == state


def test_a_captured_checkpoint_sums_cotangents_in_the_order_of_eager_code() -> None:
    def loss(x: ml.Tensor, y: ml.Tensor) -> ml.Tensor:
        z = x * y + 0.2

        def body(s: ml.Tensor, row: ml.Tensor) -> Any:
            return ml.checkpoint(lambda s: (ml.sin(s) + 0.5 * ml.tanh(z)) * z * 0.9)(s * row), s

        last, rows = ml.scan(body, x * 0.7, ml.stack([y, z * 0.5, x * 0.7]))
        return ml.sin(last * 0.5 + ml.sum(rows))

    gradient = ml.grad(loss, argnums=(0, 1))
    captured = ml.capture(gradient)
    for x, y in np.random.default_rng(0).uniform(0.2, 1.1, (16, 2)):
        operands = ml.asarray(x), ml.asarray(y)
        assert [float(g) for g in captured(*operands)] == [float(g) for g in gradient(*operands)]


def test_what_a_checkpoint_does_not_need_gets_no_cotangent_captured_either() -> None:
    """Not even zeros, which would be -0 times what is negative."""

    def step(c: ml.Tensor, d: ml.Tensor) -> Any:
        def loss(c: ml.Tensor) -> ml.Tensor:
            h = c * d

            def body(s: ml.Tensor, row: ml.Tensor) -> Any:
                ml.exp(h)
                return s, row

            return ml.sum(ml.scan(body, d, d, checkpoint=True)[1])

        return ml.grad(loss)(c)

    x = ml.asarray([1.0, 2.0])
    assert not np.signbit(step(x, -x).numpy()).any()
    assert not np.signbit(ml.capture(step)(x, -x).numpy()).any()
