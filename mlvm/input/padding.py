"""Padding of samples: values by column, and lengths of batches."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from mlvm.core.errors import PipelineError, brief
from mlvm.core.rules import is_real
from mlvm.core.types import Array

Pad: TypeAlias = float | Mapping[str | int, float]
"""Value for all columns of samples with an axis, or values by name or position of a column."""

PadTo: TypeAlias = Literal["longest", "powers of two"] | int | Sequence[int]
"""Lengths of batches."""

_OPEN: Final = ("longest", "powers of two")


class Padding:
    """Padding of the first axis of samples.

    values: value of every column, or values by name or position.
    lengths: the allowed lengths in ascending order; empty if any length is allowed.
    powers: True if lengths are rounded up to powers of two.
    """

    def __init__(self, values: Pad, to: PadTo) -> None:
        several = values.values() if isinstance(values, Mapping) else [values]
        if not all(isinstance(value, bool) or is_real(value) for value in several):
            raise PipelineError(
                f"pad: expected a number, or numbers by column, got {brief(values)}"
            )
        self.values = dict(values) if isinstance(values, Mapping) else values
        self.powers = to == "powers of two"
        self.lengths: tuple[int, ...] = ()
        if not isinstance(to, str) or to not in _OPEN:
            with suppress(TypeError):
                bounds = [operator.index(to)] if not isinstance(to, (tuple, list)) else to  # type: ignore[arg-type]
                self.lengths = tuple(sorted(map(operator.index, bounds)))
            if not self.lengths or self.lengths[0] < 1:
                raise PipelineError(
                    f"pad_to: expected 'longest', 'powers of two', or lengths >= 1, got {brief(to)}"
                )

    def __str__(self) -> str:
        to = "powers of two" if self.powers else "the longest"
        return f"{brief(self.values)} to {', '.join(map(str, self.lengths)) or to}"

    def rounded(self, longest: int) -> int:
        """Return the length of a batch whose longest sample has that length. Raises `PipelineError`
        if it exceeds all lengths."""
        if self.powers:
            return 1 << max(longest - 1, 0).bit_length()
        if not self.lengths:
            return longest
        for length in self.lengths:
            if longest <= length:
                return length
        raise PipelineError(
            f"a sample has length {longest}, but the largest length of pad_to is "
            f"{self.lengths[-1]}; "
            f"pass a larger length, or truncate the samples"
        )

    def value_of(self, position: int, name: str | None) -> float | None:
        """Return the value that pads a column, None if the column is not padded."""
        if not isinstance(self.values, dict):
            return self.values
        value = self.values.get(position)
        return value if name is None or value is not None else self.values.get(name)

    def require_columns(self, names: Sequence[str | None]) -> None:
        """Raise `PipelineError` if a value is for a column that does not exist."""
        columns = {*range(len(names)), *names}
        keys = self.values if isinstance(self.values, dict) else ()
        unknown = [key for key in keys if key not in columns]
        if unknown:
            named = ", ".join(repr(name) for name in names if name is not None)
            raise PipelineError(
                f"pad: unknown column {brief(unknown)}; the columns are "
                f"{named or f'0 .. {len(names) - 1}'}"
            )

    def padded(
        self, column: Array | list[Array], position: int, name: str | None, length: int | None
    ) -> Array:
        """Return a column of a batch as one array, padded to `length` or to the longest sample.

        column: an array [B, ...], or B arrays that differ in the first axis
        """
        value = self.value_of(position, name)
        if value is None or min(x.ndim for x in column) == 0:
            if isinstance(column, np.ndarray):
                return column
            shapes = list(dict.fromkeys(x.shape for x in column))
            which = repr(name) if name is not None else f"{position}"
            raise PipelineError(
                f"samples differ: in column {which} they have shapes {brief(shapes)}; "
                f"pad={{{which}: 0}} pads them"
            )
        rests = list(dict.fromkeys(x.shape[1:] for x in column))
        if len(rests) > 1:
            raise PipelineError(
                f"expected samples with equal shapes after the first axis, got {brief(rests)}"
            )
        longest = longest_of(column)
        if length is None or longest > length:
            length = self.rounded(longest)
        dtype = np.result_type(*{x.dtype for x in column})
        if not _fits(value, dtype):
            raise PipelineError(f"pad: expected a value that {dtype} can hold, got {value}")
        shape = (len(column), length, *rests[0])
        try:
            batch = np.full(shape, value, dtype)
        except (ValueError, MemoryError):
            raise PipelineError(
                f"pad_to: a batch of shape {brief(shape)} exceeds memory; use a smaller length"
            ) from None
        for row, sample in zip(batch, column, strict=True):
            row[: len(sample)] = sample
        return batch


def _fits(value: float, dtype: np.dtype[Any]) -> bool:
    """Return whether a dtype holds the value; floats may round it, but not to an infinity."""
    with np.errstate(all="ignore"), suppress(OverflowError, ValueError):
        result = np.array(value).astype(dtype)
        if dtype.kind in "biu":
            return bool(result == value)
        return dtype.kind in "fcV" and not (math.isfinite(value) and np.isinf(result))
    return False


def longest_of(column: Array | list[Array]) -> int:
    """Return the length of the longest sample of a column; 0 for numbers."""
    return max([len(x) if x.ndim else 0 for x in column])


class Ragged:
    """Column of samples that differ in length: arrays in memory, all of the same dtype."""

    def __init__(self, rows: Sequence[Any] | Array) -> None:
        arrays: list[Array] = [np.asarray(row) for row in rows]
        dtypes = {x.dtype for x in arrays if x.size} or {x.dtype for x in arrays}
        dtype = np.result_type(*dtypes)
        self._rows = [x if x.dtype == dtype else x.astype(dtype) for x in arrays]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, indices: Array) -> tuple[list[Array]]:
        return ([self._rows[i] for i in indices],)
