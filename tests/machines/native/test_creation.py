"""The native kernels that make tensors: against the reference, to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.machines.native.planners import assert_same_bits, native, planned, reference

FLOATS = st.floats(-1e300, 1e300)


@given(FLOATS, FLOATS, st.integers(1, 50))
def test_floats_by_steps(start: float, step: float, count: int) -> None:
    stop = start + count * step
    assume(step != 0 and abs(stop) < 1e300 and (stop - start) / step < 100)
    assert_same_bits("arange", start=start, stop=stop, step=step, dtype="f64")


@given(
    FLOATS,
    FLOATS,
    st.sampled_from([0, 1, 2, 3, 100, 5000]),
    st.booleans(),
    st.sampled_from(["f32", "f64"]),
)
def test_linspace(start: float, stop: float, num: int, endpoint: bool, dtype: str) -> None:
    attributes: dict[str, Any] = {"start": start, "stop": stop, "num": num}
    attributes |= {"endpoint": endpoint, "dtype": dtype}
    expected = reference("linspace", **attributes)
    with np.errstate(all="ignore"):
        assert native("linspace", **attributes).tobytes() == expected.tobytes()
    if num > 1 and 1e-3 < abs(stop - start) < 1e30:
        assert planned("linspace", **attributes)
