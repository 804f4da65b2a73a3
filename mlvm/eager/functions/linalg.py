"""Linear algebra: `ml.linalg`, with the names of the Python Array API standard (2025.12).

Every function accepts stacks of matrices, in the last two axes, and processes each matrix. Integers
and bools are converted to the default float dtype where the result is a float, as in a division. A
matrix without a result raises `LinAlgError`, which is a subclass of numpy's `LinAlgError`.

The gradients are defined in `mlvm.eager.autodiff.rules_linalg`, which states where they do not
exist.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias, cast

from mlvm.core.errors import ArgumentError, DTypeError, ShapeError, brief, counted
from mlvm.core.errors import LinAlgError as LinAlgError
from mlvm.core.ops.decompositions import QRMode, qr_shapes, svd_shapes
from mlvm.core.rules import Axis, is_real, normalize_axes, normalize_axis
from mlvm.core.types import TensorType, promote
from mlvm.eager.functions import shapes
from mlvm.eager.functions.arguments import Ints, axes_of, integer, integers, type_of
from mlvm.eager.functions.creation import eye
from mlvm.eager.functions.elements import astype
from mlvm.eager.functions.halves import in_f32, of_products, rounded, through_f32, widened
from mlvm.eager.functions.matrices import adjoint, conj, cut, diagonal_of, floating, order_of, real
from mlvm.eager.functions.shapes import matrix_transpose as matrix_transpose
from mlvm.eager.functions.sums import outer as outer
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.autocast import NO_AUTOCAST
from mlvm.eager.tensor.constants import constant
from mlvm.eager.tensor.dtypes import finfo
from mlvm.eager.tensor.primitives import matmul as matmul
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.wrapper import names_of, public

NormOrder: TypeAlias = float | Literal["fro", "nuc"] | None


class EigResult(NamedTuple):
    """Result of `eig`, with `x V = V diag(L)`: eigenvalues L, and eigenvectors as the columns of V.

    For x [..., n, n]: c[..., n] and c[..., n, n].

        >>> ml.linalg.eig(ml.asarray([[2.0, 0.0], [0.0, 2.0]])).eigenvalues
        Tensor([2.+0.j, 2.+0.j], c64[2])
    """

    eigenvalues: Tensor
    eigenvectors: Tensor


class EighResult(NamedTuple):
    """Result of `eigh`, with `x = V diag(L) V^H`: ascending eigenvalues L, eigenvectors in V.

    The eigenvectors are the columns of V. For x [..., n, n]: f[..., n] and [..., n, n].

        >>> ml.linalg.eigh(ml.asarray([[9.0, 0.0], [0.0, 4.0]])).eigenvalues
        Tensor([4., 9.], f32[2])
    """

    eigenvalues: Tensor
    eigenvectors: Tensor


class LUResult(NamedTuple):
    """Result of `lu`, with `x = P L U`.

    For x [..., m, n] and k = min(m, n): [..., m, m], [..., m, k] and [..., k, n].

        >>> ml.linalg.lu(ml.ones((3, 2))).U.type
        f32[2,2]
    """

    P: Tensor
    L: Tensor
    U: Tensor


class LUFactorResult(NamedTuple):
    """Factors of `lu_factor` for `lu_solve`: the matrix `LU` and the order of the rows of x.

    L is stored below the diagonal of `LU`, and U above. For x [..., m, n]: [..., m, n] and i64[...,
    m].

        >>> ml.linalg.lu_factor(ml.asarray([[1.0, 2.0], [4.0, 4.0]])).permutation
        Tensor([1, 0], i64[2])
    """

    LU: Tensor
    permutation: Tensor


class QRResult(NamedTuple):
    """Result of `qr`, with `x = Q R`.

    For x [..., m, n] and k = min(m, n): [..., m, k] and [..., k, n].

        >>> ml.linalg.qr(ml.ones((3, 2))).R.type
        f32[2,2]
    """

    Q: Tensor
    R: Tensor


class SVDResult(NamedTuple):
    """Result of `svd`, with `x = U diag(S) Vh`.

    For x [..., m, n] and k = min(m, n): [..., m, m], f[..., k] and [..., n, n].

        >>> ml.linalg.svd(ml.asarray([[4.0, 0.0], [0.0, 9.0]])).S
        Tensor([9., 4.], f32[2])
    """

    U: Tensor
    S: Tensor
    Vh: Tensor


class SlogdetResult(NamedTuple):
    """Result of `slogdet`, with `det(x) = sign exp(logabsdet)`.

    For x [..., n, n]: [...] and f[...].

        >>> ml.linalg.slogdet(ml.asarray([[0.0, 1.0], [1.0, 0.0]])).sign
        Tensor(-1., f32[])
    """

    sign: Tensor
    logabsdet: Tensor


class LstsqResult(NamedTuple):
    """Least-squares solution, with residuals, rank and singular values.

    For x1 [..., m, n] and x2 [..., m, k]: [..., n, k], f[..., k], i64[...] and f[..., min(m, n)].

        >>> ml.linalg.lstsq(ml.asarray([[2.0], [0.0]]), ml.asarray([4.0, 1.0])).residuals
        Tensor(1., f32[])
    """

    solution: Tensor
    residuals: Tensor
    rank: Tensor
    singular_values: Tensor


def _matrices(x: Tensor) -> TensorType:
    """Return the type of a stack of matrices.

    Raises `ShapeError` if it has fewer than two axes."""
    type = type_of(x)
    if type.ndim < 2:
        raise ShapeError(f"expected matrices with 2 dimensions or more, got {type.ndim}; reshape x")
    return type


# --- products ------------------------------------------------------------------------


@public
@of_products
@through_f32
def vecdot(x1: Tensor, x2: Tensor, /, *, axis: int = -1) -> Tensor:
    """Sum conj(x1) x2 along `axis`, counted from the last axis in both; the other axes broadcast.

    x1 and x2: [..., n], any dtype but bool -> [...]. Raises `ShapeError` if the vectors have
    different lengths; `AxisError` if an operand has no such axis; `DTypeError` if an operand is
    bool.

        >>> ml.vecdot(ml.asarray([1.0, 2.0]), ml.asarray([3.0, 4.0]))
        Tensor(11., f32[])
    """
    axis = _common_axis(x1, x2, axis)
    if x1.shape[axis] != x2.shape[axis]:
        raise ShapeError(
            f"expected vectors of equal length, got lengths {x1.shape[axis]} and {x2.shape[axis]}"
        )
    product = conj(x1) * x2
    return op.sum(product, axis=axis, dtype=product.dtype)


def _common_axis(x1: Tensor, x2: Tensor, axis: int) -> int:
    """Return an axis of two tensors that broadcast, counted from the last axis."""
    ndims = type_of(x1).ndim, type_of(x2).ndim
    axis = integer(axis, "axis")
    if axis >= 0 and ndims[0] != ndims[1]:
        raise ArgumentError(
            f"axis {axis} is ambiguous for operands with {ndims[0]} and {ndims[1]} dimensions; use "
            f"a negative axis, for example -1"
        )
    return normalize_axis(axis, min(ndims)) - min(ndims)


@public
def tensordot(x1: Tensor, x2: Tensor, /, axes: int | Sequence[Ints] = 2) -> Tensor:
    """Sum products of x1 and x2 over the last `axes` axes of x1 and the first of x2.

    `axes` may also be a pair of sequences that name the axes of each. The result has the remaining
    axes of x1, then the remaining axes of x2, without conjugation.

    x1: [m, k], x2: [k, n] -> [m, n] for axes=1. Raises `ShapeError` if the axes have different
    lengths; `ArgumentError` if an operand has fewer axes; `AxisError` if an operand has no such
    axis; `DTypeError` if an operand is bool.

        >>> ml.tensordot(ml.ones((2, 3)), ml.ones((3, 4)), axes=1)
        Tensor([[3., 3., 3., 3.],
                [3., 3., 3., 3.]], f32[2,4])

    Invalid calls:
        ml.tensordot(x, x, axes=((5,), (0,)))  # AxisError
        ml.linalg.tensordot(x, x, axes=((5,), (0,)))  # AxisError
    """
    first, second = _contracted(axes, (type_of(x1), type_of(x2)))
    rows = [i for i in range(x1.ndim) if i not in first]
    wide = [i for i in range(x2.ndim) if i not in second]
    product = op.matmul(_as_matrix(x1, rows, first), _as_matrix(x2, second, wide))
    if len(rows) == len(wide) == 1:
        return product
    return shapes.reshape(product, [*(x1.shape[i] for i in rows), *(x2.shape[i] for i in wide)])


def _as_matrix(x: Tensor, rows: Sequence[int], columns: Sequence[int]) -> Tensor:
    """View x as a matrix: some axes are merged into rows, the other axes into columns."""
    axes = [*rows, *columns]
    if axes != [*range(len(axes))]:
        x = shapes.permute_dims(x, axes)
    if len(rows) == len(columns) == 1:
        return x
    return shapes.reshape(x, [math.prod(x.shape[: len(rows)]), math.prod(x.shape[len(rows) :])])


def _contracted(
    axes: int | Sequence[Ints], types: tuple[TensorType, TensorType]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the axes of each operand that are summed over, in order."""
    x1, x2 = types
    if isinstance(axes, Sequence) and not isinstance(axes, str) and len(axes) == 2:
        first = normalize_axes(integers(axes[0], "axes[0]"), x1.ndim)
        second = normalize_axes(integers(axes[1], "axes[1]"), x2.ndim)
    else:
        try:
            count = integer(cast(int, axes), "axes")
        except ArgumentError:
            raise ArgumentError(
                f"expected axes as an int or a pair of sequences, got {brief(axes)}"
            ) from None
        if not 0 <= count <= min(x1.ndim, x2.ndim):
            raise ArgumentError(
                f"expected axes from 0 to {min(x1.ndim, x2.ndim)}, the number of dimensions, got "
                f"{count}"
            )
        first, second = tuple(range(x1.ndim - count, x1.ndim)), tuple(range(count))
    lengths = [x1.shape[i] for i in first], [x2.shape[i] for i in second]
    if lengths[0] != lengths[1]:
        raise ShapeError(
            f"expected contracted axes of equal lengths, got {lengths[0]} and {lengths[1]}"
        )
    return first, second


