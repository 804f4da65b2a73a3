"""Indexing: x[key] and x[key] = values, with the keys of numpy.

A key consists of integers, slices, `...`, None, integer tensors and boolean masks. Index tensors
may be arrays and lists on a VM of this process. `x.at[key].add(values)` accepts the same keys,
returns a new tensor, and accumulates all values for one element.

A key is translated to a `slice` for integers and slices, a `take` for tensors, and a reshape, which
does not copy. An assignment is translated to a `slice_set`, an `index_set`, or for a mask to a
`where` or `mask_set`; these write to x. The gradients follow from these ops.
"""

from __future__ import annotations

import math
import sys
from types import EllipsisType
from typing import Any, Literal, NoReturn, TypeAlias, cast

import numpy as np

from mlvm.core import errors
from mlvm.core.errors import brief, with_article
from mlvm.core.rules import broadcast_shapes, require
from mlvm.core.types import DType, Shape, bf16, i64
from mlvm.eager.functions.arguments import Span, sliced, type_of
from mlvm.eager.functions.creation import full
from mlvm.eager.functions.shapes import broadcast_to, moveaxis, reshape, unstack
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.apply import alias, alias_of, apply, one_op
from mlvm.eager.tensor.constants import is_same_kind
from mlvm.eager.tensor.number import index_of
from mlvm.eager.tensor.operands import as_operand, is_array, tensor_of
from mlvm.eager.tensor.parts import warn_of_part
from mlvm.eager.tensor.positions import numbers_in
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.update import apply_into
from mlvm.eager.tensor.warn import LOCAL, has_temporary_count, warn_of_temporary
from mlvm.eager.tensor.wrapper import annotate_error, hinted, public
from mlvm.machines.native.extension import EXTENSION, install

Item: TypeAlias = "int | slice | Tensor | None"


def getitem(x: Tensor, key: Any) -> Tensor:
    """Return `x[key]`.

    A single mask tensor selects elements by `boolean_index`. Any other mask is replaced by the
    positions where it is True: one index tensor for each axis of the mask.

    Raises `IndexingError` if an index is out of range or has an invalid type, and for too many
    indices; `PositionError` if a value of an index tensor is out of range; `MaskError` if the shape
    of a mask differs from the axes that it indexes.
    """
    keys = key if issubclass(type(key), tuple) else (key,)
    try:
        items = [_item(each) for each in keys]
        if isinstance(key, Tensor) and key.dtype.is_integer and x.ndim:
            return op.take(x, key, axis=0)
        if any(_is_mask(item) for item in items):
            if len(items) == 1 and (items[0] is keys[0] or not cast(Tensor, items[0]).ndim):
                return op.boolean_index(x, cast(Tensor, items[0]))
            items = _with_positions(x, items, keys)
        per_axis = _without_ellipsis(items, x.ndim)
        if any(isinstance(item, Tensor) for item in items):
            return _indexed(x, per_axis, in_front=_separated(items))
        return _view(x, per_axis)
    except errors.MlvmError as error:
        _explain(error, "getitem", x, keys)
        raise


def _explain(error: errors.MlvmError, name: str, x: Tensor, keys: tuple[Any, ...]) -> None:
    """Add the operands of the call to an error, and remove our frames."""
    if isinstance(error, errors.IndexingError):
        error.at(name, (x.type, *map(_text, keys)))
    elif isinstance(error, errors.PositionError):
        _name_axis(error, name, x, keys)
    error.__traceback__ = None  # as in `tensor`


def _name_axis(error: errors.PositionError, name: str, x: Tensor, keys: tuple[Any, ...]) -> None:
    """Describe an index out of range by the key, which the caller wrote, and the axis if unique."""
    if error.late or error.op not in ("take", "index_set", "flat_indices"):
        return
    error.op, error.operands = name, (x.type, *map(_text, keys))
    _, length = numbers_in(error)
    if x.shape.count(length) == 1:
        axis = f"axis {x.shape.index(length)} of length"
        error.reason = error.reason.replace("for length", f"for {axis}")


