"""The special functions over their range: a few units in the last place, and their edges."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from mlvm.core.types import Array
from tests.brief import cases
from tests.cases.evaluate import evaluate
from tests.cases.special import digamma, inverse_of_erf, polygamma

RNG = np.random.default_rng(3)
EPS = float(np.finfo(np.float64).eps)

RANGES: dict[str, tuple[Callable[[float], float], Array, float]] = {
    "erfc": (math.erfc, np.concatenate([RNG.uniform(-6, 26, 2000), [0.46875, 4.0, -4.0]]), 8),
    "erfinv": (
        inverse_of_erf,
        np.concatenate([RNG.uniform(-1, 1, 500), 1 - 10 ** RNG.uniform(-15, -1, 200)]),
        16,  # of the other expression, too
    ),
    "lgamma": (
        math.lgamma,
        np.concatenate([RNG.uniform(0, 12, 2000), 10 ** RNG.uniform(-300, 300, 200)]),
        12,
    ),
    "digamma": (digamma, np.concatenate([RNG.uniform(0.01, 15, 100), [40.0, 1e3]]), 200),
}
"""The function, where it is looked at, and how many epsilons it may be off."""


@pytest.mark.parametrize("name", RANGES)
def test_a_few_units_in_the_last_place(name: str) -> None:
    of, x, most = RANGES[name]
    name = name.split()[0]
    expected = np.array([of(each) for each in x.tolist()])
    atol = 2e-15 if name == "lgamma" else 0.0  # of `math`, near the zeros
    np.testing.assert_allclose(evaluate(name, x), expected, rtol=most * EPS, atol=atol)
    narrow = x[(np.abs(x) < 1e30) & (np.abs(x) > 1e-30)].astype(np.float32)
    narrow = narrow[np.abs(narrow) < 1] if name == "erfinv" else narrow
    expected = np.array([of(each) for each in narrow.tolist()])
    with np.errstate(under="ignore", over="ignore"):
        np.testing.assert_allclose(
            evaluate(name, narrow), expected.astype("f4"), rtol=1.2e-7, atol=1e-45
        )


def test_lgamma_at_its_zeros() -> None:
    u, gamma = np.array([2.0**-30, -(2.0**-24), 2.0**-40]), 0.5772156649015329
    for at, slope, bend in ((1, -gamma, math.pi**2 / 12), (2, 1 - gamma, math.pi**2 / 12 - 0.5)):
        expected = slope * u + bend * u**2
        np.testing.assert_allclose(evaluate("lgamma", at + u), expected, rtol=1e-14)


def test_digamma_at_its_root() -> None:
    root = 1.4616321449683622
    x = root + np.array([1e-9, -1e-12, 4.440892098500626e-16])
    expected = polygamma(1, root) * ((x - root) - 9.549995429965697e-17)
    np.testing.assert_allclose(evaluate("digamma", x), expected, rtol=1e-8)


@cases("n", 1, 2, 5, 20)
def test_polygamma(n: int) -> None:
    x = np.concatenate([RNG.uniform(0.05, 30, 60), [-0.3, -4.6]])
    expected = [polygamma(n, each) for each in x.tolist()]
    np.testing.assert_allclose(evaluate("polygamma", x, n=n), expected, rtol=1e-10)
    np.testing.assert_array_equal(evaluate("polygamma", x, n=0), evaluate("digamma", x))