@public
@through_f32
def cross(x1: Tensor, x2: Tensor, /, *, axis: int = -1) -> Tensor:
    """Return the cross product of vectors of 3 elements along `axis`.

    The axis counts from the last axis in both operands; the other axes broadcast.

    x1 and x2: [..., 3], any dtype but bool -> [..., 3]. Raises `ShapeError` if the vectors do not
    have 3 elements; `AxisError` if an operand has no such axis; `DTypeError` if an operand is
    bool.

        >>> ml.linalg.cross(ml.asarray([1.0, 0.0, 0.0]), ml.asarray([0.0, 1.0, 0.0]))
        Tensor([0., 0., 1.], f32[3])

    Invalid calls:
        ml.cross(ml.ones(()), ml.ones(3))  # AxisError
        ml.cross(ml.ones(0), ml.ones(3))  # ShapeError
        ml.cross(ml.ones(3, dtype="bool"), ml.ones(3, dtype="bool"))  # DTypeError
    """
    axis = _common_axis(x1, x2, axis)
    if x1.shape[axis] != 3 or x2.shape[axis] != 3:
        raise ShapeError(f"expected vectors of length 3, got {x1.shape[axis]} and {x2.shape[axis]}")

    def part(i: int, j: int) -> Tensor:
        return op.roll(x1, shift=-i, axis=axis) * op.roll(x2, shift=-j, axis=axis)

    return part(1, 2) - part(2, 1)


