"""Standard streams and exit statuses of commands: the same for every `python -m` of the project."""

from __future__ import annotations

import argparse
import io
import os
import select
import sys
from collections.abc import Callable
from typing import Any

from mlvm.core.errors import ArgumentError, MlvmError, brief, notes_of
from mlvm.core.sizes import parse_size

INTERRUPTED = 130
"""Exit status after Ctrl-C."""


def whole_number(text: str) -> int:
    """Read a whole number above 0, such as 3, 64M or "64 MiB", for `add_argument`."""
    try:
        return parse_size(text, "")
    except ArgumentError:
        raise argparse.ArgumentTypeError(
            f"expected a whole number from 1 to 2**63 - 1, got {brief(text)}; the units are "
            f"K, M, G, T, KiB ... TiB and kB ... TB, as in 4G"
        ) from None


def run_command(work: Callable[[], int | None], program: str = "") -> int:
    """Run a command and return the exit status: 0, 1 for an error, 130 after Ctrl-C.

    The result of `work`, or the `status` of an error, replaces these values. An error is one line
    on stderr. Characters that stdout cannot encode are escaped. If the reader of stdout closes the
    pipe, as `head` does, the command exits with status 0. Output to a closed stream is discarded.
    """
    open_streams()
    status, leaving = 0, None
    try:
        status = work() or 0
    except SystemExit as exit:  # raised by --help, or for invalid usage
        leaving = exit
    except (MlvmError, OSError, MemoryError) as error:
        if not is_reader_gone(error):
            say(f"{program}error: {one_line(error)}")
            status = getattr(error, "status", 1)
    except KeyboardInterrupt:
        say(f"{program}interrupted")
        status = INTERRUPTED
    failed = _flushed()
    if failed is not None:  # discard the rest, or the flush at exit fails as well
        _discard(sys.stdout.fileno())
        if not isinstance(failed, BrokenPipeError):
            say(f"{program}error: {one_line(failed)}")
            return status or 1
    if leaving is not None:
        raise leaving
    return status


def is_reader_gone(error: Exception) -> bool:
    """Return whether the error means that the reader of stdout has closed the pipe."""
    if not isinstance(error, BrokenPipeError):
        return False
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
    except (AttributeError, OSError, ValueError):  # Windows has no `poll`
        return True
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def open_streams() -> None:
    """Escape characters that stdout cannot encode, and open closed streams as null devices."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        stream: Any = getattr(sys, name)
        if stream is None:
            try:
                os.fstat(number)
            except OSError:  # otherwise the next opened file would get the number of a stream
                _discard(number)
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _discard(number: int) -> None:
    """Make the null device the file of a descriptor."""
    null = os.open(os.devnull, os.O_RDWR)
    if null != number:
        os.dup2(null, number)
        os.close(null)


def _flushed() -> OSError | None:
    """Flush stdout, and return the error if that fails."""
    try:
        sys.stdout.flush()
    except OSError as error:
        return error
    return None


def say(line: str) -> None:
    """Write a line to stderr. Characters that a terminal might interpret are escaped."""
    print(escaped(line), file=sys.stderr, flush=True)


def escaped(text: str) -> str:
    """Escape characters that a terminal might interpret, such as a newline as `\\n`."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def one_line(error: Exception) -> str:
    """Return the text and the notes of an error as one line."""
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{os.fspath(error.filename)}: {error.strerror}"
    else:
        text = str(error) or "out of memory"
    return " ".join("; ".join([text, *notes_of(error)]).splitlines())
