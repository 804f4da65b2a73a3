"""Products of vectors and matrices with numpy's names, distances, and diagonals."""

from __future__ import annotations

from mlvm.core.errors import ArgumentError, ShapeError, counted
from mlvm.core.rules import is_real, require
from mlvm.core.types import i64, u8
from mlvm.eager.functions.arguments import axes_of, counts_of, integer, span, type_of
from mlvm.eager.functions.elements import astype
from mlvm.eager.functions.halves import in_f32
from mlvm.eager.functions.linalg import tensordot, vecdot, vector_norm
from mlvm.eager.functions.matrices import diagonal_of, floating
from mlvm.eager.functions.pieces import diag_embed
from mlvm.eager.functions.shapes import expand_dims, moveaxis, part, reshape
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.wrapper import public


@public
def dot(x: Tensor, y: Tensor, /) -> Tensor:
    """Sum products over the last axis of x and the second-to-last axis of y, as in numpy.

    If y is a vector, the only axis is used. Two vectors result in a number, two matrices in
    `matmul`, and a number in the elementwise product.

    x: [..., k], y: [k] or [..., k, n], any dtype but bool -> [..., ..., n]. Raises `ShapeError` if
    the axes have different lengths; `DTypeError` if an operand is bool or the dtypes do not
    promote.

        >>> ml.dot(ml.asarray([1.0, 2.0]), ml.asarray([3.0, 4.0]))
        Tensor(11., f32[])
    """
    require("numeric", type_of(x), type_of(y))
    if not (x.ndim and y.ndim):
        return x * y
    return tensordot(x, y, axes=((-1,), (-1 if y.ndim == 1 else -2,)))


@public
def inner(x: Tensor, y: Tensor, /) -> Tensor:
    """Sum products over the last axes of both; with a number, compute the elementwise product.

    Operands are not conjugated.

    x: [..., k], y: [..., k], any dtype but bool -> [..., ...]. Raises `ShapeError` if the axes have
    different lengths; `DTypeError` if an operand is bool or the dtypes do not promote.

        >>> ml.inner(ml.asarray([1.0, 2.0]), ml.asarray([3.0, 4.0]))
        Tensor(11., f32[])
    """
    require("numeric", type_of(x), type_of(y))
    return tensordot(x, y, axes=((-1,), (-1,))) if x.ndim and y.ndim else x * y


@public
def vdot(x: Tensor, y: Tensor, /) -> Tensor:
    """Return the sum of conj(x) y over all elements, in row-major order.

    x and y: [...] with the same number of elements, any dtype but bool -> []. Raises `ShapeError`
    if the numbers of elements differ; `DTypeError` if an operand is bool or the dtypes do not
    promote.

        >>> ml.vdot(ml.asarray([1j, 2.0]), ml.asarray([1j, 4.0]))
        Tensor(9.+0.j, c64[])
    """
    if type_of(x).size != type_of(y).size:
        raise ShapeError(f"expected equal numbers of elements, got {x.size} and {y.size}")
    return vecdot(reshape(x, -1), reshape(y, -1))


@public
def kron(x: Tensor, y: Tensor, /) -> Tensor:
    """Compute the Kronecker product: each element x[i, j] is replaced by x[i, j] * y.

    x: [m, n], y: [p, q], or any other number of dimensions, any dtype but bool -> [m p, n q].
    Raises `DTypeError` if an operand is bool or the dtypes do not promote.

        >>> ml.kron(ml.asarray([1, 10]), ml.asarray([1, 2, 3]))
        Tensor([ 1,  2,  3, 10, 20, 30], i64[6])
    """
    require("numeric", type_of(x), type_of(y))
    ndim = max(x.ndim, y.ndim)
    first, second = [(*[1] * (ndim - each.ndim), *each.shape) for each in (x, y)]
    blocks = reshape(x, [n for m in first for n in (m, 1)])
    inside = reshape(y, [n for m in second for n in (1, m)])
    return reshape(blocks * inside, [m * n for m, n in zip(first, second, strict=True)])


@public
@in_f32
def cdist(x1: Tensor, x2: Tensor, /, p: float = 2.0) -> Tensor:
    """Compute the distances between the rows of x1 and the rows of x2.

    A distance is the `linalg.vector_norm` of order p of a difference; all differences are stored in
    memory. The gradient between equal rows is 0.

    x1: [..., m, d], x2: [..., n, d], floats, integers as f32; the batch axes broadcast -> f[...,
    m, n]. Raises `ShapeError` if the rows have different lengths; `DTypeError` if an operand is
    bool or the dtypes do not promote; `ArgumentError` unless p is a number >= 0.

        >>> ml.cdist(ml.asarray([[0.0, 0.0]]), ml.asarray([[3.0, 4.0], [0.0, 1.0]]))
        Tensor([[5., 1.]], f32[1,2])

    Invalid calls:
        ml.cdist(x, x, -1.0)  # ArgumentError
    """
    for each in (x1, x2):
        require("numeric", type_of(each))
        if each.ndim < 2:
            raise ShapeError(f"expected at least 2 dimensions, got {each.ndim}")
    if not (is_real(p) and p >= 0):
        raise ArgumentError(f"expected p as a number >= 0, got {p!r}")
    if x1.shape[-1] != x2.shape[-1]:
        raise ShapeError(f"expected rows of equal length, got {x1.shape[-1]} and {x2.shape[-1]}")
    differences = expand_dims(floating(x1), axis=-2) - expand_dims(floating(x2), axis=-3)
    return vector_norm(differences, axis=-1, ord=float(p))


