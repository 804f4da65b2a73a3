"""Warnings that refer to a line of Python."""

from __future__ import annotations

import sys
import warnings
from opcode import opmap
from types import FrameType
from typing import Any, Final

from mlvm.core.errors import user_line
from mlvm.eager.tensor.templates import opaque

_registries: Final[dict[str, dict[Any, Any]]] = {}
"""For each file, the registry of `warnings` for the lines of the file."""


class NoEffectWarning(UserWarning):
    """Warning for a line that has no effect.

    Examples are a seed that a draw does not use, a gradient that reaches no parameter, a Module
    that is neither trained nor saved, and an update of a temporary. The text contains the remedy.

        >>> x = ml.zeros((2, 2))
        >>> import warnings
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     x[0][0] = 5.0
        >>> caught[0].category.__name__, x[0, 0].item()
        ('NoEffectWarning', 0.0)
    """


class _Probe:
    """Object that counts the references to itself in `__setitem__`."""

    count = 0

    def __setitem__(self, key: object, value: object) -> None:
        _Probe.count = sys.getrefcount(self)

    def __iadd__(self, other: object) -> _Probe:
        _Probe.count = sys.getrefcount(self)
        return self


def _references() -> tuple[int, int, int]:
    """Return the reference counts of a temporary, a local variable, and an operator's operand."""
    _Probe()[0] = 0
    temporary, probe = _Probe.count, _Probe()
    probe[0] = 0
    local = _Probe.count
    probe += 1
    return temporary, local, _Probe.count


_TEMPORARY, LOCAL, LOCAL_OPERATOR = _references()
"""The counts differ by one in CPython 3.11 to 3.13.

If the interpreter's stack borrows references from variables, there is no warning."""
_STORES: Final = {opmap.get(name) for name in ("STORE_SUBSCR", "STORE_SLICE")}


def has_temporary_count(references: int) -> bool:
    """Return whether a tensor with this reference count in `__setitem__` is a temporary.

    A call of the method by name has fewer references."""
    return references <= _TEMPORARY < LOCAL


def warn_of_temporary(frame: FrameType, type: object) -> None:
    """Warn that a temporary is updated, if the frame's line is an assignment."""
    if frame.f_code.co_code[frame.f_lasti] in _STORES:
        warn_at(
            user_line(),
            f"this {type} is a temporary, and its update changes no other tensor: write "
            f"x[i, j] = v for x[i][j] = v, x[:, i] = v for x.T[i] = v, or give the tensor a name",
            NoEffectWarning,
        )


def warn_at(line: str | None, message: str, category: type[Warning]) -> None:
    """Issue a warning for that `file:line`, or for this file if it is None.

    By default each line is reported once."""
    opaque()
    file, _, number = (line or f"{__file__}:1").rpartition(":")
    registry = _registries.setdefault(file, {})
    warnings.warn_explicit(message, category, file, int(number), registry=registry)