def _item(key: Any) -> Item | EllipsisType:
    """Convert one element of a key; integers of any type are converted to int.

    Raises `IndexingError` if it is not an index."""
    if key is None or isinstance(key, (slice, EllipsisType)):
        return key
    if issubclass(type(key), Tensor):  # isinstance might run user code
        if key.dtype.is_inexact:
            raise errors.IndexingError(
                f"expected an index tensor of integers or bools, got {key.dtype.name}"
            )
        return cast(Tensor, key)
    try:
        if not isinstance(key, bool):
            return index_of(key)
    except TypeError:
        pass
    if is_array(key):
        return _item(_tensor_of(key))
    raise errors.IndexingError(
        f"expected integers, slices, None, ... or tensors, arrays and lists of integers as index, "
        f"got {with_article(type(key).__name__)}"
    )


def _tensor_of(key: object) -> Tensor:
    """Convert an array or list to an index tensor or a mask; an empty one is an index tensor."""
    if isinstance(key, (list, tuple)) and not np.size(key):
        key = np.asarray(key, np.int64)
    try:
        return as_operand(key)
    except errors.OpError as error:
        if error.late:
            raise
        raise errors.IndexingError(error.reason) from None


def _is_mask(item: Item | EllipsisType) -> bool:
    return isinstance(item, Tensor) and item.dtype.kind == "bool"


def _covers(mask: Shape, axes: Shape) -> bool:
    """Return whether a mask has the lengths of the axes; as in numpy, 0 matches any length."""
    return len(mask) == len(axes) and all(n in (m, 0) for n, m in zip(mask, axes, strict=True))


def _with_positions(
    x: Tensor, items: list[Item | EllipsisType], keys: tuple[Any, ...]
) -> list[Item | EllipsisType]:
    """Replace each mask by the positions where it is True.

    For arrays and lists, numpy computes the positions, so the shape of the result is known before
    any launch."""
    lengths = [cast(Tensor, item).ndim if _is_mask(item) else 1 for item in items]
    for i, item in enumerate(items):
        if item is None or item is Ellipsis:
            lengths[i] = 0
        elif lengths[i] == 0:
            raise errors.IndexingError(
                f"expected a mask without dimensions as the only index, got {len(items)} indices"
            )
    rest = x.ndim - sum(lengths)
    lengths = [rest if item is Ellipsis else n for item, n in zip(items, lengths, strict=True)]
    expanded: list[Item | EllipsisType] = []
    axis = 0
    for item, length, key in zip(items, lengths, keys, strict=True):
        if isinstance(item, Tensor) and _is_mask(item):
            if not _covers(item.shape, x.shape[axis : axis + length]):
                raise errors.MaskError(
                    f"expected a mask with the axes of {x.shape} from axis {axis} on, "
                    f"got shape {item.shape}"
                ).at("getitem", (x.type, item.type))
            places = op.nonzero_indices(item) if item is key else tensor_of(np.argwhere(key))
            expanded.extend(unstack(places, axis=1))
        else:
            expanded.append(item)
        axis += length
    return expanded


def _without_ellipsis(items: list[Item | EllipsisType], ndim: int) -> list[Item]:
    """Return one item per axis: full slices replace `...`, or are appended."""
    dots = [i for i, item in enumerate(items) if item is Ellipsis]
    if len(dots) > 1:
        raise errors.IndexingError(f"expected at most one ... in an index, got {len(dots)}")
    count = len([item for item in items if item is not None]) - len(dots)
    if count > ndim:
        raise errors.IndexingError(f"expected at most {ndim} indices, got {count}")
    position = dots[0] if dots else len(items)
    missing = [slice(None)] * (ndim - count)
    return [*items[:position], *missing, *items[position + 1 :]]  # type: ignore[list-item]


def _separated(items: list[Item | EllipsisType]) -> bool:
    """Return whether a slice, `...` or None separates integers and tensors.

    Numpy then puts the axes of the index tensors first."""
    chosen = [i for i, item in enumerate(items) if isinstance(item, (int, Tensor))]
    return bool(chosen) and chosen[-1] - chosen[0] >= len(chosen)


