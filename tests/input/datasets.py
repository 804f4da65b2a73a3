"""A data set that tells which samples of it were read. Worker processes can import it."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlvm.input.sampling import Indices, SampleRandom


class Numbers:
    """Sample i is the number i, as f32[2] and as i64. Its `length` may be an impossible one."""

    def __init__(self, length: Any = 23) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, indices: Indices) -> Any:
        return np.repeat(indices[:, None], 2, 1).astype(np.float32), indices


def noisy(arrays: Any, random: SampleRandom) -> Any:
    numbers, indices = arrays
    return numbers + random.normal((2,)), indices
