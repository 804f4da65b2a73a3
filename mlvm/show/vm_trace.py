"""Profiles of a VM over time, in the Trace Event Format that Perfetto and Chrome read.

On a VM of this process a profile has every function. For a remote VM it has the calls of this
process, with the time here and the bytes sent and received.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np

from mlvm.core.errors import ArgumentError, Place, brief, user_place
from mlvm.core.machine.callee import Value, describe, is_tensor
from mlvm.core.observe import Layer, observed, on_wait
from mlvm.core.op import Attributes
from mlvm.core.program.program import Program
from mlvm.core.protocol import VMProtocol
from mlvm.core.types import Array
from mlvm.core.vm import VM
from mlvm.machines.files import require_writable, write_file
from mlvm.machines.local import LocalVM
from mlvm.show.calls import ProgramCache, calls_in, is_straight

_CALLS: Final = (
    *("alloc_tensor", "dealloc_tensor", "read", "write", "launch"),
    *("alloc_storage", "dealloc_storage", "tensor_from_storage", "swap"),
)
"""The calls of the protocol that allocate, move or compute."""

Origin: TypeAlias = tuple[Program | None, int | None, Place | None]
_NOWHERE: Final[Origin] = None, None, None


class TimeSpan(NamedTuple):
    """A call on a thread.

    began, ended: nanoseconds of `time.perf_counter_ns`.
    program: program that was launched, or that contains the call.
    place: Python line of that launch.
    """

    name: str
    thread: int
    began: int
    ended: int
    about: dict[str, Any]
    program: Program | None = None

    pc: int | None = None
    place: Place | None = None


T = TypeVar("T")


class Latest(Generic[T]):
    """Queue of the last `most` items added; `forgotten` counts the items before them.

    It is thread-safe.
    """

    def __init__(self, most: int | None = None) -> None:
        self.forgotten = 0
        self._items: deque[T] = deque(maxlen=most)
        self._lock = threading.Lock()

    def add(self, item: T) -> None:
        with self._lock:
            self.forgotten += len(self._items) == self._items.maxlen
            self._items.append(item)

    def __iter__(self) -> Iterator[T]:
        return iter(self._items.copy())

    def __len__(self) -> int:
        return len(self._items)


class VMTrace:
    """Instrument that times every function.

    `layers` time calls of a VM, and `launching` notes the programs of functions.

    spans: the last `most` calls.
    rows: names of the threads that made the calls.
    """

    def __init__(self, vm: str, *, most: int | None = None) -> None:
        self.vm = vm
        self.spans: Latest[TimeSpan] = Latest(most)
        self.rows: dict[int, str] = {}
        self._start = time.perf_counter_ns()
        self._began = threading.local()
        self._calls = ProgramCache(_in_order)

    def before(self, name: str, params: Sequence[Value], attributes: Attributes) -> None:
        self._began.__dict__.setdefault("stack", []).append((name, time.perf_counter_ns()))

    def after(
        self, name: str, params: Sequence[Value], attributes: Attributes, results: Sequence[Value]
    ) -> None:
        ended = time.perf_counter_ns()
        while (entry := self._began.stack.pop())[0] != name:
            pass  # a function inside this one raised, so the end was not recorded
        about = {
            "params": describe(params),
            "results": describe(results),
            "attributes": dict(attributes),
            "bytes": sum(x.nbytes for x in filter(is_tensor, (*params, *results))),
        }
        self._note(name, entry[1], ended, about, self._origin(name))

    def waited(self, what: str, began: int) -> None:
        """Note that a thread has waited for the VM's device since `began`."""
        self._note(f"wait: {what}", began, time.perf_counter_ns(), {})

    def layers(self) -> dict[str, Layer]:
        """Return the layers with which to observe a VM."""

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
                    about = {"params": brief(args), "bytes": sum(sizes)}
                    program = args[0] if name == "launch" else None
                    self._note(name, began, ended, about, (program, None, user_place()))

            return timed

        return {name: layer(name) for name in _CALLS}

    def launching(
        self, proceed: Callable[..., list[Array]], program: Program, *args: Any, **options: Any
    ) -> list[Array]:
        """Wrap `launch` of a VM of this process. A launch of several calls has a span."""
        ncalls, in_order = self._calls[program]
        outer = getattr(self._began, "launch", None)
        self._began.launch = program, iter(in_order)
        began = time.perf_counter_ns()
        try:
            return proceed(program, *args, **options)
        finally:
            self._began.launch = outer
            if ncalls > 1:
                ended = time.perf_counter_ns()
                self._note("launch", began, ended, {}, (program, None, user_place()))

    def _origin(self, name: str) -> Origin:
        """Return the program of this thread's launch, a pc and a Python location.

        The pc belongs to the next call, if that call has the name.
        """
        launch = getattr(self._began, "launch", None)
        if launch is None:
            return _NOWHERE
        program, calls = launch
        pc, called = next(calls, (None, ""))
        return program, pc if called == name else None, user_place()

    def _note(
        self, name: str, began: int, ended: int, about: dict[str, Any], origin: Origin = _NOWHERE
    ) -> None:
        """Note a call on this thread between two times in nanoseconds."""
        thread = threading.current_thread()
        row = threading.get_ident()
        self.rows[row] = thread.name if thread.name.startswith(f"{self.vm}_") else self.vm
        self.spans.add(TimeSpan(name, row, began, ended, about, *origin))

    def to_json(self) -> str:
        """Return all events, with the names of the rows first."""
        names = [{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": self.vm}}]
        names += [
            {"name": "thread_name", "ph": "M", "pid": 1, "tid": row, "args": {"name": name}}
            for row, name in self.rows.items()
        ]
        spans = [
            {
                "name": span.name,
                "ph": "X",
                "pid": 1,
                "tid": span.thread,
                "ts": (span.began - self._start) / 1000,
                "dur": (span.ended - span.began) / 1000,
                "args": span.about,
            }
            for span in self.spans
        ]
        return json.dumps({"traceEvents": [*names, *spans], "displayTimeUnit": "ns"}, default=repr)


def _in_order(program: Program) -> tuple[int, list[tuple[int, str]]]:
    """Return the number of main's calls, and the calls if they run in order."""
    calls = calls_in(program)
    return len(calls), calls if is_straight(program) else []


def profile(
    vm: VMProtocol, path: str | os.PathLike[str] | None = None
) -> AbstractContextManager[None]:
    """Write what runs inside the block to a trace file, which Perfetto and chrome://tracing open.
    The VM and each worker have a row. A call is shown with name, types and bytes, a wait for the
    VM's device with the time. For a VM of a different process the file has the calls of the
    protocol, with the time spent in this process.

    Raises `ArgumentError` unless `path` is a path, and `OSError` at the start if the file cannot be
    written.

    Invalid calls:
        vm.profile()  # ArgumentError
    """
    if not isinstance(path, (str, os.PathLike)):
        path_text = "" if path is None else f", not {brief(path)}"
        raise ArgumentError(
            f"profile: expected the path of the file to write{path_text}: "
            'with vm.profile("trace.json")'
        )
    return _traced(vm, path)


@contextmanager
def _traced(vm: VMProtocol, path: str | os.PathLike[str]) -> Iterator[None]:
    tracer = VMTrace(vm.name)

    def waited(name: str, what: str, began: float) -> None:
        if name == vm.name:
            tracer.waited(what, round(began * 1e9))

    require_writable(path)
    on_wait.append(waited)
    try:
        with vm.instrumented(tracer) if isinstance(vm, VM) else observed(vm, **tracer.layers()):
            yield
    finally:
        on_wait.remove(waited)
        write_file(path, tracer.to_json())


LocalVM.profile = profile
