"""Matrix products."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from mlvm.core.errors import ArgumentError, ShapeError
from mlvm.core.op import op
from mlvm.core.ops.block_memory import block_length, blocks, memory_of
from mlvm.core.rules import broadcast_shapes, require
from mlvm.core.types import Array, Shape, TensorType, promote

# --- type rules ----------------------------------------------------------------------


def _matrix(x: TensorType, transpose: bool, name: str) -> Shape:
    """Return (rows, columns) of the last two axes, transposed or not; (length,) of a vector."""
    if transpose and x.ndim < 2:
        raise ArgumentError(
            f"transpose_{name} needs 2 dimensions or more, {name} has {x.ndim}; reshape it"
        )
    return x.shape[-2:][::-1] if transpose else x.shape[-2:]


def _matmul(x: TensorType, y: TensorType, transpose_x: bool, transpose_y: bool) -> TensorType:
    dtype = promote(x.dtype, y.dtype)
    require("numeric", TensorType(dtype))
    if x.ndim == 0 or y.ndim == 0:
        raise ShapeError(
            "expected 1 dimension or more for both operands, got a scalar; for a scalar, use x * y"
        )
    *rows, x_inner = _matrix(x, transpose_x, "x")
    y_inner, *columns = _matrix(y, transpose_y, "y")
    if x_inner != y_inner:
        raise ShapeError(
            f"expected equal inner dimensions, got {x_inner} (x) and {y_inner} (y); "
            "transpose an operand with x.mT"
        )
    return TensorType(dtype, (*broadcast_shapes(x.shape[:-2], y.shape[:-2]), *rows, *columns))


def _batch_contract(
    x: TensorType, y: TensorType, transpose_x: bool, transpose_y: bool
) -> TensorType:
    if x.ndim < 2 or y.ndim < 2 or x.shape[:-2] != y.shape[:-2]:
        raise ShapeError(
            f"expected matrices with equal batch axes, all but the last two, got {x.shape} and "
            f"{y.shape}"
        )
    product = _matmul(x, y, transpose_x, transpose_y)
    return product.with_shape(product.shape[-2:])


def _matmul_flops(x: TensorType, y: TensorType, transpose_x: bool, transpose_y: bool) -> int:
    inner = _matrix(x, transpose_x, "x")[-1]
    return 2 * inner * _matmul(x, y, transpose_x, transpose_y).size


_PIECE: Final = 1 << 18  # products per partial sum

# --- ops -----------------------------------------------------------------------------


@op(infer=_matmul, flops=_matmul_flops, precision="half", is_holomorphic=True, heads=True)
def matmul(
    out: Array, x: Array, y: Array, *, transpose_x: bool = False, transpose_y: bool = False
) -> None:
    """x @ y: f[..., m, k] @ f[..., k, n] -> f[..., m, n], broadcasting the batch axes.

    A 1-d x is a row and a 1-d y is a column; the result does not have that axis, as in the Python
    Array API standard. `transpose_x` and `transpose_y` swap the last two axes of an operand of 2 or
    more dimensions, without a copy.

    Raises `ShapeError` for operands that do not match or have no axes, `DTypeError` for dtypes that
    promote to bool, or not at all.

        >>> ml.matmul([[1.0, 2.0], [3.0, 4.0]], [1.0, 1.0])
        Tensor([3., 7.], f32[2])
    """
    if x.ndim > 2 and y.ndim <= 2 and not transpose_x:
        # Compute one large product instead of one product per matrix of the batch.
        rows = math.prod(x.shape[:-1])
        out = out.reshape(rows, *out.shape[x.ndim - 1 :])
        x = x.reshape(rows, x.shape[-1])
    _contract(out, _swapped(x, transpose_x), _swapped(y, transpose_y))


@op(infer=_batch_contract, flops=_matmul_flops, public=False, is_holomorphic=True)
def batch_contract(
    out: Array, x: Array, y: Array, *, transpose_x: bool = False, transpose_y: bool = False
) -> None:
    """The sum over the batch of x @ y: f[..., m, k], f[..., k, n] -> f[m, n].

    This is the gradient of a matrix that was multiplied with a whole batch. x and y have the same
    batch axes; `transpose_x` and `transpose_y` are as in `matmul`. Only a few products are in
    memory at a time; they are added in the order of the batch.
    """
    rows = math.prod(x.shape[:-1])
    if transpose_x and not transpose_y:
        # Contract the batch and the inner axis together, in one product.
        _contract(out, x.reshape(rows, x.shape[-1]).T, y.reshape(rows, y.shape[-1]))
        return
    batch = math.prod(x.shape[:-2])
    x = _swapped(x.reshape(batch, *x.shape[-2:]), transpose_x)
    y = _swapped(y.reshape(batch, *y.shape[-2:]), transpose_y)
    memory = memory_of(block_length(batch, out.size), *out.shape, dtype=out.dtype)
    out.fill(0)
    for block in blocks(batch, out.size):
        products = memory[: block.stop - block.start]
        np.matmul(x[block], y[block], products, dtype=out.dtype)
        np.add(out, products[0] if len(products) == 1 else np.add.reduce(products, 0), out)


def _contract(out: Array, x: Array, y: Array) -> None:
    """Compute x @ y, with sums of integers in pieces, which does not change the result.

    numpy holds the interpreter lock for up to 500 results, even if the sums are long.
    """
    step = max(_PIECE // max(out.size, 1), 1)
    if out.dtype.kind not in "iu" or out.size > 500 or x.shape[-1] <= step:
        np.matmul(x, y, out, dtype=out.dtype)
        return
    out.fill(0)
    for start in range(0, x.shape[-1], step):
        part = slice(start, start + step)
        rows = y[part] if y.ndim == 1 else y[..., part, :]
        np.add(out, np.matmul(x[..., part], rows, dtype=out.dtype), out)


def _swapped(x: Array, transpose: bool) -> Array:
    return x.swapaxes(-1, -2) if transpose else x
