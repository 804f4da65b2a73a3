"""Threads and an arena: one is inside, all allocate and free, and every byte is counted."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from mlvm.arena.arena import STALE, Allocation, Arena, scope
from mlvm.arena.placement import Chunk, Reuse
from mlvm.core.errors import ArenaBusyError, ArenaError, ArenaOverflowError, StaleTensorError
from mlvm.core.types import TensorType
from mlvm.core.vm import VM
from tests.brief import cases
from tests.interrupting import with_each_line_interrupted
from tests.threads import PATIENCE, in_threads, start, taking_turns

TYPES = [TensorType("u64", (n,)) for n in (1, 8, 9, 16, 40)]


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads take turns as often as the interpreter can."""
    with taking_turns():
        yield


@pytest.mark.usefixtures("hasty")
@cases("capacity", None, 1 << 14)
def test_no_two_tensors_share_bytes_and_none_are_lost(capacity: int | None, vm: VM) -> None:
    arena = Arena(vm, "shared", capacity=capacity)

    def work(k: int) -> None:
        rng = random.Random(k)
        live: list[tuple[Allocation, int]] = []
        for i in range(1500):
            if live and (rng.random() < 0.5 or len(live) > 12):
                tensor, value = live.pop(rng.randrange(len(live)))
                assert (vm.read(tensor.handle) == value).all()
                if rng.random() < 0.5:
                    arena.free(tensor)
                del tensor
                continue
            try:
                tensor = arena.alloc(rng.choice(TYPES))
            except ArenaOverflowError:
                continue
            value = 1000 * k + i
            vm.write(tensor.handle, np.full(tensor.type.shape, value, np.uint64))
            live.append((tensor, value))
            del tensor
        for tensor, value in live:
            assert (vm.read(tensor.handle) == value).all()

    in_threads(work, range(6))
    gc.collect()
    assert (arena.used, arena.live()) == (0, [])
    arena.reset()
    if capacity is not None:
        whole = arena.alloc(TensorType("u8", (capacity,)))
        assert arena.used == capacity
        del whole
    arena.close()
    assert vm.consumed_size_in_mib() == 0


@pytest.mark.usefixtures("hasty")
@cases("how", "free", "reset")
def test_of_two_threads_that_end_a_tensor_one_does(how: str) -> None:
    arena = Arena(VM(), "shared")
    tensors: list[Allocation] = []
    turn = threading.Barrier(2)
    freed = [0, 0]

    def work(k: int) -> None:
        for _ in range(200):
            if k == 0:
                tensors[:] = [arena.alloc(TYPES[1]) for _ in range(20)]
            turn.wait(30)
            if k == 1 and how == "reset":
                arena.reset()
            else:
                for tensor in [*tensors]:
                    try:
                        arena.free(tensor)
                        freed[k] += 1
                    except StaleTensorError:
                        pass
            turn.wait(30)

    in_threads(work, range(2))
    assert arena.used == 0
    assert how == "reset" or sum(freed) == 200 * 20
    again = [arena.alloc(TYPES[1]) for _ in range(40)]
    assert len({tensor.handle for tensor in again}) == 40


def test_merging_leaves_alone_what_a_thread_has_just_taken() -> None:
    placement = Reuse(grows=False)
    placement.chunks.append(Chunk(1, 256))
    found_places = [placement.find(TYPES[1], thrifty=True) for _ in range(3)]
    regions = [region for region in found_places if region is not None]
    for region in regions:
        region.bin.append(region)
    assert regions[0].bin.pop() is regions[2]  # as another thread may at any moment
    assert not placement._drop(regions)
    assert placement.regions == regions
    assert sorted(region.number for region in regions[0].bin) == [1, 2]


# --- what comes in between two lines --------------------------------------------------


def test_whoever_comes_between_two_lines_a_tensor_ends_once() -> None:
    arenas: list[Arena] = []
    freed: list[Arena] = []

    def attempt(arena: Arena, tensor: Allocation) -> None:
        with contextlib.suppress(StaleTensorError):
            arena.free(tensor)
            freed.append(arena)

    def make() -> tuple[Callable[[], Any], Callable[[], Any]]:
        arenas.append(arena := Arena(VM(), "shared"))
        tensor = arena.alloc(TYPES[1])
        return lambda: attempt(arena, tensor), lambda: attempt(arena, tensor)

    assert with_each_line_interrupted(Arena._end, make) >= 5
    assert freed == arenas
    for arena in arenas:
        assert arena.used == 0
        first, second = arena.alloc(TYPES[1]), arena.alloc(TYPES[1])
        assert first.handle != second.handle


def test_a_view_made_while_its_base_ends_is_stale_or_refused() -> None:
    outcomes: list[str] = []

    def attempt(arena: Arena, base: Allocation) -> None:
        try:
            view = arena.view(base, TYPES[1])
        except StaleTensorError:
            outcomes.append("refused")
        else:
            if base.region is not None:  # in the last run, which nothing interrupts
                arena.free(base)
            assert view.handle == STALE
            assert "freed it" in str(view.stale())
            outcomes.append("stale")

    def make() -> tuple[Callable[[], Any], Callable[[], Any]]:
        arena = Arena(VM(), "shared")
        base = arena.alloc(TYPES[1])
        return lambda: attempt(arena, base), lambda: arena.free(base)

    lines = with_each_line_interrupted(Arena.view, make)
    assert lines >= 10
    assert "refused" in outcomes


