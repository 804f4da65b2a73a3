"""Reductions: `kernels/reduction.c`."""

from __future__ import annotations

from typing import Final, NamedTuple

from mlvm.core.op import Attributes
from mlvm.core.ops.strides import around
from mlvm.core.rules import Axis, normalize_axes
from mlvm.core.types import DType, Shape, bool_, i64, u8, u64
from mlvm.machines.native._native import REDUCTION_WIDEST, KernelCall
from mlvm.machines.native.planner import Types, kernel_call, planner

_UNITS: Final = 32
"""Minimum number of units if dividing the work is worthwhile: two, three or five threads get nearly
equal shares."""
_PART: Final = 8192  # minimum elements in a part of an output


class Axes(NamedTuple):
    """Shape as kept, reduced, kept, reduced, kept axes, after merging adjacent axes."""

    outer: int
    rows: int
    middle: int
    length: int
    inner: int


def collapsed(shape: Shape, axes: tuple[int, ...]) -> Axes | None:
    """Merge adjacent axes of the same kind and drop axes of length 1.

    Return None if more than five axes remain.
    """
    lengths = [1]
    for i, n in enumerate(shape):
        if n == 1:
            continue
        if (i in axes) == (len(lengths) % 2 == 0):
            lengths[-1] *= n
        else:
            lengths.append(n)
    if len(lengths) % 2 == 0:
        lengths.append(1)
    at, missing = len(lengths) // 2, 5 - len(lengths)
    lengths[at:at] = [1] * missing
    return Axes(*lengths) if missing >= 0 else None


def reduction(
    kernel: str,
    types: Types,
    axis: Axis,
    *,
    floats: tuple[float, ...] = (),
    scratch: int = 0,
    shared: int,
    ns: float = 1,
    exact: bool = False,
) -> KernelCall | None:
    """Plan a call of reduction.c.

    `scratch`, `shared`: bytes per column of a block, and per result of a part.
    `ns`: time per element, relative to a sum.
    `exact`: the bits of a result do not depend on the division. Otherwise the division must not
    depend on the other results.
    """
    out, x = types[0], types[1]
    axes = collapsed(x.shape, normalize_axes(axis, x.ndim))
    if axes is None or not x.size or axes.length >= 2**31:
        return None
    outer, rows, middle, length, inner = axes
    width = min(inner, REDUCTION_WIDEST)
    blocks = -(-inner // width)
    part_rows, part_length = rows, length
    others = 1 if exact else outer
    parts_wanted = _UNITS * others // (outer * middle * blocks)
    if parts_wanted > 1 and x.size >= 2 * _PART * others:
        size = max(-(-_PART // width), -(-rows * length // parts_wanted))
        if size >= length:
            part_rows = -(-size // length)
        else:
            multiple = 1024 if inner == 1 else 32
            part_rows, part_length = 1, -(-size // multiple) * multiple
    parts_of_length = -(-length // part_length)
    parts = -(-rows // part_rows) * parts_of_length
    many = parts > 1 and outer * middle * blocks > _UNITS // 2  # enough units without division
    outputs = (1 if many else outer) * middle
    stride, contiguous = middle * length * inner, rows == parts == blocks == 1
    of_x = {"outputs": outputs, "length": length, "inner": inner, "middle": middle}
    of_part = {"part_rows": part_rows, "part_length": part_length, "blocks": blocks, "width": width}
    integers = {**of_x, "rows_outer": rows, "stride": stride, "contiguous": contiguous}
    integers |= {**of_part, "parts": parts, "parts_of_length": parts_of_length}
    units, work = outputs * parts * blocks, ns * (x.nbytes * 0.02 + outer * middle * inner * 2)
    scratch *= REDUCTION_WIDEST
    shared *= outputs * parts * inner if parts > 1 else 0
    call = kernel_call(kernel, 2, units, work, integers, floats, scratch=scratch, shared=shared)
    if call is None or not many:
        return call
    shared_at = -(-scratch // 64) * 64
    strides = {"out_bytes": out.nbytes // outer, "x_bytes": x.nbytes // outer}
    integers, scratch = {**strides, "shared_at": shared_at}, shared_at + shared
    return kernel_call("each", 2, outer, work, integers, scratch=scratch, children=[call])


def _sum_kernel(op: str, types: Types) -> str:
    """Return the kernel that adds or multiplies elements of x in the result dtype."""
    out, x = types[0].dtype, types[1].dtype
    if x is out and x.is_float:
        return f"{op}_{x.name}"
    if out in (i64, u64) and not x.is_float:  # both wrap modulo 2^64, so they share a kernel
        return f"{op}_{_bytes(x).name}"
    return f"{op}_{x.name}_{out.name}"


def _bytes(dtype: DType) -> DType:
    return u8 if dtype is bool_ else dtype


@planner("prod")
@planner("sum", "mean", halves="sum")
def sum(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    kernel, size = _sum_kernel("prod" if op == "prod" else "sum", types), types[0].dtype.itemsize
    divisor = types[1].size // max(1, types[0].size) if op == "mean" else 1
    axis, floats = attributes["axis"], (divisor,)  # a product ignores the divisor
    return reduction(kernel, types, axis, floats=floats, shared=size)


@planner("var")
def var(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    dtype, count = types[1].dtype, types[1].size // max(1, types[0].size)
    floats, size = (count, max(0, count - attributes["correction"])), dtype.itemsize
    axis, kernel = attributes["axis"], f"var_{dtype.name}"
    return reduction(kernel, types, axis, floats=floats, scratch=size, shared=2 * size, ns=3)


@planner("max", "min")
def extreme(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    dtype, size = _bytes(types[1].dtype), types[1].dtype.itemsize
    return reduction(f"{op}_{dtype.name}", types, attributes["axis"], shared=size)


@planner("argmax", "argmin")
def position(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    dtype, size = _bytes(types[1].dtype), types[1].dtype.itemsize
    kernel, axis = f"{op}_{dtype.name}", attributes["axis"]
    return reduction(kernel, types, axis, scratch=size + 4, shared=8, ns=2, exact=True)


@planner("all", "any")
def decision(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    x = types[1].dtype
    kernel = f"{op}_{x.name}" if x.is_float else f"{op}_u{8 * x.itemsize}"
    return reduction(kernel, types, attributes["axis"], shared=1)


@planner("cumulative_sum", "cumulative_prod")
def cumulative(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    x = types[1]
    if not x.size:
        return None
    rows, length, inner = around(x.shape, attributes["axis"] or 0)
    width = min(inner, REDUCTION_WIDEST)
    units, work = rows * -(-inner // width), x.size if inner > 1 else 1.5 * x.size
    integers = {"length": length, "inner": inner, "width": width}
    return kernel_call(_sum_kernel(op, types), 2, units, work, integers)
