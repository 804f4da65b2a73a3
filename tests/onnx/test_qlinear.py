"""Weights of few bits and integers in ONNX files, beside plain numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mlvm.onnx import load
from tests.brief import cases
from tests.cases.claim_tests import claims
from tests.onnx.making import called, computed, constant, graph, model, node, value

RNG = np.random.default_rng(0)
Array = np.ndarray[Any, Any]


@pytest.mark.parametrize("zeros", ["none", "packed", "float"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_weights_of_few_bits(bits: int, zeros: str) -> None:
    n, k, block = 5, 40, 16
    q = RNG.integers(0, 1 << bits, (n, 48))  # the last block is not full
    scale = RNG.random((n, 3)).astype("f4")
    zero = {"none": np.full((n, 3), 1 << bits - 1), "float": RNG.random((n, 3)).astype("f4")}.get(
        zeros, RNG.integers(0, 1 << bits, (n, 3))
    )

    def packed(codes: Array) -> Array:
        each = 8 // bits
        whole = np.pad(codes, [(0, 0), (0, -codes.shape[1] % each)])
        shifts = bits * np.arange(each)
        return (whole.reshape(n, -1, each) << shifts).sum(-1).astype("u1")

    z = None if zeros == "none" else packed(zero) if zeros == "packed" else zero
    how: Any = {"K": k, "N": n, "bits": bits, "block_size": block, "domain": "com.microsoft"}
    x = RNG.standard_normal((2, k)).astype("f4")
    y = computed("MatMulNBits", x, packed(q).reshape(n, 3, -1), scale, z, **how)
    weights = (q - np.repeat(zero, block, 1)) * np.repeat(scale, block, 1)
    np.testing.assert_allclose(y, x @ weights[:, :k].T, rtol=1e-5, atol=1e-4 * (1 << bits))


def test_weights_that_nodes_share_are_packed_for_each_form() -> None:
    how: Any = {"domain": "com.microsoft", "K": 16, "N": 1, "block_size": 16}
    pairs = ("x w s", "y"), ("x w s z", "y0")
    nodes = [node("MatMulNBits", *names, **how) for names in pairs]
    arrays = [np.full((1, 1, 8), 0x98, "u1"), np.ones((1, 1), "f4"), np.zeros((1, 1), "u1")]
    body = graph(nodes, [value("x", 1, [1, 16])], "y y0", [*map(constant, "wsz", arrays)])
    assert called(model(body), np.ones((1, 16), "f4")) == (8, 17 * 8)


@cases("channels, window, groups", (4, 1, 1), (4, 3, 1), (40, 3, 1), (4, 3, 2))
@pytest.mark.parametrize("dtype", ["u1", "i1"])
def test_convolutions_of_integers_are_exact(
    channels: int, window: int, groups: int, dtype: str
) -> None:
    w = RNG.integers(-100, 100, (6, channels // groups, window, window)).astype(dtype)
    x = RNG.integers(0, 256, (2, channels, 6, 5)).astype("u1")
    how: Any = {"group": groups, "pads": [1, 0, 1, 2], "strides": [2, 1]}
    y = computed("ConvInteger", x, w, np.array(9, "u1"), np.array(3, dtype), **how)
    assert y.dtype == np.int32
    assert np.array_equal(y, computed("Conv", x.astype("f8") - 9, w.astype("f8") - 3, **how))


@pytest.mark.parametrize("shape", [(5, 9), (2, 5, 9)])
def test_products_of_integers_are_exact(shape: tuple[int, ...]) -> None:
    """With a zero for each row of the first, and each column of the second."""
    x, w = RNG.integers(0, 256, shape).astype("u1"), RNG.integers(-128, 128, (9, 6)).astype("i1")
    xz, wz = RNG.integers(0, 256, 5).astype("u1"), RNG.integers(-128, 128, 6).astype("i1")
    y = computed("MatMulInteger", x, w, xz, wz)
    assert np.array_equal(y, (x.astype("i8") - xz[:, None]) @ (w.astype("i8") - wz))


def quantised(x: Array, scale: float, zero: int, dtype: str = "u1") -> Array:
    limits = np.iinfo(dtype)
    result: Array = np.clip(np.round(x / np.float32(scale)) + zero, limits.min, limits.max)
    return result.astype(dtype)


def floats(q: Array, scale: Any, zero: int) -> Array:
    return (q.astype("f4") - np.float32(zero)) * np.float32(scale)


def scaling(scale: float, zero: int) -> list[Array]:
    return [np.array(scale, "f4"), np.array(zero, "u1")]


@pytest.mark.parametrize("kind", ["Conv", "depthwise", "line", "MatMul", "Gemm"])
def test_factors_between_quantising_nodes_are_multiplied_as_integers(kind: str) -> None:
    """Nodes of onnxruntime's quantiser around a product become a product of integers, and the
    numbers are those of the floats that they stand for."""
    groups = {"depthwise": 6}.get(kind, 1)
    shapes: dict[str, Any] = {
        "Conv": ((2, 4, 6, 5), (6, 4, 3, 3)),
        "depthwise": ((2, 6, 6, 5), (6, 1, 3, 3)),
    }
    shapes |= {
        "line": ((2, 4, 9), (6, 4, 3)),
        "MatMul": ((40, 9), (9, 6)),
        "Gemm": ((5, 9), (6, 9)),
    }
    x_shape, w_shape = shapes[kind]
    x, w = RNG.standard_normal(x_shape).astype("f4"), RNG.integers(-127, 128, w_shape).astype("i1")
    channel = 1 if kind == "MatMul" else 0
    scale = (0.01 * (1 + RNG.random(w_shape[channel]))).astype("f4")
    bias = RNG.integers(-1000, 1000, 6).astype("i4")
    x_scale, y_scale = np.array(0.03, "f4"), np.array(0.05, "f4")
    names = ["sx", "sy", "w", "sw", "b", "sb", "zx", "zy", "zw"]
    arrays = [x_scale, y_scale, w, scale, bias, scale * x_scale]
    arrays += [np.array(120, "u1"), np.array(7, "u1"), np.zeros(6, "i1")]
    has_bias = kind != "MatMul"
    how: Any = {"transB": 1} if kind == "Gemm" else {"group": groups} if len(w_shape) > 2 else {}
    op = "Conv" if len(w_shape) > 2 else kind
    nodes = [
        node("QuantizeLinear", "x sx zx", "xq"),
        node("DequantizeLinear", "xq sx zx", "xd"),
        node("DequantizeLinear", "w sw zw", "wd", axis=channel),
        node("DequantizeLinear", "b sb", "bd", axis=0),
        node(op, "xd wd bd" if has_bias else "xd wd", "p", **how),
        node("QuantizeLinear", "p sy zy", "y"),
    ]
    data = model(graph(nodes, [value("x", 1, x_shape)], "y", [*map(constant, names, arrays)]))
    y = called(data, x)
    by = scale.reshape([-1 if i == channel else 1 for i in range(w.ndim)])
    parts = [floats(quantised(x, 0.03, 120), 0.03, 120), w * by, bias * (scale * x_scale)]
    exact = computed(op, *[each.astype("f8") for each in parts[: 2 + has_bias]], **how)
    off = np.abs(y.astype(int) - quantised(exact, 0.05, 7).astype(int))
    assert off.max() <= 1
    assert (off > 0).mean() < 0.02
    kinds = ["QuantizeLinear", f"Quantized{op}", "QuantizeLinear"]
    assert [each.type for each in load(data).graph.nodes] == kinds


A8, B8 = RNG.integers(0, 256, (2, 2, 3, 4, 4)).astype("u1")
X8, Y8 = floats(A8, 1 / 64, 100), floats(B8, 1 / 32, 120)
ONE, TWO, TO = [A8, *scaling(1 / 64, 100)], [B8, *scaling(1 / 32, 120)], scaling(1 / 32, 7)
W8, R8 = (RNG.integers(-99, 99, (1, k, 12)).astype("i1") for k in (5, 3))
UNIT, STEPS = np.array([0.01], "f4"), RNG.standard_normal((6, 2, 5)).astype("f4")


def called_on(op: str, *operands: Any, **attributes: Any) -> Any:
    return computed(op, *operands, domain="com.microsoft", **attributes)


def whole(x: Array) -> Array:
    """Quantise x as onnxruntime quantises sums, products and means: with the zero point."""
    return np.clip(np.round(x * 32 + 7), 0, 255).astype("u1")


def weights(q: Array, zero: int) -> Array:
    """Return the weights of an LSTM that DynamicQuantizeLSTM stores as q."""
    return np.swapaxes((q.astype("f4") - zero) * UNIT, 1, 2)


test_rows = claims("onnx_quantized", globals())


def test_halves_are_rounded_as_onnxruntime_rounds_them() -> None:
    """Those of sums and products of quantised tensors together with their zero, those of sums of
    products before it is added. All numbers here are exact."""
    a = np.arange(8, dtype="u1").reshape(2, 4)
    b, scale_a, scale_b, zero_a, zero_b, zero = a + np.uint8(3), 0.5, 0.25, 2, 3, 7
    x, y = floats(a, scale_a, zero_a), floats(b, scale_b, zero_b)
    of_a, of_b = scaling(scale_a, zero_a), scaling(scale_b, zero_b)
    cases = [
        ("com.microsoft", "QLinearAdd", x + y, b, 0.5),
        ("com.microsoft", "QLinearMul", x * y, b, 0.25),
        ("", "QLinearMatMul", x @ y.T, np.ascontiguousarray(b.T), 0.5),
    ]
    for domain, name, exact, second, scale in cases:
        operands = a, *of_a, second, *of_b, *scaling(scale, zero)
        result = computed(name, *operands, domain=domain)
        units = exact / scale
        reference = np.round(units + zero) if domain else np.round(units) + zero
        assert np.any(np.round(units + zero) != np.round(units) + zero)
        assert result.tolist() == reference.tolist(), name
