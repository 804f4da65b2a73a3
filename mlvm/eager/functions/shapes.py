"""Shape functions: reshape, join, split and repeat.

A function that changes only the shape does not copy: the result refers to the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias, cast, get_args

import numpy as np

from mlvm.core import rules
from mlvm.core.errors import ArgumentError, DTypeError, ShapeError, TransposeError, brief, counted
from mlvm.core.ops.windows import Pair
from mlvm.core.rules import Axis
from mlvm.core.types import Shape
from mlvm.eager.functions.arguments import (
    Ints,
    Span,
    axes_of,
    counts_of,
    inferred,
    integer,
    integers,
    pair,
    sliced,
    span,
    type_of,
)
from mlvm.eager.functions.creation import arange, asarray, full
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.apply import alias, alias_of, apply, one_op
from mlvm.eager.tensor.constants import constant
from mlvm.eager.tensor.operands import (
    as_operand,
    as_operands,
    in_groups,
    is_array,
    is_whole,
    widest_of,
)
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.wrapper import public


@public
def reshape(x: Tensor, /, shape: Ints, *, copy: bool | None = None) -> Tensor:
    """Arrange the elements of x, in row-major order, in a different shape; one length may be -1.

    The elements are copied only if `copy` is True.

    x: [...] -> [*shape], the same dtype. Raises `ShapeError` if the elements do not fill the shape.

        >>> ml.reshape(ml.arange(6), (2, -1))
        Tensor([[0, 1, 2],
                [3, 4, 5]], i64[2,3])
    """
    if copy:
        x = op.copy(x)
    type, lengths = type_of(x), integers(shape, "shape")
    if -1 in lengths:
        if lengths.count(-1) > 1:
            raise ShapeError(f"expected at most one -1, got {lengths.count(-1)}")
        rest = -math.prod(lengths)
        if rest <= 0 or type.size % rest:
            raise ShapeError(
                f"cannot infer -1: expected lengths that divide {type.size} elements, got {lengths}"
            )
        lengths = tuple(type.size // rest if n == -1 else n for n in lengths)
    return _shaped(x, lengths)


def _shaped(x: Tensor, lengths: Sequence[int]) -> Tensor:
    """Reshape x to lengths that are known to be integers."""
    call = one_op("reshape", shape=tuple(lengths))
    return alias(call, x, inferred(call, x))


@public
def expand_dims(x: Tensor, /, axis: int | tuple[int, ...] = 0) -> Tensor:
    """Insert axes of length 1 at these positions of the result.

    x: [n, m] -> [1, n, m] for axis 0. Raises `AxisError` if the result has no such axis.

        >>> ml.expand_dims(ml.asarray([1.0, 2.0]), axis=1)
        Tensor([[1.],
                [2.]], f32[2,1])
    """
    axes, lengths = integers(axis, "axis"), iter(type_of(x).shape)
    ndim = x.ndim + len(axes)
    new = rules.normalize_axes(axes, ndim)
    return _shaped(x, [1 if i in new else next(lengths) for i in range(ndim)])


@public
def squeeze(x: Tensor, /, axis: Axis = None) -> Tensor:
    """Remove these axes, which must have length 1; None removes all axes of length 1.

    x: [1, n] -> [n] for axis 0. Raises `ShapeError` if the length of an axis is not 1;
    `AxisError` if x has no such axis.

        >>> ml.squeeze(ml.zeros((1, 3, 1)), axis=0).shape
        (3, 1)
    """
    if axis is None:
        return _shaped(x, [n for n in type_of(x).shape if n != 1])
    removed = axes_of(axis, x)
    for i in removed:
        if x.shape[i] != 1:
            raise ShapeError(f"expected length 1 for axis {i}, got {x.shape[i]}")
    return _shaped(x, [n for i, n in enumerate(x.shape) if i not in removed])


@public
def permute_dims(x: Tensor, /, axes: Sequence[int] | None = None) -> Tensor:
    """Reorder the axes of x: axis i of the result is axis axes[i] of x. None reverses the axes.

    The result shares memory with x if the order of the axes longer than 1 does not change.

    x: [n, m] -> [m, n] for axes (1, 0). Raises `AxisError` if x has no such axis or an axis
    occurs twice; `ArgumentError` unless `axes` contains all axes.

        >>> ml.permute_dims(ml.zeros((2, 3, 4)), (2, 0, 1)).shape
        (4, 2, 3)

    Invalid calls:
        ml.permute_dims(x, (0,))  # ArgumentError
    """
    order = tuple(reversed(range(x.ndim))) if axes is None else integers(axes, "axes")
    result = inferred(one_op("permute_dims", axes=order), x)
    long = [i % x.ndim for i in order if x.shape[i] != 1]
    return _shaped(x, result.shape) if long == sorted(long) else op.permute_dims(x, axes=order)


@public
def matrix_transpose(x: Tensor, /) -> Tensor:
    """Swap the last two axes of x, `x.mT`, without a copy if one of them has length 1.

    x: [..., m, n] -> [..., n, m]. Raises `TransposeError` if x has fewer than two axes.

        >>> ml.matrix_transpose(ml.asarray([[1, 2, 3]]))
        Tensor([[1],
                [2],
                [3]], i64[3,1])
    """
    type_of(x)
    return transposed(x)


def transposed(x: Tensor) -> Tensor:
    """Swap the last two axes: `x.mT`. Raises `TransposeError` if x has fewer than two dimensions.

    Invalid calls:
        v.mT  # TransposeError
    """
    shape, ndim = x.type.shape, x.type.ndim
    if ndim < 2:
        raise TransposeError(f"expected 2 dimensions or more for mT, got {x.ndim}; reshape x").at(
            "mT", (x.type,)
        )
    if shape[-1] == 1 and shape[-2] == 1:
        return alias_of(x)
    *rest, rows, columns = shape
    if 1 in (rows, columns):
        swapped = x.type.with_shape((*rest, columns, rows))
        return alias(one_op("reshape", shape=swapped.shape), x, swapped)
    return apply(one_op("permute_dims", axes=(*range(ndim - 2), ndim - 1, ndim - 2)), x)


@public
def flatten(x: Tensor, /, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """Merge the axes from `start_dim` to `end_dim`, as in PyTorch; by default, flatten to a vector.

    x: [..., m, n, ...] -> [..., m * n, ...]. Raises `AxisError` if x has no such axis;
    `ArgumentError` if the end is before the start.

        >>> ml.flatten(ml.zeros((2, 3, 4)), 1).shape
        (2, 12)

    Invalid calls:
        ml.flatten(x, 1, 0)  # ArgumentError
        ml.flatten(x, 9)  # AxisError
    """
    if not type_of(x).ndim:
        return reshape(x, -1)
    [first], [last] = axes_of(start_dim, x), axes_of(end_dim, x)
    if last < first:
        raise ArgumentError(f"expected end_dim after start_dim={start_dim}, got {end_dim}")
    length = math.prod(x.shape[first : last + 1])
    return reshape(x, (*x.shape[:first], length, *x.shape[last + 1 :]))


@public
def moveaxis(
    x: Tensor, source: int | tuple[int, ...], destination: int | tuple[int, ...], /
) -> Tensor:
    """Move the axes `source` to the positions `destination`; the remaining axes stay in order.

    x: [k, n, m] -> [n, m, k] for 0 and -1. Raises `AxisError` if x has no such axis or an axis
    occurs twice; `ArgumentError` unless `source` and `destination` have the same length.

        >>> ml.moveaxis(ml.zeros((2, 3, 4)), 0, -1).shape
        (3, 4, 2)

    Invalid calls:
        ml.moveaxis(x, (0, 1), (0,))  # ArgumentError
    """
    sources, destinations = axes_of(source, x), axes_of(destination, x)
    if len(sources) != len(destinations):
        raise ArgumentError(f"expected equal numbers of axes, got {source} and {destination}")
    order = [i for i in range(x.ndim) if i not in sources]
    for position, axis in sorted(zip(destinations, sources, strict=True)):
        order.insert(position, axis)
    return permute_dims(x, order)


@public
def swapaxes(x: Tensor, /, axis1: int, axis2: int) -> Tensor:
    """Swap two axes of x.

    x: [..., m, ..., n, ...] -> [..., n, ..., m, ...]. Raises `AxisError` if x has no such axis.

        >>> ml.swapaxes(ml.zeros((2, 3, 4)), 0, 2).shape
        (4, 3, 2)

    Invalid calls:
        ml.swapaxes(x, 0, 9)  # AxisError
    """
    [i], [j] = axes_of(axis1, x), axes_of(axis2, x)
    return moveaxis(x, (i, j), (j, i)) if i != j else alias_of(x)


@public
def broadcast_to(x: Tensor, /, shape: Ints) -> Tensor:
    """Repeat x along new leading axes and along axes of length 1, up to `shape`.

    If no axis is repeated, the result shares memory with x.

    The result: [*shape], the dtype of x. Raises `ShapeError` if x does not broadcast to it.

        >>> ml.broadcast_to(ml.asarray([1.0, 2.0]), (2, 2))
        Tensor([[1., 2.],
                [1., 2.]], f32[2,2])
    """
    lengths = integers(shape, "shape")
    if inferred(one_op("broadcast_to", shape=lengths), x).size == x.size:
        return reshape(x, lengths)
    return op.broadcast_to(x, shape=lengths)


@public
def broadcast_shapes(*shapes: Ints) -> Shape:
    """Return the shape that tensors of these shapes broadcast to.

    Raises `ShapeError` if there is none.

        >>> ml.broadcast_shapes((3, 1), (4,))
        (3, 4)

    Invalid calls:
        ml.broadcast_shapes((2,), (3,))  # ShapeError
    """
    lengths = [integers(shape, "a shape") for shape in shapes]
    try:
        return rules.broadcast_shapes(*lengths)
    except ShapeError as error:
        raise error.at("broadcast_shapes", lengths) from None


@public
def broadcast_arrays(*arrays: Tensor) -> tuple[Tensor, ...]:
    """Broadcast the tensors to a common shape.

    Each result: [...], the dtype of the tensor. Raises `ShapeError` if the shapes do not broadcast.

        >>> [x.shape for x in ml.broadcast_arrays(ml.zeros((2, 1)), ml.zeros(3))]
        [(2, 3), (2, 3)]
    """
    shape = rules.broadcast_shapes(*[type_of(x).shape for x in arrays])
    return tuple([broadcast_to(x, shape) for x in arrays])


@public
def meshgrid(*arrays: Tensor, indexing: Literal["xy", "ij"] = "xy") -> tuple[Tensor, ...]:
    """Return the coordinate tensors of the grid that vectors span.

    With "xy" the first two axes are swapped.

    [n] and [m] -> two tensors [m, n], or [n, m] with "ij". Raises `ShapeError` if an operand is not
    a vector; `ArgumentError` if `indexing` is unknown.

        >>> ml.meshgrid(ml.arange(2), ml.arange(3))[0]
        Tensor([[0, 1],
                [0, 1],
                [0, 1]], i64[3,2])

    Invalid calls:
        ml.meshgrid(v, indexing="yx")  # ArgumentError
    """
    types = [type_of(x) for x in arrays]
    if indexing not in ("xy", "ij"):
        raise ArgumentError(f'expected indexing as "xy" or "ij", got {indexing!r}')
    if any(type.ndim != 1 for type in types):
        ndim = next(type.ndim for type in types if type.ndim != 1)
        raise ShapeError(f"expected tensors of 1 dimension, got one of {ndim}")
    axes = list(range(len(arrays)))
    if indexing == "xy":
        axes[:2] = reversed(axes[:2])
    others = [tuple(i for i in range(len(arrays)) if i != axis) for axis in axes]
    return broadcast_arrays(*[expand_dims(x, axis=i) for x, i in zip(arrays, others, strict=True)])


@public
def concat(arrays: Iterable[Tensor], /, axis: int | None = 0) -> Tensor:
    """Join the tensors along `axis`; None flattens them first.

    dtypes promote.

    The tensors have the same shape except along `axis`, and so does the result. Raises `ShapeError`
    if the shapes do not fit, or there are no tensors; `AxisError` if an operand has no such axis;
    `DTypeError` if the dtypes do not promote.

        >>> ml.concat([ml.zeros((1, 2)), ml.ones((1, 2))], axis=0)
        Tensor([[0., 0.],
                [1., 1.]], f32[2,2])

    Invalid calls:
        ml.concat([ml.ones(2, dtype="u64"), ml.ones(2, dtype="i64")])  # DTypeError
    """
    xs = tuple(arrays)
    if axis is None:
        xs, axis = tuple([reshape(x, -1) for x in xs]), 0
    if len(xs) == 1:
        axes_of(axis, xs[0])
        return alias_of(xs[0])
    return op.concat(*in_groups(xs, axis), axis=axis)


@public
def stack(arrays: Iterable[Tensor], /, axis: int = 0) -> Tensor:
    """Join tensors of the same shape along a new axis.

    The tensors: [...]; the result: [k, ...] for k tensors and axis 0. Raises `ShapeError` if the
    shapes differ, or there are no tensors; `AxisError` if the result has no such axis;
    `DTypeError` if the dtypes do not promote.

        >>> ml.stack([ml.zeros(2), ml.ones(2)])
        Tensor([[0., 0.],
                [1., 1.]], f32[2,2])

    Invalid calls:
        ml.stack([ml.ones(2, dtype="u64"), ml.ones(2, dtype="i64")])  # DTypeError
    """
    xs = list(arrays)
    if any(type(x) is not Tensor for x in xs):
        like, widest = next((x for x in xs if isinstance(x, Tensor)), None), widest_of(xs)
        xs = [as_operand(x, widest if is_whole(x) else like) if is_array(x) else x for x in xs]
    shapes = [x.shape for x in xs if isinstance(x, Tensor)]
    if any(each != shapes[0] for each in shapes):
        other = next(each for each in shapes if each != shapes[0])
        raise ShapeError(f"expected equal shapes, got {shapes[0]} and {other}")
    is_same = all(isinstance(x, Tensor) and x.type is xs[0].type for x in xs)
    if is_same and len(xs) > 1 and type(axis) is int and not xs[0].dtype.is_storage:
        along, shape = rules.normalize_axis(axis, xs[0].ndim + 1), xs[0].shape
        if along < len(shape):  # a single view, instead of a view per operand
            joined = op.concat(*in_groups(xs, along), axis=along)
            return _shaped(joined, [*shape[:along], len(xs), *shape[along:]])
        call = one_op("reshape", shape=(*shape, 1))
        type_with_axis = inferred(call, xs[0])
        columns = [alias(call, x, type_with_axis) for x in xs]
        return op.concat(*in_groups(columns, along), axis=along)
    return concat([expand_dims(x, axis=axis) for x in xs], axis=axis)


def several(arrays: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Convert the tensors. Raises `ShapeError` if there are none."""
    xs = [*arrays]
    if not xs:
        raise ShapeError("expected at least one tensor, got none")
    return as_operands(xs)


