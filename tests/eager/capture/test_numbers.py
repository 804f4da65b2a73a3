"""Python numbers that change between the calls of a captured function.

Whatever a function does with a number, a call gives what the eager one gives, to the bit. Where
Python does not look at the number, it is recorded twice at most: by value, and then for any.
"""

from __future__ import annotations

import copy
import fractions
import json
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import CaptureError
from mlvm.eager import nn, optim
from mlvm.eager.tensor.number import Number, Numbers, is_same, plain
from mlvm.step.saved import SavedStep
from tests.brief import Fn, Patch, cases, refuses
from tests.eager.capture.table import Row, Run, Table, Wrap, tried
from tests.threads import in_threads

pytestmark = [
    pytest.mark.usefixtures("weights"),
    pytest.mark.filterwarnings("ignore::mlvm.eager.RecompilationWarning"),
]

ROWS: Final = Table()

FLOATS = [0.5, 0.0, -0.0, math.inf, -math.inf, math.nan, 1e300, 5e-324, 1 / 3, -7.25]
INTS = [3, 0, -1, 2, 7, 2**31, 2**53 + 1, 1]


def called_with(values: list[Any]) -> Callable[[Fn], Run]:
    """Return a maker of rows that call fn(x, value) with each value, and some of them again."""

    def of(fn: Fn) -> Run:
        def run(wrap: Wrap) -> Iterator[Any]:
            step, x = wrap(fn), ml.asarray([0.1, -2.5, 3.0])
            for value in [*values, *values[::-1], *values]:
                yield tried(step, x, value)

        return run

    return of


ROWS.rows("a float is an input when it has changed", [
    lambda x, a: x * a,
    lambda x, a: a - x,
    lambda x, a: x / a + a / x,
    lambda x, a: ml.astype(x, "float64") * a,
    lambda x, a: (x * (1 - a), ml.astype(x, "float64") * (1 - a)),
    lambda x, a: ml.clip(x, -abs(a), a),
    lambda x, a: ml.where(x > 0, x, -a),
    lambda x, a: ml.full((2,), a),
    lambda x, a: x < a,
    lambda x, a: x**a,
    lambda x, a: x * (a * 3 - a / 7 + 2) * +a,
    lambda x, a: ml.value_and_grad(lambda x: ml.sum(x * x * a))(x),
    lambda x, a: (x + 1, a, [a * 2, {"half": a / 2}]),
    lambda x, a: x * sum([a, a, 0.25]),
    lambda x, a: ml.softmax(x * a) + copy.deepcopy([a])[0],
], called_with(FLOATS), programs=2)  # fmt: skip

ROWS.rows("an int is an input when it has changed", [
    lambda x, n: x * n,
    lambda x, n: ml.astype(x, "int32") + n % 2**20,
    lambda x, n: ml.arange(3) * (n * 2 + 1) - n // 2 + n % 3,
    lambda x, n: x + divmod(n, 3)[0] * divmod(17, n + 1)[1],
    lambda x, n: (x + 1, n + 1),
    lambda x, n: ml.full((2,), n),
    lambda x, n: x * (n / 3),
], called_with(INTS), programs=2)  # fmt: skip

for _fn, _values, _programs in (
    (lambda x, n: ml.astype(x, "int8") + n, [1, 2, 127, 128, 2**70, -129, 5], 2),
    (lambda x, a: x * (1 / a), [1.0, 2.0, 4.0, 0.0, 0.5], 2),
    (lambda x, a: ml.astype(x, "int32") * a, [0.5, 0.25, 0.125], 2),
    (lambda x, a: x * a, [1j, 2 + 1j, 1j, complex(1, -0.0), complex(1, 0.0)], 4),
    (lambda x, a: (x * a if a > 0.25 else x - a if a else x), FLOATS, 4),
    (lambda x, n: (x * n, n), [1, True, 1.0, 2, False, 0.0, -0.0, 0, 2.0, 3], 6),
    (lambda x, n: (x + 1, n), [1, True, 1.0, 2, False, 0.0, -0.0, 0, 2.0, 3], 6),
    (lambda x, a: x * a * len(json.dumps({"a": a})), [0.5, 0.25, 1.0, 0.125], None),
    (lambda x, a: [x * name * value for name, value in a.items()],
     [{a: b} for a in (0.5, 0.25, -0.0, 0.0) for b in (1.0, 2.0, 3.0)], 8),
):  # fmt: skip
    ROWS.rows(f"numbers {_values}", [_fn], called_with(_values), programs=_programs)

