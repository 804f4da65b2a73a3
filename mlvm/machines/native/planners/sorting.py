"""Sorting: `kernels/sorting.c`."""

from __future__ import annotations

from mlvm.core.op import Attributes
from mlvm.core.ops.strides import around
from mlvm.machines.native._native import KernelCall
from mlvm.machines.native.planner import Types, kernel_call, planner


@planner("sort", "argsort", "top_indices")
def sort(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    out, x = types
    (_, length, inner), count = around(x.shape, attributes["axis"]), out.shape[attributes["axis"]]
    # Maximum number of positions that are found without sorting, in rows at least eight times as
    # long.
    is_few = op == "top_indices" and count <= 64 and length >= 8 * count
    # Maximum elements per row; numpy sorts longer rows, because each thread has memory for the keys
    # and positions of two rows.
    if not out.size or length > (1 << 31 if is_few else (1 << 20)):
        return None
    record = 16 if x.dtype.itemsize == 8 else 8
    integers = {"length": length, "inner": inner, "descending": attributes["descending"]}
    integers |= {"count": count, "few": count if is_few else 0}
    work = (2 if is_few else 1.5 * record) * x.size
    scratch = record * count if is_few else 2 * record * length
    kernel = f"{'sort' if op == 'sort' else 'argsort'}_{x.dtype.name}"
    return kernel_call(kernel, 2, x.size // length, work, integers, scratch=scratch)


@planner("searchsorted")
def searchsorted(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    _, edges, x = types
    if not x.size or not edges.size:
        return None
    length = edges.shape[-1]
    integers = {"length": length, "count": x.shape[-1], "right": attributes["right"]}
    work = (4 + length.bit_length()) * x.size
    return kernel_call(f"searchsorted_{x.dtype.name}", 3, x.size, work, integers)
