"""Rules of one's own: `custom_vjp` and `custom_jvp`, under every other transformation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import GradientError
from mlvm.eager import nn
from mlvm.eager.tensor.tensor import Tensor
from tests.brief import refuses
from tests.trees import assert_close

X = ml.asarray([0.5, -1.25, 2.0], dtype=ml.float64)
Y = ml.asarray([2.0, 0.25, -1.0], dtype=ml.float64)
Function = Callable[..., Any]


@ml.custom_vjp
def by_vjp(x: Tensor, y: Tensor) -> Any:
    """sin(x) y, whose gradient is said to be ten times as large for x."""
    return ml.sin(x) * y


by_vjp.defvjp(
    lambda x, y: (by_vjp(x, y), (ml.cos(x), ml.sin(x), y)),
    lambda residuals, g: (10.0 * residuals[0] * residuals[2] * g, residuals[1] * g),
)


@ml.custom_jvp
def by_jvp(x: Tensor, y: Tensor) -> Any:
    return ml.sin(x) * y


@by_jvp.defjvp
def _by_jvp(primals: Any, tangents: Any) -> Any:
    (x, y), (dx, dy) = primals, tangents
    return by_jvp(x, y), 10.0 * ml.cos(x) * y * dx + ml.sin(x) * dy


by_parts: Any = ml.custom_jvp(ml.capture(lambda x, y: ml.sin(x) * y))
by_parts.defjvps(lambda t, out, x, y: 10.0 * ml.cos(x) * y * t, lambda t, out, x, y: ml.sin(x) * t)

PLAIN: Function = lambda x, y: ml.sin(x) * y  # noqa: E731
EXPECTED = 10.0 * ml.cos(X) * Y, ml.sin(X)
RULES = {"by_vjp": by_vjp, "by_jvp": by_jvp, "by_parts": by_parts}

AROUND: dict[str, Callable[[Function], Function]] = {
    "alone": lambda fn: fn,
    "in lanes": lambda fn: ml.vmap(fn),
    "in lanes in lanes": lambda fn: lambda x, y: ml.vmap(ml.vmap(fn))(x[None], y[None])[0],
    "with an argument for all lanes": lambda fn: (
        lambda x, y: ml.stack(
            [ml.vmap(fn, in_axes=(0, None))(x[i : i + 1], y[i])[0] for i in range(3)]
        )
    ),
    "in a scan": lambda fn: lambda x, y: ml.scan(lambda s, r: (s, fn(*r)), None, (x, y))[1],
    "in a cond": lambda fn: lambda x, y: ml.cond(x[0] > 0.0, fn, PLAIN, x, y),
    "in a function": lambda fn: ml.subroutine(fn),
    "in a checkpoint": lambda fn: ml.checkpoint(fn),
    "in lanes with branches": lambda fn: ml.vmap(lambda x, y: ml.cond(x > 9.0, PLAIN, fn, x, y)),
}


@pytest.mark.parametrize(
    ("rule", "around"),  # `by_parts` is made like `by_jvp`
    [*product(["by_vjp", "by_jvp"], AROUND), *product(["by_parts"], ["alone", "in lanes"])],
)
def test_the_rule_is_taken_whatever_is_around(rule: str, around: str) -> None:
    fn = AROUND[around](RULES[rule])

    def total(x: Tensor, y: Tensor) -> Tensor:
        return ml.sum(fn(x, y))

    np.testing.assert_allclose(fn(X, Y).numpy(), PLAIN(X, Y).numpy(), rtol=1e-15)
    gradient = ml.grad(total, (0, 1))
    for gradients in (gradient(X, Y), ml.capture(gradient)(X, Y)):
        assert_close(gradients, EXPECTED, 1e-12)

    def of_row(x: Tensor, y: Tensor) -> Any:
        return ml.sum(fn(x[None], y[None]))

    rows = ml.vmap(ml.grad(of_row))
    if around not in ("in a cond", "in lanes in lanes", "with an argument for all lanes"):
        np.testing.assert_allclose(rows(X, Y).numpy(), EXPECTED[0].numpy(), rtol=1e-12)
    second = -10.0 * ml.sin(X) * Y * Y  # the gradient's own derivative: rules are eager code
    back = ml.grad(lambda x: ml.sum(gradient(x, Y)[0] * Y))(X)
    np.testing.assert_allclose(ml.hvp(total, (X, Y), (Y, None)).numpy(), second.numpy(), rtol=1e-12)
    if rule == "by_vjp":
        np.testing.assert_allclose(back.numpy(), second.numpy(), rtol=1e-12)
        refuses(GradientError, "so it has no tangent", ml.jvp, fn, (X, Y), (Y, None))
        return
    tangent = ml.jvp(fn, (X, Y), (Y, X))[1]
    expected = EXPECTED[0] * Y + EXPECTED[1] * X
    np.testing.assert_allclose(tangent.numpy(), expected.numpy(), rtol=1e-12)
    again = ml.capture(lambda x, y: ml.jvp(fn, (x, y), (y, x))[1])(X, Y)
    np.testing.assert_array_equal(again.numpy(), tangent.numpy())


def test_trees_modules_numbers_and_arguments_that_are_not_differentiated() -> None:
    @partial(ml.custom_vjp, nondiff_argnums=(0, 3))
    def scaled(name: str, model: nn.Linear, p: Any, how: Any = None) -> Any:
        return {name: model(p["x"]), "n": p["n"]}

    def back(name: str, how: Any, residuals: Any, g: Any) -> Any:
        assert (name, how, residuals, g["n"]) == ("y", max, "kept", None)
        return {"kernel": ml.ones((3, 2)), "bias": None}, {
            "x": ml.sum(g["y"]) * ml.ones(3),
            "n": None,
        }

    scaled.defvjp(lambda name, m, p, how: (scaled(name, m, p, how), "kept"), back)
    model, p = nn.Linear(3, 2), {"x": ml.ones(3), "n": ml.asarray(3)}

    def total(model: Any, x: Tensor) -> Tensor:
        return ml.sum(scaled("y", model, p={"x": x, "n": p["n"]}, how=max)["y"] * 2.0)

    of_model, of_x = ml.grad(total, (0, 1))(model, p["x"])
    assert of_x.tolist() == [4.0, 4.0, 4.0]
    assert [g.tolist() for g in of_model.values()] == [[[1.0, 1.0]] * 3, [0.0, 0.0]]

    @partial(ml.custom_jvp, nondiff_argnums=1)
    def powered(x: Tensor, n: int) -> Any:
        return x**n

    powered.defjvp(lambda n, xs, ts: (xs[0] ** n, ts[0] * float(n)))
    assert ml.jvp(lambda x: powered(x, 3), (2.0,), (1.0,))[1].tolist() == 3.0

    class Layer(nn.Module):
        @ml.custom_jvp
        def __call__(self, x: Tensor) -> Any:
            return x * self.w

        def __init__(self) -> None:
            self.w = ml.asarray(2.0)

        __call__.defjvp(lambda xs, ts: (xs[0](xs[1]), ts[1] * 5.0))

    assert ml.grad(lambda m, x: m(x), 1)(Layer(), ml.asarray(3.0)).tolist() == 5.0


def test_what_is_no_rule() -> None:
    w = ml.asarray(2.0, dtype=ml.float64)

    def custom(fwd: Any, bwd: Any) -> Function:
        f: Any = ml.custom_vjp(lambda x: x * 2.0)
        f.defvjp(fwd, bwd)
        return lambda x: ml.sum(f(x))

    def by(rule: Any) -> Function:
        f: Any = ml.custom_jvp(lambda x: x * 2.0)
        f.defjvp(rule)
        return lambda x: ml.sum(f(x))

    pair: Function = lambda x: (x, None)  # noqa: E731
    for text, fn in (
        ("has no rule; call <lambda>.defvjp", ml.custom_vjp(lambda x: x)),
        ("has no rule; call <lambda>.defjvp", ml.custom_jvp(lambda x: x)),
        (r"expected a pair \(result, residuals\) from fwd", custom(lambda x: x, pair)),
        ("expected a tuple of 1 cotangent from bwd", custom(pair, lambda residuals, g: g)),
        (
            r"bwd returns for argument 0: expected f64\[3\], got f64\[\]",
            custom(pair, lambda residuals, g: (w,)),
        ),
        (r"expected a pair \(result, tangent\)", by(lambda xs, ts: xs[0])),
        (r"the tangent that the rule returns: expected", by(lambda xs, ts: (xs[0], w))),
    ):
        refuses(GradientError, text, ml.grad(lambda x, fn=fn: ml.sum(fn(x))), X)
    refuses(GradientError, "expected a function, got", ml.custom_vjp, 3)  # type: ignore[arg-type]
    one: Any = ml.custom_jvp(by_jvp.fun, nondiff_argnums=0)
    refuses(GradientError, "nondiff_argnums needs defjvp", one.defjvps, None)


def test_a_rule_that_closes_over_what_is_transformed() -> None:
    def scaled(w: Tensor, rule_too: bool) -> Function:
        f: Any = ml.custom_jvp(lambda x: x * w)
        f.defjvp(lambda xs, ts: (xs[0] * w, ts[0] * (w if rule_too else 1.0)))
        return f

    def of_w(w: Tensor, rule_too: bool = True) -> Tensor:
        return ml.sum(scaled(w, rule_too)(X))

    w = ml.asarray(2.0, dtype=ml.float64)
    assert ml.vmap(of_w)(w[None]).tolist() == [float(ml.sum(X) * 2.0)]
    for fn in (of_w, partial(of_w, rule_too=False)):
        refuses(GradientError, "from outside that is differentiated", ml.grad(fn), w)
        refuses(GradientError, "from outside that is differentiated", ml.jvp, fn, (w,), (w,))
    lanes = ml.vmap(lambda w: ml.grad(lambda x: ml.sum(scaled(w, True)(x)))(X))
    assert lanes(w[None]).tolist() == [[2.0, 2.0, 2.0]]


def test_what_a_rule_updates_is_its_own() -> None:
    back: Any = ml.custom_vjp(lambda x: x * 2.0)

    def bwd(residual: Tensor, g: Tensor) -> tuple[Tensor]:
        residual *= 0.0
        g *= 3.0
        return (g,)

    back.defvjp(lambda x: (x * 2.0, x), bwd)
    forth: Any = ml.custom_jvp(lambda x: x * 2.0)

    @forth.defjvp  # type: ignore[untyped-decorator]
    def rule(xs: tuple[Tensor], ts: tuple[Tensor]) -> tuple[Tensor, Tensor]:
        (x,), (t,) = xs, ts
        x *= 2.0
        t *= 3.0
        return x, t

    x, v = ml.copy(X), ml.ones(3, dtype=ml.float64)
    for fn in (back, forth):
        total = ml.grad(lambda x, fn=fn: ml.sum(fn(x) + x))
        for result in (total(x), ml.capture(total)(x), ml.vmap(total)(x[None])[0]):
            assert result.tolist() == [4.0, 4.0, 4.0]
    value, tangent = ml.jvp(lambda x: forth(x) + x, (x,), (v,))
    assert (value.tolist(), tangent.tolist()) == ((X * 3.0).tolist(), [4.0, 4.0, 4.0])
    assert (x.tolist(), v.tolist()) == (X.tolist(), [1.0, 1.0, 1.0])


def test_a_rule_forward_runs_under_the_autocast_of_its_function() -> None:
    product = ml.custom_jvp(lambda x, w: ml.matmul(x, w))

    @product.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        (x, w), (tx, tw) = primals, tangents
        return product(x, w), ml.matmul(tx, w) + ml.matmul(x, tw)

    x, w = ml.ones((2, 3)), ml.ones((3, 2))

    @ml.autocast("bfloat16")
    def fn(x: Tensor) -> Any:
        return product(x, w)

    value, tangent = ml.jvp(fn, (x,), (x,))
    assert value.dtype is tangent.dtype is fn(x).dtype is ml.bfloat16
    assert ml.linearize(fn, x)[0].dtype is ml.jacfwd(fn)(x).dtype is ml.bfloat16
    g = ml.grad(lambda x: ml.sum(ml.astype(fn(x), "float32")))(x)
    assert g.tolist() == [[2.0] * 3] * 2
