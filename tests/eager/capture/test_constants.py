"""Arrays, lists and numbers that a captured function reaches are constants of its program, and a
call after one of them changed finds the new value: eager and captured are one to the bit."""

from __future__ import annotations

import gc
import operator
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mlvm.eager as ml
from mlvm.core.errors import CaptureError
from mlvm.core.ops.half import cast
from mlvm.core.types import bf16
from mlvm.eager import nn
from mlvm.machines.wire import WireVM
from tests.brief import Fn, refuses
from tests.trees import bits

pytestmark = pytest.mark.local(reason="arrays and lists stand beside tensors of this process alone")

Row = tuple[Callable[[], Any], Callable[[Any], Fn], Sequence[Callable[[Any], object]]]

X = np.array([[0.5, -0.0, np.nan], [np.inf, 2.0, -3.25]], np.float32)
MEAN = np.array([1.0, 2.0, 3.0], np.float32)
untyped: Any = ml
put: Any = operator.setitem


@pytest.fixture(autouse=True)
def around() -> Iterator[Any]:
    vm = ml.VM("constants")
    with ml.Arena(vm, "results").allocating():
        yield vm
    MEAN[:] = [1.0, 2.0, 3.0]


# --- what is reachable from outside is known by value -----------------------------------------


class Scaler(nn.Module):
    def __init__(self) -> None:
        self.mean = np.ones(3, np.float32)
        self.weight = ml.ones(3)

    def __call__(self, x: Any) -> Any:
        return (x - self.mean) * self.weight


class Named(np.ndarray):
    name: str


class Scaled:
    """An object that has an array."""

    def __init__(self) -> None:
        self.values, self.scale = np.ones(3, np.float32), 1.0

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.values * np.float32(self.scale)


def sets(**fields: Any) -> Callable[[Any], None]:
    return lambda c: vars(c).update(fields)


def puts(place: Any, value: Any, of: Any = None) -> Callable[[Any], None]:
    """The change that writes a value at a place, into an item of the object if `of` names one."""
    return lambda c: put(c if of is None else c[of], place, value)


def of_other_classes(c: Any) -> Fn:
    named, masked, record, compact, raw = c

    def fn(x: Any) -> Any:
        y = x * named + masked.data + ml.asarray(compact)
        return y, record["a"] * x, record["b"] + ml.asarray(raw), x + masked.filled(9.0)

    return fn


def assigned(c: Any) -> Fn:
    values, places = c

    def fn(x: Any) -> Any:
        y = x + 0
        y[:, places] = values
        y[0] += values.sum()
        return y, ml.where(values.mean() > 5, x, values[0]), untyped.take(x, [1, *places], axis=1)

    return fn


def masked(c: Any) -> Fn:
    rows, columns = c

    def fn(x: Any) -> Any:
        y = ml.grad(lambda x: ml.sum(ml.cos(x[rows])) + ml.sum(ml.exp(x[:, columns])))(x)
        y[columns[:2]] = 5.0
        return x[rows], x[:, columns], x[X > 0], x[rows, columns], x[..., None, columns], y

    return fn


def drawn(seeds: Any) -> Fn:
    def fn(x: Any) -> Any:
        key = ml.random.fold_in(ml.random.key(seeds["key"]), seeds["step"])
        return key, x + ml.random.normal(3, key=key)

    return fn


KINDS = [np.float32, np.float64, np.int32, np.bool_, np.complex64, np.float16]
SIX = np.arange(6, dtype=np.float32)

