"""The first difference of two recordings: step, cause, op and line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.__main__ import main
from mlvm.eager import Tensor
from mlvm.eager.runs.diff import Difference, diff, elements, equality
from mlvm.eager.runs.names import optimizers_of
from mlvm.eager.runs.replay import Mismatch, Replay
from mlvm.eager.runs.run import Run
from tests.brief import Capsys
from tests.eager.runs.recorded import train


def first(a: Run, b: Run) -> Difference:
    difference = diff(a, b)
    assert difference is not None
    return difference


def test_another_order_of_batches(folder: Path) -> None:
    order = [0, 1, 2, 3, 4, 6, 5, 7, 8, 9]
    found = first(train(folder / "a"), train(folder / "b", order=order))
    assert (found.step, found.cause, found.names) == (5, "input", ["x", "y"])
    assert found.elements is not None
    assert found.elements.size == 24


def test_a_changed_hyperparameter(folder: Path) -> None:
    found = first(train(folder / "a"), train(folder / "b", rate=0.125))
    assert (found.step, found.cause) == (0, "op")
    multiple: Any = ml.optim.MultiSteps(ml.optim.SGD({"w": ml.ones(2)}, 0.5), 2)
    assert optimizers_of(lambda: multiple, (), {}) == {"multiple": repr(multiple)[1:-1]}
    for name, rate in (("A", "0.1"), ("B", "0.125")):
        text = f"\n  {name}: optimizer is AdamW of 2 tensors: learning_rate={rate}, "
        assert text in str(found)
    for report, rate in zip(found.ops, ("0.1", "0.125"), strict=True):
        assert report is not None
        assert "optimizer.update(grads)" in report.text
        assert any(each.origin.startswith(f"constant {rate}") for each in report.operands)


def test_an_operand_that_differs_has_no_equal_one_elsewhere(folder: Path) -> None:
    a = once(folder / "a", lambda x: ml.sum(x) * 2.0, [3.0, 1.0])
    found = first(a, once(folder / "b", lambda x: ml.sum(x) * 4.0, [3.0, 1.0]))
    assert str(found).count(", differs\n") == 2
    assert "equal to operand" not in str(found)


def once(folder: Path, fn: Any, *inputs: Any) -> Run:
    step = ml.capture(fn)
    with ml.runs.record(folder):
        step(*[ml.asarray(x, dtype=ml.float32) for x in inputs])
    return ml.runs.open(folder)


def test_operands_are_matched_by_value(folder: Path) -> None:
    """Ops that do not correspond have no common elements."""
    inputs = [1e8, 2.0], [-1e8, 3.0], [0.5, 4.0]
    a = once(folder / "a", lambda a, b, c: (a + b) + c, *inputs)
    found = first(a, once(folder / "b", lambda a, b, c: (b + c) + a, *inputs))
    assert found.cause == "op"
    assert found.elements is None
    assert "input 'b', equal to operand 0 of B" in str(found)
    assert "input 'b', equal to operand 1 of A" in str(found)
    assert "differs\n" not in str(found)


def test_the_turn_of_a_loop_is_named(folder: Path, capsys: Capsys) -> None:
    def run(folder: Path, last: float) -> Run:
        def step(x: Tensor) -> Tensor:
            return ml.fori_loop(0, 5, lambda i, x: x + ml.where(i == 3, ml.asarray(last), 1.0), x)

        return once(folder, step, 0.0)

    found = first(run(folder / "a", 2.0), run(folder / "b", 3.0))
    assert str(found).count("in loop turn") >= 2
    assert found.ops[0] is not None
    assert main(["replay", str(folder / "a"), "--at", str(found.ops[0].line)]) == 0
    assert capsys.readouterr().out.count("in loop turn ") == 6


def test_a_result_that_is_a_number_is_named(folder: Path, capsys: Capsys) -> None:
    def run(n: int) -> Run:
        return once(folder / str(n), lambda x: {"loss": ml.sum(x), "n": n}, [1.0])

    assert first(run(7), run(8)).names == ["n"]
    assert main(["replay", str(folder / "7")]) == 0
    assert "loss 1.0, n 7.0\nequal bits\n" in capsys.readouterr().out


def test_a_limit_and_a_factor_are_printed_with_both_values(folder: Path) -> None:
    """The loop of the second run computes the first run's z by coincidence."""

    def run(limit: float, factor: float) -> Run:
        def step(x: Tensor) -> tuple[Tensor, Tensor]:
            z = x * factor
            return z, ml.while_loop(lambda s: s > limit, lambda s: s * 0.5, z)

        return once(folder / f"{limit} {factor}", step, 1.0)

    a = run(0.25, 1.0)
    text = str(first(a, run(0.125, 1.0)))
    assert "is multiply in B, which A lacks\n" in text
    _, programs = text.split("the first op in which the programs differ:")
    assert all(f"constant {limit}, differs" in programs for limit in (0.25, 0.125))
    assert "the value differs: 1.0 (3f800000), 2.0 (40000000)" in str(first(a, run(0.25, 2.0)))


