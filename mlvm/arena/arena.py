"""Arenas: named memory for tensors that live and end together.

An arena takes storages from its VM, carves them into regions, and hands the regions out again
and again (see `placement`). A step that allocates as the step before gets the same addresses, and
the views remembered there: in steady state nothing is allocated.

One thread at a time enters an arena, and resets it. Its tensors are read on any thread, and die on
any. So `alloc` and the end of a tensor suit threads, and take no lock, which would cost as much as
all they do. Instead, whoever takes `tensor.region` away ends the tensor. CPython (3.11 and later,
with its global lock) lets another thread in only at a call or a loop; the lines marked `at once`
have neither. All that is rare takes the arena's lock. A thread that has this lock calls no VM: a
launch may call Python that waits for the lock.

A region keeps its handles: the next tensor there has the handle of the last. So whoever has read a
tensor looks whether it still lives, and drops what was read if not.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import ClassVar, Final, NamedTuple, Protocol, TypeAlias

from typing_extensions import TypeVar

from mlvm.arena.fields import AllocationFields, ArenaFields
from mlvm.arena.placement import Chunk, Placement, Reuse, pop, rounded
from mlvm.arena.placement import Region as Region
from mlvm.arena.recording import Recording
from mlvm.core import errors
from mlvm.core.locks import new_lock
from mlvm.core.program.program import Program
from mlvm.core.protocol import TensorHandle, VMProtocol
from mlvm.core.types import TensorType

SMALLEST_CHUNK: Final = 1 << 16
STALE: Final = 0  # no VM ever issues this handle
_LARGEST: Final = 3  # holders that an overflow names
_COPY: Final = Program.of_op("copy.out", 2, {}, 0)

_new: Final = object.__new__

A = TypeVar("A", bound="Allocation", default="Allocation")


class Allocation(AllocationFields):
    """A typed tensor in an arena, until it dies, is freed, or its arena is reset.

    `handle` names it in `arena.vm`. A view has a `base` that it keeps alive, and no region
    of its own. A stale one has handle 0, and its root's `ended` says why.
    """

    __slots__ = ()

    arena: Arena
    handle: TensorHandle
    type: TensorType
    region: Region | None
    base: Allocation | None
    ended: str

    def prepare(self) -> None:
        """What a subclass sets up in a tensor that its arena makes for itself."""

    @property
    def root(self) -> Allocation:
        """What owns the bytes: the base of a view, else the allocation itself."""
        base = self.base  # once: an update by another thread may take it away
        return self if base is None else base

    def views(self) -> list[Allocation]:
        """The views of it that are alive."""
        region = self.region
        return _alive(region.views if region is not None else None)

    def _settle(self) -> None:
        """Be the one that its region, if it has one, belongs to."""
        region = self.region
        if region is not None:
            reference, place = weakref.ref(self), region.made_at
            region.holder = reference
            region.noted = (reference, place) if place is not None else None

    def stale(self) -> errors.StaleTensor:
        """The error for using this allocation after its end."""
        why = getattr(self.root, "ended", "its arena was closed")
        text = f"this {self.type} of arena {self.arena.name!r} ended: {why}"
        return errors.StaleTensor(f"{text}; read it or copy it before")


V = TypeVar("V")


def _alive(entries: weakref.WeakValueDictionary[int, V] | None) -> list[V]:
    """Those that are alive. Another thread may add one meanwhile, so they are copied at once."""
    references = entries.valuerefs() if entries else ()
    return [one for reference in references if (one := reference()) is not None]


def stale_of(tensors: Iterable[Allocation]) -> errors.StaleTensor | None:
    """The error for the first of these tensors that has ended, if one has."""
    for x in tensors:
        if x.handle == STALE or x.arena.closed:
            return x.stale()
    return None


def exchange(x: Allocation, new: Allocation) -> None:
    """Let `x` have the memory of `new`, of the same type, which nobody else knows; `new` gets that
    of `x`. The views of `x` become views of `new`: they see the same bytes as before."""
    region, base = x.region, x.base
    known = (base if base is not None else x).region
    x.region, x.base, x.arena, x.handle, new.region, new.base, new.arena, new.handle = (
        *(new.region, new.base, new.arena, new.handle),
        *(region, base, x.arena, x.handle),
    )  # at once
    for mark in _alive(new.arena._marks):
        if region is not None and id(region.holder) in mark._living:
            reference = weakref.ref(new)
            mark._living[id(reference)] = reference
    moved = regions(x.arena.vm).on_moved
    for tensor in (x, new):
        tensor._settle()
        if moved is not None and tensor.region is not None:
            moved(tensor.region)
        for watcher in tensor.arena._watchers.copy():
            watcher.moved(tensor)
    views = known.views if known is not None else None
    if base is not None and views is not None:
        views.pop(id(x), None)
        views[id(new)] = new
    else:
        for view in _alive(views):
            view.base = new


def rebase(view: Allocation, base: Allocation) -> None:
    """Let a view be one of another base, in the bytes of that. Raises `StaleTensor`."""
    twin = base.arena.view(base, view.type)
    old = view.root.region
    view.base, view.arena, view.handle = twin.base, twin.arena, twin.handle
    if old is not None and old.views is not None:
        old.views.pop(id(view), None)
    region = base.root.region
    if region is not None and region.views is not None:
        region.views[id(view)] = view


class Guest(Protocol):
    """Tensors in other memory that an arena's reset ends too. What is got from a queue inside
    `with arena:` is one."""

    def end(self, why: str) -> None: ...


class Watcher(Protocol):
    """Is told of an arena's tensors: of each one made, each one ended before it dies, each one that
    has moved into a region of another, each that gets a name, and each reset of the arena."""

    def made(self, tensor: Allocation) -> None: ...
    def ending(self, tensor: Allocation) -> None: ...
    def moved(self, tensor: Allocation) -> None: ...
    def named(self, tensor: Allocation, name: Name) -> None: ...
    def was_reset(self) -> None: ...


Name: TypeAlias = tuple[str, str]
_names: Final[weakref.WeakKeyDictionary[Region, tuple[object, Name]]] = weakref.WeakKeyDictionary()
"""Of regions whose tensor has a name: the reference to that tensor, and the name."""


def set_name(tensor: Allocation, kind: str, path: str = "") -> None:
    """Name a tensor in pictures and reports, which else tell its op: what kind of tensor it is,
    which decides its colour, and which one, such as a parameter's path."""
    root = tensor.root
    region = root.region
    if region is not None:
        _names[region] = region.holder, (kind, path)
        for watcher in root.arena._watchers.copy():
            watcher.named(root, (kind, path))


