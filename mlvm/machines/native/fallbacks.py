"""Ops in different dtypes, for types that no kernel supports.

| op | types | computed in |
|---|---|---|
| sum, matmul | an integer result | i64, modulo 2^64; the result is its lower bits |
| matmul, concat | operands of a different dtype than the result | the result dtype |
| any | f16 or bf16 | f32, or f64 (`mlvm.core.ops.half`) |
| any | f32 and f64 | f64 |

Python (`NativeKernel`) and C (`mlvm.build.lower`) convert operands and results by this table. The
first row that matches an op applies; the resulting op may match a different row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from mlvm.core.op import Attributes, Op
from mlvm.core.ops import half
from mlvm.core.types import TensorType, f32, f64, i64
from mlvm.machines.native.planner import Types


class Fallback(NamedTuple):
    """Op in different dtypes: types of the result and operands, and attributes."""

    types: list[TensorType]
    attributes: Attributes


def fallback(op: Op, types: Types, attributes: Attributes) -> Fallback | None:
    """Return the op that replaces an op that has no kernel for these types, or None."""
    if not types:  # a raw VM may pass no types
        return None
    out, *xs = types
    wide, attributes = out.dtype, dict(attributes)
    narrow = wide.is_integer and (wide.itemsize < i64.itemsize or op.name == "sum")
    if op.name in ("sum", "matmul") and narrow and wide is not i64:
        wide, operands = i64, xs
        attributes |= {"dtype": i64.name} if op.name == "sum" else {}
    elif op.name in ("matmul", "concat") and any(x.dtype is not wide for x in xs):
        operands = [x.with_dtype(wide) for x in xs]
    elif half.have_halves(types):
        if not _is_exact(op, xs):
            return None
        operands = [x.with_dtype(f32) if half.is_half(x) else x for x in xs]
        if half.is_half(out):
            wide, attributes = half.computed_in(op, wide, xs, attributes)
    elif f64 in [x.dtype for x in xs]:
        operands = [x.with_dtype(f64) if x.dtype is f32 else x for x in xs]
    else:
        return None
    changed = [out.with_dtype(wide), *operands]
    return Fallback(changed, attributes) if changed != [*types] else None


def _is_exact(op: Op, operands: list[TensorType]) -> bool:
    """Return whether an op on half precision equals the op on f32 with a rounded result.

    `half.run` rounds integers of more than 8 bits first, and implements some ops differently.
    """
    rounded: Any = zip(operands, half.promotes(op, operands), strict=True)
    return not (
        any(is_value and x.dtype.is_integer and x.dtype.itemsize > 1 for x, is_value in rounded)
        or op.dynamic
        or op.name in ("nextafter", "uniform", "astype")
    )
