"""Convolutions and transposed convolutions.

Shapes: sequences [batch, length, channels], images NHWC, volumes [batch, depth, height, width,
channels]. The last two axes of a kernel are input and output channels.
"""

from __future__ import annotations

import math
from typing import Any

from mlvm.core.errors import ArgumentError, ShapeError
from mlvm.core.ops.windows import Pair, span_of
from mlvm.core.types import Shape, bf16
from mlvm.eager.functions.arguments import Ints, each_of, type_of
from mlvm.eager.functions.halves import through_f32
from mlvm.eager.functions.shapes import expand_dims, permute_dims, reshape, squeeze
from mlvm.eager.functions.sliding import (
    Geometry,
    Sides,
    Volume,
    Window,
    geometry_of,
    require_places,
)
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.autocast import in_half
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.wrapper import public


@public
def conv2d(
    x: Tensor,
    kernel: Tensor,
    *,
    stride: Window = 1,
    padding: Sides = "VALID",
    dilation: Window = 1,
    groups: int = 1,
) -> Tensor:
    """Convolve NHWC images with an HWIO kernel (cross-correlation: the kernel is not flipped).

    f[N, H, W, I] with f[KH, KW, I / groups, O] -> f[N, OH, OW, O]. `padding` is "VALID", "SAME" or
    ((top, bottom), (left, right)); padded elements are zeros. Adjacent kernel elements are
    `dilation` pixels apart in the image (Yu and Koltun, arXiv 1511.07122). The channels are split
    into `groups`: each group of output channels depends only on the same group of input channels.
    If `groups` equals the number of channels, the convolution is depthwise (Chollet, arXiv
    1610.02357).

    Raises `ShapeError` if the channels do not fit the kernel, or the kernel is larger than the
    padded image; `ArgumentError` if the stride, padding, dilation or groups are invalid;
    `DTypeError` unless both are floats of the same dtype.

        >>> ml.conv2d(ml.ones((1, 4, 4, 3)), ml.ones((3, 3, 3, 8))).type
        f32[1,2,2,8]

    Invalid calls:
        ml.conv2d(images, ml.ones((2, 2, 2, 3)), groups=0)  # ArgumentError
    """
    return _conv(x, kernel, *_geometry(x, kernel, 2, stride, padding, dilation), groups)


@public
def conv1d(
    x: Tensor,
    kernel: Tensor,
    *,
    stride: int = 1,
    padding: str | Pair = "VALID",
    dilation: int = 1,
    groups: int = 1,
) -> Tensor:
    """Convolve sequences with a kernel (cross-correlation: the kernel is not flipped).

    f[N, L, I] with f[K, I / groups, O] -> f[N, OL, O]. `padding` is "VALID", "SAME" or (before,
    after). The other options are the same as for `conv2d`.

    Raises `ShapeError` if the channels do not fit the kernel, or the kernel is larger than the
    padded sequence; `ArgumentError` if the stride, padding, dilation or groups are invalid;
    `DTypeError` unless both are floats of the same dtype.

        >>> ml.conv1d(ml.ones((1, 4, 3)), ml.ones((3, 3, 8))).type
        f32[1,2,8]

    Invalid calls:
        ml.conv1d(sequences, ml.ones((2, 2, 3)), stride=0)  # ArgumentError
    """
    geometry = _geometry(x, kernel, 1, stride, padding, dilation)
    images, window = expand_dims(x, axis=1), expand_dims(kernel, axis=0)
    return squeeze(_conv(images, window, *geometry.of_rows(), groups), axis=1)


@public
def conv3d(
    x: Tensor,
    kernel: Tensor,
    *,
    stride: Volume = 1,
    padding: Sides = "VALID",
    dilation: Volume = 1,
    groups: int = 1,
) -> Tensor:
    """Convolve volumes with a kernel (cross-correlation: the kernel is not flipped).

    f[N, D, H, W, I] with f[KD, KH, KW, I / groups, O] -> f[N, OD, OH, OW, O]. `padding` is "VALID",
    "SAME" or ((front, back), (top, bottom), (left, right)). The other options are the same as for
    `conv2d`.

    Raises `ShapeError` if the channels do not fit the kernel, or the kernel is larger than the
    padded volume; `ArgumentError` if the stride, padding, dilation or groups are invalid;
    `DTypeError` unless both are floats of the same dtype.

        >>> ml.conv3d(ml.ones((1, 4, 4, 4, 3)), ml.ones((3, 3, 3, 3, 8))).type
        f32[1,2,2,2,8]

    Invalid calls:
        ml.conv3d(volumes, ml.ones((2, 2, 2, 2, 3)), dilation=0)  # ArgumentError
    """
    return _conv(x, kernel, *_geometry(x, kernel, 3, stride, padding, dilation), groups)


