"""Cases of factors, equations and eigenvalues.

Where nothing chooses the signs of vectors, LAPACK does: those cases compare with numpy, and
`test_decompositions.py` with what defines them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from mlvm.core.types import Array
from tests.cases.case import Case, Draws

_draws = Draws(11)
_f64, _c128 = _draws.f64, _draws.c128


def _positive(*shape: int, complex: bool = False) -> Array:
    """Hermitian matrices whose eigenvalues are above 1."""
    x = _c128(*shape) if complex else _f64(*shape)
    return x @ x.swapaxes(-1, -2).conj() + np.eye(shape[-1])


def _each(function: Callable[..., Any], dims: int = 2) -> Callable[..., Array]:
    """The function of each of the arrays in the last `dims` axes."""

    def expected(x: Array, **attributes: Any) -> Array:
        stack = x.shape[: x.ndim - dims]
        results = [np.asarray(function(x[i], **attributes)) for i in np.ndindex(stack)]
        return np.stack(results).reshape(*stack, *results[0].shape)

    return expected


def _cholesky(x: Array, upper: bool = False) -> Array:
    """Row by row, from the left."""
    n = len(x)
    factor = np.zeros_like(x)
    for i in range(n):
        for j in range(i + 1):
            rest = x[i, j] - np.sum(factor[i, :j] * factor[j, :j].conj())
            factor[i, j] = np.sqrt(rest) if i == j else rest / factor[j, j]
    return factor.T.conj() if upper else factor


def _triangle(x: Array, y: Array, lower: bool, unit_diagonal: bool = False) -> Array:
    """By the inverse of the triangle."""
    whole = np.tril(x) if lower else np.triu(x)
    if unit_diagonal:
        i = np.arange(x.shape[-1])
        whole[..., i, i] = 1
    inverse: Array = np.linalg.inv(whole)
    return inverse @ y


def _lu(x: Array) -> Array:
    """Gauss's elimination of one matrix, row by row."""
    a, order = x.copy(), list(range(len(x)))
    for k in range(min(x.shape)):
        best = max(range(k, len(a)), key=lambda i: abs(a[i, k]))
        a[[k, best]], order[k], order[best] = a[[best, k]], order[best], order[k]
        for i in range(k + 1, len(a)):
            a[i, k] /= a[k, k]
            a[i, k + 1 :] -= a[i, k] * a[k, k + 1 :]
    return _packed(a, np.array(order)).astype(x.dtype)


def _expm(x: Array) -> Array:
    """The series, of a small matrix."""
    term = total = np.eye(len(x), dtype=x.dtype)
    for k in range(1, 40):
        term = term @ x / k
        total = total + term
    return total.astype(x.dtype)


def _det(x: Array) -> Any:
    """The sum over all permutations."""
    n, total = len(x), x.dtype.type(0)
    for order in itertools.permutations(range(n)):
        inversions = sum(a > b for a, b in itertools.combinations(order, 2))
        total += (-1) ** inversions * np.prod([x[i, j] for i, j in enumerate(order)] or [1])
    return total


def _inv(x: Array) -> Array:
    """Cramer's rule."""
    n = len(x)
    minors = [
        [_det(np.delete(np.delete(x, j, 0), i, 1)) * (-1) ** (i + j) for j in range(n)]
        for i in range(n)
    ]
    return np.array(minors, x.dtype).reshape(n, n) / _det(x)


def _det_vjp(g: Array, x: Array) -> Array:
    cofactors = _each(lambda x: _inv(x).T * _det(x))(x)
    return np.asarray(g[..., np.newaxis, np.newaxis] * cofactors.conj())


def _solve(subscripts: str) -> Callable[..., Array]:
    def expected(x: Array, y: Array) -> Array:
        return np.einsum(subscripts, _each(_inv)(x), y)

    return expected


def _packed(*parts: Any) -> Array:
    return np.concatenate([np.ravel(part) for part in parts])


