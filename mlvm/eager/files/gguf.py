"""GGUF files: metadata, and tensors in low-bit blocks, memory-mapped.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. A tensor in blocks becomes two tensors.
The name refers to the elements, in a low-bit or 8-bit dtype. Name + `.scale` refers to one scale
per group, or pairs of scale and offset, as for `quantized_matmul`. No value is rounded.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from mlvm.core.errors import ShapeError, WeightsError
from mlvm.core.op import MAX_NESTING
from mlvm.core.ops import few
from mlvm.core.ops.half import widened
from mlvm.core.types import Array, DType, TensorType, bf16, f16, f32, i4, i8, u4, u8
from mlvm.eager.files.safetensors import damaged

MAGIC: Final = b"GGUF"
SCALE: Final = ".scale"
_VERSIONS: Final = (2, 3)
_NUMBERS: Final = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
"""The formats of numbers in the metadata, by code."""
_TEXT, _LIST = 8, 9
_ALIGNMENT: Final = "general.alignment"


class Format(NamedTuple):
    """Block format: elements and bytes per block, element dtype, and the unpacking function."""

    name: str
    elements: int
    nbytes: int
    dtype: DType
    unpack: Callable[[Array], tuple[Array, Array]] | None = None


# --- blocks: u8[n, bytes] -> elements [n, elements], scales [n, groups] or [n, groups, 2] ------


def _half(blocks: Array, at: int) -> Array:
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(x: Array) -> Array:
    """Unpack nibbles [n, m] -> [n, 2 m]: for 16 or 32 bytes the low nibbles, then the high ones."""
    return np.concatenate([x & 15, x >> 4], axis=-1)


def _bits(x: Array, count: int, width: int = 1) -> Array:
    """Unpack bits [n, m] -> [n, count, m], the lowest bits first."""
    shifts = np.arange(0, count * width, width, dtype=np.uint8)[:, np.newaxis]
    return np.asarray(x[:, np.newaxis] >> shifts & (1 << width) - 1)


def _fifth(blocks: Array, at: int) -> Array:
    """Unpack the fifth bits of 32 elements from four bytes."""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << 4


def _with_least(blocks: Array) -> Array:
    return np.stack([_half(blocks, 0), _half(blocks, 2)], axis=-1)


def _q5_0(blocks: Array) -> tuple[Array, Array]:
    values = _nibbles(blocks[:, 6:]) | _fifth(blocks, 2)
    return values.view(np.int8) - np.int8(16), _half(blocks, 0)


def _scales_of_k(blocks: Array) -> Array:
    """Unpack the eight scales and offsets of Q4_K and Q5_K, six bits each in twelve bytes."""
    a, b, c = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scale = np.concatenate([a & 63, c & 15 | a >> 2 & 48], axis=1) * _half(blocks, 0)
    offset = np.concatenate([b & 63, c >> 4 | b >> 2 & 48], axis=1) * -_half(blocks, 2)
    return np.stack([scale, offset], axis=-1)


def _q2_k(blocks: Array) -> tuple[Array, Array]:
    values = _bits(blocks[:, 16:80].reshape(-1, 32), 4, 2)
    scale, offset = blocks[:, :16] & 15, blocks[:, :16] >> 4
    pairs = np.stack([scale * _half(blocks, 80), offset * -_half(blocks, 82)], axis=-1)
    return values.reshape(len(blocks), 256), pairs


def _q3_k(blocks: Array) -> tuple[Array, Array]:
    n = len(blocks)
    low = _bits(blocks[:, 32:96].reshape(-1, 32), 4, 2).reshape(n, 256)
    values = low | _bits(blocks[:, :32], 8).reshape(n, 256) << 2
    scale = _bits(blocks[:, 96:104], 2, 4).reshape(n, 16)
    scale = scale | _bits(blocks[:, 104:108], 4, 2).reshape(n, 16) << 4
    return values - 4 & 15, (scale.view(np.int8) - np.int8(32)) * _half(blocks, 108)


def _q4_k(blocks: Array) -> tuple[Array, Array]:
    lines = blocks[:, 16:].reshape(len(blocks), 4, 32)
    return _nibbles(lines).reshape(len(blocks), 256), _scales_of_k(blocks)


def _q5_k(blocks: Array) -> tuple[Array, Array]:
    low = _nibbles(blocks[:, 48:].reshape(len(blocks), 4, 32)).reshape(len(blocks), 8, 32)
    return (low | _bits(blocks[:, 16:48], 8) << 4).reshape(len(blocks), 256), _scales_of_k(blocks)


def _q6_k(blocks: Array) -> tuple[Array, Array]:
    n = len(blocks)
    low = _nibbles(blocks[:, :128].reshape(n, 2, 64)).reshape(n, 8, 32)
    high = _bits(blocks[:, 128:192].reshape(-1, 32), 4, 2).reshape(n, 8, 32)
    scale = blocks[:, 192:208].view(np.int8) * _half(blocks, 208)
    return ((low | high << 4).view(np.int8) - np.int8(32)).reshape(n, 256), scale


_IQ4: Final = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)
"""Values of the sixteen codes of IQ4_NL and IQ4_XS."""
_E2M1: Final = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Twice the values of the codes of MXFP4; the code of -0 has the value 0."""


