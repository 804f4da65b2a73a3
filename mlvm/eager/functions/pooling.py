"""Pooling: the largest element or the mean of each window, channel by channel. Sequences are
[batch, length, channels], images NHWC, volumes [batch, depth, height, width, channels].
"""

from __future__ import annotations

from typing import Any

from mlvm.core.errors import ShapeError
from mlvm.core.ops.windows import Pair
from mlvm.core.rules import require
from mlvm.core.types import Shape
from mlvm.eager.functions.arguments import Ints, each_of, type_of
from mlvm.eager.functions.halves import through_f32
from mlvm.eager.functions.shapes import expand_dims, part, reshape, squeeze, stack
from mlvm.eager.functions.windows import Sides, Volume, Window, geometry_of, require_places
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.wrapper import public


@public
def max_pool2d(
    x: Tensor,
    window: Window,
    *,
    stride: Window | None = None,
    padding: Sides = "VALID",
    dilation: Window = 1,
) -> Tensor:
    """Take the largest element of each window of NHWC images. The stride is the window unless
    given; padding, as in `conv2d`, counts as -inf; `dilation` is that of `conv2d`, too.

    x: f[N, H, W, C] -> f[N, OH, OW, C]. Raises `DTypeError` if x is not of floats; `ShapeError` if
    x has another number of axes, or the window is larger than the padded image; `ArgumentError`
    if the window, stride, padding or dilation is invalid.

        >>> ml.max_pool2d(ml.reshape(ml.arange(4.0), (1, 2, 2, 1)), window=2).tolist()
        [[[[3.0]]]]

    Refuses:
        ml.max_pool2d(images, 0)  # ArgumentError
    """
    return _pooled(op.max_pool2d, x, 2, window, stride, padding, dilation)


@public
def avg_pool2d(
    x: Tensor,
    window: Window,
    *,
    stride: Window | None = None,
    padding: Sides = "VALID",
    dilation: Window = 1,
) -> Tensor:
    """Average each window of NHWC images. The stride is the window unless given; padding, as in
    `conv2d`, counts as zeros; `dilation` is that of `conv2d`, too.

    x: f[N, H, W, C] -> f[N, OH, OW, C]. Raises `DTypeError` if x is not of floats; `ShapeError` if
    x has another number of axes, or the window is larger than the padded image; `ArgumentError`
    if the window, stride, padding or dilation is invalid.

        >>> ml.avg_pool2d(ml.reshape(ml.arange(4.0), (1, 2, 2, 1)), window=2).tolist()
        [[[[1.5]]]]

    Refuses:
        ml.avg_pool2d(images, 0)  # ArgumentError
    """
    return _pooled(op.avg_pool2d, x, 2, window, stride, padding, dilation)


@public
def max_pool1d(
    x: Tensor,
    window: int,
    *,
    stride: int | None = None,
    padding: str | Pair = "VALID",
    dilation: int = 1,
) -> Tensor:
    """Take the largest element of each window of sequences; `padding` is "VALID", "SAME" or
    (before, after), otherwise as `max_pool2d`.

    x: f[N, L, C] -> f[N, OL, C]. Raises `DTypeError` if x is not of floats; `ShapeError` if x has
    another number of axes, or the window is larger than the padded sequence; `ArgumentError` if
    the window, stride, padding or dilation is invalid.

        >>> ml.max_pool1d(ml.reshape(ml.arange(4.0), (1, 4, 1)), window=2).tolist()
        [[[1.0], [3.0]]]

    Refuses:
        ml.max_pool1d(sequences, 0)  # ArgumentError
    """
    return _pooled(op.max_pool2d, x, 1, window, stride, padding, dilation)


@public
def avg_pool1d(
    x: Tensor,
    window: int,
    *,
    stride: int | None = None,
    padding: str | Pair = "VALID",
    dilation: int = 1,
) -> Tensor:
    """Average each window of sequences; `padding` is "VALID", "SAME" or (before, after), otherwise
    as `avg_pool2d`.

    x: f[N, L, C] -> f[N, OL, C]. Raises `DTypeError` if x is not of floats; `ShapeError` if x has
    another number of axes, or the window is larger than the padded sequence; `ArgumentError` if
    the window, stride, padding or dilation is invalid.

        >>> ml.avg_pool1d(ml.reshape(ml.arange(4.0), (1, 4, 1)), window=2).tolist()
        [[[0.5], [2.5]]]

    Refuses:
        ml.avg_pool1d(sequences, 0)  # ArgumentError
    """
    return _pooled(op.avg_pool2d, x, 1, window, stride, padding, dilation)


@public
def max_pool3d(
    x: Tensor,
    window: Volume,
    *,
    stride: Volume | None = None,
    padding: Sides = "VALID",
    dilation: Volume = 1,
) -> Tensor:
    """Take the largest element of each window of volumes; `padding` is "VALID", "SAME" or ((front,
    back), (top, bottom), (left, right)), otherwise as `max_pool2d`.

    x: f[N, D, H, W, C] -> f[N, OD, OH, OW, C]. Raises `DTypeError` if x is not of floats;
    `ShapeError` if x has another number of axes, or the window is larger than the padded volume;
    `ArgumentError` if the window, stride, padding or dilation is invalid.

        >>> ml.max_pool3d(ml.reshape(ml.arange(8.0), (1, 2, 2, 2, 1)), window=2).tolist()
        [[[[[7.0]]]]]

    Refuses:
        ml.max_pool3d(volumes, 0)  # ArgumentError
    """
    return _pooled(op.max_pool2d, x, 3, window, stride, padding, dilation)


