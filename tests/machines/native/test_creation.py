"""The native kernels that make tensors: against the reference, to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mlvm.core.types import DType
from tests.machines.native.planners import assert_same_bits, native, planned, reference

DTYPES = [name for name, dtype in DType.all.items() if not dtype.is_half]
REAL = [name for name in DTYPES if DType.named(name).kind != "complex"]
FLOATS = st.floats(-1e300, 1e300)


@pytest.mark.parametrize("dtype", DTYPES)
def test_full(dtype: str) -> None:
    value = np.array(1, DType.named(dtype).numpy)
    for shape in ((), (0,), (1,), (17,), (3, 0, 2), (5, 7), (40000,)):
        assert_same_bits("full", value, shape=shape)


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), -0.0, 1e-45])
def test_full_of_special_values(value: float) -> None:
    assert_same_bits("full", np.array(value, "f4"), shape=(9,))


@pytest.mark.parametrize("dtype", [name for name in REAL if name != "bool"])
def test_arange(dtype: str) -> None:
    for start, stop, step in ((0, 0, 1), (3, 100, 7), (100, 3, -7), (0, 1, 1), (5, 2, 1)):
        if dtype[0] != "u" or stop >= 0:
            assert_same_bits("arange", start=start, stop=stop, step=step, dtype=dtype)


def test_long_ranges() -> None:
    assert_same_bits("arange", start=-5000, stop=5000, step=1, dtype="i16")
    assert_same_bits("arange", start=0, stop=100_000, step=3, dtype="i64")
    assert_same_bits("arange", start=2**64 - 10_000, stop=2**64, step=1, dtype="u64")
    assert_same_bits("arange", start=2**63 - 1, stop=-(2**63), step=-(2**50), dtype="i64")
    assert_same_bits("arange", start=0.1, stop=1000.0, step=0.1, dtype="f32")
    assert_same_bits("arange", start=0.1, stop=1000.0, step=0.1, dtype="f64")


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


def test_linspace_at_the_ends_of_the_floats() -> None:
    for start, stop in ((0.0, 5e-324), (-1.7e308, 1.7e308), (2.0, 2.0), (-0.0, -0.0)):
        for num in (1, 2, 10):
            for endpoint in (True, False):
                attributes: dict[str, Any] = {"start": start, "stop": stop, "num": num}
                attributes |= {"endpoint": endpoint, "dtype": "f64"}
                with np.errstate(all="ignore"):
                    result = native("linspace", **attributes)
                assert result.tobytes() == reference("linspace", **attributes).tobytes()


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("k", [-(2**40), -3, 0, 2, 2**40])
def test_eye(dtype: str, k: int) -> None:
    for rows, columns in ((0, 3), (3, 0), (1, 1), (5, 3), (3, 5), (300, 70)):
        assert_same_bits("eye", rows=rows, columns=columns, k=k, dtype=dtype)
