"""The planner never lets blocks alive at once overlap, and comes close to what they need."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mlvm.arena.planner import Block, Plan, lower_bound, plan
from mlvm.core.types import ALIGNMENT
from tests.cases.claim_tests import claims

lives = st.tuples(st.integers(-3, 12), st.integers(0, 6))
blocks_of_any_kind = st.lists(
    st.builds(
        lambda nbytes, life: Block(nbytes, life[0], life[0] + life[1]), st.integers(0, 400), lives
    ),
    max_size=24,
)


def rounded(nbytes: int, alignment: int) -> int:
    return (nbytes + alignment - 1) // alignment * alignment


def check(blocks: list[Block], planned: Plan, alignment: int = ALIGNMENT) -> None:
    """By brute force: every offset is aligned and in bounds, nothing overlaps, the bound is one."""
    spans = [
        (offset, offset + rounded(block.nbytes, alignment))
        for offset, block in zip(planned.offsets, blocks, strict=True)
    ]
    assert all(low >= 0 and low % alignment == 0 for low, _ in spans)
    assert max((high for _, high in spans), default=0) == planned.nbytes
    for (a, (low_a, high_a)), (b, (low_b, high_b)) in combinations(
        zip(blocks, spans, strict=True), 2
    ):
        if {*range(a.start, a.end)} & {*range(b.start, b.end)}:
            assert high_a <= low_b or high_b <= low_a or high_a == low_a or high_b == low_b
    totals = [
        sum(rounded(b.nbytes, alignment) for b in blocks if b.start <= moment < b.end)
        for moment in range(-4, 20)
    ]
    assert planned.lower_bound == max(totals) == lower_bound(blocks, alignment=alignment)
    assert planned.lower_bound <= planned.nbytes


@given(blocks=blocks_of_any_kind, alignment=st.sampled_from([1, 16, 64, 100]))
def test_blocks_alive_at_once_never_overlap(blocks: list[Block], alignment: int) -> None:
    """In a plan that is the same every time, and no larger than one without reuse."""
    planned = plan(blocks, alignment=alignment)
    check(blocks, planned, alignment)
    assert planned == plan(tuple(blocks), alignment=alignment)
    assert planned.nbytes <= sum(rounded(b.nbytes, alignment) for b in blocks)


@given(blocks=st.lists(st.builds(Block, st.integers(1, 400), st.just(0), st.just(1)), max_size=9))
def test_blocks_that_all_live_at_once_meet_the_bound(blocks: list[Block]) -> None:
    planned = plan(blocks)
    assert planned.nbytes == planned.lower_bound == sum(rounded(b.nbytes, 64) for b in blocks)


def test_thousands_of_blocks_come_close_to_the_bound() -> None:
    rng, n = np.random.default_rng(0), 2_500
    start = rng.integers(0, 5_000, n)
    blocks = [
        Block(int(size), int(s), int(s + life))
        for size, s, life in zip(
            rng.integers(0, 10**6, n), start, rng.integers(1, 2_000, n), strict=True
        )
    ]
    planned = plan(blocks)
    assert planned.nbytes <= 1.1 * planned.lower_bound


test_rows = claims("planner", globals())
