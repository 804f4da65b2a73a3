"""Errors for indices out of range, in terms of the function that computed the indices."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from mlvm.arena.context import context
from mlvm.core.errors import PositionError


def numbers_in(error: PositionError) -> tuple[int, int]:
    """Return the index and the length in an error."""
    numbers = [int(x) for x in re.findall(r"-?\d+", error.reason)]
    return numbers[0], numbers[-1]


Reword: TypeAlias = Callable[[PositionError], None]
"""Function that changes the text of an error."""


@contextmanager
def rewording(reword: Reword) -> Iterator[None]:
    """Let `reword` change the error for an index out of range in ops inside the block.

    This applies to errors raised now, and to errors raised when a program with these ops runs."""

    def once(error: PositionError) -> None:
        if not getattr(error, "is_reworded", False):
            error.is_reworded = True  # type: ignore[attr-defined]
            reword(error)

    try:
        with context(reword=once):
            yield
    except PositionError as error:
        once(error)
        raise
