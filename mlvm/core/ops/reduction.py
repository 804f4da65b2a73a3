"""Reductions: sums, extremes and statistics along some or all axes.

`axis` is an int, a tuple of ints, or None for every axis; negative axes count from the last.
`keepdims` keeps the reduced axes with length 1.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mlvm.core.errors import ShapeError
from mlvm.core.op import reduction
from mlvm.core.ops.layout import require_castable
from mlvm.core.ops.rows import sum_rows
from mlvm.core.rules import Axis, normalize_axes, normalize_axis, reduced_shape, require
from mlvm.core.types import Array, DType, TensorType, bool_, f32, i64, u64

# --- type rules ----------------------------------------------------------------------


def _accumulator(x: TensorType, dtype: str | None) -> DType:
    """Return the dtype of a sum or product: `dtype`, else i64 or u64 for integers, else x's."""
    require("numeric", x)
    if dtype is None:
        return {"signed": i64, "unsigned": u64}.get(x.dtype.kind, x.dtype)
    named = DType.named(dtype)
    require("numeric", x.with_dtype(named))
    require_castable(x.dtype, named)
    return named


def _accumulate(x: TensorType, axis: Axis, keepdims: bool, dtype: str | None) -> TensorType:
    x = x.with_dtype(i64) if x.dtype is bool_ else x
    return TensorType(_accumulator(x, dtype), reduced_shape(x.shape, axis, keepdims))


def _mean(x: TensorType, axis: Axis, keepdims: bool, dtype: str | None = None) -> TensorType:
    result = x.with_dtype(x.dtype if x.dtype.is_inexact else f32)
    if dtype is not None:
        result = x.with_dtype(DType.named(dtype))
        require("inexact", result)
        require_castable(x.dtype, result.dtype)
    return result.with_shape(reduced_shape(x.shape, axis, keepdims))


def _var(x: TensorType, axis: Axis, keepdims: bool, correction: float) -> TensorType:
    require("real or bool", x)
    return _mean(x, axis, keepdims)


def _statistic(x: TensorType, axis: Axis, keepdims: bool) -> TensorType:
    require("float", x)
    return x.with_shape(reduced_shape(x.shape, axis, keepdims))


def _choose(x: TensorType, axis: Axis, keepdims: bool) -> TensorType:
    require("real or bool", x)
    for i in normalize_axes(axis, x.ndim):
        if x.shape[i] == 0:
            raise ShapeError(f"expected at least 1 element along axis {i}, got 0")
    return x.with_shape(reduced_shape(x.shape, axis, keepdims))


def _position(x: TensorType, axis: int | None, keepdims: bool) -> TensorType:
    return _choose(x, axis, keepdims).with_dtype(i64)


def _decide(x: TensorType, axis: Axis, keepdims: bool) -> TensorType:
    return TensorType(bool_, reduced_shape(x.shape, axis, keepdims))


def _cumulate(x: TensorType, axis: int | None, dtype: str | None) -> TensorType:
    if x.ndim == 0 or (axis is None and x.ndim > 1):
        raise ShapeError(f"expected an axis for x of {x.ndim} dimensions, got None")
    normalize_axis(0 if axis is None else axis, x.ndim)
    return x.with_dtype(_accumulator(x, dtype))


# --- sums ----------------------------------------------------------------------------


@reduction(infer=_accumulate, precision="f32")
def sum(
    out: Array, x: Array, *, axis: Axis = None, keepdims: bool = False, dtype: str | None = None
) -> None:
    """The sum along `axis`; 0 for an empty axis.

    Without a `dtype`, signed integers are summed in i64, unsigned integers in u64, and floats in
    the dtype of x. For bools, the True elements are counted in i64. With a `dtype`, the elements
    are first cast to it.

        >>> ml.sum([[1.0, 5.0], [7.0, 0.0]], axis=1)
        Tensor([6., 7.], f32[2])
    """
    _sum(out, x, axis, keepdims)


@reduction(infer=_mean, precision="f32")
def mean(
    out: Array, x: Array, *, axis: Axis = None, keepdims: bool = False, dtype: str | None = None
) -> None:
    """The arithmetic mean along `axis`; nan for an empty axis.

    Without a `dtype`, floats and complex numbers are averaged in the dtype of x. For integers and
    bools the mean is computed in f64 and rounded to f32. With a `dtype`, the elements are first
    cast to it.

        >>> ml.mean([[1.0, 5.0], [7.0, 0.0]], axis=1)
        Tensor([3. , 3.5], f32[2])
    """
    is_wide = x.dtype.kind in "fc" or out.dtype.kind == "c"
    total = out if is_wide else np.empty(out.shape)
    _sum(total, x, axis, keepdims)
    np.divide(total, _count(x, axis), out, casting="same_kind")


