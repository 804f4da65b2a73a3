"""Layers without parameters that change the shape, and the identity."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mlvm.core.errors import ArgumentError, ShapeError
from mlvm.eager.functions import images
from mlvm.eager.functions.arguments import Ints, integer
from mlvm.eager.functions.images import Mode
from mlvm.eager.functions.shapes import reshape
from mlvm.eager.nn.module import Module
from mlvm.eager.nn.parameters import sizes
from mlvm.eager.tensor.tensor import Tensor


class Upsample(Module):
    """Resizing of x to a `size`, or by `scale`: f[N, ..., C] -> f[N, *size, C].

    See `interpolate`, also for the modes.

    Raises `ShapeError` if x has fewer than three axes or an axis of length 0; `ArgumentError`
    unless exactly one of `size` and `scale` is given, if it is invalid, or if the mode is unknown;
    `DTypeError` if x is not of floats.

        >>> ml.nn.Upsample(scale=2, mode="bilinear")(ml.ones((1, 4, 4, 3))).type
        f32[1,8,8,3]

    Invalid calls:
        ml.nn.Upsample()  # ArgumentError
    """

    def __init__(
        self,
        size: Ints | None = None,
        *,
        scale: float | Sequence[float] | None = None,
        mode: Mode = "nearest",
        align_corners: bool = False,
    ) -> None:
        if (size is None) == (scale is None):
            actual = "neither" if size is None else "both"
            raise ArgumentError(f"Upsample: expected either size or scale, got {actual}")
        self.size, self.scale = size, scale
        self.mode, self.align_corners = mode, align_corners

    def __call__(self, x: Tensor) -> Tensor:
        return images.interpolate(
            x, self.size, scale=self.scale, mode=self.mode, align_corners=self.align_corners
        )


class PixelShuffle(Module):
    """Rearrangement of channels to pixels: [N, H, W, C r^2] -> [N, H r, W r, C] for a factor r.

    See `pixel_shuffle`.

    Raises `ShapeError` if x does not have 4 axes or the number of channels is not a multiple of
    r^2; `ArgumentError` if the factor is below 1.

        >>> ml.nn.PixelShuffle(2)(ml.ones((1, 4, 4, 12))).type
        f32[1,8,8,3]

    Invalid calls:
        ml.nn.PixelShuffle(0)  # ArgumentError
        ml.nn.PixelShuffle(2)(images)  # ShapeError
    """

    def __init__(self, factor: int) -> None:
        [self.factor] = sizes(type(self).__name__, factor=factor)

    def __call__(self, x: Tensor) -> Tensor:
        return images.pixel_shuffle(x, self.factor)


class PixelUnshuffle(PixelShuffle):
    """Rearrangement of pixels to channels: [N, H r, W r, C] -> [N, H, W, C r^2] for a factor r.

    See `pixel_unshuffle`.

    Raises `ShapeError` if x does not have 4 axes, or the height or width is not a multiple of r;
    `ArgumentError` if the factor is below 1.

        >>> ml.nn.PixelUnshuffle(2)(ml.ones((1, 8, 8, 3))).type
        f32[1,4,4,12]

    Invalid calls:
        ml.nn.PixelUnshuffle(0)  # ArgumentError
    """

    def __call__(self, x: Tensor) -> Tensor:
        return images.pixel_unshuffle(x, self.factor)


class Flatten(Module):
    """Merging of the axes from `start` on, in row-major order: [N, ...] -> [N, n].

    Channels vary fastest in the result; in PyTorch, spatial positions do.

    Raises `ShapeError` if x has fewer than `start` axes; `ArgumentError` if `start` is below 0.

        >>> ml.nn.Flatten()(ml.ones((2, 4, 4, 3))).type
        f32[2,48]

    Invalid calls:
        ml.nn.Flatten(-1)  # ArgumentError
    """

    def __init__(self, start: int = 1) -> None:
        self.start = integer(start, "Flatten: start")
        if self.start < 0:
            raise ArgumentError(f"Flatten: expected start as an int >= 0, got {self.start}")

    def __call__(self, x: Tensor) -> Tensor:
        if x.ndim < self.start:
            raise ShapeError(f"Flatten: expected x of {self.start} axes or more, got {x.type}")
        return reshape(x, (*x.shape[: self.start], math.prod(x.shape[self.start :])))


class Identity(Module):
    """Identity function, as a placeholder for a layer.

    x: [...], any dtype -> the same.

        >>> ml.nn.Identity()(ml.ones(2))
        Tensor([1., 1.], f32[2])
    """

    def __call__(self, x: Tensor) -> Tensor:
        return x