@public
def vstack(arrays: Iterable[Tensor], /) -> Tensor:
    """Join the tensors along the first axis; vectors become rows.

    The tensors: shape [n] for all, or [..., *rest]; the result: [k, n] for k vectors, else [...,
    *rest]. Raises `ShapeError` if the shapes do not fit, or there are no tensors; `DTypeError` if
    the dtypes do not promote.

        >>> ml.vstack([ml.zeros(2), ml.ones(2)])
        Tensor([[0., 0.],
                [1., 1.]], f32[2,2])

    Invalid calls:
        ml.vstack([ml.ones(2, dtype="u64"), ml.ones(2, dtype="i64")])  # DTypeError
    """
    return concat([reshape(x, (1, -1)) if x.ndim < 2 else x for x in several(arrays)])


@public
def hstack(arrays: Iterable[Tensor], /) -> Tensor:
    """Join the tensors along the second axis; vectors are joined along the only axis.

    The tensors have the same shape except along that axis, and so does the result. Raises
    `ShapeError` if the shapes do not fit, or there are no tensors; `DTypeError` if the dtypes do
    not promote.

        >>> ml.hstack([ml.zeros((2, 1)), ml.ones((2, 1))])
        Tensor([[0., 1.],
                [0., 1.]], f32[2,2])

    Invalid calls:
        ml.hstack([ml.ones(2, dtype="u64"), ml.ones(2, dtype="i64")])  # DTypeError
    """
    xs = [reshape(x, -1) if not x.ndim else x for x in several(arrays)]
    return concat(xs, axis=min(1, xs[0].ndim - 1))


