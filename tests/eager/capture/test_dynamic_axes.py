"""Open lengths: one trace and one plan for calls that differ by sizes, with the bits of eager."""

from __future__ import annotations

import gc
import itertools
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import ArgumentError, CaptureError, MlvmError, ShapeError
from mlvm.core.types import root
from mlvm.eager import nn
from mlvm.eager.capture import cache
from mlvm.eager.capture.capture_limits import LIMITS
from mlvm.eager.capture.guards.changing import RecompilationWarning
from mlvm.eager.capture.patched import PatchedProgram
from mlvm.eager.tensor import number
from mlvm.machines.local import LocalVM
from mlvm.machines.native.extension import EXTENSION
from mlvm.step.saved import LoadedStep, SavedStep
from tests.brief import Fn, Patch, cases, count_calls, refuses, with_long
from tests.eager.capture.table import Row, Run, Table, Wrap, tried
from tests.fuzz import lengths as fuzz

N: Final = {"x": ("n", None)}
GRID: Final = ml.random.uniform((1, 3, 3, 2), key=ml.random.key(0)) * 2.0 - 1.0
ROWS: Final = Table()


def matrix(n: int, width: int = 4, seed: int = 0) -> ml.Tensor:
    values = np.random.default_rng((seed, n)).standard_normal((n, width))
    return ml.asarray(values.astype(np.float32))


def same(step: Any, fn: Callable[..., Any], *arguments: Any) -> bool:
    captured, eager = step(*arguments), fn(*arguments)
    return bool(captured.type is eager.type and np.array_equal(captured.numpy(), eager.numpy()))


# --- sizes ---------------------------------------------------------------------------------


def at_sizes(*sizes: int, **options: Any) -> Callable[[Fn], Run]:
    """Return a maker of rows that call fn with matrices of these sizes."""

    def of(fn: Fn) -> Run:
        def run(wrap: Wrap) -> Iterator[Any]:
            step = wrap(fn, dynamic_axes=N, **options)
            for n in sizes:
                yield step(matrix(n))

        return run

    return of


for _fn, _sizes, _programs in (
    (lambda x: ml.sum(ml.tanh(x[:-1]) @ ml.matrix_transpose(x), axis=0), (5, 9, 3, 17, 4, 9), 1),
    (lambda x: x * 2.0 if x.shape[0] > 6 else x + 1.0, (5, 9, 3, 17, 6, 7), 2),
    (lambda x: ml.trapezoid(x[:, 0] * 1.0), (9, 12, 7, 30, 7), 1),
    (lambda x: ml.median(x[:, 0]), (9, 12, 7, 30, 7), 1),
    (lambda x: x[:, 0] * ml.fft.fftfreq(x.shape[0], 0.1), (9, 12, 7, 30, 7), 1),
    (lambda x: ml.sum(x) * ml.fft.rfftfreq(x.shape[0]), (9, 12, 7, 30, 7), 1),
    (lambda x: x[:, 0] * ml.hanning(x.shape[0]), (9, 12, 7, 30, 7), 1),
    (lambda x: ml.grid_sample(x[None, :, :, None], GRID), (9, 12, 7, 30, 7), 1),
    (lambda x: ml.quantile(x[:, 0], [0.1, 0.7]), (9, 12, 7, 30, 7), 1),
    (lambda x: x * ((x.shape[0] ** 13) * 1.0), (20, 33, 40, 33, 64, 3), 1),  # beyond 64 bits
    (lambda x: x + (x.shape[0] ** 40) / (x.shape[0] ** 39), (20, 33, 40, 33, 64, 3), 1),
    (lambda x: ml.concat([x, x * ml.mean(x, axis=0)]), (4, 1, 0, 5, 1), None),
    (lambda x: (x * 2.0, x.shape, x.shape[0] * 3), (4, 7, 3, 7), 1),
):
    _make = at_sizes(*_sizes, max_sizes={"n": 64})
    ROWS.rows(f"sizes {_fn.__code__.co_firstlineno}", [_fn], _make, programs=_programs)

ROWS.rows("what python sees of a size is what a program is for", [
    lambda x: x * int(x.shape[0]),
    lambda x: x * np.sqrt(x.shape[0]).astype(np.float32),
    lambda x: x * len(x),
    lambda x: x + float(f"{x.shape[0]}"),
    lambda x: sum(x[i] for i in range(x.shape[0])),
    lambda x: x * len([0] * x.shape[0]),
    lambda x: x * {x.shape[0]: 2.0}[x.shape[0]],
    lambda x: ml.sum(x) * x.nbytes.bit_length(),
    lambda x: x * float(str(x.type).split(",")[0][4:]),
], at_sizes(4, 6, 3, 6))  # fmt: skip


