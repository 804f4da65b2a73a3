"""A trace of what ran when, in the Trace Event Format that Perfetto and Chrome read."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from mlvm.core.machine.callee import Value, describe
from mlvm.core.op import Attributes
from mlvm.core.vm import VM
from mlvm.machines.local import LocalVM


class Trace:
    """An instrument that times every function; each thread that runs them has a row."""

    def __init__(self, vm: str) -> None:
        self._vm = vm
        self._start = time.perf_counter_ns()
        self._began = threading.local()
        self._events: list[dict[str, Any]] = []
        self._rows: dict[int, str] = {}

    def before(self, name: str, params: Sequence[Value], attributes: Attributes) -> None:
        stack = self._began.__dict__.setdefault("stack", [])
        stack.append((name, time.perf_counter_ns()))

    def after(
        self,
        name: str,
        params: Sequence[Value],
        attributes: Attributes,
        results: Sequence[Value],
    ) -> None:
        ended = time.perf_counter_ns()
        while (entry := self._began.stack.pop())[0] != name:
            pass  # a function within this one raised, and so did not end
        began = entry[1]
        thread = threading.current_thread()
        row = threading.get_ident()
        self._rows[row] = thread.name if thread.name.startswith(f"{self._vm}_") else self._vm
        arrays = [x for x in (*params, *results) if isinstance(x, np.ndarray)]
        self._events.append(
            {
                "name": name,
                "ph": "X",
                "pid": 1,
                "tid": row,
                "ts": (began - self._start) / 1000,
                "dur": (ended - began) / 1000,
                "args": {
                    "params": describe(params),
                    "results": describe(results),
                    "attributes": dict(attributes),
                    "bytes": sum(x.nbytes for x in arrays),
                },
            }
        )

    def write(self, file: TextIO) -> None:
        """Write all events, with the names of the rows first."""
        names = [{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": self._vm}}]
        names += [
            {"name": "thread_name", "ph": "M", "pid": 1, "tid": row, "args": {"name": name}}
            for row, name in self._rows.items()
        ]
        events = [*names, *self._events]
        json.dump({"traceEvents": events, "displayTimeUnit": "ns"}, file, default=repr)


@contextmanager
def trace(vm: VM, path: str | Path) -> Iterator[None]:
    """Write what runs inside the block to a trace file, which Perfetto and chrome://tracing open.
    The VM and each worker have a row; each call has its name, types and bytes.

    Raises `OSError` at the start if the file cannot be written.
    """
    seen = Trace(vm.name)
    with open(path, "w", encoding="utf-8") as file:
        try:
            with vm.instrumented(seen):
                yield
        finally:
            seen.write(file)


LocalVM.trace = trace
