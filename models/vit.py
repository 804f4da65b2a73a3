"""Vision Transformer with the parameter names and layouts of the official checkpoints.

See Dosovitskiy et al., arXiv 2010.11929. `python -m models.vit` prints the published variants.
"""

from __future__ import annotations

import math
import sys

import mlvm.eager as ml
from mlvm.eager import Tensor, nn
from mlvm.machines.terminal import CommandParser
from models.mlp_mixer import MlpBlock

HEADER = "variant patch_size hidden_size num_layers mlp_dim num_heads     parameters"
VARIANTS = {
    "Ti/16": (16, 192, 12, 768, 3),
    "S/32": (32, 384, 12, 1536, 6),
    "S/16": (16, 384, 12, 1536, 6),
    "B/32": (32, 768, 12, 3072, 12),
    "B/16": (16, 768, 12, 3072, 12),
    "B/8": (8, 768, 12, 3072, 12),
    "L/32": (32, 1024, 24, 4096, 16),
    "L/16": (16, 1024, 24, 4096, 16),
    "H/14": (14, 1280, 32, 5120, 16),
    "g/14": (14, 1408, 40, 6144, 16),
    "G/14": (14, 1664, 48, 8192, 16),
}


class HeadsOf(nn.Module):
    """Linear map to heads: [N, T, width] -> [N, num_heads, T, head_dim]."""

    def __init__(self, width: int, num_heads: int, key: Tensor) -> None:
        shape = width, num_heads, width // num_heads
        self.kernel = ml.random.normal(shape, key=key) / math.sqrt(width)
        self.bias = ml.zeros(shape[1:])

    def __call__(self, x: Tensor) -> Tensor:
        y = x @ ml.reshape(self.kernel, (x.shape[-1], -1)) + ml.reshape(self.bias, (-1,))
        return ml.permute_dims(ml.reshape(y, (*x.shape[:-1], *self.bias.shape)), (0, 2, 1, 3))


class OfHeads(nn.Module):
    """Linear map from heads: [N, num_heads, T, head_dim] -> [N, T, width]."""

    def __init__(self, width: int, num_heads: int, key: Tensor) -> None:
        shape = num_heads, width // num_heads, width
        self.kernel = ml.random.normal(shape, key=key) / math.sqrt(width)
        self.bias = ml.zeros((width,))

    def __call__(self, x: Tensor) -> Tensor:
        width = self.bias.shape[0]
        y = ml.reshape(ml.permute_dims(x, (0, 2, 1, 3)), (x.shape[0], -1, width))
        return y @ ml.reshape(self.kernel, (width, width)) + self.bias


class Attention(nn.Module):
    """Attention of all tokens to all: [N, T, width] -> [N, T, width]."""

    def __init__(self, width: int, num_heads: int, key: Tensor) -> None:
        keys = ml.random.split(key, 4)
        self.query, self.key, self.value = (HeadsOf(width, num_heads, keys[i]) for i in range(3))
        self.out = OfHeads(width, num_heads, keys[3])

    def __call__(self, x: Tensor) -> Tensor:
        heads = ml.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))
        return self.out(heads)


class EncoderBlock(nn.Module):
    """Norm and attention, then norm and perceptron: [N, T, width] -> [N, T, width]."""

    def __init__(
        self, width: int, mlp_dim: int, num_heads: int, key: Tensor, *, approximate: bool = True
    ) -> None:
        keys = ml.random.split(key)
        self.LayerNorm_0 = nn.LayerNorm(width, eps=1e-6)
        self.MultiHeadDotProductAttention_1 = Attention(width, num_heads, keys[0])
        self.LayerNorm_2 = nn.LayerNorm(width, eps=1e-6)
        self.MlpBlock_3 = MlpBlock(width, mlp_dim, keys[1], approximate=approximate)

    def __call__(self, x: Tensor) -> Tensor:
        x = x + self.MultiHeadDotProductAttention_1(self.LayerNorm_0(x))
        return x + self.MlpBlock_3(self.LayerNorm_2(x))


class PositionEmbedding(nn.Module):
    """Learned vector per token, added to the input: [N, T, width] -> [N, T, width]."""

    def __init__(self, tokens: int, width: int, key: Tensor) -> None:
        self.pos_embedding = 0.02 * ml.random.normal((1, tokens, width), key=key)

    def __call__(self, x: Tensor) -> Tensor:
        return x + self.pos_embedding


