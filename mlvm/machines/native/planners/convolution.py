"""Convolution as a product: `kernels/linalg.c` gathers the windows, row by row of it."""

from __future__ import annotations

import math

from mlvm.core.op import Attributes
from mlvm.machines.native._native import Plan
from mlvm.machines.native.planner import Types, twin
from mlvm.machines.native.planners.linalg import Matrix, Product, float_dtype, plan, tiles


@twin("conv2d")
def conv2d(types: Types, attributes: Attributes) -> Plan | None:
    out, x, kernel = types
    dtype = float_dtype(x, kernel)
    if dtype is None:
        return None
    _, height, width, channels = x.shape
    window, stride = kernel.shape[:2], attributes["stride"]
    (top, bottom), (left, right) = attributes["padding"]
    inner, outputs = math.prod(kernel.shape[:3]), kernel.shape[3]
    places = Matrix(math.prod(out.shape[:3]), inner, inner, 1)
    product = Product(dtype, places, Matrix(inner, outputs, outputs, 1))
    if window == (1, 1) and stride == (1, 1) and not any((top, bottom, left, right)):
        return plan(product)
    windows = (height, width, channels, window[1], *stride, top, left, *out.shape[1:3])
    return tiles(product, windows=windows)
