"""Threads that share an arena: nothing overlaps, nothing is lost, every byte is counted."""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest

from mlvm.arena.arena import STALE, Allocation, Arena, scope
from mlvm.arena.placement import Chunk, Reuse
from mlvm.core.errors import ArenaOverflow, StaleTensor
from mlvm.core.types import TensorType
from mlvm.core.vm import VM

TYPES = [TensorType("u64", (n,)) for n in (1, 8, 9, 16, 40)]


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads take turns as often as the interpreter can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(n: int, work: Callable[[int], None]) -> None:
    errors: list[BaseException] = []

    def run(k: int) -> None:
        try:
            work(k)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(k,)) for k in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("capacity", [None, 1 << 14])
def test_no_two_tensors_share_bytes_and_none_are_lost(capacity: int | None) -> None:
    vm = VM()
    arena = Arena(vm, "shared", capacity=capacity)

    def work(k: int) -> None:
        rng = random.Random(k)
        held: list[tuple[Allocation, int]] = []
        for i in range(1500):
            if held and (rng.random() < 0.5 or len(held) > 12):
                tensor, value = held.pop(rng.randrange(len(held)))
                assert (vm.read(tensor.handle) == value).all()
                if rng.random() < 0.5:
                    arena.free(tensor)
                del tensor
                continue
            try:
                tensor = arena.alloc(rng.choice(TYPES))
            except ArenaOverflow:
                continue
            value = 1000 * k + i
            vm.write(tensor.handle, np.full(tensor.type.shape, value, np.uint64))
            held.append((tensor, value))
            del tensor
        for tensor, value in held:
            assert (vm.read(tensor.handle) == value).all()

    in_threads(6, work)
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
def test_a_reset_in_one_thread_ends_tensors_of_all_and_frees_each_once() -> None:
    vm = VM()
    arena = Arena(vm, "shared")
    done = threading.Event()

    def work(k: int) -> None:
        if k == 0:
            for _ in range(400):
                arena.reset()
            done.set()
            return
        rng = random.Random(k)
        held: list[Allocation] = []
        while not done.is_set():
            held.append(arena.alloc(rng.choice(TYPES)))
            try:
                held.append(arena.view(held[-1], held[-1].type))
                if rng.random() < 0.3:
                    arena.free(held[-2])
            except StaleTensor:
                pass
            if len(held) > 20:
                del held[: rng.randrange(20)]

    in_threads(4, work)
    gc.collect()
    assert arena.used == sum(holder.nbytes for holder in arena.holders())
    arena.reset()
    assert arena.used == 0
    regions = [region for bin in arena._placement._sizes.values() for region in bin]  # type: ignore[attr-defined]
    assert len(regions) == len({id(region) for region in regions}) == len(arena._placement.regions)


@pytest.mark.usefixtures("hasty")
def test_every_byte_is_counted_once() -> None:
    arena = Arena(VM(), "shared")

    def work(k: int) -> None:
        for _ in range(20_000):
            arena.alloc(TYPES[k % 2])

    in_threads(4, work)
    assert arena.used == 0
    assert 64 <= arena.high_water <= 4 * 64


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("how", ["free", "reset"])
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
                    except StaleTensor:
                        pass
            turn.wait(30)

    in_threads(2, work)
    assert arena.used == 0
    assert how == "reset" or sum(freed) == 200 * 20
    again = [arena.alloc(TYPES[1]) for _ in range(40)]
    assert len({tensor.handle for tensor in again}) == 40


def test_merging_leaves_alone_what_a_thread_has_just_taken() -> None:
    placement = Reuse(grows=False)
    placement.chunks.append(Chunk(1, 256))
    taken = [placement.find(TYPES[1], thrifty=True) for _ in range(3)]
    regions = [region for region in taken if region is not None]
    for region in regions:
        region.bin.append(region)
    assert regions[0].bin.pop() is regions[2]  # as another thread may at any moment
    assert not placement._drop(regions)
    assert placement.regions == regions
    assert sorted(region.number for region in regions[0].bin) == [1, 2]


# --- what comes in between two lines --------------------------------------------------


def with_each_line_interrupted(
    function: Callable[..., Any], make: Callable[[], tuple[Callable[[], Any], Callable[[], Any]]]
) -> int:
    """Call the first of what `make` returns, for n = 1, 2, ..., with the second called before the
    n-th line of `function`, as another thread might; how many lines there were."""

    n = line = 0
    before = sys.gettrace()

    def tracer(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal line
        if frame.f_code is function.__code__ and event == "line":
            line += 1
            if line == n:
                sys.settrace(None)
                interrupt()
        return tracer

    while line == n:
        n, line = n + 1, 0
        run, interrupt = make()
        sys.settrace(tracer)
        try:
            run()
        finally:
            sys.settrace(before)
    return line


def test_whoever_comes_between_two_lines_a_tensor_ends_once() -> None:
    arenas: list[Arena] = []

    def attempt(arena: Arena, tensor: Allocation) -> None:
        with contextlib.suppress(StaleTensor):
            arena.free(tensor)

    def make() -> tuple[Callable[[], Any], Callable[[], Any]]:
        arenas.append(arena := Arena(VM(), "shared"))
        tensor = arena.alloc(TYPES[1])
        return lambda: attempt(arena, tensor), lambda: attempt(arena, tensor)

    assert with_each_line_interrupted(Arena._end, make) >= 5
    for arena in arenas:
        assert arena.used == 0
        first, second = arena.alloc(TYPES[1]), arena.alloc(TYPES[1])
        assert first.handle != second.handle


def test_a_view_made_while_its_base_ends_is_stale_or_refused() -> None:
    outcomes: list[str] = []

    def attempt(arena: Arena, base: Allocation) -> None:
        try:
            view = arena.view(base, TYPES[1])
        except StaleTensor:
            outcomes.append("refused")
        else:
            if base.region is not None:  # in the last run, which nothing interrupts
                arena.free(base)
            assert view.handle == STALE
            assert "it was freed" in str(view.stale())
            outcomes.append("stale")

    def make() -> tuple[Callable[[], Any], Callable[[], Any]]:
        arena = Arena(VM(), "shared")
        base = arena.alloc(TYPES[1])
        return lambda: attempt(arena, base), lambda: arena.free(base)

    lines = with_each_line_interrupted(Arena.view, make)
    assert lines >= 10
    assert "refused" in outcomes


def test_the_last_thread_to_leave_resets() -> None:
    arena = Arena(VM(), "shared")
    inside, leave = threading.Event(), threading.Event()
    found: list[Any] = []

    def other() -> None:
        with arena:
            found.append(arena.alloc(TYPES[0]))
            inside.set()
            leave.wait(30)
            found.append(found[0].handle)

    thread = threading.Thread(target=other)
    with arena:
        thread.start()
        inside.wait(30)
        mine = arena.alloc(TYPES[0])
    assert scope.get() is None
    assert mine.handle != STALE
    leave.set()
    thread.join(30)
    assert found[1] != STALE
    assert (found[0].handle, mine.handle, arena.used) == (STALE, STALE, 0)
