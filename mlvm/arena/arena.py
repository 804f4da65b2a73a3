"""Arenas: named memory for tensors that live and end together.

An arena takes storages from its VM, carves them into regions, and hands the regions out again
and again, as `placement` says. A step that allocates as the step before gets the same addresses,
and the views remembered there: in steady state nothing is allocated.

Threads may share an arena. `alloc` and the end of a tensor take no lock, which would cost as much
as all they do: whoever takes `tensor.region` away ends the tensor, and the lines marked `at once`
hold no call and no loop, the only places where CPython (3.11 and later, with its global lock) lets
another thread in. All that is rare takes the arena's lock, and calls no VM while it has it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar, Token
from typing import ClassVar, Final, Literal, NamedTuple, Protocol

from typing_extensions import TypeVar

from mlvm.arena.placement import Bump, Chunk, Placement, Reuse, pop, rounded
from mlvm.arena.placement import Region as Region
from mlvm.arena.recording import Recording
from mlvm.core.errors import (
    ArenaError,
    ArenaOverflow,
    HandleError,
    StaleTensor,
    line_of,
    user_place,
)
from mlvm.core.program.program import Program
from mlvm.core.protocol import TensorHandle, VMProtocol
from mlvm.core.types import TensorType

Policy = Literal["reuse", "bump"]

SMALLEST_CHUNK: Final = 1 << 16
STALE: Final = 0  # no VM ever issues this handle
_LARGEST: Final = 3  # holders that an overflow names
_COPY: Final = Program.of_op("copy.out", 2, {}, 0)

_new: Final = object.__new__

A = TypeVar("A", bound="Allocation", default="Allocation")


class Allocation:
    """A typed tensor in an arena, until it dies, is freed, or its arena is reset.

    `handle` names it in `arena.vm`. A view has a `base` that it keeps alive, and no region
    of its own. A stale one has handle 0, and `ended` says why.
    """

    __slots__ = ("__weakref__", "arena", "base", "ended", "handle", "region", "type")

    arena: Arena
    handle: TensorHandle
    type: TensorType
    region: Region | None
    base: Allocation | None
    ended: str

    def __del__(self) -> None:
        try:
            region, self.region = self.region, None  # at once
        except AttributeError:  # one that no arena has made
            return
        if region is not None:
            region.bin.append(region)
            self.arena.used -= region.nbytes  # at once

    def prepare(self) -> None:
        """What a kind of its own sets up in a tensor that its arena makes unasked."""

    @property
    def root(self) -> Allocation:
        """What owns the bytes: the base of a view, else the allocation itself."""
        return self if self.base is None else self.base

    def stale(self) -> StaleTensor:
        """The error for using this allocation after its end."""
        return StaleTensor(f"this {self.type} of arena {self.arena.name!r} ended: {self.ended}")


class Guest(Protocol):
    """Tensors in other memory that an arena's reset ends too: what was got from a queue inside
    `with arena:`."""

    def end(self, why: str) -> None: ...


class Watcher(Protocol):
    """What hears of an arena's tensors: each that is made, each that ends before it dies, and the
    arena's resets."""

    def made(self, tensor: Allocation) -> None: ...
    def ending(self, tensor: Allocation) -> None: ...
    def was_reset(self) -> None: ...


class Holder(NamedTuple):
    """A live tensor: what it takes up, and the Python line that made it, where lines are noted."""

    nbytes: int
    type: TensorType
    line: str | None

    def __str__(self) -> str:
        return f"{self.type}: {self.nbytes:,} bytes" + (f", {self.line}" if self.line else "")


class Mark:
    """A point in an arena's life, to rewind to: it refers to what lived then."""

    __slots__ = ("__weakref__", "_living", "_number", "arena")

    def __init__(self, arena: Arena, number: int, living: dict[Region, object]) -> None:
        self.arena = arena
        self._number = number
        self._living = living


class Regions(weakref.WeakValueDictionary[TensorHandle, Region]):
    """The region that each handle views which an arena on one VM has made."""

    def __init__(self, vm: VMProtocol) -> None:
        super().__init__()


