"""Order: sorting, positions in what is sorted, and sets, as the Python Array API standard has them.

All is composed of `sort` and `argsort`, which are stable and take nan for the largest. What is true
of an order is true for bools too (False first); complex numbers have one only where a set needs it.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, TypeAlias, overload

from mlvm.core.errors import AttributeRefused, DTypeError, ShapeError, brief
from mlvm.core.rules import require
from mlvm.core.types import bool_, f32, i64, u8
from mlvm.eager.functions.arguments import axes_of, counts_of, integer, type_of
from mlvm.eager.functions.creation import full
from mlvm.eager.functions.elements import astype, between, take
from mlvm.eager.functions.halves import through_f32
from mlvm.eager.functions.shapes import concat, moveaxis, part, reshape
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
    """The elements of x in order along `axis`; nan counts as the largest. The order is always
    `stable`.

    x: [...], any dtype but complex, and so is the result. Raises `AxisRefused` for an axis that x
    does not have, `DTypeError` for complex numbers, which have no order.

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
    """The positions (i64) along `axis` of the elements that `sort` gives. Equal elements keep their
    order, so it is always `stable`.

    x: [...] -> i64[...]. Raises what `sort` raises.

        >>> ml.argsort([3.0, 1.0, 2.0])
        Tensor([1, 2, 0], i64[3])
    """
    x = _ordered(x)
    return op.argsort(x, axis=axis, descending=descending, out=out)


@public
def topk(x: Tensor, /, k: int, axis: int = -1) -> tuple[Tensor, Tensor]:
    """The k largest elements along `axis`, the largest first, and their positions (i64).

    Of equal elements the first one comes first, and nan counts as the largest, as in
    `jax.lax.top_k`.

    x: [..., n] -> [..., k] each. Raises `AttributeRefused` unless 0 <= k <= n, `AxisRefused` for an
    axis that x does not have, `DTypeError` for complex numbers.

        >>> ml.topk(ml.asarray([1.0, 5.0, 3.0]), 2)
        (Tensor([5., 3.], f32[2]), Tensor([1, 2], i64[2]))
    """
    [along] = axes_of(axis, x)
    [count] = counts_of(integer(k, "k"), "k")
    if count > x.shape[along]:
        raise AttributeRefused(f"k must be at most {x.shape[along]}, not {count}")
    order = argsort(x, axis=along, descending=True)
    indices = part(order, along, range(count))
    return op.take_along_axis(x, indices, axis=along), indices


@public
def searchsorted(
    x1: Tensor, x2: Operand, /, *, side: Side = "left", sorter: Tensor | None = None
) -> Tensor:
    """Where each element of x2 would go into the vector x1, which is in order, or which `sorter`,
    as `argsort` gives it, puts in order: i64, in the shape of x2.

    With "left" it goes before equal elements, with "right" behind them. x2 may be a number.

    x1: [n], x2: [...] -> i64[...]. Raises `ShapeError` for an x1 that is no vector and for a
    `sorter` of another length, `AttributeRefused` for another side, `DTypeError` for complex
    numbers, for dtypes that do not promote and for a `sorter` that is no integers,
    `PositionRefused` for a place in it that x1 does not have.

        >>> ml.searchsorted(ml.asarray([1.0, 3.0, 5.0]), ml.asarray([0.0, 3.0, 9.0]))
        Tensor([0, 1, 3], i64[3])
    """
    x1 = _ordered(x1)
    x2 = _ordered(as_operand(x2, x1))
    if x1.ndim != 1:
        raise ShapeError("the sorted tensor has 1 dimension")
    if side not in ("left", "right"):
        raise AttributeRefused(f'side is "left" or "right", not {brief(side)}')
    if sorter is not None:
        if sorter.shape != x1.shape:
            raise ShapeError(f"a sorter has the shape of x1, and is {sorter.type}")
        x1 = take(x1, sorter)
    # In the order of both together, so many elements of x1 stand before one of x2 as its place
    # there is beyond its place among those of x2 alone.
    wanted = reshape(x2, -1)
    both = concat([wanted, x1] if side == "left" else [x1, wanted])
    first = 0 if side == "left" else x1.size
    places = part(_places(op.argsort(both)), 0, range(first, first + wanted.size))
    return reshape(places - _places(op.argsort(wanted)), x2.shape)


def _places(order: Tensor) -> Tensor:
    """The inverse of a permutation: the place of each element in that order."""
    return op.argsort(order)


def _ordered(x: Tensor) -> Tensor:
    """x, with numbers for bools. Raises `DTypeError`, which names the function, for no order."""
    type = type_of(x)
    if type.dtype.kind == "complex":
        raise DTypeError("complex numbers have no order; take real, imag or abs")
    return astype(x, u8) if type.dtype is bool_ else x


# --- sets ----------------------------------------------------------------------------


