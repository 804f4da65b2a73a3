"""What an arena holds now, as a table, and over time: which tensors lived where and when.

Only an arena that is being recorded pays for it: while `record` lasts, the instance has an
`alloc`, an `_end` and an `_end_all` of its own, its VM a `launch` and a `write`, and each tensor
a weak reference that notices its end.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, TypeVar

from mlvm.arena.arena import Allocation, Arena, on_made
from mlvm.arena.placement import Region
from mlvm.core.errors import Place, line_of
from mlvm.core.program.program import Opcode, Program
from mlvm.core.protocol import StorageHandle, TensorHandle, VMProtocol
from mlvm.core.types import Array, TensorType

A = TypeVar("A", bound=Allocation)

COPIED_IN: Final = "copied in"
"""Stands for the op of a tensor whose first value came from outside the VM."""


@dataclass(slots=True)
class Lifetime:
    """A tensor's stay in an arena, at bytes `offset` .. `offset + nbytes` and in the moments
    `start` .. `end - 1`. `nbytes` is its size rounded up to what it takes up; `op` names what
    wrote it first, and `place` where in Python it was made, or the line itself, as far as that is
    known."""

    type: TensorType
    offset: int
    nbytes: int
    start: int
    end: int
    op: str = ""
    place: Place | str | None = None

    @property
    def line(self) -> str:
        """The Python line that made it, as `file:line`, or nothing."""
        return self.place or "" if not isinstance(self.place, tuple) else line_of(self.place)


@dataclass
class Recording:
    """The tensors that lived in an arena while it was recorded, in the order they came.

    Each allocation and each end of a tensor makes a new moment; `moments` is the number after
    the last, `first` the one that the recording reaches back to. `resets` are the moments at
    which the arena was reset. Offsets see the arena's storages laid end to end, as they came;
    `capacity` is the most that the arena held of its VM.
    """

    arena: str
    capacity: int = 0
    moments: int = 1
    lifetimes: list[Lifetime] = field(default_factory=list)
    first: int = 0
    resets: list[int] = field(default_factory=list)
    _homes: dict[StorageHandle, int] = field(default_factory=dict, repr=False)
    _extent: int = 0

    def offset(self, arena: Arena, region: Region) -> int:
        """Where the region is when the arena's storages lie end to end."""
        if region.storage not in self._homes:
            for chunk in arena.chunks():
                if chunk.storage not in self._homes:
                    self._homes[chunk.storage] = self._extent
                    self._extent += chunk.nbytes
            self.capacity = max(self.capacity, arena.capacity)
        return self._homes[region.storage] + region.offset

    def so_far(self) -> Recording:
        """A copy in which what lives now does so to the last moment."""
        now = [
            replace(x) if x.end != x.start else replace(x, end=self.moments) for x in self.lifetimes
        ]
        return replace(self, lifetimes=now, resets=self.resets.copy())

    def used(self) -> list[int]:
        """The bytes in use at each moment since `first` of a complete recording. Their maximum
        is a lower bound for any placement."""
        change = [0] * (self.moments - self.first + 1)
        for lifetime in self.lifetimes:
            change[max(lifetime.start, self.first) - self.first] += lifetime.nbytes
            change[lifetime.end - self.first] -= lifetime.nbytes
        return list(accumulate(change[:-1]))

    def forget(self, most: int) -> None:
        """Keep of the tensors that have ended only the last so many."""
        ended = [lifetime.end for lifetime in self.lifetimes if lifetime.end != lifetime.start]
        if len(ended) > most:
            self.first = sorted(ended)[-most - 1]
            self.lifetimes = [
                each for each in self.lifetimes if each.end == each.start or each.end > self.first
            ]
            self.resets = [moment for moment in self.resets if moment >= self.first]


