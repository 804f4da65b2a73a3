"""The composites and creation functions against numpy, and what they refuse."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.eager.functions.sums import sum_to
from tests.brief import cases, refuses
from tests.slopes import check_slopes

Array = np.ndarray[Any, Any]

RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 3, 4)).astype(np.float32)
V = RNG.normal(size=5).astype(np.float32)
INDICES = np.array([[2, 0], [-1, 1]])

t = ml.asarray
untyped: Any = ml  # for calls that type checkers would refuse


def same(result: ml.Tensor, expected: Any) -> None:
    expected = np.asarray(expected)
    assert result.type == ml.asarray(expected).type
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-6, atol=1e-6)


# --- values copied in ----------------------------------------------------------------


@cases(
    "obj, dtype",
    (True, ml.bool),
    (3, ml.int64),
    (2.5, ml.float32),
    ([[1, 2], [3, 4]], ml.int64),
    ([1, 2.5], ml.float32),
    ([[True], [False]], ml.bool),
    ([], ml.float32),
    (np.float64(2.5), ml.float64),
    (np.array([2**63, 1], np.uint64), ml.uint64),
    (np.arange(3, dtype=np.uint16), ml.uint16),
    (np.zeros((2, 0), np.int8), ml.int8),
    (np.asfortranarray(X[0]), ml.float32),
)
def test_asarray_keeps_values_and_chooses_the_dtype(obj: Any, dtype: Any) -> None:
    result = t(obj)
    assert result.dtype is dtype
    np.testing.assert_array_equal(result.numpy(), np.asarray(obj, dtype.numpy))


def test_asarray_converts_to_the_dtype_asked_for() -> None:
    same(t([1, 2], dtype=ml.float32), np.array([1, 2], np.float32))
    same(t([2**63, 1], dtype=ml.uint64), np.array([2**63, 1], np.uint64))
    same(t([0, 1], dtype=ml.bool), [False, True])
    same(t([1.9, -1.9]), np.array([1.9, -1.9], np.float32))
    same(t(np.array([1.9, -1.9]), dtype=ml.int32), np.array([1, -1], np.int32))
    same(t(2**63 + 1, dtype="u64"), np.uint64(2**63 + 1))
    same(t(t([1, 2]), dtype=np.float64), np.array([1.0, 2.0]))
    assert t([1e300]).item() == math.inf


def test_asarray_of_a_tensor_copies_nothing() -> None:
    x = t(V)
    for y in (t(x), t(x, dtype=ml.float32), ml.astype(x, ml.float32)):
        assert y is not x
        assert y.handle == x.handle


def test_asarray_copies() -> None:
    source = V.copy()
    x = t(source)
    source[:] = 0
    same(x, V)


@pytest.mark.parametrize("module", ["torch", "jax.numpy"])
def test_asarray_takes_arrays_of_other_libraries(module: str) -> None:
    library = pytest.importorskip(module)
    same(t(library.asarray(V)), V)
    same(t(library.asarray([1, 2]), dtype=ml.int32), np.array([1, 2], np.int32))


def test_asarray_takes_what_only_has_dlpack() -> None:
    class Foreign:
        __dlpack__ = V.__dlpack__
        __dlpack_device__ = V.__dlpack_device__

    same(t(Foreign()), V)


@cases(
    "obj, dtype, error, text",
    ("word", None, ml.errors.DTypeError, "asarray takes"),
    (None, None, ml.errors.DTypeError, "object"),
    ([1, None], None, ml.errors.DTypeError, "object"),
    (np.zeros(2, np.longdouble), None, ml.errors.DTypeError, "no dtype"),
    (np.array([None]), None, ml.errors.DTypeError, "no dtype"),
    (np.array(["1"]), ml.float32, ml.errors.DTypeError, "no dtype"),
    (np.array([1j]), ml.float32, ml.errors.DTypeError, "take real or imag"),
    (1j, ml.float32, ml.errors.DTypeError, "take real or imag"),
    (2**70, None, ml.errors.OperandValueError, "any integer dtype; write it as a float"),
    (2**63, None, ml.errors.OperandValueError, "does not fit into i64"),
    ([2**63, 1], None, ml.errors.OperandValueError, "does not fit into i64"),
    ([2**63, -1], ml.uint64, ml.errors.OperandValueError, "beside negative ones"),
    (300, ml.uint8, ml.errors.OperandValueError, "the int 300 does not fit into u8: 0 .. 255"),
    ([0, -1], ml.uint8, ml.errors.OperandValueError, "the int -1"),
    (2, ml.bool, ml.errors.OperandValueError, "the int 2 does not fit into bool"),
    ([1.5], ml.int32, ml.errors.DTypeError, "astype"),
    ([[1], [2, 3]], None, ml.errors.ShapeError, "inhomogeneous"),
    ([1, 2], "f3", ml.errors.DTypeError, "f3"),
)
def test_asarray_refuses(obj: Any, dtype: Any, error: type[Exception], text: str) -> None:
    with ml.Arena(ml.default_vm(), "refused") as arena:
        raised = refuses(error, "", t, obj, dtype=dtype)
        assert arena.used == 0
    assert text in str(raised)


def test_asarray_joins_tensors() -> None:
    x, y = ml.asarray([1.0, 2.0]), ml.asarray([3, 4])
    assert ml.asarray([x, y]).tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert ml.asarray([x, y]).dtype is ml.float32
    assert ml.asarray([[y[0], 5], (6, y[1])]).tolist() == [[3, 5], [6, 4]]
    assert ml.asarray([x[0], 2], dtype=ml.int64).dtype is ml.int64
    assert ml.grad(lambda x: ml.sum(ml.asarray([x, 2.0, x * x])))(x[1]).item() == 5.0
    for value, text in (([x, y[:1]], "rows have shapes"), ([x, []], "rows have shapes")):
        refuses(ml.errors.ShapeError, text, ml.asarray, value)


def test_half_floats_stay_what_they_are() -> None:
    half = np.array([1.5, -2.0, 65504.0], np.float16)
    same(t(half), half)
    same(t(half, dtype=ml.int32), half.astype(np.int32))
    same(t(half, dtype=ml.float32), half.astype(np.float32))


def test_asarray_of_a_torch_tensor_takes_its_value() -> None:
    torch = pytest.importorskip("torch")
    same(t(torch.ones(2, requires_grad=True)), np.ones(2, np.float32))
    x = t(torch.full((2,), 1.5, dtype=torch.bfloat16))
    assert (x.dtype, x.tolist()) == (ml.bfloat16, [1.5, 1.5])
    same(t(torch.tensor([1 + 2j]).conj()), np.array([1 - 2j], np.complex64))


# --- made from a description ---------------------------------------------------------


CREATED: list[tuple[ml.Tensor, Any]] = [
    (ml.zeros((2, 3)), np.zeros((2, 3), np.float32)),
    (ml.zeros(2, dtype=ml.bool), np.zeros(2, np.bool_)),
    (ml.ones([2], dtype="u8"), np.ones(2, np.uint8)),
    (ml.empty((2, 2), dtype=ml.float64), np.zeros((2, 2))),
    (ml.full((2,), 7), np.full(2, 7)),
    (ml.full((), 2.5), np.float32(2.5)),
    (ml.full(2, True), np.full(2, True)),
    (untyped.full(2, np.float32(1.5), dtype=ml.float64), np.full(2, 1.5)),
    (ml.full((2,), t(3), dtype=ml.float32), np.full(2, 3, np.float32)),
    (ml.zeros_like(t(X)), np.zeros_like(X)),
    (ml.ones_like(t(X), dtype=ml.int32), np.ones_like(X, np.int32)),
    (ml.empty_like(t(V)), np.zeros_like(V)),
    (ml.full_like(t(V), 3), np.full_like(V, 3)),
    (ml.zeros(2, "i16"), np.zeros(2, np.int16)),
    (ml.ones((2, 2), dtype=None), np.ones((2, 2), np.float32)),
    (ml.ones(2, bool), np.ones(2, bool)),
    (ml.arange(5), np.arange(5)),
    (ml.arange(2, 8, 3, dtype=ml.uint8), np.arange(2, 8, 3, dtype=np.uint8)),
    (ml.arange(1.0, 2, 0.25), np.arange(1, 2, 0.25, dtype=np.float32)),
    (ml.arange(5, 0, -2), np.arange(5, 0, -2)),
    (ml.linspace(0, 1, 5), np.linspace(0, 1, 5, dtype=np.float32)),
    (ml.linspace(0, 1, 4, endpoint=False, dtype="f64"), np.linspace(0, 1, 4, endpoint=False)),
    (ml.linspace(0, 2 - 2j, 3), np.linspace(0, 2 - 2j, 3, dtype=np.complex64)),
    (ml.linspace(0, 1, 3, dtype="c128"), np.linspace(0, 1, 3, dtype=np.complex128)),
    (ml.eye(3), np.eye(3, dtype=np.float32)),
    (ml.eye(2, 3, k=1, dtype=ml.int64), np.eye(2, 3, 1, np.int64)),
    (ml.eye(2, k=2**70), np.zeros((2, 2), np.float32)),
]


@pytest.mark.parametrize(("result", "expected"), CREATED)
def test_created(result: ml.Tensor, expected: Any) -> None:
    same(result, expected)


# --- shapes, joining, choosing: mlvm, numpy and the operand --------------------------

OF_X: dict[str, Callable[[Any, Any], Any]] = {
    "reshape": lambda f, x: f.reshape(x, (4, 6)),
    "reshape -1": lambda f, x: f.reshape(x, (3, -1)),
    "reshape int": lambda f, x: f.reshape(x, -1),
    "reshape copy": lambda f, x: f.reshape(x, -1, copy=True),
    "expand_dims": lambda f, x: f.expand_dims(x, 0),
    "expand_dims -1": lambda f, x: f.expand_dims(x, axis=-1),
    "expand_dims 2": lambda f, x: f.expand_dims(x, axis=(0, 2)),
    "squeeze": lambda f, x: f.squeeze(x[:1], 0),
    "squeeze all": lambda f, x: f.squeeze(x[:1, :, :1]),
    "permute_dims": lambda f, x: f.permute_dims(x, (2, 0, 1)),
    "permute -1": lambda f, x: f.permute_dims(x, (-1, 0, 1)),
    "matrix_transpose": lambda f, x: f.matrix_transpose(x),
    "mT": lambda f, x: x.mT,
    "moveaxis": lambda f, x: f.moveaxis(x, 0, -1),
    "moveaxis 2": lambda f, x: f.moveaxis(x, (0, 1), (2, 0)),
    "broadcast_to": lambda f, x: f.broadcast_to(x[:, :1], (5, 2, 3, 4)),
    "concat": lambda f, x: f.concat([x, x], axis=1),
    "concat None": lambda f, x: f.concat([x, x[0]], axis=None),
    "stack": lambda f, x: f.stack([x, x], axis=-1),
    "by position": lambda f, x: f.stack([f.concat([x, x], 1), f.roll(f.repeat(x, 2, 1), 1, 0)], 1),
    "tile": lambda f, x: f.tile(x, (2, 1, 3)),
    "tile fewer": lambda f, x: f.tile(x, 2),
    "tile more": lambda f, x: f.tile(x, (2, 1, 1, 2)),
    "repeat": lambda f, x: f.repeat(x, 2, axis=1),
    "repeat None": lambda f, x: f.repeat(x, 3),
    "repeat each": lambda f, x: f.repeat(x, f.asarray([2, 0, 3]), axis=1),
    "repeat list": lambda f, x: f.repeat(x[0, 0], [0, 1, 2, 3]),
    "repeat tensor": lambda f, x: f.repeat(x, f.asarray(2)),
    "diff": lambda f, x: f.diff(x),
    "diff n": lambda f, x: f.diff(x, 2, 1),
    "diff too often": lambda f, x: f.diff(x, n=5),
    "diff 0": lambda f, x: f.diff(x, n=0),
    "diff 0 between": lambda f, x: f.diff(x, n=0, axis=0, append=x),
    "cumulative_sum": lambda f, x: f.cumulative_sum(x, axis=1),
    "cumulative_sum from 0": lambda f, x: f.cumulative_sum(x, axis=-1, include_initial=True),
    "count_nonzero": lambda f, x: f.count_nonzero(f.maximum(x, 0.0), (0, 2), keepdims=True),
    "roll": lambda f, x: f.roll(x, 1, axis=-1),
    "roll all": lambda f, x: f.roll(x, 5),
    "flip": lambda f, x: f.flip(x, axis=1),
    "pad": lambda f, x: f.pad(x, 1),
    "pad each": lambda f, x: f.pad(x, [(0, 1), (2, 0), (0, 0)]),
    "pad edge": lambda f, x: f.pad(x, [(2, 0), (0, 9), (0, 0)], mode="edge"),
    "pad reflect": lambda f, x: f.pad(x, [(3, 0), (1, 2), (0, 9)], mode="reflect"),
    "pad reflect one": lambda f, x: f.pad(x[:1], [(2, 1), (0, 0), (0, 0)], mode="reflect"),
    "pad symmetric": lambda f, x: f.pad(x, [(3, 0), (1, 2), (0, 9)], mode="symmetric"),
    "pad wrap": lambda f, x: f.pad(x, [(3, 0), (1, 2), (0, 9)], mode="wrap"),
    "pad nothing": lambda f, x: f.pad(x, 0, mode="wrap"),
    "astype": lambda f, x: f.astype(x * 10, f.int32),
    "take": lambda f, x: f.take(x, f.asarray(INDICES), axis=1),
    "take 1-d": lambda f, x: f.take(x[0, 0], f.asarray(INDICES)),
    "take_along_axis": lambda f, x: f.take_along_axis(x, f.asarray([[[2], [0]]]), 1),
    "where True": lambda f, x: f.where(True, x, -x),
    "where": lambda f, x: f.where(x > 0, x, -x),
    "clip": lambda f, x: f.clip(x, -0.5, 0.5),
    "clip min": lambda f, x: f.clip(x, min=0.0),
    "clip max": lambda f, x: f.clip(x, max=x[0]),
    "std": lambda f, x: f.std(x, axis=1, correction=1.0, keepdims=True),
    "outer": lambda f, x: f.outer(x[0, 0], x[0, 1]),
    "angle": lambda f, x: f.angle(x[0] + 1j * x[1]),
    "angle real": lambda f, x: f.angle(x),
    "deg2rad": lambda f, x: f.deg2rad(x),
    "exp2": lambda f, x: f.exp2(x),
    "hstack": lambda f, x: f.hstack([x[0], x[1]]),
    "hstack of vectors": lambda f, x: f.hstack([x[0, 0], x[0, 1]]),
    "rad2deg": lambda f, x: f.rad2deg(x),
    "round": lambda f, x: f.round(x, 1),
    "round tens": lambda f, x: f.round(x * 100, decimals=-1),
    "swapaxes": lambda f, x: f.swapaxes(x, 0, -1),
    "unravel_index": lambda f, x: f.stack(f.unravel_index(f.argmax(x, axis=0), (4, 6))),
    "vstack": lambda f, x: f.vstack([x[0], x[1]]),
    "vstack of vectors": lambda f, x: f.vstack([x[0, 0], x[0, 1]]),
}
"""The same text for mlvm and numpy."""

OTHERWISE: dict[str, tuple[Callable[[Any], Any], Callable[[Array], Any]]] = {
    "cumulative_sum by position": (lambda x: ml.cumulative_sum(x, 1), lambda x: np.cumsum(x, 1)),
    "diff between": (
        lambda x: ml.diff(x, axis=0, prepend=0.0, append=x[:1]),
        lambda x: np.diff(x, axis=0, prepend=np.float32(0), append=x[:1]),
    ),
    "pad pair": (lambda x: ml.pad(x, (1, 0), 2.0), lambda x: np.pad(x, (1, 0), constant_values=2)),
    "where kinds": (
        lambda x: ml.where(x > 0, 1, 0.5),
        lambda x: np.where(x > 0, np.float32(1), np.float32(0.5)),
    ),
    "where scalar": (
        lambda x: ml.where(x > 0, 0.0, x),
        lambda x: np.where(x > 0, np.float32(0), x),
    ),
    "where scalars": (
        lambda x: ml.where(x > 0, 1.0, 0.0),
        lambda x: np.where(x > 0, np.float32(1), np.float32(0)),
    ),
    "clip int": (
        lambda x: ml.clip(ml.astype(x, "i32"), 0.5),
        lambda x: np.clip(x.astype("i4"), 0.5, None).astype("f4"),
    ),
    "silu": (ml.silu, lambda x: x / (1 + np.exp(-x))),
}


@pytest.mark.parametrize("name", OF_X)
def test_function_of_x(name: str) -> None:
    same(OF_X[name](ml, t(X)), OF_X[name](np, X))


@pytest.mark.parametrize("name", OTHERWISE)
def test_function_of_x_that_numpy_writes_otherwise(name: str) -> None:
    ours, theirs = OTHERWISE[name]
    same(ours(t(X)), theirs(X))


DIFFERENTIABLE: dict[str, Callable[[Any], Any]] = {
    "diff": lambda x: ml.diff(x, 2, 0, prepend=0.0, append=x[:1] * x[1:]),
    "repeat": lambda x: ml.repeat(x * x, t([2, 0, 1]), axis=1),
    "cumulative_sum": lambda x: ml.cumulative_sum(x * x, 1, include_initial=True),
    "take_along_axis": lambda x: ml.take_along_axis(x * x, t([[2, 2, 0]]), 1),
    "clip": lambda x: ml.clip(x * x, None, 1.0),
    "angle": lambda x: ml.angle(x + 1j * x * x),
    "exp2": lambda x: ml.exp2(x * x),
    "stacks": lambda x: ml.hstack([x * x, ml.vstack([x[0] * x[1], ml.rad2deg(x[1])])]),
    "mask": lambda x: (x * x)[1:, t([True, False, True])],
    "asarray": lambda x: ml.asarray(ml.reshape(x * x, -1, copy=True), copy=True),
    "pad reflect": lambda x: ml.pad(x * x, (2, 3), mode="reflect"),
    "pad edge": lambda x: ml.pad(x * x, (2, 3), mode="edge"),
}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_of_functions(name: str) -> None:
    check_slopes(DIFFERENTIABLE[name], t(X[:, :, 0].astype(np.float64)), order=2)


def test_functions_that_decide_no_shape_by_values_can_be_captured() -> None:
    def functions(x: ml.Tensor) -> tuple[ml.Tensor, ...]:
        edges = ml.sort(x[0])
        return (
            ml.searchsorted(edges, x, side="right"),
            ml.isin(x, edges[:2], invert=True),
            ml.diff(x, prepend=1.0),
            ml.count_nonzero(x > 0, 1),
            ml.where(True, x, 0),
        )

    captured = ml.capture(functions)
    for scale in (1.0, -2.0):
        for ours, theirs in zip(captured(t(X[0] * scale)), functions(t(X[0] * scale)), strict=True):
            np.testing.assert_array_equal(ours.numpy(), theirs.numpy(), strict=True)


# --- products and choices along an axis ------------------------------------------------


@pytest.mark.parametrize("dtype", ["f4", "f8", "i1", "u2", "i8"])
def test_cumulative_prod(dtype: str) -> None:
    for shape in ((5,), (3, 1, 8), (2, 9, 3), (0,), (3, 0), (1,)):
        x = (RNG.normal(size=shape) * 3).astype(dtype)
        wide = ml.prod(t(x)).dtype.numpy
        for axis in range(-1, len(shape)):
            expected = np.cumprod(x, axis, dtype=wide)
            result = ml.cumulative_prod(t(x), axis=axis)
            assert result.type == t(expected).type
            np.testing.assert_allclose(result.numpy(), expected, rtol=1e-5)
            first = list(shape)
            first[axis] = 1
            longer = ml.cumulative_prod(t(x), axis=axis, include_initial=True)
            joined = np.concatenate([np.ones(first, wide), expected], axis)
            np.testing.assert_allclose(longer.numpy(), joined, rtol=1e-5)
    same(ml.cumulative_prod(t([1, 2, 3, 4])), [1, 2, 6, 24])
    same(ml.cumulative_prod(t([2, 3]), dtype=ml.float32), np.array([2, 6], np.float32))


@pytest.mark.parametrize("row", [[2, 3, 5, 7], [2, 0, 5, 7], [0, 0, 5, 0], [0], []])
def test_gradients_of_running_products_are_right_where_there_are_zeros(row: list[float]) -> None:
    x = t(np.array([row, row[::-1]], np.float64))
    check_slopes(lambda x: ml.cumulative_prod(x, axis=1), x, order=2)
    shorter = t(np.array(row, np.float64))
    check_slopes(lambda x: ml.cumulative_prod(x, axis=0, include_initial=True), shorter)


def test_topk() -> None:
    x = RNG.permutation(24).reshape(2, 3, 4).astype(np.float32)
    for axis in (-1, 0, 1):
        for k in range(x.shape[axis] + 1):
            values, indices = ml.topk(t(x), k, axis=axis)
            order = np.take(np.argsort(-x, axis), range(k), axis)
            same(indices, order)
            same(values, np.take_along_axis(x, order, axis))
    ties = t([3, 1, 3, 2, 3])
    assert [y.numpy().tolist() for y in ml.topk(ties, 4)] == [[3, 3, 3, 2], [0, 2, 4, 3]]
    assert ml.topk(t([1.0, math.nan, math.inf]), 2)[1].numpy().tolist() == [1, 2]
    assert ml.topk(ml.zeros((3, 0)), 0)[0].shape == (3, 0)
    distinct = t(x.astype(np.float64) / 7)
    check_slopes(lambda x: ml.topk(x * x, 2, axis=1)[0], distinct, order=2)


def test_a_border_is_of_bools_of_halves_and_captured() -> None:
    assert ml.pad(ml.asarray([0]), 1, 2**60 + 1).tolist() == [2**60 + 1, 0, 2**60 + 1]
    mask = ml.pad(t([True, False]), 1, True)
    assert mask.tolist() == [True, True, False, True]
    captured = ml.capture(lambda x: ml.pad(x, (3, 2), mode="reflect"))
    for dtype in (ml.float16, ml.bfloat16, ml.int64):
        x = ml.arange(4, dtype=dtype)
        for _ in range(2):
            assert captured(x).type == x.type.with_shape((9,))
            assert captured(x).tolist() == [3, 2, 1, 0, 1, 2, 3, 2, 1]


def test_topk_and_cumulative_prod_can_be_captured() -> None:
    def both(x: ml.Tensor) -> tuple[ml.Tensor, ...]:
        return *ml.topk(x, 2), ml.cumulative_prod(x, axis=1)

    captured = ml.capture(both)
    for _ in range(2):
        x = t(RNG.normal(size=(3, 5)).astype(np.float32))
        for result, expected in zip(captured(x), both(x), strict=True):
            np.testing.assert_array_equal(result.numpy(), expected.numpy())


@cases(
    "call, error, text",
    (lambda x: ml.topk(x, 5), ml.errors.ArgumentError, "topk.*k of at most 4, got 5"),
    (lambda x: ml.topk(x, -1), ml.errors.ArgumentError, "topk.*expected k >= 0, got -1"),
    (lambda x: ml.topk(x, 1, axis=3), ml.errors.ArgumentError, "topk.*axis 3 is out of"),
    (lambda x: ml.topk(ml.sum(x), 1), ml.errors.ArgumentError, "out of range for 0"),
    (lambda x: untyped.topk("1", 1), ml.errors.DTypeError, "asarray"),
    (ml.cumulative_prod, ml.errors.ShapeError, "cumulative_prod.*axis None is for 1 dim"),
    (lambda x: ml.cumulative_prod(ml.sum(x)), ml.errors.ShapeError, "cumulative_prod"),
    (
        lambda x: ml.cumulative_prod(x, axis=3),
        ml.errors.ArgumentError,
        "cumulative_prod.*axis 3 is out of range",
    ),
)
def test_along_an_axis_refused(call: Any, error: type[Exception], text: str) -> None:
    refuses(error, text, call, t(X))


def test_logaddexp_at_infinity_and_where_both_are_equal() -> None:
    x = t(np.array([0.0, -np.inf, np.inf, -np.inf, 1e4, 3.0]))
    y = t(np.array([0.0, -np.inf, np.inf, 5.0, -1e4, np.nan]))
    expected_values = [math.log(2), -np.inf, np.inf, 5.0, 1e4, np.nan]
    np.testing.assert_allclose(ml.logaddexp(x, y).numpy(), expected_values, rtol=1e-15)
    gradients = ml.grad(lambda x, y: ml.sum(ml.logaddexp(x, y)), (0, 1))(x, y)
    expected = [[0.5, 0.5, 0.5, 0, 1, np.nan], [0.5, 0.5, 0.5, 1, 0, np.nan]]
    np.testing.assert_array_equal([g.numpy() for g in gradients], expected)
    zero = t(np.zeros(()))
    second = ml.grad(ml.grad(lambda x: ml.logaddexp(x, zero)))(zero)
    assert second.item() == 0.25
    check_slopes(ml.logaddexp, t(np.zeros(3)), t(np.array([0.0, 1, -2])), order=3)


LISTS: dict[str, tuple[Callable[[Any], Any], Callable[[Array], Any]]] = {
    "split": (lambda x: ml.split(x, 2, axis=2), lambda x: np.split(x, 2, 2)),
    "split at": (lambda x: ml.split(x, [1, 3], axis=-1), lambda x: np.split(x, [1, 3], -1)),
    "split none": (lambda x: ml.split(x, []), lambda x: np.split(x, [])),
    "unstack": (lambda x: ml.unstack(x, axis=1), lambda x: [x[:, i] for i in range(3)]),
    "nonzero": (lambda x: ml.nonzero(x > 0), lambda x: np.nonzero(x > 0)),
    "broadcast_arrays": (
        lambda x: ml.broadcast_arrays(x[0], x[:, :1]),
        lambda x: np.broadcast_arrays(x[0], x[:, :1]),
    ),
    "meshgrid": (
        lambda x: ml.meshgrid(x[0, 0], x[0, :, 0], x[:, 0, 0]),
        lambda x: np.meshgrid(x[0, 0], x[0, :, 0], x[:, 0, 0]),
    ),
    "meshgrid ij": (
        lambda x: ml.meshgrid(x[0, 0], x[0, :, 0], indexing="ij"),
        lambda x: np.meshgrid(x[0, 0], x[0, :, 0], indexing="ij"),
    ),
}


@pytest.mark.parametrize("name", LISTS)
def test_function_with_several_results(name: str) -> None:
    ours, theirs = LISTS[name]
    for result, expected in zip(ours(t(X)), theirs(X), strict=True):
        same(result, expected)


def test_clip_keeps_integers() -> None:
    same(ml.clip(t([1, 5, 9]), 2), [2, 5, 9])
    same(ml.clip(t([1, 5, 9], dtype="u8"), max=4), np.array([1, 4, 4], np.uint8))


def test_one_hot_and_take_along_axis() -> None:
    same(ml.one_hot(t([2, 0]), 3), np.eye(3, dtype=np.float32)[[2, 0]])
    same(ml.one_hot(t([2, 0]), 3, dtype=ml.bool), np.eye(3, dtype=np.bool_)[[2, 0]])
    order = np.argsort(X, -1)
    same(ml.take_along_axis(t(X), t(order)), np.sort(X, -1))
    same(untyped.take(t(X), -1, axis=2), X[:, :, -1])  # a number is one position


def test_sum_to_reverses_broadcasting() -> None:
    same(sum_to(t(X), t(X[0, :, :1]).type), X.sum((0, 2))[:, None])
    same(sum_to(t(X), ml.asarray(0.0, dtype="f64").type), np.float64(X.sum()))


# --- what copies nothing -------------------------------------------------------------

ALIASES: dict[str, Callable[[ml.Tensor], ml.Tensor]] = {
    "reshape": lambda x: ml.reshape(x, (4, 6)),
    "expand_dims": ml.expand_dims,
    "squeeze": lambda x: ml.squeeze(ml.expand_dims(x), 0),
    "permute of unit axes": lambda x: ml.permute_dims(ml.reshape(x, (2, 1, 12)), (1, 0, 2)),
    "broadcast to leading ones": lambda x: ml.broadcast_to(x, (1, 2, 3, 4)),
    "index None": lambda x: x[:, None],
}


@pytest.mark.parametrize("name", ALIASES)
def test_aliases_copy_nothing(name: str) -> None:
    x = t(X)
    with ml.Arena(ml.default_vm(), "unused") as arena:
        alias = ALIASES[name](x)
    assert arena.high_water == 0
    np.testing.assert_array_equal(alias.numpy().reshape(-1), X.reshape(-1))
    x += 1.0
    np.testing.assert_array_equal(alias.numpy().reshape(-1), X.reshape(-1))


SAME: dict[str, Callable[[ml.Tensor], ml.Tensor]] = {
    "reshape": lambda x: ml.reshape(x, (2, 3, -1)),
    "permute_dims": lambda x: ml.permute_dims(x, (0, 1, 2)),
    "broadcast_to": lambda x: ml.broadcast_to(x, (2, 3, 4)),
    "concat": lambda x: ml.concat([x], axis=1),
    "split": lambda x: ml.split(x, 1)[0],
    "clip": ml.clip,
    "dropout": lambda x: ml.dropout(x, 0.0),
    "index": lambda x: x[...],
}


@pytest.mark.parametrize("name", SAME)
def test_what_changes_nothing_gives_another_tensor_over_the_same_bytes(name: str) -> None:
    x = t(X)
    y = SAME[name](x)
    assert y is not x
    assert (y.type, y.handle) == (x.type, x.handle)


# --- neural networks -----------------------------------------------------------------


def test_conv2d_resolves_stride_and_padding() -> None:
    x = t(RNG.normal(size=(2, 5, 6, 3)).astype(np.float32))
    kernel = t(RNG.normal(size=(3, 2, 3, 4)).astype(np.float32))
    assert ml.conv2d(x, kernel).shape == (2, 3, 5, 4)
    assert ml.conv2d(x, kernel, stride=2, padding="SAME").shape == (2, 3, 3, 4)
    explicit = ml.conv2d(x, kernel, stride=(1, 2), padding=((1, 1), (0, 1)))
    assert explicit.shape == (2, 5, 3, 4)
    window = x.numpy()[0, :3, :2]
    expected = np.einsum("hwi,hwio->o", window, kernel.numpy())
    np.testing.assert_allclose(ml.conv2d(x, kernel).numpy()[0, 0, 0], expected, rtol=1e-5)


def test_pools() -> None:
    images = RNG.normal(size=(1, 4, 4, 2)).astype(np.float32)
    windows = images.reshape(1, 2, 2, 2, 2, 2).swapaxes(2, 3)
    same(ml.max_pool2d(t(images), 2), windows.max((3, 4)))
    same(ml.avg_pool2d(t(images), (2, 2)), windows.mean((3, 4)))
    assert ml.max_pool2d(t(images), 3, stride=1, padding="SAME").shape == images.shape


def test_dropout_takes_the_next_key_unless_given_one() -> None:
    x, key = ml.ones((100,)), ml.random.key(0)
    dropped = ml.dropout(x, 0.5, key=key)
    assert set(dropped.numpy()) == {0.0, 2.0}
    same(ml.dropout(x, 0.5, key=key), dropped)
    assert np.any(ml.dropout(x, 0.5).numpy() != ml.dropout(x, 0.5).numpy())


# --- dtypes --------------------------------------------------------------------------


def test_dtype_questions() -> None:
    assert ml.result_type(ml.int8, t([1], dtype="u8")) is ml.int16
    assert ml.can_cast(ml.int8, ml.int32)
    assert not ml.can_cast(ml.float32, ml.int32)
    assert ml.result_type(ml.int8, 1) is ml.int8
    assert ml.result_type(t([1], dtype="u8"), 1.5, True) is ml.float32
    assert ml.result_type(ml.float64, 1.5) is ml.float64
    assert ml.result_type(1, 2.5) is ml.float32
    assert ml.isdtype(ml.float32, "real floating")
    assert ml.isdtype(ml.uint8, ("bool", "integral"))
    assert ml.isdtype(ml.uint8, ml.uint8)
    assert not ml.isdtype(ml.bool, "numeric")
    assert ml.finfo(ml.float32).eps == 2**-23
    assert ml.finfo(t(V)).dtype is ml.float32
    assert ml.iinfo(ml.int16)[:3] == (16, 32767, -32768)


@cases(
    "call",
    lambda: ml.result_type(ml.int8, ml.uint64),
    lambda: ml.result_type(),
    lambda: ml.finfo(ml.int8),
    lambda: ml.iinfo(ml.float32),
    lambda: ml.isdtype("f3", "bool"),
)
def test_dtype_questions_without_an_answer(call: Callable[[], Any]) -> None:
    refuses(ml.errors.DTypeError, "", call)


def test_shapes_broadcast() -> None:
    assert ml.broadcast_shapes() == ()
    assert ml.broadcast_shapes((2, 1), [3], 1) == (2, 3)
    refuses(ValueError, r"broadcast_shapes\(\(2,\), \(3,\)\)", ml.broadcast_shapes, (2,), (3,))


OUT_OF_RANGE: dict[str, Callable[[ml.Tensor], Any]] = {
    "axis": lambda x: ml.sum(x, axis=3),
    "axis twice": lambda x: ml.sum(x, axis=(0, 0)),
    "new axis": lambda x: ml.expand_dims(x, axis=5),
    "index": lambda x: x[2],
    "too many": lambda x: x[0, 0, 0, 0],
    "tensor": lambda x: x[t([2])],
    "take": lambda x: ml.take(x, t([-3]), axis=0),
    "take one": lambda x: untyped.take(x, 9, axis=0),
    "mask": lambda x: x[t([True] * 3)],
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_what_is_out_of_range_is_an_index_error(name: str) -> None:
    refused = refuses(IndexError, "", OUT_OF_RANGE[name], t(X))
    assert isinstance(refused, ml.errors.OpError)


def test_an_axis_out_of_range_is_all_that_libraries_expect() -> None:
    refused = refuses(ml.errors.AxisRefused, "", ml.stack, [t(X)], axis=9)
    assert all(isinstance(refused, each) for each in (IndexError, ValueError, TypeError))


# --- what is refused -----------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "stack of none": (lambda x: ml.stack([]), ml.errors.ShapeError, "expected 1 tensor"),
    "stack of shapes": (
        lambda x: ml.stack([x, x[0]]),
        ml.errors.ShapeError,
        r"stack\(f32\[2,3,4\], f32\[3,4\]\): expected equal shapes",
    ),
    "reshape": (
        lambda x: ml.reshape(x, (5, 5)),
        ml.errors.ShapeError,
        r"reshape\(f32\[2,3,4\]\): 24 .*\(5, 5\)",
    ),
    "reshape -1": (lambda x: ml.reshape(x, (7, -1)), ml.errors.ShapeError, r"24 .*\(7, -1\)"),
    "reshape -1 -1": (lambda x: ml.reshape(x, (-1, -1)), ml.errors.ShapeError, "-1"),
    "reshape 0": (lambda x: ml.reshape(x, (0, -1)), ml.errors.ShapeError, "-1"),
    "reshape float": (lambda x: untyped.reshape(x, (2.0, 12)), ml.errors.ArgumentError, "2.0"),
    "reshape text": (lambda _: untyped.reshape("x", (24,)), ml.errors.DTypeError, "asarray"),
    "expand_dims": (lambda x: ml.expand_dims(x, axis=4), ml.errors.ArgumentError, "axis 4"),
    "squeeze": (lambda x: ml.squeeze(x, 1), ml.errors.ShapeError, "length 3, not 1"),
    "permute_dims": (lambda x: ml.permute_dims(x, (0, 1)), ml.errors.ArgumentError, "each"),
    "matrix_transpose": (
        lambda x: ml.matrix_transpose(ml.reshape(x, -1)),
        ml.errors.ShapeError,
        "2 dimensions",
    ),
    "moveaxis": (lambda x: ml.moveaxis(x, (0, 1), 0), ml.errors.ArgumentError, "equally many"),
    "broadcast_to": (lambda x: ml.broadcast_to(x, (3, 4)), ml.errors.ShapeError, "broadcast"),
    "broadcast_arrays": (
        lambda x: ml.broadcast_arrays(x, x.mT),
        ml.errors.ShapeError,
        r"broadcast_arrays\(f32\[2,3,4\], f32\[2,4,3\]\)",
    ),
    "meshgrid": (ml.meshgrid, ml.errors.ShapeError, "1 dimension"),
    "concat nothing": (lambda _: ml.concat([]), ml.errors.ShapeError, "none"),
    "concat": (lambda x: ml.concat([x, x.mT]), ml.errors.ShapeError, "equal"),
    "concat axis": (lambda x: ml.concat([x], axis=3), ml.errors.ArgumentError, "axis 3"),
    "split": (lambda x: ml.split(x, 5, axis=2), ml.errors.ShapeError, "length 4"),
    "pad": (lambda x: ml.pad(x, [(1, 1)]), ml.errors.ArgumentError, "pairs"),
    "pad negative": (lambda x: ml.pad(x, -1), ml.errors.ArgumentError, ">= 0"),
    "pad triple": (lambda x: ml.pad(x, [(1, 1, 1)] * 3), ml.errors.ArgumentError, "two"),
    "pad mode": (lambda x: untyped.pad(x, 1, mode="odd"), ml.errors.ArgumentError, "reflect"),
    "pad of nothing": (
        lambda x: ml.pad(x[:0], 1, mode="edge"),
        ml.errors.ShapeError,
        "axis 0 has no elements",
    ),
    "pad pairs": (lambda x: ml.pad(x, [(1, 1)], mode="edge"), ml.errors.ArgumentError, "pairs"),
    "clip bools": (lambda x: ml.clip(x > 0, True), ml.errors.DTypeError, "dtype bool"),
    "take axis": (lambda x: ml.take(x, t([0])), ml.errors.ArgumentError, "axis"),
    "take": (lambda x: ml.take(x, t([9]), axis=0), ml.errors.OperandValueError, "index 9"),
    "nonzero": (lambda _: ml.nonzero(t(1.0)), ml.errors.ShapeError, "scalar"),
    "where": (lambda x: ml.where(x, x, x), ml.errors.DTypeError, "bool"),
    "outer": (lambda x: ml.outer(x, x), ml.errors.ShapeError, "1 dimension"),
    "dropout": (lambda x: ml.dropout(x, 1.0), ml.errors.ArgumentError, "rate"),
    "conv2d": (lambda x: ml.conv2d(x, x), ml.errors.ShapeError, "4 axes"),
    "conv2d padding": (
        lambda x: ml.conv2d(x[None], x[None], padding="FULL"),
        ml.errors.ArgumentError,
        "FULL",
    ),
    "pool": (lambda x: ml.max_pool2d(x, 2), ml.errors.ShapeError, "4 axes"),
    "pool window": (
        lambda x: untyped.avg_pool2d(x[None], (1, 2, 3)),
        ml.errors.ArgumentError,
        "avg_pool2d.*two",
    ),
    "zeros": (lambda _: ml.zeros((2, -1)), ml.errors.ShapeError, "-1"),
    "zeros word": (lambda _: untyped.zeros("word"), ml.errors.ArgumentError, "word"),
    "zeros of lengths": (
        lambda _: ml.zeros(3, 4),
        ml.errors.DTypeError,
        r"one argument: write zeros\(\(3, 4\)\)",
    ),
    "repeat": (
        lambda x: ml.repeat(x, [1, 2], axis=1),
        ml.errors.ShapeError,
        "2 repeats for 3 places",
    ),
    "repeat floats": (lambda x: ml.repeat(x, x[0, 0]), ml.errors.DTypeError, "integers"),
    "repeat -1": (lambda x: ml.repeat(x[0, 0], t([1, -1, 1, 1])), ml.errors.ArgumentError, "-1"),
    "repeat grid": (lambda x: ml.repeat(x, t([[1]])), ml.errors.ShapeError, "vector"),
    "diff": (lambda x: ml.diff(x, n=-1), ml.errors.ArgumentError, "expected n >= 0"),
    "diff axis": (lambda x: ml.diff(x, axis=3), IndexError, "diff.*axis 3"),
    "cumulative_sum": (
        lambda x: ml.cumulative_sum(x[0, 0], include_initial=True, out=x),
        ml.errors.ArgumentError,
        "out= is not supported",
    ),
    "take_along_axis": (
        lambda x: ml.take_along_axis(x, t([[[0, 0]]] * 3), axis=0),
        ml.errors.ShapeError,
        r"take_along_axis\(f32\[2,3,4\], i64\[3,1,2\]\)",
    ),
    "full": (lambda _: ml.full(2, 1.5, dtype=ml.int32), ml.errors.DTypeError, "full"),
    "full list": (lambda _: untyped.full(2, [1, 2]), ml.errors.DTypeError, "list"),
    "arange": (lambda _: ml.arange(0, 1, 0), ml.errors.ArgumentError, "step"),
    "arange u8": (lambda _: ml.arange(300, dtype=ml.uint8), ml.errors.ArgumentError, "299"),
    "linspace": (lambda _: ml.linspace(0, 1, -1), ml.errors.ArgumentError, "num"),
    "eye": (lambda _: ml.eye(-1), ml.errors.ShapeError, "-1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    call, error, text = REFUSED[name]
    refuses(error, text, call, t(X))


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_leaves_nothing_allocated(name: str) -> None:
    call, error, _ = REFUSED[name]
    x = t(X)
    with ml.Arena(ml.default_vm(), "refused") as arena:
        refuses(error, "", call, x)
        assert arena.used == 0


def names_of(call: Callable[[], object]) -> str | None:
    refused = refuses(ml.errors.OpError, "", call)
    return refused.op


@pytest.mark.parametrize("name", ["zeros", "ones", "empty"])
def test_errors_name_the_function_that_was_called(name: str) -> None:
    make = getattr(ml, name)
    for shape in ((-1,), 1.5, (1 << 40, 1 << 40), 10**5000):
        assert names_of(lambda shape=shape: make(shape)) == name  # type: ignore[misc]


def test_errors_of_composed_functions_name_them() -> None:
    x, n = t(X), ml.arange(3)
    assert names_of(lambda: ml.repeat(x, -1)) == "repeat"
    assert names_of(lambda: ml.tile(x, (1, -1))) == "tile"
    assert names_of(lambda: ml.std(t([1j]))) == "std"
    assert names_of(lambda: untyped.reshape(x, "2")) == "reshape"
    assert names_of(lambda: untyped.squeeze(x, 0.5)) == "squeeze"
    assert names_of(lambda: ml.split(x, 10**5000)) == "split"
    assert names_of(lambda: ml.full_like(n, 0.5)) == "full_like"


HUGE = 10**5000  # Python refuses to print it


@cases(
    "call",
    lambda x: ml.eye(HUGE),
    lambda x: ml.sum(x, axis=HUGE),
    lambda x: ml.reshape(x, HUGE),
    lambda x: ml.expand_dims(x, axis=HUGE),
    lambda x: ml.arange(HUGE),
    lambda x: ml.full(2, HUGE),
    lambda x: x + HUGE,
    lambda x: x[HUGE],
    lambda x: ml.roll(x, HUGE),
)
def test_huge_ints_are_refused_in_few_words(call: Callable[[ml.Tensor], object]) -> None:
    refused = refuses(ml.errors.OpError, "", call, t(X))
    assert len(str(refused)) < 300


def test_a_diagonal_far_outside_is_none() -> None:
    for k in (1 << 63, -(1 << 63)):
        same(ml.eye(2, 3, k=k), np.zeros((2, 3), np.float32))
        same(ml.tril(t(X), k=k), X if k > 0 else X * 0)
        same(ml.triu(t(X), k=k), X if k < 0 else X * 0)


def test_lists_nested_too_deep_are_no_tensor() -> None:
    inside: list[Any] = []
    inside.append(inside)
    deep: list[Any] = [1]
    for _ in range(5000):
        deep = [deep]
    for lists in (inside, deep):
        refuses(ml.errors.ShapeError, "64 deep", ml.asarray, lists)


def test_a_dtype_is_whatever_names_one() -> None:
    n = ml.arange(3)
    for dtype in ("float64", np.float64, float, "f64", np.dtype("f8"), ml.float64):
        assert ml.sum(n, dtype=dtype).dtype is ml.float64
        assert ml.prod(n, dtype=dtype).dtype is ml.float64
        assert ml.isdtype(dtype, "float64")
    refuses(ml.errors.DTypeError, r"sum\(\): no dtype for 'float12'", ml.sum, n, dtype="float12")


def test_bools_are_counted_and_else_converted() -> None:
    flags = t(X) > 0
    same(ml.sum(flags, axis=1), (X > 0).sum(axis=1))
    same(ml.mean(flags), (X > 0).mean(dtype=np.float32))
    same(ml.var(flags, axis=0), (X > 0).var(axis=0, dtype=np.float32))
    same(ml.std(t([1, 2, 4]), correction=1), np.std([1, 2, 4], ddof=1, dtype=np.float32))
    same(ml.prod(flags, axis=1), (X > 0).prod(axis=1))
    same(ml.max(flags, axis=2), (X > 0).max(axis=2))
    same(ml.min(flags, axis=2), (X > 0).min(axis=2))
    same(ml.argmax(flags, axis=2), (X > 0).argmax(axis=2))
    same(ml.argmin(flags), (X > 0).argmin())
    same(ml.cumulative_prod(flags[0, 0]), np.cumprod(X[0, 0] > 0))
    same(ml.cumulative_sum(flags, 1), np.cumsum(X > 0, 1))


# --- the namespace -------------------------------------------------------------------


def test_every_public_name_is_there_and_documented() -> None:
    names = vars(ml)["__all__"]
    assert len(set(names)) == len(names)
    for name in names:
        value = getattr(ml, name)
        if callable(value) or isinstance(value, type(math)):
            assert (value.__doc__ or "").strip(), f"ml.{name} has no docstring"


_REACHED = """
import mlvm.eager as ml
for module in (ml, ml.errors, ml.nn, ml.optim, ml.parallel, ml.random, ml.testing, ml.tree):
    names = [name for name in dir(module) if not name.startswith("__")]
    assert names == sorted(module.__all__), set(names) ^ set(module.__all__)
    for name in ("TYPE_CHECKING", "annotations", "host", "math", "tensor"):
        assert not hasattr(module, name), name
"""


def test_nothing_but_public_names_can_be_reached() -> None:
    """This runs in a separate Python: `mlvm.eager.stub` becomes `ml.stub` where it is imported."""
    subprocess.run([sys.executable, "-c", _REACHED], check=True, timeout=60)


def test_a_name_that_is_missing_in_the_language_is_a_module_all_the_same() -> None:
    import mlvm.eager.tensor.tensor as by_path
    from mlvm.eager.tensor import tensor as by_name

    assert by_path is by_name
    assert by_path.Tensor is ml.Tensor


def test_a_tensor_lists_what_it_has() -> None:
    for x in (ml.zeros((2, 3)), ml.reshape(ml.zeros((2, 3)), (3, 2))):
        for name in dir(x):
            getattr(x, name)
        assert {"shape", "numpy", "T", "__add__", "sum"} <= set(dir(x))
        assert not {"sort", "backward", "prepare", "_taken"} & set(dir(x))


def test_random_functions_are_documented() -> None:
    for module in (ml.random, ml.nn, ml.optim):
        for name, value in vars(module).items():
            if getattr(value, "__module__", None) == module.__name__ and name[0] != "_":
                assert (value.__doc__ or "").strip(), f"{module.__name__}.{name}"
