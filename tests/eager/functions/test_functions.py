"""`asarray`, functions at their edges, and names; what they compute is rows of a table."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from tests.slopes import check_slopes

RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 3, 4)).astype(np.float32)
V = RNG.normal(size=5).astype(np.float32)

t = ml.asarray


def same(result: ml.Tensor, expected: Any) -> None:
    expected = np.asarray(expected)
    assert result.type == ml.asarray(expected).type
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-6, atol=1e-6)


# --- values copied in ----------------------------------------------------------------


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


def test_asarray_of_a_torch_tensor_takes_its_value() -> None:
    torch = pytest.importorskip("torch")
    same(t(torch.ones(2, requires_grad=True)), np.ones(2, np.float32))
    x = t(torch.full((2,), 1.5, dtype=torch.bfloat16))
    assert (x.dtype, x.tolist()) == (ml.bfloat16, [1.5, 1.5])
    same(t(torch.tensor([1 + 2j]).conj()), np.array([1 - 2j], np.complex64))


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


_EXTREMES = np.array([*itertools.product([0.0, -0.0, 1.0, 2.0, -3.0, np.inf, -np.inf], repeat=3)])


def _slopes_of_products(x: Any, counts: list[int], by_count: bool) -> Any:
    """Sum the products without one element, of the first `counts` elements of each row.

    Sum over the counts for each element, or over the elements for each count."""
    sums = np.zeros((len(x), len(counts) if by_count else x.shape[1]))
    with np.errstate(invalid="ignore"):
        for at, count in enumerate(counts):
            for j in range(count):
                others = [i for i in range(count) if i != j]
                sums[:, at if by_count else j] += np.prod(x[:, others], axis=1)
    return sums


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        ({}, [1, 2, 3]),
        ({"exclusive": True}, [0, 1, 2]),
        ({"include_initial": True}, [0, 1, 2, 3]),
    ],
    ids=str,
)
@pytest.mark.parametrize("way", ["grad", "vmap", "capture", "jvp"])
def test_gradients_of_running_products_are_sums_of_products(
    options: dict[str, bool], counts: list[int], way: str
) -> None:
    x = t(_EXTREMES)

    def products(x: ml.Tensor) -> ml.Tensor:
        return ml.cumulative_prod(x, axis=-1, **options)

    slopes = ml.grad(lambda x: ml.sum(products(x)))
    ways: dict[str, Callable[[ml.Tensor], ml.Tensor]] = {
        "grad": slopes,
        "vmap": ml.vmap(slopes),
        "capture": ml.capture(slopes),
        "jvp": lambda x: ml.jvp(products, (x,), (ml.ones_like(x),))[1],
    }
    result = ways[way](x).numpy()
    expected = _slopes_of_products(_EXTREMES, counts, by_count=way == "jvp")
    # inf * (1 + 0) is inf, the limit, where the sum inf * 1 + inf * 0 is nan
    np.testing.assert_array_equal(np.where(np.isnan(expected), np.nan, result), expected)


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


# --- the namespace -------------------------------------------------------------------


def test_a_tensor_lists_what_it_has() -> None:
    for x in (ml.zeros((2, 3)), ml.reshape(ml.zeros((2, 3)), (3, 2))):
        for name in dir(x):
            getattr(x, name)
        assert {"shape", "numpy", "T", "__add__", "sum"} <= set(dir(x))
        assert not {"sort", "backward", "prepare", "_taken"} & set(dir(x))
