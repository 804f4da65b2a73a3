"""Merge sort along an axis: each pass merges runs and doubles their length."""

from __future__ import annotations

from functools import partial
from typing import Final

from mlvm.core.ops.strides import around
from mlvm.core.types import DType
from mlvm.machines.gpu.dtypes import computed
from mlvm.machines.gpu.kernels import (
    Argument,
    Call,
    Calls,
    Facts,
    Scratch,
    Types,
    flat_call,
    kernel,
    source,
)

_RUN: Final = 32  # the same value as RUN in sorting.c


def sorted_rows(
    x: Argument, dtype: DType, sizes: tuple[int, int, int], text: str
) -> tuple[list[Call], Scratch, Scratch]:
    """Return the calls that sort, and the memory of the sorted keys and indices."""
    before, length, behind = sizes
    key = computed(dtype)
    total = before * length * behind
    keys = [Scratch(f"keys{i}", total * key.itemsize) for i in range(2)]
    order = [Scratch(f"order{i}", total * 4) for i in range(2)]
    args = (keys[0], order[0], x)
    calls = [flat_call(text, "begin", total, args, total, length, behind)]
    run, now = _RUN, 0
    while run < length:
        to = 1 - now
        more = (keys[to], order[to], keys[now], order[now])
        calls.append(flat_call(text, "merge", total, more, total, length, run))
        run, now = 2 * run, to
    return calls, keys[now], order[now]


def text_of(dtype: DType, out: DType, descending: bool = False, numbers: bool = False) -> str:
    """Return the C expression of a comparison, in which nan is the largest value."""
    less = "((a) < (b) || ((b) != (b) && (a) == (a)))" if dtype.is_float else "((a) < (b))"
    before = "BEFORE(b, a)" if descending else "BEFORE(a, b)"
    names = {"K": computed(dtype).name, "X": dtype.name, "T": out.name, before: less}
    return source("sorting.c", **names, NUMBERS=int(numbers))


def _sort_into(
    numbers: bool,
    device: Facts,
    types: Types,
    /,
    *,
    axis: int,
    descending: bool,
    count: int | None = None,
) -> Calls:
    """Write the sorted values or, with `numbers`, the indices: all, or the first `count`."""
    out, x = types
    sizes = around(x.shape, axis)
    if sizes[1] >= 2**31:  # indices are i32
        return None
    text = text_of(x.dtype, out.dtype, descending, numbers)
    calls, keys, order = sorted_rows(1, x.dtype, sizes, text)
    lengths = *sizes[1:], sizes[1] if count is None else count
    return [*calls, flat_call(text, "put_back", out.size, (0, keys, order), out.size, *lengths)]


kernel("sort", computes=True)(partial(_sort_into, False))
kernel("argsort", "top_indices", computes=True)(partial(_sort_into, True))
