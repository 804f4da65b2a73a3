"""In which order groups run, so that less memory is in use at once."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from mlvm.core.types import ALIGNMENT
from mlvm.step.flow import Group, Home, Value


def earlier_where_it_frees(groups: Sequence[Group], wanted: Iterable[Value]) -> list[Group]:
    """The groups in an order that needs less memory, as a rule.

    A group that frees more bytes than it takes, as the update of a parameter frees its gradient,
    runs as soon as it can; of several, the one that takes least is first. One that makes no more
    than a scalar does so too: it may be the learning rate that an update waits for.
    What depends on each other keeps its order, so every value is the same to the last bit.
    """
    after: list[list[int]] = [[] for _ in groups]
    unmet = [0] * len(groups)
    for later, earlier in _dependences(groups):
        after[earlier].append(later)
        unmet[later] += 1
    readers: dict[Value, set[int]] = {value: set() for group in groups for value in group.makes}
    for i, group in enumerate(groups):
        for value in group.reads:
            if value in readers:
                readers[value].add(i)
    for value in wanted:
        if value in readers:
            readers[value].add(len(groups))
    done = [False] * len(groups)
    order: list[Group] = []
    early: list[tuple[int, int]] = []

    def consider(i: int) -> None:
        """Have group i run early, which can run now, if that is of use."""
        group = groups[i]
        taken = sum(v.nbytes for v in group.makes if v.home is None and readers[v])
        ending = [v for v in group.reads if v.home is None and len(readers.get(v, ())) == 1]
        frees = sum(v.nbytes for v in ending) > taken
        if frees or (0 < taken <= ALIGNMENT and group.movable):
            heapq.heappush(early, (taken, i))

    def run(i: int) -> None:
        done[i] = True
        order.append(groups[i])
        for value in groups[i].reads & readers.keys():
            readers[value].discard(i)
            if len(readers[value]) == 1:
                [last] = readers[value]
                if last < len(groups) and not unmet[last]:
                    consider(last)
        for later in after[i]:
            unmet[later] -= 1
            if not unmet[later]:
                consider(later)

    for i in range(len(groups)):
        if not unmet[i]:
            consider(i)
    for i in range(len(groups)):
        if not done[i]:
            run(i)
        while early:
            _, j = heapq.heappop(early)
            if not done[j]:
                run(j)
    return order


def _dependences(groups: Sequence[Group]) -> Iterable[tuple[int, int]]:
    """Pairs (later, earlier) of which the second has to run first."""
    maker: dict[Value, int] = {}
    written: dict[Home, int] = {}
    readers: dict[Home, list[int]] = {}
    fixed: int | None = None
    for i, group in enumerate(groups):
        found = {maker[value] for value in group.reads if value in maker}
        for home in group.writes_to:
            found.update(readers.pop(home, []))
            if home in written:
                found.add(written[home])
            written[home] = i
        for home in group.reads_from:
            readers.setdefault(home, []).append(i)
            if home in written:
                found.add(written[home])
        if group.fixed:
            if fixed is not None:
                found.add(fixed)
            fixed = i
        maker.update(dict.fromkeys(group.makes, i))
        found.discard(i)
        for earlier in found:
            yield i, earlier
