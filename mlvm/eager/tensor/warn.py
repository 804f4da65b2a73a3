"""Warnings about a line of Python."""

from __future__ import annotations

import warnings


def warn_at(line: str | None, message: str, category: type[Warning]) -> None:
    """Issue a warning about that `file:line`; about this file where there is none."""
    file, _, number = (line or f"{__file__}:1").rpartition(":")
    warnings.warn_explicit(message, category, file, int(number))
