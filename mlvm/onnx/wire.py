"""Decoding of ONNX messages from the wire format of protobuf.

`SCHEMA` contains all fields that are read and written; other fields are skipped.
https://protobuf.dev/programming-guides/encoding,
https://github.com/onnx/onnx/blob/main/onnx/onnx.proto
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Self, TypeAlias

import numpy as np

from mlvm.core.errors import EncodingError
from mlvm.core.memo import memoized

SCHEMA: Final = """
Model: 1 ir_version int, 2 producer_name str, 3 producer_version str, 4 domain str, 5
    model_version int, 6 doc_string str, 7 graph Graph, 8 opset_import OperatorSet*, 14
    metadata_props Pair*, 25 functions Function*
OperatorSet: 1 domain str, 2 version int
Pair: 1 key str, 2 value str
Graph: 1 node Node*, 2 name str, 5 initializer Tensor*, 10 doc_string str, 11 input Value*, 12
    output Value*, 15 sparse_initializer SparseTensor*
Node: 1 input str*, 2 output str*, 3 name str, 4 op_type str, 5 attribute Attribute*, 6
    doc_string str, 7 domain str, 8 overload str, 9 metadata_props Pair*
Attribute: 1 name str, 2 f float, 3 i int, 4 s bytes, 5 t Tensor, 6 g Graph, 7 floats float*, 8
    ints int*, 9 strings bytes*, 10 tensors Tensor*, 11 graphs Graph*, 13 doc_string str, 14 tp
    Type, 15 type_protos Type*, 20 type int, 21 ref_attr_name str, 22 sparse_tensor
    SparseTensor, 23 sparse_tensors SparseTensor*
Tensor: 1 dims int*, 2 data_type int, 4 float_data float*, 5 int32_data int*, 6 string_data
    bytes*, 7 int64_data int*, 8 name str, 9 raw_data bytes?, 10 double_data double*, 11
    uint64_data int*, 13 external_data Pair*, 14 data_location int
SparseTensor: 1 values Tensor, 2 indices Tensor, 3 dims int*
Value: 1 name str, 2 type Type, 3 doc_string str
Type: 1 tensor_type TensorType, 4 sequence_type ElementType, 5 map_type MapType, 8
    sparse_tensor_type TensorType, 9 optional_type ElementType
TensorType: 1 elem_type int, 2 shape Shape
ElementType: 1 elem_type Type
MapType: 1 key_type int, 2 value_type Type
Shape: 1 dim Dimension*
Dimension: 1 dim_value int?, 2 dim_param str
Function: 1 name str, 4 input str*, 5 output str*, 6 attribute str*, 7 node Node*, 8 doc_string
    str, 9 opset_import OperatorSet*, 10 domain str, 11 attribute_proto Attribute*, 13 overload str
