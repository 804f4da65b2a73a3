"""One BLAS thread for each VM while groups run: more would take cores from the other VMs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mlvm.core.extras import extra


class BlasLimit:
    """Limits the BLAS libraries of the process to one thread, as long as any group runs.

    All groups share the limit, so the last of them to end restores the former number.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: set[object] = set()
        self._controller: Any = None
        self._limit: Any = None

    def prepare(self) -> None:
        """Find the libraries that are loaded. Raises `MissingExtra` without threadpoolctl."""
        self._controller = extra("threadpoolctl", "parallel").ThreadpoolController()

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Limit BLAS to the calling thread inside the block."""
        holder = object()
        try:
            with self._lock:
                self._limit = self._limit or self._controller.limit(limits=1, user_api="blas")
                self._holders.add(holder)
            yield
            self._release(holder)
        except BaseException:  # an interrupt of the release, too
            self._release(holder)
            raise

    def _release(self, holder: object) -> None:
        """End the limit if this was its last holder. Idempotent."""
        with self._lock:
            self._holders.discard(holder)
            if self._limit is not None and not self._holders:
                self._limit.restore_original_limits()
                self._limit = None


one_blas_thread = BlasLimit()
