"""`ml.auto_batch` of functions with open lengths: one trace, and one memory, for rows of any
length."""

from __future__ import annotations

import weakref
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from bench.lengths import trees
from mlvm.core.errors import MlvmError, OutOfMemoryError, ShapeError
from mlvm.core.types import root
from mlvm.machines import lane_runs
from mlvm.machines.native.lanes import NativeLanes
from mlvm.step import lane_programs as step_lanes
from mlvm.step.lane_function import LaneFunction
from mlvm.step.open_lanes import OpenLanes
from mlvm.step.open_step import _closed, _opened
from mlvm.step.saved import LoadedStep, SavedStep
from models.tree_lstm import TreeClassifier
from tests.brief import cases, refuses, with_long
from tests.trees import bits

NAMES = {"x": (None, "time", None)}
SIZES = (9, 5, 31, 7, 31, 9, 3, 17)


def batch_of(size: int, count: int = 3) -> ml.Tensor:
    words = np.random.default_rng(size).integers(20, size=(count, size))
    return ml.asarray(trees(words))


def train(model: TreeClassifier) -> Any:
    """Return a function of trees: the loss, and its gradients."""

    def loss(model: TreeClassifier, x: ml.Tensor) -> ml.Tensor:
        return ml.softmax_cross_entropy(model(x), x[:, 0, 0] % 5, reduction="mean")

    return lambda x: ml.value_and_grad(loss)(model, x)


def model(seed: int = 0) -> TreeClassifier:
    return TreeClassifier(20, 5, 8, 12, key=ml.random.key(seed))


@pytest.mark.local(reason="it counts the bytes of this process's VM")
def test_trees_of_any_size_have_one_trace_and_one_memory() -> None:
    with ml.use(ml.VM()) as vm:
        fn = train(model())
        step = ml.capture(fn, dynamic_axes=NAMES, max_sizes={"time": 31})
        used = []
        for size in SIZES:
            x = batch_of(size)
            assert bits(step(x)) == bits(fn(x)), size
            del x
            used.append(vm.consumed_size_in_mib())
        assert step.signatures == 1
        assert used[-1] - used[2] < 0.5  # eager calls have programs of their own


