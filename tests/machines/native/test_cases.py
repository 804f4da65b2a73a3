"""Every case of every op that has a native planner: against the case's own expression, with the
reference kernel's tolerance, and with the same bits on any number of threads."""

from __future__ import annotations

import numpy as np
import pytest

from mlvm.machines.native.planner import PLANNERS
from tests.core.ops.cases import CASES, Case
from tests.machines.native.planners import native

TOLERANCE = {"float64": 1e-12, "float32": 2e-6, "complex128": 1e-12, "complex64": 2e-6}

TWINNED = [
    pytest.param(name, case, id=f"{name}-{i}")
    for name, cases in CASES.items()
    if name in PLANNERS
    for i, case in enumerate(cases)
]


@pytest.mark.parametrize(("name", "case"), TWINNED)
def test_case(name: str, case: Case) -> None:
    result = native(name, *case.inputs, **case.attributes)
    with np.errstate(all="ignore"):
        expected = np.asarray(case.expected(*case.inputs, **case.attributes))
    assert result.shape == expected.shape
    tolerance = TOLERANCE.get(result.dtype.name, 0)
    np.testing.assert_allclose(
        result, expected.astype(result.dtype), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize(("name", "case"), TWINNED)
def test_threads_change_no_bit(name: str, case: Case) -> None:
    results = [
        native(name, *case.inputs, threads=threads, **case.attributes) for threads in (1, 2, 3, 5)
    ]
    assert len({result.tobytes() for result in results}) == 1
