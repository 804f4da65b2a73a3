"""Captured calls are the eager ones: arguments, results, and what a function reaches by itself."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, Final

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.eager import nn, optim
from tests.brief import Fn, Patch, cases
from tests.eager.capture.table import Row, Run, Table, Wrap, tried

pytestmark = [
    pytest.mark.usefixtures("weights"),
    pytest.mark.filterwarnings("ignore::mlvm.eager.RecompilationWarning"),
]

ROWS: Final = Table()


# --- arguments -----------------------------------------------------------------------------


@ROWS.row()
def trees_of_arguments(wrap: Wrap) -> Iterator[Any]:
    draw = random.Random(5)
    x, reached = ml.ones(2), ml.ones(4)
    objects = [object(), nn.Linear(2, 2, key=ml.random.key(0))]
    pool = [x, ml.ones(2), ml.reshape(x, (2, 1)), ml.zeros(3), 1, 2, 1.5, True, "s", None, *objects]
    pool.append(reached)

    def some(depth: int = 2) -> Any:
        kind = draw.choice(["leaf", "leaf", "list", "tuple", "dict"] if depth else ["leaf"])
        if kind == "leaf":
            return draw.choice(pool)
        items = [some(depth - 1) for _ in range(draw.randrange(4))]
        if kind == "dict":
            return dict(
                zip(draw.sample(["a", "b", "c", 1, object], len(items)), items, strict=True)
            )
        return items if kind == "list" else tuple(items)

    def total(*args: Any) -> ml.Tensor:
        return sum([ml.sum(x) for x in args if isinstance(x, ml.Tensor)], ml.sum(reached))

    step = wrap(total)
    calls = [tuple(some() for _ in range(draw.randrange(1, 3))) for _ in range(120)]
    for args in calls:
        for each in (args, args, *draw.sample(calls, 2), args):
            yield step(*each)


@ROWS.row(programs=11)
def arguments_by_value(wrap: Wrap) -> Iterator[Any]:
    step, x = wrap(lambda x, how=None, **more: x * (2.0 if how else 1.0)), ml.ones(2)
    values = [None, True, 1, 1.0, "1", b"1", 0.0, -0.0, (1, 2), [1, 2], {"a": 1}, math.nan]
    for how in values * 2:
        yield step(x, how)


@ROWS.row(programs=2)
def arguments_by_name(wrap: Wrap) -> Iterator[Any]:
    step = wrap(lambda *xs, **named: xs[0] * named.pop("by") + len(named))
    for more in ({}, {}, {"k": 1}, {}, {"k": 1}):
        yield step(ml.ones(2), by=2.0, **more)


@ROWS.row(programs=6)
def types_and_structure(wrap: Wrap) -> Iterator[Any]:
    step = wrap(lambda tree: ml.sum(tree["x"] if isinstance(tree, dict) else tree[0]))
    x = ml.ones(2)
    trees: list[Any] = [[x], (x,), [ml.ones(3)], [ml.ones(2, dtype="f64")], {"x": x}, [x, 1]]
    for tree in trees * 3:
        yield step(tree)


@ROWS.row(is_in_c=True, programs=1)
def arrays_as_arguments(wrap: Wrap) -> Iterator[Any]:
    step, array, x = wrap(lambda x, y: x + y), np.ones(2, np.float32), ml.ones(2)
    for i in range(8):
        yield step(array * i, x)


@ROWS.row(programs=2)
def arrays_and_numbers_as_arguments(wrap: Wrap) -> Iterator[Any]:
    step, rows = wrap(lambda x, y, n: ml.sum(x * y, axis=0) ** n + y), np.ones((2, 3))
    for i in range(3):
        rows[:] = i
        for _ in range(2):
            yield step(rows, np.float64(i + 1), 2)
    yield step(rows, 3.0, 2)


@ROWS.row()
def containers_of_other_classes(wrap: Wrap) -> Iterator[Any]:
    class Named(list[ml.Tensor]):
        scale = 1.0

    def step(counts: Any, parts: Any) -> Any:
        return {"sum": counts["a"] + counts["missing"], "parts": parts, "scale": parts.scale}

    fn = wrap(step)
    for scale in (1.0, 2.0, 2.0):
        counts: Any = defaultdict(lambda: ml.ones(2), a=ml.ones(2))
        counts["missing"]
        parts = Named([ml.ones(2)])
        parts.scale = scale
        yield fn(counts, parts)
    yield wrap(lambda x: OrderedDict(a=x + 1.0))(ml.ones(2))


class Around:
    """Tensors of six elements to choose arguments from, two of them, `a` and `w`, with views, and
    a function of three arguments that reaches `w` by itself, too."""

    def __init__(self) -> None:
        self.w = ml.arange(6.0) + 30.0
        a, b = ml.reshape(ml.arange(6.0), (2, 3)) + 0.0, ml.arange(6.0) * 10.0
        flat, same = ml.reshape(a, (6,)), ml.stop_gradient(a)
        self.tensors = {"a": a, "flat a": flat, "same a": same, "b": b, "w": self.w}

    def step(self, a: ml.Tensor, b: ml.Tensor, c: ml.Tensor, updated: int | None) -> Any:
        def mixed() -> ml.Tensor:
            x, y, z = (ml.reshape(each, (6,)) for each in (a, b, c))
            return x - 2.0 * y + 4.0 * z + 8.0 * self.w

        before = mixed()
        if updated is not None:
            x = (a, b, c)[updated]
            x += 1.0
        return before, mixed(), a, {"rest": [c, b]}


def _patterns(updated: int | None) -> Run:
    def run(wrap: Wrap) -> Iterator[Any]:
        around = Around()
        step = wrap(around.step)
        patterns = list(itertools.product(around.tensors, repeat=3))
        for names in [*patterns, *patterns[::7]]:
            result = tried(step, *[around.tensors[name] for name in names], updated)
            if isinstance(result[0], type):  # an error
                yield result
                continue
            before, after, a, rest = result
            returned = [a, *rest["rest"]]
            yield [[k for k, x in around.tensors.items() if x is each] for each in returned]
            yield [x.tolist() for x in (before, after, *around.tensors.values())]

    return run


for _updated in (None, 0, 1, 2):
    ROWS[f"three arguments of every pattern, {_updated} updated"] = Row(
        _patterns(_updated), launches=None
    )


@ROWS.row()
def one_variable_twice(wrap: Wrap) -> Iterator[Any]:
    w, v = ml.ones(2), ml.ones(2) * 2.0

    def loss(tree: list[ml.Tensor]) -> ml.Tensor:
        return ml.sum(ml.cos(tree[1])) + ml.mean(tree[0] * tree[0])

    step = wrap(lambda a: list(ml.grad(loss)([a, w])))  # one variable twice, if a is w
    for a in (w, v, w, ml.reshape(w, (2,)), v):
        yield step(a)


@ROWS.row(programs=2)
def an_argument_that_the_optimizer_has(wrap: Wrap) -> Iterator[Any]:
    params, other = {"w": ml.ones(3)}, {"w": ml.ones(3)}
    opt = optim.SGD(params, 0.5)

    def step(weights: dict[str, ml.Tensor], x: ml.Tensor) -> Any:
        loss, grads = ml.value_and_grad(lambda p: ml.sum(p["w"] * x))(weights)
        opt.update(grads)
        return loss

    fn = wrap(step)
    for weights in (params, params, params, other):
        yield fn(weights, ml.ones(3)), params, other


# --- results -------------------------------------------------------------------------------


def _of_a_made_one(x: ml.Tensor, view: Callable[[ml.Tensor], ml.Tensor]) -> list[Any]:
    y = x * 2
    first = view(y)
    return [first, y, first, view(first), view(y)]


def _of_the_argument(x: ml.Tensor, view: Callable[[ml.Tensor], ml.Tensor]) -> list[Any]:
    first = view(x)
    return [first, x, first, view(x), x]


def _of_two(x: ml.Tensor, view: Callable[[ml.Tensor], ml.Tensor]) -> list[Any]:
    y, z = x * 2, x + 1
    return [view(z), view(y), z]


def _views(fn: Fn, view: Fn, build: Fn) -> Run:
    def run(wrap: Wrap) -> Iterator[Any]:
        step = wrap(lambda x: fn(x, view))
        for i in range(3):
            x = build(ml.arange(3.0) + i)
            yield x, step(x)

    return run


for _i, _each in enumerate(
    itertools.product(
        (_of_a_made_one, lambda x, view: [view(x * 2)], _of_the_argument, _of_two),
        (lambda y: ml.reshape(y, (3, 1)), ml.stop_gradient),
        (lambda x: x, ml.stop_gradient),
    )
):
    ROWS[f"results that are views of each other {_i}"] = Row(_views(*_each), programs=1)


@ROWS.row(programs=1)
def a_tree_of_results(wrap: Wrap) -> Iterator[Any]:
    state, inner = ml.ones(3), [1, "two", 3.0]

    def step(x: ml.Tensor, pair: Any) -> Any:
        nonlocal state
        y = x * 2
        state += y
        made = [y, (y, ml.reshape(y, (1, 3)))]
        around = (state, ml.reshape(state, (3, 1)))
        return {"x": x, "view": ml.reshape(x, (3, 1)), "made": made, "state": around,
                "of a tree": pair[1]["x"][0] + 1, "rest": (None, inner, 5)}  # fmt: skip

    fn = wrap(step)
    for i in range(3):
        x, z = ml.full(3, float(i)), ml.full(2, float(i))
        yield x, state, fn(x, (None, {"x": [z]}))


@ROWS.row()
def results_that_stay_alive(wrap: Wrap) -> Iterator[Any]:
    x, results = ml.asarray([1.0, 2.0]), []
    scale = wrap(lambda x: (x + x, x * x))
    for i in range(200):
        x[...] = float(i)
        results.append(scale(x))
    yield results


@ROWS.row()
def results_that_are_updated(wrap: Wrap) -> Iterator[Any]:
    step = wrap(lambda x: (ml.reshape(y := x * 2, (3, 1)), y))
    for _ in range(3):
        view, y = step(ml.ones((3,)))
        y += 1
        yield view, y
        view += 2
        yield view, y


@dataclasses.dataclass
class Report:
    rate: float


@ROWS.row()
def a_number_in_a_result_of_another_class(wrap: Wrap) -> Iterator[Any]:
    step = wrap(lambda x, a: (x * a, Report(a * 2)))
    for a in (0.5, 0.25, 0.125, 0.5):
        yield step(ml.ones(1), a)


@ROWS.row()
def objects_with_tensors_and_numbers_of_the_call(wrap: Wrap) -> Iterator[Any]:
    step = wrap(lambda x, k: [Report(x * k), (x.shape[0], k)])
    for n, k in ((2, 1.0), (3, 2.0), (4, 3.0), (5, 4.0)):
        yield step(ml.ones(n), k)


# --- what the function reaches -------------------------------------------------------------


@ROWS.row(programs=1, is_in_c=True)
def updates_happen_once_a_call(wrap: Wrap) -> Iterator[Any]:
    w, x = ml.zeros(3), ml.ones(3)

    def step(x: Any) -> Any:
        w[...] = w + x
        return ml.sum(w)

    fn = wrap(step)
    for _ in range(10):
        yield fn(x), w


@ROWS.row(launches=None)
def an_update_moves_where_a_view_needs_the_old_value(wrap: Wrap) -> Iterator[Any]:
    x, total = ml.ones(2), ml.zeros(2)

    def step(x: ml.Tensor) -> None:
        nonlocal total
        total += x

    fn, aliases = wrap(step), []
    for i in range(6):
        if i % 3 == 2:
            aliases.append(ml.reshape(total, (2, 1)))
        fn(x)
        yield total, aliases


@ROWS.row(launches=None)
def weights_and_inputs_seen_as_other_types(wrap: Wrap) -> Iterator[Any]:
    w, x = ml.asarray([1.0, 2.0, 3.0, 4.0]), ml.asarray([[1.0], [2.0]])
    step = wrap(lambda x: ml.reshape(w, (2, 2)) @ x + ml.reshape(x, (1, 2)))
    for _ in range(5):
        yield step(x)
    w[...] = w + 1.0  # in place
    yield step(x)
    view = ml.reshape(w, (4, 1))
    w[0] = 0.0  # moves, as the view needs the old bytes
    for _ in range(3):
        yield step(x), view, w


@ROWS.row(launches=None)
def what_it_reaches_moves(wrap: Wrap) -> Iterator[Any]:
    w, p, x = ml.reshape(ml.arange(4.0), (2, 2)), ml.ones((2,)), ml.ones((2,))
    q, reached = +p, +x
    steps = [
        (wrap(lambda x: x @ w), ml.ones((1, 2))),
        (wrap(lambda _: p + q * 10.0), x),
        (wrap(lambda x: ml.sum(x * reached)), x),
    ]
    for _ in range(4):
        for step, argument in steps:
            yield step(argument)
        w *= 10.0
        p += 1.0
        reached *= 5.0


@ROWS.row(launches=None)
def a_view_is_updated_and_its_base_is_not(wrap: Wrap) -> Iterator[Any]:
    step, x = wrap(lambda x: x.__iadd__(1.0) is None), ml.ones((3,))
    step(x)
    for _ in range(2):
        view = ml.stop_gradient(x)
        step(view)
        yield view, x
    step(x)
    yield x


def _under_both_names(updates_argument: bool) -> Run:
    def run(wrap: Wrap) -> Iterator[Any]:
        w, x = ml.ones((2,)), ml.ones((2,))

        def step(a: ml.Tensor) -> ml.Tensor:
            saved, updated = (w, a) if updates_argument else (a, w)

            def loss(p: ml.Tensor) -> ml.Tensor:
                y = ml.sin(saved * p)
                ml.add(updated, 1.0, out=updated)
                return ml.sum(y)

            return ml.grad(loss)(x)

        fn = wrap(step)
        for argument in [w, w] if updates_argument else [w, ml.reshape(w, (1, 2)), w]:
            yield fn(argument)
        fn(ml.ones((2,)))  # not what the function reaches by itself
        yield w

    return run


for _flag in (False, True):
    ROWS[f"an update that a gradient must not see, {_flag}"] = Row(_under_both_names(_flag))


@ROWS.row()
def an_operand_is_no_out_under_another_name(wrap: Wrap) -> Iterator[Any]:
    w, a = ml.asarray([2.0, 1.0]), ml.zeros((2,))
    step = wrap(lambda a: ml.sort(w, out=a) is a)
    for argument in (w, a, w, a):
        w[...] = ml.asarray([2.0, 1.0])
        step(argument)
        yield w, a


@ROWS.row()
def an_update_of_what_a_gradient_keeps(wrap: Wrap) -> Iterator[Any]:
    weights, x = ml.arange(3.0), ml.asarray([0.1, 0.5, -0.3])

    def in_place(x: ml.Tensor) -> ml.Tensor:
        y = ml.exp(x)
        y /= ml.sum(y)
        return ml.sum(y * weights)

    def through_out(x: ml.Tensor) -> ml.Tensor:
        y = ml.exp(x)
        z = x + y
        ml.tanh(x, out=y)
        return ml.sum(y * z)

    for loss in (in_place, through_out):
        step = wrap(ml.grad(loss))
        yield from [step(x) for _ in range(3)]


@ROWS.row()
def numbers_and_fields_that_change(wrap: Wrap) -> Iterator[Any]:
    x, scale = ml.ones(2), [2.0]
    by, named, times = (
        wrap(lambda x, by: x * by),
        wrap(lambda **d: ml.sum(*d.values())),
        wrap(lambda x: x * scale[0]),
    )
    for rate in (0.5, 0.5, 0.25, 0.5, 0.25):
        scale[0] = rate + 1.0
        yield by(x, rate), times(x), named(a=x), named(b=x)


@ROWS.row()
def a_learning_rate_that_changes(wrap: Wrap) -> Iterator[Any]:
    model, x = nn.Linear(2, 2, key=ml.random.key(1)), ml.ones(2)
    optimizer = optim.SGD(model, 0.5)
    step = wrap(lambda x: optimizer.update(ml.grad(lambda m: ml.sum(m(x)))(model)))
    for rate in (0.5, 0.5, 0.25, 0.125, 0.5):
        optimizer.learning_rate = rate
        step(x)
        yield model.kernel


@ROWS.row(launches=None)
def another_context_has_another_program(wrap: Wrap) -> Iterator[Any]:
    step, x = wrap(lambda x: x @ x), ml.ones((2, 2))
    for dtype in (None, None, "bfloat16", None, "bfloat16"):
        with ml.autocast(dtype) if dtype else nullcontext():
            yield step(x)


@ROWS.row(launches=None)
def another_vm_has_another_program(wrap: Wrap) -> Iterator[Any]:
    step, vm = wrap(lambda x: x * 2.0), ml.VM("other")
    for _ in range(3):
        yield step(ml.ones(2))
        with ml.use(vm), ml.Arena(vm, "other").allocating():
            yield step(ml.ones(2))


@ROWS.row(launches=None)
def a_captured_function_within_one(wrap: Wrap) -> Iterator[Any]:
    captured = wrap(lambda x: x * 2.0)
    inner = getattr(captured, "step", captured)
    steps = [wrap(lambda x: inner(x) + 1.0), wrap(lambda x: ml.grad(lambda y: ml.sum(inner(y)))(x))]
    for _ in range(3):
        yield [step(ml.ones(1)) for step in (*steps, inner)]


@ROWS.row()
def an_arena_entered_inside_for_temporaries(wrap: Wrap) -> Iterator[Any]:
    w = ml.ones(3)
    batch = ml.Arena(w.device, "temporaries")

    def step(x: ml.Tensor) -> None:
        nonlocal w
        with batch:
            w += x * 2

    fn = wrap(step)
    for _ in range(3):
        fn(ml.ones(3))
        yield w, batch.used


@ROWS.row(launches=None)
def hoisted_values_follow_updates(wrap: Wrap) -> Iterator[Any]:
    w, other, x = ml.full((4, 3), 2.0), ml.zeros(3), ml.ones((2, 4))
    forward, shrink, add = (
        wrap(lambda x: x @ ml.exp(w)),
        wrap(lambda factor: w.__imul__(factor) is None),
        wrap(lambda x: other.__iadd__(x) is None),
    )
    for i in range(20):
        if i % 3 == 0:
            shrink(ml.asarray(0.5))
        add(ml.ones(3))
        yield forward(x), other


@ROWS.row(programs=1)
def a_training_step_hoists_nothing_of_its_weights(wrap: Wrap) -> Iterator[Any]:
    key = ml.random.key(1)
    layers: list[Any] = [nn.Linear(4, 6, key=key), nn.BatchNorm(6), nn.Linear(6, 1, key=key)]
    model = nn.Sequential(*layers)
    optimizer = optim.SGD(model, 0.1)

    def train(x: ml.Tensor) -> ml.Tensor:
        loss, grads = ml.value_and_grad(lambda model, x: ml.mean(model(x) ** 2))(model, x)
        optimizer.update(grads)
        return loss

    step = wrap(train)
    for _ in range(6):
        yield step(ml.ones((3, 4))), model.named_parameters()


@ROWS.row(launches=None)
def functions_that_differ_in_the_sign_of_a_zero(wrap: Wrap) -> Iterator[Any]:
    w = ml.ones(3)
    for value in (0.0, -0.0):
        step = wrap(lambda x, value=value: x / ml.pad(w * 2.0, 1, value=value))
        yield from [step(ml.ones(5)) for _ in range(2)]


@ROWS.row()
def a_slice_has_the_value_before_a_later_write(wrap: Wrap) -> Iterator[Any]:
    def late(x: ml.Tensor) -> ml.Tensor:
        inner = x[1:-1]
        x[...] = x * 2.0
        return inner * 3.0

    def in_a_loop(x: ml.Tensor) -> ml.Tensor:
        def body(_: ml.Tensor, state: Any) -> Any:
            a, b = state
            inner = a[1:-1]
            return a + ml.pad(-inner, (2, 0)), b + ml.pad(ml.exp(-inner), (1, 1))

        return ml.fori_loop(0, 2, body, (x, x))[1]

    def loss(c: ml.Tensor, b: ml.Tensor) -> ml.Tensor:
        def body(_: ml.Tensor, state: Any) -> Any:
            c, b = state
            w = -b[1:]
            z = -w[1:]
            c = ml.copy(c)
            h = -c
            c[1:-1] = z - h[2:]
            return c, b

        c, b = ml.fori_loop(0, 1, body, (c, b))
        return ml.sum(c) + ml.sum(b)

    first, second, third = (wrap(fn) for fn in (late, in_a_loop, ml.grad(loss, argnums=(0, 1))))
    for _ in range(3):
        x = ml.arange(12.0, dtype="f64") + 1.0
        yield first(x), x, second(x), third(x, ml.ones(12, dtype="f64"))


# --- the table ------------------------------------------------------------------------------


@cases("fuse", True, False)
@pytest.mark.parametrize("name", ROWS)
def test_captured_calls_are_the_eager_ones(name: str, fuse: bool, monkeypatch: Patch) -> None:
    ROWS.check(name, monkeypatch, fuse=fuse)