def test_an_axis_of_rows_is_opened_at_its_third_size() -> None:
    step = ml.capture(ml.auto_batch(lambda row: ml.sum(row[: row.shape[0] // 2])))
    counts = []
    for n in (4, 5, 6, 7, 8):
        x = ml.asarray(np.arange(2.0 * n, dtype=np.float32).reshape(2, n))
        assert np.array_equal(step(x).numpy(), x.numpy()[:, : n // 2].sum(axis=1))
        counts.append(step.signatures)
    assert counts == [1, 2, 3, 3, 3]


def test_any_number_of_rows_has_one_trace() -> None:
    fn = train(model())
    step = ml.capture(fn, dynamic_axes={"x": ("batch", "time", None)})
    for count, size in ((3, 9), (5, 9), (2, 5), (4, 31)):
        x = batch_of(size, count)
        assert bits(step(x)) == bits(fn(x))
    assert step.signatures == 1


@pytest.fixture(scope="module")
def saved() -> tuple[bytes, TreeClassifier]:
    """The file of a step for trees of up to 31 nodes, and its model."""
    net = model()
    step = ml.capture(lambda x: net(x), dynamic_axes=NAMES, max_sizes={"time": 31})
    for size in (5, 9):
        step(batch_of(size))
    with TemporaryDirectory() as folder:
        path = Path(folder, "step.mlvm")
        step.save(path)
        return path.read_bytes(), net


def test_a_file_has_rows_of_any_length(saved: tuple[bytes, TreeClassifier]) -> None:
    data, net = saved
    step = LoadedStep(SavedStep.from_bytes(data), ml.VM())
    for size in SIZES:
        x = batch_of(size)
        assert np.array_equal(step(x.numpy())[0], net(x).numpy())
    refuses(ShapeError, "expected 1 to 31", step, batch_of(33).numpy())


def test_a_damaged_file_is_refused_or_another_step(saved: tuple[bytes, TreeClassifier]) -> None:
    """Its open part comes last."""
    data, rng = saved[0], np.random.default_rng(0)
    x, refused = batch_of(7).numpy(), 0
    count = with_long(100, 300)
    for _ in range(count):
        place, value = int(rng.integers(len(data) - 9000, len(data))), int(rng.integers(256))
        damaged = data[:place] + bytes([value]) + data[place + 1 :]
        try:
            LoadedStep(SavedStep.from_bytes(damaged), ml.VM())(x)
        except MlvmError:
            refused += 1
    assert refused > count / 2


@pytest.mark.local(reason="it runs inside of a launch")
@pytest.mark.processor(reason="lanes run on the host, by its kernels")
def test_a_batch_inside_the_launch_of_another_has_its_own_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a signal handler."""
    halves = ml.auto_batch(
        lambda x: ml.while_loop(lambda s: ml.sum(s) > 1.0, lambda s: ml.tanh(s) * 0.5, x)
    )
    rows, others = ml.full((5, 3), 2.0), ml.full((7, 3), 4.0)
    expected, inner = bits(halves(rows)), bits(halves(others))
    run = lane_runs.Lanes.run
    results: list[Any] = []

    def run_twice(self: Any, arrays: Any) -> None:
        if not results:
            results.append(None)
            results[0] = bits(halves(others))
        run(self, arrays)

    monkeypatch.setattr(lane_runs.Lanes, "run", run_twice)
    before = ml.default_vm().consumed_size_in_mib()
    assert bits(halves(rows)) == expected
    assert results == [inner]
    assert ml.default_vm().consumed_size_in_mib() <= before + 0.1


def test_models_of_one_structure_take_turns() -> None:
    first, second = train(model(0)), train(model(1))
    x = batch_of(9)
    expected = bits(first(x)), bits(second(x))
    steps = ml.capture(first), ml.capture(second)
    for _ in range(2):
        assert (bits(steps[0](x)), bits(steps[1](x))) == expected


# --- errors in the middle of a run ---------------------------------------------------


def settling(w: ml.Tensor) -> Any:
    """Return a batch whose lanes share `exp(w)`."""
    body = lambda s: s * 0.5 - ml.exp(w) * 0.01  # noqa: E731
    return ml.auto_batch(lambda x: ml.while_loop(lambda s: ml.sum(s) > 1.0, body, x))


@pytest.mark.local(reason="it interrupts what this process's VM does")
@pytest.mark.processor(reason="lanes run on the host, by its kernels")
@cases(
    "owner, name, calls, before, count",
    (step_lanes, "compile_flow", 1, 0, 300),
    (step_lanes, "compile_flow", 2, 1, 300),
    (lane_runs._Memory, "bound", 1, 0, 300),
    (lane_runs._Memory, "bound", 1, 1, 300),
    (NativeLanes, "grow", 1, 1, 300),
    (NativeLanes, "grow", 1, 1, 40),  # behind rows that have been written
    (lane_runs._Memory, "area", 2, 1, 300),
)
def test_an_interrupted_run_is_repeated(
    owner: Any, name: str, calls: int, before: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind that many runs of one lane; the rows of the run are those of its own operands."""
    w, x = [0.0, 1.0, 2.0, 3.0], np.full((count, 4), 2.0, np.float32)
    with ml.use(ml.VM()):
        expected = bits(settling(ml.asarray(w))(ml.asarray(x)))
    step_lanes._parts.clear()
    step_lanes._written.clear()
    original, interrupts = getattr(owner, name), iter([*[False] * (calls - 1), True])

    def interrupted(*args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        if next(interrupts, False):
            raise KeyboardInterrupt
        return result

    with ml.use(ml.VM()):
        step = ml.capture(settling(ml.asarray(w)), hoist=False)
        for _ in range(before):
            step(ml.ones((1, 4)))
        monkeypatch.setattr(owner, name, interrupted)
        refuses(KeyboardInterrupt, "", step, ml.asarray(x + 1))
        for _ in range(2):
            assert bits(step(ml.asarray(x))) == expected


@pytest.mark.local(reason="it registers a function inside of a launch")
@pytest.mark.processor(reason="lanes run on the host, by its kernels")
def test_a_function_registered_inside_a_run_ends_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    part, results = NativeLanes.part, list[Any]()
    vm = ml.VM()
    with ml.use(vm):
        fn = settling(ml.ones(300))
        rows, others = ml.full((50, 300), 2.0), ml.full((70, 300), 4.0)
        expected, inner = bits(fn(rows)[:49]), bits(fn(others))

        def part_and_more(*args: Any) -> Any:
            if not results:
                results.append(None)
                vm.register("nothing", lambda _: None)
                with ml.use(vm):
                    results[0] = bits(fn(others))
            return part(*args)

        monkeypatch.setattr(NativeLanes, "part", part_and_more)
        assert bits(fn(rows[:49])) == expected
        assert results == [inner]


@pytest.mark.local(reason="it asks for the arrays of this process's VM")
def test_memory_that_cannot_grow_remains(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(type: ml.TensorType) -> int:
        raise OutOfMemoryError(f"none for {type}")

    vm = ml.VM()
    memory = lane_runs._Memory(vm)
    memory.users = 1
    area = memory.area("result", 100)
    before = vm.consumed_size_in_mib()
    with monkeypatch.context() as patch:
        patch.setattr(vm, "alloc_tensor", refuse)
        refuses(OutOfMemoryError, "none", memory.area, "result", 1000)
    memory.begin()
    assert memory.area("result", 100) is area
    assert vm.consumed_size_in_mib() == before
    memory.area("result", 1000)
    memory.free()
    assert vm.consumed_size_in_mib() == 0


@pytest.mark.local(reason="it asks for the arrays of this process's VM")
@pytest.mark.processor(reason="lanes run on the host, by its kernels")
def test_few_arrays_that_have_ended_stay_in_memory() -> None:
    alive: list[Any] = []
    vm = ml.VM()
    with ml.use(vm):
        tables: list[ml.Tensor] = []
        rows_of = ml.auto_batch(lambda i: tables[-1][i] * 2.0)
        for _ in range(6):
            with ml.Arena(vm, f"table {len(alive)}") as arena:
                tables[:] = [ml.ones(1000)]
                alive.append(weakref.ref(root(vm.array_of(tables[0].handle))))
                rows_of(ml.asarray([1, 5]))
            arena.close()
        assert sum(each() is not None for each in alive) <= 2


# --- files that are not as written ---------------------------------------------------


def test_a_function_of_a_file_shares_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sums are the other way round."""
    functions: list[Any] = []
    of = OpenLanes.of

    def noted(function: LaneFunction) -> Any:
        functions.append(of(function))
        return functions[-1]

    monkeypatch.setattr(OpenLanes, "of", noted)

    def loss(ws: list[ml.Tensor], x: ml.Tensor) -> ml.Tensor:
        row_sum = lambda row: ml.sum(row, axis=0) @ ml.tanh(ws[0]) + ml.sum(ws[1] ** 2)  # noqa: E731
        return ml.sum(ml.auto_batch(row_sum)(x))

    step = ml.capture(lambda ws, x: ml.grad(loss)(ws, x), dynamic_axes={"x": (None, "time", None)})
    weights = [ml.full(4, 0.5), ml.full(4, 0.25)]
    step(weights, ml.ones((2, 3, 4)))
    *fields, sums, policy = functions[-1].fields(_closed)
    swapped = tuple([(home, 1 - i) for home, i in sums])
    OpenLanes.read((*fields, swapped, policy), _opened).at([6])
    x = ml.ones((2, 6, 4))
    captured = bits(step(weights, x))
    assert captured == bits(ml.grad(loss)(weights, x))
    assert np.frombuffer(captured[1][2], np.float32)[0] == 1.0


def test_blocks_too_deep_are_refused() -> None:
    condition = (0, ml.TensorType("bool"))
    calls: list[Any] = [
        ("cond", False, {}, (), (condition,), (i + 1,), -1, ()) for i in range(5000)
    ]
    blocks = (*[((), (call,), None) for call in calls], ((), (), None))
    fields = (), ((1, -1),), blocks, (("row", (), 0),), (), (), (), 0
    refuses(ValueError, "recursion", OpenLanes.read, fields, _opened)
