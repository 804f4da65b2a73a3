"""Exceptions that cross to another process."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple


class Failure(NamedTuple):
    """Exception in transit between processes: its pickle if it has one, text, traceback.

    Only the receiver, by unpickling, finds out whether the pickle is an exception.
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
        """Rebuild the exception, with a note that contains its traceback and `where` it was raised.

        `instead(text)` makes the exception where the original has no pickle, or would end a
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
