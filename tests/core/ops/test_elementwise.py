"""Elementwise ops: promotion, and results over operands."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mlvm.core.errors import DTypeError, OpError
from mlvm.core.op import OPS
from mlvm.core.ops.block_memory import BLOCK_SIZE
from mlvm.core.types import DType, TensorType, promote
from tests.brief import cases, refuses
from tests.cases import CASES
from tests.cases.evaluate import evaluate


def gives_floats_of_integers(name: str) -> bool:
    """Derive from the type rule that the result of integers is f32."""
    op = OPS[name]
    try:
        out = op.infer([TensorType("i64")] * len(op.inputs), op.bind({}))
    except OpError:
        return False
    return out is TensorType("f32")


FLOATS = [name for name, op in OPS.items() if op.elementwise and gives_floats_of_integers(name)]


def infer(name: str, *types: str) -> str:
    return str(OPS[name].infer([TensorType.parse(each) for each in types], {}))


@cases("size", 7, 2 * BLOCK_SIZE + 3)
@cases("place", None, 0, 1, 2)
def test_multiply_add_may_write_over_any_operand(size: int, place: int | None) -> None:
    operands = list(np.random.default_rng(0).standard_normal((3, size), np.float32))
    x, y, z = operands
    expected = x * y + z
    out = np.empty_like(x) if place is None else operands[place]
    OPS["multiply_add"].kernel(out, *operands)
    np.testing.assert_array_equal(out, expected)


# --- types ----------------------------------------------------------------------------


@pytest.mark.parametrize("x", DType.all.values(), ids=str)
@pytest.mark.parametrize("y", DType.all.values(), ids=str)
def test_dtypes_promote(x: DType, y: DType) -> None:
    if (x.name == "u64" and y.kind == "signed") or (x.kind == "signed" and y.name == "u64"):
        refuses(
            DTypeError, f"{x!r} and {y!r} do not promote", infer, "equal", f"{x!r}[]", f"{y!r}[]"
        )
        return
    assert infer("equal", f"{x!r}[]", f"{y!r}[]") == "bool[]"
    result = OPS["where"].infer([TensorType("bool"), TensorType(x), TensorType(y)], {})
    assert result is TensorType(promote(x, y))


# --- values ---------------------------------------------------------------------------


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


@cases("shape", (), (1,), (1, 1), (2,), (3, 2))
@cases("dtype", np.complex64, np.complex128)
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
