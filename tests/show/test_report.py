"""A recording shows which tensors lived where and when in an arena, and leaves no trace in it."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

import mlvm.eager as ml
from mlvm.arena.arena import Allocation, Arena
from mlvm.arena.recording import Lifetime, Recording, merged_if_many
from mlvm.core.errors import ArenaOverflowError
from mlvm.core.program.assembly import assemble
from mlvm.core.program.program import Opcode, Program
from mlvm.core.types import TensorType
from mlvm.core.vm import VM
from mlvm.show.calls import writes_in
from mlvm.show.record import COPIED_IN, record, record_all
from mlvm.show.report import report_of
from mlvm.show.session import all_recorded
from tests.cases.claim_tests import claims

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
        assert spans(recording.so_far()) == [(SMALL, 64, 1, 3), (LARGE, 192, 2, 3)]
        assert recording.so_far().used() == [0, 64, 256]
        del x
        z = arena.alloc(SMALL, Allocation)
        del z, y
    assert spans(recording) == [(SMALL, 64, 1, 3), (LARGE, 192, 2, 6), (SMALL, 64, 4, 5)]
    assert recording.moments == 7
    assert recording.used() == [0, 64, 256, 192, 256, 192, 0]
    assert recording.high_water == arena.high_water == 256
    assert recording.so_far() == recording


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
            assert disjoint(x, y)


def disjoint(x: Lifetime, y: Lifetime) -> bool:
    return (
        x.end <= y.start
        or y.end <= x.start
        or x.offset + x.nbytes <= y.offset
        or y.offset + y.nbytes <= x.offset
    )


def test_nothing_of_a_recording_stays_in_the_arena(arena: Arena) -> None:
    fields = set(vars(arena))
    with pytest.raises(ArenaOverflowError), record(arena) as recording:
        [arena.alloc(type) for type in (SMALL, TensorType("u8", (4096,)))]
    assert set(vars(arena)) == fields
    arena.alloc(LARGE)
    assert spans(recording) == [(SMALL, 64, 1, 2)]
    assert arena.used == 0


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


# --- ops and lines, recordings within recordings, the table ---------------------------


def test_a_lifetime_knows_the_op_and_the_line_that_made_it() -> None:
    batch = ml.Arena(ml.VM(), "batch")
    with ml.record(batch) as recording, batch:
        x = ml.asarray([1.0, 2.0])
        y = ml.reshape(x, (2, 1)) * 3.0
        x += 1.0
    line = test_a_lifetime_knows_the_op_and_the_line_that_made_it.__code__.co_firstlineno + 3
    assert [(each.op, each.line) for each in recording.lifetimes] == [
        (COPIED_IN, f"{__file__}:{line}"),
        ("multiply", f"{__file__}:{line + 1}"),
    ]
    del y
    assert {"launch", "write"}.isdisjoint(vars(batch.vm))


def test_recordings_of_one_arena_and_of_one_vm_lie_within_each_other() -> None:
    vm = ml.VM()
    batch, other = ml.Arena(vm, "batch"), ml.Arena(vm, "other")
    with ml.record(batch) as outer:
        with batch, ml.record(batch) as inner, ml.record(other) as third:
            x = ml.ones(3)
            y = other.keep(x)
        with batch:
            ml.ones(4) + 1.0
    assert [(each.type.size, each.op) for each in outer.lifetimes] == [
        (3, "full"), (4, "full"), (4, "add"),
    ]  # fmt: skip
    assert [each.op for each in inner.lifetimes] == ["full"]
    assert [each.op for each in third.lifetimes] == ["copy"]
    assert outer.resets == [outer.moments - 4, outer.moments]
    assert batch.recording is outer
    del y


def test_a_recording_keeps_no_program_alive() -> None:
    with ml.Arena(ml.VM(), "batch").allocating() as batch:
        step = ml.capture(lambda x: x * 2.0)
        x = ml.ones(3)
        with ml.record(batch):
            step(x)
        program = weakref.ref(step.program)
        step.close()
        assert program() is None


def test_a_recording_can_forget_what_is_long_past(arena: Arena) -> None:
    with record(arena, max_tensors=5) as recording:
        tensor = arena.alloc(LARGE, Allocation)
        for _ in range(40):
            arena.alloc(SMALL, Allocation)
        assert len(recording.lifetimes) <= 12
    assert 5 <= len(recording.lifetimes) <= 12
    assert recording.lifetimes[0].type is LARGE
    assert recording.first > 50
    assert len(recording.used()) == recording.moments - recording.first
    assert max(recording.used()) == 256
    assert recording.forgotten == 41 - len(recording.lifetimes)
    assert recording.so_far() == recording
    del tensor


def test_the_most_in_use_is_not_forgotten(arena: Arena) -> None:
    with record(arena, max_tensors=4) as recording:
        peak = [arena.alloc(LARGE, Allocation) for _ in range(4)]
        del peak
        for _ in range(40):
            arena.alloc(SMALL, Allocation)
    assert max(recording.used()) == 64
    assert recording.high_water == recording.high_before == arena.high_water == 768
    [summary, forgotten] = arena.report().split("\n\n")[1].splitlines()[:2]
    assert summary == "recorded: at most 768 bytes in use"
    assert forgotten.startswith(
        f"{recording.forgotten} tensors that ended by moment {recording.first} are forgotten; "
        f"since then at most 64 bytes in use, at moment "
    )
    assert report_of(recording).splitlines()[2:5] == [
        "high water  768", "capacity    1,024", "tensors     44",
    ]  # fmt: skip


def test_what_a_captured_function_returns_has_the_op_that_wrote_it() -> None:
    with record_all(programs=True) as recordings:
        arena = ml.Arena(ml.VM("captured"), "a")

        @ml.subroutine
        def half(x: ml.Tensor) -> Any:
            return ml.cond(ml.sum(x) > 1, lambda x: half(x * 0.5), lambda x: x, x)

        @ml.capture
        def step(x: ml.Tensor) -> tuple[ml.Tensor, ...]:
            loop = ml.while_loop(lambda x: ml.max(x) > 0.5, ml.sin, x)
            return x @ x, ml.exp(x) * 2 + x, ml.reshape(ml.cos(x), (16,)), loop, half(x)

        with arena:
            results = step(ml.ones((4, 4)))
            y = results[0]
            y += 1  # which is not what wrote it first
        program = step.program
        step.close()
    [recording] = [each for each in recordings if each.arena == "a"]
    by_op = {each.op: each for each in recording.lifetimes}
    assert list(by_op) == ["full", "matmul", "exp, multiply, add", "cos", "copy"]
    assert [each.op for each in recording.lifetimes][-2:] == ["copy", "copy"]
    code = program.main.code
    for each in recording.lifetimes[1:]:
        assert each.program is program
        assert each.pc is not None
    assert by_op["matmul"].pc is not None
    assert code[by_op["matmul"].pc - 1].immediates == ("matmul.out",)
    last = recording.lifetimes[-1].pc
    assert last is not None
    assert code[last].opcode in (Opcode.cfunc, Opcode.call)


def test_what_is_written_through_a_view_has_its_op(arena: Arena) -> None:
    source = arena.alloc(SMALL)
    with record(arena) as recording:
        x, y = arena.alloc(SMALL), arena.alloc(SMALL)
        views = [arena.view(each, TensorType("f32", (1, 3))) for each in (x, source)]
        copy = Program.of_op("copy.out", 2, {}, 0)
        arena.vm.launch(copy, [each.handle for each in views])
    assert [each.op for each in recording.lifetimes] == ["", "copy", ""]
    del y


def test_offsets_stay_apart_when_storages_come_and_go() -> None:
    arena = Arena(VM(), "trims", trims=True)
    large = TensorType("u8", (1 << 17,))
    with record(arena) as recording:
        x = arena.alloc(large, Allocation)
        del x
        arena.trim()
        y = arena.alloc(large, Allocation)
    assert [each.offset for each in recording.lifetimes] == [0, 1 << 17]
    del y


def test_every_arena_made_inside_the_block_is_recorded() -> None:
    before = ml.Arena(ml.VM(), "before")
    with record_all() as recordings:
        batch = ml.Arena(before.vm, "batch")
        inner = ml.Arena(before.vm, "inner")
        inner.alloc(SMALL)
    assert [(each.arena, len(each.lifetimes)) for each in recordings] == [
        ("batch", 0),
        ("inner", 1),
    ]
    assert recordings == [batch.recording, inner.recording]
    after = ml.Arena(before.vm, "after")
    assert after.recording is before.recording is None


def test_no_arena_and_no_vm_is_kept_to_be_recorded() -> None:
    vms: list[weakref.ref[ml.VM]] = []
    with all_recorded() as session:
        for _ in range(3):
            vm = ml.VM("v")
            arena = ml.Arena(vm, "a")
            with arena:
                x = ml.ones(1000)
            end = weakref.ref(arena)
            vms.append(weakref.ref(vm))
            del vm, arena, x
            assert end() is None  # at once, and its memory with it
        gc.collect()
        assert [vm() for vm in vms] == [None] * 3
    matches = [each for each in session.recordings if each.arena == "a"]
    assert [(each.vm, each.high_water, len(each.lifetimes)) for each in matches] == [
        ("v", 4032, 1)
    ] * 3
    assert [each.lifetimes[0].end for each in matches] == [2] * 3
    assert [len(trace.spans) for trace in session.traces] == [1] * 3


def test_many_arenas_of_one_name_are_one() -> None:
    with record_all() as recordings:
        for _ in range(5):
            arena = Arena(VM("v"), "a")
            x = arena.alloc(SMALL)
            del x, arena
        first, second = Arena(VM("v"), "a"), Arena(VM("v"), "a")
        tensors = [first.alloc(LARGE), second.alloc(SMALL)]
        other = Arena(VM("w"), "a")
        other.alloc(SMALL)
    assert merged_if_many(recordings, 7) == recordings
    assert [each.arenas for each in merged_if_many(recordings[:2], 1)] == [2]
    [whole, apart_from_it] = merged_if_many(recordings, 6)
    assert apart_from_it is other.recording
    assert (whole.arena, whole.vm, whole.arenas, len(whole.lifetimes)) == ("a", "v", 7, 7)
    assert whole.high_water == 192 + 64
    assert whole.capacity == first.capacity + second.capacity
    assert [each.offset for each in whole.lifetimes] == [0, 0, 0, 0, 0, 0, 192]
    assert whole.times == sorted(whole.times)
    assert len(whole.times) == whole.moments == len(whole.used())
    for i, one in enumerate(whole.lifetimes):
        assert 0 < one.start < one.end <= whole.moments
        assert all(disjoint(one, another) for another in whole.lifetimes[:i])
    assert report_of(whole).splitlines()[1] == "arenas      7, of that name"
    recordings[0].forgotten = 1
    assert merged_if_many(recordings[:2], 1) == recordings[:2]
    del tensors


def test_the_report_is_a_table() -> None:
    vm = ml.VM("second")
    arena = ml.Arena(vm, "batch", capacity=4096)
    assert ml.Arena(vm, "weights").report().splitlines() == [
        "arena       weights",
        "on          second",
        "used        0",
        "high water  0",
        "capacity    0 (grows)",
        "tensors     0",
    ]
    with ml.record(arena), arena:
        tensors = [ml.ones(100), ml.ones((10, 10)), ml.ones(100), ml.ones(3)]
        head, rows = arena.report().split("\n\n")[:2]
    line = f"{__file__}:{test_the_report_is_a_table.__code__.co_firstlineno + 12}"
    line = line.removeprefix(f"{Path.cwd()}/")
    assert head.splitlines()[2:] == [
        "used        1,408",
        "high water  1,408",
        "capacity    4,096",
        "tensors     4",
    ]
    assert rows.splitlines() == [
        "bytes  tensors  type        made at",
        f"  896        2  f32[100]    {line}",
        f"  448        1  f32[10,10]  {line}",
        f"   64        1  f32[3]      {line}",
    ]
    peak = arena.report().split("\n\n")[1].splitlines()
    assert peak[0] == "recorded: at most 1,408 bytes in use, at moment 4"
    assert peak[2] == f"  896        2  f32[100]    full  {line}"
    del tensors


def test_a_report_lists_only_the_largest(arena: Arena) -> None:
    tensors = [arena.alloc(TensorType("u8", (n,)), Allocation) for n in range(1, 13)]
    rows = arena.report().split("\n\n")[1].splitlines()
    assert len(rows) == 1 + 8 + 1
    assert rows[-1].split() == ["256", "4", "others"]
    del tensors


def test_a_region_in_use_again_before_its_tensor_is_gone(arena: Arena) -> None:
    """Another thread takes a region as soon as a finalizer has returned it."""
    later: list[Allocation] = []

    class Reborn(Allocation):
        __slots__ = ()

        def __del__(self) -> None:
            super().__del__()
            later.append(arena.alloc(SMALL, Allocation))

    with record(arena) as recording:
        arena.alloc(SMALL, Reborn)
        other = arena.alloc(LARGE, Allocation)
        later.clear()
        del other
    assert [(x.start, x.end) for x in recording.lifetimes] == [(1, 2), (2, 4), (3, 5)]
    assert recording.used() == [0, 64, 64, 256, 192, 0]
    assert recording.high_water == 256


def test_what_a_thread_of_ours_makes_has_no_line_of_pythons() -> None:
    arena = Arena(VM(), "batch", capacity=4096)
    with record(arena) as recording:
        thread = Thread(target=arena.alloc, args=(SMALL, Allocation))
        thread.start()
        thread.join()
    assert [x.line for x in recording.lifetimes] == [""]


test_rows = claims("report", globals())


def written(code: str) -> Any:
    inner = '.func inner 2 0\nget -2\nget -1\npush_str "sin.out"\ncfunc 2 0\nreturn 0\n'
    return writes_in(assemble(f".func main 0 *\n{code}\nhalt\n{inner}"))