"""
"""Number, name and kind of each field of a message. `*` marks a repeated field. An absent field is
None if the kind is a message or ends with `?`, otherwise 0 or empty."""

_DEFAULTS: Final = {"int": 0, "float": 0.0, "double": 0.0, "str": "", "bytes": b""}
_FIXED: Final[dict[str, Any]] = {"float": np.dtype("<f4"), "double": np.dtype("<f8")}
# wire types of single numbers; everything else has the wire type 2
WIRES: Final = {"int": 0, "double": 1, "float": 5}
_WIDTHS: Final = {1: 8, 5: 4}  # bytes of these wire types
Bytes: TypeAlias = memoryview | bytes


class ProtoField(NamedTuple):
    """Field of a message.

    name: field name.
    kind: kind of the values.
    many: whether the field is repeated.
    default: value of an absent field.
    """

    name: str
    kind: str
    many: bool
    default: Any


def _fields(text: str) -> dict[int, ProtoField]:
    fields = {}
    for number, name, kind in (each.split() for each in text.split(",")):
        plain = kind.rstrip("*?")
        default = () if kind[-1] == "*" else None if kind[-1] == "?" else _DEFAULTS.get(plain)
        fields[int(number)] = ProtoField(name, plain, kind[-1] == "*", default)
    return fields


FIELDS: Final = {
    kind: _fields(text)
    for kind, _, text in (
        message.partition(": ") for message in SCHEMA.strip().replace("\n    ", " ").split("\n")
    )
}


def _readers(fields: Mapping[int, ProtoField]) -> dict[int, tuple[str, str, bool, bool]]:
    """Return the readers of fields by number and wire type.

    A reader consists of the name, the kind, whether the field is repeated, and whether the values
    are numbers, which may be packed.
    """
    readers = {}
    for number, (name, kind, many, _) in fields.items():
        for wire in {WIRES.get(kind, 2), *([2] if many else [])}:
            readers[number << 3 | wire] = name, kind, many, kind in WIRES
    return readers


_READERS: Final = {kind: _readers(fields) for kind, fields in FIELDS.items()}


class ProtoMessage:
    """Message with fields as attributes.

    Repeated numbers are an array of i64, f32 or f64; other repeated fields are a list. Bytes are a
    view of the file.
    """

    kind: str

    def __new__(cls, kind: str, **_: Any) -> Self:
        return object.__new__(_CLASSES[kind])  # type: ignore[no-any-return]

    def __init__(self, kind: str, **fields: Any) -> None:
        self.__dict__.update(fields)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"an ONNX {self.kind} has no field {name!r}")

    def __repr__(self) -> str:
        return f"{self.kind}({', '.join(f'{name}={x!r:.60}' for name, x in vars(self).items())})"


_CLASSES: Final[dict[str, Any]] = {
    kind: type(kind, (ProtoMessage,), {f.name: f.default for f in fields.values()} | {"kind": kind})
    for kind, fields in FIELDS.items()
}


def _damaged(reason: str) -> EncodingError:
    """Return the error for bytes that are not a message of protobuf."""
    return EncodingError(f"{reason}; export or download the file again")


def decode(data: Bytes, kind: str = "Model", depth: int = 0) -> ProtoMessage:
    """Decode a message of a kind. Raises `EncodingError` for malformed bytes."""
    if depth > 100:  # the limit of protobuf
        raise _damaged(f"messages are nested more than {depth - 1} deep")
    message = object.__new__(_CLASSES[kind])
    values, readers = message.__dict__, _READERS[kind]
    numbers: dict[str, list[Any]] = {}
    place, end = 0, len(data)
    if end < 4096:
        data = bytes(data)  # slices of bytes are faster
    while place < end:
        key = data[place]
        place += 1
        if key > 127:
            key, place = _varint(data, place - 1)
        wire = key & 7
        value: Any
        if wire == 2:
            size = data[place] if place < end else 128
            if size < 128:  # the common case, without a call, which would dominate the time
                place += 1
            else:
                size, place = _varint(data, place)
        elif wire == 0:
            value = data[place] if place < end else 128
            if value < 128:
                place += 1
            else:
                value, place = _varint(data, place)
        elif wire in _WIDTHS:
            size = _WIDTHS[wire]
        else:
            raise _damaged(f"field {key >> 3} of {kind}: unknown wire type {wire}")
        if wire:
            if size > end - place:
                raise _damaged(
                    f"field {key >> 3} of {kind}: expected {size} bytes, but only {end - place} "
                    f"remain"
                )
            value = data[place : place + size]
            place += size
        reader = readers.get(key)
        if reader is None:
            if key >> 3 in FIELDS[kind]:
                name = FIELDS[kind][key >> 3].name
                raise _damaged(f"{kind}.{name}: unexpected wire type {wire}")
            continue
        name, inner, many, is_number = reader
        if is_number:  # or packed numbers
            if wire == 2:
                value = _packed(value, inner)
            else:
                value = np.frombuffer(value, _FIXED[inner])[0].item() if wire else _signed(value)
            if many:
                numbers.setdefault(name, []).append(value)
            else:
                values[name] = value
            continue
        if inner == "str":
            try:
                value = str(value, "utf-8")
            except UnicodeDecodeError:
                raise _damaged(
                    f"{kind}.{name}: expected UTF-8, got {bytes(value[:20])!r}"
                ) from None
        elif inner == "Attribute" and size < 64:
            value = _attribute(bytes(value), depth + 1)
        elif inner != "bytes":
            value = decode(value, inner, depth + 1)
        if not many:
            values[name] = value
        elif name in values:
            values[name].append(value)
        else:
            values[name] = [value]
    for name, parts in numbers.items():
        values[name] = _joined(parts)
    return message  # type: ignore[no-any-return]


@memoized(1024)
def _attribute(data: bytes, depth: int) -> ProtoMessage:
    """Decode a short attribute. Equal attributes share a message, which is never changed."""
    return decode(data, "Attribute", depth)


def _joined(parts: Sequence[Any]) -> np.ndarray[Any, Any]:
    """Concatenate the numbers of a repeated field, which are single or packed."""
    if all(part.__class__ is np.ndarray for part in parts):
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
    if not any(part.__class__ is np.ndarray for part in parts):
        return np.array(parts)
    return np.concatenate([np.atleast_1d(part) for part in parts])


def _varint(data: Bytes, place: int) -> tuple[int, int]:
    """Decode the number at an offset; return it and the offset after it."""
    result = shift = 0
    try:
        while True:
            byte = data[place]
            place += 1
            if byte < 128:
                return result | byte << shift, place
            result |= (byte & 127) << shift
            shift += 7
            if shift > 63:
                raise _damaged("expected a number of at most 10 bytes, got more")
    except IndexError:
        raise _damaged("the data ends within a number") from None


def _signed(value: int) -> int:
    """Return 64 bits as a signed number."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _packed(value: Bytes, kind: str) -> np.ndarray[Any, Any]:
    """Decode packed numbers."""
    if kind == "int":
        return _varints(np.frombuffer(value, np.uint8))
    dtype = _FIXED[kind]
    if len(value) % dtype.itemsize:
        raise _damaged(f"expected a multiple of {dtype.itemsize} bytes, got {len(value)}")
    return np.frombuffer(value, dtype)


def _varints(data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Decode packed integers together, by the offset of the last byte of each integer."""
    ends = np.flatnonzero(data < 128)
    if len(data) and (not len(ends) or ends[-1] != len(data) - 1):
        raise _damaged("the data ends within a number")
    starts = np.concatenate([np.zeros(1, ends.dtype), ends[:-1] + 1])[: len(ends)]
    longest = int((ends - starts).max(initial=-1)) + 1
    if longest > 10:
        raise _damaged("expected a number of at most 10 bytes, got more")
    numbers = np.zeros(len(ends), np.uint64)
    for i in range(longest):
        there = ends - starts >= i
        numbers[there] |= (data[starts[there] + i] & 127).astype(np.uint64) << np.uint64(7 * i)
    return numbers.view(np.int64)
