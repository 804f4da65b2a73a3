"""Captured functions whose arguments and results share memory: as in eager, to the object."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

import mlvm.eager as ml
from mlvm.core.errors import ArgumentError
from tests.brief import cases

pytestmark = pytest.mark.usefixtures("weights")


# --- arguments -------------------------------------------------------------------------


class Around:
    """Tensors of six elements to choose arguments from, two of them, `a` and `w`, with views, and
    a function of three arguments that reaches `w` by itself, too."""

    def __init__(self) -> None:
        self.w = ml.arange(6.0) + 30.0
        a, b = ml.reshape(ml.arange(6.0), (2, 3)) + 0.0, ml.arange(6.0) * 10.0
        self.tensors = {
            "a": a,
            "flat a": ml.reshape(a, (6,)),
            "same a": ml.stop_gradient(a),
            "b": b,
            "w": self.w,
        }

    def step(self, a: ml.Tensor, b: ml.Tensor, c: ml.Tensor, updated: int | None) -> Any:
        def mixed() -> ml.Tensor:
            x, y, z = (ml.reshape(each, (6,)) for each in (a, b, c))
            return x - 2.0 * y + 4.0 * z + 8.0 * self.w

        before = mixed()
        if updated is not None:
            x = (a, b, c)[updated]
            x += 1.0
        return before, mixed(), a, {"rest": [c, b]}


def outcome(call: Callable[..., Any], around: Around, names: tuple[str, ...], updated: Any) -> Any:
    """The values of what a call returns and of all tensors around, and which of these it returns;
    or that it is refused."""
    args = [around.tensors[name] for name in names]
    try:
        before, after, a, rest = call(*args, updated)
    except ArgumentError as error:
        return str(error)
    returned = [a, *rest["rest"]]
    which = [next(k for k, x in around.tensors.items() if x is each) for each in returned]
    return which, [x.tolist() for x in (before, after, *around.tensors.values())]


@pytest.mark.filterwarnings("ignore::mlvm.eager.RecompilationWarning")
@pytest.mark.parametrize("updated", [None, 0, 1, 2])
def test_three_arguments_of_every_pattern(updated: int | None) -> None:
    eager, captured = Around(), Around()
    step = ml.capture(captured.step)
    patterns = list(itertools.product(eager.tensors, repeat=3))
    for names in [*patterns, *patterns[::7]]:
        expected = outcome(eager.step, eager, names, updated)
        assert outcome(step, captured, names, updated) == expected, names


@pytest.mark.parametrize("updates_argument", [False, True])
def test_an_update_that_a_gradient_must_not_see_under_both_names(updates_argument: bool) -> None:
    w, x = ml.ones((2,)), ml.ones((2,))

    def step(a: ml.Tensor) -> ml.Tensor:
        saved, updated = (w, a) if updates_argument else (a, w)

        def loss(p: ml.Tensor) -> ml.Tensor:
            y = ml.sin(saved * p)
            ml.add(updated, 1.0, out=updated)
            return ml.sum(y)

        gradient: ml.Tensor = ml.grad(loss)(x)
        return gradient

    captured = ml.capture(step)
    results = []
    for fn in (step, captured):
        w *= 0.0
        w += 1.0
        for argument in [w] if updates_argument else [w, ml.reshape(w, (1, 2))]:
            results.append(fn(argument).tolist())
        fn(ml.ones((2,)))  # not what the function reaches by itself
        results.append(w.tolist())
    half = len(results) // 2
    assert results[:half] == results[half:]


def test_an_operand_is_no_out_under_another_name() -> None:
    w = ml.asarray([2.0, 1.0])

    def step(a: ml.Tensor) -> None:
        ml.sort(w, out=a)

    for fn in (step, ml.capture(step)):
        w[...] = ml.asarray([2.0, 1.0])
        fn(w)
        assert w.tolist() == [1, 2]
    w[...] = ml.asarray([2.0, 1.0])
    a = ml.zeros((2,))
    ml.capture(step)(a)
    assert a.tolist() == [1, 2]


def test_a_view_is_updated_and_its_base_is_not() -> None:
    @ml.capture
    def step(x: ml.Tensor) -> None:
        x += 1.0

    x = ml.ones((3,))
    step(x)
    for _ in range(2):
        view = ml.stop_gradient(x)
        step(view)
        assert (view.tolist(), x.tolist()) == ([3, 3, 3], [2, 2, 2])
    step(x)
    assert x.tolist() == [3, 3, 3]


# --- results ----------------------------------------------------------------------------


def structure(result: Any, x: ml.Tensor) -> Any:
    """Of each returned tensor the type, whether it is a view, and which object and which memory it
    is, counted from the argument on."""
    objects, roots = [id(x)], [id(x.root)]
    summary = []
    for y in result:
        for identities, each in ((objects, y), (roots, y.root)):
            if id(each) not in identities:
                identities.append(id(each))
        numbers = objects.index(id(y)), roots.index(id(y.root))
        summary.append((y.type, y.base is not None, *numbers, y.root.type, y.tolist()))
    return summary


def of_a_made_one(x: ml.Tensor, view: Callable[[ml.Tensor], ml.Tensor]) -> list[Any]:
    y = x * 2
    first = view(y)
    return [first, y, first, view(first), view(y)]


def of_the_argument(x: ml.Tensor, view: Callable[[ml.Tensor], ml.Tensor]) -> list[Any]:
    first = view(x)
    return [first, x, first, view(x), x]


def of_two(x: ml.Tensor, view: Callable[[ml.Tensor], ml.Tensor]) -> list[Any]:
    y, z = x * 2, x + 1
    return [view(z), view(y), z]


@cases("fn", of_a_made_one, lambda x, view: [view(x * 2)], of_the_argument, of_two)
@pytest.mark.parametrize("view", [lambda y: ml.reshape(y, (3, 1)), ml.stop_gradient])
@pytest.mark.parametrize("build", [lambda x: x, ml.stop_gradient])
def test_results_are_views_of_each_other_as_in_eager(fn: Any, view: Any, build: Any) -> None:
    step = ml.capture(lambda x: fn(x, view))
    for i in range(3):
        x = build(ml.arange(3.0) + i)
        assert structure(step(x), x) == structure(fn(x, view), x)


def test_what_was_returned_beside_a_view_of_it_is_updated() -> None:
    def step(x: ml.Tensor) -> Any:
        y = x * 2
        return ml.reshape(y, (3, 1)), y

    captured = ml.capture(step)
    for call in (step, captured, captured):
        view, y = call(ml.ones((3,)))
        y += 1
        assert view.tolist() == [[2], [2], [2]]
        view += 2
        assert (view.tolist(), y.tolist()) == ([[4], [4], [4]], [3, 3, 3])


# --- what a function reaches by itself is updated between two calls -----------------------


def test_a_view_that_it_reaches_moves() -> None:
    w = ml.reshape(ml.arange(4.0), (2, 2))
    step = ml.capture(lambda x: x @ w)
    x = ml.ones((1, 2))
    for _ in range(3):
        assert step(x).tolist() == (x @ w).tolist()
        w *= 10.0
    assert step.signatures <= 2


def test_the_base_of_a_view_that_it_reaches_moves() -> None:
    p = ml.ones((2,))
    q = +p
    step = ml.capture(lambda: p + q * 10.0)
    for i in range(3):
        assert step().tolist() == [11.0 + i, 11.0 + i]
        p += 1.0


def test_a_view_of_an_argument_that_it_reaches_moves() -> None:
    x = ml.ones((2,))
    reached = +x
    step = ml.capture(lambda x: ml.sum(x * reached))
    assert step(x).item() == 2.0
    reached *= 5.0
    assert step(x).item() == 10.0


def test_an_update_of_what_a_gradient_keeps() -> None:
    weights = ml.arange(3.0)

    def in_place(x: ml.Tensor) -> ml.Tensor:
        y = ml.exp(x)
        y /= ml.sum(y)
        return ml.sum(y * weights)

    def through_out(x: ml.Tensor) -> ml.Tensor:
        y = ml.exp(x)
        z = x + y
        ml.tanh(x, out=y)
        return ml.sum(y * z)

    x = ml.asarray([0.1, 0.5, -0.3])
    for loss in (in_place, through_out):
        assert ml.capture(ml.grad(loss))(x).tolist() == ml.grad(loss)(x).tolist()
