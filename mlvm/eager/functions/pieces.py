"""Functions that split, join and cut tensors, with numpy's names."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np

from mlvm.core.errors import ArgumentError, DTypeError, ShapeError, brief
from mlvm.eager.functions.arguments import (
    MOST_PARTS,
    Ints,
    axes_of,
    counts_of,
    integer,
    integers,
    sliced,
    span,
    type_of,
)
from mlvm.eager.functions.creation import asarray
from mlvm.eager.functions.shapes import concat, expand_dims, part, reshape, several, split
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.operands import Operand, as_operand
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.wrapper import public


@public
def array_split(x: Tensor, indices_or_sections: Ints, axis: int = 0) -> list[Tensor]:
    """Split x along `axis` into nearly equal sections, or before each of the indices.

    Longer sections come first.

    x: [n, ...] -> tensors [..., ...] along axis 0. For a number of sections, the lengths differ by
    at most 1. Raises `ArgumentError` for less than one section or very many; `AxisError` if x has
    no such axis.

        >>> ml.array_split(ml.arange(5), 2)
        [Tensor([0, 1, 2], i64[3]), Tensor([3, 4], i64[2])]

    Invalid calls:
        ml.array_split(v, 0)  # ArgumentError
    """
    if isinstance(indices_or_sections, (tuple, list)):
        return split(x, indices_or_sections, axis)
    [along] = axes_of(axis, x)
    sections = integer(cast(int, indices_or_sections), "indices_or_sections")
    if not 1 <= sections <= MOST_PARTS:
        raise ArgumentError(f"expected 1 .. {MOST_PARTS} sections, got {sections}")
    least, longer = divmod(x.shape[along], sections)
    cuts = [i * least + min(i, longer) for i in range(1, sections)]
    return split(x, cuts, axis=along)


@public
def hsplit(x: Tensor, indices_or_sections: Ints) -> list[Tensor]:
    """Split x along the second axis like `split`; a vector is split along the only axis.

    x: [m, n, ...] -> [m, n / sections, ...] each. Raises `ShapeError` if x has no dimension, or the
    length does not divide into equal sections.

        >>> ml.hsplit(ml.arange(4), 2)
        [Tensor([0, 1], i64[2]), Tensor([2, 3], i64[2])]

    Invalid calls:
        ml.hsplit(v, 3)  # ShapeError
    """
    _require_ndim(x, 1)
    return split(x, indices_or_sections, axis=min(1, x.ndim - 1))


@public
def vsplit(x: Tensor, indices_or_sections: Ints) -> list[Tensor]:
    """Split x along the first axis, like `split`.

    x: [m, n, ...] -> [m / sections, n, ...] each. Raises `ShapeError` if x has fewer than two
    dimensions, or the length does not divide into equal sections.

        >>> [each.shape for each in ml.vsplit(ml.zeros((4, 2)), 2)]
        [(2, 2), (2, 2)]

    Invalid calls:
        ml.vsplit(v, 2)  # ShapeError
    """
    _require_ndim(x, 2)
    return split(x, indices_or_sections, axis=0)


@public
def dsplit(x: Tensor, indices_or_sections: Ints) -> list[Tensor]:
    """Split x along the third axis, like `split`.

    x: [m, n, k, ...] -> [m, n, k / sections, ...] each. Raises `ShapeError` if x has fewer than
    three dimensions, or the length does not divide into equal sections.

        >>> [each.shape for each in ml.dsplit(ml.zeros((1, 1, 4)), [1])]
        [(1, 1, 1), (1, 1, 3)]

    Invalid calls:
        ml.dsplit(v, 2)  # ShapeError
    """
    _require_ndim(x, 3)
    return split(x, indices_or_sections, axis=2)


def _require_ndim(x: Tensor, least: int) -> None:
    if type_of(x).ndim < least:
        raise ShapeError(f"expected {least} dimension{'s' * (least > 1)} or more, got {x.ndim}")


@public
def atleast_1d(*arrays: Operand) -> Any:
    """Convert scalars to vectors with one element; several operands return a tuple.

    Each result: [1] for [], else the shape and dtype of the operand. Raises `DTypeError` if an
    operand has no tensor's values.

        >>> ml.atleast_1d(ml.asarray(3.0))
        Tensor([3.], f32[1])

    Invalid calls:
        ml.atleast_1d("x")  # DTypeError
    """
    return _each(arrays, lambda x: x if x.ndim else reshape(x, (1,)))


@public
def atleast_2d(*arrays: Operand) -> Any:
    """Convert scalars and vectors to matrices with one row; several operands return a tuple.

    Each result: [1, n] for [n], else the shape and dtype of the operand. Raises `DTypeError` if an
    operand has no tensor's values.

        >>> ml.atleast_2d(ml.asarray([1.0, 2.0])).shape
        (1, 2)

    Invalid calls:
        ml.atleast_2d("x")  # DTypeError
    """
    return _each(arrays, lambda x: x if x.ndim > 1 else reshape(x, (1, x.size)))


@public
def atleast_3d(*arrays: Operand) -> Any:
    """Convert operands to three dimensions: [n] to [1, n, 1], and [m, n] to [m, n, 1].

    Several operands return a tuple.

    Each result: [m, n, k], the dtype of the operand. Raises `DTypeError` if an operand has no
    tensor's values.

        >>> ml.atleast_3d(ml.zeros(2)).shape, ml.atleast_3d(ml.zeros((2, 3))).shape
        ((1, 2, 1), (2, 3, 1))

    Invalid calls:
        ml.atleast_3d("x")  # DTypeError
    """
    return _each(arrays, _solid)


def _solid(x: Tensor) -> Tensor:
    axes = {0: (0, 1, 2), 1: (0, 2), 2: (2,)}.get(x.ndim)
    return x if axes is None else expand_dims(x, axis=axes)


def _each(arrays: Sequence[Operand], fn: Any) -> Any:
    results = tuple([fn(as_operand(x)) for x in arrays])
    return results[0] if len(results) == 1 else results


def _joined(arrays: Iterable[Tensor]) -> tuple[Tensor, ...]:
    if isinstance(arrays, Tensor) or not isinstance(arrays, Iterable):
        raise DTypeError(f"expected a list of tensors, got {brief(arrays)}")
    return several(arrays)


@public
def column_stack(arrays: Iterable[Tensor], /) -> Tensor:
    """Join vectors as the columns of a matrix.

    Operands with more dimensions are joined along the second axis.

    The tensors: [n] or [n, k, ...]; the result: [n, columns, ...]. Raises `ShapeError` if the
    shapes do not fit, or there are no tensors; `DTypeError` if the dtypes do not promote.

        >>> ml.column_stack([ml.zeros(2), ml.ones(2)])
        Tensor([[0., 1.],
                [0., 1.]], f32[2,2])

    Invalid calls:
        ml.column_stack([])  # ShapeError
        ml.column_stack([ml.ones(2, dtype="u64"), ml.ones(2, dtype="i64")])  # DTypeError
    """
    return concat([reshape(x, (x.size, 1)) if x.ndim < 2 else x for x in _joined(arrays)], axis=1)


@public
def dstack(arrays: Iterable[Tensor], /) -> Tensor:
    """Join operands along the third axis, after `atleast_3d`.

    The tensors have one shape except along that axis, and so has the result. Raises `ShapeError` if
    the shapes do not fit, or there are no tensors; `DTypeError` if the dtypes do not promote.

        >>> ml.dstack([ml.zeros((2, 3)), ml.ones((2, 3))]).shape
        (2, 3, 2)

    Invalid calls:
        ml.dstack([])  # ShapeError
        ml.dstack([ml.ones(2, dtype="u64"), ml.ones(2, dtype="i64")])  # DTypeError
    """
    return concat([_solid(x) for x in _joined(arrays)], axis=2)


@public
def unflatten(x: Tensor, /, axis: int, shape: Ints) -> Tensor:
    """Replace one axis by several axes with these lengths, one of which may be -1.

    x: [..., n, ...] -> [..., *shape, ...]. Raises `ShapeError` if the product of the lengths is not
    the length of the axis; `AxisError` if x has no such axis.

        >>> ml.unflatten(ml.zeros((2, 12)), 1, (3, -1)).shape
        (2, 3, 4)

    Invalid calls:
        ml.unflatten(v, 0, (3, -1))  # ShapeError
    """
    [along] = axes_of(axis, x)
    lengths, n = integers(shape, "shape"), x.shape[along]
    product = math.prod(m for m in lengths if m != -1)
    if lengths.count(-1) == 1 and product > 0 and n % product == 0:
        lengths = tuple([n // product if m == -1 else m for m in lengths])
    if not lengths or min(lengths) < 0 or math.prod(lengths) != n:
        raise ShapeError(f"expected lengths whose product is {n}, got {integers(shape, 'shape')}")
    return reshape(x, (*x.shape[:along], *lengths, *x.shape[along + 1 :]))


@public
def delete(x: Tensor, index: Any, axis: int | None = None) -> Tensor:
    """Remove the elements at an index, a slice or several indices along `axis` (None: flattened).

    The values of an index tensor are read, because they determine the shape.

    x: [n, ...] -> [n - removed, ...] along axis 0. Raises `ArgumentError` if an index is not an
    int or is out of range; `AxisError` if x has no such axis.

        >>> ml.delete(ml.asarray([1.0, 2.0, 3.0]), -1)
        Tensor([1., 2.], f32[2])

    Invalid calls:
        ml.delete(v, 9)  # ArgumentError
    """
    if axis is None:
        x, axis = reshape(x, -1), 0
    [along] = axes_of(axis, x)
    n = x.shape[along]
    if isinstance(index, slice):
        at = sliced(index, n)
        removed = {at.start + i * at.step for i in range(at.length)}
    else:
        values = index.tolist() if isinstance(index, (Tensor, np.ndarray)) else index
        removed = {i + n if i < 0 else i for i in integers(values, "index")}
        if removed and not 0 <= min(removed) <= max(removed) < n:
            raise ArgumentError(f"expected indices of {n} elements, got {brief(values)}")
    rest = [i for i in range(n) if i not in removed]
    if rest == [*range(rest[0] if rest else 0, (rest[-1] + 1) if rest else 0)]:
        return part(x, along, span(rest[0], rest[-1] + 1) if rest else span(0))
    return op.take(x, asarray(np.asarray(rest, np.int64)), axis=along)


@public
def diag_embed(x: Tensor, offset: int = 0) -> Tensor:
    """Return matrices with the vectors in the last axis of x as diagonals.

    A positive `offset` selects a diagonal above the main diagonal.

    x: [..., n] -> [..., n + |offset|, n + |offset|], any dtype. Raises `ShapeError` if x has no
    dimension.

        >>> ml.diag_embed(ml.asarray([1.0, 2.0]))
        Tensor([[1., 0.],
                [0., 2.]], f32[2,2])

    Invalid calls:
        ml.diag_embed(ml.ones(()))  # ShapeError
    """
    _require_ndim(x, 1)
    k = integer(offset, "offset")
    *batch, n = x.shape
    m = n + abs(k)
    counts_of(m, "offset")
    if not x.size:
        return op.zeros(shape=(*batch, m, m), dtype=x.dtype)
    zeros, ones = (0,) * len(batch), (1,) * len(batch)
    start = (*zeros, max(k, -k * m))
    flat = op.embed(x, shape=(*batch, m * m), start=start, step=(*ones, m + 1))
    return reshape(flat, (*batch, m, m))
