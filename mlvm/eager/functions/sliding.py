"""Windows of sequences, images and volumes, channels last: padding, `unfold` and `fold`."""

from __future__ import annotations

from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from mlvm.core.errors import ArgumentError, ShapeError, brief
from mlvm.core.ops.windows import Pair, resolve_padding, span_of
from mlvm.core.types import Shape
from mlvm.eager.functions.arguments import Ints, each_of, integers, pair, type_of
from mlvm.eager.functions.halves import through_f32
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.wrapper import public

Window: TypeAlias = int | Pair
"""A window or a stride: (vertical, horizontal), or one int for both."""

Volume: TypeAlias = int | tuple[int, int, int]
"""A window or a stride: (depth, height, width), or one int for all."""

Sides: TypeAlias = str | int | tuple[int | Pair, ...]
"""Padding: "SAME", "VALID" or (before, after) for each axis; for images ((top, bottom), (left,
right)). As in PyTorch, a single number applies to both sides, for all axes or for one axis."""

KINDS: Final = {
    1: ("a sequence", "(batch, length, channels)", "(before, after)"),
    2: ("an image", "(batch, height, width, channels)", "((top, bottom), (left, right))"),
    3: (
        "a volume",
        "(batch, depth, height, width, channels)",
        "((front, back), (top, bottom), (left, right))",
    ),
}
"""For each number of axes: the name of the input, the axis names, and the form of the padding."""


def require_places(x: Tensor, axes: int) -> Shape:
    """Return the length of x along each of `axes` spatial axes.

    Raises `ShapeError` if x does not have that number of axes."""
    kind, names, _ = KINDS[axes]
    if type_of(x).ndim != axes + 2:
        raise ShapeError(f"expected {kind} of {axes + 2} axes {names}, got {x.ndim}")
    return x.shape[1:-1]


class Geometry(NamedTuple):
    """Positions of windows along each axis, as attributes of an op."""

    stride: Shape
    padding: tuple[Pair, ...]
    dilation: Shape

    def of_rows(self) -> Geometry:
        """Return the geometry of sequences as images with one row."""
        return Geometry((1, *self.stride), ((0, 0), *self.padding), (1, *self.dilation))


def geometry_of(
    size: Shape, window: Shape, stride: Ints, padding: object, dilation: Ints
) -> tuple[Geometry, Shape]:
    """Return the geometry of windows in an input of that size, and the span of a window.

    Raises `ArgumentError` if an argument is invalid."""
    axes = len(size)
    steps, dilations, span = each_of(stride, axes, "stride"), (1,) * axes, window
    if type(dilation) is not int or dilation != 1:
        dilations = each_of(dilation, axes, "dilation")
        span = span_of(window, dilations)
    return Geometry(steps, sides_of(padding, span, steps, size), dilations), span


def sides_of(padding: Any, span: Shape, stride: Shape, size: Shape) -> tuple[Pair, ...]:
    """Return the padding, (before, after) for each axis.

    Raises `ArgumentError` if it is invalid."""
    if isinstance(padding, str):
        return resolve_padding(padding.upper(), span, stride, size)
    return numbers_of(padding, len(size))


def numbers_of(padding: Any, axes: int) -> tuple[Pair, ...]:
    """Return a padding of numbers as (before, after) for each axis.

    As in PyTorch, a single number applies to both sides of all axes, and one number per axis
    applies to both sides of that axis. A pair within a sequence is (before, after). Raises
    `ArgumentError`."""
    if isinstance(padding, (int, np.integer)):
        padding = (padding,) * axes
    elif axes == 1 and isinstance(padding, (tuple, list)) and len(padding) == 2:
        padding = (padding,)
    if isinstance(padding, (tuple, list)) and len(padding) == axes:
        sides: list[Any] = [
            (side, side) if isinstance(side, (int, np.integer)) else side for side in padding
        ]
        if all(isinstance(side, (tuple, list)) and len(side) == 2 for side in sides):
            return tuple(pair(integers(side, "padding"), "padding", least=0) for side in sides)
    raise ArgumentError(
        f'expected padding as "SAME", "VALID", a number or {KINDS[axes][2]}, got {brief(padding)}'
    )


def grid_of(size: Shape, span: Shape, stride: Shape, sides: tuple[Pair, ...]) -> Shape:
    """Return the number of windows along each axis.

    Raises `ShapeError` if a window is too large."""
    padded = tuple(n + sum(side) for n, side in zip(size, sides, strict=True))
    if any(length > n for n, length in zip(padded, span, strict=True)):
        shown, available = (" x ".join(map(str, each)) for each in (span, padded))
        raise ShapeError(
            f"expected a window within the padded input, {available}, got {shown}; use more padding"
        )
    return tuple(
        (n - length) // step + 1 for n, length, step in zip(padded, span, stride, strict=True)
    )


# --- images split into windows -----------------------------------------------------------


@public
def unfold(
    x: Tensor, window: Window, *, stride: Window = 1, padding: Sides = "VALID", dilation: Window = 1
) -> Tensor:
    """Return all windows of NHWC images: f[N, H, W, C] -> f[N, OH, OW, KH, KW, C].

    `fold` adds the windows up again. `stride`, `padding` and `dilation` are the same as for
    `conv2d`.

    PyTorch's columns are [N, C KH KW, OH OW]: the same elements in a different order.

    Raises `ShapeError` if x does not have 4 axes, or the window is larger than the padded image;
    `ArgumentError` if the window, stride, padding or dilation is invalid; `DTypeError` if x is not
    of floats.

        >>> ml.unfold(ml.ones((1, 4, 4, 3)), 2).type
        f32[1,3,3,2,2,3]

    Invalid calls:
        ml.unfold(images, 0)  # ArgumentError
    """
    size, shape = require_places(x, 2), pair(window, "window")
    geometry, _ = geometry_of(size, shape, stride, padding, dilation)
    return op.patches(x, window=shape, **geometry._asdict())


@public
@through_f32
def fold(
    windows: Tensor,
    size: Window,
    *,
    stride: Window = 1,
    padding: Sides = "VALID",
    dilation: Window = 1,
) -> Tensor:
    """Add up windows at the window positions in images: f[N, OH, OW, KH, KW, C] -> f[N, H, W, C].

    `size` is (H, W). The windows have the layout of `unfold`; as a linear map, `fold` is the
    transpose of `unfold`.

    Raises `ShapeError` unless `unfold` returns this number of windows for such images;
    `ArgumentError` if the size, stride, padding or dilation is invalid; `DTypeError` if x is not of
    floats.

        >>> x = ml.reshape(ml.arange(9.0), (1, 3, 3, 1))
        >>> ml.fold(ml.unfold(x, 2), 3)[0, :, :, 0]
        Tensor([[ 0.,  2.,  2.],
                [ 6., 16., 10.],
                [ 6., 14.,  8.]], f32[3,3])

    Invalid calls:
        ml.fold(ml.ones((1, 2, 2, 2, 2, 1)), 0)  # ArgumentError
    """
    if type_of(windows).ndim != 6:
        raise ShapeError(f"expected windows of 6 axes (N, OH, OW, KH, KW, C), got {windows.ndim}")
    window, places = windows.shape[3:5], windows.shape[1:3]
    lengths = pair(size, "size")
    geometry, span = geometry_of(lengths, window, stride, padding, dilation)
    grid = grid_of(lengths, span, geometry.stride, geometry.padding)
    if places != grid:
        raise ShapeError(f"expected {grid} windows for images of {lengths}, got {places}")
    shape = (windows.shape[0], *lengths, windows.shape[5])
    return op.unpatches(windows, shape=shape, **geometry._asdict())
