"""Native chains have the bits that their ops have one by one, whatever is broadcast."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlvm.core.machine.fused import Chain, Link
from mlvm.core.op import OPS
from mlvm.core.ops.half import cast, shown
from mlvm.core.types import Array, TensorType, aligned_array, aligned_copy
from mlvm.machines.native.planners.chain import PIECE, _Steps, chain_call
from tests.brief import cases
from tests.core.machine.test_fused import Example, examples
from tests.machines.native.planners import KERNELS, POOLS, assert_same_bits, links, native

SHAPES = [
    ((), ()), ((5,), ()), ((3000,), (1,)), ((0, 3), (3,)), ((7, 300), (300,)), ((300, 7), (7,)),
    ((33, 10), (10,)), ((2, PIECE), (PIECE,)), ((2, PIECE + 1), (PIECE + 1,)),
    ((2, 3000), (3000,)), ((7, 300), (7, 1)), ((2000, 2), (2000, 1)), ((4, 5, 60), (5, 1)),
    ((4, 5, 60), (4, 1, 60)), ((4, 5, 60), (4, 1, 1)), ((4, 5, 60), (1, 5, 60)),
    ((2, 3, 4, 5, 6), (3, 1, 5, 1)), ((2, 3, 4, 5, 600), (2, 1, 4, 1, 600)),
    ((6, 1, 7), (1, 200, 1)),
]  # fmt: skip


@cases("dtype", "u8", "i16", "f32", "f64")
@pytest.mark.parametrize(("x", "y"), SHAPES)
def test_broadcasts(x: tuple[int, ...], y: tuple[int, ...], dtype: str) -> None:
    types = [TensorType(dtype, shape) for shape in (x, y)]
    rng = np.random.default_rng(3)
    operands = [rng.integers(0, 100, type.shape).astype(type.dtype.numpy) for type in types]
    for pair in (operands, operands[::-1]):
        assert_same_bits("subtract", *pair, threads=(*POOLS,))


def test_broadcasts_three_ways() -> None:
    rng = np.random.default_rng(4)
    x, y, z = (rng.standard_normal(s).astype("f4") for s in ((40, 1), (70,), (3, 1, 1)))
    for operands in itertools.permutations((x, y, z)):
        assert_same_bits("multiply_add", *operands)


@cases("size", 1, 16, PIECE, PIECE + 1, 5000)
def test_works_in_place(size: int) -> None:
    x = np.arange(size, dtype=np.float32)
    y = x[:1] + 3
    for operands in ((x, x), (x, y), (y, x)):
        arrays = [aligned_copy(each) for each in operands]
        expected = operands[0] * operands[1]
        out = next(each for each in arrays if each.size == size)
        KERNELS[2]["multiply"](out, *arrays)
        np.testing.assert_array_equal(out, expected)


def one_by_one(example: Example) -> list[Array]:
    """Return the results of a chain's ops alone, on the native machine."""
    values: dict[int, Any] = dict(enumerate(example.operands, len(example.expected)))
    for op, target, sources, attributes in example.chain.links:
        operands = [values[source] for source in sources]
        type = op.infer([TensorType.of(x) for x in operands], attributes)
        assert type is not None
        values[target] = aligned_array(type)
        with np.errstate(all="ignore"):
            KERNELS[1].get(op.name, op.kernel)(values[target], *operands, **attributes)
    return [values[i] for i in range(len(example.expected))]


@given(examples(), st.sampled_from(sorted(POOLS)))
def test_has_the_bits_of_its_ops_one_by_one(example: Example, threads: int) -> None:
    chain = Chain(example.chain.links, example.chain.outputs, KERNELS[threads])
    outs = [aligned_copy(np.zeros_like(x)) for x in example.expected]
    with np.errstate(all="ignore"):
        KERNELS[threads]["fused"](*outs, *map(aligned_copy, example.operands), chain=chain)
    for actual, expected in zip(outs, one_by_one(example), strict=True):
        np.testing.assert_array_equal(actual, expected)
        assert actual.tobytes() == expected.tobytes() or np.isnan(expected).any()


ADAM = links(
    ("multiply_add", 0, 3, 7, 6),
    ("multiply", -1, 4, 8),
    ("multiply_add", 1, 6, 6, -1),
    ("sqrt", -2, 1),
    ("add", -3, -2, 9),
    ("divide", -4, 0, -3),
    ("multiply_add", 2, -4, 10, 5),
)


