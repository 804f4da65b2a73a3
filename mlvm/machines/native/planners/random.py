"""Draws from keys, and dropout: `kernels/random.c`."""

from __future__ import annotations

import sys
from typing import Final

from mlvm.core.op import Attributes
from mlvm.core.types import f32
from mlvm.machines.native._native import Plan
from mlvm.machines.native.elements import integer_kind
from mlvm.machines.native.planner import Types, twin

_UNIT: Final = 256
"""Words of a unit."""
_SPLIT: Final = 1
_FOLD: Final = 2


@twin("uniform")
def uniform(types: Types, attributes: Attributes) -> Plan | None:
    out = types[0]
    per_word = 2 if out.dtype is f32 else 1
    return _draws(f"uniform_{out.dtype}", types, per_word, [out.size])


@twin("dropout")
def dropout(types: Types, attributes: Attributes) -> Plan | None:
    out, rate = types[0], attributes["rate"]
    return _draws(f"dropout_{out.dtype}", types, 2, [out.size], [rate, 1 / (1 - rate)])


@twin("bernoulli")
def bernoulli(types: Types, attributes: Attributes) -> Plan | None:
    out, _, p = types
    period = p.shape
    while period[:1] == (1,):
        period = period[1:]
    if period != out.shape[out.ndim - len(period) :]:
        return None
    return _draws(f"bernoulli_{p.dtype}", types, 1, [out.size, p.size])


@twin("split_key")
def split_key(types: Types, attributes: Attributes) -> Plan | None:
    return _draws("random_words", types, 1, [types[0].size, _SPLIT, 0])


@twin("fold_in")
def fold_in(types: Types, attributes: Attributes) -> Plan | None:
    return _draws("random_words", types, 1, [2, _FOLD, integer_kind(types[2].dtype)])


def _draws(
    kernel: str,
    types: Types,
    per_word: int,
    ints: list[int],
    floats: tuple[float, ...] | list[float] = (),
) -> Plan | None:
    if sys.byteorder != "little":
        return None
    words = -(-ints[0] // per_word)
    return Plan(kernel, len(types), ints, floats, units=-(-words // _UNIT), work=words * 3.5)
