"""Resizing and resampling of images in channels-last layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import index
from typing import Any, Final, Literal, TypeAlias, get_args

import numpy as np

from mlvm.core.errors import ArgumentError, ShapeError, brief
from mlvm.core.ops.half import cast
from mlvm.core.rules import is_real, require
from mlvm.core.types import Array, DType, i64
from mlvm.eager.functions.arguments import Ints, each_of, integer, type_of
from mlvm.eager.functions.elements import astype, stop_gradient, where
from mlvm.eager.functions.halves import through_f32
from mlvm.eager.functions.pooling import adaptive_avg_pool
from mlvm.eager.functions.shapes import permute_dims, reshape, stack, unstack
from mlvm.eager.functions.sliding import require_places
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.constants import table
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.wrapper import public

Mode: TypeAlias = Literal[
    "nearest", "nearest-exact", "linear", "bilinear", "trilinear", "cubic", "bicubic", "area"
]

Outside: TypeAlias = Literal["zeros", "border", "reflection"]

_LINEAR: Final = ("linear", "bilinear", "trilinear")


@public
@through_f32
def interpolate(
    x: Tensor,
    size: Ints | None = None,
    *,
    scale: float | Sequence[float] | None = None,
    mode: Mode = "nearest",
    align_corners: bool = False,
) -> Tensor:
    """Resize sequences, images or volumes to a `size` or by a `scale`.

    Both are one number for all axes, or one number per axis. The function corresponds to PyTorch's
    function of that name, but expects channels last.

    For n positions in x and k in the result, position i of the result corresponds to (i + 1/2) n /
    k - 1/2 in x; with `align_corners` to i (n - 1) / (k - 1). With a `scale`, n / k is 1 / scale.
    The modes are:

    - "nearest": the element at the floor of i n / k. "nearest-exact": the nearest element.

    - "linear" (also "bilinear" and "trilinear"): the weighted mean of two neighbours per axis.

    - "cubic" ("bicubic"): four neighbours per axis (Keys, IEEE ASSP 29, 1981, with a = -3/4).

    - "area": the means of `adaptive_avg_pool`.

    x: f[N, ..., C] -> f[N, *size, C]. Raises `ShapeError` if x has fewer than three axes or an axis
    of length 0; `ArgumentError` unless exactly one of `size` and `scale` is given and valid, if the
    mode is unknown, or if the mode does not support `align_corners`; `DTypeError` if the dtype of x
    is not a float.

        >>> x = ml.reshape(ml.asarray([1.0, 2.0]), (1, 2, 1))
        >>> ml.interpolate(x, 4, mode="linear")[0, :, 0]
        Tensor([1.  , 1.25, 1.75, 2.  ], f32[4])

    Invalid calls:
        ml.interpolate(images)  # ArgumentError
    """
    require("float", type_of(x))
    if x.ndim < 3 or 0 in x.shape[1:-1]:
        raise ShapeError(f"expected x as [N, ..., C] with spatial axes between, got {x.type}")
    if mode not in get_args(Mode):
        raise ArgumentError(f"expected mode as one of {', '.join(get_args(Mode))}, got {mode!r}")
    if align_corners and mode in ("nearest", "nearest-exact", "area"):
        raise ArgumentError(f"align_corners: expected a linear or cubic mode, got {mode}")
    counts, ratios = _counts(x.shape[1:-1], size, scale)
    if mode == "area":
        return adaptive_avg_pool(x, counts)
    divisors: list[float | None] = [None] * len(counts)
    if scale is not None:
        divisors = np.broadcast_to(np.asarray(scale, np.float64), len(counts)).tolist()
    for axis, divisor in enumerate(divisors, 1):
        n, count, ratio = index(x.shape[axis]), index(counts[axis - 1]), ratios[axis - 1]
        if mode == "nearest":
            x = op.take(x, table(_floors, n, count, divisor), axis=axis)
            continue
        if mode == "nearest-exact":
            x = op.take(x, table(_nearest, n, count, ratio), axis=axis)
            continue
        places = n, count, ratio, mode, align_corners
        rows = reshape(x, (math.prod(x.shape[:axis]), n, math.prod(x.shape[axis + 1 :])))
        indices, weights = table(_tap_indices, *places), table(_tap_weights, *places, x.dtype)
        shape = (*x.shape[:axis], count, *x.shape[axis + 1 :])
        x = reshape(op.weighted_take(rows, indices, weights), shape)
    return x


def _floors(n: int, count: int, divisor: float | None) -> Array:
    """Return, for each index in the result, the index in x at or before it."""
    place = np.arange(count)
    places = place * n // count if divisor is None else place // divisor
    return np.minimum(places, n - 1).astype(np.int64)


def _nearest(n: int, count: int, ratio: float) -> Array:
    """Return, for each index in the result, the index of the nearest pixel in x."""
    places: Array = np.minimum((np.arange(count) + 0.5) * ratio, n - 1).astype(np.int64)
    return places


def _tap_indices(n: int, count: int, ratio: float, mode: Mode, align_corners: bool) -> Array:
    """Return the indices in x that contribute to each index in the result: [1, count, taps]."""
    taps = _taps_of(n, count, ratio, mode, align_corners)
    return np.stack([np.clip(each, 0, n - 1) for each, _ in taps], -1).astype(np.int64)[None]


def _tap_weights(
    n: int, count: int, ratio: float, mode: Mode, align_corners: bool, dtype: DType
) -> Array:
    """Return the weights of `_tap_indices`."""
    taps = _taps_of(n, count, ratio, mode, align_corners)
    return cast(np.stack([weight for _, weight in taps], -1)[None], dtype)


def _taps_of(
    n: int, count: int, ratio: float, mode: Mode, align_corners: bool
) -> list[tuple[Array, Array]]:
    place = np.arange(count)
    at = (place + 0.5) * ratio - 0.5
    if align_corners:
        at = place * ((n - 1) / max(count - 1, 1))
    if mode in _LINEAR:
        at = np.clip(at, 0, n - 1)
    first = np.floor(at)
    return _taps(first, at - first, mode)


def _counts(
    places: tuple[int, ...], size: Ints | None, scale: float | Sequence[float] | None
) -> tuple[tuple[int, ...], list[float]]:
    """Return the result length along each axis, and the step in x between result positions."""
    axes = len(places)
    if (size is None) == (scale is None):
        actual = "both" if scale is not None else "neither"
        raise ArgumentError(f"expected either size or scale, got {actual}")
    if size is not None:
        counts = each_of(size, axes, "size")
        return counts, [n / count for n, count in zip(places, counts, strict=True)]
    scales: list[Any] = list(scale) if isinstance(scale, (tuple, list)) else [scale] * axes
    if len(scales) != axes or not all(is_real(each) and each > 0 for each in scales):
        raise ArgumentError(f"expected scale as one number > 0, or {axes}, got {brief(scale)}")
    counts = tuple(math.floor(n * each) for n, each in zip(places, scales, strict=True))
    if min(counts) < 1:
        raise ArgumentError(
            f"scale {brief(scale)} of an image of size {list(places)} would give an empty result; "
            f"use a larger scale"
        )
    return counts, [1 / each for each in scales]


def _taps(first: Any, t: Any, mode: str) -> list[tuple[Any, Any]]:
    """Return the positions to interpolate at offset t after `first`, and the weights."""
    if mode in _LINEAR:
        return [(first, 1.0 - t), (first + 1.0, t)]
    weights = _far(t + 1.0), _near(t), _near(1.0 - t), _far(2.0 - t)
    return [(first + float(k), weight) for k, weight in enumerate(weights, -1)]


def _near(d: Any) -> Any:
    """Return the cubic weight of a neighbour at a distance of at most 1."""
    return (1.25 * d - 2.25) * d * d + 1.0


def _far(d: Any) -> Any:
    """Return the cubic weight of a neighbour at a distance from 1 to 2."""
    return ((-0.75 * d + 3.75) * d - 6.0) * d + 3.0


# --- sampling at arbitrary positions -------------------------------------------------------


@public
@through_f32
def grid_sample(
    x: Tensor,
    grid: Tensor,
    /,
    *,
    mode: Mode = "bilinear",
    padding: Outside = "zeros",
    align_corners: bool = False,
) -> Tensor:
    """Sample NHWC images at the positions given by a grid.

    Jaderberg et al., Spatial Transformer Networks, arXiv 1506.02025. The function corresponds to
    PyTorch's function of that name, but expects channels last.

    A position is (x, y): from -1 (left or upper edge) to 1 (right or lower edge). With
    `align_corners`, -1 and 1 are the centres of the outermost pixels. A position in a volume is (x,
    y, z). Between pixels, "bilinear" interpolates 4 pixels, "bicubic" 16, and "nearest" selects the
    nearest pixel. `padding` defines the pixels outside of the image: "zeros", the pixels at the
    "border", or a "reflection" of the image.

    Images: f[N, H, W, C], grid f[N, OH, OW, 2] -> f[N, OH, OW, C]. Volumes: f[N, D, H, W, C], grid
    f[N, OD, OH, OW, 3] -> f[N, OD, OH, OW, C]. Raises `ShapeError` if the shapes do not fit or an
    image has no pixels; `ArgumentError` if the mode or padding is unknown; `DTypeError` if the
    dtype of x is not a float.

        >>> x = ml.reshape(ml.arange(4.0), (1, 2, 2, 1))
        >>> ml.grid_sample(x, [[[[0.0, 0.0], [0.5, -0.5]]]])[0, 0, :, 0]
        Tensor([1.5, 1. ], f32[2])

    Invalid calls:
        ml.grid_sample(images, ml.ones((1, 2, 2, 2)), mode="most")  # ArgumentError
    """
    require("float", type_of(x), type_of(grid))
    axes = x.ndim - 2
    fits = axes in (2, 3) and grid.ndim == x.ndim and grid.shape[:: axes + 1] == (x.shape[0], axes)
    if not fits or 0 in x.shape[1:-1]:
        raise ShapeError(
            "expected x [N, H, W, C] and grid [N, OH, OW, 2], or x [N, D, H, W, C] and grid [N, "
            f"OD, OH, OW, 3], got {list(x.shape)} and {list(grid.shape)}"
        )
    if mode not in ("nearest", "bilinear", "bicubic"):
        raise ArgumentError(f"expected mode 'nearest', 'bilinear' or 'bicubic', got {mode!r}")
    if padding not in get_args(Outside):
        raise ArgumentError(f"expected padding as one of {get_args(Outside)}, got {padding!r}")
    n, *size, channels = x.shape

    def inside(at: Tensor, length: int) -> Tensor:
        """Map a position outside of the image to one inside, as `padding` prescribes."""
        if padding == "reflection":
            at = _reflected(at, length, align_corners)
        return at if padding == "zeros" else op.clip(at, 0.0, (length - 1) * 1.0)

    sides = []
    for place, length in zip(unstack(grid, axis=-1)[::-1], size, strict=True):
        if align_corners:
            at = (place + 1.0) * ((length - 1) / 2)
        else:
            at = ((place + 1.0) * (length * 1.0) - 1.0) / 2.0
        if mode != "bicubic":
            at = inside(at, length)
        first = op.floor(stop_gradient(at))
        taps = [(op.round(at), None)] if mode == "nearest" else _taps(first, at - first, mode)
        if mode == "bicubic":
            taps = [(inside(each, length), weight) for each, weight in taps]
        sides.append([_tap(each, weight, length) for each, weight in taps])
    indices, weights = map(list, zip(*sides[0], strict=True))
    for side, length in zip(sides[1:], size[1:], strict=True):
        indices = [index * length + own for index in indices for own, _ in side]
        weights = [weight * own for weight in weights for _, own in side]
    shape = (n, math.prod(grid.shape[1:-1]), len(indices))
    pixels = reshape(x, (n, math.prod(size), channels))
    places, shares = (reshape(stack(each, axis=-1), shape) for each in (indices, weights))
    return reshape(op.weighted_take(pixels, places, shares), (*grid.shape[:-1], channels))


def _tap(place: Tensor, weight: Tensor | None, n: int) -> tuple[Tensor, Tensor]:
    """Return an index in 0 .. n - 1 and the weight, which is 0 for a position outside."""
    last = (n - 1) * 1.0  # a dynamic size would become a constant in float(n)
    inside = op.logical_and(op.greater_equal(place, 0.0), op.less_equal(place, last))
    full = op.astype(inside, dtype=place.dtype)
    index = astype(op.clip(place, 0.0, last), i64)
    return index, full if weight is None else where(inside, weight, 0.0)


def _reflected(at: Tensor, n: int, align_corners: bool) -> Tensor:
    """Reflect a position outside of the image at the edges."""
    low, span = (0.0, (n - 1) * 1.0) if align_corners else (-0.5, n * 1.0)
    if span == 0.0:
        return at * 0.0
    away = op.remainder(at - low, 2.0 * span)
    return op.minimum(away, 2.0 * span - away) + low


# --- channels to positions ------------------------------------------------------------------


@public
def pixel_shuffle(x: Tensor, factor: int, /) -> Tensor:
    """Rearrange channels to pixels: f[N, H, W, C r^2] -> f[N, H r, W r, C] for a factor r.

    Channel c r^2 + i r + j moves to row i and column j of an r by r block, as in PyTorch (Shi et
    al., arXiv 1609.05158).

    x: [N, H, W, C r^2], any dtype. Raises `ShapeError` if x does not have 4 axes or the number of
    channels is not a multiple of r^2; `ArgumentError` if the factor is below 1.

        >>> ml.pixel_shuffle(ml.reshape(ml.arange(4), (1, 1, 1, 4)), 2)[0, :, :, 0]
        Tensor([[0, 1],
                [2, 3]], i64[2,2])

    Invalid calls:
        ml.pixel_shuffle(images, 0)  # ArgumentError
    """
    r = _factor(x, factor)
    n, height, width, channels = x.shape
    if channels % (r * r):
        raise ShapeError(f"expected a multiple of {r * r} channels, got {channels}")
    blocks = reshape(x, (n, height, width, channels // (r * r), r, r))
    shape = (n, height * r, width * r, channels // (r * r))
    return reshape(permute_dims(blocks, (0, 1, 4, 2, 5, 3)), shape)


@public
def pixel_unshuffle(x: Tensor, factor: int, /) -> Tensor:
    """Rearrange pixels to channels, the inverse of `pixel_shuffle`.

    x: [N, H r, W r, C] -> [N, H, W, C r^2] for a factor r, any dtype. Raises `ShapeError` if x does
    not have 4 axes, or the height or width is not a multiple of r; `ArgumentError` if the factor is
    below 1.

        >>> ml.pixel_unshuffle(ml.reshape(ml.arange(4), (1, 2, 2, 1)), 2)[0, 0, 0]
        Tensor([0, 1, 2, 3], i64[4])

    Invalid calls:
        ml.pixel_unshuffle(images, 0)  # ArgumentError
    """
    r = _factor(x, factor)
    n, height, width, channels = x.shape
    if height % r or width % r:
        raise ShapeError(f"expected height and width as multiples of {r}, got {height} x {width}")
    blocks = reshape(x, (n, height // r, r, width // r, r, channels))
    shape = (n, height // r, width // r, channels * r * r)
    return reshape(permute_dims(blocks, (0, 1, 3, 5, 2, 4)), shape)


def _factor(x: Tensor, factor: int) -> int:
    r = integer(factor, "factor")
    if r < 1:
        raise ArgumentError(f"expected factor as an int >= 1, got {r}")
    require_places(x, 2)
    return r
