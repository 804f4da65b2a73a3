"""Linear systems, factorizations and eigenvalues of the matrices in the last two axes.

The kernels call numpy, which calls LAPACK, for one matrix after the other. An op with several
results concatenates them along one last axis, each in row-major order: `eigh` of f[..., n, n] is
f[..., n + n n], the eigenvalues before the vectors. All results of a complex matrix are complex,
also the real ones. `mlvm.eager.linalg` splits them.

If a matrix has no result (it is singular or not positive definite, or an iteration does not
converge), the op raises `LinAlgError`. The flops are from Golub and Van Loan, Matrix Computations,
4th ed., 2013.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import numpy as np

from mlvm.core.errors import LinAlgError, ShapeError, counted
from mlvm.core.op import internal
from mlvm.core.rules import broadcast_shapes, require
from mlvm.core.types import Array, Shape, TensorType, c64, promote

QRMode = Literal["reduced", "complete"]

# --- type rules ----------------------------------------------------------------------


def _matrices(x: TensorType) -> TensorType:
    """Return the type of x. Raises an error unless x is a stack of float matrices."""
    require("inexact", x)
    if x.ndim < 2:
        raise ShapeError(f"expected matrices with 2 dimensions or more, got {x.ndim}; reshape x")
    return x


def _squares(x: TensorType, **_: object) -> TensorType:
    rows, columns = _matrices(x).shape[-2:]
    if rows != columns:
        raise ShapeError(
            f"expected square matrices, got {rows} by {columns}; for these, use svd, qr or lstsq"
        )
    return x


def _flat(x: TensorType, *parts: Shape) -> TensorType:
    """Return the type of the concatenated results for each matrix of x."""
    return x.with_shape((*x.shape[:-2], sum(map(math.prod, parts))))


def _scalars(x: TensorType) -> TensorType:
    return _squares(x).with_shape(x.shape[:-2])


def _det_vjp(g: TensorType, x: TensorType) -> TensorType:
    if g is not _scalars(x):
        raise ShapeError(f"expected g of the type of det(x), {_scalars(x)}, got {g}")
    return x


def _solve(x: TensorType, y: TensorType) -> TensorType:
    require("inexact", y)
    dtype, n = promote(_squares(x).dtype, y.dtype), x.shape[-1]
    if y.ndim == 0:
        raise ShapeError("expected a right-hand side with at least 1 dimension, got a scalar")
    rows = y.shape[-1] if y.ndim == 1 else y.shape[-2]
    if rows != n:
        raise ShapeError(f"expected {counted(n, 'row')} on the right-hand side, got {rows}")
    if y.ndim == 1:
        return TensorType(dtype, x.shape[:-1])
    return TensorType(dtype, (*broadcast_shapes(x.shape[:-2], y.shape[:-2]), *y.shape[-2:]))


def _eigh(x: TensorType) -> TensorType:
    n = _squares(x).shape[-1]
    return _flat(x, (n,), (n, n))


def qr_shapes(shape: Shape, mode: QRMode) -> tuple[Shape, Shape]:
    """Return the shapes of Q and R for one matrix of that shape."""
    rows, columns = shape
    inner = rows if mode == "complete" else min(rows, columns)
    return (rows, inner), (inner, columns)


def svd_shapes(shape: Shape, full_matrices: bool) -> tuple[Shape, Shape, Shape]:
    """Return the shapes of U, S and Vh for one matrix of that shape."""
    rows, columns = shape
    inner = min(rows, columns)
    if full_matrices:
        return (rows, rows), (inner,), (columns, columns)
    return (rows, inner), (inner,), (inner, columns)


def _svd(x: TensorType, full_matrices: bool) -> TensorType:
    return _flat(x, *svd_shapes(_pair(_matrices(x)), full_matrices))


def _singular_values(x: TensorType) -> TensorType:
    return _real(_matrices(x)).with_shape((*x.shape[:-2], min(_pair(x))))


def _lu(x: TensorType) -> TensorType:
    rows, columns = _pair(_matrices(x))
    return _flat(x, (rows, columns), (rows,))


def _pinv(x: TensorType, rtol: TensorType) -> TensorType:
    require("float", rtol)
    stack = _matrices(x).shape[:-2]
    if broadcast_shapes(stack, rtol.shape) != stack:
        raise ShapeError(
            f"expected an rtol that broadcasts to the batch axes {stack}, got shape {rtol.shape}"
        )
    return x.with_shape((*stack, x.shape[-1], x.shape[-2]))


def _pair(x: TensorType) -> tuple[int, int]:
    rows, columns = x.shape[-2:]
    return rows, columns


def _real(x: TensorType) -> TensorType:
    return x.with_dtype(x.dtype.real)


def _complex(x: TensorType) -> TensorType:
    return x.with_dtype(promote(x.dtype, c64))


# --- how many operations ------------------------------------------------------------


def _cubic(factor: float) -> Callable[..., int]:
    """Return a function that counts `factor` times the cube of the rows for each matrix."""

    def flops(x: TensorType, **attributes: Any) -> int:
        n = x.shape[-1]
        return round(factor * n**3) * math.prod(x.shape[:-2])

    return flops


def _solve_flops(x: TensorType, y: TensorType) -> int:
    return _cubic(2 / 3)(x) + 2 * x.shape[-1] * _solve(x, y).size


def _triangular_flops(x: TensorType, y: TensorType, **attributes: Any) -> int:
    return x.shape[-1] * _solve(x, y).size


def _lu_flops(x: TensorType) -> int:
    (m, n), r = _pair(x), min(_pair(x))
    return (2 * m * n * r - (m + n) * r**2 + 2 * r**3 // 3) * math.prod(x.shape[:-2])


def _qr_flops(x: TensorType, mode: QRMode) -> int:
    """Count R by Householder reflections, and the same number again for Q."""
    inner = min(_pair(x))
    one = 2 * inner**2 * (max(_pair(x)) - inner // 3)
    return 2 * one * math.prod(x.shape[:-2])


def _svd_flops(x: TensorType, *others: TensorType, **attributes: Any) -> int:
    longer, shorter = max(_pair(x)), min(_pair(x))
    return (4 * longer**2 * shorter + 22 * shorter**3) * math.prod(x.shape[:-2])


def _svdvals_flops(x: TensorType) -> int:
    return 4 * max(_pair(x)) * min(_pair(x)) ** 2 * math.prod(x.shape[:-2])


# --- kernels -------------------------------------------------------------------------


class _refusing(np.errstate):
    """Context manager that raises `LinAlgError` with a reason for numpy's error of this name."""

    def __init__(self, reason: str) -> None:
        super().__init__(all="ignore")
        self.reason = reason

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)
        if isinstance(error, np.linalg.LinAlgError):
            raise LinAlgError(self.reason) from None