def name_at(region: Region) -> Name:
    """The kind and the path of the tensor that lives in the region, or nothing twice."""
    holder, name = _names.get(region, (None, ("", "")))
    return name if holder is region.holder else ("", "")


class Holder(NamedTuple):
    """A live tensor: its size in the arena, and the Python line that made it, if noted."""

    nbytes: int
    type: TensorType
    line: str | None

    def __str__(self) -> str:
        return f"{self.type}: {self.nbytes:,} bytes" + (f", {self.line}" if self.line else "")


class Mark:
    """A point in an arena's life to rewind to. It refers to the tensors that lived then."""

    __slots__ = ("__weakref__", "_living", "_number", "arena")

    def __init__(self, arena: Arena, number: int, living: dict[int, object]) -> None:
        self.arena = arena
        self._number = number
        self._living = living


class Regions(weakref.WeakValueDictionary[TensorHandle, Region]):
    """The regions of all arenas of one VM, by every handle that views them."""

    data: dict[TensorHandle, weakref.ref[Region]]  # as the base class has it

    def __init__(self, vm: VMProtocol) -> None:
        super().__init__()
        _vms[id(vm)] = vm
        self._once = weakref.WeakValueDictionary[int, Region]()
        self.on_moved: Callable[[Region], None] | None = None
        """Called with each region that a tensor has left, or come to, in an exchange."""

    def add(self, handle: TensorHandle, region: Region) -> None:
        self[handle] = self._once[id(region)] = region

    def once(self) -> list[Region]:
        """Each region once, however many handles view it."""
        return _alive(self._once)


