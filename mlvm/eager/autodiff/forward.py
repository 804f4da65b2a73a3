"""Forward mode: the tangent of a call's result, by the forward rules in `rules`.

Without a forward rule the reverse rule is transposed. It maps a cotangent g to J^T g, for the
Jacobian J. This is linear in g, so the gradient with respect to g, in the direction of a tangent t,
is J t.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

from mlvm.arena.context import context
from mlvm.core.types import TensorType
from mlvm.eager.autodiff.grad import vjp
from mlvm.eager.autodiff.joint import or_zeros
from mlvm.eager.autodiff.op_rules import OpRules, Rules, dense, in_its_place
from mlvm.eager.autodiff.rules import VJPS
from mlvm.eager.autodiff.tape import (
    RESULT,
    Conditional,
    added,
    bound_rule,
    operand_name,
    refusal,
    template_of,
)
from mlvm.eager.functions.creation import full
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.apply import OneOp, Tensors, apply
from mlvm.eager.tensor.tensor import Tensor


def tangent_of(call: OneOp, operands: Tensors, tangents: Sequence[Any], out: Tensor) -> Any:
    """Return the tangent of a call's float or complex result `out`.

    At least one of the operands' `tangents` is a tensor; None represents zeros. Raises
    `GradientError` for an op without a rule.

    A `Conditional` tangent contributes only where it is present, because a rule may turn zeros into
    nan. The cost is linear in the number of conditions.
    """
    types = tuple([x.type for x in operands])
    row = VJPS[call.op.name]
    moving = [i for i, t in enumerate(tangents) if t is not None]
    for i in moving:
        name = operand_name(call.op, i)
        if name not in row:
            refusal(call, types, name)(out)
    conditions = {id(t.present): t.present for t in tangents if isinstance(t, Conditional)}
    is_linear = isinstance(row, OpRules) and row.is_linear
    if is_linear and (len(moving) == len(row) or not call.op.elementwise):
        named = [operand_name(call.op, i) in row for i in range(len(operands))]
        moved = [
            or_zeros(t, x.type) if n else x
            for t, x, n in zip(tangents, operands, named, strict=True)
        ]
        total = fitting(apply(call, *moved), out.type)
        if not conditions or any(isinstance(t, Tensor) for t in tangents):
            return total
        with context(tape=None):
            return Conditional(total, reduce(op.logical_or, conditions.values()))
    if conditions:
        return reduce(added, [_alone(call, operands, tangents, out, i) for i in moving])
    rules = row.forward if isinstance(row, OpRules) else row if call.op.elementwise else None
    if rules is None:
        return _transposed(call, operands, tangents, out)
    parts = [_part(call, operands, i, tangents[i], out, rules) for i in moving]
    return fitting(reduce(added, parts), out.type)


def _alone(call: OneOp, operands: Tensors, tangents: Sequence[Any], out: Tensor, i: int) -> Any:
    """Return the contribution of operand i to the tangent, `Conditional` if the tangent of i is."""
    t, alone = tangents[i], [None] * len(tangents)
    alone[i] = t.x if isinstance(t, Conditional) else t
    part = tangent_of(call, operands, alone, out)
    return Conditional(part, t.present) if isinstance(t, Conditional) else part


def _part(
    call: OneOp, operands: Tensors, position: int, t: Tensor, out: Tensor, rules: Rules
) -> Any:
    """Return the tangent of the result for the tangent `t` of only one operand."""
    rule = rules[operand_name(call.op, position)]
    if rule is in_its_place:
        return apply(call, *operands[:position], t, *operands[position + 1 :])
    bare, values = bound_rule(call, tuple([x.type for x in operands]), rule, position)
    return bare(t, *[out if i == RESULT else operands[i] for i in values])


def fitting(t: Tensor, type: TensorType) -> Tensor:
    """Convert a tangent to a type: cast it, and repeat it along axes that broadcasting added."""
    if t.dtype is not type.dtype:
        t = op.astype(t, dtype=type.dtype)
    return t if t.type is type else op.broadcast_to(t, shape=type.shape)


def _transposed(
    call: OneOp, operands: Tensors, tangents: Sequence[Tensor | None], out: Tensor
) -> Tensor:
    """Return the tangent by transposing the reverse rules."""
    types = tuple([x.type for x in operands])
    bound = template_of(call, types, out.type, tuple([t is not None for t in tangents]))
    saved = [out if i == RESULT else operands[i] for i in bound.saves]

    def back(g: Tensor) -> list[Tensor]:
        return [dense(rule(g, *[saved[i] for i in needs])) for _, rule, needs, _ in bound.vjps]

    return transposed(back, out.type, [t for t in tangents if t is not None])


def transposed(
    back: Callable[[Tensor], list[Tensor]], type: TensorType, tangents: list[Tensor]
) -> Tensor:
    """Return J t, given the function `back` from a cotangent g of that type to J^T g."""
    [result] = vjp(back, full(type.shape, 0, dtype=type.dtype))[1](tangents)
    return result  # type: ignore[no-any-return]
