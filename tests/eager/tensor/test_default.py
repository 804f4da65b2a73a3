"""The default float dtype: what it applies to, and what not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from tests.brief import cases, output_of, refuses
from tests.cases.tables import FUNCTIONS, flat

MADE: dict[str, Callable[[], Any]] = {
    "asarray": lambda: ml.asarray([0.5, 1.0]),
    "asarray of ints": lambda: ml.asarray([1, 2]) * 0.5,
    "full": lambda: ml.full(2, 0.5),
    "zeros": lambda: ml.zeros(2),
    "ones": lambda: ml.ones(2),
    "empty": lambda: ml.empty(2),
    "eye": lambda: ml.eye(2),
    "arange": lambda: ml.arange(2.0),
    "linspace": lambda: ml.linspace(0, 1, 3),
    "linspace of ints": lambda: ml.linspace(ml.asarray(0), 1, 3),
    "one_hot": lambda: ml.one_hot(ml.asarray([1]), 3),
    "where": lambda: ml.where(ml.asarray([True]), 1.0, 2.0),
    "hanning": lambda: ml.hanning(4),
    "fftfreq": lambda: ml.fft.fftfreq(4),
    "sinusoidal_encoding": lambda: ml.sinusoidal_encoding(ml.arange(3), 4),
    "loop state": lambda: ml.fori_loop(0, 2, lambda i, x: x * 2.0, 1.0),
    **{
        name: partial(getattr(ml.random, name), 3)
        for name in ("normal", "uniform", "exponential", "laplace", "gumbel", "cauchy")
    },
    "gamma": lambda: ml.random.gamma(2.0),
    "beta": lambda: ml.random.beta(2.0, 2.0),
    "dirichlet": lambda: ml.random.dirichlet(ml.asarray([1.0, 2.0])),
    "student_t": lambda: ml.random.student_t(2.0),
    "truncated_normal": lambda: ml.random.truncated_normal(-1.0, 1.0, 3),
    "init": lambda: ml.nn.init.xavier_uniform((2, 3)),
    "Linear": lambda: ml.nn.Linear(2, 2).kernel,
    "Conv2d": lambda: ml.nn.Conv2d(1, 2, 3).kernel,
    "Embedding": lambda: ml.nn.Embedding(3, 2).embedding,
    "BatchNorm": lambda: ml.nn.BatchNorm(3).scale,
    "LSTM": lambda: ml.nn.LSTM(2, 3)(ml.ones((1, 2, 2)))[0],
    "MultiHeadAttention": lambda: ml.nn.MultiHeadAttention(4, 2)(ml.ones((1, 3, 4))),
}


@cases("name", *MADE)
@cases("dtype", "f32", "f64", "bf16")
def test_it_is_the_dtype_of_what_names_none(name: str, dtype: str) -> None:
    with ml.default_dtype(dtype):
        assert MADE[name]().dtype == dtype
    assert MADE[name]().dtype == "f32"


def test_complex_numbers_follow_it() -> None:
    with ml.default_dtype("f64"):
        assert ml.asarray(1j).dtype == (ml.asarray([1]) * 1j).dtype == "c128"
        assert ml.linspace(0, 1j, 3).dtype == ml.result_type(1j) == "c128"
        defaults = ml.__array_namespace_info__().default_dtypes()
    assert defaults["real floating"] == "f64"
    assert defaults["complex floating"] == "c128"


@cases("own", "f16", "bf16", "f32", "c64")
def test_numbers_beside_floats_have_the_dtype_of_these(own: str) -> None:
    x = ml.ones(2, dtype=own)
    with ml.default_dtype("f64"):
        for y in (x * 0.5, x + 1, 2.0 - x, ml.maximum(x, 0.5) if own != "c64" else x, x / 3):
            assert y.dtype is x.dtype
        assert (x * 1j).dtype == "c64"
        assert ml.full_like(x, 0.5).dtype is ml.zeros_like(x).dtype is x.dtype
    assert ml.asarray([np.float32(1), 2.0]).dtype == "f32"


def test_a_thread_begins_with_f32_and_a_task_with_the_dtype_of_its_creator() -> None:
    seen: list[object] = []

    async def look() -> None:
        seen.append(ml.zeros(1).dtype)
        ml.set_default_dtype("f16")  # of this task alone

    with ml.default_dtype("f64"):
        thread = threading.Thread(target=lambda: seen.append(ml.zeros(1).dtype))
        thread.start()
        thread.join()
        asyncio.run(look())
        assert ml.zeros(1).dtype == "f64"
        with ml.parallel.Group(2) as group:
            seen += group.run(lambda rank, vm: ml.zeros(1).dtype)
    assert seen == ["f32", "f64", "f64", "f64"]


def test_it_is_set_to_the_end_of_the_block() -> None:
    with ml.default_dtype("f64"):
        ml.set_default_dtype("f16")
        assert ml.zeros(1).dtype == "f16"
    assert ml.zeros(1).dtype == "f32"

    @ml.default_dtype("f64")
    def made() -> Any:
        return ml.zeros(1)

    assert made().dtype == "f64"
    assert ml.zeros(1).dtype == "f32"


def test_a_captured_function_has_a_program_for_each() -> None:
    step = ml.capture(lambda x: x * 0.5 + ml.ones(2))
    n = ml.asarray([1, 2])
    for dtype in ("f32", "f64", "f32", "f64"):
        with ml.default_dtype(dtype):
            assert step(n).dtype == dtype
    ml.set_default_dtype("f32")  # as it was
    assert step(n).dtype == "f32"
    assert step.signatures == 2
    refuses(
        ml.errors.CaptureError,
        "with ml.default_dtype",
        ml.capture(lambda x: ml.set_default_dtype("f64")),
        n,
    )


def test_rules_and_checkpoints_run_again_under_it() -> None:
    seen: list[object] = []

    @ml.checkpoint
    def loss(x: Any) -> Any:
        seen.append(ml.zeros(1).dtype)
        return ml.sum(ml.sin(x) * ml.asarray(0.1))

    def within(x: Any) -> Any:
        with ml.default_dtype("f64"):
            return loss(x)

    g = ml.grad(within)(ml.ones(3))
    assert g.dtype == "f32"
    assert {*seen} == {ml.float64}


@pytest.mark.parametrize("dtype", ["i64", "bool", "c64", "f99", None])
def test_another_dtype_is_refused(dtype: Any) -> None:
    refuses(ml.errors.DTypeError, "", ml.set_default_dtype, dtype)
    with pytest.raises(ml.errors.DTypeError), ml.default_dtype(dtype):
        pass
    assert ml.zeros(1).dtype == "f32"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_float_results_of_integers_have_the_default_dtype() -> None:
    """Each function of the table that takes integers."""
    tried = 0
    for row in FUNCTIONS:
        if not row.operands or any(x.dtype.kind == "c" for x in row.operands.values()):
            continue
        finite = [np.nan_to_num(x, posinf=3, neginf=-3) * 2 for x in row.operands.values()]
        integers = [ml.asarray(np.round(x).astype(np.int64)) for x in finite]
        try:
            row.ours(*integers)
        except ml.errors.MlvmError:
            continue  # it takes none
        with ml.default_dtype("float64"):
            results = [x for x in flat(row.ours(*integers)) if isinstance(x, ml.Tensor)]
        assert not {ml.float32, ml.complex64} & {x.dtype for x in results}, row.call
        tried += 1
    assert tried > 700


def test_calls_that_were_prepared_before_a_default_was_set_follow_it() -> None:
    program = """
import mlvm.eager as ml
x = ml.asarray([1, 2, 4])
for _ in range(3):
    assert (ml.mean(x).dtype, (x / x).dtype) == (ml.float32, ml.float32)
ml.set_default_dtype("float64")
for _ in range(3):
    assert (ml.mean(x).dtype, (x / x).dtype) == (ml.float64, ml.float64)
ml.set_default_dtype("float32")
for _ in range(3):
    assert (ml.mean(x).dtype, (x / x).dtype) == (ml.float32, ml.float32)
"""
    output_of("-c", program)
