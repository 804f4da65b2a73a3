"""Convolutions, channels last."""

from __future__ import annotations

from typing import Any

from mlvm.core.errors import AttributeRefused
from mlvm.core.types import f32
from mlvm.eager.functions import creation, neural
from mlvm.eager.functions.neural import Sides, Window
from mlvm.eager.nn.module import Module
from mlvm.eager.nn.parameters import checked_padding, lecun_normal, matched, sizes, window_of
from mlvm.eager.tensor.tensor import Tensor


class _Convolution(Module):
    """What convolutions have in common: kernel, bias, stride and padding."""

    kernel: Tensor
    bias: Tensor | None  # [out_channels]
    stride: Any
    padding: Any

    def _begin(
        self, shape: Any, fan_in: int, outputs: int, bias: bool, key: Tensor | None, dtype: object
    ) -> None:
        """Draw the kernel, LeCun normal; the bias is zero."""
        self.kernel = lecun_normal(type(self).__name__, shape, fan_in, key, dtype)
        self.bias = creation.zeros(outputs, dtype=dtype) if bias else None

    def _convolved(self, function: Any, x: Tensor, **options: Any) -> Tensor:
        x, bias = matched(type(self).__name__, x, self.kernel), self.bias
        y: Tensor = function(x, self.kernel, stride=self.stride, padding=self.padding, **options)
        return y if bias is None else y + bias


class Conv2d(_Convolution):
    """y = x * kernel + bias, cross-correlated: [N, H, W, in_channels] -> [N, OH, OW, out_channels].

    `window` and `stride` are numbers, or (vertical, horizontal). `padding` is "SAME", "VALID" or
    ((top, bottom), (left, right)) zeros. Each of the `groups` of results sees only its group of the
    channels of x; as many groups as channels make the convolution depthwise. The kernel is LeCun
    normal, the bias zero.

    Raises `ShapeError` for other channels, and for a window larger than the padded image,
    `DTypeError` for other than floats of its own dtype, `AttributeRefused` for a number of channels
    below 1, and a window, stride, groups or padding that makes no sense.

        >>> ml.nn.Conv2d(3, 8, 3)(ml.ones((2, 6, 6, 3))).type
        f32[2,6,6,8]
    """

    kernel: Tensor  # [window height, window width, in_channels / groups, out_channels]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        window: Window,
        *,
        stride: Window = 1,
        padding: Sides = "SAME",
        groups: int = 1,
        bias: bool = True,
        key: Tensor | None = None,
        dtype: object = f32,
    ) -> None:
        inputs, outputs = _channels("Conv2d", in_channels, out_channels, groups)
        height, width = window_of("Conv2d", "window", window)
        self.stride = window_of("Conv2d", "stride", stride)
        self.padding = checked_padding("Conv2d", padding)
        self.groups = groups
        shape = (height, width, inputs, outputs)
        self._begin(shape, height * width * inputs, outputs, bias, key, dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return self._convolved(neural.conv2d, x, groups=self.groups)


class Conv1d(_Convolution):
    """y = x * kernel + bias, cross-correlated: [N, L, in_channels] -> [N, OL, out_channels].

    `padding` is "SAME", "VALID" or (before, after) zeros; otherwise as `Conv2d`.

    Raises `ShapeError` for other channels, and for a window larger than the padded sequence,
    `DTypeError` for other than floats of its own dtype, `AttributeRefused` for a number of channels
    below 1, and a window, stride, groups or padding that makes no sense.

        >>> ml.nn.Conv1d(3, 8, 3)(ml.ones((2, 6, 3))).type
        f32[2,6,8]
    """

    kernel: Tensor  # [window, in_channels / groups, out_channels]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        window: int,
        *,
        stride: int = 1,
        padding: str | tuple[int, int] = "SAME",
        groups: int = 1,
        bias: bool = True,
        key: Tensor | None = None,
        dtype: object = f32,
    ) -> None:
        inputs, outputs = _channels("Conv1d", in_channels, out_channels, groups)
        length, self.stride = sizes("Conv1d", window=window, stride=stride)
        self.padding = checked_padding("Conv1d", padding, "(before, after)")
        self.groups = groups
        self._begin((length, inputs, outputs), length * inputs, outputs, bias, key, dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return self._convolved(neural.conv1d, x, groups=self.groups)


class ConvTranspose2d(_Convolution):
    """The transpose of a convolution from out_channels to in_channels, plus a bias:
    [N, H, W, in_channels] -> [N, OH, OW, out_channels]; see `conv_transpose2d`.

    OH is H stride with the padding "SAME", and (H - 1) stride + window height with "VALID", less
    top + bottom with ((top, bottom), (left, right)). The kernel is LeCun normal, where as many
    elements of it as meet in one result, on average, count as its inputs; the bias is zero.

    Raises `ShapeError` for other channels, and where nothing is left, `DTypeError` for complex
    numbers, `AttributeRefused` for a number of channels below 1, and a window, stride or padding
    that makes no sense.

        >>> ml.nn.ConvTranspose2d(3, 8, 2, stride=2)(ml.ones((2, 6, 6, 3))).type
        f32[2,12,12,8]
    """

    kernel: Tensor  # [window height, window width, out_channels, in_channels]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        window: Window,
        *,
        stride: Window = 1,
        padding: Sides = "SAME",
        bias: bool = True,
        key: Tensor | None = None,
        dtype: object = f32,
    ) -> None:
        name = "ConvTranspose2d"
        inputs, outputs = _channels(name, in_channels, out_channels, 1)
        height, width = window_of(name, "window", window)
        self.stride = down, right = window_of(name, "stride", stride)
        self.padding = checked_padding(name, padding)
        fan_in = max(height * width * inputs // (down * right), 1)
        self._begin((height, width, outputs, inputs), fan_in, outputs, bias, key, dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return self._convolved(neural.conv_transpose2d, x)


def _channels(layer: str, in_channels: int, out_channels: int, groups: int) -> tuple[int, int]:
    """Channels that one result sees, and all results. Raises `AttributeRefused`."""
    inputs, outputs, parts = sizes(
        layer, in_channels=in_channels, out_channels=out_channels, groups=groups
    )
    if inputs % parts or outputs % parts:
        raise AttributeRefused(
            f"{layer}: groups must divide in_channels and out_channels, given {parts} groups of "
            f"{inputs} and {outputs}"
        )
    return inputs // parts, outputs
