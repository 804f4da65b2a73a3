"""The cases of all ops as parameters of a test."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from mlvm.core.ops.half import shown
from mlvm.core.types import Array
from tests.cases import CASES, Case, random

TOLERANCE = {"float64": 1e-12, "float32": 2e-6, "complex128": 1e-12, "complex64": 2e-6}


def crossed(
    is_suited: Callable[[str, Any], object] = lambda name, case: True,
    *,
    cases: Mapping[str, Sequence[Any]] = CASES,
    first: bool = False,
    few: bool = False,
) -> pytest.MarkDecorator:
    """Run the test for the `name` and `case` of each suited case. With `first`, run one case of an
    op; with `few`, one of those that have the same attributes and kinds of dtypes."""
    params = []
    for name, of_op in cases.items():
        suited = [(i, case) for i, case in enumerate(of_op) if is_suited(name, case)]
        suited = suited[:1] if first else suited
        if few:
            suited = [*{_kind(case): (i, case) for i, case in reversed(suited)}.values()]
        params += [pytest.param(name, case, id=f"{name}-{i}") for i, case in suited]
    return pytest.mark.parametrize(("name", "case"), params)


def _kind(case: Case) -> str:
    return f"{case.attributes} {[x.dtype.kind for x in case.inputs]}"


def assert_expected(name: str, case: Case, result: Array, tolerance: float | None = None) -> None:
    """Check dtype, shape and values against the oracle of the case; draws have its bits."""
    with np.errstate(all="ignore"):
        expected = np.asarray(case.expected(*case.inputs, **case.attributes))
    wide = any(x.dtype in (np.float64, np.complex128) for x in case.inputs)
    if expected.dtype == np.float64 and not wide and "dtype" not in case.attributes:
        expected = expected.astype(np.float32)  # computed more precisely than the op can
    assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
    result, expected = shown(result), shown(expected)
    if name in random.CASES:
        np.testing.assert_array_equal(result, expected)
        return
    tolerance = TOLERANCE.get(result.dtype.name, 0) if tolerance is None else tolerance
    np.testing.assert_allclose(result, expected, rtol=tolerance, atol=tolerance)
