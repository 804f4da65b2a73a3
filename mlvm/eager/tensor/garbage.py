"""Garbage collection that has happened when it returns."""

from __future__ import annotations

import gc
import time
from typing import Final

_TRIES: Final = 1000


def collect() -> None:
    """Free objects that only cycles of references keep alive, such as variables of a function that
    calls itself. `gc.collect` does nothing while another thread collects; this waits for that."""
    for _ in range(_TRIES):  # not for ever: a finalizer may have called it
        before = _collections()
        gc.collect()
        if _collections() != before:
            return
        time.sleep(0.001)


def _collections() -> int:
    return int(gc.get_stats()[-1]["collections"])
