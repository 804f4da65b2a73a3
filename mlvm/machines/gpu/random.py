"""Random draws with the same bits as on the processor.

They use Philox4x64-10, and numpy's conversions of the generator's words to numbers.

The generator is a function of a key and a counter: all blocks are computed in parallel.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from mlvm.core.ops.random import SPLIT
from mlvm.core.types import Shape, f64, i64
from mlvm.machines.gpu.dtypes import scalar
from mlvm.machines.gpu.kernels import (
    REFUSED,
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
from mlvm.machines.gpu.reductions import adding, running
from mlvm.machines.ziggurat import ziggurat


def _words(to: Argument, key: int, count: int, purpose: int = 0) -> Call:
    items = -(-count // 4)
    return flat_call(source("random.c"), "words", items, (to, key), count, np.uint64(purpose))


@kernel("split_key")
def _split_key(device: Facts, types: Types, *, n: int) -> Calls:
    return [_words(0, 1, 2 * n, SPLIT)]


@kernel("fold_in")
def _fold_in(device: Facts, types: Types) -> Calls:
    text = source("random.c", DATA=types[2].dtype.name)
    return [Call(text, "fold_in", (1,), (1,), (0, 1, 2))]


@kernel("uniform", computes=True)
def _uniform(device: Facts, types: Types, *, shape: Shape, dtype: str) -> Calls:
    if types[0].dtype.is_half:
        return None
    out = types[0]
    text = source("random.c", T=dtype, **({"WIDE": 1} if out.dtype is f64 else {}))
    each = 4 if out.dtype is f64 else 8
    return [flat_call(text, "uniform", -(-out.size // each), (0, 1), out.size)]


@kernel("dropout", computes=True)
def _dropout(device: Facts, types: Types, *, rate: float) -> Calls:
    out = types[0]
    text, items = source("random.c", T=out.dtype.name), -(-out.size // 8)
    numbers = out.size, scalar(out.dtype, 1 / (1 - rate)), np.float32(rate)
    return [flat_call(text, "dropout", items, (0, 1, 2), *numbers)]


@kernel("bernoulli", judges=2)
def _bernoulli(device: Facts, types: Types, *, shape: Shape) -> Calls:
    """Return whether p is one value, or contiguous along adjacent axes."""
    out, _, p = types
    wide = (1,) * (out.ndim - p.ndim) + p.shape
    axes = [i for i, length in enumerate(wide) if length > 1]
    first, end = (axes[0], axes[-1] + 1) if axes else (0, 0)
    if not device.has_f64 or wide[first:end] != out.shape[first:end]:
        return None
    length, behind = math.prod(wide[first:end]), math.prod(out.shape[end:])
    text = source("random.c", T=p.dtype.name, WIDE=1)
    items, args = -(-out.size // 4), (0, 1, 2, REFUSED)
    return [flat_call(text, "bernoulli", items, args, out.size, length, behind)]


@kernel("randint")
def _randint(
    device: Facts, types: Types, *, low: int, high: int, shape: Shape, dtype: str
) -> Calls:
    """Draw with rejection of some words.

    The additional words are insufficient with a probability below 1e-30.
    """
    out = types[0]
    count, span, itemsize = out.size, high - low, out.dtype.itemsize
    bits = 8 * itemsize if itemsize < 8 else 32 if span <= 2**32 else 64
    refused = (2**bits - span) % span
    part = refused / 2**bits
    drawn = math.ceil((count + 12 * math.sqrt(count * part)) / (1 - part))
    drawn = drawn + 128 if refused else count
    text = source("random.c", BITS=bits, OUT=dtype)
    to: Argument = Scratch("drawn", drawn * itemsize) if refused else 0
    is_used: Argument = Scratch("taken", 8 * drawn) if refused else 0  # otherwise it is not written
    numbers = [np.uint64(n % 2**64) for n in (low, span, refused)]
    items = -(-drawn * bits // 256)
    calls = [flat_call(text, "integers", items, (to, is_used, 1), drawn, *numbers)]
    if refused:
        ranks = Scratch("ranks", 8 * drawn)
        calls += running(device, adding(i64), (ranks, "i64"), (is_used, "i64"), (1, drawn, 1))
        calls.append(flat_call(text, "gather_taken", drawn, (0, to, ranks), drawn, count))
    return calls


# --- standard normal values -----------------------------------------------------------


@cache
def _ziggurat() -> str | None:
    """The tables as C source."""
    tables = ziggurat()
    return tables and " ".join(
        f"TABLE f32 {name}[{len(values)}] = {{{', '.join([f'{float(x)!r}f' for x in values])}}};"
        for name, values in tables._asdict().items()
    )


@kernel("normal")
def _normal(device: Facts, types: Types, *, shape: Shape, dtype: str) -> Calls:
    """Draw standard normal values by the ziggurat method on the device.

    In 98 of 100 cases a value needs one word. It needs more words if a word is rejected, and the
    next value starts after the last word. The kernel computes a value from every word, and then
    finds the words at which values start by doubling the number of known starts. It draws 3 % more
    words than values; 2.2 % are needed. f64 values are drawn on the host.
    """
    out, count, tables = types[0], types[0].size, _ziggurat()
    size = count + count // 32 + 256
    if tables is None or out.dtype is f64 or not device.has_f64 or size >= 2**31:
        return None
    text = source("random.c", NORMAL=tables, OUT=dtype)
    stream = Scratch("stream", 8 * (size // 2 + 4))
    values, jumps = Scratch("values", 4 * size), [Scratch(f"jumps{i}", 4 * size) for i in (0, 1)]
    rounds = max(count - 1, 0).bit_length()
    starts = Scratch("starts", 4 << rounds)
    fill = source("indexing.c", T="u8")
    calls = [
        _words(stream, 1, size // 2 + 4),
        flat_call(text, "normals", size, (values, jumps[0], stream), size),
        flat_call(fill, "fill_i32", 1, (starts,), 1, np.int32(0)),
    ]
    for i in range(rounds):
        jump = (starts, jumps[(i + 1) % 2], jumps[i % 2])
        calls.append(flat_call(text, "jump", size, jump, size, 1 << i))
    return [*calls, flat_call(text, "gather_values", count, (0, values, starts), count)]
