"""Digest of a tensor: 16 bytes that equal tensors share, and in practice no others."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from mlvm.core.ops.half import shown
from mlvm.core.types import Array, TensorType


def digest(array: Array) -> bytes:
    """Return the BLAKE2b digest of a tensor's type and elements, in row-major order.

    All nans of a dtype count as equal, since docs/determinism.md leaves their sign and payload
    open. Zeros of different signs differ.

        >>> from mlvm.core.digest import digest
        >>> digest(np.float32([0.0, np.nan])) == digest(np.float32([0.0, -np.nan]))
        True
        >>> digest(np.float32([0.0])) == digest(np.float32([-0.0]))
        False
    """
    type = TensorType.of(array)
    state = blake2b(str(type).encode(), digest_size=16)
    state.update(_canonical(array, type).tobytes())
    return state.digest()


def _canonical(array: Array, type: TensorType) -> Array:
    """Return the elements in little-endian order, and each nan as the one that numpy has."""
    elements = array.astype(array.dtype.newbyteorder("<"), copy=False)
    if not type.dtype.is_inexact or type.dtype.is_storage:
        return elements
    parts = elements
    if type.dtype.kind == "complex":
        parts = np.ascontiguousarray(elements).view(
            np.float32 if type.dtype.name == "c64" else "f8"
        )
    is_nan = np.isnan(shown(parts))
    if not is_nan.any():
        return elements
    parts = parts.copy()
    bits = parts.view(f"<u{parts.dtype.itemsize}")
    bits[is_nan] = _NAN_BITS[type.dtype.name]
    return parts


_NAN_BITS = {
    "f16": 0x7E00,
    "bf16": 0x7FC0,
    "f32": 0x7FC00000,
    "f64": 0x7FF8000000000000,
    "c64": 0x7FC00000,
    "c128": 0x7FF8000000000000,
}
"""The quiet nan without sign and payload, by the dtype of which it is a part."""
