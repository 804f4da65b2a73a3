"""`ml.batch` of functions with open lengths: one trace, and one memory, for rows of any length."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from bench.lengths import trees
from mlvm.core.errors import MlvmError, ShapeError
from mlvm.machines import lanes
from mlvm.step.saved import LoadedStep, SavedStep
from models.tree_lstm import TreeClassifier
from tests.brief import refuses

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


def bits(tree: Any) -> list[bytes]:
    return [x.numpy().tobytes() for x in ml.tree.leaves(tree)]


def model(seed: int = 0) -> TreeClassifier:
    return TreeClassifier(20, 5, 8, 12, key=ml.random.key(seed))


@pytest.mark.local(reason="it counts the bytes of this process's VM")
def test_trees_of_any_size_have_one_trace_and_one_memory() -> None:
    with ml.use(ml.VM()) as vm:
        fn = train(model())
        step = ml.capture(fn, lengths=NAMES, at_most={"time": 31})
        used = []
        for size in SIZES:
            x = batch_of(size)
            assert bits(step(x)) == bits(fn(x)), size
            del x
            used.append(vm.consumed_size_in_mib())
        assert step.signatures == 1
        assert used[-1] - used[2] < 0.5  # eager calls have programs of their own


def test_an_axis_of_rows_is_opened_at_its_third_size() -> None:
    step = ml.capture(ml.batch(lambda row: ml.sum(row[: row.shape[0] // 2])))
    counts = []
    for n in (4, 5, 6, 7, 8):
        x = ml.asarray(np.arange(2.0 * n, dtype=np.float32).reshape(2, n))
        assert np.array_equal(step(x).numpy(), x.numpy()[:, : n // 2].sum(axis=1))
        counts.append(step.signatures)
    assert counts == [1, 2, 3, 3, 3]


@pytest.fixture(scope="module")
def saved() -> tuple[bytes, TreeClassifier]:
    """The file of a step for trees of up to 31 nodes, and its model."""
    net = model()
    step = ml.capture(lambda x: net(x), lengths=NAMES, at_most={"time": 31})
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
    for _ in range(300):
        place, value = int(rng.integers(len(data) - 9000, len(data))), int(rng.integers(256))
        damaged = data[:place] + bytes([value]) + data[place + 1 :]
        try:
            LoadedStep(SavedStep.from_bytes(damaged), ml.VM())(x)
        except MlvmError:
            refused += 1
    assert refused > 150


@pytest.mark.local(reason="it runs inside of a launch")
@pytest.mark.processor(reason="lanes run on the host, by its kernels")
def test_a_batch_inside_the_launch_of_another_has_its_own_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a signal handler."""
    halves = ml.batch(
        lambda x: ml.while_loop(lambda s: ml.sum(s) > 1.0, lambda s: ml.tanh(s) * 0.5, x)
    )
    rows, others = ml.full((5, 3), 2.0), ml.full((7, 3), 4.0)
    expected, inner = bits(halves(rows)), bits(halves(others))
    run = lanes.Lanes.run
    results: list[Any] = []

    def run_twice(self: Any, arrays: Any) -> None:
        if not results:
            results.append(None)
            results[0] = bits(halves(others))
        run(self, arrays)

    monkeypatch.setattr(lanes.Lanes, "run", run_twice)
    before = ml.default_vm().consumed_size_in_mib()
    assert bits(halves(rows)) == expected
    assert results == [inner]
    assert ml.default_vm().consumed_size_in_mib() <= before + 0.1


def test_models_of_one_structure_take_turns() -> None:
    first, second = train(model(0)), train(model(1))
    x = batch_of(9)
    expected = bits(first(x)), bits(second(x))
    steps = ml.capture(first), ml.capture(second)
    for _ in range(3):
        assert (bits(steps[0](x)), bits(steps[1](x))) == expected
