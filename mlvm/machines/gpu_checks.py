"""Values that kernels on a device refuse, without waiting for the device at each.

A kernel that checks values (indices, labels, counts) calls `check` with a few integers that lie on
the device. Outside of `noting` they are read at once: the host waits, and an error is raised before
the kernel writes. Within it they are noted, and the kernel runs on, with indices that wrap around
and without changing what it works on in place. Whoever launches reads all notes together, by
`settle`, with one transfer to the host; a note of a recorded launch can be read again after each
replay.

    with noting() as notes:
        launch()
    settle(notes)

The error is the reference kernel's own, made from the operand that was judged: a copy of it, where
the kernel runs on and others may write to it before the note is read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from mlvm.core.errors import OperandValueError, OpError
from mlvm.core.op import Op
from mlvm.core.types import TensorType


class Note(NamedTuple):
    """A check of one call of `op`: integers on the device, i64[n], whether they are refused, and
    the operand that they were made of."""

    op: Op
    values: Any
    refuses: Callable[[Sequence[int]], bool]
    operands: tuple[Any, ...]
    judged: Any
    attributes: Mapping[str, Any]

    def kept(self) -> Note:
        """The note with a copy of what it judges."""
        copy = self.judged.copy()
        operands = [copy if x is self.judged else x for x in self.operands]
        return self._replace(operands=tuple(operands), judged=copy)

    def error(self) -> OpError:
        """What the reference kernel says to the operand; it asks for no other before that."""
        types = [TensorType.of(x) for x in self.operands]
        arrays = [
            x.get() if x is self.judged else np.zeros(x.shape, x.dtype) for x in self.operands
        ]
        type = self.op.infer(types, self.attributes)
        out = [] if type is None else [np.empty(type.shape, type.dtype.numpy)]
        try:
            with np.errstate(all="ignore"):
                self.op.kernel(*out, *arrays, **self.attributes)
        except OpError as error:
            return error.at(self.op.name, types)
        refused = OperandValueError("a value was refused that the processor takes")
        return refused.at(self.op.name, types)


class _Noted(threading.local):
    notes: list[Note] | None = None


_noted = _Noted()


@contextmanager
def noting() -> Iterator[list[Note]]:
    """While it lasts, checks of this thread are added to the list, which nobody waits for."""
    before, _noted.notes = _noted.notes, []
    try:
        yield _noted.notes
    finally:
        _noted.notes = before


def settle(notes: Sequence[Note]) -> None:
    """Read what was noted, with one transfer. Raises the error of the first that is refused."""
    if not notes:
        return
    values = [note.values for note in notes]
    together: Any = np.concatenate(values) if len(values) > 1 else values[0]
    found = together.get().tolist()
    for note in notes:
        given, found = found[: len(note.values)], found[len(note.values) :]
        if note.refuses(given):
            raise note.error()


def check(note: Note) -> bool:
    """Note it where notes are taken: then True. Else read it. Raises the error if it refuses."""
    if _noted.notes is not None:
        _noted.notes.append(note.kept())
        return True
    settle([note])
    return False