@reduction(infer=_accumulate, precision="f32", is_holomorphic=True)
def prod(
    out: Array, x: Array, *, axis: Axis = None, keepdims: bool = False, dtype: str | None = None
) -> None:
    """The product along `axis`, in the dtype that `sum` uses; 1 for an empty axis.

    For bools it is 1 if all are True, in i64. If a finite float is 0, the product is 0 even if the
    product of the other elements overflows.

        >>> ml.prod([1.0, 2.0, 4.0])
        Tensor(8., f32[])
    """
    np.multiply.reduce(x, axis, out.dtype, out=out, keepdims=keepdims)
    if out.dtype.kind == "f" and np.isnan(out).any():
        are_finite = np.all(np.isfinite(x), axis=axis, keepdims=keepdims)
        np.copyto(out, 0, where=np.isnan(out) & are_finite)


@reduction(infer=_var, precision="f32")
def var(
    out: Array, x: Array, *, axis: Axis = None, keepdims: bool = False, correction: float = 0.0
) -> None:
    """The variance along `axis`: sum((x - mean(x))^2) / (n - correction), in two passes.

    For integers and bools it is computed in f64 and rounded to f32. A `correction` of 1 gives the
    unbiased estimate; for n <= correction the result is nan or inf.

        >>> ml.var([1.0, 3.0])
        Tensor(1., f32[])
    """
    n, wide = _count(x, axis), out.dtype if x.dtype.kind == "f" else np.dtype(np.float64)
    mean = np.empty(reduced_shape(x.shape, axis, True), wide)
    _sum(mean, x, axis, True)
    np.divide(mean, n, mean)
    squares = np.empty(x.shape, wide)
    np.subtract(x, mean, squares)
    np.square(squares, squares)
    total = out if wide == out.dtype else np.empty(out.shape)
    _sum(total, squares, axis, keepdims)
    np.divide(total, n - correction if n > correction else 0, out, casting="same_kind")


@reduction(infer=_cumulate, precision="f32")
def cumulative_sum(
    out: Array, x: Array, *, axis: int | None = None, dtype: str | None = None
) -> None:
    """The running sums along `axis`, in the dtype that `sum` uses. None requires 1 dimension."""
    np.add.accumulate(x, 0 if axis is None else axis, out.dtype, out)


@reduction(infer=_cumulate, precision="f32", is_holomorphic=True)
def cumulative_prod(
    out: Array, x: Array, *, axis: int | None = None, dtype: str | None = None
) -> None:
    """The running products along `axis` (None: the only one), in the dtype that `prod` uses.

    Where all floats up to an element are finite and one of them is 0, the product is 0, also if the
    product of the others overflows.
    """
    along = 0 if axis is None else axis
    np.multiply.accumulate(x, along, out.dtype, out)
    if out.dtype.kind == "f" and np.isnan(out).any():
        are_finite = np.logical_and.accumulate(np.isfinite(x), along)
        np.copyto(out, 0, where=np.isnan(out) & are_finite)


@reduction(infer=_statistic, precision="f32")
def logsumexp(out: Array, x: Array, *, axis: Axis = None, keepdims: bool = False) -> None:
    """log(sum(exp(x))) along `axis`, as m + log(sum(exp(x - m))) with m the maximum.

    It overflows only if the result does; -inf for an empty axis.

        >>> ml.logsumexp([[0.0, 0.0], [1.0, 1000.0]], axis=1)
        Tensor([6.931472e-01, 1.000000e+03], f32[2])
    """
    peak = np.maximum.reduce(x, axis, keepdims=True, initial=-np.inf)
    peak = np.where(np.isfinite(peak), peak, 0)
    terms = np.empty_like(x)
    np.subtract(x, peak, terms)
    np.exp(terms, terms)
    _sum(out, terms, axis, keepdims)
    np.log(out, out)
    np.add(out, peak.reshape(out.shape), out)


# --- extremes ------------------------------------------------------------------------


@reduction(infer=_choose)
def max(out: Array, x: Array, *, axis: Axis = None, keepdims: bool = False) -> None:
    """The largest element along `axis`; nan if any is nan. An empty axis raises `ShapeError`.

    >>> ml.max([[1.0, 5.0], [7.0, 0.0]], axis=1)
    Tensor([5., 7.], f32[2])
    """
    np.maximum.reduce(x, axis, out=out, keepdims=keepdims)


