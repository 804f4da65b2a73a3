"""How kernels name dtypes that they only move or read as integers: `src/kernels/elements.h`."""

from __future__ import annotations

import numpy as np

from mlvm.core.types import DType


def integer_kind(dtype: DType) -> int:
    """The size of an integer in bytes, negative for a signed one."""
    return dtype.itemsize if dtype.kind == "unsigned" else -dtype.itemsize


def pattern(value: object, dtype: DType) -> int:
    """Eight bytes full of that element, as an integer."""
    return int(np.full(8 // dtype.itemsize, value, dtype.numpy).view(np.int64)[0])
