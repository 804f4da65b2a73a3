"""Reductions of rows by segment, with the names of `jax.ops`.

`segment_ids` holds the segment of each row, in any order. A gradient flows into the rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from mlvm.core.errors import PositionError, ShapeError
from mlvm.core.rules import require
from mlvm.core.types import i64
from mlvm.eager.functions.arguments import count_of, type_of
from mlvm.eager.functions.creation import full
from mlvm.eager.functions.elements import astype
from mlvm.eager.functions.halves import in_f32
from mlvm.eager.functions.indexing import Combine
from mlvm.eager.functions.shapes import reshape
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.dtypes import iinfo
from mlvm.eager.tensor.positions import numbers_in, rewording
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.wrapper import public


@public
def segment_sum(data: Tensor, segment_ids: Tensor, num_segments: int | None = None) -> Tensor:
    """Sum the rows of each segment; 0 for a segment without rows.

    Without `num_segments`, the number of segments is the largest id + 1, which is read from memory.
    Pass it in a captured function, and to avoid waiting for a remote VM.

    data: [k, ...], any dtype but bool; segment_ids: i[k] -> [num_segments, ...]. Raises
    `ShapeError` if the shapes do not fit; `DTypeError` if an operand is bool or the ids are not
    integers; `PositionError` if an id is negative, or not below `num_segments`;
    `ArgumentError` if `num_segments` is negative.

        >>> ml.segment_sum(ml.asarray([1.0, 2.0, 4.0]), ml.asarray([1, 0, 1]), 3)
        Tensor([2., 5., 0.], f32[3])

    Invalid calls:
        ml.segment_sum(v, ints, -1)  # ArgumentError
        ml.segment_sum(v, ints, 1)  # PositionError
    """
    with _segments(data, segment_ids, num_segments) as (length, ids):
        return op.scatter_add(data, ids, axis=0, length=length)


@public
@in_f32
def segment_mean(data: Tensor, segment_ids: Tensor, num_segments: int | None = None) -> Tensor:
    """Average the rows of each segment; 0 for a segment without rows.

    data: [k, ...], floats and complex numbers; segment_ids: i[k] -> [num_segments, ...]. Raises
    the errors of `segment_sum`.

        >>> ml.segment_mean(ml.asarray([1.0, 2.0, 4.0]), ml.asarray([1, 0, 1]), 3)
        Tensor([2. , 2.5, 0. ], f32[3])
    """
    with _segments(data, segment_ids, num_segments) as (length, ids):
        require("inexact", data.type)
        total = op.scatter_add(data, ids, axis=0, length=length)
        ones = full(ids.shape, 1.0, dtype=data.dtype.real)
        counts = op.maximum(op.scatter_add(ones, ids, axis=0, length=length), 1.0)
    return total / reshape(counts, (length, *[1] * (data.ndim - 1)))


@public
def segment_max(data: Tensor, segment_ids: Tensor, num_segments: int | None = None) -> Tensor:
    """Return the elementwise maximum of the rows of each segment.

    A segment without rows gets the smallest number of the dtype.

    data: [k, ...], integers or floats; segment_ids: i[k] -> [num_segments, ...]. Raises the errors
    of `segment_sum`.

        >>> ml.segment_max(ml.asarray([1.0, 2.0, 4.0]), ml.asarray([1, 0, 1]))
        Tensor([2., 4.], f32[2])
    """
    least = -math.inf if type_of(data).dtype.is_float else _limits(data)[0]
    return _combined("maximum", data, segment_ids, num_segments, least)


@public
def segment_min(data: Tensor, segment_ids: Tensor, num_segments: int | None = None) -> Tensor:
    """Return the elementwise minimum of the rows of each segment.

    A segment without rows gets the largest number of the dtype.

    data: [k, ...], integers or floats; segment_ids: i[k] -> [num_segments, ...]. Raises the errors
    of `segment_sum`.

        >>> ml.segment_min(ml.asarray([1.0, 2.0, 4.0]), ml.asarray([1, 0, 1]))
        Tensor([2., 1.], f32[2])
    """
    most = math.inf if type_of(data).dtype.is_float else _limits(data)[1]
    return _combined("minimum", data, segment_ids, num_segments, most)


@public
@in_f32
def segment_prod(data: Tensor, segment_ids: Tensor, num_segments: int | None = None) -> Tensor:
    """Multiply the rows of each segment; 1 for a segment without rows.

    data: [k, ...], any dtype but bool; segment_ids: i[k] -> [num_segments, ...]. Raises the errors
    of `segment_sum`.

        >>> ml.segment_prod(ml.asarray([1.0, 2.0, 4.0]), ml.asarray([1, 0, 1]))
        Tensor([2., 4.], f32[2])
    """
    return _combined("multiply", data, segment_ids, num_segments, 1)


def _limits(data: Tensor) -> tuple[int, int]:
    require("integer", data.type)
    info = iinfo(data.dtype)
    return info.min, info.max


@contextmanager
def from_front(indices: Tensor, length: int) -> Iterator[Tensor]:
    """Move negative indices out of range, so that they do not count from the end.

    Yield the indices; an error in the block reports the original indices."""
    wide = astype(indices, i64)
    with rewording(_reword):
        yield op.where(op.less(wide, 0), wide - length, wide)


def _reword(error: PositionError) -> None:
    index, length = numbers_in(error)
    if index < 0:
        error.reason = error.reason.replace(str(index), str(index + length), 1)


@contextmanager
def _segments(data: Tensor, ids: Tensor, count: int | None) -> Iterator[tuple[int, Tensor]]:
    """Yield the number of segments, and the checked ids."""
    require("numeric", type_of(data))
    require("integer", type_of(ids))
    if ids.ndim != 1 or data.shape[:1] != ids.shape:
        raise ShapeError(f"expected one id per row as segment_ids, got {ids.type}")
    if count is None:
        count = max(int(op.max(ids)) + 1, 0) if ids.size else 0
    length = count_of(count, "num_segments")
    with from_front(ids, length) as places:
        yield length, places


def _combined(by: Combine, data: Tensor, ids: Tensor, count: int | None, start: float) -> Tensor:
    with _segments(data, ids, count) as (length, places):
        x = full((length, *data.shape[1:]), start, dtype=data.dtype)
        return op.index_reduce(x, data, places, by=by)
