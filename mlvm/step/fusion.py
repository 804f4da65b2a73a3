"""Which calls of a step run as one: chains of ops on one shape, for the host function `fused`.

A call joins the chain that makes one of its operands, if one of the two can move to where the
other stands. What only the chain itself reads is never written to memory.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Final

from mlvm.core.machine.fused import Chain, Link
from mlvm.core.ops.blocks import BLOCK
from mlvm.core.types import Shape, TensorType
from mlvm.step.flow import Call, Group, Use, Value

WINDOW: Final = 16
"""How many groups far a chain is looked for."""


SHORTEST: Final = 3
"""Links of a chain: what two ops gain by sharing the cache is less than the blocks cost, but for
an update in place, which reads and writes more memory than others."""


def fused(calls: Sequence[Call]) -> list[Group]:
    """The calls in groups, in an order in which they can run."""
    groups: list[Group | None] = []
    place: dict[Group, int] = {}
    maker: dict[Value, Group] = {}
    for call in calls:
        group = Group([call])
        for partner in _partners(call, maker, place):
            if not all(_takes(partner, each) for each in group.calls):
                continue
            between = [g for g in groups[place[partner] + 1 :] if g is not None]
            if len(between) > WINDOW:
                continue
            if not any(partner.must_precede(other) for other in between):
                groups[place.pop(partner)] = None
                group = Group([*partner.calls, *group.calls])
            elif len(group.calls) == 1 and not any(other.must_precede(group) for other in between):
                merged = Group([*partner.calls, *group.calls])
                at = place[merged] = place.pop(partner)
                groups[at] = merged
                maker.update(dict.fromkeys(merged.makes, merged))
                break
        else:
            place[group] = len(groups)
            groups.append(group)
            maker.update(dict.fromkeys(group.makes, group))
    found: list[Group] = []
    for each in groups:
        if each is not None and len(each.calls) < SHORTEST and not each.writes_to:
            found += [Group([call]) for call in each.calls]
        elif each is not None:
            found.append(each)
    return found


def _partners(call: Call, maker: dict[Value, Group], place: dict[Group, int]) -> list[Group]:
    """The groups that make an operand of the call, the nearest first: it may join them, unless it
    is there to run no earlier than it does."""
    if call.again:
        return []
    found = {maker[use.value] for use in call.ins if use.value in maker}
    return sorted(found, key=place.__getitem__, reverse=True)


def _takes(group: Group, call: Call) -> bool:
    """Whether the group is a chain, or the beginning of one, on the shape that the call works
    through, and the two fit: the call reads what the group makes as it was made, and no reduction
    of it, and writes nothing over what the group reads as another type, in other places."""
    first, shape = group.calls[0].op, domain_of(call)
    if first is None or not first.elementwise or domain_of(group.calls[0]) != shape:
        return False
    values = {use.value for each in group.calls for use in each.outs}
    whole = {use for each in group.calls for use in each.outs if each.op and each.op.elementwise}
    return all(use in whole for use in call.ins if use.value in values) and all(
        use.type is out.type
        for out in call.outs
        for each in group.calls
        for use in each.ins
        if out.value.home is not None and use.value.home is out.value.home
    )


def domain_of(call: Call) -> Shape | None:
    """The shape that the call works through, if it can be a link of a chain."""
    op = call.op
    if op is None:
        return None
    if op.elementwise:
        return call.outs[0].type.shape
    if op.room == "reduction" and "axis" in op.attributes and call.ins[0].type.size <= BLOCK:
        return call.ins[0].type.shape  # in one block, as the op alone would see it
    return None


def chain_of(group: Group, kept: Container[Value]) -> tuple[Chain, list[Use], list[Use]]:
    """The chain that runs the group, what it writes, and what it reads, in the order of the
    parameters. Of the values it makes, those in `kept` are written; the others pass in scratch."""
    made = [use for call in group.calls for use in call.outs]
    last = {use.value.home: use.value for use in made if use.value.home is not None}
    outs = [
        use
        for use in made
        if use.value in kept and (use.value.home is None or last[use.value.home] is use.value)
    ]
    ins = list(
        dict.fromkeys(
            use for call in group.calls for use in call.ins if use.value not in group.makes
        )
    )
    numbers: dict[Use, int] = {use: number for number, use in enumerate([*outs, *ins])}
    scratch = _Scratch()
    last_read = {use: i for i, call in enumerate(group.calls) for use in call.ins}
    links = []
    for i, call in enumerate(group.calls):
        assert call.op is not None  # or it would be in no chain
        [out] = call.outs
        sources = tuple([numbers[use] for use in call.ins])
        ending = {use for use in call.ins if last_read[use] == i and numbers[use] < 0}
        if call.op.in_place:
            scratch.put_back(ending, numbers)
        if out not in numbers:
            numbers[out] = scratch.take(out.type)
            if out not in last_read:
                ending.add(out)
        if not call.op.in_place:
            scratch.put_back(ending, numbers)
        links.append(Link(call.op, numbers[out], sources, call.attributes))
    return Chain(links, len(outs)), outs, ins


class _Scratch:
    """Numbers for blocks of scratch, used again for others of the same type."""

    def __init__(self) -> None:
        self.taken = 0
        self.free: dict[TensorType, list[int]] = {}

    def take(self, type: TensorType) -> int:
        stock = self.free.setdefault(type, [])
        if stock:
            return stock.pop()
        self.taken += 1
        return -self.taken

    def put_back(self, uses: Iterable[Use], numbers: dict[Use, int]) -> None:
        for use in uses:
            self.free.setdefault(use.type, []).append(numbers[use])
