"""Refusals of ops: operand types and attributes, the error, and a part of its text.

`refusals.txt` has a line for those that ops have in common. Errors that values of operands cause
are in `tests/core/ops`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final, NamedTuple

from mlvm.core import errors


class Refusal(NamedTuple):
    """Operand types, attributes, and the expected error."""

    types: list[str]
    attributes: dict[str, Any]
    error: type[errors.MlvmError]
    message: str


def _read() -> dict[str, list[Refusal]]:
    refusals: dict[str, list[Refusal]] = {}
    for line in Path(__file__).with_suffix(".txt").read_text("utf-8").splitlines()[1:]:
        names, types, attributes, error, message = map(str.strip, line.split("|", 4))
        arguments = eval(f"dict({attributes})", {"inf": math.inf, "nan": math.nan})
        refusal = Refusal(types.split(), arguments, getattr(errors, error), message)
        for name in names.split():
            refusals.setdefault(name, []).append(refusal)
    return refusals


REFUSALS: Final = _read()
