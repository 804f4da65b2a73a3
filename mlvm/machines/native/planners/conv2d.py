"""Convolution and transposed convolutions.

`kernels/linalg.c` multiplies windows, which it gathers row by row or column by column.
`kernels/depthwise.c` convolves narrow groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from mlvm.core.op import Attributes
from mlvm.core.ops.windows import NARROW, images_per_block
from mlvm.core.types import Shape, TensorType
from mlvm.machines.native._native import GATHER, LINES, MOST_RUNS, KernelCall
from mlvm.machines.native.planner import Types, kernel_call, planner
from mlvm.machines.native.planners.linalg import (
    BLOCK,
    Matrix,
    Product,
    call,
    float_dtype,
    in_panels,
    tiles,
)
from mlvm.machines.native.planners.windows import geometry

_PIXELS: Final = 16384
"""Bytes of a group's pixels that are copied together and stay in the first-level cache."""
_VECTOR: Final = 64
"""Bytes of the longest vector."""
_LINES: Final = 3 << 16
"""Bytes of image lines that are copied together and stay in the second-level cache."""
_PLACES: Final = 192
"""Maximum number of windows, in several lines, that are multiplied together."""
_CHANNELS: Final = 256
"""Bytes of channels per unit of a kernel's gradient."""


@planner("conv2d")
def conv2d(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    out, x, kernel = types
    dtype = float_dtype(x, kernel)
    if dtype is None:
        return None
    if _is_narrow(kernel, attributes):
        return _narrow("grouped", out, x, out, kernel, attributes)
    return _convolved(dtype, out, x, kernel, attributes)


@planner("packed_conv2d")
def packed_conv2d(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    out, x, panels = types
    kernel = panels.with_shape((*attributes["window"], x.shape[-1], attributes["columns"]))
    dtype = float_dtype(x, panels)
    if dtype is None:
        return None
    return _convolved(dtype, out, x, kernel, {**attributes, "groups": 1}, panels)


def _convolved(
    dtype: str,
    out: TensorType,
    x: TensorType,
    kernel: TensorType,
    attributes: Attributes,
    panels: TensorType | None = None,
) -> KernelCall | None:
    """Plan products of windows and the kernel, which may be packed into panels."""
    groups, *_, inputs, outputs = attributes["groups"], *kernel.shape
    each, inner = outputs // groups, math.prod(kernel.shape[:-1])
    places, channels = math.prod(out.shape[:-1]), x.shape[-1]
    axes = [(groups, inputs, each)] if groups > 1 else []
    product = Product(dtype, Matrix(places, inner, inner, 1), Matrix(inner, each, outputs, 1), axes)
    if panels is not None:
        product = in_panels(product, panels)
    single = {*kernel.shape[:-2], *attributes["stride"]} == {1}
    if groups == 1 and single and not any(map(any, attributes["padding"])):
        return call(product)
    dilation = attributes["dilation"]
    windows = _gathered(x, kernel.shape[:-2], out, attributes["stride"], dilation)
    windows |= _axes("pad", [before for before, _ in attributes["padding"]], 0)
    side_by_side = dilation[-1] == 1 and inputs == channels
    windows |= _runs(kernel.shape[-3], inputs, side_by_side)
    windows |= _in_lines(dtype, windows, kernel.shape[:-2], groups)
    return tiles(product, windows=windows | {"out_row": outputs, "out_product": each})


@planner("conv_transpose2d")
def conv_transpose2d(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    """Plan a convolution with the reversed kernel.

    With a stride, zeros are inserted between the elements of x.
    """
    out, x, kernel = types
    dtype = float_dtype(x, kernel)
    if dtype is None:
        return None
    if _is_narrow(kernel, attributes) and kernel.shape[2] == 1:
        return _narrow("grouped_transpose", out, x, out, kernel, attributes)
    groups, *window, inputs, outputs = attributes["groups"], *kernel.shape
    each = outputs // groups
    inner, places = math.prod(window) * each, math.prod(out.shape[:-1])
    axes = [(groups, each, each)] if groups > 1 else []
    left, right = Matrix(places, inner, inner, 1), Matrix(inner, inputs, 1, outputs)
    product = Product(dtype, left, right, axes)
    dilation, padding = attributes["dilation"], attributes["padding"]
    windows = _gathered(x, tuple(window), out, (1,) * len(window), dilation)
    pads = [(n - 1) * by - a for n, by, (a, _) in zip(window, dilation, padding, strict=True)]
    windows |= _axes("pad", pads, 0)
    windows |= _axes("sparse", attributes["stride"], 1)
    side_by_side = dilation[-1] == attributes["stride"][-1] == groups == 1
    windows |= _runs(window[-1], each, side_by_side)
    windows |= _in_lines(dtype, windows, tuple(window), groups)
    windows |= {"run_y": each, "run_step": inputs * outputs}
    return tiles(product, windows=windows | {"out_row": out.shape[-1], "out_product": inputs})


@planner("conv2d_kernel_vjp", "add_conv2d_kernel_vjp")
def conv2d_kernel_vjp(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    """Plan a product of windows, as columns, and cotangents, in blocks of whole images or less."""
    out, *totals, g, x = types
    dtype = float_dtype(x, g)
    if dtype is None:
        return None
    groups, *window, inputs, outputs = attributes["groups"], *out.shape
    if _is_narrow(out, attributes):
        return _narrow("grouped_kernel_vjp", out, x, g, out, attributes)
    each, inner = outputs // groups, math.prod(out.shape[:-1])
    images, places = g.shape[0], math.prod(g.shape[1:-1])
    axes, block, parts = [], 0, (1, 0, 0)
    if groups > 1:
        axes, places = [(groups, inputs, each)], images * places
    elif places > BLOCK:
        parts = images, 0, places * outputs
    else:
        block, places = images_per_block(places) * places, images * places
    # A column stride of 1 would mean that windows are rows. Here they are always columns.
    left, right = Matrix(inner, places, 1, max(inner, 2)), Matrix(places, each, outputs, 1)
    product = Product(dtype, left, right, axes, parts, block=block)
    dilation = attributes["dilation"]
    windows = _gathered(x, tuple(window), g, attributes["stride"], dilation)
    windows |= _axes("pad", [before for before, _ in attributes["padding"]], 0)
    windows |= _runs(window[-1], inputs, dilation[-1] == 1 and groups == 1)
    windows |= {"x": len(types) - 1, "y": len(types) - 2, "out_row": outputs, "out_product": each}
    if totals:
        windows["total"] = 1
    return tiles(product, windows=windows)


def _is_narrow(kernel: TensorType, attributes: Attributes) -> bool:
    """Return whether groups have one channel, or together fill vectors.

    The groups have the same number of channels in x.
    """
    *window, inputs, outputs = kernel.shape
    if len(window) != 2 or inputs * attributes["groups"] != outputs or outputs == 1:  # no lanes
        return False
    if inputs == 1:
        return True
    (tall, wide), dilation_x = window, attributes["dilation"][1]
    pixels = 7 * attributes["stride"][1] + (wide - 1) * dilation_x + 1  # read by eight positions
    nbytes = tall * pixels * inputs * kernel.dtype.itemsize
    full = outputs * kernel.dtype.itemsize % _VECTOR == 0
    return inputs in NARROW and full and nbytes <= _PIXELS


def _axes(name: str, numbers: Iterable[int], otherwise: int) -> dict[str, int]:
    """Name the integers of three spatial axes; the value of a missing axis is `otherwise`."""
    behind = ("front", "top", "left") if name == "pad" else ("behind", "down", "across")
    if name in ("image", "grid"):
        behind = ("depth", "height", "width")
    lengths = tuple(numbers)
    filled = (otherwise,) * (3 - len(lengths)) + lengths
    return {f"{name}_{end}": n for end, n in zip(behind, filled, strict=True)}


def _gathered(
    x: TensorType, window: Shape, grid: TensorType, stride: Shape, dilation: Shape
) -> dict[str, int]:
    """Return the integers of windows over x at the positions of `grid`."""
    return {
        "copy_x": GATHER,
        "channels": x.shape[-1],
        "window_height": window[-2],
        **_axes("image", x.shape[1:-1], 1),
        **_axes("grid", grid.shape[1:-1], 1),
        **_axes("stride", stride, 1),
        **_axes("apart", dilation, 1),
        **_axes("sparse", (), 1),
    }


def _runs(across: int, channels: int, side_by_side: bool) -> dict[str, int]:
    """Return length and number of contiguous runs of a line of a window.

    There is one run if its pixels are `side_by_side` with all channels.
    """
    runs = 1 if side_by_side else across
    return {"run": across * channels // runs, "runs": runs}


def _in_lines(dtype: str, windows: dict[str, int], window: Shape, groups: int) -> dict[str, int]:
    """Return the integers for reading windows from copied lines of an image.

    The result is empty if the lines of windows are short or contain several images, or if the
    pixels are so large that they would collide in a cache.
    """
    across, down, channels = windows["grid_width"], windows["grid_height"], windows["channels"]
    size, step = 8 if dtype == "f64" else 4, windows["stride_down"]
    if len(window) > 2 or groups > 1 or dtype == "bf16x2" or across * down < 96:
        return {}
    if windows["sparse_down"] * windows["sparse_across"] > 1:
        return {}
    first = (window[0] - 1) * windows["apart_down"] + 1
    pixels = (across - 1) * windows["stride_across"] + (window[1] - 1) * windows["apart_across"] + 1
    line = pixels * channels
    if not 6 <= across <= 512 or windows["run"] * (MOST_RUNS - 2) < BLOCK:
        return {}
    if windows["stride_across"] * channels * size >= 4096 or first * line * size > _LINES:
        return {}
    more = (_LINES // (line * size) - first) // step
    lines = min(1 + more, max(1, _PLACES // across), down)
    lines = -(-down // -(-down // lines))
    return {
        "copy_x": LINES,
        "line": line,
        "unit": across,
        "rows_at_once": lines * across,
        "strip_length": -(-((lines - 1) * step + first) * line // 16) * 16,
    }


def _narrow(
    kernel: str,
    out: TensorType,
    read: TensorType,
    written: TensorType,
    weights: TensorType,
    attributes: Attributes,
) -> KernelCall | None:
    """Plan narrow groups.

    A unit is a row of the result, or a row of the kernel for some channels.
    """
    (n, height, width, channels), (_, down, across, _) = read.shape, written.shape
    (tall, wide, each, _), block = weights.shape, _CHANNELS // out.dtype.itemsize
    integers = {"images": n, "block": block, "each_group": each}
    integers |= geometry(read.shape, (down, across), (tall, wide), attributes)
    units = -(-channels // block) * tall if kernel == "grouped_kernel_vjp" else n * down
    places = min(height * width, down * across)
    work = 50 + n * places * weights.size / 20
    if each == 1:
        kernel = kernel.replace("grouped", "depthwise")
    return kernel_call(f"{kernel}_{out.dtype.name}", 3, units, work, integers)
