"""Indexing by tensors: `kernels/indexing.c`.

Every call has at least one unit, which checks the indices.
"""

from __future__ import annotations

import math

from mlvm.core.memo import memoized
from mlvm.core.op import Attributes
from mlvm.core.ops.strides import around, group_steps
from mlvm.core.rules import normalize_axis
from mlvm.core.types import TensorType
from mlvm.machines.native._native import KernelCall
from mlvm.machines.native.elements import integer_kind, numbers, pattern
from mlvm.machines.native.planner import Types, kernel_call, planner


@planner("take")
def take(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    out, x, indices = types
    sizes = _split(x, attributes)
    sizes["behind"] *= x.dtype.itemsize
    return _rows("take", indices, indices.size, out.nbytes, sizes)


@planner("flat_indices")
def flat_indices(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    out, *indices = types
    piece, count = 4096, len(indices)
    sizes = {"count": out.size, "piece": piece, "updates": count}
    kinds = [integer_kind(x.dtype) for x in indices]
    rest = [n for pair in zip(kinds, attributes["lengths"], strict=True) for n in pair]
    units, work = max(1, -(-out.size // piece)), out.size * count * 1.5
    return kernel_call("flat_indices", 1 + count, units, work, sizes, rest=rest)


@planner("take_along_axis")
def take_along_axis(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    out, x, indices = types
    count = _split(indices, attributes)["length"]
    kernel, sizes = f"take_along_{x.dtype.itemsize}", _split(x, attributes)
    return _rows(kernel, indices, count, out.size * 15, sizes)


@planner("weighted_take")
def weighted_take(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    """Plan `weighted_take`. A unit is some rows of the result."""
    _, x, indices, _ = types
    if x.dtype.name not in ("f32", "f64"):
        return None
    (many, count, taps), (n, length, behind) = indices.shape, x.shape
    piece = max(1, 4096 // max(1, taps * behind))
    sizes = {"kind": integer_kind(indices.dtype), "before": n, "count": count, "length": length}
    sizes |= {"behind": behind, "piece": piece, "updates": taps, "one": int(many == 1)}
    units = max(1, n * -(-count // piece))
    work = n * count * taps * (behind * 0.3 + 3)
    return kernel_call(f"weighted_take_{x.dtype.name}", 4, units, work, sizes)


def _rows(
    kernel: str, indices: TensorType, count: int, work: int, sizes: dict[str, int]
) -> KernelCall | None:
    """Plan units of some of the before * count rows of `behind` bytes or elements."""
    piece, rows = max(1, 4096 // max(1, sizes["behind"])), sizes["before"] * count
    sizes |= {"kind": integer_kind(indices.dtype), "count": count, "piece": piece}
    return kernel_call(kernel, 3, max(1, -(-rows // piece)), rows * 2 + work / 10, sizes)


@planner("dynamic_update")
def dynamic_update(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    out, _, update, start = types
    sizes, count = _split(out, attributes), _split(update, attributes)["length"]
    sizes["behind"] *= out.dtype.itemsize
    sizes |= {"kind": integer_kind(start.dtype), "count": count}
    before = sizes["before"]
    return kernel_call("update_rows", 4, max(1, before), before * 2 + update.nbytes / 20, sizes)


@planner("scatter_add", "index_add", "scatter_add_along_axis")
def add(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    """Plan a scatter-add. A unit is a number of columns after the axis."""
    out, *_, updates, indices = types
    along, sizes = op == "scatter_add_along_axis", _split(out, attributes)
    count = _split(indices, attributes)["length"] if along else indices.size
    piece, before = 64 // out.dtype.itemsize, sizes["before"]
    started = 0 if op == "index_add" else out.nbytes  # index_add works in place
    units = max(1, before * -(-sizes["behind"] // piece))
    work = before * count * 2 + updates.size * (2 if along else 0.3) + started / 20
    sizes |= {"kind": integer_kind(indices.dtype), "count": count, "piece": piece}
    kernel = f"{'scatter_along' if along else op}_{numbers(out.dtype)}"
    return kernel_call(kernel, len(types), units, work, sizes)


@planner("index_reduce")
def index_reduce(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    """Plan `index_reduce` along axis 0. A unit is a number of columns after this axis."""
    out, _, updates, indices = types
    sizes, piece = _split(out, {"axis": 0}), 64 // out.dtype.itemsize
    by = ("multiply", "minimum", "maximum").index(attributes["by"])
    sizes |= {"kind": integer_kind(indices.dtype), "count": indices.size, "piece": piece, "by": by}
    units = max(1, -(-sizes["behind"] // piece))
    work = indices.size * 2 + updates.size * 0.3
    return kernel_call(f"{op}_{out.dtype.name}", 4, units, work, sizes)


@planner("index_set")
def index_set(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    """Plan `index_set`; a unit writes a piece of the bytes after the axes.

    The reference kernel runs if the values broadcast along only some axes of a part: those before,
    those of the indices, or those after."""
    out, _, values, indices = types
    axis, size = normalize_axis(attributes["axis"], max(out.ndim, 1)), out.dtype.itemsize
    end = axis + attributes["axes"]
    parts = out.shape[:axis], indices.shape, out.shape[end:]
    steps = group_steps(values.shape, parts)
    if steps is None:
        return None
    before, length, behind = map(math.prod, (parts[0], out.shape[axis:end], parts[2]))
    count, piece = indices.size, 64
    sizes = {"kind": integer_kind(indices.dtype), "count": count, "piece": piece, "before": before}
    sizes |= {"length": length, "behind": behind * size, "size": 0 if steps[2] else size}
    sizes |= {"step_before": steps[0] * size, "step_count": steps[1] * size}
    units = max(1, before * -(-behind * size // piece))
    work = before * count * (3 + behind * size / 20)
    return kernel_call("index_set", 4, units, work, sizes)


def _split(x: TensorType, attributes: Attributes) -> dict[str, int]:
    """Return the number of elements before the axis, along it and after it, by name."""
    return dict(
        zip(("before", "length", "behind"), around(x.shape, attributes["axis"]), strict=True)
    )


@planner("one_hot")
def one_hot(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    out, indices = types
    size, classes, count = out.dtype.itemsize, attributes["num_classes"], indices.size
    piece = max(1, 16384 // max(1, classes * size))
    element = {"length": classes, "size": size, "one": pattern(1, out.dtype)}
    rows = {"kind": integer_kind(indices.dtype), "count": count, "piece": piece}
    units, work = max(1, -(-count // piece)), count * 2 + out.nbytes / 20
    return kernel_call("one_hot", 2, units, work, {**rows, **element})


@planner("mask_scatter", "mask_set")
def masked(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    out, *_, updates, mask = types
    covered, row = out.shape[: mask.ndim], out.shape[mask.ndim :]
    if mask.shape != covered or updates.shape[1:] != row:  # numpy handles filling and broadcasting
        return None
    width = math.prod(row) * out.dtype.itemsize
    return _masked("masked", len(types), mask.size, updates.shape[0], width)


@memoized(256)
def boolean_index(count: int, width: int) -> KernelCall | None:
    """Plan a call that copies rows of `width` bytes where a mask is True.

    The parameters are a result with `count` rows, x, and a mask of `count` elements that must not
    change during the call.
    """
    return _masked("boolean_index", 3, count, 0, width)


def _masked(kernel: str, nparams: int, count: int, updates: int, width: int) -> KernelCall | None:
    piece = max(64, 16384 // max(1, width))
    rows = {"count": count, "piece": piece, "updates": updates, "behind": width}
    units, work = max(1, -(-count // piece)), count * (3 + width / 10)
    return kernel_call(kernel, nparams, units, work, rows)
