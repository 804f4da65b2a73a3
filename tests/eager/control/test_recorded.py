"""Captured control flow: the eager values and gradients to the bit, in a program that does not grow
with its turns, and errors for what a later call could not do again."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlvm.eager as ml
from mlvm.__main__ import main
from mlvm.core.errors import CaptureError
from mlvm.eager.tree import named_leaves
from tests.brief import refuses, with_long
from tests.slopes import check_slopes
from tests.trees import arrays, assert_close

HERE = Path(__file__).name


def bits(tree: Any) -> list[tuple[str, bytes]]:
    """Types and bytes; no zero is negative: where eager code adds a row to zeros, a captured loop
    puts it in its place."""
    leaves = [x.numpy() for _, x in named_leaves(tree, buffers=True)]
    return [(f"{x.dtype}{x.shape}", (x + x.dtype.type(0)).tobytes()) for x in leaves]


def vector(n: int = 3, seed: int = 0) -> ml.Tensor:
    return ml.asarray(np.random.default_rng(seed).normal(size=n).astype(np.float32))


@ml.subroutine
def power(x: ml.Tensor, n: ml.Tensor) -> ml.Tensor:
    return ml.cond(n < 1, lambda: x, lambda: ml.sin(power(x, n - 1)) * x)


@ml.subroutine
def both(x: ml.Tensor, n: ml.Tensor) -> ml.Tensor:
    """Calls itself twice, and uses what it is given in several places."""
    return ml.cond(n < 1, lambda: ml.tanh(x), lambda: both(x * 0.5, n - 1) * both(x + 1.0, n - 2))


@ml.subroutine
def folded(x: ml.Tensor, n: ml.Tensor, w: ml.Tensor) -> ml.Tensor:
    """Calls itself in its first branch, so that the other alone tells the result's type."""
    deeper = lambda: ml.tanh(folded(ml.sin(x + w), n - 1, w)) * x  # noqa: E731
    return ml.cond(n > 0, deeper, lambda: x)


def row(x: ml.Tensor) -> ml.Tensor:
    return ml.sum(x[ml.asarray([[1, 0, 1]] * 9)], axis=0)  # a gradient whose order matters


Loss = Callable[[ml.Tensor, ml.Tensor, ml.Tensor], Any]

# Functions of x, w (f32[3] each) and n (i64[], 0 .. 3). With `True`: of a length that is known.
LOSSES: dict[str, tuple[bool, Loss]] = {
    "cond": (True, lambda x, w, n: ml.cond(n > 1, lambda x: ml.sin(x * w), lambda x: x / 2, x)),
    "switch": (True, lambda x, w, n: (lambda r: ml.switch(
        n, [lambda: x * w, lambda: w, lambda: r * w]))(row(x)) + ml.exp(x)),
    "fori": (True, lambda x, w, n: ml.fori_loop(0, 3, lambda i, s: ml.sin(s * w) + x, x)),
    "fori, of n": (False, lambda x, w, n: (lambda r: ml.fori_loop(
        0, n, lambda i, s: ml.sin(s * row(x)) + r, w))(row(x)) + ml.exp(x)),
    "counted": (True, lambda x, w, n: ml.fori_loop(
        0, 3, lambda i, s: (s[0] + i, s[1] * ml.astype(s[0], "f32")), (1, x))[1]),
    "while": (False, lambda x, w, n: ml.while_loop(
        lambda s: ml.sum(s * s) < 40, lambda s: s * (ml.abs(w) + 1.1) + ml.square(x), x)),
    "no turns": (False, lambda x, w, n: ml.while_loop(lambda s: n > 9, lambda s: s * w, x * 2)),
    "scan": (True, lambda x, w, n: ml.scan(
        lambda s, r: (ml.tanh(s * r + w), {"y": s * 2}), x, x)[1]["y"]),
    "scan, reverse": (True, lambda x, w, n: ml.scan(
        lambda s, r: (ml.tanh(s * r), s * r), w, x, reverse=True)[1]),
    "scan, of n": (True, lambda x, w, n: ml.scan(
        lambda s, r: (ml.tanh(s * r), s * w), w, x, n)[1]),
    "scan, no rows": (True, lambda x, w, n: ml.scan(lambda s, r: (s * r, s), w, x[:0])[0] * x),
    "map": (True, lambda x, w, n: ml.map(lambda r: ml.sin(r["x"]) * w, {"x": x, "n": w})),
    "checkpoint": (True, lambda x, w, n: ml.scan(
        lambda s, r: (ml.tanh(s * r + w), s * 2), x, x, checkpoint=True)[1]),
    "unchanged": (True, lambda x, w, n: ml.fori_loop(
        0, 3, lambda i, s: (s[0], s[1] * s[0]), (x, w))[1]),
    "twice": (True, lambda x, w, n: ml.fori_loop(
        0, 2, lambda i, s: (s[0] + s[1] * w, s[0]), (x, x))[0]),
    "nested": (True, lambda x, w, n: ml.fori_loop(0, 3, lambda i, s: ml.cond(
        i == n, lambda: ml.scan(lambda c, r: (ml.sin(c * r) + w, None), s, x)[0], lambda: s / 2),
        x)),
    "while in scan": (False, lambda x, w, n: ml.scan(lambda s, r: (ml.while_loop(
        lambda q: ml.sum(q) < r + 2, lambda q: q * 0.9 + ml.abs(w) + 0.5, s), s), x, x)[0]),
    "scan in while": (False, lambda x, w, n: ml.while_loop(
        lambda s: s[1] < n, lambda s: (ml.scan(
            lambda c, r: (ml.sin(c * r + x), c), s[0], w)[0], s[1] + 1), (x, 0))[0]),
    "gradient in a loop": (True, lambda x, w, n: ml.fori_loop(
        0, 2, lambda i, s: s - 0.1 * ml.grad(lambda v: ml.sum(ml.sin(v * w)))(s), x)),
    "function in function": (True, lambda x, w, n: ml.subroutine(lambda n: ml.subroutine(
        lambda n: row(x) * w)(n) + ml.square(x) * ml.exp(x))(n)),
    "two calls": (False, lambda x, w, n: both(x, n) + both(w, n + 1)),
    "first branch": (False, lambda x, w, n: folded(x, n, w)),
    "function in scan": (False, lambda x, w, n: ml.scan(
        lambda s, r: (power(s * r, n), s), w, x)[1]),
    "loop in function": (False, lambda x, w, n: ml.subroutine(lambda x, n: ml.fori_loop(
        0, n, lambda i, s: ml.sin(s * x), x))(x * w, n)),
}  # fmt: skip


