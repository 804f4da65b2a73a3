"""Outcomes of tasks, which are sent to other processes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from traceback import format_exception
from typing import Any, Final, NamedTuple, Protocol

from mlvm.core.errors import GroupError
from mlvm.parallel.communicator import brief_error

_TEXT: Final = "_mlvm_text"
"""Attribute of an exception: the line to print, or None to print the traceback immediately."""


class AnyFailure(Protocol):
    """Exception that was sent by another process, with or without a pickle."""

    def error(self, where: str, instead: Callable[[str], Exception]) -> Exception: ...


class Outcome(NamedTuple):
    """Result or error of a task.

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
            del error  # because the traceback refers to this frame
    return [outcomes[rank].value for rank in range(len(names))]


def print_once(error: BaseException, here: str, printer: str) -> None:
    """Print the traceback of an error that all members raise in one of their processes.

    The other processes print one line if nothing catches the error. `here` is the name of this
    member, `printer` the name of the member that prints the traceback. Each process writes the text
    with one call, because a launcher such as mpirun mixes the output of the processes.
    """
    [line, *_] = brief_error(error).splitlines()
    is_other = here != printer
    text = f"{here}: {line}; see the traceback of {printer}\n" if is_other else None
    error.__dict__[_TEXT] = text
    if getattr(sys.excepthook, "func", None) is not _print:
        sys.excepthook = partial(_print, sys.excepthook)


def _print(before: Callable[..., object], kind: Any, error: Any, traceback: Any) -> None:
    text = error.__dict__.get(_TEXT)
    if text is None and (before is not sys.__excepthook__ or _TEXT not in error.__dict__):
        before(kind, error, traceback)
    else:
        sys.stderr.write(text or "".join(format_exception(error)))