ROWS.rows("what python sees of a float is what a program is for", [
    lambda x, a: x * math.sqrt(abs(a)) if a == a else x,
    lambda x, a: x * float(a),
    lambda x, a: x * float(np.float32(a)),
    lambda x, a: x * len(f"{a:.3f}"),
    lambda x, a: x * {0.5: 1.0, math.inf: 2.0}.get(a, 3.0),
    lambda x, a: x * (3.0 if a in {0.5, 7.0} else 4.0),
    lambda x, a: ml.linspace(0.0, a, 3),
    lambda x, a: ml.softmax(x) * (round(a) if math.isfinite(a) else 1),
    lambda x, a: x * a.as_integer_ratio()[0] if math.isfinite(a) and abs(a) > 0.1 else x,
    lambda x, a: (x, fractions.Fraction(a) if math.isfinite(a) else None),
    lambda x, a: x * fractions.Fraction(1, 2).__rmul__(a) if a == a else x,
    lambda x, a: x * (a * np.float64(3.0)),
    lambda x, a: x * (np.float32(3.0) * a),
    lambda x, a: x * (complex(1, 2) * a).real,
    lambda x, a: x * len(json.dumps([a])),
    lambda x, a: x * pickle.loads(pickle.dumps(a)),
    lambda x, a: x * (1.0 if type(a) is float else 2.0),
    lambda x, a: x * (1.0 if a.__class__ is float else 2.0),
    lambda x, a: (x, np.full(2, a)),
    lambda x, a: x * (1.0 if isinstance(a, float) and not isinstance(a, int) else 2.0),
    lambda x, a: x * max(a, 0.25),
    lambda x, a: x * sorted([1.0, a, 0.0])[1],
    lambda x, a: x * (a**0.5).real,
], called_with(FLOATS))  # fmt: skip

ROWS.rows("what python sees of an int is what a program is for", [
    lambda x, n: ml.zeros((n % 5,)) + x[0],
    lambda x, n: ml.broadcast_to(x, (n % 4, 3)),
    lambda x, n: x[n % 3],
    lambda x, n: ml.sum(ml.reshape(x, (1, 3)), axis=n % 2),
    lambda x, n: [x * i for i in range(n % 4)],
    lambda x, n: ml.concat([x] * (n % 4 + 1)),
    lambda x, n: x ** (n % 5),
    lambda x, n: ml.one_hot(ml.arange(2), n % 3 + 2),
    lambda x, n: x * (True + n) + (True if n == 1 else 5),
    lambda x, n: x * [1.0, 2.0, 3.0][n % 3],
    lambda x, n: x * (n & 3 | 4) * (n % 8 << 2),
    lambda x, n: x * n.bit_length(),
    lambda x, n: x * (2 ** (n % 5 - 2)),
    lambda x, n: x * pow(n, 3, 7),
    lambda x, n: x * ((n > 0) + (n > 1)),
], called_with(INTS))  # fmt: skip

for _fn, _programs in (
    (lambda x, a: x + ml.asarray(a), 2),
    (lambda x, a: ml.sqrt(a) + x, 2),
    (lambda x, a: ml.asarray(a * 2, dtype=ml.float64) + x, 2),
    (lambda x, a: ml.asarray(a, dtype=ml.complex64) * x, 2),
    (lambda x, a: ml.add(a, 2) + x, 2),
    (lambda x, a: x * [a, 2.0, -a], 5),
    (lambda x, a: x * np.array([a, 2.0, a]), 5),
    (lambda x, a: x * np.float32(a), 5),
):
    _make = called_with([0.5, 0.1, 1 / 3, 0.7, 1e-30])
    ROWS.rows(
        f"a constant of each call, {_fn.__code__.co_firstlineno}", [_fn], _make, programs=_programs
    )
for _dtype in (None, "i64", "u8", "f32", "f16", "f64", "c64"):
    _make = called_with([1, 2, 200, 3, 2**60 + 2**36 + 1, -1])
    ROWS.rows(f"ints as {_dtype}", [lambda x, n, dtype=_dtype: ml.asarray(n, dtype=dtype)], _make)


