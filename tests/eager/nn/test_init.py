"""Initialisers: how their values are distributed, and that layers take them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.types import Array
from mlvm.eager import nn
from mlvm.eager.nn import init

SHAPE = (3, 100, 50)  # a window of 3: the fan in is 300, the fan out 150

# the standard deviation, and the largest distance from the mean that there is, in these
DRAWN: dict[str, tuple[Callable[..., Any], float, float]] = {
    "normal": (init.normal(mean=2.0, std=0.5), 0.5, math.inf),
    "uniform": (init.uniform(low=-1.0, high=5.0), 6 / math.sqrt(12), math.sqrt(3)),
    "truncated_normal": (init.truncated_normal(mean=1.0, std=0.1), 0.1 * 0.8796, 2 / 0.8796),
    "lecun_normal": (init.lecun_normal, 300**-0.5, math.inf),
    "lecun_uniform": (init.lecun_uniform, 300**-0.5, math.sqrt(3)),
    "xavier_normal": (init.xavier_normal, (2 / 450) ** 0.5, math.inf),
    "xavier_uniform": (init.xavier_uniform(gain=2.0), 2 * (2 / 450) ** 0.5, math.sqrt(3)),
    "kaiming_normal": (init.kaiming_normal, (2 / 300) ** 0.5, math.inf),
    "kaiming_normal, slope": (
        init.kaiming_normal(negative_slope=2.0),
        (2 / 5 / 300) ** 0.5,
        math.inf,
    ),
    "kaiming_uniform": (init.kaiming_uniform(mode="fan_out"), (2 / 150) ** 0.5, math.sqrt(3)),
    "orthogonal": (init.orthogonal, 300**-0.5, math.inf),
}
MEANS = {"normal": 2.0, "uniform": 2.0, "truncated_normal": 1.0}


@pytest.mark.parametrize("name", DRAWN)
def test_how_values_are_distributed(name: str) -> None:
    make, std, far = DRAWN[name]
    drawn = make(SHAPE, key=ml.random.key(1)).numpy()
    assert (drawn.shape, drawn.dtype) == (SHAPE, np.float32)
    distance = np.abs(drawn - MEANS.get(name, 0.0)) / std
    assert abs((drawn.mean() - MEANS.get(name, 0.0)) / std) < 4 / math.sqrt(drawn.size)
    assert abs(drawn.std() / std - 1) < 0.03
    assert distance.max() <= far * 1.01
    assert distance.max() > (far * 0.98 if far < math.inf else 3.0)
    again = make(SHAPE, key=ml.random.key(1)).numpy()
    np.testing.assert_array_equal(again, drawn)
    assert (make(SHAPE, key=ml.random.key(2)).numpy() != drawn).any()
    assert (make(SHAPE).numpy() != make(SHAPE).numpy()).any()
    for dtype in ("f64", "f16", "bf16"):
        assert make(SHAPE, key=ml.random.key(1), dtype=dtype).type == ml.TensorType(dtype, SHAPE)


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (2, 2, 3), (4, 4)])
def test_orthogonal_kernels(shape: tuple[int, ...]) -> None:
    matrix = init.orthogonal(shape, gain=2.0, dtype="f64").numpy().reshape(-1, shape[-1])
    if matrix.shape[0] < matrix.shape[1]:
        matrix = matrix.T
    np.testing.assert_allclose(matrix.T @ matrix, 4 * np.eye(matrix.shape[1]), atol=1e-12)


def ramp(shape: Any, *, key: Any, dtype: Any) -> ml.Tensor:
    """1, 2, 3, ... in row-major order."""
    count = math.prod(shape if isinstance(shape, tuple) else (shape,))
    return ml.astype(ml.reshape(ml.arange(1, count + 1), shape), dtype)


def order(*shape: int) -> Array:
    return np.arange(1, math.prod(shape) + 1).reshape(shape)


LAYERS: dict[str, tuple[Callable[..., Any], dict[str, Array]]] = {
    "Linear": (lambda **k: nn.Linear(2, 3, **k), {"kernel": order(2, 3), "bias": order(3)}),
    "Bilinear": (
        lambda **k: nn.Bilinear(2, 3, 4, **k),
        {"kernel": order(2, 3, 4), "bias": order(4)},
    ),
    "Conv1d": (lambda **k: nn.Conv1d(2, 3, 4, **k), {"kernel": order(4, 2, 3), "bias": order(3)}),
    "Conv3d": (
        lambda **k: nn.Conv3d(2, 4, 1, groups=2, **k),
        {"kernel": order(1, 1, 1, 1, 4), "bias": order(4)},
    ),
    "ConvTranspose2d": (
        lambda **k: nn.ConvTranspose2d(2, 3, (1, 2), **k),
        {"kernel": np.moveaxis(order(1, 2, 2, 3), -1, -2), "bias": order(3)},
    ),
    "MultiHeadAttention": (
        lambda **k: nn.MultiHeadAttention(4, 2, num_kv_heads=1, **k),
        {
            "query/kernel": order(4, 4),
            "key/kernel": order(4, 2),
            "value/bias": order(2),
            "out/kernel": order(4, 4),
        },
    ),
    "TransformerDecoderLayer": (
        lambda **k: nn.TransformerDecoderLayer(4, 2, 3, **k),
        {"memory_attention/key/kernel": order(4, 4), "hidden/kernel": order(4, 3)},
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_take_initialisers(name: str) -> None:
    make, expected = LAYERS[name]
    for dtype in ("f32", "bf16"):
        layer = make(kernel_init=ramp, bias_init=ramp, dtype=dtype)
        for path, values in expected.items():
            np.testing.assert_array_equal(layer.state()[path].numpy(), values, path)
            assert layer.state()[path].dtype == dtype


def test_embeddings_take_initialisers() -> None:
    for kind in (nn.Embedding, nn.EmbeddingBag):
        np.testing.assert_array_equal(
            kind(3, 2, embedding_init=ramp).embedding.numpy(), order(3, 2)
        )


@pytest.mark.parametrize("name", ["RNN", "LSTM", "GRU"])
def test_recurrent_layers_take_initialisers(name: str) -> None:
    options = {"kernel_init": ramp, "hidden_kernel_init": init.orthogonal, "bias_init": ramp}
    gates = {"RNN": 1, "LSTM": 4, "GRU": 3}[name]
    for layer in (
        getattr(nn, f"{name}Cell")(2, 3, **options),
        getattr(nn, name)(2, 3, bidirectional=True, **options).backward[0],
    ):
        np.testing.assert_array_equal(layer.input_kernel.numpy(), order(2, 3 * gates))
        np.testing.assert_array_equal(layer.bias.numpy(), order(3 * gates))
        hidden = layer.hidden_kernel.numpy()
        np.testing.assert_allclose(hidden @ hidden.T, np.eye(3), atol=1e-6)
