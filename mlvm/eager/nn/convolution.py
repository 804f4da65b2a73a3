"""Convolutions, channels last."""

from __future__ import annotations

import math

from mlvm.core.errors import AttributeRefused
from mlvm.core.types import f32
from mlvm.eager import creation
from mlvm.eager import functions as fn
from mlvm.eager.nn.module import Module
from mlvm.eager.nn.parameters import lecun_normal, sizes
from mlvm.eager.tensor import Tensor

Pair = int | tuple[int, int]


class Conv2d(Module):
    """y = x * kernel + bias, cross-correlated: [N, H, W, in_channels] -> [N, OH, OW, out_channels].

    `window` and `stride` are numbers, or (vertical, horizontal). `padding` is "SAME", "VALID" or
    ((top, bottom), (left, right)) zeros. The kernel is LeCun normal, the bias zero.
    """

    kernel: Tensor  # [window height, window width, in_channels, out_channels]
    bias: Tensor | None  # [out_channels]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        window: Pair,
        *,
        stride: Pair = 1,
        padding: str | tuple[tuple[int, int], tuple[int, int]] = "SAME",
        bias: bool = True,
        key: Tensor | None = None,
        dtype: object = f32,
    ) -> None:
        channels = sizes("Conv2d", in_channels=in_channels, out_channels=out_channels)
        height, width = fn.pair(window, "window", "Conv2d")
        self.stride = fn.pair(stride, "stride", "Conv2d")
        if isinstance(padding, str) and padding not in ("SAME", "VALID"):
            raise AttributeRefused(
                f'Conv2d: padding must be "SAME", "VALID" or ((top, bottom), (left, right)), '
                f"given {padding!r}"
            )
        self.padding = padding
        shape = (height, width, *channels)
        self.kernel = lecun_normal("Conv2d", shape, math.prod(shape[:3]), key, dtype)
        self.bias = creation.zeros(channels[1:], dtype=dtype) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        y = fn.conv2d(x, self.kernel, stride=self.stride, padding=self.padding)
        return y if self.bias is None else y + self.bias
