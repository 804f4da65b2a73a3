"""Tensors: operators, scalars, values, arenas, and how numpy and torch see them."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from operator import attrgetter
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.types import DType, TensorType
from mlvm.eager.tensor import apply as apply_file
from mlvm.eager.tensor.apply import apply, one_op
from tests.brief import Patch, cases, refuses
from tests.fuzz.arguments import Imitation

X = np.array([[1.5, -2.0, 3.0], [0.25, 4.0, -1.0]], np.float32)
Y = np.array([2.0, 0.5, -3.0], np.float32)
N = np.array([7, -8, 3], np.int32)
M = np.array([2, 3, 1], np.int32)


def same(result: Any, expected: Any) -> None:
    assert isinstance(result, ml.Tensor)
    np.testing.assert_array_equal(result.numpy(), expected, strict=True)


# --- operators -----------------------------------------------------------------------

FLOATS = ["add", "sub", "mul", "truediv", "floordiv", "mod", "lt", "le", "gt", "ge", "eq", "ne"]
INTEGERS = ["floordiv", "mod", "pow", "and_", "or_", "xor", "lshift", "rshift", "eq"]


@cases(
    "name, x, y, left, right",
    *((name, X, Y, 0.5, 0.5) for name in FLOATS),
    *((name, N, M, 5, 2) for name in INTEGERS),
)
def test_operators(name: str, x: Any, y: Any, left: Any, right: Any) -> None:
    fn = getattr(operator, name)
    same(fn(ml.asarray(x), ml.asarray(y)), fn(x, y))
    same(fn(ml.asarray(x), right), fn(x, x.dtype.type(right)))
    same(fn(left, ml.asarray(y)), fn(y.dtype.type(left), y))


@pytest.mark.parametrize("fn", [operator.neg, operator.pos, operator.abs])
def test_unary_operators(fn: Callable[[Any], Any]) -> None:
    same(fn(ml.asarray(X)), fn(X))
    same(~ml.asarray(N), ~N)
    same(~ml.asarray(X > 0), ~(X > 0))


def test_what_has_no_dimensions_has_no_length() -> None:
    x = ml.asarray(1.0)
    for ask in (len, iter, list):
        caught = refuses(TypeError, "a scalar tensor has no", ask, x)
        assert isinstance(caught, ml.errors.ShapeError)


# --- numbers beside a tensor ---------------------------------------------------------


def test_numbers_adopt_the_tensors_dtype() -> None:
    x: Any = ml.asarray(X)
    n: Any = ml.asarray(N)
    same(1 - x, 1 - X)
    same(x + 1, X + 1)
    same(x * np.float64(2), X * 2)
    same(n + np.int8(1), N + 1)

    class Level(IntEnum):
        HIGH = 3

    same(n * Level.HIGH, N * 3)
    assert (x + 1e300).numpy().tolist() == [[math.inf] * 3] * 2


def test_a_number_of_a_higher_kind_has_its_default_dtype() -> None:
    x: Any
    n: Any
    x, n, wide = ml.asarray(X), ml.asarray(N), ml.asarray(X.astype("f8"))
    same(n + 1.5, N.astype("f4") + 1.5)
    same(1.5 - n, 1.5 - N.astype("f4"))
    same(n * 2j, N.astype("c8") * 2j)
    same(x * 2j, X * np.complex64(2j))
    same(wide * 2j, X.astype("f8") * 2j)
    same(x + n, X + N.astype("f4"))
    same(n / n, np.ones(3, "f4"))
    same(x / n, X / N.astype("f4"))
    assert complex(ml.asarray(2 - 1j)) == ml.asarray(2 - 1j).item() == 2 - 1j
    with pytest.raises(ml.errors.DTypeError, match="cannot be written to"):
        n += 1.5
    with pytest.raises(ml.errors.DTypeError, match="cannot be written to"):
        x *= 1j


def test_attributes_seen_earlier_are_still_checked() -> None:
    n = ml.asarray(N)
    axis: Any
    ml.sum(n, axis=0)
    for axis in (False, 0.0):
        refuses(ml.errors.ArgumentError, "", ml.sum, n, axis=axis)


def test_attributes_in_tuples_seen_earlier_are_still_checked() -> None:
    x = ml.asarray(X)
    axes: Any
    for axes in ((0, 1), (False, True), (0.0, 1.0)):
        if axes != (0, 1) or type(axes[0]) is not int:
            refuses(ml.errors.ArgumentError, "axis", ml.sum, x, axis=axes)
        else:
            ml.sum(x, axis=axes)


def test_many_different_calls_are_not_all_remembered(monkeypatch: Patch) -> None:
    for memo in (apply_file._by_meaning, apply_file._by_spelling):
        memo.clear()
        monkeypatch.setattr(memo, "limit", 64)
    x = ml.arange(300)
    assert [int(ml.roll(x, i)[0]) for i in range(300)] == [-i % 300 for i in range(300)]
    assert 0 < len(apply_file._by_meaning) <= 64
    assert 0 < len(apply_file._by_spelling) <= 64


# --- values --------------------------------------------------------------------------


def test_repr() -> None:
    assert repr(ml.asarray([1.0, 2.5])) == "Tensor([1. , 2.5], f32[2])"
    assert repr(ml.asarray(3)) == "Tensor(3, i64[])"
    with ml.Arena(ml.default_vm(), "scratch"):
        x = ml.asarray([True])
        assert repr(x) == "Tensor([ True], bool[1], arena='scratch')"
    assert repr(x) == "<bool[1] of arena 'scratch' was freed: the arena was reset>"
    assert len(repr(ml.zeros((100, 100)))) < 1000


# --- updates in place ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["iadd", "isub", "imul", "itruediv"])
def test_updates_in_place(name: str) -> None:
    update = getattr(operator, name)
    x, y = ml.asarray(X), ml.asarray(Y)
    with ml.Arena(ml.default_vm(), "unused") as arena:
        assert update(x, y) is x
        assert update(x, 2.0) is x
    assert arena.high_water == 0
    expected = X.copy()
    update(expected, Y)
    update(expected, np.float32(2))
    same(x, expected)


def test_an_update_keeps_the_type() -> None:
    y = ml.asarray(Y)
    with pytest.raises(ml.errors.ShapeError, match=r"cannot be written to f32\[3\]"):
        y += ml.asarray(X)
    n = ml.asarray(M, dtype=ml.int8)
    n += ml.asarray(N)
    assert (n.dtype, n.tolist()) == (ml.int8, (np.asarray(M, np.int8) + N).tolist())
    with pytest.raises(ml.errors.DTypeError, match="f32"):
        n += ml.ones(())


KINDS = [name for name, dtype in DType.all.items() if dtype is not ml.bfloat16]


@cases("own, other", *itertools.product(KINDS, KINDS))
def test_an_update_casts_the_same_kind_as_numpy_does(own: str, other: str) -> None:
    """`x += y` and `x[i] = y` cast where numpy's casting="same_kind" does."""
    x, y = ml.ones(2, dtype=DType.all[own]), ml.asarray([1, 0], dtype=DType.all[other])
    a, b = x.numpy(), y.numpy()
    is_cast = np.can_cast(b.dtype, a.dtype, "same_kind")
    with suppress(TypeError):  # of numpy.add, whose result has another kind
        a += b
    try:
        x += y
    except ml.errors.DTypeError:
        both = np.promote_types(a.dtype, b.dtype)
        assert both == np.bool_ or not np.can_cast(both, a.dtype, "same_kind")  # no bools are added
    else:
        np.testing.assert_array_equal(x.numpy(), a)
    x = ml.zeros(2, dtype=DType.all[own])
    if is_cast:
        x[:] = y
        assert x.tolist() == [1, 0]
    else:
        refuses(ml.errors.DTypeError, "values, got", x.__setitem__, slice(None), y)


