"""Arenas: named memory for tensors that are freed together.

An arena allocates storages from a VM, divides them into regions, and reuses the regions (see
`placement`). A step that repeats the allocations of the previous step gets the same addresses and
the views that were created there. A steady state therefore needs no new storages or views.

Only one thread at a time can enter or reset an arena. Any thread may read and free tensors. `alloc`
and freeing a tensor are therefore thread-safe, but without a lock, which would double the cost. The
thread that removes `tensor.region` frees the tensor. CPython (3.11 and later, with its global lock)
switches threads only at a call or a loop; the lines marked `atomic` have neither. Rare operations
use the arena's lock. A thread that holds this lock must not call the VM, because a launch may run
Python code that waits for the lock.

A region keeps the handles of freed tensors, and a later tensor in the region gets the same handle.
After reading a tensor, the reader therefore checks that the tensor is still alive, and otherwise
discards the value.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import ClassVar, Final, NamedTuple, Protocol, TypeAlias

from typing_extensions import TypeVar

from mlvm.arena.context import current, set_arena
from mlvm.arena.fields import AllocationFields, ArenaFields
from mlvm.arena.placement import Chunk, Placement, Reuse, pop, rounded, size_class
from mlvm.arena.placement import Region as Region
from mlvm.arena.recording import Recording
from mlvm.core import errors
from mlvm.core.locks import new_lock
from mlvm.core.program.program import Program
from mlvm.core.protocol import TensorHandle, VMProtocol
from mlvm.core.sizes import MAX_SIZE, parse_size
from mlvm.core.types import TensorType

SMALLEST_CHUNK: Final = 1 << 16

KEPT_BYTES: Final = 1 << 20
"""Unused bytes that an arena with `trims` keeps.