# --- diagonals -----------------------------------------------------------------------


@public
def diagonal(x: Tensor, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Tensor:
    """Return the diagonals of the matrices in two axes, along the last axis of the result.

    `linalg.diagonal` uses the last two axes.

    x: [m, n, ...], any dtype -> [..., k], where k is min(m, n) for the main diagonal. Raises
    `ShapeError` if x has fewer than two axes; `AxisError` if x has no such axis.

        >>> ml.diagonal(ml.asarray([[4.0, 0.0], [0.0, 9.0]]))
        Tensor([4., 9.], f32[2])

    Invalid calls:
        ml.diagonal(x, 0, 0, 5)  # AxisError
    """
    if type_of(x).ndim < 2:
        raise ShapeError(f"expected matrices with 2 dimensions or more, got {x.ndim}; reshape x")
    first, second = axes_of((axis1, axis2), x)
    return diagonal_of(moveaxis(x, (first, second), (-2, -1)), integer(offset, "offset"))


@public
def trace(
    x: Tensor, offset: int = 0, axis1: int = 0, axis2: int = 1, dtype: object = None
) -> Tensor:
    """Return the sums of the diagonals of the matrices in two axes, in the dtype that `sum` uses.

    `linalg.trace` uses the last two axes.

    x: [m, n, ...], any dtype -> [...]. Raises `ShapeError` if x has fewer than two axes;
    `AxisError` if x has no such axis; `DTypeError` if `dtype` is bool.

        >>> ml.trace(ml.asarray([[4.0, 0.0], [0.0, 9.0]]))
        Tensor(13., f32[])

    Invalid calls:
        ml.trace(x, 0, 0, 5)  # AxisError
        ml.trace(x, dtype="bool")  # DTypeError
    """
    return op.sum(diagonal(x, offset=offset, axis1=axis1, axis2=axis2), axis=-1, dtype=dtype)


@public
def diag(x: Tensor, k: int = 0) -> Tensor:
    """Return a matrix with a vector as the k-th diagonal, or the k-th diagonal of a matrix.

    Diagonals above the main diagonal have positive k.

    x: [n] -> [n + |k|, n + |k|], or [m, n] -> [...], any dtype. Raises `ShapeError` unless x has
    one or two dimensions.

        >>> ml.diag(ml.asarray([4, 9]))
        Tensor([[4, 0],
                [0, 9]], i64[2,2])
    """
    k = integer(k, "k")
    if type_of(x).ndim == 2:
        return diagonal_of(x, k)
    if x.ndim != 1:
        raise ShapeError(f"expected a vector or a matrix, got {counted(x.ndim, 'dimension')}")
    return diag_embed(x, k)


@public
def tril_indices(n: int, k: int = 0, m: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the rows and columns (i64) of the elements on and below the k-th diagonal of a matrix.

    The matrix is n by m, by default n by n. The order is row-major.

    The result: two i64 vectors of the same shape. Raises `ArgumentError` if a length is negative.

        >>> ml.tril_indices(2)
        (Tensor([0, 1, 1], i64[3]), Tensor([0, 0, 1], i64[3]))

    Invalid calls:
        ml.tril_indices(-1)  # ArgumentError
    """
    return _indices(n, integer(k, "k"), m, below=True)


@public
def triu_indices(n: int, k: int = 0, m: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the rows and columns (i64) of the elements on and above the k-th diagonal of a matrix.

    The matrix is n by m, by default n by n. The order is row-major.

    The result: two i64 vectors of the same shape. Raises `ArgumentError` if a length is negative.

        >>> ml.triu_indices(2)
        (Tensor([0, 0, 1], i64[3]), Tensor([0, 1, 1], i64[3]))

    Invalid calls:
        ml.triu_indices(2, 0, -1)  # ArgumentError
    """
    return _indices(n, integer(k, "k"), m, below=False)


def _indices(n: int, k: int, m: int | None, *, below: bool) -> tuple[Tensor, Tensor]:
    """Return the rows and columns of a triangle, by a stable sort of a mask."""
    rows, columns = counts_of((n, n if m is None else m), "n and m")
    places = op.arange(start=0, stop=rows * columns, step=1, dtype=i64)
    lengths = [max(0, min(columns, i + k + (1 if below else 0))) for i in range(rows)]
    count = sum(lengths) if below else rows * columns - sum(lengths)
    if not count:
        return places[:0], places[:0]
    row, column = op.floor_divide(places, columns), op.remainder(places, columns)
    beyond = op.greater(column, row + k) if below else op.less(column, row + k)
    chosen = part(op.argsort(astype(beyond, u8)), 0, span(count))
    return op.take(row, chosen, axis=0), op.take(column, chosen, axis=0)
