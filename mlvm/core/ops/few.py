"""Low-bit dtypes, which can be stored in tensors and converted.

The integers i4, u4, i2 and u2 are packed two or four to a byte, the first in the lowest bits. The
floats are f8e4m3 and f8e5m2 (Micikevicius et al., "FP8 Formats for Deep Learning", arXiv
2209.05433), and f4e2m1 (OCP Microscaling Formats, 2023), two to a byte.

Integers are unpacked to i8 and u8, floats to f32; these conversions are exact.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import numpy as np

from mlvm.core.types import Array, DType, TensorType, f4e2m1, f8e4m3, f8e5m2, f32, i2, i4, i8, u8

FLOATS: Final = {f8e4m3: (4, 3), f8e5m2: (5, 2), f4e2m1: (2, 1)}
"""Number of bits of the exponent and of the fraction, by dtype."""


def is_few(x: Array) -> bool:
    """Return whether the elements have a low-bit dtype."""
    return x.dtype.names is not None and DType.of(x.dtype).is_storage


def unpacked_dtype(dtype: DType) -> DType:
    """Return the dtype that represents all values of a low-bit dtype: i8, u8 or f32."""
    return f32 if dtype in FLOATS else i8 if dtype in (i4, i2) else u8


def integers(dtype: DType) -> range:
    """Return the range of integers of i4, u4, i2 or u2."""
    bits = 8 // dtype.per_byte
    half = 1 << bits - 1
    return range(-half, half) if dtype in (i4, i2) else range(2 * half)


def unpacked(x: Array) -> Array:
    """Unpack the values to `unpacked_dtype`: [..., n / per_byte] -> [..., n].

    An array of f8 may be a scalar.
    """
    type = TensorType.of(x)
    values: Array = _values(type.dtype)[x.view(np.uint8)].reshape(type.shape)
    return values


def pack(out: Array, x: Array) -> None:
    """Write numbers in the dtype of `out`.

    Floats are rounded to nearest even, integers are converted as in `astype`. Values out of range
    become infinite in f8e5m2, nan in f8e4m3, and the largest value in f4e2m1, where nan becomes 0.
    """
    dtype = DType.of(out.dtype)
    if dtype in FLOATS:
        codes = _nearest(dtype, x.astype(np.float64))
    elif x.dtype.kind == "f":
        own = integers(dtype)
        codes = np.clip(np.nan_to_num(np.trunc(x), nan=0.0), own[0], own[-1]).astype(np.int8)
    else:
        codes = x.astype(np.uint8)  # modulo 2^8, then modulo 2^bits
    bits = 8 // dtype.per_byte
    digits = codes.view(np.uint8).reshape(*out.shape, dtype.per_byte) & np.uint8((1 << bits) - 1)
    shifts = np.arange(dtype.per_byte, dtype=np.uint8) * np.uint8(bits)
    np.bitwise_or.reduce(digits << shifts, axis=-1, out=out.view(np.uint8))


@cache
def _values(dtype: DType) -> Array:
    """Return the values in each possible byte: [256, per_byte]."""
    bits = 8 // dtype.per_byte
    codes = np.arange(256)[:, np.newaxis] >> bits * np.arange(dtype.per_byte) & (1 << bits) - 1
    if dtype in FLOATS:
        floats: Array = _floats(dtype)[codes]
        return floats
    own = integers(dtype)
    signed: Array = np.where(codes > own[-1], codes + 2 * own[0], codes)
    return signed.astype(unpacked_dtype(dtype).numpy)


@cache
def _floats(dtype: DType) -> Array:
    """Return the value of each code."""
    of_exponent, of_fraction = FLOATS[dtype]
    values = magnitudes(of_exponent, of_fraction, (1 << of_exponent - 1) - 1)
    if dtype is f8e4m3:
        values[-1] = np.nan
    elif dtype is f8e5m2:
        values[-4:] = np.inf, np.nan, np.nan, np.nan
    return np.concatenate([values, -values])


def magnitudes(of_exponent: int, of_fraction: int, bias: int) -> Array:
    """Return the numbers of an exponent and a fraction of some bits, by code, f32."""
    codes = np.arange(1 << of_exponent + of_fraction)
    exponent, fraction = codes >> of_fraction, codes & (1 << of_fraction) - 1
    whole = np.float32((exponent > 0) * (1 << of_fraction) + fraction)
    numbers: Array = np.ldexp(whole, np.maximum(exponent, 1) - bias - of_fraction)
    return numbers


def _nearest(dtype: DType, x: Array) -> Array:
    """Return the code of the nearest value; ties go to the even code."""
    half = 1 << sum(FLOATS[dtype])
    finite = _floats(dtype)[:half].astype(np.float64)
    finite = finite[np.isfinite(finite)]
    most = finite.size - 1
    # append the value that would follow the largest value
    borders = np.append(finite, 2 * finite[-1] - finite[-2])
    borders = (borders[1:] + borders[:-1]) / 2
    size = np.abs(x)
    codes = np.searchsorted(borders, size, side="left")
    codes += (size == borders[np.minimum(codes, most)]) & (codes % 2 == 1)  # a tie
    if dtype is f4e2m1:
        codes = np.where(np.isnan(x), 0, np.minimum(codes, most))
    else:
        # the code after the largest encodes overflow
        codes = np.where(np.isnan(x), half - 1, codes)
    return (codes + np.where(np.signbit(x), half, 0)).astype(np.uint8)


def limits(dtype: DType) -> tuple[float, float]:
    """Return the smallest and largest finite number of a low-bit dtype, i8 or u8."""
    if dtype in (i8, u8):
        return (-128, 127) if dtype is i8 else (0, 255)
    if dtype not in FLOATS:
        return integers(dtype)[0], integers(dtype)[-1]
    values = _floats(dtype)
    most = float(values[np.isfinite(values)].max())
    return -most, most
