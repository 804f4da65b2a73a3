"""Sliding windows: convolution, transposes of convolution, and pooling.

Images are NHWC (batch, height, width, channels), volumes have a depth axis before the height.
Convolution kernels are HWIO: a window of matrices, input channels by output channels. Adjacent
window elements are `dilation` apart in the image (Yu and Koltun, arXiv 1511.07122). Ops named
`x_vjp` are as in `neural`. `out` must not be an operand, as kernels use it as workspace.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from mlvm.core.errors import ArgumentError, ShapeError
from mlvm.core.op import internal, op
from mlvm.core.ops.block_memory import blocks
from mlvm.core.rules import require, require_cotangent, require_one_float_dtype
from mlvm.core.types import Array, Shape, TensorType

Pair: TypeAlias = tuple[int, int]
"""Pair (vertical, horizontal)."""
Padding: TypeAlias = tuple[Pair, Pair]
"""Padding ((top, bottom), (left, right))."""
Sides: TypeAlias = tuple[tuple[int, int], ...]
"""Padding as (before, after) for each axis."""
WINDOWS_PER_BLOCK: Final = 352
"""Maximum number of windows that the gradient of a kernel sums together."""
NARROW: Final = (2, 4, 8, 16)
"""Channels of groups that are convolved without matrix products."""


def resolve_padding(
    padding: str | Sides, window: Shape, stride: Shape, size: Shape
) -> tuple[Pair, ...]:
    """Return the padding as (before, after) for each axis of images of that size.

    "VALID" means no padding. "SAME" gives ceil(size / stride) windows; if the padding is odd, the
    extra zero is at the end, as in TensorFlow and JAX. Explicit padding is returned unchanged.
    Raises `ArgumentError` for any other word, and for a stride below 1.
    """
    if not isinstance(padding, str):
        return padding
    if padding == "VALID":
        return ((0, 0),) * len(window)
    if padding != "SAME":
        raise ArgumentError(
            f'expected padding "SAME", "VALID" or ((top, bottom), (left, right)), got {padding!r}'
        )
    _require_stride(stride)
    missing = [
        max((-(-n // step) - 1) * step + length - n, 0)
        for n, step, length in zip(size, stride, window, strict=True)
    ]
    return tuple((n // 2, n - n // 2) for n in missing)


def span_of(window: Shape, dilation: Shape) -> Shape:
    """Return the extent of a dilated window on each axis, from the first to the last element."""
    return tuple((n - 1) * step + 1 for n, step in zip(window, dilation, strict=True))


def _require_stride(stride: Shape) -> None:
    if min(stride) < 1:
        raise ArgumentError(f"expected stride >= 1 along each axis, got {stride}")


def _times(lengths: Shape) -> str:
    return " x ".join(map(str, lengths))


def _grid(image: Shape, window: Shape, stride: Shape, padding: Sides, dilation: Shape) -> Shape:
    """Return the number of windows on each axis of the padded images."""
    axes = len(window)
    if len(image) != axes + 2:
        kind, names = ("an image", "") if axes == 2 else ("a volume", "depth, ")
        raise ShapeError(
            f"expected {kind} of {axes + 2} axes (batch, {names}height, width, channels), got "
            f"{len(image)}"
        )
    if not len(stride) == len(padding) == len(dilation) == axes:
        raise ArgumentError(
            f"expected {axes} axes of stride, padding, dilation, got {stride}, {padding}, "
            f"{dilation}"
        )
    if min(window) < 1:
        raise ShapeError(f"expected a window >= {_times((1,) * axes)}, got {_times(window)}")
    _require_stride(stride)
    if min(dilation) < 1:
        raise ArgumentError(f"expected dilation >= 1 along each axis, got {dilation}")
    if min(min(side) for side in padding) < 0:
        raise ArgumentError(f"expected padding >= 0 on every side, got {padding}")
    padded = tuple(n + sum(side) for n, side in zip(image[1:-1], padding, strict=True))
    span = span_of(window, dilation)
    if any(length > n for length, n in zip(span, padded, strict=True)):
        dilated = f"; with dilation, the window spans {_times(span)}" if span != window else ""
        raise ShapeError(
            f"expected a window of at most {_times(padded)}, the padded image, got "
            f"{_times(window)}{dilated}; channels are the last axis"
        )
    return tuple((n - k) // step + 1 for n, k, step in zip(padded, span, stride, strict=True))


def _pad(x: Array, padding: Sides, value: float = 0) -> Array:
    """Return x padded with `value`; x itself if there is no padding."""
    if not any(map(any, padding)):
        return x
    lengths = [n + sum(side) for n, side in zip(x.shape[1:-1], padding, strict=True)]
    padded: Array = np.full((x.shape[0], *lengths, x.shape[-1]), value, x.dtype)
    padded[_inside(x.shape, padding)] = x
    return padded


def _inside(shape: Shape, padding: Sides) -> tuple[slice, ...]:
    """Return the slices of a padded image that exclude the padding."""
    pairs = zip(shape[1:-1], padding, strict=True)
    return (slice(None), *[slice(before, before + n) for n, (before, _) in pairs])


def _windows(padded: Array, window: Shape, stride: Shape, dilation: Shape) -> Array:
    """Return all windows, [N, *grid, *window, C], as a view of the padded images."""
    axes = len(window)
    every: Array = sliding_window_view(padded, span_of(window, dilation), tuple(range(1, axes + 1)))
    steps = [slice(None, None, step) for step in (*stride, 1, *dilation)]
    chosen = every[(slice(None), *steps)]  # [N, *grid, C, *window]
    return np.moveaxis(chosen, axes + 1, -1)


def _window_elements(
    padded: Array, grid: Shape, window: Shape, stride: Shape, dilation: Shape
) -> Iterator[tuple[Shape, Array]]:
    """Yield (place, elements) for each place in a window.

    `elements` are the elements of all windows at that place, a view [N, *grid, C] of the padded
    images.
    """
    for place in itertools.product(*map(range, window)):
        parts = [
            slice(i * distance, i * distance + (n - 1) * step + 1, step)
            for i, distance, n, step in zip(place, dilation, grid, stride, strict=True)
        ]
        yield place, padded[(slice(None), *parts)]


# --- patches -------------------------------------------------------------------------


def _patches(x: TensorType, window: Pair, pad_value: float = 0, **how: Any) -> TensorType:
    require("float", x)
    grid = _grid(x.shape, window, **how)
    return x.with_shape((x.shape[0], *grid, *window, x.shape[-1]))


@op(infer=_patches, public=False)
def patches(
    out: Array,
    x: Array,
    *,
    window: Pair,
    stride: Pair,
    padding: Padding,
    pad_value: float = 0.0,
    dilation: Pair = (1, 1),
) -> None:
    """Sliding windows over the padded image: [N,H,W,C] -> [N,OH,OW,KH,KW,C]."""
    out[...] = _windows(_pad(x, padding, pad_value), window, stride, dilation)


def _unpatches(x: TensorType, shape: Shape, **how: Any) -> TensorType:
    if x.ndim != 6:
        raise ShapeError(f"expected patches of 6 axes (N, OH, OW, KH, KW, C), got {x.ndim}")
    window = (x.shape[3], x.shape[4])
    image = x.with_shape(shape)
    expected = _patches(image, window, **how)
    if x is not expected:
        raise ShapeError(f"expected patches of an image {image} with the type {expected}, got {x}")
    return image


@op(infer=_unpatches, public=False)
def unpatches(
    out: Array,
    x: Array,
    *,
    shape: tuple[int, ...],
    stride: Pair,
    padding: Padding,
    dilation: Pair = (1, 1),
) -> None:
    """The transpose of `patches`: [N,OH,OW,KH,KW,C] -> [N,H,W,C].

    Every window is added to the image at the position of the window. Elements in the padding are
    dropped.
    """
    out[...] = 0
    padded = _pad(out, padding)
    grid, window = x.shape[1:3], x.shape[3:5]
    for (i, j), elements in _window_elements(padded, grid, window, stride, dilation):
        elements += x[:, :, :, i, j]
    if padded is not out:
        out[...] = padded[_inside(out.shape, padding)]


# --- convolution ---------------------------------------------------------------------


def convolution(
    x: TensorType, kernel: TensorType, stride: Shape, padding: Sides, dilation: Shape, groups: int
) -> TensorType:
    require_one_float_dtype(x, kernel)
    axes = 3 if x.ndim == 5 else 2
    if kernel.ndim != axes + 2:
        names = "depth, " if axes == 3 else ""
        raise ShapeError(
            f"expected a kernel of {axes + 2} axes ({names}height, width, channels in, channels "
            f"out), got {kernel.ndim}"
        )
    grid = _grid(x.shape, kernel.shape[:-2], stride, padding, dilation)
    _require_channels(x, kernel, groups)
    return x.with_shape((x.shape[0], *grid, kernel.shape[-1]))


def _require_channels(x: TensorType, kernel: TensorType, groups: int) -> None:
    """Raise an error unless the kernel matches the channels of x."""
    if groups < 1:
        raise ArgumentError(f"expected groups as an integer >= 1, got {groups}")
    channels, (inputs, outputs) = x.shape[-1], kernel.shape[-2:]
    if inputs * groups == channels and outputs % groups == 0:
        return
    if groups > 1:
        window = "height, width" if x.ndim == 4 else "depth, height, width"
        raise ShapeError(
            f"expected a kernel of shape [{window}, {channels} / {groups}, a multiple of {groups}] "
            f"for {groups} groups of {channels} channels, got {list(kernel.shape)}"
        )
    text = f"expected {inputs} channels in x, as in the kernel, got {channels}"
    if x.shape[1] == inputs:
        text += "; channels are the last axis: write moveaxis(x, 1, -1)"
    raise ShapeError(text)


def _conv2d_flops(x: TensorType, kernel: TensorType, **attributes: Any) -> int:
    return 2 * math.prod(kernel.shape[:-1]) * convolution(x, kernel, **attributes).size


@op(infer=convolution, flops=_conv2d_flops, precision="half", images=1)
def conv2d(
    out: Array,
    x: Array,
    kernel: Array,
    *,
    stride: tuple[int, ...] = (1, 1),
    padding: Sides,
    dilation: tuple[int, ...] = (1, 1),
    groups: int = 1,
) -> None:
    """The convolution (cross-correlation) of images: [N,H,W,I], [KH,KW,I/groups,O] -> [N,OH,OW,O].

    The images are padded with zeros. Each group of result channels reads only the corresponding
    group of x's channels. Volumes are convolved likewise.
    """
    window = kernel.shape[:-2]
    every = _windows(_pad(x, padding), window, stride, dilation)
    weights = _weights(kernel, groups)
    for images in blocks(out.shape[0], math.prod(out.shape[1:-1]) * weights.shape[1] * groups):
        part = out[images]
        products = _by_groups(every[images], len(window), groups) @ weights
        part[...] = products.transpose(1, 0, 2).reshape(part.shape)


def _by_groups(windows: Array, axes: int, groups: int) -> Array:
    """Return [N, *grid, *window, C] as [groups, windows, elements of a window in a group]."""
    *places, channels = windows.shape
    grouped = windows.reshape(*places, groups, channels // groups)
    rows, inner = math.prod(places[: axes + 1]), math.prod(places[axes + 1 :])
    moved: Array = np.moveaxis(grouped, -2, 0)
    return moved.reshape(groups, rows, inner * (channels // groups))


def _weights(kernel: Array, groups: int) -> Array:
    """Return [*window, I / groups, O] as [groups, elements of a window in a group, O / groups]."""
    *_, outputs = kernel.shape
    matrix = kernel.reshape(math.prod(kernel.shape[:-1]), groups, outputs // groups)
    return matrix.transpose(1, 0, 2)


def _conv_transpose2d(x: TensorType, kernel: TensorType, shape: Shape, **how: Any) -> TensorType:
    images = x.with_shape(shape)
    expected = convolution(images, kernel, **how)
    if x is not expected:
        raise ShapeError(f"expected x with the type {expected} (convolution of {images}), got {x}")
    return images


def _conv_transpose2d_flops(x: TensorType, kernel: TensorType, **_: Any) -> int:
    return 2 * math.prod(kernel.shape[:-1]) * x.size


@op(infer=_conv_transpose2d, flops=_conv_transpose2d_flops, precision="half", images=1)
def conv_transpose2d(
    out: Array,
    x: Array,
    kernel: Array,
    *,
    shape: tuple[int, ...],
    stride: tuple[int, ...] = (1, 1),
    padding: Sides,
    dilation: tuple[int, ...] = (1, 1),
    groups: int = 1,
) -> None:
    """The transpose of `conv2d` as a linear map, which is the gradient for images.

    [N,OH,OW,O] with [KH,KW,I/groups,O] -> images of `shape`, [N,H,W,I]. Each element of x
    multiplies the kernel, and the product is added to the element's window. Elements in the padding
    are dropped.
    """
    window = kernel.shape[:-2]
    out[...] = 0
    padded = _pad(out, padding)
    rows = _by_groups(x, len(window), groups)
    weights = _weights(kernel, groups).reshape(
        groups, math.prod(window), kernel.shape[-2], rows.shape[2]
    )
    every = _window_elements(padded, x.shape[1:-1], window, stride, dilation)
    for i, (_, elements) in enumerate(every):
        products = rows @ weights[:, i].transpose(0, 2, 1)
        elements += products.transpose(1, 0, 2).reshape(elements.shape)
    if padded is not out:
        out[...] = padded[_inside(out.shape, padding)]


def _conv2d_kernel_vjp(
    g: TensorType, x: TensorType, window: Shape, groups: int, **how: Any
) -> TensorType:
    if groups < 1 or x.ndim < 1 or x.shape[-1] % groups:
        raise ArgumentError(f"expected groups that divide the channels of {x}, got {groups}")
    outputs = g.shape[-1] if g.ndim else 0
    kernel = g.with_shape((*window, x.shape[-1] // groups, outputs))
    require_cotangent(g, convolution(x, kernel, groups=groups, **how))
    return kernel


def _conv2d_kernel_vjp_flops(g: TensorType, x: TensorType, window: Shape, **how: Any) -> int:
    each: int = x.shape[-1] // how["groups"]
    return 2 * math.prod(window) * each * g.size


@op(infer=_conv2d_kernel_vjp, flops=_conv2d_kernel_vjp_flops, public=False)
def conv2d_kernel_vjp(
    out: Array,
    g: Array,
    x: Array,
    *,
    window: tuple[int, ...],
    stride: tuple[int, ...] = (1, 1),
    padding: Sides,
    dilation: tuple[int, ...] = (1, 1),
    groups: int = 1,
) -> None:
    """The gradient of `conv2d` for its kernel: [N,OH,OW,O], [N,H,W,I] -> [KH,KW,I/groups,O].

    It is the sum over all windows of the window times the element of g.
    """
    every = _windows(_pad(x, padding), window, stride, dilation)
    columns = _by_groups(every, len(window), groups)
    products = columns.transpose(0, 2, 1) @ _by_groups(g, len(window), groups)
    out[...] = products.transpose(1, 0, 2).reshape(out.shape)


def images_per_block(places: int) -> int:
    """Return the number of images, with that many windows each, in a block of a kernel's gradient.

    The gradient is summed block by block. Images with more windows have several blocks each.
    """
    return 1 << max(0, (WINDOWS_PER_BLOCK // max(1, places)).bit_length() - 1)


def sums_in_blocks(kernel: TensorType, groups: int) -> bool:
    """Return whether the gradient of a kernel is a matrix product, which is summed in blocks.

    For parts of a batch that consist of whole blocks, `add_conv2d_kernel_vjp` then computes the
    bits of `conv2d_kernel_vjp` for the batch.
    """
    *_, inputs, outputs = kernel.shape
    return groups == 1 and (inputs != outputs or inputs > NARROW[-1])


def _add_conv2d_kernel_vjp(
    total: TensorType, g: TensorType, x: TensorType, **how: Any
) -> TensorType:
    kernel = _conv2d_kernel_vjp(g, x, **how)
    if not sums_in_blocks(kernel, how["groups"]):
        raise ArgumentError(f"expected a gradient that is summed in blocks, got {kernel}")
    if total is not kernel:
        raise ShapeError(f"expected a total with the type {kernel}, got {total}")
    return kernel


@internal(
    infer=_add_conv2d_kernel_vjp,
    flops=lambda total, g, x, window, **how: _conv2d_kernel_vjp_flops(g, x, window, **how),
    in_place=1,
)
def add_conv2d_kernel_vjp(
    out: Array,
    total: Array,
    g: Array,
    x: Array,
    *,
    window: tuple[int, ...],
    stride: tuple[int, ...] = (1, 1),
    padding: Sides,
    dilation: tuple[int, ...] = (1, 1),
    groups: int = 1,
) -> None:
    """`conv2d_kernel_vjp` for the next images of a batch, added to the total of the images before.

    The blocks of windows are added to the total in order.
    """
    how: dict[str, Any] = {"padding": padding, "dilation": dilation, "groups": groups}
    gradient = np.empty_like(out)
    conv2d_kernel_vjp.kernel(gradient, g, x, window=window, stride=stride, **how)
    np.add(total, gradient, out)


# --- pooling -------------------------------------------------------------------------


def _pool(x: TensorType, window: Pair, **how: Any) -> TensorType:
    require("float", x)
    grid = _grid(x.shape, window, **how)
    return x.with_shape((x.shape[0], *grid, x.shape[-1]))


@op(infer=_pool, images=1)
def max_pool2d(
    out: Array, x: Array, *, window: Pair, stride: Pair, padding: Padding, dilation: Pair = (1, 1)
) -> None:
    """The largest element of each window per channel. Padding counts as -inf."""
    out[...] = -np.inf
    padded = _pad(x, padding, -np.inf)
    for _, elements in _window_elements(padded, out.shape[1:3], window, stride, dilation):
        np.maximum(out, elements, out=out)


def _max_pool2d_vjp(g: TensorType, x: TensorType, **attributes: Any) -> TensorType:
    require_one_float_dtype(g, x)
    require_cotangent(g, _pool(x, **attributes))
    return x


@op(infer=_max_pool2d_vjp, public=False, images=2)
def max_pool2d_vjp(
    out: Array,
    g: Array,
    x: Array,
    *,
    window: Pair,
    stride: Pair,
    padding: Padding,
    dilation: Pair = (1, 1),
) -> None:
    """The gradient of `max_pool2d`: g of each window, split equally among the largest elements.

    Padding gets no part, even if all elements are -inf.
    """
    framed, frame = _pad(x, padding, -np.inf), _pad(np.zeros_like(x), padding)
    every = _windows(framed, window, stride, dilation)
    inside = _windows(_pad(np.ones_like(x, np.bool_), padding), window, stride, dilation)
    chosen = (every == every.max((3, 4), keepdims=True)) & inside
    shares = g / np.add.reduce(chosen, (3, 4), g.dtype)
    for (i, j), elements in _window_elements(frame, g.shape[1:3], window, stride, dilation):
        elements += chosen[:, :, :, i, j] * shares
    out[...] = frame[_inside(out.shape, padding)]


@op(infer=_pool, images=1)
def avg_pool2d(
    out: Array, x: Array, *, window: Pair, stride: Pair, padding: Padding, dilation: Pair = (1, 1)
) -> None:
    """The mean of each window per channel. Padding counts as zeros and in the divisor."""
    out[...] = 0
    for _, elements in _window_elements(_pad(x, padding), out.shape[1:3], window, stride, dilation):
        out += elements
    out /= math.prod(window)
