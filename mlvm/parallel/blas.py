"""Limit of one BLAS thread per VM while groups run, so each VM uses one core."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mlvm.core.extras import extra


class BlasLimit:
    """Limit of the BLAS libraries of this process to one thread while any group runs.

    All groups share the limit. The last group that finishes restores the previous number.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: set[object] = set()
        self._controller: Any = None
        self._limit: Any = None

    def prepare(self) -> None:
        """Find the loaded BLAS libraries. Raises `MissingExtraError` without threadpoolctl."""
        self._controller = extra("threadpoolctl", "parallel").ThreadpoolController()

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Limit BLAS to one thread inside the block."""
        holder = object()
        try:
            with self._lock:
                self._limit = self._limit or self._controller.limit(limits=1, user_api="blas")
                self._holders.add(holder)
            yield
            self._release(holder)
        except BaseException:  # includes an interrupt during the release
            self._release(holder)
            raise

    def _release(self, holder: object) -> None:
        """Restore the previous number of threads if this was the last holder. Idempotent."""
        with self._lock:
            self._holders.discard(holder)
            if self._limit is not None and not self._holders:
                self._limit.restore_original_limits()
                self._limit = None


one_blas_thread = BlasLimit()
