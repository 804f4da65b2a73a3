"""Draws from keys, and dropout: `kernels/random.c`."""

from __future__ import annotations

import sys

from mlvm.core.op import Attributes
from mlvm.core.ops.random import FOLD, SPLIT
from mlvm.core.types import f32
from mlvm.machines.native._native import DRAW_UNIT, KernelCall
from mlvm.machines.native.elements import integer_kind
from mlvm.machines.native.planner import Types, kernel_call, planner


@planner("uniform")
def uniform(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    dtype = types[0].dtype
    return _draws(f"uniform_{dtype}", types, per_word=2 if dtype is f32 else 1)


@planner("dropout")
def dropout(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    rate = attributes["rate"]
    return _draws(f"dropout_{types[0].dtype}", types, (rate, 1 / (1 - rate)), per_word=2)


@planner("bernoulli")
def bernoulli(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    out, _, p = types
    period = p.shape
    while period[:1] == (1,):
        period = period[1:]
    if period != out.shape[out.ndim - len(period) :]:
        return None
    return _draws(f"bernoulli_{p.dtype}", types, chances=p.size)


@planner("split_key")
def split_key(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    return _draws("random_words", types, purpose=SPLIT)


@planner("fold_in")
def fold_in(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    return _draws("random_words", types, purpose=FOLD, kind=integer_kind(types[2].dtype))


def _draws(
    kernel: str, types: Types, floats: tuple[float, ...] = (), per_word: int = 1, **integers: int
) -> KernelCall | None:
    if sys.byteorder != "little":
        return None
    count = types[0].size
    words = -(-count // per_word)
    units, work = -(-words // DRAW_UNIT), words * 3.5
    return kernel_call(kernel, len(types), units, work, {"count": count, **integers}, floats)
