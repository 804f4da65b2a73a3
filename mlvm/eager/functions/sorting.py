"""Sorting, searching and sets, as in the Python Array API standard.

All functions are composed of `sort`, `argsort` and `searchsorted`. Sorting is stable, and nan comes
last. Bools are ordered (False first). Complex numbers are ordered only in sets.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, TypeAlias, overload

from mlvm.core.errors import ArgumentError, DTypeError, ShapeError, brief
from mlvm.core.rules import common_dtype, is_real, require
from mlvm.core.types import bool_, i64, u8
from mlvm.eager.functions.arguments import Ints, axes_of, count_of, integers, span, type_of
from mlvm.eager.functions.creation import full
from mlvm.eager.functions.elements import astype, between, take
from mlvm.eager.functions.halves import through_f32
from mlvm.eager.functions.matrices import floating
from mlvm.eager.functions.shapes import concat, moveaxis, neighbours, part, reshape
from mlvm.eager.functions.sums import cumulative_sum
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.constants import constant
from mlvm.eager.tensor.operands import Operand, as_operand
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.wrapper import public

Side: TypeAlias = Literal["left", "right"]


@public
def sort(
    x: Tensor,
    /,
    axis: int = -1,
    *,
    descending: bool = False,
    stable: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """Sort the elements of x along `axis`; nan counts as the largest.

    The sort is always stable.

    x: [...], any dtype but complex, and so is the result. Raises `AxisError` if x has no such
    axis; `DTypeError` if x is complex: complex numbers have no order.

        >>> ml.sort(ml.asarray([3.0, 1.0, 2.0]))
        Tensor([1., 2., 3.], f32[3])
    """
    numbers = _ordered(x)
    if numbers is x or out is not None:
        return op.sort(x, axis=axis, descending=descending, out=out)
    return astype(op.sort(numbers, axis=axis, descending=descending), x.dtype)


@public
def argsort(
    x: Tensor,
    /,
    axis: int = -1,
    *,
    descending: bool = False,
    stable: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """Return the positions (i64) along `axis` of the elements in the order of `sort`.

    The sort is always stable: equal elements are not reordered.

    x: [...] -> i64[...]. Raises the errors of `sort`.

        >>> ml.argsort([3.0, 1.0, 2.0])
        Tensor([1, 2, 0], i64[3])
    """
    x = _ordered(x)
    return op.argsort(x, axis=axis, descending=descending, out=out)


@public
def topk(x: Tensor, /, k: int, axis: int = -1, *, largest: bool = True) -> tuple[Tensor, Tensor]:
    """Return the k largest elements along `axis`, the largest first, and the positions (i64).

    Without `largest`, return the k smallest elements, the smallest first. Equal elements are not
    reordered, and nan counts as the largest, as in `jax.lax.top_k`.

    x: [..., n] -> [..., k] each. Raises `ArgumentError` unless 0 <= k <= n; `AxisError` if x
    has no such axis; `DTypeError` if an operand is complex.

        >>> ml.topk(ml.asarray([1.0, 5.0, 3.0]), 2)
        (Tensor([5., 3.], f32[2]), Tensor([1, 2], i64[2]))

    Invalid calls:
        ml.topk(v, 9)  # ArgumentError
    """
    [along] = axes_of(axis, x)
    count = count_of(k, "k")
    if count > x.shape[along]:
        raise ArgumentError(f"expected k of at most {x.shape[along]}, got {count}")
    largest = bool(largest)
    indices = op.top_indices(_ordered(x), axis=along, count=count, descending=largest)
    return op.take_along_axis(x, indices, axis=along), indices


@public
def partition(x: Tensor, /, kth: Ints, axis: int = -1) -> Tensor:
    """Move the element of each rank `kth` to the sorted position along `axis`.

    No larger element precedes it, and no smaller element follows it. This function sorts all
    elements, which numpy's specification permits.

    x: [..., n], any dtype but complex, and so is the result. Raises `ArgumentError` if a rank is
    out of range; `AxisError` if x has no such axis; `DTypeError` if x is complex.

        >>> ml.partition(ml.asarray([3.0, 1.0, 2.0]), 1)
        Tensor([1., 2., 3.], f32[3])

    Invalid calls:
        ml.partition(v, 9)  # ArgumentError
    """
    _require_ranks(x, kth, axis)
    return sort(x, axis=axis)


@public
def argpartition(x: Tensor, /, kth: Ints, axis: int = -1) -> Tensor:
    """Return the positions (i64) along `axis` of the elements in the order of `partition`.

    x: [..., n] -> i64[..., n]. Raises the errors of `partition`.

        >>> ml.argpartition(ml.asarray([3.0, 1.0, 2.0]), 1)
        Tensor([1, 2, 0], i64[3])
    """
    _require_ranks(x, kth, axis)
    return argsort(x, axis=axis)


def _require_ranks(x: Tensor, kth: Ints, axis: int) -> None:
    [along] = axes_of(axis, x)
    n = x.shape[along]
    for rank in integers(kth, "kth"):
        if not -n <= rank < n:
            raise ArgumentError(f"expected kth in {-n} .. {n - 1}, got {rank}")


@public
def searchsorted(
    x1: Tensor, x2: Operand, /, *, side: Side = "left", sorter: Tensor | None = None
) -> Tensor:
    """Return the position at which to insert each element of x2 into the sorted vector x1, as i64.

    `sorter`, a result of `argsort`, sorts an unsorted x1. With "left" the position is before equal
    elements, with "right" after them. x2 may be a number.

    x1: [n], x2: [...] -> i64[...]. Raises `ShapeError` if x1 is not a vector, or the length of
    `sorter` differs; `ArgumentError` if the side is unknown; `DTypeError` if an operand is complex,
    the dtypes do not promote, or `sorter` is not of integers; `PositionError` if `sorter`
    contains a position outside x1.

        >>> ml.searchsorted(ml.asarray([1.0, 3.0, 5.0]), ml.asarray([0.0, 3.0, 9.0]))
        Tensor([0, 1, 3], i64[3])

    Invalid calls:
        ml.searchsorted(v, v, side="mid")  # ArgumentError
        ml.searchsorted(v, v, sorter=ml.full(v.size, 9))  # PositionError
        ml.searchsorted(v, v, sorter=ml.arange(v.size + 1))  # ShapeError
    """
    x1 = _ordered(x1)
    x2 = _ordered(as_operand(x2, x1))
    if x1.ndim != 1:
        raise ShapeError(f"expected a sorted tensor of 1 dimension, got {x1.type}")
    if side not in ("left", "right"):
        raise ArgumentError(f'expected side as "left" or "right", got {brief(side)}')
    if sorter is not None:
        if sorter.shape != x1.shape:
            raise ShapeError(f"expected a sorter of x1's shape, got {sorter.type}")
        x1 = take(x1, sorter)
    dtype = common_dtype([x1.type, x2.type])
    x1, keys = astype(x1, dtype), reshape(astype(x2, dtype), -1)
    return reshape(op.searchsorted(x1, keys, right=side == "right"), x2.shape)


def _ordered(x: Tensor) -> Tensor:
    """Convert bools to numbers.

    Raises `DTypeError` if x is complex, because complex numbers have no order."""
    type = type_of(x)
    if type.dtype.kind == "complex":
        raise DTypeError("complex numbers have no order; use real, imag or abs")
    return astype(x, u8) if type.dtype is bool_ else x


# --- sets ----------------------------------------------------------------------------


class UniqueAllResult(NamedTuple):
    """Result of `unique_all`."""

    values: Tensor
    indices: Tensor
    inverse_indices: Tensor
    counts: Tensor


class UniqueCountsResult(NamedTuple):
    """Result of `unique_counts`."""

    values: Tensor
    counts: Tensor


class UniqueInverseResult(NamedTuple):
    """Result of `unique_inverse`."""

    values: Tensor
    inverse_indices: Tensor


class _Sorted:
    """Sorted elements of x as a vector, and the positions where groups of equal elements start.

    With `equal_nan`, nans are equal."""

    def __init__(self, x: Tensor, equal_nan: bool = False) -> None:
        type_of(x)
        flat = reshape(x, -1)
        self.shape = x.shape
        self.order = _any_order(flat)
        self.values = take(flat, self.order)
        changes = _differ(*neighbours(self.values, 0), equal_nan)
        self.starts = concat([full(min(1, flat.size), True), changes])

    def chosen(self, x: Tensor) -> Tensor:
        """Return the element of x at the first position of each group."""
        return op.boolean_index(x, self.starts)

    def inverse(self) -> Tensor:
        """Return for each element of x the index of the value among the distinct values."""
        groups = cumulative_sum(astype(self.starts, "i64")) - 1
        return reshape(take(groups, op.argsort(self.order)), self.shape)

    def counts(self) -> Tensor:
        """Count the occurrences of each distinct value."""
        size = self.order.size
        [starts] = reshape(op.nonzero_indices(self.starts), (1, -1))
        ends = concat([neighbours(starts, 0)[0], full(1, size)])
        return part(ends, 0, span(starts.size)) - starts


def _differ(x: Tensor, y: Tensor, equal_nan: bool) -> Tensor:
    different = op.not_equal(x, y)
    if not equal_nan or not x.dtype.is_inexact:
        return different
    both = op.logical_and(op.isnan(x), op.isnan(y))
    return op.logical_and(different, op.logical_not(both))


def _any_order(flat: Tensor) -> Tensor:
    """Return an order of a vector in which equal elements are adjacent, in the original order."""
    if flat.dtype.kind != "complex":
        return argsort(flat)
    by_imag = op.argsort(op.imag(flat))
    return take(by_imag, op.argsort(take(op.real(flat), by_imag)))


@public
def unique_all(x: Tensor, /) -> UniqueAllResult:
    """Return the sorted distinct values in x, with first positions, inverse and counts.

    The results are the distinct values, and the position (i64) of the first occurrence of each in
    the flattened x. Then, for each element of x, the index of the element's value, and finally the
    count (i64) of each value. Nans are distinct, and 0.0 and -0.0 are equal. Gradients flow into
    `values`.

    x: [...], any dtype -> values [n], indices and counts i64[n], inverse_indices i64[...].

        >>> ml.unique_all(ml.asarray([3, 1, 3])).indices
        Tensor([1, 0], i64[2])
    """
    groups = _Sorted(x)
    values, indices = groups.chosen(groups.values), groups.chosen(groups.order)
    return UniqueAllResult(values, indices, groups.inverse(), groups.counts())


@public
def unique_counts(x: Tensor, /) -> UniqueCountsResult:
    """Return the sorted distinct values in x, and the counts (i64), as in `unique_all`.

    x: [...], any dtype -> values [n] and counts i64[n].

        >>> ml.unique_counts(ml.asarray([3, 1, 3])).counts
        Tensor([1, 2], i64[2])
    """
    groups = _Sorted(x)
    return UniqueCountsResult(groups.chosen(groups.values), groups.counts())


@public
def unique_inverse(x: Tensor, /) -> UniqueInverseResult:
    """Return the sorted distinct values in x, and for each element of x the index of the value.

    See `unique_all`.

    x: [...], any dtype -> values [n] and inverse_indices i64[...].

        >>> ml.unique_inverse(ml.asarray([3, 1, 3])).inverse_indices
        Tensor([1, 0, 1], i64[3])
    """
    groups = _Sorted(x)
    return UniqueInverseResult(groups.chosen(groups.values), groups.inverse())


@public
def unique_values(x: Tensor, /) -> Tensor:
    """Return the sorted distinct values in x as a vector; nans are distinct.

    x: [...] -> [n], the same dtype.

        >>> ml.unique_values(ml.asarray([3, 1, 3]))
        Tensor([1, 3], i64[2])
    """
    groups = _Sorted(x)
    return groups.chosen(groups.values)


@overload
def unique(
    x: Tensor,
    return_index: Literal[False] = False,
    return_inverse: Literal[False] = False,
    return_counts: Literal[False] = False,
    axis: int | None = None,
    *,
    equal_nan: bool = True,
) -> Tensor: ...
@overload
def unique(
    x: Tensor,
    return_index: bool = False,
    return_inverse: bool = False,
    return_counts: bool = False,
    axis: int | None = None,
    *,
    equal_nan: bool = True,
) -> Any: ...
@public
def unique(
    x: Tensor,
    return_index: bool = False,
    return_inverse: bool = False,
    return_counts: bool = False,
    axis: int | None = None,
    *,
    equal_nan: bool = True,
) -> Any:
    """Return the sorted distinct values in x, or the sorted distinct slices along `axis`.

    Slices are sorted in lexicographic order. Optional further results are the positions of the
    first occurrences, for each element the index of the value, and the counts, all i64, as in
    `unique_all`. With `equal_nan`, nans are equal. Gradients flow into the values.

    x: [...], any dtype, but not complex with an `axis` -> [n], or the shape of x with n along the
    axis. Raises `AxisError` if x has no such axis; `DTypeError` if x is complex and `axis` is
    given: complex numbers have no order.

        >>> ml.unique(ml.asarray([[1, 2], [0, 5], [1, 2]]), axis=0)
        Tensor([[0, 5],
                [1, 2]], i64[2,2])

    Invalid calls:
        ml.unique(x * 1j, axis=0)  # DTypeError
    """
    if axis is None:
        groups = _Sorted(x, equal_nan)
        values = groups.chosen(groups.values)
    else:
        [along] = axes_of(axis, x)
        groups = _Sorted(_ranks(_ordered(moveaxis(x, along, 0)), equal_nan))
        values = op.take(x, groups.chosen(groups.order), axis=along)
    more: list[Tensor] = []
    if return_index:
        more.append(groups.chosen(groups.order))
    if return_inverse:
        more.append(groups.inverse())
    if return_counts:
        more.append(groups.counts())
    return (values, *more) if more else values


def _ranks(x: Tensor, equal_nan: bool) -> Tensor:
    """Return the lexicographic rank of each row of x; equal rows have equal ranks.

    Columns are ranked separately, then merged in pairs until one is left."""
    n = x.shape[0]
    ranks = _dense(reshape(x, (n, math.prod(x.shape[1:]))), equal_nan)
    while (columns := ranks.shape[1]) > 1:
        firsts, seconds = [
            op.slice(ranks, start=(0, i), length=(n, (columns - i + 1) // 2), step=(1, 2))
            for i in (0, 1)
        ]
        if columns % 2:
            seconds = op.pad(seconds, widths=((0, 0), (0, 1)))
        ranks = _dense(firsts * n + seconds, False)
    return op.sum(ranks, axis=1)


def _dense(x: Tensor, equal_nan: bool) -> Tensor:
    """For each element of x[n, m], count the smaller distinct elements in the column, as i64."""
    order = op.argsort(x, axis=0)
    values = op.take_along_axis(x, order, axis=0)
    changes = astype(_differ(*neighbours(values, 0), equal_nan), i64)
    first = min(1, x.shape[0])
    ranks = op.cumulative_sum(op.pad(changes, widths=((first, 0), (0, 0))), axis=0)
    return op.take_along_axis(ranks, op.argsort(order, axis=0), axis=0)


@public
@through_f32
def interp(
    x: Tensor,
    xp: Tensor,
    fp: Tensor,
    left: Operand | None = None,
    right: Operand | None = None,
    period: float | None = None,
) -> Tensor:
    """Interpolate linearly between the points (xp, fp), at x.

    Before the first point the result is `left` (default: the first fp), after the last point
    `right` (default: the last fp). With a `period`, the points repeat, xp may have any order, and
    `left` and `right` are ignored.

    x: [...], xp: [n] in order, fp: [n], floats, or integers as f32 -> f[...]. Raises `ShapeError`
    if xp and fp are not nonempty vectors of equal length; `DTypeError` if an operand is bool or
    complex; `ArgumentError` if the period is not a finite number other than 0.

        >>> ml.interp(ml.asarray([0.5, 9.0]), ml.asarray([0.0, 1.0]), ml.asarray([2.0, 4.0]))
        Tensor([3., 4.], f32[2])

    Invalid calls:
        ml.interp(v, v, v, period=0.0)  # ArgumentError
    """
    require("real", type_of(x), type_of(xp), type_of(fp))
    if xp.ndim != 1 or xp.shape != fp.shape or not xp.size:
        raise ShapeError(f"expected vectors xp and fp of one length, got {xp.type} and {fp.type}")
    x, xp, fp = map(floating, (x, xp, fp))
    if period is not None:
        x, xp, fp = _repeating(x, xp, fp, period)
        left = right = None
    n = xp.size
    above = op.clip(searchsorted(xp, x, side="right"), min(1, n - 1), n - 1)
    below = op.maximum(above - 1, 0)
    x0, x1, f0, f1 = [op.take(each, at, axis=0) for each in (xp, fp) for at in (below, above)]
    share = _share(x, x0, x1, op.equal(f0, f1))
    y = between(f0, f1, share if n > 1 else constant(0.0, share.dtype))
    for is_beyond, at, value in [(op.less, 0, left), (op.greater, n - 1, right)]:
        end = part(fp, 0, span(at, at + 1)) if value is None else as_operand(value, y)
        end = reshape(end, ()) if end.size == 1 else end
        edge = reshape(part(xp, 0, span(at, at + 1)), ())
        y = op.where(is_beyond(x, edge), end, y)
    return y


def _share(x: Tensor, x0: Tensor, x1: Tensor, is_level: Tensor) -> Tensor:
    """Return (x - x0) / (x1 - x0).

    The share of nan is nan. If an end is infinite and x is finite, the share is 0 or 1. If both
    interval bounds are infinite, only a constant function has a value."""
    is_finite = op.logical_and(op.isfinite(x0), op.isfinite(x1))
    is_finite = op.logical_or(is_finite, op.isnan(x))
    halves = op.where(op.isfinite(x1 - x0), constant(1.0, x1.dtype), constant(0.5, x1.dtype))
    start, end, at = [op.where(is_finite, each, constant(0.0, each.dtype)) for each in (x0, x1, x)]
    wide = end * halves - start * halves
    wide = op.where(op.equal(wide, 0.0), constant(1.0, wide.dtype), wide)
    share = (at * halves - start * halves) / wide
    none, whole, half = [constant(each, share.dtype) for each in (0.0, 1.0, 0.5)]
    both = op.logical_not(op.logical_or(op.isfinite(x0), op.isfinite(x1)))
    between_both = op.where(is_level, half, constant(math.nan, share.dtype))
    at_last = op.where(op.logical_or(op.equal(x, x1), op.isfinite(x1)), whole, none)
    ends = op.where(op.equal(x, x0), none, at_last)
    is_inside = op.logical_not(op.logical_or(op.equal(x, x0), op.equal(x, x1)))
    ends = op.where(op.logical_and(both, is_inside), between_both, ends)
    return op.where(is_finite, share, ends)


def _repeating(x: Tensor, xp: Tensor, fp: Tensor, period: float) -> tuple[Tensor, Tensor, Tensor]:
    """Map x and the points into one period, and repeat the outer points on the other side.

    The last point is prepended, and the first point is appended."""
    if not is_real(period) or not math.isfinite(period) or not period:
        raise ArgumentError(f"expected period as a finite number other than 0, got {brief(period)}")
    length = abs(float(period))
    x, xp = op.remainder(x, length), op.remainder(xp, length)
    order = op.argsort(xp, axis=0)
    xp, fp = [op.take(each, order, axis=0) for each in (xp, fp)]
    (first, f_first), (last, f_last) = [
        [part(each, 0, span(at, at + 1)) for each in (xp, fp)] for at in (0, xp.size - 1)
    ]
    return (
        x,
        concat([last - length, xp, first + length]),
        concat([f_last, fp, f_first]),
    )


@public
def isin(x1: Operand, x2: Operand, /, *, invert: bool = False) -> Tensor:
    """Test for each element of x1 whether it is equal to any element of x2; `invert` negates this.

    One operand may be a number. nan is not equal to anything.

    x1: [...] -> bool[...], for an x2 of any shape. Raises `DTypeError` if both are numbers or the
    dtypes do not promote.

        >>> ml.isin(ml.asarray([1, 2, 3]), ml.asarray([2, 5]))
        Tensor([False,  True, False], bool[3])

    Invalid calls:
        ml.isin(1, 2)  # DTypeError
    """
    if not isinstance(x1, Tensor):
        if not isinstance(x2, Tensor):
            raise DTypeError("expected at least one tensor, got two numbers").at(
                "isin", (brief(x1), brief(x2))
            )
        x1 = as_operand(x1, x2)
    values = reshape(as_operand(x2, x1), -1)
    if values.size == 0:
        return full(x1.shape, invert)
    if "complex" in (x1.dtype.kind, values.dtype.kind):  # unordered: compare all pairs
        matches = op.any(op.equal(reshape(x1, (*x1.shape, 1)), values), axis=-1)
    else:
        values = sort(values)
        place = op.minimum(searchsorted(values, x1), values.size - 1)
        matches = op.equal(take(values, place), x1)
    return op.logical_not(matches) if invert else matches