_SINGULAR = "a matrix is singular"
_NO_CONVERGENCE = "the iteration does not converge, as with inf or nan in a matrix"


def write(out: Array, *parts: Array) -> None:
    """Write the results for each matrix along the last axis of `out`."""
    at, stack = 0, out.shape[:-1]
    for part in parts:
        size = math.prod(part.shape[len(stack) :])
        out[..., at : at + size] = part.reshape(*stack, size)
        at += size


def hermitian(x: Array) -> Array:
    """Return the Hermitian part (x + x^H) / 2."""
    half = x * x.dtype.type(0.5)
    whole: Array = half + adjoint(half)
    return whole


@internal(infer=_squares, flops=_cubic(1 / 3), may_raise=True)
def cholesky(out: Array, x: Array, *, upper: bool = False) -> None:
    """The lower triangular L with x = L L^H, or the `upper` one U with x = U^H U: f[..., n, n].

    Like JAX, it factors the Hermitian part (x + x^H) / 2, which equals x for valid input. Raises
    `LinAlgError` for a matrix that is not positive definite.
    """
    with _refusing("a matrix is not positive definite"):
        np.copyto(out, np.linalg.cholesky(hermitian(x), upper=upper))


@internal(infer=_squares, flops=_cubic(2), may_raise=True)
def inv(out: Array, x: Array) -> None:
    """The inverses of square matrices: f[..., n, n]. Raises `LinAlgError` for a singular one."""
    with _refusing(_SINGULAR):
        np.copyto(out, np.linalg.inv(x))


@internal(infer=_solve, flops=_solve_flops, may_raise=True)
def solve(out: Array, x: Array, y: Array) -> None:
    """z with x z = y: f[..., n, n], f[..., n, k] -> f[..., n, k], broadcasting the batch axes.

    A y with one dimension is a column for all matrices, and the result lacks that axis. Raises
    `LinAlgError` for a singular matrix.
    """
    with _refusing(_SINGULAR):
        np.copyto(out, np.linalg.solve(x, y))


