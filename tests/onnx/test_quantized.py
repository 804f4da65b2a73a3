"""Weights of few bits and integers in ONNX files, beside plain numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.onnx import load
from tests.onnx.making import constant, graph, model, node, value

RNG = np.random.default_rng(0)
Array = np.ndarray[Any, Any]


def called(data: bytes, x: Array) -> Array:
    """What the model makes of x, eagerly and captured."""
    made = load(data)
    eager, captured = (np.asarray(fn(ml.asarray(x))) for fn in (made, ml.capture(made)))
    assert np.array_equal(eager, captured)
    return eager


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
        found: Array = (whole.reshape(n, -1, each) << shifts).sum(-1).astype("u1")
        return found

    constants = [constant("w", packed(q).reshape(n, 3, -1)), constant("s", scale)]
    if zeros != "none":
        constants.append(constant("z", packed(zero) if zeros == "packed" else zero))
    names = "x w s" + " z" * (zeros != "none")
    how: Any = {"K": k, "N": n, "bits": bits, "block_size": block}
    made = node("MatMulNBits", names, "y", domain="com.microsoft", **how)
    x = RNG.standard_normal((2, k)).astype("f4")
    y = called(model(graph([made], [value("x", 1, x.shape)], "y", constants)), x)
    weights = (q - np.repeat(zero, block, 1)) * np.repeat(scale, block, 1)
    np.testing.assert_allclose(y, x @ weights[:, :k].T, rtol=1e-5, atol=1e-4 * (1 << bits))


@pytest.mark.parametrize(
    ("channels", "window", "groups"), [(4, 1, 1), (4, 3, 1), (40, 3, 1), (4, 3, 2)]
)
@pytest.mark.parametrize("dtype", ["u1", "i1"])
def test_convolutions_of_integers_are_exact(
    channels: int, window: int, groups: int, dtype: str
) -> None:
    w = RNG.integers(-100, 100, (6, channels // groups, window, window)).astype(dtype)
    x = RNG.integers(0, 256, (2, channels, 6, 5)).astype("u1")
    how: Any = {"group": groups, "pads": [1, 0, 1, 2], "strides": [2, 1]}
    made = node("ConvInteger", "x w xz wz", "y", **how)
    zeros = [constant("xz", np.array(9, "u1")), constant("wz", np.array(3, dtype))]
    constants = [constant("w", w), *zeros]
    y = called(model(graph([made], [value("x", 2, x.shape)], "y", constants)), x)
    plain = model(
        graph([node("Conv", "x w", "y", **how)], [value("x", 11)], "y",
              [constant("w", w.astype("f8") - 3)])
    )  # fmt: skip
    assert y.dtype == np.int32
    assert np.array_equal(y, called(plain, x.astype("f8") - 9))


@pytest.mark.parametrize("shape", [(5, 9), (2, 5, 9)])
def test_products_of_integers_are_exact(shape: tuple[int, ...]) -> None:
    """With a zero for each row of the first, and each column of the second."""
    x, w = RNG.integers(0, 256, shape).astype("u1"), RNG.integers(-128, 128, (9, 6)).astype("i1")
    xz, wz = RNG.integers(0, 256, 5).astype("u1"), RNG.integers(-128, 128, 6).astype("i1")
    constants = [constant(name, each) for name, each in (("w", w), ("xz", xz), ("wz", wz))]
    made = node("MatMulInteger", "x w xz wz", "y")
    y = called(model(graph([made], [value("x", 2, shape)], "y", constants)), x)
    assert np.array_equal(y, (x.astype("i8") - xz[:, None]) @ (w.astype("i8") - wz))
