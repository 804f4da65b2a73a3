"""Queue tensors in one thread: elements, slots that come back, bad input."""

from __future__ import annotations

import contextvars
import gc
import queue
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mlvm.arena.arena import Allocation, Arena
from mlvm.core.errors import (
    ArenaError,
    HandleError,
    MachineError,
    QueueClosedError,
    QueueEmptyError,
    QueueFullError,
)
from mlvm.core.observe import observed
from mlvm.core.program.builder import ProgramBuilder
from mlvm.core.protocol import VMProtocol
from mlvm.core.types import Array, TensorType
from mlvm.core.vm import VM
from mlvm.input.queue import QueueTensor
from mlvm.machines.dry import DryVM
from mlvm.machines.wire import WireVM
from tests.brief import cases, refuses
from tests.cases.claim_tests import claims
from tests.interrupting import with_each_line_interrupted

PAIR = ["f32[2,3]", "i64[2]"]


@pytest.fixture(params=["here", "elsewhere"])
def vm(request: pytest.FixtureRequest) -> Any:
    return VM() if request.param == "here" else WireVM(VM())


def pair(value: int) -> tuple[Array, Array]:
    return np.full((2, 3), value, np.float32), np.full(2, value)


def values(vm: VMProtocol, tensors: tuple[Allocation, ...]) -> set[int]:
    return {int(x) for tensor in tensors for x in vm.read(tensor.handle).ravel()}


@cases("dtype", "bool", "u8", "i16", "u64", "f64")
@cases("shape", (), (0,), (3,), (1, 5))
def test_every_type_survives_the_slots(vm: VM, dtype: str, shape: tuple[int, ...]) -> None:
    type = TensorType(dtype, shape)
    array = np.arange(type.size).reshape(shape).astype(type.dtype.numpy)
    q = QueueTensor(vm, [type, type], 2)
    q.put((array, array))
    for tensor in q.get():
        np.testing.assert_array_equal(vm.read(tensor.handle), array)


def test_get_moves_no_byte() -> None:
    vm = VM()
    q = QueueTensor(vm, PAIR, 2)
    with q.reserve() as slots:
        for slot in slots:
            slot[...] = 7
    tensors = q.get()
    for slot, tensor in zip(slots, tensors, strict=True):
        assert slot.ctypes.data == vm.borrow(tensor.handle).ctypes.data
        assert slot.ctypes.data % 64 == 0
    before = q.arena.views_created
    del tensors, tensor
    for _ in range(10):
        q.put(pair(1))
        q.get()
    assert q.arena.views_created == before


def test_put_takes_strided_arrays(vm: VM) -> None:
    q = QueueTensor(vm, ["f32[2,3]"], 1)
    array = np.arange(12, dtype=np.float32).reshape(3, 4).T[::2]
    q.put((array,))
    np.testing.assert_array_equal(vm.read(q.get()[0].handle), array)


def test_a_cycle_is_collected_even_amid_a_call(vm: VM) -> None:
    """The collector may run anywhere; the slot comes back without a lock."""
    q = QueueTensor(vm, PAIR, 2)
    gc.freeze()  # what other tests have left is not looked at fifty times
    try:
        for _ in range(50):
            q.put(pair(1))
            cycle: list[object] = [q.get()]
            cycle.append(cycle)
            del cycle
            with q._lock:
                gc.collect()
    finally:
        gc.unfreeze()
    assert q._free.qsize() == 2


def test_a_reset_spares_the_slots_next_tensors() -> None:
    def make() -> tuple[Callable[[], None], Callable[[], None]]:
        vm = VM()
        q, step = QueueTensor(vm, PAIR, 1), Arena(vm, "step")
        q.put(pair(1))
        with step.allocating():
            elements = [q.get()]
        elsewhere = contextvars.Context()

        def another_gets_the_slot() -> None:
            elements.clear()
            q.put(pair(2))
            elements.append(elsewhere.run(q.get))

        def reset() -> None:
            step.reset()
            if elements and q.stats().elements_in == 2:
                assert values(vm, elements[0]) == {2}

        return reset, another_gets_the_slot

    assert with_each_line_interrupted(Arena._end_all, make) >= 10


def test_a_kind_of_its_own(vm: VM) -> None:
    class Kind(Allocation):
        __slots__ = ("prepared",)
        prepared: bool

        def prepare(self) -> None:
            self.prepared = True

    q = QueueTensor(vm, PAIR, 1)
    q.put(pair(1))
    tensors = q.get(kind=Kind)
    assert all(tensor.prepared for tensor in tensors)


