"""A part of `python -m tests.invariance`, functions of several ops, and docs/determinism.md."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.op import OPS
from mlvm.core.ops import half
from mlvm.core.types import Array, DType
from mlvm.machines.native import extension
from tests.brief import cases, with_long
from tests.invariance.machines import Machine, Native, Reference, choose, machines, outside
from tests.invariance.samples import samples
from tests.invariance.walk import DTYPES, MOST, Rows, Sample, differing, reference, rows_of

PAGE: Final = Path(__file__).parents[2] / "docs" / "determinism.md"
WITHOUT_ROWS: Final = {
    "nothing goes in": "full zeros arange linspace eye",
    "draws": "normal uniform bernoulli randint gamma poisson binomial multinomial permutation"
    " split_key fold_in dropout",
    "values say where": "nonzero_indices boolean_index mask_scatter mask_set",
    "rows lie behind": "index_reduce recurrence recurrence_vjp",
    "sums over rows": "layer_norm_scale_vjp conv2d_kernel_vjp add_conv2d_kernel_vjp",
}
"""Ops that have none, and why."""
_OF_EACH: Final = 2
"""Samples of each op that are tried here, of so many elements at most."""
_SMALL: Final = 3000
SETS: Final = [
    each
    for each in machines()
    if isinstance(each, Native) and each.threads == 3 and each.simd != "amx_emulated"
]


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    simd = extension.EXTENSION.simd() if extension.EXTENSION is not None else None
    yield
    if simd is not None:
        choose(simd)


@cache
def _by_op() -> dict[str, list[Sample]]:
    by_op: dict[str, list[Sample]] = {}
    for sample in samples():
        by_op.setdefault(sample.op, []).append(sample)
    return by_op


# --- ops -----------------------------------------------------------------------------


def test_each_op_has_rows_or_is_one_that_has_none() -> None:
    """Of the smallest samples; with `--long` of all."""
    none = " ".join(WITHOUT_ROWS.values()).split()
    few = {
        op: sorted(every, key=lambda sample: sum([x.size for x in sample.inputs]))
        for op, every in _by_op().items()
    }
    most = with_long(16, None)
    without = [op for op in OPS if not any(map(rows_of, few.get(op, ())[:most]))]
    assert sorted(without) == sorted(none)


def test_a_row_has_the_same_bits_whatever_stands_beside_it() -> None:
    draws, used = random.Random(0), machines()
    for every in _by_op().values():
        small = [sample for sample in every if sum([x.size for x in sample.inputs]) < _SMALL]
        for sample in draws.sample(small, min(len(small), _OF_EACH)):
            each = sample.in_dtype(draws.choice(DTYPES)) or sample
            inside = [machine for machine in used if not outside(machine, each)]
            for rows in rows_of(each)[-1:] if inside else ():
                _check(draws.choice(inside), each, rows, draws.randrange(2, MOST))


def test_avx512_bf16_has_bits_of_its_own_in_products_of_bf16_alone() -> None:
    one, other = Native("avx512", 1), Native("avx512_bf16", 1)
    if not {one.simd, other.simd} <= {each.simd for each in SETS}:
        pytest.skip("this build or processor has no avx512_bf16")
    compared = set()
    for op, every in _by_op().items():
        for sample in every:
            small = sum([x.size for x in sample.inputs]) < _SMALL
            if small and not half.have_halves(sample.inputs):
                assert one.run(sample).tobytes() == other.run(sample).tobytes(), (op, sample)
                compared.add(op)
    assert compared >= {"matmul", "conv2d", "recurrence"}


def _check(machine: Machine, sample: Sample, rows: Rows, count: int) -> None:
    wrong = [*differing(machine, sample, rows, (1, count))]
    assert not wrong, f"{sample} on {machine}, rows {rows.axes}: from, how many: {wrong}"


@pytest.mark.parametrize("machine", SETS, ids=str)
@cases(
    "op, shape, how",
    ("sum", (3, 20_000), {"axis": 1}),
    ("mean", (3, 17_000, 3), {"axis": 1}),
    ("var", (3, 300, 60), {"axis": 1}),
    ("prod", (2, 60, 3, 200), {"axis": (1, 3)}),
)
def test_how_a_long_sum_is_divided_does_not_depend_on_others(
    machine: Native, op: str, shape: tuple[int, ...], how: dict[str, Any]
) -> None:
    x = 1 + np.random.default_rng(0).standard_normal(shape).astype("f") / 100
    sample = Sample(op, (x,), how)
    [rows] = [each for each in rows_of(sample) if each.axes == (0,)]
    _check(machine, sample, rows, 5)


@pytest.mark.parametrize("machine", SETS, ids=str)
def test_a_vector_is_a_matrix_of_one_row_or_column(machine: Native) -> None:
    rng = np.random.default_rng(0)
    for m, k, n in ((1, 40, 1), (7, 33, 5), (5, 800, 1), (3, 360, 40)):
        x, y = rng.standard_normal((m, k)).astype("f"), rng.standard_normal((k, n)).astype("f")
        whole = machine.run(Sample("matmul", (x, y)))
        row = machine.run(Sample("matmul", (x[0].copy(), y)))
        assert row.tobytes() == whole[0].tobytes()
        if n == 1:
            column = machine.run(Sample("matmul", (x, y[:, 0].copy())))
            assert column.tobytes() == whole.tobytes()


def test_the_walk_finds_a_row_that_depends_on_others() -> None:
    class Other:
        def run(self, sample: Sample) -> Array:
            return reference(sample) * np.float32(1 + (len(sample.inputs[0]) == 3) * 1e-6)

    sample = Sample("exp", (np.ones((2, 3), np.float32),))
    [rows] = [each for each in rows_of(sample) if each.axis == 0]
    assert [*differing(Other(), sample, rows, (1, 3))] == [(0, 3), (22, 3), (67, 3)]


def test_an_axis_of_rows_lies_in_front_of_what_the_op_works_along() -> None:
    def axes(op: str, *shapes: tuple[int, ...], **how: Any) -> list[tuple[int | None, ...]]:
        inputs = [np.random.default_rng(0).standard_normal(shape) for shape in shapes]
        return [each.axes for each in rows_of(Sample(op, tuple(inputs), how))]

    assert axes("sum", (3, 4, 5), axis=1) == [(0,)]
    assert axes("softmax", (3, 4, 5)) == [(0,), (1,)]
    assert axes("matmul", (2, 3, 4), (4, 5)) == [(0, None), (1, None)]
    assert axes("matmul", (2, 4, 3), (2, 4, 5), transpose_x=True) == [(0, 0), (2, None)]
    assert axes("add", (3, 4), (4,)) == [(0, None), (1, 0)]


@cases("machine", Reference(), *SETS, ids=str)
def test_floats_become_the_same_integers(machine: Machine) -> None:
    """The nearest that their dtype has, whatever lies beside them."""
    edges = [0.5, 1.0, *(2.0**k for k in (7, 8, 15, 16, 31, 32, 63, 64, 100))]
    integers = [dtype for dtype in DType.all.values() if dtype.is_integer]
    for x, y in itertools.product(("f4", "f8"), integers):
        values = np.array([-0.0, np.nan, np.inf, *edges], x)
        values = np.concatenate([np.nextafter(values, 0), values, np.nextafter(values, 1e9)])
        operand = np.resize(np.concatenate([values, -values]), 997)
        limits, numbers = np.iinfo(y.numpy.name), operand.tolist()
        within = [min(max(v, -(2.0**70)), 2.0**70) if v == v else 0.0 for v in numbers]
        expected = [min(max(int(v), limits.min), limits.max) for v in within]
        result = machine.run(Sample("astype", (operand,), {"dtype": y.name}))
        assert result.tolist() == expected, (x, y)


# --- functions -----------------------------------------------------------------------


def _weights(*shape: int) -> Array:
    return np.random.default_rng(shape).standard_normal(shape).astype("f")


_WEIGHTS: Final = [
    _weights(24, 40),
    _weights(40),
    _weights(40, 1),
    _weights(8),
    _weights(2, 2, 4, 5),
]


def _perceptron(x: Any, w: list[Any]) -> Any:
    return ml.gelu(x @ w[0] + w[1]) @ w[2]


def _attention(x: Any, w: list[Any]) -> Any:
    y = ml.layer_norm(ml.reshape(x, (-1, 3, 8)), w[3], w[3], eps=1e-5)
    return ml.scaled_dot_product_attention(y, y * 2, y, is_causal=True).mean(axis=1)


def _convolution(x: Any, w: list[Any]) -> Any:
    y = ml.relu(ml.conv2d(ml.reshape(x, (-1, 2, 3, 4)), w[4], padding="SAME"))
    return ml.log_softmax(y.var(axis=(1, 2)) + ml.sin(y.sum(axis=(1, 2))))


def _slope(of: Callable[..., Any]) -> Callable[..., Any]:
    return ml.grad(lambda x, w: ml.sum(ml.square(of(x, w))))


FUNCTIONS: Final = [
    *(_perceptron, _attention, _convolution),
    *(_slope(_perceptron), _slope(_attention), _slope(_convolution)),
]
NAMES: Final = [f"{kind}{of}" for kind in ("", "slope of ") for of in ("mlp", "attention", "conv")]


@pytest.mark.skipif(not SETS, reason="numpy leaves products to BLAS")
@pytest.mark.parametrize("of", FUNCTIONS, ids=NAMES)
def test_a_row_of_a_function_has_the_same_bits_eagerly_and_captured(of: Callable[..., Any]) -> None:
    x = _weights(MOST, 24)
    with ml.Arena(ml.VM(native=True, threads=2), "rows"):
        w = [ml.asarray(each) for each in _WEIGHTS]
        whole = of(ml.asarray(x), w).numpy()
        captured = ml.capture(of)
        for first, m in ((0, 1), (40, 1), (3, 2), (17, 33)):
            rows = x[first : first + m]
            expected = whole[first : first + m].tobytes()
            assert of(ml.asarray(rows), w).numpy().tobytes() == expected
            assert captured(ml.asarray(rows), w).numpy().tobytes() == expected


@pytest.mark.skipif(not SETS, reason="numpy leaves products to BLAS")
def test_members_that_share_rows_have_the_bits_of_one_that_has_all() -> None:
    x = _weights(MOST, 24)

    def share(rank: int, vm: Any) -> Array:
        w = [ml.asarray(each) for each in _WEIGHTS]
        rows = ml.asarray(np.array_split(x, ml.parallel.size())[rank])
        return ml.concat([of(rows, w) for of in (_perceptron, _attention)], axis=1).numpy()

    results = []
    for size in (1, 3):
        with ml.parallel.Group([ml.VM(native=True) for _ in range(size)]) as group:
            results.append(np.concatenate(group.run(share)))
    assert results[0].tobytes() == results[1].tobytes()


# --- the page ------------------------------------------------------------------------


def test_the_page_names_what_has_no_rows() -> None:
    page = PAGE.read_text("utf-8")
    missing = [op for op in " ".join(WITHOUT_ROWS.values()).split() if f"`{op}`" not in page]
    assert not missing
