"""Reordering and moving of elements: `kernels/layout.c`."""

from __future__ import annotations

import itertools
import math

from mlvm.core.op import Attributes
from mlvm.core.rules import normalize_axes, normalize_axis
from mlvm.core.types import Shape
from mlvm.machines.native._native import COPY_UNIT, MOST_PARAMETERS, KernelCall
from mlvm.machines.native.boxes import Boxes, Strides, moved, strides
from mlvm.machines.native.elements import numbers, pattern
from mlvm.machines.native.planner import Types, kernel_call, planner


@planner("copy", "reshape")
def copy(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    nbytes = types[0].nbytes
    integers = {"bytes": nbytes, "reads": 1}
    return kernel_call("copy", 2, -(-nbytes // COPY_UNIT), nbytes / 10, integers)


@planner("permute_dims")
def permute_dims(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    out, x = types
    into = strides(x)
    return moved(out, tuple([into[i] for i in attributes["axes"]]))


@planner("pack_panels")
def pack_panels(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    out, y = types
    _, rows, wide, side = out.shape
    n = y.shape[0 if attributes["transpose_y"] else -1]
    size, k = y.dtype.itemsize, y.size // max(n, 1)
    if rows * side != k:
        return None
    of_k, of_n = (size, k * size) if attributes["transpose_y"] else (n * size, size)
    to, into = strides(out), (wide * of_n, side * of_k, of_n, of_k)
    (whole, remainder), boxes = divmod(n, wide), Boxes(size)
    boxes.copy((whole, rows, wide, side), to, into)
    if remainder:
        at = whole * to[0]
        boxes.copy((rows, remainder, side), to[1:], into[1:], out_at=at, in_at=whole * into[0])
        boxes.fill((rows, wide - remainder, side), to[1:], 0, at + remainder * to[2])
    return boxes.call()


@planner("flip")
def flip(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    x = types[1]
    axes, where = normalize_axes(attributes["axis"], x.ndim), strides(x)
    into = tuple([-by if i in axes else by for i, by in enumerate(where)])
    return moved(x, into, sum((x.shape[i] - 1) * where[i] for i in axes))


@planner("slice")
def slice_(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    out, x = types
    where = strides(x)
    return moved(out, _times(where, attributes["step"]), _sum(where, attributes["start"]))


@planner("concat")
def concat(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    out, *xs = types
    if any(x.dtype is not out.dtype for x in xs) or len(xs) > MOST_PARAMETERS - 2:
        return None
    axis = normalize_axis(attributes["axis"], out.ndim)
    where, at = strides(out), 0
    boxes = Boxes(out.dtype.itemsize, len(xs))
    for i, x in enumerate(xs):
        boxes.copy(x.shape, where, strides(x), out_at=at, reads=1 + i)
        at += x.shape[axis] * where[axis]
    return boxes.call()


@planner("roll")
def roll(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    x, shift, axis = types[1], attributes["shift"], attributes["axis"]
    if axis is None:
        x = x.with_shape((x.size,))
    axes = normalize_axes(axis, x.ndim)
    if len(axes) > 4:  # maximum axes of `roll`: each axis doubles the number of boxes
        return None
    each = shift if isinstance(shift, tuple) else [shift] * len(axes)
    shifts = dict(zip(axes, each, strict=True))
    where, boxes = strides(x), Boxes(x.dtype.itemsize)
    # Along an axis rolled by s, the first n - s elements go to s, and the last s to 0.
    for parts in itertools.product(*[_halves(n, shifts.get(i, 0)) for i, n in enumerate(x.shape)]):
        shape, to, at = zip(*parts, strict=True) if parts else ((), (), ())
        out_at, in_at = _sum(to, where), _sum(at, where)
        boxes.copy(shape, where, where, out_at=out_at, in_at=in_at)
    return boxes.call()


def _halves(n: int, shift: int) -> list[tuple[int, int, int]]:
    """Return (length, target, source) of the one or two runs of a rolled axis of length n."""
    shift = shift % n if n else 0
    return [(n - shift, shift, 0), (shift, 0, n - shift)] if shift else [(n, 0, 0)]


@planner("pad")
def pad(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    x = types[1]
    start = tuple([before for before, _ in attributes["widths"]])
    return _embedded(types, start, (1,) * x.ndim, pattern(attributes["value"], x.dtype))


@planner("embed")
def embed(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    return _embedded(types, attributes["start"], attributes["step"], 0)


def _embedded(types: Types, start: Shape, step: tuple[int, ...], value: int) -> KernelCall | None:
    """Plan x in a window of the result, the value around it."""
    out, x = types
    where, boxes = strides(out), Boxes(x.dtype.itemsize)
    boxes.fill_around(out, start, x.shape, step, value)
    boxes.copy(x.shape, _times(where, step), strides(x), out_at=_sum(where, start))
    return boxes.call()


@planner("slice_add")
def slice_add(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    out, _, updates = types
    start, step = attributes["start"], attributes["step"]
    where, boxes = strides(out), Boxes(out.dtype.itemsize, 2)
    boxes.fill_around(out, start, updates.shape, step, None)
    to, out_at, number = _times(where, step), _sum(where, start), numbers(out.dtype)
    boxes.add(updates.shape, to, strides(updates), out_at=out_at, reads=2, number=number)
    return boxes.call()


@planner("slice_set")
def slice_set(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    out, _, values = types
    start, length, step = attributes["start"], attributes["length"], attributes["step"]
    where, boxes = strides(out), Boxes(out.dtype.itemsize, 2)
    packed = zip(values.shape, strides(values), strict=True)
    into = (0,) * out.ndim + tuple([by if n != 1 else 0 for n, by in packed])
    into = into[len(into) - out.ndim :]
    boxes.fill_around(out, start, length, step, None)
    boxes.copy(length, _times(where, step), into, out_at=_sum(where, start), reads=2)
    return boxes.call()


def _times(where: Strides, step: tuple[int, ...]) -> Strides:
    return tuple([distance * by for distance, by in zip(where, step, strict=True)])


def _sum(where: Strides, at: Shape) -> int:
    return sum([distance * i for distance, i in zip(where, at, strict=True)])


@planner("tril", "triu")
def triangle(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    x, k, above = types[0], attributes["k"], op == "triu"
    rows, columns = x.shape[-2:]
    size, width = x.dtype.itemsize, columns * x.dtype.itemsize
    high = max(1, 16384 // max(1, width))
    count = math.prod(x.shape[:-1]) if width else 0
    diagonal = max(-rows, min(k if above else k + 1, columns))
    of_rows = {"width": width, "size": size, "rows": rows, "rows_in_all": count, "tile_rows": high}
    units, work = -(-count // high), count * 8 + x.nbytes / 10
    integers = {**of_rows, "diagonal": diagonal, "above": above}
    return kernel_call("triangle", 2, units, work, integers)
