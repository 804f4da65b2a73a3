"""Statistics: quantiles, reductions that ignore nan, averages, covariances, counts.

Names and semantics follow numpy, as in JAX; `correction` is the standard's name for `ddof`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, Literal, TypeAlias, get_args

from mlvm.core.errors import ArgumentError, DTypeError, ShapeError, brief, counted
from mlvm.core.rules import Axis, is_real, require
from mlvm.core.types import Array, f64, i64
from mlvm.eager.functions.arguments import axes_of, count_of, span, type_of
from mlvm.eager.functions.creation import asarray, full
from mlvm.eager.functions.elements import astype, between, stop_gradient
from mlvm.eager.functions.halves import in_f32, rounded, widened
from mlvm.eager.functions.matrices import adjoint, diagonal_of, floating, real
from mlvm.eager.functions.segments import from_front
from mlvm.eager.functions.shapes import (
    broadcast_to,
    concat,
    expand_dims,
    moveaxis,
    neighbours,
    part,
    permute_dims,
    reshape,
)
from mlvm.eager.functions.sorting import Side, searchsorted
from mlvm.eager.functions.sums import var
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.autocast import NO_AUTOCAST
from mlvm.eager.tensor.constants import constant
from mlvm.eager.tensor.operands import as_operand, is_array
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.wrapper import public

Method: TypeAlias = Literal["linear", "lower", "higher", "midpoint", "nearest"]
Numbers: TypeAlias = "float | Sequence[float] | Array | Tensor"

_METHODS: Final = get_args(Method)


# --- quantiles -----------------------------------------------------------------------


@public
def quantile(
    x: Tensor, q: Numbers, axis: Axis = None, *, method: Method = "linear", keepdims: bool = False
) -> Tensor:
    """Compute quantiles along `axis`: the element at position q (n - 1) of the sorted elements.

    Between two elements, `method` selects a weighted mean ("linear"), the "lower" or the "higher"
    element, the "midpoint", or the "nearest" element. If an element is nan, the result is nan.

    `x`: [...], any dtype but complex, integers and bools as f32; q: a number, or f[...] of any
        shape
    -> f[*q.shape, ...], followed by the shape of x without the axes (with length 1 if `keepdims`).
    The result is nan for elements of a tensor q that are not in 0 .. 1. Raises `ArgumentError` if a
    number q is not in 0 .. 1 or the method is unknown; `ShapeError` if there are no elements;
    `AxisError` if x has no such axis; `DTypeError` if x is complex or q is not of floats.

        >>> ml.quantile(ml.asarray([3.0, 1.0, 2.0]), 0.25)
        Tensor(1.5, f32[])

    Invalid calls:
        ml.quantile(v, 1.5)  # ArgumentError
    """
    return _quantile(x, q, 1.0, axis, method, keepdims)


def _quantile(
    x: Tensor,
    q: Numbers,
    most: float,
    axis: Axis,
    method: Method,
    keepdims: bool,
    *,
    skips_nan: bool = False,
) -> Tensor:
    """Compute `quantile` for q in 0 .. most, or with `skips_nan` `nanquantile`.

    Sorting puts nan last, so the numbers of a row are the first elements."""
    if method not in _METHODS:
        raise ArgumentError(f"expected method as one of {', '.join(_METHODS)}, got {brief(method)}")
    x = floating(x)
    require("real", x.type)
    share = _share(q, most)
    rows = _rows(widened(x), axis)
    if not rows.shape[-1]:
        raise ShapeError("expected at least one element, got none")
    rows = op.sort(rows, axis=-1)
    valid = op.logical_and(op.greater_equal(share, 0.0), op.less_equal(share, 1.0))
    place = op.where(valid, share, constant(0.0, f64))
    if skips_nan:
        counts = op.sum(astype(op.logical_not(op.isnan(rows)), f64), axis=-1, keepdims=True)
        is_defined = op.logical_and(op.greater(counts, 0.0), reshape(valid, -1))
        place = op.maximum(counts - 1.0, 0.0) * reshape(place, -1)
    else:
        last = part(rows, rows.ndim - 1, span(rows.shape[-1] - 1, rows.shape[-1]))
        is_defined = op.logical_not(op.isnan(reshape(last, (*rows.shape[:-1], *[1] * share.ndim))))
        is_defined = op.logical_and(is_defined, valid)
        place = place * (rows.shape[-1] - 1)
    fixed = stop_gradient(place)
    low, high = op.floor(fixed), op.ceil(fixed)
    take = op.take_along_axis if skips_nan else op.take
    below, above = [take(rows, astype(at, i64), axis=-1) for at in (low, high)]
    weight = _weight(method, place, fixed, low, high)
    result = between(below, above, astype(weight, rows.dtype))
    result = op.where(op.equal(below, above), below, result)
    result = rounded(op.where(is_defined, result, constant(math.nan, rows.dtype)), x.dtype)
    behind = tuple(range(rows.ndim - 1, result.ndim))
    result = moveaxis(result, behind, tuple(range(len(behind))))
    result = reshape(result, (*share.shape, *rows.shape[:-1]))
    axes = tuple([share.ndim + i for i in axes_of(axis, x)])
    return expand_dims(result, axis=axes) if keepdims else result


def _share(q: Numbers, most: float) -> Tensor:
    """Return q / most in f64, which represents positions exactly."""
    if is_real(q):
        number = float(q)
        if not 0 <= number <= most:
            raise ArgumentError(f"expected q from 0 to {most:g}, got {brief(q)}")
        return full((), number / most, dtype=f64)
    if isinstance(q, Tensor) and not q.dtype.is_float:
        raise DTypeError(f"expected q of floats, got {q.type}")
    return asarray(q, dtype=f64) / most


def _rows(x: Tensor, axis: Axis) -> Tensor:
    """Move the axes to reduce to the end, and merge them into one."""
    axes = axes_of(axis, x)
    rest = [i for i in range(x.ndim) if i not in axes]
    count = math.prod(x.shape[i] for i in axes)
    return reshape(permute_dims(x, (*rest, *axes)), (*[x.shape[i] for i in rest], count))


@public
def percentile(
    x: Tensor, q: Numbers, axis: Axis = None, *, method: Method = "linear", keepdims: bool = False
) -> Tensor:
    """Compute `quantile` for q in 0 .. 100.

    x: [...], any dtype but complex, integers and bools as f32; q: a number, or f[...] of any shape
    -> f[*q.shape, ...]. Raises the errors of `quantile`.

        >>> ml.percentile(ml.asarray([3.0, 1.0, 2.0]), 25.0)
        Tensor(1.5, f32[])

    Invalid calls:
        ml.percentile(v, 101.0)  # ArgumentError
    """
    return _quantile(x, q, 100.0, axis, method, keepdims)


@public
def median(x: Tensor, axis: Axis = None, *, keepdims: bool = False) -> Tensor:
    """Return the middle of the sorted elements along `axis`, or the mean of the two in the middle.

    x: [...], any dtype but complex, integers and bools as f32 -> f, the shape of x without the
    axes, or with axes of length 1 if `keepdims`. Raises `ShapeError` if there are no elements;
    `AxisError` if x has no such axis; `DTypeError` if an operand is complex.

        >>> ml.median(ml.asarray([3.0, 1.0, 2.0, 9.0]))
        Tensor(2.5, f32[])
    """
    return quantile(x, 0.5, axis, keepdims=keepdims)


# --- without nan ---------------------------------------------------------------------


def _without_nan(x: Tensor, value: float) -> Tensor:
    """Replace each nan by a value."""
    return op.where(op.isnan(x), constant(value, x.dtype), x)


@public
def nansum(
    x: Tensor, /, axis: Axis = None, *, dtype: object = None, keepdims: bool = False
) -> Tensor:
    """Sum the elements that are not nan; 0 if all are nan.

    x: [...], any dtype but bool. The result: the shape and dtype of `sum`. Raises `AxisError` if
    x has no such axis; `DTypeError` if an operand is bool.

        >>> ml.nansum(ml.asarray([1.0, ml.nan, 3.0]))
        Tensor(4., f32[])
    """
    require("numeric", type_of(x))
    numbers = _without_nan(x, 0.0) if x.dtype.is_inexact else x
    return op.sum(numbers, axis=axis, dtype=dtype, keepdims=keepdims)


@public
@in_f32
def nanmean(x: Tensor, /, axis: Axis = None, *, keepdims: bool = False) -> Tensor:
    """Average the elements that are not nan; nan if all are nan.

    x: [...], any dtype but bool, integers as f32 -> the shape of x without the axes, or with axes
    of length 1 if `keepdims`. Raises the errors of `nansum`.

        >>> ml.nanmean(ml.asarray([1.0, ml.nan, 3.0]))
        Tensor(2., f32[])
    """
    require("numeric", type_of(x))
    x = floating(x)
    return op.mean(x, axis=axis, keepdims=keepdims, where=op.logical_not(op.isnan(x)))


@public
@in_f32
def nanvar(
    x: Tensor, /, axis: Axis = None, *, correction: float = 0.0, keepdims: bool = False
) -> Tensor:
    """Compute the variance of the elements that are not nan.

    The result is nan unless the number of these is greater than `correction`.

    x: [...], integers or floats, integers as f32 -> f, the shape of x without the axes, or with
    axes of length 1 if `keepdims`. Raises `AxisError` if x has no such axis; `DTypeError` if an
    operand is bool or complex.

        >>> ml.nanvar(ml.asarray([1.0, ml.nan, 3.0]))
        Tensor(1., f32[])
    """
    require("real", type_of(x))
    x = floating(x)
    is_number = op.logical_not(op.isnan(x))
    return var(x, axis, correction=correction, keepdims=keepdims, where=is_number)


@public
@in_f32
def nanstd(
    x: Tensor, /, axis: Axis = None, *, correction: float = 0.0, keepdims: bool = False
) -> Tensor:
    """Return the square root of `nanvar`.

    x: [...], integers or floats, integers as f32 -> f, the shape of x without the axes, or with
    axes of length 1 if `keepdims`. Raises the errors of `nanvar`.

        >>> ml.nanstd(ml.asarray([1.0, ml.nan, 3.0]))
        Tensor(1., f32[])
    """
    return op.sqrt(nanvar(x, axis=axis, correction=correction, keepdims=keepdims))


@public
def nanmax(x: Tensor, /, axis: Axis = None, *, keepdims: bool = False) -> Tensor:
    """Return the largest element that is not nan; nan if all are nan.

    x: [...], integers or floats, and so is the result, of the shape of x without the axes, or with
    axes of length 1 if `keepdims`. Raises `AxisError` if x has no such axis; `DTypeError` if an
    operand is bool or complex; `ShapeError` if there are no elements.

        >>> ml.nanmax(ml.asarray([1.0, ml.nan, 3.0]))
        Tensor(3., f32[])
    """
    return _extreme(op.max, x, -math.inf, axis, keepdims)


@public
def nanmin(x: Tensor, /, axis: Axis = None, *, keepdims: bool = False) -> Tensor:
    """Return the smallest element that is not nan; nan if all are nan.

    x: [...], integers or floats, and so is the result, of the shape of x without the axes, or with
    axes of length 1 if `keepdims`. Raises the errors of `nanmax`.

        >>> ml.nanmin(ml.asarray([1.0, ml.nan, 3.0]))
        Tensor(1., f32[])
    """
    return _extreme(op.min, x, math.inf, axis, keepdims)


def _extreme(reduce: Any, x: Tensor, least: float, axis: Axis, keepdims: bool) -> Tensor:
    """Reduce the elements that are not nan; each nan is replaced by `least`."""
    require("real", type_of(x))
    if x.dtype.is_integer:
        y: Tensor = reduce(x, axis=axis, keepdims=keepdims)
        return y
    extreme = reduce(_without_nan(x, least), axis=axis, keepdims=keepdims)
    none = op.all(op.isnan(x), axis=axis, keepdims=keepdims)
    return op.where(none, constant(math.nan, x.dtype), extreme)


@public
def nanquantile(
    x: Tensor, q: Numbers, axis: Axis = None, *, method: Method = "linear", keepdims: bool = False
) -> Tensor:
    """Compute `quantile` of the elements that are not nan; nan if all are nan.

    x: [...], any dtype but complex, integers and bools as f32; q: a number, or f[...] of any shape
    -> f[*q.shape, ...]. Raises the errors of `quantile`.

        >>> ml.nanquantile(ml.asarray([3.0, ml.nan, 2.0]), 0.5)
        Tensor(2.5, f32[])

    Invalid calls:
        ml.nanquantile(v, 1.5)  # ArgumentError
    """
    return _quantile(x, q, 1.0, axis, method, keepdims, skips_nan=True)


@public
def nanpercentile(
    x: Tensor, q: Numbers, axis: Axis = None, *, method: Method = "linear", keepdims: bool = False
) -> Tensor:
    """Compute `nanquantile` for q in 0 .. 100.

    x: [...], any dtype but complex, integers and bools as f32; q: a number, or f[...] of any shape
    -> f[*q.shape, ...]. Raises the errors of `quantile`.

        >>> ml.nanpercentile(ml.asarray([3.0, ml.nan, 2.0]), 50.0)
        Tensor(2.5, f32[])

    Invalid calls:
        ml.nanpercentile(v, 101.0)  # ArgumentError
    """
    return _quantile(x, q, 100.0, axis, method, keepdims, skips_nan=True)


@public
def nanmedian(x: Tensor, axis: Axis = None, *, keepdims: bool = False) -> Tensor:
    """Compute the `median` of the elements that are not nan; nan if all are nan.

    x: [...], any dtype but complex, integers and bools as f32 -> f, the shape of x without the
    axes, or with axes of length 1 if `keepdims`. Raises the errors of `median`.

        >>> ml.nanmedian(ml.asarray([3.0, ml.nan, 1.0, 2.0]))
        Tensor(2., f32[])
    """
    return nanquantile(x, 0.5, axis, keepdims=keepdims)


def _weight(method: Method, place: Tensor, fixed: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return the interpolation weight of the element above a position."""
    return {
        "linear": place - low,
        "lower": low * 0.0,
        "higher": high - low,
        "midpoint": (high - low) * 0.5,
        "nearest": op.round(fixed) - low,
    }[method]