_vms: Final = weakref.WeakValueDictionary[int, VMProtocol]()


def vms() -> list[VMProtocol]:
    """The VMs that have arenas."""
    found = [reference() for reference in _vms.valuerefs()]  # other threads make some meanwhile
    return [vm for vm in found if vm is not None]


def regions(vm: VMProtocol) -> Regions:
    """The `Regions` of the VM."""
    return vm.attached(Regions)


scope: ContextVar[Arena | None] = ContextVar("scope", default=None)
"""The arena that a thread or task allocates results in: that of the last block it began."""


class results_in:
    """A block in which results are allocated in an arena; see `Arena.hosting`."""

    __slots__ = ("arena", "resets", "thread")

    def __init__(self, arena: Arena, *, resets: bool = False) -> None:
        self.arena = arena
        self.resets = resets
        self.thread = threading.current_thread()

    def __enter__(self) -> Arena:
        _set_blocks((*_blocks.get(), self))
        return self.arena

    def __exit__(self, *_: object) -> None:
        _set_blocks(tuple([block for block in _blocks.get() if block is not self]))


_blocks: ContextVar[tuple[results_in, ...]] = ContextVar("blocks", default=())
"""The blocks that a thread or task is in, the innermost last."""


def _set_blocks(blocks: tuple[results_in, ...]) -> None:
    _blocks.set(blocks)
    scope.set(blocks[-1].arena if blocks else None)


_arenas: Final = weakref.WeakValueDictionary[int, "Arena"]()
_kept: Final[list[Arena]] = []

if hasattr(os, "register_at_fork"):
    # A forked process drops what only other threads knew before it frees the locks that they had.
    os.register_at_fork(
        before=lambda: _kept.extend(_alive(_arenas)),
        after_in_parent=_kept.clear,
        after_in_child=_kept.clear,
    )

on_made: Final[list[Callable[[Arena], None]]] = []
"""Functions called with each new arena, such as one that records it from its first moment on."""


