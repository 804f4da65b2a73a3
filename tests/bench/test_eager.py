"""Expressions of `bench/eager.txt`: all libraries compute the same numbers, in both modes."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import numpy as np
import pytest

from bench import eager
from bench.eager import CALLS, NUMBERED, SPACES, Sizes
from bench.harness import run
from tests.brief import cases, with_long

DRAWN: Final = {
    *("normal", "normal keyless", "uniform", "randint", "dropout"),
    *("Linear", "LayerNorm", "Embedding", "Conv2d", "LSTMCell", "mlp forward", "mlp grad"),
    *("mlp sgd step", "AdamW update", "Adam update", "SGD update", "SGD momentum update"),
    *("global norm", "x[1] = 0", "x[:, 2:5] = v", "x[i] = v", "x[mask] = 0", "x[1] = y"),
    *("x[i] = 1.0", "x[i:i + 3] = 1.0", "x[1] += v", "x[:, 1] = v", "x[i] += 0", "x[i] = row"),
    *("permutation", "uniform(i)", "randint(0, i)"),
}
"""Calls whose results are random, depend on random weights, or are nothing."""


def sorted_leaves(result: Any) -> list[Any]:
    """Return the arrays of a result, each flat and sorted: layouts of images differ."""
    if isinstance(result, tuple | list):
        return [x for part in result for x in sorted_leaves(part)]
    if hasattr(result, "detach"):
        result = result.detach()
    return [np.sort(np.asarray(result).astype(np.complex128), axis=None)]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@cases("library", "torch", "numpy", "jax")
def test_libraries_compute_the_same(library: str) -> None:
    pytest.importorskip(library)
    for sizes in with_long([Sizes.numbered(57)], [Sizes(), *map(Sizes.numbered, (0, 57, 99))]):
        ours, theirs = SPACES["mlvm"](sizes), SPACES[library](sizes)
        for name, call in CALLS.items():
            if library not in call.expressions or name in DRAWN:
                continue
            number = (7,) if call.takes_number else ()
            [mine], [other] = (
                eager.functions(each, call, [space])
                for each, space in (("mlvm", ours), (library, theirs))
            )
            pairs = sorted_leaves(mine(*number)), sorted_leaves(other(*number))
            for x, y in zip(*pairs, strict=True):
                np.testing.assert_allclose(x, y, 1e-3, 1e-4, err_msg=f"{library}: {name}")


def test_the_sizes_of_100_types_differ() -> None:
    sizes = [Sizes.numbered(number) for number in range(eager.TYPES)]
    for fields in (("r", "c"), ("p", "q"), ("u",)):
        assert len({tuple(getattr(each, f) for f in fields) for each in sizes}) == eager.TYPES


def test_a_quick_run_of_a_few_cases() -> None:
    suite = eager.SUITE
    chosen = tuple(c for c in suite.contenders if c.name in ("mlvm", "numpy"))
    suite = dataclasses.replace(suite, contenders=chosen)
    records = run(suite, quick=True, only=["x[i:", "softmax"])
    assert {(r.case, r.metric, r.contender) for r in records} == {
        *[(name, "new_us", c.name) for name in NUMBERED if "x[i:" in name for c in chosen],
        *[
            (name, metric, "mlvm")
            for name in ("softmax", "log_softmax")
            for metric in ("repeated_us", "types_us")
        ],
    }
    assert all(r.median > 0 for r in records)
