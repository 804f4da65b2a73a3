"""Calls of f32 kernels on rows in half precision: `kernels/halves.c`."""

from __future__ import annotations

from typing import Final

from mlvm.core.op import OPS, Attributes
from mlvm.core.types import bf16, f32
from mlvm.machines.native import _native
from mlvm.machines.native._native import KernelCall
from mlvm.machines.native.planner import HALVES, PLANNERS, Types, kernel_call
from mlvm.machines.native.planners.elementwise import conversion
from mlvm.machines.native.planners.rows import part_of_rows

_WHOLE: Final = frozenset(["scale", "bias"])
_PIECE: Final = 1024  # approximate elements of an operand that are converted together


def halves_call(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    """Plan the f32 kernel for types of which some are in half precision.

    All half-precision types have the same dtype. Return None if no kernel exists.
    """
    floats = {type.dtype for type in types if type.dtype.is_float} - {f32}
    if len(floats) > 1:
        return None
    [half] = floats
    wide = [type.with_dtype(f32) if type.dtype is half else type for type in types]
    is_sum, product = HALVES[op] == "sum", HALVES[op] == "product"
    if is_sum:
        if types[1].dtype is not bf16:
            return None
        wide[1] = types[1]
    child = PLANNERS[op](wide, attributes)
    if child is None or "_of_columns" in child.kernel:
        return None
    # elements, for a product
    if product and (not child.units or sum(type.size for type in types) > (1 << 16)):
        return None
    part, later = 1, product or is_sum
    if op == "layer_norm_scale_vjp":
        part, later = part_of_rows(types[2]), True
    lengths = [type.size // child.units for type in types]
    if part > 1:
        lengths = [part * type.shape[-1] for type in types]
    together = child.units if product else max(1, _PIECE // max(1, *lengths))
    end, rest = 0, []
    for i, (name, type, own) in enumerate(zip(("", *OPS[op].inputs), types, wide, strict=True)):
        kind, size = _native.AS_IT_IS, 0
        if type is not own:
            if i == 0 and later:
                kind = _native.LATER
            elif product or name in _WHOLE:
                kind, size = _native.ENTIRE, type.size
            else:
                kind, size = _native.PIECES, together * lengths[i]
        spec = {"KIND": kind, "LENGTH": lengths[i], "COUNT": type.size, "PLACE": end}
        rest += [spec[field] for field in _native.HALVES_VALUE]
        end += -(-size * 4 // 64) * 64
    shared = -(-types[0].size * 4 // 64) * 64 if later else 0
    integers = {"together": together, "shared_at": shared, "scratch_at": end}
    rows = [conversion(half, f32), conversion(f32, half)]
    head = "halves", len(types), child.units, child.work, integers
    scratch, shared = end + child.scratch, shared + child.shared
    return kernel_call(
        *head, scratch=scratch, shared=shared, children=[child], rest=rest, rows=rows
    )
