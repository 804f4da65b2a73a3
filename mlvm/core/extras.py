"""Optional packages, imported where they are used."""

from __future__ import annotations

import importlib
from typing import Any

from mlvm.core.errors import MissingExtra


def extra(module: str, name: str) -> Any:
    """The module, which `pip install "mlvm[name]"` brings. Raises `MissingExtra` without it, and
    where it is there but lacks something that it needs."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]:
            raise MissingExtra(f'{module} is not installed: pip install "mlvm[{name}]"') from None
        why = " ".join(str(error.__cause__ or error).split())
        raise MissingExtra(f"{module} is installed, but cannot be imported: {why}") from error
