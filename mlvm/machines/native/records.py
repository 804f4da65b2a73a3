"""Stack of residuals in C (`machine/records.c`): programs push and read without Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mlvm.core.op import NO_ATTRIBUTES
from mlvm.core.types import Array
from mlvm.machines.native._native import PUSH_RECORD, READ_RECORD, Records
from mlvm.machines.native.host import CFunction
from mlvm.machines.native.types import DTYPES


class NativeStack:
    """Stack in C with the interface of `mlvm.machines.residuals.Stack`. `push` and `read` are the
    names of its host functions."""

    def __init__(self, more: Callable[[int], Array], push: str, read: str) -> None:
        self._records = records = Records(more)
        self.functions = [
            CFunction(push, PUSH_RECORD, None, 0, None, records, slice(1, None)),
            CFunction(read, READ_RECORD, None, 0, None, records, slice(-1, None)),
        ]

    @property
    def nbytes(self) -> int:
        return self._records.nbytes

    def begin(self) -> Any:
        return self._records.begin()

    def end(self, mark: Any) -> None:
        self._records.end(mark)

    def push(self, arrays: Sequence[Array]) -> int:
        number = np.zeros((), np.int64)
        self.functions[0].call([number, *arrays], NO_ATTRIBUTES)
        return int(number)

    def record(self, number: int) -> list[Array] | None:
        parts = self._records.parts(number)
        if parts is None:
            return None
        arrays = [np.empty(shape, DTYPES[code].numpy) for code, shape in parts]
        self.functions[1].call([*arrays, np.asarray(number, np.int64)], NO_ATTRIBUTES)
        return arrays
