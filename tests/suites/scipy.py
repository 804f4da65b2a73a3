"""Plugin of pytest that runs SciPy's array API tests, those of its fixture `xp`, with mlvm."""

from __future__ import annotations

import sys
from typing import Any

import pytest

import mlvm.eager as ml

for name in ("torch", "jax", "cupy", "dask"):  # SciPy would import them, too
    sys.modules.setdefault(name, None)  # type: ignore[arg-type]
conftest: Any = __import__("scipy.conftest", fromlist=["xp"])
for name in ("torch", "jax", "cupy", "dask"):
    if sys.modules[name] is None:
        del sys.modules[name]

_backend = pytest.param(ml, id="mlvm", marks=pytest.mark.array_api_backends)
conftest.xp = pytest.fixture(params=[_backend])(conftest.xp._get_wrapped_function())


@pytest.fixture(autouse=True)
def _double_precision() -> Any:
    with ml.default_dtype(ml.float64):
        yield
