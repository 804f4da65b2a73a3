"""Which products take their weights in panels (`mlvm.core.ops.packed`), packed ahead of the step.

A product that copies its second operand as panels does so each time that it runs. Of some rows,
this is much of its time; of fewer it reads the operand where it lies, line by line from far places.
A product with panels that are there has the bits of either.
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
"""The fewest and the most rows of a product whose weights are packed ahead."""
SMALL: Final = 1 << 16
"""So many elements of a weight stay in a cache: it is packed as fast as it is read."""


class Packed(NamedTuple):
    """A product that takes panels: of which op, with which attributes. Its weights have so many
    `columns`."""

    op: str
    attributes: dict[str, Any]
    columns: int
    transposed: bool = False


def packing(call: Call) -> tuple[Call, Call] | None:
    """What packs the weights of a product, and the product of these; None where that gains nothing,
    and for other calls."""
    rule = _RULES.get(call.op.name) if call.op is not None else None
    if rule is None:
        return None
    x, y = call.ins
    found = rule(x.type, y.type, call.attributes)
    if found is None or y.type.size <= SMALL or found.columns < PANEL // 2:
        return None
    if not ROWS[0] <= call.outs[0].type.size // found.columns <= ROWS[1]:
        return None
    pack, op = OPS["pack_panels"], OPS[found.op]
    how = {"transpose_y": found.transposed}
    type = pack.infer([y.type], how)
    assert type is not None
    panels = Use(Value(type.nbytes), type)
    attributes = op.bind({**found.attributes, "columns": found.columns})
    return (
        Call(pack.name + OUT, pack, how, [panels], [y], call.line),
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
    how = {name: attributes[name] for name in ("stride", "padding", "dilation")}
    if {*window, *how["stride"]} == {1} and not any(map(any, how["padding"])):
        return Packed("packed_matmul", {}, columns)
    return Packed("packed_conv2d", {"window": tuple(window), **how}, columns)


_RULES: Final[dict[str, Callable[[TensorType, TensorType, Attributes], Packed | None]]] = {
    "matmul": _matmul,
    "conv2d": _conv2d,
}
