"""Copies of boxes as plans: elements at equal distances along each axis, in the result and in an
operand. `kernels/layout.c` runs them; most ops of its room are one box or a few."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from mlvm.core.types import Shape
from mlvm.machines.native._native import Plan

Strides = tuple[int, ...]

_TILE: Final = 16384
"""Bytes of a tile, roughly: a unit that is worth the sharing, and fits the first-level cache."""
_SQUARE: Final = (64, 128)
"""Rows and columns of a tile that is transposed."""


class _Axis(NamedTuple):
    """How many elements, and their distances in bytes."""

    length: int
    out: int
    into: int


def strides(shape: Shape, itemsize: int) -> Strides:
    """The distances in bytes between neighbours along each axis of a packed tensor."""
    return tuple(itemsize * math.prod(shape[i + 1 :]) for i in range(len(shape)))


class Boxes:
    """Collects the boxes of an op's result. They may not overlap in it, and must cover it."""

    def __init__(self, itemsize: int, operands: int = 1) -> None:
        self.itemsize = itemsize
        self.nparams = 1 + operands
        self._parts: list[Plan] = []

    def copy(
        self,
        shape: Shape,
        out: Strides,
        into: Strides,
        *,
        out_at: int = 0,
        in_at: int = 0,
        reads: int = 1,
        value: int = 0,
    ) -> None:
        """A box of that shape. `reads` is the parameter that is read, or 0 for `value`, a pattern
        of eight bytes; the distances into it are `into`, those in the result `out`."""
        if 0 in shape:
            return
        merged, out_at, in_at = _upward(shape, out, into, out_at, in_at)
        size = self.itemsize
        if merged and merged[-1][1:] == (size, size):
            run = merged.pop()
            size *= run.length
        if not merged and reads and size > self.itemsize:
            ints = [size, out_at, in_at, reads]
            self._add("copy", ints, -(-size // 4096), size / 10)
            return
        self._tiles(merged, size, [reads, value, out_at, in_at])

    def add(
        self, shape: Shape, out: Strides, into: Strides, *, out_at: int, reads: int, number: str
    ) -> None:
        """A box of the first operand, which has the result's shape, with elements of the
        parameter `reads` added. `number` is what they are: a float dtype, or an integer's bytes."""
        if 0 not in shape:
            merged, out_at, in_at = _upward(shape, out, into, out_at, 0)
            self._tiles(merged, self.itemsize, [reads, 0, out_at, in_at], f"box_add_{number}")

    def fill(self, shape: Shape, out: Strides, value: int, out_at: int = 0) -> None:
        """A box full of that pattern of eight bytes."""
        self.copy(shape, out, (0,) * len(shape), out_at=out_at, reads=0, value=value)

    def rest(self, shape: Shape, out: Strides, out_at: int) -> None:
        """A box of the first operand, which has the result's shape and may be the result."""
        merged, out_at, in_at = _upward(shape, out, out, out_at, out_at)
        self._tiles(merged, self.itemsize, [1, 0, out_at, in_at], f"box_rest_{self.itemsize}")

    def fill_around(
        self, shape: Shape, start: Shape, length: Shape, step: Strides, value: int | None
    ) -> None:
        """What a window leaves of a result of that shape, full of the pattern, or with None as the
        first operand has it. On axis i, the window has length[i] elements at start[i], start[i] +
        step[i], ..."""
        where = strides(shape, self.itemsize)
        out_at, inside, outs = 0, [*shape], [*where]
        for i, (n, first, count, by) in enumerate(zip(shape, start, length, step, strict=True)):
            low, high = sorted((first, first + (count - 1) * by)) if count else (n, n)
            by = abs(by) if count > 1 else 1
            for at, shape_here in (
                (0, (1, low)),
                (high + 1, (1, n - high - 1)),
                (low + 1, (count - 1, by - 1)),
            ):
                around = (*inside[:i], *shape_here, *inside[i + 1 :])
                steps = (*outs[:i], by * where[i], where[i], *outs[i + 1 :])
                if 0 in around or min(shape_here) < 0:
                    continue
                if value is None:
                    self.rest(around, steps, out_at + at * where[i])
                else:
                    self.fill(around, steps, value, out_at + at * where[i])
            out_at, inside[i], outs[i] = out_at + low * where[i], count, by * where[i]

    def plan(self) -> Plan:
        """All of them."""
        if len(self._parts) == 1:
            return self._parts[0]
        return Plan(
            "boxes",
            self.nparams,
            units=sum(part.units for part in self._parts),
            work=sum(part.work for part in self._parts),
            parts=self._parts,
        )

    def _tiles(
        self, axes: list[_Axis], size: int, begin: list[int], named: str | None = None
    ) -> None:
        """Elements of `size` bytes along axes that do not merge any further; a `named` kernel's, or
        copied."""
        count = math.prod(axis.length for axis in axes)
        if size not in (1, 2, 4, 8):
            kernel, work = "box_rows", count * (2 + size / 10)
            columns, size = _Axis(size, 1, 1), 1
        else:
            kernel, work = f"box_each_{size}", count * 0.7
            columns = axes.pop() if axes else _Axis(1, size, 0)
            if named is not None:
                kernel, work = named, 0 if named.startswith("box_rest") else work
            beside = next((i for i, axis in enumerate(axes) if axis.into == size), -1)
            if not columns.into:
                work = count * size / 20
            elif (
                not named
                and columns.out == size
                and beside >= 0
                and min(columns[0], axes[beside][0]) >= 4
            ):
                kernel, work = f"box_transpose_{size}", count * size / 8
                axes.append(axes.pop(beside))
            elif axes and columns.length < min(8, axes[-1].length):
                axes[-1], columns = columns, axes[-1]
        rows = axes.pop() if axes else _Axis(1, 0, 0)
        if kernel == f"box_transpose_{size}":
            high, wide = min(rows.length, _SQUARE[0]), min(columns.length, _SQUARE[1])
        else:
            wide = min(columns.length, _TILE // size)
            high = min(rows.length, max(1, _TILE // size // wide))
        planes, deep = _Axis(1, 0, 0), 1
        if axes and (high, wide) == (rows.length, columns.length):
            planes = axes.pop()
            deep = min(planes.length, max(1, _TILE // (high * wide * size)))
        parts = ((planes, deep), (rows, high), (columns, wide))
        counting = []
        for axis, part in parts:
            counting.append(len(axes) if part < axis.length else -1)
            if part < axis.length:
                tiles = -(-axis.length // part)
                axes.append(_Axis(tiles, part * axis.out, part * axis.into))
        ints = [*begin, *[axis.length for axis, _ in parts], *[part for _, part in parts]]
        ints += [*[axis.out for axis, _ in parts], *[axis.into for axis, _ in parts], len(axes)]
        ints += [len(axes) if i < 0 else i for i in counting]
        ints += [number for axis in axes for number in axis]
        self._add(kernel, ints, math.prod(axis.length for axis in axes), work)

    def _add(self, kernel: str, ints: Sequence[int], units: int, work: float) -> None:
        self._parts.append(Plan(kernel, self.nparams, ints, units=units, work=work))


def _upward(
    shape: Shape, out: Strides, into: Strides, out_at: int, in_at: int
) -> tuple[list[_Axis], int, int]:
    """The axes of a box, merged, and where it begins, so that it goes upward in the result."""
    axes = [_Axis(*axis) for axis in zip(shape, out, into, strict=True) if axis[0] > 1]
    for axis in axes:
        if axis.out < 0:
            out_at += (axis.length - 1) * axis.out
            in_at += (axis.length - 1) * axis.into
    axes = [_Axis(n, abs(o), i if o > 0 else -i) for n, o, i in axes]
    return _merged(sorted(axes, key=lambda axis: -axis.out)), out_at, in_at


def _merged(axes: list[_Axis]) -> list[_Axis]:
    """The same elements along fewer axes: two are one where the inner one's end is the next step
    of the outer one."""
    merged: list[_Axis] = []
    for axis in axes:
        if merged and merged[-1][1:] == (axis.length * axis.out, axis.length * axis.into):
            axis = _Axis(axis.length * merged.pop().length, axis.out, axis.into)
        merged.append(axis)
    return merged
