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
from tests.rows import table

ACTIVATIONS: dict[str, tuple[Callable[[], nn.Module], Callable[[Array], Array]]] = table(
    globals(), "ACTIVATIONS"
)


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