class Arena(ArenaFields):
    """Memory of a VM under a name. `with arena:` allocates in it, and resets it at the end.

    `used` bytes are taken now, `high_water` is the most there ever were, `capacity` is what
    the arena holds of its VM. Sizes are in bytes, each tensor's rounded up to 64.

    With `capacity` the arena takes so many bytes at the start and never grows. It notes the Python
    line of each allocation, and names the largest when the capacity does not suffice. Without
    `capacity` it grows by chunks; with `trims` it first gives empty chunks back, once they outweigh
    what is in use.

    It hands a region out again to the next tensor of its size. For a size that it has no region
    of, it merges free neighbours. A growing arena merges only regions that a few resets left
    unused, and only once it holds twice what it ever needed.

    One thread at a time is inside `with arena:` or `arena.allocating()`. Another that enters,
    marks, rewinds, resets or closes it meanwhile gets `ArenaBusy`. Any thread may read its tensors.

    Raises `ArenaError` for an impossible capacity, `OutOfMemory` for one that the VM does not have.
    An op whose result does not fit a fixed capacity raises `ArenaOverflow`.

        >>> arena = ml.Arena(ml.VM("mine"), "batch")
        >>> with arena: y = ml.sum(ml.ones(16))
        >>> arena.used, arena.high_water
        (0, 128)

    Refuses:
        ml.Arena(vm, "a", capacity=-1)  # ArenaError
        ml.Arena(5, "a")  # ArenaError
        busy.mark()  # ArenaBusy
        tight.alloc(x.type)  # ArenaOverflow
        ml.Arena(vm, "a", capacity=2**60)  # OutOfMemory
    """

    report: ClassVar[Callable[..., str]]
    """`arena.report()`; see `mlvm.show.report`, which adds it."""

    _repr_html_: ClassVar[Callable[[Arena], str]]
    plot: ClassVar[Callable[..., None]]
    """`arena.plot(path)`; see `mlvm.show.picture`, which adds it."""

    def __init__(
        self, vm: VMProtocol, name: str = "", *, capacity: int | None = None, trims: bool = False
    ) -> None:
        if not hasattr(vm, "tensor_from_storage"):
            raise errors.ArenaError(
                f"an arena is memory of a VM, not of {errors.brief(vm)}; its name comes second: "
                'ml.Arena(ml.VM(), "weights")'
            )
        if not name:
            raise errors.ArenaError('an arena has a name: ml.Arena(vm, "weights")')
        if capacity is not None and (not isinstance(capacity, int) or capacity < 0):
            raise errors.ArenaError(f"arena {name!r}: a capacity is >= 0 bytes, not {capacity!r}")
        vm.require_open()
        self.vm = vm
        regions(vm)  # from now on it is among `vms`
        self.fast_path = getattr(vm, "fast_path", None)  # of a native VM
        self.name = name
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
        self._lock = new_lock()
        self._inside: list[results_in] = []
        self._marks: weakref.WeakValueDictionary[int, Mark] = weakref.WeakValueDictionary()
        self._marks_made = 0
        # Not the VM itself: this arena may be attached to it, and it must be free to die.
        chunks = self._placement.chunks
        self._close = weakref.finalize(self, _dealloc, weakref.ref(vm), chunks)
        self._close.atexit = False
        if capacity is not None:
            self.note_lines()
            self._add_chunk(capacity)
        _arenas[id(self)] = self
        for callback in on_made:
            callback(self)

    # --- allocation ---

    def alloc(
        self,
        type: TensorType,
        kind: type[A] = Allocation,  # type: ignore[assignment]
        region: Region | None = None,
    ) -> A:
        """A tensor of that type, its bytes undefined; in `region`, if one is given.

        Raises `ArenaOverflow` when a fixed capacity does not suffice, `ArenaError` after close.

        Refuses:
            closed.alloc(x.type)  # ArenaError
            tight.alloc(x.type)  # ArenaOverflow
        """
        if region is None:
            try:
                region = self._bins[type].pop()
            except (KeyError, IndexError):
                region = self._find(type)
        tensor = _new(kind)
        tensor.region = region
        self.used = used = self.used + region.nbytes  # at once, with the lines around it
        if used > self.high_water:
            self.high_water = used
        tensor.arena = self
        tensor.type = type
        tensor.base = None
        try:
            tensor.handle = region.handles[type]
        except KeyError:
            tensor.handle = self._view(region, type)
        refer = self._refer  # a method call would cost 15 ns more
        region.holder = refer(tensor)
        return tensor

    def view(self, base: Allocation, type: TensorType, kind: type[A] = Allocation) -> A:  # type: ignore[assignment]
        """Another tensor over the same bytes, of a type of the same size. It keeps `base` alive.

        Raises `StaleTensor`, or `ArenaError` for a type of other size or a base of another arena.

        Refuses:
            v.arena.view(v, x.type)  # ArenaError
            stale.arena.view(stale, stale.type)  # StaleTensor
        """
        self._require_own(base)
        root = base.root
        region = root.region
        if region is None:
            raise root.stale()
        if type.nbytes != base.type.nbytes:
            raise errors.ArenaError(
                f"a view of {base.type} has as many bytes; {type} has {type.nbytes}"
            )
        tensor = _new(kind)
        tensor.region = None
        tensor.arena = self
        tensor.type = type
        tensor.base = root
        tensor.handle = region.handles.get(type) or self._view(region, type)
        views = region.views
        if views is None:
            with self._lock:  # threads may view one tensor
                views = region.views = region.views or weakref.WeakValueDictionary()
        views[id(tensor)] = tensor
        if root.region is not region:  # another thread has ended or moved it meanwhile
            return self.view(base, type, kind)
        return tensor

    def keep(self, tensor: A) -> A:
        """A copy of a tensor, from any arena of the same VM, in this one; of the same kind.

            best = weights.keep(loss)  # survives the reset of the arena that `loss` is in

        It starts a life of its own: no gradient flows through it. Raises `StaleTensor`,
        `ArenaError` for a tensor of another VM, `ArenaBusy` while another thread is inside this
        arena, and what `alloc` raises.

        Refuses:
            vm_arena.keep(v)  # ArenaError
            vm_arena.keep(freed)  # StaleTensor
            busy.keep(in_busy)  # ArenaBusy
        """
        if not isinstance(tensor, Allocation):
            raise errors.ArenaError(
                f"arena {self.name!r} keeps tensors, not a {tensor.__class__.__name__}"
            )
        if not tensor.arena.vm.is_same(self.vm):
            raise errors.ArenaError(
                f"arena {self.name!r} on {self.vm.name} was asked to keep a {tensor.type} that "
                f"lives on {tensor.arena.vm.name}; keep copies within one VM"
            )
        if tensor.handle == STALE:
            raise tensor.stale()
        with self.allocating():
            copy = self.alloc(tensor.type, tensor.__class__)
            try:
                self.vm.launch(_COPY, (copy.handle, tensor.handle))
            except errors.HandleError as error:
                raise stale_of((tensor, copy)) or error from None
        if tensor.handle == STALE:
            raise tensor.stale()
        copy.prepare()
        return copy

    def free(self, tensor: Allocation) -> None:
        """Give the tensor's bytes back now; it is stale from here on.

        Raises `StaleTensor`, or `ArenaError` for a view or a tensor of another arena.

        Refuses:
            vm_arena.free(v)  # ArenaError
            vm_arena.free(freed)  # StaleTensor
        """
        self._require_own(tensor)
        if tensor.base is not None and tensor.base.region is not None:
            raise errors.ArenaError("free the base of a view")
        if not self._end(tensor, "it was freed"):
            raise tensor.stale()

    def reset(self) -> None:
        """End every tensor of the arena. Its memory and remembered views stay. Raises `ArenaBusy`
        while another thread is inside.

        Refuses:
            busy.reset()  # ArenaBusy
        """
        with self._lock:
            self._require_turn()
            self._end_all("its arena was reset")

    def mark(self) -> Mark:
        """This point in the arena's life. `rewind` goes back to it, any number of times. Raises
        `ArenaBusy` while another thread is inside.

        Refuses:
            busy.mark()  # ArenaBusy
        """
        with self._lock:
            self._require_turn()
            self._marks_made += 1
            living: dict[int, object] = {  # by tensor: an update may move one
                id(region.holder): region.holder
                for region in self._regions()
                if region.tensor() is not None
            }
            mark = Mark(self, self._marks_made, living)
            self._marks[self._marks_made] = mark
            self._placement.tidy()
        return mark

    def rewind(self, mark: Mark) -> None:
        """End every tensor allocated since the mark, and the marks made since.

        Raises `ArenaError` for a mark of another arena, or one that a reset or a rewind to an
        earlier mark has ended; `ArenaBusy` while another thread is inside.

        Refuses:
            busy.rewind(begun)  # ArenaBusy
            vm_arena.rewind(closed_mark)  # ArenaError
        """
        if not isinstance(mark, Mark) or mark.arena is not self:
            whose = f"one of arena {mark.arena.name!r}" if isinstance(mark, Mark) else repr(mark)
            raise errors.ArenaError(f"arena {self.name!r} rewinds to its own marks, not to {whose}")
        with self._lock:
            self._require_turn()
            if self._marks.get(mark._number) is not mark:
                raise errors.ArenaError(
                    f"arena {self.name!r} was reset, or rewound past this mark, since"
                )
            for number in list(self._marks):
                if number > mark._number:
                    self._marks.pop(number, None)
            for region in self._regions():
                tensor = region.tensor()
                if tensor is not None and id(region.holder) not in mark._living:
                    self._end(tensor, "its arena was rewound")
            self._placement.tidy()

    def trim(self) -> None:
        """Give storages in which no tensor lives back to the VM; a fixed capacity stays."""
        if self.grows:
            with self._lock:
                self._placement.release()
            self._give_back()

    def close(self) -> None:
        """End every tensor and give all memory back to the VM. Idempotent. Raises `ArenaBusy` while
        another thread is inside.

        Refuses:
            busy.close()  # ArenaBusy
        """
        with self._lock:
            if not self.closed:
                self._require_turn()
            self._close.detach()
            self._end_all("its arena was closed")
            self._placement.clear()
        self._give_back()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return not self._close.alive

    # --- where results go ---

    def __enter__(self) -> Arena:
        return self._enter(results_in(self, resets=True))

    def __exit__(self, *_: object) -> None:
        """Leave the arena. A thread that finalizes another's generator ends the generator's stay
        only: it goes on allocating where it did."""
        mine = [block for block in _blocks.get() if block.arena is self and block.resets]
        if mine:
            mine[-1].__exit__()
        with self._lock:  # whoever enters meanwhile waits for the reset
            stays = [block for block in self._inside if block.resets]
            if stays:
                self._inside.remove(mine[-1] if mine and mine[-1] in stays else stays[-1])
            if len(stays) <= 1 and self._is_my_turn():
                self._end_all("its arena was reset")

    @contextmanager
    def allocating(self) -> Iterator[Arena]:
        """Allocate results here, and reset nothing at the end: for weights. Raises `ArenaBusy`
        while another thread is inside.

        Refuses:
            within(busy.allocating(), list)  # ArenaBusy
        """
        block = results_in(self)
        self._enter(block)
        try:
            yield self
        finally:
            block.__exit__()
            with self._lock:
                self._inside = [each for each in self._inside if each is not block]

    def hosting(self) -> results_in:
        """A block in which results are allocated here, without entering the arena: for what has its
        place here, such as a tensor that moves, whichever thread is inside."""
        return results_in(self)

    def _enter(self, block: results_in) -> Arena:
        with self._lock:
            self._require_turn()
            self._inside.append(block)
        return block.__enter__()

    def _is_my_turn(self) -> bool:
        return not self._inside or self._inside[0].thread is threading.current_thread()

    def _require_turn(self) -> None:
        """Raise `ArenaBusy` while another thread is inside. The lock is held. A thread that has
        ended is not inside, nor is one of the process that this one was forked from."""
        if not self._is_my_turn():
            self._inside = [block for block in self._inside if block.thread.is_alive()]
        if not self._is_my_turn():
            raise errors.ArenaBusy(
                f"arena {self.name!r} is entered by thread {self._inside[0].thread.name!r}; it "
                f"serves one thread at a time: give each an arena of its own"
            )

    # --- what can be seen ---

    def note_lines(self, noted: bool = True) -> bool:
        """Start or stop noting the Python line of each allocation. Returns whether they were
        noted before."""
        before, self._notes_lines = self._notes_lines, noted
        self._choose_reference()
        return before

    def watch(self, watcher: Watcher) -> None:
        """Tell the watcher of this arena's tensors from here on."""
        self._watchers.append(watcher)
        self._choose_reference()

    def unwatch(self, watcher: Watcher) -> None:
        """Tell the watcher no more."""
        self._watchers.remove(watcher)
        self._choose_reference()

    def _choose_reference(self) -> None:
        """Choose how `alloc` refers to a new tensor. What nobody wants to know costs nothing."""
        if self._watchers:
            self._refer = _tell
        else:
            self._refer = _note if self._notes_lines else weakref.ref

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
            Holder(region.nbytes, tensor.type, errors.line_of(place) if place is not None else None)
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
        return Reuse(grows=self.grows)

    def _regions(self) -> list[Region]:
        return self._placement.regions.copy()  # which other threads may change

    def _require_own(self, tensor: Allocation) -> None:
        if tensor.arena is not self:
            raise errors.ArenaError(
                f"arena {self.name!r} was given a {tensor.type} of arena {tensor.arena.name!r}"
            )

    def _view(self, region: Region, type: TensorType) -> TensorHandle:
        """The region's handle for a type that it had none for. Raises `ArenaError` after close."""
        try:
            new = self.vm.tensor_from_storage(region.storage, type, region.offset)
        except errors.HandleError:
            if self.closed:
                raise self._closed() from None
            raise
        self.views_created += 1
        regions(self.vm).add(new, region)
        handle = region.handles.setdefault(type, new)
        if handle != new:  # another thread made one
            self._dealloc(new)
        return handle

    def _end_all(self, why: str) -> None:
        """End every tensor."""
        placement = self._placement
        with self._lock:
            guests = self.guests.copy()
            self.guests -= guests
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
        for guest in guests:
            guest.end(why)
        for watcher in self._watchers.copy():
            watcher.was_reset()

    def _end(self, tensor: Allocation, why: str) -> bool:
        """End the tensor and its views; whether it had not ended yet.

        A tensor that the garbage collector is about to finalize is not reached here. It keeps its
        region until its `__del__`.
        """
        if tensor.region is None:
            return False
        for watcher in self._watchers.copy():
            watcher.ending(tensor)
        tensor.ended = why
        region, tensor.region = tensor.region, None  # at once
        if region is None:  # another thread was faster
            return False
        self.used -= region.nbytes  # at once
        views, region.views = region.views, None
        tensor.handle = STALE
        for view in _alive(views):
            view.handle = STALE
        region.bin.append(region)  # whoever gets it now finds the tensor stale
        return True

    def _dealloc(self, handle: TensorHandle) -> None:
        regions(self.vm).pop(handle, None)
        with suppress(errors.HandleError):  # another thread has ended its storage
            self.vm.dealloc_tensor(handle)

    def _closed(self) -> errors.ArenaError:
        return errors.ArenaError(f"arena {self.name!r} is closed")

    def _find(self, type: TensorType) -> Region:
        """A region for a type whose bin is empty."""
        nbytes = rounded(type.nbytes)
        while True:
            with self._lock:
                if self.closed:
                    raise self._closed() from None  # nor of the bin that was empty
                thrifty = not self.grows or self.capacity > 2 * self.high_water
                region = self._placement.find(type, thrifty=thrifty)
                if region is None:
                    if not self.grows:
                        raise self._overflow(type, nbytes) from None
                    trims = self.trims and self.capacity - self.used > self.used + nbytes
                    if trims or thrifty:
                        self._placement.release(idle=not trims)
            self._give_back()
            if region is not None:
                return region
            self._add_chunk(max(nbytes, self.capacity // 4, SMALLEST_CHUNK))

    def _overflow(self, type: TensorType, nbytes: int) -> errors.ArenaOverflow:
        left, gap = self.capacity - self.used, self._placement.largest_gap()
        pieces = f", in pieces of at most {gap:,}" if gap < left else ""
        largest = "; ".join(map(str, self.holders()[:_LARGEST]))
        return errors.ArenaOverflow(
            f"arena {self.name!r}: {type} asks for {nbytes:,} bytes; {left:,} of "
            f"{self.capacity:,} are left{pieces}"
            + (f"; the largest holders are {largest}" if largest else "")
        )

    def _add_chunk(self, nbytes: int) -> None:
        nbytes = rounded(nbytes)
        self._placement.chunks.append(Chunk(self.vm.alloc_storage(nbytes), nbytes))
        if self.closed:  # meanwhile, maybe before the chunk was there
            self.close()

    def _give_back(self) -> None:
        """Give back to the VM what the placement has dropped."""
        placement = self._placement
        while (handle := pop(placement.handles)) is not None:
            self._dealloc(handle)
        while (storage := pop(placement.storages)) is not None:
            self.vm.dealloc_storage(storage)


def _note(tensor: Allocation) -> weakref.ref[Allocation]:
    """Note the line that made a new tensor in its region. Returns a reference to the tensor."""
    reference, region = weakref.ref(tensor), tensor.region
    if region is not None:
        region.noted = reference, errors.user_place()
    return reference


def _tell(tensor: Allocation) -> weakref.ref[Allocation]:
    """Tell the watchers of its arena of a new tensor, and return a reference to it. No method: an
    arena that refers to itself would not die as soon as nobody needs it."""
    region, arena = tensor.region, tensor.arena
    reference = (_note if arena._notes_lines else weakref.ref)(tensor)
    if region is not None:
        region.holder = reference  # watchers ask for the place that made it
    for watcher in arena._watchers.copy():
        watcher.made(tensor)
    return reference


def _dealloc(reference: weakref.ref[VMProtocol], chunks: list[Chunk]) -> None:
    vm = reference()
    if vm is not None:
        for chunk in chunks:
            vm.dealloc_storage(chunk.storage)
