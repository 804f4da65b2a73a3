"""Layers that resize, shuffle, flatten and mix, and the outside of an image; functions of images
are rows of a table."""

from __future__ import annotations

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.eager import nn
from tests.eager.nn.checks import check, f64, normal, randomized

t = ml.asarray
IMAGE = normal(2, 4, 3, 2)
LINE, OFFSETS = np.array([4, 0, 3, 3, 1]), np.array([0, 2, 2, 3])


def test_upsampled_and_shuffled_images() -> None:
    x = t(IMAGE)
    layer = nn.Upsample(scale=2, mode="bicubic", align_corners=True)
    expected = ml.interpolate(x, scale=2, mode="bicubic", align_corners=True)
    np.testing.assert_array_equal(layer(x).numpy(), expected.numpy())
    np.testing.assert_array_equal(nn.Upsample((3, 5))(x).numpy(), ml.interpolate(x, (3, 5)).numpy())
    x = t(normal(2, 3, 3, 8))
    np.testing.assert_array_equal(nn.PixelUnshuffle(2)(nn.PixelShuffle(2)(x)).numpy(), x.numpy())


@pytest.mark.parametrize("bias", [True, False])
def test_bilinear(bias: bool) -> None:
    layer = nn.Bilinear(3, 4, 2, bias=bias, dtype="f64")
    w, x, y = randomized(layer), normal(5, 3), normal(5, 4)
    expected = np.array(
        [
            [a @ w["kernel"][:, :, k] @ b + (w["bias"][k] if bias else 0) for k in range(2)]
            for a, b in zip(x, y, strict=True)
        ]
    )
    np.testing.assert_allclose(layer(t(x), t(y)).numpy(), expected, rtol=1e-11)
    check(lambda layer, x, y: layer(x, y), layer, f64(2, 3), f64(2, 4))
    half = nn.Bilinear(3, 4, 2, dtype=ml.bfloat16)
    assert half(ml.ones((5, 3), dtype=ml.bfloat16), ml.ones((5, 4), dtype=ml.bfloat16)).type == (
        ml.TensorType("bf16", (5, 2))
    )


def test_bags_of_a_layer_are_those_of_the_function() -> None:
    layer = nn.EmbeddingBag(5, 4, mode="sum", dtype="f64")
    bags = layer(t(LINE), t(OFFSETS), weights=t(np.arange(5.0))).numpy()
    rows = layer.embedding.numpy()[LINE] * np.arange(5.0)[:, None]
    expected = [rows[:2].sum(0), np.zeros(4), rows[2], rows[3:].sum(0)]
    np.testing.assert_allclose(bags, np.stack(expected), rtol=1e-12)
    assert not layer(ml.zeros((2, 0), dtype="i64")).numpy().any()
    late = ml.embedding_bag(layer.embedding, t(LINE), t(np.array([3])), mode="sum").numpy()
    np.testing.assert_allclose(late, layer.embedding.numpy()[LINE[3:]].sum(0)[None], rtol=1e-12)
