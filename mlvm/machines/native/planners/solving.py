"""Small matrices: `kernels/solving.c`. LAPACK handles larger matrices."""

from __future__ import annotations

import math
from typing import Final

from mlvm.core.op import Attributes
from mlvm.core.ops.strides import broadcast_steps
from mlvm.core.types import TensorType, f32, f64
from mlvm.machines.native import _native
from mlvm.machines.native._native import KernelCall
from mlvm.machines.native.planner import Types, kernel_call, planner

_SETUP: Final = 20
"""Nanoseconds per matrix, without products."""


def _is_small(*types: TensorType) -> bool:
    one_dtype = types[0].dtype in (f32, f64) and all(x.dtype is types[0].dtype for x in types)
    return one_dtype and 0 < types[0].shape[-1] <= _native.MOST_SMALL


@planner("cholesky", "det")
def factor(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    out, x = types
    if not _is_small(x) or not out.size:
        return None
    size, units = x.shape[-1], math.prod(x.shape[:-2])
    integers = {"size": size, "is_f64": x.dtype is f64, "upper": attributes.get("upper", False)}
    return kernel_call(f"small_{op}", 2, units, (_SETUP + size**3) * units, integers)


@planner("inv", "solve")
def solve(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    out, x, *others = types
    if not _is_small(x, *others) or not out.size:
        return None
    size = x.shape[-1]
    is_vector = bool(others) and others[0].ndim == 1
    columns = 1 if is_vector else out.shape[-1]
    stack = out.shape[:-1] if is_vector else out.shape[:-2]
    y_stack = others[0].shape[:-2] if others else ()
    of_x, of_y = [broadcast_steps(shape, len(stack)) for shape in (x.shape[:-2], y_stack)]
    integers = {"size": size, "is_f64": x.dtype is f64, "columns": columns, "axes": len(stack)}
    units = math.prod(stack)
    work = (_SETUP + size**3 + columns * size**2) * units
    rest = [number for axis in zip(stack, of_x, of_y, strict=True) for number in axis]
    return kernel_call("small_solve", len(types), units, work, integers, rest=rest)