# --- averages and covariances --------------------------------------------------------


@public
@in_f32
def average(
    x: Tensor, axis: int | None = None, weights: Tensor | None = None, *, keepdims: bool = False
) -> Tensor:
    """Compute sum(weights x) / sum(weights) along `axis`; without weights, the mean.

    x: [..., n], any dtype but bool, integers as f32; weights: as x, or [n] along the axis. The
    result: the shape of x without the axis, or with an axis of length 1 if `keepdims`. Raises
    `ShapeError` if the weights have a different shape; `AxisError` if x has no such axis;
    `DTypeError` if an operand is bool.

        >>> ml.average(ml.asarray([1.0, 4.0]), weights=ml.asarray([2.0, 1.0]))
        Tensor(2., f32[])
    """
    require("numeric", type_of(x))
    x = floating(x)
    if weights is None:
        return op.mean(x, axis=axis, keepdims=keepdims)
    require("numeric", type_of(weights))
    if weights.shape != x.shape:
        along = axes_of(axis, x)
        if len(along) != 1 or weights.shape != (x.shape[along[0]],):
            raise ShapeError(
                f"expected weights of the shape of x, {x.shape}, or a vector for a single axis, "
                f"got {weights.shape}"
            )
        weights = reshape(weights, [n if i in along else 1 for i, n in enumerate(x.shape)])
        weights = broadcast_to(weights, x.shape)
    total = op.sum(weights, axis=axis, keepdims=keepdims)
    return op.sum(x * weights, axis=axis, keepdims=keepdims) / total


