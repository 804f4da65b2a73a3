"""conv2d, whose windows are gathered inside the product."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlvm.core.ops.windows import images_per_block
from tests.brief import cases
from tests.machines.native.planners import assert_near, native, reference


@cases("dtype", "float32", "float64")
@given(
    batch=st.integers(0, 3),
    size=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    channels=st.tuples(st.integers(1, 5), st.integers(1, 20)),
    window=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(*[st.tuples(st.integers(0, 4), st.integers(0, 4))] * 2),
)
@settings(max_examples=60, deadline=None)
def test_windows(
    dtype: str,
    batch: int,
    size: tuple[int, int],
    channels: tuple[int, int],
    window: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[tuple[int, int], tuple[int, int]],
) -> None:
    fits = (min(w, n + sum(p)) for w, n, p in zip(window, size, padding, strict=True))
    rng = np.random.default_rng(0)
    x = rng.standard_normal((batch, *size, channels[0])).astype(dtype)
    kernel = rng.standard_normal((*fits, *channels)).astype(dtype)
    attributes: dict[str, Any] = {"stride": stride, "padding": padding}
    tolerance = 2e-5 if dtype == "float32" else 1e-12
    assert_near("conv2d", x, kernel, rtol=0, atol=tolerance, **attributes)


@cases(
    "op, size, kernel, stride, dilation, padding",
    ("conv2d", (23, 31), (7, 7, 3, 40), (2, 2), (1, 1), ((3, 3), (3, 3))),
    ("conv2d", (12, 17), (3, 3, 50, 33), (1, 1), (1, 1), ((1, 1), (1, 1))),
    ("conv2d", (12, 19), (3, 2, 50, 16), (1, 1), (2, 3), ((3, 0), (0, 4))),
    ("conv2d", (40, 33), (2, 2, 5, 9), (3, 2), (1, 1), ((0, 9), (8, 0))),
    ("conv2d", (64, 60), (3, 3, 64, 5), (1, 1), (1, 1), ((1, 1), (1, 1))),
    ("conv_transpose2d", (12, 17), (3, 3, 20, 33), (1, 1), (1, 1), ((1, 1), (1, 1))),
    ("conv_transpose2d", (14, 17), (1, 2, 20, 33), (1, 1), (1, 1), ((1, 0), (2, 0))),
)
def test_windows_in_lines(
    op: str,
    size: tuple[int, int],
    kernel: tuple[int, int, int, int],
    stride: tuple[int, int],
    dilation: tuple[int, int],
    padding: tuple[tuple[int, int], tuple[int, int]],
) -> None:
    """Lines of images are copied, in strips that end with an image, and sums in blocks cut runs."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, *size, kernel[2 if op == "conv2d" else 3]), np.float32)
    weights = rng.standard_normal(kernel, np.float32)
    attributes: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation}
    if op == "conv_transpose2d":
        down, across = (
            n - 1 + w - sum(p) for n, w, p in zip(size, kernel[:2], padding, strict=True)
        )
        attributes["shape"] = (2, down, across, kernel[2])
    result = assert_near(op, x, weights, **attributes)
    single = native(op, x[1:], weights, **{**attributes, **_of_one(attributes)})
    assert single.tobytes() == result[1:].tobytes()


def _of_one(attributes: dict[str, Any]) -> dict[str, Any]:
    return {"shape": (1, *attributes["shape"][1:])} if "shape" in attributes else {}


@cases("size, images", ((32, 32), 1), ((19, 19), 1), ((18, 18), 1), ((9, 9), 4), ((3, 5), 16))
@cases("dtype", "float32", "float64")
def test_the_gradient_of_a_kernel_continues_over_parts_of_a_batch(
    size: tuple[int, int], images: int, dtype: str
) -> None:
    """The parts consist of whole blocks of the sum, so all bits are those of one call."""
    assert images == images_per_block(size[0] * size[1])
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4 * images, *size, 3)).astype(dtype)
    g = rng.standard_normal((4 * images, *size, 7)).astype(dtype)
    how: dict[str, Any] = {"window": (3, 3), "padding": ((1, 1), (1, 1))}
    whole = assert_near("conv2d_kernel_vjp", g, x, rtol=0, atol=0.02, **how)
    total = native("conv2d_kernel_vjp", g[:images], x[:images], **how)
    for begin, end in ((images, 3 * images), (3 * images, 4 * images)):
        parts = g[begin:end], x[begin:end]
        total = assert_near("add_conv2d_kernel_vjp", total, *parts, rtol=0, atol=0.02, **how)
    assert total.tobytes() == whole.tobytes()


@cases("op", "conv2d", "conv_transpose2d")
@cases("across, wide, stride", (7, 7, 1), (8, 3, 1), (10, 5, 1), (15, 3, 1), (16, 7, 1), (17, 3, 2))
def test_each_channel_by_itself(op: str, across: int, wide: int, stride: int) -> None:
    """Tiles of 7 and of 8 places, which may hang over both sides of an image."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 5, across, 37), np.float32)
    kernel = rng.standard_normal((3, wide, 1, 37), np.float32)
    side = wide // 2
    attributes: dict[str, Any] = {"padding": ((1, 1), (side, side)), "groups": 37}
    attributes |= {"stride": (1, stride), "dilation": (1, 1)}
    if op == "conv_transpose2d":
        x = x[:, :, : -(-across // stride)]
        attributes["shape"] = 2, 5, across, 37
    assert_near(op, x, kernel, atol=1e-4, **attributes)


@cases("dtype", "f4", "f8")
@cases("each", 2, 4, 8, 16)
@pytest.mark.parametrize(("across", "wide", "stride", "dilation"), [
    (3, 3, 1, 1), (5, 1, 1, 1), (7, 3, 1, 1), (9, 3, 2, 1), (14, 5, 1, 2), (70, 9, 1, 3)
])  # fmt: skip
def test_narrow_groups(
    across: int, wide: int, stride: int, dilation: int, each: int, dtype: str
) -> None:
    """Tiles of places, some of them outside of the image, and pixels that are copied in parts."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 6, across, 64)).astype(dtype)
    kernel = rng.standard_normal((3, wide, each, 64)).astype(dtype)
    far = (wide - 1) * dilation
    attributes: dict[str, Any] = {"groups": 64 // each, "stride": (2, stride)}
    attributes |= {"padding": ((1, 1), (far // 2 + 1, far // 2)), "dilation": (1, dilation)}
    y = assert_near("conv2d", x, kernel, **attributes)
    most = float(abs(reference("conv2d_kernel_vjp", y, x, window=(3, wide), **attributes)).max())
    attributes["window"] = 3, wide
    assert_near("conv2d_kernel_vjp", y, x, atol=1e-3 * most, **attributes)
