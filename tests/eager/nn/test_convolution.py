"""Convolutions: groups, sequences and transposes, beside numpy and PyTorch."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import ArgumentError, MlvmError, ShapeError
from mlvm.core.types import Array
from mlvm.eager import nn
from tests.brief import cases, refuses
from tests.eager.nn.checks import check, f64, normal, randomized


def convolve(x: Array, kernel: Array, stride: tuple[int, int], pads: Any, groups: int) -> Array:
    """Cross-correlation by loops over groups and results."""
    x = np.pad(x, ((0, 0), *pads, (0, 0)))
    height, width, inputs, outputs = kernel.shape
    rows = range(0, x.shape[1] - height + 1, stride[0])
    columns = range(0, x.shape[2] - width + 1, stride[1])
    y = np.zeros((x.shape[0], len(rows), len(columns), outputs))
    for o in range(outputs):
        first = o // (outputs // groups) * inputs
        for a, i in enumerate(rows):
            for b, j in enumerate(columns):
                window = x[:, i : i + height, j : j + width, first : first + inputs]
                y[:, a, b, o] = np.sum(window * kernel[..., o], axis=(1, 2, 3))
    return y


@cases("groups, inputs, outputs", (2, 4, 6), (3, 3, 3), (2, 2, 6), (4, 4, 4))
@cases(
    "window, stride, padding, pads",
    ((3, 2), (1, 1), "SAME", ((1, 1), (0, 1))),
    ((2, 2), (2, 1), ((1, 0), (0, 2)), ((1, 0), (0, 2))),
)
def test_groups(
    groups: int, inputs: int, outputs: int, window: Any, stride: Any, padding: Any, pads: Any
) -> None:
    layer = nn.Conv2d(
        inputs, outputs, window, stride=stride, padding=padding, groups=groups, dtype="f64"
    )
    w, x = randomized(layer), normal(2, 4, 5, inputs)
    assert layer.kernel.shape == (*window, inputs // groups, outputs)
    expected = convolve(x, w["kernel"], stride, pads, groups) + w["bias"]
    np.testing.assert_allclose(layer(ml.asarray(x)).numpy(), expected, rtol=1e-12, atol=1e-13)


@cases(
    "layer, shape",
    (nn.Conv1d(2, 3, 3, stride=2, dtype="f64"), (2, 4, 2)),
    (nn.Conv2d(4, 2, 2, stride=(1, 2), groups=2, dtype="f64"), (1, 3, 3, 4)),
    (nn.Conv2d(2, 4, 2, stride=(1, 2), groups=2, dtype="f64"), (1, 3, 3, 2)),
    (nn.ConvTranspose2d(2, 3, (2, 3), stride=2, dtype="f64"), (1, 2, 3, 2)),
)
def test_convolutions_have_gradients(layer: nn.Module, shape: tuple[int, ...]) -> None:
    check(lambda layer, x: layer(x), layer, f64(*shape))


@pytest.mark.parametrize(("padding", "pads"), [("SAME", (1, 1)), ("VALID", (0, 0)), ((2, 0),) * 2])
@pytest.mark.parametrize("groups", [1, 2])
def test_conv1d(padding: Any, pads: Any, groups: int) -> None:
    layer = nn.Conv1d(4, 6, 3, padding=padding, groups=groups, dtype="f64")
    w, x = randomized(layer), normal(2, 5, 4)
    kernel = w["kernel"][None]
    expected = convolve(x[:, None], kernel, (1, 1), ((0, 0), pads), groups)[:, 0] + w["bias"]
    np.testing.assert_allclose(layer(ml.asarray(x)).numpy(), expected, rtol=1e-12, atol=1e-13)
    assert nn.Conv1d(4, 6, 3, stride=2, padding=padding, dtype="f64")(ml.asarray(x)).shape == (
        2,
        (5 + sum(pads) - 3) // 2 + 1,
        6,
    )


@cases(
    "window, stride, padding",
    (3, 1, "VALID"),
    (3, 2, "SAME"),
    ((2, 3), (1, 2), "SAME"),
    (2, 3, "SAME"),
    (4, 2, ((1, 1), (0, 2))),
)
def test_the_transpose_of_a_convolution(window: Any, stride: Any, padding: Any) -> None:
    """<conv2d(u), x> = <u, conv_transpose2d(x)> for all images u."""
    layer = nn.ConvTranspose2d(3, 2, window, stride=stride, padding=padding, dtype="f64")
    x = f64(2, 3, 4, 3)
    y = layer(x)
    if padding == "SAME":
        down, right = layer.stride
        assert y.shape == (2, 3 * down, 4 * right, 2)
    u = f64(*y.shape)
    back = ml.conv2d(u, layer.kernel, stride=stride, padding=padding)
    assert back.shape == x.shape
    np.testing.assert_allclose(float(ml.sum(back * x)), float(ml.sum(u * y)), rtol=1e-11)


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


x4, x3 = ml.ones((1, 3, 3, 4)), ml.ones((1, 3, 4))


untyped: Any = 1.0


@cases(
    "call, error, message",
    (lambda: nn.Conv2d(4, 6, 3, groups=3), ArgumentError, "expected groups that divide"),
    (lambda: nn.Conv2d(4, 4, 3, groups=0), ArgumentError, "expected groups as an integer >= 1"),
    (
        lambda: nn.Conv2d(4, 4, 3, padding=untyped),
        ArgumentError,
        'padding as "SAME", "VALID", a number or ((top, bottom), (left, right)), got 1.0',
    ),
    (
        lambda: nn.Conv1d(4, 4, 3, padding="FULL"),
        ArgumentError,
        '"VALID", a number or (before, after)',
    ),
    (lambda: nn.Conv1d(4, 4, 0), ArgumentError, "expected window as an integer >= 1, got 0"),
    (
        lambda: ml.conv2d(x4, ml.ones((2, 2, 2, 3)), groups=2),
        ShapeError,
        "a kernel for 2 groups of 4 channels is [height, width, 4 / 2, a multiple of 2], "
        "not [2, 2, 2, 3]",
    ),
    (lambda: ml.conv2d(x4, ml.ones((4, 4, 2, 2)), groups=2), ShapeError, "window is 4 x 4"),
    (lambda: ml.conv2d(x4, ml.ones((4, 4, 1, 4)), groups=4), ShapeError, "window is 4 x 4"),
    (lambda: ml.conv2d(x4, ml.ones((1, 1, 1, 4)), groups=-4), ArgumentError, "expected groups"),
    (lambda: ml.conv1d(x4, ml.ones((3, 4, 4))), ShapeError, "expected a sequence of 3 axes"),
    (lambda: ml.conv1d(x3, ml.ones((4, 4, 4))), ShapeError, "the window is 1 x 4"),
    (
        lambda: ml.conv_transpose2d(x4, ml.ones((2, 2, 4, 3))),
        ShapeError,
        "a kernel for 4 channels is [*window, channels out, 4], not [2, 2, 4, 3]",
    ),
    (
        lambda: ml.conv_transpose2d(x4, ml.ones((2, 2, 3, 4)), padding=((2, 2), (0, 0))),
        ShapeError,
        "leaves nothing",
    ),
    (lambda: ml.conv_transpose2d(x3, ml.ones((2, 2, 3, 4))), ShapeError, "4 axes"),
)
def test_what_is_refused(call: Callable[[], Any], error: type[MlvmError], message: str) -> None:
    refuses(error, re.escape(message), call)
