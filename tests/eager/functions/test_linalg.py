"""`ml.linalg` at its edges, and large matrices; what it computes is rows of a table."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import LinAlgError
from mlvm.core.types import Array
from mlvm.machines.wire import WireVM
from tests.brief import cases

la: Any = ml.linalg
RNG = np.random.default_rng(31)


def random(*shape: int) -> Array:
    return RNG.standard_normal(shape)


def positive(*shape: int) -> Array:
    x = random(*shape)
    return x @ x.swapaxes(-1, -2) + np.eye(shape[-1])


def parts(result: Any) -> list[Array]:
    several = result if isinstance(result, tuple) else (result,)
    return [np.asarray(each) for each in several]


def assert_like(result: Any, expected: Any, tolerance: float = 1e-12) -> None:
    """Equal dtypes, shapes and, nearly, values."""
    for actual, reference in zip(parts(result), parts(expected), strict=True):
        assert (actual.dtype, actual.shape) == (reference.dtype, reference.shape)
        np.testing.assert_allclose(actual, reference, rtol=tolerance, atol=tolerance)


def test_results_have_the_names_of_the_standard() -> None:
    x = ml.asarray(positive(2, 2))
    for result, names in (
        (la.eigh(x), ("eigenvalues", "eigenvectors")),
        (la.eig(x), ("eigenvalues", "eigenvectors")),
        (la.qr(x), ("Q", "R")),
        (la.slogdet(x), ("sign", "logabsdet")),
        (la.svd(x), ("U", "S", "Vh")),
    ):
        assert result._fields == names
        assert all(each.shape[: x.ndim - 2] == () for each in result)
    assert [each.shape for each in la.svd(ml.asarray(random(5, 2)), full_matrices=False)] == [
        *((5, 2), (2,), (2, 2))
    ]
    assert [each.shape for each in la.qr(ml.asarray(random(5, 2)), mode="complete")] == [
        *((5, 5), (5, 2))
    ]


# --- norms, ranks, least squares -------------------------------------------------------


@pytest.mark.parametrize("ord", [2, 3, 1.5, 0.5, -2])
def test_gradients_of_vector_norms_of_zeros_are_zero(ord: float) -> None:
    gradient = ml.grad(lambda x: ml.sum(la.vector_norm(x, axis=-1, ord=ord)))
    assert gradient(ml.zeros(3)).tolist() == [0.0] * 3
    assert gradient(ml.zeros(2, dtype="c64")).tolist() == [0.0] * 2
    row, mixed = gradient(ml.asarray([[2.0, 1.0], [0.0, 1.0]])).tolist()
    expected = np.asarray([2.0, 1.0]) ** (ord - 1) * (2.0**ord + 1) ** (1 / ord - 1)
    np.testing.assert_allclose(row, expected, rtol=1e-6)
    assert mixed == ([0.0, 1.0] if ord > 0 else [0.0, 0.0])


def test_ranks_have_a_tolerance_for_each_matrix() -> None:
    x = np.stack([np.diag([1.0, 1e-3, 1e-9])] * 2).astype("f")
    assert la.matrix_rank(ml.asarray(x)).tolist() == [2, 2]
    assert la.matrix_rank(ml.asarray(x), rtol=0.01).tolist() == [1, 1]
    assert la.matrix_rank(ml.asarray(x), rtol=ml.asarray([0.01, 1e-10])).tolist() == [1, 3]
    assert la.matrix_rank(ml.zeros((3, 3))).item() == 0
    assert_like(la.pinv(ml.asarray(x), rtol=0.01), np.linalg.pinv(x, rtol=0.01))


@pytest.mark.parametrize("rcond", [None, -1, 0.5])
def test_least_squares_take_rcond_as_numpy_does(rcond: float | None) -> None:
    x, y = np.diag([1.0, 2.0, 8e-16, 0.0])[:, :3], np.array([1.0, 2.0, 0.0, 3.0])
    expected = np.linalg.lstsq(x, y, rcond)
    got = la.lstsq(ml.asarray(x), ml.asarray(y), rcond=rcond)
    assert got.rank.item() == expected[2]
    assert_like(got.solution, expected[0])
    assert la.lstsq(ml.asarray(x), ml.asarray(y), rcond).rank.item() == expected[2]


# --- elsewhere -------------------------------------------------------------------------


@pytest.mark.local(reason="the VM behind the wire is here")
def test_an_error_has_its_class_behind_the_wire() -> None:
    with ml.Arena(WireVM(ml.VM()), "elsewhere"), pytest.raises(np.linalg.LinAlgError) as caught:
        la.inv(ml.zeros((2, 2)))
    assert str(caught.value) == "inv(f32[2,2]): a matrix is singular"
    assert isinstance(caught.value, LinAlgError)


# --- elimination, substitution, exponentials -----------------------------------------


@cases("shape", (3, 3), (2, 5, 3), (2, 3, 5), (90, 90), (70, 50), (0, 0), (2, 0))
@pytest.mark.parametrize("dtype", ["d", "D"])
def test_lu(shape: tuple[int, ...], dtype: str) -> None:
    x = (random(*shape) + 1j * random(*shape)).astype(dtype) if dtype == "D" else random(*shape)
    factors = la.lu(ml.asarray(x))
    p, lower, upper = parts(factors)
    k = min(shape[-2:])
    assert (lower.shape, upper.shape) == ((*shape[:-1], k), (*shape[:-2], k, shape[-1]))
    np.testing.assert_allclose(p @ lower @ upper, x, atol=1e-12)
    np.testing.assert_array_equal(p.sum(-1), np.ones(shape[:-1]))
    np.testing.assert_array_equal(lower, np.tril(lower))
    np.testing.assert_array_equal(lower[..., range(k), range(k)], np.ones((*shape[:-2], k)))
    np.testing.assert_array_equal(upper, np.triu(upper))
    assert (np.abs(lower) <= 1).all()  # the largest was the pivot
    both, order = la.lu_factor(ml.asarray(x))
    rows = np.take_along_axis(x, order.numpy()[..., None], -2)
    np.testing.assert_allclose(lower @ upper, rows, atol=1e-12)
    np.testing.assert_array_equal(np.triu(both.numpy())[..., :k, :], upper)
    np.testing.assert_array_equal(np.tril(both.numpy(), -1)[..., :k], np.tril(lower, -1))


@pytest.mark.parametrize("n", [3, 70])
def test_solvers_as_numpys(n: int) -> None:
    x, right = random(2, n, n), random(n, 3)
    tall = ml.asarray(right)
    assert_like(la.lu_solve(la.lu_factor(ml.asarray(x)), tall), np.linalg.solve(x, right), 1e-9)
    solution = la.lu_solve(la.lu_factor(ml.asarray(x)), tall[:, 0])
    assert_like(solution, np.linalg.solve(x, right[:, :1])[..., 0], 1e-9)
    for lower, take in ((True, np.tril), (False, np.triu)):
        whole = x + 5 * np.sqrt(n) * np.eye(n)
        expected = np.linalg.solve(take(whole), right)
        assert_like(la.solve_triangular(ml.asarray(whole), tall, lower=lower), expected)
        ones = take(x / n, -1 if lower else 1) + np.eye(n)
        solution = la.solve_triangular(ml.asarray(x / n), tall, lower=lower, unit_diagonal=True)
        assert_like(solution, np.linalg.solve(ones, right))
    c = positive(n, n)
    for upper in (False, True):
        factor = la.cholesky(ml.asarray(c), upper=upper)
        solution = la.cholesky_solve(factor, tall[:, 0], upper=upper)
        assert_like(solution, np.linalg.solve(c, right[:, 0]), 1e-9)
        assert_like(la.cholesky_solve(factor, tall, upper=upper), np.linalg.solve(c, right), 1e-9)


def test_expm() -> None:
    for scale in (1e-3, 1.0, 30.0):
        x = random(3, 4, 4) * scale
        values, vectors = np.linalg.eig(x)
        expected = (vectors * np.exp(values)[:, None, :] @ np.linalg.inv(vectors)).real
        result = la.expm(ml.asarray(x)).numpy()
        np.testing.assert_allclose(result, expected, rtol=1e-9, atol=1e-9 * np.abs(expected).max())
    turn = np.array([[0.0, -1.0], [1.0, 0.0]])
    for angle in (0.1, 3.0, 100.0):
        c, s = math.cos(angle), math.sin(angle)
        assert_like(la.expm(ml.asarray(turn * angle)), np.array([[c, -s], [s, c]]), 1e-11)
    narrow = la.expm(ml.asarray((turn * 3).astype("f")))
    np.testing.assert_allclose(narrow.numpy(), la.expm(ml.asarray(turn * 3)).numpy(), atol=1e-6)
    strange = np.stack([np.full((2, 2), np.inf), np.zeros((2, 2))])
    result = la.expm(ml.asarray(strange)).numpy()
    assert np.isnan(result[0]).all()
    np.testing.assert_array_equal(result[1], np.eye(2))
    assert la.expm(ml.zeros((0, 0))).shape == (0, 0)


def test_solvers_of_halves_and_integers() -> None:
    x = np.array([[2, 1], [0, 4]])
    for dtype in (ml.float16, ml.bfloat16):
        half = ml.asarray(x, dtype=dtype)
        for result in (
            la.solve_triangular(half, half),
            la.lu_solve(la.lu_factor(half), half),
            la.lu(half).U - half + ml.eye(2, dtype=dtype),
        ):
            assert result.dtype is dtype
            np.testing.assert_allclose(result.numpy(), np.eye(2), atol=1e-2)
        np.testing.assert_allclose(la.expm(half * 0.0).numpy(), np.eye(2))
    assert la.lu(ml.asarray(x)).L.dtype is ml.float32
    assert la.expm(ml.asarray(x)).dtype is ml.float32
