"""Cases of the ops on weights of few bits, by arithmetic on their codes."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlvm.core.ops.half import cast
from mlvm.core.types import Array, DType
from tests.core.ops.cases.case import Case

_rng = np.random.default_rng(23)


def _f32(*shape: int) -> Array:
    return _rng.standard_normal(shape, np.float32)


def _exact(*shape: int) -> Array:
    """Numbers whose products and sums f32 has."""
    return _rng.integers(-4, 5, shape).astype(np.float32) / 2


def _codes(dtype: str, *shape: int) -> Array:
    """Random bytes, taken for elements of that dtype; no nans."""
    own = DType.named(dtype)
    data = _rng.integers(0, 256, (*shape[:-1], shape[-1] // own.per_byte), np.uint8)
    if dtype.startswith("f8"):
        data &= 0xBB
    return data.view(own.numpy)


def _value(code: int, dtype: str) -> float:
    """What a code of that many bits means, spelt out."""
    if dtype in ("i4", "i2", "i8"):
        bits = int(dtype[1:])
        return code - (1 << bits) if code >> (bits - 1) else code
    if dtype[0] == "u":
        return code
    exponent_bits, fraction_bits = int(dtype[-3]), int(dtype[-1])
    size = code & ((1 << (exponent_bits + fraction_bits)) - 1)
    exponent, fraction = size >> fraction_bits, size & ((1 << fraction_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    if exponent:
        value = 2.0 ** (exponent - bias) * (1 + fraction / (1 << fraction_bits))
    else:
        value = 2.0 ** (1 - bias) * fraction / (1 << fraction_bits)
    return -value if code != size else value


def _values(x: Array) -> Array:
    dtype = DType.of(x.dtype)
    bits = 8 // dtype.per_byte
    rows = x.view(np.uint8)
    codes = [(rows >> (bits * i)) & ((1 << bits) - 1) for i in range(dtype.per_byte)]
    apart = np.stack(codes, axis=-1).reshape(*x.shape[:-1], x.shape[-1] * dtype.per_byte)
    return np.asarray(np.vectorize(lambda c: _value(int(c), dtype.name), otypes="d")(apart))


def _dequantized(x: Array, scale: Array) -> Array:
    values = _values(x)
    with_offset = scale.ndim > x.ndim
    scales = scale[..., 0] if with_offset else scale
    size = values.shape[-1] // scales.shape[-1]
    out = values * np.repeat(scales.astype(float), size, axis=-1)
    if with_offset:
        out = out + np.repeat(scale[..., 1].astype(float), size, axis=-1)
    return np.asarray(out)


def _product(x: Array, y: Array, scale: Array) -> Any:
    return np.einsum("...k,nk->...n", x.astype(float), _dequantized(y, scale)).astype(np.float32)


def _integers(x: Array, y: Array) -> Any:
    return np.asarray(x.astype(np.int64) @ y.astype(np.int64).T).astype(np.int32)


def _unpacked(x: Array) -> Any:
    kinds = {"i": np.int8, "u": np.uint8, "f": np.float32}
    return _values(x).astype(kinds[DType.of(x.dtype).name[0]])


def _packed(x: Array, dtype: str) -> Array:
    return cast(x, DType.named(dtype))


FEW = ("i4", "u4", "i2", "u2", "f8e4m3", "f8e5m2", "f4e2m1")
_EXACT = np.array([[0, 1, 2, 3]], np.float32)

CASES: dict[str, list[Case]] = {
    "pack": [Case((_EXACT,), _packed, {"dtype": dtype}) for dtype in FEW]
    + [
        Case((np.array([3, -8, 7, 1], np.int32),), _packed, {"dtype": "i4"}),
        Case((np.array([0.5, -0.0, 6, 100]),), _packed, {"dtype": "f4e2m1"}),
    ],
    "unpack": [Case((_codes(dtype, 3, 8),), _unpacked) for dtype in FEW],
    "dequantize": [
        *(Case((_codes(dtype, 2, 16), _f32(2, 4)), _dequantized) for dtype in (*FEW, "i8", "u8")),
        Case((_codes("u4", 3, 16), _f32(3, 2, 2)), _dequantized),
        Case((_codes("i4", 8), _f32(1)), _dequantized),
    ],
    "dequantize_rows": [
        Case(
            (np.array([[1, 0], [2, -1]]), _codes(dtype, 3, 8), _f32(3, *groups)),
            lambda indices, x, scale: _dequantized(x, scale)[indices].astype(np.float32),
        )
        for dtype, groups in (("i4", (2,)), ("u4", (1, 2)), ("i8", (4,)))
    ],
    "quantized_matmul": [
        Case((_exact(*x), _codes(dtype, n, k), _exact(n, *groups)), _product)
        for dtype in (*FEW, "i8", "u8")
        for x, n, k, groups in (
            ((2, 3, 40), 5, 40, (1,)),
            ((1, 128), 19, 128, (2, 2)),
            ((9, 192), 21, 192, (3,)),
            ((192,), 4, 192, (1, 2)),
        )
    ],
    "integer_matmul": [
        Case(
            (
                _rng.integers(0, 256, (*m, k)).astype(np.uint8).view(x),
                _rng.integers(0, 256, (n, k)).astype(np.uint8).view(y),
            ),
            _integers,
        )
        for x in (np.int8, np.uint8)
        for y in (np.int8, np.uint8)
        for m, n, k in (((3,), 5, 7), ((2, 3), 17, 130), ((), 3, 64), ((41,), 35, 70))
    ],
}
