"""Indexing by tensors: integer indices and masks.

As linear maps, these ops are transposes of each other, <A x, y> = <x, A' y>, which gradients need:
`take` and `scatter_add`, `take_along_axis` and `scatter_add_along_axis`, `boolean_index` and
`mask_scatter`.

Indices have any integer dtype. An index out of range raises `PositionError`, which names the
index.
"""

from __future__ import annotations

import math
from typing import Final, Literal

import numpy as np

from mlvm.core.errors import (
    ArgumentError,
    MaskError,
    OperandValueError,
    PositionError,
    ShapeError,
)
from mlvm.core.op import movement, op
from mlvm.core.ops.layout import begin_as, require_dtype_of, require_updates, require_values
from mlvm.core.rules import normalize_axis, require, require_one_float_dtype
from mlvm.core.types import Array, DType, Shape, TensorType, i64

# --- type rules ----------------------------------------------------------------------


def _length(length: int) -> int:
    if length < 0:
        raise ArgumentError(f"expected length >= 0, got {length}")
    return length


def _take(x: TensorType, indices: TensorType, axis: int) -> TensorType:
    require("integer", indices)
    axis = normalize_axis(axis, x.ndim)
    return x.with_shape(x.shape[:axis] + indices.shape + x.shape[axis + 1 :])


def _scatter_add(updates: TensorType, indices: TensorType, axis: int, length: int) -> TensorType:
    require("numeric", updates)
    require("integer", indices)
    if updates.ndim < indices.ndim:
        raise ShapeError(
            f"expected updates with at least the {indices.ndim} axes of indices, got {updates.ndim}"
        )
    axis = normalize_axis(axis, updates.ndim - indices.ndim + 1)
    end = axis + indices.ndim
    if updates.shape[axis:end] != indices.shape:
        raise ShapeError(
            f"expected updates of the indices' shape {indices.shape} from axis {axis} on, got "
            f"{updates.shape[axis:end]}"
        )
    return updates.with_shape((*updates.shape[:axis], _length(length), *updates.shape[end:]))


def _weighted_take(x: TensorType, indices: TensorType, weights: TensorType) -> TensorType:
    require_one_float_dtype(x, weights)
    require("integer", indices)
    if x.ndim != 3 or indices.ndim != 3 or indices.shape[0] not in (1, x.shape[0]):
        raise ShapeError(f"expected x [N, M, C] and indices [N or 1, P, K], got {x} and {indices}")
    if weights.shape != indices.shape:
        raise ShapeError(f"expected weights of shape {indices.shape}, got {weights.shape}")
    return x.with_shape((x.shape[0], indices.shape[1], x.shape[2]))


def _weighted_take_flops(x: TensorType, indices: TensorType, weights: TensorType) -> int:
    return 2 * x.shape[0] * math.prod(indices.shape[1:]) * x.shape[2]


def _index_add(x: TensorType, updates: TensorType, indices: TensorType, axis: int) -> TensorType:
    require_updates(x, updates)
    chosen = _take(x, indices, axis).shape
    if updates.shape != chosen:
        raise ShapeError(f"expected updates of shape {chosen}, got {updates.shape}")
    return x


def _index_reduce(x: TensorType, updates: TensorType, indices: TensorType, by: str) -> TensorType:
    if by != "multiply":
        require("real", x)
    return _index_add(x, updates, indices, 0)


def _index_set(
    x: TensorType, values: TensorType, indices: TensorType, axis: int, axes: int
) -> TensorType:
    require("integer", indices)
    axis = normalize_axis(axis, max(x.ndim, 1))
    if not 0 <= axes <= x.ndim - axis:
        raise ArgumentError(f"expected axes from 0 to {x.ndim - axis}, got {axes}")
    require_values(x, values, x.shape[:axis] + indices.shape + x.shape[axis + axes :])
    return x


def _flat_indices(*indices: TensorType, lengths: tuple[int, ...]) -> TensorType:
    require("integer", *indices)
    if not indices or len(indices) != len(lengths):
        raise ArgumentError(f"expected a length for each operand, got {len(lengths)} lengths")
    for length in lengths:
        _length(length)
    if any(x.shape != indices[0].shape for x in indices):
        shapes = ", ".join([str(x.shape) for x in indices])
        raise ShapeError(f"expected indices of equal shapes, got {shapes}")
    return TensorType(i64, indices[0].shape)


def _take_along_axis(x: TensorType, indices: TensorType, axis: int) -> TensorType:
    require("integer", indices)
    axis = normalize_axis(axis, x.ndim)
    if _without(indices.shape, axis) != _without(x.shape, axis) or indices.ndim != x.ndim:
        raise ShapeError(
            f"expected x and indices of the same shape except along axis {axis}, got {x.shape} "
            f"and {indices.shape}"
        )
    return x.with_shape(indices.shape)


