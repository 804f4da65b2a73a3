"""grad, value_and_grad and vjp: structure, nesting, errors, updates in place, memory, threads."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.arena.arena import Arena
from mlvm.arena.context import current
from mlvm.core.errors import GradientError, ShapeError
from mlvm.eager.autodiff import tape as tapes
from mlvm.eager.autodiff.grad import grad, value_and_grad, vjp
from mlvm.eager.autodiff.tape import Tape
from mlvm.eager.functions.creation import ones, zeros
from mlvm.eager.functions.elements import stop_gradient
from mlvm.eager.functions.shapes import reshape
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.context import default_vm
from mlvm.eager.tensor.tensor import Tensor, from_array
from mlvm.eager.tensor.update import live_tapes
from tests.brief import Patch, cases, refuses
from tests.slopes import check_slopes
from tests.threads import in_threads


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    yield
    assert current().tape is None
    assert not any(isinstance(tape, Tape) and tape.nodes for tape in live_tapes)


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena(default_vm(), "test") as arena:
        yield arena


def tensor(value: object) -> Tensor:
    return from_array(np.asarray(value, np.float64))


def lists(tree: Any) -> Any:
    """The tree with nested lists of numbers as leaves."""
    if isinstance(tree, Tensor):
        return tree.numpy().tolist()
    if isinstance(tree, dict):
        return {name: lists(child) for name, child in tree.items()}
    return None if tree is None else [lists(child) for child in tree]


# --- arguments and results -------------------------------------------------------------

model = ml.nn.Linear(2, 1)


def _of_the_global(argument: ml.nn.Module, x: ml.Tensor) -> ml.Tensor:
    return ml.sum(model(x))


def test_a_gradient_that_reaches_no_parameter_says_so() -> None:
    x = ml.ones((3, 2))
    local = ml.nn.Linear(2, 1)
    losses: list[tuple[Callable[..., ml.Tensor], ml.nn.Module, str]] = [
        (_of_the_global, model, "_of_the_global reads the global variable 'model'"),
        (lambda m, x: _of_the_global(m, x), model, "<lambda> reads the global variable 'model'"),
        (lambda m, x: ml.sum(local(x)), local, "reads the local variable 'local'"),
        (_of_the_global, local, "_of_the_global does not use its argument"),
        (lambda m, x: ml.sum(ml.stop_gradient(m(x))), local, "zero"),
    ]
    for loss, seed, text in losses:
        for differentiated in (
            ml.grad(loss),
            ml.parallel.value_and_grad(loss),
            ml.capture(grad(loss)),
        ):
            with pytest.warns(ml.NoEffectWarning, match=text) as caught:
                differentiated(seed, x)
            assert [each.filename for each in caught] == [__file__]


def test_a_gradient_of_members_that_reaches_no_parameter_says_so() -> None:
    def member(rank: int, vm: object) -> None:
        net = ml.nn.Linear(2, 1)
        ml.parallel.value_and_grad(lambda m: ml.sum(net(ml.ones((3, 2)))))(net)

    with ml.parallel.Group(2) as group, pytest.warns(ml.NoEffectWarning, match="'net'") as caught:
        group.run(member)
    assert [each.filename for each in caught] == [__file__] * 2


def test_a_gradient_that_reaches_some_parameters_says_nothing() -> None:
    x, net = ml.ones((3, 2)), ml.nn.Sequential(ml.nn.Linear(2, 2), ml.nn.Linear(2, 1))
    grad(lambda net: ml.sum(net[0](x)))(net)
    grad(lambda net: ml.sum(net[0](x)), where="layers_0/bias")(net)
    grad(lambda both: ml.sum(both[0](x)))([net[0], net[1]])
    grad(lambda net: ml.sum(grad(lambda net: ml.sum(net[0](x)))(net)["layers_0"]["kernel"]))(net)
    with pytest.warns(ml.NoEffectWarning):
        grad(lambda net: ml.sum(net[0](x)), where="layers_1*")(net)


def test_a_lost_gradient_of_a_result_of_any_shape_says_so() -> None:
    def lost(x: ml.Tensor) -> ml.Tensor:
        return (x > 0.0) * 1.0

    for derivative in (ml.jacrev(lost), lambda x: ml.vjp(lost, x)):
        with pytest.warns(ml.NoEffectWarning, match="zero: lost uses its argument only through"):
            derivative(ml.ones(3))
    ml.hessian(lambda x: ml.sum(ml.relu(x)))(ml.ones(3))  # a constant gradient: no warning
    for constant in (ml.jacfwd(ml.relu), ml.vmap(ml.vmap(ml.grad(ml.relu)))):
        ml.jacrev(constant)(ml.ones((1, 3)))


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


def test_gradients_have_the_structure_of_their_arguments() -> None:
    def loss(tree: Any) -> Any:
        return tree["a"] * tree["b"][0] + tree["c"].first * 2.0 + tree["b"][1][0] * tree["a"]

    tree = {
        "a": tensor(3.0),
        "b": [tensor(5.0), (tensor(7.0), tensor(0.0))],
        "c": Pair(tensor(1.0), tensor(1.0)),
        "d": None,
    }
    gradient = grad(loss)(tree)
    assert lists(gradient) == {"a": 12.0, "b": [3.0, [3.0, 0.0]], "c": [2.0, 0.0], "d": None}
    assert isinstance(gradient["c"], Pair)


def test_gradients_share_no_memory() -> None:
    a, b = grad(lambda a, b: op.sum(a + b), (0, 1))(tensor([1.0]), tensor([1.0]))
    a *= 2.0
    assert lists([a, b]) == [[2.0], [1.0]]
    cotangent = tensor([1.0, 2.0])
    [reshaped] = vjp(lambda x: reshape(x, (2,)), tensor([[1.0, 1.0]]))[1](cotangent)
    reshaped *= 2.0
    assert lists(cotangent) == [1.0, 2.0]
    [own] = vjp(lambda x: reshape(x * 1.0, (2,)), tensor([[1.0, 1.0]]))[1](cotangent)
    own *= 2.0
    assert lists(own) == [[2.0, 4.0]]


def test_a_variable_that_occurs_twice_has_one_gradient() -> None:
    x, y = tensor(3.0), tensor(5.0)
    gradient = grad(lambda tree: tree["a"] * tree["b"][0])({"a": x, "b": [x], "c": [y, y]})
    assert gradient["a"] is gradient["b"][0]
    assert gradient["c"][0] is gradient["c"][1]
    assert lists(gradient) == {"a": 6.0, "b": [6.0], "c": [0.0, 0.0]}


# --- vjp and stop_gradient -------------------------------------------------------------


def test_a_pullback_ends_with_the_gradient_around_it() -> None:
    escaped = []

    def loss(x: Tensor) -> Tensor:
        value, pullback = vjp(lambda y: y * y, x)
        escaped.append(pullback)
        return value

    assert lists(grad(loss)(tensor(3.0))) == 6.0
    refuses(GradientError, r"f64\[\]: its tape was deleted", escaped[0], tensor(1.0))


# --- gradients of gradients ------------------------------------------------------------


def test_an_inner_error_that_is_caught_leaves_the_outer_gradient_intact() -> None:
    def loss(x: Tensor) -> Tensor:
        refuses(GradientError, "", lambda: grad(lambda y: op.floor(y) * x)(x))
        return x * x

    assert lists(grad(loss)(tensor(3.0))) == 6.0


# --- parts of a tensor -------------------------------------------------------------------

TURNS = 4
_rng = np.random.default_rng(3)
PARTS: dict[str, Callable[[Any, int], Any]] = {
    "x[t]": lambda x, t: x[t],
    "x[t:t+2]": lambda x, t: x[t : t + 2],
    "x[:, i]": lambda x, t: x[:, t % 5],
    "x[::-1]": lambda x, t: x[::-1, ::2],
    "x[[..]]": lambda x, t: x[_chosen(x, t)],
    "x[:, [..]]": lambda x, t: x[:, _chosen(x, t) % 5],
    "x[t] and x": lambda x, t: x[t] * 2.0 if t % 3 else x[t] + x,
    "x[t] of x[t]": lambda x, t: x[t : t + 3][0] * x[t],
}


def _chosen(x: Any, t: int) -> Any:
    indices = np.array([[t, 0], [t, t]])
    return ml.asarray(indices) if isinstance(x, Tensor) else indices


def _of_parts(part: Callable[[Any, int], Any], x: Tensor) -> Tensor:
    """Return a sum to which every part adds in another way, so that its cotangents differ."""
    total = op.sum(x[:1] * 0.0)
    for t in range(TURNS):
        y = part(x, t)
        total = total + op.sum(op.sin(y * (1.0 + t)))
    return total


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_a_large_tensor_add_up_in_one_cotangent(name: str) -> None:
    x = tensor(_rng.normal(size=(TURNS + 2, 5, 900)))  # more than _WORTH_UPDATING
    check_slopes(lambda x: _of_parts(PARTS[name], x), x)


@pytest.mark.parametrize("name", PARTS)
def test_parts_have_gradients_of_any_order(name: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr(tapes, "_WORTH_UPDATING", 0)
    x = tensor(_rng.normal(size=(TURNS + 2, 5)) * 0.3)
    check_slopes(lambda x: _of_parts(PARTS[name], x), x, order=3)


def test_no_other_reader_of_a_cotangent_sees_it_change(monkeypatch: Patch) -> None:
    """A cotangent that has another reader is copied before a part is added to it."""
    monkeypatch.setattr(tapes, "_WORTH_UPDATING", 0)
    c = tensor([1.0, 2.0, 3.0, 4.0])

    def twice(x: Tensor, y: Tensor) -> Tensor:  # the seed is y's cotangent, and x's first part
        parts = op.concat(x[:2] * 1.0, x[2:] * 10.0, axis=0)
        return parts + (x + y)

    _, pullback = vjp(twice, tensor(np.zeros(4)), tensor(np.zeros(4)))
    for _ in range(2):
        assert lists(list(pullback(c))) == [[2.0, 4.0, 33.0, 44.0], [1.0, 2.0, 3.0, 4.0]]
        assert lists(c) == [1.0, 2.0, 3.0, 4.0]

    cotangents: list[Tensor] = []

    def keep(g: Tensor, x: Tensor, out: Tensor) -> Tensor:
        cotangents.append(g)
        return g

    def through(x: Tensor) -> Tensor:
        y = ml.host_call("copy", x, vjp=keep)
        return op.sum(y[:2] * 3.0) + op.sum(y[1:] * 5.0) + op.sum(x[2:] * 7.0 + x[:2])

    gradient = grad(through)(tensor(np.zeros(4)))
    assert lists(gradient) == [4.0, 9.0, 12.0, 12.0]
    assert lists(cotangents) == [[3.0, 8.0, 5.0, 5.0]]


def test_a_pullback_of_its_own_value_is_no_update_of_it(monkeypatch: Patch) -> None:
    monkeypatch.setattr(tapes, "_WORTH_UPDATING", 0)
    value, pullback = vjp(lambda x: x[:2] + x[1:], tensor([1.0, 2.0, 3.0]))
    assert lists(list(pullback(value))) == [[3.0, 8.0, 5.0]]


def test_many_slices_need_one_cotangent(arena: Arena) -> None:
    x = tensor(np.ones((50, 2000)))

    def loss(x: Tensor) -> Tensor:
        return op.sum(sum((x[t] for t in range(1, 50)), x[0]))

    loss(x)  # its constants
    before = arena.high_water = arena.used
    grad(loss)(x)
    assert arena.high_water - before < 1.2 * x.nbytes


# --- errors ----------------------------------------------------------------------------


def _raise(_: Tensor) -> Tensor:
    raise ZeroDivisionError("by design")


@cases(
    "function, error, match",
    (
        lambda x: x * 2.0,
        GradientError,
        r"expected a float scalar to differentiate, got f64\[3\]; take ml.sum",
    ),
    (lambda x: 1.0, GradientError, "got the number 1.0; return a loss that functions of ml"),
    (lambda x: op.argmax(x), GradientError, r"got i64\[\]"),
    (lambda x: op.sum(op.floor(x)), GradientError, r"^floor\(f64\[3\]\) has no gradient for x"),
    (lambda x: op.sum(x + tensor([1.0, 2.0])), ShapeError, "do not broadcast"),
    (_raise, ZeroDivisionError, "by design"),
)
def test_an_error_leaves_nothing_behind(
    arena: Arena, function: Callable[[Tensor], Any], error: type[Exception], match: str
) -> None:
    x = tensor([1.0, 2.0, 3.0])
    used = arena.used
    refuses(error, match, lambda: grad(function)(x))
    assert current().tape is None
    assert not any(isinstance(tape, Tape) and tape.nodes for tape in live_tapes)
    assert arena.used == used


def test_an_error_in_vjp_leaves_nothing_behind(arena: Arena) -> None:
    x = tensor([1.0, 2.0, 3.0])
    used = arena.used
    for function in (_raise, op.argmax):
        raised = refuses((ZeroDivisionError, GradientError), "", vjp, function, x)
        assert not any(isinstance(tape, Tape) and tape.nodes for tape in live_tapes)
        del raised
    assert arena.used == used


@pytest.mark.local(reason="arrays stand for tensors of this process alone")
def test_arrays_and_numbers_stand_for_tensors() -> None:
    def cubed(x: Any) -> Any:
        return ml.sum(x**3)

    array = np.array([1.0, -2.0])
    gradient = grad(cubed)(array)
    np.testing.assert_array_equal(gradient.numpy(), 3 * array**2, strict=True)
    np.testing.assert_array_equal(array, [1.0, -2.0])
    value, slope = value_and_grad(cubed)(2.0)
    assert [str(x.type) for x in (value, slope)] == ["f32[]", "f32[]"]
    assert (float(value), float(slope)) == (8.0, 12.0)
    assert [float(x) for x in grad(lambda p: p["a"] * p["b"][0])({"a": 3.0, "b": [5.0]})["b"]] == [
        3
    ]
    same = np.float32(3.0)  # an object in two places is two variables, unless it is a tensor
    assert [float(x) for x in grad(lambda x: x[0] ** 2 * x[1])([same, same])] == [18.0, 9.0]
    assert grad(lambda x: ml.real(x * x))(1j).dtype is ml.complex64
    assert [x.tolist() for x in grad(lambda x, y: x * y, (0, 1))(2.0, np.float32(7.0))] == [
        7.0,
        2.0,
    ]
    value, pullback = vjp(lambda x, y: x * y, 2.0, np.array([3.0, 4.0]))
    for seed in ([1.0, 1.0], np.ones(2, np.float32), ml.ones(2, dtype=value.dtype)):
        assert [x.tolist() for x in pullback(seed)] == [7.0, [2.0, 2.0]]
    assert vjp(ml.sin, 0.0)[1](1.0)[0].tolist() == 1.0


@cases(
    "item",
    float,
    int,
    bool,
    round,
    math.sqrt,
    lambda x: x.item(),
    lambda x: x.tolist(),
    lambda x: abs(complex(x)),
    lambda x: 3.0 if x else 0.0,
    lambda x: float("%.2f" % x),  # noqa: UP031  format is something else
)
def test_no_gradient_is_lost_in_a_number_of_python(item: Any) -> None:
    """It was: d/dx of x * float(x) came out as x."""
    x = ml.asarray(4.0)
    remedy = r"Python numbers are constants, but .* this f32\[\]: .*has_aux=True"
    refuses(ml.errors.GradientError, remedy, ml.grad(lambda x: x * item(x)), x)
    refuses(ml.errors.GradientError, remedy, ml.grad(ml.grad(lambda x: x * x * item(x))), x)
    constant = ml.grad(lambda x: x * item(ml.stop_gradient(x)))(x)
    assert constant.item() == item(x)
    (_, aux), _ = ml.value_and_grad(lambda x: (x * x, item(ml.stop_gradient(x))), has_aux=True)(x)
    assert aux == item(x)


def test_what_python_decides_and_prints_needs_no_gradient() -> None:
    """A comparison is of bools, through which none goes; text is not computed with."""
    texts = []

    def fn(x: ml.Tensor, n: ml.Tensor) -> ml.Tensor:
        texts.append(f"{x:.1f} {x} {x!r}")
        total = x * int(n)
        while total < 10 and not ml.isnan(total):
            total = total * x
        return max(total, x) if ml.all(total > 0) else min(total, x)

    assert ml.grad(fn)(ml.asarray(2.0), ml.asarray(3)).item() == 3 * 2 * 2
    assert texts == ["2.0 Tensor(2., f32[]) Tensor(2., f32[])"]


# --- updates in place ------------------------------------------------------------------


def test_the_tape_keeps_the_old_value_of_what_is_updated() -> None:
    w, b = tensor([1.0, 2.0]), tensor([3.0, 4.0])

    def needs_b(w: Tensor) -> Tensor:
        nonlocal b
        y = w * b
        b *= 2.0
        view = reshape(b, (2, 1))
        view *= 2.0
        return op.sum(y) + op.sum(view)

    assert lists(grad(needs_b)(w)) == [3.0, 4.0]
    assert lists(b) == [6.0, 8.0]


def test_gradients_go_through_updates_of_tracked_tensors_and_not_of_their_views() -> None:
    def loss(x: Tensor) -> Tensor:
        y = x * 3.0
        view = stop_gradient(y)
        y *= y
        view *= 2.0
        y += view
        return y

    assert lists(value_and_grad(loss)(tensor(1.0))) == [15.0, 18.0]


def test_a_pullback_keeps_its_values_when_they_are_updated() -> None:
    w = tensor([1.0, 2.0])
    value, pullback = vjp(op.square, w)
    w += 1.0
    value *= 0.0
    assert lists(pullback(tensor([1.0, 1.0]))) == [[2.0, 4.0]]
    assert lists([w, value]) == [[2.0, 3.0], [0.0, 0.0]]


def test_what_one_tape_keeps_another_does_not_release() -> None:
    w, x = tensor([1.0, 2.0]), tensor([3.0, 4.0])
    _, pullback = vjp(lambda x: op.sum(x * w), x)
    grad(lambda x: op.sum(x * w))(x)
    w *= 10.0
    assert lists(pullback(tensor(1.0))) == [[1.0, 2.0]]


def test_a_value_that_is_an_argument_has_memory_of_its_own() -> None:
    x = tensor([1.0])
    value, pullback = vjp(lambda x: x, x)
    value += 1.0
    assert lists(pullback(tensor([3.0]))) == [[3.0]]
    y = tensor(1.0)
    value, gradient = value_and_grad(lambda y: y)(y)
    value += 1.0
    (value, aux), _ = value_and_grad(lambda y: (y, "aux"), has_aux=True)(y)
    value += 1.0
    closed, _ = value_and_grad(lambda _: y)(y)
    closed += 1.0
    assert (lists([x, y, gradient]), aux) == ([[1.0], 1.0, 1.0], "aux")
    second = grad(lambda y: value_and_grad(lambda y: y)(y)[0] ** 2)
    assert lists(second(tensor(3.0))) == 6.0, "the copy is differentiable"


# --- memory ----------------------------------------------------------------------------

_KIB = 1024


def _kibibyte() -> Tensor:
    return tensor(np.ones(_KIB // 8))


def _repeat(n: int, function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def repeated(x: Tensor) -> Tensor:
        for _ in range(n):
            x = function(x)
        return x

    return repeated


def test_what_no_rule_needs_is_not_kept(arena: Arena) -> None:
    x = _kibibyte()
    before = arena.high_water = arena.used

    def loss(x: Tensor) -> Tensor:
        y = _repeat(100, lambda x: reshape(reshape(x + x, (4, -1)), x.shape) - 1.0)(x)
        assert arena.used - before <= 2 * _KIB
        return op.sum(y)

    grad(loss)(x)
    assert arena.high_water - before <= 6 * _KIB


def test_backward_needs_no_more_memory_than_forward(arena: Arena) -> None:
    x = _kibibyte()
    before = arena.high_water = arena.used
    gradient = grad(lambda x: op.sum(_repeat(100, op.relu)(x)))(x)
    assert arena.high_water - before <= 106 * _KIB
    assert arena.used - before == gradient.type.nbytes


def test_a_pullback_holds_its_values_until_it_is_dropped(arena: Arena) -> None:
    x = _kibibyte()
    before = arena.used
    value, pullback = vjp(_repeat(10, op.exp), x)
    assert arena.used - before == 10 * _KIB
    pullback(value)
    assert arena.used - before == 10 * _KIB
    del value, pullback
    assert arena.used == before


def test_a_deep_chain_does_not_recurse() -> None:
    depth = 3 * sys.getrecursionlimit()
    gradient = grad(lambda x: _repeat(depth, lambda y: y * x)(x))(tensor(1.0))
    assert lists(gradient) == depth + 1.0


# --- threads ---------------------------------------------------------------------------


def test_threads_have_tapes_of_their_own_and_may_share_tensors() -> None:
    x, all_are_inside = tensor(2.0), threading.Barrier(4, timeout=30)

    def differentiate(n: int) -> object:
        def power(x: Tensor) -> Tensor:
            all_are_inside.wait()
            y = _repeat(n, lambda y: y * x)(x)
            all_are_inside.wait()
            return y

        with Arena(default_vm(), f"thread {n}"):
            return lists(grad(power)(x))

    assert in_threads(differentiate, range(4)) == [(n + 1) * 2.0**n for n in range(4)]


# --- beside others ---------------------------------------------------------------------


def test_an_update_in_place_with_a_tracked_operand_is_tracked() -> None:
    def accumulated(x: Tensor) -> Tensor:
        total = zeros(())
        for _ in range(2):
            total += op.sum(x * x)
        return total

    assert lists(value_and_grad(accumulated)(ones((2,)))) == [4.0, [4.0, 4.0]]


def test_a_zero_gradient_after_a_read_of_values_names_the_line() -> None:
    x = tensor([1.0, 2.0])
    reads = lambda x: ml.sum(ml.asarray(x.numpy()))  # noqa: E731
    line = f"test_autodiff.py:{reads.__code__.co_firstlineno}"
    with pytest.warns(ml.NoEffectWarning, match=f"gradient is zero: .*{line} reads values"):
        grad(reads)(x)
    grad(lambda x: ml.sum(x * x.numpy()))(x)  # as a constant
