"""Examples of every op, a module a room of `mlvm.core.ops`.

`CASES[name]` is what the walks of `tests/walks` cross with machines, derivatives and batches.
"""

from __future__ import annotations

import numpy as np

from tests.cases import (
    bessel,
    creation,
    decompositions,
    elementwise,
    fft,
    incomplete,
    indexing,
    lanes,
    layout,
    matmul,
    neural,
    packed,
    quantized,
    random,
    recurrent,
    reduction,
    special,
    windows,
)
from tests.cases.case import Case

_ROOMS = (
    *(bessel, creation, decompositions, elementwise, fft, incomplete, indexing),
    *(lanes, layout, matmul, neural, packed, quantized, random, recurrent),
    *(reduction, special, windows),
)

_MOVES = (
    "full reshape permute_dims broadcast_to concat flip roll pad slice embed slice_add tril triu "
    "copy take scatter_add index_add take_along_axis scatter_add_along_axis dynamic_update "
    "index_reduce slice_set index_set mask_set boolean_index mask_scatter matmul batch_contract"
)
"""Ops that do with complex numbers what they do with floats, and whose `expected` does, too."""


def _with_complex(name: str, cases: list[Case]) -> list[Case]:
    """The cases, and the first with floats once more with complex numbers of both sizes."""
    if name not in _MOVES.split():
        return cases
    case = next(each for each in cases if any(x.dtype == np.float64 for x in each.inputs))
    inputs = [x + 1j * (0.3 - x) if x.dtype == np.float64 else x for x in case.inputs]
    wide = Case(tuple(inputs), case.expected, case.attributes)
    narrow = tuple([x.astype("c8") if x.dtype.kind == "c" else x for x in inputs])
    return [*cases, wide, Case(narrow, case.expected, case.attributes)]


CASES: dict[str, list[Case]] = {
    name: _with_complex(name, cases) for room in _ROOMS for name, cases in room.CASES.items()
}

__all__ = ["CASES", "Case"]
