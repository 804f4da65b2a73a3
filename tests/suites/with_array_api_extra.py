"""Plugin of pytest that runs array-api-extra's tests on mlvm."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest

import mlvm.eager as ml

backends: Any = import_module("array_api_extra._lib._backends").Backend
backend = object.__new__(backends)
backend._name_, backend._value_ = "MLVM", "mlvm.eager"
backends._member_map_["MLVM"] = backends._value2member_map_["mlvm.eager"] = backend
backends._member_names_.append("MLVM")  # the enumeration's tests are made from its members


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    """Compute in f64, as with NumPy: the tests have its largest number."""
    with ml.default_dtype(ml.float64):
        yield
