"""Small matrices: their kernels beside LAPACK, stacks, refusals, and products that overflow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import LinAlgError
from mlvm.core.types import Array
from tests.brief import cases

_STACKS: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((), ()), ((3,), (3,)), ((2, 3), (3,)), ((1, 3), (2, 1)), ((), (4,)), ((0,), (0,)),
]  # fmt: skip


def _matrices(shape: tuple[int, ...], dtype: str) -> Array:
    return np.random.default_rng(shape).normal(size=shape).astype(dtype)


def _assert_solves(x: Array, z: Array, y: Array) -> None:
    """The residual is that of a backward stable method (Golub and Van Loan, 3.4.6)."""
    wide = x.astype("f8"), z.astype("f8")
    scale = np.max(np.abs(wide[0]) @ np.abs(wide[1]) + np.abs(y), initial=0)
    most = 10 * x.shape[-1] * np.finfo(z.dtype).eps * scale
    assert np.all(np.abs(wide[0] @ wide[1] - y) <= most)


@cases("dtype", "f4", "f8")
@cases("size", 1, 2, 3, 7, 16, 17)
@cases("columns", 1, 5, 16, 40)
def test_solutions(size: int, columns: int, dtype: str) -> None:
    for x_stack, y_stack in _STACKS:
        x, y = _matrices((*x_stack, size, size), dtype), _matrices((*y_stack, size, columns), dtype)
        z = ml.linalg.solve(ml.asarray(x), ml.asarray(y))
        assert z.shape == (*np.broadcast_shapes(x_stack, y_stack), size, columns)
        _assert_solves(x, z.numpy(), y)
        vector = ml.linalg.solve(ml.asarray(x), ml.asarray(_matrices((size,), dtype)))
        assert vector.shape == (*x_stack, size)
        _assert_solves(x, vector.numpy()[..., None], _matrices((size,), dtype)[:, None])


@cases("dtype", "f4", "f8")
@cases("size", 1, 2, 3, 7, 16, 17)
@cases("stack", (), (3,), (2, 3), (0,))
def test_factors_inverses_and_determinants(size: int, stack: tuple[int, ...], dtype: str) -> None:
    x = _matrices((*stack, size, size), dtype)
    _assert_solves(x, ml.linalg.inv(ml.asarray(x)).numpy(), np.eye(size))
    det = ml.linalg.det(ml.asarray(x)).numpy()
    tolerance = 100 * size * float(np.finfo(dtype).eps)
    np.testing.assert_allclose(det, np.linalg.det(x.astype("f8")), tolerance, tolerance)
    positive = x @ np.swapaxes(x, -1, -2) + size * np.eye(size, dtype=dtype)
    lower = ml.linalg.cholesky(ml.asarray(positive)).numpy()
    upper = ml.linalg.cholesky(ml.asarray(positive), upper=True).numpy()
    expected = np.linalg.cholesky(positive.astype("f8"))
    np.testing.assert_allclose(lower, expected, tolerance, tolerance * size)
    np.testing.assert_allclose(upper, np.swapaxes(expected, -1, -2), tolerance, tolerance * size)


@cases("name", "inv", "solve", "cholesky")
def test_matrices_without_a_result_are_refused(name: str) -> None:
    singular = np.array([np.eye(3), [[1, 2, 3], [2, 4, 6], [0, 0, 1]]])
    operands = [ml.asarray(singular)] * (2 if name == "solve" else 1)
    expected = "not positive definite" if name == "cholesky" else "singular"
    with pytest.raises(LinAlgError, match=expected):
        getattr(ml.linalg, name)(*operands)


def test_determinants_of_all_sizes_of_numbers() -> None:
    huge: Any = np.diag([1e200, 1e200, 1e-300, -1e-90])
    exact = ml.linalg.det(ml.asarray(huge)).numpy()
    np.testing.assert_allclose(exact, -1e10, 1e-14)
    swapped = ml.asarray(np.eye(3)[[1, 0, 2]])
    assert float(ml.linalg.det(swapped)) == -1.0
    assert float(ml.linalg.det(ml.zeros((2, 2)))) == 0.0
    assert np.isnan(float(ml.linalg.det(ml.asarray([[np.nan, 1.0], [1.0, 2.0]]))))
    assert np.isinf(float(ml.linalg.det(ml.asarray(np.diag([1e200, 1e200])))))


def test_a_nan_changes_no_other_matrix_of_a_stack() -> None:
    x = np.stack([np.eye(5) * (2.0 + i) + 0.1 for i in range(20)])
    expected = ml.linalg.cholesky(ml.asarray(x)).numpy()
    x[7, 2, 2] = np.nan
    factors = ml.linalg.cholesky(ml.asarray(x)).numpy()
    assert np.isnan(factors[7]).any()
    others = [i for i in range(20) if i != 7]
    assert factors[others].tobytes() == expected[others].tobytes()


@cases("name", "inv", "det", "cholesky")
def test_a_matrix_has_the_same_bits_alone_and_in_a_stack(name: str) -> None:
    x = _matrices((50, 9, 9), "f4")
    x = x @ np.swapaxes(x, -1, -2) + 9 * np.eye(9, dtype="f4")
    whole = getattr(ml.linalg, name)(ml.asarray(x)).numpy()
    for i in (0, 17, 49):
        alone = getattr(ml.linalg, name)(ml.asarray(x[i])).numpy()
        assert alone.tobytes() == whole[i].tobytes()
