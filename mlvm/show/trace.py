"""A trace of what ran when, in the Trace Event Format that Perfetto and Chrome read.

On a VM of this process it has every function that ran. Of a VM elsewhere it has the calls that this
process made: how long each took here, and how many bytes went and came.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TextIO

import numpy as np

from mlvm.core.errors import brief
from mlvm.core.machine.callee import Value, describe
from mlvm.core.observe import Layer, observed
from mlvm.core.op import Attributes
from mlvm.core.protocol import VMProtocol
from mlvm.core.vm import VM
from mlvm.machines.local import LocalVM

_CALLS: Final = [
    "alloc_tensor",
    "dealloc_tensor",
    "read",
    "write",
    "launch",
    "alloc_storage",
    "dealloc_storage",
    "tensor_from_storage",
    "swap",
]
"""The calls of the protocol that have to do with what a VM holds or runs."""


class Trace:
    """An instrument that times every function; each thread that runs them has a row. Its `layers`
    time calls of a VM."""

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
        arrays = [x for x in (*params, *results) if isinstance(x, np.ndarray)]
        self._note(
            name,
            entry[1],
            ended,
            params=describe(params),
            results=describe(results),
            attributes=dict(attributes),
            bytes=sum(x.nbytes for x in arrays),
        )

    def layers(self) -> dict[str, Layer]:
        """What to observe a VM with."""

        def layer(name: str) -> Layer:
            def timed(proceed: Callable[..., Any], *args: Any, **options: Any) -> Any:
                began, result = time.perf_counter_ns(), None
                try:
                    result = proceed(*args, **options)
                    return result
                finally:
                    ended = time.perf_counter_ns()
                    came = result if isinstance(result, list) else [result]
                    sizes = [x.nbytes for x in (*args, *came) if isinstance(x, np.ndarray)]
                    self._note(name, began, ended, params=brief(args), bytes=sum(sizes))

            return timed

        return {name: layer(name) for name in _CALLS}

    def _note(self, name: str, began: int, ended: int, **about: Any) -> None:
        """Note what ran on this thread between these two times in nanoseconds."""
        thread = threading.current_thread()
        row = threading.get_ident()
        self._rows[row] = thread.name if thread.name.startswith(f"{self._vm}_") else self._vm
        self._events.append(
            {
                "name": name,
                "ph": "X",
                "pid": 1,
                "tid": row,
                "ts": (began - self._start) / 1000,
                "dur": (ended - began) / 1000,
                "args": about,
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
def trace(vm: VMProtocol, path: str | Path) -> Iterator[None]:
    """Write what runs inside the block to a trace file, which Perfetto and chrome://tracing open.
    The VM and each worker have a row; each call has its name, types and bytes. Of a VM that is not
    of this process it has the calls of the protocol, with the time that they take here.

    Raises `OSError` at the start if the file cannot be written.
    """
    seen = Trace(vm.name)
    with open(path, "w", encoding="utf-8") as file:
        try:
            with vm.instrumented(seen) if isinstance(vm, VM) else observed(vm, **seen.layers()):
                yield
        finally:
            seen.write(file)


LocalVM.trace = trace