@ROWS.row(programs=2)
def numbers_in_nested_arguments(wrap: Wrap) -> Iterator[Any]:
    def step(tree: Any, *more: float, last: float = 1.0) -> Any:
        return [
            tree["x"] * tree["a"] + tree["list"][0][1],
            ml.full((1,), more[0]) * more[1] - last,
            {**tree, "x": None},
        ]

    fn, x = wrap(step), ml.asarray([1.0, 2.0])
    for i in range(1, 8):
        tree = {"a": i / 3, "x": x, "list": [(i, i / 5)]}
        yield fn(tree, i / 7, float(i), last=0.5 * i)


class Scaled(nn.Module):
    def __init__(self) -> None:
        self.w = ml.ones((3,))
        self.scale = 2.0
        self.limits: tuple[float, float] = (0.5, 4)
        self.power = 1

    def __call__(self, x: ml.Tensor) -> ml.Tensor:
        low, high = self.limits
        return ml.clip(x * self.w * self.scale, low, high) * self.power


def _fields(is_arg: bool) -> Run:
    def run(wrap: Wrap) -> Iterator[Any]:
        model, x = Scaled(), ml.asarray([0.1, 1.0, 3.0])
        step = wrap((lambda model, x: model(x)) if is_arg else (lambda _, x: model(x)))
        for i in range(12):
            model.scale = i / 7
            model.limits = (0.125 * i, 8 - i)
            model.power = i - 3
            yield step(model, x), vars(model)
        model.scale = math.nan
        yield step(model, x), vars(model)
        model.limits = (1, 2.0)  # other classes of numbers: a third program
        yield step(model, x), vars(model)

    return run


ROWS["numbers in fields of a Module"] = Row(_fields(False), programs=3)
ROWS["numbers in fields of an argument"] = Row(_fields(True), programs=3)


@ROWS.row()
def a_field_that_the_function_counts_up(wrap: Wrap) -> Iterator[Any]:
    model = Scaled()

    def step(x: ml.Tensor) -> ml.Tensor:
        model.power += 1
        return model(x) * 0.5

    fn = wrap(step)
    for _ in range(5):
        yield fn(ml.ones(3)), model.power


OPTIMIZERS: dict[str, tuple[Fn, Fn]] = {
    "SGD with momentum": (
        lambda p: optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1),
        lambda o, t: o.__dict__.update(momentum=1 - 1 / (t + 1), weight_decay=0.2 / t),
    ),
    "AdamW": (
        lambda p: optim.AdamW(p, 0.1),
        lambda o, t: o.__dict__.update(
            learning_rate=0.2 / t, betas=(0.9 - 0.5 / t, 1 - 1 / (9 + t)), eps=1e-7 * t,
            weight_decay=0.1 * t,
        ),
    ),
    "Lion in groups": (
        lambda p: optim.Lion(p, 0.1, groups=[("w", {"weight_decay": 0.5})]),
        lambda o, t: [
            o.groups[0].__dict__.update(weight_decay=1 / t),
            o.__dict__.update(learning_rate=0.2 / t),
        ],
    ),
}  # fmt: skip


def _optimized(make: Fn, change: Fn) -> Run:
    def run(wrap: Wrap) -> Iterator[Any]:
        params = {"w": ml.asarray([[0.5, -1.0], [2.0, 0.25]]), "b": ml.asarray([0.125, 3.0])}
        optimizer = make(params)

        def step(x: ml.Tensor) -> Any:
            def loss(params: Any) -> ml.Tensor:
                return ml.mean((x @ params["w"] + params["b"]) ** 2)

            value, gradients = ml.value_and_grad(loss)(params)
            optimizer.update(gradients)
            return value

        fn = wrap(step)
        for t in range(1, 51):
            yield fn(ml.asarray([[1.0, 0.5], [0.25, -2.0]])), params, optimizer.state()
            change(optimizer, t)

    return run


for _name, (_build, _change) in OPTIMIZERS.items():
    ROWS[f"hyperparameters of {_name}"] = Row(_optimized(_build, _change), programs=2)


