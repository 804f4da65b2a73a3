"""Division of long arrays into blocks, so that intermediate results stay in the cache."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from mlvm.core.types import ALIGNMENT, Array

BLOCK_SIZE = 65536
"""Number of elements per block.

Several f32 arrays of a block fit into a second-level cache, and the work on one block takes much
longer than a call of numpy.
"""


def block_length(length: int, width: int = 1) -> int:
    """Return the number of rows per block, at least 1, of `length` rows with `width` elements."""
    return max(1, min(length, BLOCK_SIZE // max(1, width)))


def blocks(length: int, width: int = 1) -> Iterator[slice]:
    """Yield slices that divide `range(length)` into blocks of rows with `width` elements."""
    step = block_length(length, width)
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def memory_of(*shape: int, dtype: np.dtype[Any]) -> Array:
    """Return an uninitialized array for intermediate results, aligned as tensors are.

    numpy's own arrays are not aligned, which makes work in the cache a third slower.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + nbytes].view(dtype).reshape(shape)