def test_the_forward_op_of_a_gradient_is_named(folder: Path) -> None:
    """The gradients of these differ at 0 only."""

    def run(folder: Path, relu: Any) -> Run:
        return once(folder, lambda x: ml.value_and_grad(lambda x: ml.sum(relu(x)))(x), [0.0, 1.0])

    def by_maximum(x: Tensor) -> Tensor:
        return ml.maximum(x, 0.0)

    def by_where(x: Tensor) -> Tensor:
        return ml.where(x >= 0.0, x, 0.0)

    text = str(first(run(folder / "a", by_maximum), run(folder / "b", by_where)))
    _, programs = text.split("the first op in which the programs differ:")
    assert "return ml.maximum(x, 0.0)" in programs
    assert "return ml.where(x >= 0.0, x, 0.0)" in programs


def rated(folder: Path, rates: list[float]) -> Run:
    """Record an update for each of these rates."""
    w = ml.ones(4)
    optimizer = ml.optim.SGD({"w": w}, 0.5)

    @ml.capture
    def step(x: Tensor) -> None:
        optimizer.update({"w": x * w})

    with ml.runs.record(folder):
        for n, optimizer.learning_rate in enumerate(rates):
            step(ml.full(4, 0.5 + n))
    return ml.runs.open(folder)


@pytest.mark.parametrize("changed", ["a", "b"])
def test_a_rate_that_becomes_another_is_named_with_both_values(folder: Path, changed: str) -> None:
    runs = [rated(folder / x, [0.5, 0.5, 0.25 if x == changed else 0.5, 0.5]) for x in "ab"]
    text = str(first(*runs))
    assert text.startswith("step 2: the programs differ")
    assert "constant 0.5" in text
    assert "input 'number optimizer.learning_rate' = 0.25" in text
    assert "optimizer.update" in text


def test_inputs_of_other_types_and_numbers(folder: Path) -> None:
    def total(x: Tensor, *more: Tensor) -> Tensor:
        return ml.sum(x) + len(more)

    a = once(folder / "a", total, np.ones((3, 2)))
    other_batch = first(a, once(folder / "b", total, np.ones((4, 2))))
    assert other_batch.text == "step 0: the inputs differ: x (f32[3,2] in A, f32[4,2] in B)"
    more = first(a, once(folder / "c", total, np.ones((3, 2)), np.ones(1)))
    assert more.text.startswith("step 0: the inputs differ: A has x; B has x, ")


def test_a_rate_that_is_changed_later(folder: Path) -> None:
    a, b = (rated(folder / str(later), [0.5] * 4 + [later] * 2) for later in (0.25, 0.125))
    found = first(a, b)
    assert (found.step, found.cause) == (4, "input")
    assert found.elements is not None
    assert {abs(x) for x in found.elements.values} == {0.25, 0.125}


def test_an_op_that_was_replaced_by_an_equal_one(folder: Path) -> None:
    def other(x: Tensor) -> Tensor:
        return ml.exp(2.0 * ml.log(ml.abs(x)))

    a = train(folder / "a")
    found = first(a, train(folder / "b", square=other))
    assert (found.step, found.cause) == (0, "op")
    report = found.ops[1]
    assert report is not None
    assert report.text == "return ml.exp(2.0 * ml.log(ml.abs(x)))"
    same_bits = train(folder / "c", square=ml.square)
    assert diff(a, same_bits) is None


def test_state_that_was_written_between_steps(folder: Path) -> None:
    def between(n: int, model: Any) -> None:
        if n == 6:
            model.bias[1] += 1

    found = first(train(folder / "a"), train(folder / "b", between=between))
    assert (found.step, found.cause, found.names) == (7, "state", ["model.bias"])
    assert "was written between step 6 and step 7: model.bias" in found.text
    assert found.elements is not None
    assert found.elements.first == (1,)


