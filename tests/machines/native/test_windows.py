"""The native kernels of sliding windows: against the reference, to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.brief import cases
from tests.machines.native.planners import assert_same_bits, native, reference

NONE = ((0, 0), (0, 0))


@st.composite
def _sliding(draw: st.DrawFn) -> dict[str, Any]:
    numbers = st.tuples(st.integers(1, 4), st.integers(1, 4))
    borders = st.tuples(st.integers(0, 3), st.integers(0, 3))
    return {
        "window": draw(numbers),
        "stride": draw(numbers),
        "padding": draw(st.sampled_from([NONE, draw(st.tuples(borders, borders))])),
    }


@given(
    _sliding(),
    st.tuples(*[st.integers(*bounds) for bounds in ((0, 3), (4, 9), (4, 9), (0, 9))]),
    st.sampled_from(["f4", "f8"]),
)
def test_windows_of_any_shape(sliding: dict[str, Any], shape: tuple[int, ...], dtype: str) -> None:
    rng = np.random.default_rng(5)
    x = np.asarray(rng.normal(size=shape) * 10.0 ** rng.integers(-5, 5, shape), dtype)
    for name in ("patches", "max_pool2d", "avg_pool2d"):
        assert_same_bits(name, x, **sliding)
    assert_same_bits("patches", x, **sliding, pad_value=float("-inf"))
    windows = native("patches", x, **sliding)
    del sliding["window"]
    assert_same_bits("unpatches", windows, shape=shape, **sliding)


@cases("channels", 1, 3, 16, 67)
@cases("window, stride", (2, 2), (3, 1), (3, 2), (4, 4), (5, 7))
@cases("padding", 0, 2)
def test_images(channels: int, window: int, stride: int, padding: int) -> None:
    x = np.random.default_rng(6).normal(size=(2, 28, 29, channels)).astype("f4")
    sides = (padding, padding)
    sliding: dict[str, Any] = {"stride": (stride, stride), "padding": (sides, sides)}
    for name in ("patches", "max_pool2d", "avg_pool2d"):
        assert_same_bits(name, x, window=(window, window), **sliding)
    windows = native("patches", x, window=(window, window), **sliding)
    assert_same_bits("unpatches", windows, shape=x.shape, **sliding)


def test_windows_that_see_nothing_but_padding() -> None:
    x = np.ones((1, 1, 2, 1))
    sliding: dict[str, Any] = {"stride": (1, 1), "padding": ((3, 3), (3, 3)), "window": (2, 2)}
    for name in ("patches", "max_pool2d", "avg_pool2d"):
        assert_same_bits(name, x, **sliding)
    assert native("max_pool2d", x, **sliding)[0, 0, 0, 0] == -np.inf


@cases("channels", 1, 2, 9)
@cases("stride", 1, 2, 3)
def test_special_values(channels: int, stride: int) -> None:
    values = [np.nan, np.inf, -np.inf, 1.0, -1.0, 1e-45, 3e38, -3e38]
    x = np.random.default_rng(7).choice(values, (2, 12, 13, channels)).astype("f4")
    sliding: dict[str, Any] = {"stride": (stride, stride), "padding": NONE, "window": (2, 2)}
    for name in ("patches", "max_pool2d", "avg_pool2d"):
        result = native(name, x, **sliding)
        np.testing.assert_array_equal(result, reference(name, x, **sliding))
