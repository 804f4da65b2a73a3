"""Gather and scatter by indices and masks.

Sums by index are computed in the order of the updates: indices are sorted, and each element of the
result adds its updates.
"""

from __future__ import annotations

import math

import numpy as np

from mlvm.core.ops.strides import around, group_steps
from mlvm.core.rules import normalize_axis
from mlvm.core.types import DType, Shape, i64
from mlvm.machines.gpu.dtypes import RAW
from mlvm.machines.gpu.kernels import (
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
from mlvm.machines.gpu.merge_sort import sorted_rows, text_of
from mlvm.machines.gpu.reductions import adding, running


def _units(dtype: DType) -> tuple[str, int]:
    """Return the integer dtype for moving elements, and the number of integers per element."""
    return RAW[dtype.itemsize], max(dtype.itemsize // 8, 1)


def _text(elements: str, indices: DType | None = None, **more: str | int) -> str:
    defines: dict[str, str | int] = {"T": elements, **more}
    if indices is not None:
        defines |= {"I": indices.name, "SIGNED": int(indices.kind == "signed")}
    return source("indexing.c", **defines)


def _call(text: str, entry: str, args: tuple[Argument, ...], items: int, *numbers: int) -> Call:
    return flat_call(text, entry, items, args, items, *numbers)


def _calls_of_take(types: Types, axis: int, entry: str, *numbers: int) -> Calls:
    """Return the calls that read x at the indices along an axis; `numbers` follow the sizes."""
    out, x, indices = types
    unit, units = _units(x.dtype)
    _, length, behind = around(x.shape, axis)
    sizes = out.size * units, length, behind * units
    return [_call(_text(unit, indices.dtype), entry, (0, 1, 2, REFUSED), *sizes, *numbers)]


@kernel("take", judges=2)
def _take(device: Facts, types: Types, *, axis: int) -> Calls:
    return _calls_of_take(types, axis, "take", types[2].size)


@kernel("flat_indices", judges=1)
def _flat_indices(device: Facts, types: Types, *, lengths: Shape) -> Calls:
    out, *indices = types
    return [
        _call(_text("i64", x.dtype), "flat_indices", (0, 1 + i, REFUSED), out.size, length, i)
        for i, (x, length) in enumerate(zip(indices, lengths, strict=True))
    ]


@kernel("take_along_axis", judges=2)
def _take_along_axis(device: Facts, types: Types, *, axis: int) -> Calls:
    _, x, indices = types
    numbers = around(indices.shape, axis)[1], _units(x.dtype)[1]
    return _calls_of_take(types, axis, "take_along_axis", *numbers)


@kernel("weighted_take", judges=2, computes=True)
def _weighted_take(device: Facts, types: Types) -> Calls:
    out, x, indices, _ = types
    _, points, many = indices.shape
    numbers = (x.shape[1], x.shape[2], points, many, int(indices.shape[0] == 1))
    text = _text(x.dtype.name, indices.dtype)
    return [_call(text, "weighted_take", (0, 1, 2, 3, REFUSED), out.size, *numbers)]


@kernel("one_hot", judges=1, computes=True)
def _one_hot(device: Facts, types: Types, *, num_classes: int, dtype: str) -> Calls:
    out, indices = types
    text = _text(out.dtype.name, indices.dtype)
    return [_call(text, "one_hot", (0, 1, REFUSED), out.size, num_classes)]


@kernel("dynamic_update", judges=3)
def _dynamic_update(device: Facts, types: Types, *, axis: int) -> Calls:
    out, x, update, start = types
    unit, units = _units(x.dtype)
    _, length, behind = around(x.shape, axis)
    args = (0, 1, 2, 3, REFUSED)
    numbers = (length, behind * units, update.shape[axis])
    text = _text(unit, start.dtype)
    return [_call(text, "dynamic_update", args, out.size * units, *numbers)]


@kernel("index_set", judges=3)
def _index_set(device: Facts, types: Types, *, axis: int, axes: int) -> Calls:
    out, x, values, indices = types
    axis = normalize_axis(axis, max(x.ndim, 1))
    before, behind = x.shape[:axis], x.shape[axis + axes :]
    length = math.prod(x.shape[axis : axis + axes])
    steps = group_steps(values.shape, (before, indices.shape, behind))
    if steps is None:
        return None
    unit, units = _units(x.dtype)
    if units > 1 and steps[2] == 0 and math.prod(behind) > 1:
        return None
    inner = 1 if units > 1 else steps[2]
    last = Scratch("last", 4 * max(length, 1))
    text, count = _text(unit, indices.dtype), indices.size
    most = np.int32(2**31 - 1)
    calls = [flat_call(_text("u8"), "fill_i32", length, (last,), length, most)]
    if count:
        calls.append(_call(text, "last_index", (last, 3, REFUSED), count, length))
    numbers = (length, math.prod(behind) * units, count, steps[0] * units, steps[1] * units, inner)
    calls.append(_call(text, "index_set", (0, 1, 2, last), out.size * units, *numbers))
    return calls


# --- sums by index --------------------------------------------------------------------


@kernel("scatter_add", judges=2)
@kernel("index_add", judges=3)
def _index_add(device: Facts, types: Types, *, axis: int, length: int = 0) -> Calls:
    return _adds(device, types, axis)


@kernel("index_reduce", judges=3)
def _index_reduce(device: Facts, types: Types, *, by: str) -> Calls:
    if types[0].dtype.kind == "complex":
        return None
    return _adds(device, types, 0, by=("add", "multiply", "minimum", "maximum").index(by))


@kernel("scatter_add_along_axis", judges=2)
def _scatter_add_along_axis(device: Facts, types: Types, *, axis: int, length: int) -> Calls:
    return _adds(device, types, axis, along=True)


def _adds(device: Facts, types: Types, axis: int, *, along: bool = False, by: int = 0) -> Calls:
    """Sum updates by index.

    The second-to-last operand contains the updates, and the last operand the indices. With three
    operands, the sums are added to the first operand. `along`: each row along the axis has separate
    indices.
    """
    out, index_type = types[0], types[-1]
    updates, indices = len(types) - 2, len(types) - 1
    starts = int(len(types) == 4)
    before, length, behind = around(out.shape, axis)
    parts = 2 if out.dtype.kind == "complex" else 1  # real and imaginary parts are added separately
    dtype = DType.named("f32" if out.dtype.itemsize == 8 else "f64") if parts == 2 else out.dtype
    if not device.has(dtype):
        return None
    rows = before * behind if along else 1
    count = index_type.size // max(rows, 1)
    mark = parts if along else 0
    text = _text(dtype.name, index_type.dtype, ADDS=starts, BY=by)
    numbers = (length, behind * parts, count, mark)
    if count <= 32:  # maximum number of indices that an element of a result scans
        args = (0, starts, updates, indices, REFUSED)
        return [_call(text, "add_few", args, out.size * parts, *numbers)]
    if count > 2**31 - 1:
        return None
    places = Scratch("places", 8 * index_type.size)
    each = (before, count, behind) if along else (1, count, 1)
    calls, keys, order = sorted_rows(places, i64, each, text_of(i64, i64))
    return [
        _call(text, "places", (places, indices, REFUSED), index_type.size, length),
        *calls,
        _call(text, "add_sorted", (0, starts, updates, keys, order), out.size * parts, *numbers),
    ]


# --- by masks -------------------------------------------------------------------------


@kernel("mask_scatter", judges=2)
@kernel("mask_set", judges=3)
def _masked(device: Facts, types: Types, **_: Shape) -> Calls:
    """Replace elements where a mask is true by values.

    All other elements are zero, or come from the first of three operands.
    """
    out, values, mask = types[0], types[-2], types[-1]
    begin, number, mask_number = range(len(types) - 3, len(types))
    behind, count = out.shape[mask.ndim :], values.shape[0]
    steps = group_steps(values.shape, ((count,), behind))
    unit, units = _units(out.dtype)
    if not mask.size or steps is None or (units > 1 and steps[1] == 0 and math.prod(behind) > 1):
        return None
    ranks = Scratch("ranks", 8 * mask.size)
    sums = running(device, adding(i64), (ranks, "i64"), (mask_number, "bool"), (1, mask.size, 1))
    text = _text(unit, MASKED=int(begin == 0))
    args = (0, begin, number, mask_number, ranks, REFUSED)
    inner = 1 if units > 1 else steps[1]
    numbers = (mask.size, math.prod(behind) * units, count, steps[0] * units, inner)
    return [*sums, _call(text, "mask_set", args, out.size * units, *numbers)]