Otherwise calls with ever new sizes would free and allocate chunks all the time.
"""

STALE: Final = 0  # no VM creates this handle
_ENDED: Final = -1  # unknown to every VM; the tensor was not freed
_COPY: Final = Program.of_op("copy.out", 2, {}, 0)

_new: Final = object.__new__

A = TypeVar("A", bound="Allocation", default="Allocation")


class Allocation(AllocationFields):
    """Typed tensor in an arena, until it is garbage collected or freed, or the arena is reset.

    `arena`: the arena that contains the tensor.
    `handle`: handle in `arena.vm`; 0 if stale.
    `region`: memory of the tensor; None for a view or a freed tensor.
    `base`: for a view, the tensor that owns the bytes. The view keeps it alive.
    `ended`: the reason why the tensor was freed.
    """

    __slots__ = ()

    arena: Arena
    handle: TensorHandle
    type: TensorType
    region: Region | None
    base: Allocation | None
    ended: str
    is_part: bool
    """Whether NumPy would return a view of a different tensor, until the first update."""

    def prepare(self) -> None:
        """Initialize a tensor that the arena itself allocates; subclasses override this."""

    @property
    def root(self) -> Allocation:
        """The tensor that owns the bytes: the base of a view, else the tensor itself."""
        base = self.base  # read once, as another thread may change it
        return self if base is None else base

    def views(self) -> list[Allocation]:
        """Return the live views of the tensor."""
        region = self.region
        return [*region.views] if region is not None else []

    def _settle(self) -> None:
        """Register the tensor as the holder of the region, if it has one."""
        region = self.region
        if region is not None:
            reference, place = weakref.ref(self), region.allocated_at
            region.holder = reference
            region.noted = (reference, place) if place is not None else None

    def stale(self) -> errors.StaleTensorError:
        """Return the error for using this tensor after it was freed."""
        traced = tracer_of(self)
        if traced and self.arena.closed:
            return errors.StaleTensorError(
                f"use of an abstract tensor: {self.type} belongs to the trace of {traced}, which "
                f"has finished; return it from the function"
            )
        why = getattr(self.root, "ended", "the arena was closed")
        text = f"{self.type} of arena {self.arena.name!r} was freed: {why}"
        return errors.StaleTensorError(
            f"use of a freed tensor: {text}; copy it out first, for example with weights.keep(x)"
        )


def tracer_of(x: Allocation) -> str:
    """Return what is being traced with this abstract tensor, or ""."""
    return getattr(x.arena.vm, "what", "")


V = TypeVar("V")


class ViewLog:
    """Log of new views, which numbers them by id in the order of creation.

    count: number of views created while the log is in `view_logs`
    """

    def __init__(self) -> None:
        self.count = 0
        self.numbers: dict[int, int] = {}

    def note(self, view: Allocation) -> None:
        self.numbers[id(view)] = self.count
        self.count += 1


view_logs: Final[list[ViewLog]] = []
"""Logs that record each new view, of any thread."""


def _alive(entries: weakref.WeakValueDictionary[int, V] | None) -> list[V]:
    """Return the live values.

    The references are copied atomically, as another thread may add some.
    """
    references = entries.valuerefs() if entries else ()
    return [one for reference in references if (one := reference()) is not None]


def trim_arenas(vm: VMProtocol) -> None:
    """Return unused storages of all arenas to a VM that has run out of memory."""
    for arena in _alive(_arenas):
        if arena.vm is vm:
            arena.trim()


def stale_of(tensors: Iterable[Allocation]) -> errors.StaleTensorError | None:
    """Return the error for the first of these tensors that was freed, or None."""
    for x in tensors:
        if x.handle == STALE or x.arena.closed:
            return x.stale()
    return None


def exchange(x: Allocation, new: Allocation) -> None:
    """Exchange the memory of `x` and `new`, which have the same type.

    Only the caller may refer to `new`. The views of `x` become views of `new`, so they see the same
    bytes as before.
    """
    region, base = x.region, x.base
    owner = (base if base is not None else x).region
    x.region, x.base, x.arena, x.handle, new.region, new.base, new.arena, new.handle = (
        *(new.region, new.base, new.arena, new.handle),
        *(region, base, x.arena, x.handle),
    )  # atomic
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
    if base is not None and owner is not None:
        owner.remove_view(x)
        owner.add_view(new)
        for log in view_logs:
            log.note(new)
    elif owner is not None:
        for view in owner.views:
            view.base = new


def rebase(view: Allocation, base: Allocation) -> None:
    """Move a view to a different base and the bytes of that base. Raises `StaleTensorError`."""
    twin = base.arena.view(base, view.type)
    old = view.root.region
    view.base, view.arena, view.handle = twin.base, twin.arena, twin.handle
    if old is not None:
        old.remove_view(view)
    region = base.root.region
    if region is not None:
        region.add_view(view)


class Guest(Protocol):
    """Interface of tensors in other memory that an arena's reset also frees.

    An example is a queue's element that was taken inside `with arena:`.
    """

    def end(self, why: str) -> None: ...


class Watcher(Protocol):
    """Listener for events of an arena: allocations, frees, moves of tensors, names, resets."""

    def allocated(self, tensor: Allocation) -> None: ...
    def ending(self, tensor: Allocation) -> None: ...
    def moved(self, tensor: Allocation) -> None: ...
    def named(self, tensor: Allocation, name: Name) -> None: ...
    def was_reset(self) -> None: ...


Name: TypeAlias = tuple[str, str]
_names: Final[weakref.WeakKeyDictionary[Region, tuple[object, Name]]] = weakref.WeakKeyDictionary()
"""Map from the region of a named tensor to a reference to the tensor and the name."""


def set_name(tensor: Allocation, kind: str, path: str = "") -> None:
    """Name a tensor for plots and reports, which show the op by default.

    kind: decides the colour.
    path: distinguishes tensors of the same kind, such as a parameter's path.
    """
    root = tensor.root
    region = root.region
    if region is not None:
        _names[region] = region.holder, (kind, path)
        for watcher in root.arena._watchers.copy():
            watcher.named(root, (kind, path))


def name_at(region: Region) -> Name:
    """Return the kind and path of the region's tensor, or two empty texts."""
    holder, name = _names.get(region, (None, ("", "")))
    return name if holder is region.holder else ("", "")


class Holder(NamedTuple):
    """Live tensor, with the size in the arena, the type, and the Python line that allocated it.

    The line is None if it was not recorded.
    """

    nbytes: int
    type: TensorType
    line: str | None

    def __str__(self) -> str:
        return f"{self.type}: {self.nbytes:,} bytes" + (f", {self.line}" if self.line else "")


_mark_numbers: Final = itertools.count(1)


class Mark:
    """Point to which an arena can rewind. It refers to the tensors that were alive then."""

    __slots__ = ("__weakref__", "_living", "_number", "arena")

    def __init__(self, arena: Arena, number: int, living: dict[int, object]) -> None:
        self.arena = arena
        self._number = number
        self._living = living


