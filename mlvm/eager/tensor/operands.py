"""Conversion of operands to tensors: from a tensor, a number, an array or a list."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import Any, Final, TypeAlias

import numpy as np

from mlvm.arena.context import current
from mlvm.core.errors import DTypeError, OperandValueError, ShapeError, brief
from mlvm.core.ops.half import cast
from mlvm.core.types import Array, DType, TensorType, bool_, c64, f64, promote, u64
from mlvm.eager.tensor.apply import COPY, apply, one_op
from mlvm.eager.tensor.constants import Scalar, constant, dtype_beside, scalar_kind
from mlvm.eager.tensor.default import KINDS, default_of
from mlvm.eager.tensor.number import Number, class_of, plain
from mlvm.eager.tensor.tensor import Tensor, from_array
from mlvm.eager.tensor.values import (
    array_of,
    in_memory,
    kind_of,
    leaves,
    of_numbers,
    values_for,
    zeros_and_ones,
)
from mlvm.machines.native.extension import EXTENSION, install

Operand: TypeAlias = "Tensor | Scalar | Array | list[Any] | tuple[Any, ...]"

NUMBERS: Final = (bool, int, float, complex, np.generic)

_INT: Final = TensorType(default_of(int))
_LISTED: Final = frozenset({list, float, int})  # values of which C makes a tensor
_SMALL: Final = 4096
"""Size in bytes of a small tensor."""


def as_operand(value: Any, like: Tensor | None = None, *, or_index: bool = False) -> Tensor:
    """Convert the value that a user passes as an operand to a tensor.

    `like` is another operand of the op, a tensor.

    1. A tensor is itself.
    2. An array has the dtype that `asarray` gives it. But f64, numpy's default, becomes the float
       of `like`, where that is narrower (`array_beside`).
    3. A Python number is weak: it has the dtype of `like`. A number of a higher kind has the dtype
       in which the two compute (`dtype_beside`). Without `like` it is as in `asarray`.
    4. A list of numbers is as weak as the number of the highest kind. If it may also be a list of
       indices (`or_index`), only a list of floats is weak. Without `like` it is as in `asarray`.

    Arrays and lists are copied, as by `asarray`, also to a remote VM. In a captured function they
    become constants.

    Raises `DTypeError` for any other value, and `OperandValueError` for an int that the dtype
    cannot represent.
    """
    kind = class_of(value)
    if issubclass(kind, Tensor):
        return value  # type: ignore[no-any-return]
    if issubclass(kind, NUMBERS):
        if like is None:
            return tensor_of(value)
        if issubclass(kind, np.generic):
            DType.of(value.dtype)  # raises for long doubles, dates and strings
            return _number(value.item(), like)
        return _number(value, like)
    if not is_array(value):
        why = (
            "; functions without a return statement, or that work in place, return None"
            if value is None
            else ""
        )
        raise DTypeError(
            "expected a tensor, a number, or an array or list of numbers, got "
            f"{kind_of(value)}{why}"
        )
    if not issubclass(kind, (list, tuple)):
        array = in_memory(value)
        if array is not None and like is not None:
            return tensor_of(array, array_beside(DType.of(array.dtype), like.dtype))
    dtype = None if like is None else listed_beside(value, like.dtype)
    if or_index and dtype is not None:
        own = listed_beside(value, bool_) or bool_
        dtype = (dtype.real if own.is_float else dtype) if own.is_inexact else None
    return tensor_of(value, dtype)


operand: Final[Callable[[object, Tensor], Tensor]] = (
    as_operand if EXTENSION is None else EXTENSION.operand
)
"""As `as_operand(value, like)`. With the C extension, C remembers the tensors of numbers."""

install(slow_operand=as_operand)


def _number(value: Scalar, like: Tensor) -> Tensor:
    try:
        return constant(value, dtype_beside(value.__class__, like.dtype))
    except OperandValueError as error:
        if error.late or not like.dtype.is_integer:
            raise
        fits = like.dtype is not u64 and -(2**63) <= value < 2**63  # type: ignore[operator]
        wider = "ml.int64" if fits else "ml.float64"
        reason = f"{error.reason}; write ml.astype(x, {wider}) for the tensor"
        raise OperandValueError(reason) from None


def as_operands(values: Sequence[Any]) -> tuple[Tensor, ...]:
    """Convert operands to tensors, each as an operand of the first tensor.

    Without a tensor, the first array, the first list or the first number is used instead. Arrays
    are converted as operands of the tensor with the widest float dtype. Raises `DTypeError` for any
    other value."""
    widest = widest_of(values)
    like = next((x for x in values if issubclass(type(x), Tensor)), None)
    if like is None:
        first = min(values, key=lambda x: 2 * isinstance(x, NUMBERS) + isinstance(x, (list, tuple)))
        like = as_operand(first)
        values = [like if x is first else x for x in values]
    return tuple([as_operand(x, widest if is_whole(x) else like) for x in values])


def widest_of(values: Iterable[Any]) -> Tensor | None:
    """Return the tensor with the widest float dtype among the values, or None."""
    floats = [x for x in values if issubclass(type(x), Tensor) and x.dtype.is_inexact]
    return max(floats, key=lambda x: x.dtype.real.itemsize, default=None)


def array_beside(own: DType, dtype: DType) -> DType:
    """Return the dtype of an array combined with a tensor of the widest float `dtype`.

    f64 becomes that float dtype, like numbers in a list, and c128 becomes the corresponding complex
    dtype."""
    if not own.is_inexact or own.real is not f64 or not dtype.is_inexact or dtype.real is f64:
        return own
    return dtype.real if own.is_float else promote(dtype, c64)


def is_whole(x: object) -> bool:
    """Return whether a value is an array rather than a list."""
    return is_array(x) and not isinstance(x, (list, tuple))


def is_array(value: object) -> bool:
    """Return whether an operand may have the values of an array.

    The operand is neither a tensor nor a number."""
    kind = class_of(value)
    if issubclass(kind, (Tensor, *NUMBERS)):
        return False
    return (
        issubclass(kind, (list, tuple))
        or hasattr(value, "__array__")
        or hasattr(value, "__dlpack__")
    )


def tensor_of(values: object, dtype: DType | None = None) -> Tensor:
    """Return a new tensor from values that are not a tensor, with the errors of `asarray`."""
    if type(values) is Number:
        target = dtype or default_of(values.__class__)
        if isinstance(values, float) or target.is_integer:
            return apply(COPY, constant(values, target))
        values = plain(values)  # a large int is rounded once; a constant would round it twice
    if dtype is None and EXTENSION is not None and type(values) in _LISTED:
        listed: Tensor | None = EXTENSION.listed(values, TensorType(default_of(float)), _INT)
        if listed is not None:
            return listed
    if dtype is None and type(values) is np.ndarray:
        return from_array(zeros_and_ones(array_of(values)))
    array = in_memory(values)
    first = next((leaf for leaf in leaves(values) if isinstance(leaf, Tensor)), None)
    if array is not None:
        array = zeros_and_ones(array)
        own = DType.of(array.dtype)
        target = dtype or own
        if own.kind == "complex" and target.kind not in ("complex", "bool"):
            raise DTypeError(f"cannot convert complex numbers to {target.name}; use real or imag")
    elif first is not None:
        joined = _joined(values, first)
        cast_to = None if dtype in (None, joined.dtype) else one_op("astype", dtype=dtype)
        return joined if cast_to is None else apply(cast_to, joined)
    else:
        array = zeros_and_ones(of_numbers(values, dtype))
        target = dtype or _listed_dtype(values, array)
        array = values_for(target, array, values)
    return from_array(cast(array, target))


def _listed_dtype(values: object, array: Array) -> DType:
    """Return the dtype of nested lists; `array` contains the numbers.

    The dtypes of numpy scalars and arrays do not change, and Python numbers adapt to them. Without
    both, it is the default dtype of the array's kind."""
    kinds = dict.fromkeys(getattr(leaf, "dtype", leaf.__class__) for leaf in leaves(values))
    own = [DType.of(kind) for kind in kinds if not isinstance(kind, type)]
    if not own:
        return default_of(type(array.dtype.type(0).item()))
    numbers = [kind for kind in kinds if isinstance(kind, type) and scalar_kind(kind)]
    return reduce(lambda dtype, kind: dtype_beside(kind, dtype), numbers, reduce(promote, own))