@public
@through_f32
def matrix_power(x: Tensor, n: int, /) -> Tensor:
    """Raise a square matrix to the power n, with about log2(n) matrix multiplications.

    n = 0 returns the identity, a negative n the power of the inverse.

    x: [..., n, n], any dtype, integers and bools as f32 -> [..., n, n]. Raises `ShapeError` if the
    matrices are not square; `LinAlgError` if a matrix to invert is singular.

        >>> ml.linalg.matrix_power(ml.asarray([[2.0, 0.0], [0.0, 4.0]]), 3)
        Tensor([[ 8.,  0.],
                [ 0., 64.]], f32[2,2])

    Invalid calls:
        ml.linalg.matrix_power(ml.zeros((2, 2)), -1)  # LinAlgError
    """
    x, n = floating(x), integer(n, "n")
    type = _matrices(x)
    if type.shape[-2] != type.shape[-1]:
        raise ShapeError(f"expected square matrices, got {type.shape[-2]} by {type.shape[-1]}")
    if n == 0:
        return op.copy(shapes.broadcast_to(eye(type.shape[-1], dtype=type.dtype), type.shape))
    power, left = op.inv(x) if n < 0 else x, abs(n)
    result: Tensor | None = None
    while left:
        if left % 2:
            result = power if result is None else result @ power
        left //= 2
        if left:
            power = power @ power
    return op.copy(x) if result is x or result is None else result


# --- parts of matrices ---------------------------------------------------------------


@public
def diagonal(x: Tensor, /, offset: int = 0) -> Tensor:
    """Return the diagonals of matrices; `offset` is positive above the main diagonal.

    The result is empty if there is no such diagonal.

    x: [..., m, n], any dtype -> [..., k], where k is min(m, n) for the main diagonal. Raises
    `ShapeError` if x has fewer than two axes.

        >>> ml.linalg.diagonal(ml.asarray([[4.0, 0.0], [0.0, 9.0]]))
        Tensor([4., 9.], f32[2])
    """
    _matrices(x)
    return diagonal_of(x, integer(offset, "offset"))


@public
def trace(x: Tensor, /, offset: int = 0, dtype: object = None) -> Tensor:
    """Return the sums of the diagonals of matrices, in the dtype that `sum` uses.

    x: [..., m, n], any dtype -> [...]. Raises `ShapeError` if x has fewer than two axes;
    `DTypeError` if `dtype` is bool.

        >>> ml.linalg.trace(ml.asarray([[4.0, 0.0], [0.0, 9.0]]))
        Tensor(13., f32[])

    Invalid calls:
        ml.linalg.trace(x, dtype="bool")  # DTypeError
    """
    return op.sum(diagonal(x, offset=offset), axis=-1, dtype=dtype)


# --- factorisations and equations ----------------------------------------------------


@public
def cholesky(x: Tensor, /, *, upper: bool = False) -> Tensor:
    """Factor x = L L^H with a lower triangular L, or with `upper` x = U^H U.

    Only the Hermitian part of x, (x + x^H) / 2, is used.

    x: [..., n, n], any dtype, integers and bools as f32 -> [..., n, n]. Raises `ShapeError` if the
    matrices are not square; `LinAlgError` if one is not positive definite.

        >>> ml.linalg.cholesky(ml.asarray([[4.0, 0.0], [0.0, 9.0]]))
        Tensor([[2., 0.],
                [0., 3.]], f32[2,2])

    Invalid calls:
        ml.linalg.cholesky(ml.zeros((2, 2)))  # LinAlgError
    """
    return op.cholesky(floating(x), upper=upper)