def _view(x: Tensor, items: list[Item]) -> Tensor:
    """Index x by integers, slices and None."""
    places = _places_of(x.shape, [item for item in items if item is not None])
    if places is not None:
        x = apply(one_op("slice", **_window(places)), x)
    lengths = iter(x.shape)
    axes = [(item, 1 if item is None else next(lengths)) for item in items]
    shape = tuple([n for item, n in axes if item is None or isinstance(item, slice)])
    return alias(one_op("reshape", shape=shape), x, x.type.with_shape(shape))


def _indexed(x: Tensor, items: list[Item], *, in_front: bool) -> Tensor:
    """Index x by items of which one is a tensor; each indexes one axis, and None adds an axis."""
    per_axis = [item for item in items if item is not None]
    places = _places_of(x.shape, per_axis)
    if places is not None:
        number = _single(per_axis)
        if number is not None and _is_less(x.shape, number, places):
            part = op.take(x, cast(Tensor, per_axis[number]), axis=number)
            return _view(part, [item for item in items if not isinstance(item, Tensor)])
        x = op.slice(x, **_window(places))
    lengths = iter(x.shape)
    result_lengths = [1 if item is None else next(lengths) for item in items]
    basic = [item is None or isinstance(item, slice) for item in items]
    tensors = [item for item in per_axis if isinstance(item, Tensor)]
    rest = [n for n, keep in zip(result_lengths, basic, strict=True) if keep]
    axes = [axis for axis, item in enumerate(per_axis) if isinstance(item, Tensor)]
    first = basic.index(False)
    if in_front:
        x = moveaxis(x, tuple(axes), tuple(range(len(axes))))
        axes = list(range(len(axes)))
        first = 0
    x, chosen = _take_indices(x, axes, tensors)
    return reshape(x, [*rest[:first], *chosen, *rest[first:]])


def _single(items: list[int | slice | Tensor]) -> int | None:
    """Return the axis of the only tensor among the items if it is a single index, else None."""
    axes = [axis for axis, item in enumerate(items) if isinstance(item, Tensor)]
    return axes[0] if len(axes) == 1 and cast(Tensor, items[axes[0]]).ndim == 0 else None


def _is_less(shape: Shape, axis: int, places: list[Span]) -> bool:
    """Return whether a single index along an axis selects fewer elements than these positions."""
    return math.prod(shape[:axis] + shape[axis + 1 :]) < math.prod([x.length for x in places])


def _places_of(shape: Shape, items: list[int | slice | Tensor]) -> list[Span] | None:
    """Return the positions that integers and slices select on each axis; None if all do."""
    places = [_places(item, n) for item, n in zip(items, shape, strict=True)]
    are_all = all(
        place == (0, n, 1) or (place.length == 0 and n == 0)
        for place, n in zip(places, shape, strict=True)
    )
    return None if are_all else places


def _window(places: list[Span]) -> dict[str, Any]:
    """Return the attributes of an op that selects these positions along each axis."""
    start, length, step = zip(*places, strict=True) if places else ((), (), ())
    return {"start": start, "length": length, "step": step}


def _places(item: int | slice | Tensor, length: int) -> Span:
    """Return the positions of an axis that an item selects.

    Raises `IndexingError` if an integer is out of range."""
    if isinstance(item, Tensor):
        return Span(0, length)
    if isinstance(item, int):
        if not -length <= item < length:
            raise errors.IndexingError(f"index {brief(item)} is out of range for length {length}")
        return Span(item + length if item < 0 else item, 1)
    try:
        places = sliced(item, length)
    except (TypeError, ValueError) as error:
        raise errors.IndexingError(f"invalid index {brief(item)}: {error}") from None
    return places if places.step == 1 or places.length > 1 else Span(places.start, places.length)


def _take_indices(
    x: Tensor, axes: list[int], indices: list[Tensor]
) -> tuple[Tensor, tuple[int, ...]]:
    """Replace these axes of x by the axes of the broadcast index tensors.

    Return the result and the broadcast shape. Axes in between have length 1. Several index tensors
    are combined to one index into the merged axes.
    """
    first, end = axes[0], axes[-1] + 1
    flat = _flat([x.shape[axis] for axis in axes], indices)
    if len(indices) > 1:
        x = reshape(x, (*x.shape[:first], math.prod(x.shape[first:end]), *x.shape[end:]))
    return op.take(x, flat, axis=first), flat.shape


