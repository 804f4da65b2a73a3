"""Run the commands; an error is printed as one line and sets the exit status."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import mlvm.eager as ml
from mlvm.machines.terminal import escaped, run_command


class OptionError(ml.errors.MlvmError, ValueError):
    """Error for an option of a command or function that is unknown or out of range."""


def run(
    parser: argparse.ArgumentParser,
    work: Callable[[argparse.Namespace], int | None],
    arguments: Sequence[str] | None = None,
) -> int:
    """Parse the options, run the command, and return the exit status of `run_command`.

    For bad usage, including `OptionError`, the program exits with status 2.
    """

    def parsed() -> int | None:
        options = parser.parse_args(arguments)
        try:
            return work(options)
        except OptionError as error:
            parser.error(escaped(str(error)))

    return run_command(parsed, f"{parser.prog}: ")
