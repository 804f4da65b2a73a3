"""Optional packages, which are imported when they are first used."""

from __future__ import annotations

import importlib
from typing import Any

from mlvm.core.errors import MissingExtraError


def extra(module: str, name: str) -> Any:
    """Import and return a module that `pip install "mlvm[name]"` installs.

    Raises `MissingExtraError` if the package is missing or incomplete.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]:
            raise MissingExtraError(
                f'{module} is not installed: pip install "mlvm[{name}]"'
            ) from None
        why = " ".join(str(error.__cause__ or error).split())
        raise MissingExtraError(f"{module} is installed, but cannot be imported: {why}") from error