def _flat(lengths: list[int], indices: list[Tensor]) -> Tensor:
    """Combine index tensors for several axes to one row-major index; the tensors broadcast."""
    if len(indices) == 1:
        return indices[0]
    try:
        shape = broadcast_shapes(*[index.shape for index in indices])
    except errors.ShapeError as error:
        raise errors.IndexingError(f"index tensors must broadcast: {error.reason}") from None
    return op.flat_indices(*[broadcast_to(x, shape) for x in indices], lengths=tuple(lengths))


def setitem(x: Tensor, key: Any, values: Any) -> None:
    """Assign `x[key] = values`: update x in place, for all keys that `x[key]` accepts.

    Only x changes. The values broadcast to `x[key]`, and are cast to the dtype of x if they are of
    the same kind (`is_same_kind`). If several values are assigned to one element, the last in
    row-major order is kept, and the other values get no gradient. A mask that selects n elements
    accepts n values, or 1.

    Raises the errors of `x[key]`; `DTypeError` if the values are of a different kind; `ShapeError`
    if they do not broadcast; `OperandValueError` if a mask selects a different number of elements.
    """
    keys = key if issubclass(type(key), tuple) else (key,)
    try:
        _assign(x, key, keys, _values(x, values))
    except errors.MlvmError as error:
        _explain(error, "setitem", x, keys)
        raise


def _warn_of_lost(x: Tensor, references: int) -> None:
    """Warn if the update of x in the caller's line has no effect.

    x is then a temporary, with one reference, or a part of a tensor."""
    frame = sys._getframe(1)
    if references == 1:
        warn_of_temporary(frame, x.type)
    else:
        warn_of_part(frame, x, references - 2)


def _assign(x: Tensor, key: Any, keys: tuple[Any, ...], values: Tensor) -> None:
    items = [_item(each) for each in keys]
    if len(items) == 1 and _is_mask(items[0]):
        return _set_masked(x, cast(Tensor, items[0]), values)
    if any(_is_mask(item) for item in items):
        items = _with_positions(x, items, keys)
    if any(isinstance(item, Tensor) for item in items):
        return _set_taken(x, key, items, values)
    return _set_window(x, _without_ellipsis(items, x.ndim), values)


def _values(x: Tensor, values: Any) -> Tensor:
    """Convert the values to a tensor with the dtype of x.

    Raises `DTypeError` if they are of a different kind."""
    try:
        operand = as_operand(values, x)
    except errors.OpError as error:
        if not error.late:
            error.op, error.operands = "setitem", (x.type, type(values).__name__)
        raise
    if operand.dtype is x.dtype:
        return operand
    if not is_same_kind(operand.dtype, x.dtype):
        remedy = _converted(values, operand.dtype, x.dtype)
        raise errors.DTypeError(
            f"expected {x.dtype.name} values, got {operand.dtype.name}; {remedy}"
        ).at("setitem", (x.type, operand.type))
    return op.astype(operand, dtype=x.dtype)


def _converted(values: object, dtype: DType, target: DType) -> str:
    """Return code that casts values of `dtype` to `target`, as a remedy."""
    name = target.long_name
    if dtype.kind == "complex":
        return "ml.real(values) or ml.imag(values) takes a part of them"
    if isinstance(values, np.ndarray):
        if target is bf16:
            return "write ml.asarray(values, dtype=ml.bfloat16)"
        return f"write values.astype(np.{name})"
    if isinstance(values, Tensor):
        return f"write ml.astype(values, ml.{name})"
    return f"write ml.asarray(values).astype(ml.{name})"