class UniqueAllResult(NamedTuple):
    """What `unique_all` gives."""

    values: Tensor
    indices: Tensor
    inverse_indices: Tensor
    counts: Tensor


class UniqueCountsResult(NamedTuple):
    """What `unique_counts` gives."""

    values: Tensor
    counts: Tensor


class UniqueInverseResult(NamedTuple):
    """What `unique_inverse` gives."""

    values: Tensor
    inverse_indices: Tensor


class _Sorted:
    """The elements of x in order, as a vector, and where an element differs from the last. With
    `equal_nan` one nan does not differ from another."""

    def __init__(self, x: Tensor, equal_nan: bool = False) -> None:
        type_of(x)
        flat = reshape(x, -1)
        self.shape = x.shape
        self.order = _any_order(flat)
        self.values = take(flat, self.order)
        rest = range(1, flat.size)
        before = part(self.values, 0, range(flat.size - 1) if flat.size else range(0))
        changes = _differ(part(self.values, 0, rest), before, equal_nan)
        self.starts = concat([full(min(1, flat.size), True), changes])

    def chosen(self, x: Tensor) -> Tensor:
        """The elements of x at the first of equal elements."""
        return op.boolean_index(x, self.starts)

    def inverse(self) -> Tensor:
        """For each element of x the place of its value among the different ones."""
        groups = cumulative_sum(astype(self.starts, "i64")) - 1
        return reshape(take(groups, _places(self.order)), self.shape)

    def counts(self) -> Tensor:
        """How often each different value is there."""
        size = self.order.size
        [starts] = reshape(op.nonzero_indices(self.starts), (1, -1))
        ends = concat([part(starts, 0, range(min(1, starts.size), starts.size)), full(1, size)])
        return part(ends, 0, range(starts.size)) - starts


def _differ(x: Tensor, y: Tensor, equal_nan: bool) -> Tensor:
    different = op.not_equal(x, y)
    if not equal_nan or not x.dtype.is_inexact:
        return different
    both = op.logical_and(op.isnan(x), op.isnan(y))
    return op.logical_and(different, op.logical_not(both))


def _any_order(flat: Tensor) -> Tensor:
    """An order of a vector that puts equal elements side by side, the first of them first."""
    if flat.dtype.kind != "complex":
        return argsort(flat)
    by_imag = op.argsort(op.imag(flat))
    return take(by_imag, op.argsort(take(op.real(flat), by_imag)))


@public
def unique_all(x: Tensor, /) -> UniqueAllResult:
    """The different values in x, in order; for each the position (i64) of the first in the
    flattened x, and its count (i64); for each element of x the place of its value.

    Each nan is different from all others, and 0.0 and -0.0 are equal. Gradients flow into `values`.

    x: [...], any dtype -> values [n], indices and counts i64[n], inverse_indices i64[...].

        >>> ml.unique_all(ml.asarray([3, 1, 3])).indices
        Tensor([1, 0], i64[2])
    """
    found = _Sorted(x)
    values, indices = found.chosen(found.values), found.chosen(found.order)
    return UniqueAllResult(values, indices, found.inverse(), found.counts())


@public
def unique_counts(x: Tensor, /) -> UniqueCountsResult:
    """The different values in x, in order, and their counts (i64), as `unique_all` tells them.

    x: [...], any dtype -> values [n] and counts i64[n].

        >>> ml.unique_counts(ml.asarray([3, 1, 3])).counts
        Tensor([1, 2], i64[2])
    """
    found = _Sorted(x)
    return UniqueCountsResult(found.chosen(found.values), found.counts())


@public
def unique_inverse(x: Tensor, /) -> UniqueInverseResult:
    """The different values in x, in order, and for each element of x the place (i64) of its value
    there, as `unique_all` tells them.

    x: [...], any dtype -> values [n] and inverse_indices i64[...].

        >>> ml.unique_inverse(ml.asarray([3, 1, 3])).inverse_indices
        Tensor([1, 0, 1], i64[3])
    """
    found = _Sorted(x)
    return UniqueInverseResult(found.chosen(found.values), found.inverse())


