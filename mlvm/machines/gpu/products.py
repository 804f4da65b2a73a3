"""Products of matrices, and convolutions, which are products of windows with a kernel."""

from __future__ import annotations

import math
from typing import Final, NamedTuple, cast

import numpy as np

from mlvm.core.ops.neural import Padding, Pair
from mlvm.core.types import TensorType
from mlvm.machines.gpu.dtypes import computed, runs
from mlvm.machines.gpu.kernels import Argument, Call, Calls, Facts, Scratch, Types, kernel, source
from mlvm.machines.gpu.moves import Window, move
from mlvm.machines.gpu.reductions import adding, fold
from mlvm.machines.gpu.tiles import tile


class Sizes(NamedTuple):
    """What there is to do: [m, k] @ [k, n], for each of a batch, with sums over others."""

    m: int
    n: int
    k: int
    batch: int
    summed: int


_PART: Final = 64 * 64  # elements of a result that keep a group busy
_ENOUGH: Final = 64  # groups: with fewer, a long sum is shared out
_LONG: Final = 1024  # elements of a sum that are not shared out


class _Operand(NamedTuple):
    """Where the elements of an operand lie: its steps along rows, columns, two axes of the batch
    and the axis that is summed over."""

    number: int
    dtype: str
    row: int
    column: int
    first: int = 0
    second: int = 0
    summed: int = 0


