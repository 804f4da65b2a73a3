"""Damaged files: mutations of a valid one, and the test that a reader refuses them well.

MUTATIONS=100000 python -m pytest tests -k mutations
"""

from __future__ import annotations

import os
import re
import struct
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

from mlvm.core.program.encoding import MAGIC, VERSION, Kind
from tests.brief import with_long

MUTATIONS: Final = int(os.environ.get("MUTATIONS", with_long("100", "300")))
"""How many mutations of a format are tried."""

_EXTREMES: Final = (0, 1, -1, 2**7, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63)
_WORDS: Final = [
    *(str(n).encode() for n in (*_EXTREMES, 2**64, 10**30)),
    *(b"1e309 1.5 NaN true null None [] {} () \"x\" 'x' -1 3, ,3 [1] (1,) #".split()), b"9" * 5000,
    b"[" * 2000, b"1, " * 70, b"\xff\xfe", b"",
]  # fmt: skip


def mutated(data: bytes, random: Random) -> bytes:
    """The data with one to three changes: bytes, numbers in binary and in text, pieces."""
    for _ in range(random.randint(1, 3)):
        data = random.choice(_CHANGES)(data, random)
    return data


def _byte(data: bytes, random: Random) -> bytes:
    return _replaced(data, random.randint(0, len(data)), 1, bytes([random.randrange(256)]))


def _bit(data: bytes, random: Random) -> bytes:
    at = random.randrange(len(data)) if data else 0
    return _replaced(data, at, 1, bytes([data[at] ^ 1 << random.randrange(8)]) if data else b"")


def _number(data: bytes, random: Random) -> bytes:
    """An integer of 1, 2, 4 or 8 bytes becomes an extreme one."""
    size = random.choice((1, 2, 4, 8))
    number = random.choice(_EXTREMES) % 2 ** (8 * size)
    at = random.randint(0, len(data))
    return _replaced(data, at, size, number.to_bytes(size, random.choice(("little", "big"))))


def _word(data: bytes, random: Random) -> bytes:
    """A word of a text, a number or a name, becomes another."""
    words = list(re.finditer(rb"-?\d+|\w+|[\[\](){}'\":,]", data[:5000]))
    if not words:
        return data
    word = random.choice(words)
    return _replaced(data, word.start(), len(word.group()), random.choice(_WORDS))


def _truncation(data: bytes, random: Random) -> bytes:
    return data[: random.randint(0, len(data))]


def _removal(data: bytes, random: Random) -> bytes:
    return _replaced(data, random.randint(0, len(data)), random.randint(1, 16), b"")


def _extension(data: bytes, random: Random) -> bytes:
    return data + random.randbytes(random.randint(1, 64))


def _repetition(data: bytes, random: Random) -> bytes:
    at, length = random.randint(0, len(data)), random.randint(1, 64)
    return _replaced(data, random.randint(0, len(data)), 0, data[at : at + length])


def _replaced(data: bytes, at: int, length: int, piece: bytes) -> bytes:
    return data[:at] + piece + data[at + length :]


_CHANGES: Final[Sequence[Callable[[bytes, Random], bytes]]] = (
    _byte, _bit, _number, _word, _truncation, _removal, _extension, _repetition,
)  # fmt: skip


def framed(kind: Kind) -> Callable[[bytes], bytes]:
    """Return a function that puts a header of that kind before bytes."""

    def message(data: bytes) -> bytes:
        return struct.pack("<4sHHQ", MAGIC, VERSION, kind.value, len(data)) + data

    return message


def parts_of_npy(content: bytes) -> list[tuple[bytes, Callable[[bytes], bytes]]]:
    """Return a file of numpy, and its header with what puts another one in its place."""
    end = content.index(b"\n")

    def with_header(header: bytes) -> bytes:
        length = min(len(header), 2**16 - 1).to_bytes(2, "little")
        return content[:8] + length + header + content[end:]

    return [(content, bytes), (content[10:end], with_header)]


def assert_well_refused(
    parts: Sequence[tuple[bytes, Callable[[bytes], bytes]]],
    read: Callable[[bytes], Any],
    errors: type[Exception] | tuple[type[Exception], ...],
    *,
    file: Path | None = None,
    most: int = 8 << 20,
) -> None:
    """Each mutation is read or refused with one of the `errors`, in a few bytes of memory.

    `parts` are valid pieces of a file, each with what makes the whole file of it: lengths and
    checksums around a piece do not hide what is wrong inside. It is written to `file`, if there is
    one, before it is read. No call allocates more than `most` bytes.
    """
    random = Random(0)
    outcomes = set()
    tracemalloc.start()
    try:
        for number in range(MUTATIONS):
            part, whole = parts[number % len(parts)]
            data = whole(mutated(part, random))
            if file is not None:
                file.write_bytes(data)
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            try:
                read(data)
                outcomes.add("read")
            except errors as error:
                is_internal = re.search(r"\b[A-Z]\w+\([a-z]\w*=", str(error)) is not None
                outcomes.add(f"refused with an object: {error}" if is_internal else "refused")
            except Exception as error:
                raise AssertionError(f"mutation {number}: {error!r} of {data!r}") from error
            _, peak = tracemalloc.get_traced_memory()
            assert peak - before <= most, f"mutation {number}: {peak - before} bytes for {data!r}"
    finally:
        tracemalloc.stop()
    assert outcomes <= {"read", "refused"}
    assert "refused" in outcomes
