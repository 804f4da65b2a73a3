"""The sizes of the models that the suites train and run, and their batches.

A case is a network and a batch. All train alike: forward, the mean cross-entropy, backward,
SGD with momentum, in f32, on one batch of noise again and again.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.dynamic_sizes import TransformerSize

LEARNING_RATE: Final = 0.01
MOMENTUM: Final = 0.9


class MixerSize(NamedTuple):
    """An MLP-Mixer. After `batch` come the arguments of `models.mlp_mixer.MlpMixer`, in order."""

    batch: int
    image_shape: tuple[int, int, int]
    num_classes: int
    patch_size: int
    hidden_dim: int
    num_blocks: int
    tokens_mlp_dim: int
    channels_mlp_dim: int

    @property
    def patches(self) -> int:
        """The number of patches of an image: the tokens."""
        height, width, _ = self.image_shape
        return height * width // self.patch_size**2

    @property
    def patch_features(self) -> int:
        """The numbers in a patch."""
        return self.patch_size**2 * self.image_shape[2]


class ConvNetSize(NamedTuple):
    """A convolutional network. After `batch` come the arguments of `models.convnet.ConvNet`."""

    batch: int
    image_shape: tuple[int, int, int]
    num_classes: int
    features: tuple[int, int]


class TextSize(NamedTuple):
    """A transformer. `name` is that of its class in `models`. After `batch` and `length`, the
    number of tokens of a text, come its arguments."""

    name: str
    batch: int
    length: int
    num_symbols: int
    hidden_dim: int
    num_blocks: int
    num_heads: int

    @property
    def as_transformer(self) -> TransformerSize:
        """The size for `bench.dynamic_sizes.weights_of`."""
        shape = self.num_blocks, self.hidden_dim, self.num_heads, self.num_symbols
        return TransformerSize(*shape, self.length, self.batch)


ImagesSize = MixerSize | ConvNetSize
Size = ImagesSize | TextSize

MIXERS: Final[dict[str, MixerSize]] = {
    "tiny": MixerSize(32, (16, 16, 1), 10, 4, 64, 4, 32, 128),
    "cifar": MixerSize(64, (32, 32, 3), 10, 4, 128, 8, 64, 512),
    "s16": MixerSize(8, (224, 224, 3), 1000, 16, 512, 8, 256, 2048),
}
STEPS: Final = {"tiny": 20, "cifar": 2, "s16": 1}
"""How many training steps are one round."""
CASES: Final[dict[str, ImagesSize]] = {
    **MIXERS,
    "convnet": ConvNetSize(64, (32, 32, 3), 10, (32, 64)),
}


TEXTS: Final[dict[str, Size]] = {
    "transformer": TextSize("Transformer", 16, 128, 256, 128, 4, 4),
    "bert": TextSize("Bert", 16, 128, 256, 128, 4, 4),
}


def batch_of(size: Size) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the images, f32[batch, height, width, channels], and labels, i64[batch]: always the
    same. Of texts, symbols and labels are i64[batch, length]."""
    rng = np.random.default_rng(0)
    if isinstance(size, TextSize):
        symbols, labels = rng.integers(size.num_symbols, size=(2, size.batch, size.length))
        return symbols, labels
    images = rng.standard_normal((size.batch, *size.image_shape), np.float32)
    return images, rng.integers(size.num_classes, size=size.batch)