@public
@through_f32
def conv_transpose2d(
    x: Tensor,
    kernel: Tensor,
    *,
    stride: Window = 1,
    padding: Sides = "VALID",
    dilation: Window = 1,
    groups: int = 1,
) -> Tensor:
    """Apply the transpose of `conv2d` as a linear map, as in PyTorch and TensorFlow.

    Each element of x, multiplied by the kernel, is added to a window of the result (Dumoulin and
    Visin, arXiv 1603.07285, section 4).

    f[N, H, W, I] with f[KH, KW, O / groups, I] -> f[N, OH, OW, O]. The kernel has the layout of a
    convolution from O to I channels.

    `padding` is the padding of that convolution: elements in the padding are dropped. OH is (H - 1)
    stride + the span of the kernel, (KH - 1) dilation + 1, minus the rows of padding; with "SAME"
    it is H stride.

    Raises `ShapeError` if the channels do not fit the kernel or the result would be empty;
    `ArgumentError` if the stride, padding, dilation or groups are invalid; `DTypeError` if an
    operand is complex.

        >>> ml.conv_transpose2d(ml.ones((1, 4, 4, 3)), ml.ones((2, 2, 8, 3)), stride=2).type
        f32[1,8,8,8]

    Invalid calls:
        ml.conv_transpose2d(images, ml.ones((2, 2, 3, 2)), padding="most")  # ArgumentError
        ml.conv_transpose2d(images, ml.ones((2, 2, 3, 2)), padding=((1, 1),))  # ArgumentError
    """
    return _transposed(x, kernel, 2, stride, padding, dilation, groups)


@public
@through_f32
def conv_transpose1d(
    x: Tensor,
    kernel: Tensor,
    *,
    stride: int = 1,
    padding: str | Pair = "VALID",
    dilation: int = 1,
    groups: int = 1,
) -> Tensor:
    """Apply the transpose of `conv1d` as a linear map.

    f[N, L, I] with f[K, O / groups, I] -> f[N, OL, O]. `padding` is "VALID", "SAME" or (before,
    after). The other options are the same as for `conv_transpose2d`.

    Raises `ShapeError` if the channels do not fit the kernel or the result would be empty;
    `ArgumentError` if the stride, padding, dilation or groups are invalid; `DTypeError` if an
    operand is complex.

        >>> ml.conv_transpose1d(ml.ones((1, 4, 3)), ml.ones((2, 8, 3)), stride=2).type
        f32[1,8,8]

    Invalid calls:
        ml.conv_transpose1d(sequences, ml.ones((2, 3, 2)), stride=0)  # ArgumentError
    """
    return _transposed(x, kernel, 1, stride, padding, dilation, groups)


@public
@through_f32
def conv_transpose3d(
    x: Tensor,
    kernel: Tensor,
    *,
    stride: Volume = 1,
    padding: Sides = "VALID",
    dilation: Volume = 1,
    groups: int = 1,
) -> Tensor:
    """Apply the transpose of `conv3d` as a linear map.

    f[N, D, H, W, I] with f[KD, KH, KW, O / groups, I] -> f[N, OD, OH, OW, O]. The options are the
    same as for `conv_transpose2d`.

    Raises `ShapeError` if the channels do not fit the kernel or the result would be empty;
    `ArgumentError` if the stride, padding, dilation or groups are invalid; `DTypeError` if an
    operand is complex.

        >>> ml.conv_transpose3d(ml.ones((1, 2, 2, 2, 3)), ml.ones((2, 2, 2, 8, 3)), stride=2).type
        f32[1,4,4,4,8]

    Invalid calls:
        ml.conv_transpose3d(volumes, ml.ones((2, 2, 2, 3, 2)), stride=0)  # ArgumentError
    """
    return _transposed(x, kernel, 3, stride, padding, dilation, groups)