@public
def qr(x: Tensor, /, mode: QRMode = "reduced") -> QRResult:
    """Factor x = Q R, with orthonormal columns in Q, and R upper triangular with a real diagonal.

    For an m by n matrix, Q is m by k and R is k by n. k is min(m, n), or m if the mode is
    "complete".

    x: [..., m, n], any dtype, integers and bools as f32 -> [..., m, k] and [..., k, n]. Raises
    `ShapeError` if x has fewer than two axes; `ArgumentError` if the mode is unknown.

        >>> q, r = ml.linalg.qr(ml.ones((3, 2)))
        >>> q.type, r.type
        (f32[3,2], f32[2,2])

    Invalid calls:
        ml.linalg.qr(x, mode="r")  # ArgumentError
    """
    x = floating(x)
    return QRResult(*cut(op.qr(x, mode=mode), *qr_shapes((x.shape[-2], x.shape[-1]), mode)))


@public
def inv(x: Tensor, /) -> Tensor:
    """Invert square matrices.

    x: [..., n, n], any dtype, integers and bools as f32 -> [..., n, n]. Raises `ShapeError` if the
    matrices are not square; `LinAlgError` if one is singular.

        >>> ml.linalg.inv(ml.asarray([[2.0, 0.0], [0.0, 4.0]]))
        Tensor([[0.5 , 0.  ],
                [0.  , 0.25]], f32[2,2])
    """
    return op.inv(floating(x))


@public
def solve(x1: Tensor, x2: Tensor, /) -> Tensor:
    """Solve x1 z = x2: f[..., n, n], f[..., n, k] -> f[..., n, k], broadcasting the batch axes.

    An x2 with one dimension is used as one column for all matrices, and the result lacks that axis.

    x1: [..., n, n], x2: [..., n, k], any dtype, integers and bools as f32. Raises `ShapeError` if
    the operands do not fit; `LinAlgError` if a matrix is singular.

        >>> ml.linalg.solve(ml.asarray([[2.0, 0.0], [0.0, 4.0]]), ml.asarray([2.0, 4.0]))
        Tensor([1., 1.], f32[2])

    Invalid calls:
        ml.linalg.solve(ml.zeros((4, 4)), x)  # LinAlgError
    """
    return op.solve(floating(x1), floating(x2))


@public
def solve_triangular(
    x1: Tensor, x2: Tensor, /, *, lower: bool = False, unit_diagonal: bool = False
) -> Tensor:
    """Solve x1 z = x2 by substitution for an upper triangular x1, or a `lower` triangular x1.

    The rest of x1 is not read. Each column needs O(n^2) multiplications. With `unit_diagonal`, the
    diagonal is assumed to be ones.

    x1: [..., n, n], x2: [..., n, k] or [n], any dtype, integers and bools as f32 -> [..., n, k] or
    [..., n]; the batch axes broadcast. Raises `ShapeError` if the operands do not fit;
    `LinAlgError` if the diagonal contains a 0.

        >>> ml.linalg.solve_triangular(ml.asarray([[2.0, 1.0], [0.0, 4.0]]), ml.asarray([4.0, 8.0]))
        Tensor([1., 2.], f32[2])

    Invalid calls:
        ml.linalg.solve_triangular(ml.zeros((2, 2)), v)  # LinAlgError
    """
    return op.solve_triangular(floating(x1), floating(x2), lower=lower, unit_diagonal=unit_diagonal)


@public
@through_f32
def cholesky_solve(x1: Tensor, x2: Tensor, /, *, upper: bool = False) -> Tensor:
    """Solve L L^H z = x2 for the L of `cholesky`, or with `upper` U^H U z = x2.

    x1: [..., n, n], x2: [..., n, k] or [n], any dtype, integers and bools as f32 -> [..., n, k] or
    [..., n]. Raises the errors of `linalg.solve_triangular`.

        >>> factor = ml.linalg.cholesky(ml.asarray([[4.0, 0.0], [0.0, 9.0]]))
        >>> ml.linalg.cholesky_solve(factor, ml.asarray([4.0, 18.0]))
        Tensor([1., 2.], f32[2])

    Invalid calls:
        ml.linalg.cholesky_solve(ml.zeros((2, 2)), v)  # LinAlgError
    """
    x1 = floating(x1)
    _matrices(x1)
    first, second = (adjoint(x1), x1) if upper else (x1, adjoint(x1))
    half = op.solve_triangular(first, floating(x2), lower=True)
    return op.solve_triangular(second, half, lower=False)


