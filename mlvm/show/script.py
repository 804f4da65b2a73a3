"""Runs of Python scripts under observation."""

from __future__ import annotations

import errno
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from mlvm.core.errors import MlvmError
from mlvm.machines.terminal import INTERRUPTED, is_reader_gone


class ScriptFailed(MlvmError):
    """A script has raised an error. The text contains the error and the line.

    output: text that Python prints, such as the traceback.
    status: exit status.
    """

    def __init__(self, text: str, output: str, status: int) -> None:
        super().__init__(text)
        self.output = output
        self.status = status


def run_script(file: Path, arguments: Sequence[str] = ()) -> None:
    """Run a Python script with arguments, as `python FILE ...` does.

    Afterwards the current directory is restored. Raises `ScriptFailed`.
    """
    before, path, directory = sys.argv, sys.path, Path.cwd()
    sys.argv, sys.path = [os.fspath(file), *arguments], [os.fspath(file.parent), *path]
    try:
        runpy.run_path(os.fspath(file), run_name="__main__")
    except SystemExit as end:
        if end.code:
            output, status = ("", end.code) if isinstance(end.code, int) else (f"{end.code}\n", 1)
            raise ScriptFailed(f"{file}: it exited with {end.code!r}", output, status) from None
    except KeyboardInterrupt as error:
        output = _traceback(file, error)
        raise ScriptFailed(f"{file}: the script was interrupted", output, INTERRUPTED) from error
    except Exception as error:
        if is_reader_gone(error) or getattr(error, "errno", None) == errno.ENOSPC:
            raise
        raise ScriptFailed(_what_happened(file, error), _traceback(file, error), 1) from error
    finally:
        sys.argv, sys.path = before, path
        with suppress(OSError):  # the directory may have been removed
            os.chdir(directory)


def _in_script(file: Path, error: BaseException) -> TracebackType | None:
    """Return the traceback from the first frame of the script on."""
    place = error.__traceback__
    while place is not None and place.tb_frame.f_code.co_filename != os.fspath(file):
        place = place.tb_next
    return place


def _traceback(file: Path, error: BaseException) -> str:
    """Return the traceback that `python FILE` prints."""
    shown = traceback.TracebackException(type(error), error, _in_script(file, error))
    return "".join(shown.format())


def _what_happened(file: Path, error: Exception) -> str:
    """Return the error, and the innermost line of the script that led to it."""
    line = error.lineno if isinstance(error, SyntaxError) else None
    place = _in_script(file, error)
    while place is not None:
        if place.tb_frame.f_code.co_filename == os.fspath(file):
            line = place.tb_lineno
        place = place.tb_next
    where = f"line {line}: " if line is not None else ""
    return f"{file}: {where}{error.__class__.__name__}: {error}"
