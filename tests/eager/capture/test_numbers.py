"""Python numbers that change between the calls of a captured function.

Whatever a function does with a number, a call gives what the eager one gives, to the bit. Where
Python does not look at the number, it is recorded twice at most: by value, and then for any.
"""

from __future__ import annotations

import copy
import dataclasses
import fractions
import json
import math
import pickle
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import CaptureError
from mlvm.eager import nn, optim
from mlvm.eager.tensor.number import Number, Numbers, is_same, plain
from tests.brief import Fn, refuses
from tests.threads import in_threads

pytestmark = [
    pytest.mark.usefixtures("weights"),
    pytest.mark.filterwarnings("ignore::mlvm.eager.RecompilationWarning"),
]

FLOATS = [0.5, 0.0, -0.0, math.inf, -math.inf, math.nan, 1e300, 5e-324, 1 / 3, -7.25]
INTS = [3, 0, -1, 2, 7, 2**31, 2**53 + 1, 1]


def bits(result: Any) -> Any:
    """Return the form in which two results are compared: bits, where one nan is as good as another,
    and the classes of Python's values."""
    if isinstance(result, ml.Tensor):
        array = result.numpy()
        if result.dtype.is_float:
            array[np.isnan(array)] = np.nan
        return result.dtype, result.shape, array.tobytes()
    if isinstance(result, (list, tuple)):
        return type(result), [bits(each) for each in result]
    if isinstance(result, dict):
        return {name: bits(each) for name, each in result.items()}
    return type(result), repr(result)


def outcome(fn: Fn, *args: Any, **kwargs: Any) -> Any:
    try:
        return bits(fn(*args, **kwargs))
    except Exception as error:
        return type(error), str(error)


def agree(fn: Fn, values: list[Any], *, programs: int | None = None, fuse: bool = False) -> None:
    """Calls with these values, some of them again, are the eager ones."""
    captured = ml.capture(fn, fuse=fuse)
    x = ml.asarray([0.1, -2.5, 3.0])
    for value in [*values, *values[::-1], *values]:
        assert outcome(captured, x, value) == outcome(fn, x, value), value
    if programs is not None:
        assert captured.signatures == programs


# --- what is recorded twice at most ---------------------------------------------------------

FREE: list[Fn] = [
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
]


@pytest.mark.parametrize("number", range(len(FREE)))
def test_a_float_is_an_input_when_it_has_changed(number: int) -> None:
    agree(FREE[number], FLOATS, programs=2, fuse=number % 2 == 0)


INT_FREE: list[Fn] = [
    lambda x, n: x * n,
    lambda x, n: ml.astype(x, "int32") + n,
    lambda x, n: ml.arange(3) * (n * 2 + 1) - n // 2 + n % 3,
    lambda x, n: (x + 1, n + 1),
    lambda x, n: ml.full((2,), n),
    lambda x, n: x * (n / 3),
]


@pytest.mark.parametrize("fn", INT_FREE)
def test_an_int_is_an_input_when_it_has_changed(fn: Fn) -> None:
    values = [n for n in INTS if abs(n) < 2**20] if fn is INT_FREE[1] else INTS
    agree(fn, values, programs=2)


def test_a_number_that_is_refused_raises_as_in_eager_and_the_next_one_is_fine() -> None:
    agree(lambda x, n: ml.astype(x, "int8") + n, [1, 2, 127, 128, 2**70, -129, 5], programs=2)
    agree(lambda x, a: x * (1 / a), [1.0, 2.0, 4.0, 0.0, 0.5], programs=2)


def test_a_float_beside_integers_is_f32_as_in_eager() -> None:
    agree(lambda x, a: ml.astype(x, "int32") * a, [0.5, 0.25, 0.125], programs=2)
    captured = ml.capture(lambda x, a: ml.astype(x, "int32") * a)
    assert captured(ml.ones(2), 0.5).dtype is ml.float32


def test_complex_numbers_are_known_by_value() -> None:
    agree(lambda x, a: x * a, [1j, 2 + 1j, 1j, complex(1, -0.0), complex(1, 0.0)], programs=4)


# --- what Python looks at ------------------------------------------------------------------


