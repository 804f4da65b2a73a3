"""Gradients of functions that call themselves, where the first branch is the one that does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlvm.eager as ml
from tests.brief import cases


@cases(
    "before, after",
    (lambda s: ml.tanh(s), lambda s: s),
    (lambda s: ml.sin(s + 1.0), lambda s: ml.exp(-s)),
    (lambda s: s * 0.5, lambda s: ml.tanh(s) * s),
)
def test_a_branch_that_recurs_first_leaves_nothing_on_the_tape(
    before: Callable[[Any], Any], after: Callable[[Any], Any]
) -> None:
    """Its result types are known by the other branch alone, so that it is recorded twice."""

    @ml.function
    def fold(x: Any, i: Any, s: Any) -> Any:
        deeper = lambda: after(fold(x, i + 1, before(s + x[i])))  # noqa: E731
        return ml.cond(i < x.shape[0], deeper, lambda: s)

    def loss(x: Any) -> Any:
        return ml.sum(fold(x, ml.asarray(0), ml.zeros(2)))

    x = ml.asarray([[0.5, -1.0], [0.25, 2.0], [1.0, 0.0]])
    gradient = ml.grad(loss)
    assert ml.capture(gradient)(x).tolist() == gradient(x).tolist()
    captured = ml.capture(ml.grad(lambda x: ml.sum(gradient(x) ** 2)))
    assert captured(x).tolist() == ml.grad(lambda x: ml.sum(gradient(x) ** 2))(x).tolist()
