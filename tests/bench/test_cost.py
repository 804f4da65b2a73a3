"""The model on paper: what it says where it can be worked out by hand."""

from __future__ import annotations

import pytest

from bench.cost import (
    Link,
    all_gather_time,
    all_reduce_time,
    reduce_scatter_time,
    ring_time,
    sent_by_all_reduce,
    step_time,
    table,
)
from tests.brief import output_of

SLOW = Link(bandwidth=12.5e6, latency=1e-3, overhead=0)


def test_one_member_sends_nothing() -> None:
    assert step_time(0.2, 1e9, 1, 1.0, 1.0) == 0.2
    assert all_reduce_time(1e9, 1, SLOW) == ring_time(1e9, 1, SLOW) == 0


@pytest.mark.parametrize(("members", "rounds", "factor"), [(2, 1, 1), (4, 2, 2), (64, 6, 2)])
def test_a_large_all_reduce_sends_every_element_twice_at_most(
    members: int, rounds: int, factor: float
) -> None:
    assert sent_by_all_reduce(1e8, members) == factor * 1e8
    block = (1 << 18) / 12.5e6
    hops = 2 * (members - 1)
    expected = (rounds + hops) * 1e-3 + factor * 1e8 / 12.5e6 + (hops - 1) * block
    assert all_reduce_time(1e8, members, SLOW) == pytest.approx(expected)
    ring = hops * 1e-3 + 2 * (members - 1) / members * 1e8 / 12.5e6
    assert ring_time(1e8, members, SLOW) == pytest.approx(ring)


def test_a_small_one_goes_to_everyone() -> None:
    assert sent_by_all_reduce(1000, 5) == 4000
    assert all_reduce_time(1000, 5, SLOW) == pytest.approx(3e-3 + 4000 / 12.5e6)


def test_what_hides_behind_the_way_back_costs_nothing_but_the_last_bucket() -> None:
    fast = Link(1e9, 0, 0)
    one = all_reduce_time(2**20, 2, fast)
    step = step_time(1.0, 100 * 2**20, 2, 1e9, 0, overhead=0)
    assert step == pytest.approx(1.0 + one)
    bound = step_time(0.03, 100 * 2**20, 2, 1e9, 0, overhead=0)
    assert bound == pytest.approx(0.01 + 0.02 / 100 + 100 * one)


def test_all_parts_do_not_hide_and_those_of_the_optimizer_do_half() -> None:
    assert reduce_scatter_time(2**20, 4, SLOW) == pytest.approx(3e-3 + 0.75 * 2**20 / 12.5e6)
    gather = all_gather_time(2**20, 4, SLOW)
    both = gather + reduce_scatter_time(2**20, 4, SLOW)
    every = step_time(1.0, 8 * 2**20, 4, 12.5e6, 1e-3, overhead=0, shard="all", tensors=8)
    assert every == pytest.approx(1.0 + 8 * both)
    half = step_time(8.0, 8 * 2**20, 4, 12.5e6, 1e-3, overhead=0, shard="optimizer")
    assert half == pytest.approx(8.0 + 7 * gather + both)


def test_more_members_never_cost_less() -> None:
    steps = [row[1] for row in table(0.5, 1e8, Link(1.25e9, 5e-5), [1, 2, 4, 64, 4096])]
    assert steps == sorted(steps)


def test_the_command() -> None:
    head, first, *rest = output_of("-m", "bench.cost", "--bytes", "1e6").splitlines()
    assert head.split() == ["members", "step", "ms", "ring", "ms", "computing"]
    assert first.split() == ["1", "500.0", "500.0", "100.0", "%"]
    assert len(rest) == 6
