"""What many numbers are like: quantiles, what is left without nan, averages, covariances, counts.

Names and meaning are numpy's, as JAX has them; `correction` is the standard's word for `ddof`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, Literal, TypeAlias, get_args

from mlvm.core.errors import AttributeRefused, DTypeError, ShapeError, brief
from mlvm.core.rules import Axis, is_real, require
from mlvm.core.types import Array, f64, i64
from mlvm.eager.functions.arguments import axes_of, counts_of, integer, type_of
from mlvm.eager.functions.creation import asarray, full
from mlvm.eager.functions.elements import astype, stop_gradient
from mlvm.eager.functions.halves import in_f32, rounded, widened
from mlvm.eager.functions.matrices import adjoint, diagonal_of, floating, real
from mlvm.eager.functions.segments import from_front
from mlvm.eager.functions.shapes import (
    broadcast_to,
    concat,
    expand_dims,
    moveaxis,
    part,
    permute_dims,
    reshape,
)
from mlvm.eager.functions.sorting import searchsorted
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
    """The values below which the part q of the elements along `axis` lies: the element at place
    q (n - 1) in order. Between two elements: a mean with weights ("linear"), the "lower", the
    "higher", their "midpoint", or the "nearest". Where one is nan, the result is nan.

    x: [...], any dtype but complex, integers and bools as f32; q: a number, or f[...] of any shape,
    whose axes come first -> f[*q.shape, ...], the shape of x without the axes, or with 1 in their
    place if `keepdims`. Where a q that is a tensor is not in 0 .. 1, the result is nan. Raises
    `AttributeRefused` for a number that is not, and for another method, `ShapeError` for no
    elements, `AxisRefused` for an axis that x does not have, `DTypeError` for complex numbers, and
    for a q of no floats.

        >>> ml.quantile(ml.asarray([3.0, 1.0, 2.0]), 0.25)
        Tensor(1.5, f32[])
    """
    return _quantile(x, q, 1.0, axis, method, keepdims)


def _quantile(
    x: Tensor, q: Numbers, most: float, axis: Axis, method: Method, keepdims: bool
) -> Tensor:
    """`quantile` for a q of 0 .. most."""
    if method not in _METHODS:
        raise AttributeRefused(f"method is one of {', '.join(_METHODS)}, not {brief(method)}")
    x = floating(x)
    require("real", x.type)
    share = _share(q, most)
    rows = _rows(widened(x), axis)
    if not rows.shape[-1]:
        raise ShapeError("there are no elements")
    rows = op.sort(rows, axis=-1)
    valid = op.logical_and(op.greater_equal(share, 0.0), op.less_equal(share, 1.0))
    place = op.where(valid, share, constant(0.0, f64)) * float(rows.shape[-1] - 1)
    fixed = stop_gradient(place)
    low, high = op.floor(fixed), op.ceil(fixed)
    below, above = [op.take(rows, astype(at, i64), axis=-1) for at in (low, high)]
    weight = {
        "linear": place - low,
        "lower": low * 0.0,
        "higher": high - low,
        "midpoint": (high - low) * 0.5,
        "nearest": op.round(fixed) - low,
    }[method]
    between = below + (above - below) * astype(weight, rows.dtype)
    result = op.where(op.equal(below, above), below, between)
    last = part(rows, rows.ndim - 1, range(rows.shape[-1] - 1, rows.shape[-1]))
    known = op.logical_not(op.isnan(reshape(last, (*rows.shape[:-1], *[1] * share.ndim))))
    known = op.logical_and(known, valid)
    result = rounded(op.where(known, result, constant(math.nan, rows.dtype)), x.dtype)
    behind = tuple(range(rows.ndim - 1, result.ndim))
    result = moveaxis(result, behind, tuple(range(share.ndim)))
    if not keepdims:
        return result
    axes = axes_of(axis, x)
    kept = [1 if i in axes else n for i, n in enumerate(x.shape)]
    return reshape(result, (*share.shape, *kept))


def _share(q: Numbers, most: float) -> Tensor:
    """q / most in f64, in which places are exact."""
    if is_real(q):
        number = float(q)
        if not 0 <= number <= most:
            raise AttributeRefused(f"q must be in 0 .. {most:g}, not {brief(q)}")
        return full((), number / most, dtype=f64)
    if isinstance(q, Tensor) and not q.dtype.is_float:
        raise DTypeError(f"q is floats, not {q.type}")
    return asarray(q, dtype=f64) / most


def _rows(x: Tensor, axis: Axis) -> Tensor:
    """x with what is reduced along the last axis."""
    axes = axes_of(axis, x)
    rest = [i for i in range(x.ndim) if i not in axes]
    count = math.prod(x.shape[i] for i in axes)
    return reshape(permute_dims(x, (*rest, *axes)), (*[x.shape[i] for i in rest], count))


@public
def percentile(
    x: Tensor, q: Numbers, axis: Axis = None, *, method: Method = "linear", keepdims: bool = False
) -> Tensor:
    """`quantile`, with q in 0 .. 100.

    x: [...], any dtype but complex, integers and bools as f32; q: a number, or f[...] of any shape
    -> f[*q.shape, ...]. Raises what `quantile` raises.

        >>> ml.percentile(ml.asarray([3.0, 1.0, 2.0]), 25.0)
        Tensor(1.5, f32[])
    """
    return _quantile(x, q, 100.0, axis, method, keepdims)


@public
def median(x: Tensor, axis: Axis = None, *, keepdims: bool = False) -> Tensor:
    """The middle of the elements along `axis` in order, or the mean of the two in the middle.

    x: [...], any dtype but complex, integers and bools as f32 -> f, the shape of x without the
    axes, or with 1 in their place if `keepdims`. Raises `ShapeError` for no elements, `AxisRefused`
    for an axis that x does not have, `DTypeError` for complex numbers.

        >>> ml.median(ml.asarray([3.0, 1.0, 2.0, 9.0]))
        Tensor(2.5, f32[])
    """
    return quantile(x, 0.5, axis, keepdims=keepdims)


# --- without nan ---------------------------------------------------------------------


def _without_nan(x: Tensor, value: float) -> Tensor:
    """x with a value in the place of each nan."""
    return op.where(op.isnan(x), constant(value, x.dtype), x)


@public
def nansum(
    x: Tensor, /, axis: Axis = None, *, dtype: object = None, keepdims: bool = False
) -> Tensor:
    """`sum` of what is not nan; 0 where all is.

    x: [...], any dtype but bool. The result: the shape and dtype that `sum` has. Raises
    `AxisRefused` for an axis that x does not have, `DTypeError` for bools.

        >>> ml.nansum(ml.asarray([1.0, ml.nan, 3.0]))
        Tensor(4., f32[])
    """
    require("numeric", type_of(x))
    known = _without_nan(x, 0.0) if x.dtype.is_inexact else x
    return op.sum(known, axis=axis, dtype=dtype, keepdims=keepdims)


@public
@in_f32
def nanmean(x: Tensor, /, axis: Axis = None, *, keepdims: bool = False) -> Tensor:
    """`mean` of what is not nan; nan where all is.

    x: [...], any dtype but bool, integers as f32 -> the shape of x without the axes, or with 1 in
    their place if `keepdims`. Raises what `nansum` raises.

        >>> ml.nanmean(ml.asarray([1.0, ml.nan, 3.0]))
        Tensor(2., f32[])
    """
    require("numeric", type_of(x))
    x = floating(x)
    total = op.sum(_without_nan(x, 0.0), axis=axis, keepdims=keepdims)
    return total / _known(x, axis, keepdims)


def _known(x: Tensor, axis: Axis, keepdims: bool) -> Tensor:
    """How many elements are not nan."""
    known = astype(op.logical_not(op.isnan(x)), x.dtype.real)
    return op.sum(known, axis=axis, keepdims=keepdims)


@public
@in_f32
def nanvar(
    x: Tensor, /, axis: Axis = None, *, correction: float = 0.0, keepdims: bool = False
) -> Tensor:
    """`var` of what is not nan; nan where no more than `correction` elements are left.

    x: [...], integers or floats, integers as f32 -> f, the shape of x without the axes, or with 1
    in their place if `keepdims`. Raises `AxisRefused` for an axis that x does not have,
    `DTypeError` for bools and complex numbers.

        >>> ml.nanvar(ml.asarray([1.0, ml.nan, 3.0]))
        Tensor(1., f32[])
    """
    require("real", type_of(x))
    x = floating(x)
    away = op.where(op.isnan(x), constant(0.0, x.dtype), x - nanmean(x, axis=axis, keepdims=True))
    total = op.sum(op.square(away), axis=axis, keepdims=keepdims)
    left = _known(x, axis, keepdims) - float(correction)
    return total / op.where(op.greater(left, 0.0), left, constant(math.nan, x.dtype))


@public
@in_f32
def nanstd(
    x: Tensor, /, axis: Axis = None, *, correction: float = 0.0, keepdims: bool = False
) -> Tensor:
    """The square root of `nanvar`.

    x: [...], integers or floats, integers as f32 -> f, the shape of x without the axes, or with 1
    in their place if `keepdims`. Raises what `nanvar` raises.

        >>> ml.nanstd(ml.asarray([1.0, ml.nan, 3.0]))
        Tensor(1., f32[])
    """
    return op.sqrt(nanvar(x, axis=axis, correction=correction, keepdims=keepdims))


@public
def nanmax(x: Tensor, /, axis: Axis = None, *, keepdims: bool = False) -> Tensor:
    """`max` of what is not nan; nan where all is.

    x: [...], integers or floats, and so is the result, of the shape of x without the axes, or with
    1 in their place if `keepdims`. Raises `AxisRefused` for an axis that x does not have,
    `DTypeError` for bools and complex numbers, `ShapeError` for no elements.

        >>> ml.nanmax(ml.asarray([1.0, ml.nan, 3.0]))
        Tensor(3., f32[])
    """
    require("real", type_of(x))
    if x.dtype.is_integer:
        return op.max(x, axis=axis, keepdims=keepdims)
    found = op.max(_without_nan(x, -math.inf), axis=axis, keepdims=keepdims)
    none = op.all(op.isnan(x), axis=axis, keepdims=keepdims)
    return op.where(none, constant(math.nan, x.dtype), found)


@public
def nanmin(x: Tensor, /, axis: Axis = None, *, keepdims: bool = False) -> Tensor:
    """`min` of what is not nan; nan where all is.

    x: [...], integers or floats, and so is the result, of the shape of x without the axes, or with
    1 in their place if `keepdims`. Raises what `nanmax` raises.

        >>> ml.nanmin(ml.asarray([1.0, ml.nan, 3.0]))
        Tensor(1., f32[])
    """
    require("real", type_of(x))
    if x.dtype.is_integer:
        return op.min(x, axis=axis, keepdims=keepdims)
    found = op.min(_without_nan(x, math.inf), axis=axis, keepdims=keepdims)
    none = op.all(op.isnan(x), axis=axis, keepdims=keepdims)
    return op.where(none, constant(math.nan, x.dtype), found)


# --- averages and covariances --------------------------------------------------------


@public
@in_f32
def average(
    x: Tensor, axis: int | None = None, weights: Tensor | None = None, *, keepdims: bool = False
) -> Tensor:
    """sum(weights x) / sum(weights) along `axis`; without weights `mean`.

    x: [..., n], any dtype but bool, integers as f32; weights: as x, or [n] for the elements along
    the axis -> the shape of x without the axis, or with 1 in its place if `keepdims`. Raises
    `ShapeError` for weights of another shape, `AxisRefused` for an axis that x does not have,
    `DTypeError` for bools.

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
            raise ShapeError("weights have the shape of x, or are a vector for one axis of it")
        weights = reshape(weights, [n if i in along else 1 for i, n in enumerate(x.shape)])
        weights = broadcast_to(weights, x.shape)
    total = op.sum(weights, axis=axis, keepdims=keepdims)
    return op.sum(x * weights, axis=axis, keepdims=keepdims) / total