class Regions(weakref.WeakValueDictionary[TensorHandle, Region]):
    """Regions of all arenas of a VM, by handle."""

    data: dict[TensorHandle, weakref.ref[Region]]  # declared in the base class

    def __init__(self, vm: VMProtocol) -> None:
        super().__init__()
        _vms[id(vm)] = vm
        self._once = weakref.WeakValueDictionary[int, Region]()
        self.on_moved: Callable[[Region], object] | None = None
        """Function called with each region of a tensor that `exchange` has moved."""

    def add(self, handle: TensorHandle, region: Region) -> None:
        self[handle] = self._once[id(region)] = region

    def note(self, region: Region) -> None:
        """Add a region that has no handle yet."""
        self._once[id(region)] = region

    def once(self) -> list[Region]:
        """Return each region once, although it may have several handles."""
        return _alive(self._once)


_vms: Final = weakref.WeakValueDictionary[int, VMProtocol]()


def vms() -> list[VMProtocol]:
    """Return the VMs that have arenas."""
    return _alive(_vms)


def regions(vm: VMProtocol) -> Regions:
    """Return the `Regions` of a VM."""
    return vm.attached(Regions)


def scope() -> Arena | None:
    """Return the arena of this thread's or task's innermost block; None outside of blocks."""
    return current().arena  # type: ignore[no-any-return]


class results_in:
    """Context manager that allocates results in an arena; see `Arena.hosting`."""

    __slots__ = ("arena", "resets", "thread")

    def __init__(self, arena: Arena, *, resets: bool = False) -> None:
        self.arena = arena
        self.resets = resets
        self.thread = threading.current_thread()

    def __enter__(self) -> Arena:
        try:
            _set_blocks((*current().arena_blocks, self))
        except BaseException:  # an interrupt
            self.__exit__()
            raise
        return self.arena

    def __exit__(self, *_: object) -> None:
        try:
            self._remove()
        except BaseException:  # an interrupt
            self._remove()
            raise

    def _remove(self) -> None:
        blocks = current().arena_blocks
        if blocks[-1:] == (self,):
            _set_blocks(blocks[:-1])
        else:
            _set_blocks(tuple([block for block in blocks if block is not self]))


def _set_blocks(blocks: tuple[results_in, ...]) -> None:
    set_arena(blocks[-1].arena if blocks else None, blocks)


_arenas: Final = weakref.WeakValueDictionary[int, "Arena"]()
_alive_at_fork: Final[list[Arena]] = []

if hasattr(os, "register_at_fork"):
    # A forked process drops references of other threads before it releases the locks.
    os.register_at_fork(
        before=lambda: _alive_at_fork.extend(_alive(_arenas)),
        after_in_parent=_alive_at_fork.clear,
        after_in_child=_alive_at_fork.clear,
    )

on_made: Final[list[Callable[[Arena], None]]] = []
"""Callbacks for each new arena, for example to record the arena from the start."""


