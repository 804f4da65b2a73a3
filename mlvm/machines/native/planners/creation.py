"""Creation of tensors: `kernels/creation.c`, and boxes filled with a value."""

from __future__ import annotations

from mlvm.core.op import Attributes
from mlvm.machines.native._native import RANGE_UNIT, KernelCall
from mlvm.machines.native.boxes import Boxes, moved, strides
from mlvm.machines.native.elements import pattern, wrapped
from mlvm.machines.native.planner import Types, kernel_call, planner


@planner("full")
def full(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    return moved(types[0], (0,) * types[0].ndim)


@planner("zeros")
def zeros(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    out = types[0]
    boxes = Boxes(out.dtype.itemsize, operands=0)
    boxes.fill(out.shape, strides(out), 0)
    return boxes.call()


@planner("arange")
def arange(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    out, start, step = types[0], attributes["start"], attributes["step"]
    if out.dtype.is_float:
        return _range(f"range_{out.dtype.name}", out.size, (float(start), float(step)))
    kernel = f"range_{out.dtype.itemsize}"
    return _range(kernel, out.size, start=wrapped(start), step=wrapped(step))


@planner("linspace")
def linspace(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    out, start, stop = types[0], attributes["start"], attributes["stop"]
    last = attributes["endpoint"] and out.size > 1
    step = (stop - start) / max(1, out.size - attributes["endpoint"])
    if step == 0 or step - step != 0:  # it underflows or overflows: numpy handles these cases
        return None
    return _range(f"linspace_{out.dtype.name}", out.size, (start, step, stop), exact_end=last)


def _range(
    kernel: str, count: int, floats: tuple[float, ...] = (), **integers: int
) -> KernelCall | None:
    units = -(-count // RANGE_UNIT)
    return kernel_call(kernel, 1, units, count * 0.5, {"count": count, **integers}, floats)


@planner("eye")
def eye(op: str, types: Types, attributes: Attributes) -> KernelCall | None:
    out = types[0]
    (rows, columns), size = out.shape, out.dtype.itemsize
    high, width = max(1, 16384 // max(1, columns * size)), columns * size
    element = {"size": size, "one": pattern(1, out.dtype)}
    integers = {"row_bytes": width, "rows": rows, "high": high, **element}
    integers["diagonal"] = max(-rows, min(attributes["k"], columns))
    return kernel_call("eye", 1, -(-rows // high), rows * 3 + out.nbytes / 20, integers)