def _geometry(
    x: Tensor, kernel: Tensor, axes: int, stride: Ints, padding: object, dilation: Ints
) -> Geometry:
    """Return the geometry of the kernel's windows. Raises the errors of convolutions."""
    size = require_places(x, axes)
    _require_kernel(kernel, axes)
    return geometry_of(size, kernel.shape[:axes], stride, padding, dilation)[0]


def _require_kernel(kernel: Tensor, axes: int) -> None:
    if type_of(kernel).ndim != axes + 2:
        raise ShapeError(
            f"expected a kernel of {axes + 2} axes, [*window, channels, channels], got "
            f"{kernel.ndim}"
        )
    if 0 in kernel.shape[:axes]:
        raise ArgumentError(f"expected a kernel with a window, got {list(kernel.shape)}")


def _conv(
    x: Tensor, kernel: Tensor, stride: Shape, sides: tuple[Pair, ...], dilation: Shape, groups: int
) -> Tensor:
    """Launch the op on images or volumes, with one argument per axis."""
    _require_groups(groups)
    x, kernel = in_half((x, kernel))
    *window, inputs, outputs = kernel.shape
    alone = (*window,) == stride and groups == 1 and not any(map(any, sides))
    alone = alone and (max(stride) == 1 or (len(window) == 2 and max(dilation) == 1))
    if alone and x.dtype is kernel.dtype is bf16 and _has_places(x, kernel):
        # non-overlapping windows are rows of a matrix; matrix products of bf16 have special kernels
        if max(stride) > 1:
            x = _rows(x, *stride)
        return op.matmul(x, reshape(kernel, (math.prod(window) * inputs, outputs)))
    return op.conv2d(x, kernel, stride=stride, padding=sides, dilation=dilation, groups=groups)


def _rows(x: Tensor, tall: int, wide: int) -> Tensor:
    """Reshape adjacent windows to rows; a remainder smaller than a window is dropped."""
    n, height, width, channels = x.shape
    down, across = height // tall, width // wide
    if (down * tall, across * wide) != (height, width):
        x = x[:, : down * tall, : across * wide]
    x = reshape(x, (n, down, tall, across, wide * channels))
    return reshape(permute_dims(x, (0, 1, 3, 2, 4)), (n, down, across, tall * wide * channels))


def _has_places(x: Tensor, kernel: Tensor) -> bool:
    """Return whether the channels of x match the kernel and the kernel fits into x."""
    places = zip(x.shape[1:-1], kernel.shape[:-2], strict=True)
    return x.shape[-1] == kernel.shape[-2] and all(n >= length for n, length in places)


def _require_groups(groups: object) -> None:
    if not isinstance(groups, int) or groups < 1:
        raise ArgumentError(f"expected groups as an integer >= 1, got {groups!r}")


def _transposed(
    x: Tensor, kernel: Tensor, axes: int, stride: Ints, padding: object, dilation: Ints, groups: int
) -> Tensor:
    """Apply the transpose of a convolution over `axes` axes."""
    places = require_places(x, axes)
    _require_kernel(kernel, axes)
    *window, outputs, inputs = kernel.shape
    _require_groups(groups)
    if inputs != x.shape[-1] or inputs % groups:
        parts, each = (f" in {groups} groups", f" / {groups}") if groups > 1 else ("", "")
        raise ShapeError(
            f"expected a kernel [*window, channels out{each}, {x.shape[-1]}] for "
            f"{x.shape[-1]} channels{parts}, got {list(kernel.shape)}"
        )
    steps = each_of(stride, axes, "stride")
    size = tuple(n * step for n, step in zip(places, steps, strict=True))
    geometry, span = geometry_of(size, tuple(window), steps, padding, dilation)
    if padding != "SAME":
        size = tuple(
            (n - 1) * step + length - sum(side)
            for n, step, length, side in zip(places, steps, span, geometry.padding, strict=True)
        )
    if min(size) < 1:
        raise ShapeError(
            f"padding {padding} would remove all elements of the result; use less padding"
        )
    shape = (x.shape[0], *size, outputs * groups)
    if axes > 1:
        return transpose(x, kernel, shape, *geometry, groups)
    image, columns = expand_dims(x, axis=1), expand_dims(kernel, axis=0)
    shape = (shape[0], 1, *shape[1:])
    return squeeze(transpose(image, columns, shape, *geometry.of_rows(), groups), axis=1)