@public
def ptp(x: Tensor, axis: Axis = None, *, keepdims: bool = False) -> Tensor:
    """Return max - min along `axis` (peak to peak).

    x: [...], integers or floats, and so is the result, of the shape of x without the axes, or with
    axes of length 1 if `keepdims`. Raises `AxisError` if x has no such axis; `DTypeError` if an
    operand is bool or complex; `ShapeError` if there are no elements.

        >>> ml.ptp(ml.asarray([3.0, 1.0, 2.0]))
        Tensor(2., f32[])
    """
    require("real", type_of(x))
    return op.max(x, axis=axis, keepdims=keepdims) - op.min(x, axis=axis, keepdims=keepdims)


@public
@in_f32
@NO_AUTOCAST
def cov(
    x: Tensor, y: Tensor | None = None, *, rowvar: bool = True, correction: float = 1.0
) -> Tensor:
    """Compute the covariances of the rows of x, and also of y if it is given.

    They are sum((a - mean(a)) conj(b - mean(b))) / (n - correction) for all pairs of rows a and b.
    If `rowvar` is False, columns are used instead of rows.

    x and y: [d, n] or [n], any dtype but bool, integers as f32 -> [d, d], or [] for one vector.
    Raises `ShapeError` if x has more axes or the length of y differs; `DTypeError` if an operand is
    bool or the dtypes do not promote.

        >>> ml.cov(ml.asarray([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]]))
        Tensor([[ 1., -1.],
                [-1.,  1.]], f32[2,2])
    """
    rows = [_variables(each, rowvar) for each in (x, y) if each is not None]
    if rows[0].shape[1] != rows[-1].shape[1]:
        raise ShapeError(
            f"expected equal observations, got {rows[0].shape[1]} and {rows[-1].shape[1]}"
        )
    joined = concat(rows)
    away = joined - op.mean(joined, axis=1, keepdims=True)
    covariance = away @ adjoint(away) / max(away.shape[1] - float(correction), 0.0)
    return reshape(covariance, ()) if covariance.size == 1 and x.ndim < 2 else covariance


