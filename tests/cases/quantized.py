"""Cases of the ops on weights of few bits, by arithmetic on their codes."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlvm.core.types import Array, DType
from tests.cases.case import Case

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
    """Return the value of a code of that many bits."""
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
    unpacked = np.stack(codes, axis=-1).reshape(*x.shape[:-1], x.shape[-1] * dtype.per_byte)
    return np.asarray(np.vectorize(lambda c: _value(int(c), dtype.name), otypes="d")(unpacked))


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


def _convolved(x: Array, kernel: Array, x_zero: Array, kernel_zero: Array, **how: Any) -> Any:
    """Place by place of the window, on a frame of zeros."""
    (top, bottom), (left, right) = how["padding"]
    wide = np.pad(x.astype(int) - int(x_zero), ((0, 0), (top, bottom), (left, right), (0, 0)))
    weights, groups = kernel.astype(int) - int(kernel_zero), how.get("groups", 1)
    outputs, tall, across, inputs = kernel.shape
    (down, right), (dy, dx) = (how.get("stride", (1, 1)), how.get("dilation", (1, 1)))
    high = (wide.shape[1] - (tall - 1) * dy - 1) // down + 1
    broad = (wide.shape[2] - (across - 1) * dx - 1) // right + 1
    total = np.zeros((len(x), high, broad, outputs), int)
    for i, j in np.ndindex(tall, across):
        part = wide[:, i * dy :: down, j * dx :: right][:, :high, :broad]
        part = part.reshape(*part.shape[:3], groups, inputs)
        by = weights[:, i, j].reshape(groups, outputs // groups, inputs)
        total += np.einsum("nhwgi,goi->nhwgo", part, by).reshape(total.shape)
    return total.astype(np.int32)


def _image_case(x: Any, kernel: Any, shape: Any, outputs: int, window: Any, **how: Any) -> Case:
    of_x = _rng.integers(0, 256, shape).astype(np.uint8).view(x)
    each = shape[-1] // how.get("groups", 1)
    weights = _rng.integers(0, 256, (outputs, *window, each)).astype(np.uint8).view(kernel)
    zeros = np.array(100, x), np.array(77, kernel)
    return Case((of_x, weights, *zeros), _convolved, {"padding": ((1, 1), (0, 2)), **how})


def _quantised(x: Array, scale: Array, zero: Array) -> Any:
    limits = np.iinfo(zero.dtype)
    exact = np.round(x.astype(float) / scale.astype(float)) + zero
    return np.clip(np.nan_to_num(exact, nan=0.0), limits.min, limits.max).astype(zero.dtype)


_SPECIAL = np.array([[np.nan, np.inf, -np.inf, 0.5, 1.5, -2.5, 1e9, -300.0]], np.float32)


def _unpacked(x: Array) -> Any:
    kinds = {"i": np.int8, "u": np.uint8, "f": np.float32}
    return _values(x).astype(kinds[DType.of(x.dtype).name[0]])


def _code(x: Any, dtype: str) -> int:
    """Return the code of the nearest value, of two the even one; of integers, the last bits."""
    bits = 8 // DType.named(dtype).per_byte
    if dtype[0] != "f":
        values = [_value(code, dtype) for code in range(1 << bits)]
        if isinstance(x, np.floating):
            x = np.clip(np.nan_to_num(np.trunc(x)), min(values), max(values))
        return int(x) & ((1 << bits) - 1)
    half = 1 << (bits - 1)
    most = {"f8e4m3": 0x7F, "f8e5m2": 0x7C, "f4e2m1": 7}[dtype]  # nan, inf and 6
    if np.isnan(x):
        return 0 if dtype == "f4e2m1" else half - 1
    size = min(abs(x), _value(most, dtype))
    nearest = min(range(most + 1), key=lambda code: (abs(_value(code, dtype) - size), code % 2))
    return nearest + half * bool(np.signbit(x))


def _packed(x: Array, dtype: str) -> Array:
    own = DType.named(dtype)
    codes = np.array([_code(each, dtype) for each in x.flat]).reshape(-1, own.per_byte)
    packed = sum(codes[:, i] << (8 // own.per_byte * i) for i in range(own.per_byte))
    return np.asarray(packed, np.uint8).view(own.numpy).reshape(*x.shape[:-1], -1)


FEW = ("i4", "u4", "i2", "u2", "f8e4m3", "f8e5m2", "f4e2m1")
_EXACT = np.array([[0, 1, 2, 3]], np.float32)
_FLOATS = np.array([
    *(0.5, -0.0, 6, 100, -100, 0.25, 0.75, -1.75, 2.5, 5, -5, 3.5, 1.9, -1.9, np.nan, np.inf),
    *(-np.inf, 1e-9, 448, 464, 465, -480, 57344, 61439, 61440, -61441, 3e38, -300),
    *(2**-17, 1.5 * 2**-16, 2**-10, 3 * 2**-10),
])  # fmt: skip

CASES: dict[str, list[Case]] = {
    "pack": [Case((_EXACT,), _packed, {"dtype": dtype}) for dtype in FEW]
    + [
        Case((np.array([3, -8, 7, 1], np.int32),), _packed, {"dtype": "i4"}),
        *[Case((_FLOATS,), _packed, {"dtype": dtype}) for dtype in FEW],
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
            ((20, 40), 35, 40, (1,)),
            ((17, 192), 19, 192, (3, 2)),
            ((13, 4480), 5, 4480, (1,)),
        )
    ],
    "integer_matmul": [
        Case(
            (
                _rng.integers(0, 256, (*m, k)).astype(np.uint8).view(x),
                _rng.integers(0, 256, (n, k)).astype(np.uint8).view(y),
            ),
            lambda x, y: x.astype("i4") @ y.astype("i4").T,
        )
        for x in (np.int8, np.uint8)
        for y in (np.int8, np.uint8)
        for m, n, k in (
            *(((3,), 5, 7), ((2, 3), 17, 130), ((), 3, 64)),
            *(((41,), n, 150) for n in (35, 70, 140)),
        )
    ],
    "integer_conv2d": [
        _image_case(x, kernel, *rest, **how)
        for x in (np.int8, np.uint8)
        for kernel in (np.int8, np.uint8)
        for rest, how in (
            (((1, 6, 5, 4), 6, (3, 3)), {}),
            (((2, 9, 8, 5), 35, (3, 2)), {"stride": (2, 1), "dilation": (1, 2)}),
            (((1, 7, 7, 3), 17, (1, 1)), {"padding": ((0, 0), (0, 0))}),
            (((1, 8, 8, 6), 4, (3, 3)), {"groups": 2, "padding": ((0, 2), (3, 1))}),
            (((1, 8, 9, 83), 83, (5, 3)), {"groups": 83, "stride": (2, 1), "dilation": (1, 2)}),
            (((1, 5, 4, 7), 7, (3, 3)), {"groups": 7, "padding": ((2, 1), (3, 0))}),
        )
    ],
    "quantize_linear": [
        Case((x, np.array(0.5, np.float32), np.array(3, dtype)), _quantised)
        for x in (_SPECIAL, 100 * _f32(3, 70))
        for dtype in (np.int8, np.uint8)
    ]
    + [Case((_exact(2, 5), np.full((5,), 0.25, np.float32), np.zeros((5,), np.int8)), _quantised)],
    "dequantize_linear": [
        Case(
            (_rng.integers(0, 99, (3, 5)).astype(dtype), _exact(5), np.array(40, dtype)),
            lambda x, scale, zero: ((x.astype(float) - zero) * scale).astype(np.float32),
        )
        for dtype in (np.int8, np.uint8, np.int32)
    ],
}