@cases("dtype", "f32", "f64")
@cases("size", 1, 16, 1000, 5000)
def test_a_step_of_adam_is_one_pass_in_place(size: int, dtype: str) -> None:
    vector, scalar = TensorType(dtype, (size,)), TensorType(dtype)
    call = chain_call(ADAM, [*[vector] * 7, *[scalar] * 4])
    assert call is not None
    kernels = {1: "chain_of_elements", 16: "short_chain", 5000: "chain"}
    assert call.kernel == kernels.get(size, call.kernel)
    rng = np.random.default_rng(5)
    m, v, p, g = (rng.random(size).astype(vector.dtype.numpy) for _ in range(4))
    beta1, beta2, eps, rate = (np.array(x, m.dtype) for x in (0.9, 0.999, 1e-8, -0.1))
    expected_m = m * beta1 + g
    expected_v = g * g + v * beta2
    expected_p = expected_m / (np.sqrt(expected_v) + eps) * rate + p
    arrays = [aligned_copy(x) for x in (m, v, p, g, beta1, beta2, eps, rate)]
    call.run(POOLS[2], *arrays[:3], *arrays[:4], *arrays[4:])
    for actual, expected in zip(arrays, (expected_m, expected_v, expected_p), strict=False):
        np.testing.assert_array_equal(actual, expected)


LINE = links(
    ("add", -1, 1, 2),
    ("subtract", -2, 3, -1),
    ("multiply", -3, -2, 4),
    ("divide", -4, 5, -3),
    ("subtract", -5, -4, 1),
    ("divide", -6, -5, 4),
    ("multiply", 0, 5, -6),
)


@cases("dtype", "f32", "f64")
@cases("size", 2, 3, 4, 7, 31, 32, 33, 65, 100, 5000)
def test_a_line_of_arithmetic_is_one_row_function_in_place(size: int, dtype: str) -> None:
    vector, scalar = TensorType(dtype, (size,)), TensorType(dtype)
    types = [*[vector] * 4, *[scalar] * 2]
    [step] = _Steps(LINE, types).steps
    assert step.row == f"line_{dtype}"
    call = chain_call(LINE, types)
    assert call is not None
    rng = np.random.default_rng(8)
    x, y, z = (rng.random(size).astype(vector.dtype.numpy) + 1 for _ in range(3))
    a, b = np.array(0.3, x.dtype), np.array(1.7, x.dtype)
    expected = b * ((b / ((z - (x + y)) * a) - x) / a)
    arrays = [aligned_copy(each) for each in (x, y, z, a, b)]
    call.run(POOLS[2], arrays[0], *arrays)
    np.testing.assert_array_equal(arrays[0], expected)


@cases("dtype", "f32", "f64")
@cases("second", "add", "subtract", "multiply", "divide")
@cases("first", "add", "subtract", "multiply", "divide")
def test_two_ops_of_single_elements_are_one_function(first: str, second: str, dtype: str) -> None:
    ops = {"add": np.add, "subtract": np.subtract, "multiply": np.multiply, "divide": np.divide}
    scalar = TensorType(dtype)
    x, y, z = (np.array(value, scalar.dtype.numpy) for value in (0.3, 1.7, -2.1))
    for operands, values in (((-1, 3), lambda v: (v, z)), ((3, -1), lambda v: (z, v))):
        chain = links((first, -1, 1, 2), (second, 0, *operands))
        assert len(_Steps(chain, [scalar] * 4).steps) == 1
        call = chain_call(chain, [scalar] * 4)
        assert call is not None
        out = np.zeros_like(x)
        call.run(POOLS[1], out, x, y, z)
        assert out == ops[second](*values(ops[first](x, y)))


def test_a_chain_of_single_elements_has_any_length_and_works_in_place() -> None:
    """Row functions without a function of one element, such as sine, are links of it, too."""
    count = 40
    chain = links(
        ("multiply", -1, 1, 2),
        *[link for i in range(1, count) for link in (
            ("sin", -2 * i, 1 - 2 * i), ("add", -2 * i - 1, -2 * i, 2),
        )],
        ("less", -2 * count, 1 - 2 * count, 2),
        ("where", 0, -2 * count, 1, 1 - 2 * count),
    )  # fmt: skip
    call = chain_call(chain, [TensorType("f64")] * 3)
    assert call is not None
    assert call.kernel == "chain_of_elements"
    x, y = np.array(0.7), np.array(1.3)
    value = native("multiply", x, y)
    for _ in range(1, count):
        value = native("add", native("sin", value), y)
    expected = x if value < y else value
    call.run(POOLS[1], x, x, y)
    assert x == expected


