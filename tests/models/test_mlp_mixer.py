"""The Mixer computes what two other implementations compute; its parameters are in
`test_published.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import mlvm.eager as ml
from mlvm.eager.tree import named_tensors, substitute
from models.mlp_mixer import MlpMixer
from tests.brief import cases, refuses

Array = NDArray[Any]


@cases("size, patch_size", ((224, 225), 16), ((15, 16), 2), ((8, 8), 0), ((8, 8), 16))
def test_patches_must_tile_the_image(size: tuple[int, int], patch_size: int) -> None:
    caught = refuses(ml.errors.ShapeError, "", MlpMixer, (*size, 3), 10, patch_size)
    assert f"{patch_size} x {patch_size}" in str(caught)
    assert f"{size[0]} x {size[1]}" in str(caught)


# --- what it computes ----------------------------------------------------------------


class Reference:
    """The Mixer and its loss in numpy, from named parameters."""

    def __init__(self, parameters: dict[str, Array], patch_size: int, num_blocks: int) -> None:
        self.parameters = parameters
        self.patch_size = patch_size
        self.num_blocks = num_blocks

    def loss(self, images: Array, labels: Array) -> float:
        """Return the mean cross entropy; fill `logits`."""
        n, height, width, channels = images.shape
        p = self.patch_size
        patches = images.reshape(n, height // p, p, width // p, p, channels)
        x = patches.transpose(0, 1, 3, 2, 4, 5).reshape(n, -1, p * p * channels)
        x = self.dense("stem", x)
        for i in range(self.num_blocks):
            block = f"MixerBlock_{i}"
            tokens = self.layer_norm(f"{block}/LayerNorm_0", x).swapaxes(1, 2)
            x = x + self.mlp(f"{block}/token_mixing", tokens).swapaxes(1, 2)
            x = x + self.mlp(f"{block}/channel_mixing", self.layer_norm(f"{block}/LayerNorm_1", x))
        self.logits = self.dense("head", self.layer_norm("pre_head_layer_norm", x).mean(1))
        exps = np.exp(self.logits - self.logits.max(1, keepdims=True))
        return float(-np.log(exps[np.arange(n), labels] / exps.sum(1)).mean())

    def mlp(self, path: str, x: Array) -> Array:
        hidden = self.dense(f"{path}/Dense_0", x)
        t = np.tanh(np.sqrt(2 / np.pi) * (hidden + 0.044715 * hidden**3))
        return self.dense(f"{path}/Dense_1", 0.5 * hidden * (1 + t))

    def dense(self, path: str, x: Array) -> Array:
        kernel, bias = self.parameters[f"{path}/kernel"], self.parameters[f"{path}/bias"]
        result: Array = x @ kernel.reshape(-1, kernel.shape[-1]) + bias
        return result

    def layer_norm(self, path: str, x: Array) -> Array:
        scale, bias = self.parameters[f"{path}/scale"], self.parameters[f"{path}/bias"]
        result: Array = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
        return result * scale + bias


class Case:
    """A small Mixer with random parameters, images that are not square, and labels."""

    patch_size, num_blocks = 2, 2
    image_shape, num_classes = (6, 4, 3), 5

    def __init__(self, dtype: str) -> None:
        random = np.random.default_rng(7)
        model = MlpMixer(
            self.image_shape,
            self.num_classes,
            self.patch_size,
            hidden_dim=8,
            num_blocks=self.num_blocks,
            tokens_mlp_dim=5,
            channels_mlp_dim=12,
            key=ml.random.key(0),
        )
        self.model = substitute(lambda x: ml.astype(x, dtype), model)
        self.parameters = {
            name: (0.5 * random.standard_normal(x.shape) + name.endswith("scale")).astype(
                x.dtype.numpy
            )
            for name, x in self.model.named_parameters().items()
        }
        self.model.load_parameters(self.parameters)
        self.images = random.standard_normal((3, *self.image_shape)).astype(dtype_of(dtype))
        self.labels = np.array([4, 0, 2])

    def run(self) -> tuple[Array, float, dict[str, Array]]:
        """Logits, loss, and gradients by name, as mlvm computes them."""

        def loss(model: MlpMixer, images: ml.Tensor, labels: ml.Tensor) -> Any:
            logits = model(images)
            return ml.mean(ml.softmax_cross_entropy(logits, labels)), logits

        run = ml.value_and_grad(loss, has_aux=True)
        (value, logits), gradients = run(
            self.model, ml.asarray(self.images), ml.asarray(self.labels)
        )
        named = {name: x.numpy() for name, x in named_tensors(gradients).items()}
        return logits.numpy(), float(value), named


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(np.float32 if name == "f32" else np.float64)


def assert_close(actual: Array, expected: Array, tolerance: float, name: str) -> None:
    """Equal within the tolerance, relative to the largest element."""
    assert actual.shape == expected.shape, name
    error = np.abs(actual - expected).max() / max(1e-3, np.abs(expected).max())
    assert error < tolerance, f"{name}: {error}"


@pytest.mark.parametrize(("dtype", "tolerance"), [("f32", 1e-5), ("f64", 1e-10)])
def test_forward_loss_and_gradients_equal_numpy(dtype: str, tolerance: float) -> None:
    """Gradients, to the precision of the numpy reference's finite differences."""
    case = Case(dtype)
    doubles = {name: x.astype(np.float64) for name, x in case.parameters.items()}
    images = case.images.astype(np.float64)
    reference = Reference(doubles, case.patch_size, case.num_blocks)
    expected_loss = reference.loss(images, case.labels)
    logits, loss, gradients = case.run()
    assert logits.dtype == dtype_of(dtype)
    assert abs(loss - expected_loss) < tolerance * expected_loss
    assert_close(logits, reference.logits, tolerance, "logits")
    assert gradients.keys() == case.parameters.keys()
    random, eps = np.random.default_rng(0), 1e-6
    for name, gradient in gradients.items():
        assert gradient.dtype == dtype_of(dtype)
        direction = random.standard_normal(gradient.shape)
        losses = []
        for sign in (1, -1):
            reference.parameters = {**doubles, name: doubles[name] + sign * eps * direction}
            losses.append(reference.loss(images, case.labels))
        slope = (losses[0] - losses[1]) / (2 * eps)
        assert slope == pytest.approx((gradient * direction).sum(), rel=1e-5, abs=2e-7), name