def branches(x: ml.Tensor, a: float) -> ml.Tensor:
    if a > 0.25:
        return x * a
    return x - a if a else x


def test_a_condition_is_what_a_program_is_for_and_not_the_number() -> None:
    agree(branches, [0.5, 0.75, 1.5, 0.0, -0.0, 0.1, -3.0, math.nan, math.inf], programs=4)


SEEN: list[Fn] = [
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
]


@pytest.mark.parametrize("fn", SEEN)
def test_what_python_sees_is_what_a_program_is_for(fn: Fn) -> None:
    agree(fn, FLOATS)


SEEN_INTS: list[Fn] = [
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
]


@pytest.mark.parametrize("fn", SEEN_INTS)
def test_what_python_sees_of_an_int_is_what_a_program_is_for(fn: Fn) -> None:
    agree(fn, INTS)


def test_classes_are_kept_apart() -> None:
    agree(lambda x, n: (x * n, n), [1, True, 1.0, 2, False, 0.0, -0.0, 0, 2.0, 3], programs=6)
    agree(lambda x, n: (x + 1, n), [1, True, 1.0, 2, False, 0.0, -0.0, 0, 2.0, 3], programs=6)


def test_a_key_of_a_dict_is_known_by_value() -> None:
    def step(x: ml.Tensor, named: dict[float, float]) -> Any:
        return [x * name * value for name, value in named.items()]

    captured, x = ml.capture(step), ml.ones(2)
    for name in (0.5, 0.25, -0.0, 0.0):
        for value in (1.0, 2.0, 3.0):
            assert bits(captured(x, {name: value})) == bits(step(x, {name: value}))
    assert captured.signatures == 8


def test_a_number_that_is_kept_in_a_result_of_another_class_is_known_by_value() -> None:
    @dataclasses.dataclass
    class Report:
        rate: float

    captured = ml.capture(lambda x, a: (x * a, Report(a * 2)))
    for a in (0.5, 0.25, 0.125, 0.5):
        y, report = captured(ml.ones(1), a)
        assert (y.item(), report.rate) == (a, 2 * a)


def test_a_number_that_is_noted_outside_is_as_a_number() -> None:
    notes: list[Any] = []
    captured = ml.capture(lambda x, a: (notes.append(a), x * a)[1])  # type: ignore[func-returns-value]
    for a in (0.5, 0.25, 0.125):
        assert captured(ml.ones(1), a).item() == a
    assert notes == [0.5, 0.25, 0.125]
    assert [repr(each * 2) for each in notes] == ["1.0", "0.5", "0.25"]
    assert all(type(each * 2) is float for each in notes)


def test_a_function_that_does_not_take_what_stands_for_a_number_gets_the_number() -> None:
    agree(lambda x, a: x * a * len(json.dumps({"a": a})), [0.5, 0.25, 1.0, 0.125])


# --- fields ---------------------------------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self) -> None:
        self.w = ml.ones((3,))
        self.scale = 2.0
        self.limits: tuple[float, float] = (0.5, 4)
        self.inner = nn.Dropout(0.0)
        self.power = 1

    def __call__(self, x: ml.Tensor) -> ml.Tensor:
        low, high = self.limits
        return ml.clip(x * self.w * self.scale, low, high) * self.power


@pytest.mark.parametrize("is_arg", [False, True])
def test_a_number_in_a_field_of_a_module(is_arg: bool) -> None:
    model, x = Scaled(), ml.asarray([0.1, 1.0, 3.0])
    captured: Any = ml.capture((lambda model, x: model(x)) if is_arg else (lambda _, x: model(x)))
    for i in range(12):
        model.scale = i / 7
        model.limits = (0.125 * i, 8 - i)
        model.power = i - 3
        assert bits(captured(model, x)) == bits(model(x))
        assert type(model.scale) is type(model.limits[0]) is float
    assert captured.signatures == 2
    model.scale = math.nan
    assert bits(captured(model, x)) == bits(model(x))
    model.limits = (1, 2.0)
    assert bits(captured(model, x)) == bits(model(x))
    assert captured.signatures == 3  # other classes of numbers