class Encoder(nn.Module):
    """Transformer encoder: [N, tokens, width] -> [N, tokens, width]."""

    def __init__(
        self,
        tokens: int,
        width: int,
        num_layers: int,
        mlp_dim: int,
        num_heads: int,
        key: Tensor,
        *,
        approximate: bool = True,
    ) -> None:
        keys = ml.random.split(key, num_layers + 1)
        self.posembed_input = PositionEmbedding(tokens, width, keys[0])
        self.encoderblock = [
            EncoderBlock(width, mlp_dim, num_heads, keys[1 + i], approximate=approximate)
            for i in range(num_layers)
        ]
        self.encoder_norm = nn.LayerNorm(width, eps=1e-6)

    def __call__(self, x: Tensor) -> Tensor:
        x = self.posembed_input(x)
        for block in self.encoderblock:
            x = block(x)
        return self.encoder_norm(x)


class VisionTransformer(nn.Module):
    """Images [N, *image_shape] -> logits [N, num_classes]; image_shape is (H, W, channels).

    The head reads the class token. With `representation_size`, a layer of this size with tanh
    precedes the head. The official code uses the GELU with tanh (`approximate`); timm uses the
    exact GELU. The model has no dropout.

    Raises `ShapeError` if patches do not tile the image, and for images of a different shape;
    `ArgumentError` if `num_heads` does not divide `hidden_size`.
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        num_classes: int,
        patch_size: int = 4,
        hidden_size: int = 96,
        num_layers: int = 4,
        mlp_dim: int = 192,
        num_heads: int = 4,
        *,
        representation_size: int | None = None,
        approximate: bool = True,
        key: Tensor | None = None,
    ) -> None:
        (height, width, channels), patch = image_shape, patch_size
        if patch < 1 or height % patch or width % patch:
            raise ml.errors.ShapeError(f"patch size {patch} must divide {height} x {width}")
        if num_heads < 1 or hidden_size % num_heads:
            raise ml.errors.ArgumentError(
                f"num_heads must divide hidden_size, got {num_heads} and {hidden_size}"
            )
        keys = ml.random.split(ml.random.next_key() if key is None else key, 3)
        self.image_shape = image_shape
        self.embedding = nn.Conv2d(
            channels, hidden_size, patch, stride=patch, padding="VALID", key=keys[0]
        )
        self.cls = ml.zeros((1, 1, hidden_size))
        self.Transformer = Encoder(
            1 + height * width // patch**2,
            hidden_size,
            num_layers,
            mlp_dim,
            num_heads,
            keys[1],
            approximate=approximate,
        )
        features = hidden_size
        self.pre_logits = None
        if representation_size is not None:
            features = representation_size
            self.pre_logits = nn.Linear(hidden_size, features, key=keys[2])
        # initial values of the paper's code
        self.head = nn.Linear(features, num_classes, kernel_init=nn.init.zeros)

    def __call__(self, images: Tensor) -> Tensor:
        if images.shape[1:] != self.image_shape:
            raise ml.errors.ShapeError(f"built for images {self.image_shape}, got {images.type}")
        x = self.embedding(images)
        x = ml.reshape(x, (x.shape[0], -1, x.shape[-1]))
        cls = ml.broadcast_to(self.cls, (x.shape[0], *self.cls.shape[1:]))
        x = self.Transformer(ml.concat([cls, x], axis=1))[:, 0]
        if self.pre_logits is not None:
            x = ml.tanh(self.pre_logits(x))
        return self.head(x)


def parser() -> CommandParser:
    """Return the parser of the command."""
    return CommandParser(_print_variants, prog="python -m models.vit")


def _print_variants(_: object) -> None:
    """Print the published variants of the model with the number of parameters.

    Example:
        python -m models.vit
    """
    print(HEADER)
    with ml.Arena(ml.DryVM(), "weights").allocating():  # types without values
        for name, variant in VARIANTS.items():
            count = VisionTransformer((224, 224, 3), 1000, *variant).num_parameters()
            print("{:7}{:11}{:12}{:11}{:8}{:10}{:15,}".format(name, *variant, count))


if __name__ == "__main__":
    sys.exit(parser().run())
