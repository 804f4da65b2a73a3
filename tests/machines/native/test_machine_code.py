"""Machine code of chains computes the bits that the row functions of its links compute."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mlvm.core.machine.fused import Link
from mlvm.core.types import Array, TensorType, aligned_copy
from mlvm.machines.native import _native
from mlvm.machines.native.planners.chain import chain_call
from tests.brief import cases
from tests.machines.native.planners import POOLS, links

BINARY = ("add", "subtract", "multiply", "divide")
UNARY = ("square", "sqrt", "reciprocal", "negative", "exp")  # exp has no machine code
COMPARISONS = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")
OF_MASKS = ("bitwise_and", "bitwise_or", "bitwise_invert", "logical_not")
SPECIAL = (0.0, -0.0, 1.0, np.inf, -np.inf, np.nan, 1e-310, 1e-40)


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    after = _native.code_after(0)
    yield
    _native.code_after(after)


def random_links(
    rng: random.Random, results: int, operands: int, count: int
) -> tuple[list[Link], set[int]]:
    """Return links whose last ones compute the results 0, 1, ..., and the results that are masks.

    The last two operands are masks.
    """
    *numbers, first, second = range(results, results + operands + 2)
    masks = [first, second]
    described: list[tuple[Any, ...]] = []
    for i in range(count):
        target = i - count if i < count - results else i - count + results
        x, y = rng.choices(numbers, k=2)
        kind = rng.random()
        if kind < 0.2:
            op = rng.choice(COMPARISONS if kind < 0.1 else OF_MASKS)
            if op in OF_MASKS:
                x, y = rng.choices(masks, k=2)
            described.append((op, target, x) if op in OF_MASKS[2:] else (op, target, x, y))
            masks.append(target)
            continue
        if kind < 0.3:
            described.append(("where", target, rng.choice(masks), x, y))
        elif kind < 0.45:
            described.append((rng.choice(UNARY), target, x))
        else:
            described.append((rng.choice(BINARY), target, x, y))
        numbers.append(target)
    return links(*described), {*masks} & {*range(results)}


def run(chain: list[Link], types: list[TensorType], operands: list[Array], threads: int) -> Any:
    call = chain_call(chain, types)
    assert call is not None
    results = [
        np.zeros(type.shape, type.dtype.numpy) for type in types[: len(types) - len(operands)]
    ]
    call.run(POOLS[threads], *results, *[aligned_copy(x) for x in operands])
    return [np.where(x == x, x, np.nan).astype(x.dtype).tobytes() for x in results]


@cases("dtype", "f32", "f64")
@cases("seed", *range(50))
def test_has_the_bits_of_the_links(seed: int, dtype: str) -> None:
    rng, values = random.Random(seed), np.random.default_rng(seed)
    results, operands = rng.randint(1, 3), rng.randint(1, 30)
    shape = rng.choice(((), (), (3,), (70,), (5, 9), (33, 37), (3001,)))
    chain, masks = random_links(rng, results, operands, rng.choice((5, 12, 40, 90)))
    types = [TensorType("bool" if i in masks else dtype, shape) for i in range(results)]
    types += [
        TensorType(dtype, rng.choice((shape, shape, shape[-1:], ()))) for _ in range(operands)
    ]
    types += [TensorType("bool", shape)] * 2
    arrays = [
        np.where(values.random(type.shape) < 0.1, values.choice(SPECIAL, type.shape), x)
        for type in types[results:]
        for x in [values.standard_normal(type.shape)]
    ]
    with np.errstate(all="ignore"):
        arrays = [
            np.asarray(x > 0 if type.dtype.name == "bool" else x, type.dtype.numpy)
            for x, type in zip(arrays, types[results:], strict=True)
        ]
    for threads in (1, 3):
        _native.code_after(0)
        expected = run(chain, types, arrays, threads)
        _native.code_after(1)
        assert run(chain, types, arrays, threads) == expected


@cases("dtype", "f32", "f64")
def test_more_values_than_registers(dtype: str) -> None:
    """Forty sums are needed at the end, in the order in which they were computed."""
    count, type = 40, TensorType(dtype, (1001,))
    sums = [("add", -1 - i, 1, 2) if not i else ("multiply", -1 - i, -i, 2) for i in range(count)]
    total = [("subtract", -100 - i, -1 - i, -99 - i if i else 1) for i in range(count - 1)]
    chain = links(*sums, *total, ("divide", 0, -count, -98 - count))
    x, y = (np.random.default_rng(3).random(1001).astype(type.dtype.numpy) for _ in range(2))
    expected = run(chain, [type] * 3, [x, y], 1)
    _native.code_after(1)
    assert run(chain, [type] * 3, [x, y], 1) == expected


def test_works_in_place() -> None:
    chain = links(
        ("multiply", -1, 2, 3),
        ("less", -2, -1, 2),
        ("where", -3, -2, 2, 3),
        ("add", 0, -3, -1),
        ("subtract", 1, -3, 3),
    )
    x, y = np.random.default_rng(4).standard_normal((2, 777))
    expected = run(chain, [TensorType("f64", (777,))] * 4, [x, y], 1)
    _native.code_after(1)
    call = chain_call(chain, [TensorType("f64", (777,))] * 4)
    assert call is not None
    x, y = aligned_copy(x), aligned_copy(y)
    call.run(POOLS[1], x, y, x, y)
    assert [x.tobytes(), y.tobytes()] == expected


def test_code_is_generated_once_it_pays() -> None:
    """Three threads that run a call for the first time have the same bits as the later calls."""
    chain = links(("multiply", -1, 1, 2), ("add", 0, -1, 1))
    types = [TensorType("f32", (100_000,))] * 3
    x, y = np.random.default_rng(5).standard_normal((2, 100_000)).astype("f4")
    _native.code_after(20_000)
    call = chain_call(chain, types)
    assert call is not None
    for _ in range(3):
        out = np.zeros_like(x)
        call.run(POOLS[3], out, x, y)
        assert out.tobytes() == (x * y + x).tobytes()
