"""Every op of the table against its cases, and what all of them have in common."""

from __future__ import annotations

import numpy as np
import pytest

from mlvm.core.errors import AttributeRefused, ShapeError
from mlvm.core.op import OPS
from mlvm.core.ops.half import shown
from tests.brief import refuses
from tests.core.ops.cases import CASES, Case
from tests.core.ops.evaluate import evaluate

TOLERANCE = {"float64": 1e-12, "float32": 1e-6, "complex128": 1e-12, "complex64": 2e-6}


@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, case, id=f"{name}-{i}")
        for name, cases in CASES.items()
        for i, case in enumerate(cases)
    ],
)
def test_case(name: str, case: Case) -> None:
    """`evaluate` hands in read-only inputs and an `out` that shows what is left unwritten."""
    result = evaluate(name, *case.inputs, **case.attributes)
    with np.errstate(all="ignore"):
        expected = np.asarray(case.expected(*case.inputs, **case.attributes))
    wide = any(x.dtype in (np.float64, np.complex128) for x in case.inputs)
    if expected.dtype == np.float64 and not wide and "dtype" not in case.attributes:
        expected = expected.astype(np.float32)  # computed more precisely than the op can
    assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
    assert result.flags.c_contiguous
    result, expected = shown(result), shown(expected)
    tolerance = TOLERANCE.get(result.dtype.name, 0)
    np.testing.assert_allclose(result, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", OPS)
def test_every_op_has_cases_and_documentation(name: str) -> None:
    assert CASES.get(name), f"no case of {name} in tests/core/ops/cases"
    assert OPS[name].doc


def test_every_case_is_of_an_op() -> None:
    assert set(CASES) <= set(OPS)


@pytest.mark.parametrize("name", OPS)
def test_every_op_refuses_an_unknown_attribute_and_too_few_tensors(name: str) -> None:
    refuses(AttributeRefused, "colour", evaluate, name, colour=3)
    op = OPS[name]
    if op.inputs and not op.variadic:
        refuses(ShapeError, rf"{name}\(\): takes {len(op.inputs)} tensors", op.infer, [], {})
