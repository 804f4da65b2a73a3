"""Lengths that a trace leaves open: integers of which the next launch may have another value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Length:
    """Base of integers of a trace that have another value in another launch."""

    __slots__ = ()

    def is_open(self) -> bool:
        """Return whether the trace goes on, in which formulas with it are recorded."""
        raise NotImplementedError

    @property
    def present(self) -> Any:
        """The present value; reading it here counts as no use."""
        raise NotImplementedError

    def see(self) -> Any:
        """Return the present value for code that needs it: it is a guard of the trace."""
        raise NotImplementedError

    def formula(self) -> int:
        """Return the number by which `Formulas` of the native machine compute it."""
        raise NotImplementedError

    def open_type(self, dtype: Any, shape: Sequence[int]) -> Any:
        """Return the one `TensorType` of the trace with that dtype and shape."""
        raise NotImplementedError


def open_length(shape: Sequence[Any]) -> Any:
    """Return the first open length of the shape; None if there is none."""
    return next((n for n in shape if issubclass(type(n), Length) and n.is_open()), None)