def transpose(
    x: Tensor,
    kernel: Tensor,
    shape: Shape,
    stride: Shape,
    padding: tuple[Pair, ...],
    dilation: Shape,
    groups: int,
) -> Tensor:
    """Apply the transpose of a convolution of images with that shape.

    With a stride, it adds whole windows, unless it is depthwise, so that no zeros between the
    positions are read."""
    *window, each, channels = kernel.shape
    places: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation}
    span = span_of(tuple(window), dilation)
    reaches = all(max(sides) < n for sides, n in zip(padding, span, strict=True))
    # Maximum number of channels per group for which a flipped kernel is faster.
    if max(stride) == 1 and 1 < each <= 16 and channels == each * groups and reaches:
        return _turned(x, kernel, padding, dilation, groups)
    if max(stride) == 1 or (len(window) == 2 and each == 1 and channels == groups):
        return op.conv_transpose2d(x, kernel, shape=shape, groups=groups, **places)
    windows = _spread(x, kernel, groups)
    if len(window) == 2:
        return op.unpatches(windows, shape=shape, **places)
    # each depth of a volume is processed as an image; the depths of a window are channels until the
    # sum
    (n, depth, *image, _), (_, *size, channels) = x.shape, shape
    windows = reshape(windows, (n * depth, *image, *window, channels))
    windows = permute_dims(windows, (0, 1, 2, 4, 5, 3, 6))
    windows = reshape(windows, (*windows.shape[:5], window[0] * channels))
    layers = op.unpatches(
        windows,
        shape=(n * depth, *size[1:], window[0] * channels),
        **{name: each[1:] for name, each in places.items()},
    )
    layers = reshape(layers, (n, depth, *size[1:], window[0], channels))
    layers = permute_dims(layers, (0, 1, 4, 2, 3, 5))
    inner = size[1] * size[2] * channels
    y = op.unpatches(
        reshape(layers, (n, depth, 1, window[0], 1, inner)),
        shape=(n, size[0], 1, inner),
        stride=(stride[0], 1),
        padding=(padding[0], (0, 0)),
        dilation=(dilation[0], 1),
    )
    return reshape(y, shape)


def _turned(
    x: Tensor, kernel: Tensor, padding: tuple[Pair, ...], dilation: Shape, groups: int
) -> Tensor:
    """Convolve x with the flipped kernel, with inputs and outputs of each group swapped."""
    *window, inputs, outputs = kernel.shape
    axes, each = len(window), outputs // groups
    grouped = reshape(kernel, (*window, inputs, groups, each))
    swapped = permute_dims(grouped, (*range(axes), axes + 2, axes + 1, axes))
    turned = op.flip(reshape(swapped, (*window, each, groups * inputs)), axis=tuple(range(axes)))
    span = span_of(tuple(window), dilation)
    sides = tuple([(n - 1 - a, n - 1 - b) for n, (a, b) in zip(span, padding, strict=True)])
    return op.conv2d(x, turned, stride=(1,) * axes, padding=sides, dilation=dilation, groups=groups)


def _spread(x: Tensor, kernel: Tensor, groups: int) -> Tensor:
    """Multiply each element of x by the kernel: f[N, *positions, *window, O]."""
    *window, outputs, inputs = kernel.shape
    count, rows = math.prod(window), math.prod(x.shape[:-1])
    if groups == 1:
        weights = reshape(kernel, (count * outputs, inputs))
        y = op.matmul(x, weights, transpose_y=True)
    else:
        grouped = reshape(x, (rows, groups, inputs // groups))
        weights = reshape(kernel, (count * outputs, groups, inputs // groups))
        y = op.matmul(permute_dims(grouped, (1, 0, 2)), permute_dims(weights, (1, 2, 0)))
        y = permute_dims(reshape(y, (groups, rows, count, outputs)), (1, 2, 0, 3))
    return reshape(y, (*x.shape[:-1], *window, outputs * groups))
