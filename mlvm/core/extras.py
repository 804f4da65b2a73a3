"""Optional packages, imported where they are used."""

from __future__ import annotations

import importlib
from typing import Any

from mlvm.core.errors import MissingExtra


def extra(module: str, name: str) -> Any:
    """The module, which `pip install "mlvm[name]"` brings. Raises `MissingExtra` without it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise  # the package is there, but something it needs is not
        raise MissingExtra(f'{module} is not installed: pip install "mlvm[{name}]"') from None
