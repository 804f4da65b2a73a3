"""Type rules that several ops share, and shape arithmetic for the other rules.

A rule receives the operands' types and the op's attributes, and returns the result's type. It
raises an error with the reason only; `Op.infer` adds the op and the operand types.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, reduce
from typing import TypeGuard

import numpy as np

from mlvm.core.errors import ArgumentError, AxisError, DTypeError, ShapeError
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
    """Raise `DTypeError` unless every operand's dtype belongs to the allowed class.

    The classes are: any, numeric, real, real or bool, integer, integer or bool, inexact, float,
    bool.
    """
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
    """Raise `DTypeError` unless all operands are floats of the same dtype."""
    require("float", *operands)
    dtypes = [operand.dtype for operand in operands]
    if len(set(dtypes)) > 1:
        raise DTypeError(
            "expected operands of one dtype, got "
            f"{', '.join([each.name for each in dtypes])}; convert with astype"
        )


def require_cotangent(g: TensorType, result: TensorType) -> None:
    """Raise `ShapeError` unless `g` can be the cotangent of a result of that type."""
    if g is not result:
        raise ShapeError(f"expected a cotangent of the result's type {result}, got {g}")


def common_dtype(operands: Sequence[TensorType]) -> DType:
    """Return the promoted dtype of all operands."""
    return reduce(promote, [operand.dtype for operand in operands])


def broadcast_shapes(*shapes: Shape) -> Shape:
    """Return the shape that all shapes broadcast to, aligned at the last axis.

    Raises `ShapeError`.
    """
    ndim = max(map(len, shapes), default=0)
    result = [1] * ndim
    for shape in shapes:
        for i, n in enumerate(shape, ndim - len(shape)):
            length = result[i]
            # do not compare a dynamic size with 1: that would add a guard
            if type(length) is int and length == 1:
                result[i] = n
            elif (type(n) is not int or n != 1) and n != length and n != 1:
                if length != 1:
                    raise ShapeError(
                        "shapes do not broadcast: expected equal sizes or 1 on axis "
                        f"{i - ndim}, got {length} and {n}"
                    )
                result[i] = n
    return tuple(result)


def elementwise(allowed: str = "numeric", result: DType | None = None) -> Callable[..., TensorType]:
    """Return the type rule of elementwise ops.

    The operands promote to one dtype, which must be of the allowed class, and broadcast to one
    shape. The result has this dtype unless `result` names a different dtype.
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
    """Return `axis` counted from the first axis. Raises `AxisError` if it is out of range."""
    if not -ndim <= axis < ndim:
        valid = f"expected -{ndim} to {ndim - 1}" if ndim else "it has no axes"
        raise AxisError(f"axis {axis} is out of range for {ndim} dimensions; {valid}")
    return axis % ndim


def normalize_axes(axis: Axis, ndim: int) -> tuple[int, ...]:
    """Return the axes counted from the first, in the order given; all axes for None.

    Raises `AxisError` for an axis that is out of range or repeated.
    """
    if axis is None:
        return tuple(range(ndim))
    axes = (axis,) if isinstance(axis, int) else axis
    result = tuple(normalize_axis(a, ndim) for a in axes)
    if len(set(result)) != len(result):
        raise AxisError(f"expected distinct axes, got {axis}")
    return result


def reduced_shape(shape: Shape, axis: Axis, keepdims: bool) -> Shape:
    """Return the shape with the named axes reduced."""
    axes = normalize_axes(axis, len(shape))
    if keepdims:
        return tuple(1 if i in axes else n for i, n in enumerate(shape))
    return tuple(n for i, n in enumerate(shape) if i not in axes)


def is_real(value: object) -> TypeGuard[float]:
    """Return whether the value is a number that converts to a float; 10**400 does not."""
    if not isinstance(value, (int, float, np.integer, np.floating)):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


@cache
def bounds(dtype: DType) -> tuple[int, int]:
    """Return the least and greatest value of a bool or integer dtype."""
    if not dtype.is_integer:
        return 0, 1
    limits = np.iinfo(dtype.numpy.name)
    return limits.min, limits.max


def require_representable(value: float, dtype: DType) -> None:
    """Raise `ArgumentError` unless a bool or integer dtype can hold `value` exactly.

    A float or complex dtype accepts any number and rounds it.
    """
    if dtype.is_inexact:
        return
    low, high = bounds(dtype)
    if not (low <= value <= high and (isinstance(value, int) or value == int(value))):
        raise ArgumentError(f"{value} is not a value of {dtype.name} ({low} .. {high})")
