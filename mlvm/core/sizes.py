"""Memory sizes as users write them: `"64 MiB"`, `"64M"`, or a number of bytes."""

from __future__ import annotations

import operator
import os
import re
import sys
from contextlib import suppress
from typing import Final

from mlvm.core.errors import ArgumentError, MlvmError, brief

_UNITS: Final = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}

MAX_SIZE: Final = 2**63 - 1
MAX_TERM: Final = MAX_SIZE // 2 + 1
"""Sums of two numbers below this bound fit into 64 bits."""
MAX_EXACT: Final = 2**sys.float_info.mant_dig
"""Largest integer up to which a float represents every integer."""
_DECIMAL: Final = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SIZE: Final = re.compile(r"\s*(\d{1,40}(?:\.\d+)?)\s*([a-z]*)\s*", re.ASCII | re.IGNORECASE)


def parse_count(text: str) -> int | None:
    """Return the number of a text of 1 to 18 digits, or None for a different text."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def physical_memory() -> int:
    """Return the size of this machine's memory in bytes, or 0 if the system does not report it."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0


def parse_size(
    value: object, where: str, *, least: int = 1, error: type[MlvmError] = ArgumentError
) -> int:
    """Return the number of bytes for an int, or for a text with a number and a unit.

    K, M, G, T and KiB, MiB, GiB, TiB are powers of 1024. kB, MB, GB, TB are powers of 1000. A
    number with B or without a unit is in bytes. The message of an error begins with `where`.

    Raises `error` for an invalid size, and for a size below `least` or above 2**63 - 1.

        >>> parse_size("1.5 MiB", "here"), parse_size("64M", "here"), parse_size(100, "here")
        (1572864, 67108864, 100)
    """
    nbytes: float = -1
    if isinstance(value, str):
        if (match := _SIZE.fullmatch(value)) is not None:
            unit = match[2].lower()
            factor = _DECIMAL.get(unit) or _UNITS.get(unit.removesuffix("ib") or "?")
            if factor is not None:
                number = int(match[1]) if match[1].isdecimal() else float(match[1])
                nbytes = -1 if factor == 1 and number % 1 else number * factor  # bytes are whole
    elif not isinstance(value, bool):
        with suppress(TypeError):
            nbytes = operator.index(value)  # type: ignore[arg-type]
    if 0 < nbytes < 1 or not least <= nbytes <= MAX_SIZE:
        raise error(
            f"{where}: expected a size from {least} to 2**63 - 1 bytes, as an int or a text such "
            f"as '64 MiB' (units: B, K, M, G, T, KiB ... TiB, kB ... TB), got {brief(value)}"
        )
    return int(nbytes)


def size_text(nbytes: float) -> str:
    """Return a size in the largest one-letter unit of which it is a multiple: `64M`."""
    for unit, size in sorted(_UNITS.items(), key=lambda item: -item[1]):
        if nbytes >= size and nbytes % size == 0:
            return f"{nbytes // size:g}{unit.upper()}"
    return f"{nbytes:g}"
