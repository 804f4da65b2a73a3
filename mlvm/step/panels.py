"""Matrix products with packed weights: panels (`mlvm.core.ops.packed`) computed before the step.

Without them a matrix product packs the second operand each time. For few rows, packing needs much
of the time. For very few rows, the kernel reads the operand in place with large strides. A product
with packed weights has the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, NamedTuple

from mlvm.core.machine.callee import OUT
from mlvm.core.op import OPS, Attributes
from mlvm.core.ops.packed import PANEL
from mlvm.core.types import TensorType, bf16, f32
from mlvm.step.flow import Call, Use, Value

ROWS: Final = (2, 256)
"""Minimum and maximum number of rows of a product with weights that are packed in advance."""
SMALL: Final = 1 << 16
"""Elements of a weight that fits into a cache: packing it is as fast as reading it."""


class Packed(NamedTuple):
    """Matrix product with panels.

    op, attributes: the op that packs the weights.
    columns: columns of the weights.
    transposed: whether the weights are transposed.
    """

    op: str
    attributes: dict[str, Any]
    columns: int
    transposed: bool = False


def packing(call: Call) -> tuple[Call, Call] | None:
    """Return the call that packs the weights of a product, and the product that uses them.

    Return None if packing gains no time, and for other calls.
    """
    rule = _RULES.get(call.op.name) if call.op is not None else None
    if rule is None:
        return None
    x, y = call.ins
    packed = rule(x.type, y.type, call.attributes)
    if packed is None or y.type.size <= SMALL or packed.columns < PANEL // 2:
        return None
    if not ROWS[0] <= call.outs[0].type.size // packed.columns <= ROWS[1]:
        return None
    pack, op = OPS["pack_panels"], OPS[packed.op]
    pack_attributes = {"transpose_y": packed.transposed}
    type = pack.infer([y.type], pack_attributes)
    assert type is not None
    panels = Use(Value(type.nbytes), type)
    attributes = op.bind({**packed.attributes, "columns": packed.columns})
    return (
        Call(pack.name + OUT, pack, pack_attributes, [panels], [y], call.line),
        replace(call, name=op.name + OUT, op=op, attributes=attributes, ins=[x, panels]),
    )


def _matmul(x: TensorType, y: TensorType, attributes: Attributes) -> Packed | None:
    if x.ndim < 2 or y.ndim != 2 or x.dtype is not y.dtype or x.dtype not in (f32, bf16):
        return None
    transpose_x, transpose_y = attributes["transpose_x"], attributes["transpose_y"]
    columns = y.shape[0 if transpose_y else 1]
    return Packed("packed_matmul", {"transpose_x": transpose_x}, columns, transpose_y)


def _conv2d(x: TensorType, kernel: TensorType, attributes: Attributes) -> Packed | None:
    if attributes["groups"] > 1 or x.dtype is not f32:
        return None
    *window, _, columns = kernel.shape
    geometry = {name: attributes[name] for name in ("stride", "padding", "dilation")}
    if {*window, *geometry["stride"]} == {1} and not any(map(any, geometry["padding"])):
        return Packed("packed_matmul", {}, columns)
    return Packed("packed_conv2d", {"window": tuple(window), **geometry}, columns)


_RULES: Final[dict[str, Callable[[TensorType, TensorType, Attributes], Packed | None]]] = {
    "matmul": _matmul,
    "conv2d": _conv2d,
}
