"""Calls that differ by numbers alone: by open templates they have the bits, types and errors of the
function itself."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import GradientError
from mlvm.eager.functions import shapes
from mlvm.eager.tensor import templates
from mlvm.machines.native.extension import EXTENSION
from tests.brief import count_calls, with_long
from tests.cases import tables
from tests.cases.tables import FUNCTIONS, Row
from tests.trees import outcome

pytestmark = pytest.mark.skipif(EXTENSION is None, reason="templates need the C extension")

CALLS: Final = 7
_OPERAND: Final = re.compile(r"\b([a-z])_((?:\d+(?:_\d+)*)?)\b")
_LENGTH: Final = re.compile(r"(?<![\w.*<-])(\d{1,2})(?![\w.*<])")


@pytest.fixture(autouse=True)
def _early() -> Iterator[None]:
    assert EXTENSION is not None
    before = EXTENSION.open_after(2)
    yield
    EXTENSION.open_after(before)


class Renumbered:
    """A row of functions.txt with other lengths and integers: equal ones stay equal.

    row: the row
    literals: whether integers of the code change as well
    """

    def __init__(self, row: Row, literals: bool) -> None:
        self.rng = random.Random(row.call)
        self.by = {n: self.rng.choice([0, 1, 1, 2]) for n in range(100)}
        self.row, self.literals = row, literals

    def other(self, n: str, call: int) -> str:
        return str(int(n) + call * self.by[int(n)])

    def code(self, call: int) -> str:
        """Return the code of that call."""

        def lengths(match: re.Match[str]) -> str:
            others = [self.other(n, call) for n in match[2].split("_") if n]
            return f"{match[1]}_" + "_".join(others)

        def literal(match: re.Match[str]) -> str:
            return self.other(match[1], call)

        code = _OPERAND.sub(lengths, self.row.call)
        return _LENGTH.sub(literal, code) if self.literals else code

    def function(self, call: int, dtype: str) -> Callable[[], Any]:
        """Return the call, with operands of that dtype."""
        code = self.code(call)
        space = {**tables._SPACE, "f": ml, **tables._CONSTANTS, **self.operands(code, dtype)}
        return eval(compile(f"lambda: ({code})", code, "eval"), space)

    def gradient(self, call: int, dtype: str) -> Callable[[], Any]:
        """Return a function of the value and the gradients of a sum over all results."""
        code = self.code(call)
        compiled = compile(f"({code})", code, "eval")
        operands = self.operands(code, dtype)
        space = {**tables._SPACE, "f": ml, **tables._CONSTANTS, **operands}

        def loss(xs: dict[str, ml.Tensor]) -> ml.Tensor:
            leaves = ml.tree.leaves(eval(compiled, space | xs))
            parts = [ml.sum(ml.cos(x)) for x in leaves if x.dtype.is_float]
            return sum(parts, ml.asarray(0.0)).astype("f32")

        floats = {name: x for name, x in operands.items() if x.dtype.is_float}

        def gradient() -> list[ml.Tensor]:
            value, slopes = ml.value_and_grad(loss)(floats)
            return [value, *slopes.values()]

        return gradient

    def operands(self, code: str, dtype: str) -> dict[str, ml.Tensor]:
        """Return the operands that the code names, floats in that dtype."""
        operands = {}
        for match in _OPERAND.finditer(code):
            x = ml.asarray(tables._operand(match[1], match[2]))
            operands[match[0]] = x.astype(dtype) if x.dtype.is_float else x
        return operands


ROWS: Final = [row for row in FUNCTIONS if row.first and "random" not in row.call]
SOME: Final = with_long(ROWS[::5], ROWS)


def require_same_outcomes(calls: Renumbered, make: Callable[..., Any], dtype: str) -> None:
    """Check what calls do with templates beside what they do without them."""
    for call in range(CALLS):
        function = make(calls, call, dtype)
        actual = outcome(function)
        with templates.disabled():
            expected = outcome(function)
        assert actual == expected, calls.code(call)


@pytest.mark.parametrize("dtype", with_long(["f32"], ["f32", "f16", "f64", "i32"]))
@pytest.mark.parametrize("literals", with_long([True], [True, False]))
@pytest.mark.parametrize("row", ROWS, ids=[row.call for row in ROWS])
def test_calls_of_other_numbers_are_as_the_function_makes_them(
    row: Row, literals: bool, dtype: str
) -> None:
    require_same_outcomes(Renumbered(row, literals), Renumbered.function, dtype)


@pytest.mark.parametrize("dtype", with_long(["f32"], ["f32", "f16", "f64"]))
@pytest.mark.parametrize("row", SOME, ids=[row.call for row in SOME])
def test_gradients_of_other_numbers_are_as_the_function_makes_them(row: Row, dtype: str) -> None:
    require_same_outcomes(Renumbered(row, True), Renumbered.gradient, dtype)


LOOPS: Final[dict[str, Callable[[ml.Tensor, int], ml.Tensor]]] = {
    "x[i]": lambda x, i: x[i],
    "x[-i]": lambda x, i: x[-i],
    "x[i:i + 3]": lambda x, i: x[i : i + 3],
    "concat": lambda x, i: ml.concat([x[:i], x[:2]]),
    "roll": lambda x, i: ml.roll(x, i, axis=0),
    "set": lambda x, i: x.at[i].set(2.0),
}


@pytest.mark.parametrize("rows", [200, 9000])  # the cotangent of the longer one is added in place
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_within_a_loss_runs_by_open_templates(name: str, rows: int) -> None:
    assert EXTENSION is not None
    x = ml.asarray(np.random.default_rng(0).standard_normal((rows, 4)), dtype="f32")

    def loss(x: ml.Tensor) -> ml.Tensor:
        total = ml.sum(x)
        for i in range(2, 40):
            total += ml.sum(LOOPS[name](x, i) * (1.0 + i))
        return total

    gradient = ml.value_and_grad(loss)
    before = EXTENSION.open_calls()
    actual = outcome(lambda: gradient(x))
    assert EXTENSION.open_calls() - before > 38
    with templates.disabled():
        assert outcome(lambda: gradient(x)) == actual


def test_an_operand_without_a_gradient_is_named_with_the_numbers_of_the_call() -> None:
    for n in range(10, 20):
        with pytest.raises(GradientError, match=rf"nextafter\(f32\[{n}\], f32\[{n}\]\)"):
            ml.grad(lambda x: ml.sum(ml.nextafter(x, x)))(ml.ones(n))


def test_the_default_dtype_is_a_part_of_the_key() -> None:
    x = ml.arange(100)
    for n in range(2, 20):
        assert ml.sqrt(x[:n]).dtype is ml.mean(x[:n]).dtype is ml.float32
        with ml.default_dtype(ml.float64):
            assert ml.sqrt(x[:n]).dtype is ml.mean(x[:n]).dtype is ml.float64
        assert (x[:n] / 2).dtype is ml.float32


def test_zeros_of_both_signs_are_two_numbers() -> None:
    condition = ml.asarray([True, False])
    for x in [1.5, 2.5, 3.5, 4.5]:
        ml.where(condition, x, x)
    assert np.signbit(ml.where(condition, 0.0, -0.0).numpy()).tolist() == [False, True]


def test_most_of_these_calls_run_by_open_templates() -> None:
    assert EXTENSION is not None
    before, count = EXTENSION.open_calls(), 0
    for row in ROWS[::5]:
        calls = Renumbered(row, False)
        if "dynamic" not in row.words and calls.code(0) != calls.code(1):
            count += 1
            for call in range(CALLS):
                outcome(calls.function(call, "f32"))
    assert EXTENSION.open_calls() - before > count


def test_numbers_are_open_whichever_numbers_were_open_before() -> None:
    assert EXTENSION is not None
    for p, q in np.ndindex(12, 12):
        ml.log1p(ml.ones((p + 2, q + 2)) ** 0.25)
    x, before = ml.ones((4, 4)), EXTENSION.open_calls()
    for i in range(2, 42):
        assert ml.array_equal(x ** (1.0 + 1.0 / i), x)
    assert EXTENSION.open_calls() - before > 30


def test_passes_over_many_numbers_run_by_open_templates() -> None:
    assert EXTENSION is not None
    x, before = ml.arange(200.0), EXTENSION.open_calls()
    for _ in range(8):
        for n in range(2, 42):
            assert ml.roll(x, n)[n] == 0
    assert EXTENSION.open_calls() - before > 300


def test_a_function_of_calls_with_open_templates_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_calls(monkeypatch, shapes, "_shaped")
    for n in range(40, 60):
        x = ml.ones((n, 3))
        assert ml.stack([x, x + 1.0]).shape == (2, n, 3)
        if n == 50:
            calls.clear()
    assert not calls
