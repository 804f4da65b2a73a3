"""Formatting of tables with aligned columns."""

from __future__ import annotations

from collections.abc import Container, Sequence


def table(cells: Sequence[Sequence[str]], *, right: int | Container[int]) -> list[str]:
    """Return the lines of a table; `right` selects right-aligned columns, by count or by index."""
    flush_right = range(right) if isinstance(right, int) else right
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i in flush_right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
