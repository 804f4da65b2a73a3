"""Matrix products with low-bit weights (`kernels/quantized.c`) and of bytes (`kernels/bytes.c`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from mlvm.core.machine.fused import Link
from mlvm.core.op import Attributes
from mlvm.core.types import TensorType, i8
from mlvm.machines.native._native import KernelCall
from mlvm.machines.native.planner import Types, kernel_call, planner
from mlvm.machines.native.planners.linalg import (
    MOST_PANELS,
    ProductChain,
    after,
    chained_call,
    scratch_behind,
)
from mlvm.machines.native.planners.windows import geometry

_WORDS: Final = 16  # 32-bit words of weights that the kernel processes together
_CACHE: Final = 1 << 18
"""Approximate bytes of x that are rearranged together."""
_UNIT: Final = 16
_COLUMNS: Final = 32
"""Rows of y per unit, for products of bytes."""


@planner("quantized_matmul")
def quantized_matmul(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    _, x, y, scale = types
    n, k = y.shape
    groups, per_word = scale.shape[1], 4 * y.dtype.per_byte
    words = k // groups / per_word
    if groups > 1 and words not in (2, 4, 8) and words % _WORDS:
        return None
    chunks = -(-k // (_WORDS * per_word))
    row = chunks * _WORDS * (per_word + 1) * 4
    m = math.prod(x.shape[:-1])
    many = m >= 16  # minimum rows of x for which low-bit weights are copied to panels
    # approximate bytes of x that are rearranged for panels
    at_once = max(4, min(m, ((1 << 20) if many else _CACHE) // (row + 1) // 4 * 4))
    unit, scratch, work = _UNIT, at_once * row, 0.02 * m
    if many:
        unit = _COLUMNS
        work = 0.1 + 0.006 * m
        # elements at one index, sums, words and scales of a panel
        scales = max(groups, chunks * _WORDS // 2 if groups > 1 else 0) * math.prod(scale.shape[2:])
        panel = chunks * (per_word + _WORDS) + _WORDS * (at_once + 8) + scales
        scratch += panel * _COLUMNS * 4
    integers = {"m": m, "n": n, "k": k, "groups": groups, "pairs": scale.ndim == 3}
    integers |= {"unit": unit, "at_once": at_once, "many": many}
    kernel, units = f"quantized_matmul_{y.dtype.name}", -(-n // unit)
    work = 50 + n * k * max(work, 0.025)
    return kernel_call(kernel, 4, units, work, integers, scratch=scratch)


@planner("integer_matmul", "integer_conv2d")
def integer_product(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    return _integer_call(types[0], types[1:], attributes, range(len(types)), None)


def integer_headed_call(links: Sequence[Link], types: Types) -> KernelCall | None:
    """Plan a chain that begins with a product or convolution of bytes.

    It works as `linalg.headed_call`.
    """
    head, *rest = links
    operands = [types[source] for source in head.sources]
    out = head.op.infer(operands, head.attributes)
    if out is None or not rest or not out.shape[-1:] or not out.size:
        return None
    chain = after(head, rest, out, types)
    if chain is None:
        return None
    places = (-1 if chain.out is None else chain.out, *head.sources)
    return _integer_call(out, operands, head.attributes, places, chain)


def _integer_call(
    out: TensorType,
    operands: Types,
    attributes: Attributes,
    places: Sequence[int],
    chain: ProductChain | None,
) -> KernelCall | None:
    """Plan a product of bytes.

    `places`: parameter numbers of the result and the operands; -1 for a product that only the chain
    reads.
    """
    x, y = operands[:2]
    n, groups, windows = out.shape[-1], 1, y.ndim == 4
    integers = dict(zip(("out", "x", "y", "x_zero", "y_zero"), places, strict=False))
    integers |= {"x_signed": x.dtype is i8, "y_signed": y.dtype is i8}
    if windows:
        groups = attributes["groups"]
        integers |= geometry(x.shape, out.shape[1:3], y.shape[1:3], attributes)
        plain = groups == 1 and {*y.shape[1:3], *attributes["stride"]} == {1}
        plain = plain and x.shape[:3] == out.shape[:3]
        if groups == x.shape[-1] == n > 1:
            return _depthwise(out, y, integers, chain)
        windows = not plain
    m, k = math.prod(out.shape[:-1]), math.prod(y.shape[1:])
    # Minimum rows of x for which rows of y are copied.
    many, row = m >= 32 or groups > 1, -(-k // 64) * 64 + 4
    if chain and not many:
        return None
    width = 4 * _COLUMNS * (-(-k // 4) + 1)  # bytes of panels
    panels = groups * -(-n // groups // _COLUMNS) if n else 1
    if panels * width > MOST_PANELS:
        if chain:
            return None
        panels = max(1, MOST_PANELS // width)
    at_once = _CACHE // (2 * row) // 8 * 8 if many else _CACHE // row // 4 * 4
    if chain:
        at_once = min(at_once, _CACHE // (4 * n))
    at_once = max(8, min(at_once, -(-m // 8) * 8))
    # Scratch: panels, then rows of x; or both as 16 bits; then for a chain its child's, and the
    # product.
    scratch = max(many * panels * width + at_once * (row + 8) + 64, 2 * (at_once + 8) * row)
    child_scratch = -(-scratch // 64) * 64
    product_scratch = scratch_behind(child_scratch, chain)
    # If units are rows, each thread gets several units, because each thread copies all panels.
    unit = max(16, -(-m // 16) // 8 * 8) if many else _COLUMNS
    integers |= {"m": m, "n": n, "k": k, "groups": groups, "windows": windows, "many": many}
    integers |= {"unit": unit, "at_once": at_once, "panels_at_once": panels}
    integers |= {"child_scratch": child_scratch, "product_scratch": product_scratch}
    k_work = n // groups * k * (0.002 if many else 0.004)
    work = 50 + groups * m * k_work + m * k * 0.05 * windows + n * k * (0.1 if many else 0.02)
    units, scratch = -(-(m if many else n) // unit), product_scratch + bool(chain) * at_once * n * 4
    kernels, nparams = ("integer_matmul", "integer_chain"), len(operands) + 1
    return chained_call(kernels, chain, nparams, units, work, integers, scratch)


def _depthwise(
    out: TensorType, y: TensorType, integers: dict[str, int], chain: ProductChain | None
) -> KernelCall | None:
    """Plan a depthwise convolution. A unit is a row of the result."""
    images, down, across, channels = out.shape
    window = math.prod(y.shape[1:])
    child_scratch = 4 * window * -(-channels // 32) * 32
    product_scratch = scratch_behind(child_scratch, chain)
    integers |= {"n": channels, "groups": channels}
    integers |= {"child_scratch": child_scratch, "product_scratch": product_scratch}
    kernels, work = ("integer_depthwise", "integer_depthwise_chain"), 50 + out.size * window * 0.03
    scratch = product_scratch + bool(chain) * across * channels * 4
    return chained_call(kernels, chain, 5, images * down, work, integers, scratch)
