"""Elements in another order, or elsewhere: `kernels/layout.c`."""

from __future__ import annotations

import itertools
import math
from typing import Final

from mlvm.core.op import Attributes
from mlvm.core.rules import normalize_axes, normalize_axis
from mlvm.core.types import Shape
from mlvm.machines.native._native import Plan
from mlvm.machines.native.boxes import Boxes, strides
from mlvm.machines.native.elements import numbers, pattern
from mlvm.machines.native.planner import Types, twin

_MOST_OPERANDS: Final = 254
_MOST_ROLLED: Final = 4
"""Axes that `roll` moves along: each of them doubles the number of boxes."""


@twin("copy", "reshape")
def copy(types: Types, attributes: Attributes) -> Plan:
    nbytes = types[0].nbytes
    return Plan("copy", 2, [nbytes, 0, 0, 1], units=-(-nbytes // 4096), work=nbytes / 10)


@twin("permute_dims")
def permute_dims(types: Types, attributes: Attributes) -> Plan:
    out, x = types
    size = x.dtype.itemsize
    into = strides(x.shape, size)
    boxes = Boxes(size)
    boxes.copy(out.shape, strides(out.shape, size), tuple(into[i] for i in attributes["axes"]))
    return boxes.plan()


@twin("concat")
def concat(types: Types, attributes: Attributes) -> Plan | None:
    out, *xs = types
    if any(x.dtype is not out.dtype for x in xs) or len(xs) > _MOST_OPERANDS:
        return None
    size = out.dtype.itemsize
    axis = normalize_axis(attributes["axis"], out.ndim)
    where, at = strides(out.shape, size), 0
    boxes = Boxes(size, len(xs))
    for i, x in enumerate(xs):
        boxes.copy(x.shape, where, strides(x.shape, size), out_at=at, reads=1 + i)
        at += x.shape[axis] * where[axis]
    return boxes.plan()


@twin("flip")
def flip(types: Types, attributes: Attributes) -> Plan:
    x = types[1]
    size = x.dtype.itemsize
    axes = normalize_axes(attributes["axis"], x.ndim)
    where = strides(x.shape, size)
    boxes = Boxes(size)
    boxes.copy(
        x.shape,
        where,
        tuple(-by if i in axes else by for i, by in enumerate(where)),
        in_at=sum((x.shape[i] - 1) * where[i] for i in axes),
    )
    return boxes.plan()


@twin("roll")
def roll(types: Types, attributes: Attributes) -> Plan | None:
    x, shift, axis = types[1], attributes["shift"], attributes["axis"]
    shape = (x.size,) if axis is None else x.shape
    axes = normalize_axes(axis, len(shape))
    shifts = dict(
        zip(axes, shift if isinstance(shift, tuple) else [shift] * len(axes), strict=True)
    )
    if len(axes) > _MOST_ROLLED:
        return None
    where = strides(shape, x.dtype.itemsize)
    boxes = Boxes(x.dtype.itemsize)
    # Along an axis rolled by s, the first n - s elements go to s, and the last s to 0.
    for parts in itertools.product(*[_halves(n, shifts.get(i, 0)) for i, n in enumerate(shape)]):
        boxes.copy(
            tuple(count for count, _, _ in parts),
            where,
            where,
            out_at=sum(to * by for (_, to, _), by in zip(parts, where, strict=True)),
            in_at=sum(at * by for (_, _, at), by in zip(parts, where, strict=True)),
        )
    return boxes.plan()


def _halves(n: int, shift: int) -> list[tuple[int, int, int]]:
    """How many elements go where from where, along an axis of length n."""
    shift = shift % n if n else 0
    return [(n - shift, shift, 0), (shift, 0, n - shift)] if shift else [(n, 0, 0)]


@twin("pad")
def pad(types: Types, attributes: Attributes) -> Plan:
    x = types[1]
    start = tuple(before for before, _ in attributes["widths"])
    return _embedded(types, start, (1,) * x.ndim, pattern(attributes["value"], x.dtype))


@twin("embed")
def embed(types: Types, attributes: Attributes) -> Plan:
    return _embedded(types, attributes["start"], attributes["step"], 0)


@twin("slice_add")
def slice_add(types: Types, attributes: Attributes) -> Plan:
    out, _, updates = types
    start, step = attributes["start"], attributes["step"]
    size = out.dtype.itemsize
    where = strides(out.shape, size)
    boxes = Boxes(size, 2)
    boxes.fill_around(out.shape, start, updates.shape, step, None)
    boxes.add(
        updates.shape,
        _times(where, step),
        strides(updates.shape, size),
        out_at=_offset(where, start),
        reads=2,
        number=numbers(out.dtype),
    )
    return boxes.plan()


@twin("slice_set")
def slice_set(types: Types, attributes: Attributes) -> Plan:
    out, _, values = types
    start, length, step = attributes["start"], attributes["length"], attributes["step"]
    size = out.dtype.itemsize
    where = strides(out.shape, size)
    packed = dict(enumerate(strides(values.shape, size), out.ndim - values.ndim))
    into = tuple(
        packed[i] if i in packed and values.shape[i - out.ndim] != 1 else 0 for i in range(out.ndim)
    )
    boxes = Boxes(size, 2)
    boxes.fill_around(out.shape, start, length, step, None)
    boxes.copy(length, _times(where, step), into, out_at=_offset(where, start), reads=2)
    return boxes.plan()


def _embedded(types: Types, start: Shape, step: tuple[int, ...], value: int) -> Plan:
    """x in a window of the result, the value around it."""
    out, x = types
    size = x.dtype.itemsize
    where = strides(out.shape, size)
    boxes = Boxes(size)
    boxes.fill_around(out.shape, start, x.shape, step, value)
    boxes.copy(
        x.shape,
        _times(where, step),
        strides(x.shape, size),
        out_at=_offset(where, start),
    )
    return boxes.plan()


@twin("slice")
def slice_(types: Types, attributes: Attributes) -> Plan:
    out, x = types
    size = x.dtype.itemsize
    where = strides(x.shape, size)
    boxes = Boxes(size)
    boxes.copy(
        out.shape,
        strides(out.shape, size),
        _times(where, attributes["step"]),
        in_at=_offset(where, attributes["start"]),
    )
    return boxes.plan()


def _times(where: tuple[int, ...], step: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(distance * by for distance, by in zip(where, step, strict=True))


def _offset(where: tuple[int, ...], start: Shape) -> int:
    return sum(distance * first for distance, first in zip(where, start, strict=True))


@twin("tril")
def tril(types: Types, attributes: Attributes) -> Plan:
    return _triangle(types, attributes["k"] + 1, 0)


@twin("triu")
def triu(types: Types, attributes: Attributes) -> Plan:
    return _triangle(types, attributes["k"], 1)


def _triangle(types: Types, diagonal: int, above: int) -> Plan:
    x = types[0]
    rows, columns = x.shape[-2:]
    width = columns * x.dtype.itemsize
    high = max(1, 16384 // max(1, width))
    count = math.prod(x.shape[:-1]) if width else 0
    diagonal = max(-rows, min(diagonal, columns))
    ints = [width, x.dtype.itemsize, rows, count, high, diagonal, above]
    return Plan("triangle", 2, ints, units=-(-count // high), work=count * 8 + x.nbytes / 10)
