"""The rows of the table `rules`: how derivatives go back through an op, and forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

from mlvm.eager.tensor.apply import OneOp
from mlvm.eager.tensor.tensor import Tensor


class Sparse(NamedTuple):
    """A cotangent that is zero but for some elements. `alone` makes it of the operands; `added`
    takes a tensor before them, and gives it with those elements added."""

    operands: tuple[Tensor, ...]
    alone: OneOp
    added: OneOp


Rule: TypeAlias = Callable[..., "Tensor | Sparse"]
Rules: TypeAlias = Mapping[str, Rule]

NON_DIFFERENTIABLE: Final[Rules] = MappingProxyType({})
"""The rules of an op without a gradient: its result is never a float, or is constant in pieces. A
gradient of zero would be right almost everywhere, and never what was meant."""


class Row(dict[str, Rule]):
    """The reverse rules of an op, and its `forward` ones, for the operands that have one. `linear`
    is an op that is linear in all of these together, so that its tangent is the op of theirs."""

    def __init__(self, rules: Rules, forward: Rules, *, is_linear: bool = False) -> None:
        super().__init__(rules)
        self.forward, self.is_linear = forward, is_linear


def forward(rules: Rules, /, **others: Rule) -> Row:
    """The rules back, and those forward, whose first parameter is the operand's tangent `t`."""
    return Row(rules, others)


def linear(**rules: Rule) -> Row:
    """Of an op that is linear in these operands together: the tangent is the op of the tangents."""
    return Row(rules, {}, is_linear=True)


def in_its_place(t: Tensor) -> Tensor:
    """The forward rule where an op is linear in one operand: the op, with the tangent there."""
    raise NotImplementedError  # the engine knows it


def multilinear(**rules: Rule) -> Row:
    """Of an op that is linear in each of these operands by itself, such as a product."""
    return Row(rules, dict.fromkeys(rules, in_its_place))


def symmetric(**rules: Rule) -> Row:
    """Of an op with symmetric Jacobians: a tangent goes forward as a cotangent goes back. That is
    how it is for an elementwise op, unless its row says otherwise: its Jacobians are diagonal."""
    return Row(rules, rules)