# An object, a function of it that returns the function, and changes after each of which the
# function computes another value of a tensor f32[2,3].
CASES: dict[str, Row] = {
    "a global": (lambda: MEAN, lambda _: lambda x: x - MEAN, [
        puts(1, 7.0), puts(1, np.nan), puts(slice(None), [0.0, -0.0, 0.0]), puts(1, 0.0)]),
    "a zero that changes its sign": (
        lambda: np.zeros((), np.float32), lambda c: lambda x: x / c, [puts((), -0.0)]),
    "a nan with other bits": (
        lambda: np.array([0x7FC00000], np.uint32),
        lambda c: (lambda value: lambda x: ml.asarray(value))(c.view(np.float32)),
        [puts(0, 0x7FC00001)]),
    "a value of another class": (
        lambda: SimpleNamespace(mean=np.ones(3, np.float32)),
        lambda c: lambda x: (x + c.mean, ml.asarray(c.mean)),
        [sets(mean=each) for each in (
            [1.0, 2.0, 3.0], (1, 2, 3), (1, 2.0, 3), 5, True, np.float64(5))]),
    "an array of another dtype": (
        lambda: SimpleNamespace(mean=np.ones(3, np.float32)),
        lambda c: lambda x: (x + c.mean, ml.asarray(c.mean)),
        [sets(mean=np.array([1, 0, 1], each)) for each in KINDS]),
    "another shape": (
        lambda: [SIX.reshape(2, 3)], lambda c: lambda x: x * c[0],
        [puts(0, each) for each in (
            SIX.reshape(2, 3)[:, ::-1], SIX.reshape(3, 2).T, SIX.reshape(2, 1, 3))]),
    "a field of an object": (
        lambda: SimpleNamespace(mean=np.ones(3), by=[np.float32(2.0)]),
        lambda c: lambda x: (x - c.mean) * c.by[0],
        [lambda c: put(c.mean, 0, 4.0), sets(mean=np.zeros(3)),
         lambda c: put(c.by, 0, np.float32(3.0))]),
    "a field of a module": (
        Scaler, lambda c: c.__call__,
        [lambda c: put(c.mean, 0, 4.0), lambda c: setattr(c, "mean", np.zeros(3, np.float64))]),
    "a default": (
        lambda: np.ones(3), lambda c: lambda x, c=c, *, by=c: (x - c) * by, [puts(0, 4.0)]),
    "containers": (
        lambda: np.ones(3), lambda c: (lambda a, b, d: lambda x: x + a[1][0] * b[0] * d["d"][1])(
            (c, [c]), deque([c]), OrderedDict(d=MappingProxyType({1: c}))), [puts(0, 4.0)]),
    "a list of numbers": (
        lambda: ([1.0, 2.0, 3.0], [0, 2]),
        lambda c: (lambda scale, places: lambda x: (x * scale)[:, places])(*c),
        [puts(0, -0.0, 0), lambda c: c[0].reverse(), puts(1, 1, 1), lambda c: c[1].append(2),
         puts(2, 1, 0), lambda c: c[1].clear()]),
    "a view of what changes": (
        lambda: np.arange(9, dtype=np.float32),
        lambda c: (lambda view, fixed: lambda x: x * view + fixed)(
            c[::3], np.broadcast_to(c[:1], (3,))), [puts(3, -1.0), puts(0, 5.0)]),
    "arrays of other classes": (
        lambda: (
            np.ones(3, np.float32).view(Named),
            np.ma.MaskedArray([1.0, 2.0, 3.0], mask=[False, True, False]),
            np.array([(1.0, 2)] * 3, [("a", "f4"), ("b", "i4")]),
            array("f", [1.0, 2.0, 3.0]), bytearray(b"abc")),
        of_other_classes,
        [puts(0, 2.0, 0), lambda c: put(c[1].data, 0, 2.0), lambda c: put(c[1].mask, 0, True),
         puts(0, (3.0, 4), 2), puts(0, 2.0, 3), puts(0, 98, 4)]),
    "halves of sixteen bits": (
        lambda: (np.ones(3, np.float16), cast(np.array([1.0, 2.0, 3.0]), bf16)),
        lambda c: (lambda half, brain: lambda x: (
            x + half, ml.asarray(brain, dtype=ml.bfloat16)))(*c), [puts(0, 2.0, 0)]),
    "an object that has an array": (
        Scaled, lambda c: lambda x: x * c, [lambda c: put(c.values, 0, 2.0), sets(scale=3.0)]),
    "an array of objects": (
        lambda: np.array([[1.0], 2.0], object),
        lambda c: lambda x: x * [c[0][0], c[1], 3.0], [puts(1, -0.0), puts(0, 5.0, 0)]),
    "what numpy computes of it": (
        lambda: (np.arange(12.0).reshape(4, 3), [0, 2]),
        lambda c: (lambda table, rows: lambda x: x + np.cumsum(
            table[rows], axis=0) * np.sin(len(rows)))(*c), [puts((2, 1), 100.0, 0), puts(0, 3, 1)]),
    "an argument of a method": (
        lambda: np.ones(3), lambda c: (lambda dot: lambda x: x * dot(np.eye(3)))(
            operator.methodcaller("dot", c)), [puts(0, 4.0)]),
    "where values go": (
        lambda: (np.array([5.0, 6.0], np.float32), np.array([0, 2])), assigned,
        [puts(0, 7.0, 0), puts(0, 1, 1)]),
    "a mask": (
        lambda: ([True, False], np.array([True, False, True])), masked,
        [puts(0, False, 1), puts(1, True, 1), lambda c: c[0].reverse(), puts(0, True, 0)]),
    "a seed": (
        lambda: {"key": 5, "step": 3}, drawn,
        [puts(name, 2**63 + 1 - 2**62) for name in ("key", "step")]),
}  # fmt: skip


