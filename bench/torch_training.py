"""PyTorch's side of the training benchmarks: the same networks, as its users write them.

Images are NCHW, as PyTorch's convolutions want them. Transformers have the weights of
`bench.dynamic_sizes`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from bench.dynamic_sizes import TransformerSize, Weights, weights_of
from bench.sizes import LEARNING_RATE, MOMENTUM, ConvNetSize, MixerSize, Size, TextSize, batch_of
from bench.torch_dynamic import Block, Transformer, dense_of, norm_of


class MlpBlock(nn.Module):
    def __init__(self, features: int, mlp_dim: int) -> None:
        super().__init__()
        self.Dense_0 = nn.Linear(features, mlp_dim)
        self.Dense_1 = nn.Linear(mlp_dim, features)

    def forward(self, x: Tensor) -> Tensor:
        return self.Dense_1(F.gelu(self.Dense_0(x), approximate="tanh"))


class MixerBlock(nn.Module):
    def __init__(self, size: MixerSize) -> None:
        super().__init__()
        self.LayerNorm_0 = nn.LayerNorm(size.hidden_dim, eps=1e-6)
        self.token_mixing = MlpBlock(size.patches, size.tokens_mlp_dim)
        self.LayerNorm_1 = nn.LayerNorm(size.hidden_dim, eps=1e-6)
        self.channel_mixing = MlpBlock(size.hidden_dim, size.channels_mlp_dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.token_mixing(self.LayerNorm_0(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channel_mixing(self.LayerNorm_1(x))


class MlpMixer(nn.Module):
    def __init__(self, size: MixerSize) -> None:
        super().__init__()
        channels, patch = size.image_shape[2], size.patch_size
        self.stem = nn.Conv2d(channels, size.hidden_dim, patch, stride=patch)
        self.MixerBlock = nn.Sequential(*(MixerBlock(size) for _ in range(size.num_blocks)))
        self.pre_head_layer_norm = nn.LayerNorm(size.hidden_dim, eps=1e-6)
        self.head = nn.Linear(size.hidden_dim, size.num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images).flatten(2).transpose(1, 2)
        return self.head(self.pre_head_layer_norm(self.MixerBlock(x)).mean(dim=1))


class ConvNet(nn.Module):
    def __init__(self, size: ConvNetSize) -> None:
        super().__init__()
        height, width, channels = size.image_shape
        first, second = size.features
        self.Conv_0 = nn.Conv2d(channels, first, 3, padding=1)
        self.Conv_1 = nn.Conv2d(first, second, 3, padding=1)
        self.head = nn.Linear((height // 4) * (width // 4) * second, size.num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.Conv_0(images)), 2)
        x = F.max_pool2d(F.relu(self.Conv_1(x)), 2)
        return self.head(x.flatten(1))


class RotaryBlock(Block):
    """A block of BERT that rotates queries and keys by position."""

    def __init__(self, weights: Weights, name: str, heads: int, length: int) -> None:
        super().__init__(weights, name, heads, before=False)
        half = self.out.in_features // heads // 2
        angles = torch.arange(length)[:, None] * 10_000.0 ** (-torch.arange(half) / half)
        self.register_buffer("cos", torch.cos(angles))
        self.register_buffer("sin", torch.sin(angles))

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = super().split(x)
        return self.rotated(query), self.rotated(key), value

    def rotated(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        turned = first * self.cos - second * self.sin, second * self.cos + first * self.sin
        return torch.cat(turned, dim=-1)


class Bert(nn.Module):
    """Symbols [N,T] -> logits [N,T,symbols]."""

    def __init__(self, size: TransformerSize) -> None:
        super().__init__()
        weights = weights_of(size)
        tokens = torch.from_numpy(weights["tokens"])
        self.embedding = nn.Embedding.from_pretrained(tokens, freeze=False)
        blocks = [
            RotaryBlock(weights, f"block_{i}", size.heads, size.length) for i in range(size.layers)
        ]
        self.blocks = nn.Sequential(*blocks)
        self.norm, self.head = norm_of(weights, "norm"), dense_of(weights, "head")

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.norm(self.embedding(tokens))))


def model_of(size: Size) -> nn.Module:
    torch.manual_seed(0)
    if isinstance(size, TextSize):
        kind = Bert if size.name == "Bert" else Transformer
        return kind(size.as_transformer)
    return MlpMixer(size) if isinstance(size, MixerSize) else ConvNet(size)


def load_mixer(model: nn.Module, parameters: Mapping[str, NDArray[Any]]) -> None:
    """Set the parameters of an MlpMixer to those of `models.mlp_mixer`, by name."""
    state = {}
    for name, values in parameters.items():
        *path, kind = re.sub(r"(MixerBlock)_", r"\1.", name).split("/")
        if kind == "kernel":  # HWIO -> OIHW, and in, out -> out, in
            values = values.transpose(3, 2, 0, 1) if values.ndim == 4 else values.T
        state[".".join([*path, "bias" if kind == "bias" else "weight"])] = torch.from_numpy(
            values.copy()
        )
    model.load_state_dict(state)


def training(
    size: Size,
    model: nn.Module,
    *,
    compiled: bool = False,
    device: str = "cpu",
    bf16: bool = False,
) -> Callable[[], float]:
    """Return a function that trains the model on the batch once and returns the loss before.
    `bf16`: under `torch.autocast`."""
    model = model.to(device)
    inputs, labels = (torch.from_numpy(x).to(device) for x in batch_of(size))
    if not isinstance(size, TextSize):
        inputs = inputs.permute(0, 3, 1, 2).contiguous()
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, momentum=MOMENTUM, foreach=True)
    forward = torch.compile(model) if compiled else model

    def step() -> float:
        with torch.autocast(device, torch.bfloat16, enabled=bf16):
            loss = F.cross_entropy(forward(inputs).flatten(0, -2), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()  # type: ignore[no-any-return]

    return step


def compiles() -> bool:
    """Return whether torch.compile finds a compiler that works."""
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(3))
    except Exception:  # PyTorch documents none of its many kinds
        return False
    return True
