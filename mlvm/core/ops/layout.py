"""Ops that rearrange or convert elements: shapes, axes, windows, order and dtype."""

from __future__ import annotations

import builtins
from typing import Literal

import numpy as np

from mlvm.core import rules
from mlvm.core.errors import ArgumentError, DTypeError, ShapeError, counted
from mlvm.core.op import movement
from mlvm.core.ops.half import convert
from mlvm.core.types import Array, DType, Shape, TensorType, i64

# --- shapes and axes -----------------------------------------------------------------


def _reshape(x: TensorType, shape: Shape) -> TensorType:
    result = x.with_shape(shape)
    if result.size != x.size:
        raise ShapeError(
            f"expected a shape of {x.size} elements, got {shape} with {result.size}; -1 "
            "infers a length"
        )
    return result


def _permute_dims(x: TensorType, axes: tuple[int, ...]) -> TensorType:
    order = rules.normalize_axes(axes, x.ndim)
    if len(order) != x.ndim:
        raise ArgumentError(
            f"expected axes that name each of the {x.ndim} dimensions once, got {axes}"
        )
    return x.with_shape([x.shape[i] for i in order])


def _broadcast_to(x: TensorType, shape: Shape) -> TensorType:
    result = x.with_shape(shape)
    if len(shape) < x.ndim or rules.broadcast_shapes(x.shape, result.shape) != result.shape:
        raise ShapeError(
            f"expected a shape that {x.shape} broadcasts to, got {shape}; only axes of "
            "length 1 are repeated"
        )
    return result


def _concat(*xs: TensorType, axis: int) -> TensorType:
    if not xs:
        raise ShapeError("expected 1 tensor or more, got none")
    along = rules.normalize_axis(axis, xs[0].ndim)
    others = [x.shape[:along] + x.shape[along + 1 :] for x in xs]
    for i, x in enumerate(xs):
        if others[i] != others[0] or x.ndim != xs[0].ndim:
            place = f" (operand {i})" if len(xs) > 2 else ""
            raise ShapeError(
                f"expected equal shapes except along axis {along}, got {xs[0].shape} and "
                f"{x.shape}{place}"
            )
    shape = list(xs[0].shape)
    shape[along] = sum(x.shape[along] for x in xs)
    return TensorType(rules.common_dtype(xs), shape)


@movement(infer=_reshape, copies_only=True)
def reshape(out: Array, x: Array, *, shape: tuple[int, ...]) -> None:
    """The elements of x, in row-major order, in a different shape of the same size."""
    np.copyto(out, x.reshape(shape))


@movement(infer=_permute_dims, copies_only=True, is_view=True)
def permute_dims(out: Array, x: Array, *, axes: tuple[int, ...]) -> None:
    """x with its axes in a different order: axis i of the result is axis axes[i] of x."""
    np.copyto(out, x.transpose(axes))


@movement(infer=_broadcast_to, elementwise=True, copies_only=True, is_cheap=True)
def broadcast_to(out: Array, x: Array, *, shape: tuple[int, ...]) -> None:
    """x repeated along new leading axes and along axes of length 1, up to `shape`."""
    np.copyto(out, x)


@movement(infer=_concat, copies_only=True)
def concat(out: Array, *xs: Array, axis: int = 0) -> None:
    """The tensors concatenated along `axis`; the dtypes promote."""
    np.concatenate(xs, axis, out)


# --- windows -------------------------------------------------------------------------


def _flip(x: TensorType, axis: rules.Axis) -> TensorType:
    rules.normalize_axes(axis, x.ndim)
    return x


def _roll(x: TensorType, shift: int | tuple[int, ...], axis: rules.Axis) -> TensorType:
    axes = rules.normalize_axes(axis, x.ndim)
    if isinstance(shift, tuple) and (axis is None or len(shift) != len(axes)):
        raise ArgumentError(f"expected one shift per axis, got shift {shift} and axis {axis}")
    return x


def _pad(x: TensorType, widths: tuple[tuple[int, int], ...], value: float) -> TensorType:
    if len(widths) != x.ndim:
        raise ArgumentError(f"expected {counted(x.ndim, 'pair')} of widths, got {len(widths)}")
    if any(width < 0 for pair in widths for width in pair):
        raise ArgumentError(f"expected widths >= 0, got {widths}")
    rules.require_representable(value, x.dtype)
    return x.with_shape([a + n + b for n, (a, b) in zip(x.shape, widths, strict=True)])


