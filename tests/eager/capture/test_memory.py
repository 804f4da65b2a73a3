"""`capture(memory=)`, what `measure` says of budgets, and why a plan is as large as it is."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import fromstring

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import (
    ArgumentError,
    BudgetError,
    CaptureError,
    MlvmError,
    OutOfMemoryError,
    ShapeError,
)
from mlvm.eager import Tensor, nn
from mlvm.eager.capture.measuring import Measured
from mlvm.step.saved import SavedStep
from tests.brief import cases, line_with, refuses

WIDTH = 32


def model_of(seed: int) -> nn.Sequential:
    keys = ml.random.split(ml.random.key(seed), 8)
    layers: list[Any] = []
    for key in keys:
        layers += [nn.Linear(WIDTH, WIDTH, key=key), ml.gelu]
    return nn.Sequential(*layers)


class Training:
    """A model, its optimizer and a step."""

    def __init__(self) -> None:
        self.model = model_of(0)
        self.optimizer = ml.optim.Adam(self.model, 0.01)

    def step(self, x: Tensor) -> Tensor:
        loss, gradients = ml.value_and_grad(lambda m: ml.mean(ml.square(m(x))))(self.model)
        self.optimizer.update(gradients)
        return loss


X = np.random.default_rng(0).normal(size=(64, WIDTH)).astype(np.float32)


def bits_of(training: Training, step: Any) -> list[bytes]:
    losses = [step(ml.asarray(X)) for _ in range(3)]
    return [x.numpy().tobytes() for x in (*losses, *training.model.named_parameters().values())]


def plan_nbytes(step: Any) -> int:
    return int(step.plan.nbytes + step.plan.hoisted_nbytes)


def test_a_step_within_budgets_has_the_same_bits() -> None:
    training = Training()
    expected = bits_of(training, training.step)
    points = ml.measure(training.step, ml.asarray(X)).curve()
    assert (points[-1].nbytes or 0) < 0.6 * (points[0].nbytes or 0)
    for point in points[:: max(1, len(points) // 6)]:
        training = Training()
        step = ml.capture(training.step, memory=point.nbytes)
        assert bits_of(training, step) == expected
        assert plan_nbytes(step) <= (point.nbytes or 0)


def test_a_budget_that_is_too_small_is_refused_before_anything_runs() -> None:
    training = Training()
    before = [x.numpy().tobytes() for x in training.model.named_parameters().values()]
    step = ml.capture(training.step, memory="1 KiB")
    with pytest.raises(BudgetError) as raised:
        step(ml.asarray(X))
    assert [x.numpy().tobytes() for x in training.model.named_parameters().values()] == before
    error = raised.value
    assert isinstance(error, CaptureError)
    text = str(error)
    assert "at most 1,024 bytes (memory=)" in text
    assert f"{error.smallest:,}" in text
    assert text.count(line_with("ml.gelu]", __file__)) + text.count("test_memory.py") == 3
    step = ml.capture(training.step, memory=error.smallest)
    step(ml.asarray(X))
    assert plan_nbytes(step) == error.smallest


@cases(
    "size", 0, -5, 2**63, True, 1.5, "", "much", "64 XB", "-3M", "0", "1e99 GiB", "9" * 5000, None
)
def test_what_is_no_size_is_refused(size: Any) -> None:
    if size is not None:
        text = r"capture\(memory=\): expected a size from 1 to 2\*\*63 - 1 bytes"
        refuses(ArgumentError, text, ml.capture, ml.tanh, memory=size)
        refuses(ArgumentError, r"measure\(memory=\)", ml.measure, ml.tanh, ml.ones(3), memory=size)
    refuses(ArgumentError, "budgets", ml.measure, ml.tanh, ml.ones(3), budgets=[size])


def test_open_lengths_fit_at_their_bounds() -> None:
    def loss(w: Tensor, x: Tensor) -> Tensor:
        for _ in range(10):
            x = ml.tanh(x @ w)
        return ml.sum(x)

    fn, w = ml.grad(loss), ml.ones((8, 8)) / 8
    whole = ml.measure(fn, w, ml.TensorType("f32", (100, 8))).plan
    budget = (whole.nbytes + whole.hoisted_nbytes) * 2 // 3
    step = ml.capture(fn, dynamic_axes={"x": ("n", None)}, max_sizes={"n": 100}, memory=budget)
    for n in (3, 50, 100, 7):
        x = ml.asarray(X[:1, :8]) * ml.ones((n, 1))
        assert step(w, x).tolist() == fn(w, x).tolist()
        assert plan_nbytes(step) <= budget
    assert step.signatures == 1
    step = ml.capture(fn, dynamic_axes={"x": ("n", None)}, max_sizes={"n": 100}, memory=500)
    refuses(BudgetError, "smallest", step, w, ml.ones((3, 8)))


def test_hoisted_values_count_and_may_be_computed_in_the_step() -> None:
    weight = ml.asarray(np.ones((64, 64), np.float32))

    def step(x: Tensor) -> Tensor:
        return ml.sum(x @ ml.exp(ml.sin(weight)))

    x = ml.ones((2, 64))
    whole = ml.measure(step, x).plan
    assert whole.hoisted_nbytes >= weight.nbytes
    for budget in (whole.nbytes + whole.hoisted_nbytes, weight.nbytes + 2048):
        captured = ml.capture(step, memory=budget)
        assert captured(x).tolist() == step(x).tolist()
        assert plan_nbytes(captured) <= budget


def test_saved_steps_and_copies_keep_the_budget(tmp_path: Path) -> None:
    training = Training()
    whole = ml.measure(training.step, ml.asarray(X)).plan
    budget = (whole.nbytes + whole.hoisted_nbytes) * 3 // 4
    step = ml.capture(training.step, memory=budget)
    step(ml.asarray(X))
    step.save(tmp_path / "step.mlvm")
    assert SavedStep.from_bytes((tmp_path / "step.mlvm").read_bytes()).planned.plan.nbytes <= budget
    assert copy.copy(ml.capture(np.sum, memory="1 MiB")).budget == 1 << 20


# --- what measure says ------------------------------------------------------------------------


def test_budgets_of_a_measurement() -> None:
    training = Training()
    measured = ml.measure(training.step, ml.asarray(X), budgets=["1 GiB", "60 KiB", 10])
    large, small, none = measured.curve()
    least = measured.plan.nbytes + measured.plan.hoisted_nbytes
    assert (large.nbytes or 0) > least  # no value is computed again
    assert large.seconds < small.seconds < none.seconds == float("inf")
    assert (small.nbytes or 0) <= 60 << 10
    assert none.nbytes is None


def test_the_largest_batch_that_fits() -> None:
    def fn(x: Tensor) -> Any:
        return ml.grad(lambda x: ml.sum(ml.tanh(ml.tanh(ml.exp(x)) @ ml.ones((10, 10)))))(x)

    sizes = ml.measure(fn, memory="16 KiB", x=ml.TensorType("f32", ("batch", 10)))
    n = sizes.largest("batch")
    ml.measure(fn, memory="16 KiB", x=ml.TensorType("f32", (n, 10)))
    refuses(BudgetError, "", ml.measure, fn, memory="16 KiB", x=ml.TensorType("f32", (n + 1, 10)))
    assert (
        sizes.at(batch=n).plan
        == ml.measure(fn, ml.TensorType("f32", (n, 10)), memory="16 KiB").plan
    )
    none = ml.measure(fn, memory=1, x=ml.TensorType("f32", ("batch", 10)))
    refuses(BudgetError, "smallest", none.largest, "batch")
    two = ml.measure(ml.matmul, ml.TensorType("f32", ("n", "m")), ml.TensorType("f32", ("m", 3)))
    assert two.at(n=2, m=4).plan.nbytes >= 0
    refuses(ArgumentError, "expected a size for 'm'", two.at, n=2)
    refuses(ArgumentError, r"write .at\(m=32, n=32\)", lambda: two.plan)
    assert "n" in repr(two)


def test_the_largest_size_is_found_although_a_smaller_one_does_not_fit() -> None:
    for most in (1, 2, 9, 13, 30, 170, 1000):
        without = {most - 1, most - most // 16} - {most, 0, 1}

        def measured(sizes: Any, most: int = most, without: set[int] = without) -> Any:
            if sizes["n"] > most or sizes["n"] in without:
                raise BudgetError("too large", 0)

        found = Measured(measured, {"n"}, budget=1).largest("n")
        assert found == most if most < 128 else 0 <= most - found <= most // 128


def test_named_types() -> None:
    type = ml.TensorType("f32", ("batch", 784))
    assert str(type) == "f32[batch,784]"
    refuses(ShapeError, "expected a shape as a tuple", ml.TensorType, "f32", ("no name", 3))
    refuses(ShapeError, "", ml.TensorType, "f32", ("n", -3))


def test_why_names_lines_and_what_recomputing_costs() -> None:
    def loss(x: Tensor) -> Tensor:
        wide = ml.exp(x @ ml.ones((4, 400)))
        return ml.sum(ml.sort(wide @ ml.ones((400, 4)) + x) * ml.max(wide))

    step = ml.capture(ml.grad(loss))
    step(ml.ones((8, 4)))
    values = step.plan.why(3)
    assert len(values) == 3
    assert [x.nbytes for x in values] == sorted([x.nbytes for x in values], reverse=True)
    assert values[0].type == "f32[8,400]"
    assert values[0].line.endswith(line_with("ml.ones((4, 400)))", __file__))
    lines = repr(values).splitlines()
    assert len(lines) == 4
    assert lines[0].split()[:3] == ["bytes", "type", "op"]
    assert (
        sum(x.nbytes for x in step.plan.why(99)) == step.plan.lower_bound + step.plan.hoisted_nbytes
    )
    refuses(ArgumentError, "count", step.plan.why, 0)


def test_hoisted_values_are_among_those_at_the_peak() -> None:
    w = ml.ones((100, 1000))
    measured = ml.measure(lambda x: ml.sum(ml.sort(x + (w * 2.0))), ml.ones((100, 1000)))
    ahead = [each for each in measured.plan.why(9) if each.op.endswith(" (hoisted)")]
    assert sum(each.nbytes for each in ahead) == measured.plan.hoisted_nbytes > 0
    assert ahead[0][:3] == ("f32[100,1000]", 400_000, "multiply (hoisted)")
    assert ahead[0].line.startswith(__file__)
    assert ahead[0].last_line == ahead[0].line
    assert ahead[0].again is None


def test_the_curve_at_the_bounds_of_lengths() -> None:
    def step(x: Tensor) -> Any:
        return ml.grad(lambda x: ml.sum(ml.sort(ml.tanh(ml.exp(x)) @ ml.ones((10, 10)))))(x)

    options: Any = {"dynamic_axes": {"x": ("n", None)}, "max_sizes": {"n": 500}}
    measured = ml.measure(step, ml.ones((4, 10)), **options)
    points = measured.curve()
    assert points[0].nbytes == measured.plan.nbytes + measured.plan.hoisted_nbytes
    whole = ml.measure(step, ml.ones((500, 10)))
    assert points[0].nbytes == whole.plan.nbytes + whole.plan.hoisted_nbytes
    budgets = ml.measure(step, ml.ones((4, 10)), budgets=["1 GiB"], **options)
    assert budgets.curve() == points[:1]


@cases("suffix", ".png", "", ".SVG.gz")
def test_pictures_have_the_names_of_their_format(suffix: str, tmp_path: Path) -> None:
    step = ml.capture(ml.tanh)
    step(ml.ones(3))
    path = tmp_path / f"picture{suffix}"
    for plot in (step.plot, ml.measure(ml.tanh, ml.ones(3)).plot, ml.Arena(ml.VM(), "a").plot):
        refuses(ArgumentError, r"plot: expected a name that ends in \.svg", plot, path)
        plot(tmp_path / "PICTURE.SVG")
    assert [each.name for each in tmp_path.iterdir()] == ["PICTURE.SVG"]


def test_types_are_for_measure_alone() -> None:
    step = ml.capture(lambda x: (x["a"][0] if isinstance(x, dict) else x) + 1.0)
    expected = r"expected tensors, got the type f32\[2\].*ml.measure"
    plain = ml.TensorType("f32", (2,))
    for value in (plain, {"a": [plain]}, plain):
        refuses(CaptureError, expected, step, value)
        refuses(CaptureError, expected, step, x=value)
    refuses(CaptureError, expected, ml.capture(lambda x: x), plain)
    filled = ml.capture(lambda x, like: ml.zeros(like.shape, dtype=like.dtype) + x)
    assert filled(ml.ones(()), plain).numpy().tolist() == [1.0, 1.0]  # it reads the type only
    for argument in (ml.TensorType("f32", ("n", 4)), [ml.TensorType("f32", ("n", 4))]):
        refuses(CaptureError, r"f32\[n,4\].*ml.measure\(step, x\).at\(n=32\)", step, argument)
    assert step(ml.ones(2)).tolist() == [2.0, 2.0]


def test_errors_of_a_measurement_name_it_once() -> None:
    for options in ({"memory": 1}, {"max_sizes": {"n": 3}}, {"dynamic_axes": {"y": ("n",)}}):
        caught = refuses(MlvmError, "", ml.measure, lambda x: ml.sum(ml.sort(x)), X, **options)
        assert str(caught).startswith("measure")
        assert "capture:" not in str(caught)
    sizes = ml.measure(lambda x: ml.sum(ml.sort(x)), ml.TensorType("f32", ("n",)), memory=1)
    refuses(BudgetError, "^measure: expected a plan", sizes.at, n=1000)


def test_the_curve_is_drawn(tmp_path: Path) -> None:
    training = Training()
    measured = ml.measure(training.step, ml.asarray(X))
    measured.plot(tmp_path / "curve.svg")
    text = (tmp_path / "curve.svg").read_text("utf-8")
    circles = [each for each in fromstring(text).iter() if each.tag.endswith("circle")]
    assert len(circles) == len(measured.curve())
    assert f"this plan: {measured.plan.nbytes + measured.plan.hoisted_nbytes:,} bytes" in text


def test_the_budget_holds_after_weights_change_before_each_call() -> None:
    """Then a second program computes hoisted values in the step, if it fits beside them."""
    w = ml.random.normal((64, 64), key=ml.random.key(1))
    x = ml.random.normal((16, 64), key=ml.random.key(2))

    def fn(x: Tensor) -> Tensor:
        wide, h = w.astype("f64"), x.astype("f64")
        for _ in range(4):
            h = ml.tanh(h @ wide) + ml.sort(h, axis=-1)
        return ml.sum(h)

    needed = ml.measure(fn, x).plan
    assert needed.hoisted_nbytes > 0
    limit = needed.nbytes + needed.hoisted_nbytes
    step = ml.capture(fn, memory=limit)
    for _ in range(5):
        assert step(x).tolist() == fn(x).tolist()
        assert plan_nbytes(step) <= limit
        w *= 0.9


def test_sizes_may_have_any_name() -> None:
    sizes = ml.measure(ml.sort, ml.TensorType("f32", ("self", "name")), memory="1 MiB")
    assert sizes.at(self=2, name=3).arena == 64
    assert sizes.largest("self", name=4) > 0


def test_the_largest_size_of_a_function_that_no_memory_holds() -> None:
    """The sum of its tensors exceeds 2**63 bytes at 2**30 rows."""
    square = ml.TensorType("f32", ("n", "n"))
    sizes = ml.measure(lambda x: ml.sum(ml.sort(x @ x)), square, memory=2**63 - 1)
    assert 2**28 < sizes.largest("n") < 2**30
    refuses(OutOfMemoryError, r"at most 2\*\*63 - 1 bytes", sizes.at, n=2**30)


def test_a_step_without_a_peak() -> None:
    for step in (lambda x: x, lambda x: None, lambda x: ml.ones(0)):
        measured = ml.measure(step, ml.ones(3), budgets=[1, 2**63 - 1])
        assert len(measured.plan.why()) == 0
        assert [each.nbytes for each in measured.curve()] == [0, 0]
