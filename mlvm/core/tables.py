"""Tables as text, in columns as wide as needed."""

from __future__ import annotations

from collections.abc import Container, Sequence


def table(cells: Sequence[Sequence[str]], *, right: int | Container[int]) -> list[str]:
    """Return lines of columns. `right` columns are flush right: a number of the first, or which."""
    flush_right = range(right) if isinstance(right, int) else right
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i in flush_right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