def _rolled(fn: Fn, axes: Any) -> Run:
    def run(wrap: Wrap) -> Iterator[Any]:
        step = wrap(fn, dynamic_axes=axes)
        for n in (6, 3, 4, 5, 7):
            x = ml.arange(n, dtype=ml.float32)
            for k in (1, 2, 0, -1, 2, 2**31):
                yield step(x, k)

    return run


for _axes in ({"x": ("n",)}, None):
    _make = partial(_rolled, axes=_axes)
    ROWS.rows(f"numbers in attributes, axes {_axes}", [
        lambda x, k: ml.roll(x, k),
        lambda x, k: x[k:],
        lambda x, k: ml.arange(k, k + x.shape[0]),
        lambda x, k: ml.concat([ml.roll(x, -k), x * k]),
    ], _make)  # fmt: skip


@ROWS.row(programs=3)
def an_axis_is_dynamic_from_its_third_size(wrap: Wrap) -> Iterator[Any]:
    step = wrap(lambda x: ml.softmax(x, axis=0) * x.shape[0])
    for n in (5, 6, 7, 8, 9, 20):
        yield step(matrix(n))


@ROWS.row(programs=3)
def axes_that_were_always_equal_have_one_size(wrap: Wrap) -> Iterator[Any]:
    step = wrap(lambda x, y: x + y)
    for n in (4, 5, 6, 7):
        yield step(matrix(n), matrix(n, seed=1))
    yield tried(lambda: step(matrix(7), matrix(8)))[0]


@ROWS.row(programs=1, launches=None)
def views_of_dynamic_sizes(wrap: Wrap) -> Iterator[Any]:
    def fn(x: ml.Tensor) -> Any:
        x[0] = 3.0
        return ml.sum(x, axis=0), ml.reshape(x, -1), x

    step = wrap(fn, dynamic_axes=N, max_sizes={"n": 30})
    for n in (7, 12, 24, 5):
        base = ml.copy(ml.reshape(matrix(n), -1))
        view = ml.reshape(base, (n, 4))
        yield view, step(view), base


@ROWS.row(programs=3)
def two_arguments_in_one_memory(wrap: Wrap) -> Iterator[Any]:
    axes = {"x": ("n",), "y": ("m",)}
    step = wrap(lambda x, y: x + ml.reshape(y, x.shape), dynamic_axes=axes)
    for n in (5, 4, 6):
        x = ml.ones(n)
        yield step(x, ml.reshape(x, -1))


class Rows(NamedTuple):
    x: ml.Tensor
    y: list[ml.Tensor]


@ROWS.row(programs=1)
def axes_of_a_named_tuple(wrap: Wrap) -> Iterator[Any]:
    names = {"batch": {"x": ("n", None), "y": [("n",)]}}
    step = wrap(lambda batch: batch.x * batch.y[0][:, None], dynamic_axes=names)
    for n in (4, 7, 3):
        yield step(Rows(matrix(n), [ml.ones((n,)) * 2]))


@ROWS.row()
def rebound_fields_with_dynamic_sizes(wrap: Wrap) -> Iterator[Any]:
    class Mean(nn.Module):
        def __init__(self) -> None:
            self.total = ml.zeros(4)

        def __call__(self, x: ml.Tensor) -> ml.Tensor:
            self.total = self.total + ml.sum(x, axis=0)
            return x * self.total

    model = Mean()
    step = wrap(lambda x: model(x), dynamic_axes={"x": {-2: "n"}})
    for n in (4, 7, 3, 9, 7, 4, 12):
        yield step(matrix(n)), model.total


class Language(nn.Module):
    """A model of tokens, with attention or with an LSTM and padding."""

    def __init__(self, has_attention: bool) -> None:
        self.embedding = nn.Embedding(11, 8)
        layer = partial(nn.TransformerEncoderLayer, 8, 2, rotary_base=100.0, pre_norm=True)
        self.layer = layer() if has_attention else nn.LSTM(8, 8)
        self.head = nn.Linear(8, 11)

    def __call__(self, tokens: ml.Tensor) -> ml.Tensor:
        if isinstance(self.layer, nn.TransformerEncoderLayer):
            return self.head(self.layer(self.embedding(tokens), is_causal=True))
        lengths = tokens.shape[1] // (ml.arange(2) + 1)
        y, _ = self.layer(self.embedding(ml.matrix_transpose(tokens)), lengths=lengths)
        return ml.permute_dims(self.head(y), (1, 0, 2))


