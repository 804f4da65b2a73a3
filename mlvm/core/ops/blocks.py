"""Cutting long arrays into pieces whose intermediates stay in the processor's cache."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from mlvm.core.types import ALIGNMENT, Array

BLOCK_SIZE = 65536
"""The number of elements in a block. Several f32 arrays of a block fit a second-level cache. The
work on one block takes far longer than a call of numpy."""


def block_length(length: int, width: int = 1) -> int:
    """Return the number of rows in a block, of `length` rows of `width` elements: 1 or more."""
    return max(1, min(length, BLOCK_SIZE // max(1, width)))


def blocks(length: int, width: int = 1) -> Iterator[slice]:
    """Slices that cover `range(length)` in order, a block of rows each. A row has `width`
    elements."""
    step = block_length(length, width)
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def memory_of(*shape: int, dtype: np.dtype[Any]) -> Array:
    """An array for intermediates, its elements undefined. It is aligned as tensors are: numpy's
    own arrays are not, and work in cache on them takes a third longer."""
    nbytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + nbytes].view(dtype).reshape(shape)
