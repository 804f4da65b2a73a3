"""Random draws from keys, and dropout: `kernels/random.c`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from mlvm.core.op import Attributes
from mlvm.core.ops.random import FOLD, SPLIT
from mlvm.core.types import f32
from mlvm.machines.native._native import DRAW_UNIT, KernelCall
from mlvm.machines.native.elements import integer_kind, wrapped
from mlvm.machines.native.planner import Types, kernel_call, planner
from mlvm.machines.ziggurat import ziggurat


@planner("uniform")
def uniform(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    dtype = types[0].dtype
    return _draws(f"uniform_{dtype.name}", types, per_word=2 if dtype is f32 else 1)


@planner("dropout")
def dropout(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    rate = attributes["rate"]
    return _draws(f"dropout_{types[0].dtype.name}", types, (rate, 1 / (1 - rate)), per_word=2)


@planner("bernoulli")
def bernoulli(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    out, _, p = types
    period = p.shape
    while period[:1] == (1,):
        period = period[1:]
    if period != out.shape[out.ndim - len(period) :]:
        return None
    return _draws(f"bernoulli_{p.dtype.name}", types, chances=p.size)


@planner("split_key")
def split_key(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    return _draws("random_words", types, purpose=SPLIT)


@planner("fold_in")
def fold_in(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    return _draws("random_words", types, purpose=FOLD, kind=integer_kind(types[2].dtype))


@planner("normal")
def normal(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    tables = ziggurat(types[0].dtype)
    if tables is None:
        return None
    widths, inside, density = tables
    return _follow(
        f"normal_{types[0].dtype.name}", types, 4, floats=(*widths, *density), rest=inside
    )


@planner("randint")
def randint(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    low, most = attributes["low"], attributes["high"] - 1 - attributes["low"]
    size = types[0].dtype.itemsize
    word = size if size < 8 else 4 if most < 1 << 32 else 8
    integers = {"low": wrapped(low), "most": wrapped(most), "word": word}
    return _follow(f"randint_u{8 * size}", types, 3, integers)


@planner("permutation")
def permutation(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    return _follow("permutation", types, 6) if types[0].size < 1 << 32 else None


def _follow(
    kernel: str,
    types: Types,
    each: float,
    integers: Mapping[str, int] = MappingProxyType({}),
    floats: Sequence[float] = (),
    rest: Sequence[int] = (),
) -> KernelCall | None:
    """Plan sequential draws, because some words are rejected. `each`: nanoseconds per draw."""
    if sys.byteorder != "little":
        return None
    count = types[0].size
    integers = {"count": count, **integers}
    return kernel_call(
        kernel, len(types), min(count, 1), 50 + each * count, integers, floats, rest=rest
    )


def _draws(
    kernel: str, types: Types, floats: tuple[float, ...] = (), per_word: int = 1, **integers: int
) -> KernelCall | None:
    if sys.byteorder != "little":
        return None
    count = types[0].size
    words = -(-count // per_word)
    units, work = -(-words // DRAW_UNIT), words * 3.5
    return kernel_call(kernel, len(types), units, work, {"count": count, **integers}, floats)
