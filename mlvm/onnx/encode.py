"""Encoding of ONNX messages in the wire format of protobuf, by the schema of `wire`."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Any, Final

from mlvm.core.program.encoding import varint
from mlvm.onnx.wire import FIELDS, WIRES

Parts = list[bytes | memoryview]

_NUMBERS: Final = {
    kind: {field.name: (number, field) for number, field in fields.items()}
    for kind, fields in FIELDS.items()
}


def encode(kind: str, fields: Mapping[str, Any]) -> Parts:
    """Encode a message as a list of parts, without copying large arrays.

    Nested messages are also mappings.
    """
    parts: Parts = []
    for name, value in fields.items():
        number, field = _NUMBERS[kind][name]
        many = field.many
        if many and field.kind in WIRES:
            packed = b"".join(_number(field.kind, each) for each in value)
            parts += [varint(number << 3 | 2), varint(len(packed)), packed]
            continue
        for each in value if many else (value,):
            if field.kind in WIRES:
                parts += [varint(number << 3 | WIRES[field.kind]), _number(field.kind, each)]
            else:
                inner = _bytes(each) if field.kind in ("str", "bytes") else encode(field.kind, each)
                parts += [varint(number << 3 | 2), varint(size_of(inner)), *inner]
    return parts


def size_of(parts: Iterable[bytes | memoryview]) -> int:
    """Return the number of bytes of the parts."""
    return sum(map(len, parts))


def _bytes(value: Any) -> Parts:
    return [value.encode() if isinstance(value, str) else value]


def _number(kind: str, value: Any) -> bytes:
    if kind == "int":
        return varint(int(value))
    return struct.pack("<f" if kind == "float" else "<d", value)
