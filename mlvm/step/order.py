"""In which order units run, so that less memory is in use at once."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from mlvm.core.types import ALIGNMENT
from mlvm.step.flow import Home, Unit, Value


def earlier_where_it_frees(units: Sequence[Unit], wanted: Iterable[Value]) -> list[Unit]:
    """The units in an order that needs less memory, as a rule.

    A unit that frees more bytes than it takes, as the update of a parameter frees its gradient,
    runs as soon as it can; of several, the one that takes least is first. One that makes no more
    than a scalar does so too: it may be the learning rate that an update waits for.
    What depends on each other keeps its order, so every value is the same to the last bit.
    """
    after: list[list[int]] = [[] for _ in units]
    unmet = [0] * len(units)
    for later, earlier in _dependences(units):
        after[earlier].append(later)
        unmet[later] += 1
    readers: dict[Value, set[int]] = {value: set() for unit in units for value in unit.makes}
    for i, unit in enumerate(units):
        for value in unit.reads:
            if value in readers:
                readers[value].add(i)
    for value in wanted:
        if value in readers:
            readers[value].add(len(units))
    done = [False] * len(units)
    order: list[Unit] = []
    early: list[tuple[int, int]] = []

    def consider(i: int) -> None:
        """Have unit i run early, which can run now, if that is of use."""
        unit = units[i]
        taken = freed = 0
        for value in unit.makes:
            if value.home is None and readers[value]:
                taken += value.nbytes
        for value in unit.reads:
            if value.home is None and len(readers.get(value, ())) == 1:
                freed += value.nbytes
        if freed > taken or (0 < taken <= ALIGNMENT and unit.movable):
            heapq.heappush(early, (taken, i))

    def run(i: int) -> None:
        done[i] = True
        order.append(units[i])
        for value in units[i].reads:
            others = readers.get(value)
            if others is None:
                continue
            others.discard(i)
            if len(others) == 1:
                [last] = others
                if last < len(units) and not unmet[last]:
                    consider(last)
        for later in after[i]:
            unmet[later] -= 1
            if not unmet[later]:
                consider(later)

    for i in range(len(units)):
        if not unmet[i]:
            consider(i)
    for i in range(len(units)):
        if not done[i]:
            run(i)
        while early:
            _, j = heapq.heappop(early)
            if not done[j]:
                run(j)
    return order


def _dependences(units: Sequence[Unit]) -> Iterable[tuple[int, int]]:
    """Pairs (later, earlier) of which the second has to run first."""
    maker: dict[Value, int] = {}
    written: dict[Home, int] = {}
    readers: dict[Home, list[int]] = {}
    fixed: int | None = None
    guard: int | None = None
    for i, unit in enumerate(units):
        found = {maker[value] for value in unit.reads if value in maker}
        for home in unit.writes_to:
            found.update(readers.pop(home, []))
            if home in written:
                found.add(written[home])
            written[home] = i
        for home in unit.reads_from:
            readers.setdefault(home, []).append(i)
            if home in written:
                found.add(written[home])
        if unit.fixed:
            if fixed is not None:
                found.add(fixed)
            fixed = i
        if guard is not None and unit.updates:
            found.add(guard)
        if unit.guards:
            guard = i  # which comes after the one before: both are fixed
        maker.update(dict.fromkeys(unit.makes, i))
        found.discard(i)
        for earlier in found:
            yield i, earlier
