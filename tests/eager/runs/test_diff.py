"""The first difference of two recordings: step, cause, op and line."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.types import Array
from mlvm.eager import Tensor
from mlvm.eager.runs.diff import Difference, diff, elements
from mlvm.eager.runs.execution import Executed, Execution
from mlvm.eager.runs.replay import Replay
from mlvm.eager.runs.run import Run
from mlvm.machines.digest import digest
from tests.brief import with_long
from tests.eager.runs.recorded import STEPS, train


def first(a: Run, b: Run) -> Difference:
    difference = diff(a, b)
    assert difference is not None
    return difference


def test_equal_runs(folder: Path) -> None:
    assert diff(train(folder / "a"), train(folder / "b")) is None


def test_another_order_of_batches(folder: Path) -> None:
    order = [0, 1, 2, 3, 4, 6, 5, 7, 8, 9]
    found = first(train(folder / "a"), train(folder / "b", order=order))
    assert (found.step, found.cause, found.names) == (5, "input", ["x", "y"])
    assert found.elements is not None
    assert found.elements.size == 24


def test_a_changed_hyperparameter(folder: Path) -> None:
    found = first(train(folder / "a"), train(folder / "b", rate=0.125))
    assert (found.step, found.cause) == (0, "op")
    for report, rate in zip(found.ops, ("0.1", "0.125"), strict=True):
        assert report is not None
        assert "optimizer.update(grads)" in report.text
        assert any(each.origin.startswith(f"constant {rate}") for each in report.operands)


def test_a_rate_that_is_changed_later(folder: Path) -> None:
    def rates(folder: Path, later: float) -> Run:
        w = ml.ones(4)
        optimizer = ml.optim.SGD({"w": w}, 0.5)

        @ml.capture
        def step(x: Tensor) -> None:
            optimizer.update({"w": x * w})

        with ml.runs.record(folder):
            for n in range(6):
                optimizer.learning_rate = 0.5 if n < 4 else later
                step(ml.full(4, 0.5 + n))
        return ml.runs.open(folder)

    found = first(rates(folder / "a", 0.25), rates(folder / "b", 0.125))
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
    assert found.elements is not None
    assert found.elements.first == (1,)


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


def test_runs_in_other_machines_are_equal(folder: Path) -> None:
    a = train(folder / "a")
    for number, vm in enumerate((ml.VM(threads=3), ml.VM(workers=2), ml.VM(threads=2, workers=1))):
        with ml.use(vm):
            b = train(folder / f"b{number}", captured=number != 1)
        assert diff(a, b) is None


def test_control_flow_is_compared_turn_by_turn(folder: Path) -> None:
    def run(folder: Path, last: float) -> Run:
        @ml.capture
        def step(x: Tensor, xs: Tensor) -> Tensor:
            def turn(x: Tensor, each: Tensor) -> tuple[Tensor, Tensor]:
                x = ml.cond(ml.sum(each) > 0, lambda x: x * each, lambda x: x + each, x)
                return x, x

            return ml.scan(turn, x, xs)[0]  # type: ignore[no-any-return]

        factor = ml.asarray([1.0, 2.0, -3.0, last])
        with ml.runs.record(folder, inputs="all"):
            step(ml.ones(30), ml.broadcast_to(factor[:, None], (4, 30)))
        return ml.runs.open(folder)

    found = first(run(folder / "a", 1.0), run(folder / "b", 1.5))
    assert (found.cause, found.names) == ("input", ["xs"])


class Flipped(Execution):
    """Execution in which one bit of the first result of the op at a position is flipped."""

    flip = (-1, 0)  # position and bit

    def step(self) -> Executed | None:
        op = super().step()
        position, bit = self.flip
        if op is not None and op.position == position:
            content = self._find(op.results[0])
            assert content is not None
            held = content.value
            array = held.read(op.types[0])
            data = array.reshape(-1).view(np.uint8)
            data[bit // 8] ^= np.uint8(1 << bit % 8)
            held.vm.write(held.handle(op.types[0]), array)
        return op


class FaultyReplay(Replay):
    """Replay on a machine that flips one bit in one step."""

    fault = (-1, -1, 0)  # step, position and bit

    def execution(self, number: int) -> Execution:
        step, *at = self.fault
        if number != step:
            return super().execution(number)
        execution = Flipped(self.run.program(self.run.steps[number].table), self.operands(number))
        execution.flip = (at[0], at[1])
        return execution


def test_a_flipped_bit_is_found(folder: Path) -> None:
    """A machine that flips one bit, in a random step and op, records other digests there."""
    run = train(folder / "a")
    rng, nfound = random.Random(0), 0
    while nfound < with_long(6, 100):
        number = rng.randrange(STEPS)
        clean = Replay(run).execution(number)
        clean.run()
        ops = [op for op in clean.executed if op.types[0].dtype.name == "f32"]
        op = rng.choice(ops)
        faulty = FaultyReplay(Run(folder / "a"))
        faulty.fault = number, op.position, rng.randrange(8 * op.types[0].nbytes)
        execution = faulty.execution(number)
        execution.run()
        results = execution.results()
        if all(map(same_bits, results, clean.results())):
            continue  # the bit has no effect
        step = faulty.run.steps[number]
        faulty.run.steps[number] = step._replace(results=[0] * len(step.results), after=0)
        found = first_of(Replay(run), faulty)
        assert (found.step, found.cause) == (number, "op")
        for report in found.ops:
            assert report is not None
            assert (report.op.position, report.line) == (op.position, op.line)
        assert found.elements is not None
        assert (found.elements.differing, found.elements.size) == (1, op.types[0].size)
        nfound += 1


def test_a_recording_that_no_replay_reproduces_is_named(folder: Path) -> None:
    a = train(folder / "a")
    b = Run(folder / "a")
    b.steps[4] = b.steps[4]._replace(results=[1], after=2)
    found = first(a, b)
    assert (found.step, found.cause) == (4, "result")
    assert "does not reproduce the bits of B" in found.text


def same_bits(x: Array, y: Array) -> bool:
    return digest(x) == digest(y)


def first_of(a: Replay, b: Replay) -> Difference:
    difference = diff(a, b)
    assert difference is not None
    return difference


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
