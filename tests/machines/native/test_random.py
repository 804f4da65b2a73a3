"""The native draws: numpy's bits, for any key and shape, in any division into units."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mlvm.core.types import Array
from tests.brief import cases
from tests.machines.native.planners import assert_same_bits

WORDS = st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([0, 1, 2**64 - 1]))
KEYS = st.tuples(WORDS, WORDS).map(lambda words: np.array(words, np.uint64))


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


@cases("dtype", "u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64")
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