def test_a_function_that_raises_leaves_the_fields_as_they_were() -> None:
    model = Scaled()

    @ml.capture
    def step(x: ml.Tensor) -> ml.Tensor:
        y = model(x)
        if model.scale > 3:
            raise KeyError(model.scale)
        return y

    for scale in (1.0, 2.0, 2.5, 5.0, 6.0):
        model.scale = scale
        if scale > 3:
            refuses(KeyError, str(scale), step, ml.ones(3))
        else:
            step(ml.ones(3))
        assert type(model.scale) is float
        assert (model.scale, model.limits) == (scale, (0.5, 4))
    assert step.signatures == 2


def test_a_field_that_the_function_counts_up_is_as_it_was_recorded() -> None:
    def run(wrap: Fn) -> list[Any]:
        model = Scaled()

        def step(x: ml.Tensor) -> ml.Tensor:
            model.power += 1
            return model(x) * 0.5

        stepped = wrap(step)
        results = [bits(stepped(ml.ones(3))) for _ in range(5)]
        assert type(model.power) is int
        return [*results, model.power]

    assert run(ml.capture) == run(lambda step: step)


# --- optimizers -----------------------------------------------------------------------------

OPTIMIZERS: list[tuple[str, Fn, Fn]] = [
    (
        "SGD with momentum",
        lambda p: optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1),
        lambda o, t: o.__dict__.update(momentum=1 - 1 / (t + 1), weight_decay=0.2 / t),
    ),
    (
        "AdamW",
        lambda p: optim.AdamW(p, 0.1),
        lambda o, t: o.__dict__.update(
            learning_rate=0.2 / t,
            betas=(0.9 - 0.5 / t, 1 - 1 / (9 + t)),
            eps=1e-7 * t,
            weight_decay=0.1 * t,
        ),
    ),
    (
        "Lion in groups",
        lambda p: optim.Lion(p, 0.1, groups=[("w", {"weight_decay": 0.5})]),
        lambda o, t: [
            o.groups[0].__dict__.update(weight_decay=1 / t),
            o.__dict__.update(learning_rate=0.2 / t),
        ],
    ),
]


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize(("name", "make", "change"), OPTIMIZERS)
def test_hyperparameters_change_at_each_step(name: str, make: Fn, change: Fn, fuse: bool) -> None:
    runs = []
    for captured in (False, True):
        params = {"w": ml.asarray([[0.5, -1.0], [2.0, 0.25]]), "b": ml.asarray([0.125, 3.0])}
        optimizer = make(params)

        def step(x: ml.Tensor, params: Any = params, optimizer: Any = optimizer) -> Any:
            def loss(params: Any) -> ml.Tensor:
                return ml.mean((x @ params["w"] + params["b"]) ** 2)

            value, gradients = ml.value_and_grad(loss)(params)
            optimizer.update(gradients)
            return value

        stepped = ml.capture(step, fuse=fuse) if captured else step
        results = []
        for t in range(1, 51):
            results.append(bits(stepped(ml.asarray([[1.0, 0.5], [0.25, -2.0]]))))
            change(optimizer, t)
        runs.append([results, bits(params), bits(optimizer.state())])
        if isinstance(stepped, ml.Captured):
            assert stepped.signatures == 2
    assert runs[0] == runs[1]


# --- with everything else ------------------------------------------------------------------


def test_numbers_in_nested_arguments_each_have_their_place() -> None:
    def step(tree: Any, *more: float, last: float = 1.0) -> Any:
        return [
            tree["x"] * tree["a"] + tree["list"][0][1],
            ml.full((1,), more[0]) * more[1] - last,
            {**tree, "x": None},
        ]

    captured, x = ml.capture(step), ml.asarray([1.0, 2.0])
    for i in range(1, 8):
        args = {"a": i / 3, "x": x, "list": [(i, i / 5)]}, i / 7, float(i)
        assert bits(captured(*args, last=0.5 * i)) == bits(step(*args, last=0.5 * i))
    assert captured.signatures == 2


def test_a_saved_step_has_the_last_calls_numbers(tmp_path: Any) -> None:
    captured = ml.capture(lambda x, a: x * (1 - a))
    for a in (0.5, 0.25, 0.75):
        captured(ml.ones(2), a)
    captured.save(tmp_path / "step.mlvm")
    from mlvm.step.saved import SavedStep

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
