"""Matrix products: `src/kernels/linalg.c`, whose `enum Product` lists what a plan says."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from mlvm.core.op import Attributes
from mlvm.core.rules import broadcast_shapes
from mlvm.core.types import Shape, TensorType
from mlvm.machines.native._native import Plan
from mlvm.machines.native.twin import Types, twin

_BLOCK_K: Final = 256
_PANELS: Final = 4 << 20
"""Bytes of y that a thread copies at once."""


class Matrix(NamedTuple):
    """An operand's last two axes, after the transposition: lengths and strides in elements."""

    rows: int
    columns: int
    row: int
    column: int

    @property
    def T(self) -> Matrix:
        return Matrix(self.columns, self.rows, self.column, self.row)


def _matrix(x: TensorType, transpose: bool) -> Matrix:
    rows, columns = x.shape[-2:]
    matrix = Matrix(rows, columns, columns, 1)
    return matrix.T if transpose else matrix


def _batch(x: Shape, y: Shape, x_size: int, y_size: int) -> list[tuple[int, int, int]]:
    """The batch axes, as few as can be: their lengths, and strides of x and y, 0 where repeated."""
    axes: list[tuple[int, int, int]] = []
    lengths = broadcast_shapes(x, y)
    x, y = ((1,) * (len(lengths) - len(shape)) + shape for shape in (x, y))
    for length, x_length, y_length in zip(lengths[::-1], x[::-1], y[::-1], strict=True):
        if length == 1:
            continue
        axis = length, x_size * (x_length > 1), y_size * (y_length > 1)
        x_size, y_size = x_size * x_length, y_size * y_length
        if axes and axis[1:] == (axes[0][0] * axes[0][1], axes[0][0] * axes[0][2]):
            axes[0] = length * axes[0][0], *axes[0][1:]
        else:
            axes.insert(0, axis)
    return axes


def plan(
    dtype: str,
    x: Matrix,
    y: Matrix,
    axes: list[tuple[int, int, int]],
    groups: tuple[int, int, int] = (1, 0, 0),
) -> Plan:
    m, n, k = x.rows, y.columns, x.columns
    itemsize = 4 if dtype == "f32" else 8
    by_columns = n > m
    unit = 64 if by_columns else 24
    copy_x = n > 64
    copy_y = y.column != 1 or m > 64
    rows = 96
    columns = min(n, _PANELS // (itemsize * _BLOCK_K))
    wide = -(-columns // 32) * 32
    blocks = -(-k // _BLOCK_K) * groups[0]
    at_once = max(1, min(blocks, _PANELS // (itemsize * _BLOCK_K * wide)))
    strip = (min(m, rows) * 4 // 3 + 32) * _BLOCK_K
    panels = at_once * min(k, _BLOCK_K) * wide
    products = math.prod(axis[0] for axis in axes)
    ints = [m, n, k, groups[0], x.row, x.column, groups[1], y.row, y.column, groups[2], 1, 2, 0]
    ints += [by_columns, unit, copy_x, copy_y, rows, columns, at_once, strip, len(axes)]
    return Plan(
        f"matmul_{dtype}",
        3,
        ints=[int(i) for i in ints] + [i for axis in axes for i in axis],
        units=products * -(-(n if by_columns else m) // unit),
        work=products * groups[0] * m * n * (k + 4) / 30 + 50,
        scratch=(strip + panels) * itemsize,
    )


def _dtype(types: Types) -> str | None:
    """The suffix of the kernels for these types."""
    names = {type.dtype.name for type in types}
    name = names.pop()
    return name if not names and name in ("f32", "f64") else None


@twin("matmul")
def matmul(types: Types, attributes: Attributes) -> Plan | None:
    dtype, (_, x, y) = _dtype(types), types
    if dtype is None:
        return None
    if x.ndim == 1:
        x = x.with_shape((1, *x.shape))
    if y.ndim == 1:
        y = y.with_shape((*y.shape, 1))
    if x.ndim > 2 and y.ndim == 2 and not attributes["transpose_x"]:
        x = x.with_shape((math.prod(x.shape[:-1]), x.shape[-1]))
    a, b = _matrix(x, attributes["transpose_x"]), _matrix(y, attributes["transpose_y"])
    axes = _batch(x.shape[:-2], y.shape[:-2], a.rows * a.columns, b.rows * b.columns)
    return plan(dtype, a, b, axes)


@twin("batch_contract")
def batch_contract(types: Types, attributes: Attributes) -> Plan | None:
    dtype, (_, x, y) = _dtype(types), types
    if dtype is None:
        return None
    batch = math.prod(x.shape[:-2])
    if attributes["transpose_x"] and not attributes["transpose_y"]:
        x = x.with_shape((batch * x.shape[-2], x.shape[-1]))
        y = y.with_shape((batch * y.shape[-2], y.shape[-1]))
        batch = 1
    a, b = _matrix(x, attributes["transpose_x"]), _matrix(y, attributes["transpose_y"])
    return plan(dtype, a, b, [], (batch, a.rows * a.columns, b.rows * b.columns))
