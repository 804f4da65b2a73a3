"""Fixed training step with a digest that shows whether two computers compute the same bits."""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

import mlvm.eager as ml
from mlvm.machines.digest import digest
from mlvm.machines.native.extension import is_native

EXPECTED: Final = "48c92de7da85eb778413e60f80cd5202"
"""Expected digest with the native kernels of every instruction set."""


class _Net(ml.nn.Module):
    """Small network with the usual kinds of layers."""

    def __init__(self, key: ml.Tensor) -> None:
        keys = ml.random.split(key, 4)
        self.patches = ml.nn.Conv2d(3, 24, 3, stride=2, key=keys[0])
        self.norm = ml.nn.LayerNorm(24)
        self.hidden = ml.nn.Linear(24, 50, key=keys[1])
        self.out = ml.nn.Linear(50, 24, key=keys[2])
        self.head = ml.nn.Linear(24, 10, key=keys[3])

    def __call__(self, images: ml.Tensor) -> ml.Tensor:
        x = ml.tanh(self.patches(images))
        x = x + self.out(ml.gelu(self.hidden(self.norm(x))))
        return self.head(ml.mean(x, axis=(1, 2)))


def fixed_step() -> str:
    """Return the digest of the losses and weights of three captured training steps in f32."""
    with ml.Arena(ml.VM("fixed step"), "fixed step"):
        model_key, images_key, labels_key = ml.random.split(ml.random.key(63), 3)
        model = _Net(model_key)
        optimizer = ml.optim.AdamW(model, 1e-2)
        # the gradient of the convolution's kernel is summed in three blocks of images
        images = ml.random.normal((40, 9, 9, 3), key=images_key)
        labels = ml.random.randint((40,), low=0, high=10, key=labels_key)

        def loss_of(model: _Net, images: ml.Tensor, labels: ml.Tensor) -> ml.Tensor:
            return ml.softmax_cross_entropy(model(images), labels, reduction="mean")

        @ml.capture
        def train(images: ml.Tensor, labels: ml.Tensor) -> ml.Tensor:
            loss, gradients = ml.value_and_grad(loss_of)(model, images, labels)
            optimizer.update(gradients)
            return loss

        losses = [train(images, labels) for _ in range(3)]
        tensors = *losses, *model.named_parameters().values()
        return blake2b(b"".join([digest(x.numpy()) for x in tensors]), digest_size=16).hexdigest()


def about_fixed_step() -> str:
    """Return the digest as text and, for native kernels, whether it is as expected."""
    value = fixed_step()
    if not is_native(None):
        return f"{value} (numpy; native kernels compute {EXPECTED})"
    return value if value == EXPECTED else f"{value} (WRONG: expected {EXPECTED})"
