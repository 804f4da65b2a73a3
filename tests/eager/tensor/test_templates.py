"""Each row of tests/cases/functions.txt through the cache of composed calls: the first call, which
is recorded, and later ones, which are replayed, do what a call without the cache does.

Compared are bits, types, structures, warnings, errors, and gradients."""

from __future__ import annotations

import importlib
import importlib.util
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, Final

import pytest

import mlvm.eager as ml
from mlvm.eager.autodiff.rules import VJPS
from mlvm.eager.tensor import primitives, templates
from mlvm.eager.tensor.apply import one_op
from mlvm.eager.tensor.constants import constant, is_constant
from mlvm.eager.tensor.wrapper import public
from mlvm.machines.native.extension import EXTENSION
from tests.brief import run_python, with_long
from tests.cases.tables import FUNCTIONS, Row, flat
from tests.trees import outcome

MODULE: Final = "mlvm.eager.tensor.templates"
DTYPES: Final = ("f32", "bf16", "f64")
CALLS: Final = 3
"""Calls of each row with the cache."""

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec(MODULE) is None, reason="this version has no cache of composed calls"
)

rows = pytest.mark.parametrize("row", FUNCTIONS, ids=[row.call for row in FUNCTIONS])


@pytest.fixture(autouse=True, scope="module")
def _chains_at_first() -> Iterator[None]:
    """Join the elementwise steps of a template in its first run."""
    assert EXTENSION is not None
    before = EXTENSION.chain_after(0)
    yield
    EXTENSION.chain_after(before)


def disabled() -> AbstractContextManager[Any]:
    """Return a block without the cache."""
    return importlib.import_module(MODULE).disabled()


def operands(row: Row, dtype: str) -> list[ml.Tensor]:
    narrow = {"f": dtype, "c": "c128" if dtype == "f64" else "c64"}
    return [ml.asarray(x).astype(narrow.get(x.dtype.kind, x.dtype)) for x in row.operands.values()]


def check(call: Callable[[], Any]) -> None:
    """Check that calls with the cache have the outcome of one without."""
    with disabled():
        expected = outcome(call)
    for _ in range(CALLS):
        assert outcome(call) == expected


def usual(row: Row) -> str:
    """Return the dtype of a row in a quick run, another one for the next row."""
    allowed = [dtype for dtype in DTYPES if not row.words & {"f32", "f64"} - {dtype}]
    return allowed[len(row.call) % len(allowed)]


@rows
def test_values(row: Row) -> None:
    for dtype in with_long([usual(row)], DTYPES):
        xs = operands(row, dtype)
        check(lambda xs=xs: row.ours(*xs))  # type: ignore[misc]
        again = operands(row, dtype)  # other tensors of these types, with other values
        again = [x * 0.5 if x.dtype.is_float else x for x in again]
        check(lambda xs=again: row.ours(*xs))  # type: ignore[misc]


@rows
def test_gradients(row: Row) -> None:
    """A tape is active, and the rows without gradients raise the same errors."""
    xs = operands(row, usual(row))
    inexact = [i for i, x in enumerate(xs) if x.dtype.is_inexact]

    def gradients() -> Any:
        def results(*chosen: ml.Tensor) -> Any:
            arguments = [*xs]
            for i, x in zip(inexact, chosen, strict=True):
                arguments[i] = x
            return [
                y
                for y in flat(row.ours(*arguments))
                if isinstance(y, ml.Tensor) and y.dtype.is_inexact
            ]

        ys, pullback = ml.vjp(results, *[xs[i] for i in inexact])
        return ys, pullback([ml.cos(y) for y in ys])

    check(gradients)


@rows
def test_under_autocast(row: Row) -> None:
    """The cache has other entries there: the row runs outside, inside, and outside again."""
    xs = operands(row, "f64" if "f64" in row.words else "f32")
    check(lambda: row.ours(*xs))
    with ml.autocast("bfloat16"):
        check(lambda: row.ours(*xs))
    check(lambda: row.ours(*xs))


def test_an_operand_that_is_the_tensor_of_a_number_makes_no_template() -> None:
    """Its step would mean the operand where the function means the number."""
    zero, two = constant(0.0, ml.float64), ml.asarray(2.0, dtype=ml.float64)
    zero = constant(0.0, ml.float64)
    for x, expected in ((zero, True), (two, False)):
        assert [bool(ml.equal(x, 0.0)) for _ in range(CALLS)] == [expected] * CALLS


@pytest.mark.skipif(EXTENSION is None, reason="without the C extension there are no templates")
def test_one_thread_records_at_a_time() -> None:
    """Another thread begins to record while this one asks whether an operand is a constant."""
    extension: Any = EXTENSION
    x, calls = ml.ones(3), list[object]()
    is_inside, may_go = threading.Event(), threading.Event()

    def slow(x: ml.Tensor) -> ml.Tensor:
        is_inside.set()
        may_go.wait(10)
        return x + 1.0

    def quick(x: ml.Tensor) -> ml.Tensor:
        calls.append(x)
        return x * 2.0

    recorder = threading.Thread(target=lambda: extension.call(slow, (x,), {}))

    def asked(tensor: ml.Tensor) -> bool:
        if recorder.ident is None:
            recorder.start()
            is_inside.wait(10)
        return is_constant(tensor)

    may_go.set()
    for function in (slow, quick):
        extension.call(function, (x,), {})
    may_go.clear()
    is_inside.clear()
    extension.install(is_constant=asked)
    try:
        assert extension.call(quick, (x,), {}).tolist() == [2, 2, 2]
        may_go.set()
        recorder.join()
    finally:
        extension.install(is_constant=is_constant)
    assert extension.call(quick, (x,), {}).tolist() == [2, 2, 2]
    assert len(calls) == 3  # the second call was not recorded