@ROWS.row()
def a_number_that_raises_leaves_the_fields(wrap: Wrap) -> Iterator[Any]:
    model = Scaled()

    def step(x: ml.Tensor) -> ml.Tensor:
        y = model(x)
        if model.scale > 3:
            raise KeyError(model.scale)
        return y

    fn = wrap(step)
    for scale in (1.0, 2.0, 2.5, 5.0, 6.0, 2.0):
        model.scale = scale
        yield tried(fn, ml.ones(3)), vars(model)


@cases("fuse", True, False)
@pytest.mark.parametrize("name", ROWS)
def test_captured_calls_are_the_eager_ones(name: str, fuse: bool, monkeypatch: Patch) -> None:
    ROWS.check(name, monkeypatch, fuse=fuse)


# --- errors, files and classes --------------------------------------------------------------


def test_a_number_that_is_noted_outside_is_as_a_number() -> None:
    notes: list[Any] = []
    captured = ml.capture(lambda x, a: (notes.append(a), x * a)[1])  # type: ignore[func-returns-value]
    for a in (0.5, 0.25, 0.125):
        assert captured(ml.ones(1), a).item() == a
    assert notes == [0.5, 0.25, 0.125]
    assert [repr(each * 2) for each in notes] == ["1.0", "0.5", "0.25"]
    assert all(type(each * 2) is float for each in notes)


def test_a_saved_step_has_the_last_calls_numbers(tmp_path: Any) -> None:
    captured = ml.capture(lambda x, a: x * (1 - a))
    for a in (0.5, 0.25, 0.75):
        captured(ml.ones(2), a)
    captured.save(tmp_path / "step.mlvm")
    saved = SavedStep.from_bytes((tmp_path / "step.mlvm").read_bytes())
    assert [array.tolist() for array in saved.states] == [0.25]
    refuses(ml.errors.ArgumentError, r"got x\.onnx; ml\.onnx\.save", captured.save, "x.onnx")


def test_a_capture_error_is_the_same_error() -> None:
    captured = ml.capture(lambda x, a: x * a if float(x[0]) > a else x)
    for a in (0.5, 0.25):
        refuses(CaptureError, "cannot read a tensor's value inside", captured, ml.ones(1), a)


# --- what stands for a number ---------------------------------------------------------------


def test_what_stands_for_a_number_is_the_number_when_recording_has_ended() -> None:
    numbers = Numbers([0.5, 3])
    with numbers.recording() as (a, n):
        doubled = a * 2
        assert isinstance(a, float)
        assert isinstance(n, int)
        assert not isinstance(n, bool)
        assert type(doubled) is Number
    assert type(doubled * 3) is float
    assert (doubled, n + 1, f"{a:.1f}", [1, 2, 3, 4][n]) == (1.0, 4, "0.5", 4)
    assert numbers.again([2.0, 5]) == [2.0, 5, 2, 4.0]  # nothing was seen while it was recorded
    assert doubled.recorded is None


def test_plain_changes_nothing_where_nothing_stands_for_a_number() -> None:
    tree = {"a": [1, (2.0, None)], "b": "c"}
    assert plain(tree) is tree
    with Numbers([0.5]).recording() as [a]:
        result = plain({"a": [a, (a, 1)]})
    assert result == {"a": [0.5, (0.5, 1)]}
    assert type(result["a"][1][0]) is float


@pytest.mark.parametrize("x", [0, 1, True, False, 1.0, 0.0, -0.0, math.nan, 2**70, 1j, None])
def test_the_same_number_is_the_same_class_and_bits(x: Any) -> None:
    for y in [0, 1, True, False, 1.0, 0.0, -0.0, math.nan, 2**70, 1j, None]:
        assert is_same(x, y) == (type(x) is type(y) and repr(x) == repr(y))


def test_threads_each_get_their_numbers() -> None:
    captured = ml.capture(lambda x, a: (x * a, a))
    vm = ml.VM("shared")

    def work(number: int) -> None:
        arena = ml.Arena(vm, f"thread {number}")
        with arena.allocating():
            x = ml.ones(3)
            for i in range(30):
                a = number + i / 64
                y, same = captured(x, a)
                assert y.tolist() == [a] * 3
                assert same == a

    in_threads(work, range(4))
    assert captured.signatures <= 8