def _variables(x: Tensor, rowvar: bool) -> Tensor:
    """Return x with one row per variable."""
    require("numeric", type_of(x))
    if x.ndim not in (1, 2):
        raise ShapeError(f"expected 1 or 2 dimensions, got {x.ndim}")
    x = floating(x)
    if x.ndim == 1:
        return expand_dims(x, axis=0)
    return x if rowvar else x.mT


@public
@in_f32
def corrcoef(x: Tensor, y: Tensor | None = None, *, rowvar: bool = True) -> Tensor:
    """Compute Pearson's correlation coefficients: `cov`, divided by both standard deviations.

    x and y: [d, n] or [n], any dtype but bool, integers as f32 -> [d, d], or [] for one vector.
    Raises the errors of `cov`.

        >>> ml.corrcoef(ml.asarray([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]]))
        Tensor([[ 1., -1.],
                [-1.,  1.]], f32[2,2])
    """
    c = cov(x, y, rowvar=rowvar)
    if c.ndim == 0:
        return c / c
    away = op.sqrt(real(diagonal_of(c)))
    coefficients = c / expand_dims(away, axis=1) / away
    return op.clip(coefficients, -1.0, 1.0) if coefficients.dtype.is_float else coefficients


# --- counts --------------------------------------------------------------------------


