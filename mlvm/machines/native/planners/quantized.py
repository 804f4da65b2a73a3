"""Products with weights of few bits, and of bytes: `kernels/quantized.c` and `kernels/bytes.c`."""

from __future__ import annotations

import math
from typing import Final

from mlvm.core.op import Attributes
from mlvm.core.types import i8
from mlvm.machines.native._native import KernelCall
from mlvm.machines.native.planner import Types, kernel_call, planner

_WORDS: Final = 16  # of 32 bits, of weights, that the kernel uses at once
_CACHE: Final = 1 << 18
"""Bytes of x that are laid out at once, roughly."""
_UNIT: Final = 16
_COLUMNS: Final = 32
"""Rows of y, of bytes, that are a unit."""
_MANY: Final = 32
"""So many rows of x are worth copying those of y."""


@planner("quantized_matmul")
def quantized_matmul(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    _, x, y, scale = types
    n, k = y.shape
    groups, per_word = scale.shape[1], 4 * y.dtype.per_byte
    words = k // groups / per_word
    if groups > 1 and words not in (2, 4, 8) and words % _WORDS:
        return None
    row = -(-k // (_WORDS * per_word)) * _WORDS * (per_word + 1) * 4
    m = math.prod(x.shape[:-1])
    at_once = max(4, min(m, _CACHE // (row + 1) // 4 * 4))
    integers = {"m": m, "n": n, "k": k, "groups": groups, "pairs": scale.ndim == 3}
    return kernel_call(
        f"quantized_matmul_{y.dtype}",
        4,
        -(-n // _UNIT),
        50 + n * k * max(0.02 * m, 0.025),
        {**integers, "unit": _UNIT, "at_once": at_once},
        scratch=at_once * row,
    )


@planner("integer_matmul", "packed_integer_matmul")
def integer_matmul(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    _, x, y = types
    packed = op == "packed_integer_matmul"
    n, k = attributes["columns"] if packed else y.shape[0], x.shape[-1]
    panel = math.prod(y.shape[1:-1]) if packed else 0
    m = math.prod(x.shape[:-1])
    many, row = packed or m >= _MANY, -(-k // 64) * 64 + 4
    at_once = max(4, min(m, _CACHE // row // 4 * 4))
    integers = {"m": m, "n": n, "k": k, "unit": _COLUMNS, "at_once": at_once, "many": many}
    integers["y_panel"] = panel
    signs = {"x_signed": x.dtype is i8, "y_signed": y.dtype is i8}
    scratch = 2 * (at_once + _COLUMNS) * row + 64
    work = 50 + m * n * k * (0.002 if many else 0.004)
    work += n * k * (0.1 if many and not packed else 0.02)
    return kernel_call(
        "integer_matmul", 3, -(-n // _COLUMNS), work, {**integers, **signs}, scratch=scratch
    )
