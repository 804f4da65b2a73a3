"""Forward mode: the tangent of a call's result, by the forward rules in `rules`.

Without a forward rule the reverse rule is transposed. It maps a cotangent g to J^T g, for the
Jacobian J. That is linear in g, so its gradient for g, in the direction of a tangent t, is J t.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

from mlvm.core.types import TensorType
from mlvm.eager.autodiff.grad import vjp
from mlvm.eager.autodiff.rows import Row, Rules, Sparse, in_its_place
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
from mlvm.eager.functions.sums import sum_to
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.apply import OneOp, Tensors, apply
from mlvm.eager.tensor.context import taped
from mlvm.eager.tensor.tensor import Tensor


def tangent_of(
    call: OneOp, operands: Tensors, tangents: Sequence[Tensor | None], out: Tensor
) -> Tensor:
    """Return the tangent of a call's float or complex result `out`. At least one of the operands'
    `tangents` is a tensor; None stands for zeros. Raises `GradientError` for an op without a
    rule."""
    types = tuple([x.type for x in operands])
    row = VJPS[call.op.name]
    moving = [i for i, t in enumerate(tangents) if t is not None]
    for i in moving:
        name = operand_name(call.op, i)
        if name not in row:
            refusal(call, types, name)(out)
    if isinstance(row, Row) and row.is_linear:
        named = [operand_name(call.op, i) in row for i in range(len(operands))]
        moved = [
            _or_zeros(t, x) if n else x for t, x, n in zip(tangents, operands, named, strict=True)
        ]
        return fitting(apply(call, *moved), out.type)
    rules = _rules_of(call)
    if rules is None:
        return _transposed(call, operands, tangents, out)
    parts = [
        _part(call, operands, i, t, out, rules) for i, t in enumerate(tangents) if t is not None
    ]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return fitting(total, out.type)


def conditional_tangent(
    call: OneOp, operands: Tensors, tangents: Sequence[Any], out: Tensor
) -> Tensor | Conditional | None:
    """Return the tangent of a call as `tangent_of` does, where some tangents are `Conditional`.

    The work is linear in their number. None if that needs a rule which the op does not have: parts
    of the tangent that are added in the dtype of the result.
    """
    row = VJPS[call.op.name]
    if isinstance(row, Row) and row.is_linear:
        values = [Conditional.cleaned(t) if isinstance(t, Conditional) else t for t in tangents]
        total = tangent_of(call, operands, values, out)
        if any(isinstance(t, Tensor) for t in tangents):
            return total
        conditions = {id(t.present): t.present for t in tangents if t is not None}
        with taped(None):
            return Conditional(total, reduce(op.logical_or, conditions.values()))
    pairs = [(i, t) for i, t in enumerate(tangents) if t is not None]
    if _rules_of(call) is None or any(operands[i].dtype is not out.dtype for i, _ in pairs):
        return None
    parts = []
    for i, t in pairs:
        value = t.x if isinstance(t, Conditional) else t
        alone = [value if i == k else None for k in range(len(operands))]
        part = tangent_of(call, operands, alone, out)
        parts.append(Conditional(part, t.present) if isinstance(t, Conditional) else part)
    return reduce(added, parts)


def _rules_of(call: OneOp) -> Rules | None:
    """Return the forward rules by operand; None for an op whose reverse rules are transposed."""
    row = VJPS[call.op.name]
    return row.forward if isinstance(row, Row) else row if call.op.elementwise else None


def _part(
    call: OneOp, operands: Tensors, position: int, t: Tensor, out: Tensor, rules: Rules
) -> Any:
    """Return the tangent of the result for the tangent `t` of one operand alone."""
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


def _or_zeros(t: Tensor | None, x: Tensor) -> Tensor:
    return full(x.shape, 0, dtype=x.dtype) if t is None else t


def _transposed(
    call: OneOp, operands: Tensors, tangents: Sequence[Tensor | None], out: Tensor
) -> Tensor:
    """Return the tangent by transposing the reverse rules."""
    types = tuple([x.type for x in operands])
    bound = template_of(call, types, out.type, tuple([t is not None for t in tangents]))
    saved = [out if i == RESULT else operands[i] for i in bound.saves]

    def back(g: Tensor) -> list[Tensor]:
        parts = []
        for type, rule, needs in bound.vjps:
            part = rule(g, *[saved[i] for i in needs])
            if isinstance(part, Sparse):
                part = apply(part.alone, *part.operands)
            parts.append(sum_to(part, type))
        return parts

    return transposed(back, out.type, [t for t in tangents if t is not None])


def transposed(
    back: Callable[[Tensor], list[Tensor]], type: TensorType, tangents: list[Tensor]
) -> Tensor:
    """Return J t for the function `back` from a cotangent g of that type to J^T g."""
    [result] = vjp(back, full(type.shape, 0, dtype=type.dtype))[1](tangents)
    return result  # type: ignore[no-any-return]
