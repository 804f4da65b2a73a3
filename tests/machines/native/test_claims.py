"""Each row of tests/cases/claims/native.txt: what native kernels compute, and what is numpy's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mlvm.core.types import Array
from mlvm.machines.native import _native as c
from tests.cases.claim_tests import claims
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


def as_python(operation: Any, x: Any, y: Any) -> bool:
    """Return whether a formula has the operation's value, or none where that is an error, a wide
    integer, or a quotient of floats that is none for formulas."""
    formulas, call = c.Formulas(), c.KernelCall("copy", 2, [0], patches=[0, 2])
    name, ints = operation.__name__, [n for n in (x, y) if isinstance(n, int)]
    formulas.step(name, formulas.input(), formulas.input())
    formulas.evaluate([x, y])
    try:
        result = operation(x) if name in ("neg", "pos", "abs", "truth") else operation(x, y)
    except ArithmeticError:
        result = None
    try:
        formulas.write([call])
    except IndexError:  # there is no value
        rounded = name in ("floordiv", "mod") and len(ints) < 2
        return result is None or rounded or any(abs(n) > 2**53 for n in [*ints, result])
    return result is not None and (result != result or formulas.hold((2, result)))


test_rows = claims("native", vars(planners) | globals())
