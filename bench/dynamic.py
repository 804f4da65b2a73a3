"""Time of programs whose control flow depends on the input, beside PyTorch and JAX.

The families are those of the Nimble paper (Shen et al., MLSys 2021, arXiv 2006.03031). An LSTM runs
on sentences of any length, a Tree-LSTM on trees of any shape, and BERT's encoder, one input at a
time. Then come training steps of an LSTM and of a transformer, and generation by a transformer.
`us_per_token` is the time of all inputs of a family, one after the other, by their words.

All contenders have the same weights, and none is timed before its results are those of
`dynamic_sizes.reference`; generation is compared with the likeliest symbols, and timed with drawn
ones. Contenders compile for each length before they are timed. mlvm records one program for all
inputs of a family; a second one is an error. `torch-cells` is an LSTM as a loop over `nn.LSTMCell`;
`torch-compiled` compiles the cells, and whole models elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bench.dynamic_sizes import (
    CASES,
    QUICK,
    GenerationSize,
    LstmSize,
    LstmTrainingSize,
    Size,
    reference,
)
from bench.harness import Contender, Prepare, Round, Suite, rounds_of, say

Outputs = Sequence[NDArray[Any]]
Run = Callable[[], Outputs]
"""Computes what comes out of each input of a family."""

RUNS: Final = {"lstm training": 5}
"""How many runs are one round, where one is too short."""
TOLERANCE: Final = 1e-4


def preparing(
    make: Callable[..., Run], takes: Callable[[Size], bool] = lambda size: True
) -> Prepare:
    """Return a `prepare` of the cases that the contender takes. `make(size, greedy=...)` gives what
    a round runs."""

    def prepare(quick: bool) -> Mapping[str, Round]:
        cases = {case: x for case, x in (QUICK if quick else CASES).items() if takes(x)}

        def run_of(case: str) -> Run:
            size = cases[case]
            run = make(size, greedy=False)
            checked = make(size, greedy=True) if isinstance(size, GenerationSize) else run
            check(checked(), reference(size))
            return run

        runs = {case: RUNS.get(case, 1) for case in cases}
        return rounds_of(run_of, runs, "us_per_token", lambda case: cases[case].tokens)

    return prepare


def check(outputs: Outputs, expected: Outputs) -> None:
    """Raise `ValueError` unless the first results are the expected ones. Of symbols there may be
    more than are expected."""
    for i, (got, exact) in enumerate(zip(outputs, expected, strict=False)):
        if exact.dtype.kind == "i":
            if not np.array_equal(got[: len(exact)], exact):
                raise ValueError(f"input {i}: symbols {got[: len(exact)]} in place of {exact}")
            continue
        if got.shape != exact.shape:
            raise ValueError(f"input {i}: a result {got.shape} in place of {exact.shape}")
        error = float(np.abs(got - exact).max() / np.abs(exact).max())
        if not error <= TOLERANCE:
            raise ValueError(
                f"input {i}: a result is off by {error:.1e} of the largest, "
                f"{TOLERANCE:g} is accepted"
            )
    if len(outputs) < len(expected):
        raise ValueError(f"{len(outputs)} results in place of {len(expected)} or more")


def mlvm(size: Size, *, greedy: bool, captured: bool) -> Run:
    from bench.mlvm_dynamic import running

    return running(size, greedy=greedy, captured=captured)


def torch(size: Size, *, greedy: bool, **how: bool) -> Run:
    from bench.torch_dynamic import running

    return running(size, greedy=greedy, **how)


def prepare_torch_compiled(quick: bool) -> Mapping[str, Round]:
    from bench.torch_training import compiles

    if not compiles():
        say("dynamic: torch.compile finds no compiler that works, skipped")
        return {}
    return preparing(partial(torch, compiled=True))(quick)


def jax(size: Size, *, greedy: bool) -> Run:
    from bench.jax_dynamic import running

    return running(size, greedy=greedy)


def has_cells(size: Size) -> bool:
    return isinstance(size, LstmSize | LstmTrainingSize)


SUITE = Suite(
    module="bench.dynamic",
    contenders=(
        Contender("mlvm-eager", "mlvm", preparing(partial(mlvm, captured=False))),
        Contender("mlvm-captured", "mlvm", preparing(partial(mlvm, captured=True))),
        Contender("torch-eager", "torch", preparing(torch)),
        Contender("torch-cells", "torch", preparing(partial(torch, cells=True), has_cells)),
        Contender("torch-compiled", "torch", prepare_torch_compiled),
        Contender("jax-jit", "jax", preparing(jax)),
    ),
    units={"us_per_token": "us"},
    ours=("mlvm-captured", "mlvm-eager"),
    targets={
        (case, "us_per_token", "mlvm-captured", theirs): target
        for theirs, case, target in (
            ("torch-eager", "lstm 1 layer", 2.0),
            ("torch-eager", "lstm 2 layers", 2.0),
            ("jax-jit", "lstm 1 layer", 1.0),
            ("jax-jit", "lstm 2 layers", 1.0),
            ("torch-eager", "tree-lstm", 8.0),
            ("torch-eager", "bert", 1.1),
            ("torch-eager", "lstm training", 1.5),
            ("torch-eager", "transformer training", 1.5),
            ("torch-eager", "generation", 2.0),
        )
    },
    rounds=11,
    timeout=600,  # torch.compile takes its time
    quick_rounds=1,
)