@public
def bincount(
    x: Tensor, weights: Tensor | None = None, minlength: int = 0, *, length: int | None = None
) -> Tensor:
    """Count each of 0, 1, 2, ... among the elements (i64), or sum weights.

    Without `length`, the result extends to the largest element, and has at least `minlength`
    counts. The largest element is then read, so pass `length` in a captured function.

    x: i[n]; weights: [n] -> [length], i64 or the dtype of the weights. Raises `ShapeError` if the
    shapes do not fit; `DTypeError` if x is not of integers, or the weights are bool;
    `ArgumentError` if a number is negative; `PositionError` if an element is negative, or not
    below `length`.

        >>> ml.bincount(ml.asarray([1, 3, 1]))
        Tensor([0, 2, 0, 1], i64[4])

    Invalid calls:
        ml.bincount(ints, minlength=-1)  # ArgumentError
        ml.bincount(ints, length=1)  # PositionError
    """
    require("integer", type_of(x))
    if x.ndim != 1:
        raise ShapeError(f"expected a vector, got {counted(x.ndim, 'dimension')}")
    if weights is not None and type_of(weights).shape != x.shape:
        raise ShapeError(f"expected weights of shape {x.shape}, like x, got {weights.shape}")
    least = count_of(minlength, "minlength")
    if length is None:
        length = max(least, int(op.max(x)) + 1 if x.size else 0)
    bins = count_of(length, "length")
    amounts = full(x.shape, 1, dtype=i64) if weights is None else weights
    with from_front(x, bins) as places:
        return op.scatter_add(amounts, places, axis=0, length=bins)


def _run(x: Tensor, first: int, end: int) -> Tensor:
    """Return the elements first .. end - 1 of a vector."""
    return part(x, 0, span(first, end))


@public
def digitize(x: Tensor, bins: Tensor, *, right: bool = False) -> Tensor:
    """Return the index (i64) of the bin that contains each element.

    It is i if bins[i-1] <= x < bins[i], or with `right` if bins[i-1] < x <= bins[i]. Elements
    before all edges are in bin 0, elements after all edges in bin n. The edges ascend or descend,
    as in numpy.

    x: [...], bins: [n], any dtype but complex -> i64[...]. Raises `ShapeError` if `bins` is not a
    vector; `DTypeError` if an operand is complex or the dtypes do not promote.

        >>> ml.digitize(ml.asarray([0.5, 1.0, 9.0]), ml.asarray([0.0, 1.0, 2.0]))
        Tensor([1, 2, 3], i64[3])
    """
    side: Side = "left" if right else "right"
    if type_of(bins).ndim != 1:
        raise ShapeError(f"expected bins as a vector, got {bins.type}")
    n = bins.shape[0]
    if n < 2:
        return searchsorted(bins, x, side=side)
    first, last = reshape(_run(bins, 0, 1), ()), reshape(_run(bins, n - 1, n), ())
    # nan is sorted after all numbers, so only descending edges begin with it.
    is_falling = op.logical_or(op.greater(first, last), op.not_equal(first, first))
    place = searchsorted(op.where(is_falling, op.flip(bins, axis=0), bins), x, side=side)
    return op.where(is_falling, n - place, place)


