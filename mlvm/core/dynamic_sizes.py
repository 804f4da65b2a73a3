"""Dynamic sizes: integers of a trace with values that may differ in the next launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Length:
    """Base class of integers of a trace with values that may differ between launches."""

    __slots__ = ()

    def is_open(self) -> bool:
        """Return whether the trace is still running, and so records formulas with this size."""
        raise NotImplementedError

    @property
    def present(self) -> Any:
        """Return the value of the current call, without a guard."""
        raise NotImplementedError

    def see(self) -> Any:
        """Return the value of the current call for code that needs it; add a guard to the trace."""
        raise NotImplementedError

    def formula(self) -> int:
        """Return the number of this size in the `Formulas` of the native machine."""
        raise NotImplementedError

    def open_type(self, dtype: Any, shape: Sequence[int]) -> Any:
        """Return the trace's unique `TensorType` with that dtype and shape."""
        raise NotImplementedError


def open_length(shape: Sequence[Any]) -> Any:
    """Return the first dynamic size of the shape, or None."""
    return next((n for n in shape if issubclass(type(n), Length) and n.is_open()), None)


def always_equal(xs: Sequence[int], ys: Sequence[int]) -> bool:
    """Return whether pairs are equal for all values of dynamic sizes, without a guard."""
    differences = [x - y for x, y in zip(xs, ys, strict=False)]
    return len(xs) == len(ys) and all(type(each) is int and not each for each in differences)