def scalar(loss: Loss) -> Loss:
    return lambda x, w, n: ml.sum(ml.sin(loss(x, w, n)))


def of_order(loss: Loss, order: int) -> Callable[..., Any]:
    """Its gradients, with respect to x and w, of this order."""
    fn: Callable[..., Any] = scalar(loss)
    for _ in range(order - 1):
        before = ml.grad(fn, (0, 1))
        fn = lambda x, w, n, before=before: sum(ml.sum(ml.sin(g)) for g in before(x, w, n))  # noqa: E731
    return ml.value_and_grad(fn, (0, 1))


@pytest.mark.parametrize("name", LOSSES)
def test_values_and_gradients_are_the_eager_ones_to_the_bit(name: str) -> None:
    _, loss = LOSSES[name]
    eager = of_order(loss, 1)
    plain, fused = ml.capture(eager, fuse=False), ml.capture(eager)
    for seed, n in enumerate((2, 0, 3)):
        args = vector(seed=seed), vector(seed=9 + seed), ml.asarray(n)
        expected = bits(eager(*args))
        assert bits(plain(*args)) == expected
        assert bits(fused(*args)) == expected
        assert bits(plain(*args)) == expected  # again, on the same memory
    assert plain.signatures == fused.signatures == 1


# Functions of x and w (f64[3] each) whose second gradient adds several cotangents to one tensor: of
# an operand, of a turn's state, of one that is a result as well, of rows.
SUMS: dict[str, Callable[[ml.Tensor, ml.Tensor], Any]] = {
    "operand": lambda x, w: ml.cond(ml.sum(x) < 9.0, lambda y: y * y, ml.sin, x * w),
    "fori": lambda x, w: ml.fori_loop(0, 3, lambda i, s: ml.tanh(s * s + ml.sin(s) * w), x),
    "while": lambda x, w: ml.while_loop(
        lambda s: s[0] < 3.0,
        lambda s: (s[0] + 1.0, ml.tanh(s[1] * s[1] + ml.sin(s[1]) * w)),
        (ml.sum(x) * 0.0, x),
    )[1],
    "result": lambda x, w: ml.scan(lambda s, r: (ml.tanh(s * r + ml.sin(s) * w),) * 2, x, w)[1],
    "states": lambda x, w: ml.scan(
        lambda s, r: ((ml.tanh(s[0] * r + s[1] * s[1]), ml.sin(s[0] * w)), s[0]), (x, x), w
    )[1],
    "rows": lambda x, w: ml.scan(lambda s, r: (s * r * r, ml.sin(r) * s), x, x)[1] * w,
}


@pytest.mark.parametrize("name", SUMS)
def test_second_gradients_are_added_up_in_the_eager_order(name: str) -> None:
    def slope(x: ml.Tensor, w: ml.Tensor) -> Any:
        gradients = ml.grad(lambda *args: ml.sum(ml.sin(SUMS[name](*args))), (0, 1))(x, w)
        return ml.sum(ml.sin(gradients[0])) + ml.sum(ml.sin(gradients[1]))

    second = ml.grad(slope, (0, 1))
    captured = ml.capture(second)
    for seed in range(7):
        args = [ml.asarray(x) for x in np.random.default_rng(seed).normal(size=(2, 3))]
        assert bits(captured(*args)) == bits(second(*args))


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_slopes(name: str) -> None:
    _, loss = LOSSES[name]
    check_slopes(loss, vector(), vector(seed=9), ml.asarray(2))


