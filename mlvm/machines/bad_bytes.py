"""Bytes that a failed task should have written.

Reading them raises the error of the task until they are written again.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mlvm.core.errors import MlvmError
from mlvm.core.machine.callee import UserFunction, Value, WritesInto, is_tensor
from mlvm.core.machine.functions import Binding
from mlvm.core.op import Attributes
from mlvm.core.types import Array, root


class ByteRange(NamedTuple):
    """Range of bytes, from address `start` up to `end`, in the memory of that id."""

    start: int
    end: int
    memory: int

    @staticmethod
    def of(array: Array) -> ByteRange:
        start = array.__array_interface__["data"][0]
        return ByteRange(start, start + array.nbytes, id(root(array)))

    def meets(self, other: ByteRange) -> bool:
        return self.start < other.end and other.start < self.end

    def without(self, other: ByteRange) -> list[ByteRange]:
        """Return the parts of this span outside of the other."""
        left = self._replace(end=min(self.end, other.start))
        right = self._replace(start=max(self.start, other.end))
        return [span for span in (left, right) if span.start < span.end]


class _Memory:
    """Bad spans of a memory block, until the memory is freed."""

    def __init__(self, memory: weakref.ref[Array]) -> None:
        self.memory = memory
        self.bad: list[tuple[ByteRange, BaseException]] = []


class BadBytes:
    """Bad spans of all memories, each with an error. Only one thread at a time may use it."""

    def __init__(self) -> None:
        self._memories: dict[int, _Memory] = {}

    def add(self, span: ByteRange, error: BaseException, memory: weakref.ref[Array]) -> None:
        """Mark these bytes as bad."""
        self.heal(span)
        if span.start == span.end:
            return
        of = self._memories.get(span.memory)
        if of is None or of.memory() is None:
            of = self._memories[span.memory] = _Memory(memory)
        of.bad.append((span, error))
        # Maximum number of spans per memory; beyond it, all spans are merged into one.
        if len(of.bad) > 64:
            start, end = min(x.start for x, _ in of.bad), max(x.end for x, _ in of.bad)
            of.bad = [(ByteRange(start, end, span.memory), of.bad[0][1])]

    def heal(self, written: ByteRange) -> None:
        """Unmark bytes that are written again."""
        of = self._memories.get(written.memory)
        if of is None:
            return
        of.bad = [(rest, error) for span, error in of.bad for rest in span.without(written)]
        if not of.bad or of.memory() is None:
            del self._memories[written.memory]

    def error(self, spans: Iterable[ByteRange]) -> BaseException | None:
        """Return the error of the first bad bytes in the spans, or None."""
        if not self._memories:
            return None
        for span in spans:
            of = self._memories.get(span.memory)
            if of is not None and of.memory() is not None:
                for bad, error in of.bad:
                    if bad.meets(span):
                        return error
        return None

    def first_error(self) -> BaseException | None:
        """Return the error of any bad bytes, or None if no bytes are bad."""
        self._memories = {key: of for key, of in self._memories.items() if of.memory() is not None}
        return next((of.bad[0][1] for of in self._memories.values()), None)


def again(error: BaseException) -> BaseException:
    """Copy an error to raise it. The original gets no traceback, which would keep arrays alive."""
    if isinstance(error, MlvmError):
        error.late = True
    try:
        copied = copy.copy(error).with_traceback(None)
        if hasattr(error, "__notes__"):
            copied.__notes__ = [*error.__notes__]
        return copied
    except Exception:  # a user-defined exception that cannot be copied
        return error.with_traceback(None)


def read_and_written(
    binding: Binding, params: Sequence[Value], attributes: Attributes
) -> tuple[list[Array], list[Array]]:
    """Return the tensors that a function reads, and those that it writes."""
    callee, arrays = binding.callee, list(filter(is_tensor, params))
    written = 0
    if isinstance(callee, WritesInto):
        written = callee.writes(attributes)
    elif isinstance(callee, UserFunction) and callee.reads is not None:
        read = arrays[callee.reads]
        return read, [x for x in arrays if all(x is not each for each in read)]
    return arrays[written:], arrays[:written]


class Careful:
    """Scheduler that runs each function immediately and raises the error of bad bytes it reads."""

    def __init__(self) -> None:
        self._bad = BadBytes()

    def spoil(self, array: Array, error: BaseException) -> None:
        """Mark an array that a failed call should have written."""
        self._bad.add(ByteRange.of(array), error, weakref.ref(root(array)))

    def meets(self, arrays: Iterable[Array]) -> bool:
        """Return True if any of the arrays has bad bytes."""
        return self._bad.error(map(ByteRange.of, arrays)) is not None

    def is_needed(self) -> bool:
        """Return whether any bytes are bad."""
        return self._bad.first_error() is not None

    def call(
        self, binding: Binding, params: Sequence[Value], attributes: Attributes, blame: object
    ) -> Sequence[Value]:
        """Call the function. Raises the error of bad bytes that it reads."""
        read, written = read_and_written(binding, params, attributes)
        self.wait(read)
        results = binding.call(params, attributes)
        for array in written:
            self.overwrite(array)
        return results

    def wait(self, arrays: Iterable[Array], *, writing: bool = False) -> None:
        """Raise the error of the first bad bytes in the arrays."""
        error = self._bad.error(map(ByteRange.of, arrays))
        if error is not None:
            raise again(error)

    def overwrite(self, array: Array) -> None:
        """Unmark an array that is written again."""
        self._bad.heal(ByteRange.of(array))

    def drain(self) -> None:
        """Do nothing: no task runs asynchronously."""

    synchronize = close = drain