def _broadcasting(x: Tensor, values: Tensor, shape: Shape) -> Shape:
    """Return the shape of the values without leading axes of 1.

    Raises `ShapeError` unless it broadcasts to that shape."""
    behind = values.shape[max(0, values.ndim - len(shape)) :]
    fits = all(n in (1, m) for n, m in zip(behind[::-1], shape[::-1], strict=False))
    if not fits or values.size != math.prod(behind):
        raise errors.ShapeError(
            f"expected values that broadcast to {shape}, got shape {values.shape}"
        ).at("setitem", (x.type, values.type))
    return behind


def _set_window(x: Tensor, items: list[Item], values: Tensor) -> None:
    """Assign to the elements that integers and slices select; values get one axis per axis of x."""
    per_axis = [item for item in items if item is not None]
    places = [_places(item, n) for item, n in zip(per_axis, x.shape, strict=True)]
    lengths = iter([place.length for place in places])
    chosen = [1 if item is None else next(lengths) for item in items]
    shape = tuple([n for n, item in zip(chosen, items, strict=True) if not isinstance(item, int)])
    behind = [*_broadcasting(x, values, shape)]
    lined_up: list[int] = []
    for item in reversed(items):
        n = behind.pop() if behind and not isinstance(item, int) else 1
        if item is not None:
            lined_up.append(n)
    in_line = tuple(lined_up[::-1])
    values = alias(one_op("reshape", shape=in_line), values, values.type.with_shape(in_line))
    apply_into(x, one_op("slice_set", **_window(places)), x, values)


def _set_taken(x: Tensor, key: Any, items: list[Item | EllipsisType], updates: Tensor) -> None:
    """Assign to the elements that integer tensors select, possibly with integers and slices."""
    per_axis = _without_ellipsis(items, x.ndim)
    if _is_part(items, per_axis):
        _set_in_part(x, cast("list[int | slice | Tensor]", per_axis), updates)
        return
    indices, axis, axes = _chosen(x, key, items)
    shape = (*x.shape[:axis], *indices.shape, *x.shape[axis + axes :])
    values = reshape(updates, _broadcasting(x, updates, shape))
    apply_into(x, one_op("index_set", axis=axis, axes=axes), x, values, indices)


def _is_part(items: list[Item | EllipsisType], per_axis: list[Item]) -> bool:
    """Return whether the items select a window of one part of a tensor.

    Adjacent single indices select the part, slices select the window.
    """
    rest = [item for item in per_axis if not isinstance(item, (int, Tensor))]
    tensors = [item for item in per_axis if isinstance(item, Tensor)]
    is_window = None not in rest and any(item != slice(None) for item in rest)
    return is_window and not _separated(items) and all(each.ndim == 0 for each in tensors)


def _set_in_part(x: Tensor, items: list[int | slice | Tensor], updates: Tensor) -> None:
    """Assign to a window of the part that single indices select.

    The part is read, changed and written back, so the cost depends on the size of the part, not on
    the size of x.
    """
    whole = [item if isinstance(item, (int, Tensor)) else slice(None) for item in items]
    window: list[Item] = [item for item in items if isinstance(item, slice)]
    lengths = [n for item, n in zip(items, x.shape, strict=True) if isinstance(item, slice)]
    places = [_places(item, n) for item, n in zip(window, lengths, strict=True) if item is not None]
    _broadcasting(x, updates, tuple([place.length for place in places]))
    part = _indexed(x, [*whole], in_front=False)
    _set_window(part, window, updates)
    _set_taken(x, tuple(whole), [*whole], part)


def _chosen(x: Tensor, key: Any, items: list[Item | EllipsisType]) -> tuple[Tensor, int, int]:
    """Describe the elements that integer tensors select.

    Return the indices, the first axis, and the number of axes that they index in row-major order.
    """
    per_axis = _without_ellipsis(items, x.ndim)
    axes = [i for i, item in enumerate(per_axis) if isinstance(item, (int, Tensor))]
    first, end = axes[0], axes[-1] + 1
    rest = per_axis[:first] + per_axis[end:]
    if _separated(items) or any(item != slice(None) for item in rest):
        positions = op.arange(start=0, stop=x.size, step=1, dtype=i64)
        return getitem(reshape(positions, x.shape), key), 0, x.ndim
    indices: list[Tensor] = []
    for item, length in zip(per_axis[first:end], x.shape[first:end], strict=True):
        if isinstance(item, int):
            item = full((), _places(item, length).start, dtype=i64)
        indices.append(cast(Tensor, item))
    return _flat([*x.shape[first:end]], indices), first, end - first


