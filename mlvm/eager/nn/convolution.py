"""Convolution layers (channels last)."""

from __future__ import annotations

import math
from collections.abc import Callable

from mlvm.core.errors import ArgumentError
from mlvm.eager.functions import convolution, shapes
from mlvm.eager.functions.arguments import Ints
from mlvm.eager.functions.sliding import Sides
from mlvm.eager.nn.module import Module
from mlvm.eager.nn.parameters import (
    Init,
    bias_of,
    biased,
    checked_padding,
    kernel_of,
    matched,
    sizes,
    window_of,
)
from mlvm.eager.tensor.tensor import Tensor


class _Convolution(Module):
    """Base class of convolutions: `_function` over `_axes` axes with a kernel and a bias."""

    _axes: int
    _function: Callable[..., Tensor]
    _transposed = False

    kernel: Tensor
    bias: Tensor | None  # [out_channels]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        window: Ints,
        *,
        stride: Ints = 1,
        padding: Sides | tuple[int, int] = "SAME",
        dilation: Ints = 1,
        groups: int = 1,
        bias: bool = True,
        kernel_init: Init | None = None,
        bias_init: Init | None = None,
        key: Tensor | None = None,
        dtype: object = None,
    ) -> None:
        name, axes = type(self).__name__, self._axes
        inputs, outputs, parts = sizes(
            name, in_channels=in_channels, out_channels=out_channels, groups=groups
        )
        if inputs % parts or outputs % parts:
            raise ArgumentError(
                f"{name}: expected groups that divide in_channels and out_channels, got {parts} "
                f"groups of {inputs} and {outputs}"
            )
        shape = window_of(name, "window", window, axes)
        self.stride = window_of(name, "stride", stride, axes)
        self.padding = checked_padding(name, padding, axes)
        self.dilation = window_of(name, "dilation", dilation, axes)
        self.groups = parts
        fan_in = math.prod(shape) * inputs // parts
        channels = (inputs // parts, outputs)
        if self._transposed:
            fan_in = max(fan_in // math.prod(self.stride), 1)
            channels = (outputs // parts, inputs)
            if kernel_init is not None:
                kernel_init = _transpose_of(kernel_init)
        self.kernel = kernel_of(name, kernel_init, (*shape, *channels), fan_in, key, dtype)
        self.bias = bias_of(name, bias_init, outputs, key, dtype) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        x = matched(type(self).__name__, x, self.kernel)
        y = type(self)._function(
            x,
            self.kernel,
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            groups=self.groups,
        )
        return biased(y, self.bias)


def _transpose_of(init: Init) -> Init:
    """Return an initialiser for transposed kernels from an initialiser for ordinary kernels.

    A transposed kernel is [*window, channels out, channels in]."""

    def transposed(shape: tuple[int, ...], *, key: Tensor | None, dtype: object) -> Tensor:
        *window, outputs, inputs = shape
        kernel = init((*window, inputs, outputs), key=key, dtype=dtype)
        return shapes.moveaxis(kernel, -1, -2)

    return transposed


class Conv2d(_Convolution):
    """2D convolution with a bias: [N, H, W, in_channels] -> [N, OH, OW, out_channels].

    The operation is a cross-correlation.

    Arguments:

    - `window`, `stride`, `dilation`: numbers, or (vertical, horizontal). Adjacent elements of the
      window are `dilation` positions apart in x.

    - `padding`: "SAME", "VALID" or ((top, bottom), (left, right)) zeros.

    - `groups`: each group of output channels depends only on the corresponding group of channels of
      x. If `groups` equals the number of channels, the convolution is depthwise.

    - `kernel_init`, `bias_init`: initialisers, see `ml.nn.init`. Default: LeCun normal for the
      kernel, zeros for the bias.

    Raises `ShapeError` if x has a different number of channels, or the window is larger than the
    padded image; `DTypeError` if x is not of floats, or is wider than half-precision weights;
    `ArgumentError` if a number of channels is below 1, or the window, stride, dilation, groups or
    padding is invalid.

        >>> ml.nn.Conv2d(3, 8, 3)(ml.ones((2, 6, 6, 3))).type
        f32[2,6,6,8]

    Invalid calls:
        ml.nn.Conv2d(2, 3, 2, groups=5)  # ArgumentError
    """

    _axes = 2
    _function = staticmethod(convolution.conv2d)

    kernel: Tensor  # [window height, window width, in_channels / groups, out_channels]


class Conv1d(_Convolution):
    """1D convolution with a bias: [N, L, in_channels] -> [N, OL, out_channels].

    `padding` is "SAME", "VALID" or (before, after) zeros. The other options are the same as for
    `Conv2d`.

    Raises `ShapeError` if x has a different number of channels, or the window is larger than the
    padded sequence; `DTypeError` if x is not of floats, or is wider than half-precision weights;
    `ArgumentError` if a number of channels is below 1, or the window, stride, dilation, groups or
    padding is invalid.

        >>> ml.nn.Conv1d(3, 8, 3)(ml.ones((2, 6, 3))).type
        f32[2,6,8]

    Invalid calls:
        ml.nn.Conv1d(2, 3, 2, groups=5)  # ArgumentError
    """

    _axes = 1
    _function = staticmethod(convolution.conv1d)

    kernel: Tensor  # [window, in_channels / groups, out_channels]


class Conv3d(_Convolution):
    """3D convolution with a bias: [N, D, H, W, in_channels] -> [N, OD, OH, OW, out_channels].

    `window`, `stride` and `dilation` are numbers, or (depth, vertical, horizontal). `padding` is
    "SAME", "VALID" or ((front, back), (top, bottom), (left, right)) zeros. The other options are
    the same as for `Conv2d`.

    Raises `ShapeError` if x has a different number of channels, or the window is larger than the
    padded volume; `DTypeError` if x is not of floats, or is wider than half-precision weights;
    `ArgumentError` if a number of channels is below 1, or the window, stride, dilation, groups or
    padding is invalid.

        >>> ml.nn.Conv3d(3, 8, 3)(ml.ones((2, 6, 6, 6, 3))).type
        f32[2,6,6,6,8]

    Invalid calls:
        ml.nn.Conv3d(2, 3, 0)  # ArgumentError
    """

    _axes = 3
    _function = staticmethod(convolution.conv3d)

    kernel: Tensor  # [depth, height, width, in_channels / groups, out_channels]


class ConvTranspose2d(_Convolution):
    """Transposed 2D convolution with a bias: [N, H, W, in_channels] -> [N, OH, OW, out_channels].

    It is the transpose of a convolution from out_channels to in_channels; see `conv_transpose2d`.
    OH is H stride with the padding "SAME", and (H - 1) stride + the span of the window with
    "VALID". With ((top, bottom), (left, right)) it is top + bottom less. By default the kernel is
    LeCun normal, where fan in is the average number of products per output element, and the bias is
    zero; `kernel_init` and `bias_init` replace them.

    Raises `ShapeError` if x has a different number of channels or the result would be empty;
    `DTypeError` if an operand is complex; `ArgumentError` if a number of channels is below 1, or
    the window, stride, dilation, groups or padding is invalid.

        >>> ml.nn.ConvTranspose2d(3, 8, 2, stride=2)(ml.ones((2, 6, 6, 3))).type
        f32[2,12,12,8]

    Invalid calls:
        ml.nn.ConvTranspose2d(2, 3, 0)  # ArgumentError
    """

    _axes = 2
    _function = staticmethod(convolution.conv_transpose2d)
    _transposed = True

    kernel: Tensor  # [window height, window width, out_channels / groups, in_channels]


class ConvTranspose1d(_Convolution):
    """Transposed 1D convolution with a bias: [N, L, in_channels] -> [N, OL, out_channels].

    `padding` is "SAME", "VALID" or (before, after). The other options are the same as for
    `ConvTranspose2d`.

    Raises `ShapeError` if x has a different number of channels or the result would be empty;
    `DTypeError` if an operand is complex; `ArgumentError` if a number of channels is below 1, or
    the window, stride, dilation, groups or padding is invalid.

        >>> ml.nn.ConvTranspose1d(3, 8, 2, stride=2)(ml.ones((2, 6, 3))).type
        f32[2,12,8]

    Invalid calls:
        ml.nn.ConvTranspose1d(2, 3, 0)  # ArgumentError
    """

    _axes = 1
    _function = staticmethod(convolution.conv_transpose1d)
    _transposed = True

    kernel: Tensor  # [window, out_channels / groups, in_channels]


class ConvTranspose3d(_Convolution):
    """Transposed 3D convolution with a bias, from in_channels to out_channels.

    [N, D, H, W, in_channels] -> [N, OD, OH, OW, out_channels]. `padding` is "SAME", "VALID" or
    ((front, back), (top, bottom), (left, right)). The other options are the same as for
    `ConvTranspose2d`.

    Raises `ShapeError` if x has a different number of channels or the result would be empty;
    `DTypeError` if an operand is complex; `ArgumentError` if a number of channels is below 1, or
    the window, stride, dilation, groups or padding is invalid.

        >>> ml.nn.ConvTranspose3d(3, 8, 2, stride=2)(ml.ones((2, 3, 3, 3, 3))).type
        f32[2,6,6,6,8]

    Invalid calls:
        ml.nn.ConvTranspose3d(2, 3, 0)  # ArgumentError
    """

    _axes = 3
    _function = staticmethod(convolution.conv_transpose3d)
    _transposed = True

    kernel: Tensor  # [depth, height, width, out_channels / groups, in_channels]
