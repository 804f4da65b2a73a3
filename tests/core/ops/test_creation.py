"""Creation ops: how many elements, how exact, and refusals."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.cases.evaluate import evaluate

steps = st.integers(-5, 5).filter(bool)


@given(st.integers(-100, 27), st.integers(-100, 127), steps)
def test_arange_of_integers_is_range(start: int, stop: int, step: int) -> None:
    result = evaluate("arange", start=start, stop=stop, step=step, dtype="i8")
    assert result.tolist() == list(range(start, stop, step))


@given(st.floats(-50, 50), st.floats(-50, 50), st.floats(0.125, 5), st.booleans())
def test_arange_of_floats_stops_short(start: float, stop: float, step: float, down: bool) -> None:
    step = -step if down else step
    result = evaluate("arange", start=start, stop=stop, step=step, dtype="f64")
    assert len(result) == max(0, math.ceil((stop - start) / step))
    assert result.tolist() == [start + i * step for i in range(len(result))]


@given(st.floats(-50, 50), st.floats(-50, 50), st.integers(2, 40))
def test_linspace_reaches_both_ends(start: float, stop: float, num: int) -> None:
    result = evaluate("linspace", start=start, stop=stop, num=num, dtype="f64")
    assert (result[0], result[-1]) == (start, stop)
    np.testing.assert_allclose(np.diff(result), (stop - start) / (num - 1), atol=1e-13)
