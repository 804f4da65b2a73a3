"""Programs and messages as bytes: a header, then fields. docs/wire.md has the whole format.

A `Writer` appends fields, a `Reader` takes them off again. Bytes from anywhere are safe to read:
the reader compares every length and count with the bytes that are left before it allocates.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from typing import Any, Final, NamedTuple

import numpy as np
from typing_extensions import TypeVar

from mlvm.core.errors import EncodingError, LimitExceeded, OpError, brief
from mlvm.core.op import MAX_NESTING
from mlvm.core.types import Array, DType, TensorType

MAGIC: Final = b"MLVM"
VERSION: Final = 1
KIND_AT: Final = 6
"""Where in a message its kind stands, in two bytes, low first."""

HEADER: Final = struct.Struct("<4sHHQ")  # magic, version, kind, bytes that follow
_F64: Final = struct.Struct("<d")
_PER_ITEM: Final = 64  # bytes of a small object and of its place among others

T = TypeVar("T")


def varint(number: int) -> bytes:
    """A number as protobuf has it: 7 bits a byte, ten bytes for a negative one."""
    number &= (1 << 64) - 1
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    return bytes([*encoded, number])


class Kind(Enum):
    """Kind of a message; the number stands in its header."""

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


class Allowance:
    """The bytes of Python's objects that may be made of what is read, beside texts and elements."""

    def __init__(self, nbytes: int) -> None:
        self.remaining = nbytes

    def spend(self, items: int) -> None:
        """Raise `LimitExceeded` if that number of items exceeds the allowance."""
        if items * _PER_ITEM > self.remaining:
            more = f"{items:,} items take {items * _PER_ITEM:,} bytes"
            raise LimitExceeded(f"{more}; there may be {self.remaining:,} more")
        self.remaining -= items * _PER_ITEM


def open_message(
    data: bytes | bytearray | memoryview, *kinds: Kind, allowance: Allowance | None = None
) -> tuple[Kind, Reader]:
    """The kind of the message, and a reader of what follows its header, within an `allowance`.

    Raises `EncodingError` unless `data` is a whole message, and nothing more, of one of `kinds`.
    """
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise EncodingError(f"expected bytes, got a {data.__class__.__name__}")
    data = bytes(data)
    if len(data) < HEADER.size:
        raise EncodingError(f"a header has {HEADER.size} bytes; there are {len(data)}")
    magic, version, number, length = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise EncodingError(f"a message starts with {MAGIC!r}, not {magic!r}")
    if version != VERSION:
        raise EncodingError(f"format version {version} is not known; this is version {VERSION}")
    if number not in [kind.value for kind in kinds]:
        expected = " or ".join(f"{kind.name} ({kind.value})" for kind in kinds)
        raise EncodingError(f"expected a message of kind {expected}, got {number}")
    if length != (rest := len(data) - HEADER.size):
        raise EncodingError(f"the header announces {length} bytes; {rest} follow it")
    reader = Reader(data, HEADER.size)
    reader.allowance = allowance
    return Kind(number), reader


class Deferred:
    """Base of attributes that are texts, which `str` makes where a program is written down."""


