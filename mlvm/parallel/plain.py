"""Values and errors on their way to a member that is told no more than data: nothing is unpickled.

None, bools, numbers, texts, bytes and arrays, and lists, tuples and dicts of them; a NamedTuple
arrives as a tuple. An error keeps its class if that is one of mlvm or of Python.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from mlvm.core.errors import EncodingError, GroupError, MlvmError, brief
from mlvm.core.program.encoding import Kind, Reader, Writer, open_message
from mlvm.core.types import Array
from mlvm.machines.wire import encode_error, read_error
from mlvm.parallel.outcome import Outcome


class PlainFailure(NamedTuple):
    """An error as its message on the wire, and what Python would print of it."""

    message: bytes
    traceback: str

    def error(self, where: str, instead: Callable[[str], Exception]) -> Exception:
        """The exception with its traceback as a note, and `where` that was."""
        error = read_error(open_message(self.message, Kind.error)[1])
        error.add_note(f"in {where}:\n{self.traceback}")
        return error


def packed(value: Any) -> bytes:
    """What a member returned, as bytes. Raises `GroupError` for what is no plain data."""
    arrays: list[Array] = []
    blobs: list[bytes] = []
    try:
        return _message(None, _told(value, arrays, blobs), arrays, blobs)
    except MlvmError as error:
        raise GroupError(
            f"{brief(value)} cannot be sent to another member: {error}; numbers, texts, arrays, "
            f"and lists and dicts of them can"
        ) from None


def packed_failure(error: BaseException, *, first: bool) -> bytes:
    """How a member failed, as bytes."""
    if not isinstance(error, Exception):  # SystemExit, say, which is for its own process
        [*_, text] = traceback.format_exception_only(error)
        told: Exception = GroupError(text.strip())
    else:
        told = error
    trace = "".join(traceback.format_exception(error))
    return _message((first, trace), None, [], [encode_error(told)])


def unpacked(data: bytes) -> Outcome:
    """How a task ended in a member. Raises `EncodingError` for bytes that do not say so."""
    _, reader = open_message(data, Kind.answer)
    failed, told = reader.value(), reader.value()
    arrays, blobs = reader.sequence(Reader.array), reader.sequence(Reader.blob)
    if failed is None:
        return Outcome(_value(told, arrays, blobs))
    first, trace = failed
    return Outcome(None, PlainFailure(blobs[0], trace), first)


def _message(failed: Any, told: Any, arrays: list[Array], blobs: list[bytes]) -> bytes:
    writer = Writer()
    writer.value(failed)
    writer.value(told)
    writer.sequence(arrays, Writer.array)
    writer.sequence(blobs, Writer.blob)
    return writer.message(Kind.answer)


def _told(value: Any, arrays: list[Array], blobs: list[bytes]) -> Any:
    """The value with a list of two, its kind and its parts, for each of its containers; arrays and
    bytes by their numbers."""
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return ["array", len(arrays) - 1]
    if isinstance(value, bytes):
        blobs.append(value)
        return ["bytes", len(blobs) - 1]
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, tuple([_told(each, arrays, blobs) for each in value])]
    if isinstance(value, Mapping):
        pairs = [tuple([_told(each, arrays, blobs) for each in item]) for item in value.items()]
        return ["dict", tuple(pairs)]
    if value is not None and not isinstance(value, (bool, int, float, str, np.generic)):
        raise EncodingError(f"a {type(value).__name__} is no plain data")
    return value


def _value(told: Any, arrays: list[Array], blobs: list[bytes]) -> Any:
    if not isinstance(told, list):
        return told
    kind, parts = told
    if kind == "array":
        return arrays[parts]
    if kind == "bytes":
        return blobs[parts]
    if kind == "dict":
        return {_value(k, arrays, blobs): _value(x, arrays, blobs) for k, x in parts}
    items = [_value(each, arrays, blobs) for each in parts]
    return items if kind == "list" else tuple(items)
