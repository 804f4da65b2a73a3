"""Examples of every op, a module a room of `mlvm.core.ops`.

`CASES[name]` is what `test_ops.py` checks the kernels with, and the eager layer its gradients.
"""

from __future__ import annotations

from tests.core.ops.cases import (
    creation,
    decompositions,
    elementwise,
    fft,
    indexing,
    layout,
    linalg,
    neural,
    random,
    reduction,
)
from tests.core.ops.cases.case import Case

_ROOMS = (
    *(creation, decompositions, elementwise, fft, indexing),
    *(layout, linalg, neural, random, reduction),
)

CASES: dict[str, list[Case]] = {
    name: cases for room in _ROOMS for name, cases in room.CASES.items()
}

__all__ = ["CASES", "Case"]
