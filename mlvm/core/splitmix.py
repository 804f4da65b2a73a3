"""SplitMix64: a bijection of 64-bit words, and the generator that applies it to a counter."""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Words: TypeAlias = NDArray[np.uint64]

GOLDEN: Final = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio, odd


def mixed(words: Words) -> Words:
    """Apply the bijection. Every bit of a result depends on all bits of the word."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def generated(count: int) -> Words:
    """Return the first numbers of the generator with seed 0."""
    return mixed(np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GOLDEN))
