"""Plugin of pytest that runs SciPy's array API tests, those with the fixture `xp`, on mlvm."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import pytest

import mlvm.eager as ml
from tests.suites.names import double_precision as double_precision

OTHERS = ("array_api_strict", "torch", "jax", "cupy", "dask")

modules: dict[str, Any] = {name: sys.modules.get(name) for name in OTHERS}
sys.modules.update(dict.fromkeys(OTHERS))  # type: ignore[arg-type]  # SciPy would import and test them
conftest: Any = import_module("scipy.conftest")
for name in OTHERS:
    del sys.modules[name]
sys.modules.update({name: module for name, module in modules.items() if module is not None})
conftest.xp_known_backends.add("mlvm.eager")  # which tests of numpy alone skip
backend = pytest.param(ml, id="mlvm", marks=pytest.mark.array_api_backends)
conftest.xp = pytest.fixture(params=[backend])(conftest.xp._get_wrapped_function())