# Functions of x and of a constant c, which nothing makes depend on x: `floor` has no gradient.
CONSTANTS: dict[str, Callable[[Any, Any], Any]] = {
    "state": lambda x, c: ml.fori_loop(
        0, 3, lambda i, s: (s[0] * ml.floor(s[1]), s[1] + 0.5), (x, c))[0],
    "rows": lambda x, c: ml.scan(lambda s, r: (s * ml.floor(r), r), x, c)[0],
    "result": lambda x, c: x * ml.floor(ml.fori_loop(
        0, 3, lambda i, s: (s[0] * 2.0, s[1] + 0.5), (x, c))[1]),
    "stacked": lambda x, c: x * ml.floor(ml.scan(lambda s, r: (s * r, r), x, c)[1]),
    "while": lambda x, c: ml.while_loop(
        lambda s: ml.sum(s[1]) < 20, lambda s: (s[0] * ml.floor(s[1]), s[1] + 0.5), (x, c))[0],
    "nested": lambda x, c: ml.fori_loop(0, 2, lambda i, s: ml.fori_loop(
        0, 2, lambda j, t: (t[0] * ml.floor(t[1]), t[1] + 0.5), s), (x, c))[0],
    "branch": lambda x, c: x * ml.floor(ml.cond(
        ml.sum(c) > 0, lambda: (x * 2, c), lambda: (x, c + 1))[1]),
    "in the next turn": lambda x, c: ml.fori_loop(
        0, 3, lambda i, s: (s[1] * s[2], s[2], s[0] + s[2]), (x, c, c))[0],
}  # fmt: skip


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_state_that_nothing_tracked_goes_into_is_a_constant(name: str) -> None:
    eager = ml.grad(lambda x, c: ml.sum(ml.sin(CONSTANTS[name](x, c))))
    args = vector(), ml.abs(vector(seed=9)) + 1.0
    assert bits(ml.capture(eager)(*args)) == bits(eager(*args))


@ml.subroutine
def tree(node: ml.Tensor, rows: ml.Tensor, w: ml.Tensor, loss: Any) -> ml.Tensor:
    return ml.cond(
        node < 1,
        lambda: ml.sin(rows[node] * ml.sum(w)),
        lambda: loss(tree(node - 1, rows, w, loss) + tree(node - 2, rows, w, loss)),
    )


def through_closures(x: ml.Tensor, w: ml.Tensor, n: ml.Tensor) -> Any:
    """A function that calls itself, a loop in it, and another that both call, all with weights from
    outside: by their rows, too."""
    inner = ml.subroutine(lambda y: ml.tanh(y * w) + x[ml.asarray([0, 2, 0])])

    @ml.subroutine
    def outer(y: ml.Tensor, n: ml.Tensor) -> Any:
        deeper = lambda: outer(inner(y) * w[n], n - 1) + ml.take(x, n, axis=0)  # noqa: E731
        turned = lambda: ml.fori_loop(0, n + 2, lambda i, s: inner(s) * w, y)  # noqa: E731
        return ml.cond(n < 1, turned, deeper)

    return outer(x, n) * inner(w)


def pulled_twice(fn: Callable[[Any], Any], x: ml.Tensor) -> Any:
    pair: Any = ml.vjp(fn, x)
    y, pull = pair
    return pull(y)[0] + pull(y * y)[0] * y


THIRD = "cond", "fori", "map"
KNOWN = *THIRD, "scan, of n", "nested", "checkpoint"
# Beside those of unknown length above and a few of known length, for gradients of gradients.
DEEP: dict[str, Loss] = {
    **{name: loss for name, (is_known, loss) in LOSSES.items() if not is_known or name in KNOWN},
    "closures": through_closures,
    "tree": lambda x, w, n: tree(n, ml.stack([x, w, x * w]), w, lambda y: ml.tanh(y * w + x)),
    "while in function": lambda x, w, n: ml.subroutine(lambda y, n: ml.while_loop(
        lambda s: ml.sum(s) < 3, lambda s: s * 1.2 + ml.abs(w) + y, y))(x * x, n),
    "function in while": lambda x, w, n: ml.while_loop(
        lambda s: s[1] <= n, lambda s: (power(s[0] * w, s[1]) + x, s[1] + 1), (x, 0))[0],
    "in a branch": lambda x, w, n: ml.cond(n > 1, lambda: ml.fori_loop(
        0, n, lambda i, s: ml.sin(s * w), x), lambda: power(x * w, n) + w),
    "pulled twice": lambda x, w, n: pulled_twice(
        lambda x: ml.fori_loop(0, n, lambda i, s: ml.sin(s * w) * s, x), x),
}  # fmt: skip