def _scatter_add_along_axis(
    updates: TensorType, indices: TensorType, axis: int, length: int
) -> TensorType:
    require("numeric", updates)
    require("integer", indices)
    axis = normalize_axis(axis, updates.ndim)
    if updates.shape != indices.shape:
        raise ShapeError(
            f"expected updates and indices of the same shape, got {updates.shape} and "
            f"{indices.shape}"
        )
    return updates.with_shape((*updates.shape[:axis], _length(length), *updates.shape[axis + 1 :]))


def _without(shape: Shape, axis: int) -> Shape:
    return shape[:axis] + shape[axis + 1 :]


def _one_hot(indices: TensorType, num_classes: int, dtype: str) -> TensorType:
    require("integer", indices)
    if num_classes < 0:
        raise ArgumentError(f"expected num_classes >= 0, got {num_classes}")
    return TensorType(DType.named(dtype), (*indices.shape, num_classes))


def _dynamic_update(x: TensorType, update: TensorType, start: TensorType, axis: int) -> TensorType:
    require("integer", start)
    axis = normalize_axis(axis, x.ndim)
    fits = update.ndim == x.ndim and update.shape[axis] <= x.shape[axis]
    if not fits or _without(update.shape, axis) != _without(x.shape, axis):
        raise ShapeError(
            f"expected an update of shape {x.shape}, or shorter along axis {axis}, got "
            f"{update.shape}"
        )
    require_dtype_of(x, update, "an update")
    if start.shape != ():
        raise ShapeError(f"expected one number as start, got {start}")
    return x


def _check_mask(mask: TensorType, shape: Shape) -> None:
    require("bool", mask)
    covered = all(n in (m, 0) for n, m in zip(mask.shape, shape, strict=False))
    if mask.ndim > len(shape) or not covered:
        raise MaskError(f"expected a mask with the first axes of {shape}, got shape {mask.shape}")


def _boolean_index(x: TensorType, mask: TensorType) -> None:
    _check_mask(mask, x.shape)


def _mask_scatter(updates: TensorType, mask: TensorType, shape: Shape) -> TensorType:
    _check_mask(mask, shape)
    if updates.ndim == 0 or updates.shape[1:] != shape[mask.ndim :]:
        raise ShapeError(
            f"expected each update to have the shape {shape[mask.ndim :]}, got {updates.shape[1:]}"
        )
    return updates.with_shape(shape)


def _mask_set(x: TensorType, values: TensorType, mask: TensorType) -> TensorType:
    _check_mask(mask, x.shape)
    if values.ndim == 0:
        raise ShapeError("expected one value per selected element, got a scalar")
    require_values(x, values, (values.shape[0], *x.shape[mask.ndim :]))
    return x


_BY: Final = {"multiply": np.multiply, "minimum": np.minimum, "maximum": np.maximum}

# --- by indices ----------------------------------------------------------------------


@movement(infer=_take, copies_only=True, may_raise=True)
def take(out: Array, x: Array, indices: Array, *, axis: int) -> None:
    """The slices of x at `indices` along `axis`; the indices' axes replace that axis.

    Negative indices count from the end.
    """
    # The indices were checked. Mode "raise" would need a buffer in addition to `out`.
    np.take(x, _positions(indices, x.shape[axis]), axis, out, "clip")


@op(infer=_weighted_take, flops=_weighted_take_flops, public=False, may_raise=True)
def weighted_take(out: Array, x: Array, indices: Array, weights: Array) -> None:
    """Weighted sums of rows of x: [N, M, C] with [B, P, K] twice -> [N, P, C].

    out[n, p] is the sum over k of weights[b, p, k] x[n, indices[b, p, k]], where b is n, or 0 if B
    is 1. A row with weight 0 is ignored, even if it contains inf or nan.
    """
    places = _positions(indices, x.shape[1], negative=False)
    rows = np.arange(len(x))[:, None]
    out[...] = 0
    for k in range(places.shape[2]):
        weight = weights[:, :, k, None]
        with np.errstate(invalid="ignore"):
            term = weight * x[rows, places[:, :, k]]
        out += np.where(weight == 0, x.dtype.type(0), term)