def test_a_rate_that_is_also_computed_by_another_op_is_named(folder: Path) -> None:
    """AdamW computes 1 - 0.999, which is the changed rate."""

    def run(name: str, rate: float) -> Run:
        w = ml.ones(4)
        optimizer = ml.optim.AdamW({"w": w}, 0.01)
        step = ml.capture(lambda x: optimizer.update({"w": x * w}))
        with ml.runs.record(folder / name):
            for n in range(4):
                optimizer.learning_rate = rate if n == 2 else 0.01
                step(ml.full(4, 0.5 + n))
        return ml.runs.open(folder / name)

    text = str(first(run("a", 0.01), run("b", 0.001)))
    assert "first op whose result differs is negative\n" in text
    assert "input 'number optimizer.learning_rate' = 0.001" in text


def test_ops_in_another_order_are_not_the_cause(folder: Path) -> None:
    """The differing op is the one that combines the results, not the exchanged ones."""
    inputs = [2.0, 3.0], [5.0, 7.0]
    a = once(folder / "a", lambda x, y: ml.exp(x) - ml.exp(y), *inputs)

    def exchanged(x: Tensor, y: Tensor) -> Tensor:
        second = ml.exp(y)
        return second - ml.exp(x)

    assert "first op whose result differs is subtract\n" in str(
        first(a, once(folder / "b", exchanged, *inputs))
    )


def test_updated_arguments_are_compared(folder: Path) -> None:
    def run(folder: Path, factor: float) -> Run:
        @ml.capture
        def step(x: Tensor) -> None:
            x[...] = x * factor

        x = ml.ones(100)
        with ml.runs.record(folder):
            for _ in range(3):
                step(x)
        return ml.runs.open(folder)

    a = run(folder / "a", 2.0)
    assert [len(each.stored_inputs) for each in a.steps] == [1, 0, 0]
    assert ml.runs.verify(a).is_accepted
    assert diff(a, run(folder / "b", 2.0)) is None
    found = first(a, run(folder / "c", 3.0))
    assert (found.step, found.cause) == (0, "op")
    assert found.elements is not None
    assert found.elements.values == (2.0, 3.0)


def test_state_of_other_optimizers_is_compared_by_name(folder: Path) -> None:
    def run(folder: Path, kind: Any, *, counted: bool = False) -> Run:
        model = ml.nn.Linear(3, 2, key=ml.random.key(1))
        optimizer, count = kind(model, 0.1), ml.zeros(())

        @ml.capture
        def step(x: Tensor) -> None:
            grads = ml.grad(lambda model: ml.mean(model(x) ** 2))(model)
            optimizer.update(grads)
            if counted:
                nonlocal count
                count += 1.0

        with ml.runs.record(folder):
            for i in range(3):
                step(ml.full((4, 3), i + 1.0))
        return ml.runs.open(folder)

    a = run(folder / "a", ml.optim.SGD)
    found = first(a, run(folder / "b", ml.optim.Adam))
    assert (found.step, found.cause) == (0, "op")
    c = run(folder / "c", ml.optim.SGD, counted=True)
    assert diff(a, c) is None
    assert equality(a, c) == "equal: 3 steps; only B has the state count (f32[])"


def test_exchanged_state_differs_and_state_that_one_program_reads_does_not(folder: Path) -> None:
    def run(name: str, body: Any, values: tuple[float, float] = (1.0, 2.0)) -> Run:
        a, b = [ml.full(3, value) for value in values]
        with ml.runs.record(folder / name):
            ml.capture(lambda: body(a, b))()
        return ml.runs.open(folder / name)

    a, b = run("a", lambda a, b: a + b), run("b", lambda a, b: a + b, (2.0, 1.0))
    assert (first(a, b).cause, first(a, b).names) == ("state", ["a", "b"])
    c, d = run("c", lambda a, b: ml.sum(a * 3.0)), run("d", lambda a, b: ml.sum(a * 3.0 * b))
    assert (first(c, d).cause, first(d, c).cause) == ("op", "op")


def test_another_seed_is_named_before_the_first_step(folder: Path) -> None:
    def run(folder: Path, seed: int) -> Run:
        ml.random.seed(seed)
        step = ml.capture(lambda: ml.random.normal(3))
        with ml.runs.record(folder):
            step()
        return ml.runs.open(folder)

    found = first(run(folder / "a", 0), run(folder / "b", 1))
    assert (found.step, found.cause, found.names) == (0, "state", ["random keys"])
    assert "before the first step" in str(found)


