"""Trees of tensors, arrays and numbers beside each other."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

import mlvm.eager as ml
from mlvm.core.errors import MlvmError
from mlvm.core.types import Array
from mlvm.eager.tensor.reading import values_of


def arrays(tree: Any) -> list[Array]:
    return [np.asarray(x) for x in ml.tree.leaves(tree)]


def bits(tree: Any) -> list[tuple[str, tuple[int, ...], bytes]]:
    """All that the leaves hold, in a form that compares: one nan is another, 0.0 is not -0.0."""
    return [(x.dtype.str, x.shape, x.tobytes()) for x in arrays(tree)]


def assert_close(actual: Any, expected: Any, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Check that there are as many leaves, each near the other."""
    for x, y in zip(arrays(actual), arrays(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol, atol)


def outcome(call: Callable[[], Any]) -> Any:
    """Return what a call results in or raises, and its warnings, in a form that compares."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        try:
            result = _words(call())
        except (MlvmError, TypeError, ValueError, IndexError) as error:
            result = type(error), str(error)
    return result, [(each.category, str(each.message)) for each in caught]


def _words(x: Any) -> Any:
    if isinstance(x, (tuple, list)):
        return type(x), [_words(each) for each in x]
    if isinstance(x, ml.Tensor):
        return str(x.type), values_of(x).tobytes()
    return type(x), repr(x)
