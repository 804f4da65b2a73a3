"""The windows of sequences, images and volumes, channels last: how they are padded, where the
places of one lie, and images cut into them and put together again.

Windows with a dilation are those of images without: the places that are `dilation` apart make an
image of their own, a lattice, in which they are neighbours (Yu and Koltun, arXiv 1511.07122).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, TypeAlias, cast

from mlvm.core.errors import AttributeRefused, ShapeError, brief
from mlvm.core.ops.neural import Padding, Pair, resolve_padding
from mlvm.core.types import Shape
from mlvm.eager.functions.arguments import integers, pair, type_of
from mlvm.eager.functions.halves import in_f32
from mlvm.eager.functions.shapes import permute_dims, reshape
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.wrapper import public

Window: TypeAlias = int | Pair
"""A window or a stride: (vertical, horizontal), or one int for both."""

Volume: TypeAlias = int | tuple[int, int, int]
"""A window or a stride: (depth, height, width), or one int for all."""

Sides: TypeAlias = str | tuple[Pair, ...]
"""A padding: "SAME", "VALID" or (before, after) for each axis; for images, these are ((top,
bottom), (left, right))."""

KINDS: Final = {
    1: ("a sequence", "(batch, length, channels)", "(before, after)"),
    2: ("an image", "(batch, height, width, channels)", "((top, bottom), (left, right))"),
    3: (
        "a volume",
        "(batch, depth, height, width, channels)",
        "((front, back), (top, bottom), (left, right))",
    ),
}
"""What has so many axes: its name, its axes, and how its padding is written."""


def require_places(x: Tensor, axes: int) -> Shape:
    """How many places x has on each of so many axes. Raises `ShapeError` for another x."""
    kind, names, _ = KINDS[axes]
    if type_of(x).ndim != axes + 2:
        raise ShapeError(f"{kind} has {axes + 2} axes {names}, not {x.ndim}")
    return x.shape[1:-1]


def span_of(window: Shape, dilation: Shape) -> Shape:
    """How many places lie between the ends of a window, these too."""
    return tuple((n - 1) * apart + 1 for n, apart in zip(window, dilation, strict=True))


def sides_of(padding: Any, span: Shape, stride: Shape, size: Shape) -> tuple[Pair, ...]:
    """The padding, (before, after) for each axis. Raises `AttributeRefused`."""
    if isinstance(padding, str):
        return resolve_padding(padding, span, stride, size)
    axes = len(size)
    sides = [padding] if axes == 1 else padding
    several = isinstance(sides, (tuple, list)) and len(sides) == axes
    if not several or any(not isinstance(x, (tuple, list)) or len(x) != 2 for x in sides):
        raise AttributeRefused(
            f'padding is "SAME", "VALID" or {KINDS[axes][2]}, not {brief(padding)}'
        )
    return tuple(pair(integers(side, "padding"), "padding", least=0) for side in sides)


def grid_of(size: Shape, span: Shape, stride: Shape, sides: tuple[Pair, ...]) -> Shape:
    """How many windows there are on each axis. Raises `ShapeError` if one is too large."""
    padded = tuple(n + sum(side) for n, side in zip(size, sides, strict=True))
    if any(length > n for n, length in zip(padded, span, strict=True)):
        shown, given = (" x ".join(map(str, each)) for each in (span, padded))
        raise ShapeError(f"a window spans {shown}, more than the padded input, which is {given}")
    return tuple(
        (n - length) // step + 1 for n, length, step in zip(padded, span, stride, strict=True)
    )


# --- images cut into windows -------------------------------------------------------------


@public
def unfold(
    x: Tensor,
    window: Window,
    *,
    stride: Window = 1,
    padding: Sides = "VALID",
    dilation: Window = 1,
) -> Tensor:
    """All windows of NHWC images, which `fold` puts together again: f[N, H, W, C] -> f[N, OH, OW,
    KH, KW, C]. `stride`, `padding` and `dilation` are those of `conv2d`.

    PyTorch's columns are [N, C KH KW, OH OW]: the same elements in another order.

    Raises `ShapeError` for other axes, and for a window larger than the padded image,
    `AttributeRefused` for a window, stride, padding or dilation that makes no sense, `DTypeError`
    for other than floats.

        >>> ml.unfold(ml.ones((1, 4, 4, 3)), 2).type
        f32[1,3,3,2,2,3]
    """
    size = require_places(x, 2)
    shape, steps, apart = pair(window, "window"), pair(stride, "stride"), pair(dilation, "dilation")
    span = span_of(shape, apart)
    sides = sides_of(padding, span, steps, size)
    if apart == (1, 1):
        return op.patches(x, window=shape, stride=steps, padding=cast(Padding, sides))
    return by_lattices(
        x,
        lambda x: op.patches(x, window=shape, stride=(1, 1), padding=((0, 0), (0, 0))),
        (span, steps, sides, apart),
    )


@public
@in_f32
def fold(
    windows: Tensor,
    size: Window,
    *,
    stride: Window = 1,
    padding: Sides = "VALID",
    dilation: Window = 1,
) -> Tensor:
    """Images of the `size` (H, W), the sums of windows that are put where `unfold` finds them:
    f[N, OH, OW, KH, KW, C] -> f[N, H, W, C]. It is the transpose of `unfold` as a linear map.

    Raises `ShapeError` for windows that are not as many as `unfold` makes of such images,
    `AttributeRefused` for a size, stride, padding or dilation that makes no sense, `DTypeError`
    for other than floats.

        >>> x = ml.reshape(ml.arange(9.0), (1, 3, 3, 1))
        >>> ml.fold(ml.unfold(x, 2), 3)[0, :, :, 0]
        Tensor([[ 0.,  2.,  2.],
                [ 6., 16., 10.],
                [ 6., 14.,  8.]], f32[3,3])
    """
    if type_of(windows).ndim != 6:
        raise ShapeError(f"windows have 6 axes (N, OH, OW, KH, KW, C), not {windows.ndim}")
    window, places = windows.shape[3:5], windows.shape[1:3]
    lengths, steps, apart = pair(size, "size"), pair(stride, "stride"), pair(dilation, "dilation")
    span = span_of(window, apart)
    sides = sides_of(padding, span, steps, lengths)
    grid = grid_of(lengths, span, steps, sides)
    if places != grid:
        raise ShapeError(f"images of {lengths} have {grid} windows, not {places}")
    return folded(windows, lengths, steps, apart, sides)


def folded(
    windows: Tensor, size: Shape, stride: Shape, dilation: Shape, sides: tuple[Pair, ...]
) -> Tensor:
    """`fold`, without a look at its arguments."""
    (top, _), (left, _) = sides
    shape = (windows.shape[0], *size, windows.shape[5])
    if dilation == (1, 1):
        steps, padding = cast(Pair, stride), cast(Padding, sides)
        return op.unpatches(windows, shape=shape, stride=steps, padding=padding)
    window, places = windows.shape[3:5], windows.shape[1:3]
    x = reshape(windows, (*windows.shape[:3], math.prod(windows.shape[3:])))
    x = _spaced(x, stride)
    needed = [
        max((n - 1) * step + 1, first + length - (k - 1) * apart)
        for n, step, first, length, k, apart in zip(
            places, stride, (top, left), size, window, dilation, strict=True
        )
    ]
    x = in_lattices(_lengthened(x, needed, dilation), dilation)
    small = tuple(n + k - 1 for n, k in zip(x.shape[1:3], window, strict=True))
    x = op.unpatches(
        reshape(x, (*x.shape[:3], *windows.shape[3:])),
        shape=(x.shape[0], *small, shape[3]),
        stride=(1, 1),
        padding=((0, 0), (0, 0)),
    )
    return _cut(from_lattices(x, dilation), (top, left), size, (1, 1))


# --- lattices -----------------------------------------------------------------------------


def by_lattices(
    x: Tensor,
    function: Callable[[Tensor], Tensor],
    windows: tuple[Shape, Shape, tuple[Pair, ...], Shape],
) -> Tensor:
    """What a function of all windows of images makes of windows with a dilation: f[N, H, W, C] ->
    [N, OH, OW, ...]. The function is given lattices, and neither stride nor padding; `windows` are
    their span, stride, padding and dilation."""
    span, stride, sides, dilation = windows
    grid = grid_of(x.shape[1:3], span, stride, sides)
    x = op.pad(x, widths=((0, 0), *sides, (0, 0)))
    y = function(in_lattices(_lengthened(x, x.shape[1:3], dilation), dilation))
    return _cut(from_lattices(y, dilation), (0, 0), grid, stride)


def in_lattices(x: Tensor, dilation: Shape) -> Tensor:
    """The lattices of images, [N, H, W, ...] -> [dh dw N, H / dh, W / dw, ...]."""
    (n, height, width, *rest), (down, right) = x.shape, dilation
    channels = math.prod(rest)
    apart = reshape(x, (n, height // down, down, width // right, right, channels))
    apart = permute_dims(apart, (2, 4, 0, 1, 3, 5))
    return reshape(apart, (down * right * n, height // down, width // right, *rest))


def from_lattices(x: Tensor, dilation: Shape) -> Tensor:
    """The images of such lattices: the inverse of `in_lattices`."""
    (many, height, width, *rest), (down, right) = x.shape, dilation
    n = many // (down * right)
    apart = reshape(x, (down, right, n, height, width, math.prod(rest)))
    apart = permute_dims(apart, (2, 3, 0, 4, 1, 5))
    return reshape(apart, (n, height * down, width * right, *rest))


def _lengthened(x: Tensor, least: Shape | list[int], multiple: Shape) -> Tensor:
    """x with zeros behind, to the least height and width that are multiples."""
    more = [
        (0, -(-max(n, length) // part) * part - length)
        for n, length, part in zip(least, x.shape[1:3], multiple, strict=True)
    ]
    return op.pad(x, widths=((0, 0), *more, (0, 0)))


def _spaced(x: Tensor, stride: Shape) -> Tensor:
    """x with stride - 1 zeros behind each place: [N, H, W, C] -> [N, H sh, W sw, C]."""
    (n, height, width, channels), (down, right) = x.shape, stride
    apart = reshape(x, (n, height, 1, width, 1, channels))
    apart = op.pad(apart, widths=((0, 0), (0, 0), (0, down - 1), (0, 0), (0, right - 1), (0, 0)))
    return reshape(apart, (n, height * down, width * right, channels))


def _cut(x: Tensor, start: Shape, grid: Shape, stride: Shape) -> Tensor:
    """So many places of x from `start` on, each `stride` behind the one before."""
    rest = x.shape[3:]
    zeros, ones = (0,) * len(rest), (1,) * len(rest)
    return op.slice(
        x, start=(0, *start, *zeros), length=(x.shape[0], *grid, *rest), step=(1, *stride, *ones)
    )