@contextmanager
def record(arena: Arena, *, most: int | None = None) -> Iterator[Recording]:
    """Record what lives in the arena inside the block; the recording is complete after it.

        with record(batch) as recording, batch:
            train_step()
        batch.plot("step.svg")

    What is there before counts as there from the first moment on, what is there after it as
    there to the last. With `most` only about so many of the tensors that have ended are kept, the
    latest. Recordings of an arena may lie within each other.
    """
    recording = Recording(arena.name)
    living: dict[Region, tuple[Lifetime, weakref.ref[Allocation]]] = {}
    by_handle: dict[TensorHandle, Lifetime] = {}
    lock = threading.RLock()

    def begin(tensor: Allocation, moment: int) -> None:
        region = tensor.region
        if region is None:
            return
        offset, place = recording.offset(arena, region), region.made_at
        lifetime = Lifetime(tensor.type, offset, region.nbytes, moment, moment, place=place)
        recording.lifetimes.append(lifetime)
        by_handle[tensor.handle] = lifetime
        living[region] = lifetime, weakref.ref(tensor, lambda _: end(region))

    def end(region: Region) -> None:
        with lock:
            entry = living.pop(region, None)
            if entry is not None:
                entry[0].end = _next_moment(recording)

    def alloc(type: TensorType, kind: type[A] = Allocation) -> A:  # type: ignore[assignment]
        tensor = outer_alloc(type, kind)
        with lock:
            begin(tensor, _next_moment(recording))
            if most is not None and len(recording.lifetimes) > 2 * most + len(living):
                recording.forget(most)
        return tensor

    def end_early(tensor: Allocation, why: str) -> bool:
        if tensor.region is not None:
            end(tensor.region)
        return outer_end(tensor, why)

    def end_all(why: str) -> None:
        outer_end_all(why)
        with lock:
            recording.resets.append(recording.moments)

    def written(handle: TensorHandle, op: str) -> None:
        lifetime = by_handle.pop(handle, None)
        if lifetime is not None:
            lifetime.op = op

    outer_alloc, outer_end, outer_end_all = arena.alloc, arena._end, arena._end_all
    outer = {name: vars(arena).get(name) for name in ("alloc", "_end", "_end_all")}
    noted = arena.note_lines()
    present = arena.live()
    while present:  # the variable of a for loop would keep the last one alive
        begin(present.pop(0), 0)
    by_handle.clear()  # what is there was written before
    arena.alloc = alloc  # type: ignore[method-assign]
    arena._end = end_early  # type: ignore[method-assign]
    arena._end_all = end_all  # type: ignore[method-assign]
    arena.recording = recording
    try:
        with _writes(arena.vm, written):
            yield recording
    finally:
        for name, shadow in outer.items():
            if shadow is None:
                delattr(arena, name)
            else:
                setattr(arena, name, shadow)
        arena.note_lines(noted)
        arena.recording = recording
        for lifetime, _ in living.values():
            lifetime.end = recording.moments
        living.clear()
        recording.capacity = max(recording.capacity, arena.capacity)


@contextmanager
def record_all(*, most: int | None = None) -> Iterator[list[Arena]]:
    """Record every arena made inside the block, from its first moment on; lists them."""
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
            offset, place = recording.offset(arena, region), region.made_at
            lifetime = Lifetime(tensor.type, offset, region.nbytes, 0, 1, place=place)
            recording.lifetimes.append(lifetime)
    return recording


# --- the table -----------------------------------------------------------------------


def report(arena: Arena, *, holders: int = 8) -> str:
    """A table of an arena's sizes and its largest holders, of which it lists so many; if it has
    been recorded, also of what lived when most bytes were in use.

    Holders of one type made on one line share a row. Lines are known where they are noted: in
    arenas of fixed capacity, and while an arena is recorded.
    """
    live = arena.holders()
    capacity = f"{arena.capacity:,}" + ("" if not arena.grows else " (grows)")
    rows = [
        ("arena", arena.name),
        ("on", arena.vm.name),
        ("policy", arena.policy),
        ("used", f"{arena.used:,}"),
        ("high water", f"{arena.high_water:,}"),
        ("capacity", capacity),
        ("tensors", f"{len(live):,}"),
    ]
    lines = [f"{name:10}  {value}" for name, value in rows]
    if live:
        lines += ["", *_largest([(x.type, "", x.line or "", x.nbytes) for x in live], holders)]
    if arena.recording is not None and arena.recording.lifetimes:
        recording = arena.recording.so_far()
        used = recording.used()
        most = max(used)
        moment = used.index(most) + recording.first
        then = [
            (x.type, x.op, x.line, x.nbytes)
            for x in recording.lifetimes
            if x.start <= moment < x.end
        ]
        lines += ["", f"recorded: at most {most:,} bytes in use, at moment {moment:,}"]
        lines += _largest(then, holders)
    return "\n".join(lines)


