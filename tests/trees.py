"""Trees of tensors, arrays and numbers beside each other."""

from __future__ import annotations

from typing import Any

import numpy as np

import mlvm.eager as ml
from mlvm.core.types import Array


def arrays(tree: Any) -> list[Array]:
    return [np.asarray(x) for x in ml.tree.leaves(tree)]


def bits(tree: Any) -> list[tuple[str, tuple[int, ...], bytes]]:
    """All that the leaves hold, in a form that compares: one nan is another, 0.0 is not -0.0."""
    return [(x.dtype.str, x.shape, x.tobytes()) for x in arrays(tree)]


def assert_close(actual: Any, expected: Any, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Check that there are as many leaves, each near the other."""
    for x, y in zip(arrays(actual), arrays(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol, atol)
