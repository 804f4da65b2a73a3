"""The tails of every distribution, against scipy's.

    python -m tests.fuzz tails                            # all, 2^27 draws each
    python -m tests.fuzz tails gumbel --draws 1000000000

Each distribution of `ml.random` is drawn in f32 and f64. The share of draws at or below the
quantiles of `P` and of 1 - `P`, which scipy tells, must be `P` up to 6 standard deviations. Rare
classes of `categorical` are counted, too. `QUANTILES` has what scipy tells of some, for the part
that `make test` runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np

import mlvm.eager as ml
from tests.fuzz.command import parser_of, require_known

P: Final = 1e-6
_CHUNK: Final = 1 << 22

Draw = Callable[..., Any]
R: Final = ml.random

DISTRIBUTIONS: Final[dict[str, tuple[Draw, str]]] = {
    "normal": (lambda n, **how: R.normal(n, **how), "norm()"),
    "uniform": (lambda n, **how: R.uniform(n, low=-1.0, high=3.0, **how), "uniform(-1, 4)"),
    "exponential": (lambda n, **how: R.exponential(n, **how), "expon()"),
    "laplace": (lambda n, **how: R.laplace(n, **how), "laplace()"),
    "gumbel": (lambda n, **how: R.gumbel(n, **how), "gumbel_r()"),
    "cauchy": (lambda n, **how: R.cauchy(n, **how), "cauchy()"),
    "truncated_normal": (
        lambda n, **how: R.truncated_normal(-1.0, math.inf, n, **how), "truncnorm(-1, inf)"),
    "gamma, small": (lambda n, **how: R.gamma(0.3, n, **how), "gamma(0.3)"),
    "gamma, large": (lambda n, **how: R.gamma(7.0, n, **how), "gamma(7)"),
    "beta, small": (lambda n, **how: R.beta(0.4, 0.6, n, **how), "beta(0.4, 0.6)"),
    "beta, large": (lambda n, **how: R.beta(5.0, 2.0, n, **how), "beta(5, 2)"),
    "student_t": (lambda n, **how: R.student_t(3.0, n, **how), "t(3)"),
    "dirichlet": (
        lambda n, **how: R.dirichlet(ml.asarray([2.0, 3.0]), n, **how)[:, 0], "beta(2, 3)"),
    "poisson": (lambda n, **how: R.poisson(20.0, n, **how), "poisson(20)"),
    "binomial": (lambda n, **how: R.binomial(50, 0.3, n, **how), "binom(50, 0.3)"),
}  # fmt: skip
"""Name -> a function that draws n numbers, and the distribution in scipy.stats."""

COUNTS: Final = ("poisson", "binomial")


def quantiles(distribution: str, p: float) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return (x, probability of at most x) and (y, probability of more than y) for the tails."""
    stats: Any = __import__("scipy.stats").stats
    of = eval(distribution, {**vars(stats), "inf": math.inf})
    low, high = float(of.ppf(p)), float(of.isf(p))
    return (low, float(of.cdf(low))), (high, float(of.sf(high)))


QUANTILES: Final = {
    "normal": (-3.090232306167813, 3.090232306167813),
    "exponential": (0.0010005003335835335, 6.907755278982137),
    "laplace": (-6.214608098422191, 6.214608098422191),
    "gumbel": (-1.932644733916066, 6.907255070523628),
    "cauchy": (-318.30883898555044, 318.3088389855504),
}
"""Quantiles of 0.001 and 0.999."""


def shares(name: str, draws: int, dtype: str, seed: int, low: float, high: float) -> list[int]:
    """Count the draws at or below `low` and above `high`."""
    draw, below, above = DISTRIBUTIONS[name][0], 0, 0
    how = {} if name in COUNTS else {"dtype": dtype}
    for chunk in range(-(-draws // _CHUNK)):
        n = min(_CHUNK, draws - chunk * _CHUNK)
        x = draw(n, key=R.fold_in(R.key(seed), chunk), **how).numpy()
        below += int(np.count_nonzero(x <= low))
        above += int(np.count_nonzero(x > high))
    return [below, above]


def _differs(count: int, draws: int, p: float) -> bool:
    """Return whether a count is further from n p than chance is."""
    mean = draws * p
    return abs(count - mean) > 6 * math.sqrt(mean) + 3


def findings(
    name: str, draws: int, seed: int, low: tuple[float, float], high: tuple[float, float]
) -> Iterator[str]:
    """Return tails of a distribution that hold too many or too few draws. Each tail is a quantile
    and its probability."""
    for dtype in ("f32",) if name in COUNTS else ("f32", "f64"):
        counts = shares(name, draws, dtype, seed, low[0], high[0])
        for side, count, p in zip(("below", "above"), counts, (low[1], high[1]), strict=True):
            if _differs(count, draws, p):
                yield f"{name} {dtype}: {count} of {draws} {side}, expected {p * draws:.1f}"


def rare_classes(seed: int, classes: int = 20_000, logit: float = -18.0) -> Iterator[str]:
    """Count draws of many classes that are rare alone and not together."""
    logits = ml.asarray([0.0] + [logit] * classes)
    draws, total = 100_000, 0
    for i in range(draws // 1000):
        key = R.fold_in(R.key(seed), i)
        total += int(np.count_nonzero(R.categorical(logits, shape=1000, key=key).numpy()))
    rare = classes * math.exp(logit) / (1 + classes * math.exp(logit))
    if _differs(total, draws, rare):
        yield f"categorical: {total} of {draws} are rare classes, expected {rare * draws:.1f}"


def main(argv: list[str]) -> int:
    parser = parser_of(__name__, __doc__)
    parser.add_argument("names", nargs="*", help="distributions; all if there are none")
    parser.add_argument("--draws", type=int, default=1 << 27)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    known = [*DISTRIBUTIONS, "categorical"]
    require_known(parser, [x for x in options.names if x not in known], lambda: known)
    names, found = options.names or known, list[str]()
    for name in names:
        if name == "categorical":
            found += rare_classes(options.seed)
        else:
            tails = quantiles(DISTRIBUTIONS[name][1], P)
            found += findings(name, options.draws, options.seed, *tails)
    print("\n".join(found) or f"{len(names)} distributions are as scipy has them")
    return int(bool(found))
