"""Creation of parameters: initial values, and checks of sizes and dtypes."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, TypeAlias

from mlvm.core.errors import ArgumentError, DTypeError, MlvmError, ShapeError, brief
from mlvm.core.rules import is_real
from mlvm.core.types import DType, TensorType
from mlvm.eager.functions import creation, random
from mlvm.eager.functions.arguments import Ints, each_of
from mlvm.eager.functions.halves import rounded
from mlvm.eager.functions.sliding import numbers_of
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.autocast import autocast_dtype
from mlvm.eager.tensor.default import float_dtype
from mlvm.eager.tensor.operands import as_operand, is_array
from mlvm.eager.tensor.tensor import Tensor, described
from mlvm.eager.tensor.wrapper import annotate_error

Init: TypeAlias = Callable[..., Tensor]
"""Initialiser, `init(shape, key=..., dtype=...)`: see `mlvm.eager.nn.init`."""


def kernel_of(
    layer: str,
    init: Init | None,
    shape: tuple[int, ...],
    fan_in: int,
    key: Tensor | None,
    dtype: object,
    *,
    name: str = "kernel_init",
) -> Tensor:
    """Return a parameter from the initialiser, by default normal values with variance 1 / fan_in.

    LeCun et al., Efficient BackProp, 1998. Raises `ShapeError` and `DTypeError` if the result has a
    different type."""
    kind = require_float(layer, dtype)
    if init is None:
        kernel = random.normal(shape, key=key, dtype=kind)
        kernel *= 1 / math.sqrt(fan_in)
        return kernel
    parameter: Any = init(shape, key=key, dtype=kind)
    expected = TensorType(kind, shape)
    if not isinstance(parameter, Tensor) or parameter.dtype is not kind:
        raise DTypeError(
            f"{layer}: expected {name} to return {expected}, got {described(parameter)}"
        )
    if parameter.type is not expected:
        raise ShapeError(f"{layer}: expected {name} to return {expected}, got {parameter.type}")
    return parameter


def bias_of(
    layer: str, init: Init | None, length: int, key: Tensor | None, dtype: object
) -> Tensor:
    """Return a bias from the initialiser, with a different key than the kernel, or zeros."""
    if init is None:
        return creation.zeros(length, dtype=require_float(layer, dtype))
    other = None if key is None else random.fold_in(key, 1)
    return kernel_of(layer, init, (length,), 1, other, dtype, name="bias_init")


def require_float(layer: str, dtype: object) -> DType:
    target = float_dtype(dtype)
    if not target.is_float:
        raise DTypeError(f"{layer}: expected a float dtype, got {target.name}")
    return target


def matched(layer: str, x: Tensor, weight: Tensor) -> Tensor:
    """Match the dtype of x to the weights of a layer: half precision is converted to wider weights.

    Raises `DTypeError` if x is a wider float than half-precision weights, because later layers
    would silently compute in f32."""
    if type(x) is not Tensor:
        if not is_array(x):
            return x  # the op rejects it
        try:
            x = as_operand(x, weight)
        except MlvmError as error:
            annotate_error(error, layer, (x,))
            raise
    own, target = x.dtype, weight.dtype
    if own is target or not (own.is_half or (target.is_half and own.is_inexact)):
        return x
    if autocast_dtype() is not None:  # autocast casts both operands, or neither
        return x
    if target.is_half:
        raise DTypeError(
            f"{layer}: x is {own.name} and the weights are {target.name}; write "
            f"ml.astype(x, ml.{target.long_name})"
        )
    return op.astype(x, dtype=target)


def biased(y: Tensor, bias: Tensor | None) -> Tensor:
    """Add the bias to a layer's product, in the product's dtype if that is half precision."""
    if bias is None:
        return y
    return y + (rounded(bias, y.dtype) if y.dtype.is_half else bias)


def sizes(layer: str, **sizes: object) -> tuple[int, ...]:
    """Return the sizes as ints. Raises `ArgumentError` if one is not an integer >= 1."""
    for name, size in sizes.items():
        if not _size(size):
            raise ArgumentError(f"{layer}: expected {name} as an integer >= 1, got {size!r}")
    return tuple(map(_size, sizes.values()))


def window_of(layer: str, name: str, value: Ints, axes: int) -> tuple[int, ...]:
    """Return an int >= 1 for each axis; a single int is repeated.

    Raises `ArgumentError` for any other value."""
    try:
        return each_of(value, axes, name)
    except ArgumentError as error:
        raise error.at(layer, ()) from None


def number(what: str, value: Any) -> float:
    """Return the value as a float. Raises `ArgumentError` unless it is a number."""
    if not is_real(value):
        raise ArgumentError(f"expected {what} as a number, got {brief(value)}")
    return float(value)


def _size(value: Any) -> int:
    """Return a Python or numpy integer as an int; 0 if it is not an integer >= 1."""
    try:
        return 0 if isinstance(value, bool) else max(operator.index(value), 0)
    except TypeError:
        return 0


def checked_padding(layer: str, padding: Any, axes: int) -> Any:
    """Return a valid padding.

    Raises `ArgumentError` if it is invalid.

    It is "SAME", "VALID", (before, after) of a sequence, or one such pair per axis."""
    if isinstance(padding, str) and padding.upper() in ("SAME", "VALID"):
        return padding.upper()
    try:
        sides = numbers_of(padding, axes)
    except ArgumentError as error:
        raise error.at(layer, ()) from None
    return sides[0] if axes == 1 else sides
