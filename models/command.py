"""Runner of the commands: an error is one line on the terminal, and an exit status."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import mlvm.eager as ml
from mlvm.eager.files.safetensors import escaped


class OptionError(ml.errors.MlvmError, ValueError):
    """An option of a command, or of the function that does its work, is unknown or out of range."""


def run(
    parser: argparse.ArgumentParser,
    work: Callable[[argparse.Namespace], None],
    arguments: Sequence[str] | None = None,
) -> int:
    """Do the work with the options parsed; the exit status is 0, 1 for an error, 130 for an
    interrupt. Bad usage, `OptionError` included, ends the program with 2."""
    options = parser.parse_args(arguments)
    try:
        work(options)
    except OptionError as error:
        parser.error(escaped(str(error)))
    except (ml.errors.MlvmError, OSError) as error:
        say(f"{parser.prog}: error: {error}")
        return 1
    except KeyboardInterrupt:
        say(f"{parser.prog}: interrupted")
        return 130
    return 0


def say(line: str) -> None:
    """Write a line beside the output, on stderr; what might be a command to a terminal, escaped."""
    print(escaped(line), file=sys.stderr, flush=True)


def require_writable(file: Path) -> None:
    """Raise `OSError` unless the file can be written; what it holds, if anything, is kept."""
    is_new = not file.exists()
    with file.open("a"):
        pass
    if is_new:
        file.unlink()