# --- reservations ---------------------------------------------------------------------


def test_a_reservation_ends_once(vm: VM) -> None:
    q = QueueTensor(vm, PAIR, 2)
    r = q.reserve()
    r.commit()
    r.cancel()
    refuses(ArenaError, "slot 0 is no longer reserved", r.commit)
    with q.reserve() as _:
        pass
    assert q.qsize() == 2


# --- the end --------------------------------------------------------------------------


@cases("single_threaded", False, True)
def test_close_drains(vm: VM, single_threaded: bool) -> None:
    q = QueueTensor(vm, PAIR, 3, single_threaded=single_threaded)
    q.put(pair(1))
    late = q.reserve()
    q.close()
    q.close()
    assert (q.qsize(), q.closed, q.full()) == (1, True, False)
    for refused in (lambda: q.put(pair(2)), q.reserve, late.commit):
        refuses(QueueClosedError, "queue 'queue' is closed", refused)
    assert [values(vm, tensors) for tensors in q] == [{1}]
    for _ in range(2):
        refuses(QueueClosedError, "", q.get)
    assert q.empty()
    assert q._free.qsize() == 4  # all slots, and the mark of the end


@cases("single_threaded", False, True)
@cases("closed", False, True)
def test_cancel_ends_both_sides_at_once(vm: VM, single_threaded: bool, closed: bool) -> None:
    q = QueueTensor(vm, PAIR, 3, single_threaded=single_threaded)
    q.put(pair(1))
    late = q.reserve()
    if closed:
        q.close()
    error = OSError("the disk is gone")
    q.cancel(error)
    q.cancel(OSError("too late"))
    for refused in (lambda: q.put(pair(2)), q.reserve, late.commit, q.get, q.get_nowait):
        caught = refuses(OSError, "the disk is gone", refused)
        assert caught is error
    q.close()
    refuses(OSError, "the disk is gone", q.get)


@cases("single_threaded", False, True)
def test_a_closed_vm_cancels_its_queues(vm: VM, single_threaded: bool) -> None:
    q = QueueTensor(vm, PAIR, 3, single_threaded=single_threaded)
    q.put(pair(1))
    late = q.reserve()
    vm.close()
    for refused in (lambda: q.put(pair(2)), q.reserve, late.commit, q.get, q.get_nowait):
        refuses(MachineError, f"queue 'queue': VM '{vm.name}' was closed", refused)
    refuses(MachineError, "", list, q)


def test_cancel_keeps_the_traceback_that_the_error_came_with(vm: VM) -> None:
    q = QueueTensor(vm, PAIR, 1)

    def load() -> None:
        raise OSError("the disk is gone")

    loading = refuses(OSError, "", load)
    q.cancel(loading)
    depths = []
    for _ in range(3):
        with pytest.raises(OSError) as caught:
            q.get()
        assert "load" in [entry.name for entry in caught.traceback]
        depths.append(len(caught.traceback))
    assert depths == depths[:1] * 3


# --- memory ---------------------------------------------------------------------------


@cases("shared", False, True)
def test_the_slots_are_memory_of_the_vm_until_queue_and_tensors_are_gone(
    vm: VM, shared: bool
) -> None:
    q = QueueTensor(vm, ["f32[1024,256]"], 2, name="images", shared=shared)
    assert vm.consumed_size_in_mib() == 2
    assert (q.arena.name, q.arena.capacity, q.arena.used) == ("images", 2 << 20, 0)
    q.put((np.ones((1024, 256), np.float32),))
    [tensor] = q.get()
    assert (q.arena.used, q.arena.high_water, q.arena.live()) == (1 << 20, 1 << 20, [tensor])
    memory = weakref.ref(q.memory)
    del q
    assert (vm.read(tensor.handle) == 1).all()
    del tensor
    assert vm.consumed_size_in_mib() == 0
    assert memory() is None


def test_nothing_else_is_allocated_in_the_slots(vm: VM) -> None:
    q = QueueTensor(vm, PAIR, 1)
    refuses(
        ArenaError,
        "is reserved for the slots of a queue tensor",
        q.arena.alloc,
        TensorType.parse(PAIR[0]),
    )
    q.put(pair(1))
    q.get()


def test_a_reset_of_the_slots_ends_what_was_got(vm: VM) -> None:
    q = QueueTensor(vm, PAIR, 2)
    q.put(pair(1))
    q.put(pair(2))
    images, labels = q.get()
    q.arena.reset()
    assert (images.handle, labels.handle, q.arena.used) == (0, 0, 0)
    q.put_nowait(pair(3))
    assert [values(vm, q.get_nowait()) for _ in range(2)] == [{2}, {3}]


