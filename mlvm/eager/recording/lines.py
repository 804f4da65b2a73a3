"""Places of calls in a user's program: a line, and the layer of a model."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import lru_cache
from typing import Final

from mlvm.core import errors


def _no_layer() -> str | None:
    return None


layer_here: Callable[[], str | None] = _no_layer
"""Return the path of the layer whose call is running, if one is. `mlvm.eager.nn` sets it."""


class Line(str):
    """Place of a call: `file:line`, and the path of the running `layer`."""

    layer: str | None


traced_line: Final[ContextVar[Line | None]] = ContextVar("traced_line", default=None)
"""Line of the traced call that an interpreter runs now."""


def user_line() -> Line | None:
    """Return the line of a traced call, or the innermost line of Python outside of mlvm."""
    if (line := traced_line.get()) is not None:
        return line
    text = errors.user_line()
    return None if text is None else _line(text, layer_here())


@lru_cache(maxsize=4096)
def _line(text: str, layer: str | None) -> Line:
    line = Line(text)
    line.layer = layer
    return line
