"""Recordings: what they store, and that they are equal where runs are."""

from __future__ import annotations

import os
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import ArgumentError, CaptureError
from mlvm.eager import Tensor
from mlvm.eager.capture.capture import step_observers
from mlvm.eager.runs.names import names_of_objects
from mlvm.eager.runs.replay import Replay
from tests.brief import Capsys, cases, refuses, run_python, with_long
from tests.eager.runs.recorded import STEPS, batches, train
from tests.interrupting import interrupted_at_line
from tests.trees import bits
from tests.wired import connect_to


def test_a_recording_has_each_step(folder: Path) -> None:
    (folder / "a").mkdir()  # an empty folder may exist
    run = train(folder / "a")
    assert len(run.steps) == STEPS
    assert run.is_closed
    assert not run.has_failed
    assert [each.step for each in run.checkpoints] == [0, 4, 8]
    assert [step.table.names for step in run.steps] == [["x", "y"]] * STEPS
    assert {cell.name for cell in run.cells} >= {"model.kernel", "model.bias", "random keys"}
    assert np.isfinite(run.losses).all()
    log, data = (folder / "a" / name for name in ("log", "data"))
    assert log.stat().st_size < 1024 * STEPS
    assert data.stat().st_size < STEPS * 8 * 5 * 4 * 2


def test_every_step_is_replayed_bit_for_bit(folder: Path) -> None:
    def between(n: int, model: Any) -> None:
        if n in (2, 7):  # before a step of a checkpoint, and before another one
            model.bias[0] += 1

    run = train(folder / "a", between=between)
    forwards, backwards = Replay(run), Replay(run)
    assert [forwards.replay(n) for n in range(STEPS)] == [[]] * STEPS
    assert [backwards.replay(n) for n in reversed(range(STEPS))] == [[]] * STEPS


def test_a_moment_has_state_and_inputs(folder: Path) -> None:
    seen = {}

    def between(n: int, model: Any) -> None:
        seen[n + 1] = model.kernel.numpy()

    run = train(folder / "a", between=between)
    moment = run.at(6)
    np.testing.assert_array_equal(moment.state["model.kernel"], seen[6])
    x, y = batches()[6]
    np.testing.assert_array_equal(moment.inputs["x"], x)
    np.testing.assert_array_equal(moment.inputs["y"], y)
    model = ml.nn.Linear(3, 2)
    moment.load(model=model)
    np.testing.assert_array_equal(model.kernel.numpy(), seen[6])
    refuses(ArgumentError, "expected names in the recorded state", lambda: moment.load(other=model))
    refuses(ArgumentError, "from 0 to 9", lambda: run.at(10))


