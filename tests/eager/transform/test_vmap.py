"""`vmap`: what it means, lane by lane, alone and with gradients, captures and control flow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import GradientError, PositionError
from mlvm.core.types import Array
from mlvm.eager.control.state import as_tree
from mlvm.eager.tensor.tensor import Tensor
from tests.brief import cases, refuses
from tests.trees import arrays, bits

X = np.array([[0.5, -1.0, 2.0], [1.5, 0.25, -0.5], [-0.75, 3.0, 0.0], [0.1, 0.2, 0.3]])
W = np.array([[1.0, 0.5, -0.25], [0.0, 2.0, 1.0], [-1.0, 0.75, 0.5]])
Lane = Callable[[Tensor, Tensor], Any]


def _power(x: Tensor, n: Tensor) -> Any:
    """x^n, by squares."""
    half = ml.subroutine(
        lambda x, n: ml.cond(
            n < 1.0, lambda x, n: ml.ones_like(x), lambda x, n: x * half(x, n - 1.0), x, n
        )
    )
    return half(x, n)


def _tree(x: Tensor, w: Tensor) -> Any:
    """A recursion with two calls, whose depth is a lane's own."""
    node = ml.subroutine(
        lambda x, depth: ml.cond(
            depth < 0.5,
            lambda x, depth: ml.sin(x),
            lambda x, depth: ml.tanh(node(w @ x, depth - 1.0) - node(x * 0.5, depth - 1.5)),
            x,
            depth,
        )
    )
    return node(x, ml.stop_gradient(ml.round(ml.abs(x[0]) * 2.0)))


def _even(x: Tensor, w: Tensor) -> Any:
    """Two functions that call each other."""
    even = ml.subroutine(
        lambda n: ml.cond(n < 1.0, lambda n: n + w[0, 0], lambda n: odd(n - 1.0) * 2.0, n)
    )
    odd = ml.subroutine(
        lambda n: ml.cond(n < 1.0, lambda n: n - w[1, 1], lambda n: even(n - 1.0) * 3.0, n)
    )
    return even(ml.abs(x[1]) * 3.0)


def _updated(x: Tensor, w: Tensor) -> Any:
    y = ml.zeros(3, dtype=ml.float64)
    y[1] = x[0]
    y += w[0]
    x[2] = 5.0
    return y * x


