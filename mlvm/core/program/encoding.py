"""Programs and messages as bytes: a header, then fields. docs/wire.md has the whole format.

A `Writer` appends fields, a `Reader` takes them off again. The reader holds every length and
count against the bytes that are left before it takes or allocates anything, so bytes from
anywhere are safe to read: they give what was written, or raise `EncodingError`.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from typing import Any, Final

import numpy as np
from typing_extensions import TypeVar

from mlvm.core.errors import EncodingError, OpError
from mlvm.core.op import MAX_NESTING
from mlvm.core.types import Array, DType, TensorType

MAGIC: Final = b"MLVM"
VERSION: Final = 1
KIND_AT: Final = 6
"""Where in a message its kind stands, in two bytes, low first."""

_HEADER: Final = struct.Struct("<4sHHQ")  # magic, version, kind, bytes that follow
_F64: Final = struct.Struct("<d")

T = TypeVar("T")


class Kind(Enum):
    """What a message is; the number stands in its header."""

    program = 1
    call = 2
    answer = 3
    error = 4
    step = 5


def open_message(data: bytes | bytearray | memoryview, *kinds: Kind) -> tuple[Kind, Reader]:
    """The kind of the message, and a reader of what follows its header.

    Raises `EncodingError` unless `data` is a whole message, and nothing more, of one of `kinds`.
    """
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise EncodingError(f"bytes are wanted, not a {data.__class__.__name__}")
    data = bytes(data)
    if len(data) < _HEADER.size:
        raise EncodingError(f"a header has {_HEADER.size} bytes; there are {len(data)}")
    magic, version, number, length = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise EncodingError(f"a message starts with {MAGIC!r}, not {magic!r}")
    if version != VERSION:
        raise EncodingError(f"format version {version} is not known; this is version {VERSION}")
    if number not in [kind.value for kind in kinds]:
        wanted = " or ".join(f"{kind.name} ({kind.value})" for kind in kinds)
        raise EncodingError(f"a message of kind {wanted} is wanted, not {number}")
    if length != len(data) - _HEADER.size:
        raise EncodingError(
            f"the header announces {length} bytes; {len(data) - _HEADER.size} follow it"
        )
    return Kind(number), Reader(data, _HEADER.size)


class Writer:
    """Appends fields to a message. Raises `EncodingError` for what has no encoding."""

    def __init__(self) -> None:
        self._data = bytearray(_HEADER.size)

    def message(self, kind: Kind) -> bytes:
        """All that was written, behind a header."""
        length = len(self._data) - _HEADER.size
        _HEADER.pack_into(self._data, 0, MAGIC, VERSION, kind.value, length)
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
            raise EncodingError(f"a text is wanted, not {text!r}")
        self.blob(text.encode("utf-8", "surrogatepass"))

    def integer(self, n: int) -> None:
        try:
            n = operator.index(n)
        except TypeError:
            raise EncodingError(f"an integer is wanted, not {n!r}") from None
        size = n.bit_length() // 8 + 1
        if size > 255:
            raise EncodingError(f"an integer of {size} bytes is too large; it may have 255")
        self._data.append(size)
        self._data += n.to_bytes(size, "little", signed=True)

    def f64(self, x: float) -> None:
        self._data += _F64.pack(x)

    def type(self, type: TensorType) -> None:
        if not isinstance(type, TensorType):
            raise EncodingError(f"a tensor type is wanted, not {type!r}")
        self.text(type.dtype.name)
        self.sequence(type.shape, Writer.integer)

    def array(self, array: Array) -> None:
        """The type, then the elements in row-major order. Raises `DTypeError` for a dtype mlvm
        does not have."""
        type = TensorType.of(array)
        self.type(type)
        self._data += array.astype(type.dtype.numpy.newbyteorder("<"), copy=False).tobytes()

    def sequence(self, items: Collection[T], write: Callable[[Writer, T], None]) -> None:
        """The number of items, then each as `write` writes it."""
        self.count(len(items))
        for item in items:
            write(self, item)

    def mapping(self, items: Mapping[str, T], write: Callable[[Writer, T], None]) -> None:
        """The number of items, then each behind its name."""
        self.count(len(items))
        for name, item in items.items():
            self.text(name)
            write(self, item)

    def value(self, value: Any) -> None:
        """An immediate, an attribute or a part of an error, behind a tag that says what it is."""
        self._value(value, 0)

    def _value(self, value: Any, depth: int) -> None:
        if depth > MAX_NESTING:
            raise EncodingError(f"a value is nested more than {MAX_NESTING} deep")

        def inner(writer: Writer, item: Any) -> None:
            writer._value(item, depth + 1)

        if isinstance(value, np.generic):
            value = value.item()
        match value:
            case None:
                self._data += b"n"
            case bool():
                self._data += b"t" if value else b"f"
            case int():
                self._data += b"i"
                self.integer(value)
            case float():
                self._data += b"d"
                self.f64(value)
            case str():
                self._data += b"s"
                self.text(value)
            case DType():
                self._data += b"D"
                self.text(value.name)
            case TensorType():
                self._data += b"T"
                self.type(value)
            case tuple():
                self._data += b"("
                self.sequence(value, inner)
            case list():
                self._data += b"["
                self.sequence(value, inner)
            case Mapping():
                self._data += b"{"
                self.mapping(value, inner)
            case _:
                raise EncodingError(f"there is no encoding for {value!r}")


class Reader:
    """Takes fields off a message, each as the `Writer`'s method of that name wrote it.

    Raises `EncodingError` with the position of the byte where it goes wrong.
    """

    def __init__(self, data: bytes, at: int) -> None:
        self._data = memoryview(data)
        self._at = at

    def error(self, reason: str) -> EncodingError:
        return EncodingError(f"byte {self._at}: {reason}")

    def end(self) -> None:
        """Raise unless all has been read."""
        left = len(self._data) - self._at
        if left:
            raise self.error(f"{left} bytes too many")

    def count(self) -> int:
        """A number of items or bytes, none of which is smaller than a byte."""
        n = int.from_bytes(self._take(4), "little")
        left = len(self._data) - self._at
        if n > left:
            raise self.error(f"{n} items or bytes are announced; {left} bytes are left")
        return n

    def blob(self) -> bytes:
        return bytes(self._take(self.count()))

    def text(self) -> str:
        data = self.blob()
        try:
            return data.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise self.error(f"{data!r} is not UTF-8") from None

    def integer(self) -> int:
        size = self._take(1)[0]
        return int.from_bytes(self._take(size), "little", signed=True)

    def f64(self) -> float:
        x: float = _F64.unpack(self._take(8))[0]
        return x

    def type(self) -> TensorType:
        dtype = self._dtype()
        shape = self.sequence(Reader.integer)
        try:
            return TensorType(dtype, shape)
        except OpError as error:
            raise self.error(str(error)) from None

    def array(self) -> Array:
        """A new array of its own memory."""
        type = self.type()
        dtype = type.dtype.numpy
        data = np.frombuffer(self._take(type.nbytes), np.uint8)
        if type.dtype.kind == "bool" and data.size and data.max() > 1:
            raise self.error("a bool is 0 or 1")
        return data.view(dtype.newbyteorder("<")).astype(dtype).reshape(type.shape)

    def sequence(self, read: Callable[[Reader], T]) -> list[T]:
        return [read(self) for _ in range(self.count())]

    def mapping(self, read: Callable[[Reader], T]) -> dict[str, T]:
        items: dict[str, T] = {}
        for _ in range(self.count()):
            name = self.text()
            if name in items:
                raise self.error(f"{name!r} is given twice")
            items[name] = read(self)
        return items

    def value(self) -> Any:
        return self._value(0)

    def _value(self, depth: int) -> Any:
        if depth > MAX_NESTING:
            raise self.error(f"a value is nested more than {MAX_NESTING} deep")

        def inner(reader: Reader) -> Any:
            return reader._value(depth + 1)

        match bytes(self._take(1)):
            case b"n":
                return None
            case b"t":
                return True
            case b"f":
                return False
            case b"i":
                return self.integer()
            case b"d":
                return self.f64()
            case b"s":
                return self.text()
            case b"D":
                return self._dtype()
            case b"T":
                return self.type()
            case b"(":
                return tuple(self.sequence(inner))
            case b"[":
                return self.sequence(inner)
            case b"{":
                return self.mapping(inner)
            case tag:
                raise self.error(f"no value has the tag {tag!r}")

    def _dtype(self) -> DType:
        try:
            return DType.named(self.text())
        except OpError as error:
            raise self.error(str(error)) from None

    def _take(self, n: int) -> memoryview:
        end = self._at + n
        if end > len(self._data):
            raise self.error(f"{n} bytes are wanted; {len(self._data) - self._at} are left")
        taken = self._data[self._at : end]
        self._at = end
        return taken
