"""How kernels name dtypes that they only move or read as integers: `kernels/elements.h`."""

from __future__ import annotations

import numpy as np

from mlvm.core.types import DType


def integer_kind(dtype: DType) -> int:
    """The size of an integer in bytes, negative for a signed one."""
    return dtype.itemsize if dtype.kind == "unsigned" else -dtype.itemsize


def pattern(value: object, dtype: DType) -> int:
    """Eight bytes full of that element, as an integer."""
    return int(np.full(8 // dtype.itemsize, value, dtype.numpy).view(np.int64)[0])


def numbers(dtype: DType) -> str:
    """What a kernel that adds is named after: a float dtype, or an integer's size, as sums wrap
    around alike with a sign and without."""
    return str(dtype if dtype.is_float else dtype.itemsize)