def test_links_may_bring_other_dtypes() -> None:
    """Links between dtypes, and comparisons between them."""
    chain = links(("less", -1, 1, 2), ("where", -2, -1, 1, 2), ("multiply", 0, -2, 3))
    types = [
        TensorType("f64", (50, 60)), *[TensorType("f32", (50, 60))] * 2, TensorType("f64", (60,)),
    ]  # fmt: skip
    call = chain_call(chain, types)
    assert call is not None
    rng = np.random.default_rng(6)
    x, y = (rng.standard_normal((50, 60)).astype("f4") for _ in range(2))
    z = rng.standard_normal(60)
    out = np.zeros((50, 60))
    call.run(POOLS[1], out, x, y, z)
    np.testing.assert_array_equal(out, np.where(x < y, x, y) * z)


@cases("unit", 10, 300, 2000)
def test_units_cover_as_many_elements_as_asked(unit: int) -> None:
    rows = 11
    matrix, bias = TensorType("f32", (rows, unit)), TensorType("f32", (unit,))
    chain = [
        *links(("add", -1, 1, 2)),
        Link(OPS["gelu"], 0, (-1,), OPS["gelu"].bind({"approximate": True})),
    ]
    call = chain_call(chain, [matrix, matrix, bias], unit=unit)
    assert call is not None
    assert call.units == rows


@cases("dtype", "f32", "f64", "bf16", "f16")
@cases("approximate", True, False)
def test_a_value_and_its_slope_are_made_in_one_pass(dtype: str, *, approximate: bool) -> None:
    """If there is such a row function, the bits are those of the two."""
    how = OPS["gelu"].bind({"approximate": approximate})
    names = ("gelu", "gelu_slope")
    chain = [Link(OPS[name], i, (2,), how) for i, name in enumerate(names)]
    x = np.linspace(-12, 12, 3001, dtype="f4")
    x[:3] = np.nan, np.inf, -np.inf
    type = TensorType(dtype, x.shape)
    converted = cast(x, type.dtype)
    outs = [aligned_array(type), aligned_array(type)]
    call = chain_call(chain, [type] * 3)
    assert call is not None
    call.run(POOLS[1], *outs, converted)
    for name, out in zip(names, outs, strict=True):
        alone = native(name, converted, approximate=approximate)
        assert alone[1:].tobytes() == out[1:].tobytes(), name
        assert np.isnan(shown(np.stack([alone[0], out[0]]))).all()  # of signs that compilers choose
    steps = _Steps(chain, [type] * 3).steps
    in_one = dtype in ("f32", "f64") or (dtype == "bf16" and approximate)
    assert (len(steps) == 1 and "_and_slope_" in steps[0].row) == in_one


def test_unknown_functions_leave_a_chain_to_its_parts() -> None:
    chain = Chain(
        links(
            ("add", -1, 1, 1),
            ("multiply", -2, -1, 1),
            ("sinh", -3, -2),
            ("negative", -4, -3),
            ("add", 0, -4, -1),
        ),
        1,
        KERNELS[1],
    )
    x = np.random.default_rng(7).standard_normal((30, 100)).astype("f4")
    types = [TensorType.of(x)] * 2
    kernel: Any = KERNELS[1]["fused"]
    assert kernel.call(types, {"chain": chain}) is None
    out = np.zeros_like(x)
    kernel(out, x, chain=chain)
    np.testing.assert_array_equal(out, -np.sinh((x + x) * x) + (x + x))


def test_a_kernel_of_the_users_runs_in_chains() -> None:
    def add(out: Array, x: Array, y: Array) -> None:
        out[...] = 7

    chain = Chain(links(("multiply", -1, 1, 1), ("add", 0, -1, 1)), 1, {**KERNELS[1], "add": add})
    x = np.ones((5,), np.float32)
    out = np.zeros_like(x)
    KERNELS[1]["fused"](out, x, chain=chain)
    assert out.tolist() == [7] * 5