def _trained(has_attention: bool, half: bool) -> Run:
    def run(wrap: Wrap) -> Iterator[Any]:
        ml.random.seed(0)
        model = Language(has_attention)
        optimizer = ml.optim.AdamW(model, ml.optim.cosine(1e-2, total_steps=20))

        def loss_of(model: Any, tokens: ml.Tensor) -> ml.Tensor:
            logits = ml.astype(model(tokens[:, :-1]), ml.float32)
            return ml.softmax_cross_entropy(logits, tokens[:, 1:], reduction="mean")

        def train(tokens: ml.Tensor) -> ml.Tensor:
            with ml.autocast(ml.bfloat16) if half else nullcontext():
                loss, gradients = ml.value_and_grad(loss_of)(model, tokens)
            optimizer.update(ml.optim.clip_by_global_norm(gradients, 1.0))
            return loss

        axes = {"tokens": (None, "time")}
        step = wrap(train, dynamic_axes=axes, max_sizes={"time": 24})
        rng = np.random.default_rng(0)
        for n in (7, 12, 24, 5, 17, 9):
            yield step(ml.asarray(rng.integers(0, 11, size=(2, n)))), model.named_parameters()

    return run


for _has, _half in itertools.product((False, True), repeat=2):
    _text = f"training, attention {_has}, half precision {_half}"
    ROWS[_text] = Row(_trained(_has, _half), programs=1, launches=None)


@cases("fuse", True, False)
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.filterwarnings("ignore::mlvm.eager.RecompilationWarning")
def test_captured_calls_are_the_eager_ones(name: str, fuse: bool, monkeypatch: Patch) -> None:
    ROWS.check(name, monkeypatch, fuse=fuse)


# --- programs, plans and errors -------------------------------------------------------------


def test_the_line_that_sees_a_length_is_named() -> None:
    def fn(x: Any) -> Any:
        return x * int(x.shape[0])

    with pytest.warns(RecompilationWarning, match="value of 'n', 4") as caught:
        ml.capture(fn, dynamic_axes=N)(matrix(4))
    assert caught[0].filename == __file__
    assert caught[0].lineno == fn.__code__.co_firstlineno + 1


def test_a_length_kept_elsewhere_is_never_stale() -> None:
    lengths: list[Any] = []
    step = ml.capture(lambda x: x * lengths.__iadd__([x.shape[0]])[-1], dynamic_axes=N)
    assert [float(step(matrix(n) * 0 + 1)[0, 0]) for n in (4, 6, 4)] == [4.0, 6.0, 4.0]
    assert [int(n) for n in lengths][:2] == [4, 6]
    step = ml.capture(lambda x: x * vars(sys).setdefault("kept", x.shape[0]), dynamic_axes=N)
    try:  # no guard looks at `sys`
        assert [float(step(matrix(n) * 0 + 1)[0, 0]) for n in (3, 4, 5)] == [3.0] * 3
    finally:
        assert vars(sys).pop("kept") == 3


def test_a_trace_leaves_no_cycle_for_the_collector(monkeypatch: Patch) -> None:
    monkeypatch.setattr(number, "collect", lambda: pytest.fail("all objects are looked at"))
    step = ml.capture(lambda x: x * (x.shape[0] * 2.0), dynamic_axes=N)
    for n in (3, 4, 5):
        step(matrix(n))
    assert step.signatures == 1


@pytest.mark.skipif(EXTENSION is None, reason="windows are read by native kernels")
def test_windows_of_dynamic_sizes_are_read_and_written_in_place() -> None:
    def stencil(x: Any, y: Any) -> Any:
        y = ml.copy(y)
        y[1:-1] = x[:-2] + 2.0 * x[1:-1] + x[2:]
        y[-2:] = y[-2:] * x[:2]
        return y

    step = ml.capture(stencil, dynamic_axes={"x": ("n", None), "y": ("n", None)})
    for n in (5, 40, 7, 23):
        assert same(step, stencil, matrix(n), matrix(n, seed=1)), n
    assert step.signatures == 1
    text = ml.disassemble(step.program)
    assert text.count('["slice_set", ') == 2
    assert '"slice.out"' not in text


def test_the_plan_is_that_of_the_bound() -> None:
    def fn(x: Any) -> Any:
        return ml.sum(ml.sort(x, axis=0) @ ml.ones((4, 3)))

    step = ml.capture(fn, dynamic_axes=N, max_sizes={"n": 100})
    plans = []
    for n in (7, 100, 30):
        step(matrix(n))
        plans.append(step.plan.nbytes)
    assert len({*plans}) == 1
    assert plans[0] == ml.measure(fn, ml.TensorType("f32", (100, 4))).plan.nbytes
    for x in (matrix(30), ml.TensorType("f32", (30, 4))):
        measured = ml.measure(fn, x, dynamic_axes=N, max_sizes={"n": 100})
        assert measured.plan == step.plan
        assert measured.arena == ml.measure(fn, x).arena
        with pytest.raises(ShapeError, match=r"at most 29 as 'n' \(axis 0 of x\), got 30"):
            ml.measure(fn, x, dynamic_axes=N, max_sizes={"n": 29})
    with pytest.raises(ArgumentError, match="max_sizes= needs named axes"):
        ml.measure(fn, x, max_sizes={"n": 29})


