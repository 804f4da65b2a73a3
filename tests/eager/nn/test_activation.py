"""Activation and pooling layers, beside the functions of their names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.eager import nn
from tests.brief import Fn
from tests.eager.nn.checks import check, f64

NAMES = (
    "relu silu sigmoid tanh softmax log_softmax selu mish relu6 hard_sigmoid hard_swish "
    "log_sigmoid soft_sign tanh_shrink"
)
BY_NAME: dict[str, Any] = {name.lower(): each for name, each in vars(nn).items()}
ACTIVATIONS: dict[str, tuple[Fn, Fn]] = {
    **{name: (BY_NAME[name.replace("_", "")], getattr(ml, name)) for name in NAMES.split()},
    "gelu": (nn.GELU, lambda x: ml.gelu(x, approximate=True)),
    "softplus": (nn.Softplus, lambda x: ml.log1p(ml.exp(x))),
    "leaky_relu": (lambda: nn.LeakyReLU(0.2), lambda x: ml.where(x > 0, x, 0.2 * x)),
    "elu": (lambda: nn.ELU(0.5), lambda x: ml.where(x > 0, x, 0.5 * ml.exp(x) - 0.5)),
    "celu": (lambda: nn.CELU(0.5), lambda x: ml.celu(x, 0.5)),
    "glu": (lambda: nn.GLU(0), lambda x: ml.glu(x, 0)),
    "prelu": (lambda: nn.PReLU(4, dtype="f64"), lambda x: ml.prelu(x, ml.asarray(0.25))),
    "hard_tanh": (lambda: nn.Hardtanh(-2.0, 0.5), lambda x: ml.hard_tanh(x, -2.0, 0.5)),
    "softshrink": (lambda: nn.Softshrink(1.0), lambda x: ml.soft_shrink(x, 1.0)),
    "hardshrink": (lambda: nn.Hardshrink(1.0), lambda x: ml.hard_shrink(x, 1.0)),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_their_functions(name: str) -> None:
    make, function = ACTIVATIONS[name]
    x = f64(4, 4) * 2.0
    np.testing.assert_allclose(make()(x).numpy(), function(x).numpy(), rtol=1e-14, atol=1e-14)
    check(lambda layer, x: layer(x), make(), f64(2, 4))


@pytest.mark.parametrize("name", ["max", "avg"])
def test_pooling_layers_are_their_functions(name: str) -> None:
    x = f64(2, 4, 6, 3)
    for axes, batch in ((1, x[:, 0]), (2, x), (3, x[:, :, None])):
        make, function = (getattr(nn, f"{name.title()}Pool{axes}d"), f"{name}_pool{axes}d")
        for how in ({}, {"stride": 1, "padding": "SAME"}, {"stride": (2,) * axes}):
            expected = getattr(ml, function)(batch, (1,) * (axes - 1) + (2,), **how)
            result = make((1,) * (axes - 1) + (2,), **how)(batch)
            np.testing.assert_array_equal(result.numpy(), expected.numpy())
    parts = getattr(nn, f"Adaptive{name.title()}Pool")((2, 3))(x)
    expected = getattr(ml, f"adaptive_{name}_pool")(x, (2, 3))
    np.testing.assert_array_equal(parts.numpy(), expected.numpy())
    whole, reduce = getattr(nn, f"Global{name.title()}Pool")(), {"max": ml.max, "avg": ml.mean}
    np.testing.assert_array_equal(whole(x).numpy(), reduce[name](x, axis=(1, 2)).numpy())
    np.testing.assert_array_equal(whole(x[:, 0, 0]).numpy(), x[:, 0, 0].numpy())
