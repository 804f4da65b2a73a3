"""Binary format of programs and messages: a header, then fields; see docs/wire.md.

A `Writer` appends fields, a `Reader` reads them. Reading untrusted bytes is safe: the reader
compares every length and count with the remaining bytes before it allocates.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from typing import Any, Final, NamedTuple

import numpy as np
from typing_extensions import TypeVar

from mlvm.core.errors import (
    EncodingError,
    LimitExceededError,
    OpError,
    brief,
    counted,
    with_article,
)
from mlvm.core.op import MAX_NESTING
from mlvm.core.types import Array, DType, TensorType

MAGIC: Final = b"MLVM"
VERSION: Final = 1
KIND_AT: Final = 6
"""Offset of the kind in a message: two bytes, little-endian."""

HEADER: Final = struct.Struct("<4sHHQ")  # magic, version, kind, bytes that follow
_F64: Final = struct.Struct("<d")
_PER_ITEM: Final = 64  # bytes of a small object and the reference to it

T = TypeVar("T")


def varint(number: int) -> bytes:
    """Return a number as a protobuf varint: 7 bits per byte, ten bytes if negative."""
    number &= (1 << 64) - 1
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    return bytes([*encoded, number])


class Kind(Enum):
    """Kind of a message, encoded as a number in the header."""

    program = 1
    call = 2
    answer = 3
    error = 4
    step = 5
    post = 6
    launch = 7
    goodbye = 8
    ops = 9
    repro = 10


def damaged(reason: str) -> EncodingError:
    """Return the error for bytes that were changed or cut."""
    return EncodingError(f"{reason}; the data is damaged: write or send it again")


class Allowance:
    """Limit of the bytes of Python objects that a reader may create, without texts and elements."""

    def __init__(self, nbytes: int) -> None:
        self.remaining = nbytes

    def spend(self, items: int) -> None:
        """Raise `LimitExceededError` if that number of items exceeds the remaining allowance."""
        if items * _PER_ITEM > self.remaining:
            more = f"{items:,} items need {items * _PER_ITEM:,} bytes"
            raise LimitExceededError(f"{more}, the limit is {self.remaining:,}; send fewer items")
        self.remaining -= items * _PER_ITEM


def open_message(
    data: bytes | bytearray | memoryview, *kinds: Kind, allowance: Allowance | None = None
) -> tuple[Kind, Reader]:
    """Return the kind of the message, and a reader for the fields after its header.

    Raises `EncodingError` unless `data` is exactly one message with a kind from `kinds`.
    `allowance` limits the memory of the objects that are read.
    """
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise EncodingError(f"expected bytes, got {with_article(data.__class__.__name__)}")
    data = bytes(data)
    if len(data) < HEADER.size:
        raise damaged(f"expected a header of {HEADER.size} bytes, got {len(data)}")
    magic, version, number, length = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise EncodingError(f"expected a message that starts with {MAGIC!r}, got {magic!r}")
    if version != VERSION:
        raise EncodingError(
            f"expected format version {VERSION}, got {version}; use the mlvm version that wrote it"
        )
    if number not in [kind.value for kind in kinds]:
        expected = " or ".join(f"{kind.name} ({kind.value})" for kind in kinds)
        raise EncodingError(f"expected a message of kind {expected}, got {number}")
    if length != (rest := len(data) - HEADER.size):
        raise damaged(f"expected {length} bytes after the header, got {rest}")
    reader = Reader(data, HEADER.size)
    reader.allowance = allowance
    return Kind(number), reader


class Deferred:
    """Base class of attributes with a text that `str` creates when the program is encoded."""


class Writer:
    """Encoder of fields. Raises `EncodingError` for values that cannot be encoded."""

    def __init__(self) -> None:
        self._data = bytearray(HEADER.size)
        self._depth = 0  # nesting depth of the value being written

    def message(self, kind: Kind) -> bytes:
        """Return the header, followed by everything written so far."""
        HEADER.pack_into(self._data, 0, MAGIC, VERSION, kind.value, len(self._data) - HEADER.size)
        return bytes(self._data)

    def count(self, n: int) -> None:
        if n >= 2**32:
            raise EncodingError(f"expected fewer than 2**32 items or bytes in a field, got {n}")
        self._data += n.to_bytes(4, "little")

    def blob(self, data: bytes) -> None:
        """Write the number of bytes, then the bytes."""
        self.count(len(data))
        self._data += data

    def text(self, text: str) -> None:
        if not isinstance(text, str):
            raise EncodingError(f"expected a string, got {text!r}")
        self.blob(text.encode("utf-8", "surrogatepass"))

    def integer(self, n: int) -> None:
        try:
            n = operator.index(n)
        except TypeError:
            raise EncodingError(f"expected an integer, got {n!r}") from None
        size = n.bit_length() // 8 + 1
        if size > 255:
            raise EncodingError(f"expected an integer of at most 255 bytes, got {size} bytes")
        self._data.append(size)
        self._data += n.to_bytes(size, "little", signed=True)

    def f64(self, x: float) -> None:
        self._data += _F64.pack(x)

    def dtype(self, dtype: DType) -> None:
        self.text(dtype.name)

    def type(self, type: TensorType) -> None:
        if not isinstance(type, TensorType):
            raise EncodingError(f"expected a tensor type, got {type!r}")
        self.dtype(type.dtype)
        self.sequence(type.shape, Writer.integer)

    def array(self, array: Array) -> None:
        """Write the type, then the elements in row-major order.

        Raises `DTypeError` for a dtype that mlvm does not have.
        """
        type = TensorType.of(array)
        self.type(type)
        self._data += array.astype(type.dtype.numpy.newbyteorder("<"), copy=False).tobytes()

    def value(self, value: Any) -> None:
        """Write an immediate, an attribute or a part of an error, after a tag for the type."""
        if self._depth > MAX_NESTING:
            raise EncodingError(f"a value is nested more than {MAX_NESTING} levels deep")
        form = _BY_TYPE.get(type(value))
        if form is None:
            if isinstance(value, np.generic):
                value = value.item()
            if value is None or isinstance(value, bool):
                self._data += next(tag for tag, each in _ALONE.items() if value is each)
                return
            form = next((form for form in _FORMS if isinstance(value, form.type)), None)
        if form is None:
            raise EncodingError(f"expected a value that can be encoded, got {value!r}")
        self._data += form.tag
        self._depth += 1
        form.write(self, value)
        self._depth -= 1

    def sequence(self, items: Collection[T], write: Callable[[Writer, T], None] = value) -> None:
        """Write the number of items, then each item by `write`, which defaults to `value`."""
        self.count(len(items))
        for item in items:
            write(self, item)

    def mapping(self, items: Mapping[str, T], write: Callable[[Writer, T], None] = value) -> None:
        """Write the number of items, then each name and item."""
        self.count(len(items))
        for name, item in items.items():
            self.text(name)
            write(self, item)


class Reader:
    """Decoder of fields; each method reads a field written by the `Writer` method of the same name.

    Raises `EncodingError` with the position of the invalid byte.
    """

    def __init__(self, data: bytes | memoryview, at: int) -> None:
        self.allowance: Allowance | None = None
        self._data = memoryview(data)
        self._at, self._end = at, len(self._data)
        self._depth = 0  # nesting depth of the value being read

    def error(self, reason: str) -> EncodingError:
        return damaged(f"byte {self._at}: {reason}")

    @property
    def remaining(self) -> int:
        """Number of bytes that have not been read."""
        return self._end - self._at

    def end(self) -> None:
        """Raise `EncodingError` unless all bytes have been read."""
        if self.remaining:
            raise self.error(f"expected the end of the message, got {self.remaining} more bytes")

    def count(self) -> int:
        """Read a number of items or bytes; each item has at least one byte."""
        n = int.from_bytes(self._take(4), "little")
        if n > self.remaining:
            raise self.error(f"expected {n} items or bytes, but only {self.remaining} bytes remain")
        return n

    def blob(self) -> bytes:
        return bytes(self._take(self.count()))

    def text(self) -> str:
        data = self._take(self.count())
        try:
            return str(data, "utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise self.error(f"{brief(bytes(data[:100]))} is not UTF-8") from None

    def integer(self) -> int:
        size = self._take(1)[0]
        return int.from_bytes(self._take(size), "little", signed=True)

    def f64(self) -> float:
        return float(_F64.unpack(self._take(8))[0])

    def dtype(self) -> DType:
        try:
            return DType.named(self.text())
        except OpError as error:
            raise self.error(str(error)) from None

    def type(self) -> TensorType:
        dtype = self.dtype()
        shape = self.sequence(Reader.integer)
        try:
            return TensorType(dtype, shape)
        except OpError as error:
            raise self.error(str(error)) from None

    def array(self) -> Array:
        """Read an array into new memory."""
        type = self.type()
        dtype = type.dtype.numpy
        data = self._elements(type.nbytes)
        if type.dtype.kind == "bool" and data.size and data.max() > 1:
            raise self.error(f"expected a bool as 0 or 1, got {data.max()}")
        data = data.view(dtype.newbyteorder("<")).astype(dtype, copy=False)
        return data.reshape(type.array_shape)

    def value(self) -> Any:
        if self._depth > MAX_NESTING:
            raise self.error(f"a value is nested more than {MAX_NESTING} levels deep")
        tag = bytes(self._take(1))
        if tag in _ALONE:
            return _ALONE[tag]
        form = _BY_TAG.get(tag)
        if form is None:
            raise self.error(f"unknown tag {tag!r}")
        self._depth += 1
        value = form.read(self)
        self._depth -= 1
        return value

    def sequence(self, read: Callable[[Reader], T] = value) -> list[T]:
        return [read(self) for _ in range(self._items())]

    def mapping(self, read: Callable[[Reader], T] = value) -> dict[str, T]:
        items: dict[str, T] = {}
        for _ in range(self._items()):
            name = self.text()
            if name in items:
                raise self.error(f"expected distinct names, got {brief(name)} twice")
            items[name] = read(self)
        return items

    def _items(self) -> int:
        """Read a number of items, and check that the allowance covers it."""
        n = self.count()
        if self.allowance is not None:
            self.allowance.spend(n)
        return n

    def _elements(self, n: int) -> Array:
        return np.frombuffer(self._take(n), np.uint8).copy()

    def _take(self, n: int) -> memoryview:
        end = self._at + n
        if end > self._end:
            raise self.error(f"expected {counted(n, 'byte')}, got {self.remaining}")
        data = self._data[self._at : end]
        self._at = end
        return data


class _Form(NamedTuple):
    """Encoding of the values of a type, after a tag."""

    tag: bytes
    type: type
    write: Callable[[Writer, Any], None]
    read: Callable[[Reader], Any]


_ALONE: Final = {b"n": None, b"t": True, b"f": False}
"""Values that are encoded by a tag only."""

_FORMS: Final = (
    _Form(b"s", Deferred, lambda writer, value: writer.text(str(value)), Reader.text),
    _Form(b"i", int, Writer.integer, Reader.integer),
    _Form(b"d", float, Writer.f64, Reader.f64),
    _Form(b"s", str, Writer.text, Reader.text),
    _Form(b"D", DType, Writer.dtype, Reader.dtype),
    _Form(b"T", TensorType, Writer.type, Reader.type),
    _Form(b"(", tuple, Writer.sequence, lambda reader: tuple(reader.sequence())),
    _Form(b"[", list, Writer.sequence, Reader.sequence),
    _Form(b"{", Mapping, Writer.mapping, Reader.mapping),
)
_BY_TAG: Final = {form.tag: form for form in _FORMS}
_BY_TYPE: Final[Mapping[type, _Form]] = {form.type: form for form in _FORMS}