@public
def histogram(
    x: Tensor,
    bins: int | Sequence[float] | Array | Tensor = 10,
    range: tuple[float, float] | None = None,
    weights: Tensor | None = None,
    density: bool = False,
) -> tuple[Tensor, Tensor]:
    """Count the elements in each bin (i64), or sum weights; also return the bin edges.

    A bin extends from the left edge to the next edge, which only the last bin includes. With
    `density`, counts are divided by the total count and by the widths.

    `bins` are sorted edges, or the number of equal bins in `range`. The default
    range is from the least to the largest element, widened by 0.5 if they are equal. Elements
    outside of it, and nan, are not counted; pass a range if the elements contain nan.

    x: [...], integers or floats; weights: as x -> [bins] and f[bins + 1]. Raises `ShapeError` if
    the weights have a different shape, or the edges are not a vector of 2 or more; `ArgumentError`
    if there are no bins, or the range is invalid; `DTypeError` if an operand is bool or complex.

        >>> counts, edges = ml.histogram(ml.asarray([0.0, 1.0, 1.5, 4.0]), 2)
        >>> counts, edges
        (Tensor([3, 1], i64[2]), Tensor([0., 2., 4.], f32[3]))

    Invalid calls:
        ml.histogram(v, 0)  # ArgumentError
        ml.histogram(v, ml.ones(1))  # ShapeError
    """
    require("real", type_of(x))
    if weights is not None and type_of(weights).shape != x.shape:
        raise ShapeError(f"expected weights of shape {x.shape}, like x, got {weights.shape}")
    flat = reshape(x, -1)
    if isinstance(bins, (list, tuple)) or is_array(bins):
        bins = as_operand(bins, flat)
    edges = bins if isinstance(bins, Tensor) else _edges(floating(flat), bins, range)
    if edges.ndim != 1 or edges.size < 2:
        raise ShapeError(f"expected edges as a vector of 2 or more, got {edges.type}")
    count = edges.size - 1
    # Index i belongs to bin i - 1. The last bin includes the right edge.
    place = searchsorted(edges, flat, side="right")
    place = place - astype(op.equal(flat, _run(edges, count, count + 1)), i64)
    amounts = full(flat.shape, 1, dtype=i64) if weights is None else reshape(weights, -1)
    sums = _run(op.scatter_add(amounts, place, axis=0, length=count + 2), 1, count + 1)
    if density:
        widths = floating(op.subtract(*neighbours(edges, 0)))
        sums = widened(sums if sums.dtype.is_inexact else astype(sums, widths.dtype))
        sums = rounded(sums / op.sum(sums) / widened(widths), widths.dtype)
    return sums, edges


def _edges(x: Tensor, bins: Any, ends: tuple[float, float] | None) -> Tensor:
    """Return the edges of equal bins, computed like `numpy.linspace`."""
    count, dtype, x = count_of(bins, "bins"), x.dtype, widened(x)
    if not count:
        raise ArgumentError("expected at least one bin, got none")
    if ends is None and x.size:
        low, high = op.min(x), op.max(x)
    else:
        interval = (0.0, 1.0) if ends is None else ends
        is_pair = isinstance(interval, (tuple, list)) and len(interval) == 2
        is_finite = is_pair and all(is_real(each) and math.isfinite(each) for each in interval)
        if not is_finite or interval[0] > interval[1]:
            raise ArgumentError(f"expected range as a finite low <= high, got {brief(ends)}")
        low, high = [constant(float(each), x.dtype) for each in interval]
    one = op.equal(low, high)
    low, high = op.where(one, low - 0.5, low), op.where(one, high + 0.5, high)
    steps = op.arange(start=0, stop=count, step=1, dtype=x.dtype)
    return rounded(concat([steps * ((high - low) / count) + low, reshape(high, 1)]), dtype)
