"""Errors of positions that are out of range, in the words of the function that computed these."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from mlvm.arena.context import context
from mlvm.core.errors import PositionRefused


def numbers_in(error: PositionRefused) -> tuple[int, int]:
    """Return the index and the length that an error names."""
    found = [int(x) for x in re.findall(r"-?\d+", error.reason)]
    return found[0], found[-1]


Reword: TypeAlias = Callable[[PositionRefused], None]
"""Changes the text of an error."""


@contextmanager
def rewording(reword: Reword) -> Iterator[None]:
    """Let `reword` change the error of a position that is out of range in ops inside the block, now
    or when a program with them runs."""

    def once(error: PositionRefused) -> None:
        if not getattr(error, "is_reworded", False):
            error.is_reworded = True  # type: ignore[attr-defined]
            reword(error)

    try:
        with context(reword=once):
            yield
    except PositionRefused as error:
        once(error)
        raise
