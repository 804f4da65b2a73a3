"""One example of an op: what goes in, and what must come out by an independent computation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mlvm.core.types import Array


@dataclass(frozen=True)
class Case:
    """`expected(*inputs, **attributes)` is plain numpy and knows nothing of the kernel."""

    inputs: tuple[Array, ...]
    expected: Callable[..., Any]
    attributes: dict[str, Any] = field(default_factory=dict)


class Draws:
    """Random operands: one sequence of draws for each seed."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def f64(self, *shape: int) -> Array:
        return np.asarray(self.rng.standard_normal(shape))

    def f32(self, *shape: int) -> Array:
        return self.f64(*shape).astype(np.float32)

    def c128(self, *shape: int) -> Array:
        return np.asarray(self.f64(*shape) + 1j * self.f64(*shape))

    def distinct(self, *shape: int) -> Array:
        """Return values at least 0.1 apart and away from zero: no ties and no kinks nearby."""
        n = int(np.prod(shape))
        return (self.rng.permutation(n) - n / 2 + 0.25).reshape(shape) * 0.1