@public
def lu_factor(x: Tensor, /) -> LUFactorResult:
    """Factor x[permutation] = L U by elimination with partial pivoting; one matrix stores L and U.

    A singular x also has factors, with a singular U.

    x: [..., m, n], any dtype, integers and bools as f32 -> [..., m, n] and i64[..., m]. Raises
    `ShapeError` if x has fewer than two axes.

        >>> ml.linalg.lu_factor(ml.asarray([[1.0, 2.0], [4.0, 4.0]])).LU
        Tensor([[4.  , 4.  ],
                [0.25, 1.  ]], f32[2,2])
    """
    x = floating(x)
    rows, wide = _matrices(x).shape[-2:]
    factors, order = cut(op.lu(widened(x)), (rows, wide), (rows,))
    return LUFactorResult(rounded(factors, x.dtype), order_of(order))


@public
def lu(x: Tensor, /) -> LUResult:
    """Factor x = P L U by elimination with partial pivoting.

    P is a permutation of rows, L unit lower triangular and U upper triangular. The gradient treats
    P as a constant.

    x: [..., m, n], any dtype, integers and bools as f32 -> [..., m, m], [..., m, k] and [..., k,
    n], with k = min(m, n). Raises `ShapeError` if x has fewer than two axes.

        >>> ml.linalg.lu(ml.asarray([[1.0, 2.0], [4.0, 4.0]])).L
        Tensor([[1.  , 0.  ],
                [0.25, 1.  ]], f32[2,2])
    """
    factors, order = lu_factor(x)
    rows, wide = factors.shape[-2:]
    k = min(rows, wide)
    lower = op.tril(factors[..., :k], k=-1) + eye(rows, k, dtype=factors.dtype)
    permuted = op.one_hot(order, num_classes=rows, dtype=factors.dtype.name).mT
    return LUResult(permuted, lower, op.triu(factors[..., :k, :]))


@public
@NO_AUTOCAST
def lu_solve(factors: tuple[Tensor, Tensor], x2: Tensor, /) -> Tensor:
    """Solve x z = x2 with the factors that `lu_factor` returns for a square x.

    Use it for repeated solves.

    factors: [..., n, n] and i64[..., n], x2: [..., n, k] or [n], any dtype, integers and bools as
    f32 -> [..., n, k] or [..., n]. Raises `ShapeError` if the operands do not fit; `LinAlgError` if
    x is singular.

        >>> factors = ml.linalg.lu_factor(ml.asarray([[1.0, 2.0], [4.0, 4.0]]))
        >>> ml.linalg.lu_solve(factors, ml.asarray([3.0, 8.0]))
        Tensor([1., 1.], f32[2])

    Invalid calls:
        ml.linalg.lu_solve(ml.linalg.lu_factor(ml.ones((2, 2))), v)  # LinAlgError
    """
    both, order = factors
    type, right = _matrices(both), floating(x2)
    if type.shape[-1] != type.shape[-2] or order.shape != type.shape[:-1]:
        raise ShapeError(f"expected factors of square matrices, got {type} and {order.type}")
    columns = shapes.expand_dims(right, axis=-1) if right.ndim == 1 else right
    if not right.ndim or columns.shape[-2] != type.shape[-1]:
        raise ShapeError(
            f"expected {counted(type.shape[-1], 'row')} on the right-hand side, got {right.type}"
        )
    both, wide = widened(both), widened(columns)
    rows = op.one_hot(order, num_classes=type.shape[-1], dtype=wide.dtype.name) @ wide
    half = op.solve_triangular(both, rows, lower=True, unit_diagonal=True)
    solution = op.solve_triangular(both, half, lower=False)
    solution = rounded(solution, promote(type.dtype, right.dtype))
    return solution[..., 0] if right.ndim == 1 else solution


@public
def expm(x: Tensor, /) -> Tensor:
    """Compute the exponentials of square matrices: the sums of x^k / k!.

    A matrix with inf or nan results in nan.

    x: [..., n, n], any dtype, integers and bools as f32 -> [..., n, n]. Raises `ShapeError` if the
    matrices are not square.

        >>> ml.linalg.expm(ml.zeros((2, 2)))
        Tensor([[1., 0.],
                [0., 1.]], f32[2,2])
    """
    return op.expm(floating(x))


@public
def det(x: Tensor, /) -> Tensor:
    """Return the determinants of square matrices.

    The gradients also exist for a singular matrix.

    x: [..., n, n], any dtype, integers and bools as f32 -> [...]. Raises `ShapeError` if the
    matrices are not square.

        >>> ml.linalg.det(ml.asarray([[2.0, 0.0], [0.0, 4.0]]))
        Tensor(8., f32[])
    """
    return op.det(floating(x))


@public
def slogdet(x: Tensor, /) -> SlogdetResult:
    """Return the sign and the logarithm of the absolute value of the determinant.

    The logarithm neither overflows nor underflows. The sign is a complex phase for complex x. A
    singular matrix has sign 0 and logarithm -inf.

    x: [..., n, n], any dtype, integers and bools as f32 -> sign [...] and f[...]. Raises
    `ShapeError` if the matrices are not square.

        >>> ml.linalg.slogdet(ml.eye(2))
        SlogdetResult(sign=Tensor(1., f32[]), logabsdet=Tensor(0., f32[]))
    """
    sign, logarithm = cut(op.slogdet(floating(x)), (), ())
    return SlogdetResult(sign, real(logarithm))