@public
def ptp(x: Tensor, axis: Axis = None, *, keepdims: bool = False) -> Tensor:
    """`max` less `min`: from peak to peak.

    x: [...], integers or floats, and so is the result, of the shape of x without the axes, or with
    1 in their place if `keepdims`. Raises `AxisRefused` for an axis that x does not have,
    `DTypeError` for bools and complex numbers, `ShapeError` for no elements.

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
    """How the rows of x vary together: sum((a - mean(a)) conj(b - mean(b))) / (n - correction) for
    all pairs of rows, and with y of all rows of both. Without `rowvar`, of columns.

    x and y: [d, n] or [n], any dtype but bool, integers as f32 -> [d, d], or [] of one vector.
    Raises `ShapeError` for more axes, and for a y of another length, `DTypeError` for bools and
    dtypes that do not promote.

        >>> ml.cov(ml.asarray([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]]))
        Tensor([[ 1., -1.],
                [-1.,  1.]], f32[2,2])
    """
    rows = [_variables(each, rowvar) for each in (x, y) if each is not None]
    if rows[0].shape[1] != rows[-1].shape[1]:
        raise ShapeError(f"x has {rows[0].shape[1]} observations, and y {rows[-1].shape[1]}")
    joined = concat(rows)
    away = joined - op.mean(joined, axis=1, keepdims=True)
    found = away @ adjoint(away) / max(away.shape[1] - float(correction), 0.0)
    return reshape(found, ()) if found.size == 1 and x.ndim < 2 else found


def _variables(x: Tensor, rowvar: bool) -> Tensor:
    """x with a row for each variable."""
    require("numeric", type_of(x))
    if x.ndim not in (1, 2):
        raise ShapeError(f"takes 1 or 2 dimensions, not {x.ndim}")
    x = floating(x)
    if x.ndim == 1:
        return expand_dims(x, axis=0)
    return x if rowvar else x.mT


@public
@in_f32
def corrcoef(x: Tensor, y: Tensor | None = None, *, rowvar: bool = True) -> Tensor:
    """Pearson's coefficients of correlation: `cov`, each divided by the two standard deviations.

    x and y: [d, n] or [n], any dtype but bool, integers as f32 -> [d, d], or [] of one vector.
    Raises what `cov` raises.

        >>> ml.corrcoef(ml.asarray([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]]))
        Tensor([[ 1., -1.],
                [-1.,  1.]], f32[2,2])
    """
    c = cov(x, y, rowvar=rowvar)
    if c.ndim == 0:
        return c / c
    away = op.sqrt(real(diagonal_of(c)))
    found = c / expand_dims(away, axis=1) / away
    return op.clip(found, -1.0, 1.0) if found.dtype.is_float else found


# --- counts --------------------------------------------------------------------------


@public
def bincount(
    x: Tensor, weights: Tensor | None = None, minlength: int = 0, *, length: int | None = None
) -> Tensor:
    """How often each of 0, 1, 2, ... is among the elements (i64), or the sum of their weights.

    Without `length` there are as many as the largest says, and at least `minlength`: it is read, so
    a captured function gives a `length`.

    x: i[n]; weights: [n] -> [length], i64 or the dtype of the weights. Raises `ShapeError` for
    other shapes, `DTypeError` for an x of other than integers and weights that are bools,
    `AttributeRefused` for a negative number, `PositionRefused` for an element that is negative, or
    not below `length`.

        >>> ml.bincount(ml.asarray([1, 3, 1]))
        Tensor([0, 2, 0, 1], i64[4])
    """
    require("integer", type_of(x))
    if x.ndim != 1:
        raise ShapeError(f"takes a vector, not {x.ndim} dimensions")
    if weights is not None and type_of(weights).shape != x.shape:
        raise ShapeError(f"weights have the shape of x, {x.shape}")
    [least] = counts_of(integer(minlength, "minlength"), "minlength")
    if length is None:
        length = max(least, int(op.max(x)) + 1 if x.size else 0)
    [bins] = counts_of(integer(length, "length"), "length")
    given = full(x.shape, 1, dtype=i64) if weights is None else weights
    return op.scatter_add(given, from_front(x, bins), axis=0, length=bins)


def _run(x: Tensor, first: int, end: int) -> Tensor:
    """The elements of a vector from the first to before the end."""
    return part(x, 0, range(first, end))


@public
def digitize(x: Tensor, bins: Tensor, *, right: bool = False) -> Tensor:
    """The number (i64) of the bin that each element is in: i where bins[i-1] <= x < bins[i], or
    bins[i-1] < x <= bins[i] if `right`; 0 before all, the number of edges behind them. The edges
    rise, or fall, as in numpy.

    x: [...], bins: [n], any dtype but complex -> i64[...]. Raises `ShapeError` for bins that are no
    vector, `DTypeError` for complex numbers and for dtypes that do not promote.

        >>> ml.digitize(ml.asarray([0.5, 1.0, 9.0]), ml.asarray([0.0, 1.0, 2.0]))
        Tensor([1, 2, 3], i64[3])
    """
    rising = searchsorted(bins, x, side="left" if right else "right")
    n = bins.shape[0]
    if n < 2:
        return rising
    falling = n - searchsorted(op.flip(bins, axis=0), x, side="left" if right else "right")
    first, last = _run(bins, 0, 1), _run(bins, n - 1, n)
    return op.where(reshape(op.greater(first, last), ()), falling, rising)


@public
def histogram(
    x: Tensor,
    bins: int | Sequence[float] | Array | Tensor = 10,
    range: tuple[float, float] | None = None,
    weights: Tensor | None = None,
    density: bool = False,
) -> tuple[Tensor, Tensor]:
    """How many elements lie between each edge and the next (i64), or the sum of their weights, and
    the edges. The last bin has both of its edges. With `density`, divided by the sum and the width.

    `bins` are edges in order, or the number of equal bins between the ends of `range`; without it
    between the least and the largest element, or 0.5 around them where they are one. What lies
    outside, and nan, is not counted; where there is nan, give a range.

    x: [...], integers or floats; weights: as x -> [bins] and f[bins + 1]. Raises `ShapeError` for
    weights of another shape and for edges that are no vector of 2 or more, `AttributeRefused` for
    no bins and a range that is none, `DTypeError` for bools and complex numbers.

        >>> counts, edges = ml.histogram(ml.asarray([0.0, 1.0, 1.5, 4.0]), 2)
        >>> counts, edges
        (Tensor([3, 1], i64[2]), Tensor([0., 2., 4.], f32[3]))
    """
    require("real", type_of(x))
    if weights is not None and type_of(weights).shape != x.shape:
        raise ShapeError(f"weights have the shape of x, {x.shape}")
    flat = reshape(x, -1)
    if isinstance(bins, (list, tuple)) or is_array(bins):
        bins = as_operand(bins, flat)
    edges = bins if isinstance(bins, Tensor) else _edges(floating(flat), bins, range)
    if edges.ndim != 1 or edges.size < 2:
        raise ShapeError(f"edges are a vector of 2 or more, not {edges.type}")
    count = edges.size - 1
    last = _run(edges, count, count + 1)
    place = op.minimum(searchsorted(edges, flat, side="right") - 1, count - 1)
    inside = op.logical_and(op.greater_equal(flat, _run(edges, 0, 1)), op.less_equal(flat, last))
    place = op.where(inside, place, count)
    given = full(flat.shape, 1, dtype=i64) if weights is None else reshape(weights, -1)
    sums = _run(op.scatter_add(given, place, axis=0, length=count + 1), 0, count)
    if density:
        widths = floating(_run(edges, 1, count + 1) - _run(edges, 0, count))
        sums = widened(sums if sums.dtype.is_inexact else astype(sums, widths.dtype))
        sums = rounded(sums / op.sum(sums) / widened(widths), widths.dtype)
    return sums, edges


def _edges(x: Tensor, bins: Any, ends: tuple[float, float] | None) -> Tensor:
    """The edges of so many equal bins, as `numpy.linspace` has them."""
    [count], dtype, x = counts_of(integer(bins, "bins"), "bins"), x.dtype, widened(x)
    if not count:
        raise AttributeRefused("there are no bins")
    if ends is None and x.size:
        low, high = op.min(x), op.max(x)
    else:
        given = (0.0, 1.0) if ends is None else ends
        pair = isinstance(given, (tuple, list)) and len(given) == 2 and all(map(is_real, given))
        if not pair or not all(map(math.isfinite, given)) or given[0] > given[1]:
            raise AttributeRefused(f"range is a finite low <= high, not {brief(ends)}")
        low, high = [constant(float(each), x.dtype) for each in given]
    one = op.equal(low, high)
    low, high = op.where(one, low - 0.5, low), op.where(one, high + 0.5, high)
    steps = op.arange(start=0, stop=count, step=1, dtype=x.dtype)
    return rounded(concat([steps * ((high - low) / count) + low, reshape(high, 1)]), dtype)