@public
def split(x: Tensor, indices_or_sections: Ints, axis: int = 0) -> list[Tensor]:
    """Split x along `axis` into equal sections, or before each of the indices.

    x: [n, ...] -> [n / sections, ...] each, along axis 0. Raises `ShapeError` if the length is not
    a multiple of the number of sections; `AxisError` if x has no such axis.

        >>> ml.split(ml.arange(6), 3)
        [Tensor([0, 1], i64[2]), Tensor([2, 3], i64[2]), Tensor([4, 5], i64[2])]

    Invalid calls:
        ml.split(v, 3)  # ShapeError
    """
    [along] = axes_of(axis, x)
    length = x.shape[along]
    numbers = integers(indices_or_sections, "indices_or_sections")
    if isinstance(indices_or_sections, int):
        [sections] = numbers
        if sections < 1:
            raise ShapeError(f"expected 1 or more sections, got {sections}")
        if length % sections:
            raise ShapeError(
                f"cannot divide length {length} into {sections} equal sections; use array_split"
            )
        cuts = tuple(length // sections * i for i in range(1, sections))
    else:
        cuts = numbers
    bounds = zip((None, *cuts), (*cuts, None), strict=True)
    return [part(x, along, sliced(slice(first, end), length)) for first, end in bounds]


@public
def unstack(x: Tensor, /, axis: int = 0) -> tuple[Tensor, ...]:
    """Split x into slices along `axis`, without that axis.

    x: [n, ...] -> n tensors [...] along axis 0. Raises `AxisError` if x has no such axis.

        >>> ml.unstack(ml.asarray([[1, 2], [3, 4]]))
        (Tensor([1, 2], i64[2]), Tensor([3, 4], i64[2]))
    """
    [along] = axes_of(axis, x)
    places = [range(i, i + 1) for i in range(x.shape[along])]
    return tuple(squeeze(part(x, along, place), along) for place in places)


def part(x: Tensor, axis: int, positions: range | Span) -> Tensor:
    """Return the elements of x at these consecutive positions along an axis."""
    count = len(positions) if isinstance(positions, range) else positions.length
    if count == x.shape[axis]:
        return alias_of(x)
    start, length = [0] * x.ndim, list(x.shape)
    start[axis], length[axis] = positions.start, count
    return op.slice(x, start=tuple(start), length=tuple(length), step=(1,) * x.ndim)


def neighbours(x: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Return all elements along an axis except the first, and all except the last."""
    n = x.shape[axis]
    return part(x, axis, span(min(1, n), n)), part(x, axis, span(max(0, n - 1)))


@public
def tile(x: Tensor, repetitions: Ints, /) -> Tensor:
    """Repeat x repetitions[i] times along axis i.

    If shape and repetitions differ in length, ones are prepended to the shorter one.

    x: [n] -> [n repetitions]. Raises `ArgumentError` if a number is negative.

        >>> ml.tile(ml.asarray([1, 2]), (2,))
        Tensor([1, 2, 1, 2], i64[4])

    Invalid calls:
        ml.tile(v, -1)  # ArgumentError
    """
    times, lengths = counts_of(repetitions, "repetitions"), type_of(x).shape
    ndim = max(len(times), len(lengths))
    times, lengths = (1,) * (ndim - len(times)) + times, (1,) * (ndim - len(lengths)) + lengths
    spaced = reshape(x, [m for n in lengths for m in (1, n)])
    tiled = broadcast_to(spaced, [m for k, n in zip(times, lengths, strict=True) for m in (k, n)])
    return reshape(tiled, [k * n for k, n in zip(times, lengths, strict=True)])


@public
def repeat(x: Tensor, repeats: Ints | Tensor, /, axis: int | None = None) -> Tensor:
    """Repeat each element `repeats` times consecutively along `axis` (None: flattened first).

    `repeats` may be a vector of integers, one per position along the axis. The values are read,
    because they determine the shape.

    x: [n, ...] -> [n repeats, ...] along axis 0. Raises `ShapeError` if `repeats` is a vector of a
    different length; `DTypeError` if `repeats` is not of integers; `ArgumentError` if a number is
    negative; `AxisError` if x has no such axis.

        >>> ml.repeat(ml.asarray([1, 2]), 2)
        Tensor([1, 1, 2, 2], i64[4])

    Invalid calls:
        ml.repeat(v, -1)  # ArgumentError
        ml.repeat(v, v)  # DTypeError
        ml.repeat(v, ml.asarray([1, 2, 3]))  # ShapeError
    """
    if axis is None:
        x, axis = reshape(x, type_of(x).size), 0
    [along] = axes_of(axis, x)
    counts = counts_of(_listed(repeats), "repeats")
    before, behind = x.shape[: along + 1], x.shape[along + 1 :]
    if len(counts) == 1:
        [n] = counts
        repeated = broadcast_to(reshape(x, (*before, 1, *behind)), (*before, n, *behind))
        return reshape(repeated, (*before[:-1], before[-1] * n, *behind))
    if len(counts) != x.shape[along]:
        raise ShapeError(
            f"expected {counted(x.shape[along], 'repeat')} for axis {axis}, got {len(counts)}"
        )
    return op.take(x, asarray(np.repeat(np.arange(len(counts)), counts)), axis=along)


def _listed(repeats: Ints | Tensor) -> Ints:
    """Return the numbers of `repeat` as ints; a tensor is read."""
    if isinstance(repeats, np.ndarray):
        repeats = as_operand(repeats)
    if not isinstance(repeats, Tensor):
        return repeats
    if not repeats.dtype.is_integer:
        raise DTypeError(f"expected integers as repeats, got {repeats.dtype.name}")
    if repeats.ndim > 1:
        raise ShapeError(f"expected repeats as a number or a vector, got {repeats.type}")
    counts: Ints = repeats.tolist()
    return counts


@public
def roll(x: Tensor, /, shift: int | Sequence[int | Tensor] | Tensor, axis: Axis = None) -> Tensor:
    """Move every element by `shift` positions along `axis` (None: in row-major order).

    Elements that move beyond the end reappear at the front. Several axes have one shift each or
    share one. A shift may be a tensor with one integer, such as the counter of a loop.

    x: [...], and so is the result. Raises `AxisError` if x has no such axis; `ArgumentError`
    unless the numbers of shifts and axes are equal; `DTypeError` if a tensor `shift` is not of
    integers; `ShapeError` if it has several elements.

        >>> ml.roll(ml.asarray([1, 2, 3]), 1)
        Tensor([3, 1, 2], i64[3])

    Invalid calls:
        ml.roll(v, (1, 2), 0)  # ArgumentError
        ml.roll(v, v)  # DTypeError
        ml.roll(v, ints)  # ShapeError
    """
    if isinstance(shift, np.ndarray):  # as numpy accepts it
        shift = shift.tolist()
    shifts = shift if isinstance(shift, (list, tuple)) else [shift]
    if not any(isinstance(each, Tensor) for each in shifts):
        return op.roll(x, shift=cast("int | tuple[int, ...]", shift), axis=axis)
    axes = [0] if axis is None else axes_of(axis, x)
    if shift is not shifts:
        shifts = [shift] * len(axes)
    if len(shifts) != len(axes):
        raise ArgumentError(f"expected one shift per axis, got {len(shifts)} for axis {axis}")
    rolled = reshape(x, -1) if axis is None else x
    for along, by in zip(axes, shifts, strict=True):
        n = rolled.shape[along]
        number = one_integer(by, "a shift") if isinstance(by, Tensor) else by
        rolled = op.take(rolled, op.remainder(arange(n) - number, max(n, 1)), axis=along)
    return reshape(rolled, x.shape)


@public
def tril(x: Tensor, /, k: int | Tensor = 0) -> Tensor:
    """Return the matrices in the last two axes, with zeros above the k-th diagonal.

    Diagonal 0 is the main diagonal. `k` may be a tensor with one integer, such as the counter of a
    loop.

    x: [..., m, n], any dtype, and so is the result. Raises `ShapeError` for fewer than two axes, or
    if `k` has several elements; `DTypeError` if a tensor `k` is not of integers.

        >>> ml.tril(ml.ones((3, 3)))
        Tensor([[1., 0., 0.],
                [1., 1., 0.],
                [1., 1., 1.]], f32[3,3])

    Invalid calls:
        ml.tril(x, k=ints)  # ShapeError
        ml.tril(x, k=v)  # DTypeError
    """
    if isinstance(k, Tensor):
        return _triangle(x, k, below=True)
    return op.tril(x, k=k)


@public
def triu(x: Tensor, /, k: int | Tensor = 0) -> Tensor:
    """Return the matrices in the last two axes, with zeros below the k-th diagonal.

    Diagonal 0 is the main diagonal. `k` may be a tensor with one integer, such as the counter of a
    loop.

    x: [..., m, n], any dtype, and so is the result. Raises `ShapeError` for fewer than two axes, or
    if `k` has several elements; `DTypeError` if a tensor `k` is not of integers.

        >>> ml.triu(ml.ones((3, 3)), k=1)
        Tensor([[0., 1., 1.],
                [0., 0., 1.],
                [0., 0., 0.]], f32[3,3])

    Invalid calls:
        ml.triu(x, k=v)  # DTypeError
        ml.triu(x, k=ints)  # ShapeError
    """
    if isinstance(k, Tensor):
        return _triangle(x, k, below=False)
    return op.triu(x, k=k)


def one_integer(x: Tensor, what: str) -> Tensor:
    """Return a tensor with one integer as an i64[]."""
    rules.require("integer", x.type)
    if x.size != 1:
        raise ShapeError(f"expected {what} of one element, got {x.type}")
    return op.astype(reshape(x, ()), dtype="i64")


def _triangle(x: Tensor, k: Tensor, *, below: bool) -> Tensor:
    """Keep the elements on and below, or on and above, a diagonal with a tensor as its number."""
    last = one_integer(k, "k")
    if x.ndim < 2:
        raise ShapeError(f"expected matrices with 2 dimensions or more, got {x.ndim}; reshape x")
    diagonals = arange(x.shape[-1]) - reshape(arange(x.shape[-2]), (-1, 1))
    chosen = (op.less_equal if below else op.greater_equal)(diagonals, last)
    zero = constant(False if x.dtype.kind == "bool" else 0, x.dtype)
    return op.where(chosen, x, zero)


@public
def rot90(x: Tensor, k: int = 1, axes: tuple[int, int] = (0, 1)) -> Tensor:
    """Rotate x k times by 90 degrees, from the first of the two axes to the second.

    x: [m, n, ...] -> [n, m, ...] for an odd k. Raises `AxisError` if x has no such axis;
    `ArgumentError` unless there are two axes.

        >>> ml.rot90(ml.asarray([[1, 2], [3, 4]]))
        Tensor([[2, 4],
                [1, 3]], i64[2,2])

    Invalid calls:
        ml.rot90(x, 1, (0,))  # ArgumentError
    """
    several = axes_of(axes, x, name="axes")
    if len(several) != 2:
        raise ArgumentError(f"expected two axes, got {brief(axes)}")
    first, second = several
    turns = integer(k, "k") % 4
    if turns == 0:
        return alias_of(x)
    if turns == 2:
        return op.flip(x, axis=several)
    order = list(range(x.ndim))
    order[first], order[second] = second, first
    if turns == 1:
        return permute_dims(op.flip(x, axis=second), order)
    return op.flip(permute_dims(x, order), axis=second)


Border: TypeAlias = Literal["constant", "edge", "reflect", "symmetric", "wrap"]
"""Mode of `pad`."""


@public
def pad(
    x: Tensor, /, widths: int | Sequence[Any], value: complex = 0.0, *, mode: Border = "constant"
) -> Tensor:
    """Pad x with `value`, or with elements of x.

    `widths` is one int for all sides, a pair (before, after) for all axes, or one pair per axis. A
    negative width removes elements from that side.

    The modes have numpy's names: "constant" uses `value`, "edge" repeats the edge, "symmetric"
    mirrors x including the edge, "reflect" mirrors it without the edge, and "wrap" continues at the
    opposite end. A border wider than x repeats the pattern.

    x: [n, ...] -> [before + n + after, ...]. Raises `ArgumentError` if a width is negative in a
    mode other than "constant", the numbers of pairs and axes differ, integers cannot represent the
    value, or the mode is unknown; `ShapeError` if more elements would be removed than there are, or
    the border would repeat elements of an empty axis.

        >>> ml.pad(ml.asarray([1.0, 2.0]), 1)
        Tensor([0., 1., 2., 0.], f32[4])
        >>> ml.pad(ml.asarray([1.0, 2.0, 3.0]), (0, 2), mode="reflect")
        Tensor([1., 2., 3., 2., 1.], f32[5])

    Invalid calls:
        ml.pad(x, (1, 2, 3))  # ArgumentError
        ml.pad(ints, 1, 0.5)  # ArgumentError
        ml.pad(x, 1, mode="odd")  # ArgumentError
        ml.pad(x[:0], 1, mode="edge")  # ShapeError
    """
    ndim = type_of(x).ndim
    if isinstance(widths, int):
        widths = (widths, widths)
    if len(widths) == 2 and all(isinstance(width, int) for width in widths):
        widths = [widths] * ndim
    least = 0 if mode != "constant" else -(2**63)
    pairs = tuple(pair(width, "widths", least=least) for width in widths)
    if mode == "constant" and min(map(min, pairs), default=0) < 0:
        x = _cropped(x, pairs)
        pairs = tuple((max(before, 0), max(after, 0)) for before, after in pairs)
    if mode != "constant":
        return _bordered(x, pairs, mode)
    large = isinstance(value, int) and abs(value) > 2**53  # f64 may not represent it
    if not large and not isinstance(value, complex):
        return op.pad(x, widths=pairs, value=float(value) if value.__class__ is bool else value)
    inside = op.pad(full(x.shape, True), widths=pairs)
    return op.where(inside, op.pad(x, widths=pairs), as_operand(value, x))


def _cropped(x: Tensor, pairs: tuple[Pair, ...]) -> Tensor:
    """Remove elements from the sides of x with negative widths."""
    if len(pairs) != x.ndim:
        raise ArgumentError(f"expected {counted(x.ndim, 'pair')} of widths, got {len(pairs)}")
    for axis, (before, after) in enumerate(pairs):
        start, stop = max(-before, 0), x.shape[axis] - max(-after, 0)
        if start > stop:
            raise ShapeError(
                f"expected to remove at most {x.shape[axis]} elements, the length of axis "
                f"{axis}, got more"
            )
        x = part(x, axis, span(start, stop))
    return x


def _bordered(x: Tensor, pairs: tuple[Pair, ...], mode: Border) -> Tensor:
    """Pad x with elements of x, by a pattern of positions along each axis."""
    if mode not in get_args(Border):
        raise ArgumentError(f"expected mode {', '.join(get_args(Border))}, got {brief(mode)}")
    inferred(one_op("pad", widths=pairs), x)  # rejects invalid widths
    for axis, (before, after) in enumerate(pairs):
        if before == after == 0:
            continue
        n = x.shape[axis]
        if n == 0:
            raise ShapeError(f"expected elements to repeat along axis {axis}, got length 0")
        places = arange(-before, n + after)
        if mode == "edge":
            places = op.clip(places, 0, n - 1)
        elif mode == "wrap":
            places = op.remainder(places, n)
        else:
            # the period of the pattern, forwards and backwards
            last = 2 * n - 1 if mode == "symmetric" else 2 * n - 2
            places = op.remainder(places, 2 * n if mode == "symmetric" else max(last, 1))
            places = op.minimum(places, last - places)
        x = op.take(x, places, axis=axis)
    return alias_of(x)