@pytest.mark.parametrize("name", DEEP)
def test_gradients_of_gradients_through_unknown_lengths_and_functions(name: str) -> None:
    """In f64, and close: sums have another order. With `--long` third gradients of all, too."""
    x, w = (ml.asarray(each, dtype="f64") for each in ([0.3, 0.6, 0.9], [0.5, 0.2, 0.4]))
    for order in (2, 3) if name in THIRD else with_long((2,), (2, 3)):
        eager = of_order(DEEP[name], order)
        step = ml.capture(eager)
        for n in (2, 0):
            assert_close(step(x, w, ml.asarray(n)), eager(x, w, ml.asarray(n)), 1e-8, 1e-9)


BOUNDS: dict[str, Callable[..., Any]] = {
    "upper": lambda x, m, n: ml.fori_loop(0, n, lambda i, s: ml.sin(s) * 2.0 + i, x),
    "both": lambda x, m, n: ml.fori_loop(m, n, lambda i, s: ml.sin(s) * 2.0 + i, x),
    "computed, and used": lambda x, m, n: ml.fori_loop(
        m - 1, 2 * n + 1, lambda i, s: ml.sin(s * n) + i, x),
}  # fmt: skip


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("name", BOUNDS)
def test_bounds_that_change_are_inputs_of_one_program(name: str, order: int) -> None:
    loss = BOUNDS[name]
    eager = ml.grad(lambda x, m, n: ml.sum(loss(x, m, n))) if order else loss
    step = ml.capture(eager)
    for bounds in ((0, 3), (0, 5), (1, 0), (2, 2), (-2, 7), (3, 4)):
        assert bits(step(vector(), *bounds)) == bits(eager(vector(), *bounds))
    assert step.signatures == 3  # a number is free once it has changed, first n and then m


# --- trees of control flow, at random ------------------------------------------------


def bodies(depth: int, *, top: bool = True) -> st.SearchStrategy[Callable[..., ml.Tensor]]:
    """Functions of a state f32[3], w f32[3] and n i64[] to a state. What runs again is at the top:
    it may use tensors from outside, but none of a body around it."""
    plain: list[Callable[..., ml.Tensor]] = [
        lambda s, w, n: ml.sin(s * w),
        lambda s, w, n: s * 0.5 + w,
        lambda s, w, n: ml.tanh(s) - w * 0.1,
        lambda s, w, n: s,
        lambda s, w, n: w,
        lambda s, w, n: s - 0.1 * ml.grad(lambda v: ml.sum(ml.cos(v * w)))(s),
    ]
    leaf = st.sampled_from(plain)
    if not depth:
        return leaf
    inner = bodies(depth - 1, top=False)

    def cond(f: Any, g: Any) -> Any:
        return lambda s, w, n: ml.cond(ml.sum(s) > 0, lambda s: f(s, w, n), lambda s: g(s, w, n), s)

    def fori(f: Any, turns: int | None) -> Any:
        return lambda s, w, n: ml.fori_loop(
            0, n if turns is None else turns, lambda i, s: f(s, w, i), s
        )

    def loop(f: Any, limit: float) -> Any:
        return lambda s, w, n: ml.while_loop(
            lambda t: (t[1] < 3) & (ml.sum(t[0]) < limit),
            lambda t: (f(t[0], w, n), t[1] + 1),
            (s, 0),
        )[0]

    def scan(f: Any, reverse: bool, checkpoint: bool) -> Any:
        def run(s: Any, w: Any, n: Any) -> Any:
            s, ys = ml.scan(
                lambda s, r: (f(s * r, w, n), s - r), s, w, reverse=reverse, checkpoint=checkpoint
            )
            return s + ys[1]

        return run

    def function(f: Any) -> Any:
        call = ml.subroutine(lambda s, w, n: f(s, w, n))
        return lambda s, w, n: call(s, w, n)

    return st.one_of(
        leaf,
        st.builds(lambda f, g: lambda s, w, n: g(f(s, w, n), w, n), inner, inner),
        st.builds(cond, inner, inner),
        st.builds(fori, inner, st.sampled_from([None, 0, 1, 3])),
        st.builds(loop, inner, st.sampled_from([0.5, 5.0])),
        st.builds(scan, inner, st.booleans(), st.booleans() if top else st.just(False)),
        st.builds(function, inner),
    )


@given(bodies(3), st.integers(0, 3), st.booleans(), st.booleans())
@settings(max_examples=40)
def test_any_nest_is_the_eager_one(body: Any, n: int, fuse: bool, recompute: bool) -> None:
    """In f64, and close: where a tensor enters a loop by several doors (its state, its rows, its
    body), the captured gradient has another order of sums."""
    eager = ml.value_and_grad(lambda s, w, n: ml.sum(body(s, w, n)), (0, 1))
    step = ml.capture(eager, fuse=fuse, recompute=recompute)
    for seed in (0, 1):
        args = *(ml.astype(vector(seed=k + seed), ml.float64) for k in (0, 5)), ml.asarray(n)
        for ours, theirs in zip(arrays(step(*args)), arrays(eager(*args)), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9 * np.abs(theirs).max())


# --- what is compiled ----------------------------------------------------------------


