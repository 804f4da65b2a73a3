"""MLP-Mixer with the parameter names and layouts of the official checkpoints.

See Tolstikhin et al., arXiv 2105.01601. `python -m models.mlp_mixer` prints the paper's variants.
"""

from __future__ import annotations

import sys

import mlvm.eager as ml
from mlvm.eager import Tensor, nn
from mlvm.machines.terminal import CommandParser

HEADER = "variant patch_size hidden_dim num_blocks tokens_mlp_dim channels_mlp_dim  parameters"
VARIANTS = {
    "S/32": (32, 512, 8, 256, 2048),
    "S/16": (16, 512, 8, 256, 2048),
    "B/32": (32, 768, 12, 384, 3072),
    "B/16": (16, 768, 12, 384, 3072),
    "L/32": (32, 1024, 24, 512, 4096),
    "L/16": (16, 1024, 24, 512, 4096),
    "H/14": (14, 1280, 32, 640, 5120),
}


class MlpBlock(nn.Module):
    """Dense_1(gelu(Dense_0(x))) along the axis, which has the size `features`."""

    def __init__(
        self, features: int, mlp_dim: int, key: Tensor, *, axis: int = -1, approximate: bool = True
    ) -> None:
        keys = ml.random.split(key)
        self.approximate = approximate
        self.Dense = [
            nn.Linear(features, mlp_dim, axis=axis, key=keys[0]),
            nn.Linear(mlp_dim, features, axis=axis, key=keys[1]),
        ]

    def __call__(self, x: Tensor) -> Tensor:
        return self.Dense[1](ml.gelu(self.Dense[0](x), approximate=self.approximate))


class MixerBlock(nn.Module):
    """Token mixing, then channel mixing: [N, tokens, hidden_dim] -> [N, tokens, hidden_dim]."""

    def __init__(
        self,
        tokens: int,
        hidden_dim: int,
        tokens_mlp_dim: int,
        channels_mlp_dim: int,
        key: Tensor,
        *,
        approximate: bool = True,
    ) -> None:
        keys = ml.random.split(key)
        self.LayerNorm = [nn.LayerNorm(hidden_dim, eps=1e-6) for _ in range(2)]
        self.token_mixing = MlpBlock(
            tokens, tokens_mlp_dim, keys[0], axis=-2, approximate=approximate
        )
        self.channel_mixing = MlpBlock(
            hidden_dim, channels_mlp_dim, keys[1], approximate=approximate
        )

    def __call__(self, x: Tensor) -> Tensor:
        x = x + self.token_mixing(self.LayerNorm[0](x))
        return x + self.channel_mixing(self.LayerNorm[1](x))


class MlpMixer(nn.Module):
    """Images [N, *image_shape] -> logits [N, num_classes]; image_shape is (H, W, channels).

    The paper's code uses the GELU with tanh (`approximate`); timm uses the exact GELU.

    Raises `ShapeError` if patches do not tile the image, and for images of a different shape.
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        num_classes: int,
        patch_size: int = 4,
        hidden_dim: int = 96,
        num_blocks: int = 4,
        tokens_mlp_dim: int = 32,
        channels_mlp_dim: int = 192,
        *,
        approximate: bool = True,
        key: Tensor | None = None,
    ) -> None:
        (height, width, channels), patch = image_shape, patch_size
        if patch < 1 or height % patch or width % patch:
            raise ml.errors.ShapeError(f"patch size {patch} must divide {height} x {width}")
        keys = ml.random.split(ml.random.next_key() if key is None else key, num_blocks + 1)
        dims = height * width // patch**2, hidden_dim, tokens_mlp_dim, channels_mlp_dim
        self.image_shape = image_shape
        self.stem = nn.Conv2d(
            channels, hidden_dim, patch, stride=patch, padding="VALID", key=keys[0]
        )
        self.MixerBlock = [
            MixerBlock(*dims, keys[1 + i], approximate=approximate) for i in range(num_blocks)
        ]
        self.pre_head_layer_norm = nn.LayerNorm(hidden_dim, eps=1e-6)
        # initial values of the paper's code
        self.head = nn.Linear(hidden_dim, num_classes, kernel_init=nn.init.zeros)

    def __call__(self, images: Tensor) -> Tensor:
        if images.shape[1:] != self.image_shape:
            raise ml.errors.ShapeError(f"built for images {self.image_shape}, got {images.type}")
        x = self.stem(images)
        x = ml.reshape(x, (x.shape[0], -1, x.shape[-1]))
        for block in self.MixerBlock:
            x = block(x)
        return self.head(ml.mean(self.pre_head_layer_norm(x), axis=1))


def parser() -> CommandParser:
    """Return the parser of the command."""
    return CommandParser(_print_variants, prog="python -m models.mlp_mixer")


def _print_variants(_: object) -> None:
    """Print the published variants of the model with the number of parameters.

    Example:
        python -m models.mlp_mixer
    """
    print(HEADER)
    with ml.Arena(ml.DryVM(), "weights").allocating():  # types without values
        for name, variant in VARIANTS.items():
            count = MlpMixer((224, 224, 3), 1000, *variant).num_parameters()
            print("{:7}{:11}{:11}{:11}{:15}{:17}{:12,}".format(name, *variant, count))


if __name__ == "__main__":
    sys.exit(parser().run())
