"""x[key]: integers, slices, `...`, None, integer tensors and one boolean mask, as in numpy; arrays
and lists for these tensors, on a VM of this process.

A key becomes a `slice` for the integers and slices, a `take` for the tensors, and a change of
shape, which copies nothing. Gradients follow from these.
"""

from __future__ import annotations

import math
import operator
from types import EllipsisType
from typing import Any, TypeAlias

import numpy as np

from mlvm.core.errors import IndexRefused, MlvmError, OpError, brief
from mlvm.core.types import i64
from mlvm.eager import primitives as op
from mlvm.eager.functions import moveaxis, reshape
from mlvm.eager.tensor import Tensor, is_array

Item: TypeAlias = "int | slice | Tensor | None"


def getitem(x: Tensor, key: Any) -> Tensor:
    """`x[key]`; x itself for a key that selects all of it.

    Raises `IndexRefused` for an index out of range, of another kind, or one too many;
    `OperandValueError` where a value of an index tensor is out of range; `ShapeError` for a
    mask that does not have the lengths of the first axes of x.
    """
    keys = key if isinstance(key, tuple) else (key,)
    try:
        items = [_item(each) for each in keys]
        if any(isinstance(item, Tensor) and item.dtype.kind == "bool" for item in items):
            return _masked(x, items)
        return _indexed(x, _without_ellipsis(items, x.ndim), in_front=_separated(items))
    except MlvmError as error:
        if isinstance(error, IndexRefused):
            error.at("getitem", (x.type, *map(_text, keys)))
        error.__traceback__ = None  # no frame of ours, as in `tensor`
        raise


def _item(key: object) -> Item | EllipsisType:
    """One element of a key; any integer becomes an int. Raises `IndexRefused` for what is none."""
    if key is None or isinstance(key, (slice, EllipsisType)):
        return key
    if isinstance(key, Tensor):
        if key.dtype.is_inexact:
            raise IndexRefused("an index tensor holds integers, or is a mask")
        return key
    try:
        if not isinstance(key, bool):
            return operator.index(key)  # type: ignore[arg-type]
    except TypeError:
        pass
    if is_array(key):
        return _item(_tensor_of(key))
    raise IndexRefused(
        f"a {type(key).__name__} is no index, but integers, slices, None, ..., and tensors, arrays "
        f"and lists of integers are"
    )


def _tensor_of(key: object) -> Tensor:
    """An index tensor, or a mask, of an array or list. One without elements is of integers."""
    if isinstance(key, (list, tuple)) and not np.size(key):
        key = np.asarray(key, np.int64)
    try:
        return Tensor._taken(key)
    except OpError as error:
        raise IndexRefused(error.reason) from None


def _masked(x: Tensor, items: list[Item | EllipsisType]) -> Tensor:
    [mask, *others] = items
    if others or not isinstance(mask, Tensor):
        raise IndexRefused("a mask stands alone between the brackets; index its result again")
    return op.boolean_index(x, mask)


def _without_ellipsis(items: list[Item | EllipsisType], ndim: int) -> list[Item]:
    """The items, one for every axis: full slices stand for `...`, or are added at the end."""
    dots = [i for i, item in enumerate(items) if item is Ellipsis]
    if len(dots) > 1:
        raise IndexRefused("there is more than one ...")
    given = len([item for item in items if item is not None]) - len(dots)
    if given > ndim:
        raise IndexRefused(f"{given} indices are too many for {ndim} dimensions")
    position = dots[0] if dots else len(items)
    missing = [slice(None)] * (ndim - given)
    return [*items[:position], *missing, *items[position + 1 :]]  # type: ignore[list-item]


def _separated(items: list[Item | EllipsisType]) -> bool:
    """Whether a slice, `...` or None stands between integers and tensors: numpy then puts the
    axes of the index tensors in front."""
    chosen = [i for i, item in enumerate(items) if isinstance(item, (int, Tensor))]
    return bool(chosen) and chosen[-1] - chosen[0] >= len(chosen)


def _indexed(x: Tensor, items: list[Item], *, in_front: bool) -> Tensor:
    """x under these items. Each of them is for one axis, except None, which adds one."""
    per_axis = [item for item in items if item is not None]
    x = _windowed(x, per_axis)
    lengths = iter(x.shape)
    kept = [1 if item is None else next(lengths) for item in items]
    basic = [item is None or isinstance(item, slice) for item in items]
    tensors = [item for item in per_axis if isinstance(item, Tensor)]
    rest = [n for n, keep in zip(kept, basic, strict=True) if keep]
    if not tensors:
        return reshape(x, rest)
    axes = [axis for axis, item in enumerate(per_axis) if isinstance(item, Tensor)]
    first = basic.index(False)
    if in_front:
        x = moveaxis(x, tuple(axes), tuple(range(len(axes))))
        axes = list(range(len(axes)))
        first = 0
    x, chosen = _taken(x, axes, tensors)
    return reshape(x, [*rest[:first], *chosen, *rest[first:]])


def _windowed(x: Tensor, items: list[int | slice | Tensor]) -> Tensor:
    """x reduced to the integers and slices among the items, all axes kept."""
    places = [_places(item, n) for item, n in zip(items, x.shape, strict=True)]
    if places == [range(n) for n in x.shape]:
        return x
    return op.slice(
        x,
        start=tuple([place.start for place in places]),
        length=tuple([len(place) for place in places]),
        step=tuple([place.step for place in places]),
    )


def _places(item: int | slice | Tensor, length: int) -> range:
    """The positions of an axis that an item selects. Raises `IndexRefused`."""
    if isinstance(item, Tensor):
        return range(length)
    if isinstance(item, int):
        if not -length <= item < length:
            raise IndexRefused(f"index {brief(item)} is out of range for length {length}")
        return range(item % length, item % length + 1)
    try:
        places = range(length)[item]
    except (TypeError, ValueError) as error:
        raise IndexRefused(f"{brief(item)} does not work: {error}") from None
    return places if len(places) > 1 else range(places.start, places.start + len(places))


def _taken(x: Tensor, axes: list[int], indices: list[Tensor]) -> tuple[Tensor, tuple[int, ...]]:
    """x with these axes replaced by those of the index tensors broadcast together, and the shape
    of the latter. Any axes in between have length 1.

    Several index tensors become one index into the merged axes. Each is taken from the multiples
    of its axis's stride, which also checks its range.
    """
    flat = indices[0]
    first, end = axes[0], axes[-1] + 1
    if len(indices) > 1:
        lengths = [x.shape[axis] for axis in axes]
        strides = [math.prod(lengths[i + 1 :]) for i in range(len(lengths))]
        offsets = [
            op.take(_multiples(stride, n), index, axis=0)
            for stride, n, index in zip(strides, lengths, indices, strict=True)
        ]
        flat = offsets[0]
        for offset in offsets[1:]:
            flat = flat + offset
        x = reshape(x, (*x.shape[:first], math.prod(lengths), *x.shape[end:]))
    return op.take(x, flat, axis=first), flat.shape


def _multiples(stride: int, n: int) -> Tensor:
    return op.arange(start=0, stop=n, step=1, dtype=i64) * stride


def _text(key: object) -> str:
    if isinstance(key, Tensor):
        return str(key.type)
    if key is None or isinstance(key, (int, slice, EllipsisType)):
        return brief(key)
    return type(key).__name__


Tensor.__getitem__ = getitem