def _slogdet(x: Array) -> Array:
    det = _det(x)
    return np.array([det / abs(det), math.log(abs(det))])


def _svd(x: Array, full_matrices: bool = True) -> Array:
    return _packed(*np.linalg.svd(x, full_matrices))


def _qr(x: Array, mode: Any = "reduced") -> Array:
    return _packed(*np.linalg.qr(x, mode))


def _roots(x: Array) -> Array:
    """The eigenvalues, as those of the diagonal of a triangular matrix."""
    return np.diag(x).astype(np.result_type(x, np.complex64))


def _pinv(x: Array, rtol: Array) -> Array:
    """For full rank, of the smaller product; for rank one, x^H / |x|^2."""
    back = x.T.conj()
    if rtol > 0.1:
        return np.asarray(back / np.sum(x**2))
    wide = x.shape[0] < x.shape[1]
    return np.asarray(back @ _inv(x @ back) if wide else _inv(back @ x) @ back)


_TRIANGULAR = np.triu(_f64(3, 3), 1) + np.diag([-1.0, 0.5, 2.0])
_REAL_ROOTS = _positive(3, 3) @ np.diag([1.0, 2.0, 3.0])
_TOLERANCE = np.array(1e-9)

CASES: dict[str, list[Case]] = {
    "cholesky": [
        Case((_positive(3, 3),), _cholesky),
        Case((_positive(3, 3),), _cholesky, {"upper": True}),
        Case((_positive(2, 2, 2),), _each(_cholesky)),
        Case((_positive(2, 2).astype("f"),), _cholesky),
        Case((_positive(3, 3, complex=True),), _cholesky),
    ],
    "inv": [
        Case((_f64(3, 3),), _inv),
        Case((_f64(2, 2, 2),), _each(_inv)),
        Case((np.eye(2, dtype="f") + np.tri(2, dtype="f"),), _inv),
        Case((_c128(3, 3),), _inv),
    ],
    "solve": [
        Case((_f64(3, 3), _f64(3, 2)), _solve("ij,jk->ik")),
        Case((_f64(3, 3), _f64(3)), _solve("ij,j->i")),
        Case((_f64(2, 2, 2), _f64(2)), _solve("bij,j->bi")),
        Case((_f64(2, 1, 2, 2), _f64(3, 2, 1)), _solve("baij,cjk->bcik")),
        Case((np.eye(2, dtype="f") * 2, _f64(2, 3).astype("f")), _solve("ij,jk->ik")),
        Case((np.eye(2, dtype="f") * 2, _f64(2, 3)), _solve("ij,jk->ik")),
        Case((_c128(2, 2), _f64(2, 3)), _solve("ij,jk->ik")),
        Case((_f64(2, 2), _c128(2)), _solve("ij,j->i")),
    ],
    "det": [
        Case((_f64(3, 3),), _det),
        Case((_f64(2, 2, 2),), _each(_det)),
        Case((np.tri(3, dtype="f") * 2,), _det),
        Case((_c128(3, 3),), _det),
    ],
    "det_vjp": [
        Case((_f64(), _f64(3, 3)), _det_vjp),
        Case((_f64(2), _f64(2, 2, 2)), _det_vjp),
        Case((_f64(2).astype("f"), np.stack([np.tri(2, dtype="f")] * 2)), _det_vjp),
        Case((_c128(), _c128(2, 2)), _det_vjp),
    ],
    "slogdet": [
        Case((_f64(3, 3),), _slogdet),
        Case((_f64(2, 2, 2),), _each(_slogdet)),
        Case((np.tri(3, dtype="f") * 2,), _slogdet),
        Case((_c128(3, 3),), _slogdet),
    ],
    "eigh": [
        Case((_positive(3, 3),), lambda x: _packed(*np.linalg.eigh(x))),
        Case((_positive(2, 2, 2),), _each(lambda x: _packed(*np.linalg.eigh(x)))),
        Case((np.diag([3.0, 1.0]).astype("f"),), lambda x: _packed(*np.linalg.eigh(x))),
    ],
    "eigvalsh": [
        Case((_positive(3, 3),), np.linalg.eigvalsh),
        Case((np.diag([3.0, 1.0]).astype("f"),), lambda x: np.sort(np.diag(x))),
        Case((_positive(3, 3, complex=True),), np.linalg.eigvalsh),
    ],
    "eig": [Case((_REAL_ROOTS,), lambda x: _packed(*np.linalg.eig(x)).astype("D"))],
    "eigvals": [
        Case((_f64(3, 3),), lambda x: np.linalg.eigvals(x).astype("D")),
        Case((_TRIANGULAR.astype("f"),), _roots),
        Case((_c128(2, 2),), np.linalg.eigvals),
    ],
    "qr": [
        Case((_f64(3, 2),), _qr),
        Case((_f64(2, 2, 3),), _each(_qr)),
        Case((_f64(2, 2),), _qr, {"mode": "complete"}),
        Case((np.eye(3, 2, dtype="f"),), _qr),
        Case((_c128(3, 2),), _qr),
        Case((_c128(2, 3),), _qr),
    ],
    "svd": [
        Case((_f64(3, 2),), _svd),
        Case((_f64(2, 2, 3),), _each(_svd)),
        Case((_f64(3, 2),), _svd, {"full_matrices": False}),
        Case((_f64(2, 3),), _svd, {"full_matrices": False}),
        Case((np.diag([3.0, 1.0]).astype("f"),), _svd),
    ],
    "svdvals": [
        Case((_f64(3, 2),), lambda x: np.sqrt(np.linalg.eigvalsh(x.T @ x)[::-1])),
        Case((np.diag([1.0, -3.0]).astype("f"),), lambda x: np.sort(np.abs(np.diag(x)))[::-1]),
        Case((_c128(3, 2),), lambda x: np.sqrt(np.linalg.eigvalsh(x.T.conj() @ x)[::-1])),
    ],
    "pinv": [
        Case((_f64(3, 2), _TOLERANCE), _pinv),
        Case((_f64(2, 3), _TOLERANCE), _pinv),
        Case((_c128(3, 2), _TOLERANCE), _pinv),
        Case((np.outer([1.0, 2.0], [3.0, 4.0]).astype("f"), np.array(0.5, "f")), _pinv),
        Case(
            (np.diag([4.0, 1.0]).astype("f"), np.array(0.3, "f")), lambda x, _: np.diag([0.25, 0])
        ),
    ],
    "solve_triangular": [
        Case((_f64(3, 3) + 3 * np.eye(3), _f64(3, 2)), _triangle, {"lower": True}),
        Case((_f64(2, 3, 3) + 3 * np.eye(3), _f64(3, 2)), _triangle, {"lower": False}),
        Case((_f64(3, 3) + 3 * np.eye(3), _f64(3)), _triangle, {"lower": False}),
        Case((_f64(3, 3), _f64(3, 2)), _triangle, {"lower": True, "unit_diagonal": True}),
        Case((_c128(2, 2) + 3 * np.eye(2), _c128(2, 1)), _triangle, {"lower": True}),
        Case((np.tri(3, dtype="f") * 2, np.eye(3, dtype="f")), _triangle, {"lower": True}),
    ],
    "lu": [
        Case((_f64(3, 3),), _lu),
        Case((_f64(2, 3, 2),), _each(_lu)),
        Case((_f64(2, 4),), _lu),
        Case((np.tri(3, dtype="f") * 2,), _lu),
        Case((_c128(3, 3),), _lu),
    ],
    "expm": [
        Case((_f64(3, 3),), _expm),
        Case((_f64(2, 2, 2) / 4,), _each(_expm)),
        Case((np.array([[0, 1], [-1, 0]], "f"),), _expm),
        Case((_c128(2, 2),), _expm),
    ],
}