def cell(turns: int, *, gradient: bool = False) -> ml.Captured[..., Any]:
    """Capture a recurrent cell over `turns` rows."""

    def loss(w: ml.Tensor, xs: ml.Tensor) -> ml.Tensor:
        return ml.sum(ml.scan(lambda h, x: (ml.tanh(h @ w + x), None), ml.zeros((4,)), xs)[0])

    step = ml.capture(ml.grad(loss) if gradient else loss)
    step(ml.full((4, 4), 0.1), ml.ones((turns, 4)))
    return step


def test_a_program_does_not_grow_with_the_turns_nor_its_plan() -> None:
    short, many = cell(2), cell(500)
    assert len(short.program.main.code) == len(many.program.main.code)
    assert short.plan.nbytes == many.plan.nbytes
    short, many = cell(2, gradient=True), cell(500, gradient=True)
    assert len(short.program.main.code) == len(many.program.main.code)
    assert short.plan.nbytes < many.plan.nbytes  # which keeps what the way back needs


def test_nothing_is_left() -> None:
    vm = ml.VM("left")
    losses = [of_order(loss, 1) for _, loss in LOSSES.values()]

    def run() -> float:
        batch = ml.Arena(vm, "batch")
        steps = [ml.capture(loss) for loss in losses]
        for _ in range(2):
            with batch:
                for step in steps:
                    step(vector(), vector(seed=9), ml.asarray(2))
        batch.close()
        del step, steps
        gc.collect()
        return vm.consumed_size_in_mib()

    before = run()  # constants, keys and the stack of residuals stay
    assert run() == before


# --- what cannot be done again -------------------------------------------------------


def leaks(x: ml.Tensor, leaked: list[Any]) -> dict[str, Callable[[], Any]]:
    def keep(value: Any) -> Any:
        leaked.append(value)
        return value

    return {
        "of a turn": lambda: ml.fori_loop(0, 2, lambda i, s: keep(s * 2), x),
        "state": lambda: ml.fori_loop(0, 2, lambda i, s: keep(s) + 1, x),
        "number": lambda: ml.fori_loop(0, 2, lambda i, s: s + ml.astype(keep(i), "f32"), x),
        "row": lambda: ml.scan(lambda s, r: (s, keep(r) * 2), x, x),
        "branch": lambda: ml.cond(ml.sum(x) > 0, lambda: keep(x * 2), lambda: x),
        "condition": lambda: ml.while_loop(lambda s: keep(ml.sum(s)) < 5, lambda s: s * s + 1, x),
        "function": lambda: ml.subroutine(lambda y: keep(y * 2))(x),
    }


@pytest.mark.parametrize("name", leaks(ml.zeros(()), []))
@pytest.mark.parametrize("inside", [False, True])
def test_what_a_body_makes_cannot_be_used_outside(name: str, inside: bool) -> None:
    """Neither in the rest of the captured function, nor when it is kept."""
    leaked: list[Any] = []

    def step(x: ml.Tensor) -> Any:
        result = leaks(x, leaked)[name]()
        return (result, leaked[0] + 1) if inside else result

    message = "outside of it|was stored in" if name != "function" else "cannot use|was stored in"
    refuses(CaptureError, message, lambda: ml.capture(step)(vector()))


def test_a_value_that_numpy_reads_is_told_with_the_line_that_called_numpy() -> None:
    text = rf"{HERE}:\d+: cannot read a tensor's value inside.* Write ml.clip.x, 0, 1.$"
    with pytest.raises(CaptureError, match=text):
        ml.capture(lambda x: np.clip(x, 0, 1))(ml.ones(3))


def test_a_body_that_raises_has_changed_nothing() -> None:
    total = ml.zeros((3,))

    def step(x: ml.Tensor, fails: bool) -> Any:
        def body(i: ml.Tensor, s: ml.Tensor) -> ml.Tensor:
            ml.add(total, s, out=total)
            if fails:
                raise ZeroDivisionError
            return s * 2

        return ml.fori_loop(0, 2, body, x)

    captured = ml.capture(step)
    refuses(ZeroDivisionError, "", lambda: captured(ml.ones((3,)), True))
    assert total.numpy().tolist() == [0.0] * 3
    assert captured(ml.ones((3,)), False).numpy().tolist() == [4.0] * 3
    assert total.numpy().tolist() == [3.0] * 3


def added(x: ml.Tensor, y: Any) -> ml.Tensor:
    x += y
    return x


def with_row(x: ml.Tensor, i: ml.Tensor, row: ml.Tensor) -> ml.Tensor:
    x[i] = row
    return x


def of_sines(tree: Any) -> Any:
    return sum(ml.sum(ml.sin(x)) for x in tree)


def with_total(fn: Callable[[ml.Tensor], Any], start: ml.Tensor) -> ml.Tensor:
    """A tensor that the function, or what it calls, updates."""
    total = start * 1.0
    y = fn(total)
    return ml.sum(y) * total if isinstance(y, ml.Tensor) else total