def test_without_a_bound_the_plan_doubles() -> None:
    step = ml.capture(lambda x: ml.sum(ml.sort(x, axis=0)), dynamic_axes=N)
    plans = []
    for n in (60, 33, 64, 65, 100):
        step(matrix(n))
        plans.append(step.plan.nbytes)
    assert plans[0] == plans[1] == plans[2] < plans[3] == plans[4]


def attend(x: ml.Tensor) -> ml.Tensor:
    """A product, a chain on its rows, and others whose kernels depend on the length."""
    y = ml.gelu(x @ ml.ones((4, 32)) + 1.0)
    scores = ml.softmax(y @ ml.matrix_transpose(y) / x.shape[0], axis=-1)
    return ml.concat([ml.cumulative_sum(scores @ y, axis=0), y[1:]])


def scanned(x: Any) -> Any:
    state, ys = ml.scan(lambda s, row: (ml.tanh(s + row), s * row), ml.zeros(4), x, reverse=True)
    return ml.sum(state) + ml.sum(ys)


def counted_loop(x: Any) -> Any:
    return ml.fori_loop(1, x.shape[0], lambda i, s: ml.tanh(s + x[i]), x[0])


def loop_loss(x: Any) -> Any:
    return ml.sum(counted_loop(x))


def searched(x: Any) -> Any:
    def more(s: Any) -> Any:
        return ml.logical_and(s[0] < x.shape[0] - 1, ml.sum(s[1]) < 3.0)

    return ml.while_loop(more, lambda s: (s[0] + 1, s[1] * 1.1 + x[s[0]] ** 2), (0, x[-1]))[1]


def branched(x: Any) -> Any:
    turned = ml.cond(ml.sum(x) > 0, lambda y: y * 2.0, lambda y: ml.flip(y, axis=0) - 1.0, x)
    return ml.scan(lambda s, y: ml.cond(y[0] > s[0], lambda: (y, s), lambda: (s, y)), x[0], turned)[
        1
    ]


PROGRAMS: dict[str, Callable[..., Any]] = {
    "kernels that depend on the length": attend,
    "a scan": scanned,
    "the gradient of a scan": ml.grad(scanned),
    "a loop": counted_loop,
    "the gradient of a loop": ml.grad(loop_loss),
    "a loop of unknown length": searched,
    "branches": branched,
}


@pytest.mark.local(reason="the verifier of this process is taken away")
@pytest.mark.skipif(EXTENSION is None, reason="the loop in Python binds each length")
@pytest.mark.parametrize("fn", PROGRAMS.values(), ids=PROGRAMS)
def test_a_program_is_verified_once(fn: Callable[..., ml.Tensor], monkeypatch: Patch) -> None:
    most = 700 if fn is attend else 100
    with ml.use(ml.VM(native=True)):
        step = ml.capture(fn, dynamic_axes=N, max_sizes={"n": most})
        assert same(step, fn, matrix(most - 40))
        expected = {n: fn(matrix(n)).numpy() for n in (5, 7, 3, 90, 33, most, 6, 5)}
        monkeypatch.setattr("mlvm.core.vm.verify", None)
        monkeypatch.setattr("mlvm.core.vm.link", None)
        for n, result in expected.items():
            assert np.array_equal(step(matrix(n)).numpy(), result), n


