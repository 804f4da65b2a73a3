"""An exception on its way to another process."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple


class Failure(NamedTuple):
    """What a process tells another of an exception: its pickle if it has one, text, traceback.

    The receiver unpickles it, and only there can tell whether an exception comes out.
    """

    pickled: bytes | None
    text: str
    traceback: str

    @staticmethod
    def of(error: BaseException) -> Failure:
        try:
            pickled = pickle.dumps(error)
        except Exception:  # of somebody's own __reduce__
            pickled = None
        [*_, text] = traceback.format_exception_only(error)
        return Failure(pickled, text.strip(), "".join(traceback.format_exception(error)))

    def error(self, where: str, instead: Callable[[str], Exception]) -> Exception:
        """The exception with its traceback as a note, and `where` that was. One that has no pickle,
        or that would end a thread, is told of by an exception that `instead` makes of its text."""
        note = f"in {where}:\n{self.traceback}"
        if self.pickled is not None:
            with suppress(BaseException):  # SystemExit, say, which would end the thread unseen
                error = pickle.loads(self.pickled)
                if isinstance(error, Exception):
                    error.add_note(note)
                    return error
        told = instead(self.text)
        told.add_note(note)
        return told
