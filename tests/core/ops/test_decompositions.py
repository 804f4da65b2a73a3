"""Decompositions are what defines them, for all dtypes, stacks and empty matrices; wrong ones are
refused."""

from __future__ import annotations

import numpy as np
import pytest

from mlvm.core.types import Array
from tests.cases.evaluate import evaluate

RNG = np.random.default_rng(21)
SQUARES = [(3, 3), (2, 1, 2, 2), (1, 1), (0, 0), (2, 0, 0), (0, 2, 2)]
SHAPES = [*SQUARES, (4, 2), (2, 4), (3, 2, 3), (0, 3), (3, 0)]
DTYPES = ["f", "d", "F", "D"]


def matrices(shape: tuple[int, ...], dtype: str) -> Array:
    x = RNG.standard_normal(shape)
    if dtype in "FD":
        x = x + 1j * RNG.standard_normal(shape)
    return x.astype(dtype)


def adjoint(x: Array) -> Array:
    return x.swapaxes(-1, -2).conj()


def cut(packed: Array, *shapes: tuple[int, ...]) -> list[Array]:
    stack = packed.shape[:-1]
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
    assert packed.shape[-1] == ends[-1]
    parts = np.split(packed, ends[:-1], -1)
    return [part.reshape(*stack, *shape) for part, shape in zip(parts, shapes, strict=True)]


def assert_close(x: Array, y: Array) -> None:
    tolerance = 1e-5 if x.dtype.char in "fF" else 1e-12
    np.testing.assert_allclose(x, np.broadcast_to(y, x.shape), rtol=tolerance, atol=tolerance)


def assert_orthonormal(x: Array) -> None:
    assert_close(adjoint(x) @ x, np.eye(x.shape[-1], dtype=x.dtype))


every_square = pytest.mark.parametrize("shape", SQUARES, ids=str)
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


@every_square
def test_inverse_solution_and_determinant(shape: tuple[int, ...]) -> None:
    for dtype in DTYPES:
        x = matrices(shape, dtype) + 3 * np.eye(shape[-1], dtype=dtype)
        y = matrices((*shape[:-1], 2), dtype)
        inverse, solution = evaluate("inv", x), evaluate("solve", x, y)
        det, packed = evaluate("det", x), evaluate("slogdet", x)
        assert inverse.dtype == solution.dtype == det.dtype == packed.dtype == dtype
        assert_close(x @ inverse, np.eye(shape[-1], dtype=dtype))
        assert_close(x @ solution, y)
        assert_close(packed[..., 0] * np.exp(packed[..., 1]), det)
        assert_close(np.abs(packed[..., 0]), np.ones(shape[:-2], dtype))


@every_square
def test_factors_and_eigenvectors(shape: tuple[int, ...]) -> None:
    n = shape[-1]
    for dtype in DTYPES:
        root = matrices(shape, dtype)
        x = root @ adjoint(root) + np.eye(n, dtype=dtype)
        lower, upper = evaluate("cholesky", x), evaluate("cholesky", x, upper=True)
        assert_close(lower @ adjoint(lower), x)
        assert_close(adjoint(upper) @ upper, x)
        np.testing.assert_array_equal(lower, np.tril(lower))
        np.testing.assert_array_equal(upper, np.triu(upper))
        values, vectors = cut(evaluate("eigh", x), (n,), (n, n))
        assert_close(x @ vectors, vectors * values[..., np.newaxis, :])
        assert_orthonormal(vectors)
        assert np.all(values.imag == 0)
        assert np.all(np.diff(values.real) >= 0)
        alone = evaluate("eigvalsh", x)
        assert alone.dtype == np.dtype(dtype).char.lower()
        assert_close(alone, values.real)


@every_square
def test_eigenvectors_of_any_matrix(shape: tuple[int, ...]) -> None:
    n = shape[-1]
    for dtype in DTYPES:
        x = matrices(shape, dtype)
        packed = evaluate("eig", x)
        assert packed.dtype == np.dtype(dtype).char.upper()
        values, vectors = cut(packed, (n,), (n, n))
        assert_close(x @ vectors, vectors * values[..., np.newaxis, :])
        assert_close(np.linalg.norm(vectors, axis=-2), np.ones(shape[:-1]))
        assert_close(np.sort_complex(evaluate("eigvals", x)), np.sort_complex(values))


@every_shape
def test_orthonormal_factors(shape: tuple[int, ...]) -> None:
    *_, m, n = shape
    k = min(m, n)
    for dtype in DTYPES:
        x = matrices(shape, dtype)
        for mode, inner in (("reduced", k), ("complete", m)):
            q, r = cut(evaluate("qr", x, mode=mode), (m, inner), (inner, n))
            assert_close(q @ r, x)
            assert_orthonormal(q)
            np.testing.assert_array_equal(r, np.triu(r))
            assert np.all(np.diagonal(r, 0, -2, -1).imag == 0)
        for full in (True, False):
            rows, wide = (m, n) if full else (k, k)
            packed = evaluate("svd", x, full_matrices=full)
            u, s, vh = cut(packed, (m, rows), (k,), (wide, n))
            assert_close(u[..., :k] * s[..., np.newaxis, :] @ vh[..., :k, :], x)
            assert_orthonormal(u)
            assert_orthonormal(adjoint(vh))
            assert np.all(s.imag == 0)
            assert np.all(np.diff(s.real) <= 0)
        alone = evaluate("svdvals", x)
        assert alone.dtype == np.dtype(dtype).char.lower()
        assert_close(alone, s.real)


@every_shape
def test_moore_and_penrose(shape: tuple[int, ...]) -> None:
    """The four equations that define the inverse, also of a matrix without full rank."""
    for dtype in DTYPES:
        x = matrices(shape, dtype)
        x[..., -1:] = x[..., :1]
        tolerance = np.array(1e-4 if dtype in "fF" else 1e-10, np.dtype(dtype).char.lower())
        p = evaluate("pinv", x, tolerance)
        assert p.dtype == dtype
        assert_close(x @ p @ x, x)
        assert_close(p @ x @ p, p)
        assert_close(adjoint(x @ p), x @ p)
        assert_close(adjoint(p @ x), p @ x)
