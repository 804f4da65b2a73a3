"""Where in a user's program a call is from: a line, and the layer of a model."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Final

from mlvm.core import errors


def _no_layer() -> str | None:
    return None


layer_here: Callable[[], str | None] = _no_layer
"""The path of the layer of a model whose call led here, if one did. `mlvm.eager.nn` puts its own
function here."""


class Line(str):
    """`file:line`, and the path of the `layer` whose call led there."""

    layer: str | None


traced_line: Final[ContextVar[Line | None]] = ContextVar("traced_line", default=None)
"""Line of the traced call that an interpreter runs now."""


def user_line() -> Line | None:
    """Return the line of a traced call, or the innermost line of Python outside of mlvm."""
    if (line := traced_line.get()) is not None:
        return line
    found = errors.user_line()
    if found is None:
        return None
    line = Line(found)
    line.layer = layer_here()
    return line