# Functions of x and w that update what is outside of a body, with tensors that are tracked.
CARRIED: dict[str, Callable[[Any, Any], Any]] = {
    "state in a branch": lambda x, w: ml.fori_loop(0, 3, lambda i, s: ml.cond(
        ml.sum(s) > 0, lambda: added(s, w * s), lambda: s), x),
    "state in a branch, and after": lambda x, w: ml.fori_loop(0, 3, lambda i, s: ml.cond(
        i > 0, lambda: added(s, w), lambda: s * w) * s, x),
    "state in a loop": lambda x, w: ml.fori_loop(0, 3, lambda i, s: ml.fori_loop(
        0, 2, lambda j, t: added(s, w * t) * 1.5, s) + s, x),
    "row in a branch": lambda x, w: ml.scan(lambda s, r: (s * ml.cond(
        r > 0, lambda: added(r, ml.sum(s)), lambda: r * 2) + r, r), x, w)[0],
    "total": lambda x, w: with_total(lambda t: ml.fori_loop(
        0, 3, lambda i, s: added(t, s) * w, x), w),
    "total alone": lambda x, w: with_total(lambda t: [ml.fori_loop(
        0, 2, lambda i, s: added(t, s * s) * 0 + s, x)], ml.zeros_like(w)),
    "total in a branch in a loop": lambda x, w: with_total(lambda t: ml.scan(
        lambda s, r: ml.cond(r > 0, lambda: (added(t, s * r) * w, t), lambda: (s, s)), x, w)[1], w),
    "view": lambda x, w: with_total(lambda t: ml.fori_loop(
        0, 3, lambda i, s: added(ml.reshape(t, (1, 3)), s)[0] * t, x), w),
    "a part": lambda x, w: with_total(lambda t: ml.fori_loop(
        0, 3, lambda i, s: with_row(t, i, ml.sum(s)) * s, x), w),
    "a number": lambda x, w: with_total(lambda t: ml.while_loop(
        lambda s: ml.sum(t) < 9, lambda s: (added(t, ml.abs(s) + 1.0), s * w)[1], x), w),
    "total in the second branch": lambda x, w: with_total(lambda t: ml.cond(
        ml.sum(x) > 0, lambda: x * w, lambda: added(t, x * w) * 1.0), w),
    "total in the last branch in a loop": lambda x, w: with_total(lambda t: ml.fori_loop(
        0, 3, lambda i, s: ml.switch(i, [lambda: s, lambda: s * w, lambda: added(t, s)]), x), w),
    "two": lambda x, w: with_total(lambda t: with_total(lambda u: ml.fori_loop(
        0, 3, lambda i, s: added(t, added(u, s) * w), x), x), w),
}  # fmt: skip


@pytest.mark.parametrize("name", CARRIED)
def test_gradients_go_through_what_a_body_updates_outside_of_it(name: str) -> None:
    x, w = (ml.astype(vector(seed=k), ml.float64) for k in (1, 5))
    fn = CARRIED[name]
    assert bits(ml.capture(fn)(x, w)) == bits(fn(x, w))
    eager = ml.grad(lambda x, w: ml.sum(ml.sin(fn(x, w))), (0, 1))
    for step in (eager, ml.grad(lambda x, w: of_sines(eager(x, w)), (0, 1))):
        assert_close(ml.capture(step)(x, w), step(x, w), 1e-9, 1e-12)


def test_a_condition_that_updates_the_state_updates_none_of_the_loops() -> None:
    def fn(x: ml.Tensor) -> Any:
        return ml.while_loop(lambda s: ml.sum(added(s, 1.0)) < 40, lambda s: s * 1.5, x)

    x = ml.asarray([1.0, 2.0, 3.0])
    assert fn(x).tolist() == ml.capture(fn)(x).tolist() == [7.59375, 15.1875, 22.78125]


Update = Callable[[], object]
Around = Callable[[ml.Tensor, ml.Tensor, ml.Tensor, Update], Any]


def read(y: ml.Tensor, z: ml.Tensor) -> Any:
    return ml.sum(y) + 10.0 * ml.sum(z * z)


def turned(y: ml.Tensor, z: ml.Tensor, update: Update) -> Callable[[Any], Any]:
    """A body that reads both before the update and after it."""

    def body(c: Any) -> Any:
        before = read(y, z)
        update()
        return 0.5 * c + before + read(y, z)

    return body


def updated_in_cond(c: ml.Tensor, y: ml.Tensor, z: ml.Tensor, update: Update) -> Any:
    def branch(q: ml.Tensor) -> Any:
        q += 1.0
        return turned(y, z, update)(c) + ml.sum(q)

    first = ml.cond(c > 0.0, branch, lambda q: read(y, z), y)
    return ml.cond(c > 0.0, lambda: read(y, z), lambda: branch(y)) + first


def updated_in_nested(c: ml.Tensor, y: ml.Tensor, z: ml.Tensor, update: Update) -> Any:
    def body(i: ml.Tensor, c: Any) -> Any:
        w, own = +z, y * 2.0
        view = +own

        def inner(j: ml.Tensor, d: Any) -> Any:
            own.__iadd__(1.0)
            return turned(y, z, update)(d) + read(own, view) + ml.sum(w)

        return ml.fori_loop(0, 2, inner, c) + read(own, view) + ml.sum(w)

    return ml.fori_loop(0, 2, body, c)


