"""Elementwise ops: promotion, broadcasting, IEEE 754 at the edges, and refusals."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlvm.core.errors import DTypeError, OperandValueError, OpError, ShapeError
from mlvm.core.op import OPS
from mlvm.core.ops.blocks import BLOCK_SIZE
from mlvm.core.types import DType, TensorType, promote
from tests.brief import cases, refuses
from tests.cases import CASES
from tests.cases.evaluate import evaluate

INF, NAN = np.inf, np.nan


def gives_floats_of_integers(name: str) -> bool:
    """Derive from the type rule that the result of integers is f32."""
    op = OPS[name]
    try:
        out = op.infer([TensorType("i64")] * len(op.inputs), op.bind({}))
    except OpError:
        return False
    return out is TensorType("f32")


FLOATS = [name for name, op in OPS.items() if op.elementwise and gives_floats_of_integers(name)]

shapes = st.lists(st.integers(0, 3), max_size=4).map(tuple)


def infer(name: str, *types: str) -> str:
    return str(OPS[name].infer([TensorType.parse(each) for each in types], {}))


@pytest.mark.parametrize("size", [7, 2 * BLOCK_SIZE + 3])
@pytest.mark.parametrize("place", [None, 0, 1, 2])
def test_multiply_add_may_write_over_any_operand(size: int, place: int | None) -> None:
    operands = list(np.random.default_rng(0).standard_normal((3, size), np.float32))
    x, y, z = operands
    expected = x * y + z
    out = np.empty_like(x) if place is None else operands[place]
    OPS["multiply_add"].kernel(out, *operands)
    np.testing.assert_array_equal(out, expected)


def test_multiply_add_with_scalars_over_several_blocks() -> None:
    x, one = np.random.default_rng(0).standard_normal(2 * BLOCK_SIZE + 3), np.array(1.5)
    np.testing.assert_array_equal(evaluate("multiply_add", x, one, x), x * 1.5 + x)
    np.testing.assert_array_equal(evaluate("multiply_add", x, x, one[None]), x * x + 1.5)
    np.testing.assert_array_equal(evaluate("multiply_add", one, one, x), 2.25 + x)


# --- types ----------------------------------------------------------------------------


@pytest.mark.parametrize("x", DType.all.values(), ids=str)
@pytest.mark.parametrize("y", DType.all.values(), ids=str)
def test_dtypes_promote(x: DType, y: DType) -> None:
    if (x.name == "u64" and y.kind == "signed") or (x.kind == "signed" and y.name == "u64"):
        refuses(DTypeError, f"{x} and {y} do not promote", infer, "equal", f"{x}[]", f"{y}[]")
        return
    assert infer("equal", f"{x}[]", f"{y}[]") == "bool[]"
    result = OPS["where"].infer([TensorType("bool"), TensorType(x), TensorType(y)], {})
    assert result is TensorType(promote(x, y))


@given(shapes, shapes)
def test_shapes_broadcast_as_numpys(x: tuple[int, ...], y: tuple[int, ...]) -> None:
    try:
        expected = np.broadcast_shapes(x, y)
    except ValueError:
        refuses(ShapeError, "do not broadcast: axis -", evaluate, "add", np.zeros(x), np.zeros(y))
        return
    assert evaluate("add", np.ones(x), np.ones(y)).tolist() == np.full(expected, 2.0).tolist()


def test_the_error_names_op_operands_and_axis() -> None:
    with pytest.raises(ShapeError, match=re.escape("add(f32[2,3], f32[4]): shapes do not")) as e:
        infer("add", "f32[2,3]", "f32[4]")
    assert e.value.op == "add"
    assert "axis -1 has lengths 3 and 4" in e.value.reason


# --- values ---------------------------------------------------------------------------


@cases(
    "name, operands, expected",
    ("divide", [1.0, 0.0], INF),
    ("divide", [0.0, 0.0], NAN),
    ("log", [0.0], -INF),
    ("log", [-1.0], NAN),
    ("sqrt", [-1.0], NAN),
    ("rsqrt", [0.0], INF),
    ("exp", [1e4], INF),
    ("exp", [-INF], 0.0),
    ("tanh", [-INF], -1.0),
    ("sigmoid", [-1e4], 0.0),
    ("sigmoid", [INF], 1.0),
    ("sign", [NAN], NAN),
    ("maximum", [NAN, 1.0], NAN),
    ("minimum", [1.0, NAN], NAN),
    ("clip", [NAN, 0.0, 1.0], NAN),
    ("clip", [5.0, 3.0, 1.0], 1.0),
    ("floor_divide", [7, 0], 0),
    ("remainder", [7, 0], 0),
    ("pow", [0.0, -1.0], INF),
    ("where", [True, 1.0, NAN], 1.0),
)
def test_edges(name: str, operands: list[Any], expected: Any) -> None:
    assert np.array_equal(evaluate(name, *operands), np.array(expected), equal_nan=True)


def test_sigmoid_keeps_its_accuracy_far_out() -> None:
    x = np.array([-15.0, -40.0, -80.0], np.float32)
    np.testing.assert_allclose(evaluate("sigmoid", x), np.exp(x.astype("d")), rtol=1e-6)


def test_integers_wrap_around() -> None:
    assert evaluate("add", np.uint8(250), np.uint8(10)) == 4
    assert evaluate("negative", np.int8(-128)) == -128
    assert evaluate("negative", np.array([0, 1, 255], np.uint8)).tolist() == [0, 255, 1]


def test_pow_of_an_integer_refuses_a_negative_exponent() -> None:
    with pytest.raises(OperandValueError, match="no negative integer power"):
        evaluate("pow", np.array([2, 3]), np.array([1, -1]))
    assert evaluate("pow", 2.0, -1.0) == 0.5


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.elementwise])
def test_out_may_be_any_of_the_operands_that_the_op_names(name: str) -> None:
    op = OPS[name]
    nshared = 0
    for case in CASES[name]:
        expected = evaluate(name, *case.inputs, **case.attributes)
        for i, operand in enumerate(case.inputs[: op.in_place]):
            if (operand.dtype, operand.shape) == (expected.dtype, expected.shape):
                copies = [np.array(x) for x in case.inputs]
                with np.errstate(all="ignore"):
                    op.kernel(copies[i], *copies, **case.attributes)
                np.testing.assert_array_equal(copies[i], expected)
                nshared += 1
    same = name in FLOATS or name in ("add", "multiply", "maximum", "clip", "where", "negative")
    assert nshared or not same, "no case has a result of an operand's type"


@given(shapes)
def test_empty_and_scalar_tensors(shape: tuple[int, ...]) -> None:
    x = np.full(shape, 0.5)
    for name in OPS:
        op = OPS[name]
        if op.elementwise and op.in_place and len(op.inputs) == 1 and name in FLOATS:
            assert evaluate(name, x).shape == shape


def test_multiply_add_rounds_the_product_to_the_dtype_of_the_result() -> None:
    x, z = np.float32(1 + 2**-20), np.float64(0.0)
    for n in (1, 3, 100_000):
        product = evaluate("multiply_add", np.full(n, x), np.full(n, x), np.full(n, z))
        np.testing.assert_array_equal(product, np.float64(x) ** 2)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (2,), (3, 2)])
@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
def test_a_complex_product_in_place_has_the_same_bits(shape: tuple[int, ...], dtype: Any) -> None:
    """numpy takes one of a single element for a reduction, which it rounds otherwise."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        x, y = [
            np.asarray(rng.standard_normal(shape) + 1j * rng.standard_normal(shape), dtype)
            for _ in range(2)
        ]
        separate, first, second = np.empty(shape, dtype), x.copy(), y.copy()
        OPS["multiply"].kernel(separate, x, y)
        OPS["multiply"].kernel(first, first, y)
        OPS["multiply"].kernel(second, x, second)
        assert separate.tobytes() == first.tobytes() == second.tobytes()