def test_an_error_in_a_loop_of_another_length() -> None:
    """The machine goes on from the iteration that has refused a value."""
    table = ml.ones((3, 2))

    def fn(x: Any) -> Any:
        def body(i: Any, s: Any) -> Any:
            return s + ml.take(table, x[i], axis=0)

        return ml.fori_loop(0, x.shape[0], body, ml.zeros(2))

    step = ml.capture(fn, dynamic_axes={"x": ("n",)}, max_sizes={"n": 9})
    for n in (4, 6, 5):
        assert same(step, fn, ml.ones((n,), dtype=ml.int64))
    for n in (7, 8, 7):
        refuses(MlvmError, r"take.*i64", step, ml.arange(n) // 2)
        assert same(step, fn, ml.ones((n,), dtype=ml.int64))


@pytest.mark.local(reason="a VM elsewhere binds each length")
@pytest.mark.skipif(EXTENSION is None, reason="the loop in Python binds each length")
def test_a_call_inside_the_preparation_of_another(monkeypatch: Patch) -> None:
    """As in a signal handler: the inner call runs the program as any other."""

    def fn(x: Any) -> Any:
        return ml.tanh(x @ ml.matrix_transpose(x)) @ x + x

    step = ml.capture(fn, dynamic_axes=N, max_sizes={"n": 40})
    for n in (9, 12, 7, 30):
        assert same(step, fn, matrix(n))
    prepare = PatchedProgram._choice
    inner: list[bool] = []

    def interrupted(self: PatchedProgram, inputs: Any, values: Any) -> Any:
        calls = prepare(self, inputs, values)
        if not inner:
            inner.append(True)
            inner.append(same(step, fn, matrix(30)))
        return calls

    monkeypatch.setattr(PatchedProgram, "_choice", interrupted)
    for n in (8, 12, 31):
        assert same(step, fn, matrix(n))
    assert inner == [True, True]


@pytest.mark.local(reason="it looks at memory of this process")
def test_memory_of_a_closed_arena_is_not_kept() -> None:
    vm = ml.VM()
    step = ml.capture(lambda x: ml.tanh(x) * 2.0, dynamic_axes={"x": ("n",)}, max_sizes={"n": 64})
    for n in (9, 12, 7, 30):
        arena = ml.Arena(vm, "batch")
        with arena:
            x = ml.ones(n)
            step(x)
            memory = weakref.ref(root(vm._store.entry(x.handle).array))
        arena.close()
        del x
        gc.collect()
        assert memory() is None


def test_an_error_of_a_kernel_names_the_types_of_its_length() -> None:
    table = ml.ones((3, 2))
    step = ml.capture(lambda x: ml.take(table, x, axis=0) * 2.0, dynamic_axes={"x": ("n",)})
    for n in (4, 6):
        step(ml.zeros((n,), dtype=ml.int64))
    refuses(MlvmError, r"i64\[5\]", lambda: step(ml.full((5,), 3, dtype=ml.int64)))
    assert step(ml.zeros((5,), dtype=ml.int64)).shape == (5, 2)


@pytest.mark.local(reason="a function of this process")
def test_a_function_registered_between_lengths() -> None:
    vm = ml.VM()
    with ml.use(vm):
        step = ml.capture(attend, dynamic_axes=N, max_sizes={"n": 40})
        for n in (9, 12, 7, 30):
            assert same(step, attend, matrix(n))
            vm.register(f"other_{n}", lambda frame: None)
            assert same(step, attend, matrix(n))


@pytest.mark.local(reason="it counts handles of a VM of this process")
def test_programs_forgotten_give_their_memory_back() -> None:
    vm = ml.VM()
    with ml.use(vm):
        step = ml.capture(
            lambda x: ml.sum(ml.sort(x, axis=0)), dynamic_axes=N, max_sizes={"n": 200}
        )
        sizes = []
        for _ in range(5):
            for n in range(2, 40):
                step(matrix(n))
            sizes.append(len(vm._store._entries))
    assert sizes[2] == sizes[3] == sizes[4]


@pytest.mark.local(reason="it counts handles of a VM of this process")
@pytest.mark.filterwarnings("ignore::mlvm.eager.capture.guards.changing.RecompilationWarning")
def test_programs_by_shape_are_forgotten_one_at_a_time(monkeypatch: Patch) -> None:
    calls: list[object] = []
    monkeypatch.setattr("mlvm.step.compile.on_planned", [calls.append])
    vm = ml.VM()
    with ml.use(vm):
        step = ml.capture(lambda x: ml.sum(ml.sort(x, axis=0)), dynamic_axes=False)
        for n in range(1, 66):
            step(matrix(n))
        for n in range(65, 1, -1):  # the 64 last ones
            step(matrix(n))
        assert len(calls) == 65
        step(matrix(400))
        handles = []
        for first in (100, 200, 300):
            for n in range(first, first + 66):
                step(matrix(n))
            ml.default_arena().trim()  # it has a handle for each type
            handles.append(len(vm._store._entries))
        assert max(handles) == handles[0]


@cases(
    "arguments, message",
    ([(9, 4), (9,)], r"expected at most 8 as 'n' \(axis 0 of x\), got 9: f32"),
    ([(5, 4), (6,)], "'n' must have equal sizes, got 5 at axis 0 of x and 6 at axis 0 of y"),
    ([(5, 4, 1), (5,)], r"expected x with the axes \('n', None\), got f32\[5,4,1\]"),
)
def test_bad_lengths_change_nothing(arguments: Sequence[Any], message: str) -> None:
    count = ml.zeros(())

    def fn(x: Any, y: Any) -> Any:
        count[()] = count + 1
        return x * y[:, None]

    step = ml.capture(fn, dynamic_axes={"x": ("n", None), "y": ("n",)}, max_sizes={"n": 8})
    step(ml.ones((4, 4)), ml.ones((4,)))
    refuses(ShapeError, message, lambda: step(*[ml.ones(shape) for shape in arguments]))
    step(ml.ones((5, 4)), ml.ones((5,)))
    assert float(count) == 2


def test_names_of_axes_of_numbers_and_of_absent_tensors() -> None:
    step = ml.capture(
        lambda x, y=None: ml.sum(ml.asarray(x)), dynamic_axes={"x": ("n",), "y": ("n",)}
    )
    message = r"names axes of 'x', expected tensors, got a list; pass ml.asarray\(x\)"
    refuses(ArgumentError, message, step, [1.0, 2.0])
    names = {"batch": {"x": ("n", None), "y": [("n",)]}}
    of_rows = ml.capture(lambda batch: batch.x, dynamic_axes=names, max_sizes={"n": 8})
    message = r"at most 8 as 'n' \(axis 0 of batch\['x'\]\), got 9"
    refuses(ShapeError, message, of_rows, Rows(matrix(9), [ml.ones(9)]))
    assert float(step(np.asarray([1.0, 2.0]), [None, {"k": []}])) == 3


def loaded(step: Any, folder: Path) -> LoadedStep:
    """The step of a captured function, saved and loaded, on another machine."""
    step.save(folder / "step.mlvm")
    return LoadedStep(SavedStep.from_bytes((folder / "step.mlvm").read_bytes()), LocalVM())


def trained() -> tuple[nn.Module, Callable[[Any], Any]]:
    """A model, and a step of its training whose loss counts the tokens."""
    ml.random.seed(0)
    model = nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 11))
    optimizer = ml.optim.AdamW(model, 1e-2)

    def loss_of(model: Any, tokens: Any) -> Any:
        logits = ml.dropout(model(tokens[:, :-1]), 0.1)
        loss = ml.softmax_cross_entropy(logits, tokens[:, 1:], reduction="mean")
        return loss / tokens.shape[1]

    def train(tokens: Any) -> Any:
        loss, gradients = ml.value_and_grad(loss_of)(model, tokens)
        optimizer.update(gradients)
        return loss, tokens

    return model, train


