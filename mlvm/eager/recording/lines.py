"""Locations of calls in a user's program: a line, and the layer of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from mlvm.arena.context import context, current
from mlvm.core import errors
from mlvm.core.memo import memoized
from mlvm.eager.tensor.positions import Reword


def _no_layer() -> str | None:
    return None


layer_here: Callable[[], str | None] = _no_layer
"""Function that returns the path of the running layer, or None.

`mlvm.eager.nn` assigns it."""


class Line(str):
    """Location of a call: `file:line`, and the path of the running `layer`.

    `call`: the operation at the line and the operands, if the recorded op has different operands.
    Indices into these operands are preceded by the indices of `naxes` lanes. `reword` changes the
    error for an index out of range."""

    layer: str | None
    call: tuple[str, tuple[object, ...]] | None = None
    naxes: int = 0
    reword: Reword | None = None


def traced_line() -> Line | None:
    """Return the line of the traced call that an interpreter currently runs."""
    return current().line  # type: ignore[no-any-return]


@contextmanager
def standing_for(name: str, operands: Sequence[object], *, has_lanes: bool) -> Iterator[None]:
    """Let errors of the ops that are recorded inside name this call of one `vmap` element."""
    line = traced_line()
    if line is None:
        yield
        return
    named = Line(line)
    named.layer, named.naxes, named.reword = line.layer, line.naxes + has_lanes, line.reword
    named.call = line.call or (name, tuple(operands))  # the outermost call is the user's
    with context(line=named):
        yield


def user_line() -> Line | None:
    """Return the line of a traced call, or the innermost line of Python outside of mlvm."""
    if (line := traced_line()) is not None:
        return line
    text = errors.user_line()
    if text is None:
        return None
    line, reword = _line(text, layer_here()), current().reword
    if reword is not None:
        line, layer = Line(line), line.layer
        line.layer, line.reword = layer, reword
    return line


@memoized(4096)
def _line(text: str, layer: str | None) -> Line:
    line = Line(text)
    line.layer = layer
    return line