@pytest.mark.parametrize("fuse", [False, True], ids=["", "fused"])
@pytest.mark.parametrize("name", CASES)
def test_a_constant_is_known_by_value(name: str, fuse: bool) -> None:
    build, use, changes = CASES[name]
    c = build()
    fn = use(c)
    x = ml.asarray(X)
    captured = ml.capture(fn, fuse=fuse)
    last = None
    for change in [lambda c: None, *changes]:
        change(c)
        expected = bits(fn(x))
        assert expected != last  # or the change is none
        for _ in range(2):
            assert bits(captured(x)) == expected
        last = expected
    assert captured.signatures == 1 + len(changes)


def test_an_equal_value_is_the_same_constant() -> None:
    captured, x = ml.capture(lambda x: x - MEAN), ml.ones(3)
    for mean in ([1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [1.0, 2.0, 3.0], [4.0, 5.0, 6.0]):
        MEAN[:] = mean
        assert captured(x).tolist() == [1 - each for each in mean]
    assert captured.signatures == 2


def test_an_array_at_the_place_of_another_is_another() -> None:
    constants: list[Any] = []
    captured, x = ml.capture(lambda x: x + constants[0]), ml.zeros(300)
    for i in range(7):  # of one size: numpy takes the memory again, and Python the id
        constants.append(np.full(300, i, np.float32))
        assert captured(x).tolist() == [i] * 300
        constants.clear()
        if i % 2:
            captured.close()


# --- what only the code has --------------------------------------------------------------------


def test_literals_are_constants() -> None:
    def fn(x: Any) -> Any:
        y = x[:, [0, 2]] * [1.0, -0.0]
        y += ml.asarray(0) + ml.asarray([[1, 2]], dtype=ml.float32)
        with ml.Arena(x.device, "inner").allocating():
            z = y * 1
        return ml.copy(z), ml.asarray(0), ml.asarray(np.eye(2)), untyped.sqrt(2), ml.asarray([])

    captured = ml.capture(fn)
    for i in range(3):
        x = ml.asarray(X + i)
        assert bits(captured(x)) == bits(fn(x))
    assert captured.signatures == 1


def test_a_constant_is_the_same_at_each_call() -> None:
    """Though the function updates it, and the caller what was returned."""

    def fn(x: Any) -> Any:
        table = ml.asarray(MEAN)
        table += 1
        table[0] = x[0]
        again = ml.asarray(MEAN)
        return table, again, again.reshape(3, 1), ml.asarray(MEAN)

    captured = ml.capture(fn)
    for _ in range(3):
        results = captured(ml.zeros(3))
        assert [x.reshape(3).tolist() for x in results] == [[0, 3, 4], *[[1, 2, 3]] * 3]
        for result in results:
            result *= 100
            assert result.arena.name == "results"
    assert captured.signatures == 1


def test_a_constant_is_kept_once_and_no_longer_than_its_program(around: Any) -> None:
    big = np.ones((256, 1024), np.float32)
    x = ml.ones((256, 1024))
    _ = x * 2.0, ml.random.normal(2), ml.sum(x)
    gc.collect()

    def total(x: Any) -> Any:
        for _ in range(10):
            x = ml.maximum(x - big, big * 0)
        return ml.sum(x * big)

    before = around.consumed_size_in_mib()
    captured = ml.capture(total)
    result = captured(x)
    nbytes = around.consumed_size_in_mib() - before - captured.plan.nbytes / 2**20
    assert 2.0 <= nbytes < 2.1  # of big, and of big * 0
    assert "copy" not in ml.disassemble(captured.program)
    del result
    captured.close()
    gc.collect()
    assert around.consumed_size_in_mib() == before
    refuses(
        CaptureError, "cannot read a tensor's value", ml.capture(lambda x: bool((x + big)[0, 0])), x
    )
    gc.collect()
    assert around.consumed_size_in_mib() == before


def test_a_measured_function_keeps_none(around: Any) -> None:
    big = np.ones((256, 1024), np.float32)
    x, _ = ml.ones(1024), ml.random.normal(2)
    before = around.consumed_size_in_mib()
    needed = ml.measure(lambda x: ml.asarray(big)[0] + x, x)
    gc.collect()
    assert around.consumed_size_in_mib() == before
    assert needed.plan.nbytes < big.nbytes < needed.arena


def test_a_seed_inside_is_set_at_each_call() -> None:
    def fn(x: Any, seed: int) -> Any:
        ml.random.seed(seed)
        return x + ml.random.normal(3), ml.random.uniform(2)

    captured, x = ml.capture(fn), ml.zeros(3)
    for seed in (7, 7, 8, 9, 7):
        assert bits(captured(x, seed)) == bits(fn(x, seed))


def test_parameters_loaded_inside_are_loaded_at_each_call() -> None:
    kernel = np.eye(2, dtype=np.float32)
    model = nn.Linear(2, 2, bias=False, key=ml.random.key(0))

    @ml.capture
    def step(x: Any) -> Any:
        model.load_parameters({"kernel": kernel})
        y = model(x)
        model.kernel += 1.0
        return y

    for scale in (1.0, 1.0, 3.0):
        kernel[:] = scale * np.eye(2)
        assert step(ml.ones(2)).tolist() == [scale, scale]
        assert model.kernel.tolist() == (1.0 + kernel).tolist()


# --- in all that a function does ---------------------------------------------------------------


@ml.subroutine
def halved(x: Any) -> Any:
    return ml.where(x > 4, x - MEAN, x * [0.5, 2.0, 0.0])


INSIDE: dict[str, Fn] = {
    "a loop": lambda x: ml.fori_loop(
        0, 3, lambda i, x: x * MEAN[0] + [0.5, 0.25, 0.125] + ml.asarray(MEAN), x
    ),
    "a while loop": lambda x: ml.while_loop(
        lambda x: ml.sum(ml.asarray(MEAN)) > ml.sum(x), lambda x: x + MEAN, x
    ),
    "a branch": lambda x: ml.cond(ml.sum(x) > [0.5], lambda: x[[2, 0, 1]], lambda: x - MEAN),
    "a scan": lambda x: ml.scan(lambda s, y: (s + y * MEAN, s @ MEAN), x, np.arange(4, dtype="f4")),
    "a function": lambda x: halved(x) + halved(halved(x)),
    "a checkpoint": lambda x: ml.checkpoint(lambda x: ml.sin(x) * MEAN)(x),
    "a branch in a loop": lambda x: ml.fori_loop(
        0, 3, lambda i, x: ml.cond(i == [1], lambda: x * MEAN, lambda: x[[1, 2, 0]]), x
    ),
}


@pytest.mark.parametrize("differentiated", [False, True], ids=["", "differentiated"])
@pytest.mark.parametrize("name", INSIDE)
def test_constants_in_blocks(name: str, differentiated: bool) -> None:
    def slope(x: Any) -> Any:
        return ml.value_and_grad(lambda x: ml.sum(ml.sin(ml.tree.leaves([fn(x)])[0])))(x)

    fn = INSIDE[name]
    called = slope if differentiated else fn
    captured = ml.capture(called)
    for mean in ([1.0, 2.0, 3.0], [0.5, -1.0, 4.0]):
        MEAN[:] = mean
        for i in range(2):
            x = ml.asarray([0.25 * i, 1.5, -0.5])
            assert bits(captured(x)) == bits(called(x))


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("wired", [False, True])
def test_on_other_machines(native: bool, wired: bool) -> None:
    machine = ml.VM("other", native=native)
    vm: Any = WireVM(machine) if wired else machine

    def fn(x: Any, w: Any) -> Any:
        loss, slope = ml.value_and_grad(lambda w: ml.sum((x - ml.asarray(MEAN)) @ w))(w)
        w -= slope * ml.asarray([0.5, 0.25, 0.125])
        return loss, ml.random.normal(2, key=ml.random.fold_in(ml.random.key(5), 3))

    with ml.Arena(vm, "there").allocating():
        w, v = ml.ones(3), ml.ones(3)
        captured = ml.capture(fn)
        for mean in ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [4.0, 5.0, 6.0]):
            MEAN[:] = mean
            x = ml.asarray(np.arange(6, dtype=np.float32).reshape(2, 3))
            assert bits((captured(x, w), w)) == bits((fn(x, v), v))


