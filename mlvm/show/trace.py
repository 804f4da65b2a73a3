"""A trace of what ran when, in the Trace Event Format that Perfetto and Chrome read.

On a VM of this process it has every function that ran. Of a VM elsewhere it has the calls that this
process made: how long each took here, and how many bytes went and came.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, Generic, NamedTuple, TextIO, TypeVar

import numpy as np

from mlvm.core.errors import ArgumentError, Place, brief, user_place
from mlvm.core.machine.callee import Value, describe, is_tensor
from mlvm.core.observe import Layer, observed, on_wait
from mlvm.core.op import Attributes
from mlvm.core.program.program import Program
from mlvm.core.protocol import VMProtocol
from mlvm.core.types import Array
from mlvm.core.vm import VM
from mlvm.machines.local import LocalVM
from mlvm.show.calls import OfPrograms, calls_in, is_straight

_CALLS: Final = (
    *("alloc_tensor", "dealloc_tensor", "read", "write", "launch"),
    *("alloc_storage", "dealloc_storage", "tensor_from_storage", "swap"),
)
"""The calls of the protocol that have to do with what a VM holds or runs."""


class Span(NamedTuple):
    """What ran on a thread between two times in nanoseconds of `time.perf_counter_ns`."""

    name: str
    thread: int
    began: int
    ended: int
    about: dict[str, Any]
    program: Program | None = None
    """What was launched, or what the call is of."""
    pc: int | None = None
    place: Place | None = None
    """Where in Python that was launched."""


T = TypeVar("T")


class Latest(Generic[T]):
    """The last `most` of the items added, in their order; so many before them are `forgotten`.
    Threads may add to it."""

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


class Trace:
    """An instrument that times every function; each thread that runs them has a row. Its `layers`
    time calls of a VM, and its `launching` tells the programs of functions. Of very many `spans`
    the last `most` are kept; `rows` has the names of threads."""

    def __init__(self, vm: str, *, most: int | None = None) -> None:
        self.vm = vm
        self.spans: Latest[Span] = Latest(most)
        self.rows: dict[int, str] = {}
        self._start = time.perf_counter_ns()
        self._began = threading.local()
        self._calls = OfPrograms(_in_order)

    def before(self, name: str, params: Sequence[Value], attributes: Attributes) -> None:
        stack = self._began.__dict__.setdefault("stack", [])
        stack.append((name, time.perf_counter_ns()))

    def after(
        self, name: str, params: Sequence[Value], attributes: Attributes, results: Sequence[Value]
    ) -> None:
        ended = time.perf_counter_ns()
        while (entry := self._began.stack.pop())[0] != name:
            pass  # a function within this one raised, and so did not end
        arrays = filter(is_tensor, (*params, *results))
        about = {
            "params": describe(params),
            "results": describe(results),
            "attributes": dict(attributes),
            "bytes": sum(x.nbytes for x in arrays),
        }
        self._note(name, entry[1], ended, about, *self._origin(name))

    def waited(self, what: str, began: int) -> None:
        """A thread has waited for the VM's device since then."""
        self._note(f"wait: {what}", began, time.perf_counter_ns(), {})

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
                    about = {"params": brief(args), "bytes": sum(sizes)}
                    program = args[0] if name == "launch" else None
                    self._note(name, began, ended, about, program, None, user_place())

            return timed

        return {name: layer(name) for name in _CALLS}

    def launching(
        self, proceed: Callable[..., list[Array]], program: Program, *args: Any, **options: Any
    ) -> list[Array]:
        """A layer around `launch` of a VM of this process. One of several calls has a span."""
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
                self._note("launch", began, ended, {}, program, None, user_place())

    def _origin(self, name: str) -> tuple[Program | None, int | None, Place | None]:
        """The program that the launch on this thread is of, the pc of its next call if that is of
        the name, and where in Python it was launched."""
        launch = getattr(self._began, "launch", None)
        if launch is None:
            return None, None, None
        program, calls = launch
        pc, called = next(calls, (None, ""))
        return program, pc if called == name else None, user_place()

    def _note(
        self,
        name: str,
        began: int,
        ended: int,
        about: dict[str, Any],
        program: Program | None = None,
        pc: int | None = None,
        place: Place | None = None,
    ) -> None:
        """Note what ran on this thread between these two times in nanoseconds."""
        thread = threading.current_thread()
        row = threading.get_ident()
        self.rows[row] = thread.name if thread.name.startswith(f"{self.vm}_") else self.vm
        self.spans.add(Span(name, row, began, ended, about, program, pc, place))

    def write(self, file: TextIO) -> None:
        """Write all events, with the names of the rows first."""
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
        events = [*names, *spans]
        json.dump({"traceEvents": events, "displayTimeUnit": "ns"}, file, default=repr)


def _in_order(program: Program) -> tuple[int, list[tuple[int, str]]]:
    """How many calls main has, and these where they run in their order."""
    calls = calls_in(program)
    return len(calls), calls if is_straight(program) else []


def trace(
    vm: VMProtocol, path: str | os.PathLike[str] | None = None
) -> AbstractContextManager[None]:
    """Write what runs inside the block to a trace file, which Perfetto and chrome://tracing open.
    The VM and each worker have a row; each call has its name, types and bytes, each wait for the
    VM's device its time. Of a VM that is not of this process it has the calls of the protocol, with
    the time that they take here.

    Raises `ArgumentError` for what names no file, and `OSError` at the start if the file cannot
    be written.
    """
    if not isinstance(path, (str, os.PathLike)):
        given = "" if path is None else f", not {brief(path)}"
        raise ArgumentError(
            f'trace takes the path of the file to write{given}: with vm.trace("trace.json")'
        )
    return _traced(vm, path)


@contextmanager
def _traced(vm: VMProtocol, path: str | os.PathLike[str]) -> Iterator[None]:
    seen = Trace(vm.name)

    def waited(name: str, what: str, began: float) -> None:
        if name == vm.name:
            seen.waited(what, round(began * 1e9))

    with open(path, "w", encoding="utf-8") as file:
        on_wait.append(waited)
        try:
            with vm.instrumented(seen) if isinstance(vm, VM) else observed(vm, **seen.layers()):
                yield
        finally:
            on_wait.remove(waited)
            seen.write(file)


LocalVM.trace = trace
