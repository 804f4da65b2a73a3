"""Scripts that are run to be looked at."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from mlvm.core.errors import MlvmError


class ScriptFailed(MlvmError):
    """A script ended with an error; the text says which, and on what line."""


def run_script(file: Path, arguments: Sequence[str] = ()) -> None:
    """Run a Python script with its arguments, as `python FILE ...` does. Raises `ScriptFailed`."""
    before, path = sys.argv, sys.path
    sys.argv, sys.path = [os.fspath(file), *arguments], [os.fspath(file.parent), *path]
    try:
        runpy.run_path(os.fspath(file), run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise ScriptFailed(f"{file}: it ended with {end.code!r}") from None
    except Exception as error:
        raise ScriptFailed(_what_happened(file, error)) from error
    finally:
        sys.argv, sys.path = before, path


def _what_happened(file: Path, error: Exception) -> str:
    """The error, and the innermost line of the script that led to it."""
    line = error.lineno if isinstance(error, SyntaxError) else None
    place = error.__traceback__
    while place is not None:
        if place.tb_frame.f_code.co_filename == os.fspath(file):
            line = place.tb_lineno
        place = place.tb_next
    where = f"line {line}: " if line is not None else ""
    return f"{file}: {where}{error.__class__.__name__}: {error}"
