"""Functions that select, move or convert elements."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import numpy as np

from mlvm.arena.context import current
from mlvm.core import rules
from mlvm.core.errors import ArgumentError, DTypeError, PositionError, ShapeError, brief
from mlvm.core.rules import Axis, require
from mlvm.core.types import DType, bool_, f32, f64, i64
from mlvm.eager.functions.arguments import axes_of, count_of, integer, integers, type_of
from mlvm.eager.functions.creation import Device, arange, asarray, full, zeros_like
from mlvm.eager.functions.halves import rounded, through_f32, widened
from mlvm.eager.functions.shapes import broadcast_to, expand_dims, one_integer, reshape, stack
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.apply import alias_of, untracked
from mlvm.eager.tensor.constants import Scalar, constant
from mlvm.eager.tensor.default import default_of, float_dtype
from mlvm.eager.tensor.dtypes import finfo, iinfo
from mlvm.eager.tensor.number import is_open
from mlvm.eager.tensor.operands import Operand, as_operand, is_array
from mlvm.eager.tensor.positions import numbers_in, rewording
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.wrapper import public


def between(x: Tensor, y: Tensor, part: Tensor) -> Tensor:
    """Return x + part (y - x), which is exactly x at 0 and y at 1.

    If y - x overflows or is infinite, return (1 - part) x + part y, in which a weight of 0 removes
    an infinity."""
    away = y - x
    is_finite = op.isfinite(away)
    away = op.where(is_finite, away, constant(0.0, away.dtype))
    far = op.greater_equal(op.abs(part), 0.5)
    near = op.where(far, y - away * (1.0 - part), x + away * part)
    first = op.where(op.equal(part, 1.0), constant(0.0, x.dtype), x)
    last = op.where(op.equal(part, 0.0), constant(0.0, y.dtype), y)
    return op.where(is_finite, near, first * (1.0 - part) + last * part)


def from_parts(real: Tensor, imag: Tensor) -> Tensor:
    """Return the complex number of a real and an imaginary part, both f32 or both f64.

    The sum real + 1j imag would be wrong: the product of an infinity and 1j has the real part nan.
    """
    pairs = op.view(stack([real, imag], axis=-1), dtype="c64" if real.dtype is f32 else "c128")
    return reshape(pairs, real.shape)


@public
def astype(x: Tensor, dtype: object, /, *, copy: bool = True, device: Device = None) -> Tensor:
    """Convert x to a different dtype, on the same VM or on `device`.

    Floats are truncated to integers. Floats out of range become the nearest integer, and nan
    becomes 0. Nonzero elements become True in bool. A tensor that already has the dtype is never
    copied, regardless of `copy`: an update of the result does not change x.

    x: [...], and so is the result. Raises `DTypeError` if the dtype is unknown, or complex numbers
    would lose the imaginary parts.

        >>> ml.astype(ml.asarray([1.7, -1.7]), ml.int64)
        Tensor([ 1, -1], i64[2])
    """
    type_of(x)
    return asarray(x, dtype=DType.of(dtype), device=device)


@public
def where(condition: Tensor | bool, x: Operand, y: Operand, /) -> Tensor:
    """Select x where the condition holds, else y; all three broadcast, and any may be a number.

    x and y: shapes that broadcast with the condition, a bool tensor, to [...]. The result:
    [...], the dtype that x and y promote to. Raises `ShapeError` if the shapes do not fit;
    `DTypeError` if the condition is not bool or the dtypes do not promote.

        >>> ml.where(ml.asarray([True, False]), 1.0, ml.asarray([5.0, 6.0]))
        Tensor([1., 6.], f32[2])
    """
    if not isinstance(condition, Tensor):
        condition = as_operand(condition)
    if not isinstance(x, Tensor) and not isinstance(y, Tensor):
        x = as_operand(x) if is_array(x) else full((), cast(Scalar, x))
    like = x if isinstance(x, Tensor) else cast(Tensor, y)
    return op.where(condition, as_operand(x, like), as_operand(y, like))


@public
def clip(x: Tensor, /, min: Operand | None = None, max: Operand | None = None) -> Tensor:
    """Limit x to min <= x <= max, elementwise; None means no limit.

    If min > max, the result is max.

    x and limits: shapes that broadcast to [...], integers or floats. The result: [...], the dtype
    that they promote to. Raises `ShapeError` if the shapes do not fit; `DTypeError` if an operand
    is bool or complex.

        >>> ml.clip(ml.asarray([-1.0, 0.5, 2.0]), 0.0, 1.0)
        Tensor([0. , 0.5, 1. ], f32[3])
    """
    type = type_of(x)
    if min is None and max is None:
        return alias_of(x)
    require("real", type)
    floats = type.dtype.is_float
    if min is None:
        min = -math.inf if floats else iinfo(type.dtype).min
    if max is None:
        max = math.inf if floats else iinfo(type.dtype).max
    return op.clip(x, min, max)


@public
def take(x: Tensor, indices: Tensor, /, axis: int | None = None) -> Tensor:
    """Select the slices of x at `indices` along `axis`; the axes of `indices` replace it.

    A vector needs no `axis`.

    x: [n, ...], indices: i[...] -> [*indices.shape, ...] along axis 0. Raises `PositionError` if
    an index is out of range; `AxisError` if x has no such axis; `ArgumentError` if no axis is
    given and x is not a vector; `DTypeError` if the indices are not integers.

        >>> ml.take(ml.asarray([10, 20, 30]), ml.asarray([2, 0]))
        Tensor([30, 10], i64[2])

    Invalid calls:
        ml.take(x, ints)  # ArgumentError
    """
    if axis is None:
        if type_of(x).ndim != 1:
            raise ArgumentError(f"expected an axis for x of {x.ndim} dimensions, got None")
        axis = 0
    index: Any = indices
    is_number = isinstance(index, int) and not isinstance(index, bool)
    positions = constant(index, default_of(int)) if is_number else as_operand(index)
    return op.take(x, positions, axis=axis)


@public
def take_along_axis(x: Tensor, indices: Tensor, /, axis: int = -1) -> Tensor:
    """Select elements along an axis; the other axes broadcast.

    For the last of 3 axes: out[i, j, k] = x[i, j, indices[i, j, k]].

    The other axes broadcast.

    x: [..., n], indices: i[..., k] -> [..., k] along the last axis. Raises `ShapeError` if the
    shapes do not fit; `PositionError` if an index is out of range; `AxisError` if x has no such
    axis; `DTypeError` if the indices are not integers.

        >>> ml.take_along_axis(ml.asarray([[1, 2], [3, 4]]), ml.asarray([[1], [0]]), axis=1)
        Tensor([[2],
                [3]], i64[2,1])

    Invalid calls:
        ml.take_along_axis(ml.ones(0), ints)  # PositionError
    """
    [along] = axes_of(axis, x)
    if type_of(indices).ndim == x.ndim and indices.shape != x.shape:
        lengths = [[*each.shape] for each in (x.type, indices.type)]
        counts = [each.pop(along) for each in lengths]
        others = rules.broadcast_shapes(*map(tuple, lengths))
        x, indices = (
            each if [*others] == own else broadcast_to(each, (*others[:along], n, *others[along:]))
            for each, n, own in zip((x, indices), counts, lengths, strict=True)
        )
    return op.take_along_axis(x, indices, axis=along)


@public
def dynamic_slice(x: Tensor, start: Tensor | int, length: int, /, *, axis: int = 0) -> Tensor:
    """Return `length` rows of x along `axis`, beginning at `start`.

    These are the rows that `dynamic_update` replaces. A negative `start` counts from the end.

    x: [n, ...]; start: an int or i[], such as the counter of a loop; length: an int -> [length,
    ...]. Raises `PositionError` if the rows are out of range; `AxisError` if x has no such axis;
    `ArgumentError` if `length` is negative; `DTypeError` if `start` is not an integer; `ShapeError`
    if it has several elements.

        >>> ml.dynamic_slice(ml.arange(5), ml.asarray(2), 2)
        Tensor([2, 3], i64[2])

    Invalid calls:
        ml.dynamic_slice(v, 9, 1)  # PositionError
        ml.dynamic_slice(v, 0.5, 1)  # DTypeError
    """
    [along], count = axes_of(axis, x), count_of(length, "length")
    n, first = x.shape[along], one_integer(_start(start), "a start")
    if not is_open(n) and count > n:
        raise PositionError(
            f"expected a length of at most {n}, the size of axis {along}, got {count}"
        )
    first = op.where(op.less(first, 0), first + n, first)
    # a position that is still negative must not count from the end again
    first = op.where(op.less(first, 0), first - n, first)
    with rewording(partial(_rows_outside, along, count)):
        return op.take(x, first + arange(count), axis=along)


def _start(start: Any) -> Tensor:
    if isinstance(start, Tensor):
        return start
    if isinstance(start, (bool, np.bool_)) or not isinstance(start, (int, np.integer)):
        raise DTypeError(f"expected start as an integer, got {brief(start)}")
    return full((), int(start), dtype=i64)


def _rows_outside(axis: int, count: int, error: PositionError) -> None:
    """Name the rows of a slice, given the first index out of range and its position."""
    [(position, lane)] = re.findall(r"(\d+)\]( of lane.*)? is out", error.reason)
    index, n = numbers_in(error)
    first = index - int(position)
    error.reason = (
        f"rows {first} to {first + count - 1}{lane} are out of range for size {n} of axis {axis}; "
        f"expected a start of at most {n - count}"
    )


@public
def dynamic_update(
    x: Tensor, update: Tensor, start: Tensor | int, /, *, axis: int = 0, out: Tensor | None = None
) -> Tensor:
    """Replace rows of x along `axis`, beginning at `start`, by the rows of `update`.

    An `update` without that axis replaces one row. A negative `start` counts from the end.

    In a captured loop the rows are written in place without copying x, if no other code needs it.
    With x itself as `out` it is updated in place.

    x: [n, ...]; update: k rows [k, ...] or one row [...], in x's dtype; start: an int or i[] -> [n,
    ...]. Raises `ShapeError` if the rows of `update` and x differ in length; `OperandValueError` if
    the rows are out of range; `AxisError` if x has no such axis; `DTypeError` if `update` has
    a different dtype, or `start` is not an integer.

        >>> ml.dynamic_update(ml.zeros(4), ml.ones(()), ml.asarray(2))
        Tensor([0., 0., 1., 0.], f32[4])

    Invalid calls:
        ml.dynamic_update(v, ml.ones(()), 9)  # OperandValueError
    """
    types = (type_of(x), type_of(update))
    at = _start(start)
    if types[1].ndim == types[0].ndim - 1:
        update = expand_dims(update, axis=axis)
    return op.dynamic_update(x, update, at, axis=axis, out=out)


@public
def round(x: Tensor, /, decimals: int = 0, *, out: Tensor | None = None) -> Tensor:
    """Round to the given number of decimals, halves to even; both parts of a complex number.

    A number without further decimals is returned unchanged, even if 10^decimals times the number
    overflows.

    x: [...], any dtype if `decimals` is 0, otherwise floats or complex numbers. The result: [...],
    in x's dtype. Raises `DTypeError` if x is bool, or an integer tensor and `decimals` is not 0.

        >>> ml.round(ml.asarray([0.126, 2.5]), 2), ml.round(ml.asarray([0.126, 2.5]))
        (Tensor([0.13, 2.5 ], f32[2]), Tensor([0., 2.], f32[2]))

    Invalid calls:
        ml.round(ints, 1)  # DTypeError
    """
    places = integer(decimals, "decimals")
    if not places:
        return op.round(x, out=out)
    if not type_of(x).dtype.is_inexact:
        raise DTypeError(f"expected floats for decimals = {places}, got {x.dtype.name}")
    parts = (op.real(x), op.imag(x)) if x.dtype.kind == "complex" else (x,)
    results = [rounded(_round(widened(each), places), each.dtype) for each in parts]
    result = from_parts(*results) if len(results) == 2 else results[0]
    return result if out is None else op.copy(result, out=out)


def _round(x: Tensor, places: int) -> Tensor:
    """Round f32 or f64 to decimals.

    The power of 10 is split into two factors if the dtype cannot represent it. Beyond the smallest
    digit and beyond the largest number of the dtype, all powers have the same effect."""
    most, least = (308, 330) if x.dtype is f64 else (38, 50)
    power = min(abs(places), least)
    factors = [10.0 ** min(power, most), 10.0 ** max(power - most, 0)]
    scaled = x
    for factor in factors:
        scaled = scaled * factor if places > 0 else scaled / factor
    result = op.round(scaled)
    for factor in reversed(factors):
        result = result / factor if places > 0 else result * factor
    limit = (1.0 if places > 0 else 2.0) / float(finfo(x.dtype).eps)
    return op.where(op.less(op.abs(scaled), limit), result, x)


@public
def exp2(x: Tensor, /) -> Tensor:
    """Compute 2^x, elementwise.

    x: [...], any dtype -> [...], f32 of integers and bools. Raises `DTypeError` if x is not a
    tensor, array or list.

        >>> ml.exp2(ml.asarray([3.0, -1.0]))
        Tensor([8. , 0.5], f32[2])
    """
    return op.pow(2.0, x)


@public
@through_f32
def deg2rad(x: Tensor, /) -> Tensor:
    """Convert degrees to radians: pi / 180 x.

    x: [...], any dtype -> [...], f32 of integers and bools. Raises `DTypeError` if x is not a
    tensor, array or list.

        >>> ml.deg2rad(ml.asarray([180.0]))
        Tensor([3.1415927], f32[1])
    """
    return op.multiply(x, math.pi / 180)


@public
@through_f32
def rad2deg(x: Tensor, /) -> Tensor:
    """Convert radians to degrees: 180 / pi x.

    x: [...], any dtype -> [...], f32 of integers and bools. Raises `DTypeError` if x is not a
    tensor, array or list.

        >>> ml.rad2deg(ml.asarray([3.1415927]))
        Tensor([180.], f32[1])
    """
    return op.multiply(x, 180 / math.pi)


@public
def angle(x: Tensor, /) -> Tensor:
    """Return the angle of complex numbers in the plane, in radians: `atan2(imag(x), real(x))`.

    For real numbers it is 0, or pi where they are negative.

    x: [...], any dtype -> [...], real. Raises `DTypeError` if x is not a tensor, array or list.

        >>> ml.angle(ml.asarray([1.0j, -1.0 + 0.0j]))
        Tensor([1.5707964, 3.1415927], f32[2])
    """
    if type_of(x).dtype.kind == "complex":
        return op.atan2(op.imag(x), op.real(x))
    return op.atan2(zeros_like(x), x)


@public
def one_hot(x: Tensor, /, num_classes: int, *, dtype: object = None) -> Tensor:
    """Encode indices along a new last axis of length `num_classes`: 1 at the index, else 0.

    x: i[...] -> [..., num_classes] in `dtype`, f32 by default. Raises `PositionError` if an index
    is not in 0 .. num_classes - 1; `ArgumentError` if `num_classes` is negative; `DTypeError` if x
    does not contain integers.

        >>> ml.one_hot(ml.asarray([2, 0]), 3)
        Tensor([[0., 0., 1.],
                [1., 0., 0.]], f32[2,3])

    Invalid calls:
        ml.one_hot(ints, -1)  # ArgumentError
        ml.one_hot(ints, 1)  # PositionError
    """
    return op.one_hot(x, num_classes=num_classes, dtype=float_dtype(dtype))


@public
def nonzero(x: Tensor, /) -> tuple[Tensor, ...]:
    """Return the positions of the nonzero elements in row-major order, as one i64 vector per axis.

    x: [...] -> i64[k] for each axis, where k elements are nonzero. Raises `ShapeError` if x is a
    scalar.

        >>> ml.nonzero(ml.asarray([0, 3, 0, 4]))
        (Tensor([1, 3], i64[2]),)
    """
    if type_of(x).ndim == 0:
        raise ShapeError("expected at least 1 dimension, got a scalar")
    places = op.nonzero_indices(x)
    return tuple([places[:, axis] for axis in range(x.ndim)])


@public
def argwhere(x: Tensor, /) -> Tensor:
    """Return the positions of the nonzero elements in row-major order, one row per element.

    x: [...] -> i64[k, x.ndim], where k elements are nonzero. Raises `DTypeError` if x is not a
    tensor, array or list.

        >>> ml.argwhere(ml.asarray([0, 3, 0, 4]))
        Tensor([[1],
                [3]], i64[2,1])
    """
    type_of(x)
    return op.nonzero_indices(x)


@public
def flatnonzero(x: Tensor, /) -> Tensor:
    """Return the positions of the nonzero elements in the flattened x.

    x: [...] -> i64[k], where k elements are nonzero. Raises `DTypeError` if x is not a tensor,
    array or list.

        >>> ml.flatnonzero(ml.asarray([0, 3, 0, 4]))
        Tensor([1, 3], i64[2])
    """
    type_of(x)
    return reshape(op.nonzero_indices(reshape(x, -1)), -1)


@public
def unravel_index(indices: Tensor, /, shape: Sequence[int]) -> tuple[Tensor, ...]:
    """Convert row-major positions, such as the result of `argmax(x)`, to one index per axis.

    indices: i[...] -> i[...] for each axis. Raises `PositionError` if a tensor of that shape has
    no such element; `DTypeError` if the indices are not integers.

        >>> ml.unravel_index(ml.asarray([0, 5]), (2, 3))
        (Tensor([0, 1], i64[2]), Tensor([0, 2], i64[2]))

    Invalid calls:
        ml.unravel_index(v, (2, 3))  # DTypeError
        ml.unravel_index(ints * 9, (2, 3))  # PositionError
    """
    require("integer", type_of(indices))
    coordinates: list[Tensor] = []
    lengths = integers(shape, "shape")
    first, *others = lengths or (1,)
    for length in reversed(others):
        coordinates.append(indices % length)
        indices = indices // length
    every = op.arange(start=0, stop=first, step=1, dtype=indices.dtype)
    with rewording(partial(_outside, lengths)):
        coordinates.append(op.take(every, indices, axis=0))
    return tuple(reversed(coordinates)) if shape else ()


def _outside(shape: Sequence[int], error: PositionError) -> None:
    """Name the invalid elements, given the index along the first axis."""
    stride = math.prod(shape[1:])
    start = numbers_in(error)[0] * stride
    named = f"element {start}" if stride == 1 else f"an element of {start} to {start + stride - 1}"
    error.reason = f"{named} is outside of shape {tuple(shape)}, of {math.prod(shape)} elements"


@public
def count_nonzero(x: Tensor, /, axis: Axis = None, *, keepdims: bool = False) -> Tensor:
    """Count the nonzero elements along `axis`, as i64; nan counts as nonzero.

    x: [...], any dtype -> the shape of x without the axes in `axis` (None: all axes; kept with
    length 1 if `keepdims`), i64. Raises `AxisError` if x has no such axis.

        >>> ml.count_nonzero(ml.asarray([[0, 3], [1, 2]]), axis=1)
        Tensor([1, 2], i64[2])
    """
    type_of(x)
    return op.sum(astype(x, bool_), axis=axis, keepdims=keepdims)


@public
def positive(x: Tensor, /) -> Tensor:
    """Return +x: a new tensor over the bytes of x.

    x: [...], any dtype but bool, and so is the result. Raises `DTypeError` if an operand is bool.

        >>> ml.positive(ml.asarray([1.0, -2.0]))
        Tensor([ 1., -2.], f32[2])

    Invalid calls:
        ml.positive("text")  # DTypeError
    """
    require("numeric", type_of(x))
    return alias_of(x)


@public
def stop_gradient(x: Tensor) -> Tensor:
    """Return x as a constant for gradients, without a copy.

    x: [...], any dtype -> [...], in x's dtype. Raises `DTypeError` if x is not a tensor, array or
    list.

        >>> ml.grad(lambda x: x * ml.stop_gradient(x))(ml.asarray(3.0))
        Tensor(3., f32[])

    Invalid calls:
        ml.stop_gradient("text")  # DTypeError
    """
    type_of(x)
    on = current().recorder
    return untracked(x) if on is None else on.stopped(x)


Tensor.__pos__ = positive
