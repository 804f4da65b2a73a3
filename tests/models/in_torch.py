"""The Mixer and the Vision Transformer as timm has them, in plain PyTorch, on tensors by timm's
names (github.com/huggingface/pytorch-image-models, timm/models), and mlvm's beside them.

`python -m tests.models.in_torch` compares S/16 of both at their full size, with timm itself where
it is installed.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import mlvm.eager as ml
from mlvm.eager.tree import named_tensors
from models import weights

Array = NDArray[Any]
Shapes = dict[str, tuple[int, ...]]

ZERO = ("token_mixing/Dense_1/bias", "key/bias")
"""The gradients that are zero: a norm, or a softmax, takes what these add away again."""


class Size(NamedTuple):
    """Of a model: the paper's numbers, and those of the images and classes."""

    image: int
    channels: int
    classes: int
    patch: int
    width: int
    blocks: int
    mlp_dims: tuple[int, ...]  # of tokens and channels; of a ViT one
    heads: int = 0

    @property
    def tokens(self) -> int:
        return (self.image // self.patch) ** 2


SMALL = {"mlp_mixer": Size(12, 3, 5, 4, 16, 2, (6, 20)), "vit": Size(12, 3, 5, 4, 16, 2, (24,), 2)}
FULL = {
    "mlp_mixer": Size(224, 3, 1000, 16, 512, 8, (256, 2048)),
    "vit": Size(224, 3, 1000, 16, 384, 12, (1536,), 6),
}
TIMM = {"mlp_mixer": "mixer_s16_224", "vit": "vit_small_patch16_224"}


def shapes(model: str, size: Size) -> Shapes:
    """timm's names and shapes."""
    width = size.width
    stem = "stem" if model == "mlp_mixer" else "patch_embed"
    by_name: Shapes = {
        f"{stem}.proj.weight": (width, size.channels, size.patch, size.patch),
        f"{stem}.proj.bias": (width,),
    }
    if model == "vit":
        by_name["cls_token"] = 1, 1, width
        by_name["pos_embed"] = 1, 1 + size.tokens, width
    for i in range(size.blocks):
        block = f"blocks.{i}"
        for norm in ("norm1", "norm2"):
            by_name |= {f"{block}.{norm}.weight": (width,), f"{block}.{norm}.bias": (width,)}
        if model == "mlp_mixer":
            mlps = {"mlp_tokens": (size.tokens, size.mlp_dims[0])}
            mlps["mlp_channels"] = width, size.mlp_dims[1]
        else:
            mlps = {"mlp": (width, size.mlp_dims[0])}
            by_name |= {f"{block}.attn.qkv.weight": (3 * width, width)}
            by_name |= {f"{block}.attn.qkv.bias": (3 * width,)}
            by_name |= {f"{block}.attn.proj.weight": (width, width)}
            by_name |= {f"{block}.attn.proj.bias": (width,)}
        for mlp, (features, hidden) in mlps.items():
            by_name |= {f"{block}.{mlp}.fc1.weight": (hidden, features)}
            by_name |= {f"{block}.{mlp}.fc1.bias": (hidden,)}
            by_name |= {f"{block}.{mlp}.fc2.weight": (features, hidden)}
            by_name |= {f"{block}.{mlp}.fc2.bias": (features,)}
    by_name |= {"norm.weight": (width,), "norm.bias": (width,)}
    return by_name | {"head.weight": (size.classes, width), "head.bias": (size.classes,)}


def drawn(model: str, size: Size, seed: int = 0) -> dict[str, Array]:
    """Weights by timm's names, of the sizes that trained ones have."""
    random = np.random.default_rng(seed)
    arrays = {}
    for name, shape in shapes(model, size).items():
        fan_in = int(np.prod(shape[1:])) if len(shape) in (2, 4) else 400
        values = random.standard_normal(shape) / np.sqrt(fan_in)
        if "norm" in name and name.endswith("weight"):
            values += 1
        arrays[name] = values.astype(np.float32)
    return arrays


def logits(p: Mapping[str, Any], images: Any, size: Size, *, approximate: bool) -> Any:
    """Compute the logits of timm's MlpMixer or VisionTransformer for images [N, C, H, W]."""
    import torch

    F = torch.nn.functional

    def linear(path: str, x: Any) -> Any:
        return F.linear(x, p[f"{path}.weight"], p[f"{path}.bias"])

    def norm(path: str, x: Any) -> Any:
        return F.layer_norm(x, x.shape[-1:], p[f"{path}.weight"], p[f"{path}.bias"], 1e-6)

    def mlp(path: str, x: Any) -> Any:
        hidden = F.gelu(linear(f"{path}.fc1", x), approximate="tanh" if approximate else "none")
        return linear(f"{path}.fc2", hidden)

    def attention(path: str, x: Any) -> Any:
        n, tokens, width = x.shape
        qkv = linear(f"{path}.qkv", x).reshape(n, tokens, 3, size.heads, width // size.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value)
        return linear(f"{path}.proj", mixed.transpose(1, 2).reshape(n, tokens, width))

    is_vit = "pos_embed" in p
    stem = "patch_embed.proj" if is_vit else "stem.proj"
    x = F.conv2d(images, p[f"{stem}.weight"], p[f"{stem}.bias"], stride=size.patch)
    x = x.flatten(2).transpose(1, 2)
    if is_vit:
        x = torch.cat([p["cls_token"].expand(len(x), -1, -1), x], dim=1) + p["pos_embed"]
    for i in range(size.blocks):
        block = f"blocks.{i}"
        y = norm(f"{block}.norm1", x)
        if is_vit:
            x = x + attention(f"{block}.attn", y)
            x = x + mlp(f"{block}.mlp", norm(f"{block}.norm2", x))
        else:
            x = x + mlp(f"{block}.mlp_tokens", y.transpose(1, 2)).transpose(1, 2)
            x = x + mlp(f"{block}.mlp_channels", norm(f"{block}.norm2", x))
    x = norm("norm", x)
    return linear("head", x[:, 0] if is_vit else x.mean(1))


class Outcome(NamedTuple):
    """Logits, and gradients of the mean cross-entropy by official names and layouts."""

    logits: Array
    gradients: dict[str, Array]


def theirs(
    model: str,
    size: Size,
    arrays: Mapping[str, Array],
    images: Array,
    labels: Array,
    folder: Path,
    *,
    approximate: bool,
    dtype: str = "float64",
    timm: Any = None,
) -> Outcome:
    """PyTorch's outcome, or that of timm's own model. The gradients come into the official layouts
    as the weights do: by a file."""
    import torch

    p = {
        name: torch.tensor(x, dtype=getattr(torch, dtype), requires_grad=True)
        for name, x in arrays.items()
    }
    pixels = torch.tensor(images, dtype=getattr(torch, dtype)).permute(0, 3, 1, 2)
    if timm is None:
        out = logits(p, pixels, size, approximate=approximate)
    else:
        gelu = torch.nn.GELU
        act = (lambda: gelu(approximate="tanh")) if approximate else gelu
        net = timm.create_model(TIMM[model], act_layer=act)
        net.load_state_dict({name: x.detach() for name, x in p.items()})
        out = net(pixels)
        p = dict(net.named_parameters())
    torch.nn.functional.cross_entropy(out, torch.tensor(labels)).backward()
    gradients = {name: x.grad.float().numpy() for name, x in p.items()}
    ml.save(folder / "gradients", gradients)
    read = weights.read(folder / "gradients", num_heads=size.heads or None)
    return Outcome(out.detach().numpy(), read.arrays)


def ours(model: Any, images: Array, labels: Array, *, captured: bool) -> Outcome:
    """mlvm's outcome, eagerly or by one program."""

    def loss(model: Any, images: ml.Tensor, labels: ml.Tensor) -> Any:
        out = model(images)
        return ml.softmax_cross_entropy(out, labels, reduction="mean"), out

    def run(images: ml.Tensor, labels: ml.Tensor) -> Any:
        (_, out), gradients = ml.value_and_grad(loss, has_aux=True)(model, images, labels)
        return out, gradients

    function = ml.capture(run) if captured else run
    out, gradients = function(ml.asarray(images), ml.asarray(labels))
    return Outcome(out.numpy(), {name: x.numpy() for name, x in named_tensors(gradients).items()})


def largest_errors(ours: Outcome, theirs: Outcome) -> tuple[float, float]:
    """Of the logits, and of a gradient relative to its largest element; of one that is zero but for
    rounding, to that of the kernel beside it."""
    assert ours.gradients.keys() == theirs.gradients.keys()
    worst = 0.0
    for name, expected in theirs.gradients.items():
        sibling = name.removesuffix("bias") + "kernel"
        scale = theirs.gradients[sibling] if name.endswith(ZERO) else expected
        error = np.abs(ours.gradients[name] - expected).max() / np.abs(scale).max()
        worst = max(worst, float(error))
    return float(np.abs(ours.logits - theirs.logits).max()), worst


def data(size: Size, batch: int, seed: int = 1) -> tuple[Array, Array]:
    """Images [N, H, W, C] and labels."""
    random = np.random.default_rng(seed)
    images = random.standard_normal((batch, size.image, size.image, size.channels))
    return images.astype(np.float32), random.integers(0, size.classes, batch)


def main() -> int:
    """Print the errors at full size; 1 if one is too large."""
    try:
        import timm  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        timm = None
    worst = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model, size in FULL.items():
            arrays, (images, labels) = drawn(model, size), data(size, 2)
            ml.save(folder / "weights", arrays)
            for approximate in (True, False):
                net = weights.read(folder / "weights", approximate=approximate).build()
                options: dict[str, Any] = {"approximate": approximate, "dtype": "float32"}
                expected = theirs(model, size, arrays, images, labels, folder, **options, timm=timm)
                for captured in (False, True):
                    outcome = ours(net, images, labels, captured=captured)
                    at, gradient = largest_errors(outcome, expected)
                    print(
                        f"{model} S/16, {'tanh' if approximate else 'exact'} GELU, "
                        f"{'captured' if captured else 'eager'}, beside "
                        f"{'timm ' + timm.__version__ if timm else 'PyTorch'}: logits within "
                        f"{at:.1e}, each gradient within {gradient:.1e} of its largest",
                        flush=True,
                    )
                    worst |= at > 2e-5 or gradient > 3e-5
    return worst


if __name__ == "__main__":
    sys.exit(main())
