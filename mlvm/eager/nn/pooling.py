"""Layers that reduce windows, or all positions, to one value per channel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlvm.core.errors import ShapeError
from mlvm.eager.functions import pooling
from mlvm.eager.functions.arguments import Ints
from mlvm.eager.functions.sliding import Sides
from mlvm.eager.nn.module import Module
from mlvm.eager.nn.parameters import checked_padding, window_of
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.tensor import Tensor


class _Pool(Module):
    """Base class of pooling layers: `_function` pools windows over `_axes` axes."""

    _axes: int
    _function: Callable[..., Tensor]

    def __init__(
        self,
        window: Ints,
        *,
        stride: Ints | None = None,
        padding: Sides | tuple[int, int] = "VALID",
        dilation: Ints = 1,
        ceil_mode: bool = False,
    ) -> None:
        name, axes = type(self).__name__, self._axes
        self.window = window_of(name, "window", window, axes)
        self.stride = self.window if stride is None else window_of(name, "stride", stride, axes)
        self.padding = checked_padding(name, padding, axes)
        self.dilation = window_of(name, "dilation", dilation, axes)
        self.ceil_mode = bool(ceil_mode)

    def __call__(self, x: Tensor) -> Tensor:
        pooled: Tensor = self._pooled(x)
        return pooled

    def _pooled(self, x: Tensor, **options: Any) -> Any:
        function = type(self)._function
        places = {"stride": self.stride, "padding": self.padding, "dilation": self.dilation}
        return function(x, self.window, **places, ceil_mode=self.ceil_mode, **options)


class _AvgPool(_Pool):
    """Base class of mean pooling; `count_include_pad` determines whether padding is included."""

    def __init__(
        self,
        window: Ints,
        *,
        stride: Ints | None = None,
        padding: Sides | tuple[int, int] = "VALID",
        dilation: Ints = 1,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
    ) -> None:
        super().__init__(
            window, stride=stride, padding=padding, dilation=dilation, ceil_mode=ceil_mode
        )
        self.count_include_pad = bool(count_include_pad)

    def __call__(self, x: Tensor) -> Tensor:
        pooled: Tensor = self._pooled(x, count_include_pad=self.count_include_pad)
        return pooled


class MaxPool1d(_Pool):
    """Max pooling of sequences f[N, L, C]; see `max_pool1d`.

    f[N, L, C] -> f[N, OL, C]. Raises `ShapeError` if x does not have 3 axes, or the window is
    larger than the padded sequence; `DTypeError` if x is not of floats; `ArgumentError` if the
    window, stride, padding or dilation is invalid.

        >>> ml.nn.MaxPool1d(2)(ml.ones((1, 4, 3))).type
        f32[1,2,3]

    Invalid calls:
        ml.nn.MaxPool1d(0)  # ArgumentError
    """

    _axes = 1
    _function = staticmethod(pooling.max_pool1d)


class MaxPool2d(_Pool):
    """Max pooling of images f[N, H, W, C]; see `max_pool2d`.

    f[N, H, W, C] -> f[N, OH, OW, C]. Raises `ShapeError` if x does not have 4 axes, or the window
    is larger than the padded image; `DTypeError` if x is not of floats; `ArgumentError` if the
    window, stride, padding or dilation is invalid.

        >>> ml.nn.MaxPool2d(2)(ml.ones((1, 4, 4, 3))).type
        f32[1,2,2,3]

    Invalid calls:
        ml.nn.MaxPool2d(0)  # ArgumentError
    """

    _axes = 2
    _function = staticmethod(pooling.max_pool2d)


class MaxPool3d(_Pool):
    """Max pooling of volumes f[N, D, H, W, C]; see `max_pool3d`.

    f[N, D, H, W, C] -> f[N, OD, OH, OW, C]. Raises `ShapeError` if x does not have 5 axes, or the
    window is larger than the padded volume; `DTypeError` if x is not of floats; `ArgumentError` if
    the window, stride, padding or dilation is invalid.

        >>> ml.nn.MaxPool3d(2)(ml.ones((1, 4, 4, 4, 3))).type
        f32[1,2,2,2,3]

    Invalid calls:
        ml.nn.MaxPool3d(0)  # ArgumentError
    """

    _axes = 3
    _function = staticmethod(pooling.max_pool3d)


class AvgPool1d(_AvgPool):
    """Mean pooling of sequences f[N, L, C]; padding is zeros; see `avg_pool1d`.

    f[N, L, C] -> f[N, OL, C]. Raises `ShapeError` if x does not have 3 axes, or the window is
    larger than the padded sequence; `DTypeError` if x is not of floats; `ArgumentError` if the
    window, stride, padding or dilation is invalid.

        >>> ml.nn.AvgPool1d(2)(ml.ones((1, 4, 3))).type
        f32[1,2,3]

    Invalid calls:
        ml.nn.AvgPool1d(0)  # ArgumentError
    """

    _axes = 1
    _function = staticmethod(pooling.avg_pool1d)


class AvgPool2d(_AvgPool):
    """Mean pooling of images f[N, H, W, C]; padding is zeros; see `avg_pool2d`.

    f[N, H, W, C] -> f[N, OH, OW, C]. Raises `ShapeError` if x does not have 4 axes, or the window
    is larger than the padded image; `DTypeError` if x is not of floats; `ArgumentError` if the
    window, stride, padding or dilation is invalid.

        >>> ml.nn.AvgPool2d(2)(ml.ones((1, 4, 4, 3))).type
        f32[1,2,2,3]

    Invalid calls:
        ml.nn.AvgPool2d(0)  # ArgumentError
    """

    _axes = 2
    _function = staticmethod(pooling.avg_pool2d)


class AvgPool3d(_AvgPool):
    """Mean pooling of volumes f[N, D, H, W, C]; padding is zeros; see `avg_pool3d`.

    f[N, D, H, W, C] -> f[N, OD, OH, OW, C]. Raises `ShapeError` if x does not have 5 axes, or the
    window is larger than the padded volume; `DTypeError` if x is not of floats; `ArgumentError` if
    the window, stride, padding or dilation is invalid.

        >>> ml.nn.AvgPool3d(2)(ml.ones((1, 4, 4, 4, 3))).type
        f32[1,2,2,2,3]

    Invalid calls:
        ml.nn.AvgPool3d(0)  # ArgumentError
    """

    _axes = 3
    _function = staticmethod(pooling.avg_pool3d)


class _AdaptivePool(Module):
    _function: Callable[..., Tensor]

    def __init__(self, size: Ints) -> None:
        name, axes = type(self).__name__, 1 if isinstance(size, int) else len(size)
        window_of(name, "size", size, axes)
        self.size = size

    def __call__(self, x: Tensor) -> Tensor:
        return type(self)._function(x, self.size)


class AdaptiveAvgPool(_AdaptivePool):
    """Mean pooling to a given size: the means of `size` windows that together cover x.

    `size` is one number or (vertical, horizontal, ...); see `adaptive_avg_pool`. It corresponds to
    PyTorch's AdaptiveAvgPool1d, 2d and 3d.

    f[N, ..., C] -> f[N, *size, C]. Raises `ShapeError` if x has fewer than three axes or an axis of
    length 0; `ArgumentError` if a size is below 1 or the numbers of sizes and axes differ;
    `DTypeError` if x is not of floats.

        >>> ml.nn.AdaptiveAvgPool(2)(ml.ones((1, 5, 7, 3))).type
        f32[1,2,2,3]

    Invalid calls:
        ml.nn.AdaptiveAvgPool(0)  # ArgumentError
    """

    _function = staticmethod(pooling.adaptive_avg_pool)


class AdaptiveMaxPool(_AdaptivePool):
    """Max pooling to a given size: the largest elements of `size` windows that together cover x.

    `size` is one number or (vertical, horizontal, ...); see `adaptive_max_pool`. It corresponds to
    PyTorch's AdaptiveMaxPool1d, 2d and 3d.

    f[N, ..., C] -> f[N, *size, C]. Raises `ShapeError` if x has fewer than three axes or an axis of
    length 0; `ArgumentError` if a size is below 1 or the numbers of sizes and axes differ;
    `DTypeError` if x is not of floats.

        >>> ml.nn.AdaptiveMaxPool(2)(ml.ones((1, 5, 7, 3))).type
        f32[1,2,2,3]

    Invalid calls:
        ml.nn.AdaptiveMaxPool(0)  # ArgumentError
    """

    _function = staticmethod(pooling.adaptive_max_pool)


class GlobalAvgPool(Module):
    """Mean of each channel over all positions: f[N, ..., C] -> f[N, C].

    It corresponds to PyTorch's AdaptiveAvgPool2d(1) (Lin et al., arXiv 1312.4400).

    Raises `ShapeError` if there are fewer than two axes.

        >>> ml.nn.GlobalAvgPool()(ml.ones((1, 4, 4, 3))).type
        f32[1,3]
    """

    def __call__(self, x: Tensor) -> Tensor:
        return op.mean(x, axis=_places("GlobalAvgPool", x))


class GlobalMaxPool(Module):
    """Largest element of each channel over all positions: f[N, ..., C] -> f[N, C].

    It corresponds to PyTorch's AdaptiveMaxPool2d(1).

    Raises `ShapeError` if x has fewer than two axes or an axis of length 0; `DTypeError` if an
    operand is complex.

        >>> ml.nn.GlobalMaxPool()(ml.ones((1, 4, 4, 3))).type
        f32[1,3]
    """

    def __call__(self, x: Tensor) -> Tensor:
        return op.max(x, axis=_places("GlobalMaxPool", x))


def _places(layer: str, x: Tensor) -> tuple[int, ...]:
    """Return the spatial axes.

    Raises `ShapeError` if x has fewer than two axes."""
    if x.ndim < 2:
        raise ShapeError(f"{layer}: expected x as [N, ..., C], got {x.type}")
    return tuple(range(1, x.ndim - 1))
