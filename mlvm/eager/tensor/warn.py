"""Warnings about a line of Python."""

from __future__ import annotations

import warnings
from typing import Any, Final

_registries: Final[dict[str, dict[Any, Any]]] = {}
"""For each file, what `warnings` notes of the warnings about its lines."""


class NoEffectWarning(UserWarning):
    """A line has no effect: a seed that a draw does not follow, a gradient that reaches no
    parameter, a Module that is neither trained nor saved, an update of a tensor that nothing else
    names. The text says which, and what to write.

        >>> x = ml.zeros((2, 2))
        >>> import warnings
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     x[0][0] = 5.0
        >>> caught[0].category.__name__, x[0, 0].item()
        ('NoEffectWarning', 0.0)
    """


def warn_at(line: str | None, message: str, category: type[Warning]) -> None:
    """Issue a warning about that `file:line`; about this file where there is none. By default a
    line is warned about once."""
    file, _, number = (line or f"{__file__}:1").rpartition(":")
    registry = _registries.setdefault(file, {})
    warnings.warn_explicit(message, category, file, int(number), registry=registry)
