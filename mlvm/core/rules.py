"""Type rules that several ops share, and the shape arithmetic the others are made of.

A rule takes the operands' types and the op's attributes, and returns the result's type or
raises with the reason alone (`Op.infer` adds the op and the types).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, reduce
from typing import TypeGuard

import numpy as np

from mlvm.core.errors import ArgumentError, AxisRefused, DTypeError, ShapeError
from mlvm.core.types import DType, Shape, TensorType, bool_, promote

Axis = int | tuple[int, ...] | None

_KINDS: dict[str, tuple[str, ...]] = {
    "any": ("bool", "unsigned", "signed", "float", "complex"),
    "numeric": ("unsigned", "signed", "float", "complex"),
    "real": ("unsigned", "signed", "float"),
    "real or bool": ("bool", "unsigned", "signed", "float"),
    "integer": ("unsigned", "signed"),
    "integer or bool": ("bool", "unsigned", "signed"),
    "inexact": ("float", "complex"),
    "float": ("float",),
    "bool": ("bool",),
}


def require(allowed: str, *operands: TensorType) -> None:
    """Raise `DTypeError` unless every operand's dtype is of the allowed class:
    any, numeric, real, real or bool, integer, integer or bool, inexact, float, bool."""
    for operand in operands:
        if operand.dtype.kind not in _KINDS[allowed]:
            names = ", ".join(d.name for d in DType.all.values() if d.kind in _KINDS[allowed])
            is_complex = operand.dtype.kind == "complex"
            remedy = (
                "take real(x), imag(x) or abs(x)" if is_complex else "convert with astype(x, ...)"
            )
            raise DTypeError(
                f"dtype {operand.dtype.name} is not allowed; it must be {allowed} ({names}): "
                f"{remedy}"
            )


def require_one_float_dtype(*operands: TensorType) -> None:
    """Raise `DTypeError` unless all operands are floats of one dtype."""
    require("float", *operands)
    dtypes = [operand.dtype for operand in operands]
    if len(set(dtypes)) > 1:
        raise DTypeError(
            f"dtypes {', '.join([each.name for each in dtypes])} must be one and the same"
        )


def require_cotangent(g: TensorType, result: TensorType) -> None:
    """Raise `ShapeError` unless `g` can be the cotangent of a result of that type."""
    if g is not result:
        raise ShapeError(f"the cotangent is {g}, but the result it belongs to is {result}")


def common_dtype(operands: Sequence[TensorType]) -> DType:
    """The promoted dtype of all operands."""
    return reduce(promote, [operand.dtype for operand in operands])


def broadcast_shapes(*shapes: Shape) -> Shape:
    """The shape that all of them broadcast to, aligned at the last axis. Raises `ShapeError`."""
    ndim = max(map(len, shapes), default=0)
    result = [1] * ndim
    for shape in shapes:
        for i, n in enumerate(shape, ndim - len(shape)):
            length = result[i]
            if type(length) is int and length == 1:  # an open length is not compared beside it
                result[i] = n
            elif (type(n) is not int or n != 1) and n != length and n != 1:
                if length != 1:
                    raise ShapeError(
                        f"shapes do not broadcast: axis {i - ndim} has lengths {length} and {n}"
                    )
                result[i] = n
    return tuple(result)


def elementwise(allowed: str = "numeric", result: DType | None = None) -> Callable[..., TensorType]:
    """The rule of ops that work element by element: the operands promote to one dtype, of an
    allowed class, and broadcast to one shape. The result has that dtype unless `result` names one.
    """

    def infer(*operands: TensorType) -> TensorType:
        dtype = common_dtype(operands)
        if dtype is bool_ and allowed in ("numeric", "real") and result is None:
            raise DTypeError("dtype bool is not allowed; use & | ^ ~, or astype(x, 'int64')")
        require(allowed, TensorType(dtype))
        return TensorType(result or dtype, broadcast_shapes(*[x.shape for x in operands]))

    return infer


broadcast = elementwise("numeric")


def normalize_axis(axis: int, ndim: int) -> int:
    """`axis` counted from the front. Raises `AxisRefused` when it is out of range."""
    if not -ndim <= axis < ndim:
        raise AxisRefused(f"axis {axis} is out of range for {ndim} dimensions")
    return axis % ndim


def normalize_axes(axis: Axis, ndim: int) -> tuple[int, ...]:
    """All of them for None, else each counted from the front, in order, none twice."""
    if axis is None:
        return tuple(range(ndim))
    axes = (axis,) if isinstance(axis, int) else axis
    result = tuple(normalize_axis(a, ndim) for a in axes)
    if len(set(result)) != len(result):
        raise AxisRefused(f"axis {axis} names an axis twice")
    return result


def reduced_shape(shape: Shape, axis: Axis, keepdims: bool) -> Shape:
    """Return the shape with the named axes reduced."""
    axes = normalize_axes(axis, len(shape))
    if keepdims:
        return tuple(1 if i in axes else n for i, n in enumerate(shape))
    return tuple(n for i, n in enumerate(shape) if i not in axes)


def is_real(value: object) -> TypeGuard[float]:
    """Return whether it is a number that converts to a float, as 10**400 does not."""
    if not isinstance(value, (int, float, np.integer, np.floating)):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


@cache
def _bounds(dtype: DType) -> tuple[int, int]:
    """Return the least and greatest value of a bool or integer dtype."""
    if not dtype.is_integer:
        return 0, 1
    bounds = np.iinfo(dtype.numpy.name)
    return bounds.min, bounds.max


def require_representable(value: float, dtype: DType) -> None:
    """Raise `ArgumentError` unless a bool or integer dtype holds `value` exactly.

    A float or complex dtype takes any number, rounded."""
    if dtype.is_inexact:
        return
    low, high = _bounds(dtype)
    if not (low <= value <= high and (isinstance(value, int) or value == int(value))):
        raise ArgumentError(f"{value} is not a value of {dtype.name} ({low} .. {high})")
