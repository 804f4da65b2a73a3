"""Batches of inputs for programs whose control flow depends on the input: trees and sentences.

The Tree-LSTM and the LSTM of the suite `dynamic`, on 64 inputs of different shapes, and on one
tree. `us_per_token` is the time of all inputs by their words. `mlvm-batch` runs them as one
`ml.auto_batch`, `mlvm-alone` one after the other, each as one captured program; their bits are
compared first. `jax-vmap` is `jax.vmap` over inputs padded to the longest, `jax-alone` runs each
input alone, compiled for its shape before it is timed. `dynet` is DyNet 2 with `autobatch`, of the
package `dyNET38` (Neubig et al., arXiv 1705.07860), as its users write it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import numpy as np

from bench.dynamic import Outputs, Run, check
from bench.dynamic_sizes import LstmSize, Size, TreeSize, reference
from bench.harness import Contender, Prepare, Round, Suite, rounds_of


def _some(count: int, most: int) -> tuple[int, ...]:
    """Draw `count` sizes up to the largest, always the same ones."""
    return tuple(map(int, np.random.default_rng(2).integers(5, most + 1, size=count)))


CASES: Final[dict[str, Size]] = {
    "64 trees": TreeSize(300, 150, _some(64, 50)),
    "one tree": TreeSize(300, 150, (27,)),
    "64 sentences": LstmSize(300, 512, 1, _some(64, 50)),
}
QUICK: Final[dict[str, Size]] = {
    "64 trees": TreeSize(6, 5, (5, 2, 9)),
    "one tree": TreeSize(6, 5, (5,)),
    "64 sentences": LstmSize(6, 8, 1, (5, 3, 9)),
}
RUNS: Final = {"one tree": 20}
"""How many runs are one round, where one is too short."""


def preparing(make: Callable[[Any], Run]) -> Prepare:
    """Return a `prepare` of all cases. `make(size)` gives what a round runs."""

    def prepare(quick: bool) -> Mapping[str, Round]:
        cases = QUICK if quick else CASES

        def run_of(case: str) -> Run:
            run = make(cases[case])
            check(run(), reference(cases[case]))
            return run

        runs = {case: RUNS.get(case, 1) for case in cases}
        return rounds_of(run_of, runs, "us_per_token", lambda case: cases[case].tokens)

    return prepare


def batch(size: Any) -> Run:
    """Return all inputs as one batch, whose results have the bits of each input alone."""
    from bench.mlvm_dynamic import batched

    run, alone = batched(size), mlvm_alone(size)

    def are_same(xs: Outputs, ys: Outputs) -> bool:
        return all(np.array_equal(x, y) for x, y in zip(xs, ys, strict=True))

    if not are_same(run(), alone()):
        raise ValueError("a batch has other bits than its inputs alone")
    return run


def mlvm_alone(size: Any) -> Run:
    from bench.mlvm_dynamic import running

    return running(size, captured=True)


def torch(size: Any) -> Run:
    from bench.torch_dynamic import running

    return running(size)


def jax(size: Any, *, padded: bool) -> Run:
    from bench.jax_dynamic import padded_together, running

    return padded_together(size) if padded else running(size)


def dynet(size: Any) -> Run:
    from bench.dynet_batches import running

    return running(size)


SUITE = Suite(
    module="bench.batches",
    contenders=(
        Contender("mlvm-batch", "mlvm", preparing(batch)),
        Contender("mlvm-alone", "mlvm", preparing(mlvm_alone)),
        Contender("torch-eager", "torch", preparing(torch)),
        Contender("jax-alone", "jax", preparing(partial(jax, padded=False))),
        Contender("jax-vmap", "jax", preparing(partial(jax, padded=True))),
        Contender("dynet", "dynet", preparing(dynet)),
    ),
    units={"us_per_token": "us"},
    ours=("mlvm-batch",),
    targets={
        ("64 trees", "us_per_token", "mlvm-batch", "mlvm-alone"): 5.0,
        ("64 trees", "us_per_token", "mlvm-batch", "torch-eager"): 8.0,
        ("64 trees", "us_per_token", "mlvm-batch", "jax-vmap"): 1.0,
        ("one tree", "us_per_token", "mlvm-batch", "jax-alone"): 1.0,
    },
    rounds=21,
    timeout=600,
)