def _iq4_xs(blocks: Array) -> tuple[Array, Array]:
    n = len(blocks)
    low = _bits(blocks[:, 4:8, np.newaxis].reshape(-1, 1), 2, 4).reshape(n, 8)
    high = _bits(blocks[:, 2:4, np.newaxis].reshape(-1, 1), 4, 2).reshape(n, 8)
    scale = (low | high << 4).view(np.int8) - np.int8(32)
    values = _nibbles(blocks[:, 8:].reshape(n, 8, 16)).reshape(n, 256)
    return _IQ4[values], scale * _half(blocks, 0)


def _mxfp4(blocks: Array) -> tuple[Array, Array]:
    half = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)  # exp2 rounds 2**127
    return _E2M1[_nibbles(blocks[:, 1:])], half


_FORMATS: Final = {
    0: Format("F32", 1, 4, f32),
    1: Format("F16", 1, 2, f16),
    2: Format("Q4_0", 32, 18, i4, lambda x: (_nibbles(x[:, 2:]) ^ 8, _half(x, 0))),  # minus 8
    3: Format("Q4_1", 32, 20, u4, lambda x: (_nibbles(x[:, 4:]), _with_least(x))),
    6: Format("Q5_0", 32, 22, i8, _q5_0),
    7: Format("Q5_1", 32, 24, u8, lambda x: (_nibbles(x[:, 8:]) | _fifth(x, 4), _with_least(x))),
    8: Format("Q8_0", 32, 34, i8, lambda x: (x[:, 2:].view(np.int8), _half(x, 0))),
    10: Format("Q2_K", 256, 84, u4, _q2_k),
    11: Format("Q3_K", 256, 110, i4, _q3_k),
    12: Format("Q4_K", 256, 144, u4, _q4_k),
    13: Format("Q5_K", 256, 176, u8, _q5_k),
    14: Format("Q6_K", 256, 210, i8, _q6_k),
    20: Format("IQ4_NL", 32, 18, i8, lambda x: (_IQ4[_nibbles(x[:, 2:])], _half(x, 0))),
    23: Format("IQ4_XS", 256, 136, i8, _iq4_xs),
    30: Format("BF16", 1, 2, bf16),
    39: Format("MXFP4", 32, 17, i8, _mxfp4),
}


class GgufEntry(NamedTuple):
    """A tensor's format and type, and the file offset of the first byte.

    A tensor in a different format, of which `format` is the number, can be skipped, but not
    read."""

    format: Format | int
    type: TensorType
    start: int
    stop: int


