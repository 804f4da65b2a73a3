"""Dtypes in the text of kernels."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from mlvm.core.types import DType, Shape, TensorType, f32

RAW: Final = {1: "u8", 2: "u16", 4: "u32", 8: "u64", 16: "u64"}
"""By the bytes of an element, the integers that it is moved as; of 16 bytes, two."""


def computed(dtype: DType) -> DType:
    """The dtype that elements of this one are computed in: f32 for halves."""
    return f32 if dtype.is_half else dtype


def scalar(dtype: DType, value: float) -> Any:
    """The value as an argument of what the dtype is computed in."""
    return computed(dtype).numpy.type(value)


def extremes(dtype: DType) -> tuple[str, str]:
    """The lowest and the highest value of a dtype, as C writes them."""
    if dtype.is_float:
        return "(-INFINITY)", "INFINITY"
    if dtype.kind == "bool":
        return "0", "1"
    limits = np.iinfo(dtype.numpy)  # type: ignore[type-var]
    if dtype.kind == "unsigned":
        return "0", f"{limits.max}u"
    return f"(-{limits.max} - 1)", f"{limits.max}"


def around(shape: Shape, axis: int) -> tuple[int, int, int]:
    """Count the elements along the axes before that axis, along it, and behind it."""
    axis = axis % max(len(shape), 1)
    if not shape:
        return 1, 1, 1
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])


def nbytes(dtype: DType, count: int) -> int:
    return count * computed(dtype).itemsize


def flat(type: TensorType) -> TensorType:
    """The type of as many elements in a row."""
    return type.with_shape((type.size,))
