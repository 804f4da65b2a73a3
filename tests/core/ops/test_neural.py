"""Neural ops: edges of their domains, several blocks, and refusals. Values and gradients of cases
are judged by `tests/walks` and `tests/eager/autodiff/test_rules.py`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mlvm.core.ops.block_memory import BLOCK_SIZE
from tests.brief import cases
from tests.cases.case import Draws
from tests.cases.claim_tests import claims
from tests.cases.evaluate import evaluate

DRAWS = Draws(11)
f64, f32 = DRAWS.f64, DRAWS.f32
KEY = np.array([3, 0], np.uint64)


# --- erf and gelu ---------------------------------------------------------------------


@cases("dtype", np.float64, np.float32)
def test_exact_gelu_is_x_times_the_normal_distribution_function(dtype: Any) -> None:
    x = np.linspace(-6, 6, 3 * BLOCK_SIZE + 7).astype(dtype)  # several blocks, the last one short
    expected = [v * 0.5 * (1 + math.erf(v / math.sqrt(2))) for v in x.tolist()]
    atol = 1e-14 if dtype is np.float64 else 2e-6
    np.testing.assert_allclose(evaluate("gelu", x, approximate=False), expected, 0, atol)


# --- slopes and transposes ------------------------------------------------------------


@cases("approximate", True, False)
@cases("dtype", "f4", "f8")
def test_gelu_and_its_gradient_far_from_zero(dtype: str, approximate: bool) -> None:
    x = np.array([64, 1e14, 1e38, np.finfo(dtype).max], dtype)
    for far in (x, -x):
        value = evaluate("gelu", far, approximate=approximate)
        slope = evaluate("gelu_slope", far, approximate=approximate)
        np.testing.assert_array_equal(value, np.maximum(far, 0))
        np.testing.assert_array_equal(slope, far > 0)


# --- numerics and edges ---------------------------------------------------------------


@cases("width", BLOCK_SIZE // 3, BLOCK_SIZE // 70, 2 * BLOCK_SIZE)
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


@cases("width", BLOCK_SIZE // 3, BLOCK_SIZE // 70)
def test_layer_norm_scale_vjp_over_several_blocks(width: int) -> None:
    x, g = f64(5 * BLOCK_SIZE // width + 3, width), f64(5 * BLOCK_SIZE // width + 3, width)
    expected = (g * evaluate("layer_norm_normalize", x, eps=1e-6)).sum(0)
    result = evaluate("layer_norm_scale_vjp", g, x, eps=1e-6)
    np.testing.assert_allclose(result, expected, 1e-10, 1e-10)


# --- dropout --------------------------------------------------------------------------


def test_dropout_depends_on_key_and_shape_only() -> None:
    x, y = f64(200, 300), f64(200, 300)
    mask = evaluate("dropout", np.ones_like(x), KEY, rate=0.4)
    np.testing.assert_allclose(evaluate("dropout", x, KEY, rate=0.4), x * mask, 1e-15)
    np.testing.assert_allclose(evaluate("dropout", y, KEY, rate=0.4), y * mask, 1e-15)
    single = evaluate("dropout", np.ones(x.shape, np.float32), KEY, rate=0.4)
    np.testing.assert_array_equal(single != 0, mask != 0)
    other = evaluate("dropout", np.ones_like(x), np.array([4, 0], np.uint64), rate=0.4)
    assert (mask != other).any()


test_rows = claims("neural", globals())
