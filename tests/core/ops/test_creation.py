"""Creation ops: how many elements, how exact, and what they refuse."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlvm.core.errors import ArgumentError, DTypeError, ShapeError
from tests.brief import cases, refuses
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


def test_arange_of_no_integers_takes_any() -> None:
    assert evaluate("arange", start=-(2**70), stop=-1, step=-3, dtype="i8").shape == (0,)


def test_arange_in_f32_is_rounded_once() -> None:
    result = evaluate("arange", start=0, stop=1000, step=0.1, dtype="f32")
    assert result.tolist() == [float(np.float32(i * 0.1)) for i in range(10_000)]


@given(st.floats(-50, 50), st.floats(-50, 50), st.integers(2, 40))
def test_linspace_reaches_both_ends(start: float, stop: float, num: int) -> None:
    result = evaluate("linspace", start=start, stop=stop, num=num, dtype="f64")
    assert (result[0], result[-1]) == (start, stop)
    np.testing.assert_allclose(np.diff(result), (stop - start) / (num - 1), atol=1e-13)


@cases(
    "name, attributes, error, message",
    ("arange", {"step": 0}, ArgumentError, "step must not be 0"),
    ("arange", {"stop": math.inf}, ArgumentError, "stop must be finite, not inf"),
    ("arange", {"start": math.nan}, ArgumentError, "start must be finite, not nan"),
    ("arange", {"start": 10**400}, ArgumentError, "start: int | float was given 1000"),
    ("arange", {"step": 5e-324, "dtype": "f64"}, ArgumentError, "too many steps"),
    ("arange", {"step": 0.5}, ArgumentError, "i8 must be integers, not 0, 5, 0.5"),
    ("arange", {"stop": 300}, ArgumentError, "299 is not a value of i8 (-128 .. 127)"),
    ("arange", {"start": -1, "dtype": "u8"}, ArgumentError, "-1 is not a value of u8"),
    ("arange", {"dtype": "bool"}, DTypeError, "dtype bool is not allowed"),
    ("arange", {"dtype": "int8"}, DTypeError, "no dtype 'int8'"),
    ("linspace", {"num": -1}, ArgumentError, "num must be >= 0, not -1"),
    ("linspace", {"stop": math.inf}, ArgumentError, "stop must be finite"),
    ("linspace", {"dtype": "i32"}, DTypeError, "dtype i32 is not allowed"),
    ("eye", {"rows": -1}, ShapeError, "integers >= 0"),
    ("eye", {"dtype": "f8"}, DTypeError, "no dtype 'f8'"),
)
def test_refused(
    name: str, attributes: dict[str, Any], error: type[Exception], message: str
) -> None:
    good: dict[str, dict[str, Any]] = {
        "arange": {"start": 0, "stop": 5, "step": 1, "dtype": "i8"},
        "linspace": {"start": 0, "stop": 5, "num": 3, "dtype": "f32"},
        "eye": {"rows": 2, "columns": 3, "dtype": "f32"},
    }
    evaluate(name, **good[name])
    refuses(error, re.escape(message), evaluate, name, **{**good[name], **attributes})


def test_full_takes_a_scalar() -> None:
    with pytest.raises(ShapeError, match="must be a scalar, not of 1 dimensions"):
        evaluate("full", np.ones(1), shape=(2,))
    refuses(ShapeError, "integers >= 0", evaluate, "full", np.array(1.0), shape=(-2,))
