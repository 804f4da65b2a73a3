"""Digests of tensors: equal digests mean equal types and equal bits."""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np

from mlvm.core.types import Array, TensorType

_NANS: Final = {"f16": 0x7E00, "bf16": 0x7FC0, "f32": 0x7FC00000, "f64": 0x7FF8 << 48}
"""The nan that stands for all nans of a dtype: the processor chooses sign and payload."""
_INFINITIES: Final = {"f16": 0x7C00, "bf16": 0x7F80, "f32": 0x7F800000, "f64": 0x7FF0 << 48}
_PARTS: Final = {"c64": "f32", "c128": "f64"}


def digest(*arrays: Array) -> str:
    """Return 32 hexadecimal digits that depend on the arrays' types and bits, in this order; all
    nans count as one.

        >>> from mlvm.core.digest import digest
        >>> digest(np.float32([1, np.nan])) == digest(np.float32([1, -np.nan]))
        True
        >>> digest(np.float32([0])) == digest(np.float32([-0.0]))
        False
    """
    state = hashlib.blake2b(digest_size=16)
    for array in arrays:
        type = TensorType.of(array)
        state.update(f"{type} ".encode())
        state.update(_with_one_nan(array, type.dtype.name))
    return state.hexdigest()


def _with_one_nan(array: Array, dtype: str) -> bytes:
    """Return the bytes of the array after its nans have become the one of their dtype."""
    dtype = _PARTS.get(dtype, dtype)
    nan = _NANS.get(dtype)
    if nan is None:
        return array.tobytes()
    size = 8 if dtype == "f64" else 4 if dtype == "f32" else 2
    bits = np.frombuffer(array.tobytes(), f"u{size}")
    magnitude = bits & ~np.array(1 << (8 * size - 1), bits.dtype)
    is_nan = magnitude > np.array(_INFINITIES[dtype], bits.dtype)
    return np.where(is_nan, np.array(nan, bits.dtype), bits).tobytes()
