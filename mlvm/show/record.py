"""Recordings of arenas at work: the offset, the lifetime and the op of each tensor.

An arena without a recording has no overhead.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from mlvm.arena.arena import Allocation, Arena, name_at, on_made, regions
from mlvm.arena.placement import Region
from mlvm.arena.recording import Lifetime, Recording
from mlvm.core.errors import ArenaError, brief
from mlvm.core.observe import observed
from mlvm.core.program.program import Program
from mlvm.core.protocol import TensorHandle, VMProtocol
from mlvm.core.types import Array
from mlvm.machines.old_keywords import old_keywords
from mlvm.show.calls import ProgramCache, writes_in

if TYPE_CHECKING:
    from contextlib import _GeneratorContextManager

COPIED_IN: Final = "copied in"
"""Name in place of an op for a tensor that was first written from outside the VM."""


@old_keywords("record")
def record(arena: Arena, *, max_tensors: int | None = None) -> _GeneratorContextManager[Recording]:
    """Record what lives in the arena inside the block; the recording is complete after it.

        with record(batch) as recording, batch:
            train_step()
        batch.plot("step.svg")

    A tensor that exists before the block is recorded from the first moment on; a tensor that still
    exists after it is recorded to the last moment. With `max_tensors`, the recording keeps about
    that many of the most recently freed tensors, the number of all other tensors, and the peak use.
    Recordings of an arena may be nested. Raises `ArenaError` for anything but an arena.

        >>> arena = ml.Arena(ml.VM("mine"), "batch")
        >>> with ml.record(arena) as recording, arena: y = ml.ones(16)
        >>> arena.report().splitlines()[-1].split()[:4]
        ['64', '1', 'f32[16]', 'full']

    Invalid calls:
        ml.record(vm)  # ArenaError
    """
    if not isinstance(arena, Arena):
        raise ArenaError(f"ml.record: expected an arena, got {brief(arena)}")
    return _recorded(arena, max_tensors)


@contextmanager
def _recorded(arena: Arena, most: int | None) -> Iterator[Recording]:
    watcher = _Watcher(arena, most)
    watcher.start(arena)
    try:
        yield watcher.recording
    finally:
        watcher.stop()


class _Watcher:
    """Watcher of an arena that writes a recording.

    It records the start, the end and the first writer of each tensor. It keeps neither the arena
    nor its VM alive.
    """

    def __init__(self, arena: Arena, most: int | None, *, programs: bool = False) -> None:
        self.recording = Recording(arena.name, times=[time.perf_counter()], vm=arena.vm.name)
        self._arena = weakref.ref(arena)
        self._writes = weakref.ref(arena.vm.attached(_Writes))
        self._regions = regions(arena.vm)
        self._noted = False
        self._most = most
        self._programs = programs
        self._lock = threading.RLock()
        self._living: dict[Region, tuple[Lifetime, weakref.ref[Allocation]]] = {}
        self._unwritten: dict[TensorHandle, Lifetime] = {}
        self._ended: weakref.finalize[Any, Arena] | None = None

    def start(self, arena: Arena) -> None:
        """Begin with the tensors that exist already and have been written."""
        self._noted = arena.note_lines()
        present = arena.live()
        while present:  # the variable of a for loop would keep the last tensor alive
            self._begin(present.pop(0), 0, arena)
        self._unwritten.clear()
        arena.watch(self)
        arena.recording = self.recording
        writes = self._writes()
        if writes is not None:
            writes.tell(self.written)
        self._ended = weakref.finalize(arena, self._arena_ended)
        self._ended.atexit = False

    def stop(self) -> None:
        """End the recording: tensors that still live end at the last moment."""
        arena, writes = self._arena(), self._writes()
        if writes is not None:
            writes.tell_no_more(self.written)
        if self._ended is not None:
            self._ended.detach()
        if arena is not None:
            arena.unwatch(self)
            arena.note_lines(self._noted)
            arena.recording = self.recording
            self.recording.note_capacity(arena.chunks())
        self._finish()

    def _arena_ended(self) -> None:
        """Finish without locks of a VM: the garbage collector may end an arena anywhere."""
        writes = self._writes()
        if writes is not None:
            writes.drop(self.written)
        self._finish()

    def _finish(self) -> None:
        with self._lock:
            for lifetime, _ in self._living.values():
                lifetime.end = self.recording.moments
            self._living.clear()
            self._unwritten.clear()

    def allocated(self, tensor: Allocation) -> None:
        recording = self.recording
        with self._lock:
            self._begin(tensor, recording.next_moment(), tensor.arena)
            ended, most = len(recording.lifetimes) - len(self._living), self._most
            if most is not None and ended > 2 * most:
                recording.forget(most)

    def ending(self, tensor: Allocation) -> None:
        if tensor.region is not None:
            self._end(tensor.region)

    def moved(self, tensor: Allocation) -> None:
        region = tensor.region
        with self._lock:
            if region is not None and region in self._living:
                lifetime, _ = self._living[region]
                self._living[region] = lifetime, self._watched(tensor, region, lifetime)

    def named(self, tensor: Allocation, name: tuple[str, str]) -> None:
        with self._lock:
            entry = self._living.get(tensor.region) if tensor.region is not None else None
            if entry is not None:
                entry[0].op, entry[0].path = name
                self._unwritten.pop(tensor.handle, None)

    def was_reset(self) -> None:
        with self._lock:
            self.recording.resets.append(self.recording.moments)

    def written(
        self, handle: TensorHandle, op: str, program: Program | None, pc: int | None
    ) -> None:
        if not self._unwritten:
            return
        lifetime = self._unwritten.pop(handle, None)
        region = self._regions.get(handle) if lifetime is None else None
        for other in region.handles.values() if region is not None else ():  # the handle is known
            lifetime = lifetime or self._unwritten.pop(other, None)
        if lifetime is not None:
            lifetime.op = op
            if self._programs:
                lifetime.program, lifetime.pc = program, pc

    def _begin(self, tensor: Allocation, moment: int, arena: Arena) -> None:
        region = tensor.region
        if region is None:
            return
        lifetime = _added(self.recording, tensor, region, arena, moment)
        self._unwritten[tensor.handle] = lifetime
        earlier = self._living.get(region)
        # another thread may return a region before it reports the end
        if earlier is not None:
            earlier[0].end = moment
        self._living[region] = lifetime, self._watched(tensor, region, lifetime)

    def _watched(
        self, tensor: Allocation, region: Region, lifetime: Lifetime
    ) -> weakref.ref[Allocation]:
        return weakref.ref(tensor, lambda _: self._end(region, lifetime))

    def _end(self, region: Region, lifetime: Lifetime | None = None) -> None:
        """End the lifetime in a region, but not the lifetime of a later tensor there."""
        with self._lock:
            entry = self._living.get(region)
            if entry is None or (lifetime is not None and lifetime is not entry[0]):
                return
            del self._living[region]
            entry[0].end = self.recording.next_moment()
            for handle in region.handles.values() if self._unwritten else ():
                self._unwritten.pop(handle, None)


@contextmanager
def record_all(*, most: int | None = None, programs: bool = False) -> Iterator[list[Recording]]:
    """Record every arena made inside the block from the first moment on.

    Yield the list of recordings, which are complete after the block. It keeps no arena alive, and
    programs only with `programs`.

    Arenas of the abstract VM of a trace are left out."""
    watchers: list[_Watcher] = []
    recordings: list[Recording] = []

    def begin(arena: Arena) -> None:
        if arena.vm.stands_for is arena.vm:
            watcher = _Watcher(arena, most, programs=programs)
            watcher.start(arena)
            watchers.append(watcher)
            recordings.append(watcher.recording)

    on_made.append(begin)
    try:
        yield recordings
    finally:
        on_made.remove(begin)
        for watcher in watchers:
            watcher.stop()


def snapshot(arena: Arena) -> Recording:
    """Return the live tensors of the arena as a recording of a single moment."""
    recording = Recording(arena.name, arena.capacity)
    for tensor in arena.live():
        if tensor.region is not None:
            _added(recording, tensor, tensor.region, arena, 0).end = 1
    return recording


def _added(
    recording: Recording, tensor: Allocation, region: Region, arena: Arena, moment: int
) -> Lifetime:
    """Add a tensor that starts at a moment to a recording, and return the lifetime."""
    offset, (op, path) = recording.offset(region, arena.chunks()), name_at(region)
    where = offset, region.nbytes, moment, moment
    lifetime = Lifetime(tensor.type, *where, op, region.allocated_at, path=path)
    recording.lifetimes.append(lifetime)
    return lifetime


# --- writers of tensors --------------------------------------------------------------

Written: TypeAlias = Callable[[TensorHandle, str, Program | None, int | None], None]
"""Listener to writes: takes the handle, the op, and the program and pc of the call."""


class _Writes:
    """Observer of a VM that reports writes by launches and copies from outside to listeners.

    For any number of listeners the VM has one layer around `launch` and one around `write`.
    """

    def __init__(self, vm: VMProtocol) -> None:
        self._vm = weakref.ref(vm)
        self._writes_of = ProgramCache(writes_in)
        self._listeners: list[Written] = []
        self._lock = threading.Lock()
        self._observing: AbstractContextManager[None] | None = None

    def tell(self, written: Written) -> None:
        """Add a listener."""
        with self._lock:
            vm = self._vm()
            if self._observing is None and vm is not None:
                self._observing = observed(vm, launch=self._launched, write=self._copied_in)
                self._observing.__enter__()
            self._listeners.append(written)

    def tell_no_more(self, written: Written) -> None:
        """Remove a listener, and the layers with the last one."""
        self.drop(written)
        with self._lock:
            if not self._listeners and self._observing is not None:
                self._observing.__exit__(None, None, None)
                self._observing = None
                self._writes_of.clear()  # the dict keeps programs alive

    def drop(self, written: Written) -> None:
        """Remove a listener without a lock. Idempotent."""
        with suppress(ValueError):
            self._listeners.remove(written)

    def _launched(
        self,
        proceed: Callable[..., list[Array]],
        program: Program,
        args: Sequence[TensorHandle] = (),
        **options: Any,
    ) -> list[Array]:
        outputs = proceed(program, args, **options)
        for number, (name, pc) in self._writes_of[program].items():
            for written in self._listeners.copy() if number < len(args) else ():
                written(args[number], name, program, pc)
        return outputs

    def _copied_in(self, proceed: Callable[..., None], handle: TensorHandle, array: Array) -> None:
        proceed(handle, array)
        for written in self._listeners.copy():
            written(handle, COPIED_IN, None, None)
