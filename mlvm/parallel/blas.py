"""One BLAS thread for each VM while groups run: more would take the cores from the others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mlvm.core.extras import extra


class BlasLimit:
    """Holds the BLAS libraries of the process at one thread, as long as anybody needs it.

    The number of threads is one for the whole process, so the last to leave restores it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held = 0
        self._controller: Any = None
        self._limit: Any = None

    def prepare(self) -> None:
        """Find the libraries that are loaded. Raises `MissingExtra` without threadpoolctl."""
        self._controller = extra("threadpoolctl", "parallel").ThreadpoolController()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside the block each thread has one BLAS thread, itself."""
        with self._lock:
            if not self._held:
                self._limit = self._controller.limit(limits=1, user_api="blas")
            self._held += 1
        try:
            yield
        finally:
            with self._lock:
                self._held -= 1
                if not self._held:
                    self._limit.restore_original_limits()


one_blas_thread = BlasLimit()
