"""Warnings that refer to a line of Python."""

from __future__ import annotations

import ast
import linecache
import sys
import warnings
from opcode import opmap
from types import FrameType
from typing import Any, Final

from mlvm.core.errors import user_line, with_article
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


def warn_of_row(frame: FrameType, type: object) -> None:
    """Warn if a loop at the frame's line updates the loop variable in place and never reads it."""
    file, number = frame.f_code.co_filename, frame.f_lineno
    try:
        tree = ast.parse("".join(linecache.getlines(file, frame.f_globals)))
    except SyntaxError:  # a line of a console, or no source
        return
    for loop in ast.walk(tree):
        if (
            isinstance(loop, ast.For)
            and loop.lineno == number
            and isinstance(loop.target, ast.Name)
            and not any(isinstance(part, ast.comprehension) for part in ast.walk(loop.iter))
        ):
            names = {*frame.f_code.co_varnames} - {*frame.f_code.co_cellvars}
            is_local = loop.target.id in names  # no other function reads a local variable
            parts: list[Any] = [
                part for line in (loop.body if is_local else [tree]) for part in ast.walk(line)
            ]
            name = loop.target.id
            written = [part.value for part in parts if _is_stored(part)]
            written += [part.target for part in parts if isinstance(part, ast.AugAssign)]
            is_read = any(_reads(part, name) and part not in written for part in parts)
            if not is_read and any(getattr(part, "id", "") == name for part in written):
                warn_at(
                    f"{file}:{number}",
                    f"{name!r} is {with_article(type)} of its own, and its update changes "
                    f"no other tensor: "
                    f"write x[i] = v in a loop over i, or an update of the whole x",
                    NoEffectWarning,
                )


def _is_stored(part: Any) -> bool:
    return isinstance(part, ast.Subscript) and isinstance(part.ctx, ast.Store)


def _reads(part: Any, name: str) -> bool:
    return isinstance(part, ast.Name) and part.id == name and isinstance(part.ctx, ast.Load)


def warn_at(line: str | None, message: str, category: type[Warning]) -> None:
    """Issue a warning for that `file:line`, or for this file if it is None.

    By default each line is reported once."""
    opaque()
    file, _, number = (line or f"{__file__}:1").rpartition(":")
    registry = _registries.setdefault(file, {})
    warnings.warn_explicit(message, category, file, int(number), registry=registry)
