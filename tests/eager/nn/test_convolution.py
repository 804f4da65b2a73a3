"""Convolutional layers beside the functions of their names."""

from __future__ import annotations

from typing import Any

import numpy as np

import mlvm.eager as ml
from mlvm.eager import nn
from tests.brief import cases
from tests.eager.nn.checks import f64, normal, randomized


@cases(
    "name, axes, options, shape",
    ("Conv1d", 1, {"dilation": 2, "padding": (2, 1)}, (3, 4, 6)),
    ("Conv2d", 2, {"dilation": (1, 2), "groups": 2, "padding": "VALID"}, (3, 3, 2, 6)),
    ("Conv3d", 3, {"groups": 2, "stride": 2}, (3, 3, 3, 2, 6)),
    ("ConvTranspose1d", 1, {"stride": 2, "dilation": 2}, (3, 6, 4)),
    ("ConvTranspose2d", 2, {"groups": 2, "stride": (1, 2)}, (3, 3, 3, 4)),
    ("ConvTranspose3d", 3, {"padding": "VALID", "dilation": 2}, (3, 3, 3, 6, 4)),
)
def test_layers_are_their_functions(
    name: str, axes: int, options: dict[str, Any], shape: tuple[int, ...]
) -> None:
    layer = getattr(nn, name)(4, 6, 3, dtype="f64", **options)
    w, x = randomized(layer), f64(2, *[5] * axes, 4)
    assert layer.kernel.shape == shape
    of = getattr(ml, f"{'conv_transpose' if 'T' in name else 'conv'}{axes}d")
    expected = of(x, ml.asarray(w["kernel"]), **{"padding": "SAME", **options}).numpy() + w["bias"]
    np.testing.assert_allclose(layer(x).numpy(), expected, rtol=1e-12, atol=1e-13)


@cases(
    "axes, padding, sides",
    (1, 1, (1, 1)),
    (1, (1,), (1, 1)),
    (1, np.int64(2), (2, 2)),
    (2, 1, ((1, 1), (1, 1))),
    (2, (1, 1), ((1, 1), (1, 1))),
    (2, [2, 0], ((2, 2), (0, 0))),
    (2, (1, (2, 0)), ((1, 1), (2, 0))),
    (3, (1, 0, 2), ((1, 1), (0, 0), (2, 2))),
)
def test_a_number_pads_both_sides(axes: int, padding: Any, sides: Any) -> None:
    x, kernel = ml.asarray(normal(2, *(6, 5, 4)[:axes], 3)), ml.asarray(normal(*[3] * axes, 3, 3))
    for name in (f"conv{axes}d", f"conv_transpose{axes}d"):
        function = getattr(ml, name)
        expected = function(x, kernel, padding=sides).numpy()
        np.testing.assert_array_equal(function(x, kernel, padding=padding).numpy(), expected)
    for name, sizes in ((f"Conv{axes}d", (3, 4, 3)), (f"MaxPool{axes}d", (3,))):
        make = getattr(nn, name)
        layer = make(*sizes, padding=padding)
        assert layer.padding == make(*sizes, padding=sides).padding == sides
        layer(x.astype("f32"))
