"""The tails of every distribution, against scipy's.

    python -m tests.fuzz tails                            # all, 2^25 draws each
    python -m tests.fuzz tails gumbel --draws 1000000000

Each distribution of `ml.random` is drawn in f32 and f64. The draws at or below the quantile of each
of `LEVELS`, and above that of 1 less the level, which scipy tells, must be as many as expected.
The classes of `categorical` are counted, too, and many rare ones together. `QUANTILES` has what
scipy tells of some, for the part that `make test` runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

import mlvm.eager as ml
from tests.fuzz.command import parser_of, require_known

LEVELS: Final = (1e-6, 1e-5, 1e-4, 1e-3)
_CHUNK: Final = 1 << 22

Draw = Callable[..., Any]
Tail: TypeAlias = tuple[float, float]
"""A quantile and its probability."""
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
    "truncated_normal, far": (
        lambda n, **how: R.truncated_normal(6.0, math.inf, n, **how), "truncnorm(6, inf)"),
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


def quantiles(distribution: str) -> tuple[list[Tail], list[Tail]]:
    """Return (x, probability of at most x) and (y, probability of more than y) of all levels."""
    stats: Any = __import__("scipy.stats").stats
    of = eval(distribution, {**vars(stats), "inf": math.inf})
    lows, highs = of.ppf(LEVELS), of.isf(LEVELS)
    return [*zip(lows, of.cdf(lows), strict=True)], [*zip(highs, of.sf(highs), strict=True)]


QUANTILES: Final = {
    "normal": (-3.090232306167813, 3.090232306167813),
    "exponential": (0.0010005003335835335, 6.907755278982137),
    "laplace": (-6.214608098422191, 6.214608098422191),
    "gumbel": (-1.932644733916066, 6.907255070523628),
    "cauchy": (-318.30883898555044, 318.3088389855504),
}
"""Quantiles of 0.001 and 0.999."""


def counted(name: str, draws: int, dtype: str, seed: int, lows: Any, highs: Any) -> list[Any]:
    """Count the draws at or below each of `lows` and above each of `highs`."""
    draw, below, above = DISTRIBUTIONS[name][0], np.zeros(len(lows), int), np.zeros(len(highs), int)
    how = {} if name in COUNTS else {"dtype": dtype}
    for chunk in range(-(-draws // _CHUNK)):
        n = min(_CHUNK, draws - chunk * _CHUNK)
        x = draw(n, key=R.fold_in(R.key(seed), chunk), **how).numpy()
        below += [np.count_nonzero(x <= low) for low in lows]
        above += [np.count_nonzero(x > high) for high in highs]
    return [below, above]


def _differs(count: int, draws: int, p: float) -> bool:
    """Return whether a count is further from n p than chance is, by Chernoff's bound of 1e-8."""
    mean = draws * p
    return (count and count * math.log(count / mean)) - count + mean > math.log(1e8)


def findings(
    name: str, draws: int, seed: int, lows: Sequence[Tail], highs: Sequence[Tail]
) -> Iterator[str]:
    """Return tails of a distribution that hold too many or too few draws."""
    for dtype in ("f32",) if name in COUNTS else ("f32", "f64"):
        counts = counted(name, draws, dtype, seed, [x for x, _ in lows], [x for x, _ in highs])
        for side, numbers, tails in zip(("to", "above"), counts, (lows, highs), strict=True):
            for count, (x, p) in zip(numbers, tails, strict=True):
                if dtype == "f32" and np.float32(x) == 1.0 != x:
                    continue  # f32 has no numbers between x and 1, to which draws are rounded
                if _differs(int(count), draws, p):
                    yield f"{name} {dtype}: {count} of {draws} {side} {x}, expected {p * draws:.1f}"


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


def each_class(draws: int, seed: int) -> Iterator[str]:
    """Count draws of a few classes, the rarest of which has a probability of 8e-7."""
    logits = np.array([0.0, -4.0, -8.0, -11.0, -14.0])
    p = np.exp(logits) / np.exp(logits).sum()
    for dtype in ("f32", "f64"):
        counts = np.zeros(len(p), int)
        for chunk in range(-(-draws // _CHUNK)):
            n, key = min(_CHUNK, draws - chunk * _CHUNK), R.fold_in(R.key(seed), chunk)
            drawn = R.categorical(ml.asarray(logits, dtype=dtype), shape=n, key=key).numpy()
            counts += np.bincount(drawn, minlength=len(p))
        for i, count in enumerate(counts.tolist()):
            if _differs(count, draws, p[i]):
                yield f"categorical {dtype}: {count} of {draws} are {i}, not {p[i] * draws:.1f}"


def main(argv: list[str]) -> int:
    parser = parser_of(__name__, __doc__)
    parser.add_argument("names", nargs="*", help="distributions; all if there are none")
    parser.add_argument("--draws", type=int, default=1 << 25)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    known = [*DISTRIBUTIONS, "categorical"]
    require_known(parser, [x for x in options.names if x not in known], lambda: known)
    names, found = options.names or known, list[str]()
    for name in names:
        if name == "categorical":
            found += [*rare_classes(options.seed), *each_class(options.draws, options.seed)]
        else:
            tails = quantiles(DISTRIBUTIONS[name][1])
            found += findings(name, options.draws, options.seed, *tails)
    print("\n".join(found) or f"{len(names)} distributions are as scipy has them")
    return int(bool(found))
