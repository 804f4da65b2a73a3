"""Sums of products: of batches in groups, and long ones of integers."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mlvm.core.op import OPS
from mlvm.core.ops import matmul
from mlvm.core.types import Array, DType
from tests.brief import Patch, cases, count_calls
from tests.cases.evaluate import evaluate

RNG = np.random.default_rng(8)
lengths = st.integers(0, 4)


def integers(*shape: int) -> Array:
    """Small whole numbers, so that every order of summation gives the same bits."""
    return RNG.integers(-4, 5, shape).astype(np.float32)


def operand(shape: tuple[int, ...], transpose: bool) -> tuple[Array, Array]:
    """A tensor, and what it is in the product."""
    x = integers(*shape[:-2], *(shape[-2:][::-1] if transpose else shape[-2:]))
    return x, x.swapaxes(-1, -2) if transpose else x


@given(st.lists(lengths, max_size=2), lengths, lengths, lengths, st.booleans(), st.booleans())
def test_batch_contract_is_the_sum_of_the_products(
    batch: list[int], m: int, k: int, n: int, transpose_x: bool, transpose_y: bool
) -> None:
    x, left = operand((*batch, m, k), transpose_x)
    y, right = operand((*batch, k, n), transpose_y)
    result = evaluate("batch_contract", x, y, transpose_x=transpose_x, transpose_y=transpose_y)
    ab = "ab"[: len(batch)]
    np.testing.assert_array_equal(result, np.einsum(f"{ab}mk,{ab}kn->mn", left, right))


@cases("m, n", (140, 150), (300, 300), (64, 64))
def test_batch_contract_of_several_groups(m: int, n: int) -> None:
    x, y = integers(37, m, 3), integers(37, n, 3)
    result = evaluate("batch_contract", x, y, transpose_y=True)
    np.testing.assert_array_equal(result, np.tensordot(x, y, ((0, 2), (0, 2))))


@cases("dtype", "i64", "i8", "u16")
def test_a_long_sum_of_integers_is_made_in_pieces_of_the_same_bits(
    dtype: str, monkeypatch: Patch
) -> None:
    """So that other threads run meanwhile: numpy keeps the lock for a small result."""
    rng = np.random.default_rng(0)
    kind = DType.named(dtype).numpy
    pieces = 0
    shapes = [
        ((3, 100), (100, 2)), ((100,), (100,)), ((2, 3, 100), (2, 100, 3)), ((2, 100), (100,)),
    ]  # fmt: skip
    for left, right in shapes:
        x, y = (rng.integers(0, 100, size=shape).astype(kind) for shape in (left, right))
        expected = np.matmul(x, y)
        out = np.empty(expected.shape, kind)
        with monkeypatch.context() as patch:
            patch.setattr(matmul, "_PIECE", 64)
            products = count_calls(patch, np, "matmul")
            OPS["matmul"].kernel(out, x, y)
        pieces += products["matmul"]
        np.testing.assert_array_equal(out, expected)
    assert pieces > 4 * len(shapes)
