"""Activation and pooling layers, beside numpy and PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.types import Array
from mlvm.eager import nn
from tests.brief import cases
from tests.eager.nn.checks import check, f64, normal

ACTIVATIONS: dict[str, tuple[Callable[[], nn.Module], Callable[[Array], Array]]] = {
    "ReLU": (nn.ReLU, lambda x: np.where(x > 0, x, 0)),
    "LeakyReLU": (lambda: nn.LeakyReLU(0.2), lambda x: np.where(x > 0, x, 0.2 * x)),
    "ELU": (lambda: nn.ELU(0.5), lambda x: np.where(x > 0, x, 0.5 * np.exp(x) - 0.5)),
    "GELU": (nn.GELU, lambda x: x / (1 + np.exp(-np.sqrt(8 / np.pi) * (x + 0.044715 * x**3)))),
    "SiLU": (nn.SiLU, lambda x: x / (1 + np.exp(-x))),
    "Sigmoid": (nn.Sigmoid, lambda x: 1 / (1 + np.exp(-x))),
    "Tanh": (nn.Tanh, np.tanh),
    "Softplus": (nn.Softplus, lambda x: np.log(1 + np.exp(x))),
    "Softmax": (nn.Softmax, lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True)),
    "LogSoftmax": (nn.LogSoftmax, lambda x: x - np.log(np.exp(x).sum(-1, keepdims=True))),
    "CELU": (lambda: nn.CELU(0.5), lambda x: np.where(x > 0, x, 0.5 * np.expm1(2 * x))),
    "SELU": (nn.SELU, lambda x: 1.05070099 * np.where(x > 0, x, 1.67326324 * np.expm1(x))),
    "Mish": (nn.Mish, lambda x: x * np.tanh(np.log1p(np.exp(x)))),
    "GLU": (lambda: nn.GLU(0), lambda x: x[:2] / (1 + np.exp(-x[2:]))),
    "PReLU": (lambda: nn.PReLU(4, dtype="f64"), lambda x: np.where(x > 0, x, x / 4)),
    "ReLU6": (nn.ReLU6, lambda x: np.clip(x, 0, 6)),
    "Hardsigmoid": (nn.Hardsigmoid, lambda x: np.clip(x / 6 + 0.5, 0, 1)),
    "Hardswish": (nn.Hardswish, lambda x: x * np.clip(x / 6 + 0.5, 0, 1)),
    "Hardtanh": (lambda: nn.Hardtanh(-2.0, 0.5), lambda x: np.clip(x, -2, 0.5)),
    "LogSigmoid": (nn.LogSigmoid, lambda x: -np.log1p(np.exp(-x))),
    "Softsign": (nn.Softsign, lambda x: x / (1 + abs(x))),
    "Tanhshrink": (nn.Tanhshrink, lambda x: x - np.tanh(x)),
    "Softshrink": (lambda: nn.Softshrink(1.0), lambda x: x - np.clip(x, -1, 1)),
    "Hardshrink": (lambda: nn.Hardshrink(1.0), lambda x: x * (abs(x) > 1)),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str) -> None:
    make, expected = ACTIVATIONS[name]
    x = normal(4, 4) * 2
    np.testing.assert_allclose(make()(ml.asarray(x)).numpy(), expected(x), rtol=1e-8, atol=1e-14)
    check(lambda layer, x: layer(x), make(), f64(2, 4))


def test_pooling() -> None:
    x = normal(2, 4, 6, 3)
    windows = x.reshape(2, 2, 2, 3, 2, 3)
    pooled = nn.MaxPool2d(2)(ml.asarray(x)).numpy()
    np.testing.assert_array_equal(pooled, windows.max((2, 4)))
    pooled = nn.AvgPool2d(2)(ml.asarray(x)).numpy()
    np.testing.assert_allclose(pooled, windows.mean((2, 4)), rtol=1e-12)
    most = nn.GlobalMaxPool()(ml.asarray(x)).numpy()
    np.testing.assert_array_equal(most, x.max((1, 2)))
    halves = nn.AdaptiveAvgPool((2, 3))(ml.asarray(x)).numpy()
    np.testing.assert_allclose(halves, windows.mean((2, 4)), rtol=1e-12)
    halves = nn.AdaptiveMaxPool((2, 3))(ml.asarray(x)).numpy()
    np.testing.assert_array_equal(halves, windows.max((2, 4)))
    for name in ("max", "avg"):
        for axes, batch in ((1, x[:, 0]), (3, x[:, :, None])):
            layer = getattr(nn, f"{name.title()}Pool{axes}d")(2, stride=1, padding="SAME")
            of = getattr(ml, f"{name}_pool{axes}d")
            expected = of(ml.asarray(batch), 2, stride=1, padding="SAME").numpy()
            np.testing.assert_array_equal(layer(ml.asarray(batch)).numpy(), expected)
    mean = nn.GlobalAvgPool()(ml.asarray(x)).numpy()
    np.testing.assert_allclose(mean, x.mean((1, 2)), rtol=1e-12)
    np.testing.assert_array_equal(nn.GlobalAvgPool()(ml.asarray(x[:, 0, 0])).numpy(), x[:, 0, 0])
    assert nn.MaxPool2d(3, stride=(2, 1), padding="SAME")(ml.asarray(x)).shape == (2, 2, 6, 3)


@cases("make", lambda: nn.MaxPool2d(2, stride=1), lambda: nn.AvgPool2d((1, 2)), nn.GlobalAvgPool)
def test_pooling_has_gradients(make: Callable[[], nn.Module]) -> None:
    check(lambda layer, x: layer(x), make(), f64(1, 3, 4, 2))