class Writer:
    """Appends fields to a message. Raises `EncodingError` for what has no encoding."""

    def __init__(self) -> None:
        self._data = bytearray(HEADER.size)
        self._depth = 0  # how many values enclose the one being written

    def message(self, kind: Kind) -> bytes:
        """All that was written, behind a header."""
        HEADER.pack_into(self._data, 0, MAGIC, VERSION, kind.value, len(self._data) - HEADER.size)
        return bytes(self._data)

    def count(self, n: int) -> None:
        if n >= 2**32:
            raise EncodingError(f"{n} items or bytes are too many for one field")
        self._data += n.to_bytes(4, "little")

    def blob(self, data: bytes) -> None:
        """Bytes, behind their number."""
        self.count(len(data))
        self._data += data

    def text(self, text: str) -> None:
        if not isinstance(text, str):
            raise EncodingError(f"expected a text, got {text!r}")
        self.blob(text.encode("utf-8", "surrogatepass"))

    def integer(self, n: int) -> None:
        try:
            n = operator.index(n)
        except TypeError:
            raise EncodingError(f"expected an integer, got {n!r}") from None
        size = n.bit_length() // 8 + 1
        if size > 255:
            raise EncodingError(f"an integer of {size} bytes is too large; it may have 255")
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
        """The type, then the elements in row-major order. Raises `DTypeError` for a dtype mlvm
        does not have."""
        type = TensorType.of(array)
        self.type(type)
        self._data += array.astype(type.dtype.numpy.newbyteorder("<"), copy=False).tobytes()

    def value(self, value: Any) -> None:
        """An immediate, an attribute or a part of an error, behind a tag that says what it is."""
        if self._depth > MAX_NESTING:
            raise EncodingError(f"a value is nested more than {MAX_NESTING} deep")
        if isinstance(value, np.generic):
            value = value.item()
        if value is None or isinstance(value, bool):
            self._data += next(tag for tag, each in _ALONE.items() if value is each)
            return
        form = _BY_TYPE.get(type(value))
        form = form or next((form for form in _FORMS if isinstance(value, form.type)), None)
        if form is None:
            raise EncodingError(f"there is no encoding for {value!r}")
        self._data += form.tag
        self._depth += 1
        form.write(self, value)
        self._depth -= 1

    def sequence(self, items: Collection[T], write: Callable[[Writer, T], None] = value) -> None:
        """The number of items, then each as `write` writes it; the default writes values."""
        self.count(len(items))
        for item in items:
            write(self, item)

    def mapping(self, items: Mapping[str, T], write: Callable[[Writer, T], None] = value) -> None:
        """The number of items, then each behind its name."""
        self.count(len(items))
        for name, item in items.items():
            self.text(name)
            write(self, item)


class Reader:
    """Takes fields off a message, each as the `Writer`'s method of that name wrote it.

    Raises `EncodingError` with the position of the byte where it goes wrong.
    """

    def __init__(self, data: bytes | memoryview, at: int) -> None:
        self.allowance: Allowance | None = None
        self._data = memoryview(data)
        self._at, self._end = at, len(self._data)
        self._depth = 0  # how many values enclose the one being read

    def error(self, reason: str) -> EncodingError:
        return EncodingError(f"byte {self._at}: {reason}")

    @property
    def remaining(self) -> int:
        """Number of bytes that have not been read."""
        return self._end - self._at

    def end(self) -> None:
        """Raise unless all has been read."""
        if self.remaining:
            raise self.error(f"{self.remaining} bytes too many")

    def count(self) -> int:
        """A number of items or bytes, none of which is smaller than a byte."""
        n = int.from_bytes(self._take(4), "little")
        if n > self.remaining:
            raise self.error(f"{n} items or bytes are announced; {self.remaining} bytes are left")
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
            raise self.error("a bool is 0 or 1")
        data = data.view(dtype.newbyteorder("<")).astype(dtype, copy=False)
        return data.reshape(type.array_shape)

    def value(self) -> Any:
        if self._depth > MAX_NESTING:
            raise self.error(f"a value is nested more than {MAX_NESTING} deep")
        tag = bytes(self._take(1))
        if tag in _ALONE:
            return _ALONE[tag]
        form = _BY_TAG.get(tag)
        if form is None:
            raise self.error(f"no value has the tag {tag!r}")
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
                raise self.error(f"{brief(name)} is given twice")
            items[name] = read(self)
        return items

    def _items(self) -> int:
        """A number of items, for which there is memory."""
        n = self.count()
        if self.allowance is not None:
            self.allowance.spend(n)
        return n

    def _elements(self, n: int) -> Array:
        return np.frombuffer(self._take(n), np.uint8).copy()

    def _take(self, n: int) -> memoryview:
        end = self._at + n
        if end > self._end:
            raise self.error(f"expected {n} bytes; {self.remaining} are left")
        data = self._data[self._at : end]
        self._at = end
        return data


class _Form(NamedTuple):
    """Encoding of the values of one type, behind a tag."""

    tag: bytes
    type: type
    write: Callable[[Writer, Any], None]
    read: Callable[[Reader], Any]


_ALONE: Final = {b"n": None, b"t": True, b"f": False}
"""Values that are written as their tag alone."""

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
