"""Schedules that compute values again, on steps whose best schedule is known."""

from __future__ import annotations

import copy
import gc
from functools import partial
from typing import Any

import pytest

import mlvm.eager as ml
from mlvm.core.errors import BudgetError
from mlvm.eager import Tensor
from mlvm.step import budget
from tests.brief import cases, refuses

N = 1024


def chain(depth: int) -> Any:
    """Return the gradient of products with all earlier values: each waits for the backward pass."""

    def loss(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(depth):
            x = ml.tanh(x @ w)
        return ml.sum(x)

    return ml.grad(loss, argnums=(0, 1))


X, W = ml.TensorType("f32", (N, 16)), ml.TensorType("f32", (16, 16))


@pytest.mark.parametrize("depth", [6, 16])
def test_a_chain_needs_less_and_less_memory_for_more_and_more_time(depth: int) -> None:
    points = ml.measure(chain(depth), X, W).curve()
    sizes = [each.nbytes or 0 for each in points]
    times = [each.seconds for each in points]
    assert sizes == sorted(sizes, reverse=True)
    assert times == sorted(times)
    assert sizes[0] >= depth * X.nbytes
    assert sizes[-1] <= (2 * depth**0.5 + 4) * X.nbytes  # checkpoints every sqrt(depth) layers
    assert times[-1] < 2 * times[0]  # the forward pass is less than half of the work


@cases("act", ml.tanh, ml.relu, ml.gelu, ids=["tanh", "relu", "gelu"])
@cases("last", ml.sum, lambda x: ml.sum(x * x), ids=["sum", "squares"])
def test_every_program_of_a_curve_runs(act: Any, last: Any) -> None:
    """Some evict a value at once: the chain that made it first is dead."""
    ws, x = [ml.ones((64, 64)) * 0.01 for _ in range(8)], ml.ones((512, 64))

    def loss(ws: list[Tensor]) -> Tensor:
        y = x
        for w in ws:
            y = act(y @ w)
        return last(y)

    require_bits_of_every_program(lambda: ml.grad(loss)(ws))


def test_a_budget_drops_a_write_that_nothing_reads() -> None:
    def loss(x: Tensor, a: Tensor) -> Tensor:
        c, total = ml.copy(x), ml.asarray(0.0)
        for _ in range(2):
            c[1:-1] = ml.tanh(a[:-2])
            a = ml.exp(-ml.abs(a)) * 1.5
            total = total + ml.sum(c**2)
        return total

    require_bits_of_every_program(ml.grad(loss, argnums=(0, 1)), ml.ones(300), ml.ones(300) * 0.5)


def require_bits_of_every_program(step: Any, *args: Tensor) -> None:
    expected = [each.numpy().tobytes() for each in step(*args)]
    for point in ml.measure(step, *args).curve():
        captured = ml.capture(step, memory=point.nbytes)
        assert [each.numpy().tobytes() for each in captured(*args)] == expected


@cases("deepest, share", (3, 0.9), (200, 0.3))
def test_values_that_need_many_others_first_are_not_computed_again(
    deepest: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "EFFORT", budget.SearchEffort(depth=deepest))

    def loss(x: Tensor) -> Tensor:
        for _ in range(150):
            x = ml.sort(x + 1.0)
        return ml.sum(x)

    points = ml.measure(ml.grad(loss), ml.TensorType("f32", (256,))).curve()
    assert (points[-1].nbytes or 0) < share * (points[0].nbytes or 0)


def test_a_limit_of_the_simulated_runs_omits_no_program_that_fits() -> None:
    """Each point of the curve is computed without a limit, each budget with one."""
    for point in ml.measure(chain(16), X, W).curve():
        assert point.nbytes is not None
        for nbytes in (point.nbytes, point.nbytes + 64):
            step = ml.measure(chain(16), X, W, budgets=[nbytes])
            [within] = step.curve()
            assert within == point


def test_compilation_leaves_no_garbage() -> None:
    """Otherwise the memory of schedules would be in use while the step runs."""
    gc.collect()
    gc.disable()
    try:
        ml.measure(chain(6), X, W, memory="500 KiB")
        assert gc.collect() < 100
    finally:
        gc.enable()


def test_no_target_is_reached_by_computing_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "EFFORT", budget.SearchEffort(slowest=0.1))
    points = ml.measure(chain(16), X, W).curve()
    assert points[-1].seconds <= 1.1 * points[0].seconds