@internal(
    infer=lambda x, y, lower, unit_diagonal: _solve(x, y), flops=_triangular_flops, may_raise=True
)
def solve_triangular(
    out: Array, x: Array, y: Array, *, lower: bool, unit_diagonal: bool = False
) -> None:
    """`solve` with only the lower or upper triangle of x, optionally with ones on the diagonal.

    Raises `LinAlgError` for a 0 on the diagonal.
    """
    if unit_diagonal:
        x = np.where(np.eye(x.shape[-1], dtype=np.bool_), x.dtype.type(1), x)
    columns = y[:, np.newaxis] if y.ndim == 1 else y
    with _refusing(_SINGULAR):
        solution = _substituted(x, columns, lower)
        np.copyto(out, solution[..., 0] if y.ndim == 1 else solution)


_LEAF: Final = 32
"""Number of rows that are processed one by one, or by LAPACK; matrix products do the rest."""


def _substituted(x: Array, y: Array, lower: bool) -> Array:
    """Solve by recursion: the first half, the update by a matrix product, the second half."""
    n = x.shape[-1]
    if n <= _LEAF:
        solved: Array = np.linalg.solve(np.tril(x) if lower else np.triu(x), y)
        return solved
    half = n // 2
    first, last = np.s_[..., :half, :], np.s_[..., half:, :]
    if lower:
        upper = _substituted(x[first][..., :half], y[first], lower)
        beneath = _substituted(x[last][..., half:], y[last] - x[last][..., :half] @ upper, lower)
    else:
        beneath = _substituted(x[last][..., half:], y[last], lower)
        upper = _substituted(x[first][..., :half], y[first] - x[first][..., half:] @ beneath, lower)
    return np.concatenate([upper, beneath], axis=-2)


@internal(infer=_lu, flops=_lu_flops)
def lu(out: Array, x: Array) -> None:
    """x[p] = L U with partial pivoting: f[..., m, n] -> f[..., m n + m].

    L (unit lower triangular) and U (upper triangular) share one matrix, which the permutation p of
    the rows follows. The pivot of each column is the largest element. A pivot of 0 is kept; U is
    then singular.

    The columns are split recursively (Toledo, Locality of reference in LU decomposition with
    partial pivoting, 1997).
    """
    rows, columns = x.shape[-2:]
    a = x.copy()
    order = np.broadcast_to(np.arange(rows), x.shape[:-1]).copy()
    square = min(rows, columns)
    with np.errstate(all="ignore"):
        _eliminate(a, order, 0, square)
        if columns > square:
            a[..., square:] = _unit_solved(a[..., :square], a[..., square:])
    write(out, a, order.astype(x.dtype))


def _unit_solved(x: Array, y: Array) -> Array:
    """Solve for y with the unit lower triangle of x."""
    eye = np.eye(x.shape[-1], dtype=np.bool_)
    return _substituted(np.where(eye, x.dtype.type(1), x), y, True)


def _eliminate(a: Array, order: Array, start: int, stop: int) -> None:
    """Factor the columns from `start` to before `stop` in place, exchanging whole rows."""
    if stop - start > _LEAF:
        middle = (start + stop) // 2
        _eliminate(a, order, start, middle)
        left, right = np.s_[start:middle], np.s_[middle:stop]
        a[..., left, right] = _unit_solved(a[..., left, left], a[..., left, right])
        a[..., middle:, right] -= a[..., middle:, left] @ a[..., left, right]
        _eliminate(a, order, middle, stop)
        return
    for k in range(start, stop):
        pivot = np.abs(a[..., k:, k]).argmax(-1) + k
        exchanged = np.broadcast_to(np.arange(order.shape[-1]), order.shape).copy()
        np.put_along_axis(exchanged, pivot[..., np.newaxis], k, -1)
        exchanged[..., k] = pivot
        a[...] = np.take_along_axis(a, exchanged[..., np.newaxis], -2)
        order[...] = np.take_along_axis(order, exchanged, -1)
        diagonal = a[..., k, k, np.newaxis]
        a[..., k + 1 :, k] /= np.where(diagonal == 0, 1, diagonal)
        rest = np.s_[k + 1 : stop]
        a[..., k + 1 :, rest] -= a[..., k + 1 :, k, np.newaxis] * a[..., k, np.newaxis, rest]