def test_runs_of_other_lengths(folder: Path) -> None:
    a = train(folder / "a")
    found = first(a, train(folder / "b", order=range(7)))
    assert (found.step, found.cause) == (7, "length")
    assert found.text == "the first 7 steps are equal; A has 10 steps, B has 7"

    def stop(n: int, model: object) -> None:
        if n == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(folder / "c", between=stop)
    assert str(first(a, ml.runs.open(folder / "c"))).endswith("c ended with an error")


def test_runs_in_other_machines_are_equal(folder: Path) -> None:
    a = train(folder / "a")
    for number, vm in enumerate((ml.VM(threads=3), ml.VM(workers=2), ml.VM(threads=2, workers=1))):
        with ml.use(vm):
            b = train(folder / f"b{number}", captured=number != 1)
        assert diff(a, b) is None


def test_a_step_that_cannot_be_computed_is_named(folder: Path) -> None:
    def between(n: int, model: Any) -> None:
        if n == 5:
            model.bias[1] += 1

    options = {"inputs": "none"}
    a = train(folder / "a", options=options)
    found = first(a, train(folder / "b", rate=0.2, options=options))
    assert (found.step, found.cause) == (0, "result")
    assert "the results differ, and this machine cannot compute the step: replay: i" in found.text
    found = first(a, train(folder / "c", between=between, options=options))
    assert (found.step, found.cause) == (6, "state")
    assert "the state before the step differs, and this machine cannot compute" in found.text
    with patch.object(Replay, "_finish", lambda *_: [Mismatch(4, "result 0")]):
        found = first(train(folder / "d"), train(folder / "e", between=between))
    assert (found.step, found.cause) == (6, "state")
    assert "result 0 does not have the recorded bits on this machine" in found.text


def test_a_recording_that_no_replay_reproduces_is_named(folder: Path) -> None:
    a = train(folder / "a")
    b = Run(folder / "a")
    b.steps[4] = b.steps[4]._replace(results=[1], after=2)
    found = first(a, b)
    assert (found.step, found.cause) == (4, "result")
    assert "does not reproduce the bits of B" in found.text


@pytest.mark.parametrize("dtype", ["f4", "f2", "i8", "?", "c8"])
def test_differing_elements(dtype: str) -> None:
    x = np.zeros((3, 4), dtype)
    y = x.copy()
    assert elements(x, y) is None
    y[1, 2] = y[2, 3] = 1
    found = elements(x, y)
    assert found is not None
    assert (found.differing, found.size, found.first, found.values) == (2, 12, (1, 2), (0, 1))
    one = y[1:2, 2].tobytes()[::-1].hex()
    assert found.bits == ("0" * len(one), one)


def test_nans_are_equal_and_zeros_are_not() -> None:
    x, y = np.array([np.nan, 0.0], "f4"), np.array([-np.nan, -0.0], "f4")
    found = elements(x, y)
    assert found is not None
    assert (found.differing, found.first) == (1, (1,))


def test_state_of_other_widths_has_the_types_and_functions_of_both_runs(folder: Path) -> None:
    def run(name: str, width: int, *fns: Any) -> None:
        model = ml.nn.Linear(3, width, key=ml.random.key(width))
        with ml.runs.record(folder / name):
            for fn in fns:
                ml.capture(fn)(model, ml.ones((1, 3)))

    def train(model: Any, x: Tensor) -> Tensor:
        return ml.sum(model(x))

    def evaluate(model: Any, x: Tensor) -> Tensor:
        return ml.mean(model(x))

    for name, width, fn in (("a", 4, train), ("b", 5, train), ("c", 4, evaluate)):
        run(name, width, fn)
    run("d", 4, evaluate, train)
    a, b, c, d = [ml.runs.open(folder / name) for name in "abcd"]
    assert "model.kernel (f32[3,4] in A, f32[3,5] in B)" in str(ml.runs.diff(a, b))
    assert re.match(r"step 0 \(\S*train in A, \S*evaluate in B\): ", str(ml.runs.diff(a, c)))
    assert re.match(r"step 0: A calls \S*train, and B calls \S*evaluate$", str(ml.runs.diff(a, d)))
