"""Tensors of an ONNX file as numpy arrays, which are views of the file if possible.

Values without an mlvm dtype are widened: floats of 8 and 4 bits to f32, integers of 4 and 2 bits to
i8 and u8.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
from pathlib import Path
from typing import Any, Final

import numpy as np

from mlvm.core.errors import ModelError, counted
from mlvm.core.ops import few
from mlvm.core.ops.few import unpacked
from mlvm.core.types import Array, DType, bf16
from mlvm.onnx.limits import limit
from mlvm.onnx.wire import ProtoMessage

STRING: Final = 8
_DTYPES: Final = "f32 u8 i8 u16 i16 i32 i64 - bool f16 f64 u32 u64 c64 c128 bf16"
DTYPES: Final = {
    number: DType.named(name) for number, name in enumerate(_DTYPES.split(), 1) if name != "-"
}
"""Dtype for each number of `TensorProto.DataType`."""

NAMES: Final = {dtype: number for number, dtype in DTYPES.items()}

STORED: Final = {
    DType.named(name): numbers
    for name, *numbers in (
        *(("f8e4m3", 17, 19), ("f8e5m2", 19, 19), ("u4", 21, 21), ("i4", 22, 21)),
        *(("f4e2m1", 23, 23), ("u2", 25, 25), ("i2", 26, 25)),
    )
}
"""Numbers of storage dtypes, and the first opset in which casts support them."""


def _floats_without_infinity(exponent: int, mantissa: int) -> Array:
    """Return the values of the floats of 8 bits without infinity and -0, by code.

    The code of -0 is nan (https://onnx.ai/onnx/technical/float8.html)."""
    values = few.magnitudes(exponent, mantissa, 1 << exponent - 1)
    return np.concatenate([values, [np.float32(np.nan)], -values[1:]])


_UNPACKED: Final = {numbers[0]: dtype for dtype, numbers in STORED.items()}


def _values(dtype: DType) -> Array:
    """Return the values of a low-bit dtype by code."""
    codes = np.arange(1 << 8 // dtype.per_byte, dtype=np.uint8)
    return unpacked(codes.view(dtype.numpy))[:: dtype.per_byte]


FLOATS: Final = {
    **{number: _values(dtype) for number, dtype in _UNPACKED.items() if dtype in few.FLOATS},
    18: _floats_without_infinity(4, 3),
    20: _floats_without_infinity(5, 2),
    24: np.concatenate([2.0 ** np.arange(-127.0, 128.0), [np.nan]]).astype(np.float32),
}
"""Values of low-bit floats by code."""

INTEGERS: Final = {n: dtype for n, dtype in _UNPACKED.items() if dtype not in few.FLOATS}
"""Low-bit integers."""


def dtype_of(number: int, what: str) -> DType:
    """Return the dtype for values of a `TensorProto.DataType`. Raises `ModelError`."""
    if number in DTYPES:
        return DTYPES[number]
    if number in FLOATS:
        return DType.named("f32")
    if number in INTEGERS:
        return few.unpacked_dtype(INTEGERS[number])
    if number == STRING:
        raise ModelError(f"{what} has strings, which are not supported; remove them from the model")
    raise ModelError(f"{what} has the unknown dtype {number}; convert it with onnx")


_OFTEN: Final = 1 << 22  # bytes


class Files:
    """External data of a model: files in the model's folder, mapped into memory.

    If the model file is a link, they may also be in the folder of the linked file, or be links into
    it.
    """

    def __init__(self, model: Path | None) -> None:
        self.model = model
        self._opened: dict[Path, memoryview] = {}
        self._maps: list[mmap.mmap] = []
        self._copied = 0

    def read(self, tensor: ProtoMessage, size: int) -> memoryview:
        """Return the bytes of a tensor with external data. Raises `ModelError`."""
        places = {pair.key: pair.value for pair in tensor.external_data}
        name = places.get("location", "")
        if self.model is None:
            raise ModelError(
                f"{tensor.name} has external data in {name!r}; load the model from its file"
            )
        if "\0" in name:
            raise ModelError(f"{tensor.name}: expected a file of external data, got {name!r}")
        roots = self.model.parent, Path(os.path.realpath(self.model)).parent
        paths = [Path(os.path.realpath(root / name)) for root in roots]
        inside = [x for x in paths if any(x.is_relative_to(os.path.realpath(y)) for y in roots)]
        path = next((x for x in inside if x.exists()), inside[0] if inside else None)
        if not name or path is None:
            raise ModelError(
                f"{tensor.name} has external data outside of the model's folder: {name!r}; "
                "move it there"
            )
        try:
            data = self._opened.get(path)
            if data is None:
                data = self._opened[path] = self.mapped(path)
            start = int(places.get("offset", 0))
            length = int(places.get("length", 0)) or (len(data) - start if size else 0)
        except (OSError, ValueError) as error:
            raise ModelError(f"cannot read {tensor.name} from {name!r}: {error}") from None
        if start < 0 or length != size or start + length > len(data):
            raise ModelError(
                f"{tensor.name}: expected {size} bytes, got {length} at {start} of {name!r}, which "
                f"has {len(data)}"
            )
        return data[start : start + length]

    def mapped(self, path: Path) -> memoryview:
        """Map a file into memory; pages are read at the first access. Raises `OSError`."""
        if not path.is_file():
            reason = "it is not a regular file" if path.exists() else "the file does not exist"
            raise FileNotFoundError(errno.ENOENT, reason, str(path))
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if (most := limit.get()) is not None:
                most.enter(size)
            if not size:
                return memoryview(b"")
            self._maps.append(mmap.mmap(stream.fileno(), size, access=mmap.ACCESS_READ))
        return memoryview(self._maps[-1])

    def forget(self, nbytes: int) -> None:
        """Count copied bytes; after every 4 MiB let the system drop the pages that were read."""
        self._copied += nbytes
        if self._copied > _OFTEN and hasattr(mmap, "MADV_DONTNEED"):
            self._copied = 0
            for each in self._maps:
                each.madvise(mmap.MADV_DONTNEED)


def array_of(tensor: ProtoMessage, files: Files) -> Array:
    """Return the values of a tensor. Raises `ModelError` for an incomplete tensor."""
    number, what = tensor.data_type, f"the tensor {tensor.name!r}"
    shape = tuple(int(n) for n in tensor.dims)
    dtype = dtype_of(number, what)
    if any(n < 0 for n in shape) or len(shape) > 64:
        raise ModelError(
            f"{what}: expected a shape of at most 64 lengths >= 0, got {list(shape)[:9]}"
        )
    size = math.prod(shape)
    per_byte = _UNPACKED[number].per_byte if number in _UNPACKED else 1
    nbytes = size * dtype.itemsize if number in DTYPES else -(-size // per_byte)
    raw: Any = files.read(tensor, nbytes) if tensor.data_location == 1 else tensor.raw_data
    if raw is not None:
        if len(raw) != nbytes:
            raise ModelError(
                f"{what}: expected {counted(nbytes, 'byte')} for {list(shape)}, got {len(raw)}"
            )
        stored = np.uint8 if number not in DTYPES else dtype.numpy.newbyteorder("<")
        flat = np.frombuffer(raw, stored)
    else:
        flat = _listed(tensor, number, dtype, size if number in DTYPES else nbytes, what)
    if number not in DTYPES:
        flat = widened(flat, number, size)
    if number == 9 and raw is not None:
        flat = flat.view(np.uint8) != 0
    try:
        return flat.reshape(shape)
    except ValueError as error:  # no elements, but lengths that numpy does not support
        raise ModelError(f"{what}: invalid shape {list(shape)}: {error}") from None


_LISTS: Final = {
    **dict.fromkeys((1, 14), "float"),
    **dict.fromkeys((11, 15), "double"),
    7: "int64",
    12: "uint64",
    13: "uint64",
}
"""Fields with a tensor's values, by dtype; all other dtypes use 32-bit integers."""


def _listed(tensor: ProtoMessage, number: int, dtype: DType, count: int, what: str) -> Array:
    """Return the values of a tensor that stores a list of numbers."""
    values = getattr(tensor, f"{_LISTS.get(number, 'int32')}_data")
    array = np.asarray(values, None if len(values) else np.int64)
    count *= 2 if dtype.kind == "complex" else 1
    if len(array) != count:
        raise ModelError(f"{what}: expected {counted(count, 'value')}, got {len(array)}")
    if dtype.kind == "complex":
        return array.view(dtype.numpy)
    if number in (10, 16):
        return array.astype(np.uint16).view(dtype.numpy)
    return array.astype(np.uint8 if number not in DTYPES else dtype.numpy)


def widened(codes: Array, number: int, size: int) -> Array:
    """Decode low-bit codes. A byte contains one, two or four codes, the first in the low bits."""
    if number not in _UNPACKED:
        return FLOATS[number][codes]
    return unpacked(codes.view(_UNPACKED[number].numpy))[:size]


def is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray)


def is_known(array: Any) -> bool:
    """Return whether `array` is a numpy array with a dtype in which numpy computes (not bf16)."""
    return isinstance(array, np.ndarray) and array.dtype != bf16.numpy
