"""A multilayer perceptron on the pixels of an image."""

from __future__ import annotations

import math
from itertools import pairwise

import mlvm.eager as ml
from mlvm.eager import Tensor, nn


class Mlp(nn.Module):
    """Images [N, *image_shape] -> logits [N, num_classes], with relu after each hidden layer."""

    Dense: list[nn.Linear]

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        num_classes: int,
        hidden_dims: tuple[int, ...] = (256, 128),
        *,
        key: Tensor | None = None,
    ) -> None:
        dims = math.prod(image_shape), *hidden_dims, num_classes
        keys = ml.random.split(ml.random.next_key() if key is None else key, len(dims) - 1)
        self.Dense = [
            nn.Linear(features, next_features, key=keys[i])
            for i, (features, next_features) in enumerate(pairwise(dims))
        ]

    def __call__(self, images: Tensor) -> Tensor:
        x = ml.reshape(images, (images.shape[0], -1))
        for dense in self.Dense[:-1]:
            x = ml.relu(dense(x))
        return self.Dense[-1](x)
