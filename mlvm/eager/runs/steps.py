"""The operands and results of a program, in terms of a run.

Operands of a program are cells (state) or external inputs: arguments and Python numbers. The table
that describes them is stored once per program; a step then contains only the digests of values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np

from mlvm.core.errors import brief
from mlvm.core.ops.half import shown
from mlvm.core.program.encoding import damaged
from mlvm.core.types import Array, TensorType
from mlvm.eager.runs.log import fits
from mlvm.eager.tensor.copying import ResultLeaf
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tree import flatten, within_containers

CELL: Final = "cell"
INPUT: Final = "input"

Operand: TypeAlias = tuple[str, int]
"""`CELL` or `INPUT`, and a number."""


_FORM: Final = {
    **dict.fromkeys(("function", "content", "file", "reason"), str),
    **{key: [str] for key in ("names", "types", "results")},
    **{key: [(int, int)] for key in ("writes", "updated")},
    **{key: [(str, int)] for key in ("operands", "state")},
    "returns": [int],
    **dict.fromkeys(("sources", "optimizers"), dict),
}
"""Form of a table in the log."""


@dataclass(frozen=True)
class StepTable:
    """Operands and results of a program, in the form that a recording stores.

    Attributes:
        function: the name of the function.
        content: the digest of the program without names and lines; "" if there is no program.
        file: the digest of the program's file, "" if there is none.
        operands: the operands of the program, in the program's numbering.
        names, types: the names and types of the external inputs.
        results: the names of the tensors and Python numbers that a call returns.
        returns: the number of the program's result for each of them; -1 for a value that the
            program does not compute: a Python number, or a tensor in a container of the arguments.
        writes: the cells that a call updates, each with the number of the program's result.
        updated: the external inputs that a call updates in place, each with the number of the
            result.
        sources: the digest of each source file that the program names, by path.
        state: the cells that a call reads or updates, each with the path of the tensor in this
            call, in the order of the paths.
        optimizers: the kind and the hyperparameters of each optimizer, by path.
        reason: why the program could not be recorded, "" with a program.
    """

    function: str
    content: str = ""
    file: str = ""
    operands: Sequence[Operand] = ()
    names: Sequence[str] = ()
    types: Sequence[str] = ()
    results: Sequence[str] = ()
    returns: Sequence[int] = ()
    writes: Sequence[tuple[int, int]] = ()
    updated: Sequence[tuple[int, int]] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    optimizers: Mapping[str, str] = field(default_factory=dict)
    state: Sequence[tuple[str, int]] = ()
    reason: str = ""

    def cells(self) -> list[int]:
        """Return the cells that a call reads or updates, in the order of the paths."""
        return [number for _, number in self.state]

    def used_cells(self) -> set[int]:
        """Return the cells among operands and writes."""
        return {*[n for kind, n in self.operands if kind == CELL], *[n for n, _ in self.writes]}

    @property
    def ntensors(self) -> int:
        """The number of external inputs that are tensors; Python numbers follow them."""
        return sum(not self.is_number(i) for i in range(len(self.names)))

    def is_number(self, i: int) -> bool:
        """Return whether an external input is a Python number."""
        return self.names[i].startswith("number ")

    def digested(self, count: int) -> list[str]:
        """Return the names of a step's digests: results, then updated inputs.

        In recordings of earlier releases, Python numbers have no names; the names are then numbers.
        """
        names = [x if x.strip("0123456789") else f"result {x}".rstrip() for x in self.results]
        names += [f"{self.names[i]} after the step" for i, _ in self.updated]
        return names if len(names) == count else [f"result {i}" for i in range(count)]

    def to_value(self) -> dict[str, Any]:
        """Return the table as a value of the log."""
        return {
            name: value if isinstance(value, (str, Mapping)) else [*value]
            for name, value in vars(self).items()
        }

    @staticmethod
    def of_value(value: Any) -> StepTable:
        """Return the table from a value of the log.

        Raises `EncodingError` if the value is invalid."""
        named = {"optimizers": {}, "state": [], **value} if isinstance(value, dict) else value
        is_table = fits(named, _FORM) and named.keys() == _FORM.keys()
        if is_table:
            table = StepTable(**named)
            inputs = [n for kind, n in table.operands if kind == INPUT]
            numbers = [n for _, n in table.operands] + [n for pair in table.writes for n in pair]
            is_table = (
                all(kind in (CELL, INPUT) for kind, _ in table.operands)
                and all(n >= 0 for n in [*numbers, *[n for pair in table.updated for n in pair]])
                and all(n < len(table.names) for n in [*inputs, *[n for n, _ in table.updated]])
                and all(n >= -1 for n in table.returns)
                and fits([*table.sources.items(), *table.optimizers.items()], [(str, str)])
                and len(table.names) == len(table.types)
                and len(table.results) == len(table.returns)
            )
        if not is_table:
            raise damaged(f"expected a program table, got {brief(value)}")
        return table


def leaves_of(tree: Any) -> list[tuple[str, Tensor | float]]:
    """Return the tensors and Python numbers of a result with paths, in order."""
    plain = int, float
    leaves, _ = flatten(tree, ends=within_containers((Tensor, ResultLeaf, *plain)))
    return [(path, x) for path, x in leaves if not isinstance(x, plain) or type(x) in plain]


def number_array(x: float) -> Array:
    """Return a Python number as an array, so that it has a digest."""
    if type(x) is int and not -(2**63) <= x < 2**63:
        x = float(x) if abs(x) < 2**1000 else float("inf")
    return np.asarray(x)


def scalar_of(x: Array) -> float | None:
    """Return the value of a real scalar; None for any other array."""
    if x.ndim or TensorType.of(x).dtype.kind not in ("float", "signed", "unsigned"):
        return None
    return float(shown(x).item())
