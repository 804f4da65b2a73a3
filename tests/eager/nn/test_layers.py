"""Every layer: gradients, captures, empty batches, arrays, and halves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.types import Array
from mlvm.eager import nn
from tests.brief import refuses
from tests.eager.nn.checks import check, f64, normal, randomized
from tests.trees import arrays

Layers: TypeAlias = dict[str, tuple[Callable[..., nn.Module], tuple[int, ...]]]

WITH_WEIGHTS: Final[Layers] = {
    "Linear": (lambda **k: nn.Linear(4, 3, **k), (7, 2, 4)),
    "Sequential": (lambda **k: nn.Sequential(nn.Linear(4, 3, **k), ml.gelu), (7, 4)),
    "PReLU": (lambda **k: nn.PReLU(4, **k), (7, 4)),
    "RMSNorm": (lambda **k: nn.RMSNorm(4, **k), (7, 4)),
    "LayerNorm": (lambda **k: nn.LayerNorm(4, **k), (7, 4)),
    "GroupNorm": (lambda **k: nn.GroupNorm(2, 4, **k), (7, 3, 4)),
    "InstanceNorm": (lambda **k: nn.InstanceNorm(4, **k), (7, 3, 3, 4)),
    "BatchNorm": (lambda **k: nn.BatchNorm(4, **k), (7, 3, 4)),
    "BatchNorm, evaluated": (lambda **k: nn.BatchNorm(4, **k).eval(), (7, 3, 4)),
    "Conv1d": (lambda **k: nn.Conv1d(4, 6, 3, stride=2, **k), (7, 5, 4)),
    "Conv2d in groups": (lambda **k: nn.Conv2d(4, 6, 2, stride=2, groups=2, **k), (7, 5, 5, 4)),
    "Conv2d of few channels": (lambda **k: nn.Conv2d(2, 4, 2, groups=2, **k), (7, 3, 3, 2)),
    "depthwise Conv2d": (lambda **k: nn.Conv2d(4, 4, 3, groups=4, **k), (7, 5, 5, 4)),
    "ConvTranspose2d": (lambda **k: nn.ConvTranspose2d(4, 6, 3, stride=2, **k), (7, 2, 3, 4)),
    "MultiHeadAttention": (lambda **k: nn.MultiHeadAttention(4, 2, **k), (7, 3, 4)),
    "rotary attention": (lambda **k: nn.MultiHeadAttention(4, 2, rotary_base=9.0, **k), (7, 3, 4)),
    "RNNCell": (lambda **k: nn.RNNCell(4, 4, **k), (7, 4)),
    "GRU": (lambda **k: nn.GRU(4, 3, **k), (5, 7, 4)),
    "LSTM": (lambda **k: nn.LSTM(4, 3, **k), (5, 7, 4)),
    "LSTM of steps": (lambda **k: nn.LSTM(4, 3, **k), (7, 2, 4)),
}
WITHOUT: Final[Layers] = {
    "MaxPool2d": (lambda: nn.MaxPool2d(2, stride=1), (7, 3, 4, 2)),
    "AvgPool2d": (lambda: nn.AvgPool2d((1, 2)), (7, 3, 4, 2)),
    "GlobalAvgPool": (nn.GlobalAvgPool, (7, 3, 3, 4)),
    "Softmax": (nn.Softmax, (7, 4)),
    "SiLU": (nn.SiLU, (7, 4)),
    "ELU": (nn.ELU, (7, 4)),
    "Dropout": (lambda: nn.Dropout(0.0), (7, 4)),
}
EVERY: Final = WITH_WEIGHTS | WITHOUT
"""How a layer is made, and the shape of its input, whose axis of samples has the length 7."""

weighted = pytest.mark.parametrize("name", WITH_WEIGHTS)
every = pytest.mark.parametrize("name", EVERY)


def first(result: Any) -> ml.Tensor:
    """The output, without a state beside it."""
    return result if isinstance(result, ml.Tensor) else result[0]


@every
def test_a_layer_has_gradients_and_is_captured(name: str) -> None:
    make, shape = EVERY[name]
    layer = make(dtype="f64") if name in WITH_WEIGHTS else make()
    randomized(layer)
    check(lambda layer, x: layer(x), layer, f64(*shape))


@every
def test_nothing_in_is_nothing_out(name: str) -> None:
    if name == "BatchNorm":
        pytest.skip("nothing has no mean")
    make, shape = EVERY[name]
    layer = make()
    full = [y.shape for y in arrays(layer(ml.zeros(shape)))]
    x = ml.zeros([0 if n == 7 else n for n in shape])
    empty = [tuple([0 if n == 7 else n for n in each]) for each in full]
    assert [y.shape for y in arrays(layer(x))] == empty
    if name in WITH_WEIGHTS:
        slopes = ml.grad(lambda layer: ml.sum(first(layer(x))))(layer)
        assert not any(map(np.any, arrays(slopes)))


@every
def test_a_layer_is_called_on_an_array_in_the_float_of_its_weights(name: str) -> None:
    make, shape = EVERY[name]
    layer, array = make(), normal(*shape).astype(np.float32)
    expected = arrays(layer(ml.asarray(array)))
    weighs = name in WITH_WEIGHTS
    for data in (array, array.astype(np.float64)) if weighs else (array,):
        for call in (layer, ml.capture(layer)):
            for result, each in zip(arrays(call(data)), expected, strict=True):
                np.testing.assert_array_equal(result, each, strict=True)
    if weighs and name[:9] != "BatchNorm":  # whose running means stay f32
        wide = layer.astype(ml.float64)
        for call in (wide, ml.capture(wide)):
            assert {x.dtype for x in arrays(call(data))} == {np.dtype("f8")}


@weighted
def test_one_rule_for_inputs_of_other_floats(name: str) -> None:
    """Halves beside f32 weights are widened; beside halves everything else is refused."""
    make, shape = WITH_WEIGHTS[name]
    layer = make()
    twin = layer.astype(ml.bfloat16)
    assert first(twin(ml.ones(shape, dtype=ml.bfloat16))).dtype is ml.bfloat16
    assert first(layer(ml.ones(shape, dtype=ml.float16))).dtype is ml.float32
    text = f"^({type(layer).__name__}|Linear): x is f32 and the weights are bf16"
    text += r"; write ml.astype\(x, ml.bfloat16\)(\nin |$)"
    wrong: tuple[ml.Tensor | Array, ...] = (ml.ones(shape), np.ones(shape, np.float32))
    for x in wrong:
        refuses(ml.errors.DTypeError, text, twin, x)
    text = "x is f16 and the weights are bf16"
    refuses(ml.errors.DTypeError, text, twin, ml.ones(shape, dtype=ml.float16))
