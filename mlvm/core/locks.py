"""Locks that are free in a forked process even if a thread of the parent held them.

A forked process has only the thread that forked, so it releases the locks of all other threads.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final, Self, TypeVar, overload

T = TypeVar("T")

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


class cached_property(functools.cached_property[T]):
    """`functools.cached_property` without a lock, as in Python 3.12.

    In Python 3.11 one lock per property is held while a value is computed. If another thread of the
    parent holds it at a fork, the child would wait forever.
    """

    if sys.version_info < (3, 12):

        @overload
        def __get__(self, instance: None, owner: type[Any] | None = None) -> Self: ...
        @overload
        def __get__(self, instance: object, owner: type[Any] | None = None) -> T: ...
        def __get__(self, instance: Any, owner: type[Any] | None = None) -> Any:
            if instance is None:
                return self
            name = self.attrname
            if name not in instance.__dict__:
                instance.__dict__[name] = self.func(instance)
            return instance.__dict__[name]


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