def _set_masked(x: Tensor, mask: Tensor, values: Tensor) -> None:
    """Assign to the elements that a mask selects: one value per element, or one for all."""
    if not _covers(mask.shape, x.shape[: mask.ndim]):
        raise errors.MaskError(
            f"expected a mask with the first axes of {x.shape}, got shape {mask.shape}"
        ).at("setitem", (x.type, mask.type))
    behind = x.shape[mask.ndim :]
    if values.ndim == len(behind) + 1 and values.shape[0] != 1:
        _broadcasting(x, values, (values.shape[0], *behind))
        apply_into(x, one_op("mask_set"), x, values, mask)
        return
    values = reshape(values, _broadcasting(x, values, behind))
    if not mask.size:
        return
    wide = reshape(mask, (*mask.shape, *[1] * len(behind)))
    apply_into(x, one_op("where"), wide, values, x)


def _text(key: Any) -> str:
    if issubclass(type(key), Tensor):
        return str(key.type)
    if key is None or isinstance(key, (int, slice, EllipsisType)):
        return brief(key)
    return type(key).__name__


# --- accumulation of values ---------------------------------------------------------------

Combine: TypeAlias = Literal["multiply", "minimum", "maximum"]


@public
def scatter_add(x: Tensor, indices: Any, updates: Any, /) -> Tensor:
    """Add `updates` to x[indices], like `x.at[indices].add(updates)`; return a new tensor.

    If an element is selected several times, all updates of the element are added, in row-major
    order.

    x: [...], any dtype but bool; indices: a key of x[...]; updates: any shape that broadcasts to
    x[indices], and a dtype that promotes to the dtype of x -> [...]. Raises `IndexingError` if the
    indices are invalid for x; `PositionError` if a value of an index tensor is out of range;
    `ShapeError` if the updates do not broadcast; `DTypeError` if an operand is bool or the updates
    are of a different kind than x.

        >>> ml.scatter_add(ml.zeros(3), [0, 2, 0], [1.0, 2.0, 3.0])
        Tensor([4., 0., 2.], f32[3])

    Invalid calls:
        ml.scatter_add(v, 9, 1.0)  # IndexingError
        ml.scatter_add(v, 0, 1j)  # DTypeError
        ml.scatter_add(v, [9], 1.0)  # PositionError
    """
    require("numeric", type_of(x))
    return _combined_at("add", x, indices, updates)


class At:
    """Property `x.at`: `x.at[key]` represents the elements that x[key] reads, for any key."""

    __slots__ = ("_x",)

    def __init__(self, x: Tensor) -> None:
        self._x = x

    def __getitem__(self, key: Any) -> Places:
        return Places(self._x, key)

    def __getattr__(self, name: str) -> NoReturn:
        call = f"{name}()" if name == "get" else f"{name}(values)"
        text = f"x.at has no {name!r}"
        if hasattr(Places, name):
            text = f"x.at needs a key: write x.at[i].{call}, or x.at[...].{call} for all of x"
        raise AttributeError(text, name=name, obj=self)