def _check_window(shape: Shape, start: Shape, length: Shape, step: tuple[int, ...]) -> None:
    """Raise `ArgumentError` unless the window is inside the shape on every axis.

    The window has the `length` elements start, start + step, ...
    """
    if not len(start) == len(length) == len(step) == len(shape):
        raise ArgumentError(
            f"expected {len(shape)} starts, lengths and steps, one per dimension, got "
            f"{len(start)}, {len(length)} and {len(step)}"
        )
    for axis, (size, first, n, by) in enumerate(zip(shape, start, length, step, strict=True)):
        if by == 0:
            raise ArgumentError(f"expected a step other than 0 along axis {axis}, got 0")
        if n < 0 or (n and not (0 <= first < size and 0 <= first + (n - 1) * by < size)):
            raise ArgumentError(
                f"slice out of range: start {first}, step {by}, length {n} on axis {axis} of "
                f"length {size}; shorten the slice"
            )


def _slice(x: TensorType, start: Shape, length: Shape, step: tuple[int, ...]) -> TensorType:
    _check_window(x.shape, start, length, step)
    return x.with_shape(length)


def _embed(x: TensorType, shape: Shape, start: Shape, step: tuple[int, ...]) -> TensorType:
    result = x.with_shape(shape)
    _check_window(result.shape, start, x.shape, step)
    return result


def require_dtype_of(x: TensorType, y: TensorType, what: str) -> None:
    """Raise `DTypeError` unless y has x's dtype."""
    if y.dtype is not x.dtype:
        raise DTypeError(
            f"expected {what} of x's dtype {x.dtype.name}, got {y.dtype.name}; convert with astype"
        )


def require_updates(x: TensorType, updates: TensorType) -> None:
    """Raise `DTypeError` unless the updates are numbers of x's own dtype."""
    rules.require("numeric", x)
    require_dtype_of(x, updates, "updates")


def _slice_add(
    x: TensorType, updates: TensorType, start: Shape, step: tuple[int, ...]
) -> TensorType:
    require_updates(x, updates)
    _check_window(x.shape, start, updates.shape, step)
    return x


def begin_as(out: Array, x: Array) -> None:
    """Copy x into `out`, unless they are the same memory."""
    if not np.may_share_memory(out, x):
        np.copyto(out, x)


def require_values(x: TensorType, values: TensorType, shape: Shape) -> None:
    """Raise `DTypeError` unless the values have x's dtype, `ShapeError` unless they broadcast.

    They must broadcast to `shape`.
    """
    require_dtype_of(x, values, "values")
    if values.ndim > len(shape) or rules.broadcast_shapes(values.shape, shape) != shape:
        raise ShapeError(f"expected values that broadcast to {shape}, got shape {values.shape}")


def _slice_set(
    x: TensorType, values: TensorType, start: Shape, length: Shape, step: tuple[int, ...]
) -> TensorType:
    _check_window(x.shape, start, length, step)
    require_values(x, values, length)
    return x


def window_index(start: Shape, length: Shape, step: tuple[int, ...]) -> tuple[builtins.slice, ...]:
    """Return numpy's index of that window; numpy uses None for an end before the first element."""
    ends = [first + n * by for first, n, by in zip(start, length, step, strict=True)]
    return tuple(
        builtins.slice(first, end if end >= 0 else None, by) if n else builtins.slice(0)
        for first, end, n, by in zip(start, ends, length, step, strict=True)
    )


@movement(infer=_flip, copies_only=True, is_view=True)
def flip(out: Array, x: Array, *, axis: rules.Axis = None) -> None:
    """x with the elements in reverse order along `axis` (None: along all axes).

    The result has the shape and dtype of x. Raises `AxisError` for an axis that x does not have.

        >>> ml.flip([1.0, 2.0, 3.0])
        Tensor([3., 2., 1.], f32[3])
    """
    np.copyto(out, np.flip(x, axis))


@movement(infer=_roll, copies_only=True)
def roll(out: Array, x: Array, *, shift: int | tuple[int, ...], axis: rules.Axis = None) -> None:
    """x with every element moved up by `shift` along `axis`, from the end to the front.

    Several axes have one shift each or share one. With `axis` None, x is rolled in row-major order.
    """
    np.copyto(out, np.roll(x, shift, axis) if x.ndim else x)


@movement(infer=_pad)
def pad(out: Array, x: Array, *, widths: tuple[tuple[int, int], ...], value: float = 0.0) -> None:
    """x with a border of `value`: on axis i, widths[i] = (elements before, elements after)."""
    out.fill(value)
    inner = tuple(builtins.slice(a, a + n) for n, (a, _) in zip(x.shape, widths, strict=True))
    out[inner] = x


