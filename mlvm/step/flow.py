"""A recorded step as data flow: calls, and the values they make of each other.

Recorded calls write over memory, again and again. Here each write makes a new `Value`, so that
what a call needs is told by the values it reads (static single assignment: Cytron et al., ACM
TOPLAS 13, 1991). A value that has a `Home` has its place in memory: it is an argument, a
parameter, a result. The others lie where the plan puts them, for as long as somebody reads them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, NamedTuple

from mlvm.core.op import Attributes, Op
from mlvm.core.types import TensorType

Role = Literal["input", "output", "state", "scratch", "element"]


@dataclass(eq=False)
class Home:
    """Memory that several values lie in: an `input` or `output` of the step, its `state`, `scratch`
    that a function changes in place, or an `element` of a queue. Which tensor of its role it is,
    the caller knows by `index`. It is of `type`, but may be seen as others."""

    role: Role
    index: int
    type: TensorType


@dataclass(eq=False)
class Value:
    """What one call has written. `home`: where it has to lie, None if that is open."""

    nbytes: int
    home: Home | None = None


class Use(NamedTuple):
    """A value, and the type it is seen as."""

    value: Value
    type: TensorType


@dataclass(eq=False)
class Call:
    """A call of a host function that writes `outs` and reads `ins`.

    `op` is None for a function that may do anything with its operands: it keeps its place among
    the calls, `outs` has a new value for each operand, in their order, and `ins` those before.
    `line` is the line of Python that made the call. An `again` is one that computes anew what was
    there before, and is to run no earlier than where it stands. A call with a `queue`, whose
    handle that is, takes the next element from it: its `outs`.
    """

    name: str
    op: Op | None
    attributes: Attributes
    outs: list[Use]
    ins: list[Use]
    line: str | None = None
    again: bool = False
    queue: int | None = None


@dataclass(eq=False)
class Group:
    """Calls that run as one: one alone, or a chain that is fused."""

    calls: list[Call]
    makes: set[Value] = field(init=False)
    reads: set[Value] = field(init=False)
    writes_to: set[Home] = field(init=False)
    reads_from: set[Home] = field(init=False)

    def __post_init__(self) -> None:
        self.makes = {use.value for call in self.calls for use in call.outs}
        self.reads = {use.value for call in self.calls for use in call.ins} - self.makes
        self.writes_to = {value.home for value in self.makes if value.home is not None}
        self.reads_from = {value.home for value in self.reads if value.home is not None}

    @property
    def fixed(self) -> bool:
        """Whether it has to keep its place among others of its kind."""
        return any(call.op is None for call in self.calls)

    def must_precede(self, later: Group) -> bool:
        """Whether a group that comes later needs this one to have run, or to have read."""
        return (
            not self.makes.isdisjoint(later.reads)
            or not later.writes_to.isdisjoint(self.reads_from)
            or not later.writes_to.isdisjoint(self.writes_to)
            or (self.fixed and later.fixed)
        )


@dataclass
class Flow:
    """The calls of a step, in order, and the values that it returns."""

    calls: list[Call]
    results: list[Value]

    def wanted(self) -> set[Value]:
        """What has to be there at the end: the results, and the last value of each home."""
        last = {
            use.value.home: use.value
            for call in self.calls
            for use in call.outs
            if use.value.home is not None and use.value.home.role not in ("scratch", "element")
        }
        return {*self.results, *last.values()}


def without_dead_calls(flow: Flow) -> list[Call]:
    """The calls whose results somebody reads, or that have to be there at the end."""
    alive = flow.wanted()
    kept: list[Call] = []
    for call in reversed(flow.calls):
        if call.op is None or any(use.value in alive for use in call.outs):
            kept.append(call)
            alive.update(use.value for use in call.ins)
    return kept[::-1]


# --- order ---------------------------------------------------------------------------


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


# --- recomputing ---------------------------------------------------------------------

CHEAP: Final = frozenset({"gelu", "relu", "broadcast_to"})
"""Ops that cost little to run again beside a matmul that reads their result."""

FAR: Final = 16
"""How many calls later a value is needed again, so that keeping it meanwhile matters."""


def recomputed(calls: Sequence[Call]) -> list[Call]:
    """The calls, with cheap ones repeated before a far later use of their result, if what they
    read is there at that time anyway: a backward pass then needs the operand of a GELU, but
    not its result (Chen et al., arXiv 1604.06174). The result has the same bits each time."""
    uses: dict[Value, list[int]] = {}
    overwritten: dict[Home, list[int]] = {}
    for i, call in enumerate(calls):
        for use in call.ins:
            uses.setdefault(use.value, []).append(i)
        for use in call.outs:
            if use.value.home is not None:
                overwritten.setdefault(use.value.home, []).append(i)

    def there(value: Value, since: int, at: int) -> bool:
        if value.home is not None:
            return not any(since < i < at for i in overwritten.get(value.home, ()))
        return uses[value][-1] >= at

    again: dict[int, list[Call]] = {}
    replaced: dict[int, dict[Value, Value]] = {}
    for i, call in enumerate(calls):
        if call.op is None or call.op.name not in CHEAP or call.outs[0].value.home is not None:
            continue
        made = call.outs[0].value
        times = uses.get(made, [])
        for before, at in zip([i, *times], times, strict=False):
            if at - before < FAR or not all(there(use.value, i, at) for use in call.ins):
                continue
            twin = Value(made.nbytes)
            out = Use(twin, call.outs[0].type)
            again.setdefault(at, []).append(replace(call, outs=[out], again=True))
            for later in times:
                if later >= at:
                    replaced.setdefault(later, {})[made] = twin
            break
    result: list[Call] = []
    for i, call in enumerate(calls):
        result += again.get(i, [])
        swaps = replaced.get(i)
        if swaps:
            ins = [Use(swaps.get(use.value, use.value), use.type) for use in call.ins]
            call = replace(call, ins=ins)
        result.append(call)
    return result
