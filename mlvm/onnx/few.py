"""Rounding to low-bit floats and integers, which are stored in wider dtypes."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlvm.core.ops.few import integers
from mlvm.onnx.arrays import FLOATS, INTEGERS


def rounded(xp: Any, x: Any, number: int, saturate: bool = True, mode: str = "up") -> Any:
    """Round x, f32, to the floats of a `TensorProto.DataType`, to nearest with ties to even.

    With `saturate`, a value that is too large becomes the largest value. Otherwise it becomes
    infinity, or nan if the format has no infinity. Powers of two (f8e8m0) are rounded by `mode`.
    """
    codes = FLOATS[number]
    if number == 24:
        return _power(xp, x, saturate, mode)
    half = codes[: len(codes) // 2]
    values = np.unique(half[np.isfinite(half)])
    middles = ((values[1:].astype(np.float64) + values[:-1]) / 2).astype(np.float32)
    beyond = np.float32(values[-1] + (values[-1] - values[-2]) / 2)
    size = xp.abs(x)
    steps = xp.asarray(middles)
    place = xp.searchsorted(steps, size)
    nearest = xp.minimum(place, len(middles) - 1)
    is_tie = xp.logical_and(xp.equal(xp.take(steps, nearest, axis=0), size), nearest % 2 == 1)
    place = xp.minimum(place + xp.astype(is_tie, place.dtype), len(values) - 1)
    y = xp.take(xp.asarray(values), place, axis=0)
    has_infinity = bool(np.isinf(codes).any())
    if not saturate and number != 23:
        over = np.float32(np.inf if has_infinity else np.nan)
        even = len(values) % 2 == 1  # tie between the largest value and the next
        is_over = xp.greater(size, beyond) if even else xp.greater_equal(size, beyond)
        y = xp.where(is_over, xp.full_like(y, over), y)
    nothing = 0.0 if number == 23 else np.nan  # f4e2m1 has no nan
    y = xp.where(xp.isnan(x), xp.full_like(y, nothing), xp.copysign(y, x))
    if number in (18, 20):  # these have no -0
        y = xp.where(xp.equal(y, 0), xp.zeros_like(y), y)
    return y


def _power(xp: Any, x: Any, saturate: bool, mode: str) -> Any:
    size = xp.astype(xp.abs(x), xp.float64)
    exponent = xp.log2(size)
    low = xp.floor(exponent)
    if mode == "down":
        power = low
    elif mode == "nearest":
        power = low + xp.astype(xp.greater_equal(size, xp.exp2(low) * 1.5), size.dtype)
    else:
        power = xp.ceil(exponent)
    power = xp.clip(power, -127.0, 127.0) if saturate else power
    y = xp.astype(xp.exp2(power), x.dtype)
    return xp.where(xp.isnan(x), xp.full_like(y, np.nan), y)


def wrapped(xp: Any, x: Any, number: int) -> Any:
    """Wrap x to a low-bit integer by keeping the low bits."""
    own, bits = integers(INTEGERS[number]), 8 // INTEGERS[number].per_byte
    low = xp.bitwise_and(xp.astype(x, xp.int32), (1 << bits) - 1)
    if own[0]:
        low = xp.bitwise_xor(low, -own[0]) + own[0]
    return xp.astype(low, xp.int8 if own[0] else xp.uint8)
