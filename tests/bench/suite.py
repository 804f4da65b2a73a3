"""Contenders, well-behaved and not, for the tests of the harness; its children import them."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Mapping

from bench.harness import Contender, Round, Suite


def costs(metric: Callable[[], float], *cases: str) -> Callable[[bool], Mapping[str, Round]]:
    """Return a `prepare` whose cases all measure `metric`, once in each round."""
    return lambda quick: dict.fromkeys(cases, lambda: {"cost": metric()})


def counted(quick: bool) -> Mapping[str, Round]:
    numbers = itertools.count()
    return {"count": lambda: {"cost": next(numbers)}}


def chatty(quick: bool) -> Mapping[str, Round]:
    def chat() -> Mapping[str, float]:
        print("a library greets its user")
        return {"cost": 8.0}

    return {"count": chat, "theirs alone": chat}


def raising(quick: bool) -> Mapping[str, Round]:
    def fail() -> Mapping[str, float]:
        raise ValueError("no such luck")

    return {"count": fail}


def hanging(quick: bool) -> Mapping[str, Round]:
    def hang() -> Mapping[str, float]:
        while True:
            time.sleep(1)

    return {"count": hang}


def threads_if_clean() -> float:
    names = {name for name in os.environ if name.startswith(("OPENBLAS_", "MLVM_"))}
    return float(os.environ["OMP_NUM_THREADS"]) if names == {"OPENBLAS_NUM_THREADS"} else -1


SUITE = Suite(
    module=__name__,
    contenders=(
        Contender("ours", "bench", counted),
        Contender("theirs", "bench", chatty),
        Contender("absent", "a_package_that_nobody_has", counted),
        Contender("first clock", "bench", costs(time.monotonic, "clock")),
        Contender("second clock", "bench", costs(time.monotonic, "clock")),
        Contender("one thread", "bench", costs(threads_if_clean, "threads")),
        Contender("two threads", "bench", costs(threads_if_clean, "threads"), threads=2),
        Contender("crashes", "bench", costs(lambda: os._exit(7), "count")),
        Contender("crashes early", "bench", lambda quick: os._exit(8)),
        Contender("raises", "bench", raising),
        Contender("hangs", "bench", hanging),
    ),
    units={"cost": "s"},
    ours=("ours", "one thread"),
    targets={("count", "cost", "ours", "theirs"): 3.0},
    limits={("count", "cost", "ours"): 2.0},
    rounds=5,
    quick_rounds=2,
    warm_up_rounds=1,
)
