"""The search finds offsets exactly where there are some, and the same in C as in Python."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from bench.plan import CAPACITY, rectangle
from mlvm.arena import planner, search
from mlvm.arena.planner import Block, plan, plan_within
from mlvm.arena.search import FOUND, LIMIT, NONE, Ints, Search, sections_of
from mlvm.machines.native import extension
from tests.brief import Patch, cases

needs_extension = pytest.mark.skipif(extension.EXTENSION is None, reason=extension.REASON)


def drawn(rng: np.random.Generator, count: int, moments: int) -> tuple[Ints, Ints, Ints]:
    """Sizes, starts and ends of random blocks."""
    start = rng.integers(0, moments, count)
    return rng.integers(1, 20, count), start, start + rng.integers(1, moments, count)


def stacked(size: Ints) -> Ints:
    return np.cumsum(size) - size


def require_valid(size: Ints, start: Ints, end: Ints, offsets: Ints) -> None:
    """By brute force: no two blocks share a byte at a moment."""
    used = np.zeros((int((offsets + size).max()), int(end.max())), bool)
    for nbytes, first, last, offset in zip(size, start, end, offsets, strict=True):
        taken = used[offset : offset + nbytes, first:last]
        assert offset >= 0
        assert not taken.any()
        taken[:] = True


def smallest(size: Ints, start: Ints, end: Ints) -> int:
    """The smallest height by trying all sequences: a block is put on those before it."""
    least = int(size.sum())
    for sequence in permutations(range(len(size))):
        tops: list[tuple[int, int, int]] = []
        for i in sequence:
            under = [top for a, b, top in tops if a < end[i] and start[i] < b]
            tops.append((int(start[i]), int(end[i]), max(under, default=0) + int(size[i])))
        least = min(least, max(top for _, _, top in tops))
    return least


def blocks_of(size: Ints, start: Ints, end: Ints) -> list[Block]:
    rows = zip(size.tolist(), start.tolist(), end.tolist(), strict=True)
    return [Block(*row) for row in rows]


@cases("machine", "native", "python")
def test_small_plans_are_the_smallest(machine: str, monkeypatch: Patch) -> None:
    if machine == "python":
        monkeypatch.setattr(search, "EXTENSION", None)
        monkeypatch.setattr(planner, "EXTENSION", None)
    for seed in range(60):
        rng = np.random.default_rng(seed)
        size, start, end = drawn(rng, int(rng.integers(1, 7)), 6)
        least = smallest(size, start, end)
        planned = plan_within(blocks_of(size, start, end), None, alignment=1).plan
        assert planned.nbytes == least
        require_valid(size, start, end, np.array(planned.offsets))
        fitted = Search(size, start, end, stacked(size))
        assert fitted.fit(least, 10**6) == FOUND
        assert Search(size, start, end, stacked(size)).fit(least - 1, 10**6) == NONE


def test_offsets_are_valid_also_where_the_search_ends_early() -> None:
    found = []
    for seed in range(100):
        rng = np.random.default_rng(seed)
        size, start, end = drawn(rng, 40, 40)
        bound = planner.lower_bound(blocks_of(size, start, end), alignment=1)
        fitted = Search(size, start, end, stacked(size))
        found.append(fitted.fit(bound, 40 * 200))
        require_valid(size, start, end, fitted.offsets)
        assert (fitted.height <= bound) == (found[-1] == FOUND)
        assert fitted.work <= 40 * 200
    assert {FOUND, LIMIT} <= {*found}


@needs_extension
def test_c_and_python_visit_the_same_nodes(monkeypatch: Patch) -> None:
    statuses = set()
    for seed in range(150):
        rng = np.random.default_rng(seed)
        size, start, end = drawn(rng, int(rng.integers(1, 40)), int(rng.integers(2, 60)))
        bound = planner.lower_bound(blocks_of(size, start, end), alignment=1)
        capacity = bound + int(rng.integers(-1, 4))
        results = []
        for each in (extension.EXTENSION, None):
            monkeypatch.setattr(search, "EXTENSION", each)
            fitted = Search(size, start, end, stacked(size))
            status = fitted.fit(capacity, 30 * len(size))
            statuses.add(status)
            results.append((status, fitted.nodes, fitted.offsets.tolist()))
        assert results[0] == results[1]
    assert statuses == {FOUND, NONE, LIMIT}


@needs_extension
def test_c_and_python_make_the_same_plans(monkeypatch: Patch) -> None:
    for seed in range(20):
        blocks, _ = rectangle(seed, 12 + seed, pinwheels=True)
        plans = []
        for each in (extension.EXTENSION, None):
            monkeypatch.setattr(search, "EXTENSION", each)
            monkeypatch.setattr(planner, "EXTENSION", each)
            plans.append(plan(blocks, alignment=1))
        assert plans[0] == plans[1]


@cases("pinwheels", False, True)
def test_rectangles_are_put_together_again(pinwheels: bool) -> None:
    """Forwards and backwards in time, and beside another one."""
    for seed in range(20):
        blocks, smallest = rectangle(seed, 60, pinwheels=pinwheels)
        assert smallest == CAPACITY == planner.lower_bound(blocks, alignment=1)
        backwards = [Block(each.nbytes, -each.end, -each.start) for each in blocks]
        for instance in (blocks, backwards, blocks + backwards):
            planned = plan(instance, alignment=1)
            assert planned.nbytes == CAPACITY
            again = plan(instance, alignment=1)
            assert again == planned


def test_more_effort_finds_smaller_plans() -> None:
    blocks, _ = rectangle(4, 300, pinwheels=True)
    little, much = (plan_within(blocks, None, alignment=1, effort=n) for n in (1, 30))
    assert little.plan.nbytes > much.plan.nbytes == CAPACITY
    assert little.nodes < much.nodes


def test_lifetimes_become_ranges_of_sections() -> None:
    """The sections are the moments 1, 2, 3 and 8; each other moment has a part of their blocks."""
    start, end = np.array([0, 1, 2, 3, 3, 8]), np.array([2, 4, 3, 5, 6, 9])
    first, last, part = sections_of(start, end)
    assert first.tolist() == [0, 0, 1, 2, 2, 3]
    assert last.tolist() == [0, 2, 1, 2, 2, 3]
    assert part.tolist() == [0, 0, 0, 0, 0, 1]
