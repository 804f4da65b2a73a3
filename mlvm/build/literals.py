"""Literals and tables of C."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

_A_LINE: Final = 96


def integer(value: int) -> str:
    return f"INT64_C({value})" if value > -(1 << 63) else "INT64_MIN"


def real(value: float) -> str:
    if math.isnan(value):
        return "NAN"
    return value.hex() if math.isfinite(value) else ("-" if value < 0 else "") + "INFINITY"


def string(text: str) -> str:
    """Write a literal of C, with special characters as octal numbers."""
    escaped = text.encode("ascii", "backslashreplace").decode()
    special = [c if c.isprintable() and c not in '\\"?' else f"\\{ord(c):03o}" for c in escaped]
    return f'"{"".join(special)}"'


def array(declaration: str, items: Iterable[str]) -> str:
    """Write a table with full lines."""
    lines, line = [], "   "
    for item in items:
        if len(line) + len(item) > _A_LINE and line.strip():
            lines.append(line)
            line = "   "
        line += f" {item},"
    return "\n".join([f"{declaration} = {{", *lines, line, "};", ""])
