"""What layers make their parameters with: first values, and checks of sizes and dtypes."""

from __future__ import annotations

import math
import operator
from typing import Any, TypeVar

from mlvm.core.errors import AttributeRefused, DTypeError, MlvmError
from mlvm.core.ops.neural import Pair
from mlvm.core.types import DType
from mlvm.eager.functions import random
from mlvm.eager.functions.arguments import pair
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.operands import as_operand, is_array
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.wrapper import told

P = TypeVar("P")


def lecun_normal(
    layer: str, shape: tuple[int, ...], fan_in: int, key: Tensor | None, dtype: object
) -> Tensor:
    """Normal values of variance 1 / fan_in (LeCun et al., Efficient BackProp, 1998)."""
    kernel = random.normal(shape, key=key, dtype=require_float(layer, dtype))
    kernel *= 1 / math.sqrt(fan_in)
    return kernel


def require_float(layer: str, dtype: object) -> DType:
    dtype = DType.of(dtype)
    if not dtype.is_float:
        raise DTypeError(f"{layer}: dtype must be a float, given {dtype}")
    return dtype


def matched(layer: str, x: Tensor, weight: Tensor) -> Tensor:
    """x for a layer with such weights: a half beside wider ones is widened. Raises `DTypeError` for
    another float beside halves, as the results of all layers behind would be f32 in silence."""
    if x.__class__ is not Tensor:
        if not is_array(x):
            return x  # for the op to refuse
        try:
            x = as_operand(x, weight)
        except MlvmError as error:
            told(error, layer, (x,))
            raise
    own, wanted = x.dtype, weight.dtype
    if own is wanted or not (own.is_half or (wanted.is_half and own.is_inexact)):
        return x
    if wanted.is_half:
        raise DTypeError(
            f"{layer}: x is {own} and the weights are {wanted}; write "
            f"ml.astype(x, ml.{wanted.long_name})"
        )
    return op.astype(x, dtype=wanted)


def sizes(layer: str, **sizes: object) -> tuple[int, ...]:
    """The sizes as ints. Raises `AttributeRefused` for the first that is no integer >= 1."""
    for name, size in sizes.items():
        if not _size(size):
            raise AttributeRefused(f"{layer}: {name} must be an integer >= 1, given {size!r}")
    return tuple(map(_size, sizes.values()))


def window_of(layer: str, name: str, value: int | tuple[int, int]) -> Pair:
    """A pair of ints >= 1; one int stands for both. Raises `AttributeRefused`."""
    try:
        return pair(value, name)
    except AttributeRefused as error:
        raise error.at(layer, ()) from None


def _size(value: Any) -> int:
    """The value, of Python or numpy, as an int; 0 if it is no integer >= 1."""
    try:
        return 0 if isinstance(value, bool) else max(operator.index(value), 0)
    except TypeError:
        return 0


def checked_padding(
    layer: str, padding: str | P, explicit: str = "((top, bottom), (left, right))"
) -> str | P:
    """The padding. Raises `AttributeRefused` for an unknown word, and for one number."""
    if isinstance(padding, (int, float)) or (
        isinstance(padding, str) and padding not in ("SAME", "VALID")
    ):
        raise AttributeRefused(
            f'{layer}: padding must be "SAME", "VALID" or {explicit}, given {padding!r}'
        )
    return padding