def test_a_saved_step_takes_all_lengths(tmp_path: Path) -> None:
    model, train = trained()
    step = ml.capture(train, dynamic_axes={"tokens": (None, "time")}, max_sizes={"time": 24})
    rng = np.random.default_rng(0)
    for n in (7, 12):
        step(ml.asarray(rng.integers(0, 11, size=(2, n))))
    saved = loaded(step, tmp_path)
    assert str(saved.step.open) == "time = 12, at most 24"
    assert saved.step.input_types == ["i64[2,time]"]
    assert saved.step.to_bytes() == (tmp_path / "step.mlvm").read_bytes()
    storages = []
    for n in (5, 24, 12, 2, 24):
        tokens = rng.integers(0, 11, size=(2, n))
        loss, same_tokens = saved(tokens)
        assert loss.tobytes() == step(ml.asarray(tokens))[0].numpy().tobytes()
        assert np.array_equal(tokens, same_tokens)
        storages.append(saved.vm.consumed_size_in_mib())
    assert storages[1] == storages[4]
    weights = {x.numpy().tobytes() for x in model.named_parameters().values()}
    assert weights <= {x.tobytes() for x in saved.states()}
    saved.close()
    assert saved.vm.consumed_size_in_mib() == 0
    assert step.signatures == 1


