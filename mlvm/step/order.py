"""In which order groups run, so that less memory is in use at once."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from mlvm.step.flow import Group, Home, Value


def earlier_where_it_frees(groups: Sequence[Group], wanted: Iterable[Value]) -> list[Group]:
    """The groups in an order that needs less memory: one that frees more bytes than it takes,
    as the update of a parameter frees its gradient, runs as soon as it can.

    What depends on each other keeps its order, so every value is the same to the last bit.
    """
    after: list[list[int]] = [[] for _ in groups]
    unmet = [0] * len(groups)
    for later, earlier in _dependences(groups):
        after[earlier].append(later)
        unmet[later] += 1
    readers = {value: 0 for group in groups for value in group.makes}
    for group in groups:
        for value in group.reads:
            if value in readers:
                readers[value] += 1
    for value in wanted:
        if value in readers:
            readers[value] += 1

    def freed(i: int) -> int:
        """By how many bytes less is in use after group i than before."""
        group = groups[i]
        ended = sum(v.nbytes for v in group.reads if readers.get(v) == 1 and v.home is None)
        return ended - sum(v.nbytes for v in group.makes if readers[v] and v.home is None)

    done = [False] * len(groups)
    order: list[Group] = []
    ready: list[tuple[int, int]] = []

    def run(i: int) -> None:
        done[i] = True
        order.append(groups[i])
        for value in groups[i].reads:
            if value in readers:
                readers[value] -= 1
        for later in after[i]:
            unmet[later] -= 1
            if not unmet[later]:
                heapq.heappush(ready, (-freed(later), later))

    for i in range(len(groups)):
        if not done[i]:
            run(i)
        waiting: list[tuple[int, int]] = []
        while ready:
            _, j = heapq.heappop(ready)
            if done[j]:
                continue
            if freed(j) > 0:
                run(j)
            else:
                waiting.append((-freed(j), j))
        ready.extend(waiting)
        heapq.heapify(ready)
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
