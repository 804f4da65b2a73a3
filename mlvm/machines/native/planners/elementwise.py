"""Row functions of `kernels/elementwise.c` for ops and operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from mlvm.core.op import Attributes, Op
from mlvm.core.rules import common_dtype
from mlvm.core.types import DType, TensorType, bool_, f32, f64
from mlvm.machines.native import _native

ROWS: Final = _native.rows()
"""Approximate nanoseconds of row functions per byte of the result, by name."""


class KernelRow(NamedTuple):
    """Row function of an op.

    dtypes: dtypes of the operands; other operands are converted, integers first to `first`.
    result: result dtype; f32 if the op's result is in half precision.
    cost: nanoseconds per element.
    """

    name: str
    dtypes: tuple[DType, ...]
    result: DType
    cost: float
    first: DType | None = None


def row_of(
    op: Op, out: TensorType, operands: Sequence[TensorType], attributes: Attributes
) -> KernelRow | None:
    """Find the row function of an op on operands of these dtypes, or return None."""
    name, dtypes = op.name, tuple([x.dtype for x in operands])
    if name == "where":
        return _row(f"where_{out.dtype.itemsize}", (bool_, out.dtype, out.dtype), out)
    if name == "astype" and dtypes != (out.dtype,):
        through = stage(dtypes[0], out.dtype)
        return _row(conversion(through, out.dtype), (through,), out)
    if name in ("copy", "broadcast_to", "astype") or (
        name in ("real", "conj") and dtypes[0].kind != "complex"
    ):
        return _row(f"copy_{out.dtype.itemsize}", dtypes, out)
    if name in ("quantize_linear", "dequantize_linear"):
        whole = dtypes[2]
        return _row(f"{name}_{whole.name}", (dtypes[0], f32, whole), out)
    if name in ("gelu", "gelu_slope"):
        name = name.replace("gelu", "gelu_tanh" if attributes["approximate"] else "gelu_erf")
    own = f"{name}_{out.dtype.name}"
    if out.dtype.is_half and {*dtypes} == {out.dtype} and own in ROWS:
        return _row(own, dtypes, out)
    dtype = common_dtype(operands)
    if out.dtype.is_float and not dtype.is_inexact:
        dtype = out.dtype  # exp and similar functions of integers
    first, dtype = (dtype, f32) if dtype.is_half else (None, dtype)
    return _row(f"{name}_{dtype.name}", (dtype,) * len(dtypes), out, first)


def _row(
    name: str, dtypes: tuple[DType, ...], out: TensorType, first: DType | None = None
) -> KernelRow | None:
    if name not in ROWS:
        return None
    result = f32 if first is not None and out.dtype.is_half else out.dtype
    return KernelRow(name, dtypes, result, out.dtype.itemsize * ROWS[name], first)


def stage(x: DType, out: DType) -> DType:
    """Return the dtype between x and `out` in a conversion.

    Half precision is first converted to f32. An integer is converted to half precision through a
    float that represents it exactly (rounded beyond 53 bits).
    """
    if x.is_half and out is not f32:
        return f32
    if out.is_half and not (x.is_float or x.is_half):
        return f32 if x.itemsize <= 2 else f64
    return x


def conversion(x: DType, y: DType) -> str:
    """Return the name of the row function that converts x to y, or None."""
    return f"astype_{x.name}_{y.name}"
