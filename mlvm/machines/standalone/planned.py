"""What is built: a saved step, in terms of this floor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mlvm.core.program.program import Program
from mlvm.core.types import Array, TensorType


class Tensor(NamedTuple):
    """An argument or result of a step: its role, the number or byte that it is at, and its type, as
    `mlvm.step.flow.Location` has them."""

    role: str
    place: int
    type: TensorType


class Stay(NamedTuple):
    """So many bytes of the plan, from byte `at` on, are in use from moment `start` to `end - 1`."""

    at: int
    nbytes: int
    start: int
    end: int


@dataclass(frozen=True)
class Planned:
    """A saved step, which has so many bytes of `scratch` memory. `moments` has those of calls by
    their pc in `main`."""

    program: Program
    arguments: Sequence[Tensor]
    results: Sequence[Tensor]
    inputs: Sequence[TensorType]
    outputs: Sequence[TensorType]
    states: Sequence[Array]
    scratch: int
    lines: Mapping[tuple[str, int], str]
    stays: Sequence[Stay]
    moments: Mapping[int, int]