def _collatz(x: Tensor, w: Tensor) -> Any:
    def turn(state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        n, steps = state
        return ml.where(n % 2 == 0, n // 2, 3 * n + 1), steps + 1

    first = ml.astype(ml.abs(x[1]) * 10.0, ml.int64) + 1
    return ml.while_loop(lambda s: s[0] > 1, turn, (first, ml.asarray(0)))[1]


def _turns(x: Tensor) -> Any:
    return ml.astype(ml.abs(x[1]) * 2.0, ml.int64)


SMOOTH: dict[str, Lane] = {
    "indices": lambda x, w: w[ml.argsort(x)] * ml.sort(x),
    "own index": lambda x, w: x[ml.argmax(x)] * w[ml.argmin(x)],
    "reductions": lambda x, w: ml.softmax(x) * ml.std(w * x) + ml.logsumexp(x),
    "updated": _updated,
    "cond": lambda x, w: ml.cond(x[0] > 0.3, lambda x: ml.log(x[0]) * w[0], lambda x: x * 3.0, x),
    "switch": lambda x, w: ml.switch(
        ml.astype(x[2], ml.int64), [lambda x: x * w[0], ml.sin, lambda x: ml.exp(x) * w[1]], x
    ),
    "guarded index": lambda x, w: ml.cond(
        x[1] < 2.5, lambda x: ml.take(x, ml.astype(x[1], ml.int64), axis=0), lambda x: x[0] * 2.0, x
    ),
    "shared cond": lambda x, w: ml.cond(w[0, 0] > 0.0, lambda x: x * w[0], lambda x: w[1], x),
    "while": lambda x, w: ml.while_loop(
        lambda s: ml.sum(s * s) < 50.0, lambda s: s * 1.5 + ml.cos(s) * w[0], x
    ),
    "while of one": lambda x, w: ml.while_loop(
        lambda s: s[0] < 3.0, lambda s: (s[0] + 1.0, s[1] * ml.sin(s[1])), (w[0, 0], x)
    )[1],
    "while in cond": lambda x, w: ml.cond(
        x[0] > 0.0,
        lambda x: ml.while_loop(lambda s: s < 9.0, lambda s: s * 2.0 + w[0, 0], x[0]),
        lambda x: ml.fori_loop(0, 3, lambda i, s: s * w[0, 1] + x[1], x[2]),
        x,
    ),
    "fori": lambda x, w: ml.fori_loop(0, 3, lambda i, s: s * x[i] + w[i], x),
    "own turns": lambda x, w: ml.fori_loop(0, _turns(x), lambda i, s: s * 1.1 + w[0], x),
    "scan": lambda x, w: ml.scan(lambda s, r: (ml.tanh(w @ s + r), s[0]), x, x),
    "scan back": lambda x, w: ml.scan(lambda s, r: (s * r + w[0], s), x, w, reverse=True),
    "scan of lengths": lambda x, w: ml.scan(
        lambda s, r: (s * 0.5 + r, s), x, w, ml.minimum(_turns(x), ml.asarray(3))
    ),
    "function": lambda x, w: ml.subroutine(lambda x: ml.sin(x) * w[0])(x),
    "power": lambda x, w: _power(x, ml.stop_gradient(ml.round(ml.abs(x[1])))) * w[0],
    "tree": _tree,
    "mutual": _even,
    "checkpoint": lambda x, w: ml.checkpoint(lambda x: ml.sin(ml.exp(x)) * w[0])(x),
    "checked": lambda x, w: ml.cond(
        x[0] > 0.0, lambda x: (ml.check(x[0] > 0.0, "positive"), x * w[0])[1], lambda x: x, x
    ),
    "shared": lambda x, w: (w * 2.0, x),
    "grad": lambda x, w: ml.grad(lambda y: ml.sum(ml.sin(w @ y) * y))(x),
    "vmap": lambda x, w: ml.vmap(lambda row, y: ml.sum(row) * y * x, (0, None))(w, x),
}
OTHERS: dict[str, Lane] = {
    "integers": _collatz,
    "dropout": lambda x, w: ml.dropout(x, 0.5, key=ml.random.key(3)),
    "own keys": lambda x, w: ml.random.normal(
        2, key=ml.random.fold_in(ml.random.key(1), ml.astype(x[1] * 4, ml.int64))
    ),
    "numbers": lambda x, w: {"a": 1, "b": (None, 2.5, [True])},
}
BOTH = {**SMOOTH, **OTHERS}
CAPTURED = {"cond", "while", "while in cond", "scan of lengths", "tree", "own turns"}
"""Those whose gradients are captured."""


def _inputs() -> tuple[Tensor, Tensor]:
    return ml.asarray(X), ml.asarray(W)


def _stacked(rows: list[Any]) -> list[Array]:
    return [np.stack(column) for column in zip(*map(arrays, rows), strict=True)]


def _close(actual: Any, expected: list[Array], rounded: float = 1e-12) -> None:
    results = arrays(actual)
    assert [(x.shape, x.dtype) for x in results] == [(y.shape, y.dtype) for y in expected]
    for x, y in zip(results, expected, strict=True):
        np.testing.assert_allclose(x, y, rounded, rounded)


@pytest.mark.parametrize("name", BOTH)
def test_it_is_the_function_in_each_lane(name: str) -> None:
    fn, (x, w) = BOTH[name], _inputs()
    rows = [ml.asarray(row) for row in X]  # as a function may update its argument
    batched = ml.vmap(fn, (0, None))
    result = batched(x, w)
    _close(result, _stacked([as_tree(fn(row, w)) for row in rows]))
    _close(x, [X], 0.0)
    assert bits(ml.capture(batched)(x, w)) == bits(result)
    for n in (0, 1):
        part = batched(x[:n], w)
        _close(part, [y[:n] for y in arrays(result)])


def _total(tree: Any) -> Tensor:
    parts = [ml.sum(ml.sin(y)) for y in ml.tree.leaves(tree)]
    return sum(parts[1:], parts[0])


@pytest.mark.parametrize("name", SMOOTH)
def test_gradients_go_through_it_and_it_goes_over_gradients(name: str) -> None:
    fn, (x, w) = SMOOTH[name], _inputs()
    grads = ml.grad(lambda x, w: _total(fn(x, w)), argnums=(0, 1))
    of_x, of_w = _stacked([grads(ml.asarray(row), w) for row in X])
    over = ml.vmap(grads, (0, None))
    through = ml.grad(lambda x, w: _total(ml.vmap(fn, (0, None))(x, w)), argnums=(0, 1))
    if name in CAPTURED:
        over, through = ml.capture(over), ml.capture(through)
    _close(over(x, w), [of_x, of_w], 1e-9)
    _close(through(x, w), [of_x, of_w.sum(0)], 1e-9)


def test_second_derivatives_of_lanes() -> None:
    x, w = _inputs()

    hessian = ml.hessian(lambda x: _total(SMOOTH["cond"](x, w)))
    _close(ml.vmap(hessian)(x), _stacked([hessian(row) for row in x]), 1e-9)


@cases("name", "while of one", "power")
def test_records_of_lanes_within_lanes(name: str) -> None:
    """Each lane reads what it has kept: nested, and for second derivatives."""
    x, w = _inputs()
    slope = ml.grad(lambda x: _total(SMOOTH[name](x, w)))
    second = ml.grad(lambda x: ml.sum(ml.sin(slope(x))))
    pairs = ml.reshape(x, (2, 2, 3))
    expected = np.stack([second(row) for row in x])
    nested = ml.vmap(ml.vmap(slope))
    each = np.stack([slope(row) for row in x])
    _close(nested(pairs), [each.reshape(2, 2, 3)], 1e-9)
    assert bits(ml.capture(nested)(pairs)) == bits(nested(pairs))
    _close(ml.capture(ml.vmap(second))(x), [expected], 1e-9)
    outside = ml.grad(lambda x: ml.sum(ml.sin(ml.vmap(slope)(x))))
    _close(outside(x), [expected], 1e-9)
    refuses(GradientError, "take both gradients inside of vmap", ml.capture(outside), x)


# --- axes ------------------------------------------------------------------------------

# --- what lanes have of their own --------------------------------------------------------


def test_a_lane_is_not_refused_what_it_does_not_do() -> None:
    """Nor is there a nan in the gradient of a branch that it does not take."""
    x, square = ml.asarray(X), ml.asarray(W @ W.T)

    def root(x: Tensor) -> Tensor:
        return ml.sqrt(x[0]) * ml.linalg.det(ml.linalg.cholesky(x[0] * square))

    def fn(x: Tensor) -> Any:
        return ml.cond(x[0] > 0.0, root, lambda x: x[1], x)

    expected = [fn(row).numpy() for row in x]
    for run in (ml.vmap(fn), ml.capture(ml.vmap(fn))):
        np.testing.assert_allclose(run(x), expected, 1e-12)
    np.testing.assert_array_equal(ml.vmap(fn)(-ml.abs(x)), -np.abs(X[:, 1]))
    assert np.isfinite(ml.grad(lambda x: ml.sum(ml.vmap(fn)(x)))(x).numpy()).all()
    where_lanes_end = ml.vmap(
        lambda n, x: ml.while_loop(
            lambda s: s[0] < n,
            lambda s: (s[0] + 1, s[1] + ml.take(x, s[0], axis=0)),
            (0, 0.0 * x[0]),
        )[1]
    )
    counts = np.array([3, 0, 2, 1])
    result = where_lanes_end(ml.asarray(counts), x)
    _close(result, [np.array([X[i, :n].sum() for i, n in enumerate(counts)])])


def test_lanes_meet_by_the_name_of_their_axis() -> None:
    x, parallel = ml.asarray(X), ml.parallel

    def reduced(op: Any) -> Callable[[Tensor], Tensor]:
        def fn(x: Tensor) -> Tensor:
            parallel.all_reduce(x, op, axis_name="i")
            return x * (parallel.rank("i") + parallel.size("i"))

        return ml.vmap(fn, axis_name="i")

    factor = np.arange(4)[:, None] + 4
    for op in ("sum", "mean", "max", "min"):
        _close(reduced(op)(x), [getattr(np, op)(X, axis=0) * factor], 1e-12)
    gathered = ml.vmap(
        ml.vmap(lambda x: parallel.all_gather(x, axis_name="i"), axis_name="j"),
        axis_name="i",
        out_axes=None,
    )
    _close(ml.vmap(lambda x: gathered(x[:, None]), axis_name="k")(x[None]), [X.reshape(1, 1, 12)])

    def scattered(x: Tensor) -> Tensor:
        parallel.broadcast(x, 2, axis_name="i")
        return parallel.reduce_scatter(x, "sum", axis_name="i")

    _close(ml.vmap(scattered, axis_name="i")(x.T @ x), [3 * (X.T @ X)[2][:, None]])

    def normalized(x: Tensor) -> Tensor:
        mean = ml.copy(x)
        parallel.all_reduce(mean, "mean", axis_name="i")
        return ml.sin(x - mean)

    weights = ml.asarray(np.cos(X))
    through = ml.grad(lambda x: ml.sum(ml.vmap(normalized, axis_name="i")(x) * weights))
    _close(
        through(x), arrays(ml.grad(lambda x: ml.sum(ml.sin(x - ml.mean(x, axis=0)) * weights))(x))
    )

    def part(x: Tensor, w: Tensor) -> Tensor:
        return ml.sum(normalized(x) * w)

    _close(ml.vmap(ml.grad(part), axis_name="i")(x, weights), arrays(through(x)))
    moved = ml.vmap(lambda x: ml.jvp(normalized, (x,), (x,))[1], axis_name="i")
    _close(moved(x), arrays(ml.jvp(lambda x: ml.sin(x - ml.mean(x, axis=0)), (x,), (x,))[1]))


_WRAPS: tuple[Any, ...] = (lambda fn: fn, ml.capture)


_LOOPS: dict[str, Callable[[int, bool], Callable[[Tensor], Any]]] = {
    "fori": lambda n, again: (
        lambda x: ml.fori_loop(0, n, lambda i, s: ml.sin(s) * x, x, checkpoint=again)
    ),
    "scan": lambda n, again: (
        lambda x: ml.scan(
            lambda s, r: (ml.sin(s) * r * x, s), x, ml.arange(1.0, n + 1.0), checkpoint=again
        )[0]
    ),
    "while": lambda n, again: (
        lambda x: ml.while_loop(
            lambda s: ml.sum(s) < 3.0 * n - 4.0, lambda s: s * s * 0.7 + 1.0, x, checkpoint=again
        )
    ),
}


def test_a_tensor_that_is_being_made_disturbs_no_trace() -> None:
    """As another thread, or a call that has failed, leaves it on the same VM."""
    x = ml.asarray([0.3, 0.5])
    unfinished = x.arena.view(x, x.type, Tensor)
    assert not hasattr(unfinished, "tape")
    assert ml.jacfwd(_LOOPS["while"](3, False))(x).shape == (2, 2)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("turns", [0, 3])
@pytest.mark.parametrize("kind", _LOOPS)
def test_loops_of_any_turns_go_through_jacobians(kind: str, turns: int, again: bool) -> None:
    fn = _LOOPS[kind](turns, again)
    plain = _LOOPS[kind](turns, False)
    x = ml.asarray([0.3, 0.5])
    lanes = ml.stack([x, x * 1.25, x + 0.125])  # whose loops push records inside and outside
    first = ml.jacfwd(plain)(x).numpy()

    def plain_total(x: Tensor) -> Any:
        return ml.sum(plain(x))

    second = ml.jacfwd(ml.grad(plain_total))(x).numpy()
    jacobian, total = ml.jacrev(fn), ml.grad(lambda x: ml.sum(fn(x)))
    for wrap in _WRAPS:
        for result, expected in (
            (wrap(jacobian)(x), first),
            (wrap(ml.vmap(jacobian))(lanes)[0], first),
            (wrap(ml.vmap(total))(lanes)[0], first.sum(0)),
            (wrap(ml.hessian(lambda x: ml.sum(fn(x))))(x), second),
            (wrap(ml.jacrev(total))(x), second),
            (wrap(ml.vmap(ml.jacrev(total)))(lanes)[0], second),
            (wrap(ml.grad(lambda x: ml.sum(jacobian(x))))(x), second.sum(0)),
        ):
            np.testing.assert_allclose(result.numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.local(reason="an error that comes late names the line of the launch")
@pytest.mark.parametrize("wrap", _WRAPS)
def test_an_index_error_tells_the_lane_and_the_position_in_it(wrap: Any) -> None:
    def first_refused(fn: Any, *args: Any) -> str:
        caught = refuses(PositionError, "", lambda: wrap(fn)(*args))
        return str(caught)

    x, i = ml.ones((2, 3)), ml.asarray([[0, 1], [2, 7]])
    text = "take(f32[3], i64[2]): index 7 at position [1] of lane 1 is out of range for length 3"
    assert first_refused(ml.vmap(ml.take), x, i) == text
    assert first_refused(ml.vmap(ml.take, in_axes=(None, 0)), x[0], i) == text
    text = text.replace(" of lane 1", "")
    assert first_refused(ml.vmap(ml.take, in_axes=(0, None)), x, i[1]) == text
    nested = ml.vmap(ml.vmap(lambda x, k: x[k]))
    text = "index 7 of lane [1, 1] is out of range for length 3"
    assert text in first_refused(nested, ml.ones((2, 2, 3)), i)


def test_a_gradient_through_vmap_of_a_function_has_the_same_bits_captured() -> None:
    twice = ml.subroutine(lambda a: (lambda y: (y, y * ml.sin(y)))(ml.exp(a) * a))

    def total(x: ml.Tensor) -> ml.Tensor:
        def lane(r: ml.Tensor) -> Any:
            first, second = twice(r)
            return first * r + second * first * ml.cos(r)

        return ml.sum(ml.vmap(lane)(x))

    x = ml.asarray(np.random.default_rng(0).normal(size=64).astype(np.float32))
    gradient = ml.grad(total)
    assert ml.capture(gradient)(x).tolist() == gradient(x).tolist()


@pytest.mark.local(reason="an error that comes late names the line of the launch")
@pytest.mark.parametrize("wrap", _WRAPS)
@pytest.mark.parametrize("pick", [lambda x, i: x[i], lambda x, i: _set(x, i)])
def test_an_index_error_has_the_index_length_and_line_of_the_function(wrap: Any, pick: Any) -> None:
    call, text = wrap(ml.vmap(pick)), r"index 9 .*range for length 7"
    indices = ml.asarray([1, 2, 3, 9])
    raised = refuses(ml.errors.PositionError, text, call, ml.ones((4, 7)), indices)
    line = pick.__code__.co_firstlineno if pick(ml.ones(7), ml.asarray(0)).ndim == 0 else _SET_LINE
    assert any(f"test_vmap.py:{line}" in note for note in raised.__notes__)
    assert "f32[7]" in map(str, raised.operands)  # as the function has it, for one element


def _set(x: Tensor, i: Tensor) -> Tensor:
    x[i] = 0.0
    return x


_SET_LINE = _set.__code__.co_firstlineno + 1
