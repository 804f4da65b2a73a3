"""Reordering of units to reduce the peak memory."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from mlvm.core.types import ALIGNMENT
from mlvm.step.flow import Home, Unit, Value


def earlier_where_it_frees(units: Sequence[Unit], live_out: Iterable[Value]) -> list[Unit]:
    """Return the units in an order that usually needs less memory.

    A unit that frees more bytes than it allocates runs as early as possible: the update of a
    parameter frees the gradient. Among several, the unit that allocates least is first. A unit that
    computes only a scalar also runs early, as it may be the learning rate for an update. Dependent
    units are not reordered, so every value is bitwise equal.
    """
    after: list[list[int]] = [[] for _ in units]
    unmet = [0] * len(units)
    for later, dependences in enumerate(_dependences(units)):
        unmet[later] = len(dependences)
        for earlier in dependences:
            after[earlier].append(later)
    # for each value: the count of readers that have not run, and the sum of the reader numbers
    readers = {value: 0 for unit in units for value in unit.makes}
    numbers = readers.copy()
    for value in readers.keys() & live_out:
        readers[value], numbers[value] = 1, len(units)
    for i, unit in enumerate(units):
        for value in unit.reads:
            if value in readers:
                readers[value] += 1
                numbers[value] += i
    done = [False] * len(units)
    order: list[Unit] = []
    early: list[tuple[int, int]] = []

    def consider(i: int) -> None:
        """Schedule the ready unit i early, if that frees memory."""
        unit = units[i]
        allocated = sum([x.nbytes for x in unit.makes if x.home is None and readers[x]])
        freed = sum([x.nbytes for x in unit.reads if x.home is None and readers.get(x) == 1])
        if freed > allocated or (0 < allocated <= ALIGNMENT and unit.movable):
            heapq.heappush(early, (allocated, i))

    def run(i: int) -> None:
        done[i] = True
        order.append(units[i])
        for value in units[i].reads:
            if value in readers:
                readers[value] -= 1
                numbers[value] -= i
                last = numbers[value]
                if readers[value] == 1 and last < len(units) and not unmet[last]:
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


def _dependences(units: Sequence[Unit]) -> Iterable[set[int]]:
    """Yield the numbers of the units that must run before each unit."""
    producers: dict[Value, int] = {}
    written: dict[Home, int] = {}
    readers: dict[Home, list[int]] = {}
    fixed: int | None = None
    raising: int | None = None
    for i, unit in enumerate(units):
        dependences = {producers[value] for value in unit.reads if value in producers}
        for home in unit.writes_to:
            dependences.update(readers.pop(home, ()))
            if home in written:
                dependences.add(written[home])
            written[home] = i
        for home in unit.reads_from:
            readers.setdefault(home, []).append(i)
            if home in written:
                dependences.add(written[home])
        if unit.fixed:
            if fixed is not None:
                dependences.add(fixed)
            fixed = i
        if raising is not None and (unit.updates or unit.may_raise):
            dependences.add(raising)  # the first call to raise is the first in eager code
        if unit.may_raise:
            raising = i
        producers.update(dict.fromkeys(unit.makes, i))
        dependences.discard(i)
        yield dependences