@reduction(infer=_choose)
def min(out: Array, x: Array, *, axis: Axis = None, keepdims: bool = False) -> None:
    """The smallest element along `axis`; nan if any is nan. An empty axis raises `ShapeError`.

    >>> ml.min([[1.0, 5.0], [7.0, 0.0]], axis=1)
    Tensor([1., 0.], f32[2])
    """
    np.minimum.reduce(x, axis, out=out, keepdims=keepdims)


@reduction(infer=_position)
def argmax(out: Array, x: Array, *, axis: int | None = None, keepdims: bool = False) -> None:
    """The index of the largest element along `axis`, i64: the first of equals, or the first nan.

    With `axis` None, the index counts in row-major order. An empty axis raises `ShapeError`.

        >>> ml.argmax([[1.0, 5.0, 2.0], [7.0, 0.0, 7.0]], axis=1)
        Tensor([1, 0], i64[2])
    """
    np.argmax(x, axis, out, keepdims=keepdims)


@reduction(infer=_position)
def argmin(out: Array, x: Array, *, axis: int | None = None, keepdims: bool = False) -> None:
    """The index of the smallest element along `axis`, i64: the first of equals, or the first nan.

    With `axis` None, the index counts in row-major order. An empty axis raises `ShapeError`.

        >>> ml.argmin([[1.0, 5.0, 2.0], [7.0, 0.0, 7.0]], axis=1)
        Tensor([0, 1], i64[2])
    """
    np.argmin(x, axis, out, keepdims=keepdims)


# --- decisions -----------------------------------------------------------------------


@reduction(infer=_decide)
def all(out: Array, x: Array, *, axis: Axis = None, keepdims: bool = False) -> None:
    """True where all elements along `axis` are nonzero; True for an empty axis. nan is nonzero.

    >>> ml.all([[True, False], [True, True]], axis=1)
    Tensor([False,  True], bool[2])
    """
    np.logical_and.reduce(x, axis, out=out, keepdims=keepdims)


@reduction(infer=_decide)
def any(out: Array, x: Array, *, axis: Axis = None, keepdims: bool = False) -> None:
    """True where an element along `axis` is nonzero; False for an empty axis. nan is nonzero.

    >>> ml.any([[True, False], [False, False]], axis=1)
    Tensor([ True, False], bool[2])
    """
    np.logical_or.reduce(x, axis, out=out, keepdims=keepdims)


# --- how sums are made ---------------------------------------------------------------

_BLOCK = 128  # elements of an axis that numpy adds sequentially


def _count(x: Array, axis: Axis) -> int:
    """Return the number of elements of x per element of the result."""
    return math.prod(x.shape[i] for i in normalize_axes(axis, x.ndim))


def _sum(out: Array, x: Array, axis: Axis, keepdims: bool) -> None:
    """Sum in the dtype of `out`. `sum_rows` sums leading axes, as for a bias gradient.

    numpy processes leading axes row by row, or along the last axis, which is 3 to 10 times slower.
    It sums pairwise along the last axis only, so other long axes are summed in blocks.
    """
    axes = normalize_axes(axis, x.ndim)
    leading = 0
    while leading in axes:
        leading += 1
    # from this number of elements on, BLAS is faster, including setup
    if 0 < leading < x.ndim and x.size > 16384 and x.dtype == out.dtype and x.dtype.kind == "f":
        remaining = x.shape[leading:]
        rows = sum_rows(x.reshape(-1, math.prod(remaining))).reshape((1,) * leading + remaining)
        np.add.reduce(rows, axes, out=out, keepdims=keepdims)
        return
    if out.dtype.kind in "fc":
        for i in axes:
            while i < x.ndim - 1 and x.shape[i] > 2 * _BLOCK:
                x = _in_blocks(x, i, out.dtype)
    np.add.reduce(x, axis, out.dtype, out=out, keepdims=keepdims)


def _in_blocks(x: Array, axis: int, dtype: np.dtype[Any]) -> Array:
    """Sum blocks of an axis, and the remainder."""
    count, rest = divmod(x.shape[axis], _BLOCK)
    before, behind = x.shape[:axis], x.shape[axis + 1 :]
    whole, last = np.split(x, [count * _BLOCK], axis)
    sums = np.add.reduce(whole.reshape(*before, count, _BLOCK, *behind), axis + 1, dtype)
    if not rest:
        return sums  # type: ignore[no-any-return]
    last = np.add.reduce(last, axis, dtype, keepdims=True)
    return np.concatenate([sums, last], axis)
