"""Directions and Jacobians: `jvp`, `linearize`, `jacfwd`, `jacrev`, `hessian`, `hvp`, `vjp`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import CaptureError, CheckError, DTypeError, GradientError
from mlvm.core.program.program import Opcode
from mlvm.eager import nn
from mlvm.eager.recording import recorder
from mlvm.eager.tensor.tensor import Tensor
from tests.brief import Patch, cases, count_calls, refuses
from tests.trees import assert_close

X = ml.asarray([0.5, 1.25, 2.0], dtype=ml.float64)
V = ml.asarray([1.0, -0.5, 0.25], dtype=ml.float64)

Function = Callable[..., Any]


# --- through everything that a function may do -------------------------------------------


def _while(x: Tensor) -> Any:
    return ml.while_loop(
        lambda s: ml.sum(s[1]) < 60.0, lambda s: (s[0] + 1, s[1] * x + 1.0), (0, x)
    )[1]


def _checked(x: Tensor) -> Tensor:
    ml.check(ml.all(x > 0.0), "x is positive")
    return x * x


def _updated(x: Tensor) -> Tensor:
    y = x * 2.0
    y[0] = x[1] * x[1]
    y += x
    return y


@ml.subroutine
def _power(n: Tensor, x: Tensor) -> Tensor:
    return ml.cond(n < 1.0, lambda: x, lambda: _power(n - 1.0, x * x) * n)


_scaled: Function = ml.custom_jvp(lambda x: x * 3.0)
_scaled.defjvp(lambda xs, ts: (xs[0] * 3.0, ts[0] * 3.0))  # type: ignore[attr-defined]

WAYS: dict[str, Function] = {
    "elements": lambda x: ml.tanh(x) * ml.exp(-x) / (1.0 + x),
    "rows": lambda x: ml.softmax(x[:, None] * x) @ x,
    "a cond": lambda x: ml.cond(x[0] < 1.0, lambda y: y * y, lambda y: (y - x) * 0.0, x),
    "the other branch": lambda x: ml.cond(x[0] > 1.0, lambda y: y * y, ml.sin, x),
    "a while_loop": _while,
    "a fori_loop": lambda x: ml.fori_loop(0, 3, lambda i, s: s * x + i, x * 0.0),
    "turns that values count": lambda x: ml.fori_loop(
        0, ml.astype(ml.sum(x), ml.int64), lambda i, s: s * x, x
    ),
    "a scan": lambda x: ml.sum(ml.scan(lambda s, r: (s * r + 1.0, s * s), x[0], x)[1]) * x,
    "a scan backwards": lambda x: ml.scan(lambda s, r: (s * r, s), x[0], x, reverse=True)[1],
    "a scan in a scan": lambda x: ml.scan(
        lambda s, r: (ml.scan(lambda t, q: (t * q + s, t), r, x)[0], s * r), x[0], x
    )[1],
    "a part of the state alone": lambda x: ml.fori_loop(
        0, 3, lambda i, s: (s[0] + 1.0, s[1] * s[0] * x), (ml.asarray(0.5, dtype=ml.float64), x)
    )[1],
    "a function": lambda x: _power(ml.asarray(2.0), x),
    "a checkpoint": lambda x: ml.checkpoint(lambda x: ml.sin(x) * x)(x),
    "a check": _checked,
    "updates": _updated,
    "a constant": lambda x: x * ml.stop_gradient(x * x),
    "lanes": ml.vmap(lambda x: ml.cond(x > 1.0, lambda: x * x, lambda: ml.sin(x))),
    "a rule": lambda x: _scaled(x * x),
    "another direction": lambda x: ml.jvp(lambda y: ml.sin(y) * x, (x,), (x * x,))[1],
}


def _slope(fn: Function, x: Tensor, v: Tensor) -> Any:
    h = 1e-6
    return ((fn(x + h * v) - fn(x - h * v)) / (2 * h)).numpy()


@pytest.mark.parametrize("name", WAYS)
def test_a_tangent_is_the_slope_eagerly_captured_and_of_gradients(name: str) -> None:
    fn = WAYS[name]
    value, tangent = ml.jvp(fn, (X,), (V,))
    np.testing.assert_array_equal(value.numpy(), fn(X).numpy())
    expected = _slope(fn, X, V)
    if name == "a constant":
        expected = (V * X * X).numpy()
    np.testing.assert_allclose(tangent.numpy(), expected, rtol=1e-6, atol=1e-8)
    _, forward = ml.linearize(fn, X)
    np.testing.assert_allclose(forward(V).numpy(), tangent.numpy(), rtol=1e-12)
    captured = ml.capture(lambda x, v: ml.jvp(fn, (x,), (v,)))(X, V)
    assert_close(captured, (value, tangent))

    gradient = ml.grad(lambda x: ml.sum(ml.sin(fn(x))))
    product = ml.hvp(lambda x: ml.sum(ml.sin(fn(x))), (X,), (V,))
    if name not in ("a constant", "a rule"):
        np.testing.assert_allclose(product.numpy(), _slope(gradient, X, V), rtol=1e-5, atol=1e-7)
    again = ml.capture(lambda x, v: ml.hvp(lambda x: ml.sum(ml.sin(fn(x))), (x,), (v,)))(X, V)
    np.testing.assert_array_equal(again.numpy(), product.numpy())
    if name not in ("a while_loop", "turns that values count"):
        over = ml.grad(lambda x: ml.sum(ml.cos(fn(X)) * ml.jvp(fn, (x,), (V,))[1]))(X)
        assert over.type is X.type


def test_third_derivatives_in_any_order() -> None:
    def total(x: Tensor) -> Tensor:
        return ml.sum(ml.sin(_while(x)))

    def second(x: Tensor) -> Tensor:
        return ml.sum(ml.hvp(total, (x,), (V,)) * V)

    back = lambda x: ml.sum(ml.grad(lambda x: ml.sum(ml.grad(total)(x) * V))(x) * V)  # noqa: E731
    over = lambda x: ml.sum(ml.grad(second)(x) * V)  # noqa: E731
    expected = _slope(second, X, V)
    for fn in (
        lambda x: ml.jvp(second, (x,), (V,))[1],
        over,
        lambda x: ml.jvp(back, (x,), (V,))[1],
    ):
        np.testing.assert_allclose(fn(X).numpy(), expected, rtol=1e-4)
        np.testing.assert_allclose(ml.capture(fn)(X).numpy(), expected, rtol=1e-4)

    through = ml.grad(lambda x: ml.sum(ml.hvp(lambda x: ml.sum(WAYS["a function"](x)), (x,), (V,))))
    refuses(GradientError, "reverse mode over forward mode", ml.capture(through), X)


def test_a_loop_carries_tangents_for_those_parts_of_its_state_that_get_one() -> None:
    def fn(x: Tensor) -> Any:
        step = lambda s: (s[0] + 1.0, s[1] * s[0], s[2] * 2.0)  # noqa: E731
        return ml.while_loop(lambda s: s[0] < 4.0, step, (ml.asarray(0.0), x, ml.asarray(1.0)))

    plain = ml.capture(fn, fuse=False)
    moved = ml.capture(lambda x, v: ml.jvp(fn, (x,), (v,)), fuse=False)
    plain(X), moved(X, V)

    def products(of: Any) -> int:
        code = of.program.main.code
        return sum(i.opcode is Opcode.push_str and i.immediates[0] == "multiply.out" for i in code)

    assert (products(plain), products(moved)) == (2, 3)
    assert moved(X, V)[1][0].numpy() == 0.0


# --- trees, types and errors -------------------------------------------------------------


class _Counted(nn.Module):
    def __init__(self) -> None:
        self.calls = nn.buffer(ml.asarray(0.0))

    def __call__(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1.0
        return x * self.calls


def test_a_buffer_gets_what_is_assigned_to_it() -> None:
    model = _Counted()
    assert ml.jvp(lambda m, x: m(x), (model, 3.0), (None, 1.0))[1].tolist() == 1.0
    assert ml.jvp(lambda m, x: m(x), (model, 3.0), (None, 1.0))[1].tolist() == 2.0
    assert model.calls.tolist() == 2.0


def test_an_op_without_a_rule_is_refused_where_a_float_of_the_result_depends_on_it() -> None:
    for function in (ml.jvp, lambda fn, xs, ts: ml.linearize(fn, *xs)[1](*ts)):
        text = r"floor\(f64.* has no gradient for x"
        refuses(GradientError, text, function, ml.floor, (X,), (V,))
        _, tangent = ml.jvp(lambda x: x[ml.astype(ml.floor(x), ml.int64)], (X,), (V,))
        assert tangent.tolist() == [1.0, -0.5, 0.25]


def test_errors_of_the_function_itself() -> None:
    message = "cannot read a tensor's value inside a function of jvp"
    refuses(CaptureError, message, ml.jvp, lambda x: x * float(x[0]), (X,), (V,))
    refuses(CheckError, "x is positive", ml.jvp, _checked, (-X,), (V,))
    refuses(DTypeError, "expected one tangent per primal, got 2", ml.linearize(ml.sin, X)[1], V, V)
    _, pull = ml.vjp(lambda x: (x, x), X)
    refuses(GradientError, "expected a cotangent with the structure of the value", pull, [X, X])
    refuses(GradientError, r"expected f64\[3\] as the cotangent, got f64\[2\]", pull, (X, X[:2]))
    refuses(
        GradientError,
        "expected a function that returns a tree of float",
        ml.vjp,
        lambda x: "text",
        X,
    )


def test_linearize_computes_what_no_tangent_needs_once() -> None:
    calls: list[int] = []
    fn = ml.capture(lambda x, v: _twice(x, v, calls), fuse=False)
    fn(X, V)
    code = fn.program.main.code
    names = [i.immediates[0] for i in code if i.opcode is Opcode.push_str]
    assert (names.count("exp.out"), names.count("sin.out"), names.count("cos.out")) == (1, 1, 1)
    assert calls == [1]


def _twice(x: Tensor, v: Tensor, calls: list[int]) -> Any:
    def function(x: Tensor) -> Tensor:
        calls.append(1)
        return ml.sin(ml.exp(x))

    value, forward = ml.linearize(function, x)
    return value, forward(v), forward(v * 2.0)


# --- Jacobians -----------------------------------------------------------------------------


def test_jacobians_are_those_of_formulas_and_of_each_other() -> None:
    a = ml.asarray(np.arange(6.0).reshape(2, 3))

    def fn(x: Tensor, p: Any) -> Any:
        return {"y": a @ ml.sin(x) * p["s"], "n": ml.astype(x, ml.int32), "z": ml.sum(x) * p["s"]}

    p = {"s": ml.asarray(2.0, dtype=ml.float64)}
    forward, back = ml.jacfwd(fn, (0, 1))(X, p), ml.jacrev(fn, (0, 1))(X, p)
    np.testing.assert_allclose(forward["y"][0].numpy(), (a * ml.cos(X) * 2.0).numpy())
    np.testing.assert_allclose(forward["y"][1]["s"].numpy(), (a @ ml.sin(X)).numpy())
    assert forward["n"] is back["n"] is None
    assert forward["z"][0].tolist() == [2.0, 2.0, 2.0]
    assert_close(forward, back, 1e-14)
    captured = ml.capture(lambda x: ml.jacfwd(fn)(x, p)["y"])(X)
    np.testing.assert_array_equal(captured.numpy(), forward["y"][0].numpy())
    assert ml.jacrev(lambda x: (x * x, "aux"), has_aux=True)(X)[1] == "aux"
    assert ml.jacfwd(lambda x: (x * x, x), has_aux=True)(X)[1].tolist() == X.tolist()


def test_a_holomorphic_jacobian_has_complex_derivatives() -> None:
    z = ml.asarray([1.0 + 1.0j, 2.0])
    expected = np.diag(2 * z.numpy()) + np.ones((2, 2))
    for jacobian in (ml.jacfwd, ml.jacrev):
        result = jacobian(lambda z: z * z + ml.sum(z), holomorphic=True)(z)
        np.testing.assert_allclose(result.numpy(), expected, rtol=1e-6)
        refuses(DTypeError, "of a complex dtype", jacobian(lambda x: x, holomorphic=True), X)
    refuses(DTypeError, "an argument of a real float dtype, got c64", ml.jacfwd(ml.abs), z)
    refuses(DTypeError, "a result of a real float dtype, got c64", ml.jacrev(lambda z: z), z)
    text = "an argument of a real float dtype, got i64"
    refuses(DTypeError, text, ml.jacfwd(lambda n: n), ml.arange(2))


def test_a_tangent_of_a_result_is_none_of_an_argument() -> None:
    for fn in (lambda x: x, lambda x: ml.cond(ml.sum(x) > 0.0, lambda x: x, ml.exp, x)):
        v = ml.copy(V)
        tangent = ml.jvp(fn, (X,), (v,))[1]
        tangent *= 2.0
        assert (v.tolist(), tangent.tolist()) == (V.tolist(), (V * 2.0).tolist())


@cases("kind", "op", "loop", "branch", "function")
def test_linearize_is_of_the_values_that_there_were(kind: str) -> None:
    def run(w: Tensor, y: Tensor) -> Any:
        if kind == "loop":
            return ml.fori_loop(0, 1, lambda i, y: y * y * w, y)
        if kind == "branch":
            return ml.cond(ml.sum(y) > 0.0, lambda y: y * y * w, ml.exp, y)
        return ml.subroutine(lambda y: y * y * w)(y) if kind == "function" else y * y * w

    def after(w: Tensor) -> Tensor:
        w, x = w * 1.0, ml.copy(X)
        forward = ml.linearize(partial(run, w), x)[1]
        w *= 2.0
        x *= 3.0
        return forward(V)

    w = ml.ones(3, dtype=ml.float64)
    for result in (after(w), ml.capture(after)(w), ml.grad(lambda w: ml.sum(after(w)))(w)):
        np.testing.assert_allclose(result.numpy(), (X * V * 2.0).numpy())


@cases("wrap", lambda fn: fn, ml.capture, ids=["eager", "captured"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_branch_that_is_not_taken_has_no_tangent(wrap: Callable[..., Any], nested: bool) -> None:
    """Zeros would be nan beside the infinities after it."""

    def fn(x: ml.Tensor, y: ml.Tensor) -> Any:
        one, two = (lambda: y * 1.0), (lambda: ml.ones(()))
        branch = (lambda: ml.cond(y > 5, one, two)) if nested else two
        z = ml.cond(x > 0, branch, one)
        return ml.sqrt(z - 1.0) * 3.0 + x * ml.log(z - 1.0) * 0 + ml.sqrt(z - 1.0) * x

    step = wrap(lambda x, y: ml.jvp(fn, (x, y), (None, ml.ones(()))))
    _, tangent = step(ml.asarray(1.0), ml.asarray(2.0))
    assert float(tangent) == 0.0
    _, tangent = step(ml.asarray(-1.0), ml.asarray(2.0))
    assert float(tangent) == pytest.approx(1.0)


def _launches(fn: Callable[..., Any], counts: Counter[str], *args: Tensor) -> int:
    """Return how many launches the recording of `fn` takes; it must compute what eager does."""
    step = ml.capture(fn)
    expected = fn(*args).numpy()
    counts.clear()
    np.testing.assert_array_equal(step(*args).numpy(), expected)
    return counts["launch"]


def _branches(depth: int, x: Tensor) -> Any:
    if depth == 0:
        return ml.sin(x)
    return ml.cond(ml.sum(x) > depth, lambda: _branches(depth - 1, x * 1.5), lambda: x)


def _loops(depth: int, x: Tensor) -> Any:
    if depth == 0:
        return ml.sin(x) * x
    body = lambda state: (state[0] + 1, _loops(depth - 1, state[1]))  # noqa: E731
    return ml.while_loop(lambda state: state[0] < 2, body, (ml.asarray(0), x))[1]


def _scans(depth: int, x: Tensor) -> Any:
    if depth == 0:
        return ml.sin(x) * x
    body = lambda state, z: ((_scans(depth - 1, state[0]), state[1] + z), state[0])  # noqa: E731
    (x, _), rows = ml.scan(body, (x, ml.ones(2)), ml.ones((2, 2)))
    return x + ml.sum(rows, axis=0)


def _row_of_branches(count: int, x: Tensor) -> Any:
    zs = [x[0] * i - 4.0 for i in range(count)]
    return ml.sum(ml.stack([ml.cond(z > 0, ml.sin, lambda z: ml.ones(()), z) for z in zs])) * x


@cases("fn, few, many, times", (_branches, 2, 8, 12), (_loops, 2, 6, 8), (_scans, 2, 6, 8),
    (_row_of_branches, 2, 8, 6),
)  # fmt: skip
def test_nests_take_quadratic_work_to_record_and_rows_linear(
    fn: Callable[..., Any], few: int, many: int, times: int, recorded: Counter[str]
) -> None:
    counts = [
        _launches(lambda x, n=n: ml.jvp(partial(fn, n), (x,), (x,))[1], recorded, ml.ones(2))
        for n in (few, many)
    ]
    assert counts[1] < times * counts[0]


def test_gradients_of_branches_take_little_more_work_with_each_order(
    recorded: Counter[str],
) -> None:
    def fn(x: Tensor) -> Any:
        y = ml.cond(ml.sum(x) > 0.0, lambda: x * x, lambda: ml.sin(x))
        z = ml.cond(ml.sum(x) > 1.0, lambda: ml.tanh(x), lambda: ml.ones(2))
        return ml.sum(y * z * y)

    def gradient(fn: Callable[..., Any]) -> Callable[..., Any]:
        return ml.grad(lambda x: ml.sum(fn(x)))

    blocks = []
    for step in (third := gradient(gradient(gradient(fn))), gradient(third)):
        recorded.clear()
        np.testing.assert_allclose(ml.capture(step)(ml.ones(2)), step(ml.ones(2)), rtol=1e-5)
        blocks.append(recorded["block"])
    assert blocks[0] < 150
    assert blocks[1] < 600


def test_a_block_costs_what_is_recorded_in_it(monkeypatch: Patch) -> None:
    scans = count_calls(monkeypatch, recorder, "_all_views")

    def fn(x: Tensor) -> Any:
        for _ in range(20):
            x = ml.cond(ml.sum(x) > 0.0, lambda x: x * 2.0, lambda x: x, x)
        return x

    assert ml.capture(fn)(ml.ones(2)).tolist() == [2.0**20] * 2
    assert scans["_all_views"] == 1


@pytest.fixture
def recorded(monkeypatch: Patch) -> Counter[str]:
    """The numbers of launches and blocks that any recorder has recorded."""
    return count_calls(monkeypatch, recorder.Recorder, "launch", "block")


def test_branches_inside_a_branch_have_conditions_of_numbers() -> None:
    def inner(x: Any) -> Any:
        y: Any = ml.cond(ml.sum(x), lambda: x * 2.0, lambda: ml.zeros_like(x))
        return y * ml.cond(ml.sum(x) - 1.0, lambda: ml.zeros_like(x), lambda: x * 3.0)

    def fn(x: Any) -> Any:
        return ml.cond(ml.sum(x) > 0.0, lambda: inner(x), lambda: x)

    x = ml.asarray([0.25, 0.75])
    transforms: list[Any] = [lambda fn: fn, ml.capture]
    for transform in transforms:
        _, tangent = transform(lambda x: ml.jvp(fn, (x,), (ml.ones(2),)))(x)
        assert tangent.tolist() == [3.0, 9.0]
