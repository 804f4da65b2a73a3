"""Each row of tests/cases/claims/native.txt: what native kernels compute, and what is numpy's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mlvm.core.types import Array
from tests.cases.claims import claims
from tests.machines.native import planners
from tests.machines.native.planners import assert_same_bits as bits
from tests.machines.native.planners import native, reference
from tests.machines.native.test_layout import _distinct

near, distinct = planners.assert_near, _distinct
SPECIAL = np.resize(np.array([np.nan, np.inf, -np.inf, -0.0, 1e-45, 3e38], "f4"), 3000)


def noise(*shape: int, of: str = "f4") -> Array:
    rng = np.random.default_rng(math.prod(shape))
    return np.asarray(rng.standard_normal(shape)).astype(of)


def whole(of: str, *shape: int) -> Array:
    info = np.iinfo(of)
    return np.random.default_rng(4).integers(info.min, info.max, shape, of)


def linspace_bits(start: float, stop: float, num: int, endpoint: bool) -> bool:
    how: Any = {"start": start, "stop": stop, "num": num, "endpoint": endpoint, "dtype": "f64"}
    with np.errstate(all="ignore"):
        return native("linspace", **how).tobytes() == reference("linspace", **how).tobytes()


def draws(size: int) -> None:
    """Every draw at a size about units."""
    key = np.array([size, 2**63 + size], np.uint64)
    for dtype, short in (("f32", "f4"), ("f64", "f8")):
        bits("uniform", key, shape=(size,), dtype=dtype)
        bits("normal", key, shape=(size,), dtype=dtype)
        for rate in (0.0, 0.1, 0.5, 0.999):
            bits("dropout", noise(size, of=short), key, rate=rate)
    bits("bernoulli", key, np.array(0.3), shape=(size,))
    bits("split_key", key, n=size)
    bits("permutation", key, n=size)


test_rows = claims("native", vars(planners) | globals())
