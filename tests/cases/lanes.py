"""Cases of the ops that combine lanes, of operands that are the same in all lanes."""

from __future__ import annotations

import numpy as np

from tests.cases.case import Case

_X = np.arange(6.0).reshape(2, 3) - 2.5
_RANK = np.array(1)
_NAMED = {"axis_name": "i", "size": 3}

_ALONE = {"axis_name": "i", "size": 1}  # then x of one lane is x of all


CASES = {
    "sum_lanes": [
        Case((_X,), lambda x, axis_name, size: x * size, _NAMED),
        Case((_X * 1j,), lambda x, axis_name, size: x * size, _NAMED),
        Case((np.array([1, -2], np.int32),), lambda x, axis_name, size: x * size, _NAMED),
        Case(
            (np.array([1, 3], np.uint8),),
            lambda x, axis_name, size: (x.astype(int) * size).astype(np.uint8),
            {"axis_name": "i", "size": 300},
        ),
    ],
    "gather_lanes": [
        Case((_X, np.array(0)), lambda x, rank, axis_name, size: x[None], _ALONE),
        Case((_X * 1j, np.array(0)), lambda x, rank, axis_name, size: x[None], _ALONE),
        Case(
            (np.array(True), _RANK), lambda x, rank, axis_name, size: np.stack([x] * size), _NAMED
        ),
    ],
}
