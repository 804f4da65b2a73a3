"""Names of dtypes in kernels that move elements or read integers: `kernels/elements.h`."""

from __future__ import annotations

import numpy as np

from mlvm.core.types import DType


def integer_kind(dtype: DType) -> int:
    """Return the size of an integer in bytes, negative for a signed integer."""
    return dtype.itemsize if dtype.kind == "unsigned" else -dtype.itemsize


def pattern(value: object, dtype: DType) -> int:
    """Repeat an element to fill eight bytes; return them as an integer."""
    with np.errstate(all="ignore"):  # f32 has no 1e300
        return int(np.full(8 // dtype.itemsize, value, dtype.numpy).view(np.int64)[0])


def wrapped(value: int) -> int:
    """Wrap an integer to the i64 with the same last 64 bits."""
    if -(2**62) <= value < 2**62:  # the common case; also taken by formulas of sizes
        return value
    return (value + 2**63) % 2**64 - 2**63


def numbers(dtype: DType) -> str:
    """Return the suffix of a kernel that adds: a float dtype, or an integer size.

    Signed and unsigned sums wrap in the same way.
    """
    return dtype.name if dtype.is_float else str(dtype.itemsize)
