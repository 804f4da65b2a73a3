"""Suspension of Python's garbage collector while many permanent objects are created."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Final

from mlvm.core.locks import after_fork, new_lock

_lock: Final = new_lock()
_inside: Final[list[int]] = []  # thread of each open block
_was_on = True


@contextmanager
def uncollected() -> Iterator[None]:
    """Suspend the collector of reference cycles inside the block.

    Ten thousand new permanent objects, such as the objects of a recording, would make the collector
    search the whole process in vain.
    """
    global _was_on
    me, before = get_ident(), _inside.count(get_ident())
    try:  # from here on an interrupt is cleaned up
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
    """Forget the blocks of other threads, which never end in a forked process."""
    _inside[:] = [each for each in _inside if each == get_ident()]
    _collect_again()
