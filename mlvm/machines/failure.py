"""Failures of a different process: exceptions that are sent, and signals."""

from __future__ import annotations

import pickle
import signal
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple


def killed_by(status: int) -> str:
    """Describe the end of a process by a signal, given its status, which is negative."""
    with suppress(ValueError):  # a signal without a name, such as SIGRTMIN + 1
        return f"was killed by {signal.Signals(-status).name}"
    return f"was killed by signal {-status}"


class Failure(NamedTuple):
    """Exception in transit between processes: a pickle if possible, text, traceback.

    Only unpickling in the receiver shows whether the pickle is an exception.
    """

    pickled: bytes | None
    text: str
    traceback: str

    @staticmethod
    def of(error: BaseException) -> Failure:
        try:
            pickled = pickle.dumps(error)
        except Exception:  # errors of a user-defined __reduce__
            pickled = None
        described = traceback.TracebackException.from_exception(error)
        described.__notes__ = None  # the traceback already contains the notes
        [*_, text] = described.format_exception_only()
        return Failure(pickled, text.strip(), "".join(traceback.format_exception(error)))

    def error(self, where: str, instead: Callable[[str], Exception]) -> Exception:
        """Rebuild the exception, with a note that contains the traceback and `where` it was raised.

        `instead(text)` creates a substitute if the original cannot be pickled, or would end a
        thread."""
        note = f"in {where}:\n{self.traceback}"
        if self.pickled is not None:
            # for example SystemExit, which would stop the thread silently
            with suppress(BaseException):
                error = pickle.loads(self.pickled)
                if isinstance(error, Exception):
                    error.add_note(note)
                    return error
        replacement = instead(self.text)
        replacement.add_note(note)
        return replacement