@public
def unique_values(x: Tensor, /) -> Tensor:
    """The different values in x, in order, as a vector. Each nan is different from all others.

    x: [...] -> [n], the same dtype.

        >>> ml.unique_values(ml.asarray([3, 1, 3]))
        Tensor([1, 3], i64[2])
    """
    found = _Sorted(x)
    return found.chosen(found.values)


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
    """The different values in x, in order, or the different slices along `axis`, in the order of
    their first elements that differ. What else is asked for follows it: the positions of the first
    ones, for each element the place of its value, and counts, all i64, as `unique_all` has them.
    With `equal_nan` one nan is equal to another. Gradients flow into the values.

    x: [...], any dtype, not complex for an axis -> [n], or the shape of x with n along the axis.
    Raises `AxisRefused` for an axis that x does not have, `DTypeError` for slices of complex
    numbers, which have no order.

        >>> ml.unique(ml.asarray([[1, 2], [0, 5], [1, 2]]), axis=0)
        Tensor([[0, 5],
                [1, 2]], i64[2,2])
    """
    if axis is None:
        found = _Sorted(x, equal_nan)
        values = found.chosen(found.values)
    else:
        [along] = axes_of(axis, x)
        found = _Sorted(_ranks(_ordered(moveaxis(x, along, 0)), equal_nan))
        values = op.take(x, found.chosen(found.order), axis=along)
    more: list[Tensor] = []
    if return_index:
        more.append(found.chosen(found.order))
    if return_inverse:
        more.append(found.inverse())
    if return_counts:
        more.append(found.counts())
    return (values, *more) if more else values


def _ranks(x: Tensor, equal_nan: bool) -> Tensor:
    """For each row of x a number, by which rows are in order: equal rows have the same. Columns
    are numbered by themselves, and then neighbours together, until one is left."""
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
    """For each element of x[n, m] how many different ones in its column are before it: i64."""
    order = op.argsort(x, axis=0)
    values = op.take_along_axis(x, order, axis=0)
    n = x.shape[0]
    changes = _differ(
        part(values, 0, range(min(1, n), n)), part(values, 0, range(max(0, n - 1))), equal_nan
    )
    ranks = op.cumulative_sum(op.pad(astype(changes, i64), widths=((min(1, n), 0), (0, 0))), axis=0)
    return op.take_along_axis(ranks, op.argsort(order, axis=0), axis=0)


@public
@through_f32
def interp(
    x: Tensor, xp: Tensor, fp: Tensor, left: Operand | None = None, right: Operand | None = None
) -> Tensor:
    """The function that goes straight from point to point (xp, fp), at x. Before the first of them
    it is `left`, the first fp unless that is given; behind the last `right`, likewise.

    x: [...], xp: [n] in order, fp: [n], floats, or integers as f32 -> f[...]. Raises `ShapeError`
    for xp and fp that are not vectors of one length, or empty, `DTypeError` for bools and for
    complex numbers.

        >>> ml.interp(ml.asarray([0.5, 9.0]), ml.asarray([0.0, 1.0]), ml.asarray([2.0, 4.0]))
        Tensor([3., 4.], f32[2])
    """
    for each in (x, xp, fp):
        require("real", type_of(each))
    if xp.ndim != 1 or xp.shape != fp.shape or not xp.size:
        raise ShapeError(f"xp and fp are vectors of one length, not {xp.type} and {fp.type}")
    x, xp, fp = [each if each.dtype.is_float else astype(each, f32) for each in (x, xp, fp)]
    n = xp.size
    above = op.clip(searchsorted(xp, x, side="right"), min(1, n - 1), n - 1)
    below = op.maximum(above - 1, 0)
    x0, x1, f0, f1 = [op.take(each, at, axis=0) for each in (xp, fp) for at in (below, above)]
    wide = x1 - x0
    wide = op.where(op.equal(wide, 0.0), constant(1.0, wide.dtype), wide)
    found = between(f0, f1, (x - x0) / wide)
    ends = [(op.less, 0, left), (op.greater, n - 1, right)]
    for is_beyond, at, value in ends:
        end = part(fp, 0, range(at, at + 1)) if value is None else as_operand(value, found)
        end = reshape(end, ()) if end.size == 1 else end
        edge = reshape(part(xp, 0, range(at, at + 1)), ())
        found = op.where(is_beyond(x, edge), end, found)
    return found


@public
def isin(x1: Operand, x2: Operand, /, *, invert: bool = False) -> Tensor:
    """Whether each element of x1 is equal to one of x2, or with `invert` to none. One of the two
    may be a number. nan is equal to nothing.

    x1: [...] -> bool[...], for an x2 of any shape. Raises `DTypeError` for two numbers, and for
    dtypes that do not promote.

        >>> ml.isin(ml.asarray([1, 2, 3]), ml.asarray([2, 5]))
        Tensor([False,  True, False], bool[3])
    """
    if not isinstance(x1, Tensor):
        if not isinstance(x2, Tensor):
            raise DTypeError("one of the two is a tensor").at("isin", (brief(x1), brief(x2)))
        x1 = as_operand(x1, x2)
    values = reshape(as_operand(x2, x1), -1)
    if values.size == 0:
        return full(x1.shape, invert)
    if "complex" in (x1.dtype.kind, values.dtype.kind):  # no order: all with all
        found = op.any(op.equal(reshape(x1, (*x1.shape, 1)), values), axis=-1)
    else:
        values = sort(values)
        place = op.minimum(searchsorted(values, x1), values.size - 1)
        found = op.equal(take(values, place), x1)
    return op.logical_not(found) if invert else found