# --- arguments -----------------------------------------------------------------------------------


def test_a_gradient_inside_is_of_an_array_or_a_number() -> None:
    def fn(x: Any, a: float) -> Any:
        cubed = ml.value_and_grad(lambda y: ml.sum(y * y * x))
        return cubed(MEAN), cubed(2.0), cubed(a), ml.vjp(ml.sin, a)[1](1.0)

    captured, x = ml.capture(fn), ml.ones(3)
    for a in (0.5, 0.1, 1 / 3, 0.7):
        assert bits(captured(x, a)) == bits(fn(x, a))
    assert captured.signatures == 2


def test_a_key_folded_with_a_counter_is_one_program() -> None:
    captured = ml.capture(lambda key, step: ml.random.fold_in(key, step))
    key = ml.random.key(3)
    for step in range(6):
        assert bits(captured(key, step)) == bits(ml.random.fold_in(key, step))
    assert captured.signatures == 2


# --- while it is recorded -----------------------------------------------------------------------


def test_a_function_that_changes_its_own_array_is_recorded_each_time() -> None:
    counts = [np.zeros(2), np.zeros(2)]

    def step(x: Any, which: int) -> Any:
        y = x + counts[which]
        counts[which][0] += 1
        return y, x * counts[which]

    captured, x = ml.capture(step), ml.ones(2)
    for _ in range(4):
        assert bits(captured(x, 0)) == bits(step(x, 1))
    assert captured.signatures == 0


