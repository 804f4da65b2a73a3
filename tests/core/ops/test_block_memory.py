"""Blocks cover a range once, in order, and none is larger than it may be."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mlvm.core.ops.block_memory import BLOCK_SIZE, block_length, blocks, memory_of
from mlvm.core.types import ALIGNMENT
from tests.brief import cases


@given(st.integers(0, 1000), st.integers(0, 2 * BLOCK_SIZE))
def test_blocks_cover_the_range(length: int, width: int) -> None:
    cut = list(blocks(length, width))
    assert [i for block in cut for i in range(length)[block]] == list(range(length))
    longest = block_length(length, width)
    assert longest == 1 or longest * width <= BLOCK_SIZE
    assert all(block.stop - block.start == longest for block in cut[:-1])


@cases("shape", (), (7,), (3, 5))
@cases("dtype", np.float32, np.float64)
def test_memory_of_is_aligned(shape: tuple[int, ...], dtype: type) -> None:
    array = memory_of(*shape, dtype=np.dtype(dtype))
    assert (array.shape, array.dtype) == (shape, np.dtype(dtype))
    assert array.ctypes.data % ALIGNMENT == 0
    array[...] = 1
    assert memory_of(0, 3, dtype=np.dtype(dtype)).shape == (0, 3)
