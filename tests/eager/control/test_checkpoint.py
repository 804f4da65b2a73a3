"""Checkpoints in checkpoints, with what they use of each other, have the gradients of none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import GradientError

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
Loss = Callable[[ml.Tensor], Any]


def _none(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn


def _uses(wrap: Wrap) -> Loss:
    """A function in which an inner one uses what the outer one makes."""

    def loss(x: ml.Tensor) -> ml.Tensor:
        @wrap
        def outer(x: ml.Tensor) -> Any:
            a = ml.tanh(x)
            b = ml.sin(a)

            @wrap
            def inner(y: ml.Tensor) -> Any:
                c = ml.sin(y) * a
                innermost = wrap(lambda z: z * c + b * a)
                return innermost(c) * y

            return inner(x) * b

        return ml.sum(outer(x) * x)

    return loss


def _returns(wrap: Wrap) -> Loss:
    """A function in which an inner one returns what the outer one has made."""

    def loss(x: ml.Tensor) -> ml.Tensor:
        @wrap
        def outer(x: ml.Tensor) -> Any:
            a = ml.tanh(x)
            p, q = wrap(lambda y: (ml.sin(y), a))(x)
            return p * q

        return ml.sum(outer(x) * x)

    return loss


def _first(loss: Callable[[ml.Tensor], ml.Tensor]) -> Loss:
    return ml.grad(loss)


def _second(loss: Callable[[ml.Tensor], ml.Tensor]) -> Loss:
    return ml.grad(lambda x: ml.sum(ml.grad(loss)(x) ** 2))


@pytest.mark.parametrize("way", [_none, ml.capture], ids=["eager", "captured"])
@pytest.mark.parametrize("order", [_first, _second])
@pytest.mark.parametrize("made", [_uses, _returns])
def test_a_checkpoint_in_another_uses_what_that_makes(made: Any, order: Any, way: Wrap) -> None:
    x = ml.asarray([0.5, -0.8, 1.2], dtype="f64")
    expected = order(made(_none))(x).numpy()
    got = way(order(made(ml.checkpoint)))(x).numpy()
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_a_loop_with_checkpoints_in_another_uses_what_that_makes() -> None:
    x = ml.asarray([0.5, -0.8, 1.2], dtype="f64")

    def loss(x: ml.Tensor, checkpoint: bool) -> ml.Tensor:
        def outer(i: ml.Tensor, s: ml.Tensor) -> Any:
            a = ml.tanh(s)
            turns = ml.fori_loop(0, 2, lambda j, t: ml.sin(t) * a + s, s, checkpoint=checkpoint)
            return turns * a

        return ml.sum(ml.fori_loop(0, 3, outer, x, checkpoint=checkpoint))

    expected = ml.grad(loss)(x, False).numpy()
    np.testing.assert_allclose(ml.grad(loss)(x, True).numpy(), expected, rtol=1e-12)
    np.testing.assert_allclose(ml.capture(ml.grad(loss))(x, True).numpy(), expected, rtol=1e-12)


def test_a_gradient_through_what_a_checkpoint_has_made_and_not_returned_is_refused() -> None:
    def loss(x: ml.Tensor) -> ml.Tensor:
        kept = []

        @ml.checkpoint
        def inner(x: ml.Tensor) -> ml.Tensor:
            kept.append(ml.tanh(x))
            return ml.sin(kept[0])

        return ml.sum(inner(x) * kept[0])

    with pytest.raises(GradientError, match="return it"):
        ml.grad(loss)(ml.ones((2,)))


def test_a_loop_of_no_turns_draws_no_keys() -> None:
    def loss(x: ml.Tensor, wrap: Wrap) -> ml.Tensor:
        @wrap
        def inner(x: ml.Tensor) -> ml.Tensor:
            rows = ml.zeros((0, 3))
            state, _ = ml.scan(lambda s, row: (s + ml.random.normal((3,)), row), x, rows)
            return ml.sin(state * ml.random.normal((3,)))

        return ml.sum(inner(x) * x)

    x, found = ml.asarray([0.5, -0.8, 1.2]), []
    for wrap in (_none, ml.checkpoint):
        ml.random.seed(5)
        found.append(ml.grad(loss)(x, wrap).numpy().tolist())
    assert found[0] == found[1]