class GgufFile:
    """The tensors of a file by name, in file order, and the metadata by name, `plain`.

    The file is mapped into memory: only the header is read before a tensor is requested.

    Raises `OSError` if the file cannot be read; `WeightsError`, without the name of the file, if it
    is not a GGUF file, is damaged, or is one part of several.
    """

    def __init__(self, file: Path) -> None:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            content: Any = mmap.mmap(stream.fileno(), size, access=mmap.ACCESS_READ)
        self._content = memoryview(content)
        self._at, self._size = 4, size
        version = self._number("I")
        if version not in _VERSIONS:
            raise WeightsError(
                f"expected GGUF version 2 or 3, little-endian, got version {version}"
            )
        tensors, values = self._number("Q"), self._number("Q")
        self.plain: Final[dict[str, Any]] = {}
        for _ in range(self._count(values, 13)):
            name = self._text()
            if name in self.plain:
                raise damaged(f"the metadata contains {name} twice")
            self.plain[name] = self._value(self._number("I"))
        parts = self.plain.get("split.count", 1)
        if parts not in (0, 1):  # llama-gguf-split --merge writes 0
            number = self.plain.get("split.no", 0)
            part = number + 1 if type(number) is int else number
            raise WeightsError(
                f"expected a whole model, got part {part} of {parts}; run "
                f"`llama-gguf-split --merge FIRST_PART MERGED.gguf`"
            )
        entries = [self._entry() for _ in range(self._count(tensors, 24))]
        alignment = self.plain.get(_ALIGNMENT, 32)
        if type(alignment) is not int or not 0 < alignment <= 1 << 20:
            raise damaged(f"expected an alignment from 1 to {1 << 20}, got {alignment!r}")
        start = -(-self._at // alignment) * alignment
        self._stored: Final[dict[str, GgufEntry]] = {}
        self.entries: Final[dict[str, TensorType]] = {}
        for name, entry in entries:
            entry = entry._replace(start=start + entry.start, stop=start + entry.stop)
            if entry.stop > size:
                raise damaged(
                    f"expected a file of at least {entry.stop} bytes, for {name}, got {size} bytes"
                )
            form = entry.format
            own = [name, name + SCALE] if isinstance(form, Format) and form.unpack else [name]
            for each in own:
                if each in self.entries:
                    raise damaged(f"the file contains {each} twice")
                self.entries[each] = entry.type
            self._stored[name] = entry

    metadata: Final[dict[str, str]] = {}

    def read(self, name: str, keep_halves: bool = False) -> Array:
        """Read a tensor, or the scales; convert f16 and bf16 to f32 unless `keep_halves`.

        Raises `WeightsError` if the format is not supported."""
        entry = self._stored.get(name)
        is_scale = entry is None
        if entry is None:
            entry = self._stored[name.removesuffix(SCALE)]
        form, type = entry.format, entry.type
        if isinstance(form, int):
            formats = ", ".join(each.name for each in _FORMATS.values())
            raise WeightsError(
                f"{name} has format {form}; supported formats are {formats}; omit it with where="
            )
        data = np.frombuffer(self._content[entry.start : entry.stop], np.uint8)
        if form.unpack is None:
            array = data.view(form.dtype.numpy).reshape(type.shape)
            return widened(array) if form.dtype.is_half and not keep_halves else array
        with np.errstate(all="ignore"):  # scales may be nan or infinite
            values, scale = form.unpack(data.reshape(-1, form.nbytes))
        rows = type.shape[:-1]
        if is_scale:
            groups = type.shape[-1] // form.elements * scale.shape[1]
            return scale.reshape(*rows, groups, *scale.shape[2:])  # pairs with offsets
        values = values.reshape(type.shape)
        if not form.dtype.is_storage:
            return values
        packed = np.empty(type.array_shape, form.dtype.numpy)
        few.pack(packed, values)
        return packed

    # --- the header ---

    def _entry(self) -> tuple[str, GgufEntry]:
        name, ndim = self._text(), self._number("I")
        if ndim > 4:
            raise damaged(f"{name}: expected at most 4 axes, got {ndim}")
        shape = [self._number("Q") for _ in range(ndim)][::-1]
        code, start = self._number("I"), self._number("Q")
        form = _FORMATS.get(code)
        size = math.prod(shape)
        if form is None:
            return name, GgufEntry(code, self._type(name, u8, shape), start, start)
        if size * form.nbytes > form.elements * self._size or start > self._size:
            raise damaged(f"{name} exceeds the file: {form.name} of shape {shape}")
        if form.unpack and (not shape or shape[-1] % form.elements):
            raise damaged(f"{name}: expected rows of {form.elements}-element blocks, got {shape}")
        type = self._type(name, form.dtype, shape)
        return name, GgufEntry(form, type, start, start + size // form.elements * form.nbytes)

    def _type(self, name: str, dtype: DType, shape: list[int]) -> TensorType:
        try:
            return TensorType(dtype, shape)
        except ShapeError as error:
            raise WeightsError(f"{name}: {error}") from None

    def _take(self, nbytes: int) -> memoryview:
        if nbytes > self._size - self._at:
            raise damaged(f"the file ends after {self._size} bytes, inside the header")
        self._at += nbytes
        return self._content[self._at - nbytes : self._at]

    def _number(self, form: str) -> Any:
        return struct.unpack("<" + form, self._take(struct.calcsize("<" + form)))[0]

    def _count(self, count: int, least: int) -> int:
        """Read the count of items of at least `size` bytes; check it against the bytes left."""
        if count * least > self._size - self._at:
            raise damaged(f"expected {count} items at {self._at}, got a file of {self._size} bytes")
        return count

    def _text(self) -> str:
        return str(self._take(self._number("Q")), "utf-8", "surrogateescape")

    def _value(self, code: int, depth: int = 0) -> Any:
        if code in _NUMBERS:
            return self._number(_NUMBERS[code])
        if code == _TEXT:
            return self._text()
        if code != _LIST or depth == MAX_NESTING:
            raise damaged(f"invalid metadata: a value of kind {code}, nested {depth} lists deep")
        kind, count = self._number("I"), self._number("Q")
        if kind in _NUMBERS:
            dtype = np.dtype("<" + _NUMBERS[kind])
            data = self._take(self._count(count, dtype.itemsize) * dtype.itemsize)
            return np.frombuffer(data, dtype).tolist()
        return [self._value(kind, depth + 1) for _ in range(self._count(count, 8))]
