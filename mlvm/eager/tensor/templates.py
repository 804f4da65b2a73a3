"""Calls of composed functions by templates: lists of the one-op calls that the function makes.

The first call of a public function on known types runs the function; later calls run the list in C
(`language/templates.c`). The function is the definition. `MLVM_TEMPLATES=0` disables the lists, as
does `with disabled():`. If the result of a function depends on more than arguments and context, the
function calls `opaque`, so that no list is made. All lists are in a table of 4,096 entries, in sets
of four by hash. A new list replaces the least recently used entry of its set.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from mlvm.machines.native.extension import EXTENSION


def _call(function: Callable[..., Any], args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    return function(*args, **keywords)


def _call_into(*_: object) -> bool:
    return False


def _next_key_of(source: Callable[[], Any]) -> Any:
    return source()


call: Final[Callable[..., Any]] = _call if EXTENSION is None else EXTENSION.call
"""Return `function(*args, **keywords)`, by a template if there is one."""

call_into: Final[Callable[..., bool]] = _call_into if EXTENSION is None else EXTENSION.call_into
"""`call_into(out, op, operands, attributes)`: write the result of an op to the bytes of `out` by an
open template. Return False, without an effect, if there is none."""

opaque: Final[Callable[[], None]] = (lambda: None) if EXTENSION is None else EXTENSION.opaque
"""Note that the composed call that runs in this thread depends on more than the key."""

next_key_of: Final[Callable[[Callable[[], Any]], Any]] = (
    _next_key_of if EXTENSION is None else EXTENSION.next_key_of
)
"""Return `source()`, a random key; a template of the composed call that runs calls it again."""

pause: Final[Callable[[bool], bool]] = (
    (lambda paused: paused) if EXTENSION is None else EXTENSION.pause
)
"""Start or stop to hide what this thread does from a recorded call; return the state before."""


@contextmanager
def disabled() -> Iterator[None]:
    """Call every function itself inside the block, in all threads."""
    before = EXTENSION is not None and EXTENSION.use_templates(False)
    try:
        yield
    finally:
        if EXTENSION is not None:
            EXTENSION.use_templates(before)


if EXTENSION is not None and os.environ.get("MLVM_TEMPLATES") == "0":
    EXTENSION.use_templates(False)
