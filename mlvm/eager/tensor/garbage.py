"""Garbage collection that is complete when the function returns."""

from __future__ import annotations

import gc
import time
from typing import Final

_TRIES: Final = 1000


def collect() -> None:
    """Free objects that only reference cycles keep alive, such as variables of a recursion.

    `gc.collect` does nothing while another thread collects; this function waits for that thread."""
    for _ in range(_TRIES):  # bounded, because a finalizer may have called this function
        before = _collections()
        gc.collect()
        if _collections() != before:
            return
        time.sleep(0.001)


def _collections() -> int:
    return int(gc.get_stats()[-1]["collections"])
