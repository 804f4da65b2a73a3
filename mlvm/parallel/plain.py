"""Encoding of values and errors for other members without pickle.

It supports None, bools, numbers, strings, bytes and arrays, and lists, tuples and dicts of these. A
NamedTuple is decoded as a tuple. The class of an error is preserved if it is built into Python or
mlvm.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from mlvm.core.errors import EncodingError, GroupError, MlvmError, brief, with_article
from mlvm.core.program.encoding import Kind, Reader, Writer, open_message
from mlvm.core.types import Array
from mlvm.machines.wire import encode_error, read_error
from mlvm.parallel.outcome import Outcome


class PlainFailure(NamedTuple):
    """Error as an encoded message, and the traceback that Python would print."""

    message: bytes
    traceback: str

    def error(self, where: str, instead: Callable[[str], Exception]) -> Exception:
        """Return the exception with the traceback and `where` as a note."""
        error = read_error(open_message(self.message, Kind.error)[1])
        error.add_note(f"in {where}:\n{self.traceback}")
        return error


def packed(value: Any) -> bytes:
    """Encode the result of a member. Raises `GroupError` if it is not plain data."""
    arrays: list[Array] = []
    blobs: list[bytes] = []
    try:
        return _message(None, _flattened(value, arrays, blobs), arrays, blobs)
    except MlvmError as error:
        raise GroupError(
            f"{brief(value)} cannot be sent to another member: {error}; return numbers, strings, "
            f"arrays, or lists, tuples and dicts of them"
        ) from None


def packed_failure(error: BaseException, *, first: bool) -> bytes:
    """Encode the failure of a member."""
    if not isinstance(error, Exception):  # SystemExit must not stop other processes
        [*_, text] = traceback.format_exception_only(error)
        shown_error: Exception = GroupError(text.strip())
    else:
        shown_error = error
    trace = "".join(traceback.format_exception(error))
    return _message((first, trace), None, [], [encode_error(shown_error)])


def unpacked(data: bytes) -> Outcome:
    """Decode the outcome of a member's task. Raises `EncodingError` if the bytes are invalid."""
    _, reader = open_message(data, Kind.answer)
    failed, flattened = reader.value(), reader.value()
    arrays, blobs = reader.sequence(Reader.array), reader.sequence(Reader.blob)
    if failed is None:
        return Outcome(_value(flattened, arrays, blobs))
    first, trace = failed
    return Outcome(None, PlainFailure(blobs[0], trace), first)


def _message(failed: Any, flattened: Any, arrays: list[Array], blobs: list[bytes]) -> bytes:
    writer = Writer()
    writer.value(failed)
    writer.value(flattened)
    writer.sequence(arrays, Writer.array)
    writer.sequence(blobs, Writer.blob)
    return writer.message(Kind.answer)


def _flattened(value: Any, arrays: list[Array], blobs: list[bytes]) -> Any:
    """Flatten a value for the encoder.

    A container is replaced by a list of the kind and the items. Arrays and bytes are appended to
    these lists and replaced by the index.
    """
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return ["array", len(arrays) - 1]
    if isinstance(value, bytes):
        blobs.append(value)
        return ["bytes", len(blobs) - 1]
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, tuple([_flattened(each, arrays, blobs) for each in value])]
    if isinstance(value, Mapping):
        pairs = [
            tuple([_flattened(each, arrays, blobs) for each in item]) for item in value.items()
        ]
        return ["dict", tuple(pairs)]
    if value is not None and not isinstance(value, (bool, int, float, str, np.generic)):
        raise EncodingError(
            f"{with_article(type(value).__name__)} is not supported; "
            "return numbers, strings, arrays, or lists, tuples and dicts of them"
        )
    return value


def _value(flattened: Any, arrays: list[Array], blobs: list[bytes]) -> Any:
    if not isinstance(flattened, list):
        return flattened
    kind, parts = flattened
    if kind == "array":
        return arrays[parts]
    if kind == "bytes":
        return blobs[parts]
    if kind == "dict":
        return {_value(k, arrays, blobs): _value(x, arrays, blobs) for k, x in parts}
    items = [_value(each, arrays, blobs) for each in parts]
    return items if kind == "list" else tuple(items)
