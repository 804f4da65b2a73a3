"""Plugin of pytest that runs scikit-learn's array API tests on mlvm."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest

import mlvm.eager as ml

array_api: Any = import_module("sklearn.utils._array_api")


def combinations(**_: object) -> list[tuple[str, None, str]]:
    """Return namespaces, devices and dtypes for tests, as the function that it replaces does."""
    return [("mlvm.eager", None, "float64"), ("mlvm.eager", None, "float32")]


def namespaces(**_: object) -> list[str]:
    return ["mlvm.eager"]


array_api.yield_namespace_device_dtype_combinations = combinations
array_api.yield_namespaces = namespaces


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    """Compute in f64 where scikit-learn names no dtype."""
    with ml.default_dtype(ml.float64):
        yield