@public
def pinv(x: Tensor, /, *, rtol: float | Tensor | None = None) -> Tensor:
    """Return the Moore-Penrose inverses of matrices: f[..., m, n] -> f[..., n, m].

    Singular values of at most `rtol` times the largest are treated as 0. The default is max(m, n)
    times the machine epsilon; a tensor contains one value per matrix. The gradient assumes that the
    rank does not change.

    x: [..., m, n], any dtype, integers and bools as f32 -> [..., n, m]. Raises `ShapeError` if x
    has fewer than two axes, or `rtol` does not broadcast; `LinAlgError` if a matrix has inf or nan.

        >>> ml.linalg.pinv(ml.asarray([[2.0, 0.0], [0.0, 4.0]]))
        Tensor([[0.5 , 0.  ],
                [0.  , 0.25]], f32[2,2])

    Invalid calls:
        ml.linalg.pinv(nans)  # LinAlgError
        ml.linalg.pinv(x, rtol=v)  # ShapeError
    """
    x = floating(x)
    return op.pinv(x, _tolerance(rtol, _matrices(x)))


def _tolerance(rtol: float | Tensor | None, type: TensorType, name: str = "rtol") -> Tensor:
    """Return one tolerance for a stack of matrices, or one per matrix; errors call it `name`."""
    if isinstance(rtol, Tensor):
        return rtol
    dtype = type.dtype.real
    if rtol is None:
        rtol = max(type.shape[-2:]) * finfo(dtype).eps
    if not is_real(rtol):
        raise DTypeError(f"expected {name} as a float or a tensor, got {brief(rtol)}")
    if name == "rcond" and rtol < 0:
        rtol = finfo(dtype).eps
    return constant(float(rtol), dtype)


@public
@NO_AUTOCAST
def lstsq(x1: Tensor, x2: Tensor, /, rcond: float | Tensor | None = None) -> LstsqResult:
    """Find the z with the smallest norm that minimises |x1 z - x2|.

    z is n by k, for an m by n x1 and an m by k x2. An x2 with one dimension is one column, as for
    `solve`. `rcond` is the `rtol` of `pinv`; a negative value means the machine epsilon, as in
    numpy. The other results are the sums of the squares of x2 - x1 z for each column (numpy
    sometimes omits them), and the rank and the singular values of x1.

    x1: [..., m, n], x2: [..., m, k], any dtype, integers and bools as f32 -> [..., n, k], f[...,
    k], i64[...] and f[..., min(m, n)]. Raises `ShapeError` if the operands do not fit;
    `LinAlgError` if a matrix has inf or nan.

        >>> ml.linalg.lstsq(ml.asarray([[2.0], [0.0]]), ml.asarray([4.0, 1.0]))[0]
        Tensor([2.], f32[1])

    Invalid calls:
        ml.linalg.lstsq(nans, ml.ones(2))  # LinAlgError
    """
    x1, x2 = floating(x1), floating(x2)
    rtol = _tolerance(rcond, _matrices(x1), "rcond")
    wide, right = widened(x1), widened(shapes.expand_dims(x2, axis=-1) if x2.ndim == 1 else x2)
    solution = op.pinv(wide, rtol) @ right
    residuals = vector_norm(right - wide @ solution, axis=-2) ** 2
    if x2.ndim == 1:
        solution, residuals = solution[..., 0], residuals[..., 0]
    dtype = promote(x1.dtype, x2.dtype)
    solution, residuals = rounded(solution, dtype), rounded(residuals, dtype.real)
    return LstsqResult(solution, residuals, matrix_rank(x1, rtol=rtol), svdvals(x1))


# --- eigenvalues and singular values -------------------------------------------------


@public
def eigh(x: Tensor, /) -> EighResult:
    """Return the eigenvalues and eigenvectors of Hermitian matrices.

    The eigenvalues are real and ascending. The eigenvectors are orthonormal, and are the columns of
    a matrix. Only the Hermitian part of x, (x + x^H) / 2, is used. The gradient through the
    eigenvectors is inf or nan where eigenvalues are equal.

    x: [..., n, n], any dtype, integers and bools as f32 -> f[..., n] and [..., n, n]. Raises
    `ShapeError` if the matrices are not square; `LinAlgError` if the iteration does not converge.

        >>> values, vectors = ml.linalg.eigh(ml.eye(2))
        >>> values
        Tensor([1., 1.], f32[2])
    """
    x = floating(x)
    values, vectors = cut(op.eigh(x), x.shape[-1:], x.shape[-2:])
    return EighResult(real(values), vectors)


@public
def eigvalsh(x: Tensor, /) -> Tensor:
    """Return only the eigenvalues of `eigh`; the gradient exists even where they are equal.

    x: [..., n, n], any dtype, integers and bools as f32 -> f[..., n]. Raises the errors of
    `linalg.eigh`.

        >>> ml.linalg.eigvalsh(ml.asarray([[4.0, 0.0], [0.0, 9.0]]))
        Tensor([4., 9.], f32[2])
    """
    return op.eigvalsh(floating(x))