@public
@through_f32
def avg_pool3d(
    x: Tensor,
    window: Volume,
    *,
    stride: Volume | None = None,
    padding: Sides = "VALID",
    dilation: Volume = 1,
) -> Tensor:
    """Average each window of volumes; `padding` is "VALID", "SAME" or ((front, back), (top,
    bottom), (left, right)), otherwise as `avg_pool2d`.

    x: f[N, D, H, W, C] -> f[N, OD, OH, OW, C]. Raises `DTypeError` if x is not of floats;
    `ShapeError` if x has another number of axes, or the window is larger than the padded volume;
    `ArgumentError` if the window, stride, padding or dilation is invalid.

        >>> ml.avg_pool3d(ml.reshape(ml.arange(8.0), (1, 2, 2, 2, 1)), window=2).tolist()
        [[[[[3.5]]]]]

    Refuses:
        ml.avg_pool3d(volumes, 0)  # ArgumentError
    """
    return _pooled(op.avg_pool2d, x, 3, window, stride, padding, dilation)


@public
@through_f32
def adaptive_avg_pool(x: Tensor, size: Ints) -> Tensor:
    """Average `size` windows, one number or (vertical, horizontal, ...), that together cover x. Of
    n places, window i of k goes from the floor of i n / k to the ceiling of (i + 1) n / k. It is
    PyTorch's adaptive_avg_pool1d, 2d and 3d, for channels last.

    x: f[N, ..., C] -> f[N, *size, C]. Raises `ShapeError` if x has fewer than three axes or x has
    no places; `ArgumentError` if a size is below 1 or the number of sizes is not that of axes;
    `DTypeError` if x is not of floats.

        >>> ml.adaptive_avg_pool(ml.reshape(ml.arange(4.0), (1, 4, 1)), 2).tolist()
        [[[0.5], [2.5]]]

    Refuses:
        ml.adaptive_avg_pool(images, 0)  # ArgumentError
    """
    return _adapted(op.mean, x, size)


@public
def adaptive_max_pool(x: Tensor, size: Ints) -> Tensor:
    """Take the largest elements of `size` windows that together cover x, as in `adaptive_avg_pool`.

    x: f[N, ..., C] -> f[N, *size, C]. Raises `ShapeError` if x has fewer than three axes or x has
    no places; `ArgumentError` if a size is below 1 or the number of sizes is not that of axes;
    `DTypeError` if x is not of floats.

        >>> ml.adaptive_max_pool(ml.reshape(ml.arange(4.0), (1, 4, 1)), 2).tolist()
        [[[1.0], [3.0]]]

    Refuses:
        ml.adaptive_max_pool(images, 0)  # ArgumentError
    """
    return _adapted(op.max, x, size)


def _pooled(
    pool: Any,
    x: Tensor,
    axes: int,
    window: Ints,
    stride: Ints | None,
    padding: Sides | Pair,
    dilation: Ints,
) -> Tensor:
    """Pool x in windows over `axes` axes by a function of images."""
    size, shape = require_places(x, axes), each_of(window, axes, "window")
    stride = shape if stride is None else stride
    geometry, _ = geometry_of(size, shape, stride, padding, dilation)
    if axes == 2:
        return _of_images(pool, x, shape, *geometry)
    if axes == 1:
        images = expand_dims(x, axis=1)
        return squeeze(_of_images(pool, images, (1, *shape), *geometry.of_rows()), axis=1)
    # in each layer, and then from layer to layer: neither a mean nor a largest element cares
    n, depth = x.shape[0], size[0]
    steps, sides, dilations = geometry
    layers = reshape(x, (n * depth, *x.shape[2:]))
    layers = _of_images(pool, layers, shape[1:], steps[1:], sides[1:], dilations[1:])
    _, *places, channels = layers.shape
    columns = reshape(layers, (n, depth, 1, places[0] * places[1] * channels))
    down = (shape[0], 1), (steps[0], 1), (sides[0], (0, 0)), (dilations[0], 1)
    y = _of_images(pool, columns, *down)
    return reshape(y, (n, y.shape[1], *places, channels))


def _of_images(
    pool: Any, x: Tensor, window: Shape, stride: Shape, padding: Any, dilation: Shape
) -> Tensor:
    y: Tensor = pool(x, window=window, stride=stride, padding=padding, dilation=dilation)
    return y


def _adapted(reduce: Any, x: Tensor, size: Ints) -> Tensor:
    """Reduce axis by axis: a window is a product of intervals."""
    require("float", type_of(x))
    if x.ndim < 3 or 0 in x.shape[1:-1]:
        raise ShapeError(f"expected x as [N, ..., C] with places between, got {x.type}")
    for axis, count in enumerate(each_of(size, x.ndim - 2, "size"), 1):
        n = x.shape[axis]
        if n % count == 0:
            shape = (*x.shape[:axis], count, n // count, *x.shape[axis + 1 :])
            x = x if n == count else reduce(reshape(x, shape), axis=axis + 1)
        else:
            windows = [range(i * n // count, -(-(i + 1) * n // count)) for i in range(count)]
            x = stack([reduce(part(x, axis, each), axis=axis) for each in windows], axis=axis)
    return x
