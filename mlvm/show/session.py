"""Sessions: recordings of a process's arenas, calls of VMs and waits for queues."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from mlvm.arena.arena import Arena, on_made
from mlvm.arena.recording import Recording
from mlvm.core.machine.callee import Value
from mlvm.core.machine.functions import Instrument
from mlvm.core.observe import observed, on_wait
from mlvm.core.op import Attributes
from mlvm.core.protocol import VMProtocol
from mlvm.core.vm import VM
from mlvm.show.record import record_all
from mlvm.show.vm_trace import Latest, VMTrace


class Wait(NamedTuple):
    """A thread's wait for `what` of a queue.

    began, ended: nanoseconds of `time.perf_counter_ns`
    """

    queue: str
    what: str
    thread: str
    began: int
    ended: int


class ScriptSession:
    """Recording of a process between the times `began` and `ended`.

    Times are in nanoseconds of `time.perf_counter_ns`.
    """

    def __init__(self, spans: int) -> None:
        self.recordings: list[Recording] = []
        self.traces: list[VMTrace] = []
        self.waits: Latest[Wait] = Latest(spans)
        self.began = self.ended = time.perf_counter_ns()


@contextmanager
def all_recorded(*, tensors: int = 20_000, spans: int = 100_000) -> Iterator[ScriptSession]:
    """Record every arena made inside the block, the VMs, and every wait for a queue tensor.
    It keeps no arena and no VM alive.

    tensors: maximum number of ended tensors of each arena: the latest, and at least half as many.
    spans: maximum number of spans of each VM, and of waits: the latest.
    """
    session, listened = ScriptSession(spans), list[weakref.ref[_Listened]]()

    def begin(arena: Arena) -> None:
        if arena.vm.stands_for is arena.vm:
            listener = arena.vm.attached(_Listened)
            if listener.session is not session:
                session.traces.append(listener.start(arena.vm, session, spans))
                listened.append(weakref.ref(listener))

    def waited(queue: str, what: str, began: float) -> None:
        span = round(began * 1e9), time.perf_counter_ns()
        session.waits.add(Wait(queue, what, threading.current_thread().name, *span))

    with record_all(most=tensors // 2, programs=True) as session.recordings:
        on_made.append(begin)
        on_wait.append(waited)
        try:
            yield session
        finally:
            on_made.remove(begin)
            on_wait.remove(waited)
            for reference in listened:
                listener = reference()
                if listener is not None:
                    listener.stop()
            session.ended = time.perf_counter_ns()


class _Listened:
    """Listener to one VM for a session. The VM owns it."""

    def __init__(self, vm: VMProtocol) -> None:
        self.session: ScriptSession | None = None
        self._layers = ExitStack()

    def start(self, vm: VMProtocol, session: ScriptSession, spans: int) -> VMTrace:
        """Time the functions of a VM of this process, or the calls of a different VM."""
        self.session, trace = session, VMTrace(vm.name, most=spans)

        def watching(proceed: Callable[[Instrument], None], own: Instrument | None) -> None:
            proceed(trace if own is None else _Both(trace, own))

        if isinstance(vm, VM):
            self._layers.callback(_watch_again, vm)
            self._layers.enter_context(observed(vm, launch=trace.launching, _watch=watching))
            self._layers.callback(vm.quiesce)
            _watch_again(vm)
        else:
            self._layers.enter_context(observed(vm, **trace.layers()))
        return trace

    def stop(self) -> None:
        self.session = None
        self._layers.close()


def _watch_again(vm: VM) -> None:
    """Use the script's instrument, if any, with the layers that are now around `_watch`."""
    with vm.lock:
        vm._watch(vm.instrument)


class _Both:
    """Two instruments in one. The second instrument may return results."""

    def __init__(self, first: Instrument, second: Instrument) -> None:
        self._first = first
        self._second = second

    def before(
        self, name: str, params: Sequence[Value], attributes: Attributes
    ) -> Sequence[Value] | None:
        self._first.before(name, params, attributes)
        results = self._second.before(name, params, attributes)
        if results is not None:
            self._first.after(name, params, attributes, results)
        return results

    def after(
        self, name: str, params: Sequence[Value], attributes: Attributes, results: Sequence[Value]
    ) -> None:
        self._second.after(name, params, attributes, results)
        self._first.after(name, params, attributes, results)
