"""The log of a recording: an append-only list of frames, each chained to the previous frames.

A frame consists of the length of the payload, a checksum of the length, the payload, and a digest.
The digest is BLAKE2b of the previous frame's digest and the payload, so changing a frame
invalidates all later frames. A process that is killed leaves at most a partial frame at the end,
which readers drop.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from mlvm.core.errors import EncodingError, MlvmError
from mlvm.core.program.encoding import HEADER, Kind, Reader, Writer, damaged
from mlvm.machines.files import open_to_append

VERSION: Final = 2
"""Version of the format. A later release reads all earlier versions."""

DIGEST: Final = 16
"""Size of a digest in bytes."""

_MAGIC: Final = b"mlvm run"
_HEAD: Final = _MAGIC + VERSION.to_bytes(4, "little")
_FRAME: Final = struct.Struct("<II")  # length of the payload, and a checksum of this length


def digest_of(*parts: bytes) -> bytes:
    """Return a cryptographic digest of the concatenated parts."""
    return blake2b(b"".join(parts), digest_size=DIGEST).digest()


def encoded(value: Any) -> bytes:
    """Encode a value of numbers, strings, tuples, lists and dicts as bytes."""
    writer = Writer()
    writer.value(value)
    return writer.message(Kind.call)[HEADER.size :]


def decoded(data: bytes) -> Any:
    """Return the value that `encoded` wrote. Raises `EncodingError`."""
    reader = Reader(data, 0)
    value = reader.value()
    reader.end()
    return value


def fits(value: Any, form: Any) -> bool:
    """Return whether a value of a log has a form.

    A form is a type, a tuple of the items' forms, a list with the form of all items, or a dict of
    forms by name. Such a dict may have further names.
    """
    if isinstance(form, type):
        return type(value) is form
    if isinstance(form, dict):
        return isinstance(value, dict) and all(fits(value.get(x), form[x]) for x in form)
    if not isinstance(value, (list, tuple)):
        return False
    forms = form * len(value) if isinstance(form, list) else form
    return len(value) == len(forms) and all(map(fits, value, forms))


def number_of(digest: bytes) -> int:
    """Return a digest as a number, the form that frames contain."""
    return int.from_bytes(digest, "little")


class AppendedFile:
    """File to which complete contents are appended.

    The caller keeps the size of all complete contents, and passes it to the next `put`, which
    overwrites the bytes of a failed or interrupted `put`. Each content is one write, so a kill
    damages at most the last one.
    """

    def __init__(self, path: Path) -> None:
        self._stream: BinaryIO = open_to_append(path)
        self._at = 0  # the size of the file, -1 if it is unknown

    def put(self, size: int, content: bytes | bytearray) -> int:
        """Append to the first `size` bytes, and return the new size. Raises `OSError`."""
        if self._at != size:
            self._stream.seek(size)
            self._stream.truncate()
        rest, self._at = memoryview(content), -1
        while rest:
            rest = rest[self._stream.write(rest) :]
        self._at = size + len(content)
        return self._at

    def sync(self) -> None:
        """Wait until all contents are on the disk."""
        os.fsync(self._stream.fileno())

    def close(self) -> None:
        self._stream.close()


class LogEnd(NamedTuple):
    """End of the complete frames of a log: the size in bytes, and the digest of the last frame."""

    size: int
    chain: bytes


class LogWriter(AppendedFile):
    """Writer of a new log.

    end: the end of the frames that `append` has written.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.end = LogEnd(self.put(0, _HEAD), digest_of(_HEAD))

    def append(self, value: Any) -> None:
        """Append a frame with a value of numbers, strings, tuples, lists and dicts."""
        self.end = self.after(self.end, [value])

    def after(self, end: LogEnd, values: Iterable[Any]) -> LogEnd:
        """Write frames after an end, in one write, and return the new end. Raises `OSError`."""
        frames, chain = b"", end.chain
        for payload in map(encoded, values):
            chain = digest_of(chain, payload)
            frames += _framed(payload, chain)
        return LogEnd(self.put(end.size, frames), chain)


def _framed(payload: bytes, chain: bytes) -> bytes:
    length = len(payload).to_bytes(4, "little")
    return _FRAME.pack(len(payload), zlib.crc32(length)) + payload + chain


class LogReader:
    """A log that was read from a file.

    Attributes:
        version: the version of the format.
        values: the values of all complete frames, in order.
        chain: the digest of the last complete frame.
        torn: the bytes of a partial frame at the end, which a killed process wrote.

    Raises `EncodingError` for a file that is not a log, has an unsupported version, or was changed.
    """

    def __init__(self, data: bytes) -> None:
        self.chain, self.torn = digest_of(data[: len(_HEAD)]), len(data)
        self.version = int.from_bytes(data[len(_MAGIC) : len(_HEAD)], "little")
        self.values: list[Any] = []
        if _HEAD.startswith(data) and len(data) < len(_HEAD):  # killed before the first frame
            return
        if not data.startswith(_MAGIC):
            raise EncodingError(
                f"expected a recording that begins with {_MAGIC!r}, got {data[:8]!r}"
            )
        if not 1 <= self.version <= VERSION:
            raise EncodingError(
                f"expected a version up to {VERSION} of the recording format, got "
                f"{self.version}; use the mlvm version that wrote it"
            )
        self.values += self._frames(data)

    def _frames(self, data: bytes) -> Iterator[Any]:
        at = len(_HEAD)
        while at < len(data):
            start = at + _FRAME.size
            if start > len(data):
                break
            length, check = _FRAME.unpack_from(data, at)
            if zlib.crc32(data[at : at + 4]) != check:
                raise damaged(
                    f"byte {at}: the checksum of the frame's length, {length}, does not match"
                )
            end = start + length + DIGEST
            if end > len(data):
                break
            payload = data[start : start + length]
            self.chain = digest_of(self.chain, payload)
            if self.chain != data[start + length : end]:
                raise damaged(
                    f"byte {at}: the digest of the frame of {length} bytes does not match"
                )
            yield decoded(payload)
            at = end
        self.torn = len(data) - at


def is_log(path: Path) -> bool:
    """Return whether the file begins as a log of any version."""
    try:
        with path.open("rb") as stream:
            return stream.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def read_log(path: Path) -> LogReader:
    """Read the log of a recording. Raises `OSError` and, with the path, `EncodingError`."""
    try:
        return LogReader(path.read_bytes())
    except MlvmError as error:
        raise EncodingError(f"{path}: {error}") from None
