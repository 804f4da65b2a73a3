"""Values: an update changes the tensor that it names, and no other, in every way of running."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings

import mlvm.eager as ml
from mlvm.core.errors import ArenaOverflowError, DTypeError, ShapeError, StaleTensorError
from mlvm.eager.tensor.update import live_tapes
from mlvm.show.record import record
from tests.fuzz import values
from tests.wired import connect_to

fewer_examples = settings(
    deadline=None,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


@settings(fewer_examples, max_examples=60)
@given(values.drawn_programs())
def test_programs_beside_numpy_with_copies(program: values.Program) -> None:
    values.try_program(program, captured=False)


@settings(fewer_examples, max_examples=8)
@given(values.drawn_programs())
def test_programs_captured(program: values.Program) -> None:
    values.try_program(program, captured=True)


@pytest.mark.local(reason="the VM behind the wire is here")
@settings(fewer_examples, max_examples=15)
@given(values.drawn_programs())
def test_programs_elsewhere(program: values.Program) -> None:
    with ml.use(connect_to(ml.VM("far"))):
        values.try_program(program, captured=False, gradients=False)


# --- memory ----------------------------------------------------------------------------


@pytest.fixture
def arena() -> Iterator[ml.Arena]:
    arena = ml.Arena(ml.VM("values"), "values")
    with arena.allocating():
        yield arena
    arena.close()


def address(x: ml.Tensor) -> Any:
    region: Any = x.root.region
    return region.storage, region.offset


def test_a_tensor_moves_only_where_somebody_needs_its_old_value(arena: ml.Arena) -> None:
    x = ml.ones((4,))
    place, used = address(x), arena.used
    x += 1.0
    x[1:3] = 0.0
    ml.multiply(x, x, out=x)
    assert (address(x), arena.used) == (place, used)
    view = ml.reshape(x, (2, 2))
    x += 1.0
    moved = address(x)
    assert (moved != place, address(view), arena.used) == (True, place, 2 * used)
    x += 1.0
    assert address(x) == moved, "the view is no view of it any more"
    del view
    assert arena.used == used
    x @= ml.ones((4, 4)) if x.ndim == 2 else x[:, None] * ml.ones((4,))
    assert arena.used == used


def test_an_update_that_has_no_room_changes_nothing() -> None:
    arena = ml.Arena(ml.VM("small"), "small", capacity=128)
    with arena.allocating():
        x = ml.ones((16,))
        y = ml.ones((16,))
        view = +x
        with pytest.raises(ArenaOverflowError):
            x += y
        assert x.tolist() == view.tolist() == [1.0] * 16
        del view
        x += y
        assert x.tolist() == [2.0] * 16


def test_what_has_moved_survives_a_rewind_and_ends_with_its_arena(arena: ml.Arena) -> None:
    x = ml.ones((3,))
    view = +x
    mark = arena.mark()
    x += 1.0
    arena.rewind(mark)
    assert (x.tolist(), view.tolist()) == ([2.0] * 3, [1.0] * 3)
    arena.reset()
    for each in (x, view):
        with pytest.raises(StaleTensorError, match="the arena was reset"):
            each += 1.0


def test_a_recording_follows_what_moves(arena: ml.Arena) -> None:
    with record(arena) as recording:
        x = ml.ones((3,))
        view = +x
        x += 1.0
        del view
        y = ml.ones((3,))
        x += y
        del x
    alive = [each.end - each.start for each in recording.lifetimes]
    assert len(alive) == 3
    assert recording.used()[-1] == 64


def test_many_threads_update_tensors_of_their_own(arena: ml.Arena) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def work(x: ml.Tensor) -> list[float]:
        for _ in range(50):
            view = +x
            x += 1.0
            view += x
            x[0] = 0.0
        assert x.arena is arena
        return x.tolist()

    with ThreadPoolExecutor(4, initializer=ml.use, initargs=(arena.vm,)) as pool:
        results = list(pool.map(work, [ml.full((3,), float(n)) for n in range(8)]))
    assert results == [[0.0, n + 50.0, n + 50.0] for n in range(8)]
    assert arena.used == 0


def test_a_slot_of_a_queue_and_a_scratch_pad_are_updated_where_they_are() -> None:
    vm = ml.VM("user")
    q = ml.QueueTensor(vm, ["f32[3]"], 2)
    with ml.Arena(vm, "here"):
        q.put((np.ones(3, np.float32),))
        [x] = q.get()
        place = address(x)
        x += 1.0
        assert (address(x), x.tolist()) == (place, [2.0] * 3)
        view = +x
        x += 1.0
        assert (x.arena.name, x.tolist(), view.tolist()) == ("here", [3.0] * 3, [2.0] * 3)
    with ml.ScratchPad(vm, 128) as pad, ml.Arena(vm, "there"):
        x = pad.tensor("f32[3]", 0)
        x[...] = 1.0
        view = +x
        x *= 2.0
        assert (x.arena.name, view.tolist(), x.tolist()) == ("there", [1.0] * 3, [2.0] * 3)


def test_nothing_is_left_behind_by_gradients(arena: ml.Arena) -> None:
    x, used = ml.ones((3,)), arena.used

    def loss(x: ml.Tensor) -> Any:
        for _ in range(3):
            x *= x
            x[0] = x[1] * x[2]
        return ml.sum(x)

    for _ in range(2):
        value, gradient = ml.value_and_grad(loss)(x)
        assert (value.item(), gradient.tolist()) == (3.0, [0.0, 16.0, 16.0])
        del value, gradient
        assert arena.used == used
    assert not any(getattr(tape, "nodes", None) for tape in live_tapes)


# --- captured --------------------------------------------------------------------------


def test_a_captured_function_updates_a_closed_over_tensor_beside_its_views() -> None:
    def build() -> tuple[Callable[[], Any], ml.Tensor, ml.Tensor]:
        state = ml.asarray([1.0, 2.0])
        view = ml.reshape(state, (2, 1))

        def step() -> Any:
            nonlocal state
            inner = ml.reshape(state, (1, 2))
            state += 1.0
            state[0] *= 2.0
            return inner, view + 0.0, ml.sum(state)

        return step, state, view

    results = []
    for wrap in (lambda fn: fn, ml.capture):
        step, state, view = build()
        run = wrap(step)
        results.append([[x.tolist() for x in run()] for _ in range(3)])
        alias = +state
        results[-1].append([x.tolist() for x in run()])
        results[-1].append([state.tolist(), view.tolist(), alias.tolist()])
    assert results[0] == results[1]


def test_a_captured_update_waits_for_no_pullback() -> None:
    w = ml.asarray([1.0, 2.0])

    @ml.capture
    def step() -> None:
        w.__iadd__(1.0)

    _, pullback = ml.vjp(lambda x: ml.sum(x * w * w), ml.ones((2,)))
    for _ in range(3):
        step()
    [g] = pullback(ml.asarray(1.0))
    assert (g.tolist(), w.tolist()) == ([1.0, 4.0], [4.0, 5.0])


def test_a_captured_step_updates_weights_without_a_copy() -> None:
    w = ml.ones((1000,))

    @ml.capture
    def step(x: ml.Tensor) -> Any:
        nonlocal w
        value, g = ml.value_and_grad(lambda w: ml.sum(w * w * x))(w)
        w -= 0.1 * g
        return value

    assert step(ml.ones((1000,))).item() == 1000.0
    assert step.plan.nbytes <= 2 * 4096, step.plan
    np.testing.assert_allclose(w.numpy(), np.full(1000, 0.8), rtol=1e-6)


# --- assignment ------------------------------------------------------------------------


@pytest.mark.local(reason="lists are taken where their values are")
def test_imported_bools_become_zeros_and_ones() -> None:
    array = np.array([2, 4, 6, 0], np.uint8).view(bool)
    for imported in (ml.asarray(array), ml.from_dlpack(array), ml.asarray([array])[0]):
        assert imported.numpy().view(np.uint8).tolist() == [1, 1, 1, 0]
        assert int(ml.count_nonzero(imported)) == 3
        assert (imported == ml.ones(4, dtype="bool")).tolist() == [True, True, True, False]
        assert ml.astype(imported, ml.int32).tolist() == [1, 1, 1, 0]
    assert ml.asarray(array, dtype=ml.int32).tolist() == [1, 1, 1, 0]
    assert ml.asarray(array[::2]).numpy().view(np.uint8).tolist() == [1, 1]


def test_values_that_do_not_fit() -> None:
    x: Any = ml.zeros((2, 3))
    for key, new, error, match in (
        (
            0,
            ml.ones((4,)),
            ShapeError,
            r"setitem\(f32\[2,3\], f32\[4\]\): expected values .* got shape \(4,\)",
        ),
        (ml.asarray([0]), ml.ones((2, 3)), ShapeError, r"values that broadcast to \(1, 3\)"),
        (x > 0.0, ml.ones((4,)), ml.errors.OperandValueError, "selects 0 elements, got 4"),
        (0, ml.ones((3,), dtype="c64"), DTypeError, "expected f32 values, got c64"),
        (7, 1.0, ml.errors.IndexingError, r"setitem\(f32\[2,3\], 7\): index 7 is out of range"),
        (ml.asarray([7]), 1.0, ml.errors.OperandValueError, "index 7"),
        (0, "text", DTypeError, r"setitem\(f32\[2,3\], str\): expected a tensor, .* got str"),
        (0, ["text"], DTypeError, r"setitem\(f32\[2,3\], list\)"),
        (0, [[1.0], [1.0, 2.0]], ShapeError, r"setitem\(f32\[2,3\], list\)"),
        (0, [1j, 0.0, 0.0], DTypeError, r"setitem\(f32\[2,3\], c64\[3\]\)"),
    ):
        with pytest.raises(error, match=match):
            x[key] = new
    with pytest.raises(TypeError, match="item deletion"):
        del x[0]
    assert x.tolist() == [[0.0] * 3] * 2


@pytest.mark.local(reason="lists are taken where their values are")
@pytest.mark.parametrize("dtype", ["u8", "i32", "f32", "f64", "c64"])
def test_the_numbers_of_a_list_take_the_dtype_as_a_number_does(dtype: str) -> None:
    x: Any = ml.zeros((3,), dtype=dtype)
    x[:2] = [1, 2]
    assert x.tolist() == [1, 2, 0]
    if x.dtype.is_integer:
        with pytest.raises(DTypeError, match=r"setitem.* values, got f32"):
            x[:2] = [0.1, 2.0]
    else:
        x[:2] = [0.1, 2.0]
        assert x.tolist() == ml.asarray([0.1, 2.0, 0.0], dtype=dtype).tolist()


def test_the_last_of_several_values_stays_and_has_the_gradient() -> None:
    def loss(v: ml.Tensor) -> Any:
        x = ml.zeros((3,))
        x[ml.asarray([1, 0, 1])] = v
        return ml.sum(x * ml.asarray([1.0, 2.0, 4.0]))

    value, g = ml.value_and_grad(loss)(ml.asarray([5.0, 6.0, 7.0]))
    assert (value.item(), g.tolist()) == (20.0, [0.0, 1.0, 2.0])
