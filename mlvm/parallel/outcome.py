"""Outcomes of tasks, which are sent to other processes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

from mlvm.core.errors import GroupError
from mlvm.parallel.communicator import brief_error

_LINE: Final = "_mlvm_line"
"""Attribute of an exception: the line to print instead of its traceback."""


class AnyFailure(Protocol):
    """Exception that was sent by another process, with or without a pickle."""

    def error(self, where: str, instead: Callable[[str], Exception]) -> Exception: ...


class Outcome(NamedTuple):
    """Result of a task, or its error.

    `first` is True if the error was not caused by the error of another member.
    """

    value: Any
    failure: AnyFailure | None = None
    first: bool = False


def results_of(outcomes: Mapping[int, Outcome], names: Sequence[str]) -> list[Any]:
    """Return the results in order of rank. Raises the first error of a member."""
    failed = [rank for rank, outcome in outcomes.items() if outcome.failure is not None]
    failed.sort(key=lambda rank: not outcomes[rank].first)
    for rank in failed:
        failure = outcomes[rank].failure
        assert failure is not None
        error = failure.error(names[rank], GroupError)
        error.add_note(f"raised by {names[rank]} of a group of {len(names)}")
        try:
            raise error
        finally:
            del error  # because its traceback refers to this frame
    return [outcomes[rank].value for rank in range(len(names))]


def shorten(error: BaseException, here: str, printer: str) -> None:
    """Print one line instead of a traceback if nothing in this process catches the error.

    All members of a group raise the error. `here` is the name of this member, `printer` the name of
    the member that prints the traceback.
    """
    [line, *_] = brief_error(error).splitlines()
    error.__dict__[_LINE] = f"{here}: {line}; see the traceback of {printer}\n"
    if getattr(sys.excepthook, "func", None) is not _print_line:
        sys.excepthook = partial(_print_line, sys.excepthook)


def _print_line(before: Callable[..., object], kind: Any, error: Any, traceback: Any) -> None:
    line = error.__dict__.get(_LINE)
    if line is None:
        before(kind, error, traceback)
    else:
        sys.stderr.write(line)