@movement(infer=_scatter_add, public=False, may_raise=True)
def scatter_add(out: Array, updates: Array, indices: Array, *, axis: int, length: int) -> None:
    """Zeros of length `length` along `axis`, to which the updates are added at `indices`.

    It is the transpose of `take`: one axis replaces the axes of `indices` in `updates`. Updates of
    the same element are added in row-major order. Negative indices count from the end.
    """
    axis = normalize_axis(axis, out.ndim)
    places = _positions(indices, length).reshape(1, -1, 1)
    out.fill(0)
    _add_at(out, updates, _flat(places, out.shape, axis))


@movement(infer=_index_add, in_place=1, public=False, may_raise=True)
def index_add(out: Array, x: Array, updates: Array, indices: Array, *, axis: int) -> None:
    """x, with the updates added to the elements that `take` with these indices reads.

    Updates of the same element are added in row-major order. Negative indices count from the end.
    """
    axis = normalize_axis(axis, out.ndim)
    places = _positions(indices, out.shape[axis]).reshape(1, -1, 1)
    begin_as(out, x)
    _add_at(out, updates, _flat(places, out.shape, axis))


@movement(infer=_index_reduce, in_place=1, public=False, is_holomorphic=True, may_raise=True)
def index_reduce(
    out: Array,
    x: Array,
    updates: Array,
    indices: Array,
    *,
    by: Literal["multiply", "minimum", "maximum"],
) -> None:
    """x with the rows at `indices` combined with the updates, in row-major order.

    The rows are along axis 0. Negative indices count from the end; a nan stays nan.
    """
    places = _positions(indices, len(x)).reshape(1, -1, 1)
    begin_as(out, x)
    flat = _flat(places, out.shape, 0).reshape(-1)
    _BY[by].at(out.reshape(-1), flat, updates.reshape(-1))


@movement(infer=_index_set, in_place=1, copies_only=True, public=False, may_raise=True)
def index_set(
    out: Array, x: Array, values: Array, indices: Array, *, axis: int, axes: int = 1
) -> None:
    """x, with values in the elements that `take` with these indices reads.

    The indices count along `axis`, or in row-major order through `axes` axes from `axis` on. The
    values broadcast to the shape of `take`. If an index occurs several times, the last value in
    row-major order remains. Negative indices count from the end.
    """
    axis = normalize_axis(axis, max(x.ndim, 1))
    before, behind = x.shape[:axis], x.shape[axis + axes :]
    length = math.prod(x.shape[axis : axis + axes])
    places = _positions(indices, length).reshape(-1)
    begin_as(out, x)
    spread = np.broadcast_to(values, before + indices.shape + behind)
    rows = out.reshape(math.prod(before), length, math.prod(behind))
    rows[:, places] = spread.reshape(len(rows), len(places), rows.shape[2])


@movement(infer=_flat_indices, public=False, may_raise=True)
def flat_indices(out: Array, *indices: Array, lengths: tuple[int, ...]) -> None:
    """The row-major positions, i64, of elements in axes of these lengths.

    Each operand has the indices along one axis; negative indices count from the end.
    """
    places = [_positions(each, n) for each, n in zip(indices, lengths, strict=True)]
    out.fill(0)
    for each, length in zip(places, lengths, strict=True):
        out *= length
        out += each


@movement(infer=_take_along_axis, copies_only=True, may_raise=True)
def take_along_axis(out: Array, x: Array, indices: Array, *, axis: int) -> None:
    """out[i, j, k] = x[i, indices[i, j, k], k], for `axis` 1 of 3 as an example.

    x and indices have the same shape, except along `axis`. Negative indices count from the end.
    """
    axis = normalize_axis(axis, x.ndim)
    np.take(x, _along(indices, x.shape, axis), None, out, "clip")


@movement(infer=_scatter_add_along_axis, public=False, may_raise=True)
def scatter_add_along_axis(
    out: Array, updates: Array, indices: Array, *, axis: int, length: int
) -> None:
    """Zeros, then out[i, indices[i, j, k], k] += updates[i, j, k], for `axis` 1 of 3.

    The transpose of `take_along_axis`; `length` is the result's length along `axis`. Updates of
    the same element are added in row-major order. Negative indices count from the end.
    """
    axis = normalize_axis(axis, out.ndim)
    places = _along(indices, out.shape, axis)
    out.fill(0)
    _add_at(out, updates, places)


@movement(infer=_one_hot, may_raise=True)
def one_hot(out: Array, indices: Array, *, num_classes: int, dtype: str = "f32") -> None:
    """A new last axis of length `num_classes`: one at the index, zeros elsewhere.

    An index outside 0 .. num_classes - 1 raises `PositionError`.
    """
    places = _positions(indices, num_classes, negative=False).reshape(-1)
    out.fill(0)
    out.reshape(places.size, num_classes)[np.arange(places.size), places] = 1


