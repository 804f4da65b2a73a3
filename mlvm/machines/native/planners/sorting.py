"""Order: `kernels/sorting.c`."""

from __future__ import annotations

import math
from typing import Final

from mlvm.core.op import Attributes
from mlvm.core.rules import normalize_axis
from mlvm.machines.native._native import KernelCall
from mlvm.machines.native.planner import Types, kernel_call, planner

_LONGEST: Final = 1 << 20
"""Elements of a row. Longer ones are left to numpy: each thread keeps memory for the keys and
positions of two rows."""


@planner("sort", "argsort")
def sort(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    x = types[1]
    axis = normalize_axis(attributes["axis"], x.ndim)
    length, inner = x.shape[axis], math.prod(x.shape[axis + 1 :])
    if not x.size or length > _LONGEST:
        return None
    record = 16 if x.dtype.itemsize == 8 else 8
    integers = {"length": length, "inner": inner, "descending": attributes["descending"]}
    work, scratch = 1.5 * record * x.size, 2 * record * length
    return kernel_call(f"{op}_{x.dtype.name}", 2, x.size // length, work, integers, scratch=scratch)
