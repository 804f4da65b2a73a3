"""Checks of values by kernels on a device, without a wait after each kernel.

A kernel that rejects a value stores the value and its position in a flag in the device's memory.
The host reads all flags when it next waits. It then calls the reference kernel on an operand of
zeros with this value, which raises the error. The error contains the op, the types and the location
of the launch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import numpy as np

from mlvm.core.errors import MlvmError, OperandValueError, OpError, Place, line_of, user_place
from mlvm.core.observe import explaining
from mlvm.core.op import Attributes, Op
from mlvm.core.ops import half
from mlvm.core.types import Array, TensorType

_WORDS: Final = 3
"""64-bit words of a flag: whether a value was rejected, the position, and the value."""

_MOST: Final = 1 << 14
"""Maximum number of launched calls with unread flags."""


class Crossings(Protocol):
    """Protocol of the device's memory: the methods that flags use."""

    def zeros(self, nbytes: int) -> Any: ...
    def write(self, array: Any, values: Any) -> None: ...


class Note:
    """Record of a call that may reject values.

    judges: number of the first operand that is checked; the following operands of the same size are
        also checked, with consecutive positions.
    slot: number of the flag.

    `explained` adds the location in the program, and the line of Python that launched it.
    """

    def __init__(
        self, op: Op, attributes: Attributes, types: Sequence[TensorType], judges: int, slot: int
    ) -> None:
        self.op, self.attributes, self.types = op, attributes, types
        self.judges, self.slot = judges, slot
        self.place: Place | None = None
        self.launch, self.thread = 0, threading.current_thread()
        self.adds: Callable[[Exception], object] | None = None
        self.explained: Callable[[MlvmError, str | None], Exception] | None = None

    def error(self, place: int, value: np.int64) -> Exception:
        """Return the reference kernel's error for an operand with the value at the position.

        At position -1, `value` is the number of elements that are True.
        """
        arrays = [np.zeros(x.shape, x.dtype.numpy) for x in self.types]
        number, size = self.judges, arrays[self.judges].size
        if place >= size > 0:
            number, place = number + place // size, place % size
        dtype, judged = self.types[number].dtype, arrays[number].reshape(-1)
        if place < 0:
            judged[: int(value)] = True
        else:
            bits = np.asarray([value]).view(np.float64 if dtype.is_float else np.int64)
            judged[place] = half.cast(bits, dtype)[0]
        error: OpError = OperandValueError("a value was rejected")
        try:
            with np.errstate(all="ignore"):
                half.suited(self.op, self.op.kernel, arrays)(*arrays, **self.attributes)
        except OpError as found:
            error = found
        error.at(self.op.name, self.types[1:])
        line = None if self.place is None else line_of(self.place)
        if self.explained is not None:
            self.explained(error, line)
        else:
            error.add_note(f"called from {line}")
        if self.adds is not None:
            self.adds(error)
        error.late = True
        return error


class Refusals:
    """Flags of a device, and the calls with unread flags."""

    def __init__(self, memory: Crossings) -> None:
        self._memory = memory
        self._all: Any = None
        self._free: list[int] = []
        self._used = 0
        self._noted: dict[Note, None] = {}
        self._due: list[tuple[Note, Array, bool]] = []  # the bool: the error was already raised
        self._launch = 0
        self._adds: Callable[[Exception], object] | None = None

    @property
    def flags(self) -> list[Any]:
        """Return the flags to read; empty if no recorded call is pending."""
        return [self._all[: self._used * _WORDS]] if self._noted else []

    def begin(self) -> None:
        """Handle the start of a launch."""
        self._launch += 1
        self._adds = explaining.get()  # saved here, because the machine runs in a different context

    def take(self) -> tuple[int, Any]:
        """Return the number and the memory of a flag for a call."""
        if self._all is None:
            self._all = self._memory.zeros(8 * _WORDS * _MOST).view(np.int64)
        if self._free:
            slot = self._free.pop()
        else:
            slot, self._used = self._used, self._used + 1
            if slot >= _MOST:
                raise MlvmError(
                    f"expected at most {_MOST} prepared calls that check values, "
                    "got more; launch fewer prepared calls"
                )
        return slot, self._all[slot * _WORDS : (slot + 1) * _WORDS]

    def give_back(self, slot: int) -> None:
        self._free.append(slot)

    def note(self, note: Note) -> None:
        """Record that the call was launched."""
        note.place, note.thread = user_place(), threading.current_thread()
        note.launch, note.adds = self._launch, self._adds
        self._noted[note] = None

    def settle(self, flags: Sequence[Array]) -> None:
        """Raise the error of a flag that was read.

        A launch has one error, the error of the first call that rejected a value. It is raised in
        the launching thread, or in the thread that waits first.
        """
        if flags:
            noted, self._noted = list(self._noted), {}
            flag_words = flags[0].reshape(-1, _WORDS)
            refused = [note for note in noted if flag_words[note.slot, 0]]
            if refused:
                self._memory.write(self._all, np.zeros(_WORDS * _MOST, np.int64))
            first = {note.launch: note for note in reversed(refused)}
            self._due += [
                (note, flag_words[note.slot], False)
                for note in refused
                if first[note.launch] is note
            ]
        me = threading.current_thread()
        self._due = [each for each in self._due if not each[2] or each[0].thread.is_alive()]
        for i, (note, words, is_told) in enumerate(self._due):
            if not is_told or note.thread is me:
                self._due[i : i + 1] = [] if note.thread is me else [(note, words, True)]
                raise note.error(int(words[1]), words[2])
