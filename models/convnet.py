"""A small convolutional network."""

from __future__ import annotations

import mlvm.eager as ml
from mlvm.eager import Tensor, nn


class ConvNet(nn.Module):
    """Images [N, *image_shape] -> logits [N, num_classes]; image_shape is (H, W, channels).

    Two blocks of a 3 x 3 convolution, relu and 2 x 2 max pooling are followed by a dense layer.
    Pooling drops an odd last row or column. Raises `ShapeError` for images below 4 x 4.
    """

    Conv: list[nn.Conv2d]
    head: nn.Linear

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        num_classes: int,
        features: tuple[int, int] = (32, 64),
        *,
        key: Tensor | None = None,
    ) -> None:
        height, width, channels = image_shape
        if min(height, width) < 4:
            raise ml.errors.ShapeError(
                f"ConvNet: images must have at least 4 x 4 pixels, got {height} x {width}"
            )
        keys = ml.random.split(ml.random.next_key() if key is None else key, 3)
        self.Conv = [
            nn.Conv2d(channels, features[0], 3, padding="SAME", key=keys[0]),
            nn.Conv2d(features[0], features[1], 3, padding="SAME", key=keys[1]),
        ]
        self.head = nn.Linear((height // 4) * (width // 4) * features[1], num_classes, key=keys[2])

    def __call__(self, images: Tensor) -> Tensor:
        x = images
        for conv in self.Conv:
            x = ml.max_pool2d(ml.relu(conv(x)), 2)
        return self.head(ml.reshape(x, (x.shape[0], -1)))