def updated_in_function(c: ml.Tensor, y: ml.Tensor, z: ml.Tensor, update: Update) -> Any:
    double = ml.subroutine(lambda x: x * 2.0)

    @ml.subroutine
    def whole(c: ml.Tensor, w: ml.Tensor) -> Any:
        view = +w
        body = turned(w, view, lambda: (double(w), w.__iadd__(1.0))[0])
        return ml.fori_loop(0, 2, lambda i, s: double(body(s)), c) + read(w, view)

    return whole(c, y) + whole(c, z * 1.0)


AROUND: dict[str, Around] = {
    "fori": lambda c, y, z, u: ml.fori_loop(0, 3, lambda i, s: turned(y, z, u)(s), c),
    "while": lambda c, y, z, u: ml.while_loop(
        lambda s: s + ml.sum(z) * 0.01 < 900.0, turned(y, z, u), c
    ),
    "scan": lambda c, y, z, u: ml.sum(
        ml.scan(lambda s, r: (turned(y, z, u)(s), r + ml.sum(z)), c, y)[1]
    ),
    "map": lambda c, y, z, u: ml.sum(ml.map(turned(y, z, u), y)) + c,
    "cond": updated_in_cond,
    "switch": lambda c, y, z, u: ml.switch(
        ml.astype(c, "i64") + 1, [lambda: read(y, z), lambda: turned(y, z, u)(c)]
    ),
    "nested": updated_in_nested,
    "function": updated_in_function,
}
UPDATED: dict[str, Callable[[ml.Tensor, ml.Tensor], object]] = {
    "base": lambda y, z: y.__setitem__(0, y[1] + 1.0),
    "view": lambda y, z: z.__iadd__(1.0),
    "both": lambda y, z: (y.__imul__(0.5), z.__iadd__(1.0)),
}


@pytest.mark.parametrize("updated", UPDATED)
@pytest.mark.parametrize("name", AROUND)
def test_what_a_body_updates_beside_a_view_goes_from_turn_to_turn(name: str, updated: str) -> None:
    def fn(c: ml.Tensor, x: ml.Tensor) -> Any:
        y = x * 2.0
        z = ml.reshape(y, (1, 3))
        result = AROUND[name](c, y, z, lambda: UPDATED[updated](y, z))
        return result, y, z

    args = ml.ones(()), ml.asarray([1.0, 2.0, 3.0])
    assert bits(ml.capture(fn)(*args)) == bits(fn(*args))


@pytest.mark.parametrize("updated", UPDATED)
def test_what_a_gradient_keeps_is_updated_in_a_body(updated: str) -> None:
    def loss(w: ml.Tensor, x: ml.Tensor) -> Any:
        y = x * 2.0
        z = +y
        first = ml.sum(w * w * y)

        def body(i: ml.Tensor, c: Any) -> Any:
            before = ml.sum(w * y * z)
            UPDATED[updated](y, z)
            return 0.5 * c + before + ml.sum(w * w * z)

        def branch(q: ml.Tensor) -> Any:
            q *= 2.0
            UPDATED[updated](y, z)
            return ml.sum(q * w * y)

        after = ml.fori_loop(0, 3, body, first)
        return after + ml.cond(after > 0.0, branch, lambda q: ml.sum(q), y) + ml.sum(w * y * z)

    step = ml.value_and_grad(loss)
    args = ml.asarray([1.0, 2.0, 3.0]), ml.asarray([3.0, 2.0, 1.0])
    assert_close(ml.capture(step)(*args), step(*args), 1e-6)


def test_a_state_of_the_caller_is_updated_in_a_body_beside_its_views() -> None:
    def results(wrap: Callable[..., Any]) -> Any:
        state = ml.asarray([1.0, 2.0])
        outer = +state

        def fn() -> Any:
            inner = +state
            body = turned(state, inner, lambda: state.__iadd__(1.0))
            own = turned(outer, inner, lambda: outer.__imul__(2.0))
            return ml.fori_loop(0, 2, lambda i, c: own(body(c)), ml.zeros(())), inner

        step = wrap(fn)
        return [bits((step(), state, outer)) for _ in range(3)]

    assert results(ml.capture) == results(lambda fn: fn)


def test_a_body_updates_its_length_and_its_rows() -> None:
    def loss(w: ml.Tensor, rows: ml.Tensor, n: ml.Tensor) -> Any:
        rows, n, positive = rows * 2.0, n + 1, ml.ones((), dtype="bool")

        def turn(s: Any, row: ml.Tensor) -> Any:
            rows.__imul__(3.0)
            n.__iadd__(5)
            return s * w + row, row

        def branch() -> Any:
            positive.__iand__(False)
            return ml.sum(w * w)

        chosen = ml.cond(positive, branch, lambda: ml.sum(w))
        return ml.sum(ml.scan(turn, w, rows, n)[0]) + chosen

    step = ml.value_and_grad(loss)
    args = ml.ones((2,)) * 0.5, ml.asarray([1.0, 2.0, 3.0]), ml.asarray(1)
    assert bits(ml.capture(step)(*args)) == bits(step(*args))


