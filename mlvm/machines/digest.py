"""Digest of a tensor: 16 bytes that are equal for equal tensors, and in practice only for these.

The bytes are read as 64-bit words, in blocks of 512 words. Word i of a block is combined with
the fixed key i. With v = word ^ key, the neighboring word and the product of the two halves of v
are added to the sum i % 8, modulo 2**64. After each block the sums are scrambled. The digest is
BLAKE2b of the type and the eight sums. This is the scheme of XXH3 (https://xxhash.com): it
reads memory at full speed, and its order is fixed. It detects accidental changes, but does not
resist adversaries. Files and logs use a BLAKE2b digest of their bytes, which does.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import Any, Final

import numpy as np

from mlvm.core.memo import memoized
from mlvm.core.splitmix import generated
from mlvm.core.types import Array, TensorType

_LANES: Final = 8
_BLOCK: Final = 512  # words
_PRIME: Final = np.uint64(0x9E3779B185EBCA87)
_KINDS: Final = {"f16": 1, "bf16": 2, "f32": 3, "c64": 3, "f64": 4, "c128": 4}
_NANS: Final = {
    1: ("<u2", 0x7C00, 0x7E00),
    2: ("<u2", 0x7F80, 0x7FC0),
    3: ("<u4", 0x7F800000, 0x7FC00000),
    4: ("<u8", 0x7FF0000000000000, 0x7FF8000000000000),
}
"""The words of floats by kind, infinity, and the nan without sign and payload."""


def digest(array: Array) -> bytes:
    """Return the digest of a tensor's type and elements, in row-major order.

    All nans of a dtype count as equal, since docs/determinism.md does not specify sign and payload
    of a nan. Zeros of different signs differ.

        >>> from mlvm.machines.digest import digest
        >>> digest(np.float32([0.0, np.nan])) == digest(np.float32([0.0, -np.nan]))
        True
        >>> digest(np.float32([0.0])) == digest(np.float32([-0.0]))
        False
    """
    text, kind, little = _about(array.dtype, array.shape)
    array = np.ascontiguousarray(array, little)
    return blake2b(text + accumulate(array, array.nbytes, kind, KEYS), digest_size=16).digest()


@memoized(1 << 12)
def _about(dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[bytes, int, np.dtype[Any]]:
    """Return the type of an array as text, the kind of floats, and the little-endian dtype."""
    type = TensorType.of(np.broadcast_to(np.empty((), dtype), shape))
    return str(type).encode(), _KINDS.get(type.dtype.name, 0), dtype.newbyteorder("<")


def accumulate_in_numpy(data: Array, nbytes: int, kind: int, keys: Array) -> bytes:
    """Return the eight sums; `kind` is the kind of floats, or 0 for other elements."""
    padded = np.zeros(-(-nbytes // 64) * 64, np.uint8)
    padded[:nbytes] = data.reshape(-1).view(np.uint8)
    if kind:
        dtype, infinity, nan = _NANS[kind]
        floats = padded.view(dtype)
        magnitude = floats & floats.dtype.type(np.iinfo(dtype).max >> 1)
        floats[magnitude > infinity] = nan
    words = padded.view("<u8").reshape(-1, _LANES)
    sums = np.zeros(_LANES, np.uint64)
    rows = _BLOCK // _LANES
    for start in range(0, len(words), rows):
        block = words[start : start + rows]
        mixed = block ^ keys[: len(block)]
        products = (mixed & np.uint64(0xFFFFFFFF)) * (mixed >> np.uint64(32))
        neighbors = block.reshape(len(block), -1, 2)[:, :, ::-1].reshape(len(block), -1)
        sums += (neighbors + products).sum(axis=0, dtype=np.uint64)
        sums = (sums ^ (sums >> np.uint64(47))) * _PRIME
    return sums.astype("<u8").tobytes()


KEYS: Final[Array] = generated(_BLOCK).reshape(-1, _LANES)
"""The keys of a block."""

accumulate: Callable[[Array, int, int, Array], bytes] = accumulate_in_numpy
"""The function that computes the sums. The native machine replaces it by one in C for each
instruction set, with equal results."""