def regions(vm: VMProtocol) -> Regions:
    """Those of the VM."""
    return vm.attached(Regions)


scope: ContextVar[Arena | None] = ContextVar("scope", default=None)
"""The arena that results are allocated in, for each thread or task."""

on_made: Final[list[Callable[[Arena], None]]] = []
"""Called with each new arena: how a script's arenas are recorded from their first moment on."""


class Arena:
    """Memory of a VM under a name. `with arena:` allocates in it, and resets it at the end.

    `used` bytes are taken now, `high_water` is the most there ever were, `capacity` is what
    the arena holds of its VM. Sizes are in bytes, each tensor's rounded up to 64.

    With `capacity` the arena takes so many bytes at once and never grows, and notes the Python
    line of each allocation, to name it when the capacity does not suffice. Without, it grows by
    chunks; with `trims` it first gives empty chunks back, once they outweigh what is in use.

    The policy "reuse" is for what a step computes: it hands a region out again to the next tensor
    of its size, and merges free neighbours for a size it has no region of. A growing arena merges
    only what a few resets left unused, and not before it holds twice what it ever needed.
    "bump" is for weights: each tensor lies behind the one before, and bytes return when all that
    lies behind them has ended, too.

    Threads may share an arena. A reset ends the tensors of all of them; of several that are
    inside `with arena:`, the last to leave resets it.
    """

    used: int
    high_water: int

    report: ClassVar[Callable[..., str]]
    """`arena.report()`; see `mlvm.show.report`, which adds it."""

    plot: ClassVar[Callable[..., None]]
    """`arena.plot(path)`; see `mlvm.show.picture`, which adds it."""

    def __init__(
        self,
        vm: VMProtocol,
        name: str,
        *,
        capacity: int | None = None,
        policy: Policy = "reuse",
        trims: bool = False,
    ) -> None:
        if capacity is not None and (not isinstance(capacity, int) or capacity < 0):
            raise ArenaError(f"arena {name!r}: a capacity is >= 0 bytes, not {capacity!r}")
        if policy not in ("reuse", "bump"):
            raise ArenaError(f"arena {name!r}: a policy is 'reuse' or 'bump', not {policy!r}")
        self.vm = vm
        self.name = name
        self.policy = policy
        self.used = 0
        self.high_water = 0
        self.views_created = 0
        self.grows = capacity is None
        self.trims = trims
        self._refer: Callable[[Allocation], weakref.ref[Allocation]] = weakref.ref
        self._notes_lines = False
        self._watchers: list[Watcher] = []
        self.recording: Recording | None = None
        self.guests: set[Guest] = set()
        self._placement = self._new_placement()
        self._bins = self._placement.bins
        self._lock = threading.RLock()
        self._entered: list[Token[Arena | None]] = []
        self._marks: weakref.WeakValueDictionary[int, Mark] = weakref.WeakValueDictionary()
        self._marks_made = 0
        if capacity is not None:
            self.note_lines()
            self._add_chunk(capacity)
        # Not the VM itself: this arena may be attached to it, and it must be free to die.
        chunks = self._placement.chunks
        self._close = weakref.finalize(self, _dealloc, weakref.ref(vm), chunks)
        self._close.atexit = False
        for callback in on_made:
            callback(self)

    # --- allocation ---

    def alloc(self, type: TensorType, kind: type[A] = Allocation) -> A:  # type: ignore[assignment]
        """A tensor of that type, its bytes undefined.

        Raises `ArenaOverflow` when a fixed capacity does not suffice, `ArenaError` after close.
        """
        try:
            region = self._bins[type].pop()
        except (KeyError, IndexError):
            region = self._find(type)
        self.used = used = self.used + region.nbytes  # at once, with the next two lines
        if used > self.high_water:
            self.high_water = used
        tensor = _new(kind)
        tensor.region = region
        tensor.arena = self
        tensor.type = type
        tensor.base = None
        tensor.handle = region.handles.get(type) or self._view(region, type)
        refer = self._refer  # called as a method of the instance it would cost 15 ns more
        region.holder = refer(tensor)
        return tensor

    def view(self, base: Allocation, type: TensorType, kind: type[A] = Allocation) -> A:  # type: ignore[assignment]
        """Another tensor over the same bytes, of a type with as many. It keeps `base` alive.

        Raises `StaleTensor`, or `ArenaError` for a type of other size or a base of another arena.
        """
        self._require_own(base)
        base = base.root
        region = base.region
        if region is None:
            raise base.stale()
        if type.nbytes != base.type.nbytes:
            raise ArenaError(f"a view of {base.type} has as many bytes; {type} has {type.nbytes}")
        tensor = _new(kind)
        tensor.region = None
        tensor.arena = self
        tensor.type = type
        tensor.base = base
        tensor.handle = region.handles.get(type) or self._view(region, type)
        views = region.views
        if views is None:
            with self._lock:
                views = region.views
                if views is None:
                    views = region.views = weakref.WeakValueDictionary()
        views[id(tensor)] = tensor
        if base.region is not region:  # another thread has ended it, maybe without seeing the view
            tensor.handle = STALE
            tensor.ended = base.ended
            raise base.stale()
        return tensor

    def keep(self, tensor: A) -> A:
        """A copy of a tensor, from any arena of the same VM, in this one; of the same kind.

            best = weights.keep(loss)  # survives the reset of the arena that `loss` is in

        It starts a life of its own: no gradient flows through it. Raises `StaleTensor`,
        `ArenaError` for a tensor of another VM, and what `alloc` raises.
        """
        if not isinstance(tensor, Allocation):
            raise ArenaError(
                f"arena {self.name!r} keeps tensors, not a {tensor.__class__.__name__}"
            )
        if not tensor.arena.vm.is_same(self.vm):
            raise ArenaError(
                f"arena {self.name!r} on {self.vm.name} was asked to keep a {tensor.type} that "
                f"lives on {tensor.arena.vm.name}; keep copies within one VM"
            )
        if tensor.handle == STALE:
            raise tensor.stale()
        copy = self.alloc(tensor.type, tensor.__class__)
        copy.prepare()
        self.vm.launch(_COPY, (copy.handle, tensor.handle))
        return copy

    def free(self, tensor: Allocation) -> None:
        """Give the tensor's bytes back now; it is stale from here on.

        Raises `StaleTensor`, or `ArenaError` for a view or a tensor of another arena.
        """
        self._require_own(tensor)
        if tensor.base is not None and tensor.base.region is not None:
            raise ArenaError("free the base of a view")
        if not self._end(tensor, "it was freed"):
            raise tensor.stale()

    def reset(self) -> None:
        """End every tensor of the arena. Its memory and remembered views stay."""
        self._end_all("its arena was reset")

    def mark(self) -> Mark:
        """This point in the arena's life, to `rewind` to, more than once if one likes."""
        self._marks_made += 1
        living: dict[Region, object] = {
            region: region.holder for region in self._regions() if region.tensor() is not None
        }
        mark = Mark(self, self._marks_made, living)
        self._marks[self._marks_made] = mark
        self._placement.tidy()
        return mark

    def rewind(self, mark: Mark) -> None:
        """End every tensor allocated since the mark, and the marks made since.

        Raises `ArenaError` for a mark that a reset or an earlier mark's rewind has passed, or of
        another arena.
        """
        if not isinstance(mark, Mark) or mark.arena is not self:
            whose = f"one of arena {mark.arena.name!r}" if isinstance(mark, Mark) else repr(mark)
            raise ArenaError(f"arena {self.name!r} rewinds to its own marks, not to {whose}")
        if self._marks.get(mark._number) is not mark:
            raise ArenaError(f"arena {self.name!r} was reset, or rewound past this mark, since")
        for number in list(self._marks):
            if number > mark._number:
                self._marks.pop(number, None)
        for region in self._regions():
            tensor = region.tensor()
            if tensor is not None and mark._living.get(region) is not region.holder:
                self._end(tensor, "its arena was rewound")
        self._placement.tidy()

    def trim(self) -> None:
        """Give storages in which no tensor lives back to the VM; a fixed capacity stays."""
        if self.grows:
            with self._lock:
                self._placement.release()
            self._give_back()

    def close(self) -> None:
        """End every tensor and give all memory back to the VM. Idempotent."""
        self._end_all("its arena was closed")
        self._close.detach()
        with self._lock:
            self._placement.clear()
        self._give_back()

    # --- where results go ---

    def __enter__(self) -> Arena:
        self._entered.append(scope.set(self))
        return self

    def __exit__(self, *_: object) -> None:
        for token in reversed(self._entered):
            try:
                scope.reset(token)
            except ValueError:  # another thread's or task's
                continue
            self._entered.remove(token)
            break
        else:  # a generator that another thread finalizes
            self._entered.pop()
        if not self._entered:
            self.reset()

    @contextmanager
    def allocating(self) -> Iterator[Arena]:
        """Allocate results here, and reset nothing at the end: for weights."""
        before = scope.set(self)
        try:
            yield self
        finally:
            scope.reset(before)

    # --- what can be seen ---

    def note_lines(self, noted: bool = True) -> bool:
        """Note the Python line of each allocation from here on, or not; whether it was so."""
        before, self._notes_lines = self._notes_lines, noted
        self._choose_reference()
        return before

    def watch(self, watcher: Watcher) -> None:
        """Have the watcher hear of this arena's tensors from here on."""
        self._watchers.append(watcher)
        self._choose_reference()

    def unwatch(self, watcher: Watcher) -> None:
        """Tell the watcher no more."""
        self._watchers.remove(watcher)
        self._choose_reference()

    def _choose_reference(self) -> None:
        """How `alloc` refers to a new tensor: what nobody wants to know costs nothing."""
        if self._watchers:
            self._refer = self._tell
        else:
            self._refer = _note if self._notes_lines else weakref.ref

    def _tell(self, tensor: Allocation) -> weakref.ref[Allocation]:
        region = tensor.region
        reference = (_note if self._notes_lines else weakref.ref)(tensor)
        if region is not None:
            region.holder = reference  # watchers ask for the place that made it
        for watcher in self._watchers.copy():
            watcher.made(tensor)
        return reference

    @property
    def capacity(self) -> int:
        """The bytes that the arena holds of its VM."""
        return sum(chunk.nbytes for chunk in self.chunks())

    def chunks(self) -> list[Chunk]:
        """The storages that the arena holds of its VM, in the order they came."""
        return self._placement.chunks.copy()

    def live(self) -> list[Allocation]:
        """The tensors that hold a region now, in order of address."""
        by_address = sorted(self._regions(), key=lambda region: (region.storage, region.offset))
        return [tensor for region in by_address if (tensor := region.tensor()) is not None]

    def holders(self) -> list[Holder]:
        """What the live tensors take up and where they were made, the largest first."""
        found = [
            Holder(region.nbytes, tensor.type, line_of(place) if place is not None else None)
            for region in self._regions()
            if (tensor := region.tensor()) is not None
            for place in [region.made_at]
        ]
        return sorted(found, key=lambda holder: holder.nbytes, reverse=True)

    def __repr__(self) -> str:
        return (
            f"<{self.__class__.__name__} {self.name!r} on {self.vm.name}: {self.used:,} of "
            f"{self.capacity:,} bytes used, high water {self.high_water:,}>"
        )

    # --- inside ---

    def _new_placement(self) -> Placement:
        return (Bump if self.policy == "bump" else Reuse)(grows=self.grows)

    def _regions(self) -> list[Region]:
        return self._placement.regions.copy()  # which other threads may change

    def _require_own(self, tensor: Allocation) -> None:
        if tensor.arena is not self:
            raise ArenaError(
                f"arena {self.name!r} was given a {tensor.type} of arena {tensor.arena.name!r}"
            )

    def _view(self, region: Region, type: TensorType) -> TensorHandle:
        handle = self.vm.tensor_from_storage(region.storage, type, region.offset)
        region.handles[type] = handle
        regions(self.vm)[handle] = region
        self.views_created += 1
        return handle

    def _end_all(self, why: str) -> None:
        for guest in self.guests.copy():  # which leave by themselves when they end
            guest.end(why)
        placement = self._placement
        self._marks.clear()
        placement.resets = reset = placement.resets + 1
        for region in self._regions():
            holder = region.holder
            if holder is region.seen or holder is None:
                continue
            tensor = holder()
            if tensor is not None:
                self._end(tensor, why)
            region.seen = holder
            region.last = reset
        placement.tidy()
        for watcher in self._watchers.copy():
            watcher.was_reset()

    def _end(self, tensor: Allocation, why: str) -> bool:
        """End the tensor and its views, unless it has ended. One that the garbage collector is
        about to finalize cannot be reached any more: it keeps its region until its `__del__`."""
        if tensor.region is None:
            return False
        for watcher in self._watchers.copy():
            watcher.ending(tensor)
        tensor.ended = why
        region, tensor.region = tensor.region, None  # at once
        if region is None:  # another thread was faster
            return False
        views, region.views = region.views, None
        tensor.handle = STALE
        for reference in views.valuerefs() if views else ():
            view = reference()
            if view is not None:
                view.handle = STALE
                view.ended = why
        region.bin.append(region)
        self.used -= region.nbytes  # at once
        return True

    def _find(self, type: TensorType) -> Region:
        """A region for a type whose bin is empty."""
        nbytes = rounded(type.nbytes)
        while True:
            with self._lock:
                if not self._close.alive:
                    raise ArenaError(f"arena {self.name!r} is closed")
                thrifty = not self.grows or self.capacity > 2 * self.high_water
                region = self._placement.find(type, thrifty=thrifty)
                if region is None:
                    if not self.grows:
                        raise self._overflow(type, nbytes)
                    trims = self.trims and self.capacity - self.used > self.used + nbytes
                    if trims or thrifty:
                        self._placement.release(idle=not trims)
            self._give_back()
            if region is not None:
                return region
            self._add_chunk(max(nbytes, self.capacity // 4, SMALLEST_CHUNK))

    def _overflow(self, type: TensorType, nbytes: int) -> ArenaOverflow:
        left, gap = self.capacity - self.used, self._placement.largest_gap()
        pieces = f", in pieces of at most {gap:,}" if gap < left else ""
        largest = "; ".join(map(str, self.holders()[:_LARGEST]))
        return ArenaOverflow(
            f"arena {self.name!r}: {type} asks for {nbytes:,} bytes; {left:,} of "
            f"{self.capacity:,} are left{pieces}"
            + (f"; the largest holders are {largest}" if largest else "")
        )

    def _add_chunk(self, nbytes: int) -> None:
        nbytes = rounded(nbytes)
        self._placement.chunks.append(Chunk(self.vm.alloc_storage(nbytes), nbytes))

    def _give_back(self) -> None:
        """Give back to the VM what the placement has dropped."""
        placement = self._placement
        while (handle := pop(placement.handles)) is not None:
            with suppress(HandleError):  # another thread has given its storage back
                self.vm.dealloc_tensor(handle)
        while (storage := pop(placement.storages)) is not None:
            self.vm.dealloc_storage(storage)


def _note(tensor: Allocation) -> weakref.ref[Allocation]:
    """A reference to a tensor just made, once its region knows the line that made it."""
    reference, region = weakref.ref(tensor), tensor.region
    if region is not None:
        region.noted = reference, user_place()
    return reference


def _dealloc(reference: weakref.ref[VMProtocol], chunks: list[Chunk]) -> None:
    vm = reference()
    if vm is not None:
        for chunk in chunks:
            vm.dealloc_storage(chunk.storage)
