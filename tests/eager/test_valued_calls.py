"""Each call in the tables tests/cases/values/*.txt has its value, or raises its error."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import mlvm.eager as ml
from tests import cases
from tests.brief import refuses
from tests.cases.tables import Section, WrongCall, sections
from tests.slopes import check_slopes

FOLDER: Final = Path(cases.__file__).parent / "values"
SECTIONS: Final = [
    pytest.param(section, id=f"{file.stem}: {section.title}")
    for file in sorted(FOLDER.glob("*.txt"))
    for section in sections(f"values/{file.name}")
]
TOLERANCE: Final = {"f2": 2e-3, "f4": 1e-5, "c8": 1e-5}
"""Relative deviations of `~>` by dtypes; of others 1e-11."""


def assert_is(result: Any, value: Any, *, is_exact: bool) -> None:
    """Assert equal values, and equal types where the value is a tensor or an array."""
    if isinstance(result, ml.Tensor):
        if isinstance(value, ml.Tensor | np.ndarray | np.generic):
            assert result.type == ml.asarray(value).type
        result, value = result.numpy(), np.asarray(value)
        assert result.shape == value.shape
    if isinstance(result, np.ndarray):
        tolerance = 0 if is_exact else TOLERANCE.get(result.dtype.str[1:], 1e-11)
        np.testing.assert_allclose(result, value, rtol=tolerance, atol=tolerance)
    elif isinstance(result, tuple | list):
        assert isinstance(value, list) == isinstance(result, list)
        assert len(result) == len(value)
        for one, other in zip(result, value, strict=True):
            assert_is(one, other, is_exact=is_exact)
    elif is_exact:
        assert result == value or (result != result and value != value)
    else:
        np.testing.assert_allclose(result, value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("section", SECTIONS)
def test_calls_have_their_values(section: Section) -> None:
    """The rows of a section run one after the other: what one changes, the next sees."""
    names: dict[str, Any] = {"ml": ml, "np": np, "math": math, "check_slopes": check_slopes}
    for row in section.rows:
        if isinstance(row, str):
            exec(row, names)
        elif isinstance(row, WrongCall):
            refuses(row.error(names), row.text, exec, row.call, names)
        else:
            assert_is(eval(row.call, names), eval(row.value, names), is_exact=row.is_exact)
