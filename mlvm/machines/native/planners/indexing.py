"""Elements chosen by tensors: `kernels/indexing.c`.

Every plan has a unit at least, which looks at the indices.
"""

from __future__ import annotations

import math

from mlvm.core.op import Attributes
from mlvm.core.rules import normalize_axis
from mlvm.core.types import DType, Shape
from mlvm.machines.native._native import Plan
from mlvm.machines.native.elements import integer_kind, numbers, pattern
from mlvm.machines.native.planner import Types, twin


@twin("take")
def take(types: Types, attributes: Attributes) -> Plan:
    out, x, indices = types
    axis = normalize_axis(attributes["axis"], x.ndim)
    before, length, behind = _split(x.shape, axis)
    size = x.dtype.itemsize
    if behind == 1 and size <= 8:
        kernel, width = f"take_{size}", size
    else:
        kernel, width = "take_rows", behind * size
    return _rows(kernel, indices.dtype, before, indices.size, length, width, out.nbytes)


@twin("dynamic_update")
def dynamic_update(types: Types, attributes: Attributes) -> Plan:
    out, _, update, start = types
    axis = normalize_axis(attributes["axis"], out.ndim)
    before, length, behind = _split(out.shape, axis)
    ints = [integer_kind(start.dtype), before, update.shape[axis], length]
    return Plan(
        "update_rows",
        4,
        [*ints, behind * out.dtype.itemsize],
        units=max(1, before),
        work=before * 2 + update.nbytes / 20,
    )


@twin("take_along_axis")
def take_along_axis(types: Types, attributes: Attributes) -> Plan:
    out, x, indices = types
    axis = normalize_axis(attributes["axis"], x.ndim)
    before, length, behind = _split(x.shape, axis)
    kernel, work = f"take_along_{x.dtype.itemsize}", out.size * 15
    return _rows(kernel, indices.dtype, before, indices.shape[axis], length, behind, work)


def _rows(
    kernel: str, kind: DType, before: int, count: int, length: int, behind: int, work: int
) -> Plan:
    """A unit is a number of the rows before * count, of `behind` bytes or elements."""
    piece = max(1, 4096 // max(1, behind))
    return Plan(
        kernel,
        3,
        [integer_kind(kind), before, count, length, behind, piece],
        units=max(1, -(-before * count // piece)),
        work=before * count * 2 + work / 10,
    )


@twin("scatter_add")
def scatter_add(types: Types, attributes: Attributes) -> Plan:
    axis = normalize_axis(attributes["axis"], types[0].ndim)
    return _columns("scatter_add", types, axis, types[2].size)


@twin("index_add")
def index_add(types: Types, attributes: Attributes) -> Plan:
    out, _, updates, indices = types
    axis = normalize_axis(attributes["axis"], out.ndim)
    return _columns("index_add", (out, updates, indices), axis, indices.size)


@twin("scatter_add_along_axis")
def scatter_add_along_axis(types: Types, attributes: Attributes) -> Plan:
    axis = normalize_axis(attributes["axis"], types[0].ndim)
    return _columns("scatter_along", types, axis, types[2].shape[axis])


def _columns(kernel: str, types: Types, axis: int, count: int) -> Plan:
    """A unit is a number of the columns behind the axis."""
    out, updates, indices = types
    before, length, behind = _split(out.shape, axis)
    piece = 64 // out.dtype.itemsize
    each = 2 if kernel == "scatter_along" else 0.3
    started = 0 if kernel == "index_add" else out.nbytes  # which mostly is its operand
    return Plan(
        f"{kernel}_{numbers(out.dtype)}",
        4 if kernel == "index_add" else 3,
        [integer_kind(indices.dtype), before, count, length, behind, piece],
        units=max(1, before * -(-behind // piece)),
        work=before * count * 2 + updates.size * each + started / 20,
    )


def _split(shape: Shape, axis: int) -> tuple[int, int, int]:
    """The sizes of what lies before an axis, along it and behind it."""
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])


@twin("one_hot")
def one_hot(types: Types, attributes: Attributes) -> Plan:
    out, indices = types
    size, classes = out.dtype.itemsize, attributes["num_classes"]
    high = max(1, 16384 // max(1, classes * size))
    ints = [integer_kind(indices.dtype), indices.size, high, classes, size, pattern(1, out.dtype)]
    units = max(1, -(-indices.size // high))
    return Plan("one_hot", 2, ints, units=units, work=indices.size * 2 + out.nbytes / 20)


@twin("mask_scatter")
def mask_scatter(types: Types, attributes: Attributes) -> Plan:
    out, updates, mask = types
    width = math.prod(out.shape[mask.ndim :]) * out.dtype.itemsize
    high = max(64, 16384 // max(1, width))
    ints = [mask.size, high, updates.shape[0], width]
    units = max(1, -(-mask.size // high))
    return Plan("mask_scatter", 3, ints, units=units, work=mask.size * 3 + out.nbytes / 10)