@movement(infer=_slice, copies_only=True, is_view=True)
def slice(
    out: Array, x: Array, *, start: tuple[int, ...], length: tuple[int, ...], step: tuple[int, ...]
) -> None:
    """The length[i] elements start[i], start[i] + step[i], ... on each axis i.

    Indices count from the front and must be inside x. A step may be negative, but not 0. The result
    has the shape `length`, and the dtype of x. Raises `ArgumentError` unless there is one number
    for each axis, for a step of 0, and for elements outside of x.

        >>> ml.slice([1, 2, 3, 4], start=(1,), length=(2,), step=(1,))
        Tensor([2, 3], i64[2])
    """
    np.copyto(out, x[window_index(start, length, step)])


@movement(infer=_embed, copies_only=True, public=False)
def embed(
    out: Array, x: Array, *, shape: tuple[int, ...], start: tuple[int, ...], step: tuple[int, ...]
) -> None:
    """Zeros of `shape`, with x in the elements that `slice` with this start and step reads.

    It is the transpose of `slice`.
    """
    out.fill(0)
    out[window_index(start, x.shape, step)] = x


@movement(infer=_slice_add, in_place=1, public=False)
def slice_add(
    out: Array, x: Array, updates: Array, *, start: tuple[int, ...], step: tuple[int, ...]
) -> None:
    """x, with the updates added to the elements that `slice` with this start and step reads."""
    begin_as(out, x)
    out[window_index(start, updates.shape, step)] += updates


@movement(infer=_slice_set, in_place=1, copies_only=True, public=False)
def slice_set(
    out: Array,
    x: Array,
    values: Array,
    *,
    start: tuple[int, ...],
    length: tuple[int, ...],
    step: tuple[int, ...],
) -> None:
    """x, with values in the elements that `slice` with this start, length and step reads.

    The values broadcast to `length`. If x is not used later, only these elements are written.
    """
    begin_as(out, x)
    out[window_index(start, length, step)] = values


# --- triangles, order, dtype ---------------------------------------------------------


def _triangle(x: TensorType, k: int) -> TensorType:
    if x.ndim < 2:
        raise ShapeError(f"expected 2 dimensions or more, got {x.ndim}")
    return x


def _sort(x: TensorType, axis: int, descending: bool) -> TensorType:
    rules.require("numeric", x)
    rules.normalize_axis(axis, x.ndim)
    return x


def require_castable(x: DType, dtype: DType) -> None:
    """Raise `DTypeError` if a cast would discard imaginary parts."""
    if x.kind == "complex" and dtype.kind not in ("complex", "bool"):
        raise DTypeError(
            f"cannot convert {x.name} to {dtype.name}: take the real or imag part first"
        )


def _astype(x: TensorType, dtype: str) -> TensorType:
    target = DType.named(dtype)
    require_castable(x.dtype, target)
    return x.with_dtype(target)


