"""The native draws: numpy's bits, for any key and shape, in any division into units."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlvm.core.types import Array
from tests.machines.native.planners import assert_same_bits, native, planned, reference

SIZES = [0, 1, 2, 7, 8, 9, 255, 256, 257, 511, 512, 513, 1025, 70_001]
WORDS = st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([0, 1, 2**64 - 1]))
KEYS = st.tuples(WORDS, WORDS).map(lambda words: np.array(words, np.uint64))


@pytest.mark.parametrize("size", SIZES)
def test_sizes_around_units(size: int) -> None:
    key = np.array([size, 2**63 + size], np.uint64)
    assert_same_bits("uniform", key, shape=(size,))
    assert_same_bits("uniform", key, shape=(size,), dtype="f64")
    assert_same_bits("bernoulli", key, np.array(0.3), shape=(size,))
    assert_same_bits("split_key", key, n=size)
    assert_same_bits("normal", key, shape=(size,))
    assert_same_bits("normal", key, shape=(size,), dtype="f64")
    assert_same_bits("permutation", key, n=size)
    for dtype in ("f4", "f8"):
        x = np.random.default_rng(size).normal(size=size).astype(dtype)
        for rate in (0.0, 0.1, 0.5, 0.999):
            assert_same_bits("dropout", x, key, rate=rate)


def test_a_word_at_a_layers_edge() -> None:
    """The number of steps inside is rounded: this stream has a word for which that matters."""
    assert_same_bits("normal", np.array([0, 2**63], np.uint64), shape=(216_230,))


@given(KEYS, st.lists(st.integers(0, 9), max_size=4))
def test_any_key(key: Array, shape: list[int]) -> None:
    assert_same_bits("uniform", key, shape=tuple(shape))
    assert_same_bits("uniform", key, shape=tuple(shape), dtype="f64")
    assert_same_bits("split_key", key, n=3)
    assert_same_bits("dropout", np.ones(shape, "f4"), key, rate=0.4)


@given(KEYS, WORDS)
def test_fold_in_any_integer(key: Array, word: int) -> None:
    for kind in ("u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8"):
        assert_same_bits("fold_in", key, np.array(word, np.uint64).astype(kind))


@pytest.mark.parametrize("dtype", ["u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64"])
def test_integers_of_any_range(dtype: str) -> None:
    """From words of the dtype's width, or half as wide ones; some of which are refused, or none."""
    bits, low = int(dtype[1:]), 0 if dtype[0] == "u" else -(1 << int(dtype[1:]) - 1)
    key, end = np.array([bits, 5], np.uint64), low + (1 << bits)
    spans = [1, 2, 7, 100, (1 << bits - 1) + 1, (1 << bits) - 1, 1 << bits]
    spans += [n for n in ((1 << 32) - 1, 1 << 32, (1 << 32) + 1) if n < 1 << bits]
    for span in spans:
        for first in (low, end - span):
            assert_same_bits(
                "randint", key, low=first, high=first + span, shape=(601,), dtype=dtype
            )


def test_dropout_of_special_values() -> None:
    values = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-45, 3e38], "f4")
    x = np.resize(values, 3000)
    result = native("dropout", x, np.array([1, 2], np.uint64), rate=0.5)
    expected = reference("dropout", x, np.array([1, 2], np.uint64), rate=0.5)
    np.testing.assert_array_equal(result, expected)
    np.testing.assert_array_equal(np.signbit(result), np.signbit(expected))


# --- bernoulli -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize(
    ("shape", "of_p"),
    [
        ((), ()),
        ((700,), (1,)),
        ((300, 7), (7,)),
        ((5, 3, 4), (1, 3, 4)),
        ((2, 3), (2, 3)),
        ((0, 3), (3,)),
    ],
)
def test_bernoulli_of_a_p_that_repeats(shape: Any, of_p: Any, dtype: str) -> None:
    p = np.random.default_rng(1).random(of_p).astype(dtype)
    assert_same_bits("bernoulli", np.array([3, 4], np.uint64), np.asarray(p), shape=shape)


def test_other_broadcasts_are_left_to_numpy() -> None:
    key = np.array([3, 4], np.uint64)
    p = np.array([[0.2], [0.8]])
    assert not planned("bernoulli", key, p, shape=(2, 3))
    np.testing.assert_array_equal(
        native("bernoulli", key, p, shape=(2, 3)), reference("bernoulli", key, p, shape=(2, 3))
    )
