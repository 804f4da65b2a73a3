"""Plugin of pytest that runs scikit-learn's array API tests on mlvm."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tests.suites.names import double_precision as double_precision

array_api: Any = import_module("sklearn.utils._array_api")


def combinations(**_: object) -> list[tuple[str, None, str]]:
    """Return namespaces, devices and dtypes for tests, as the function that it replaces does."""
    return [("mlvm.eager", None, "float64"), ("mlvm.eager", None, "float32")]


def namespaces(**_: object) -> list[str]:
    return ["mlvm.eager"]


array_api.yield_namespace_device_dtype_combinations = combinations
array_api.yield_namespaces = namespaces