# --- what is refused --------------------------------------------------------------------------


def test_a_tensor_of_another_vm_is_not_read_inside() -> None:
    with ml.Arena(ml.VM("other"), "other").allocating():
        there = ml.ones(())
    here = ml.default_vm()
    reads: list[Callable[[Any], Any]] = [
        lambda x: x * float(there),
        lambda x: x * np.asarray(there),
        lambda x: x * ml.asarray(there, device=here),
    ]
    for read in reads:
        refuses(
            CaptureError, r"test_constants.*cannot read .* inside", ml.capture(read), ml.ones(2)
        )


def helper() -> Any:
    return eval("1.0")


class Frame:
    """As one of pandas: on the way to what reads any variable its class is met twice."""

    def total(self) -> Any:
        return Frame, helper()


def test_what_is_met_twice_on_the_way_is_refused() -> None:
    frame = Frame()
    fn = ml.capture(lambda x: x * frame.total()[1])
    path = r"eval, .*: .* -> 'frame' -> Frame -> Frame.total .* -> helper .*use it outside"
    refuses(CaptureError, path, fn, ml.ones(2))


def test_a_frame_of_pandas_is_refused_with_a_remedy() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": [1.0, 2.0]})
    fn: Any = ml.capture(lambda x, frame: x * frame["a"].to_numpy())
    refuses(CaptureError, "DataFrame.*use it outside, and give what comes", fn, ml.ones(2), frame)
    values = frame["a"].to_numpy()
    assert ml.capture(lambda x: x * values)(ml.ones(2)).tolist() == [1.0, 2.0]


