"""Plugin of pytest that runs SciPy's array API tests, those with the fixture `xp`, on mlvm."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest

import mlvm.eager as ml

_OTHERS = dict.fromkeys(("array_api_strict", "torch", "jax", "cupy", "dask"))

with patch.dict(sys.modules, _OTHERS):  # which SciPy would import and test, too
    conftest: Any = import_module("scipy.conftest")
conftest.xp_known_backends.add("mlvm.eager")  # which tests of numpy alone skip
backend = pytest.param(ml, id="mlvm", marks=pytest.mark.array_api_backends)
conftest.xp = pytest.fixture(params=[backend])(conftest.xp._get_wrapped_function())


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    """Compute in f64, as SciPy has PyTorch and JAX do."""
    with ml.default_dtype(ml.float64):
        yield
