"""Copies of boxes: elements at equal distances along each axis; see `kernels/layout.c`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from mlvm.core.ops.strides import merged, packed
from mlvm.core.types import Shape, TensorType
from mlvm.machines.native._native import COPY_UNIT, KernelCall
from mlvm.machines.native.planner import kernel_call

Strides = tuple[int, ...]

_TILE: Final = 16384
"""Approximate bytes of a tile: large enough for a thread, and small enough for the L1 cache."""
_SQUARE: Final = (64, 128)
"""Rows and columns of a tile that is transposed."""


class _Axis(NamedTuple):
    """Axis of a box: the length, and the strides in bytes.

    `out` is the stride in the result, `into` in the operand.
    """

    length: int
    out: int
    into: int


def strides(x: TensorType) -> Strides:
    """Return the strides in bytes of a packed tensor."""
    return tuple([x.dtype.itemsize * step for step in packed(x.shape)])


class Boxes:
    """Builder of a kernel call from boxes, which must cover the result without overlap."""

    def __init__(self, itemsize: int, operands: int = 1) -> None:
        self.itemsize = itemsize
        self.nparams = 1 + operands
        self._parts: list[KernelCall | None] = []

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
        """Add a copy of a box.

        `reads` is the parameter that is read, with strides `into`; 0 fills the box with `value`, a
        pattern of eight bytes. `out`: the result's strides.
        """
        if 0 in shape:
            return
        if reads and (size := _run_of(self.itemsize, shape, out, into)):
            units, work = -(-size // COPY_UNIT), size / 10
            self._add("copy", units, work, bytes=size, reads=reads, out_at=out_at, in_at=in_at)
            return
        merged, out_at, in_at = _upward(shape, out, into, out_at, in_at)
        size = self.itemsize
        if merged and merged[-1][1:] == (size, size):
            size *= merged.pop().length
        self._tiles(merged, size, reads=reads, value=value, out_at=out_at, in_at=in_at)

    def add(
        self, shape: Shape, out: Strides, into: Strides, *, out_at: int, reads: int, number: str
    ) -> None:
        """Add a box with the sums of the first operand and the parameter `reads`.

        The first operand has the result's shape. `number` is the suffix of the kernel, a float
        dtype or an integer's size in bytes.
        """
        if 0 not in shape:
            merged, out_at, in_at = _upward(shape, out, into, out_at, 0)
            kernel, size = f"box_add_{number}", self.itemsize
            self._tiles(merged, size, kernel, reads=reads, out_at=out_at, in_at=in_at)

    def fill(self, shape: Shape, out: Strides, value: int, out_at: int = 0) -> None:
        """Add a box filled with a pattern of eight bytes."""
        self.copy(shape, out, (0,) * len(shape), out_at=out_at, reads=0, value=value)

    def rest(self, shape: Shape, out: Strides, out_at: int) -> None:
        """Add a copy of a box of the first operand.

        The operand has the result's shape, and may be the result.
        """
        merged, out_at, in_at = _upward(shape, out, out, out_at, out_at)
        kernel, size = f"box_rest_{self.itemsize}", self.itemsize
        self._tiles(merged, size, kernel, reads=1, out_at=out_at, in_at=in_at)

    def fill_around(
        self, out: TensorType, start: Shape, length: Shape, step: Strides, value: int | None
    ) -> None:
        """Fill all of a result outside of a window with a pattern; None copies the first operand.
        On axis i, the window has length[i] elements at start[i], start[i] + step[i], ..."""
        where = strides(out)
        out_at, inside, outs = 0, [*out.shape], [*where]
        for i, (n, first, count, by) in enumerate(zip(out.shape, start, length, step, strict=True)):
            low, high = sorted((first, first + (count - 1) * by)) if count else (n, n)
            by = abs(by) if count > 1 else 1
            beyond, between = (high + 1, (1, n - high - 1)), (low + 1, (count - 1, by - 1))
            for at, shape_here in ((0, (1, low)), beyond, between):
                around = (*inside[:i], *shape_here, *inside[i + 1 :])
                steps = (*outs[:i], by * where[i], where[i], *outs[i + 1 :])
                if 0 in around or min(shape_here) < 0:
                    continue
                if value is None:
                    self.rest(around, steps, out_at + at * where[i])
                else:
                    self.fill(around, steps, value, out_at + at * where[i])
            out_at, inside[i], outs[i] = out_at + low * where[i], count, by * where[i]

    def call(self) -> KernelCall | None:
        """Build the call of all boxes, or return None if a box has no kernel."""
        parts = [part for part in self._parts if part is not None]
        if len(parts) < len(self._parts):
            return None
        if len(parts) == 1:
            return parts[0]
        units, work = sum([part.units for part in parts]), sum([part.work for part in parts])
        return kernel_call("boxes", self.nparams, units, work, {}, children=parts)

    def _tiles(
        self, axes: list[_Axis], size: int, named: str | None = None, **integers: int
    ) -> None:
        """Add tiles over elements of `size` bytes, along axes that cannot be merged further.

        The `named` kernel processes them; without it they are copied.
        """
        if self.itemsize > 8 and (named or not integers["reads"]):  # no such kernel exists
            self._parts.append(None)
            return
        count = math.prod(axis.length for axis in axes)
        if type(size) is not int or size not in (1, 2, 4, 8):  # an open size needs no guard
            kernel, work = "box_rows", count * (2 + size / 10)
            columns, size = _Axis(size, 1, 1), 1
        else:
            kernel, work = f"box_each_{size}", count * 0.7
            columns = axes.pop() if axes else _Axis(1, size, 0)
            if named is not None:
                kernel, work = named, 0 if named.startswith("box_rest") else work
            contiguous = next((i for i, axis in enumerate(axes) if axis.into == size), -1)
            turns = not named and columns.out == size and contiguous >= 0
            if not columns.into:
                work = count * size / 20
            elif turns and min(columns.length, axes[contiguous].length) >= 4:
                kernel, work = f"box_transpose_{size}", count * size / 8
                axes.append(axes.pop(contiguous))
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
        of_rows = ("row", rows, high), ("column", columns, wide)
        for name, axis, part in (("plane", planes, deep), *of_rows):
            integers |= {f"{name}s": axis.length, f"tile_{name}s": part}
            integers |= {f"out_{name}": axis.out, f"in_{name}": axis.into}
            if part < axis.length:
                integers[f"axis_of_{name}s"] = len(axes)
                tiles = -(-axis.length // part)
                axes.append(_Axis(tiles, part * axis.out, part * axis.into))
        naxes = len(axes)
        for name in ("planes", "rows", "columns"):
            integers.setdefault(f"axis_of_{name}", naxes)
        units = math.prod([axis.length for axis in axes])
        rest = [number for axis in axes for number in axis]
        self._add(kernel, units, work, rest, naxes=naxes, **integers)

    def _add(
        self, kernel: str, units: int, work: float, rest: Sequence[int] = (), **integers: int
    ) -> None:
        self._parts.append(kernel_call(kernel, self.nparams, units, work, integers, rest=rest))


def moved(out: TensorType, into: Strides, in_at: int = 0) -> KernelCall | None:
    """Plan a copy of the operand, read by the strides `into`."""
    boxes = Boxes(out.dtype.itemsize)
    boxes.copy(out.shape, strides(out), into, in_at=in_at)
    return boxes.call()


def _run_of(itemsize: int, shape: Shape, out: Strides, into: Strides) -> int:
    """Return the bytes of a box that is contiguous in result and operand, otherwise 0."""
    run = itemsize
    for n, to, at in zip(reversed(shape), reversed(out), reversed(into), strict=True):
        if n != 1:
            if to != run or at != run:
                return 0
            run *= n
    return run


def _upward(
    shape: Shape, out: Strides, into: Strides, out_at: int, in_at: int
) -> tuple[list[_Axis], int, int]:
    """Merge the axes of a box and make the strides in the result positive.

    Also return its start.
    """
    axes = [_Axis(*axis) for axis in zip(shape, out, into, strict=True) if axis[0] > 1]
    for axis in axes:
        if axis.out < 0:
            out_at += (axis.length - 1) * axis.out
            in_at += (axis.length - 1) * axis.into
    axes = [_Axis(n, abs(o), i if o > 0 else -i) for n, o, i in axes]
    axes.sort(key=lambda axis: -axis.out)
    return [_Axis(*axis) for axis in merged(axes)], out_at, in_at
