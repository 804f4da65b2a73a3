"""State after a captured step that raises for the values of its operands."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import CaptureError, OperandValueError
from mlvm.core.op import OPS
from mlvm.eager.capture.trace import trace_once
from mlvm.eager.tensor.apply import apply, one_op
from mlvm.eager.tensor.tensor import from_array
from mlvm.step.raising import with_raising
from tests.brief import refuses
from tests.cases import CASES
from tests.walks.test_operand_values import SELDOM, extremes

RAISING = sorted(name for name, op in OPS.items() if op.may_raise and name not in SELDOM)


def _refused(name: str) -> tuple[dict[str, Any], list[Any]]:
    """Return attributes and operands that an op refuses for their values."""
    for case in CASES[name]:
        for i, x in enumerate(case.inputs):
            for extreme in extremes(x):
                operands = [*case.inputs[:i], extreme, *case.inputs[i + 1 :]]
                tensors = list(map(from_array, operands))
                try:
                    apply(one_op(name, **case.attributes), *tensors)
                except OperandValueError:
                    return dict(case.attributes), tensors
    raise AssertionError(name)


def test_a_trace_that_fails_changes_lists_only_as_eager_code_does() -> None:
    """A call may be traced twice, with open numbers or sizes, or without; it counts once."""
    log: list[float] = []
    total = ml.zeros(())

    def step(x: ml.Tensor, rate: float) -> Any:
        log.append(rate)
        total[...] = total + rate
        if len(log) == 3:
            raise ValueError
        return float(x[0]) if rate < 0 else x * rate

    captured = ml.capture(step)
    captured(ml.ones(2), 0.5)
    captured(ml.ones(3), 0.25)
    refuses(ValueError, "", captured, ml.ones(4), 0.125)
    refuses(CaptureError, "", captured, ml.ones(4), -1.0)
    ml.measure(step, ml.ones(5), 2.0)
    assert log == [0.5, 0.25, 0.125]
    assert {*map(type, log)} == {float}
    assert float(total) == 0.75


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("when", ["before", "after", "around"])
@pytest.mark.parametrize("name", RAISING)
def test_state_is_unchanged_when_a_captured_step_raises(name: str, when: str) -> None:
    attributes, operands = _refused(name)
    weights, total = ml.zeros(1000), ml.zeros(())

    @ml.capture
    def step(gradient: Any, *operands: Any) -> Any:
        doubled = gradient * 2.0  # an update that runs at once frees it
        if when != "after":
            weights[...] = weights - doubled
        result = apply(one_op(name, **attributes), *operands)
        if when != "before":
            weights[...] = weights - doubled
            total[...] = total + ml.sum(doubled)
        return result

    for _ in range(2):
        refuses(OperandValueError, "", step, ml.ones(1000), *operands)
        assert not np.any(weights.numpy())
        assert not float(total)


def test_an_update_that_a_raising_call_needs_runs_before_it_in_the_order_of_the_code() -> None:
    weights = ml.zeros(3)

    @ml.capture
    def early(indices: Any) -> Any:
        weights[...] = weights + 1.0
        return ml.take(weights, indices)

    @ml.capture
    def late(indices: Any) -> Any:
        updated = weights + 1.0
        taken = ml.take(updated, indices)
        weights[...] = updated
        return taken

    refuses(ml.errors.PositionError, "", late, ml.asarray([7]))
    assert weights.tolist() == [0.0] * 3
    refuses(ml.errors.PositionError, "", early, ml.asarray([7]))
    assert weights.tolist() == [1.0] * 3


def test_the_first_call_to_raise_is_the_first_in_the_code() -> None:
    @ml.capture
    def step(x: Any, wide: Any) -> Any:
        first = ml.take(wide, x + 1, axis=0)
        return ml.sum(first) + ml.sum(ml.one_hot(x, 2))

    refuses(ml.errors.PositionError, "take", step, ml.asarray([7]), ml.ones((4, 1000)))


def test_a_call_that_raises_precedes_updates_within_each_budget() -> None:
    """A result that is evicted before its first use is computed later, but this may not raise."""
    total, table = ml.zeros(()), ml.ones((100, 100))

    def step(x: Any, rows: Any) -> Any:
        early = ml.take(table, rows, axis=0)
        total[...] = total + ml.sum(x)
        other = ml.exp(x)
        large = ml.sort(ml.concat([x] * 8), axis=0)
        result = ml.sum(ml.sort(large, axis=1)) + ml.sum(ml.sort(early, axis=0))
        return result + 0.0 * ml.sum(ml.sort(other, axis=0))

    x, rows = ml.ones((100, 100)), ml.arange(100)
    points = ml.measure(step, x, rows).curve()
    assert len(points) > 1
    for point in points:
        total[...] = 0.0
        captured = ml.capture(step, memory=point.nbytes)
        refuses(ml.errors.PositionError, "", captured, x, rows + 50)
        assert total.tolist() == 0.0
        assert captured(x, rows).tolist() == 90_000.0
        assert total.tolist() == 10_000.0


def test_a_gradient_of_take_delays_no_update() -> None:
    """Its indices have been checked by the forward pass."""
    table, head = ml.zeros((50, 64)), ml.zeros((64, 50))

    def step(tokens: Any) -> Any:
        def loss(params: Any) -> Any:
            x = ml.take(params[0], tokens, axis=0)
            return ml.softmax_cross_entropy(x @ params[1], tokens, reduction="mean")

        value, gradients = ml.value_and_grad(loss)((table, head))
        for parameter, gradient in zip((table, head), gradients, strict=True):
            parameter[...] = parameter - 0.1 * gradient
        return value

    call, _ = trace_once(step, (ml.zeros(8, dtype=ml.int64),), {})
    marked = [call.name for call in with_raising(call.flow).calls if call.may_raise]
    assert marked == ["take.out", "softmax_cross_entropy.out"]
