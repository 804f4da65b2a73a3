"""Twins: what prepares a native kernel for an op's call.

    @twin("layer_norm")
    def layer_norm(types: Types, attributes: Attributes) -> Plan | None:
        ...

It takes the types of the result and the operands, and the op's attributes as `Op.bind` returns
them, and returns a plan of what is to be done; None leaves these types to the reference kernel. A
plan's units and its work may depend on nothing else, so that its bits depend on nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

from mlvm.core.op import OPS, Attributes
from mlvm.core.types import TensorType

if TYPE_CHECKING:
    from mlvm.machines.native._native import Plan

Types: TypeAlias = Sequence[TensorType]
Twin: TypeAlias = "Callable[[Types, Attributes], Plan | None]"

TWINS: Final[dict[str, Twin]] = {}
"""By op name."""


def twin(*names: str) -> Callable[[Twin], Twin]:
    """Make the decorated function the twin of these ops."""

    def declare(prepare: Twin) -> Twin:
        for name in names:
            assert name in OPS, name
            TWINS[name] = prepare
        return prepare

    return declare