@movement(infer=_dynamic_update, in_place=1, copies_only=True, may_raise=True)
def dynamic_update(out: Array, x: Array, update: Array, start: Array, *, axis: int) -> None:
    """x, with the rows from `start` on along `axis` replaced by the rows of `update`.

    A negative `start` counts from the end. Rows outside of x raise `OperandValueError`. If x is not
    used later, only the new rows are written.
    """
    length, rows = x.shape[axis], update.shape[axis]
    position = int(start)
    first = position + length if position < 0 else position
    if not 0 <= first <= length - rows:
        raise OperandValueError(
            f"{rows} row{'s' * (rows != 1)} from {position} on are out of range for length "
            f"{length}; "
            "use indices below the length"
        )
    if rows == length:
        np.copyto(out, update)
        return
    begin_as(out, x)
    out[(np.s_[:],) * normalize_axis(axis, x.ndim) + (np.s_[first : first + rows],)] = update


def _positions(indices: Array, length: int, *, negative: bool = True) -> Array:
    """Return the indices as intp, counted from the front. Raises `PositionError`.

    They are read only once, because a VM that shares the tensor may change it at the same time.
    """
    indices = indices.copy()
    lowest = -length if negative else 0
    if indices.size:
        low, high = int(indices.min()), int(indices.max())
        if low < lowest or high >= length:
            where = np.argwhere((indices < lowest) | (indices >= length))[0].tolist()
            index = indices[tuple(where)]
            place = f" at position {where}" if where else ""
            reason = f"index {index}{place} is out of range for length {length}"
            raise PositionError(reason, where)
        if low < 0:
            indices = np.where(indices < 0, indices.astype(np.intp) + length, indices)
    return indices.astype(np.intp, copy=False)


def _flat(places: Array, shape: Shape, axis: int) -> Array:
    """Return the row-major positions of the elements at `places` along `axis`, for that shape.

    `places` has three axes, which broadcast: for the axes before `axis`, for `axis`, and for the
    axes after it.
    """
    before, behind = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
    rows = np.arange(before).reshape(-1, 1, 1) * shape[axis] + places
    return rows * behind + np.arange(behind)


def _along(indices: Array, shape: Shape, axis: int) -> Array:
    """Return `_flat` for indices that have the axes of `shape`; the result has the same shape."""
    before, behind = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
    places = _positions(indices, shape[axis]).reshape(before, indices.shape[axis], behind)
    return _flat(places, shape, axis).reshape(indices.shape)


def _add_at(out: Array, updates: Array, places: Array) -> None:
    """Add the updates at those row-major positions, one after the other.

    numpy's `add.at` is five times faster for one axis than for rows.
    """
    np.add.at(out.reshape(-1), places.reshape(-1), updates.reshape(-1))


# --- by masks ------------------------------------------------------------------------


@movement(infer=lambda x: None, public=False)
def nonzero_indices(x: Array) -> Array:
    """The positions of the nonzero elements: i64[count, ndim], in row-major order."""
    return np.ascontiguousarray(np.argwhere(x.copy()))


@movement(infer=_boolean_index, copies_only=True, public=False)
def boolean_index(x: Array, mask: Array) -> Array:
    """The slices of x where the mask is True: [count, ...], in row-major order.

    The mask has the lengths of the first axes of x; an axis of length 0 selects no elements.
    """
    return x[mask.copy()]


def _selecting(mask: Array, values: Array, what: str) -> Array:
    """Return a copy of the mask, which must select as many elements as there are values."""
    mask = mask.copy()
    count = int(np.count_nonzero(mask))
    if count != len(values):
        raise OperandValueError(
            f"the mask selects {count} elements, got {len(values)} {what}s; "
            f"pass one {what} per selected element"
        )
    return mask


@movement(infer=_mask_scatter, copies_only=True, public=False, may_raise=True)
def mask_scatter(out: Array, updates: Array, mask: Array, *, shape: tuple[int, ...]) -> None:
    """Zeros of `shape`, with the updates, in order, where the mask is True.

    It is the transpose of `boolean_index`. Raises `OperandValueError` unless the mask selects as
    many elements as there are updates.
    """
    mask = _selecting(mask, updates, "update")
    out.fill(0)
    out[mask] = updates


@movement(infer=_mask_set, in_place=1, copies_only=True, public=False, may_raise=True)
def mask_set(out: Array, x: Array, values: Array, mask: Array) -> None:
    """x, with values, in order, in the elements that `boolean_index` with this mask reads.

    Raises `OperandValueError` unless the mask selects as many elements as there are values.
    """
    mask = _selecting(mask, values, "value")
    begin_as(out, x)
    out[mask] = values
