"""Convolution as a product: `kernels/linalg.c` gathers the windows, row by row of it."""

from __future__ import annotations

import math

from mlvm.core.op import Attributes
from mlvm.machines.native._native import GATHER, KernelCall
from mlvm.machines.native.planner import Types, planner
from mlvm.machines.native.planners.linalg import Matrix, Product, call, float_dtype, tiles


@planner("conv2d")
def conv2d(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    out, x, kernel = types
    dtype = float_dtype(x, kernel)
    if dtype is None:
        return None
    _, height, width, channels = x.shape
    window, (down, across) = kernel.shape[:2], attributes["stride"]
    (top, bottom), (left, right) = attributes["padding"]
    inner, outputs = math.prod(kernel.shape[:3]), kernel.shape[3]
    places = Matrix(math.prod(out.shape[:3]), inner, inner, 1)
    product = Product(dtype, places, Matrix(inner, outputs, outputs, 1))
    if (*window, down, across, top, bottom, left, right) == (1, 1, 1, 1, 0, 0, 0, 0):
        return call(product)
    image = {"image_height": height, "image_width": width, "channels": channels}
    strides = {"window_width": window[1], "stride_down": down, "stride_across": across}
    grid = {"grid_height": out.shape[1], "grid_width": out.shape[2]}
    pads = {"pad_top": top, "pad_left": left, "copy_x": GATHER}
    return tiles(product, windows={**image, **strides, **grid, **pads})
