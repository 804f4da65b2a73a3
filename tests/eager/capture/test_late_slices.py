"""A slice is read before a later write to its tensor, wherever its readers are."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.eager import Tensor


def _late(x: Tensor) -> Tensor:
    inner = x[1:-1]
    x[...] = x * 2.0
    return inner * 3.0


def _in_a_loop(x: Tensor) -> Tensor:
    def body(_: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        a, b = state
        inner = a[1:-1]
        return a + ml.pad(-inner, (2, 0)), b + ml.pad(ml.exp(-inner), (1, 1))

    result: Tensor = ml.fori_loop(0, 2, body, (x, x))[1]
    return result


@pytest.mark.parametrize("fn", [_late, _in_a_loop])
def test_a_slice_has_the_value_before_a_later_write(fn: Callable[[Tensor], Tensor]) -> None:
    x = np.arange(12.0) + 1.0
    expected = fn(ml.asarray(x)).numpy()
    assert np.array_equal(ml.capture(fn)(ml.asarray(x)).numpy(), expected)


def test_a_gradient_in_a_loop_reads_slices_in_time() -> None:
    def loss(c: Tensor, b: Tensor) -> Tensor:
        def body(_: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            c, b = state
            w = -b[1:]
            z = -w[1:]
            c = ml.copy(c)
            h = -c
            c[1:-1] = z - h[2:]
            return c, b

        c, b = ml.fori_loop(0, 1, body, (c, b))
        return ml.sum(c) + ml.sum(b)

    gradient = ml.grad(loss, argnums=(0, 1))
    x, y = ml.arange(12.0), ml.ones(12)
    for a, b in zip(gradient(x, y), ml.capture(gradient)(x, y), strict=True):
        assert np.array_equal(a.numpy(), b.numpy())


def test_a_budget_drops_a_write_that_nothing_reads() -> None:
    def loss(x: Tensor, a: Tensor) -> Tensor:
        c, total = ml.copy(x), ml.asarray(0.0)
        for _ in range(2):
            c[1:-1] = ml.tanh(a[:-2])
            a = ml.exp(-ml.abs(a)) * 1.5
            total = total + ml.sum(c**2)
        return total

    gradient = ml.grad(loss, argnums=(0, 1))
    x, a = ml.ones(300), ml.ones(300) * 0.5
    step = ml.capture(gradient)
    expected = [g.numpy() for g in step(x, a)]
    for percent in range(98, 40, -4):
        nbytes = (step.plan.nbytes + step.plan.hoisted_nbytes) * percent // 100
        try:
            got = ml.capture(gradient, memory=nbytes)(x, a)
        except ml.errors.BudgetError:
            break
        assert all(np.array_equal(p, q.numpy()) for p, q in zip(expected, got, strict=True))
