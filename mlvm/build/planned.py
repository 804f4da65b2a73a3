"""Input of a build: a saved step, in types of this floor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mlvm.core.program.program import Program
from mlvm.core.types import Array, TensorType


class Tensor(NamedTuple):
    """Argument or result of a step: its role, its number or offset, and its type, as in
    `mlvm.step.flow.Location`."""

    role: str
    place: int
    type: TensorType


class Stay(NamedTuple):
    """Live range in the plan: `nbytes` bytes at offset `at`, from moment `start` to `end - 1`."""

    at: int
    nbytes: int
    start: int
    end: int


@dataclass(frozen=True)
class Planned:
    """Saved step.

    scratch: bytes of scratch memory.
    lines: of Python, by function and pc.
    moments: of calls, by their pc in `main`.
    """

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
