"""What an eager call finds around it: the arena for its result, and the tape, if any.

Interactive use needs no arena of its own: results then live in the default VM's `default`
arena for as long as Python refers to them.
"""

from __future__ import annotations

import threading
from contextvars import ContextVar
from typing import TYPE_CHECKING

from mlvm.arena.arena import Arena, scope
from mlvm.core.protocol import VMProtocol
from mlvm.core.vm import VM

if TYPE_CHECKING:
    from mlvm.eager.autodiff import Tape

_lock = threading.Lock()
_default: Arena | None = None


recording: ContextVar[Tape | None] = ContextVar("recording", default=None)
"""The tape that differentiable calls are recorded on, for each thread or task."""


def default_arena() -> Arena:
    """The arena of interactive use, on the default VM; both are made when first needed."""
    global _default
    with _lock:
        if _default is None:
            _default = Arena(VM("default"), "default", trims=True)
        return _default


def default_vm() -> VMProtocol:
    """The VM that eager calls run on outside of any arena."""
    return default_arena().vm


def current_arena() -> Arena:
    """The arena that results are allocated in now."""
    return scope.get() or default_arena()
