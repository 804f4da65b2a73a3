"""Cases of the ops by which lanes meet, where x is the same in all."""

from __future__ import annotations

import numpy as np

from tests.rows import grouped

_X = np.arange(6.0).reshape(2, 3) - 2.5
_RANK = np.array(1)
_NAMED = {"axis_name": "i", "size": 3}

_ALONE = {"axis_name": "i", "size": 1}  # then x of one lane is x of all


CASES = grouped(globals(), "CASES")
