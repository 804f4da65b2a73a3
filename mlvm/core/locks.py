"""Locks that are free in a forked process even if a thread of the parent held them.

A forked process has only the thread that forked, so it releases the locks of all other threads.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final

_locks: Final = weakref.WeakSet[Any]()


def new_lock(kind: Callable[[], Any] = threading.RLock) -> threading.RLock:
    """Return an RLock that is free in a forked process, unless the forking thread holds it.

    `kind` creates the lock; it may have another type with the methods of an RLock."""
    lock: threading.RLock = kind()
    _locks.add(lock)
    return lock


def is_mine(lock: Any) -> bool:
    """Return whether this thread holds the lock."""
    return bool(lock._is_owned())


def after_fork(function: Callable[[], None]) -> Callable[[], None]:
    """Decorate a function to call in each forked process, in the order of decoration."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)
    return function


@after_fork
def _free_others() -> None:
    for lock in _locks:
        if not is_mine(lock):
            lock._at_fork_reinit()
