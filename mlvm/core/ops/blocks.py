"""Cutting long arrays into pieces whose intermediates stay in the processor's cache."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from mlvm.core.types import ALIGNMENT, Array

BLOCK = 65536
"""Elements a block: several f32 arrays of them fit a second-level cache, and numpy's cost per call
is small beside the work on one."""


def block_length(length: int, width: int = 1) -> int:
    """How many rows of `width` elements make a block, of `length` rows: at least one of them."""
    return max(1, min(length, BLOCK // max(1, width)))


def blocks(length: int, width: int = 1) -> Iterator[slice]:
    """Slices that cover `range(length)` in order, for rows of `width` elements: as many rows
    at a time as make a block."""
    step = block_length(length, width)
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def scratch(*shape: int, dtype: np.dtype[Any]) -> Array:
    """An array for intermediates, its elements undefined, aligned as tensors are: numpy's own
    are not, which costs a quarter of the speed in cache."""
    nbytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + nbytes].view(dtype).reshape(shape)
