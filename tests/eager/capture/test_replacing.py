"""`ml.capture(replace=)`: a host function is called where a step computes a pattern, or nowhere."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import (
    ArgumentError,
    CaptureError,
    CheckError,
    DTypeError,
    MlvmError,
    ShapeError,
    UnknownFunctionError,
)
from tests.brief import Fn, cases, refuses, with_long
from tests.trees import assert_close
from tests.wired import machine


class Host:
    """A VM with host functions in Python, which compute a pattern eagerly on another VM and count
    their calls."""

    def __init__(self, vm: ml.VM) -> None:
        self.vm = vm
        self.calls: dict[str, int] = {}

    def register(self, name: str, pattern: Fn) -> None:
        def function(frame: Any) -> None:
            self.calls[name] = self.calls.get(name, 0) + 1
            arrays = [frame.param(i) for i in range(frame.nparams)]
            with ml.Arena(ml.VM("other"), "inside").allocating():
                results = pattern(*map(ml.asarray, arrays))
                for y in results if isinstance(results, tuple) else (results,):
                    frame.push(y.arena.vm.read(y.handle))

        machine(self.vm).register(name, function)


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host(ml.VM("replacing"))
    with ml.Arena(host.vm, "weights").allocating():
        yield host


def normal(*shape: int, seed: int = 0) -> ml.Tensor:
    return ml.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def dense(x: ml.Tensor, w: ml.Tensor, b: ml.Tensor) -> ml.Tensor:
    return ml.gelu(x @ w + b)


def counts(step: Any) -> dict[str, int]:
    return {name: len(places) for name, places in step.replaced.items()}


def check(host: Host, fn: Fn, *args: Any, expected: int, **patterns: Fn) -> Any:
    """Capture with these patterns by name; check that results are those without, and that
    `expected` launches are replaced."""
    for name, pattern in patterns.items():
        host.register(name, pattern)
    step = ml.capture(fn, replace={pattern: name for name, pattern in patterns.items()})
    plain = ml.capture(fn)
    for _ in range(3):
        assert_close(step(*args), plain(*args))
    assert sum(counts(step).values()) == expected
    return step


def test_each_place_is_replaced_and_told(host: Host) -> None:
    w, b, v, c = normal(4, 5), normal(5), normal(5, 3), normal(3)

    def fn(x: ml.Tensor) -> ml.Tensor:
        x = dense(x, w, b)
        return ml.sum(dense(x, v, c) * 2.0)

    step = check(host, fn, normal(2, 4), expected=2, dense=dense)
    assert host.calls == {"dense": 6}
    assert [place.name for place in step.replaced["dense"]] == ["dense"] * 2
    lines = [str(place.line) for place in step.replaced["dense"]]
    first = dense.__code__.co_firstlineno
    assert all(line.endswith(f"test_replacing.py:{first + 1}") for line in lines)


@cases(
    "pattern, fn, expected",
    (lambda x: ml.exp(x) * 0.5, lambda x: ml.exp(x) * 0.5, 1),
    (lambda x: ml.exp(x) * 0.5, lambda x: ml.exp(x) * 0.25, 0),  # another number
    (lambda x: ml.sum(x, axis=0), lambda x: ml.sum(x, axis=1), 0),  # another attribute
    (lambda x: ml.sum(x, axis=0), lambda x: ml.sum(x, axis=0), 1),
    (lambda x, y: x - y, lambda x: (x * 2.0) - x, 1),
    (lambda x, y: ml.exp(x - y), lambda x: ml.exp(x - x), 1),  # one tensor for two operands
    (lambda x: ml.exp(x + x), lambda x: ml.exp(x + x * 1.5), 0),  # two for one operand
    (lambda x: ml.sin(ml.exp(x)), lambda x: ml.sin(y := ml.exp(x)) + y, 0),  # used elsewhere
    (lambda x: ml.sin(ml.exp(x)), lambda x: (ml.sin(y := ml.exp(x)), y), 0),  # returned
    (lambda x: ml.sin(y := ml.exp(x)) * y, lambda x: ml.sin(y := ml.exp(x)) * y, 1),
    (lambda x: ml.sin(y := ml.exp(x)) * y, lambda x: ml.sin(ml.exp(x)) * ml.exp(x), 0),
    (lambda x: ml.sin(ml.sin(x)), lambda x: ml.sin(ml.sin(ml.sin(ml.sin(ml.sin(x))))), 2),
    (lambda x: ml.reshape(x, (-1,)) @ ml.reshape(x, (-1,)), lambda x: ml.vecdot(x, x), 0),
    (lambda x, y: x.reshape(-1) + y, lambda x: ml.exp(x).reshape(-1) + ml.ones(12), 1),
    (lambda x, i: ml.take(x, i, axis=0), lambda x: ml.take(x, ml.argmax(x, axis=0), axis=0), 1),
    (lambda m, x, y: ml.where(m, x, y), lambda x: ml.where(x > 0.0, x, x * 2.0), 1),
    (lambda x: ml.sin(x) if x.ndim == 1 else ml.exp(x), lambda x: ml.sin(x[0]), 1),
    (lambda x: ml.softmax(x, axis=-1), lambda x: ml.softmax(x.T.astype(ml.float64), axis=-1), 1),
)
def test_what_a_pattern_matches(host: Host, pattern: Fn, fn: Fn, expected: int) -> None:
    with warnings.catch_warnings(action="ignore"):
        check(host, fn, normal(3, 4), expected=expected, pattern=pattern)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (1, 2, 1, 2, 2)])
def test_operands_of_any_shape_and_dtype(host: Host, dtype: str, shape: tuple[int, ...]) -> None:
    x = normal(*shape).astype(getattr(ml, dtype))
    check(host, lambda x: -ml.exp(ml.sin(x)), x, expected=1, f=lambda x: ml.exp(ml.sin(x)))


def test_the_first_of_overlapping_patterns_goes_first(host: Host) -> None:
    def fn(x: ml.Tensor) -> ml.Tensor:
        return ml.exp(ml.sin(ml.cos(x)))

    outer: Fn = lambda x: ml.exp(ml.sin(x))  # noqa: E731
    inner: Fn = lambda x: ml.sin(ml.cos(x))  # noqa: E731
    step = check(host, fn, normal(3), expected=2, outer=outer, inner=lambda x: ml.cos(x))
    assert counts(step) == {"outer": 1, "inner": 1}
    with pytest.warns(ml.ReplacementWarning, match="'outer' is not called"):
        step = check(host, fn, normal(3), expected=1, inner=inner, outer=outer)
    assert counts(step) == {"inner": 1, "outer": 0}


def test_inside_of_control_flow(host: Host) -> None:
    w, b = normal(3, 3), normal(3)

    layer = ml.subroutine(lambda x: dense(x, w, b) * 0.5)

    def fn(x: ml.Tensor, n: ml.Tensor) -> Any:
        x = ml.while_loop(
            lambda s: ml.sum(s[1]) < 4.0, lambda s: (dense(s[0], w, b), s[1] + 1.0), (x, n)
        )[0]
        x = ml.fori_loop(0, 3, lambda i, x: dense(x, w, b), x)
        x = ml.cond(ml.sum(n) > 0.0, lambda x: dense(x, w, b), lambda x: x * 2.0, x)
        x, rows = ml.scan(lambda x, row: (dense(x, w, row), x), x, normal(2, 3))
        return layer(x), rows

    check(host, fn, normal(2, 3), ml.ones(()), expected=5, dense=dense)


def test_a_step_with_gradients_is_matched_as_it_stands(host: Host) -> None:
    """The backward pass of `gelu` reads x @ w + b: the forward pass keeps it. A relu of sums is
    replaced, where its gradient reads the result alone."""
    w, b = normal(4, 4), normal(4)

    def loss(w: ml.Tensor, x: ml.Tensor) -> ml.Tensor:
        return ml.mean(ml.exp(x @ w + b))

    def fn(x: ml.Tensor) -> Any:
        value, g = ml.value_and_grad(loss)(w, x)
        w[...] = w - 0.1 * g
        return value

    values = {}
    for replaced in (True, False):
        w[...] = normal(4, 4)
        patterns: dict[Fn, str] = {}
        if replaced:
            host.register("affine", lambda x, w, b: ml.exp(x @ w + b))
            host.register("sgd", lambda w, g: w - 0.1 * g)
            patterns[lambda x, w, b: ml.exp(x @ w + b)] = "affine"
            patterns[lambda w, g: w - 0.1 * g] = "sgd"
        step = ml.capture(fn, replace=patterns)
        values[replaced] = [float(step(normal(2, 4))) for _ in range(4)], w.tolist()
        if replaced:
            assert counts(step) == {"affine": 1, "sgd": 1}
    assert values[True] == values[False]
    step = ml.capture(
        lambda x: ml.grad(lambda w: ml.sum(dense(x, w, b)))(w), replace={dense: "dense"}
    )
    with pytest.warns(ml.ReplacementWarning):
        step(normal(2, 4))


def test_several_results(host: Host) -> None:
    def moments(x: ml.Tensor) -> tuple[ml.Tensor, ml.Tensor]:
        return ml.mean(x, axis=0), ml.max(x, axis=0)

    def fn(x: ml.Tensor) -> Any:
        mean, top = moments(x * 2.0)
        return mean - top, ml.exp(top)

    check(host, fn, normal(4, 3), expected=1, moments=moments)
    with warnings.catch_warnings(action="ignore"):  # what lies between needs the first result

        def between(x: ml.Tensor) -> Any:
            mean = ml.mean(x, axis=0)
            return ml.max(x * mean, axis=0)

        check(host, between, normal(4, 3), expected=0, moments=lambda x: moments(x))


def test_an_operand_that_is_overwritten_before_the_last_call(host: Host) -> None:
    state = normal(3)

    def fn(x: ml.Tensor) -> ml.Tensor:
        y = ml.exp(state)
        state[...] = x
        return ml.sin(y)

    host.register("f", lambda x: ml.sin(ml.exp(x)))
    with warnings.catch_warnings(action="ignore"):
        step = ml.capture(fn, replace={lambda x: ml.sin(ml.exp(x)): "f"})
        before = state.numpy()
        np.testing.assert_allclose(step(normal(3, seed=1)).numpy(), np.sin(np.exp(before)), 1e-6)
    assert counts(step) == {"f": 0}


def test_a_tensor_that_a_pattern_reaches_is_the_same_before_the_step_writes_to_it(
    host: Host,
) -> None:
    scale, other = normal(3), normal(3)

    def fn(x: ml.Tensor) -> ml.Tensor:
        y = ml.exp(x * scale) + ml.exp(x * other)
        scale[...] = x
        return y + ml.exp(x * scale)

    before = scale.numpy()
    machine(host.vm).register("f", lambda frame: frame.push(np.exp(frame.param(0) * before)))
    step = ml.capture(fn, replace={lambda x: ml.exp(x * scale): "f"})
    x = normal(3, seed=1)
    scales = (before, other.numpy(), x.numpy())
    expected = sum(np.exp(x.numpy() * each) for each in scales)
    np.testing.assert_allclose(step(x).numpy(), expected, 1e-5)
    assert counts(step) == {"f": 1}


def test_a_pattern_that_fits_nowhere_warns_once_a_recording(host: Host) -> None:
    step = ml.capture(lambda x: x + 1.0, replace={dense: "dense"})
    with pytest.warns(
        ml.ReplacementWarning, match=r"dense \(.*test_replacing.py:\d+\) fits nowhere"
    ):
        step(normal(3))
    with warnings.catch_warnings(action="error"):
        step(normal(3))
    assert step.replaced == {"dense": []}


@cases(
    "pattern, text",
    (lambda x: x, "expected a pattern that returns distinct computed tensors"),
    (lambda x: (y := ml.exp(x), y), "pattern that returns distinct computed tensors"),
    (lambda x, y: ml.exp(x), "operand 1 is unused"),
    (
        lambda x: ml.fori_loop(0, 3, lambda i, x: ml.exp(x), x),
        "expected a pattern of ops, got a call of while",
    ),
    (lambda x: ml.reshape(x, (7,)), "rejects all operands"),
    (lambda x: float(x), "cannot read a tensor's value"),
)
def test_a_pattern_that_is_refused(host: Host, pattern: Fn, text: str) -> None:
    step = ml.capture(lambda x: ml.exp(x), replace={pattern: "f"})
    for _ in range(2):
        refuses(CaptureError, text, step, normal(3))
    assert step.signatures == 0


def test_a_function_that_does_not_do_what_the_pattern_does(host: Host) -> None:
    step = ml.capture(lambda x: ml.exp(x), replace={lambda x: ml.exp(x): "f"})
    refuses(UnknownFunctionError, "'f'", step, normal(3))
    replacement: Any
    error: type[Exception]
    for replacement, error in (np.ones(4, np.float32), ShapeError), (np.ones(3), DTypeError):
        machine(host.vm).register("f", lambda frame: frame.push(replacement))  # noqa: B023
        raised = refuses(error, "copy", step, normal(3))
        assert any("test_replacing.py" in note for note in raised.__notes__)
    machine(host.vm).register("f", lambda frame: None)
    refuses(MlvmError, "f", step, normal(3))
    host.register("f", ml.exp)
    np.testing.assert_array_equal(step(normal(3)).numpy(), ml.exp(normal(3)).numpy())


def test_replacement_holds_a_function_against_its_pattern(host: Host) -> None:
    host.register("dense", dense)
    types = [ml.TensorType("f32", shape) for shape in ((2, 3), (3, 4), (4,))]
    ml.testing.replacement(dense, "dense", *types)
    host.register("wrong", lambda x, w, b: dense(x, w, b) * 1.01)
    refuses(
        CheckError, "wrong: result 0, f32.*differ", ml.testing.replacement, dense, "wrong", *types
    )
    host.register("wide", lambda x, w, b: dense(x, w, b).astype(ml.float64))
    text = r"expected f32\[2,4\] as result 0 as in the pattern, got f64"
    refuses(CheckError, text, ml.testing.replacement, dense, "wide", *types)
    host.register("two", lambda x: (ml.exp(x), x))
    refuses(
        CheckError, "expected 1 result .* got 2", ml.testing.replacement, ml.exp, "two", types[0]
    )
    wrong: Any = 3
    refuses(UnknownFunctionError, "absent", ml.testing.replacement, ml.exp, "absent", types[0])
    refuses(ArgumentError, "TensorType", ml.testing.replacement, ml.exp, "two", wrong)


PATTERNS: dict[str, Fn] = {
    "f0": lambda x: ml.exp(-ml.abs(x)),
    "f1": lambda x, y: ml.sin(x + y) * 0.5,
    "f2": lambda x, y: (x * y, ml.maximum(x, y)),
    "f3": lambda x: ml.tanh(x) * ml.tanh(x),
    "f4": lambda x, y: (t := ml.sin(x)) + t * y,
}


@pytest.mark.parametrize("seed", range(with_long(5, 20)))
def test_random_steps_are_the_same_with_and_without_patterns(host: Host, seed: int) -> None:
    """The host functions run the same ops, so results and state are equal to the bit."""
    for name, pattern in PATTERNS.items():
        host.register(name, pattern)
    states = [normal(4, seed=i) for i in range(2)]

    def fn(x: ml.Tensor) -> Any:
        rng = np.random.default_rng(seed)
        values = [x, *states]
        for _ in range(25):
            a, b = (values[i] for i in rng.integers(0, len(values), 2))
            kind = int(rng.integers(0, 9))
            if kind == 5:
                states[int(rng.integers(0, 2))][...] = ml.tanh(a)
            elif kind == 6:
                values.append(
                    ml.cond(ml.sum(a) > 0.0, lambda a, b: ml.sin(a + b) * 0.5, ml.add, a, b)
                )
            elif kind == 7:
                values.append(ml.fori_loop(0, 2, lambda i, a: ml.exp(-ml.abs(a)), a))
            elif kind == 8:
                values.append(ml.abs(a - b))
            else:
                pattern = PATTERNS[f"f{kind}"]
                outputs = pattern(a) if kind in (0, 3) else pattern(a, b)
                values += outputs if isinstance(outputs, tuple) else (outputs,)
        return values[-4:]

    histories = []
    for patterns in {}, {pattern: name for name, pattern in PATTERNS.items()}:
        for i, state in enumerate(states):
            state[...] = normal(4, seed=i)
        with warnings.catch_warnings(action="ignore"):
            step = ml.capture(fn, replace=patterns)
            results = [y.tolist() for _ in range(2) for y in step(normal(4, seed=9))]
        histories.append((results, [state.tolist() for state in states]))
    assert histories[0] == histories[1]
    assert sum(counts(step).values())
