"""The public function of every op, derived from the op table.

`add(x, y, *, out=None)` takes tensors (Python scalars beside a tensor), attributes by keyword,
and optionally the tensor to write into. `primitives.pyi` shows editors the same signatures;
`python -m mlvm.eager.primitives` prints it, and a test compares.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlvm.core.errors import DTypeError, ShapeError
from mlvm.core.op import OPS, Op
from mlvm.eager.tensor import OneOp, Tensor, apply, apply_into, one_op, operand


def _derive(op: Op) -> Callable[..., Tensor]:
    bare = None if op.attributes else one_op(op.name)

    def function(*operands: Any, out: Tensor | None = None, **attributes: Any) -> Tensor:
        for name in op.inputs[len(operands) :]:
            if name in attributes:
                operands += (attributes.pop(name),)
        call = bare if bare is not None and not attributes else one_op(op.name, **attributes)
        for x in operands:
            if x.__class__ is not Tensor:
                operands = _tensors(call, operands)
                break
        return apply(call, *operands) if out is None else apply_into(out, call, *operands)

    function.__name__ = function.__qualname__ = op.name
    function.__doc__ = f"{op.signature}\n\n{op.doc}"
    return function


def _tensors(call: OneOp, operands: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """The operands with Python scalars made tensors of the first tensor's dtype."""
    beside = next((x for x in operands if isinstance(x, Tensor)), None)
    if beside is None:
        given = ", ".join(type(x).__name__ for x in operands)
        error = DTypeError if operands else ShapeError
        raise error(f"takes tensors, at least one, not ({given})").at(call.op.name, ())
    return tuple(operand(x, beside, call) for x in operands)


__all__ = sorted(OPS)
globals().update({name: _derive(op) for name, op in OPS.items()})