@cases(
    "shapes, message",
    (((9, 4), (9,)), "step: axis 0 of input 0 and axis 0 of input 1 is 'n' = 9, expected 1 to"),
    (((0, 4), (0,)), "step: axis 0 of input 0 and axis 0 of input 1 is 'n' = 0, expected 1 to"),
    (((5, 4), (6,)), "step: 'n' is 5 at axis 0 of input 0, and 6 at axis 0 of input 1: axes"),
    (
        ((2, 4), (2,)),
        "n = 2 the function takes other branches than at n = 7, in LINE, after a call",
    ),
    (((5, 4), (5, 1)), "step: expected input 1 as f32[n], got f32[5,1]"),
    (((5, 3), (5,)), "step: expected input 0 as f32[n,4], got f32[5,3]"),
)
def test_a_saved_step_refuses_other_lengths(shapes: Any, message: str, tmp_path: Path) -> None:
    def fn(x: Any, y: Any) -> Any:
        return ml.sum(x * y[:, None]) if x.shape[0] > 4 else ml.sum(x)

    line = f"{__file__}:{fn.__code__.co_firstlineno + 1}; save a second step"
    step = ml.capture(fn, dynamic_axes={"x": ("n", None), "y": ("n",)}, max_sizes={"n": 8})
    step(matrix(7), ml.ones(7))
    saved = loaded(step, tmp_path)
    before = saved(np.ones((7, 4), np.float32), np.ones(7, np.float32))
    caught = refuses(ShapeError, "", saved, *[np.ones(shape, np.float32) for shape in shapes])
    assert message.replace("LINE", line) in str(caught)
    assert saved(np.ones((7, 4), np.float32), np.ones(7, np.float32)) == before
    assert saved(np.ones((6, 4), np.float32), np.ones(6, np.float32)) == [24.0]


def test_a_step_is_not_saved_at_a_length_of_0(tmp_path: Path) -> None:
    step = ml.capture(lambda x: ml.tanh(x), dynamic_axes=N, max_sizes={"n": 9})
    for n in (5, 0):
        step(matrix(n))
    refuses(CaptureError, "has length 0 for n; call it with longer", step.save, tmp_path / "a.mlvm")
    step(matrix(3))
    assert loaded(step, tmp_path)(np.ones((7, 4), np.float32))[0].shape == (7, 4)


@cases(
    "fn, options, length, message",
    (
        ml.tanh,
        {},
        5,
        "a step with dynamic axes needs bounds for 'n', got none; capture it",
    ),
    (ml.tanh, {"max_sizes": {"n": 9}}, 1, "is valid only for its own lengths: sizes of 0 and 1"),
    (lambda x: x * len(x), {"max_sizes": {"n": 9}}, 5, "needs the value of 'n', so each"),
    (
        ml.tanh,
        {"max_sizes": {"n": 9}, "replace": {lambda x: ml.tanh(x): "tanh"}},
        5,
        "is valid only for its own lengths: replace= is used",
    ),
)
@pytest.mark.filterwarnings("ignore::mlvm.eager.capture.guards.changing.RecompilationWarning")
@pytest.mark.filterwarnings("ignore::mlvm.eager.capture.replacing.ReplacementWarning")
def test_a_step_that_is_for_some_lengths_alone(
    fn: Any, options: Any, length: int, message: str, tmp_path: Path
) -> None:
    step = ml.capture(lambda x: fn(x), dynamic_axes=N, **options)
    step(matrix(length))
    for use in (step.save, lambda path: step.plot(path, sizes={"n": 3})):
        caught = refuses(CaptureError, "", use, tmp_path / "step.svg")
        assert message in str(caught)
    if message.startswith("needs"):
        assert str(caught).startswith(f"{__file__}:")
    assert not list(tmp_path.iterdir())


def test_an_axis_without_a_name_has_no_place_in_a_file(tmp_path: Path) -> None:
    step = ml.capture(lambda x, y: ml.sum(x) + ml.sum(y), dynamic_axes=N, max_sizes={"n": 9})
    for n in (3, 4, 5):
        step(matrix(4), ml.ones(n))
    with pytest.raises(
        CaptureError, match=r"axis 0 of input 1, f32\[5\], became dynamic automatically"
    ):
        step.save(tmp_path / "step.mlvm")


