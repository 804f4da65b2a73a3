"""Kernels of row functions and windows of images."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from mlvm.core.ops.strides import around
from mlvm.core.ops.windows import Padding, Pair
from mlvm.core.types import Shape, TensorType
from mlvm.machines.gpu.dtypes import computed, scalar
from mlvm.machines.gpu.kernels import (
    GROUP,
    REFUSED,
    Argument,
    Call,
    Calls,
    Facts,
    Scratch,
    Types,
    flat_call,
    kernel,
    source,
)
from mlvm.machines.gpu.reductions import adding, fold


def _rows(
    device: Facts, types: Types, axis: int, entry: str, args: tuple[Any, ...], **defines: str | int
) -> Calls:
    """Return one launch over the rows along `axis` of the first operand."""
    if len({x.dtype for x in types if x.dtype.is_float}) > 1:
        return None
    return [_over_rows(device, types[1], axis, entry, args, **defines)]


def _over_rows(
    device: Facts, x: TensorType, axis: int, entry: str, args: tuple[Any, ...], **defines: str | int
) -> Call:
    before, length, behind = around(x.shape, axis)
    # Maximum elements of a row per item.
    lanes = GROUP if behind == 1 and length > 64 and not device.is_cpu else 1
    text = source(
        "rows.c",
        T=x.dtype.name,
        A=computed(x.dtype).name,
        LANES=lanes,
        SIDE=16 if device.is_cpu and behind == 1 and length >= 16 else 1,
        **defines,
    )
    rows = before * behind
    return flat_call(text, entry, rows * lanes, args, rows, length, behind)


@kernel("softmax", computes=True)
def _softmax(device: Facts, types: Types, *, axis: int) -> Calls:
    x = types[1]
    keeps: dict[str, str | int] = {} if x.dtype.is_half else {"KEEPS": 1}
    return _rows(device, types, axis, "softmax", (0, 1), **keeps)


@kernel("log_softmax", computes=True)
def _log_softmax(device: Facts, types: Types, *, axis: int) -> Calls:
    return _rows(device, types, axis, "log_softmax", (0, 1))


@kernel("softmax_cross_entropy", judges=2, computes=True)
def _softmax_cross_entropy(device: Facts, types: Types) -> Calls:
    args = (0, 1, 2, REFUSED)
    return _rows(device, types, -1, "softmax_cross_entropy", args, Y=types[2].dtype.name)


@kernel("softmax_cross_entropy_vjp", judges=3, computes=True)
def _softmax_cross_entropy_vjp(device: Facts, types: Types) -> Calls:
    x, labels = types[2:]
    args = (0, 1, 2, 3, REFUSED)
    name = "softmax_cross_entropy_vjp"
    return [_over_rows(device, x, -1, name, args, Y=labels.dtype.name)]


def _layer_norm(name: str, device: Facts, types: Types, /, *, eps: float) -> Calls:
    args = (*range(len(types)), scalar(types[1].dtype, eps))
    return _rows(device, types, -1, name, args)


for _name in ("layer_norm", "layer_norm_normalize", "layer_norm_vjp"):
    kernel(_name, computes=True)(partial(_layer_norm, _name))


@kernel("layer_norm_scale_vjp", computes=True)
def _layer_norm_scale_vjp(device: Facts, types: Types, *, eps: float) -> Calls:
    """Compute the statistics of each row, then sums over pieces of rows, and reduce these."""
    if len({x.dtype for x in types}) > 1:
        return None
    out, _, x = types
    dtype, length = computed(x.dtype), x.shape[-1]
    rows = x.size // max(length, 1)
    piece = max(-(-rows // 256), 32)
    pieces = max(-(-rows // piece), 1)
    statistics = Scratch("statistics", 2 * rows * dtype.itemsize)
    sums = Scratch("sums", pieces * length * dtype.itemsize)
    name, wide = x.dtype.name, dtype.name
    args = (statistics, 2, scalar(x.dtype, eps))
    calls = [_over_rows(device, x, -1, "row_statistics", args)] if rows else []
    text = source("rows.c", T=name, LANES=1, A=wide, SIDE=1)
    operands, numbers = (sums, 1, 2, statistics), (rows, length, piece, pieces)
    calls.append(flat_call(text, "scale_gradient", pieces * length, operands, *numbers))
    sizes = (1, pieces, length)
    return [*calls, *fold(device, adding(dtype), (0, out.dtype.name), (sums, wide), sizes)]


# --- windows --------------------------------------------------------------------------


def _windows(
    device: Facts,
    types: Types,
    entry: str,
    image: Shape,
    grid: Shape,
    window: Shape,
    *,
    stride: Pair,
    padding: Padding,
    dilation: Pair,
    filler: float = 0,
    args: tuple[Argument, ...] = (0, 1),
    items: int | None = None,
) -> list[Call]:
    """Launch a kernel with an item for each element of the result, or `items` of them."""
    out = types[0]
    count = out.size if items is None else items
    sizes = (count, *image[1:], *grid, *window, *stride, *dilation, padding[0][0], padding[1][0])
    text = source("windows.c", T=out.dtype.name)
    return [flat_call(text, entry, count, args, scalar(out.dtype, filler), *sizes)]


def _of_windows(
    name: str, filler: float, device: Facts, types: Types, /, *, window: Pair, **how: Any
) -> Calls:
    """Read the windows of images, padded with the filler."""
    out, x = types
    how = {"filler": how.pop("pad_value", filler), **how}
    return _windows(device, types, name, x.shape, out.shape[1:3], window, **how)


for _name, _filler in (("patches", 0.0), ("max_pool2d", -math.inf), ("avg_pool2d", 0.0)):
    kernel(_name, computes=True)(partial(_of_windows, _name, _filler))


@kernel("unpatches", computes=True)
def _unpatches(device: Facts, types: Types, *, shape: Shape, **how: Any) -> Calls:
    x = types[1].shape
    return _windows(device, types, "unpatches", shape, x[1:3], x[3:5], **how)


@kernel("max_pool2d_vjp", computes=True)
def _max_pool2d_vjp(device: Facts, types: Types, *, window: Pair, **how: Any) -> Calls:
    """Compute the gradient shares of each window's maximum, then the sums of the shares."""
    out, g, x = types
    grid, nbytes = g.shape[1:3], g.size * computed(out.dtype).itemsize
    largest, shares = Scratch("largest", nbytes), Scratch("shares", nbytes)
    how |= {"filler": -math.inf}
    args: tuple[Argument, ...] = (largest, shares, 1, 2)
    first = _windows(
        device, types, "pool_shares", x.shape, grid, window, args=args, items=g.size, **how
    )
    args = (0, largest, shares, 2)
    second = _windows(device, types, "max_pool2d_vjp", x.shape, grid, window, args=args, **how)
    return [*first, *second]
