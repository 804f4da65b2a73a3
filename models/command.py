"""Runner of the commands: an error is one line on the terminal, and an exit status."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import mlvm.eager as ml
from mlvm.machines.terminal import escaped, run_command


class OptionError(ml.errors.MlvmError, ValueError):
    """An option of a command, or of its function, is unknown or out of range."""


def run(
    parser: argparse.ArgumentParser,
    work: Callable[[argparse.Namespace], int | None],
    arguments: Sequence[str] | None = None,
) -> int:
    """Do the work with the options parsed; return the exit status of `run_command`.

    For bad usage, including `OptionError`, the program exits with status 2.
    """

    def parsed() -> int | None:
        options = parser.parse_args(arguments)
        try:
            return work(options)
        except OptionError as error:
            parser.error(escaped(str(error)))

    return run_command(parsed, f"{parser.prog}: ")