def test_a_load_refuses_objects_without_recorded_state(folder: Path) -> None:
    class Other(ml.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = ml.nn.Linear(3, 2)

    moment = train(folder / "a").at(3)
    wrong: Any
    for wrong in (5, "x", None, [], Other()):
        refuses(ArgumentError, "model.kernel", partial(moment.load, model=wrong))
    larger: Any = ml.nn.Linear(3, 2)
    larger.scale = ml.ones(2)
    before = larger.kernel.numpy().copy()
    refuses(ArgumentError, "no state of model.scale", lambda: moment.load(model=larger))
    np.testing.assert_array_equal(larger.kernel.numpy(), before)
    model = ml.nn.Linear(3, 2)
    optimizer = ml.optim.AdamW(model, 0.1)
    moment.load(model=model, optimizer=optimizer)
    assert model.bias is not None
    np.testing.assert_array_equal(model.bias.numpy(), moment.state["model.bias"])


def test_paths_of_public_attributes_name_the_state(folder: Path) -> None:
    linear = ml.nn.Linear(3, 4)
    model = ml.nn.Sequential(linear, ml.tanh, ml.nn.Linear(4, 2))
    optimizer = ml.optim.Adam(model, 0.1)

    @ml.capture
    def step(x: Tensor) -> Tensor:
        loss, gradients = ml.value_and_grad(lambda model: ml.mean(model(x) ** 2))(model)
        optimizer.update(gradients)
        return loss

    with ml.runs.record(folder / "a"):
        step(ml.ones((5, 3)))
        before = linear.kernel.numpy()
        step(ml.ones((5, 3)))
    moment = ml.runs.open(folder / "a").at(1)
    np.testing.assert_array_equal(moment.state["model.layers[0].kernel"], before)
    assert {f"model.layers[2].{name}" for name in ("kernel", "bias")} <= moment.state.keys()
    moment.load(model=model, optimizer=optimizer)
    np.testing.assert_array_equal(linear.kernel.numpy(), before)


def test_slots_and_fields_of_derived_classes_name_the_state() -> None:
    class Base:
        table = (ml.ones(3),)

    class Derived(Base):
        __slots__ = ("model",)
        table = (ml.zeros(3),)

    x: Any = Derived()
    x.model = Two()
    names = names_of_objects(lambda: x, (), {})
    tensors = x.model.w, x.table[0], Base.table[0]
    assert [names.get(id(each.root)) for each in tensors] == ["x.model.w", "x.table[0]", None]


def test_captured_and_eager_runs_are_equal(folder: Path) -> None:
    a = train(folder / "a")
    b = train(folder / "b", captured=False)
    assert ml.runs.diff(a, b) is None
    assert [(x.results, x.after) for x in a.steps] == [(x.results, x.after) for x in b.steps]


def test_state_that_a_function_passes_on_is_not_stored(folder: Path) -> None:
    @ml.capture
    def step(w: Tensor, x: Tensor) -> Tensor:
        return w + 0.5 * ml.sum(x, axis=0)

    w = ml.zeros(100)
    with ml.runs.record(folder / "a", every=3):
        for i in range(8):
            w = step(w, ml.full((2, 100), i + 1.0))
    run = ml.runs.open(folder / "a")
    assert [[x.number for x in step.stored_inputs] for step in run.steps] == (
        [[0, 1], [1], [1], [0, 1], [1], [1], [0, 1], [1]]
    )
    assert [Replay(run).replay(i) for i in range(8)] == [[]] * 8


def test_inputs_that_are_not_stored_are_those_of_the_caller(folder: Path) -> None:
    run = train(folder / "a", options={"inputs": "none"})
    text = "was not stored; record with inputs="
    refuses(ArgumentError, text, lambda: Replay(run).replay(3))
    assert Replay(run, inputs=lambda n: batches()[n]).replay(7) == []
    for wrong, got in ((batches()[0], "got different values"), ([[1.0], [2.0]], r"got f32\[1\]")):
        given = Replay(run, inputs=lambda n, wrong=wrong: wrong)  # type: ignore[misc]
        text = rf"item 0 of inputs\(4\) as the recorded input 'x', f32\[8,3\], {got}"
        refuses(ArgumentError, text, partial(given.replay, 7))


class Trainer:
    def __init__(self) -> None:
        self.w = ml.zeros(20)

    @ml.capture
    def step(self, x: Tensor) -> None:
        self.w[...] = self.w + x


def test_a_tensor_is_state_that_can_be_loaded(folder: Path) -> None:
    """The fields of a method's object are named with or without self."""
    trainer = Trainer()
    with ml.runs.record(folder / "a", inputs="none"):
        for _ in range(3):
            trainer.step(ml.ones(20))
    replay = Replay(ml.runs.open(folder / "a"), inputs=lambda n: np.ones(20, np.float32))
    moment, loaded = replay.at(2), ml.zeros(20)
    moment.load(w=loaded)
    moment.load(self=trainer)
    assert loaded.tolist() == trainer.w.tolist() == [2.0] * 20
    refuses(ArgumentError, "expected self.w as a tensor, got 3", lambda: moment.load(w=3))
    text = r"for a method write Trainer\.step\.debug\(instance"
    refuses(TypeError, text, lambda: trainer.step.debug(loaded))


class Two(ml.nn.Module):
    def __init__(self) -> None:
        self.w, self.h = ml.ones(3), ml.full(3, 2.0)


def update_and_rebind(m: Two, x: Tensor) -> Tensor:
    m.h *= 0.5
    m.h = ml.tanh(m.h * m.w + x)
    return m.h


def share(m: Two, x: Tensor) -> Tensor:
    m.h = m.w
    return m.h * x


@pytest.mark.parametrize("body", [update_and_rebind, share, lambda m, x: m.w * x + m.h])
@cases("change", "pass", "m.w = ml.full(3, 5.0)", "m.w, m.h = m.h, m.w", "m.w[0] = 7.0")
def test_the_state_of_a_step_is_that_of_its_paths(folder: Path, body: Any, change: str) -> None:
    m, before = Two(), []
    step = ml.capture(lambda x: body(m, x))
    with ml.runs.record(folder / "a", every=2):
        for i in range(6):
            exec(change if i % 3 else "pass")
            before.append([m.w.tolist(), m.h.tolist()])
            step(ml.full(3, i + 1.0))
    run, loaded = ml.runs.open(folder / "a"), Two()
    assert ml.runs.verify(run, steps=6).is_accepted
    for i, expected in enumerate(before):
        run.at(i).load(m=loaded)
        assert [loaded.w.tolist(), loaded.h.tolist()] == expected


def test_state_that_ended_is_not_stored_again(folder: Path) -> None:
    step = ml.capture(lambda m, x: m.w * x)
    with ml.runs.record(folder / "a"):
        for i in range(6):
            step(Two(), ml.full(3, float(i)))
    run = ml.runs.open(folder / "a")
    assert (len(run.checkpoints), [*run.at(5).state], run.torn) == (1, ["m.w"], 0)


class Effects(ml.nn.Module):
    """Steps that change Python state, fields, arguments and random generators."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.t, self.items, self.seen = ml.ones(3), 0, [1], {1}
        self.table: dict[str, Any] = {"w": ml.zeros(3), "n": 4}

    def counts(self, x: Tensor) -> Any:
        self.t += 1
        self.items.append(self.t)
        self.seen.add(len(self.items))
        return ml.sum(x) * self.t, len(self.seen)

    def initializes(self, x: Tensor) -> Any:
        if self.t == 0:
            self.t = 1
            self.w[:] = x * 2.0
        return 2**60, {"loss": ml.sum(self.w * x)}

    def draws(self, x: Tensor) -> Any:
        return ml.random.normal(3) * float(np.random.normal())

    def rebinds(self, x: Tensor) -> Any:
        self.w = self.w + x
        return ml.sum(self.w), 0.5

    def updates(self, x: Tensor) -> Any:
        x += 1.0
        self.w *= 0.5
        return [self.w, x, 3]

    def passes(self, x: Tensor) -> Any:
        self.table["w"] += x
        return self.table


@cases("name", "counts", "initializes", "draws", "rebinds", "updates", "passes")
@pytest.mark.parametrize("wrap", [ml.capture, ml.runs.step])
@pytest.mark.filterwarnings("ignore")
def test_a_recorded_run_equals_an_unrecorded_run(folder: Path, name: str, wrap: Any) -> None:
    def run() -> Any:
        effects, x = Effects(), ml.ones(3)
        step, results = wrap(getattr(effects, name)), []
        ml.random.seed(0)
        np.random.seed(0)
        for i in range(6):
            results.append(bits(step(x)))
            if i == 2:
                effects.w = ml.full(3, 5.0)
        now = float(np.random.normal()), bits(ml.random.normal(1))
        return results, bits((effects.w, x)), effects.t, effects.items, effects.seen, now

    expected = run()
    with ml.runs.record(folder / "a", every=4):
        assert run() == expected
    verified = ml.runs.verify(ml.runs.open(folder / "a"), steps=6)
    is_unchecked = (name, wrap) == ("draws", ml.runs.step)
    assert (verified.problems, verified.mismatches) == ([], [])
    assert (verified.is_accepted, verified.unchecked) == (not is_unchecked, 6 * is_unchecked)


def test_results_that_no_program_computes_are_compared(folder: Path) -> None:
    step = ml.capture(lambda x: (x * 1.5, 7))
    x = ml.ones(50)
    with ml.runs.record(folder / "a"):
        for _ in range(3):
            x, _ = step(x)
    run = ml.runs.open(folder / "a")
    assert [[each.number for each in step.stored_inputs] for step in run.steps] == [[0], [], []]
    assert ml.runs.verify(run).is_accepted
    for number in range(2):
        results = [*run.steps[1].results]
        results[number] ^= 1
        run.steps[1] = run.steps[1]._replace(results=results)
        assert ml.runs.verify(run).outcome == "does not match"
        run = ml.runs.open(folder / "a")


@pytest.mark.parametrize("is_waiting", [True, False])
def test_steps_of_several_threads_are_recorded(folder: Path, *, is_waiting: bool) -> None:
    w = ml.zeros(3)
    inner = ml.capture(lambda x: ml.sum(w.__iadd__(x)))
    with ThreadPoolExecutor(2) as pool, ml.runs.record(folder / "a", every=3):
        step = ml.runs.step(lambda xs: sum(map(float, pool.map(inner, xs))))
        for i in range(5):
            xs = [ml.full(3, float(i)), ml.ones(3)]
            _ = step(xs) if is_waiting else [*pool.map(inner, xs)]
    run = ml.runs.open(folder / "a")
    verified = ml.runs.verify(run, steps=15)
    assert (len(run.steps), verified.outcome) == (10 + 5 * is_waiting, "matches")


def test_an_eager_step_does_not_hold_up_other_threads(folder: Path) -> None:
    w, sums = ml.zeros(300), ml.zeros(50)
    inner = ml.capture(lambda x: ml.sum(sums.__iadd__(x)))
    is_over: list[bool] = []

    def others() -> None:
        while not is_over:
            inner(ml.full(50, time.monotonic()))

    @ml.runs.step
    def step(x: Tensor) -> Tensor:
        time.sleep(0.02)
        return ml.sum(w.__iadd__(x))

    with ml.runs.record(folder / "a"), ThreadPoolExecutor(1) as pool:
        inner(ml.ones(50))
        pool.submit(others)
        for i in range(3):
            step(ml.full(300, float(i)))
        is_over.append(True)
        pool.shutdown()
        step(ml.ones(300))
    run = ml.runs.open(folder / "a")
    verified = ml.runs.verify(run, steps=9999)
    assert (verified.problems, verified.outcome) == ([], "matches")
    assert (verified.unchecked, run.steps[-1].table.reason) == (3, "")


def test_a_step_without_a_program_leaves_a_whole_recording(folder: Path) -> None:
    """The first step returns other values than its trace, and the second call raises."""
    w = ml.zeros(3)
    step = ml.runs.step(lambda x: (ml.sum(w.__iadd__(x)), x))
    with ml.runs.record(folder / "a", every=3):
        for x in (np.ones(3, np.float32), ml.ones(2), *[ml.full(3, float(i)) for i in range(3)]):
            with suppress(ml.errors.ShapeError):
                step(x)
    run = ml.runs.open(folder / "a")
    assert [(each.loss, bool(each.table.file)) for each in run.steps] == [
        (3.0, False), (3.0, True), (6.0, True), (12.0, True)
    ]  # fmt: skip
    assert ml.runs.verify(run, steps=4).is_accepted


def test_steps_that_take_from_a_queue_leave_other_steps_replayable(folder: Path) -> None:
    vm = ml.VM("queue")
    with ml.use(vm):
        queue = ml.QueueTensor(vm, ["f32[50]"], maxsize=6)
        for i in range(6):
            queue.put([np.full(50, i, np.float32)])
        w = ml.zeros(50)
        take = ml.capture(lambda: w.__iadd__(queue.get()[0]) * 2.0)
        step = ml.capture(lambda x: ml.sum(w * x))
        with ml.runs.record(folder / "a", every=4):
            for _ in range(6):
                step(take())
    replay = Replay(ml.runs.open(folder / "a"))
    verified = ml.runs.verify(replay, steps=6)
    assert (verified.steps, verified.outcome) == ([1, 3, 5, 7, 9, 11], "matches")
    assert [[*map(sum, replay.at(i).state.values())] for i in (7, 8, 10)] == [[300.0], [300.0], []]


def test_an_error_of_a_step_is_that_of_the_unrecorded_step(folder: Path) -> None:
    m, arena = Two(), ml.Arena(ml.VM("freed"), "batch")

    @ml.runs.step
    def step() -> Tensor:
        m.w = m.w + 1.0
        return m.w

    with ml.use(arena.vm), ml.runs.record(folder / "a"):
        m.w = ml.ones(3)
        with arena:
            step(), step()
        refuses(ml.errors.StaleTensorError, "the arena was reset", step)


class Data(dict[Any, Any]):
    """Values that Python code can read only by key."""

    def items(self) -> Any:
        raise NotImplementedError

    __repr__ = items


def test_methods_of_the_user_are_not_called(folder: Path) -> None:
    data = Data({Data: ml.ones(3), "__metadata__": ml.ones(3)})
    step = ml.capture(lambda x, __metadata__: ml.sum(data[Data] * x + __metadata__))
    with ml.runs.record(folder / "a"):
        step(ml.ones(3), data["__metadata__"])
    assert ml.runs.verify(ml.runs.open(folder / "a")).is_accepted


@cases("caught", False, True)
@pytest.mark.parametrize("wrap", [ml.capture, ml.runs.step])
def test_an_interrupted_step_leaves_a_whole_recording(
    folder: Path, wrap: Any, *, caught: bool
) -> None:
    def run(n: int) -> bool:
        w = ml.ones(3)
        step, results = wrap(lambda x: ml.sum(w.__imul__(0.9).__iadd__(x))), []
        path = folder / str(n)

        def one(i: int) -> None:
            results.append(float(step(ml.full(3, float(i)))))

        with suppress(KeyboardInterrupt), ml.runs.record(path, every=2):
            one(0)
            was = interrupted_at_line(lambda: one(1), n, "eager/runs")
            if was and not caught:
                raise KeyboardInterrupt
            one(2)
        recorded = ml.runs.open(path)
        assert ml.runs.verify(recorded, steps=9).is_accepted
        assert set(results) <= set(recorded.losses)
        assert len(recorded.losses) <= 3
        return was

    n = 1
    while run(n):
        n += with_long(23, 1)
    assert n > 100


def test_several_functions_share_their_state(folder: Path) -> None:
    model = ml.nn.Linear(3, 1)
    optimizer = ml.optim.SGD(model, 0.1)

    @ml.capture
    def improve(x: Tensor) -> Tensor:
        value, grads = ml.value_and_grad(lambda m: ml.mean(m(x) ** 2))(model)
        optimizer.update(grads)
        return value

    @ml.capture
    def evaluate(x: Tensor) -> Tensor:
        return ml.sum(model(x))

    x = ml.ones((2, 3))
    with ml.runs.record(folder / "a"):
        for _ in range(3):
            improve(x)
            evaluate(x)
    run = ml.runs.open(folder / "a")
    assert [step.table.function.rpartition(".")[2] for step in run.steps] == (
        ["improve", "evaluate"] * 3
    )
    assert len(run.checkpoints) == 1
    assert [Replay(run).replay(i) for i in range(6)] == [[]] * 6


def summing(n: int) -> tuple[Tensor, Any]:
    """Return n zeros, and a step that adds positive numbers to them."""
    w = ml.zeros(n)

    @ml.capture
    def step(x: Tensor) -> Tensor:
        nonlocal w
        ml.check(ml.all(x > 0), "positive")
        w += x
        return ml.sum(w)

    return w, step


@pytest.mark.parametrize("stored", ["all", "1 KiB"])
def test_what_a_failed_step_has_stored_is_removed(folder: Path, stored: str) -> None:
    w, step = summing(50)
    with ml.runs.record(folder / "a", inputs=stored):
        step(ml.ones(50))
        for _ in range(3):
            w += 1.0
            with pytest.raises(ml.errors.CheckError):
                step(-ml.ones(50))
        for i in range(3):
            step(ml.full(50, i + 2.0))
    verified = ml.runs.verify(Replay(ml.runs.open(folder / "a")), steps=4)
    assert (verified.problems, verified.steps) == ([], [0, 1, 2, 3])
    assert verified.is_accepted


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32", "float64"])
def test_scalars_of_all_types_are_values_and_state(folder: Path, dtype: str) -> None:
    total = ml.zeros((), dtype=getattr(ml, dtype))
    step = ml.capture(lambda x: total.__iadd__(ml.astype(ml.sum(x), getattr(ml, dtype))))
    with ml.runs.record(folder / "a", every=2):
        for _ in range(3):
            step(ml.full(2, 1.5))
    run = ml.runs.open(folder / "a")
    assert (run.losses, ml.runs.verify(run).outcome) == ([3.0, 6.0, 9.0], "matches")
    run.at(2).load(total=total)
    assert float(total) == 6.0


@cases("value, reason", (lambda x: float(x[0]), "CaptureError"), (id, "has other results"))
def test_steps_without_a_program_have_results(folder: Path, value: Any, reason: str) -> None:
    load = ml.runs.step(lambda x: x * (value(x) % 1000003))
    step = ml.capture(lambda x: ml.sum(x))
    with ml.runs.record(folder / "a"):
        for i in range(3):
            step(load(ml.full(50, i + 1.0)))
    replay = Replay(ml.runs.open(folder / "a"))
    assert [replay.replay(i) for i in (1, 3, 5)] == [[]] * 3
    assert reason in replay.run.steps[0].table.reason
    refuses(ml.errors.EncodingError, "has no program", replay.replay, 0)


def test_writes_are_not_counted_after_a_recording(folder: Path) -> None:
    w = ml.zeros(50)
    step = ml.capture(lambda x: ml.sum(w.__iadd__(x)))
    with (recording := ml.runs.record(folder / "a")):
        step(ml.ones(50))
        was_watched = w.root.region.watched  # type: ignore[union-attr]
    assert (was_watched, w.root.region.watched) == (True, False), recording  # type: ignore[union-attr]


@cases("fn", None, ml.sum)
def test_a_step_that_begins_after_the_recording_writes_nothing(folder: Path, fn: Any) -> None:
    with ml.runs.record(folder / "a"):
        [observer] = step_observers
    before = sorted(folder.rglob("*"))
    result = observer.observe(ml.capture(lambda x: ml.sum(x)), (ml.ones(3),), {}, fn)
    assert (float(result), sorted(folder.rglob("*"))) == (3.0, before)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_does_not_record(folder: Path) -> None:
    text = """
        import os, sys, mlvm.eager as ml
        step = ml.capture(lambda x: ml.sum(x))
        with ml.runs.record("a"):
            step(ml.ones(3))
            child = os.fork()
            if child:
                os.waitpid(child, 0)
            step(ml.full(3, 2.0))
        if child:
            print(ml.runs.open("a").losses)
    """
    done = run_python("-c", textwrap.dedent(text), cwd=folder)
    assert (done.stdout, done.returncode) == ("[3.0, 6.0]\n", 0), done.stderr


def test_a_damaged_checkpoint_is_a_typed_error(folder: Path) -> None:
    w = ml.ones(3)
    scale = ml.capture(lambda x: w * x)
    double = ml.capture(lambda x: x + x)
    with ml.runs.record(folder / "a"):
        for i in range(4):
            scale(ml.full(3, float(i)))
            double(ml.full(3, float(i)))
    [checkpoint] = (folder / "a" / "checkpoints").iterdir()
    checkpoint.write_bytes(b"")
    replay = Replay(ml.runs.open(folder / "a"))
    for n in range(8):
        with pytest.raises(ml.errors.EncodingError, match="file has changed since the recording"):
            replay.replay(n)


@cases("field, value", ("returns", [9]), ("writes", [(0, 9)]), ("returns", [2**70]))
def test_a_table_refers_only_to_results_of_the_program(
    folder: Path, field: str, value: list[Any]
) -> None:
    train(folder / "a")
    run = ml.runs.open(folder / "a")
    object.__setattr__(run.steps[0].table, field, value)
    replay = Replay(run)
    refuses(ml.errors.EncodingError, r"step 0 refers to result \d+ of a program", replay.replay, 0)


def test_what_record_refuses(folder: Path) -> None:
    refuses(ArgumentError, "every as an int", lambda: ml.runs.record(folder, every=0))
    refuses(ArgumentError, "inputs", lambda: ml.runs.record(folder, inputs="some"))
    refuses(ArgumentError, "expected a folder", lambda: ml.runs.record(3))  # type: ignore[arg-type]
    with ml.runs.record(folder / "a"):
        refuses(CaptureError, "is active", lambda: ml.runs.record(folder / "b").__enter__())
    with pytest.raises(FileExistsError, match="choose another folder"):
        ml.runs.record(folder / "a").__enter__()
    ml.capture(lambda: ml.ones(2))()  # nothing is left on


@cases("name", "data", "log", "notes.txt", "")
def test_a_folder_with_other_files_stays_as_it_was(folder: Path, name: str) -> None:
    path = folder / "a" / name
    if name:
        (folder / "a").mkdir()
    path.write_bytes(b"mine")
    pattern = f"folder, but .*a contains '{name}'; choose" if name else "a folder, got the file "
    with pytest.raises(FileExistsError, match=pattern):
        ml.runs.record(folder / "a").__enter__()
    assert [each.name for each in (folder / "a").glob("*")] == [name] * bool(name)
    assert path.read_bytes() == b"mine"


def test_wrong_arguments_are_typed_errors(folder: Path) -> None:
    (folder / "a").mkdir()  # an empty folder is recorded to
    run: Any = train(folder / "a", options={"inputs": "none"})
    wrong: Any
    for wrong in ("a", None, 3):
        refuses(ArgumentError, "ml.runs.open", partial(ml.runs.diff, run, wrong))
        refuses(ArgumentError, "ml.runs.open", partial(ml.runs.Replay, wrong))
        refuses(ArgumentError, "ml.runs.open", partial(ml.runs.verify, wrong))
    options: Any
    for options in ({"steps": "a"}, {"steps": -1}, {"steps": True}, {"seed": "a"}, {"seed": 0.5}):
        refuses(ArgumentError, "as an int", partial(ml.runs.verify, run, **options))
    refuses(ArgumentError, "expected the folder", lambda: ml.runs.open(5))  # type: ignore[arg-type]
    refuses(ArgumentError, "inputs as a function", lambda: Replay(run, inputs=[]))  # type: ignore[arg-type]
    for wrong in ([], None, 3, [1]):
        replay = Replay(run, inputs=lambda n, wrong=wrong: wrong)  # type: ignore[misc]
        refuses(ArgumentError, r"a list of 2 arrays \(x, y\)", replay.replay, 1)
    assert ml.runs.verify(run, steps=0).is_accepted
    empty = train(folder / "b", order=[])
    refuses(ArgumentError, "b has no steps; record calls", lambda: empty.at(0))


def test_one_member_of_a_group_records(folder: Path) -> None:
    def member(rank: int, vm: object) -> float:
        step = ml.capture(lambda x: (ml.sum(x), ml.parallel.all_reduce(x + 1.0)))
        return float(step(ml.full(2, float(rank + 1)))[0])

    with ml.runs.record(folder / "a"), ml.parallel.Group(2) as group:
        group.run(member)
    run = ml.runs.open(folder / "a")
    assert run.losses == [2.0]
    text = "step 0 cannot be replayed separately: it calls all_reduce"
    refuses(ml.errors.UnknownFunctionError, text, lambda: Replay(run).replay(0))


@pytest.mark.local(reason="executions run on a VM of this process")
def test_a_replay_prints_nothing(folder: Path, capsys: Capsys) -> None:
    @ml.capture
    def step(x: Tensor) -> Tensor:
        y = x + 1.0
        ml.debug.print("y {}", y)
        return ml.sum(y)

    with ml.runs.record(folder / "a"):
        step(ml.ones(2))
    assert "y [2. 2.]" in capsys.readouterr().out
    replay = Replay(ml.runs.open(folder / "a"))
    assert (replay.replay(0), replay.execution(0).length >= 2) == ([], True)
    assert not capsys.readouterr().out


@pytest.mark.local(reason="executions run on a VM of this process")
def test_a_vm_elsewhere_is_recorded(folder: Path) -> None:
    a = train(folder / "a")
    with ml.use(connect_to(ml.VM("elsewhere"))):
        b = train(folder / "b")
    assert ml.runs.diff(a, b) is None