# --- bad input ------------------------------------------------------------------------


def test_an_element_is_on_a_vm_elsewhere_before_it_is_got() -> None:
    """The write is done by who commits, and a slot has its place there for good."""
    vm = WireVM(VM())
    writes: list[int] = []

    def write(proceed: Callable[..., None], handle: int, array: Array) -> None:
        proceed(handle, array)
        writes.append(handle)

    q = QueueTensor(vm, PAIR, 2)
    consumption = vm.consumed_size_in_mib()
    assert consumption == q.memory.data.nbytes / 2**20
    with observed(vm, write=write):
        q.put(pair(1))
        q.put(pair(2))
        handles = writes.copy()
        assert len(set(handles)) == 4
        for i in range(3, 9):
            tensors = q.get()
            assert [x.handle for x in tensors] == handles[:2]
            assert values(vm, tensors) == {i - 2}
            del tensors
            q.put(pair(i))
            handles = writes[-4:]
    assert len(writes) == 16
    assert vm.consumed_size_in_mib() == consumption
    del q
    gc.collect()
    assert vm.consumed_size_in_mib() == 0


def test_a_write_that_fails_cancels_the_queue() -> None:
    vm = WireVM(VM())
    q = QueueTensor(vm, PAIR, 2)

    def write(proceed: Callable[..., None], handle: int, array: Array) -> None:
        raise HandleError("the line is cut")

    with observed(vm, write=write), pytest.raises(HandleError, match="is cut"):
        q.put(pair(1))
    for call in (q.get, q.reserve, lambda: q.put(pair(2))):
        refuses(HandleError, "is cut", call)
    assert "2 free" in repr(q)


def test_an_interrupted_write_leaves_the_queue_as_it_was() -> None:
    vm = WireVM(VM())
    q = QueueTensor(vm, PAIR, 1)

    def write(proceed: Callable[..., None], handle: int, array: Array) -> None:
        raise KeyboardInterrupt

    with observed(vm, write=write), pytest.raises(KeyboardInterrupt):
        q.put(pair(1))
    q.put(pair(2))
    assert values(vm, q.get()) == {2}


def test_programs_elsewhere_take_no_elements() -> None:
    q = QueueTensor(WireVM(VM("far")), PAIR, 1)
    assert not q.in_programs
    text = "in the memory of this process, but far has separate memory; get them here"
    refuses(ArenaError, text, q.emit, ProgramBuilder())


def test_a_dry_vm_has_no_slots() -> None:
    refuses((HandleError, ArenaError), "", QueueTensor, DryVM(), PAIR, 1)


def test_single_threaded_raises_where_it_would_wait(vm: VM) -> None:
    q = QueueTensor(vm, PAIR, 1, single_threaded=True)
    refuses(queue.Empty, "", q.get)
    refuses(QueueEmptyError, "", q.get, timeout=3600)
    q.put(pair(1))
    refuses(queue.Full, "", q.put_nowait, pair(2))
    refuses(QueueFullError, "", q.put, pair(2), timeout=3600)
    refuses(QueueFullError, "", q.reserve)


def test_a_thread_does_not_wait_for_itself(vm: VM) -> None:
    q = QueueTensor(vm, PAIR, 2)
    elements = []
    for i in range(2):
        q.put(pair(i))
        elements.append(q.get())
    refuses(QueueEmptyError, "2 lent as tensors to this thread", q.get)
    refuses(QueueFullError, "to this thread", q.put, pair(2))
    elements.clear()
    q.put(pair(3))
    assert values(vm, q.get()) == {3}


def test_full_slots_are_used_memory_of_the_arena(vm: VM) -> None:
    q = QueueTensor(vm, PAIR, 2)
    q.put(pair(1))
    filling = q.reserve()
    assert (q.arena.used, len(q.arena.live())) == (q.arena.capacity, 4)
    filling.cancel()
    assert (q.arena.used, len(q.arena.live())) == (q.arena.capacity // 2, 2)


test_rows = claims("queue", globals())


def made(vm: Any, *args: Any, shared: bool) -> None:
    try:
        QueueTensor(vm, *args, shared=shared)
    finally:
        assert vm.consumed_size_in_mib() == 0


def unfit(vm: Any, arrays: Any) -> None:
    q = QueueTensor(vm, PAIR, 1)
    try:
        q.put(arrays)
    finally:
        q.put(pair(5), timeout=0)
        assert values(vm, q.get(timeout=0)) == {5}
