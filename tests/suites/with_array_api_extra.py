"""Plugin of pytest that runs array-api-extra's tests on mlvm."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tests.suites.names import double_precision as double_precision

backends: Any = import_module("array_api_extra._lib._backends").Backend
backend = object.__new__(backends)
backend._name_, backend._value_ = "MLVM", "mlvm.eager"
backends._member_map_["MLVM"] = backends._value2member_map_["mlvm.eager"] = backend
backends._member_names_.append("MLVM")  # the enumeration's tests are made from its members