# --- arenas --------------------------------------------------------------------------


def test_a_tensor_of_another_vm_is_named() -> None:
    with ml.Arena(ml.VM("elsewhere"), "there"):
        x = ml.asarray(X)
        here = ml.asarray
        with (
            ml.Arena(ml.default_vm(), "here"),
            pytest.raises(
                ml.errors.HandleError,
                match=r"f32\[2,3\] is on the VM elsewhere, .* default; .* `with ml.use\(vm\):`",
            ),
        ):
            here(X) + x
    with ml.Arena(ml.VM("elsewhere"), "weights").allocating():
        w = ml.asarray(X)
    message = (
        r"an update of f32\[2,3\] on elsewhere reads f32\[\] on default, .* arena on elsewhere"
    )
    refuses(ml.errors.HandleError, message, w.__iadd__, 1.0)
    assert w.numpy().tolist() == X.tolist()


def test_a_dry_vm_knows_types_only() -> None:
    with ml.Arena(ml.DryVM("dry"), "dry") as arena:
        x = ml.zeros((1000, 1000)) @ ml.random.normal((1000, 10))
        assert x.shape == (1000, 10)
        assert arena.high_water > 4_000_000
        for read in (x.numpy, lambda: x[x > 0], lambda: ml.nonzero(x)):
            refuses(ml.errors.HandleError, "dry", read)
        assert repr(x) == f"{x}" == "<dry f32[1000,10], arena='dry'>"


def test_a_one_op_program_is_made_once_whatever_the_types() -> None:
    call = one_op("cos")
    apply(call, ml.zeros((2,)))
    program = call.program(1)
    apply(call, ml.zeros((3, 3)))
    assert call.program(1) is program


def test_the_types_a_call_was_made_with_are_not_all_remembered() -> None:
    call = one_op("add")
    x = TensorType("f32", ())
    for n in range(10_000):
        call.infer((x, TensorType("f32", (n,))))
    assert len(call.types) <= 4096


@cases("imitated", ml.Tensor, list, dict, int, float, np.ndarray)
@cases("name", "add", "rsub", "iadd", "pow", "matmul", "eq", "lt", "getitem", "contains")
def test_an_object_that_imitates_a_class_is_refused(name: str, imitated: type) -> None:
    """`isinstance` believes its `__class__`, as for mocks."""
    with suppress(ml.errors.MlvmError):
        getattr(ml.ones(3), f"__{name}__")(Imitation(imitated))
    step = ml.capture(lambda x, other: (x * 2.0, other))
    other = Imitation(imitated)
    assert step(ml.ones(3), other)[1] is other


@cases("imitated", ml.Tensor, list, dict, int, str)
@cases("name", "sinc", "asarray", "concat", "grad", "Arena", "VM", "nn.Embedding", "random.key")
def test_calls_with_an_object_that_imitates_a_class_are_refused(name: str, imitated: type) -> None:
    with suppress(ml.errors.MlvmError):
        attrgetter(name)(ml)(Imitation(imitated))


def test_captured_functions_do_not_call_methods_of_containers() -> None:
    odd: Any = type("Odd", (list,), {"__len__": lambda self: -1, "__iter__": lambda self: 5})
    strange: Any = type("Strange", (dict,), {"items": None})
    step = ml.capture(lambda xs, ys: xs[0] * 2.0 + ys["y"])
    assert step(odd([ml.asarray(1.0)]), strange(y=ml.asarray(3.0))).tolist() == 5
    assert ml.TensorType("f32", odd([2, 3])) is ml.TensorType("f32", (2, 3))
