"""`ml.capture(check=n)`: a program that is out of date raises, with the line and the value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import ArgumentError, StaleProgramError
from mlvm.eager import nn, optim
from tests.brief import Fn, cases, line_with, refuses

pytestmark = pytest.mark.usefixtures("weights")

hidden: Any = np  # no guard compares variables of numpy


@pytest.fixture(autouse=True)
def state() -> Iterator[None]:
    hidden.rate, hidden.axis, hidden.more = 2.0, 0, False
    yield
    for name in ("rate", "axis", "more", "traced"):
        vars(hidden).pop(name, None)


def loops(x: ml.Tensor) -> Any:
    return ml.scan(lambda c, row: (c + row * hidden.rate, None), ml.zeros(3), x)[0]


def grows(x: ml.Tensor) -> Any:
    y = x * 2.0
    return y + 1.0 if hidden.more else y


@cases(
    "fn, name, value, text",
    (lambda x: x * hidden.rate, "rate", 3.0, "operand 1 of multiply was 2.0 .* is 3.0 now"),
    (lambda x: ml.sum(x, axis=hidden.axis), "axis", 1, "'axis' of sum was 0 .* and is 1 now"),
    (lambda x: (x, {"a": [hidden.rate]}), "rate", 5, r"the result\[1\]\['a'\]\[0\] was 2.0 .* 5"),
    (lambda x: ml.asarray([hidden.rate, 1.0]) * x[0, 0], "rate", 7.0, r"was \[2.0, 1.0\] .*\[7.0"),
    (loops, "rate", 3.0, "was 2.0 when it was compiled, and is 3.0 now"),
    (grows, "more", True, "the next call was .* and is the call of add now"),
)
def test_a_difference_names_its_line_and_value(fn: Fn, name: str, value: Any, text: str) -> None:
    step, x = ml.capture(fn, check=1), ml.ones((3, 3))
    for _ in range(2):
        step(x)
    setattr(hidden, name, value)
    error = refuses(StaleProgramError, f"test_checked.py:\\d+: .*{text}", step, x)
    assert "capture(check=)" in str(error)


def test_the_line_is_that_of_the_call() -> None:
    step = ml.capture(lambda x: x * hidden.rate, check=1)  # this line
    step(ml.ones(2))
    hidden.rate = 3.0
    refuses(StaleProgramError, line_with("# this line", __file__), step, ml.ones(2))


def test_every_nth_call_is_compared() -> None:
    step = ml.capture(lambda x: x * hidden.rate, check=3)
    step(ml.ones(2))
    hidden.rate = 3.0
    raised = []
    for _ in range(6):
        try:
            step(ml.ones(2))
            raised.append(False)
        except StaleProgramError:
            raised.append(True)
    assert raised == [False, False, True, False, False, True]


def test_an_error_of_the_function_is_a_difference() -> None:
    step = ml.capture(lambda x: x * (1 / hidden.rate), check=1)
    step(ml.ones(2))
    hidden.rate = 0
    refuses(StaleProgramError, "the function now raises ZeroDivisionError", step, ml.ones(2))


def test_a_training_step_with_lengths_numbers_and_updates_is_the_same() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            self.layer, self.mean = nn.Linear(3, 3, key=ml.random.key(0)), ml.zeros(3)

        def __call__(self, x: ml.Tensor) -> Any:
            self.mean = self.mean * 0.5 + ml.mean(x, axis=0)
            return nn.Dropout(0.5)(self.layer(x)) * float(hidden.rate)

    model = Model()
    optimizer = optim.AdamW(model, 1e-3)

    @ml.capture(check=1, dynamic_axes={"x": ("n", None)})
    def step(x: ml.Tensor, weight: float) -> Any:
        loss, grads = ml.value_and_grad(lambda m: weight * ml.mean(m(x) ** 2))(model)
        optimizer.update(grads)
        return loss, x.shape[0] * weight

    for i in range(8):
        optimizer.learning_rate = 1e-3 / (i + 1)
        assert step(ml.ones((3 + i, 3)), 1.0 + i)[1] == (3 + i) * (1.0 + i)


@cases(
    "fn",
    lambda x: {x + i for i in range(6)},
    lambda x: [{x * 2, x * 3}, {(x * 4, 1), (x * 5, 2), (x * 6, 3)}],
    lambda x: ({x - 1: 1, x - 2: 2}, frozenset({x * 2, frozenset({x * 3, x * 4})})),
)
def test_a_set_of_tensors_has_no_order(fn: Fn) -> None:
    for _ in range(8):
        step = ml.capture(fn, check=1)
        for _ in range(4):
            step(ml.ones(2))


def test_without_it_nothing_is_traced_again() -> None:
    for check, count in ((None, 1), (1, 4), (2, 2)):
        hidden.traced = []
        step = ml.capture(lambda x: (hidden.traced.append(1), x)[1], check=check)
        for _ in range(4):
            step(ml.ones(2))
        assert len(hidden.traced) == count


@cases("check", 0, True, 1.0, "often")
def test_what_is_no_number_of_calls_is_refused(check: Any) -> None:
    refuses(ArgumentError, "check=n with an int n of 1 or more", ml.capture, check=check)