def _view(x: TensorType, dtype: str) -> TensorType:
    target = DType.named(dtype)
    if target.is_storage or x.dtype.is_storage or "bool" in (target.kind, x.dtype.kind):
        raise DTypeError(f"cannot view {x.dtype} as {target}; to convert the values, use astype")
    if target.itemsize == x.dtype.itemsize:
        return x.with_dtype(target)
    if not x.ndim:
        raise ShapeError(
            f"expected a dtype of {x.dtype.itemsize} bytes for a scalar of {x.dtype}, got {target}"
        )
    nbytes = x.shape[-1] * x.dtype.itemsize
    if nbytes % target.itemsize:
        raise ShapeError(
            f"expected a last axis with a multiple of {target.itemsize} bytes for "
            f"{target}, got {nbytes} bytes"
        )
    return TensorType(target, (*x.shape[:-1], nbytes // target.itemsize))


@movement(infer=_view)
def view(out: Array, x: Array, *, dtype: str) -> None:
    """The bytes of x as elements of a different dtype, which is neither bool nor low-bit.

    If the element size differs, the length of the last axis changes.
    """
    flat = np.ascontiguousarray(x).reshape(-1)
    np.copyto(out, flat.view(out.dtype).reshape(out.shape))


@movement(infer=_triangle, copies_only=True)
def tril(out: Array, x: Array, *, k: int = 0) -> None:
    """The matrices in the last two axes, zero above the k-th diagonal (the main diagonal is 0).

    x: [..., m, n], any dtype, and so is the result. Raises `ShapeError` for fewer than two axes.

        >>> ml.tril(ml.ones((3, 3)))
        Tensor([[1., 0., 0.],
                [1., 1., 0.],
                [1., 1., 1.]], f32[3,3])
    """
    np.copyto(out, np.where(_not_above(k, x.shape), x, np.zeros_like(x, shape=())))


@movement(infer=_triangle, copies_only=True)
def triu(out: Array, x: Array, *, k: int = 0) -> None:
    """The matrices in the last two axes, zero below the k-th diagonal (the main diagonal is 0).

    x: [..., m, n], any dtype, and so is the result. Raises `ShapeError` for fewer than two axes.

        >>> ml.triu(ml.ones((3, 3)), k=1)
        Tensor([[0., 1., 1.],
                [0., 0., 1.],
                [0., 0., 0.]], f32[3,3])
    """
    np.copyto(out, np.where(_not_above(k - 1, x.shape), np.zeros_like(x, shape=()), x))


def _not_above(k: int, shape: Shape) -> Array:
    k = max(-shape[-2], min(k, shape[-1]))
    return np.tri(shape[-2], shape[-1], k, dtype=np.bool_)


@movement(infer=_sort)
def sort(out: Array, x: Array, *, axis: int = -1, descending: bool = False) -> None:
    """The elements sorted along `axis`; nan counts as the largest.

    Complex elements are sorted by real parts, then by imaginary parts.
    """
    np.copyto(out, np.flip(x, axis) if descending else x)
    out.sort(axis, kind="stable")
    if descending:
        np.copyto(out, np.flip(out, axis))


@movement(infer=lambda x, axis, descending: _sort(x, axis, descending).with_dtype(i64))
def argsort(out: Array, x: Array, *, axis: int = -1, descending: bool = False) -> None:
    """The indices along `axis` of the elements in the order of `sort`: i64.

    The sort is stable: equal elements are not reordered.
    """
    if descending:
        order = np.argsort(np.flip(x, axis), axis, kind="stable")
        np.subtract(x.shape[axis] - 1, np.flip(order, axis), out)
    else:
        np.copyto(out, np.argsort(x, axis, kind="stable"))


def _searchsorted(edges: TensorType, x: TensorType, right: bool) -> TensorType:
    rules.require("real", edges, x)
    if edges.dtype is not x.dtype:
        raise DTypeError(f"expected edges and x of one dtype, got {edges} and {x}")
    if not x.ndim or x.ndim != edges.ndim or x.shape[:-1] != edges.shape[:-1]:
        raise ShapeError(
            f"expected edges [..., N] and x [..., M] with the same leading axes, got "
            f"{edges.shape} and {x.shape}"
        )
    return TensorType(i64, x.shape)


@movement(infer=_searchsorted)
def searchsorted(out: Array, edges: Array, x: Array, *, right: bool = False) -> None:
    """The index at which to insert each element of x into the ascending row of edges: i64.

    The index is before equal edges, or after them with `right`. nan counts as the largest.
    """
    side: Literal["left", "right"] = "right" if right else "left"
    for row in np.ndindex(x.shape[:-1]):
        out[row] = np.searchsorted(edges[row], x[row], side)


def _top_indices(x: TensorType, *, axis: int, count: int, descending: bool) -> TensorType:
    axis = rules.normalize_axis(axis, x.ndim)
    if not 0 <= count <= x.shape[axis]:
        raise ArgumentError(f"expected count from 0 to {x.shape[axis]}, got {count}")
    shape = (*x.shape[:axis], count, *x.shape[axis + 1 :])
    return _sort(x, axis, descending).with_dtype(i64).with_shape(shape)


@movement(infer=_top_indices, public=False)
def top_indices(out: Array, x: Array, *, axis: int, count: int, descending: bool) -> None:
    """The first `count` indices along `axis` that `argsort` returns."""
    order = np.empty(x.shape, out.dtype)
    argsort.kernel(order, x, axis=axis, descending=descending)
    np.copyto(out, np.moveaxis(np.moveaxis(order, axis, 0)[:count], 0, axis))


@movement(infer=_astype, elementwise=True)
def astype(out: Array, x: Array, *, dtype: str) -> None:
    """x converted to a different dtype.

    A float is truncated to an integer; a value out of range becomes the nearest limit, and nan
    becomes 0. An integer out of range wraps around. A bool is True for nonzero elements.
    """
    convert(out, x)


@movement(infer=lambda x: x, elementwise=True, copies_only=True, takes_storage=True)
def copy(out: Array, x: Array) -> None:
    """A copy of the tensor in new memory.

    >>> x = ml.ones(2)
    >>> y = ml.copy(x)
    >>> y += 1.0
    >>> x, y
    (Tensor([1., 1.], f32[2]), Tensor([2., 2.], f32[2]))
    """
    np.copyto(out, x)
