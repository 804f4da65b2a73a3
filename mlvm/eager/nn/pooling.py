"""Layers that reduce windows of images, or whole images, to one value a channel."""

from __future__ import annotations

from mlvm.core.errors import ShapeError
from mlvm.eager.functions import neural
from mlvm.eager.functions.neural import Sides, Window
from mlvm.eager.nn.module import Module
from mlvm.eager.nn.parameters import checked_padding, window_of
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.tensor import Tensor


class _Pool(Module):
    """What pooling layers remember."""

    def __init__(
        self, window: Window, *, stride: Window | None = None, padding: Sides = "VALID"
    ) -> None:
        name = type(self).__name__
        self.window = window_of(name, "window", window)
        self.stride = self.window if stride is None else window_of(name, "stride", stride)
        self.padding = checked_padding(name, padding)


class MaxPool2d(_Pool):
    """The largest element of each window of f[N, H, W, C]; see `max_pool2d`.

    f[N, H, W, C] -> f[N, OH, OW, C]. Raises `ShapeError` for other axes, and for a window larger
    than the padded image, `DTypeError` for other than floats, `AttributeRefused` for a window,
    stride or padding that makes no sense.

        >>> ml.nn.MaxPool2d(2)(ml.ones((1, 4, 4, 3))).type
        f32[1,2,2,3]
    """

    def __call__(self, x: Tensor) -> Tensor:
        return neural.max_pool2d(x, self.window, stride=self.stride, padding=self.padding)


class AvgPool2d(_Pool):
    """The mean of each window of f[N, H, W, C]; padding counts as zeros; see `avg_pool2d`.

    f[N, H, W, C] -> f[N, OH, OW, C]. Raises `ShapeError` for other axes, and for a window larger
    than the padded image, `DTypeError` for other than floats, `AttributeRefused` for a window,
    stride or padding that makes no sense.

        >>> ml.nn.AvgPool2d(2)(ml.ones((1, 4, 4, 3))).type
        f32[1,2,2,3]
    """

    def __call__(self, x: Tensor) -> Tensor:
        return neural.avg_pool2d(x, self.window, stride=self.stride, padding=self.padding)


class GlobalAvgPool(Module):
    """The mean of each channel over all places: f[N, ..., C] -> f[N, C] (Lin et al., arXiv
    1312.4400); PyTorch's AdaptiveAvgPool2d(1).

    Raises `ShapeError` for fewer axes than two.

        >>> ml.nn.GlobalAvgPool()(ml.ones((1, 4, 4, 3))).type
        f32[1,3]
    """

    def __call__(self, x: Tensor) -> Tensor:
        if x.ndim < 2:
            raise ShapeError(f"GlobalAvgPool: x must be [N, ..., C], given {x.type}")
        return op.mean(x, axis=tuple(range(1, x.ndim - 1)))