def _largest(tensors: Sequence[tuple[TensorType, str, str, int]], most: int) -> list[str]:
    """A table of those of one type, op and line together, by their bytes."""
    groups: dict[tuple[TensorType, str, str], list[int]] = {}
    for type, op, line, nbytes in tensors:
        groups.setdefault((type, op, line), []).append(nbytes)
    largest = sorted(groups.items(), key=lambda group: sum(group[1]), reverse=True)
    cells = [
        [f"{sum(sizes):,}", f"{len(sizes):,}", str(type), op, short(line)]
        for (type, op, line), sizes in largest[:most]
    ]
    rest = [nbytes for _, sizes in largest[most:] for nbytes in sizes]
    if rest:
        cells.append([f"{sum(rest):,}", f"{len(rest):,}", "others", "", ""])
    cells.insert(0, ["bytes", "tensors", "type", "op", "made at"])
    shown = [i for i in range(5) if any(row[i] for row in cells[1:])]
    return table([[row[i] for i in shown] for row in cells], right=2)


def short(line: str) -> str:
    """A line with its path seen from where one is, if it lies below."""
    return line.removeprefix(f"{Path.cwd()}{os.sep}")


def table(cells: Sequence[Sequence[str]], *, right: int) -> list[str]:
    """Lines of columns as wide as needed, the first `right` of them flush right."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i < right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


# --- who writes what -----------------------------------------------------------------

Written = Callable[[TensorHandle, str], None]
_watched: Final = threading.Lock()


@contextmanager
def _writes(vm: VMProtocol, written: Written) -> Iterator[None]:
    """Inside the block `written` is told which op a launch writes a handle with, and what is
    copied in. A VM has one shadow of `launch` and `write`, however many listen."""
    with _watched:
        listeners: list[Written] = vm.attachments.setdefault("written", [])
        if not listeners:
            _shadow(vm, listeners)
        listeners.append(written)
    try:
        yield
    finally:
        with _watched:
            listeners.remove(written)
            if not listeners:
                del vm.launch, vm.write, vm.attachments["written"]


def _shadow(vm: VMProtocol, listeners: list[Written]) -> None:
    launch, write = vm.launch, vm.write
    names: dict[Program, str] = {}

    def launched(
        program: Program, args: Sequence[TensorHandle] = (), *, max_steps: int | None = None
    ) -> list[Array]:
        outputs = launch(program, args, max_steps=max_steps)
        name = names.get(program)
        if name is None:
            name = names[program] = _op_into_first(program)
        if name and args:
            for written in [*listeners]:
                written(args[0], name)
        return outputs

    def copied_in(handle: TensorHandle, array: Array) -> None:
        write(handle, array)
        for written in [*listeners]:
            written(handle, COPIED_IN)

    vm.launch = launched  # type: ignore[method-assign]
    vm.write = copied_in  # type: ignore[method-assign]


def _op_into_first(program: Program) -> str:
    """The op that a one-op program writes its first argument with, or nothing."""
    calls = [each for each in program.main.code if each.opcode is Opcode.push_str]
    text: Any = calls[0].immediates[0] if len(calls) == 1 else ""
    return text.removesuffix(".out") if text.endswith(".out") else ""


def _next_moment(recording: Recording) -> int:
    recording.moments += 1
    return recording.moments - 1