@public
def eig(x: Tensor, /) -> EigResult:
    """Return the eigenvalues and eigenvectors of square matrices, which are complex.

    The eigenvalues are not sorted. The eigenvectors have norm 1, and are the columns of a matrix.
    The results are complex even if x and the eigenvalues are real. A matrix with inf or nan results
    in nan. The gradient is correct for a loss that does not depend on the phases of the vectors; it
    is inf or nan where eigenvalues are equal.

    x: [..., n, n], any dtype, integers and bools as f32 -> c[..., n] and c[..., n, n]. Raises
    `ShapeError` if the matrices are not square.

        >>> ml.linalg.eig(ml.asarray([[0.0, -1.0], [1.0, 0.0]])).eigenvalues.type
        c64[2]
    """
    x = floating(x)
    return EigResult(*cut(op.eig(x), x.shape[-1:], x.shape[-2:]))


@public
def eigvals(x: Tensor, /) -> Tensor:
    """Return only the eigenvalues of `eig`.

    x: [..., n, n], any dtype, integers and bools as f32 -> c[..., n]. Raises `ShapeError` if the
    matrices are not square.

        >>> ml.linalg.eigvals(ml.asarray([[2.0, 0.0], [0.0, 2.0]]))
        Tensor([2.+0.j, 2.+0.j], c64[2])
    """
    return op.eigvals(floating(x))


@public
def svd(x: Tensor, /, full_matrices: bool = True) -> SVDResult:
    """Factor x = U diag(S) Vh, with orthonormal columns in U and rows in Vh, and S descending.

    For an m by n matrix, with k = min(m, n), U is m by m, S has k elements, and Vh is n by n.
    Without `full_matrices`, U is m by k and Vh is k by n. The gradient through U and Vh is inf or
    nan where singular values are equal or 0.

    x: [..., m, n], any dtype, integers and bools as f32. Raises `ShapeError` if x has fewer than
    two axes; `LinAlgError` if the iteration does not converge, as with inf or nan in a matrix.

        >>> u, s, vh = ml.linalg.svd(ml.ones((3, 2)), full_matrices=False)
        >>> u.type, s.type, vh.type
        (f32[3,2], f32[2], f32[2,2])

    Invalid calls:
        ml.linalg.svd(nans)  # LinAlgError
    """
    x = floating(x)
    packed = op.svd(x, full_matrices=full_matrices)
    u, s, vh = cut(packed, *svd_shapes((x.shape[-2], x.shape[-1]), full_matrices))
    return SVDResult(u, real(s), vh)


@public
def svdvals(x: Tensor, /) -> Tensor:
    """Return only the singular values of `svd`; the gradient exists even where they are equal.

    x: [..., m, n], any dtype, integers and bools as f32 -> f[..., min(m, n)]. Raises the errors of
    `linalg.svd`.

        >>> ml.linalg.svdvals(ml.asarray([[4.0, 0.0], [0.0, 9.0]]))
        Tensor([9., 4.], f32[2])

    Invalid calls:
        ml.linalg.svdvals(nans)  # LinAlgError
    """
    return op.svdvals(floating(x))


@public
def matrix_rank(x: Tensor, /, *, rtol: float | Tensor | None = None) -> Tensor:
    """Count the singular values of each matrix above `rtol` times the largest, as i64.

    The default is max(m, n) times the machine epsilon for an m by n matrix; a tensor contains one
    value per matrix.

    x: [..., m, n], any dtype, integers and bools as f32 -> i64[...]. Raises `ShapeError` if x has
    fewer than two axes; `LinAlgError` if a matrix has inf or nan.

        >>> ml.linalg.matrix_rank(ml.ones((3, 3)))
        Tensor(1, i64[])

    Invalid calls:
        ml.linalg.matrix_rank(nans)  # LinAlgError
    """
    x = floating(x)
    tolerance = _tolerance(rtol, _matrices(x))
    values = svdvals(x)
    bound = shapes.expand_dims(_largest(values, -1) * tolerance, axis=-1)
    return op.sum(op.greater(values, bound), axis=-1)


# --- norms ---------------------------------------------------------------------------


