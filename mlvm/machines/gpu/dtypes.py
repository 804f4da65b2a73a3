"""Names of dtypes in kernel sources."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from mlvm.core.types import DType, f32

RAW: Final = {1: "u8", 2: "u16", 4: "u32", 8: "u64", 16: "u64"}
"""Integer types for moving elements, by size in bytes; 16 bytes are moved as two integers."""


def computed(dtype: DType) -> DType:
    """Return the dtype in which elements of this dtype are computed: f32 for half precision."""
    return f32 if dtype.is_half else dtype


def scalar(dtype: DType, value: float) -> Any:
    """Return the value as an argument in the dtype of the computation."""
    return computed(dtype).numpy.type(value)


def extremes(dtype: DType) -> tuple[str, str]:
    """Return the minimum and maximum of a dtype as C expressions."""
    if dtype.is_float:
        return "(-INFINITY)", "INFINITY"
    if dtype.kind == "bool":
        return "0", "1"
    limits = np.iinfo(dtype.numpy)  # type: ignore[type-var]
    if dtype.kind == "unsigned":
        return "0", f"{limits.max}u"
    return f"(-{limits.max} - 1)", f"{limits.max}"


def nbytes(dtype: DType, count: int) -> int:
    return count * computed(dtype).itemsize
