"""Rows of the table `rules`: the reverse and forward rules of an op."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

from mlvm.core.op import OPS
from mlvm.core.types import TensorType
from mlvm.eager.tensor.apply import one_op
from mlvm.eager.tensor.templates import call_into
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.update import launch_into


class Sparse(NamedTuple):
    """Cotangent that is zero except for some elements.

    alone: function of an op, with its attributes, that computes it from the operands.
    added: function of an op that adds it to a tensor, which precedes the operands.
    """

    type: TensorType
    operands: tuple[Tensor, ...]
    alone: partial[Tensor]
    added: partial[Tensor]

    def add_to(self, total: Tensor) -> None:
        """Add it to a tensor in place; no other value may need the tensor's bytes."""
        name, attributes, operands = self.added.func.__name__, self.added.keywords, self.operands
        if not call_into(total, OPS[name], (total, *operands), attributes):
            launch_into(total, one_op(name, **attributes), total, *operands)


def dense(part: Tensor | Sparse) -> Tensor:
    """Return a cotangent as a tensor."""
    return part.alone(*part.operands) if isinstance(part, Sparse) else part


Rule: TypeAlias = Callable[..., "Tensor | Sparse"]
Rules: TypeAlias = Mapping[str, Rule]

NON_DIFFERENTIABLE: Final[Rules] = MappingProxyType({})
"""Row of an op without a gradient: the result is never a float, or is piecewise constant.

A gradient of zero would be correct almost everywhere, but never intended."""


class OpRules(dict[str, Rule]):
    """Rules of an op.

    The mapping contains the reverse rules by operand. forward: the forward rules by operand.
    is_linear: True for an op that is linear in these operands jointly, so the tangent of the result
    is the op applied to the operands' tangents. An elementwise op needs the tangents of all these
    operands; with some of them, the sum of the forward rules needs fewer operations.
    """

    def __init__(self, rules: Rules, forward: Rules, *, is_linear: bool = False) -> None:
        super().__init__(rules)
        self.forward, self.is_linear = forward, is_linear


def forward(rules: Rules, /, **others: Rule) -> OpRules:
    """Return a row of reverse rules and forward rules; forward rules get the tangent `t` first."""
    return OpRules(rules, others)


def linear(**rules: Rule) -> OpRules:
    """Return the row of an op that is linear in these operands jointly."""
    return OpRules(rules, rules, is_linear=True)


def in_its_place(t: Tensor) -> Tensor:
    """Represents a forward rule that applies the op itself, with the tangent as the operand."""
    raise NotImplementedError  # the engine handles this marker


def multilinear(**rules: Rule) -> OpRules:
    """Return the row of an op that is linear in each of these operands, such as a product."""
    return OpRules(rules, dict.fromkeys(rules, in_its_place))


def symmetric(**rules: Rule) -> OpRules:
    """Return the row of an op with symmetric Jacobians: forward rules are equal to reverse rules.

    This is the default for elementwise ops, which have diagonal Jacobians.
    """
    return OpRules(rules, rules)
