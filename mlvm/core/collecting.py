"""Python's garbage collector, while much is made that stays."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Final

from mlvm.core.locks import after_fork, new_lock

_lock: Final = new_lock()
_inside: Final[list[int]] = []  # the thread of each block that is open
_was_on = True


@contextmanager
def uncollected() -> Iterator[None]:
    """Suspend the collector of cycles inside the block: ten thousand new objects that stay, such as
    those of a recording, would make it search the whole process in vain."""
    global _was_on
    me, before = get_ident(), _inside.count(get_ident())
    try:  # from here on: an interrupt leaves nothing behind
        with _lock:
            if not _inside:
                _was_on = gc.isenabled()
                gc.disable()
            _inside.append(me)
        yield
    finally:
        with _lock:
            if _inside.count(me) > before:
                _inside.remove(me)
            _collect_again()


def _collect_again() -> None:
    if not _inside and _was_on:
        gc.enable()


@after_fork
def _forget_others() -> None:
    """In a forked process: other threads' blocks end never."""
    _inside[:] = [each for each in _inside if each == get_ident()]
    _collect_again()