def product(
    device: Facts,
    out: TensorType,
    x: _Operand,
    y: _Operand,
    sizes: Sizes,
    second: int = 1,
    windows: tuple[int, ...] = (),
) -> list[Call]:
    """The calls of a product."""
    m, n, _, batch, _ = sizes
    dtype = computed(out.dtype)
    names = {x.dtype, y.dtype, out.dtype.name}
    if device.is_cpu and dtype.is_float and names == {dtype.name} and not windows and n >= 16:
        return _in_panels(device, out, x, y, sizes, second)
    cut = tile(device, dtype, m, n, batch)
    groups = -(-m // cut.rows) * -(-n // cut.columns) * batch
    length, splits = _shared_out(sizes)
    text = source(
        "product.c",
        T=out.dtype.name if splits == 1 else dtype.name,
        X=x.dtype,
        Y=y.dtype,
        A=dtype.name,
        V=f"{_VECTORS[dtype.name]}{cut.lanes}" if cut.lanes > 1 else dtype.name,
        ROWS=cut.rows,
        COLUMNS=cut.columns,
        DEPTH=cut.depth,
        HIGH=cut.high,
        WIDE=cut.wide,
        LANES=cut.lanes,
        X_ALONG=int(x.column == 1),
        Y_ALONG=int(y.column == 1),
        **({"WINDOWS": 1} if windows else {}),
    )
    items = groups * splits * cut.items, cut.items
    numbers = (*_numbers(x, y, sizes, second, length, splits), *windows)
    return _added_up(device, out, text, "product", items, (x.number, y.number), numbers, splits)


def _shared_out(sizes: Sizes) -> tuple[int, int]:
    """How long the pieces of a sum are, and to how many groups they are shared out: where the
    elements of the result keep few groups busy. It is a matter of sizes, not of tiles."""
    m, n, k, batch, summed = sizes
    groups = max(m * n * batch // _PART, 1)
    if k * summed <= _LONG or groups >= _ENOUGH:
        return max(k, 1), 1
    length = min(k, 512)
    return length, min(-(-k // length) * summed, _ENOUGH // groups)


def _numbers(
    x: _Operand, y: _Operand, sizes: Sizes, second: int, length: int, splits: int
) -> tuple[int, ...]:
    m, n, k, batch, summed = sizes
    return (
        *(m, n, k, x.row, x.column, y.row, y.column, batch, second),
        *(x.first, x.second, y.first, y.second, summed, x.summed, y.summed, length, splits),
    )


def _added_up(
    device: Facts,
    out: TensorType,
    text: str,
    entry: str,
    items: tuple[int, int],
    operands: tuple[Argument, Argument],
    numbers: tuple[int, ...],
    splits: int,
) -> list[Call]:
    """The call of a product and, if it is split, the sum of what the splits have left."""
    dtype = computed(out.dtype)
    to: Argument = 0 if splits == 1 else Scratch("splits", splits * out.size * dtype.itemsize)
    args = (to, *operands, *map(np.int64, numbers))
    calls = [Call(text, entry, items[:1], items[1:], args)]
    if splits > 1:
        parts = (1, splits, out.size)
        calls += fold(device, adding(dtype), (0, out.dtype.name), (to, dtype.name), parts)
    return calls


def _in_panels(
    device: Facts, out: TensorType, x: _Operand, y: _Operand, sizes: Sizes, second: int
) -> list[Call]:
    """The calls of a product on a processor. Rows of y are brought side by side in memory first."""
    m, n, k, batch, summed = sizes
    dtype = out.dtype
    cut = tile(device, dtype, m, n, batch)
    lanes = min(cut.lanes, 64 // dtype.itemsize)
    wide = cut.wide if n >= cut.wide else lanes
    calls, number = [], cast(Argument, y.number)
    if y.column != 1:
        stack = batch // second if y.first else 1
        stack *= (second if y.second else 1) * (summed if y.summed else 1)
        number = Scratch("transposed", stack * k * n * dtype.itemsize)
        to, given = Window(0, (k * n, n, 1)), Window(0, (k * n, y.row, y.column))
        calls = move((stack, k, n), to, given, dtype, args=(number, y.number))
        y = y._replace(row=n, column=1)
    high = min(m, cut.high)
    tiles = -(-m // high) * -(-n // wide) * batch
    length, splits = _shared_out(sizes)
    text = source(
        "panels.c",
        T=dtype.name,
        V=f"{_VECTORS[dtype.name]}{lanes}",
        HIGH=high,
        WIDE=wide,
        LANES=lanes,
    )
    items = tiles * splits, 8
    numbers = _numbers(x, y, sizes, second, length, splits)
    product = _added_up(device, out, text, "panels", items, (x.number, number), numbers, splits)
    return [*calls, *product]


_VECTORS: Final = {"f32": "float", "f64": "double"}


@kernel("matmul")
def _matmul(device: Facts, types: Types, *, transpose_x: bool, transpose_y: bool) -> Calls:
    out, x, y = types
    if not runs(device, types):
        return None
    rows, inner = _matrix(x, transpose_x, left=True)
    columns = _matrix(y, transpose_y, left=False)[1]
    x_stack, y_stack = x.shape[:-2], y.shape[:-2]
    if x_stack and not math.prod(y_stack) > 1 and not transpose_x:
        rows, x_stack, y_stack = rows * math.prod(x_stack), (), ()  # one product of all
    steps = _stack(x_stack, y_stack, rows * inner, inner * columns)
    if steps is None:
        return None
    batch, second, x_first, x_second, y_first, y_second = steps
    left = _Operand(1, x.dtype.name, *_steps(rows, inner, transpose_x), x_first, x_second)
    right = _Operand(2, y.dtype.name, *_steps(inner, columns, transpose_y), y_first, y_second)
    return product(device, out, left, right, Sizes(rows, columns, inner, batch, 1), second)


def _matrix(x: TensorType, transpose: bool, *, left: bool) -> tuple[int, int]:
    """Rows and columns. A vector is a row on the left, and a column on the right."""
    if x.ndim == 1:
        return (1, x.size) if left else (x.size, 1)
    rows, columns = x.shape[-2:]
    return (columns, rows) if transpose else (rows, columns)


def _steps(rows: int, columns: int, transpose: bool) -> tuple[int, int]:
    return (1, rows) if transpose else (columns, 1)


def _stack(
    x: tuple[int, ...], y: tuple[int, ...], x_size: int, y_size: int
) -> tuple[int, int, int, int, int, int] | None:
    """How many products there are, how many along the inner of two axes, and the steps of both
    operands along each. None where broadcasting leaves more than two axes."""
    ndim = max(len(x), len(y))
    x, y = (1,) * (ndim - len(x)) + x, (1,) * (ndim - len(y)) + y
    axes: list[tuple[int, int, int]] = []  # length, step of x, step of y; the last axis first
    for a, b in zip(reversed(x), reversed(y), strict=True):
        length = a if b == 1 else b
        x_step, y_step = (x_size if a > 1 else 0), (y_size if b > 1 else 0)
        x_size, y_size = x_size * a, y_size * b
        if length == 1:
            continue
        if axes:
            inner, x_inner, y_inner = axes[-1]
            if (x_step, y_step) == (x_inner * inner, y_inner * inner):
                axes[-1] = (inner * length, x_inner, y_inner)
                continue
        axes.append((length, x_step, y_step))
    if len(axes) > 2:
        return None
    (second, x_second, y_second), (first, x_first, y_first) = (*axes, (1, 0, 0), (1, 0, 0))[:2]
    return first * second, second, x_first, x_second, y_first, y_second


@kernel("batch_contract")
def _batch_contract(device: Facts, types: Types, *, transpose_x: bool, transpose_y: bool) -> Calls:
    out, x, y = types
    if not runs(device, types):
        return None
    rows, inner = _matrix(x, transpose_x, left=True)
    columns = _matrix(y, transpose_y, left=False)[1]
    batch = math.prod(x.shape[:-2])
    if transpose_x and not transpose_y:  # batch and inner axis are one
        inner, batch = inner * batch, 1
    left = _Operand(1, x.dtype.name, *_steps(rows, inner, transpose_x), summed=rows * inner)
    right = _Operand(2, y.dtype.name, *_steps(inner, columns, transpose_y), summed=inner * columns)
    return product(device, out, left, right, Sizes(rows, columns, inner, 1, batch))


@kernel("conv2d")
def _conv2d(device: Facts, types: Types, *, stride: Pair, padding: Padding) -> Calls:
    out, x, weights = types
    if not runs(device, types):
        return None
    inner, channels = math.prod(weights.shape[:3]), weights.shape[3]
    rows = math.prod(out.shape[:3])
    left = _Operand(1, x.dtype.name, inner, 1)
    right = _Operand(2, weights.dtype.name, channels, 1)
    grid = out.shape[1:3]
    windows = (*x.shape[1:], *grid, weights.shape[1], *stride, padding[0][0], padding[1][0])
    return product(device, out, left, right, Sizes(rows, channels, inner, 1, 1), windows=windows)