_PADE: Final = [math.comb(13, k) * math.factorial(26 - k) / math.factorial(26) for k in range(14)]
"""Coefficients (26 - k)! 13! / (26! k! (13 - k)!) of x^k."""


@internal(infer=_squares, flops=_cubic(20))
def expm(out: Array, x: Array) -> None:
    """The matrix exponential, the sum of x^k / k!: f[..., n, n]. nan for a matrix with inf or nan.

    It uses scaling, a Pade approximant of degree 13 and squaring, in f64 (Higham, The scaling and
    squaring method for the matrix exponential revisited, 2005).
    """
    a = finite(x).astype(np.complex128 if x.dtype.kind == "c" else np.float64)
    size = np.abs(a).sum(-2).max(-1, initial=0.0)
    with np.errstate(all="ignore"):
        # up to this norm (theta 13 of Higham), the approximant's backward error is below 2**-53
        halvings = np.ceil(np.log2(np.maximum(size / 5.371920351148152, 1.0)))
        a = a * (0.5**halvings)[..., np.newaxis, np.newaxis]
        b, one = _PADE, np.eye(a.shape[-1])
        a2 = a @ a
        a4 = a2 @ a2
        a6 = a4 @ a2
        odd = a6 @ (b[13] * a6 + b[11] * a4 + b[9] * a2)
        odd = a @ (odd + b[7] * a6 + b[5] * a4 + b[3] * a2 + b[1] * one)
        even = a6 @ (b[12] * a6 + b[10] * a4 + b[8] * a2)
        even = even + b[6] * a6 + b[4] * a4 + b[2] * a2 + b[0] * one
        power = np.linalg.solve(even - odd, even + odd)
        for i in range(int(halvings.max(initial=0.0))):
            power = np.where((i < halvings)[..., np.newaxis, np.newaxis], power @ power, power)
        np.copyto(out, power, casting="same_kind")
    out[strange(x)] = np.nan


@internal(infer=_scalars, flops=_cubic(2 / 3))
def det(out: Array, x: Array) -> None:
    """The determinants of square matrices: f[..., n, n] -> f[...]."""
    with np.errstate(all="ignore"):
        np.copyto(out, np.linalg.det(x))


@internal(infer=_det_vjp, flops=lambda g, x: _svd_flops(x), may_raise=True)
def det_vjp(out: Array, g: Array, x: Array) -> None:
    """The gradient g conj(det(x)) x^-H of `det`: f[...], f[..., n, n] -> f[..., n, n].

    It is g times the conjugate cofactors, also for singular matrices. The cofactors are computed
    from the singular values: each pair of vectors is multiplied by the product of all other values.
    """
    with _refusing(_NO_CONVERGENCE):
        u, s, vh = np.linalg.svd(finite(x))
        others = np.where(np.eye(s.shape[-1], dtype=np.bool_), 1, s[..., np.newaxis, :]).prod(-1)
        scale = g * (np.linalg.det(u) * np.linalg.det(vh)).conj()
        np.matmul(u * others[..., np.newaxis, :] * scale[..., np.newaxis, np.newaxis], vh, out)
    out[strange(x)] = np.nan


@internal(infer=lambda x: _flat(_squares(x), (2,)), flops=_cubic(2 / 3))
def slogdet(out: Array, x: Array) -> None:
    """det(x) as the sign det(x) / |det(x)| and log(|det(x)|): f[..., n, n] -> f[..., 2].

    For a singular matrix they are 0 and -inf.
    """
    with np.errstate(all="ignore"):
        out[..., 0], out[..., 1] = np.linalg.slogdet(x)


@internal(infer=_eigh, flops=_cubic(9), may_raise=True)
def eigh(out: Array, x: Array) -> None:
    """Eigenvalues and eigenvectors of Hermitian matrices: f[..., n, n] -> f[..., n + n n].

    The eigenvalues are in ascending order, the eigenvectors are the orthonormal columns of a
    matrix. Like JAX, it uses the Hermitian part (x + x^H) / 2, which equals x for valid input, and
    returns nan for a matrix with inf or nan. Raises `LinAlgError` if the iteration does not
    converge.
    """
    _write_eigen(out, x, lambda x: np.linalg.eigh(hermitian(x)))


@internal(
    infer=lambda x: _real(_squares(x)).with_shape(x.shape[:-1]), flops=_cubic(4 / 3), may_raise=True
)
def eigvalsh(out: Array, x: Array) -> None:
    """The eigenvalues of `eigh` only, real: f[..., n, n] -> f[..., n]."""
    _write_eigen(out, x, lambda x: np.linalg.eigvalsh(hermitian(x)))


