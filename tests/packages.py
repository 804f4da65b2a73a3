"""Commands of the tests name the package that they lack, and how to install it."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@contextmanager
def named_if_missing() -> Iterator[None]:
    """Exit with the command that installs a package which the block fails to import, if the process
    runs a command of the tests, such as `python -m tests.fuzz`."""
    try:
        yield
    except ModuleNotFoundError as error:
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        if spec is None or not spec.name.startswith("tests.") or error.name is None:
            raise
        command, package = spec.name.removesuffix(".__main__"), error.name.partition(".")[0]
        if (ROOT / package).exists():
            raise
        sys.exit(f"python -m {command} needs {package}, which is not installed; {remedy(package)}")


def remedy(package: str) -> str:
    """Return the command that installs a package."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    tests = extras["project"]["optional-dependencies"]["test"]
    is_extra = any(each.startswith(package) for each in tests)
    what = '-e ".[test]"' if is_extra else package
    return f"run: pip install {what}"
