"""Sliding windows over images: `kernels/windows.c`; without padding, patches are a box."""

from __future__ import annotations

from typing import Final

from mlvm.core.op import Attributes
from mlvm.core.types import Shape, TensorType
from mlvm.machines.native._native import KernelCall
from mlvm.machines.native.boxes import moved, strides
from mlvm.machines.native.planner import Types, kernel_call, planner

_NO_PADDING: Final = ((0, 0), (0, 0))
_BLOCK: Final = 64
_GEOMETRY: Final = (
    *("height", "width", "channels", "down", "across", "tall", "wide"),
    *("stride_y", "stride_x", "apart_y", "apart_x", "top", "left"),
)


def geometry(image: Shape, grid: Shape, window: Shape, attributes: Attributes) -> dict[str, int]:
    """Return the integers of windows over images.

    These are the sizes of an image, the grid and a window, and the positions of windows.
    """
    front = [before for before, _ in attributes["padding"]]
    strides = (*attributes["stride"], *attributes["dilation"])
    return dict(zip(_GEOMETRY, (*image[1:], *grid, *window, *strides, *front), strict=True))


"""Channels of an image per unit, limited by the buffers of the kernel."""


@planner("patches")
def patches(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    out, x = types
    if attributes["padding"] != _NO_PADDING:
        value = (float(attributes["pad_value"]),)
        return _call(f"patches_{out.dtype.name}", out, x, attributes, out.shape[3:5], value)
    (down, across), (apart_y, apart_x) = attributes["stride"], attributes["dilation"]
    n, row, column, channel = strides(x)
    return moved(out, (n, row * down, column * across, row * apart_y, column * apart_x, channel))


@planner("unpatches")
def unpatches(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    out, x = types
    return _call(f"unpatches_{out.dtype.name}", x, out, attributes, x.shape[3:5], by_rows=True)


@planner("max_pool2d", "avg_pool2d")
def pool(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    out, x = types
    return _call(f"{op}_{out.dtype.name}", out, x, attributes, attributes["window"])


@planner("max_pool2d_vjp")
def max_pool_vjp(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    _, g, x = types
    return _call(f"{op}_{x.dtype.name}", g, x, attributes, attributes["window"], by_blocks=True)


def _call(
    kernel: str,
    windows: TensorType,
    image: TensorType,
    attributes: Attributes,
    window: tuple[int, ...],
    floats: tuple[float, ...] = (),
    by_rows: bool = False,
    by_blocks: bool = False,
) -> KernelCall | None:
    """Plan a call over windows.

    A unit is a row of windows (a row of the image if the kernel writes it), or some channels.
    """
    (n, height, _, channels), (down, across), (tall, wide) = image.shape, windows.shape[1:3], window
    integers = {**geometry(image.shape, (down, across), window, attributes), "block": _BLOCK}
    units, count = n * (height if by_rows else down), n * down * across * tall
    if by_blocks:
        units, count = n * -(-channels // _BLOCK), 3 * count
    work = count * (wide * channels * 0.5 + 5)
    return kernel_call(kernel, 2 + by_blocks, units, work, integers, floats)