def test_the_plan_tells_the_bytes_of_the_last_lengths(tmp_path: Path) -> None:
    step = ml.capture(
        lambda x: ml.sum(ml.sort(ml.tanh(x), axis=0)), dynamic_axes=N, max_sizes={"n": 96}
    )
    pictures, used = [], []
    for n in (96, 16, 48):
        step(matrix(n))
        used.append(step.plan.used)
        step.plot(tmp_path / "last.svg")
        pictures.append((tmp_path / "last.svg").read_text())
        step.plot(tmp_path / "named.svg", sizes={"n": 48})
    assert used[0] == step.plan.nbytes
    assert used == [used[0], used[0] // 6, used[0] // 2]
    assert str(step.plan).endswith(f"; at most {used[2]:,} in use at a call's lengths")
    named = (tmp_path / "named.svg").read_text()
    assert named.replace(" at n = 48", "") == pictures[2] != pictures[1]
    for sizes, message in (({"n": 97}, "expected 1 to 96"), ({"m": 3}, "a length of n, got 'm'")):
        refuses(ShapeError, message, step.plot, tmp_path / "none.svg", sizes=sizes)
    assert not (tmp_path / "none.svg").exists()
    fixed = ml.capture(lambda x: ml.sum(ml.sort(x)), dynamic_axes=False)
    fixed(ml.ones(4))
    assert fixed.plan.used is None


def test_a_temporary_may_be_larger_than_at_the_bound(tmp_path: Path) -> None:
    def fn(x: Any) -> Any:
        return ml.sum(ml.sort(ml.tanh(ml.ones(40 - x.shape[0])) * x[0, 0]))

    step = ml.capture(fn, dynamic_axes=N, max_sizes={"n": 32})
    for n in (30, 5, 31, 8, 30):
        assert same(step, fn, matrix(n))
    assert step.signatures == 1
    with pytest.raises(CaptureError, match="or a tensor is larger than at the bounds"):
        step.save(tmp_path / "step.mlvm")
    expected = step(matrix(32)).numpy().tobytes()
    saved = loaded(step, tmp_path)
    assert saved(matrix(32).numpy())[0].tobytes() == expected
    with pytest.raises(ShapeError, match="step: at n = 5 a temporary is larger than at the bounds"):
        saved(matrix(5).numpy())


@pytest.mark.local(reason="a VM elsewhere binds each length")
@pytest.mark.skipif(EXTENSION is None, reason="the loop in Python binds each length")
def test_kernels_chosen_for_a_length_serve_those_of_equal_guards(monkeypatch: Patch) -> None:
    with ml.use(ml.VM(native=True)):
        step = ml.capture(attend, dynamic_axes=N, max_sizes={"n": 700})
        planned = count_calls(monkeypatch, PatchedProgram, "_add")
        lengths = (600, 3, 5, 16, 17, 64, 65, 300, 7, 32, 33)
        for n in lengths * 2:
            assert same(step, attend, matrix(n))
        count = planned["_add"]
        monkeypatch.setattr(cache, "LIMITS", LIMITS._replace(programs=1))
        for n in (601, 9, 66, *lengths):
            assert same(step, attend, matrix(n))
        assert planned["_add"] - count <= 6 < count


def test_threads_share_a_trace() -> None:
    step = ml.capture(lambda x: ml.sum(ml.tanh(x) @ ml.ones((4, 4)), axis=0), dynamic_axes=N)

    def run(seed: int) -> bool:
        sizes = np.random.default_rng(seed).integers(2, 60, size=30).tolist()
        return all(same(step, step.fn, matrix(n)) for n in sizes)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(4)))


@pytest.mark.parametrize("seed", range(with_long(15, 40)))
def test_random_functions(seed: int) -> None:
    with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore"):
        assert fuzz.check(seed)[0] in ("equal", "raised")


@pytest.mark.filterwarnings("ignore:.*has recorded its")
def test_programs_of_one_length_are_forgotten_too() -> None:
    step = ml.capture(lambda x, k: ml.roll(x, k), dynamic_axes={"x": ("n",)})
    for k in range(LIMITS.programs + 9):
        step(ml.ones(50), k)
    counts = Counter(entry.opened for entry in step._entries._keys)
    assert max(counts.values()) == LIMITS.programs


def test_a_number_of_a_length_that_does_not_fit_names_the_length(tmp_path: Path) -> None:
    step = ml.capture(lambda x: x * x.shape[0], dynamic_axes=N, max_sizes={"n": 300})
    for n in (3, 4, 5):
        step(ml.ones((n, 2), dtype="int8"))
    saved = loaded(step, tmp_path)
    refuses(ShapeError, "at n = 128, 128 is out of range for i8", saved, np.ones((128, 2), "i1"))
    assert saved(np.ones((5, 2), "i1"))[0].tolist() == [[5, 5]] * 5


def test_a_step_is_saved_with_all_of_its_lengths(tmp_path: Path) -> None:
    lengths = {"x": ("n", None), "y": ("m", None)}
    step = ml.capture(
        lambda x, y: (x * 2.0, y * 3.0), dynamic_axes=lengths, max_sizes={"n": 9, "m": 9}
    )
    for m in (3, 4, 5):
        step(ml.ones((1, 4)), ml.ones((m, 4)))
    refuses(CaptureError, "has constant sizes for n", step.save, tmp_path / "step.mlvm")


def test_pictures_without_lengths_name_the_remedy(tmp_path: Path) -> None:
    step = ml.capture(ml.tanh)
    step(ml.ones(3))
    path = tmp_path / "step.svg"
    refuses(ArgumentError, "expected sizes by name", step.plot, path, sizes=cast(Any, 5))
    refuses(CaptureError, "name open axes, as in", step.plot, path, sizes={"n": 3})