@cases(
    "kept",
    lambda x, w: ml.cond(ml.sum(x) > 0, lambda: x * 2.0, lambda: x @ w),
    lambda x, w: ml.scan(lambda c, _: (c @ w, None), x, None, length=3)[0],
)
def test_values_that_blocks_read_stay(kept: Any) -> None:
    def loss(x: Tensor, w: Tensor) -> Tensor:
        first = ml.tanh(x @ w)
        x = first
        for _ in range(6):
            x = ml.tanh(x @ w)
        return ml.sum(kept(x * first, w))

    x, w = ml.random.normal((64, 16), key=ml.random.key(1)), ml.random.normal((16, 16)) / 4
    expected = [each.numpy().tobytes() for each in ml.grad(loss, argnums=(0, 1))(x, w)]
    smallest = ml.measure(ml.grad(loss, argnums=(0, 1)), x, w).curve()[-1].nbytes
    assert smallest is not None
    step = ml.capture(ml.grad(loss, argnums=(0, 1)), memory=smallest)
    assert [each.numpy().tobytes() for each in step(x, w)] == expected
    assert step.plan.nbytes + step.plan.hoisted_nbytes <= smallest


def test_an_operand_that_was_overwritten_is_not_read_again() -> None:
    """The first value depends on a weight that is updated before the value's last use."""

    def step(weight: Tensor, x: Tensor) -> Tensor:
        early = ml.tanh(x @ weight)
        weight -= 0.5 * weight
        for _ in range(6):
            x = ml.tanh(x @ weight)
        return ml.sum(early * ml.sum(x))

    key = ml.random.key(2)
    values, x = (
        ml.random.normal((16, 16), key=key).numpy() / 4,
        ml.random.normal((256, 16), key=key),
    )
    expected = step(ml.asarray(values), x).tolist()
    for point in ml.measure(step, ml.asarray(values), x).curve():
        captured = ml.capture(step, memory=point.nbytes)
        assert captured(ml.asarray(values), x).tolist() == expected


def test_a_value_that_is_evicted_before_it_is_read_is_computed_once() -> None:
    """A chain without results has no kernel."""

    def step(x: Tensor) -> Tensor:
        early = ml.exp(x) + 1.0
        large = ml.sort(ml.concat([x] * 8), axis=0)
        return ml.sum(ml.sort(large, axis=1)) + ml.sum(ml.sort(early, axis=0))

    x = ml.random.normal((16, 16), key=ml.random.key(3))
    first, *_, last = ml.measure(step, x).curve()
    assert last.nbytes is not None
    assert last.nbytes < (first.nbytes or 0)
    captured = ml.capture(step, memory=last.nbytes)
    assert captured(x).tolist() == step(x).tolist()
    assert ml.disassemble(captured.program).count('"exp"') == 1


def test_the_same_step_has_the_same_programs() -> None:
    """No hash of a value decides what runs again first."""

    def loss(w: Tensor, x: Tensor) -> Tensor:
        for _ in range(8):
            x = ml.tanh(x @ w) * ml.sin(x) + ml.softmax(x, axis=-1) @ w
        return ml.sum(x)

    square = ml.TensorType("f32", (64, 64))
    curves = {tuple(ml.measure(ml.grad(loss), square, square).curve()) for _ in range(10)}
    assert len(curves) == 1


def test_the_estimate_counts_work_and_bytes() -> None:
    """A product's operations, and the bytes of an elementwise op."""
    [(_, product), *_] = ml.measure(ml.matmul, *[ml.TensorType("f32", (512, 512))] * 2).curve()
    assert product == pytest.approx(budget.LAUNCH + 2 * 512**3 / budget.FLOPS)
    [(_, addition), *_] = ml.measure(lambda x: x + x, ml.TensorType("f32", (1 << 20,))).curve()
    assert addition == pytest.approx(budget.LAUNCH + 8 * 2**20 / budget.BANDWIDTH)


def test_a_budget_error_pickles() -> None:
    error = copy.copy(BudgetError("no", 5))
    assert (str(error), error.smallest) == ("no", 5)


def test_a_budget_refuses_residuals_of_an_unknown_number_of_iterations() -> None:
    def loss(w: Tensor, n: Any) -> Tensor:
        return ml.sum(ml.fori_loop(0, n, lambda i, x: ml.tanh(x @ w), ml.ones((16, 16))))

    w, grad = ml.ones((16, 16)), ml.grad(loss)
    text = f"residuals of [0-9,]+ bytes for each .* iterations or calls at {__file__}:[0-9]+: pass"
    for call in (ml.capture(grad, memory="1 MiB"), partial(ml.measure, grad, memory="1 MiB")):
        refuses(BudgetError, text, call, w, ml.asarray(3))
        call(w, 3)
    ml.capture(loss, memory="1 MiB")(w, ml.asarray(3))  # saves no residuals
