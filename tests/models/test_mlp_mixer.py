"""The Mixer computes what the reference of the benchmark `inference` does in numpy; its parameters
are in `test_published.py` and `test_weights.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from bench.inference import reference
from bench.mlvm_training import model_of
from bench.sizes import MixerSize
from mlvm.core.types import Array
from mlvm.eager.tree import named_tensors, substitute
from models.mlp_mixer import MlpMixer
from tests.brief import cases, refuses


@cases("size, patch_size", ((224, 225), 16), ((15, 16), 2), ((8, 8), 0), ((8, 8), 16))
def test_patches_must_tile_the_image(size: tuple[int, int], patch_size: int) -> None:
    caught = refuses(ml.errors.ShapeError, "", MlpMixer, (*size, 3), 10, patch_size)
    assert f"patch size {patch_size}" in str(caught)
    assert f"{size[0]} x {size[1]}" in str(caught)


SIZE = MixerSize(3, (6, 4, 3), 5, 2, 8, 2, 5, 12)
LABELS = np.array([4, 0, 2])


def cross_entropy(logits: Array) -> float:
    exps = np.exp(logits - logits.max(1, keepdims=True))
    return float(-np.log(exps[np.arange(len(LABELS)), LABELS] / exps.sum(1)).mean())


@pytest.mark.parametrize(("dtype", "tolerance"), [("f32", 1e-5), ("f64", 1e-10)])
def test_forward_loss_and_gradients_equal_numpy(dtype: str, tolerance: float) -> None:
    """Gradients, to the precision of the numpy reference's finite differences."""
    random = np.random.default_rng(7)
    model = substitute(lambda x: ml.astype(x, dtype), model_of(SIZE))
    params = {
        name: (0.5 * random.standard_normal(x.shape) + name.endswith("scale")).astype(x.dtype.numpy)
        for name, x in model.named_parameters().items()
    }
    model.load_parameters(params)
    images = random.standard_normal((SIZE.batch, *SIZE.image_shape)).astype(
        ml.finfo(dtype).dtype.numpy
    )

    def loss(model: MlpMixer) -> Any:
        logits = model(ml.asarray(images))
        return ml.mean(ml.softmax_cross_entropy(logits, ml.asarray(LABELS))), logits

    (value, logits), gradients = ml.value_and_grad(loss, has_aux=True)(model)
    expected = reference(SIZE, params, images.astype(np.float64))
    assert logits.dtype == dtype
    np.testing.assert_allclose(float(value), cross_entropy(expected), rtol=tolerance)
    np.testing.assert_allclose(logits.numpy(), expected, atol=tolerance * np.abs(expected).max())
    named = {name: x.numpy() for name, x in named_tensors(gradients).items()}
    assert named.keys() == params.keys()
    for name, gradient in named.items():
        assert gradient.dtype == params[name].dtype
        direction = random.standard_normal(gradient.shape)
        losses = [
            cross_entropy(reference(SIZE, params | {name: params[name] + step * direction}, images))
            for step in (1e-6, -1e-6)
        ]
        slope = (losses[0] - losses[1]) / 2e-6
        assert slope == pytest.approx((gradient * direction).sum(), rel=1e-5, abs=2e-7), name
