"""Public functions composed of ops.

Signatures are those of the Python Array API standard (2025.12), JAX's where it is silent.
A function that changes a shape, or nothing, copies nothing: the result is over the same bytes.
An op whose own function has the right signature is in `primitives` and not repeated here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Final, Literal, cast

import numpy as np

from mlvm.core import rules
from mlvm.core.errors import AttributeRefused, DTypeError, OpError, ShapeError, brief
from mlvm.core.ops.neural import Pair
from mlvm.core.protocol import VMProtocol
from mlvm.core.rules import Axis, normalize_axes
from mlvm.core.types import DType, Shape, TensorType, bool_, f32, i64
from mlvm.eager.functions.creation import asarray, integer, integers, type_of
from mlvm.eager.functions.creation import full as full
from mlvm.eager.functions.halves import in_f32, rounded, widened
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.dtypes import iinfo
from mlvm.eager.tensor.tensor import (
    OneOp,
    Operand,
    Scalar,
    Tensor,
    alias,
    alias_of,
    is_array,
    one_op,
    operand,
)

_WHERE: Final = one_op("where")


def _inferred(call: OneOp, x: Tensor) -> TensorType:
    """The type of `call` on x. Raises an `OpError` where it is refused."""
    types = (type_of(x),)
    return cast(TensorType, call.types.get(types) or call.infer(types))


def axes_of(name: str, axis: Axis, x: Tensor, new: int = 0) -> tuple[int, ...]:
    """The axes, counted from the front, of a tensor like x with `new` more dimensions."""
    type = type_of(x)
    try:
        given = axis if axis is None else integers(axis, "axis", name)
        return normalize_axes(given, type.ndim + new)
    except OpError as error:
        raise error.at(name, (type,)) from None


# --- shapes --------------------------------------------------------------------------


def reshape(x: Tensor, /, shape: int | Sequence[int], *, copy: bool | None = None) -> Tensor:
    """The elements of x, in row-major order, in another shape of the same size; one length may be
    -1. Nothing is copied unless `copy` is True.

    x: [...] -> [*shape], the same dtype. Raises `ShapeError` for a shape that the elements do not
    fill.

        >>> ml.reshape(ml.arange(6), (2, -1))
        Tensor([[0, 1, 2],
                [3, 4, 5]], i64[2,3])
    """
    if copy:
        return reshape(op.copy(x), shape)
    type, lengths = type_of(x), integers(shape, "shape", "reshape")
    if -1 in lengths:
        rest = -math.prod(lengths)
        if rest <= 0 or type.size % rest or lengths.count(-1) > 1:
            raise ShapeError(f"no length for -1 lets {type.size} elements fill {lengths}").at(
                "reshape", (type,)
            )
        lengths = tuple(type.size // rest if n == -1 else n for n in lengths)
    call = one_op("reshape", shape=lengths)
    return alias(call, x, _inferred(call, x))


def expand_dims(x: Tensor, /, axis: int | tuple[int, ...] = 0) -> Tensor:
    """x with new axes of length 1 at these positions of the result.

    x: [n, m] -> [1, n, m] for axis 0. Raises `AxisRefused` for an axis that the result does not
    have.

        >>> ml.expand_dims(ml.asarray([1.0, 2.0]), axis=1)
        Tensor([[1.],
                [2.]], f32[2,1])
    """
    new = axes_of("expand_dims", axis, x, new=len(integers(axis, "axis", "expand_dims")))
    lengths = iter(x.shape)
    return reshape(x, [1 if i in new else next(lengths) for i in range(x.ndim + len(new))])


def squeeze(x: Tensor, /, axis: Axis = None) -> Tensor:
    """x without these axes, which have length 1 (None: without all that have).

    x: [1, n] -> [n] for axis 0. Raises `ShapeError` for an axis of another length, `AxisRefused`
    for an axis that x does not have.

        >>> ml.squeeze(ml.zeros((1, 3, 1)), axis=0).shape
        (3, 1)
    """
    if axis is None:
        return reshape(x, [n for n in type_of(x).shape if n != 1])
    gone = axes_of("squeeze", axis, x)
    for i in gone:
        if x.shape[i] != 1:
            raise ShapeError(f"axis {i} has length {x.shape[i]}, not 1").at("squeeze", (x.type,))
    return reshape(x, [n for i, n in enumerate(x.shape) if i not in gone])


def permute_dims(x: Tensor, /, axes: Sequence[int]) -> Tensor:
    """x with its axes in another order: axis i of the result is axis axes[i] of x.

    Nothing is copied where the axes longer than 1 keep their order.

    x: [n, m] -> [m, n] for axes (1, 0). Raises `AxisRefused` for an axis that x does not have or
    that is named twice, `AttributeRefused` unless all are named.

        >>> ml.permute_dims(ml.zeros((2, 3, 4)), (2, 0, 1)).shape
        (4, 2, 3)
    """
    order = integers(axes, "axes", "permute_dims")
    result = _inferred(one_op("permute_dims", axes=order), x)
    long = [i % x.ndim for i in order if x.shape[i] != 1]
    if long == sorted(long):
        return reshape(x, result.shape)
    return op.permute_dims(x, axes=order)


def matrix_transpose(x: Tensor, /) -> Tensor:
    """x with its last two axes swapped.

    x: [..., m, n] -> [..., n, m]. Raises `ShapeError` for fewer than two axes.

        >>> ml.matrix_transpose(ml.asarray([[1, 2, 3]]))
        Tensor([[1],
                [2],
                [3]], i64[3,1])
    """
    type_of(x)
    return x.mT


def moveaxis(
    x: Tensor, source: int | tuple[int, ...], destination: int | tuple[int, ...], /
) -> Tensor:
    """x with the axes `source` moved to the positions `destination`, the others in order.

    x: [k, n, m] -> [n, m, k] for 0 and -1. Raises `AxisRefused` for an axis that x does not have or
    that is named twice, `AttributeRefused` unless there are as many of both.

        >>> ml.moveaxis(ml.zeros((2, 3, 4)), 0, -1).shape
        (3, 4, 2)
    """
    sources, destinations = axes_of("moveaxis", source, x), axes_of("moveaxis", destination, x)
    if len(sources) != len(destinations):
        raise AttributeRefused(f"{source} and {destination} are not as many axes").at(
            "moveaxis", (x.type,)
        )
    order = [i for i in range(x.ndim) if i not in sources]
    for position, axis in sorted(zip(destinations, sources, strict=True)):
        order.insert(position, axis)
    return permute_dims(x, order)


def broadcast_to(x: Tensor, /, shape: int | Sequence[int]) -> Tensor:
    """x repeated along new leading axes and along axes of length 1, up to `shape`.

    Nothing is copied where nothing is repeated.

    The result: [*shape], the dtype of x. Raises `ShapeError` where x does not broadcast to that.

        >>> ml.broadcast_to(ml.asarray([1.0, 2.0]), (2, 2))
        Tensor([[1., 2.],
                [1., 2.]], f32[2,2])
    """
    lengths = integers(shape, "shape", "broadcast_to")
    result = _inferred(one_op("broadcast_to", shape=lengths), x)
    if result.size == x.size:
        return reshape(x, lengths)
    return op.broadcast_to(x, shape=lengths)


def broadcast_shapes(*shapes: int | Sequence[int]) -> Shape:
    """The shape that tensors of these shapes broadcast to.

    Raises `ShapeError` where there is none.

        >>> ml.broadcast_shapes((3, 1), (4,))
        (3, 4)
    """
    lengths = [integers(shape, "a shape", "broadcast_shapes") for shape in shapes]
    try:
        return rules.broadcast_shapes(*lengths)
    except OpError as error:
        raise error.at("broadcast_shapes", lengths) from None


def broadcast_arrays(*arrays: Tensor) -> tuple[Tensor, ...]:
    """The tensors, all in the shape that they broadcast to together.

    Each result: [...], the dtype of its tensor. Raises `ShapeError` for shapes that do not
    broadcast.

        >>> [x.shape for x in ml.broadcast_arrays(ml.zeros((2, 1)), ml.zeros(3))]
        [(2, 3), (2, 3)]
    """
    types = [type_of(x) for x in arrays]
    try:
        shape = rules.broadcast_shapes(*[type.shape for type in types])
    except OpError as error:
        raise error.at("broadcast_arrays", types) from None
    return tuple([broadcast_to(x, shape) for x in arrays])


def meshgrid(*arrays: Tensor, indexing: Literal["xy", "ij"] = "xy") -> tuple[Tensor, ...]:
    """For vectors, the coordinate tensors of the grid they span; with "xy" the first two axes are
    swapped.

    [n] and [m] -> two of [m, n], or of [n, m] with "ij". Raises `ShapeError` for other than
    vectors, `AttributeRefused` for another `indexing`.

        >>> ml.meshgrid(ml.arange(2), ml.arange(3))[0]
        Tensor([[0, 1],
                [0, 1],
                [0, 1]], i64[3,2])
    """
    types = [type_of(x) for x in arrays]
    if indexing not in ("xy", "ij"):
        raise AttributeRefused(f'indexing is "xy" or "ij", not {indexing!r}').at("meshgrid", types)
    if any(type.ndim != 1 for type in types):
        raise ShapeError("takes tensors of 1 dimension").at("meshgrid", types)
    axes = list(range(len(arrays)))
    if indexing == "xy":
        axes[:2] = reversed(axes[:2])
    others = [tuple(i for i in range(len(arrays)) if i != axis) for axis in axes]
    return broadcast_arrays(*[expand_dims(x, axis=i) for x, i in zip(arrays, others, strict=True)])


# --- joining, cutting, repeating -----------------------------------------------------


def concat(arrays: Iterable[Tensor], /, axis: int | None = 0) -> Tensor:
    """The tensors one after the other along `axis` (None: flattened first); dtypes promote.

    The tensors: one shape but along `axis`; and so is the result. Raises `ShapeError` for other
    shapes and for no tensors, `AxisRefused` for an axis that they do not have, `DTypeError` for
    dtypes that do not promote.

        >>> ml.concat([ml.zeros((1, 2)), ml.ones((1, 2))], axis=0)
        Tensor([[0., 0.],
                [1., 1.]], f32[2,2])
    """
    if axis is None:
        return concat([reshape(x, -1) for x in arrays])
    xs = tuple(arrays)
    if len(xs) == 1:
        axes_of("concat", axis, xs[0])
        return alias_of(xs[0])
    return op.concat(*xs, axis=axis)


def stack(arrays: Iterable[Tensor], /, axis: int = 0) -> Tensor:
    """The tensors, of one shape, one after the other along a new axis.

    The tensors: [...]; the result: [k, ...] for k tensors and axis 0. Raises `ShapeError` for
    different shapes and for no tensors, `AxisRefused` for an axis that the result does not have,
    `DTypeError` for dtypes that do not promote.

        >>> ml.stack([ml.zeros(2), ml.ones(2)])
        Tensor([[0., 0.],
                [1., 1.]], f32[2,2])
    """
    given = list(arrays)
    beside = next((x for x in given if isinstance(x, Tensor)), None)
    xs = [Tensor._taken(x, beside=beside) if is_array(x) else x for x in given]
    types = [type_of(x, "stack") for x in xs]
    try:
        return concat([expand_dims(x, axis=axis) for x in xs], axis=axis)
    except OpError as error:
        error.op, error.operands = "stack", tuple(types)
        raise


def split(x: Tensor, indices_or_sections: int | Sequence[int], axis: int = 0) -> list[Tensor]:
    """x cut along `axis`: into that many equal sections, or before each of the indices.

    x: [n, ...] -> [n / sections, ...] each, along axis 0. Raises `ShapeError` for a length that is
    not so many equal sections, `AxisRefused` for an axis that x does not have.

        >>> ml.split(ml.arange(6), 3)
        [Tensor([0, 1], i64[2]), Tensor([2, 3], i64[2]), Tensor([4, 5], i64[2])]
    """
    [along] = axes_of("split", axis, x)
    length = x.shape[along]
    given = integers(indices_or_sections, "indices_or_sections", "split")
    if isinstance(indices_or_sections, int):
        [sections] = given
        if sections < 1 or length % sections:
            raise ShapeError(f"length {length} is not {sections} equal sections").at(
                "split", (x.type,)
            )
        cuts = tuple(length // sections * i for i in range(1, sections))
    else:
        cuts = given
    bounds = zip((None, *cuts), (*cuts, None), strict=True)
    return [part(x, along, range(length)[first:end]) for first, end in bounds]


def unstack(x: Tensor, /, axis: int = 0) -> tuple[Tensor, ...]:
    """The slices of x along `axis`, without it.

    x: [n, ...] -> n tensors [...] along axis 0. Raises `AxisRefused` for an axis that x does not
    have.

        >>> ml.unstack(ml.asarray([[1, 2], [3, 4]]))
        (Tensor([1, 2], i64[2]), Tensor([3, 4], i64[2]))
    """
    [along] = axes_of("unstack", axis, x)
    places = [range(i, i + 1) for i in range(x.shape[along])]
    return tuple(squeeze(part(x, along, place), along) for place in places)


def part(x: Tensor, axis: int, positions: range) -> Tensor:
    """The elements of x at these consecutive positions along an axis."""
    if len(positions) == x.shape[axis]:
        return alias_of(x)
    start, length = [0] * x.ndim, list(x.shape)
    start[axis], length[axis] = positions.start, len(positions)
    return op.slice(x, start=tuple(start), length=tuple(length), step=(1,) * x.ndim)


def tile(x: Tensor, repetitions: int | Sequence[int], /) -> Tensor:
    """x repeated repetitions[i] times along axis i. The shorter one of shape and repetitions gets
    ones in front.

    x: [n] -> [n repetitions]. Raises `AttributeRefused` for a negative number.

        >>> ml.tile(ml.asarray([1, 2]), (2,))
        Tensor([1, 2, 1, 2], i64[4])
    """
    times, lengths = counts_of("tile", repetitions, "repetitions", x), x.shape
    ndim = max(len(times), len(lengths))
    times, lengths = (1,) * (ndim - len(times)) + times, (1,) * (ndim - len(lengths)) + lengths
    apart = reshape(x, [m for n in lengths for m in (1, n)])
    tiled = broadcast_to(apart, [m for k, n in zip(times, lengths, strict=True) for m in (k, n)])
    return reshape(tiled, [k * n for k, n in zip(times, lengths, strict=True)])


def repeat(x: Tensor, repeats: int | Sequence[int] | Tensor, /, axis: int | None = None) -> Tensor:
    """x with each element `repeats` times in a row along `axis` (None: flattened first).

    `repeats` may be a vector of integers, one for each place along the axis: the host reads it, as
    it decides the shape.

    x: [n, ...] -> [n repeats, ...] along axis 0. Raises `ShapeError` for a vector of another
    length, `DTypeError` for one of other than integers, `AttributeRefused` for a negative number,
    `AxisRefused` for an axis that x does not have.

        >>> ml.repeat(ml.asarray([1, 2]), 2)
        Tensor([1, 1, 2, 2], i64[4])
    """
    if axis is None:
        return repeat(reshape(x, type_of(x).size), repeats, axis=0)
    [along] = axes_of("repeat", axis, x)
    counts = counts_of("repeat", _listed(repeats, x), "repeats", x)
    before, behind = x.shape[: along + 1], x.shape[along + 1 :]
    if len(counts) == 1:
        [n] = counts
        repeated = broadcast_to(reshape(x, (*before, 1, *behind)), (*before, n, *behind))
        return reshape(repeated, (*before[:-1], before[-1] * n, *behind))
    if len(counts) != x.shape[along]:
        raise ShapeError(f"{len(counts)} repeats for {x.shape[along]} places of axis {axis}").at(
            "repeat", (x.type,)
        )
    return op.take(x, asarray(np.repeat(np.arange(len(counts)), counts)), axis=along)


def _listed(repeats: int | Sequence[int] | Tensor, x: Tensor) -> int | Sequence[int]:
    """The numbers of `repeat`, where they come in a tensor."""
    if isinstance(repeats, np.ndarray):
        repeats = Tensor._taken(repeats)
    if not isinstance(repeats, Tensor):
        return repeats
    types = (x.type, repeats.type)
    if not repeats.dtype.is_integer:
        raise DTypeError("repeats are integers").at("repeat", types)
    if repeats.ndim > 1:
        raise ShapeError("repeats are a number or a vector").at("repeat", types)
    found: int | Sequence[int] = repeats.tolist()
    return found


def counts_of(function: str, value: int | Sequence[int], name: str, x: Tensor) -> tuple[int, ...]:
    """One or several ints >= 0. Raises `AttributeRefused` for others."""
    type, counts = type_of(x), integers(value, name, function)
    if min(counts, default=0) < 0:
        raise AttributeRefused(f"{name} must be >= 0, not {min(counts)}").at(function, (type,))
    return counts


def roll(x: Tensor, /, shift: int | tuple[int, ...], axis: Axis = None) -> Tensor:
    """x with every element moved `shift` places up along `axis` (None: in row-major order).
    Elements moved beyond the end come to the front.

    x: [...], and so is the result. Raises `AxisRefused` for an axis that x does not have,
    `AttributeRefused` for shifts and axes that are not equally many.

        >>> ml.roll(ml.asarray([1, 2, 3]), 1)
        Tensor([3, 1, 2], i64[3])
    """
    return op.roll(x, shift=shift, axis=axis)


def pad(x: Tensor, /, widths: int | Sequence[Any], value: complex = 0.0) -> Tensor:
    """x with a border of `value`. `widths` counts its elements: one int for all sides, a pair
    (before, after) for all axes, or a pair for each axis.

    x: [n, ...] -> [before + n + after, ...]. Raises `AttributeRefused` for negative widths, for
    pairs that are not as many as the axes, and for a value that integers do not have.

        >>> ml.pad(ml.asarray([1.0, 2.0]), 1)
        Tensor([0., 1., 2., 0.], f32[4])
    """
    ndim = type_of(x).ndim
    if isinstance(widths, int):
        widths = (widths, widths)
    if len(widths) == 2 and all(isinstance(width, int) for width in widths):
        widths = [widths] * ndim
    pairs = tuple(pair(width, "widths", "pad", least=0) for width in widths)
    if not isinstance(value, complex):
        return op.pad(x, widths=pairs, value=value)
    inside = op.pad(full(x.shape, True), widths=pairs)
    return where(inside, op.pad(x, widths=pairs), value)


def astype(
    x: Tensor, dtype: object, /, *, copy: bool = True, device: VMProtocol | None = None
) -> Tensor:
    """x in another dtype, on its VM or on `device`. Floats are truncated to integers: one that the
    dtype cannot hold becomes the nearest it has, and nan 0. bool is whether it is not zero. A
    tensor of that dtype already is not copied, whatever `copy` says: an update of one of the two
    does not change the other.

    x: [...], and so is the result. Raises `DTypeError` for an unknown dtype, and for complex
    numbers that would lose their imaginary parts.

        >>> ml.astype(ml.asarray([1.7, -1.7]), ml.int64)
        Tensor([ 1, -1], i64[2])
    """
    type_of(x)
    return asarray(x, dtype=DType.of(dtype), device=device)


# --- choosing elements ---------------------------------------------------------------


def take(x: Tensor, indices: Tensor, /, axis: int | None = None) -> Tensor:
    """The slices of x at `indices` along `axis`, which the axes of `indices` replace. A vector
    needs no `axis`.

    x: [n, ...], indices: i[...] -> [*indices.shape, ...] along axis 0. Raises `PositionRefused` for
    an index out of range, `AxisRefused` for an axis that x does not have, `AttributeRefused` if no
    axis is given and x is no vector, `DTypeError` for indices that are no integers.

        >>> ml.take(ml.asarray([10, 20, 30]), ml.asarray([2, 0]))
        Tensor([30, 10], i64[2])
    """
    if axis is None:
        if type_of(x).ndim != 1:
            raise AttributeRefused("axis must be given unless x has 1 dimension").at(
                "take", (x.type,)
            )
        axis = 0
    return op.take(x, indices, axis=axis)


def take_along_axis(x: Tensor, indices: Tensor, /, axis: int = -1) -> Tensor:
    """out[i, j, k] = x[i, j, indices[i, j, k]], for the last of 3 axes as an example. On the other
    axes the two broadcast.

    x: [..., n], indices: i[..., k] -> [..., k] along the last axis. Raises `ShapeError` for shapes
    that do not fit, `PositionRefused` for an index out of range, `AxisRefused` for an axis that x
    does not have, `DTypeError` for indices that are no integers.

        >>> ml.take_along_axis(ml.asarray([[1, 2], [3, 4]]), ml.asarray([[1], [0]]), axis=1)
        Tensor([[2],
                [3]], i64[2,1])
    """
    [along] = axes_of("take_along_axis", axis, x)
    if type_of(indices).ndim == x.ndim and indices.shape != x.shape:
        types = (x.type, indices.type)
        lengths = [[*each.shape] for each in types]
        wanted = [each.pop(along) for each in lengths]
        try:
            others = rules.broadcast_shapes(*map(tuple, lengths))
        except OpError as error:
            raise error.at("take_along_axis", types) from None
        x, indices = (
            broadcast_to(each, (*others[:along], n, *others[along:]))
            for each, n in zip((x, indices), wanted, strict=True)
        )
    return op.take_along_axis(x, indices, axis=along)


def dynamic_update(x: Tensor, update: Tensor, start: Tensor | int, /, *, axis: int = 0) -> Tensor:
    """x, with its rows from `start` on along `axis` replaced by those of `update`, or with one row
    replaced by `update`, which then lacks that axis. A negative `start` counts from the end.

    In a captured loop the rows are written where they stand, and x is not copied, if nothing else
    needs it.

    x: [n, ...]; update: k rows [k, ...] or one row [...], in x's dtype; start: an int or i[] -> [n,
    ...]. Raises `ShapeError` for an update whose rows are not as long as those of x,
    `OperandValueError` for rows that lie outside of x, `AxisRefused` for an axis that x does not
    have, `DTypeError` for an update of another dtype and for a start that is no integer.

        >>> ml.dynamic_update(ml.zeros(4), ml.ones(()), ml.asarray(2))
        Tensor([0., 0., 1., 0.], f32[4])
    """
    types = (type_of(x, "dynamic_update"), type_of(update, "dynamic_update"))
    if not isinstance(start, (Tensor, int, np.integer)):
        raise DTypeError(f"start is an integer, not {brief(start)}").at("dynamic_update", types)
    if types[1].ndim == types[0].ndim - 1:
        update = expand_dims(update, axis=axis)
    at = start if isinstance(start, Tensor) else full((), start, dtype=i64)
    return op.dynamic_update(x, update, at, axis=axis)


def one_hot(x: Tensor, num_classes: int, /, *, dtype: object = f32) -> Tensor:
    """A new last axis of length `num_classes`: one at the index, zeros elsewhere.

    x: i[...] -> [..., num_classes] in `dtype`, f32 unless it is given. Raises `OperandValueError`
    for an index that is not in 0 .. num_classes - 1, `AttributeRefused` for a negative
    `num_classes`, `DTypeError` for an x of other than integers.

        >>> ml.one_hot(ml.asarray([2, 0]), 3)
        Tensor([[0., 0., 1.],
                [1., 0., 0.]], f32[2,3])
    """
    return op.one_hot(x, num_classes=num_classes, dtype=DType.of(dtype))


def nonzero(x: Tensor, /) -> tuple[Tensor, ...]:
    """The positions of the elements that are not zero, in row-major order: an i64 vector for each
    axis.

    x: [...] -> i64[k] for each axis, where k elements are not zero. Raises `ShapeError` for a
    scalar.

        >>> ml.nonzero(ml.asarray([0, 3, 0, 4]))
        (Tensor([1, 3], i64[2]),)
    """
    if type_of(x).ndim == 0:
        raise ShapeError("a scalar has no axes").at("nonzero", (x.type,))
    return unstack(op.nonzero_indices(x), axis=1)


def count_nonzero(x: Tensor, /, axis: Axis = None, *, keepdims: bool = False) -> Tensor:
    """How many elements along `axis` are not zero: i64. nan is not zero.

    x: [...], any dtype -> the shape of x without the axes in `axis` (None: all axes; kept with
    length 1 if `keepdims`), i64. Raises `AxisRefused` for an axis that x does not have.

        >>> ml.count_nonzero(ml.asarray([[0, 3], [1, 2]]), axis=1)
        Tensor([1, 2], i64[2])
    """
    type_of(x, "count_nonzero")
    try:
        return op.sum(astype(x, bool_), axis=axis, keepdims=keepdims)
    except OpError as error:
        error.op = "count_nonzero"
        raise


def where(condition: Tensor | bool, x: Operand, y: Operand, /) -> Tensor:
    """x where the condition holds, else y; all three broadcast, and any may be a number.

    x and y: shapes that broadcast to [...] with that of the condition, which is bool. The result:
    [...], the dtype that x and y promote to. Raises `ShapeError` for other shapes, `DTypeError` for
    a condition of another dtype, and for dtypes that do not promote.

        >>> ml.where(ml.asarray([True, False]), 1.0, ml.asarray([5.0, 6.0]))
        Tensor([1., 6.], f32[2])
    """
    if condition.__class__ is bool:
        condition = full((), condition)
    if not isinstance(x, Tensor) and not isinstance(y, Tensor):
        x = Tensor._taken(x) if is_array(x) else full((), cast(Scalar, x))
    beside = x if isinstance(x, Tensor) else cast(Tensor, y)
    chosen = operand(x, beside, _WHERE), operand(y, beside, _WHERE)
    type_of(cast(Tensor, condition), "where")
    return op.where(condition, *chosen)


def clip(x: Tensor, /, min: Operand | None = None, max: Operand | None = None) -> Tensor:
    """x limited to min <= x <= max, elementwise. None is no limit; if min > max, max wins.

    x and limits: shapes that broadcast to [...], any dtype but complex. The result: [...], the
    dtype that they promote to. Raises `ShapeError` for other shapes, `DTypeError` for other dtypes.

        >>> ml.clip(ml.asarray([-1.0, 0.5, 2.0]), 0.0, 1.0)
        Tensor([0. , 0.5, 1. ], f32[3])
    """
    type = type_of(x)
    if min is None and max is None:
        return alias_of(x)
    floats = type.dtype.is_float
    if min is None:
        min = -math.inf if floats else iinfo(type.dtype).min
    if max is None:
        max = math.inf if floats else iinfo(type.dtype).max
    return op.clip(x, min, max)


# --- statistics and products ---------------------------------------------------------


@in_f32
def std(
    x: Tensor, /, axis: Axis = None, *, correction: float = 0.0, keepdims: bool = False
) -> Tensor:
    """The standard deviation along `axis`: the square root of `var`. Where all elements are equal,
    its gradient is 0, like that of `sqrt` at 0.

    x: [...], any dtype but complex. The result: the shape and dtype that `var` has. Raises
    `AxisRefused` for an axis that x does not have, `DTypeError` for complex numbers.

        >>> ml.std(ml.asarray([1.0, 3.0]))
        Tensor(1., f32[])
    """
    try:
        variance = op.var(x, axis=axis, correction=correction, keepdims=keepdims)
    except OpError as error:
        error.op = "std"
        raise
    return op.sqrt(variance)


def outer(x: Tensor, y: Tensor, /) -> Tensor:
    """x[i] * y[j] for two vectors.

    x: [m], y: [n] -> [m, n].

    x: [m], y: [n] -> [m, n]. Raises `ShapeError` for other than vectors, `DTypeError` for bools and
    dtypes that do not promote.

        >>> ml.outer(ml.asarray([1.0, 2.0]), ml.asarray([3.0, 4.0]))
        Tensor([[3., 4.],
                [6., 8.]], f32[2,2])
    """
    types = type_of(x, "outer"), type_of(y, "outer")
    if types[0].ndim != 1 or types[1].ndim != 1:
        raise ShapeError("takes two tensors of 1 dimension").at("outer", types)
    return expand_dims(x, axis=1) * y


@in_f32
def diff(
    x: Tensor,
    /,
    n: int = 1,
    axis: int = -1,
    *,
    prepend: Operand | None = None,
    append: Operand | None = None,
) -> Tensor:
    """The differences of neighbours along `axis`, taken `n` times, so that it is shorter by n.

    `prepend` and `append` come before and behind x first; a number is one element everywhere.

    x: [..., m], any dtype but bool; the result: [..., m - n]. Raises `ShapeError` for others before
    and behind x that do not fit it, `AxisRefused` for an axis that x does not have,
    `AttributeRefused` for a negative n, `DTypeError` for bools.

        >>> ml.diff(ml.asarray([1.0, 4.0, 9.0]))
        Tensor([3., 5.], f32[2])
    """
    [along] = axes_of("diff", axis, x)
    [times] = counts_of("diff", integer(n, "n", "diff"), "n", x)
    if prepend is not None or append is not None:
        pieces = [_beside(each, x, along) for each in (prepend, x, append) if each is not None]
        x = concat(pieces, axis=along)
    for _ in range(times):
        length = x.shape[along]
        behind, before = range(min(1, length), length), range(max(0, length - 1))
        x = part(x, along, behind) - part(x, along, before)
    return alias_of(x) if times == 0 else x


def _beside(value: Operand, x: Tensor, axis: int) -> Tensor:
    """What is to be joined with x along an axis: a tensor, or a number as one element."""
    if isinstance(value, Tensor) or is_array(value):
        return operand(value, x, one_op("concat", axis=0))
    shape = [1 if i == axis else length for i, length in enumerate(x.shape)]
    return broadcast_to(operand(value, x, one_op("subtract")), shape)


def cumulative_sum(
    x: Tensor,
    /,
    axis: int | None = None,
    *,
    dtype: object = None,
    include_initial: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """The running sums along `axis` (None: the only one), in the dtype that `sum` uses. With
    `include_initial` a 0 comes before them, and the axis is longer by one.

    x: [...], any dtype -> [...] in `dtype`; without one, unsigned integers give u64, other integers
    and bools i64, floats and complex numbers their own. Raises `ShapeError` for an x of other than
    one dimension if `axis` is None, `AxisRefused` for an axis that x does not have, `DTypeError` if
    `dtype` is bool.

        >>> ml.cumulative_sum(ml.asarray([1.0, 2.0, 3.0]))
        Tensor([1., 3., 6.], f32[3])
    """
    wanted = None if dtype is None else DType.of(dtype)
    x = _counted(x, "cumulative_sum")
    if not include_initial:
        return op.cumulative_sum(x, axis=axis, dtype=wanted, out=out)
    if out is not None:
        raise AttributeRefused("there is no out with include_initial").at(
            "cumulative_sum", (x.type,)
        )
    return _after(0.0, op.cumulative_sum(x, axis=axis, dtype=wanted), axis)


def _counted(x: Tensor, function: str) -> Tensor:
    """x, with i64 for bools: sums and products count those."""
    return astype(x, i64) if type_of(x, function).dtype is bool_ else x


def _after(value: float, x: Tensor, axis: int | None) -> Tensor:
    """x with one element of that value before it along an axis (None: the only one)."""
    along = (axis or 0) % x.ndim
    return op.pad(x, widths=tuple((int(i == along), 0) for i in range(x.ndim)), value=value)


def cumulative_prod(
    x: Tensor,
    /,
    axis: int | None = None,
    *,
    dtype: object = None,
    include_initial: bool = False,
) -> Tensor:
    """The running products along `axis` (None: the only one), in the dtype that `prod` uses. With
    `include_initial` a 1 comes before them, and the axis is longer by one.

    log2(n) products of all elements, of which none is a division: gradients are right where x is 0
    (Hillis and Steele, Data Parallel Algorithms, CACM 29, 1986).

    x: [...], any dtype -> [...] in `dtype`; without one, unsigned integers give u64, other integers
    and bools i64, floats and complex numbers their own. Raises `ShapeError` for an x of other than
    one dimension if `axis` is None, `AxisRefused` for an axis that x does not have, `DTypeError` if
    `dtype` is bool.

        >>> ml.cumulative_prod(ml.asarray([1.0, 2.0, 3.0]))
        Tensor([1., 2., 6.], f32[3])
    """
    wanted = None if dtype is None else DType.of(dtype).name
    x = _counted(x, "cumulative_prod")
    try:
        kind = _inferred(one_op("cumulative_sum", axis=axis, dtype=wanted), x).dtype
    except OpError as error:
        error.op = "cumulative_prod"
        raise
    result = widened(astype(x, kind))
    along, step = (axis or 0) % x.ndim, 1
    while step < x.shape[along]:
        result, step = result * with_ones_before(result, along, step), 2 * step
    result = rounded(result, kind)
    return _after(1.0, result, axis) if include_initial else result


def with_ones_before(x: Tensor, axis: int, by: int) -> Tensor:
    """x moved `by` places on along an axis, with ones before it; what is beyond the end is gone."""
    by = min(by, x.shape[axis])
    kept = part(x, axis, range(x.shape[axis] - by))
    return op.pad(kept, widths=tuple((by * (i == axis), 0) for i in range(x.ndim)), value=1.0)


def sum_to(x: Tensor, type: TensorType) -> Tensor:
    """x summed over the axes that broadcasting added or stretched from `type`, and cast to it. A
    real type gets the real part."""
    if x.dtype.kind == "complex" and type.dtype.is_float:
        x = op.real(x)
    if x.dtype is not type.dtype:
        x = astype(x, type.dtype)
    axes = _broadcast_axes(x.shape, type.shape)
    if axes:
        x = op.sum(x, axis=axes)
    return x if x.type is type else reshape(x, type.shape)


@lru_cache(maxsize=4096)
def _broadcast_axes(shape: Shape, original: Shape) -> tuple[int, ...]:
    """The axes that broadcasting from `original` to `shape` added or stretched."""
    extra = len(shape) - len(original)
    return tuple(
        i for i, n in enumerate(shape) if i < extra or (original[i - extra] == 1 and n != 1)
    )


def pair(value: int | Sequence[int], name: str, function: str, *, least: int = 1) -> Pair:
    """A pair of ints >= `least`, such as (vertical, horizontal); one int stands for both.

    Raises `AttributeRefused`, which names the value and the function.
    """
    ints = integers(value, name, function)
    if len(ints) not in (1, 2) or min(ints) < least:
        raise AttributeRefused(f"{name} must be one or two integers >= {least}, given {value}").at(
            function, ()
        )
    return ints[0], ints[-1]