def _joined(values: object, like: Tensor) -> Tensor:
    """Join nested lists of tensors and numbers into one tensor; numbers are adapted to `like`."""
    if not isinstance(values, (list, tuple)):
        return as_operand(values, like)
    rows = [_joined(each, like) for each in values]
    shapes = list(dict.fromkeys(row.shape for row in rows))
    if len(shapes) != 1:
        raise ShapeError(
            f"expected nested lists of equal lengths, got rows of shapes {brief(shapes)}"
        )
    longer = one_op("reshape", shape=(1, *shapes[0]))
    return apply(one_op("concat", axis=0), *in_groups([apply(longer, row) for row in rows], 0))


def in_groups(xs: Sequence[Tensor], axis: int) -> Sequence[Tensor]:
    """Concatenate many small tensors of one type in groups; return other tensors unchanged.

    A kernel is planned for each number of operands, so few numbers should occur."""
    each_op = 16  # tensors that one op concatenates
    if len(xs) <= each_op or current().recorder is not None or type(xs[0]) is not Tensor:
        return xs
    type_of_each, ndim = xs[0].type, xs[0].ndim
    is_valid = type(axis) is int and -ndim <= axis < ndim and type_of_each.nbytes <= _SMALL
    if is_valid and all(type(x) is Tensor and x.type is type_of_each for x in xs):
        call = one_op("concat", axis=axis)
        while len(xs) > each_op:
            groups = [xs[i : i + each_op] for i in range(0, len(xs), each_op)]
            xs = [apply(call, *each) if len(each) > 1 else each[0] for each in groups]
    return xs


def listed_beside(values: object, dtype: DType) -> DType | None:
    """Return the dtype of a list of Python numbers combined with a tensor of that dtype.

    It is the dtype that `dtype_beside` returns for the number of the highest kind. An empty list
    has the tensor's dtype. Return None for anything except a list, and for a list with arrays or
    tensors, because these are not converted."""
    if not isinstance(values, (list, tuple)):
        return None
    kinds = set()
    for leaf in leaves(values):
        number = leaf.item() if isinstance(leaf, np.generic) else leaf
        kind = next((kind for kind in KINDS if isinstance(number, kind)), None)
        if kind is None:
            return None
        kinds.add(kind)
    highest = next((kind for kind in reversed(KINDS) if kind in kinds), None)
    return dtype if highest is None else dtype_beside(highest, dtype)
