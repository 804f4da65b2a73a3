"""Pooling: the largest element or the mean of each window, per channel.

Shapes: sequences [batch, length, channels], images NHWC, volumes [batch, depth, height, width,
channels].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, overload

from mlvm.core.errors import ArgumentError, ShapeError
from mlvm.core.ops.windows import Pair
from mlvm.core.rules import require
from mlvm.core.types import Shape
from mlvm.eager.functions.arguments import MOST_PARTS, Ints, each_of, type_of
from mlvm.eager.functions.creation import arange, full, zeros_like
from mlvm.eager.functions.elements import stop_gradient, unravel_index
from mlvm.eager.functions.halves import through_f32
from mlvm.eager.functions.shapes import expand_dims, part, permute_dims, reshape, squeeze, stack
from mlvm.eager.functions.sliding import (
    Geometry,
    Sides,
    Volume,
    Window,
    geometry_of,
    require_places,
)
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.wrapper import public


@overload
def max_pool2d(
    x: Tensor,
    window: Window,
    *,
    stride: Window | None = None,
    padding: Sides = "VALID",
    dilation: Window = 1,
    ceil_mode: bool = False,
    return_indices: Literal[False] = False,
) -> Tensor: ...
@overload
def max_pool2d(
    x: Tensor,
    window: Window,
    *,
    stride: Window | None = None,
    padding: Sides = "VALID",
    dilation: Window = 1,
    ceil_mode: bool = False,
    return_indices: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@public
def max_pool2d(
    x: Tensor,
    window: Window,
    *,
    stride: Window | None = None,
    padding: Sides = "VALID",
    dilation: Window = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """Return the largest element of each window of NHWC images.

    The default stride is the window. `padding` is as in `conv2d`, with the value -inf; `dilation`
    is also as in `conv2d`. With `ceil_mode`, the last window may extend beyond the padding. With
    `return_indices`, also return the positions (i64) of these elements in the flattened H W axes,
    as in PyTorch.

    x: f[N, H, W, C] -> f[N, OH, OW, C]. Raises `DTypeError` if x is not of floats; `ShapeError` if
    x has a different number of axes, or the window is larger than the padded image; `ArgumentError`
    if the window, stride, padding or dilation is invalid.

        >>> ml.max_pool2d(ml.reshape(ml.arange(4.0), (1, 2, 2, 1)), window=2).tolist()
        [[[[3.0]]]]

    Invalid calls:
        ml.max_pool2d(images, 0)  # ArgumentError
    """
    places = _places(x, 2, window, stride, padding, dilation, ceil_mode)
    return _largest(x, places, return_indices)


@public
def avg_pool2d(
    x: Tensor,
    window: Window,
    *,
    stride: Window | None = None,
    padding: Sides = "VALID",
    dilation: Window = 1,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Tensor:
    """Return the mean of each window of NHWC images.

    The default stride is the window. `padding` is as in `conv2d`, with the value 0; without
    `count_include_pad`, padding is excluded from the mean. `dilation` is also as in `conv2d`. With
    `ceil_mode`, the last window may extend beyond the padding; elements there are always excluded.

    x: f[N, H, W, C] -> f[N, OH, OW, C]. Raises `DTypeError` if x is not of floats; `ShapeError` if
    x has a different number of axes, or the window is larger than the padded image; `ArgumentError`
    if the window, stride, padding or dilation is invalid.

        >>> ml.avg_pool2d(ml.reshape(ml.arange(4.0), (1, 2, 2, 1)), window=2).tolist()
        [[[[1.5]]]]

    Invalid calls:
        ml.avg_pool2d(images, 0)  # ArgumentError
    """
    places = _places(x, 2, window, stride, padding, dilation, ceil_mode)
    return _averaged(x, places, count_include_pad)


@overload
def max_pool1d(
    x: Tensor,
    window: int,
    *,
    stride: int | None = None,
    padding: str | Pair = "VALID",
    dilation: int = 1,
    ceil_mode: bool = False,
    return_indices: Literal[False] = False,
) -> Tensor: ...
@overload
def max_pool1d(
    x: Tensor,
    window: int,
    *,
    stride: int | None = None,
    padding: str | Pair = "VALID",
    dilation: int = 1,
    ceil_mode: bool = False,
    return_indices: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@public
def max_pool1d(
    x: Tensor,
    window: int,
    *,
    stride: int | None = None,
    padding: str | Pair = "VALID",
    dilation: int = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """Return the largest element of each window of sequences.

    `padding` is "VALID", "SAME" or (before, after). The other options are the same as for
    `max_pool2d`.

    x: f[N, L, C] -> f[N, OL, C]. Raises `DTypeError` if x is not of floats; `ShapeError` if x has
    a different number of axes, or the window is larger than the padded sequence; `ArgumentError` if
    the window, stride, padding or dilation is invalid.

        >>> ml.max_pool1d(ml.reshape(ml.arange(4.0), (1, 4, 1)), window=2).tolist()
        [[[1.0], [3.0]]]

    Invalid calls:
        ml.max_pool1d(sequences, 0)  # ArgumentError
    """
    places = _places(x, 1, window, stride, padding, dilation, ceil_mode)
    return _largest(x, places, return_indices)


@public
def avg_pool1d(
    x: Tensor,
    window: int,
    *,
    stride: int | None = None,
    padding: str | Pair = "VALID",
    dilation: int = 1,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Tensor:
    """Return the mean of each window of sequences.

    `padding` is "VALID", "SAME" or (before, after). The other options are the same as for
    `avg_pool2d`.

    x: f[N, L, C] -> f[N, OL, C]. Raises `DTypeError` if x is not of floats; `ShapeError` if x has
    a different number of axes, or the window is larger than the padded sequence; `ArgumentError` if
    the window, stride, padding or dilation is invalid.

        >>> ml.avg_pool1d(ml.reshape(ml.arange(4.0), (1, 4, 1)), window=2).tolist()
        [[[0.5], [2.5]]]

    Invalid calls:
        ml.avg_pool1d(sequences, 0)  # ArgumentError
    """
    places = _places(x, 1, window, stride, padding, dilation, ceil_mode)
    return _averaged(x, places, count_include_pad)


@overload
def max_pool3d(
    x: Tensor,
    window: Volume,
    *,
    stride: Volume | None = None,
    padding: Sides = "VALID",
    dilation: Volume = 1,
    ceil_mode: bool = False,
    return_indices: Literal[False] = False,
) -> Tensor: ...
@overload
def max_pool3d(
    x: Tensor,
    window: Volume,
    *,
    stride: Volume | None = None,
    padding: Sides = "VALID",
    dilation: Volume = 1,
    ceil_mode: bool = False,
    return_indices: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@public
def max_pool3d(
    x: Tensor,
    window: Volume,
    *,
    stride: Volume | None = None,
    padding: Sides = "VALID",
    dilation: Volume = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """Return the largest element of each window of volumes.

    `padding` is "VALID", "SAME" or ((front, back), (top, bottom), (left, right)). The other options
    are the same as for `max_pool2d`.

    x: f[N, D, H, W, C] -> f[N, OD, OH, OW, C]. Raises `DTypeError` if x is not of floats;
    `ShapeError` if x has a different number of axes, or the window is larger than the padded
    volume; `ArgumentError` if the window, stride, padding or dilation is invalid.

        >>> ml.max_pool3d(ml.reshape(ml.arange(8.0), (1, 2, 2, 2, 1)), window=2).tolist()
        [[[[[7.0]]]]]

    Invalid calls:
        ml.max_pool3d(volumes, 0)  # ArgumentError
    """
    places = _places(x, 3, window, stride, padding, dilation, ceil_mode)
    return _largest(x, places, return_indices)


@public
@through_f32
def avg_pool3d(
    x: Tensor,
    window: Volume,
    *,
    stride: Volume | None = None,
    padding: Sides = "VALID",
    dilation: Volume = 1,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Tensor:
    """Return the mean of each window of volumes.

    `padding` is "VALID", "SAME" or ((front, back), (top, bottom), (left, right)). The other options
    are the same as for `avg_pool2d`.

    x: f[N, D, H, W, C] -> f[N, OD, OH, OW, C]. Raises `DTypeError` if x is not of floats;
    `ShapeError` if x has a different number of axes, or the window is larger than the padded
    volume; `ArgumentError` if the window, stride, padding or dilation is invalid.

        >>> ml.avg_pool3d(ml.reshape(ml.arange(8.0), (1, 2, 2, 2, 1)), window=2).tolist()
        [[[[[3.5]]]]]

    Invalid calls:
        ml.avg_pool3d(volumes, 0)  # ArgumentError
    """
    places = _places(x, 3, window, stride, padding, dilation, ceil_mode)
    return _averaged(x, places, count_include_pad)


@public
@through_f32
def adaptive_avg_pool(x: Tensor, size: Ints) -> Tensor:
    """Return the means of `size` windows that together cover x.

    `size` is one number or (vertical, horizontal, ...). For n positions, window i of k extends from
    the floor of i n / k to the ceiling of (i + 1) n / k. The function corresponds to PyTorch's
    adaptive_avg_pool1d, 2d and 3d, but expects channels last.

    x: f[N, ..., C] -> f[N, *size, C]. Raises `ShapeError` if x has fewer than three axes or an axis
    of length 0; `ArgumentError` if a size is below 1 or the numbers of sizes and axes differ;
    `DTypeError` if x is not of floats.

        >>> ml.adaptive_avg_pool(ml.reshape(ml.arange(4.0), (1, 4, 1)), 2).tolist()
        [[[0.5], [2.5]]]

    Invalid calls:
        ml.adaptive_avg_pool(images, 0)  # ArgumentError
    """
    return _adapted(op.mean, x, size)


@public
def adaptive_max_pool(x: Tensor, size: Ints) -> Tensor:
    """Return the largest elements of `size` windows that together cover x.

    The windows are the same as for `adaptive_avg_pool`.

    x: f[N, ..., C] -> f[N, *size, C]. Raises `ShapeError` if x has fewer than three axes or an axis
    of length 0; `ArgumentError` if a size is below 1 or the numbers of sizes and axes differ;
    `DTypeError` if x is not of floats.

        >>> ml.adaptive_max_pool(ml.reshape(ml.arange(4.0), (1, 4, 1)), 2).tolist()
        [[[1.0], [3.0]]]

    Invalid calls:
        ml.adaptive_max_pool(images, 0)  # ArgumentError
    """
    return _adapted(op.max, x, size)


class _Windows(NamedTuple):
    """Windows over the positions of an input: shape and geometry.

    It includes the padding that `ceil_mode` adds at the end of each axis."""

    shape: Shape
    geometry: Geometry
    more: Shape

    @property
    def padding(self) -> tuple[Pair, ...]:
        """The padding, including the part that `ceil_mode` adds."""
        sides = zip(self.geometry.padding, self.more, strict=True)
        return tuple((before, after + more) for (before, after), more in sides)


def _places(
    x: Tensor,
    axes: int,
    window: Ints,
    stride: Ints | None,
    padding: Sides | Pair,
    dilation: Ints,
    ceil_mode: bool,
) -> _Windows:
    """Return the windows over `axes` axes of x."""
    size, shape = require_places(x, axes), each_of(window, axes, "window")
    stride = shape if stride is None else stride
    geometry, span = geometry_of(size, shape, stride, padding, dilation)
    more = [0] * axes
    if ceil_mode:
        for i, (n, length, step) in enumerate(zip(size, span, geometry.stride, strict=True)):
            padded = n + sum(geometry.padding[i])
            last = -(-(padded - length) // step) * step  # where the last window begins
            if last >= n + geometry.padding[i][0]:  # no window begins after the input
                last -= step
            more[i] = max(0, last + length - padded)
    return _Windows(shape, geometry, tuple(more))


def _largest(x: Tensor, places: _Windows, with_indices: bool) -> Any:
    """Return the largest element of each window, optionally with the position."""
    y = _pooled(op.max_pool2d, x, places)
    return (y, _indices(x, places)) if with_indices else y


def _pooled(pool: Callable[..., Tensor], x: Tensor, places: _Windows) -> Tensor:
    """Pool the windows of x with a function of images."""
    shape, axes = places.shape, len(places.shape)
    geometry = places.geometry._replace(padding=places.padding)
    if axes == 2:
        return pool(x, window=shape, **geometry._asdict())
    if axes == 1:
        images = expand_dims(x, axis=1)
        y = pool(images, window=(1, *shape), **geometry.of_rows()._asdict())
        return squeeze(y, axis=1)
    # pool within each layer, then across layers: for means and maxima, the result is the same
    n, depth = x.shape[:2]
    steps, sides, dilations = geometry
    layers = reshape(x, (n * depth, *x.shape[2:]))
    inner = Geometry(steps[1:], sides[1:], dilations[1:])
    layers = pool(layers, window=shape[1:], **inner._asdict())
    _, *rest, channels = layers.shape
    columns = reshape(layers, (n, depth, 1, rest[0] * rest[1] * channels))
    down = Geometry((steps[0], 1), (sides[0], (0, 0)), (dilations[0], 1))
    y = pool(columns, window=(shape[0], 1), **down._asdict())
    return reshape(y, (n, y.shape[1], *rest, channels))


def _averaged(x: Tensor, places: _Windows, with_padding: bool) -> Tensor:
    """Average the windows of x, with padding or without."""
    if not any(places.more) and (with_padding or not any(map(any, places.geometry.padding))):
        return _pooled(op.avg_pool2d, x, places)
    return _counted_average(x, places, with_padding)


@through_f32
def _counted_average(x: Tensor, places: _Windows, with_padding: bool) -> Tensor:
    """Divide the means of windows by the share of elements that count."""
    y = _pooled(op.avg_pool2d, x, places)
    counted = full((1, *x.shape[1:-1], 1), 1.0, dtype=x.dtype)
    if with_padding:
        widths = ((0, 0), *places.geometry.padding, (0, 0))
        counted = op.pad(counted, widths=widths, value=1.0)
        sides = tuple((0, more) for more in places.more)
        places = _Windows(places.shape, places.geometry._replace(padding=sides), (0,) * len(sides))
    return y / _pooled(op.avg_pool2d, counted, places)


def _indices(x: Tensor, places: _Windows) -> Tensor:
    """Return the position of the first largest element of each window, in the flattened input."""
    axes, sizes = len(places.shape), x.shape[1:-1]
    x = op.pad(stop_gradient(x), widths=((0, 0), *places.padding, (0, 0)), value=-math.inf)
    rows: list[Tensor] = []
    for i, (length, step, by) in enumerate(
        zip(places.shape, places.geometry.stride, places.geometry.dilation, strict=True)
    ):
        starts = arange(0, x.shape[1 + 2 * i] - by * (length - 1), step)
        at = reshape(starts, (-1, 1)) + arange(length) * by
        x = op.take(x, reshape(at, -1), axis=1 + 2 * i)
        x = reshape(x, (*x.shape[: 1 + 2 * i], *at.shape, *x.shape[2 + 2 * i :]))
        rows.append(at - places.padding[i][0])
    order = (0, *range(1, 2 * axes, 2), 2 * axes + 1, *range(2, 2 * axes + 1, 2))
    x = permute_dims(x, order)
    chosen = op.argmax(reshape(x, (*x.shape[: axes + 2], math.prod(places.shape))), axis=-1)
    result, parts = zeros_like(chosen), unravel_index(chosen, places.shape)
    for i, (at, k, n) in enumerate(zip(rows, parts, sizes, strict=True)):
        first = reshape(at[:, 0], [-1 if j == i else 1 for j in range(-1, axes + 1)])
        result = result * n + op.clip(first + k * places.geometry.dilation[i], 0, n - 1)
    return result


def _adapted(reduce: Any, x: Tensor, size: Ints) -> Tensor:
    """Reduce axis by axis: each window is a product of intervals."""
    require("float", type_of(x))
    if x.ndim < 3 or 0 in x.shape[1:-1]:
        raise ShapeError(f"expected x as [N, ..., C] with spatial axes between, got {x.type}")
    for axis, count in enumerate(each_of(size, x.ndim - 2, "size"), 1):
        if count > MOST_PARTS:
            raise ArgumentError(f"expected size of at most {MOST_PARTS} windows, got {count}")
        n = x.shape[axis]
        if n % count == 0:
            shape = (*x.shape[:axis], count, n // count, *x.shape[axis + 1 :])
            x = x if n == count else reduce(reshape(x, shape), axis=axis + 1)
        else:
            windows = [range(i * n // count, -(-(i + 1) * n // count)) for i in range(count)]
            x = stack([reduce(part(x, axis, each), axis=axis) for each in windows], axis=axis)
    return x
