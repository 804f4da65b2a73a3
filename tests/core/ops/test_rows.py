"""Sums along and over rows: against numpy, with bits that depend on the row alone, and on no
number of threads."""

from __future__ import annotations

import numpy as np
import pytest

from mlvm.core.ops.rows import row_sums, sum_rows
from mlvm.core.types import Array
from tests.brief import cases
from tests.cases.evaluate import printed_on_threads

SHAPES = [(0, 3), (3, 0), (1, 1), (5, 7), (700, 31), (130, 64), (40, 512), (9, 1000), (3, 9001)]


def random(*shape: int) -> Array:
    return np.random.default_rng(0).standard_normal(shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_row_sums(shape: tuple[int, int]) -> None:
    x, y = random(*shape), random(*shape)[::-1].copy()
    sums = row_sums(x, y)
    assert sums.shape == (shape[0], 1)
    np.testing.assert_allclose(sums, (x * y).sum(1, keepdims=True), 1e-10, 1e-11)
    one_row = random(shape[1])
    np.testing.assert_allclose(
        row_sums(x, one_row), (x * one_row).sum(1, keepdims=True), 1e-10, 1e-11
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_sum_rows(shape: tuple[int, int]) -> None:
    x, weights = random(*shape), random(shape[0])
    np.testing.assert_allclose(sum_rows(x), x.sum(0), 1e-10, 1e-11)
    np.testing.assert_allclose(sum_rows(x, weights), weights @ x, 1e-10, 1e-11)


@cases("width", 1, 31, 64, 500, 9001)
def test_a_rows_sum_does_not_depend_on_the_others(width: int) -> None:
    x = random(23, width).astype(np.float32)
    together = row_sums(x, x)
    for cut in range(1, 23, 3):
        np.testing.assert_array_equal(row_sums(x[cut:], x[cut:]), together[cut:])


def test_the_bits_are_the_same_on_any_number_of_threads() -> None:
    script = (
        "import numpy as np\n"
        "from mlvm.core.ops.rows import row_sums, sum_rows\n"
        "from tests.cases.evaluate import evaluate\n"
        "for shape in [(20_000, 31), (600, 512), (300, 2048), (30, 20_000)]:\n"
        "    x = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)\n"
        "    sums = row_sums(x, x)\n"
        "    print(sums.tobytes().hex(), sum_rows(x, sums[:, 0]).tobytes().hex())\n"
        "    print(evaluate('sum', x, axis=0).tobytes().hex())"
    )
    assert len(printed_on_threads(script)) == 1
