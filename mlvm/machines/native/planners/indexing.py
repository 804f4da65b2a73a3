"""Elements chosen by tensors: `kernels/indexing.c`.

Every call has a unit at least, which looks at the indices.
"""

from __future__ import annotations

import math

from mlvm.core.op import Attributes
from mlvm.core.rules import normalize_axis
from mlvm.core.types import DType, TensorType
from mlvm.machines.native._native import KernelCall
from mlvm.machines.native.elements import integer_kind, numbers, pattern
from mlvm.machines.native.planner import Types, kernel_call, planner


@planner("take")
def take(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    out, x, indices = types
    before, length, behind = _split(x, attributes)
    size = x.dtype.itemsize
    if behind == 1 and size <= 8:
        kernel, width = f"take_{size}", size
    else:
        kernel, width = "take_rows", behind * size
    return _rows(kernel, indices.dtype, before, indices.size, length, width, out.nbytes)


@planner("dynamic_update")
def dynamic_update(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    out, _, update, start = types
    before, length, behind = _split(out, attributes)
    return kernel_call(
        "update_rows",
        4,
        kind=integer_kind(start.dtype),
        before=before,
        count=_split(update, attributes)[1],
        length=length,
        behind=behind * out.dtype.itemsize,
        units=max(1, before),
        work=before * 2 + update.nbytes / 20,
    )


@planner("take_along_axis")
def take_along_axis(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    out, x, indices = types
    before, length, behind = _split(x, attributes)
    kernel, count = f"take_along_{x.dtype.itemsize}", _split(indices, attributes)[1]
    return _rows(kernel, indices.dtype, before, count, length, behind, out.size * 15)


def _rows(
    kernel: str, kind: DType, before: int, count: int, length: int, behind: int, work: int
) -> KernelCall | None:
    """A unit is a number of the rows before * count, of `behind` bytes or elements."""
    piece = max(1, 4096 // max(1, behind))
    return kernel_call(
        kernel,
        3,
        kind=integer_kind(kind),
        before=before,
        count=count,
        length=length,
        behind=behind,
        piece=piece,
        units=max(1, -(-before * count // piece)),
        work=before * count * 2 + work / 10,
    )


@planner("scatter_add", "index_add", "scatter_add_along_axis")
def add(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    """A unit is a number of the columns behind the axis."""
    out, *_, updates, indices = types
    before, length, behind = _split(out, attributes)
    along = op == "scatter_add_along_axis"
    count = _split(indices, attributes)[1] if along else indices.size
    piece = 64 // out.dtype.itemsize
    started = 0 if op == "index_add" else out.nbytes  # which mostly is its operand
    return kernel_call(
        f"{'scatter_along' if along else op}_{numbers(out.dtype)}",
        len(types),
        kind=integer_kind(indices.dtype),
        before=before,
        count=count,
        length=length,
        behind=behind,
        piece=piece,
        units=max(1, before * -(-behind // piece)),
        work=before * count * 2 + updates.size * (2 if along else 0.3) + started / 20,
    )


def _split(x: TensorType, attributes: Attributes) -> tuple[int, int, int]:
    """The sizes of what lies before the axis, along it and behind it."""
    axis = normalize_axis(attributes["axis"], x.ndim)
    return math.prod(x.shape[:axis]), x.shape[axis], math.prod(x.shape[axis + 1 :])


@planner("one_hot")
def one_hot(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    out, indices = types
    size, classes = out.dtype.itemsize, attributes["num_classes"]
    high = max(1, 16384 // max(1, classes * size))
    return kernel_call(
        "one_hot",
        2,
        kind=integer_kind(indices.dtype),
        count=indices.size,
        piece=high,
        length=classes,
        size=size,
        one=pattern(1, out.dtype),
        units=max(1, -(-indices.size // high)),
        work=indices.size * 2 + out.nbytes / 20,
    )


@planner("mask_scatter")
def mask_scatter(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    out, updates, mask = types
    width = math.prod(out.shape[mask.ndim :]) * out.dtype.itemsize
    high = max(64, 16384 // max(1, width))
    return kernel_call(
        "mask_scatter",
        3,
        count=mask.size,
        piece=high,
        updates=updates.shape[0],
        behind=width,
        units=max(1, -(-mask.size // high)),
        work=mask.size * 3 + out.nbytes / 10,
    )