@internal(infer=lambda x: _complex(_eigh(x)), flops=_cubic(25), may_raise=True)
def eig(out: Array, x: Array) -> None:
    """Eigenvalues and eigenvectors, complex: f[..., n, n] -> c[..., n + n n].

    The eigenvalues are in no order, the eigenvectors are the columns of a matrix, with length 1.
    Like JAX, it returns nan for a matrix with inf or nan. Raises `LinAlgError` if the iteration
    does not converge.
    """
    _write_eigen(out, x, np.linalg.eig, complex(np.nan, np.nan))


@internal(
    infer=lambda x: _complex(_squares(x)).with_shape(x.shape[:-1]), flops=_cubic(10), may_raise=True
)
def eigvals(out: Array, x: Array) -> None:
    """The eigenvalues of `eig` only: f[..., n, n] -> c[..., n]."""
    _write_eigen(out, x, np.linalg.eigvals, complex(np.nan, np.nan))


def _write_eigen(
    out: Array, x: Array, solve: Callable[[Array], Array | Sequence[Array]], nan: complex = np.nan
) -> None:
    """Write numpy's results for each matrix, and nan for a matrix with inf or nan."""
    whole = finite(x)
    with _refusing(_NO_CONVERGENCE):
        result = solve(whole)
        if isinstance(result, np.ndarray):
            np.copyto(out, result)
        else:
            write(out, *result)
    if whole is not x:
        out[strange(x)] = nan


def strange(x: Array) -> Any:
    """Return a mask of the matrices that contain inf or nan."""
    return ~np.isfinite(x).all((-2, -1))


def finite(x: Array) -> Array:
    """Return x with zeros in all matrices that contain inf or nan, for which numpy raises."""
    if np.isfinite(x).all():
        return x
    return np.where(strange(x)[..., np.newaxis, np.newaxis], x.dtype.type(0), x)


@internal(infer=lambda x, mode: _flat(x, *qr_shapes(_pair(_matrices(x)), mode)), flops=_qr_flops)
def qr(out: Array, x: Array, *, mode: QRMode = "reduced") -> None:
    """x = Q R: f[..., m, n] -> f[..., m k + k n], with k = min(m, n), or m if "complete".

    Q has orthonormal columns, and R is upper triangular with a real diagonal.
    """
    with np.errstate(all="ignore"):
        write(out, *np.linalg.qr(x, mode))


@internal(infer=_svd, flops=_svd_flops, may_raise=True)
def svd(out: Array, x: Array, *, full_matrices: bool = True) -> None:
    """x = U diag(S) Vh, with orthonormal columns in U and rows in Vh, and S descending.

    f[..., m, n] -> f[..., m m + k + n n], with k = min(m, n). Without `full_matrices` U is m by k
    and Vh is k by n. Raises `LinAlgError` where the iteration does not converge.
    """
    with _refusing(_NO_CONVERGENCE):
        write(out, *np.linalg.svd(x, full_matrices))


@internal(infer=_singular_values, flops=_svdvals_flops, may_raise=True)
def svdvals(out: Array, x: Array) -> None:
    """The singular values of `svd` only, descending and real: f[..., m, n] -> f[..., k]."""
    with _refusing(_NO_CONVERGENCE):
        np.copyto(out, np.linalg.svdvals(x))


@internal(infer=_pinv, flops=_svd_flops, may_raise=True)
def pinv(out: Array, x: Array, rtol: Array) -> None:
    """The Moore-Penrose inverses of matrices: f[..., m, n] -> f[..., n, m].

    Singular values up to `rtol` times the largest count as 0; rtol broadcasts to the batch axes.
    Raises `LinAlgError` where the iteration does not converge.
    """
    with _refusing(_NO_CONVERGENCE):
        u, s, vh = np.linalg.svd(x, full_matrices=False)
    largest = s.max(-1, initial=0, keepdims=True)
    is_significant = s > largest * rtol[..., np.newaxis]
    inverse = np.where(is_significant, 1 / np.where(is_significant, s, 1), 0).astype(s.dtype)
    np.matmul(adjoint(vh), inverse[..., np.newaxis] * adjoint(u), out)


def adjoint(x: Array) -> Array:
    return x.swapaxes(-1, -2).conj()