class Arena(ArenaFields):
    """Named memory of a VM.

    `with arena:` allocates results in it, and resets it when the block exits.

    vm: VM that provides the memory.
    name: name for messages, reports and plots.
    capacity: size, such as `"8 MiB"` or a number of bytes. The arena allocates it immediately and
        never grows. The lines of allocations are recorded, and an overflow names the largest
        tensors. By default, None, the arena grows by chunks.
    trims: free unused chunks when they outweigh the bytes in use; only for growing arenas.

    Attributes: `used` is the number of bytes of live tensors, each rounded up to 64; `high_water`
    the maximum of `used` so far; `capacity` the bytes of the arena's storages.

    The next tensor of the same size reuses a region. If no region has this size, free neighbours
    are merged. A growing arena merges only regions that were unused for a few resets, and only if
    the capacity exceeds twice the high-water mark.

    Only one thread at a time can be inside `with arena:` or `arena.allocating()`. If another thread
    enters, marks, rewinds, resets or closes the arena, it gets `ArenaBusyError`. Any thread may
    read the tensors.

    Raises `ArenaError` for an invalid capacity, `OutOfMemoryError` if the VM has less memory. An op
    raises `ArenaOverflowError` if the result does not fit into a fixed capacity.

        >>> arena = ml.Arena(ml.VM("mine"), "batch")
        >>> with arena: y = ml.sum(ml.ones(16))
        >>> arena.used, arena.high_water
        (0, 128)

    Invalid calls:
        ml.Arena(vm, "a", capacity=-1)  # ArenaError
        ml.Arena(5, "a")  # ArenaError
        busy.mark()  # ArenaBusyError
        tight.alloc(x.type)  # ArenaOverflowError
        ml.Arena(vm, "a", capacity=2**60)  # OutOfMemoryError
    """

    report: ClassVar[Callable[..., str]]
    """Method `arena.report()`, which `mlvm.show.report` adds."""

    _repr_html_: ClassVar[Callable[[Arena], str]]
    plot: ClassVar[Callable[..., None]]
    """Method `arena.plot(path)`, which `mlvm.show.picture` adds."""

    def __init__(
        self,
        vm: VMProtocol,
        name: str = "",
        *,
        capacity: int | str | None = None,
        trims: bool = False,
    ) -> None:
        if not hasattr(vm, "tensor_from_storage"):
            raise errors.ArenaError(
                f"ml.Arena: expected a VM, got {errors.brief(vm)}; the name is the second "
                'argument: ml.Arena(ml.VM(), "weights")'
            )
        if not name:
            raise errors.ArenaError('ml.Arena: expected a name, got none: ml.Arena(vm, "weights")')
        if capacity is not None:
            where = f"arena {name!r}: capacity"
            capacity = parse_size(capacity, where, least=0, error=errors.ArenaError)
        self.vm = vm
        self.name = name
        self._require_open_vm()
        regions(vm)  # adds it to `vms`
        self.fast_path = getattr(vm, "fast_path", None)  # of a native VM
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
        self._sizes = self._placement.sizes
        self._lock = new_lock()
        self._inside: list[results_in] = []
        self._marks: weakref.WeakValueDictionary[int, Mark] = weakref.WeakValueDictionary()
        # This is a weak reference because the arena may be attached to the VM and must not keep it
        # alive.
        self._close = weakref.finalize(self, _dealloc, weakref.ref(vm), self._placement.chunks)
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
        """Allocate an uninitialized tensor, in `region` if passed.

        Raises `ArenaOverflowError` if a fixed capacity does not suffice, `ArenaError` after close.

        Invalid calls:
            closed.alloc(x.type)  # ArenaError
            tight.alloc(x.type)  # ArenaOverflowError
        """
        if region is None:
            try:
                region = self._bins[type].pop()
            except (KeyError, IndexError):
                region = self._find(type)
        tensor = _new(kind)
        tensor.region = region
        self.used = used = self.used + region.nbytes  # atomic, with the lines around it
        if used > self.high_water:
            self.high_water = used
        tensor.arena = self
        tensor.type = type
        tensor.base = None
        tensor.is_part = False
        try:
            tensor.handle = region.handles[type]
        except KeyError:
            if len(region.handles) >= 16:  # one for each type of tensor
                self._forget_handles(region)
            tensor.handle = self._view(region, type)
        refer = self._refer  # a method call would cost 15 ns more
        region.holder = refer(tensor)
        return tensor

    def provide(self, type: TensorType) -> bool:
        """Add a region with a known address to the bin of this type, for use by C code.

        Change nothing and return False if the arena chooses regions only for specific tensors.
        """
        if self.__class__._find is not Arena._find:
            return False
        region = self._find(type)
        if not region.address:
            self._view(region, type)
        elif not region.handles:
            regions(self.vm).note(region)
        region.bin.append(region)
        return True

    def view(self, base: Allocation, type: TensorType, kind: type[A] = Allocation) -> A:  # type: ignore[assignment]
        """Create a tensor over the same bytes, with a type of the same size. It keeps `base` alive.

        Raises `StaleTensorError`, or `ArenaError` for a type of a different size or a base of
        another arena.

        Invalid calls:
            v.arena.view(v, x.type)  # ArenaError
            stale.arena.view(stale, stale.type)  # StaleTensorError
        """
        self._require_own(base)
        root = base.root
        region = root.region
        if region is None:
            raise root.stale()
        if type.nbytes != base.type.nbytes:
            raise errors.ArenaError(
                f"a view of {base.type}: expected a type of {base.type.nbytes} bytes, got {type}"
            )
        tensor = _new(kind)
        tensor.region = None
        tensor.arena = self
        tensor.type = type
        tensor.base = root
        tensor.is_part = False
        tensor.handle = region.handles.get(type) or self._view(region, type)
        region.add_view(tensor)
        for log in view_logs:
            log.note(tensor)
        if root.region is not region:  # another thread has freed or moved it meanwhile
            return self.view(base, type, kind)
        return tensor

    def keep(self, tensor: A) -> A:
        """Copy a tensor of any arena of the same VM into this arena; the class stays the same.

            best = weights.keep(loss)  # survives the reset of the arena that `loss` is in

        No gradient flows through the copy. Raises `StaleTensorError`, `ArenaError` for a tensor of
        a different VM, `ArenaBusyError` while another thread is inside this arena, and the errors
        of `alloc`.

        Invalid calls:
            vm_arena.keep(v)  # ArenaError
            vm_arena.keep(freed)  # StaleTensorError
            busy.keep(in_busy)  # ArenaBusyError
        """
        if not issubclass(type(tensor), Allocation):
            raise errors.ArenaError(
                f"arena {self.name!r}: keep: expected a tensor, got "
                f"{errors.with_article(type(tensor).__name__)}"
            )
        if not tensor.arena.vm.is_same(self.vm):
            raise errors.ArenaError(
                f"arena {self.name!r}: keep: expected a tensor on the arena's VM, {self.vm.name}, "
                f"got {errors.with_article(tensor.type)} on {tensor.arena.vm.name}; move it "
                f"first with x.to_device(vm)"
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
        """Free the tensor's bytes immediately; the tensor becomes stale.

        Raises `StaleTensorError`, or `ArenaError` for a view or a tensor of a different arena.

        Invalid calls:
            vm_arena.free(v)  # ArenaError
            vm_arena.free(freed)  # StaleTensorError
        """
        self._require_own(tensor)
        if tensor.base is not None and tensor.base.region is not None:
            raise errors.ArenaError(
                "free: expected a tensor that owns its memory, got a view; free its base"
            )
        if not self._end(tensor, "arena.free freed it"):
            raise tensor.stale()

    def reset(self) -> None:
        """Free every tensor of the arena; memory and handles remain for reuse.

        Raises `ArenaBusyError` while another thread is inside.

        Invalid calls:
            busy.reset()  # ArenaBusyError
        """
        with self._lock:
            self._require_turn()
            self._end_all("the arena was reset")

    def mark(self) -> Mark:
        """Return a mark of this point, to which `rewind` can return any number of times.

        Raises `ArenaBusyError` while another thread is inside.

        Invalid calls:
            busy.mark()  # ArenaBusyError
        """
        with self._lock:
            self._require_turn()
            living: dict[int, object] = {  # by tensor, because an update may move it
                id(region.holder): region.holder
                for region in self._regions()
                if region.tensor() is not None
            }
            mark = Mark(self, next(_mark_numbers), living)
            self._marks[mark._number] = mark
            self._placement.tidy()
        return mark

    def rewind(self, mark: Mark) -> None:
        """Free every tensor allocated since the mark, and invalidate all later marks.

        Raises `ArenaError` for a mark of a different arena, and for a mark that a reset or a rewind
        to an earlier mark has invalidated; `ArenaBusyError` while another thread is inside.

        Invalid calls:
            busy.rewind(begun)  # ArenaBusyError
            vm_arena.rewind(closed_mark)  # ArenaError
        """
        if not isinstance(mark, Mark) or mark.arena is not self:
            whose = f"one of arena {mark.arena.name!r}" if isinstance(mark, Mark) else repr(mark)
            raise errors.ArenaError(
                f"arena {self.name!r}: expected a mark of this arena, got {whose}"
            )
        with self._lock:
            self._require_turn()
            if self._marks.get(mark._number) is not mark:
                raise errors.ArenaError(
                    f"arena {self.name!r}: the mark is no longer valid: the arena was reset, or "
                    f"rewound to an earlier mark; call mark() again"
                )
            for number in list(self._marks):
                if number > mark._number:
                    self._marks.pop(number, None)
            for region in self._regions():
                tensor = region.tensor()
                if tensor is not None and id(region.holder) not in mark._living:
                    self._end(tensor, "the arena was rewound")
            self._placement.tidy()

    def trim(self) -> None:
        """Return storages without live tensors to the VM; a fixed capacity remains."""
        if self.grows:
            with self._lock:
                self._placement.release()
            self._give_back()

    def close(self) -> None:
        """Free every tensor and return all memory to the VM. Idempotent.

        Raises `ArenaBusyError` while another thread is inside.

        Invalid calls:
            busy.close()  # ArenaBusyError
        """
        with self._lock:
            if not self.closed:
                self._require_turn()
            self._close.detach()
            self._end_all("the arena was closed")
            self._placement.clear()
        self._give_back()

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return not self._close.alive

    # --- where results go ---

    def __enter__(self) -> Arena:
        """Enter the arena. Raises `MachineError` if the VM was closed and not reset since."""
        self._require_open_vm()
        block = results_in(self, resets=True)
        try:
            self._enter(block)
        except BaseException:  # an interrupt, or another thread is inside
            self._leave(block, block)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the arena, and reset it if it was entered only once.

        A thread that finalizes another thread's generator closes only the generator's block, not
        other blocks.
        """
        blocks = None
        with self._lock:  # a thread that enters meanwhile waits for the reset
            try:
                blocks = self._last_blocks()
                self._leave(*blocks)
            except BaseException:  # an interrupt
                self._leave(*(blocks or self._last_blocks()))
                raise

    @contextmanager
    def allocating(self) -> Iterator[Arena]:
        """Allocate results here inside the block, without a reset; used for weights.

        Raises `ArenaBusyError` while another thread is inside.

        Invalid calls:
            within(busy.allocating(), list)  # ArenaBusyError
        """
        self._require_open_vm()
        block = results_in(self)
        try:
            self._enter(block)
            yield self
        finally:
            try:
                self._leave(block, block)
            except BaseException:  # an interrupt
                self._leave(block, block)
                raise

    def hosting(self) -> results_in:
        """Return a block that allocates results here without entering the arena.

        It is used for memory that belongs here, such as a moved tensor's, even while another thread
        is inside.
        """
        return results_in(self)

    def _enter(self, block: results_in) -> None:
        with self._lock:
            self._require_turn()
            self._inside.append(block)
        block.__enter__()

    def _last_blocks(self) -> tuple[results_in | None, results_in | None]:
        """Return the innermost `with` block of this thread or task, and the entry to remove.

        The entry is a different one if another thread has finalized a generator meanwhile.
        """
        mine = [each for each in current().arena_blocks if each.arena is self and each.resets]
        entries = [each for each in self._inside if each.resets]
        block = mine[-1] if mine else None
        return block, block if block in entries else entries[-1] if entries else None

    def _leave(self, block: results_in | None, entry: results_in | None) -> None:
        """Remove a block from the context and an entry from the arena; reset it after the last one.

        A second call does nothing more.
        """
        if block is not None:
            block._remove()
        with self._lock:
            self._inside = [each for each in self._inside if each is not entry]
            resets = entry is None or entry.resets
            if resets and self._is_my_turn() and not any(each.resets for each in self._inside):
                self._end_all("the arena was reset")

    def _is_my_turn(self) -> bool:
        return not self._inside or self._inside[0].thread is threading.current_thread()

    def _require_turn(self) -> None:
        """Raise `ArenaBusyError` while another thread is inside. The caller holds the lock.

        Threads that have exited do not count, nor do threads of the parent of a forked process.
        """
        if not self._is_my_turn():
            self._inside = [block for block in self._inside if block.thread.is_alive()]
        if not self._is_my_turn():
            raise errors.ArenaBusyError(
                f"arena {self.name!r} is in use by thread {self._inside[0].thread.name!r}; only "
                f"one thread at a time can use an arena: create one arena per thread"
            )

    # --- inspection ---

    def note_lines(self, noted: bool = True) -> bool:
        """Start or stop recording the lines of allocations; return the previous setting."""
        before, self._notes_lines = self._notes_lines, noted
        self._choose_reference()
        return before

    def watch(self, watcher: Watcher) -> None:
        """Call the watcher for each event of this arena from now on."""
        self._watchers.append(watcher)
        self._choose_reference()

    def unwatch(self, watcher: Watcher) -> None:
        """Stop calling the watcher."""
        self._watchers.remove(watcher)
        self._choose_reference()

    def _choose_reference(self) -> None:
        """Choose how `alloc` refers to a new tensor, so that unused events cost nothing."""
        if self._watchers:
            self._refer = _notify
        else:
            self._refer = _note_line if self._notes_lines else weakref.ref

    @property
    def capacity(self) -> int:
        """Size of the arena's storages in bytes."""
        return sum([chunk.nbytes for chunk in self._placement.chunks])

    def chunks(self) -> list[Chunk]:
        """Return the arena's storages, oldest first."""
        return self._placement.chunks.copy()

    def live(self) -> list[Allocation]:
        """Return the tensors that have a region, in order of address."""
        by_address = sorted(self._regions(), key=lambda region: (region.storage, region.offset))
        return [tensor for region in by_address if (tensor := region.tensor()) is not None]

    def holders(self) -> list[Holder]:
        """Return sizes and lines of the live tensors, the largest first."""
        holders = [
            Holder(region.nbytes, tensor.type, errors.line_of(place) if place is not None else None)
            for region in self._regions()
            if (tensor := region.tensor()) is not None
            for place in [region.allocated_at]
        ]
        return sorted(holders, key=lambda holder: holder.nbytes, reverse=True)

    def __repr__(self) -> str:
        return (
            f"<{self.__class__.__name__} {self.name!r} on {self.vm.name}: {self.used:,} of "
            f"{self.capacity:,} bytes used, high water {self.high_water:,}>"
        )

    # --- inside ---

    def _new_placement(self) -> Placement:
        spare = self.trims and self.vm.memory_limit is None
        size_of = size_class if self.trims else rounded
        return Reuse(grows=self.grows, size_of=size_of, spare=spare)

    def _regions(self) -> list[Region]:
        return self._placement.regions.copy()  # other threads may change the list

    def _require_own(self, tensor: Allocation) -> None:
        if tensor.arena is not self:
            raise errors.ArenaError(
                f"arena {self.name!r}: expected a tensor of this arena, got "
                f"{errors.with_article(tensor.type)} of arena {tensor.arena.name!r}"
            )

    def _view(self, region: Region, type: TensorType) -> TensorHandle:
        """Create the region's handle for a new type. Raises `ArenaError` after close."""
        try:
            new = self.vm.tensor_from_storage(region.storage, type, region.offset)
        except errors.HandleError:
            if self.closed:
                raise self._closed() from None
            self._require_open_vm()
            raise
        self.views_created += 1
        regions(self.vm).add(new, region)
        if not region.address and self.fast_path is not None:
            region.address = self.fast_path.address_of(new, type)
            if region.address:
                self._placement.locate(region)
        handle = region.handles.setdefault(type, new)
        if handle != new:  # another thread has created one
            self._dealloc(new)
        return handle

    def _late_view(self, region: Region, type: TensorType) -> TensorHandle:
        """Return the handle of a tensor that C code allocated; `_ENDED` after the VM was closed."""
        try:
            return self._view(region, type)
        except errors.MachineError:
            return _ENDED

    def _forget_handles(self, region: Region) -> None:
        """Free the handles of a region that has no tensor."""
        handles = [*region.handles.values()]
        region.handles.clear()
        for handle in handles:
            self._dealloc(handle)

    def _end_all(self, why: str) -> None:
        """Free every tensor."""
        placement = self._placement
        try:
            self.vm.require_open()
        except (errors.MachineError, errors.ConnectionLostError) as error:
            why = str(error)  # the reason why the tensors have no memory
        with self._lock:
            guests = self.guests.copy()
            self.guests -= guests
            self._marks.clear()
            placement.resets = reset = placement.resets + 1
            for region in self._regions():
                holder = region.holder
                if holder is region.holder_at_reset or holder is None:
                    continue
                tensor = holder()
                if tensor is not None:
                    self._end(tensor, why)
                region.holder_at_reset = holder
                region.last = reset
            placement.tidy()
        for guest in guests:
            guest.end(why)
        for watcher in self._watchers.copy():
            watcher.was_reset()

    def _end(self, tensor: Allocation, why: str) -> bool:
        """Free the tensor and all views of it; return False if it was freed before.

        A tensor that the garbage collector is about to finalize is not reached here; `__del__`
        returns the region.
        """
        if tensor.region is None:
            return False
        for watcher in self._watchers.copy():
            watcher.ending(tensor)
        tensor.ended = why
        region, tensor.region = tensor.region, None  # atomic
        if region is None:  # another thread has freed it
            return False
        self.used -= region.nbytes  # atomic
        views = region.take_views()
        tensor.handle = STALE
        for view in views:
            view.handle = STALE
        region.bin.append(region)  # a new tensor may now use the region
        return True

    def _dealloc(self, handle: TensorHandle) -> None:
        regions(self.vm).pop(handle, None)
        with suppress(errors.HandleError):  # another thread has freed the storage
            self.vm.dealloc_tensor(handle)

    def _require_open_vm(self) -> None:
        try:
            self.vm.require_open()
        except errors.MachineError as error:
            raise errors.MachineError(f"arena {self.name!r}: {error}") from None

    def _closed(self) -> errors.ArenaError:
        return errors.ArenaError(f"arena {self.name!r} is closed")

    def _find(self, type: TensorType) -> Region:
        """Return a region for a type with an empty bin."""
        nbytes = (size_class if self.trims else rounded)(type.nbytes)
        while True:
            with self._lock:
                if self.closed:
                    raise self._closed() from None  # hide the IndexError of the bin
                thrifty = not self.grows or self.capacity > 2 * self.high_water
                region = self._placement.find(type, thrifty=thrifty)
                if region is None:
                    if not self.grows:
                        raise self._overflow(type, nbytes) from None
                    most = 2 * (self.used + nbytes) + KEPT_BYTES
                    trims = self.trims and self.capacity + self._placement.missing > most
                    if trims or thrifty:
                        self._placement.release(idle=not trims)
            self._give_back()
            if region is not None:
                return region
            with suppress(errors.OutOfMemoryError):
                least = max(nbytes, self._placement.missing, SMALLEST_CHUNK)
                self._add_chunk(max(least, self.capacity // 4))
                continue
            trim_arenas(self.vm)
            try:
                self._add_chunk(nbytes)
            except errors.OutOfMemoryError as error:
                with self._lock:
                    region = self._placement.find(type, thrifty=True, last=True)
                self._give_back()
                if region is None:
                    raise error from None  # hide the IndexError of the bin
                return region

    def _overflow(self, type: TensorType, nbytes: int) -> errors.ArenaOverflowError:
        unused, gap = self.capacity - self.used, self._placement.largest_gap()
        pieces = f", in blocks of at most {gap:,}" if gap < unused else ""
        # Number of tensors in the message of an overflow.
        largest = "; ".join(map(str, self.holders()[:3]))
        return errors.ArenaOverflowError(
            f"arena {self.name!r}: {type} needs {nbytes:,} bytes; {unused:,} of "
            f"{self.capacity:,} bytes are free{pieces}; raise capacity= or free tensors"
            + (f"; the largest tensors are {largest}" if largest else "")
        )

    def require_room(self, nbytes: int, what: str) -> None:
        """Raise `ArenaOverflowError` if fewer than `nbytes` are free in a fixed capacity.

        The memory is allocated elsewhere, but counts as part of this arena while `what` runs.

        Invalid calls:
            tight.require_room(1 << 20, "a step")  # ArenaOverflowError
        """
        if not self.grows and nbytes > self.capacity - self.used:
            raise errors.ArenaOverflowError(
                f"arena {self.name!r}: {what} needs {nbytes:,} bytes of scratch memory; "
                f"{self.capacity - self.used:,} of {self.capacity:,} bytes are free; raise "
                f"capacity=, or limit the scratch memory with capture(memory=)"
            )

    def _add_chunk(self, nbytes: int) -> None:
        nbytes = rounded(nbytes)
        if self.capacity + nbytes > MAX_SIZE:  # only a dry VM accepts this size
            raise errors.OutOfMemoryError(
                f"arena {self.name!r}: expected at most 2**63 - 1 bytes, got {self.capacity:,} and "
                f"{nbytes:,} more"
            )
        self._placement.chunks.append(Chunk(self.vm.alloc_storage(nbytes), nbytes))
        if self.closed:  # another thread may have closed it before the chunk was added
            self.close()

    def _give_back(self) -> None:
        """Free handles and storages that the placement has dropped."""
        placement = self._placement
        while (handle := pop(placement.handles)) is not None:
            self._dealloc(handle)
        while (storage := pop(placement.storages)) is not None:
            self.vm.dealloc_storage(storage)


def _note_line(tensor: Allocation) -> weakref.ref[Allocation]:
    """Record the line that allocated a tensor in its region; return a reference to the tensor."""
    reference, region = weakref.ref(tensor), tensor.region
    if region is not None:
        region.noted = reference, errors.user_place()
    return reference


def _notify(tensor: Allocation) -> weakref.ref[Allocation]:
    """Call the watchers of the arena with a new tensor; return a reference to the tensor.

    This is not a method, because an arena that refers to itself is freed only by the garbage
    collector.
    """
    region, arena = tensor.region, tensor.arena
    reference = (_note_line if arena._notes_lines else weakref.ref)(tensor)
    if region is not None:
        region.holder = reference  # watchers read the line
    for watcher in arena._watchers.copy():
        watcher.allocated(tensor)
    return reference


def _dealloc(reference: weakref.ref[VMProtocol], chunks: list[Chunk]) -> None:
    vm = reference()
    if vm is not None:
        for chunk in chunks:
            vm.dealloc_storage(chunk.storage)