class Places:
    """Elements `x.at[key]`: each method returns a new tensor with these elements of x updated.

    The methods have JAX's names. If an element is selected several times, all values for it are
    combined, except in `set`, which keeps the last value. Values broadcast to x[key] and are cast
    to the dtype of x, as in `x[key] = values`.

        >>> x = ml.asarray([1.0, 2.0])
        >>> x.at[[0, 0]].add(5.0), x
        (Tensor([11.,  2.], f32[2]), Tensor([1., 2.], f32[2]))
    """

    __slots__ = ("_key", "_x")

    def __init__(self, x: Tensor, key: Any) -> None:
        self._x = x
        self._key = key

    @hinted
    def get(self) -> Tensor:
        """Return x[key]."""
        return getitem(self._x, self._key)

    @hinted
    def set(self, values: object) -> Tensor:
        """Return x with these elements replaced by the values."""
        out = alias_of(self._x)
        setitem(out, self._key, values)
        return out

    @hinted
    def add(self, values: object) -> Tensor:
        """Return x with the values added to these elements."""
        return self._combined("add", "add", values)

    @hinted
    def multiply(self, values: object) -> Tensor:
        """Return x with these elements multiplied by the values."""
        return self._combined("multiply", "multiply", values)

    @hinted
    def min(self, values: object) -> Tensor:
        """Return x with each of these elements replaced by the minimum of element and values."""
        return self._combined("min", "minimum", values)

    @hinted
    def max(self, values: object) -> Tensor:
        """Return x with each of these elements replaced by the maximum of element and values."""
        return self._combined("max", "maximum", values)

    def _combined(self, name: str, by: Combine | Literal["add"], values: object) -> Tensor:
        try:
            return _combined_at(by, self._x, self._key, values)
        except errors.MlvmError as error:
            if isinstance(error, errors.OpError) and not error.late:
                error.op = None
            annotate_error(error, f"at[...].{name}", (self._x,))
            raise


def _combined_at(by: Combine | Literal["add"], x: Tensor, key: Any, updates: Any) -> Tensor:
    """Combine each element that the key selects with all updates of the element."""
    combine = getattr(op, by)
    keys = key if issubclass(type(key), tuple) else (key,)
    items = [_item(each) for each in keys]
    operand = _values(x, updates)
    if not any(isinstance(item, Tensor) for item in items):  # no element is selected twice
        out = alias_of(x)
        setitem(out, key, combine(getitem(x, key), operand))
        return out
    if len(items) == 1 and _is_mask(items[0]):
        mask = cast(Tensor, items[0])
        if operand.ndim <= x.ndim - mask.ndim and mask.shape == x.shape[: mask.ndim]:
            operand = reshape(operand, _broadcasting(x, operand, x.shape[mask.ndim :]))
            wide = reshape(mask, (*mask.shape, *[1] * (x.ndim - mask.ndim)))
            return op.where(wide, combine(x, operand), x)
    if any(_is_mask(item) for item in items):
        items = _with_positions(x, items, keys)
    indices, axis, axes = _chosen(x, key, items)
    shape = (*x.shape[:axis], *indices.shape, *x.shape[axis + axes :])
    operand = broadcast_to(reshape(operand, _broadcasting(x, operand, shape)), shape)
    before, behind = math.prod(x.shape[:axis]), math.prod(x.shape[axis + axes :])
    length = math.prod(x.shape[axis : axis + axes])
    if by == "add":
        rows = reshape(x, (*x.shape[:axis], length, *x.shape[axis + axes :]))
        return reshape(op.index_add(rows, operand, indices, axis=axis), x.shape)
    rows = moveaxis(reshape(x, (before, length, behind)), 1, 0)
    operand = moveaxis(reshape(operand, (before, indices.size, behind)), 1, 0)
    met = op.index_reduce(rows, operand, reshape(indices, -1), by=by)
    return reshape(moveaxis(met, 0, 1), x.shape)


def _delitem(x: Tensor, key: object) -> NoReturn:
    raise TypeError(
        "a Tensor does not support item deletion: its shape never changes; select the other "
        "elements"
    )


def _setitem_and_warn(x: Tensor, key: Any, values: Any) -> None:
    """Assign like `setitem`, with the warnings that the extension issues."""
    references = sys.getrefcount(x)
    setitem(x, key, values)
    frame = sys._getframe(1)
    if has_temporary_count(references):
        warn_of_temporary(frame, x.type)
    elif x.is_part and references >= LOCAL:
        warn_of_part(frame, x, references - LOCAL)


if EXTENSION is None:
    Tensor.__getitem__ = getitem
    Tensor.__setitem__ = _setitem_and_warn
    Tensor.__delitem__ = _delitem
else:  # the slots of `AllocationFields`, which call these functions for uncommon keys
    install(slow_getitem=getitem, slow_setitem=setitem, warn_of_lost=_warn_of_lost)
