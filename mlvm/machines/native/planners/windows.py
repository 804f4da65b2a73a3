"""Sliding windows over images: `kernels/windows.c`; without padding, patches are a box."""

from __future__ import annotations

from mlvm.core.op import Attributes
from mlvm.core.types import TensorType
from mlvm.machines.native._native import Plan
from mlvm.machines.native.boxes import Boxes, strides
from mlvm.machines.native.planner import Types, twin

_NO_PADDING = ((0, 0), (0, 0))


@twin("patches")
def patches(types: Types, attributes: Attributes) -> Plan:
    out, x = types
    if attributes["padding"] != _NO_PADDING:
        value = [float(attributes["pad_value"])]
        return _plan(f"patches_{out.dtype}", out, x, attributes, out.shape[3:5], value)
    down, across = attributes["stride"]
    n, row, column, channel = strides(x.shape, x.dtype.itemsize)
    boxes = Boxes(x.dtype.itemsize)
    boxes.copy(
        out.shape,
        strides(out.shape, x.dtype.itemsize),
        (n, row * down, column * across, row, column, channel),
    )
    return boxes.plan()


@twin("unpatches")
def unpatches(types: Types, attributes: Attributes) -> Plan:
    out, x = types
    return _plan(f"unpatches_{out.dtype}", x, out, attributes, x.shape[3:5], rows=1)


@twin("max_pool2d")
def max_pool2d(types: Types, attributes: Attributes) -> Plan:
    out, x = types
    return _plan(f"max_pool2d_{out.dtype}", out, x, attributes, attributes["window"])


@twin("avg_pool2d")
def avg_pool2d(types: Types, attributes: Attributes) -> Plan:
    out, x = types
    return _plan(f"avg_pool2d_{out.dtype}", out, x, attributes, attributes["window"])


def _plan(
    kernel: str,
    windows: TensorType,
    image: TensorType,
    attributes: Attributes,
    window: tuple[int, ...],
    floats: list[float] | None = None,
    rows: int | None = None,
) -> Plan:
    """A unit is a row of windows, or of the image if it is what is written."""
    (top, _), (left, _) = attributes["padding"]
    n, height, width, channels = image.shape
    down, across = windows.shape[1:3]
    size = n * down * across * window[0] * window[1] * channels
    return Plan(
        kernel,
        2,
        [height, width, channels, down, across, *window, *attributes["stride"], top, left],
        floats or [],
        units=n * (height if rows else down),
        work=size * 0.5 + n * down * across * window[0] * 5,
    )