@public
@in_f32
def vector_norm(
    x: Tensor, /, *, axis: Axis = None, keepdims: bool = False, ord: float = 2
) -> Tensor:
    """Compute sum(|x|^ord)^(1/ord) along `axis`; None computes the norm of all elements.

    For `ord` inf it is the largest |x|, for -inf the smallest, and for 0 the number of nonzero
    elements. The gradient at zeros is 0.

    x: [..., n], any dtype, integers and bools as f32 -> f[...] for axis -1, or f[..., 1] with
    `keepdims`. Raises `AxisError` if x has no such axis; `ArgumentError` if `ord` is not a
    number.

        >>> ml.linalg.vector_norm(ml.asarray([3.0, 4.0]))
        Tensor(5., f32[])

    Invalid calls:
        ml.linalg.vector_norm(v, ord="nuc")  # ArgumentError
    """
    x = floating(x)
    if not is_real(ord):
        raise ArgumentError(f"expected ord as a number, got {brief(ord)}")
    axes = axes_of(axis, x)
    if ord == 2:
        squares = op.square(x if x.dtype.is_float else op.abs(x))
        return op.sqrt(op.sum(squares, axis=axes, keepdims=keepdims))
    size = op.abs(x)
    if ord == math.inf:
        return _largest(size, axes, keepdims)
    if ord == -math.inf:
        return op.min(size, axis=axes, keepdims=keepdims)
    if ord == 0:
        return op.sum(astype(op.not_equal(size, 0.0), size.dtype), axis=axes, keepdims=keepdims)
    if ord == 1:
        return op.sum(size, axis=axes, keepdims=keepdims)
    # 0 and infinite elements have no slope: replace them by constants.
    zero, one = op.equal(size, 0.0), constant(1.0, size.dtype)
    least = constant(0.0 if ord > 0 else math.inf, size.dtype)
    powers = op.where(zero, least, op.where(zero, one, size) ** float(ord))
    total = op.sum(powers, axis=axes, keepdims=keepdims)
    none = op.equal(total, least)
    root = op.where(none, one, total) ** (1 / ord)
    return op.where(none, constant(0.0, size.dtype), root)


def _largest(x: Tensor, axis: Axis, keepdims: bool = False) -> Tensor:
    """Return the largest element along the axes; 0 for an empty axis."""
    axes = normalize_axes(axis, x.ndim)
    if all(x.shape[i] for i in axes):
        return op.max(x, axis=axes, keepdims=keepdims)
    return op.sum(x, axis=axes, keepdims=keepdims)


@public
@in_f32
def matrix_norm(x: Tensor, /, *, keepdims: bool = False, ord: NormOrder = "fro") -> Tensor:
    """Compute a norm of each matrix.

    "fro" (or None) is the root of the sum of squares, "nuc" the sum of the singular values. The
    orders 2 and -2 are the largest and the smallest singular value. The orders 1 and -1 are the
    largest and the smallest column sum of |x|; inf and -inf are the largest and the smallest row
    sum.

    x: [..., m, n], any dtype, integers and bools as f32 -> f[...], or f[..., 1, 1] with `keepdims`.
    Raises `ShapeError` if x has fewer than two axes; `ArgumentError` if `ord` is unknown;
    `LinAlgError` if a matrix has inf or nan.

        >>> ml.linalg.matrix_norm(ml.asarray([[3.0, 0.0], [0.0, 4.0]]))
        Tensor(5., f32[])

    Invalid calls:
        ml.linalg.matrix_norm(x, ord=3)  # ArgumentError
        ml.linalg.matrix_norm(nans, ord="nuc")  # LinAlgError
    """
    x = floating(x)
    _matrices(x)
    if ord in ("fro", None):
        return vector_norm(x, axis=(-2, -1), keepdims=keepdims)
    if ord == "nuc":
        result = op.sum(svdvals(x), axis=-1)
    elif ord in (2, -2):
        result = (_largest if ord == 2 else op.min)(svdvals(x), axis=-1)
    elif ord in (1, -1, math.inf, -math.inf):
        sums = op.sum(op.abs(x), axis=-2 if ord in (1, -1) else -1)
        result = (_largest if ord in (1, math.inf) else op.min)(sums, axis=-1)
    else:
        raise ArgumentError(f'expected ord "fro", "nuc", ±1, ±2 or ±inf, got {brief(ord)}')
    return shapes.expand_dims(result, axis=(-2, -1)) if keepdims else result


@public
def norm(x: Tensor, /, ord: NormOrder = None, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Compute `vector_norm` or `matrix_norm`, depending on the number of axes, as in numpy.

    Two axes, or a tensor with two dimensions, are a matrix; one axis, or one dimension, is a
    vector. Without `ord` and `axis` it is the norm of all elements.

    x: [...], any dtype, integers and bools as f32; the result: f, the shape of x without the axes,
    or with length 1 if `keepdims`. Raises `ShapeError` if x is neither; `AxisError` if x has no
    such axis; `ArgumentError` if `ord` is invalid.

        >>> ml.linalg.norm(ml.asarray([3.0, 4.0]))
        Tensor(5., f32[])

    Invalid calls:
        ml.linalg.norm(x, ord=3)  # ArgumentError
        ml.linalg.norm(ml.ones((2, 2, 2)), ord=2)  # ShapeError
    """
    type_of(x)
    if axis is None and ord is None:
        return vector_norm(x, keepdims=keepdims)
    axes = axes_of(axis, x)
    if len(axes) == 1 and not isinstance(ord, str):
        return vector_norm(x, axis=axes, keepdims=keepdims, ord=2 if ord is None else ord)
    if len(axes) != 2:
        raise ShapeError(f"expected one axis or two for a norm, got {len(axes)}")
    moved = matrix_norm(shapes.moveaxis(x, axes, (-2, -1)), ord="fro" if ord is None else ord)
    return shapes.expand_dims(moved, axis=axes) if keepdims else moved


__all__ = [*names_of(globals()), "LinAlgError", "matmul", "matrix_transpose", "outer"]