def test_whoever_closes_between_two_lines_gets_all_memory_back() -> None:
    large = TensorType("u8", (1 << 17,))
    for function in (Arena.alloc, Arena._find, Arena._add_chunk, Arena._view):
        vms: list[VM] = []

        def make(vms: list[VM] = vms) -> tuple[Callable[[], Any], Callable[[], Any]]:
            vms.append(vm := VM())
            arena = Arena(vm, "shared")
            arena.alloc(TYPES[0])

            def run() -> None:
                with contextlib.suppress(ArenaError):
                    arena.alloc(large)

            return run, arena.close

        assert with_each_line_interrupted(function, make) >= 2
        assert [vm.consumed_size_in_mib() for vm in vms[:-1]] == [0] * (len(vms) - 1)


# --- entering and leaving -----------------------------------------------------------------


def enter(arena: Arena) -> None:
    with arena:
        pass


def allocate(arena: Arena) -> None:
    with arena.allocating():
        pass


@cases("first", "with arena", "with arena.allocating")
@cases("second", enter, allocate, Arena.reset, Arena.mark, Arena.close)
def test_a_second_thread_is_told_at_once_who_is_inside(first: str, second: Any) -> None:
    arena = Arena(VM(), "shared")
    with arena if first == "with arena" else arena.allocating():
        tensor = arena.alloc(TYPES[0])
        with pytest.raises(ArenaBusyError, match=r"'shared' is in use by thread 'MainThread'"):
            start(second, arena).result(PATIENCE)
        assert scope() is arena
        assert tensor.handle != STALE
        second(arena)
    start(second, arena).result(PATIENCE)
    ends = first == "with arena" or second not in (allocate, Arena.mark)
    assert (tensor.handle == STALE) == ends


def test_a_second_thread_does_not_rewind_what_the_first_has_entered() -> None:
    arena = Arena(VM(), "shared")
    mark, tensor = arena.mark(), arena.alloc(TYPES[0])
    with arena.allocating(), pytest.raises(ArenaBusyError):
        start(arena.rewind, mark).result(PATIENCE)
    assert tensor.handle != STALE
    start(arena.rewind, mark).result(PATIENCE)
    assert tensor.handle == STALE


@cases("function", Arena.__exit__, Arena._end_all)
def test_a_reset_on_leaving_spares_who_enters_meanwhile(function: Callable[..., Any]) -> None:
    def make() -> tuple[Callable[[], Any], Callable[[], Any]]:
        arena = Arena(VM(), "shared")
        exited, inside = threading.Event(), threading.Event()
        outcomes: list[bool] = []

        def enter() -> None:
            try:
                with arena:
                    tensor = arena.alloc(TYPES[0])
                    inside.set()
                    exited.wait(30)
                    outcomes.append(tensor.handle != STALE)
            except ArenaBusyError:
                outcomes.append(True)

        entered: list[Future[None]] = []

        def interrupt() -> None:
            entered.append(start(enter))
            inside.wait(0.02)  # it may have to wait till the arena is reset

        def leave() -> None:
            with arena:
                arena.alloc(TYPES[0])
            exited.set()
            for each in entered:
                each.result(PATIENCE)
                assert outcomes == [True]
            assert arena.used == 0

        return leave, interrupt

    assert with_each_line_interrupted(function, make) >= 3


def within(arena: Arena) -> Iterator[None]:
    with arena:
        yield


def test_a_generator_that_another_thread_finalizes_leaves_its_arena() -> None:
    arena, other = Arena(VM(), "shared"), Arena(VM(), "other")
    generator: Any = within(arena)
    contextvars.Context().run(next, generator)
    tensor = arena.alloc(TYPES[0])
    with arena:
        pass
    assert tensor.handle != STALE  # the generator is inside

    def finalize() -> None:
        with other:
            generator.close()
            assert scope() is other

    start(finalize).result(PATIENCE)
    assert (tensor.handle, arena.used, scope()) == (STALE, 0, None)


def test_tasks_have_scopes_of_their_own_and_the_last_to_leave_resets() -> None:
    arena, other = Arena(VM(), "shared"), Arena(VM(), "other")
    tensors: list[Allocation] = []

    async def task(k: int) -> None:
        for i in range(5):
            with arena:
                tensors.append(tensor := arena.alloc(TYPES[0]))
                await asyncio.sleep(0)
                with other if (i + k) % 2 else arena:
                    await asyncio.sleep(0)
                    assert scope() is (other if (i + k) % 2 else arena)
                assert scope() is arena
                assert tensor.handle != STALE

    async def tasks() -> None:
        with other:
            await asyncio.gather(*[task(k) for k in range(3)])
            assert scope() is other

    asyncio.run(tasks())
    assert {tensor.handle for tensor in tensors} == {STALE}
    assert arena.used == other.used == 0


def test_a_copied_context_allocates_where_it_was_copied() -> None:
    arena, other = Arena(VM(), "shared"), Arena(VM(), "other")
    scopes: list[Arena | None] = []

    def work() -> None:
        scopes.append(scope())
        with other:
            scopes.append(scope())
        with pytest.raises(ArenaBusyError), arena.allocating():
            pass
        scopes.append(scope())

    with arena:
        tensor = arena.alloc(TYPES[0])
        start(contextvars.copy_context().run, work).result(PATIENCE)
        assert tensor.handle != STALE
    assert scopes == [arena, other, arena]


def test_a_generator_that_ends_inside_another_block_leaves_that_block_its_scope() -> None:
    arena, other = Arena(VM(), "shared"), Arena(VM(), "other")
    generator = within(arena)
    next(generator)
    with other:
        assert next(generator, None) is None
        assert scope() is other
    assert scope() is None
