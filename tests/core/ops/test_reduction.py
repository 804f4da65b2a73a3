"""Large sums, along any axes."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlvm.core.types import Array
from tests.brief import cases
from tests.cases.evaluate import evaluate

LARGE = np.random.default_rng(7).standard_normal((300, 7, 11)).astype(np.float32)


@cases("axis", 0, (0,), (0, 1), (0, 2), (1, 0), (-3, 1), 1, (1, 2), None)
@cases("keepdims", False, True)
@cases("x", LARGE, LARGE.reshape(25, 12, 77), LARGE.reshape(3, 7, 1100))
def test_large_sums(x: Array, axis: Any, keepdims: bool) -> None:
    expected = x.astype(np.float64).sum(axis, keepdims=keepdims)
    for name, divisor in [("sum", 1.0), ("mean", x.size / expected.size)]:
        result = evaluate(name, x, axis=axis, keepdims=keepdims)
        assert result.shape == expected.shape
        np.testing.assert_allclose(result, expected / divisor, rtol=1e-4, atol=1e-4 / divisor)
