"""Ops that Python runs as several kernels, as these kernels one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mlvm.core.machine.callee import WritesInto
from mlvm.core.op import Attributes
from mlvm.core.types import TensorType
from mlvm.machines.native._native import KernelCall


class Temporary(NamedTuple):
    """Memory that a step needs while it runs: bytes from an offset on."""

    type: TensorType
    at: int


def lowered(
    callee: WritesInto, types: Sequence[TensorType], numbers: Sequence[int], attributes: Attributes
) -> list[tuple[KernelCall, tuple[int | Temporary, ...]]] | None:
    """The calls, and of each its parameters; None if there are none."""
    return None
