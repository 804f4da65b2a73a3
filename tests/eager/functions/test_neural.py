"""Activations at the edges of their domains; their values and gradients are rows of a table."""

from __future__ import annotations

import numpy as np
import pytest

import mlvm.eager as ml

LAST = 1.0507009873554805 * 1.6732632423543772


def test_activations_far_from_zero_neither_overflow_nor_lose_their_slopes() -> None:
    x = ml.asarray([-1e4, -100.0, 100.0, 1e4])
    for function, ends in (
        (ml.log_sigmoid, [-1e4, -100, 0, 0]),
        (ml.mish, [0, 0, 100, 1e4]),
        (ml.selu, [-LAST, -LAST, 105.07009873554805, 10507.009873554805]),
        (ml.hard_swish, [0, 0, 100, 1e4]),
        (ml.soft_sign, [-1, -100 / 101, 100 / 101, 1]),
    ):
        value, slope = ml.vjp(function, x)
        np.testing.assert_allclose(value.numpy(), ends, rtol=1e-3, atol=1e-30)
        assert np.isfinite(slope(ml.ones(4))[0].numpy()).all()


@pytest.mark.parametrize("function", ["hardshrink", "softshrink", "tanhshrink", "hard_tanh"])
def test_a_nan_is_not_shrunk_away(function: str) -> None:
    assert np.isnan(getattr(ml, function)(ml.asarray([np.nan])).numpy()).all()
