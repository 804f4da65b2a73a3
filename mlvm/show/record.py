"""Recordings of arenas while they work: what lives where and when, and which op made it.

An arena that nobody records pays nothing for it.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Final, TypeAlias

from mlvm.arena.arena import Allocation, Arena, on_made
from mlvm.arena.placement import Region
from mlvm.arena.recording import Lifetime, Recording
from mlvm.core.machine.callee import OUT
from mlvm.core.observe import observed
from mlvm.core.program.program import Opcode, Program
from mlvm.core.protocol import TensorHandle, VMProtocol
from mlvm.core.types import Array

COPIED_IN: Final = "copied in"
"""Stands for the op of a tensor whose first value came from outside the VM."""


@contextmanager
def record(arena: Arena, *, most: int | None = None) -> Iterator[Recording]:
    """Record what lives in the arena inside the block; the recording is complete after it.

        with record(batch) as recording, batch:
            train_step()
        batch.plot("step.svg")

    A tensor that exists before the block is there from the first moment on; one that exists after
    it is there to the last. With `most`, of the tensors that have ended only about the latest so
    many are kept. Recordings of an arena may lie within each other.

        >>> arena = ml.Arena(ml.VM("mine"), "batch")
        >>> with ml.record(arena) as recording, arena: y = ml.ones(16)
        >>> arena.report().splitlines()[-1].split()[:4]
        ['64', '1', 'f32[16]', 'full']
    """
    watcher = _Watcher(arena, most)
    noted = arena.note_lines()
    watcher.begin_all(arena.live())
    arena.watch(watcher)
    arena.recording = watcher.recording
    try:
        with arena.vm.attached(_Writes).told_to(watcher.written):
            yield watcher.recording
    finally:
        arena.unwatch(watcher)
        arena.note_lines(noted)
        arena.recording = watcher.recording
        watcher.finish()


class _Watcher:
    """Notes in a recording when an arena's tensors are made and end, and what writes them."""

    def __init__(self, arena: Arena, most: int | None) -> None:
        self.recording = Recording(arena.name, times=[time.perf_counter()])
        self._arena = arena
        self._most = most
        self._lock = threading.RLock()
        self._living: dict[Region, tuple[Lifetime, weakref.ref[Allocation]]] = {}
        self._unwritten: dict[TensorHandle, Lifetime] = {}

    def begin_all(self, present: list[Allocation]) -> None:
        """Note the tensors that exist before the first moment, and have been written."""
        while present:  # a for loop's variable would keep the last one alive
            self._begin(present.pop(0), 0)
        self._unwritten.clear()

    def made(self, tensor: Allocation) -> None:
        recording = self.recording
        with self._lock:
            self._begin(tensor, recording.next_moment())
            kept, most = len(recording.lifetimes) - len(self._living), self._most
            if most is not None and kept > 2 * most:
                recording.forget(most)

    def ending(self, tensor: Allocation) -> None:
        if tensor.region is not None:
            self._end(tensor.region)

    def moved(self, tensor: Allocation) -> None:
        region = tensor.region
        with self._lock:
            if region is not None and region in self._living:
                lifetime, _ = self._living[region]
                self._living[region] = lifetime, self._watched(tensor, region)

    def was_reset(self) -> None:
        with self._lock:
            self.recording.resets.append(self.recording.moments)

    def written(self, handle: TensorHandle, op: str, program: Program | None) -> None:
        lifetime = self._unwritten.pop(handle, None)
        if lifetime is not None:
            lifetime.op, lifetime.program = op, program

    def finish(self) -> None:
        """End the tensors that live now at the last moment."""
        for lifetime, _ in self._living.values():
            lifetime.end = self.recording.moments
        self._living.clear()
        self.recording.hold(self._arena.chunks())

    def _begin(self, tensor: Allocation, moment: int) -> None:
        region = tensor.region
        if region is None:
            return
        offset = self.recording.offset(region, self._arena.chunks())
        place = region.made_at
        lifetime = Lifetime(tensor.type, offset, region.nbytes, moment, moment, place=place)
        self.recording.lifetimes.append(lifetime)
        self._unwritten[tensor.handle] = lifetime
        self._living[region] = lifetime, self._watched(tensor, region)

    def _watched(self, tensor: Allocation, region: Region) -> weakref.ref[Allocation]:
        return weakref.ref(tensor, lambda _: self._end(region))

    def _end(self, region: Region) -> None:
        with self._lock:
            entry = self._living.pop(region, None)
            if entry is not None:
                entry[0].end = self.recording.next_moment()


@contextmanager
def record_all(*, most: int | None = None) -> Iterator[list[Arena]]:
    """Record every arena made inside the block from its first moment on; yields a list of them."""
    arenas: list[Arena] = []
    with ExitStack() as stack:

        def begin(arena: Arena) -> None:
            arenas.append(arena)
            stack.enter_context(record(arena, most=most))

        on_made.append(begin)
        try:
            yield arenas
        finally:
            on_made.remove(begin)


def snapshot(arena: Arena) -> Recording:
    """What lives in the arena now, as a recording of one moment."""
    recording = Recording(arena.name, arena.capacity)
    for tensor in arena.live():
        region = tensor.region
        if region is not None:
            offset, place = recording.offset(region, arena.chunks()), region.made_at
            lifetime = Lifetime(tensor.type, offset, region.nbytes, 0, 1, place=place)
            recording.lifetimes.append(lifetime)
    return recording


# --- who writes what -----------------------------------------------------------------

Written: TypeAlias = Callable[[TensorHandle, str, Program | None], None]


class _Writes:
    """Tells listeners which op a launch on one VM writes a handle with, and what is copied in.

    For any number of listeners the VM has one layer around `launch` and one around `write`.
    """

    def __init__(self, vm: VMProtocol) -> None:
        self._vm = weakref.ref(vm)
        self._names: dict[Program, str] = {}
        self._told: list[Written] = []
        self._lock = threading.Lock()
        self._observing: AbstractContextManager[None] | None = None

    @contextmanager
    def told_to(self, written: Written) -> Iterator[None]:
        """Inside the block `written(handle, op, program)` is called for every write."""
        with self._lock:
            vm = self._vm()
            if not self._told and vm is not None:
                self._observing = observed(vm, launch=self._launched, write=self._copied_in)
                self._observing.__enter__()
            self._told.append(written)
        try:
            yield
        finally:
            with self._lock:
                self._told.remove(written)
                if not self._told and self._observing is not None:
                    self._observing.__exit__(None, None, None)
                    self._observing = None
                    self._names.clear()  # which keeps the programs

    def _launched(
        self,
        proceed: Callable[..., list[Array]],
        program: Program,
        args: Sequence[TensorHandle] = (),
        **options: Any,
    ) -> list[Array]:
        outputs = proceed(program, args, **options)
        name = self._names.get(program)
        if name is None:
            name = self._names[program] = _op_into_first(program)
        if name and args:
            for written in self._told.copy():
                written(args[0], name, program)
        return outputs

    def _copied_in(self, proceed: Callable[..., None], handle: TensorHandle, array: Array) -> None:
        proceed(handle, array)
        for written in self._told.copy():
            written(handle, COPIED_IN, None)


def _op_into_first(program: Program) -> str:
    """The op that a one-op program writes its first argument with, or nothing."""
    calls = [each for each in program.main.code if each.opcode is Opcode.push_str]
    text: Any = calls[0].immediates[0] if len(calls) == 1 else ""
    return text.removesuffix(OUT) if text.endswith(OUT) else ""
