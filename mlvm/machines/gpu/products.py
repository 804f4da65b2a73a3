"""Matrix products, and convolutions, which are products of windows with a kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from mlvm.core.ops.windows import Sides
from mlvm.core.types import Shape, TensorType
from mlvm.machines.gpu.dtypes import computed
from mlvm.machines.gpu.elementwise import collapsed
from mlvm.machines.gpu.kernels import Argument, Call, Calls, Facts, Scratch, Types, kernel, source
from mlvm.machines.gpu.moves import Window, move
from mlvm.machines.gpu.reductions import adding, fold
from mlvm.machines.gpu.tiles import tile


class Sizes(NamedTuple):
    """Sizes of matrix products: [m, k] @ [k, n], for a batch, with sums over other axes."""

    m: int
    n: int
    k: int
    batch: int
    summed: int


class _Windows(NamedTuple):
    """Windows of volumes as an operand that is not materialized.

    Along each of three axes, element t of window i is at i step + t apart + lead. Elements outside
    of the volume are 0. `transposed`: a window is a column, not a row. `phases`: the phases of a
    transposed convolution.
    """

    volume: Sequence[int]
    grid: Sequence[int]
    window: Sequence[int]
    step: Sequence[int]
    dilation: Sequence[int]
    lead: Sequence[int]
    channels: int
    channels_in_all: int
    transposed: bool = False
    phases: Sequence[int] = ()

    def numbers(self, outputs: int, outputs_in_all: int) -> tuple[int, ...]:
        """Return the arguments of a kernel. Each product computes some columns of the results."""
        sizes = (*self.volume, *self.grid, *self.window[1:], self.channels)
        places = (*self.step, *self.dilation, *self.lead)
        return (*sizes, self.channels_in_all, *places, outputs_in_all, outputs, *self.phases)


class _Operand(NamedTuple):
    """Strides of an operand: along rows, columns, two axes of the batch and the summed axis."""

    number: Argument
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
    windows: _Windows | None = None,
) -> list[Call]:
    """Return the calls of a product. Results of windows are columns of a single matrix."""
    m, n, _, batch, _ = sizes
    dtype = computed(out.dtype)
    names = {x.dtype, y.dtype, out.dtype.name}
    if device.is_cpu and dtype.is_float and names == {dtype.name} and windows is None and n >= 16:
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
        **cut.defines(),
        X_ALONG=int(x.column == 1),
        Y_ALONG=int(y.column == 1),
        **_defines(windows),
    )
    items = groups * splits * cut.items, cut.items
    numbers = _numbers(x, y, sizes, second, length, splits)
    if windows is not None:
        numbers += windows.numbers(n, out.shape[-1] if windows.phases else n * batch)
    return _added_up(device, out, text, "product", items, (x.number, y.number), numbers, splits)


def _defines(windows: _Windows | None) -> dict[str, int]:
    if windows is None:
        return {}
    phases = {"PHASES": 1} if windows.phases else {}
    return {"WINDOWS": 1, "TRANSPOSED": int(windows.transposed), **phases}


def _shared_out(sizes: Sizes) -> tuple[int, int]:
    """Return the length of a sum's pieces, and the number of groups that share them.

    Sums are split if the result has too few elements to occupy the groups. This depends on sizes,
    not on tiles.
    """
    m, n, k, batch, summed = sizes
    enough = 64  # groups; each computes at least 64 x 64 elements
    groups = max(m * n * batch // (64 * 64), 1)
    if k * summed <= 1024 or groups >= enough:
        return max(k, 1), 1
    length = min(k, 512)
    return length, min(-(-k // length) * summed, enough // groups)


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
    """Return the call of a product and, if it is split, of the sum of the partial results."""
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
    """Return the calls of a product on a processor, which first makes rows of y contiguous."""
    m, n, k, batch, summed = sizes
    dtype = out.dtype
    cut = tile(device, dtype, m, n, batch)
    lanes = min(cut.lanes, 64 // dtype.itemsize)
    wide = cut.wide if n >= cut.wide else lanes
    calls, number = [], y.number
    if y.column != 1:
        stack = batch // second if y.first else 1
        stack *= (second if y.second else 1) * (summed if y.summed else 1)
        number = Scratch("transposed", stack * k * n * dtype.itemsize)
        packed, strided = Window(0, (k * n, n, 1)), Window(0, (k * n, y.row, y.column))
        calls = move(device, (stack, k, n), packed, strided, dtype, args=(number, y.number))
        y = y._replace(row=n, column=1)
    high = min(m, cut.high)
    tiles = -(-m // high) * -(-n // wide) * batch
    length, splits = _shared_out(sizes)
    vector = f"{_VECTORS[dtype.name]}{lanes}"
    text = source("panels.c", T=dtype.name, V=vector, HIGH=high, WIDE=wide, LANES=lanes)
    items = tiles * splits, 8
    numbers = _numbers(x, y, sizes, second, length, splits)
    product = _added_up(device, out, text, "panels", items, (x.number, number), numbers, splits)
    return [*calls, *product]


_VECTORS: Final = {"f32": "float", "f64": "double"}


@kernel("matmul", computes=True)
def _matmul(device: Facts, types: Types, *, transpose_x: bool, transpose_y: bool) -> Calls:
    out, x, y = types
    rows, inner = _matrix(x, transpose_x, left=True)
    columns = _matrix(y, transpose_y, left=False)[1]
    x_stack, y_stack = x.shape[:-2], y.shape[:-2]
    if x_stack and not math.prod(y_stack) > 1 and not transpose_x:
        rows, x_stack, y_stack = rows * math.prod(x_stack), (), ()  # a single product
    steps = _stack(x_stack, y_stack, rows * inner, inner * columns)
    if steps is None:
        return None
    batch, second, x_first, x_second, y_first, y_second = steps
    left = _Operand(1, x.dtype.name, *_steps(rows, inner, transpose_x), x_first, x_second)
    right = _Operand(2, y.dtype.name, *_steps(inner, columns, transpose_y), y_first, y_second)
    return product(device, out, left, right, Sizes(rows, columns, inner, batch, 1), second)


def _matrix(x: TensorType, transpose: bool, *, left: bool) -> tuple[int, int]:
    """Return rows and columns. A vector is a row on the left, and a column on the right."""
    if x.ndim == 1:
        return (1, x.size) if left else (x.size, 1)
    rows, columns = x.shape[-2:]
    return (columns, rows) if transpose else (rows, columns)


def _steps(rows: int, columns: int, transpose: bool) -> tuple[int, int]:
    return (1, rows) if transpose else (columns, 1)


def _stack(
    x: tuple[int, ...], y: tuple[int, ...], x_size: int, y_size: int
) -> tuple[int, int, int, int, int, int] | None:
    """Return the number of matrix products, and the strides of both operands.

    It has the total, the number along the inner of two axes, and the strides along each. Returns
    None if broadcasting leaves more than two axes.
    """
    lengths, (x_steps, y_steps) = collapsed(np.broadcast_shapes(x, y), [x, y])
    if len(lengths) > 2:
        return None
    first, second = [1, *lengths][-2:]
    x_first, x_second = [x_size * step for step in [0, *x_steps][-2:]]
    y_first, y_second = [y_size * step for step in [0, *y_steps][-2:]]
    return first * second, second, x_first, x_second, y_first, y_second


@kernel("batch_contract", computes=True)
def _batch_contract(device: Facts, types: Types, *, transpose_x: bool, transpose_y: bool) -> Calls:
    out, x, y = types
    rows, inner = _matrix(x, transpose_x, left=True)
    columns = _matrix(y, transpose_y, left=False)[1]
    batch = math.prod(x.shape[:-2])
    if transpose_x and not transpose_y:  # the batch and the inner axis are merged
        inner, batch = inner * batch, 1
    left = _Operand(1, x.dtype.name, *_steps(rows, inner, transpose_x), summed=rows * inner)
    right = _Operand(2, y.dtype.name, *_steps(inner, columns, transpose_y), summed=inner * columns)
    return product(device, out, left, right, Sizes(rows, columns, inner, 1, batch))


# --- convolutions ---------------------------------------------------------------------


def _in_three(numbers: Sequence[int], filler: int = 1) -> Sequence[int]:
    """Extend the numbers for an image to a volume of depth 1."""
    return (*(filler,) * (3 - len(numbers)), *numbers)


def _windows_of(
    x: TensorType,
    grid: Shape,
    window: Shape,
    groups: int,
    *,
    stride: Shape,
    padding: Sides,
    dilation: Shape,
) -> _Windows:
    """Return the windows of a convolution of x."""
    lead = _in_three([-before for before, _ in padding], 0)
    sizes = _in_three(x.shape[1:-1]), _in_three(grid), _in_three(window)
    how = _in_three(stride), _in_three(dilation), lead
    return _Windows(*sizes, *how, x.shape[-1] // groups, x.shape[-1])


@kernel("conv2d", computes=True)
def _conv2d(device: Facts, types: Types, *, groups: int, **how: Any) -> Calls:
    out, x, weights = types
    windows = _windows_of(x, out.shape[1:-1], weights.shape[:-2], groups, **how)
    outputs = out.shape[-1]
    sizes = Sizes(out.size // outputs, outputs // groups, math.prod(weights.shape[:-1]), groups, 1)
    left = _Operand(1, x.dtype.name, 1, 1, windows.channels)
    right = _Operand(2, weights.dtype.name, outputs, 1, sizes.n)
    return product(device, out, left, right, sizes, windows=windows)


@kernel("conv_transpose2d", computes=True)
def _conv_transpose2d(
    device: Facts,
    types: Types,
    *,
    shape: Shape,
    stride: Shape,
    padding: Sides,
    dilation: Shape,
    groups: int,
) -> Calls:
    """Phases of a strided convolution, which are a batch of products.

    Results that are a stride apart form a phase: they use the same elements of the kernel, a stride
    apart, and are a convolution of x with these elements.
    """
    out, x, weights = types
    inputs, outputs = weights.shape[-2:]
    each, taps, lengths = outputs // groups, *map(_in_three, (weights.shape[:-2], out.shape[1:-1]))
    strides, dilations = _in_three(stride), _in_three(dilation)
    every = [s // math.gcd(s, d) for s, d in zip(strides, dilations, strict=True)]
    grid = [-(-n // s) for n, s in zip(lengths, strides, strict=True)]
    window = [-(-n // s) for n, s in zip(taps, every, strict=True)]
    windows = _Windows(
        _in_three(x.shape[1:-1]),
        grid,
        window,
        (1, 1, 1),
        [-n * d // s for n, d, s in zip(every, dilations, strides, strict=True)],
        _in_three([before for before, _ in padding], 0),
        each,
        outputs,
        phases=(*strides, *dilations, *every, *taps, *lengths),
    )
    count, inner = math.prod(strides), math.prod(window) * each
    sizes = Sizes(out.shape[0] * math.prod(grid), inputs, inner, groups * count, 1)
    left = _Operand(1, x.dtype.name, 1, 1, each)
    right = _Operand(2, weights.dtype.name, inputs * outputs, outputs, each)
    return product(device, out, left, right, sizes, count, windows)


@kernel("conv2d_kernel_vjp", computes=True)
def _conv2d_kernel_vjp(
    device: Facts, types: Types, *, window: Shape, groups: int, **how: Any
) -> Calls:
    out, g, x = types
    windows = _windows_of(x, g.shape[1:-1], window, groups, **how)
    windows = windows._replace(transposed=True)
    outputs = g.shape[-1]
    sizes = Sizes(out.size // outputs, outputs // groups, math.prod(g.shape[:-1]), groups, 1)
    left = _Operand(2, x.dtype.name, 1, 0, windows.channels)
    right = _Operand(1, g.dtype.name, outputs, 1, sizes.n)
    return product(device, out, left, right, sizes, windows=windows)
