"""Neural ops: edges of their domains, several blocks, and refusals. Values and gradients of cases
are judged by `tests/walks` and `tests/eager/autodiff/test_rules.py`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlvm.core.errors import ArgumentError, OperandValueError
from mlvm.core.ops.blocks import BLOCK_SIZE
from mlvm.core.ops.erf import write_erf
from mlvm.core.ops.windows import Padding, Pair, resolve_padding
from mlvm.core.types import Array
from tests.brief import refuses
from tests.cases.evaluate import evaluate

RNG = np.random.default_rng(11)
NONE = ((0, 0), (0, 0))
KEY = np.array([3, 0], np.uint64)


def f64(*shape: int) -> Array:
    return RNG.standard_normal(shape)


def f32(*shape: int) -> Array:
    return f64(*shape).astype(np.float32)


# --- erf and gelu ---------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "bound"), [(np.float64, 1e-15), (np.float32, 1e-6)])
def test_erf_is_accurate_everywhere(dtype: Any, bound: float) -> None:
    grid = np.concatenate([np.linspace(-7, 7, 40_001), np.logspace(-30, 30, 2001)]).astype(dtype)
    expected = np.array([math.erf(x) for x in grid.tolist()])
    error = np.abs(evaluate("erf", grid) - expected)
    assert (error <= bound * np.abs(expected)).all()


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_erf_at_the_ends(dtype: Any) -> None:
    x = np.array([0.0, -0.0, np.inf, -np.inf, np.nan], dtype)
    result = evaluate("erf", x)
    np.testing.assert_array_equal(result, [0, 0, 1, -1, np.nan])
    assert math.copysign(1, result[1]) == -1


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_exact_gelu_is_x_times_the_normal_distribution_function(dtype: Any) -> None:
    x = np.linspace(-6, 6, 3 * BLOCK_SIZE + 7).astype(dtype)  # several blocks, the last one short
    expected = [v * 0.5 * (1 + math.erf(v / math.sqrt(2))) for v in x.tolist()]
    atol = 1e-14 if dtype is np.float64 else 2e-6
    np.testing.assert_allclose(evaluate("gelu", x, approximate=False), expected, 0, atol)


def test_approximate_gelu_is_near_the_exact_one() -> None:
    x = np.linspace(-8, 8, 1001)
    difference = evaluate("gelu", x) - evaluate("gelu", x, approximate=False)
    assert 1e-5 < np.abs(difference).max() < 5e-4


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_erf_works_in_place(dtype: Any) -> None:
    x = np.linspace(-4, 4, 1001).astype(dtype)
    expected = evaluate("erf", x)
    write_erf(x, x)
    np.testing.assert_array_equal(x, expected)


# --- slopes and transposes ------------------------------------------------------------


@pytest.mark.parametrize("approximate", [True, False])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_gelu_and_its_gradient_far_from_zero(dtype: str, approximate: bool) -> None:
    x = np.array([64, 1e14, 1e38, np.finfo(dtype).max], dtype)
    for far in (x, -x):
        value = evaluate("gelu", far, approximate=approximate)
        slope = evaluate("gelu_slope", far, approximate=approximate)
        np.testing.assert_array_equal(value, np.maximum(far, 0))
        np.testing.assert_array_equal(slope, far > 0)
    infinite = np.array([np.inf, -np.inf], dtype)
    assert evaluate("gelu_slope", infinite, approximate=approximate).tolist() == [1, 0]


@pytest.mark.parametrize("approximate", [True, False])
def test_gelu_slope_over_several_blocks(approximate: bool) -> None:
    x = f64(2 * BLOCK_SIZE + 3)
    result = evaluate("gelu_slope", x, approximate=approximate)
    tail = evaluate("gelu_slope", x[-9:], approximate=approximate)
    np.testing.assert_array_equal(result[-9:], tail)


SIZES = st.tuples(st.integers(1, 3), st.integers(1, 3))


@settings(max_examples=60, deadline=None)
@given(
    size=st.tuples(st.integers(3, 7), st.integers(3, 7)),
    window=SIZES,
    stride=SIZES,
    padding=st.tuples(*[st.tuples(st.integers(0, 2), st.integers(0, 2))] * 2),
)
def test_unpatches_is_the_transpose_of_patches(
    size: Pair, window: Pair, stride: Pair, padding: Padding
) -> None:
    x = f64(2, *size, 2)
    windows = evaluate("patches", x, window=window, stride=stride, padding=padding)
    y = f64(*windows.shape)
    back = evaluate("unpatches", y, shape=x.shape, stride=stride, padding=padding)
    np.testing.assert_allclose(np.vdot(windows, y), np.vdot(x, back), 1e-10, 1e-10)


# --- numerics and edges ---------------------------------------------------------------


def test_softmax_and_its_logarithm_do_not_overflow() -> None:
    x = np.array([[1e4, 0, -1e4], [-1e30, -1e30, -1e30], [0, -np.inf, 0]], np.float32)
    softmax = evaluate("softmax", x)
    expected = np.array([[1, 0, 0], [1 / 3] * 3, [0.5, 0, 0.5]])
    np.testing.assert_allclose(softmax, expected, 1e-6)
    log_softmax = evaluate("log_softmax", x)
    third, half = -math.log(3), -math.log(2)
    expected = np.array([[0, -1e4, -2e4], [third] * 3, [half, -np.inf, half]])
    np.testing.assert_allclose(log_softmax, expected, 1e-6)


def test_cross_entropy_does_not_overflow() -> None:
    logits = np.array([[1e4, 0], [0, 1e4]], np.float32)
    loss = evaluate("softmax_cross_entropy", logits, np.array([0, 0]))
    np.testing.assert_array_equal(loss, [0, 1e4])


def test_layer_norm_of_a_large_offset_keeps_its_digits() -> None:
    x = (1000 + np.arange(8.0)).astype(np.float32)
    result = evaluate("layer_norm_normalize", x, eps=0.0)
    np.testing.assert_allclose(result, (np.arange(8) - 3.5) / np.arange(8).std(), 1e-6)


@pytest.mark.parametrize("width", [BLOCK_SIZE // 3, BLOCK_SIZE // 70, 2 * BLOCK_SIZE])
def test_rows_have_the_same_bits_alone_and_in_blocks(width: int) -> None:
    x, g = f32(5 * BLOCK_SIZE // width + 3, width), f32(5 * BLOCK_SIZE // width + 3, width)
    scale, bias = f32(width), f32(width)
    for name, rows, vectors in [
        ("layer_norm", (x,), (scale, bias)),
        ("layer_norm_normalize", (x,), ()),
        ("layer_norm_vjp", (g, x), (scale,)),
    ]:
        result = evaluate(name, *rows, *vectors, eps=1e-6)
        for i in (0, 1, len(x) // 2, len(x) - 1):
            alone = evaluate(name, *[each[i : i + 1] for each in rows], *vectors, eps=1e-6)
            np.testing.assert_array_equal(result[i : i + 1], alone)


@pytest.mark.parametrize("width", [BLOCK_SIZE // 3, BLOCK_SIZE // 70])
def test_layer_norm_scale_vjp_over_several_blocks(width: int) -> None:
    x, g = f64(5 * BLOCK_SIZE // width + 3, width), f64(5 * BLOCK_SIZE // width + 3, width)
    expected = (g * evaluate("layer_norm_normalize", x, eps=1e-6)).sum(0)
    result = evaluate("layer_norm_scale_vjp", g, x, eps=1e-6)
    np.testing.assert_allclose(result, expected, 1e-10, 1e-10)


def test_relu_lets_nan_through() -> None:
    np.testing.assert_array_equal(evaluate("relu", [np.nan, -np.inf, 2.0]), [np.nan, 0, 2])


def test_max_pool_ignores_its_padding_and_avg_pool_counts_it() -> None:
    x = np.full((1, 2, 2, 1), -3.0)
    corners = {"window": (2, 2), "stride": (2, 2), "padding": ((1, 1), (1, 1))}
    np.testing.assert_array_equal(evaluate("max_pool2d", x, **corners), np.full((1, 2, 2, 1), -3))
    np.testing.assert_array_equal(
        evaluate("avg_pool2d", x, **corners), np.full((1, 2, 2, 1), -0.75)
    )


@pytest.mark.parametrize(
    ("name", "shapes", "attributes", "result"),
    [
        ("relu", [(0,)], {}, (0,)),
        ("gelu", [(2, 0)], {}, (2, 0)),
        ("gelu_slope", [(0,)], {"approximate": False}, (0,)),
        ("softmax", [(0, 3)], {}, (0, 3)),
        ("softmax", [(3, 0)], {}, (3, 0)),
        ("log_softmax", [(3, 0)], {}, (3, 0)),
        ("layer_norm", [(0, 3), (3,), (3,)], {"eps": 1e-6}, (0, 3)),
        ("layer_norm", [(3, 0), (0,), (0,)], {"eps": 1e-6}, (3, 0)),
        ("layer_norm_normalize", [(3, 0)], {"eps": 1e-6}, (3, 0)),
        ("layer_norm_vjp", [(3, 0), (3, 0), (0,)], {"eps": 1e-6}, (3, 0)),
        ("layer_norm_scale_vjp", [(3, 0), (3, 0)], {"eps": 1e-6}, (0,)),
        ("layer_norm_scale_vjp", [(0, 3), (0, 3)], {"eps": 1e-6}, (3,)),
        ("conv2d", [(0, 4, 4, 2), (3, 3, 2, 5)], {"padding": NONE}, (0, 2, 2, 5)),
        ("conv2d", [(1, 4, 4, 2), (3, 3, 2, 0)], {"padding": NONE}, (1, 2, 2, 0)),
    ],
)
def test_tensors_without_elements(
    name: str, shapes: list[tuple[int, ...]], attributes: dict[str, Any], result: tuple[int, ...]
) -> None:
    assert evaluate(name, *[f32(*shape) for shape in shapes], **attributes).shape == result


def test_cross_entropy_of_an_empty_batch() -> None:
    labels = np.zeros((0,), np.int64)
    assert evaluate("softmax_cross_entropy", f32(0, 3), labels).shape == (0,)
    assert evaluate("softmax_cross_entropy_vjp", f32(0), f32(0, 3), labels).shape == (0, 3)


def test_convolution_without_input_channels_is_zero() -> None:
    result = evaluate("conv2d", f32(1, 4, 4, 0), f32(3, 3, 0, 2), padding=NONE)
    np.testing.assert_array_equal(result, np.zeros((1, 2, 2, 2)))


# --- dropout --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_dropout_keeps_its_share_and_scales_it(dtype: Any) -> None:
    x = np.full((300, 400), 3, dtype)
    result = evaluate("dropout", x, KEY, rate=0.25)
    assert set(np.unique(result)) == {0, dtype(4)}
    assert abs((result == 0).mean() - 0.25) < 0.01


def test_dropout_depends_on_key_and_shape_only() -> None:
    x, y = f64(200, 300), f64(200, 300)
    mask = evaluate("dropout", np.ones_like(x), KEY, rate=0.4)
    np.testing.assert_allclose(evaluate("dropout", x, KEY, rate=0.4), x * mask, 1e-15)
    np.testing.assert_allclose(evaluate("dropout", y, KEY, rate=0.4), y * mask, 1e-15)
    single = evaluate("dropout", np.ones(x.shape, np.float32), KEY, rate=0.4)
    np.testing.assert_array_equal(single != 0, mask != 0)
    other = evaluate("dropout", np.ones_like(x), np.array([4, 0], np.uint64), rate=0.4)
    assert (mask != other).any()


def test_dropout_of_rate_zero_is_the_identity() -> None:
    x = f32(50)
    np.testing.assert_array_equal(evaluate("dropout", x, KEY, rate=0), x)


def test_dropout_drops_infinities_too() -> None:
    result = evaluate("dropout", np.full(100, np.inf), KEY, rate=0.5)
    assert set(result) == {0, np.inf}


# --- padding by name ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "stride", "size", "expected"),
    [
        ((3, 3), (1, 1), (7, 8), ((1, 1), (1, 1))),
        ((2, 4), (1, 1), (7, 8), ((0, 1), (1, 2))),
        ((3, 3), (2, 2), (7, 8), ((1, 1), (0, 1))),
        ((1, 2), (3, 3), (7, 8), ((0, 0), (0, 0))),
        ((16, 16), (16, 16), (224, 230), ((0, 0), (5, 5))),
    ],
)
def test_same_padding_makes_size_over_stride_windows(
    window: Pair, stride: Pair, size: Pair, expected: Padding
) -> None:
    padding = resolve_padding("SAME", window, stride, size)
    assert padding == expected
    windows = evaluate("patches", f32(1, *size, 1), window=window, stride=stride, padding=padding)
    assert windows.shape[1:3] == (-(-size[0] // stride[0]), -(-size[1] // stride[1]))


def test_valid_and_explicit_padding() -> None:
    assert resolve_padding("VALID", (3, 3), (1, 1), (7, 8)) == NONE
    assert resolve_padding(((1, 2), (3, 4)), (3, 3), (1, 1), (7, 8)) == ((1, 2), (3, 4))


# --- errors ---------------------------------------------------------------------------


def test_labels_are_classes() -> None:
    x = np.zeros((2, 3))
    refuses(
        OperandValueError,
        r"label 3 at position \(1,\) is none of the 3 classes",
        evaluate,
        "softmax_cross_entropy",
        x,
        np.array([0, 3]),
    )
    refuses(
        OperandValueError,
        r"label -1 at position \(0,\) is none of the 3 classes",
        evaluate,
        "softmax_cross_entropy_vjp",
        x[:, 0],
        x,
        np.array([-1, 0]),
    )


def test_unknown_padding_is_refused() -> None:
    refuses(ArgumentError, "got 'same'", resolve_padding, "same", (3, 3), (1, 1), (7, 8))
    refuses(ArgumentError, "stride", resolve_padding, "SAME", (3, 3), (0, 1), (7, 8))
