"""Half precision: f16 (IEEE 754 binary16) and bf16 (the upper half of an f32).

Tensors store half precision, and ops compute in f32. An op with a half-precision operand or result
runs the kernel of f32. The operands are widened, which is exact, and the result is rounded once, to
nearest even. Sums and products are therefore accumulated in f32. Integers that promote to half
precision are first rounded to it. Ops that only move elements move the 16 bits.

numpy has f16, but not bf16. Arrays of bf16 have a structured dtype, which numpy can only store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np

from mlvm.core.op import Kernel, Op
from mlvm.core.ops import few
from mlvm.core.ops.block_memory import BLOCK_SIZE, blocks, memory_of
from mlvm.core.types import Array, DType, TensorType, bf16, f16, f32, f64

Convert: TypeAlias = Callable[[Array, Array], None]

_PLACES: Final = frozenset(
    {"condition", "indices", "key", "labels", "lengths", "mask", "n", "start"}
)
"""Operands that do not promote with the others: indices, masks and counts."""

_FILLS: Final = frozenset({"value", "pad_value"})
"""Attributes with values that become elements of the result."""


def is_half(x: Array | TensorType) -> bool:
    """Return whether the elements are f16 or bf16."""
    return x.dtype.itemsize == 2 and x.dtype in (f16.numpy, bf16.numpy)


def have_halves(arrays: Iterable[Array | TensorType]) -> bool:
    """Return whether any of the arrays has elements of f16 or bf16."""
    arrays = tuple(arrays)
    return 2 in [x.dtype.itemsize for x in arrays] and any(map(is_half, arrays))


def suited(op: Op, kernel: Kernel, arrays: Iterable[Array | TensorType]) -> Kernel:
    """Return the kernel for these arrays, or types.

    It is wrapped in `run` if one of them is in half precision and the kernel is not marked
    `takes_halves`.
    """
    if not have_halves(arrays) or getattr(kernel, "takes_halves", False):
        return kernel
    return partial(run, op, kernel, convert)


class OnHalves:
    """Binding of an op for calls with some half-precision arrays.

    The `kernel` handles these arrays. Everything else is delegated to the wrapped binding, which
    may change later.
    """

    def __init__(self, binding: Any, arrays: Sequence[Array]) -> None:
        self._binding = binding
        self._arrays = arrays

    def __getattr__(self, name: str) -> Any:
        return getattr(self._binding, name)

    @property
    def kernel(self) -> Kernel:
        callee = self._binding.callee
        # the name no longer belongs to an op
        if callee.kernel is None or not hasattr(callee, "op"):
            return self._binding.kernel  # type: ignore[no-any-return]
        kernel = suited(callee.op, callee.kernel, self._arrays)
        return self._binding.watched(kernel)  # type: ignore[no-any-return]


def takes_halves(kernel: Kernel) -> Kernel:
    """Mark a kernel that handles half precision itself."""
    setattr(kernel, "takes_halves", True)  # noqa: B010
    return kernel


def run(op: Op, kernel: Kernel, convert: Convert, /, *arrays: Array, **attributes: Any) -> Any:
    """Run an op on arrays with half precision, by a kernel for f32.

    `convert` converts arrays between dtypes.
    """
    if op.name == "astype":
        return convert(*arrays)
    if op.name == "view":  # reinterprets bytes, not values
        return kernel(*arrays, **attributes)
    outs, operands = ((), arrays) if op.dynamic else (arrays[:1], arrays[1:])
    if op.copies_only and _is_moved(op, outs, operands):
        moved = kernel(*[x.view(np.uint16) if is_half(x) else x for x in arrays], **attributes)
        return moved.view(operands[0].dtype) if op.dynamic else None
    wide = _in_common_half(op, operands, convert)
    if op.name == "nextafter" and len({x.dtype for x in (*outs, *wide)}) == 1:
        return _write_next(*outs, *wide)
    for i, x in enumerate(wide):
        if is_half(x):
            wide[i] = memory_of(*x.shape, dtype=f32.numpy)
            convert(wide[i], x)
    if op.dynamic or not is_half(arrays[0]):
        return kernel(*outs, *wide, **attributes)
    out = arrays[0]
    computed, attributes = computed_in(op, DType.of(out.dtype), operands, attributes)
    result = memory_of(*out.shape, dtype=computed.numpy)
    kernel(result, *wide, **attributes)
    if op.name == "uniform":  # rounded toward zero, so that the result is below 1
        bits = result.view(np.uint32)
        bits &= np.uint32(0xFFFFE000 if out.dtype == f16.numpy else 0xFFFF0000)
    convert(out, result)
    return None


def computed_in(
    op: Op, dtype: DType, operands: Iterable[Array | TensorType], attributes: Mapping[str, Any]
) -> tuple[DType, dict[str, Any]]:
    """Return the dtype in which an op computes a half-precision result, and the attributes."""
    attributes = dict(attributes)
    is_named = attributes.get("dtype") == dtype.name
    has_f64 = is_named and any(x.dtype == f64.numpy for x in operands)
    computed = f64 if has_f64 or not op.inputs else f32
    if is_named:
        attributes["dtype"] = computed.name
    for name in _FILLS & attributes.keys():
        attributes[name] = float(shown(cast(np.array(attributes[name]), dtype)))
    return computed, attributes


def promotes(op: Op, operands: Sequence[Array | TensorType]) -> list[bool]:
    """Return for each operand whether it is converted to the common dtype."""
    names = [*op.inputs, *op.inputs[-1:] * (len(operands) - len(op.inputs))]
    return [name not in _PLACES for name in names]


def _is_moved(op: Op, outs: Sequence[Array], operands: Sequence[Array]) -> bool:
    """Return whether results and operands have one dtype, ignoring operands with indices."""
    values = [x for x, counts in zip(operands, promotes(op, operands), strict=True) if counts]
    return len({x.dtype for x in (*outs, *values)}) == 1


def _in_common_half(op: Op, operands: Sequence[Array], convert: Convert) -> list[Array]:
    """Return the operands, with integers rounded to the half precision that all promote to.

    Bools and integers of 8 bits are unchanged, as half precision represents all of them.
    """
    converted, values = list(operands), [i for i, x in enumerate(promotes(op, operands)) if x]
    integers = [i for i in values if converted[i].dtype.kind in "iu" and converted[i].itemsize > 1]
    inexact = {converted[i].dtype for i in values if converted[i].dtype.kind not in "biu"}
    if len(inexact) == 1:
        [dtype] = inexact
        for i in integers if dtype in (f16.numpy, bf16.numpy) else ():
            converted[i] = memory_of(*operands[i].shape, dtype=dtype)
            convert(converted[i], operands[i])
    return converted


def _write_next(out: Array, x: Array, y: Array) -> None:
    """Write the next half-precision number after x toward y, as `nextafter` does.

    It is one step in the order of the bits, in which negative numbers count downwards from 0.
    """
    x, y = np.broadcast_arrays(x, y)
    x_bits, y_bits = x.view(np.uint16), y.view(np.uint16)
    a, b = [np.where(z < 0x8000, z, 0x8000 - z) for z in (x_bits.astype(int), y_bits.astype(int))]
    step = np.sign(b - a)
    after = np.where((a + step < 0) | (a < 0) & (a + step == 0), 0x8000 - a - step, a + step)
    after = np.where((a == b) | np.isnan(widened(y)), y_bits, after)
    after = np.where(np.isnan(widened(x)), x_bits, after)
    np.copyto(out.view(np.uint16), after, casting="unsafe")


def convert(out: Array, x: Array) -> None:
    """Convert the values of x to the dtype of `out`.

    Half-precision results are rounded once; integers of more than 53 bits are first rounded to f64.
    """
    if few.is_few(x):
        x = few.unpacked(x)
    if is_half(x):
        x = widened(x)
    if few.is_few(out):
        few.pack(out, x)
    elif is_half(out):
        narrow(out, x)
    elif x.dtype.kind == "f" and out.dtype.kind in "iu":
        truncate(np, out, x)
    else:
        np.copyto(out, x, casting="unsafe")


def truncate(xp: Any, out: Any, x: Any) -> None:
    """Convert floats to integers: values out of range to the nearest limit, and nan to 0.

    numpy leaves these cases to the processor. `xp` is numpy or a compatible library.
    """
    limits = np.iinfo(out.dtype)
    low, end = float(limits.min), float(limits.max + 1)  # both are exact in x's dtype
    xp.copyto(out, xp.where((x >= low) & (x < end), x, x.dtype.type(0)), casting="unsafe")
    xp.copyto(out, out.dtype.type(limits.min), where=x < low)
    xp.copyto(out, out.dtype.type(limits.max), where=x >= end)


def cast(x: Array, dtype: DType) -> Array:
    """Return the array converted to that dtype as by `astype`; the array itself if it has it."""
    if x.dtype == dtype.numpy:
        return x
    out = np.empty(TensorType.of(x).with_dtype(dtype).array_shape, dtype.numpy)
    with np.errstate(all="ignore"):
        convert(out, x)
    return out


def number_array(value: Any, dtype: DType) -> Array:
    """Return a Python number as an array of that dtype, where a float out of range is inf.

    Raises `OverflowError` for an integer that does not fit.
    """
    with np.errstate(over="ignore"):
        if dtype is bf16:
            return cast(np.array(value, np.float64), bf16)
        return np.array(value, dtype.numpy)


def shown(x: Array) -> Array:
    """Return the array in a dtype that numpy supports: bf16 as f32, low-bit as i8, u8 or f32."""
    if x.dtype.isbuiltin == 1:
        return x
    if few.is_few(x):
        return few.unpacked(x)
    return widened(x) if x.dtype == bf16.numpy else x


def are_true(x: Array) -> Array:
    """Return which elements are true as conditions: in any dtype those that are nonzero.

    Zeros of both signs are false, nan is true. `is_true` of `plan/loop.h` does the same in C.
    """
    return shown(x).astype(bool)


def widened(x: Array) -> Array:
    """Return the half-precision array in f32; the conversion is exact."""
    out = memory_of(*x.shape, dtype=f32.numpy)
    if x.dtype == f16.numpy:
        np.copyto(out, x)
    else:
        bits = out.view(np.uint32)
        np.copyto(bits, x.view(np.uint16))
        np.left_shift(bits, 16, bits)
    return out


def narrow(out: Array, x: Array) -> None:
    """Write real numbers in half precision, rounded to nearest even.

    Values out of range become infinite, and nan stays nan.
    """
    if out.dtype == f16.numpy:
        np.copyto(out, x, casting="unsafe")  # numpy rounds once, also from f64
        return
    if x.size > BLOCK_SIZE and x.flags.c_contiguous and out.flags.c_contiguous:
        flat_out, flat = out.reshape(-1), x.reshape(-1)
        for block in blocks(x.size):
            _write_bf16(flat_out[block], flat[block])
    else:
        _write_bf16(out, x)


def _write_bf16(out: Array, x: Array) -> None:
    if x.dtype != np.float32:
        x = _to_odd(x.astype(np.float64, copy=False))
    bits: Array = np.asarray(x).view(np.uint32)
    upper = np.right_shift(bits, 16)
    # Add half a unit in the last place, or one less if that unit is even: a carry rounds up.
    rounded = np.right_shift(bits + (0x7FFF + (upper & np.uint32(1))), 16)
    np.copyto(out.view(np.uint16), np.where(np.isnan(x), upper | 0x40, rounded), casting="unsafe")


def _to_odd(x: Array) -> Array:
    """Round f64 to f32, to odd: a value between two f32 becomes the f32 with an odd last bit.

    A second rounding to fewer bits then equals one direct rounding of x (Boldo and Melquiond,
    "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd", IEEE
    Trans. Computers 57, 2008).
    """
    nearest = np.asarray(x.astype(np.float32))
    bits = nearest.view(np.uint32)
    bits -= np.abs(nearest) > np.abs(x)
    bits |= (nearest != x) & (x == x)
    return nearest
