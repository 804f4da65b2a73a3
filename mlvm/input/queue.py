"""Queue tensors: a bounded ring of tensor slots, which producers fill in place.

    batches = QueueTensor(vm, ["f32[32,64]", "i64[32]"], maxsize=4)

    with batches.reserve() as (images, labels):   # a producer: the memory of the slot
        load(images, labels)

    images, labels = batches.get()                # a consumer: tensors over the same bytes

Names, order and errors follow CPython's `queue`; close and cancel follow TensorFlow's `FIFOQueue`.
On a VM of this process no byte is copied between `reserve` and `get`, and no call acquires the VM's
lock. Therefore producers can fill slots while a program waits in `queue.get` (see `queue_get`). For
a remote VM the producer sends an element when it commits it, before a consumer requests it. For a
VM on a device it copies from pinned memory, without waiting for the copy.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import TypeVar

from mlvm.arena.arena import Allocation
from mlvm.core.errors import (
    ArenaError,
    DTypeError,
    MachineError,
    QueueClosedError,
    QueueEmptyError,
    QueueFullError,
    brief,
    counted,
)
from mlvm.core.observe import on_wait
from mlvm.core.program.builder import ProgramBuilder
from mlvm.core.protocol import VMProtocol
from mlvm.core.rules import is_real
from mlvm.core.types import Array, Shape, TensorType, aligned_zeros, check_array
from mlvm.input import queue_get
from mlvm.input.slot_memory import SlotMemory
from mlvm.input.slots import Claim, Ring, SingleThreadedRing, Slot, SlotArena

A = TypeVar("A", bound=Allocation, default=Allocation)


class QueueStats(NamedTuple):
    """Statistics of a queue: elements put and got, and seconds of waiting.

    Producers wait for a free slot, consumers for an element; seconds are summed over threads.
    """

    elements_in: int
    elements_out: int
    producers_waited: float
    consumers_waited: float


class _LiveQueues(weakref.WeakSet["QueueTensor"]):
    """Queues of a VM, which are cancelled when the VM is closed."""

    def __init__(self, vm: VMProtocol) -> None:
        super().__init__()

    def vm_closed(self, why: str) -> None:
        for each in list(self):
            each.cancel(MachineError(f"queue {each.name!r}: {why}"))


class QueueTensor:
    """Queue of elements in `maxsize` slots; an element has one tensor of each type in `types`.

    Any number of threads may put and get. Elements are returned in the order in which `put` or
    `commit` completed. `get` returns tensors over the slot itself, to which the consumer may write.
    The slot is free again when all these tensors are freed. A tensor is freed by `arena.free`, or
    when the last reference to the tensor or a view is dropped. If `get` was called inside `with
    batch:`, a reset of this arena also frees the tensor.

    `arena` contains the slots as memory of the VM; `memory.slots` are the arrays that producers
    fill. With `shared` other processes can use them (see `SlotMemory`). `handle` names the queue in
    programs, which take elements directly on a VM of this process.

    A `single_threaded` queue has no locks: a call that would wait raises an error immediately.

    After `vm.close`, waiting and later calls raise `MachineError`.

    Raises `ArenaError` for invalid arguments and inside a captured function; `ShapeError` or
    `DTypeError` for a type; `OutOfMemoryError`.

        >>> import numpy as np
        >>> queue = ml.QueueTensor(ml.VM(), ["f32[2]", "i64[]"], maxsize=3)
        >>> queue.put([np.ones(2, np.float32), np.asarray(7)])
        >>> x, label = queue.get()
        >>> x.tolist(), int(label), queue.qsize()
        ([1.0, 1.0], 7, 0)

    Invalid calls:
        ml.QueueTensor(vm, ["f32[2]"], 0)  # ArenaError
        ml.QueueTensor(vm, ["f99[2]"], 1)  # DTypeError
        ml.QueueTensor(vm, ["f32[1125899906842624]"], 4)  # OutOfMemoryError
        ml.QueueTensor(vm, ["f32[-2]"], 1)  # ShapeError
    """

    def __init__(
        self,
        vm: VMProtocol,
        types: Sequence[TensorType | str],
        maxsize: int,
        *,
        name: str = "queue",
        single_threaded: bool = False,
        shared: bool = False,
    ) -> None:
        if vm.stands_for is not vm:
            raise ArenaError(
                f"queue {name!r}: expected a queue created outside of the captured function; "
                "create it before"
            )
        if isinstance(types, str) or not isinstance(types, Sequence) or not types:
            raise ArenaError(f"queue {name!r}: expected a list of types, got {brief(types)}")
        if isinstance(maxsize, bool) or not isinstance(maxsize, int) or maxsize < 1:
            raise ArenaError(
                f"queue {name!r}: expected maxsize as an int >= 1, got {brief(maxsize)}"
            )
        self.vm = vm
        self.name = name
        self.types = tuple([_as_type(type) for type in types])
        self.maxsize = maxsize
        new_ring: Callable[[], Ring] = SingleThreadedRing if single_threaded else queue.SimpleQueue
        self._free, self._waiting = new_ring(), new_ring()
        # Reentrant, because a finalizer in the garbage collector may close the queue.
        self._lock: Any = nullcontext() if single_threaded else threading.RLock()
        self._waits = not single_threaded
        self._end = [Claim(None, weakref.ref(self._waiting))]
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None
        self._in = self._out = 0
        self._producers_waited = self._consumers_waited = 0.0
        self.memory = SlotMemory(
            self.types, maxsize, shared=shared, zeros=getattr(vm, "pinned_zeros", aligned_zeros)
        )
        self.arena = SlotArena(vm, name, self.memory, self._free)
        self.handle = self.arena.storage
        if self.arena.lender is not None:
            queue_get.register(self.arena.lender, self)
        vm.attached(_LiveQueues).add(self)
        vm.require_open()  # `close` may have cancelled the VM's queues before this one was added

    # --- producers ---

    def put(self, arrays: Sequence[Array], timeout: float | None = None) -> None:
        """Copy one array of each type into a free slot, once there is one.

        Raises `QueueFullError` after `timeout` seconds, `QueueClosedError` after `close`, the error
        of `cancel` after `cancel`; `ArenaError`, `DTypeError` or `ShapeError` for arrays that do
        not fit.

        Invalid calls:
            queue.put([array, array])  # ArenaError
            queue.put([array.astype(np.int64)])  # DTypeError
            queue.put([array[:1]])  # ShapeError
            full.put([array], timeout=0.0)  # QueueFullError
            shut.put([array])  # QueueClosedError
        """
        self._check(arrays)
        with self.reserve(timeout) as slots:
            for slot, array in zip(slots, arrays, strict=True):
                np.copyto(slot, array)

    def put_nowait(self, arrays: Sequence[Array]) -> None:
        """Put without waiting; raise `QueueFullError` if no slot is free.

        Invalid calls:
            full.put_nowait([array])  # QueueFullError
        """
        self.put(arrays, 0)

    def reserve(self, timeout: float | None = None) -> Reservation:
        """Wait for a free slot to fill. Raises the errors of `put`.

        with q.reserve() as (images, labels):
            images[...] = 0
        """
        if self.closed:
            raise self._ended()
        try:
            claim = self._take(self._free, timeout)
        except queue.Empty:
            raise QueueFullError(
                f"no slot is free: {self._state()}; get an element, or pass a longer timeout"
            ) from None
        slot = claim.slot
        if slot is None or self.closed:
            claim.give_back()
            raise self._ended()
        try:
            self.arena.begin(claim, slot)
        except BaseException:
            claim.give_back()
            raise
        return Reservation(self, claim, slot)

    def close(self) -> None:
        """Accept no more elements.

        From now on `put`, `reserve` and `commit` raise `QueueClosedError`, and so does `get` when
        the queue is drained. Waiting threads wake. Idempotent: a second `close` completes an
        interrupted call.

        Invalid calls:
            shut.put([array])  # QueueClosedError
        """
        for marks in (self._end, self.arena.end):
            with suppress(IndexError), self._lock:  # already closed
                marks.pop().give_back()

    def cancel(self, error: BaseException) -> None:
        """Cancel the queue immediately.

        All elements are dropped, and every waiting or later call raises `error`. Later errors are
        ignored. Raises `ArenaError` if `error` is not an exception.

        Invalid calls:
            queue.cancel("text")  # ArenaError
        """
        if not isinstance(error, BaseException):
            raise ArenaError(
                f"queue {self.name!r}: expected an exception to cancel with, got {error!r}"
            )
        with self._lock:
            if self._error is None:
                self._error, self._traceback = error, error.__traceback__
        self.close()

    # --- consumers ---

    def get(self, timeout: float | None = None, kind: type[A] = Allocation) -> tuple[A, ...]:  # type: ignore[assignment]
        """Wait for the next element, and return its tensors.

        Raises `QueueEmptyError` after `timeout` seconds, `QueueClosedError` when the queue is
        closed and drained, the error of `cancel` after `cancel`. Without a timeout it also raises
        `QueueEmptyError` if the calling thread holds all slots, and would wait for itself.

        Invalid calls:
            queue.get(timeout=0.0)  # QueueEmptyError
            shut.get()  # QueueClosedError
        """
        return self.arena.lend(self.next_slot(timeout), kind)

    def get_nowait(self, kind: type[A] = Allocation) -> tuple[A, ...]:  # type: ignore[assignment]
        """Get without waiting; raise `QueueEmptyError` if no element is ready.

        Invalid calls:
            queue.get_nowait()  # QueueEmptyError
        """
        return self.get(0, kind)

    def next_slot(self, timeout: float | None = None) -> Claim:
        """Wait for the next element; return the claim to its slot, for `arena.lend`.

        Raises the errors of `get`.
        """
        try:
            claim = self._take(self._waiting, timeout)
        except queue.Empty:
            raise QueueEmptyError(
                f"no element is ready: {self._state()}; put one, or pass a longer timeout"
            ) from None
        if claim.slot is None or self._error is not None:
            claim.give_back()
            raise self._ended()
        self._out += 1  # from now on the arena counts it as well
        return claim

    def __iter__(self) -> Iterator[tuple[Allocation, ...]]:
        """Yield elements until the queue is closed and drained."""
        while True:
            try:
                yield self.get()
            except QueueClosedError:
                return

    # --- properties ---

    def qsize(self) -> int:
        """Return the number of waiting elements."""
        return max(self._waiting.qsize() - (not self._end), 0)

    def empty(self) -> bool:
        """Return whether no element is ready."""
        return self.qsize() == 0

    def full(self) -> bool:
        """Return whether no slot is free.

        Each slot has an element, is being filled, or is lent as tensors.
        """
        return not self.arena.free_slots()

    @property
    def in_programs(self) -> bool:
        """True if programs may take elements: the VM and its memory are of this process."""
        return self.arena.lender is not None

    @property
    def closed(self) -> bool:
        """True after `close` or `cancel`, including an interrupted `cancel`."""
        return not self._end or self._error is not None

    def stats(self) -> QueueStats:
        """Return the numbers of elements and the waiting times."""
        with self._lock:
            return QueueStats(self._in, self._out, self._producers_waited, self._consumers_waited)

    def emit(self, builder: ProgramBuilder, *, raises: bool = False) -> None:
        """Append the instructions that get an element: ( -- t1 .. tn ok ), see `queue_get`.

        With `raises` the effect is ( -- t1 .. tn ), and `QueueClosedError` is raised at the end.
        Raises `ArenaError` if the VM does not share the memory of this process.

        Invalid calls:
            far.emit(None)  # ArenaError
        """
        if not self.in_programs:
            raise ArenaError(
                f"queue {self.name!r}: programs take elements in the memory of this process, but "
                f"{self.vm.name} has separate memory; get them here, and launch the program on the "
                f"tensors"
            )
        attributes = {"raises": True} if raises else {}
        builder.push_int(self.handle)
        builder.host(queue_get.NAME, 1, len(self.types) + (not raises), **attributes)

    def __repr__(self) -> str:
        return f"<QueueTensor {self._state()}>"

    # --- inside ---

    def _check(self, arrays: Sequence[Array]) -> None:
        if not isinstance(arrays, (tuple, list)) or len(arrays) != len(self.types):
            count = f"{len(arrays)}" if isinstance(arrays, (tuple, list)) else brief(arrays)
            raise ArenaError(
                f"queue {self.name!r}: expected an element of {counted(len(self.types), 'array')}, "
                f"a tuple, got {count}"
            )
        for i, (array, type) in enumerate(zip(arrays, self.types, strict=True)):
            check_array(array, type, f"queue {self.name!r}, array {i} is {type}")

    def _take(self, ring: Ring, timeout: float | None) -> Claim:
        """Wait for the next claim of the ring; at the end, for a claim that has no slot.

        Raises `queue.Empty`.
        """
        if timeout is not None and not (is_real(timeout) and timeout >= 0):
            raise ArenaError(f"expected a timeout of None or seconds >= 0, got {timeout!r}")
        with suppress(queue.Empty):
            return ring.get_nowait()
        self.arena.sweep()
        try:
            return ring.get_nowait()
        except queue.Empty:
            if timeout == 0 or not self._waits:
                raise
        if timeout is None and self._is_all_mine():
            if self.arena.local is not None:
                self.arena.local.quiesce()  # workers may still be using a slot
            if self._is_all_mine():
                raise queue.Empty
        if ring is self._waiting and self.arena.local is None:
            self.vm.synchronize()  # remote errors must not wait for an element
        began = time.perf_counter()
        try:
            # longest timeout in seconds, three years: much longer timeouts raise OverflowError
            return ring.get(timeout=None if timeout is None else min(timeout, 1e8))
        finally:
            waited = time.perf_counter() - began
            for listener in on_wait.copy():
                listener(self.name, "a free slot" if ring is self._free else "an element", began)
            with self._lock:
                if ring is self._free:
                    self._producers_waited += waited
                else:
                    self._consumers_waited += waited

    def _is_all_mine(self) -> bool:
        """Return whether the calling thread holds all slots, and would wait for itself."""
        me = threading.get_ident()
        return all(slot.lent_to == me for slot in self.arena.slots)

    def _commit(self, claim: Claim, slot: Slot) -> None:
        try:
            if not self.closed:
                self.arena.complete(claim, slot)
        except BaseException as error:
            claim.give_back()
            if isinstance(error, Exception):
                self.cancel(error)
            raise
        with self._lock:
            if self.closed:
                claim.give_back()
                raise self._ended()
            self._waiting.put(claim)
            self._in += 1

    def _ended(self) -> BaseException:
        """Return the error of a cancelled or closed queue."""
        if self._error is not None:
            return self._error.with_traceback(self._traceback)
        return QueueClosedError(f"queue {self.name!r} is closed")

    def _state(self) -> str:
        """Describe the state of the slots."""
        waiting, free = self.qsize(), self.arena.free_slots()
        lent = sum(slot.lent_to != 0 for slot in self.arena.slots)
        mine = " to this thread" if self._is_all_mine() else ""
        return (
            f"queue {self.name!r} has {self.maxsize} slots, {free} free, {waiting} waiting, "
            f"{lent} lent as tensors{mine}"
        )


class Reservation:
    """Slot that a producer fills: `arrays` is the memory, `index` the slot number.

    As a context manager it returns the arrays, and commits them at the end of the block, or cancels
    after an exception. A reservation without references is cancelled. Any thread may commit it.
    """

    __slots__ = ("_claim", "_queue", "_slot", "arrays", "index")

    def __init__(self, queue: QueueTensor, claim: Claim, slot: Slot) -> None:
        self._queue = queue
        self._claim: Claim | None = claim
        self._slot = slot
        self.index = slot.index
        self.arrays = queue.memory.slots[slot.index]

    def resize(self, shapes: Sequence[Shape]) -> None:
        """Set the shapes of the element's tensors, which use the start of each part's memory."""
        claim, types = self._claim, self._queue.types
        assert claim is not None  # the slot is being filled
        if any(shape != type.shape for shape, type in zip(shapes, types, strict=True)):
            sized = zip(types, shapes, strict=True)
            claim.types = tuple([type.with_shape(shape) for type, shape in sized])

    def commit(self) -> None:
        """Append the element to the queue; the producer must not write to it afterwards.

        Raises `QueueClosedError` or `cancel`'s error if the queue has been closed or cancelled in
        the meantime, and `ArenaError` for a reservation that was committed or cancelled. If a
        remote VM fails to receive the element, the queue is cancelled with that error, which is
        also raised here.
        """
        claim, self._claim = self._claim, None
        if claim is None:
            raise ArenaError(f"slot {self.index} is no longer reserved: commit or cancel it once")
        self._queue._commit(claim, self._slot)

    def cancel(self) -> None:
        """Return the slot without committing it. Idempotent."""
        claim, self._claim = self._claim, None
        if claim is not None:
            claim.give_back()

    def __enter__(self) -> tuple[Array, ...]:
        return self.arrays

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.cancel()
        elif self._claim is not None:
            self.commit()


def _as_type(type: TensorType | str) -> TensorType:
    if isinstance(type, str):
        return TensorType.parse(type)
    if not isinstance(type, TensorType):
        raise DTypeError(f"expected a TensorType, or a text such as f32[2,3], got {brief(type)}")
    return type
