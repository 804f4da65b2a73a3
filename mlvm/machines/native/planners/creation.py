"""Tensors made from a description: `kernels/creation.c`, and boxes of a value."""

from __future__ import annotations

from typing import Final

from mlvm.core.op import Attributes
from mlvm.machines.native._native import Plan
from mlvm.machines.native.boxes import Boxes, strides
from mlvm.machines.native.elements import pattern
from mlvm.machines.native.planner import Types, twin

_UNIT: Final = 4096


@twin("full")
def full(types: Types, attributes: Attributes) -> Plan:
    out = types[0]
    boxes = Boxes(out.dtype.itemsize)
    boxes.copy(out.shape, strides(out.shape, out.dtype.itemsize), (0,) * out.ndim)
    return boxes.plan()


@twin("zeros")
def zeros(types: Types, attributes: Attributes) -> Plan:
    out = types[0]
    boxes = Boxes(out.dtype.itemsize, operands=0)
    boxes.fill(out.shape, strides(out.shape, out.dtype.itemsize), 0)
    return boxes.plan()


@twin("arange")
def arange(types: Types, attributes: Attributes) -> Plan:
    out, start, step = types[0], attributes["start"], attributes["step"]
    units, work = -(-out.size // _UNIT), out.size * 0.5
    if out.dtype.is_float:
        floats = [float(start), float(step)]
        return Plan(f"range_{out.dtype}", 1, [out.size], floats, units=units, work=work)
    ints = [out.size, _wrapped(start), _wrapped(step)]
    return Plan(f"range_{out.dtype.itemsize}", 1, ints, units=units, work=work)


def _wrapped(value: int) -> int:
    """The i64 with the same last 64 bits."""
    return (value + 2**63) % 2**64 - 2**63


@twin("linspace")
def linspace(types: Types, attributes: Attributes) -> Plan | None:
    out, start, stop = types[0], attributes["start"], attributes["stop"]
    last = attributes["endpoint"] and out.size > 1
    step = (stop - start) / max(1, out.size - attributes["endpoint"])
    if step == 0 or step - step != 0:  # it underflows, or overflows: numpy has its way with these
        return None
    return Plan(
        f"linspace_{out.dtype}",
        1,
        [out.size, int(last)],
        [start, step, stop],
        units=-(-out.size // _UNIT),
        work=out.size * 0.5,
    )


@twin("eye")
def eye(types: Types, attributes: Attributes) -> Plan:
    out = types[0]
    (rows, columns), size = out.shape, out.dtype.itemsize
    high = max(1, 16384 // max(1, columns * size))
    diagonal = max(-rows, min(attributes["k"], columns))
    ints = [columns * size, size, rows, high, diagonal, pattern(1, out.dtype)]
    return Plan("eye", 1, ints, units=-(-rows // high), work=rows * 3 + out.nbytes / 20)
