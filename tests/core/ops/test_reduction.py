"""Reductions: empty and 0-d tensors, not-a-numbers, large sums, and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mlvm.core.errors import MlvmError
from mlvm.core.types import Array
from tests.brief import cases, refuses
from tests.cases.evaluate import evaluate, printed_on_threads

REDUCTIONS = [
    "sum", "mean", "prod", "var", "logsumexp", "max", "min", "argmax", "argmin", "all", "any",
]  # fmt: skip
MANY_AXES = ["sum", "mean", "prod", "var", "logsumexp", "max", "min", "all", "any"]


# --- values ---------------------------------------------------------------------------


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


def test_a_sum_has_the_same_bits_on_any_number_of_threads() -> None:
    script = (
        "import numpy as np\n"
        "from tests.cases.evaluate import evaluate\n"
        "x = np.random.default_rng(0).standard_normal((50_000, 31), dtype=np.float32)\n"
        "print(evaluate('sum', x, axis=0).tobytes().hex())"
    )
    assert len(printed_on_threads(script)) == 1


@given(st.lists(st.integers(-100, 100), min_size=1, max_size=20))
def test_cumulative_sum_ends_with_the_sum(values: list[int]) -> None:
    x = np.array(values, np.int8)
    sums = evaluate("cumulative_sum", x)
    assert sums[-1] == evaluate("sum", x) == sum(values)
    assert np.diff(sums, prepend=0).tolist() == values


# --- refusals --------------------------------------------------------------------------


@given(st.sampled_from(REDUCTIONS), st.lists(st.integers(-4, 4), max_size=3), st.booleans())
def test_axes_are_numpys_or_refused(name: str, axes: list[int], keepdims: bool) -> None:
    x = np.arange(1.0, 25.0).reshape(2, 3, 4)
    axis = tuple(axes) if name in MANY_AXES else (axes[0] if axes else None)
    try:
        expected: Array | None = np.sum(x, axis, keepdims=keepdims)
    except ValueError:
        expected = None
    if expected is None:
        refuses(MlvmError, "", evaluate, name, x, axis=axis, keepdims=keepdims)
    else:
        assert evaluate(name, x, axis=axis, keepdims=keepdims).shape == expected.shape