def test_derivatives_of_a_power_by_a_number_and_by_a_tensor() -> None:
    def derivative(order: int, x: float, y: Any) -> float:
        fn: Any = lambda t: ml.pow(t, y)  # noqa: E731
        for _ in range(order):
            fn = ml.grad(fn)
        return float(fn(ml.asarray(x, dtype=ml.float64)))

    assert [derivative(order, -0.5, 0.0) for order in (2, 3)] == [0, 0]
    assert derivative(2, 0.0, ml.asarray(2.0, dtype=ml.float64)) == 2


@pytest.mark.parametrize("name", ["interp", "elu", "celu", "nanmedian", "trapezoid", "lerp"])
def test_no_call_of_a_composed_function_needs_more_memory_than_the_function(name: str) -> None:
    x = ml.asarray([float(i) for i in range(64)])
    args = {"interp": (x, x, x), "lerp": (x, x, 0.5)}.get(name, (x,))

    def high_water() -> int:
        arena = ml.Arena(x.arena.vm, "measured")
        with arena:
            getattr(ml, name)(*args)
            return arena.high_water

    with templates.disabled():
        of_the_function = high_water()
    assert max(high_water() for _ in range(6)) <= of_the_function


@pytest.mark.parametrize("name", ["hard_swish", "elu", "leaky_relu", "silu"])
def test_a_template_computes_elementwise_steps_together(name: str) -> None:
    x = ml.asarray([float(i - 32) for i in range(64)])
    function = getattr(ml, name)
    for _ in range(CALLS):
        function(x)
    arena = ml.Arena(x.arena.vm, "joined")
    with arena:
        function(x)
        assert arena.high_water == x.nbytes  # the steps alone need memory for their results
    with arena, templates.disabled():
        function(x)
        assert arena.high_water > x.nbytes


def test_templates_stop_gradients() -> None:
    scaled = public(lambda x: x * ml.stop_gradient(x) + 1.0)
    assert [ml.grad(scaled)(ml.asarray(3.0)).tolist() for _ in range(CALLS)] == [3] * CALLS


@pytest.mark.skipif(EXTENSION is None, reason="the extension runs templates")
def test_templates_of_the_keys_in_use_are_kept() -> None:
    """Two keys with the same place in the table replaced the templates of each other."""
    calls = []

    @public
    def twice(x: ml.Tensor, name: str) -> ml.Tensor:
        calls.append(name)
        return x * 2.0 + x

    x = ml.ones(3)
    for _ in range(3):
        calls.clear()
        for i in range(300):
            twice(x, f"{i}")
    assert not calls


@pytest.mark.skipif(EXTENSION is None, reason="the extension runs templates")
def test_a_rule_of_a_backward_pass_is_called_by_a_template(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    rule = VJPS["sinh"]["x"]

    @wraps(rule)
    def counted(g: ml.Tensor, *saved: ml.Tensor) -> Any:
        calls.append(g)
        return rule(g, *saved)

    monkeypatch.setitem(VJPS["sinh"], "x", counted)
    x = ml.asarray([0.5] * 19)
    check(lambda: ml.grad(lambda x: ml.sum(ml.sinh(x)))(x))
    assert len(calls) == 1 + 2  # without templates; the first call, and the recorded one
    monkeypatch.undo()
    one_op("sinh").templates.clear()


def test_a_step_after_a_length_that_depends_on_values_makes_no_template() -> None:
    calls = []

    @public
    def firsts(x: ml.Tensor) -> ml.Tensor:
        calls.append(x)
        positive = primitives.boolean_index(x, x > 0.0)
        return primitives.multiply(positive, float(positive.size))

    for values in ([1.0, 2.0], [1.0, -2.0], [-1.0, -2.0], [3.0, 2.0]):
        x = ml.asarray(values)
        check(lambda x=x: firsts(x))  # type: ignore[misc]
    assert len(calls) == 4 * (1 + CALLS)


@pytest.mark.parametrize("name", ["unique_values", "nonzero", "argwhere", "flatnonzero"])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f64", "int8", "uint64", "bool", "c64"])
def test_results_whose_lengths_depend_on_values(name: str, dtype: str) -> None:
    for values in ([[0.0, -0.0, 3.0], [3.0, 1.0, 0.0]], [[0.0] * 3] * 2, [[1.0, 2.0, 3.0]] * 2):
        x = ml.asarray(values).astype(dtype)
        check(lambda x=x: getattr(ml, name)(x))  # type: ignore[misc]
    check(lambda: getattr(ml, name)(ml.zeros((0, 3), dtype=dtype)))


@pytest.mark.skipif(EXTENSION is None, reason="the extension runs open templates")
def test_the_first_calls_with_new_numbers_import_neither_the_compiler_nor_queues() -> None:
    source = (
        "import sys, mlvm.eager as ml\n"
        "from mlvm.machines.native.extension import EXTENSION\n"
        "[ml.zeros(n) for n in range(2, 20)]\n"
        "unused = {'mlvm.step.compile', 'mlvm.input.queue'}\n"
        "print(EXTENSION.open_calls() > 0, unused & {*sys.modules})"
    )
    assert run_python("-c", source).stdout.split("\n")[0] == "True set()"
