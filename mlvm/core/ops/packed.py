"""Matrix products with packed weights: panels, which kernels read sequentially.

A panel has PANEL columns of a matrix [k, n]. The elements of a column that fill four bytes are
adjacent: [panels, rows, PANEL, side]. The last panel is padded with zero columns. Elements of less
than four bytes are also padded with zeros along k, to lines of 64 bytes, which a kernel processes
per iteration. `mlvm.step.panels` selects the weights that are packed before a step runs.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from mlvm.core.errors import ShapeError
from mlvm.core.op import internal, no_flops
from mlvm.core.ops.matmul import matmul
from mlvm.core.ops.windows import Sides, conv2d
from mlvm.core.types import Array, Shape, TensorType

PANEL: Final = 32
"""Columns per panel on every processor: as f32, two of the longest vectors."""
_WORD: Final = 4  # adjacent bytes of a column
_LINE: Final = 64  # bytes of a column per iteration of a kernel


def panels_of(matrix: TensorType) -> TensorType:
    """Return the type of a matrix [k, n] in panels."""
    k, n = matrix.shape
    side = max(1, _WORD // matrix.dtype.itemsize)
    step = 1 if side == 1 else _LINE // matrix.dtype.itemsize
    rows = -(-k // step) * step // side
    return matrix.with_shape((-(-n // PANEL), rows, PANEL, side))


def _pack_panels(y: TensorType, transpose_y: bool) -> TensorType:
    if y.ndim < 2 or (transpose_y and y.ndim > 2):
        raise ShapeError(f"expected a matrix, or a kernel without transpose_y, got {y}")
    matrix = y.with_shape((math.prod(y.shape[:-1]), y.shape[-1]))
    return panels_of(matrix.with_shape(matrix.shape[::-1]) if transpose_y else matrix)


def _unpacked_type(panels: TensorType, shape: Shape) -> TensorType:
    """Return the type of the matrix in the panels. The last axis of the panels is a column axis."""
    y = panels.with_shape(shape)
    expected = _pack_panels(y, False)
    if expected is not panels:
        raise ShapeError(f"expected panels of {y} with the type {expected}, got {panels}")
    return y


def _packed_matmul(
    x: TensorType, panels: TensorType, columns: int, transpose_x: bool
) -> TensorType | None:
    if x.ndim < 2:
        raise ShapeError(f"expected x with at least 2 dimensions, got {x}")
    y = _unpacked_type(panels, (x.shape[-2 if transpose_x else -1], columns))
    return matmul.infer((x, y), {"transpose_x": transpose_x, "transpose_y": False})


def _packed_conv2d(
    x: TensorType, panels: TensorType, window: Shape, columns: int, **how: Any
) -> TensorType | None:
    kernel = _unpacked_type(panels, (*window, *x.shape[-1:], columns))
    return conv2d.infer((x, kernel), {**how, "groups": 1})


def _conv2d_flops(x: TensorType, panels: TensorType, window: Shape, **how: Any) -> int:
    out: Any = _packed_conv2d(x, panels, window, **how)
    return 2 * math.prod(window) * x.shape[-1] * int(out.size)


# --- ops -----------------------------------------------------------------------------


@internal(infer=_pack_panels, flops=no_flops, copies_only=True)
def pack_panels(out: Array, y: Array, *, transpose_y: bool = False) -> None:
    """The columns of y, [..., n] as a matrix [k, n], packed in panels."""
    matrix = y.T if transpose_y else y.reshape(math.prod(y.shape[:-1]), y.shape[-1])
    k, n = matrix.shape
    panels, rows, _, side = out.shape
    padded = np.zeros((rows * side, panels * PANEL), y.dtype)
    padded[:k, :n] = matrix
    out[...] = padded.reshape(rows, side, panels, PANEL).transpose(2, 0, 3, 1)


@internal(
    infer=_packed_matmul, flops=lambda x, panels, columns, **how: 2 * x.size * columns, heads=True
)
def packed_matmul(
    out: Array, x: Array, panels: Array, *, columns: int, transpose_x: bool = False
) -> None:
    """x @ y, as in `matmul`, for y in panels with the given number of columns."""
    y = _unpacked(panels, (x.shape[-2 if transpose_x else -1], columns))
    matmul.kernel(out, x, y, transpose_x=transpose_x)


@internal(infer=_packed_conv2d, flops=_conv2d_flops)
def packed_conv2d(
    out: Array,
    x: Array,
    panels: Array,
    *,
    window: tuple[int, ...],
    columns: int,
    stride: tuple[int, ...] = (1, 1),
    padding: Sides,
    dilation: tuple[int, ...] = (1, 1),
) -> None:
    """`conv2d` in one group, for a kernel in panels with the given window and columns."""
    kernel = _unpacked(panels, (*window, x.shape[-1], columns))
    conv2d.kernel(out, x, kernel, stride=stride, padding=padding, dilation=dilation)


def _unpacked(panels: Array, shape: Shape) -> Array:
    """Return the matrix of the panels in this shape."""
    count, rows, _, side = panels.shape
    matrix = panels.transpose(1, 3, 0, 2).reshape(rows * side, count * PANEL)
    return matrix[: math.prod(shape[:-1]), : shape[-1]].reshape(shape)
