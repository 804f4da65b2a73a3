"""Cutting long arrays into pieces whose intermediates stay in the processor's cache."""

from __future__ import annotations

from collections.abc import Iterator

BLOCK = 32768
"""Elements a block: several f32 arrays of them fit a second-level cache, and numpy's cost per call
is small beside the work on one."""


def blocks(length: int, width: int = 1) -> Iterator[slice]:
    """Slices that cover `range(length)` in order, for rows of `width` elements: as many rows
    at a time as make a block, at least one."""
    step = max(1, BLOCK // max(1, width))
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))
