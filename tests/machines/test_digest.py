"""Digests of tensors: equal for equal tensors, and different for every small change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mlvm.machines import digest as digests
from mlvm.machines.digest import accumulate_in_numpy, digest
from mlvm.machines.native.extension import EXTENSION

RNG = np.random.default_rng(0)


@pytest.mark.skipif(EXTENSION is None, reason="there is one implementation only")
@pytest.mark.parametrize("nbytes", [0, 8, 56, 64, 72, 4088, 4096, 4104, 100_000])
@pytest.mark.parametrize("kind", range(5))
def test_each_instruction_set_and_numpy_compute_the_same_sums(nbytes: int, kind: int) -> None:
    data = RNG.integers(0, 256, nbytes).astype(np.uint8)
    data[: nbytes // 2] = 255  # nans of all dtypes
    operands = data, nbytes, kind, digests.KEYS
    native: Any = EXTENSION
    used = native.simd()
    try:
        for name in [name for name, here in native.simd_sets().items() if here]:
            native.choose_simd(name)
            assert digests.accumulate(*operands) == accumulate_in_numpy(*operands), name
    finally:
        native.choose_simd(used)


def test_every_bit_counts() -> None:
    x = RNG.integers(0, 256, 5000).astype(np.uint8)
    seen = {digest(x)}
    for bit in range(0, 8 * x.size, 7):
        y = x.copy()
        y[bit // 8] ^= 1 << bit % 8
        seen.add(digest(y))
    assert len(seen) == 1 + len(range(0, 8 * x.size, 7))


@pytest.mark.parametrize("n", [1, 2, 16, 17, 3000])
def test_changes_of_many_elements_count(n: int) -> None:
    x = RNG.normal(size=n).astype(np.float32)
    changed = [
        x,
        -x,
        np.roll(x, 1) + 1,
        x[::-1] * 2,
        x + 3,
        x.reshape(n, 1),
        x.astype("f8"),
    ]
    changed += [x.view(np.int32), np.append(x, np.float32(0.0))]
    assert len({digest(each) for each in changed}) == len(changed)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c8", "c16"])
def test_all_nans_are_equal_and_zeros_are_not(dtype: str) -> None:
    x = np.zeros(3, dtype)
    parts = x.view(x.real.dtype)
    parts[1] = np.nan
    y = x.copy()
    y.view(parts.dtype)[1] = -np.nan
    assert y.tobytes() != x.tobytes()
    assert digest(x) == digest(y)
    y.view(parts.dtype)[2] = -0.0
    assert digest(x) != digest(y)


def test_the_order_of_axes_in_memory_does_not_count() -> None:
    x = RNG.normal(size=(3, 4))
    assert digest(x) == digest(np.asfortranarray(x))


def test_digests_are_those_of_earlier_releases() -> None:
    x = np.arange(2000, dtype=np.float32)
    assert digest(x).hex() == "e128ffaf8943f09c4b88de09fae5f75b"
