"""A recording shows which tensors lived where and when in an arena, and leaves no trace in it."""

from __future__ import annotations

import pytest

from mlvm.arena.arena import Allocation, Arena
from mlvm.arena.report import Lifetime, Recording, record
from mlvm.core.errors import ArenaOverflow
from mlvm.core.types import TensorType
from mlvm.core.vm import VM

SMALL, LARGE = TensorType("f32", (3,)), TensorType("f64", (4, 5))  # take up 64 and 192 bytes


@pytest.fixture
def arena() -> Arena:
    return Arena(VM(), "batch", capacity=1024)


def spans(recording: Recording) -> list[tuple[TensorType, int, int, int]]:
    return [(each.type, each.nbytes, each.start, each.end) for each in recording.lifetimes]


def test_a_tensor_lives_from_its_allocation_until_python_drops_it(arena: Arena) -> None:
    with record(arena) as recording:
        x = arena.alloc(SMALL, Allocation)
        y = arena.alloc(LARGE, Allocation)
        del x
        z = arena.alloc(SMALL, Allocation)
        del z, y
    assert spans(recording) == [(SMALL, 64, 1, 3), (LARGE, 192, 2, 6), (SMALL, 64, 4, 5)]
    assert recording.moments == 7
    assert recording.used() == [0, 64, 256, 192, 256, 192, 0]


def test_what_was_there_before_and_what_stays_span_the_recording(arena: Arena) -> None:
    before = arena.alloc(SMALL, Allocation)
    with record(arena) as recording:
        after = arena.alloc(LARGE, Allocation)
        del before
    assert spans(recording) == [(SMALL, 64, 0, 2), (LARGE, 192, 1, 3)]
    assert recording.used() == [64, 256, 192]
    del after
    assert recording.used() == [64, 256, 192]


def test_a_reset_and_a_free_end_tensors(arena: Arena) -> None:
    with record(arena) as recording:
        with arena:
            x, y = arena.alloc(SMALL, Allocation), arena.alloc(LARGE, Allocation)
            arena.free(x)
        del x, y  # ended already
    assert spans(recording) == [(SMALL, 64, 1, 3), (LARGE, 192, 2, 4)]
    assert recording.used() == [0, 64, 256, 192, 0]


def test_a_view_keeps_the_tensor_it_views(arena: Arena) -> None:
    with record(arena) as recording:
        x = arena.alloc(SMALL, Allocation)
        view = arena.view(x, TensorType("f32", (1, 3)), Allocation)
        del x
        y = arena.alloc(SMALL, Allocation)
        del view, y
    assert spans(recording) == [(SMALL, 64, 1, 3), (SMALL, 64, 2, 4)]


def test_addresses_of_living_tensors_do_not_overlap() -> None:
    arena = Arena(VM(), "grows")
    types = [TensorType("u8", (n,)) for n in (100, 40_000, 50_000, 64, 70_000, 3)]
    with record(arena) as recording:
        tensors = [arena.alloc(type, Allocation) for type in types]
        del tensors[::2]
        tensors += [arena.alloc(type, Allocation) for type in types]
    assert recording.arena == "grows"
    assert recording.capacity == arena.capacity > 1 << 16
    for i, x in enumerate(recording.lifetimes):
        assert 0 <= x.offset <= arena.capacity - x.nbytes
        for y in recording.lifetimes[:i]:
            assert apart(x, y)


def apart(x: Lifetime, y: Lifetime) -> bool:
    return (
        x.end <= y.start
        or y.end <= x.start
        or x.offset + x.nbytes <= y.offset
        or y.offset + y.nbytes <= x.offset
    )


def test_used_is_what_the_arena_says(arena: Arena) -> None:
    said = [arena.used]
    with record(arena) as recording:
        tensors: list[Allocation] = []
        for type in (SMALL, LARGE, SMALL):
            tensors.append(arena.alloc(type, Allocation))
            said.append(arena.used)
        while tensors:
            tensors.pop()
            said.append(arena.used)
    assert recording.used() == said
    assert max(said) == arena.high_water


def test_nothing_of_a_recording_stays_in_the_arena(arena: Arena) -> None:
    fields = set(vars(arena))
    with record(arena) as recording:
        x = arena.alloc(SMALL, Allocation)
    assert set(vars(arena)) == fields
    y = arena.alloc(LARGE, Allocation)
    del x, y
    assert spans(recording) == [(SMALL, 64, 1, 2)]
    assert arena.used == 0


def test_an_error_ends_the_recording(arena: Arena) -> None:
    fields = set(vars(arena))
    with pytest.raises(ArenaOverflow), record(arena) as recording:
        arena.alloc(TensorType("u8", (4096,)))
    assert set(vars(arena)) == fields
    assert recording.lifetimes == []


def test_recording_changes_no_address(arena: Arena) -> None:
    def step() -> list[int]:
        with arena:
            tensors = [arena.alloc(type, Allocation) for type in (SMALL, LARGE, SMALL)]
            return [x.handle for x in tensors]

    handles = [step(), step()]
    with record(arena):
        handles.append(step())
    handles.append(step())
    assert handles[1:] == [handles[1]] * 3
