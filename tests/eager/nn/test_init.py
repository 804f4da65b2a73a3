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
from tests.rows import table

SHAPE = (3, 100, 50)  # a window of 3: the fan in is 300, the fan out 150

# the standard deviation, and the largest distance from the mean that there is, in these
DRAWN: dict[str, tuple[Callable[..., Any], float, float]] = table(globals(), "DRAWN")
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


LAYERS: dict[str, tuple[Callable[..., Any], dict[str, Array]]] = table(globals(), "LAYERS")


@pytest.mark.parametrize("name", LAYERS)
def test_layers_take_initialisers(name: str) -> None:
    make, expected = LAYERS[name]
    for dtype in ("f32", "bf16"):
        layer = make(kernel_init=ramp, bias_init=ramp, dtype=dtype)
        for path, values in expected.items():
            np.testing.assert_array_equal(layer.state()[path].numpy(), values, path)
            assert str(layer.state()[path].dtype) == dtype


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
