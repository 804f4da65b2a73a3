"""An arena's steady state, its limits, and how it ends."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlvm.arena.arena import (
    KEPT_BYTES,
    SMALLEST_CHUNK,
    STALE,
    Allocation,
    Arena,
    regions,
    scope,
)
from mlvm.arena.placement import rounded, size_class
from mlvm.arena.scratch_pad import ScratchPad
from mlvm.core.collecting import uncollected
from mlvm.core.errors import ArenaError, ArenaOverflowError, ConnectionLostError, MachineError
from mlvm.core.protocol import TensorHandle, VMProtocol
from mlvm.core.types import ALIGNMENT, TensorType, f32
from mlvm.core.vm import VM
from mlvm.machines.local import LocalVM
from tests.brief import Patch, cases, refuses
from tests.cases.claim_tests import claims

ROW, WORDS = TensorType(f32, (16,)), TensorType("u32", (4, 4))
types = st.sampled_from(
    [ROW, WORDS, *(TensorType("u8", (n,)) for n in (0, 1, 63, 64, 65, 200)), TensorType("f64")]
)


def consumed(vm: VM) -> int:
    return round(vm.consumed_size_in_mib() * 2**20)


def address(tensor: Allocation) -> tuple[int, int, TensorHandle]:
    while tensor.base is not None:
        tensor = tensor.base
    assert tensor.region is not None
    return tensor.region.storage, tensor.region.offset, tensor.handle


# --- steady state ---------------------------------------------------------------------

Action = tuple[Literal["alloc", "view", "drop", "free"], TensorType, int]
steps = st.lists(
    st.tuples(st.sampled_from(["alloc", "alloc", "view", "drop", "free"]), types, st.integers(0)),
    max_size=30,
)


def perform(arena: Arena, actions: Sequence[Action]) -> list[tuple[int, int, TensorHandle]]:
    """Do as told, inside `with arena`; where each new tensor lay, and its handle."""
    live: list[Allocation] = []
    addresses = []
    with arena:
        for action, type, number in actions:
            if action == "alloc":
                live.append(arena.alloc(type))
            elif not live:
                continue
            elif action == "view":
                base = live[number % len(live)]
                live.append(arena.view(base, TensorType("u8", (base.type.nbytes, 1))))
            else:
                tensor = live.pop(number % len(live))
                if action == "free" and tensor.base is None:
                    arena.free(tensor)
                    live = [other for other in live if other.handle != STALE]
                continue
            addresses.append((*address(live[-1]), live[-1].handle)[1:])
    return addresses


@given(history=st.lists(steps, max_size=2), step=steps)
def test_a_step_repeated_after_a_reset_finds_everything_where_it_was(
    history: list[list[Action]], step: list[Action]
) -> None:
    """The same addresses and handles, nothing asked of the VM, no growth - whatever the arena
    was used for before."""
    vm = VM()
    arena = Arena(vm, "batch")
    for earlier in history:
        perform(arena, earlier)
    first = perform(arena, step)
    views, capacity, high_water = arena.views_created, arena.capacity, arena.high_water
    with pytest.MonkeyPatch.context() as patch:
        for call in ("alloc_storage", "dealloc_storage", "tensor_from_storage", "dealloc_tensor"):
            patch.setattr(VM, call, None)
        for _ in range(3):
            assert perform(arena, step) == first
    assert (arena.views_created, arena.capacity, arena.high_water) == (views, capacity, high_water)


# --- with -----------------------------------------------------------------------------


def test_allocating_resets_nothing() -> None:
    arena, batch = Arena(VM(), "weights"), Arena(VM(), "batch")
    with arena.allocating() as inside:
        assert scope() is inside is arena
        tensor = arena.alloc(ROW)
        with batch, arena.allocating():
            assert scope() is arena
        with pytest.raises(ZeroDivisionError), batch.allocating():
            raise ZeroDivisionError
        assert scope() is arena
    assert scope() is None
    assert tensor.handle != STALE
    assert arena.used == ROW.nbytes
    with arena.allocating(), arena:
        pass
    assert tensor.handle == STALE  # `with arena:` inside resets


# --- limits ---------------------------------------------------------------------------


@cases("capacity, size", (0, 0), (1, 64), (64, 64), (65, 128))
def test_a_fixed_capacity_is_taken_at_once_and_rounded_up(capacity: int, size: int, vm: VM) -> None:
    arena = Arena(vm, "batch", capacity=capacity)
    assert arena.capacity == consumed(vm) == size
    tensors = [arena.alloc(TensorType("u8", (1,))) for _ in range(size // 64)]
    assert arena.used == size
    assert arena.alloc(TensorType("u8", (0,))).handle
    refuses(ArenaOverflowError, "", arena.alloc, TensorType("u8", (1,)))
    del tensors


@cases("capacity", -1, True, 1.5, "", "much", "-1 K", "0.0001 K", 2**63, "1e99 G")
def test_an_invalid_capacity_is_refused(capacity: Any, vm: VM) -> None:
    text = "arena 'batch': capacity: expected a size from 0 to"
    refuses(ArenaError, text, Arena, vm, "batch", capacity=capacity)
    assert consumed(vm) == 0


@cases("capacity", "8 KiB", "8k", "8192", "8192 B", "8.0 K", np.int64(8192))
def test_a_capacity_is_a_size_as_of_budgets(capacity: Any, vm: VM) -> None:
    assert Arena(vm, "batch", capacity=capacity).capacity == 8192


def test_memory_that_there_is_not_changes_nothing(vm: VM) -> None:
    arena = Arena(vm, "batch")
    tensor = arena.alloc(ROW)
    before = arena.used, arena.high_water, arena.capacity
    refuses(MemoryError, "", arena.alloc, TensorType("u8", (2**60,)))
    assert (arena.used, arena.high_water, arena.capacity) == before
    assert arena.live() == [tensor]


def test_an_allocation_that_fails_halfway_gives_its_region_back(monkeypatch: Patch) -> None:
    vm = VM()
    arena = Arena(vm, "batch")
    arena.alloc(ROW)

    def fail(*_: Any) -> TensorHandle:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(vm, "tensor_from_storage", fail)
        refuses(KeyboardInterrupt, "", arena.alloc, WORDS)
        gc.collect()
    assert (arena.used, arena.live()) == (0, [])
    first, second = arena.alloc(WORDS), arena.alloc(WORDS)
    assert address(first)[1] != address(second)[1]


# --- tensors of other arenas, views, trimming -----------------------------------------


def test_an_arena_takes_only_its_own_tensors(vm: VM) -> None:
    mine, other = Arena(vm, "mine"), Arena(vm, "other")
    tensor = mine.alloc(ROW)
    text = r"arena 'other': expected a tensor of this arena, got an f32\[16\] of arena 'mine'"
    refuses(ArenaError, text, other.free, tensor)
    refuses(ArenaError, text, other.view, tensor, WORDS)
    assert (mine.used, other.used, other.views_created) == (64, 0, 0)


def test_a_view_has_as_many_bytes_and_keeps_its_base() -> None:
    arena = Arena(VM(), "batch")
    base = arena.alloc(ROW)
    view = arena.view(arena.view(base, WORDS), ROW)
    assert (view.base, view.handle, arena.views_created) == (base, base.handle, 2)
    with pytest.raises(ArenaError, match=r"f32\[16\]: expected a type of 64 bytes, got u8\[3\]"):
        arena.view(view, TensorType("u8", (3,)))
    del base
    assert arena.used == 64
    del view
    assert arena.used == 0


def test_a_region_is_there_once_however_many_handles_view_it(vm: VM) -> None:
    arena = Arena(vm, "batch")
    x = arena.alloc(TensorType("f32", (6,)))
    views = [arena.view(x, TensorType("f32", shape)) for shape in ((2, 3), (3, 2))]
    region_counts = regions(vm)
    assert sorted(region_counts) == sorted(each.handle for each in (x, *views))
    assert region_counts.once() == [x.region]


def test_trim_gives_back_the_chunks_in_which_nothing_lives(vm: VM) -> None:
    arena = Arena(vm, "batch")
    size = 2 * SMALLEST_CHUNK
    tensors = [arena.alloc(TensorType("u8", (size,))) for _ in range(3)]
    view = arena.view(tensors[0], TensorType("i8", (size,)))
    vm.write(view.handle, np.full(size, 7, np.int8))
    del tensors
    arena.trim()
    assert arena.capacity == consumed(vm) == size
    assert (vm.read(view.handle) == 7).all()
    arena.free(view.base)  # type: ignore[arg-type]
    arena.trim()
    assert arena.capacity == consumed(vm) == 0
    assert arena.alloc(ROW).handle


@pytest.mark.parametrize(
    ("least", "step", "most"), [(2000, 8, 2.2), (1 << 18, 1 << 11, 1.27), (1 << 21, 1000, 1.143)]
)
def test_tensors_of_ever_new_sizes_reuse_memory_in_interactive_use(
    vm: VM, least: int, step: int, most: float
) -> None:
    arena, storages = Arena(vm, "default", trims=True), set[int]()
    sizes = [*range(least, 2 * least, step)]
    for n in [*sizes, *reversed(sizes)]:
        tensor = arena.alloc(TensorType("u8", (n,)))
        assert n <= arena.used <= most * n + 64
        storages.update(chunk.storage for chunk in arena.chunks())
        del tensor
        assert arena.capacity <= 3 * sizes[-1] + SMALLEST_CHUNK + KEPT_BYTES
    assert len(storages) <= 9
    assert len(arena._regions()) <= 18
    assert len(arena._placement.sizes) <= 65  # each search looks at a few of these


@pytest.mark.parametrize("nbytes", [0, 1, 64, 65, 1000, 4097, 1 << 20, (1 << 20) + 1, 12345678])
def test_a_size_class_is_at_most_an_eighth_more(nbytes: int) -> None:
    size = size_class(nbytes)
    assert rounded(nbytes) <= size <= rounded(nbytes) * 9 // 8 + ALIGNMENT
    assert size == size_class(size)
    assert size <= rounded(nbytes) * 65 // 64 or nbytes <= 1 << 20


def test_a_provided_region_is_that_of_the_next_tensor(vm: VM) -> None:
    arena = Arena(vm, "batch")
    assert arena.provide(ROW)
    assert arena.used == 0
    [region] = arena._regions()
    assert arena.alloc(ROW).region is region
    assert not ScratchPad(vm, 64).provide(ROW)


def test_a_region_keeps_few_handles(vm: VM) -> None:
    arena = Arena(vm, "batch")
    for n in range(1, 64):
        tensor = arena.alloc(TensorType("u8", (n,)))
        assert tensor.region is arena._regions()[0]
        assert vm.read(tensor.handle).shape == (n,)
        del tensor
    assert len(arena._regions()[0].handles) <= 16
    assert len(regions(vm)) <= 16


def test_an_arena_that_trims_holds_little_more_than_it_needs(vm: VM) -> None:
    arena = Arena(vm, "default", trims=True)
    largest = 0
    for n in range(1, 60):
        size = n * SMALLEST_CHUNK
        tensor = arena.alloc(TensorType("u8", (size,)))
        largest = max(largest, consumed(vm))
        del tensor
    assert largest <= 2 * 59 * SMALLEST_CHUNK + KEPT_BYTES


# --- the end --------------------------------------------------------------------------


def test_an_arena_that_is_dropped_gives_everything_back(vm: VM) -> None:
    with uncollected():
        arena = Arena(vm, "batch", capacity=1 << 20)
        tensor = arena.alloc(ROW)
        del arena
        assert consumed(vm) == 1 << 20  # the tensor still needs it
        del tensor
        assert consumed(vm) == 0


class Holding:
    """Attached to a VM, it keeps an arena of that VM alive."""

    def __init__(self, arena: Arena, tensor: Allocation, vm: VMProtocol) -> None:
        self.resources = arena, tensor


def test_a_vm_may_hold_its_own_arenas_and_still_end() -> None:
    vm = VM()
    arena = Arena(vm, "constants")
    holder = partial(Holding, arena, arena.alloc(ROW))
    vm.attached(holder)
    reference = weakref.ref(vm)
    del vm, arena, holder
    gc.collect()
    assert reference() is None


def test_a_reset_inside_a_finalizer_leaves_dying_tensors_their_bytes() -> None:
    batch = Arena(VM(), "batch")

    class Loader:
        """A cycle whose generator resets the arena while the collector ends its tensor."""

        def __init__(self) -> None:
            self.iterator = self.run()

        def run(self) -> Iterator[Allocation]:
            with batch:
                tensor = batch.alloc(ROW)
                yield tensor
                self.done = True

    loader = Loader()
    next(loader.iterator)
    del loader
    gc.collect()
    first, second = batch.alloc(ROW), batch.alloc(ROW)
    assert first.handle != second.handle
    assert first.region is not second.region
    assert batch.used == sum(x.region.nbytes for x in (first, second) if x.region is not None)


def test_an_arena_of_ever_other_sizes_holds_little_more_than_it_needs(vm: VM) -> None:
    batch = Arena(vm, "batch")
    for n in range(1, 300):
        with batch:
            first = batch.alloc(TensorType("f32", (1000 * n,)))
            second = batch.alloc(TensorType("f32", (1000 * n,)))
            del first, second
    assert batch.high_water <= 2.1 * 4 * 1000 * 300
    assert batch.capacity < 8 * batch.high_water
    assert vm.consumed_size_in_mib() * 2**20 == batch.capacity


def test_a_block_closes_a_vm_and_a_closed_one_has_no_arena() -> None:
    with LocalVM("block") as vm:
        arena = Arena(vm, "batch")
        arena.alloc(TensorType(f32, (2,)))
    refuses((MachineError, ConnectionLostError), r"block.* was closed", Arena, vm, "another")


test_rows = claims("arena", globals())