@pytest.mark.parametrize("view", [ml.positive, lambda x: ml.reshape(x, (1, 3))])
def test_a_second_gradient_through_a_view_that_a_body_makes(view: Any) -> None:
    def loss(w: ml.Tensor) -> Any:
        y = w * w

        def body(c: Any) -> Any:
            q = view(+y)
            return c + ml.sum(q * q * view(w) * ml.stop_gradient(q))

        after = ml.fori_loop(0, 2, lambda i, c: body(0.1 * c), ml.sum(w))
        return ml.cond(after > 0.0, lambda: body(after), lambda: after)

    twice = ml.grad(lambda w: ml.sum(ml.sin(ml.grad(loss)(w))))
    x = ml.asarray([0.5, 0.2, 0.3])
    np.testing.assert_allclose(ml.capture(twice)(x), twice(x), rtol=1e-5)


# --- queues, files, pictures ---------------------------------------------------------


@pytest.mark.local(reason="a turn of a loop in a program takes an element")
def test_elements_of_queues() -> None:
    """One is taken at the beginning, others in the turns of a loop."""
    vm = ml.VM("queues")
    with ml.Arena(vm, "weights").allocating():
        q = ml.QueueTensor(vm, ["f32[2]", "i64[]"], 8)
        total = ml.zeros((2,))

        def step() -> Any:
            x, n = q.get()

            def body(i: ml.Tensor, s: ml.Tensor) -> ml.Tensor:
                y, _ = q.get()
                return s + y * 10.0

            result = ml.fori_loop(0, n, body, x)
            ml.add(total, result, out=total)
            return result

        def put(values: list[Any]) -> None:
            for value, n in values:
                with q.reserve() as (x, count):
                    x[...], count[...] = value, n

        for fuse in (False, True):
            captured = ml.capture(step, fuse=fuse)
            for values, expected in (([(1, 2), (2, 9), (3, 9)], 51.0), ([(4, 0)], 4.0)):
                put(values)
                assert captured().numpy().tolist() == [expected] * 2
                assert q.empty()
        assert total.numpy().tolist() == [110.0] * 2


def test_a_saved_step_runs_from_the_command_line(tmp_path: Path) -> None:
    w, table = vector(seed=9), np.arange(3, dtype=np.float32)

    def step(x: ml.Tensor, n: ml.Tensor) -> Any:
        def loss(x: ml.Tensor) -> Any:
            noise = ml.random.normal(3, key=ml.random.key(5)) + table[[0, 0, 2]]
            return ml.sum(LOSSES["scan in while"][1](x, w, n) * power(x, n) * noise)

        return ml.value_and_grad(loss)(x)

    captured = ml.capture(step)
    expected = bits(captured(vector(), ml.asarray(2)))
    captured.save(tmp_path / "step.mlvm")
    captured.plot(tmp_path / "step.svg")
    assert "<svg" in (tmp_path / "step.svg").read_text()
    np.save(tmp_path / "x.npy", vector().numpy())
    options = ["--arg", str(tmp_path / "x.npy"), "--arg", "i64[] 2", "--out", str(tmp_path)]
    assert main(["run", str(tmp_path / "step.mlvm"), *options]) == 0
    outputs = [np.load(tmp_path / f"{i}.npy") for i in range(2)]
    assert [(x + np.float32(0)).tobytes() for x in outputs] == [each for _, each in expected]


def test_an_optimizer_in_a_loop() -> None:
    """A captured loop of training steps leaves what as many eager steps leave."""

    def trained(wrap: Callable[..., Any], turns: ml.Tensor) -> list[Any]:
        ml.random.seed(3)
        layers: list[Any] = [ml.nn.Linear(3, 4), ml.tanh, ml.nn.Dropout(0.5), ml.nn.Linear(4, 1)]
        model = ml.nn.Sequential(*layers)
        optimizer = ml.optim.AdamW(model, 1e-2)

        def step(x: ml.Tensor, turns: ml.Tensor) -> ml.Tensor:
            def turn(i: ml.Tensor, last: ml.Tensor) -> ml.Tensor:
                def loss(model: Any) -> ml.Tensor:
                    return ml.mean((model(x) - ml.sum(x, axis=1, keepdims=True)) ** 2)

                value, gradients = ml.value_and_grad(loss)(model)
                optimizer.update(gradients)
                return value

            return ml.fori_loop(0, turns, turn, 0.0)

        value = wrap(step)(ml.reshape(vector(6), (2, 3)), turns)
        return [bits(value), bits(model), bits(optimizer.state()), ml.random.state().tolist()]

    expected = trained(lambda fn: fn, ml.asarray(4))
    assert trained(lambda fn: ml.capture(fn, fuse=False), ml.asarray(4)) == expected
    assert trained(ml.capture, ml.asarray(4)) == expected