# --- anything, between any two calls -------------------------------------------------------------


FLOATS = [0.0, -0.0, 1.5, -2.25, float("nan"), float("inf"), 1e-42, 3.4e38]
_DTYPES = ["<f4", "<f8", ">f8", "<i4", "u1", "?", "<f2", "<c8"]
_SHAPES: list[tuple[int, ...]] = [(), (3,), (1,), (2, 3), (2, 1)]


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    shape, dtype = draw(st.sampled_from(_SHAPES)), np.dtype(draw(st.sampled_from(_DTYPES)))
    n = int(np.prod(shape))
    values = draw(st.lists(st.sampled_from(FLOATS), min_size=n, max_size=n))
    with np.errstate(all="ignore"):
        drawn = np.array(values).reshape(shape)
        return np.nan_to_num(drawn).astype(dtype) if dtype.kind in "iu" else drawn.astype(dtype)


_VALUES = st.one_of(
    arrays(),
    st.sampled_from(FLOATS),
    st.integers(-3, 3),
    st.booleans(),
    st.lists(st.sampled_from(FLOATS), min_size=3, max_size=3),
    st.lists(st.integers(-3, 3), min_size=3, max_size=3),
)
_WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, c: x + c,
    "divide": lambda x, c: c / x,
    "where": lambda x, c: ml.where(x > 0, x, c),
    "asarray": lambda x, c: ml.asarray(c) * x,
    "computed": lambda x, c: x * np.atleast_1d(c)[::-1],
    "joined": lambda x, c: ml.stack([ml.broadcast_to(x * c, (2, 3)), x]),
    "rows": lambda x, c: x[:, [int(np.size(c)) % 3, 0]],
    "assigned": lambda x, c: _assigned(x, c),
    "slope": lambda x, c: ml.grad(lambda x: ml.sum(ml.real(ml.sin(x) * c)))(x),
    "drawn": lambda x, c: x + ml.random.normal(3, key=ml.random.key(np.size(c))),
}


def _assigned(x: Any, c: Any) -> Any:
    y = x * 1
    y[0] = np.ravel(np.asarray(c))[0].real.astype(np.float32)
    return y


def _write(constants: Any, place: int, value: Any) -> None:
    """Another value at a place, in the bytes of the array that is there if it fits."""
    there = constants[place]
    if isinstance(there, np.ndarray) and np.shape(value) == there.shape:
        with np.errstate(all="ignore"):
            real = np.real(value)
            of_kind = {"c": value, "f": real}
            there[...] = of_kind.get(there.dtype.kind, np.nan_to_num(real) % 2)
    else:
        constants[place] = value


@given(st.data())
def test_any_constants_that_change_between_any_calls(data: st.DataObject) -> None:
    uses = data.draw(st.lists(st.sampled_from(sorted(_WAYS)), min_size=1, max_size=4))
    constants = data.draw(st.lists(_VALUES, min_size=len(uses), max_size=len(uses)))

    def fn(x: Any) -> Any:
        return [_WAYS[use](x, c) for use, c in zip(uses, constants, strict=True)]

    x = ml.asarray(np.array([[0.5, -1.5, 2.0], [3.0, -0.25, 1.0]], np.float32))
    captured = ml.capture(fn, fuse=data.draw(st.booleans()), recompute=data.draw(st.booleans()))
    for _ in range(4):
        try:
            expected = bits(fn(x))
        except ml.errors.OpError as error:
            refuses(type(error), "", captured, x)
        else:
            assert bits(captured(x)) == expected
        for i in range(len(constants)):
            if data.draw(st.booleans()):
                _write(constants, i, data.draw(_VALUES))
