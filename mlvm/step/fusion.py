"""Fusion: chains of ops on one shape that run as one call of the host function `fused`.

A call joins the chain that computes one of the operands, if one of the two can move to the position
of the other. Values that only the chain reads are never written to memory. But all operands and
results of a chain are live at the same time. A chain therefore grows only while the live bytes stay
within the limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, zip_longest
from typing import Final, NamedTuple, TypeAlias

from mlvm.arena.placement import rounded
from mlvm.core.dynamic_sizes import always_equal
from mlvm.core.machine.fused import LONGEST_CHAIN, Chain, Link
from mlvm.core.op import Op
from mlvm.core.ops.block_memory import BLOCK_SIZE
from mlvm.core.protocol import VMProtocol
from mlvm.core.types import Shape, TensorType
from mlvm.step.flow import Call, Unit, UnitTable, Use, Value, is_one_element
from mlvm.step.fused_windows import may_write, written_shape
from mlvm.step.schedule import Placed, Run, in_place, placed


class FusionPolicy(NamedTuple):
    """Policy for chains that save time with a machine's kernels.

    `native`: whether the kernels are native. Matrix products then accept packed weights and
        transposed factors, row functions widen half precision while reading, and calls for parts
        of a batch have the bits of a single call. A matrix product may begin a chain (`Op.heads`),
        links may be ops whose reference kernels make several passes, chains read and write slices
        in place, and calls on one element join a chain that computes none of their operands. A
        reduction does not end a chain: there is no row function for it, and a separate call is as
        fast.
    `shortest`: minimum number of links; an update in place may have fewer.
    `longest`: maximum number of links.
    `near`: maximum number of units between a call and a chain that it joins.
    `operands`: maximum number of values that a chain reads.
    """

    native: bool = False
    shortest: int = 3
    longest: float = math.inf
    near: int = 16
    operands: int = 192

    def links(self, op: Op) -> bool:
        return op.links if self.native else op.elementwise

    @property
    def of_formulas(self) -> FusionPolicy:
        """Return the policy for large formulas: chains may have any length."""
        return self._replace(longest=math.inf, near=64)

    def is_cut(self, units: Iterable[Unit]) -> bool:
        """Return whether the maximum length of a chain may have limited one of these chains."""
        return any(len(unit.calls) > 0.75 * self.longest for unit in units)


REFERENCE: Final = FusionPolicy()
"""With numpy, two ops gain less from the cache than the blocks cost."""

NATIVE: Final = FusionPolicy(native=True, shortest=2, longest=LONGEST_CHAIN)


def policy_of(vm: VMProtocol) -> FusionPolicy:
    """Return the policy for the kernels of the VM."""
    return NATIVE if getattr(vm, "native", False) else REFERENCE


def fused(
    calls: Sequence[Call],
    most: float = math.inf,
    policy: FusionPolicy = REFERENCE,
    units: UnitTable | None = None,
) -> list[Unit]:
    """Return the calls in units, in an order in which they can run.

    The live bytes of a chain are at most `most`, or what the calls need unfused. `units` has the
    units of single calls.
    """
    units = UnitTable() if units is None else units
    return joined(_units(calls, policy, units), most, policy, units)


def joined(
    chains: Iterable[Unit], most: float, policy: FusionPolicy, units: UnitTable
) -> list[Unit]:
    """Fuse calls that already are in chains; see `fused`."""
    row = _Row(chains)
    producers: dict[Value, Unit] = {}
    domains = units.domains.setdefault(policy, _Domains(policy))
    of_elements: dict[Shape | None, Unit] = {}  # the last unit of each shape of a single element
    for each in row.in_order():
        unit = each
        if None in [domains[call] for call in unit.calls]:
            producers.update(dict.fromkeys(unit.makes, unit))
            continue
        partners = _partners(unit.calls[0], producers, row.place)
        shape = domains[unit.calls[0]]
        is_element = policy.native and shape is not None and is_one_element(shape)
        # a single slice does not compute: it joins the chain of the call that reads it
        is_element = is_element and not all(call.window for call in unit.calls)
        if is_element and shape in of_elements and not unit.calls[0].again:
            partners.append(of_elements[shape])
        for partner in partners:
            if partner not in row.place:  # the partner has been merged
                continue
            if len(partner.calls) + len(unit.calls) > policy.longest:
                continue
            if len(partner.reads | unit.reads) > policy.operands:
                continue
            if not _takes(partner, unit.calls, domains):
                continue
            between = row.between(partner, unit)
            if len(between) > policy.near:
                continue
            merged = None
            if not any(partner.must_precede(other) for other in between):
                merged = row.merged(partner, unit, row.place[unit], most)
            if merged is not None:
                unit = merged
            elif len(unit.calls) == 1 and not any(other.must_precede(unit) for other in between):
                merged = row.merged(partner, unit, row.place[partner], most)
                if merged is not None:
                    unit = merged
                    break
        producers.update(dict.fromkeys(unit.makes, unit))
        if is_element:
            of_elements[shape] = unit
    result: list[Unit] = []
    for each in row.in_order():
        if 1 < len(each.calls) < policy.shortest and not each.writes_to:
            result += [units[call] for call in each.calls]
        else:
            result.append(each)
    return result


def with_slopes(calls: Sequence[Call]) -> list[Call]:
    """Move each slope (see `Op.slope`) after the nearest call with the same operand.

    One pass then computes both. The slope is saved for later instead of the operand.
    """
    values: dict[tuple[str, *tuple[Use, ...]], Call] = {}
    slopes: dict[Call, Call] = {}
    for call in calls:
        if call.op is None:
            continue
        if call.op.slope is not None:
            values[call.op.slope, *call.ins] = call
        value = values.get((call.op.name, *call.ins))
        if value is None or value.attributes != call.attributes or value in slopes:
            continue
        if call.outs[0].value.home is None:
            slopes[value] = call
    result: list[Call] = []
    moved = set(slopes.values())
    for call in calls:
        if call not in moved:
            result += [call, slopes[call]] if call in slopes else [call]
    return result


def _units(calls: Sequence[Call], policy: FusionPolicy, units: UnitTable) -> Iterable[Unit]:
    """Yield a unit for each call, or for a call and the slope that follows it."""
    skips = False
    for call, after in zip_longest(calls, calls[1:]):
        op = call.op
        if skips:
            skips = False
        elif op is None or op.slope is None or after is None or after.op is None:
            yield units[call]
        elif after.op.name == op.slope and after.ins == call.ins and policy.links(op):
            skips = True
            yield Unit([call, after])
        else:
            yield units[call]


_Step: TypeAlias = tuple[int, Unit, set[Placed]]
"""Position in a schedule, with the unit and the planned values and homes that the unit uses."""


class _Row:
    """Units in order, each at a position.

    The live range of a value or scratch home goes from the first to the last position that
    writes or reads it. Live ranges change only near two units that merge.
    """

    def __init__(self, units: Iterable[Unit]) -> None:
        self.place = {unit: i for i, unit in enumerate(units)}
        self._groups: list[Unit | None] = list(self.place)
        self._touched = {unit: _touched(unit) for unit in self.place}
        self._where = {call: i for unit, i in self.place.items() for call in unit.calls}
        self._users: dict[Placed, list[Call]] = {}
        self._life: dict[Placed, tuple[int, int]] = {}
        for i, (unit, touched) in enumerate(self._touched.items()):
            for each in touched:
                self._users.setdefault(each, []).append(unit.calls[0])
                self._life[each] = self._life.get(each, (i, i))[0], i
        self._nbytes = {
            each: rounded(each.nbytes if isinstance(each, Value) else each.type.nbytes)
            for each in self._users
        }
        change = [0] * (len(self.place) + 1)
        for each, (first, last) in self._life.items():
            change[first + 1] += self._nbytes[each]
            change[last + 1] -= self._nbytes[each]
        self._before = list(accumulate(change))  # live bytes at the start of the unit

    def in_order(self) -> list[Unit]:
        return [unit for unit in self._groups if unit is not None]

    def between(self, earlier: Unit, later: Unit) -> list[Unit]:
        inner = self._groups[self.place[earlier] + 1 : self.place[later]]
        return [unit for unit in inner if unit is not None]

    def merged(self, earlier: Unit, later: Unit, at: int, most: float) -> Unit | None:
        """Merge two units at position `at` of one of them.

        Return None if the live bytes would exceed `most` and the current live bytes.
        """
        start, end = self.place[earlier], self.place[later]
        moved = earlier if at == end else later
        now: dict[Placed, tuple[int, int]] = {}
        life: dict[Placed, tuple[int, int]] = {}
        for each in self._touched[moved]:
            first, last = now[each] = self._life[each]
            if moved is earlier:
                life[each] = at if first == start else first, max(last, at)
            else:
                others = [
                    self._where[call] for call in self._users[each] if call not in later.calls
                ]
                life[each] = min(first, at), max(at, *others) if others else at
        inside = {each for each, (first, last) in life.items() if first == last == at}
        unit = earlier.joined(later)
        touched = (self._touched[earlier] | self._touched[later]) - inside
        between = self.between(earlier, later)
        steps = self._steps(between)
        steps.insert(0 if moved is later else len(steps), (at, unit, touched))

        before = self._before[start]
        self._life.update(life)
        levels = self._levels(steps, before)
        needed = _highest(levels, most)
        if needed > most:
            self._life.update(now)
            if needed > _highest(self._levels(self._steps([earlier, *between, later]), before), 0):
                return None
            self._life.update(life)
        for level in levels:
            self._before[level.place] = level.before
        for call in moved.calls:
            self._where[call] = at
        for each_unit in (earlier, later):
            self._groups[self.place.pop(each_unit)] = None
        self._groups[at], self.place[unit], self._touched[unit] = unit, at, touched
        return unit

    def _steps(self, units: Iterable[Unit]) -> list[_Step]:
        return [(self.place[unit], unit, self._touched[unit]) for unit in units]

    def _levels(self, steps: Iterable[_Step], alive: int) -> list[_Level]:
        """Return the live bytes at each of the steps; `alive` is the number before the first."""
        levels = []
        for place, unit, touched in steps:
            begun = {each for each in touched if self._life[each][0] == place}
            ended = {each for each in touched if self._life[each][1] == place}
            allocated = sum([self._nbytes[each] for each in begun])
            levels.append(_Level(place, unit, alive, alive + allocated, begun, ended))
            alive += allocated - sum([self._nbytes[each] for each in ended])
        return levels


class _Level(NamedTuple):
    """Liveness at a unit.

    before: live bytes before it runs.
    most: live bytes while it runs, without reuse of operands' memory.
    begun, ended: values and homes with a live range that starts or stops there.
    """

    place: int
    unit: Unit
    before: int
    most: int
    begun: set[Placed]
    ended: set[Placed]

    def exactly(self) -> int:
        """Return the live bytes while it runs, if results reuse the memory of operands."""
        run = Run(self.unit, *self.unit.operands(self.begun))
        hosts = in_place(run, self.ended)
        return self.most - sum(rounded(operand.nbytes) for operand in hosts.values())


def _highest(levels: Iterable[_Level], enough: float) -> int:
    """Return the maximum of live bytes at the levels; exact if it is more than `enough`."""
    return max(level.exactly() if level.most > enough else level.most for level in levels)


def _touched(unit: Unit) -> set[Placed]:
    if unit.touched is None:
        places = {placed(value) for values in (unit.makes, unit.reads) for value in values}
        unit.touched = {each for each in places if each is not None}
    return unit.touched  # type: ignore[no-any-return]


def _partners(call: Call, producers: dict[Value, Unit], place: dict[Unit, int]) -> list[Unit]:
    """Return the units that compute an operand of the call and may join it, the nearest first.

    A recomputing call may not move forward, so it has none. Recomputing units come last: otherwise
    the chain would need too early the product that multiplies the recomputed value.
    """
    if call.again:
        return []
    units = {producers[use.value] for use in call.ins if use.value in producers}
    return sorted(units, key=lambda unit: (not unit.calls[0].again, place[unit]), reverse=True)


class _Domains(dict[Call, "Shape | None"]):
    """Cache of the domain of each call: the shape over which it iterates; see `_domain_of`."""

    def __init__(self, policy: FusionPolicy) -> None:
        super().__init__()
        self.policy = policy

    def __missing__(self, call: Call) -> Shape | None:
        shape = self[call] = _domain_of(call, self.policy)
        return shape


def _takes(unit: Unit, calls: Sequence[Call], domains: _Domains) -> bool:
    """Return whether the unit is a chain, or the start of one, that the calls may join.

    They must have the domain of the unit and no reduction, and read the unit's values with the type
    in which they compute. They may not overwrite memory that the unit reads with a different type
    at other positions.
    """
    first, policy = unit.calls[0], domains.policy
    if first.op is None:
        return False
    is_head = policy.native and first.op.heads
    if is_head:
        if _is_one_row(first):
            return False
        shape: Shape | None = first.outs[0].type.shape
    else:
        shape = domains[first] if policy.links(first.op) or _has_window(first) else None
    windows = [call for call in (*unit.calls, *calls) if call.window]
    for call in calls:
        domain = domains[call]
        if shape is None or domain is None or not always_equal(domain, shape):
            return False
        if is_head and _has_window(call):
            return False
        for use in call.ins:
            if use.value in unit.makes and not _makes_whole(unit, use, policy):
                return False
        if _has_window(call) and call.ins[0].value in unit.makes:
            return False
        if windows and not may_write(call, windows):
            return False
        for out in call.outs:
            home = out.value.home
            if home is None:
                continue
            if is_head and any(use.value.home is home for use in first.ins):
                return False  # the chain must not overwrite operands of a later row
            if home in unit.reads_from or home in unit.writes_to:
                uses = [use for each in unit.calls for use in each.ins if use.value.home is home]
                if any(use.type is not out.type for use in uses):
                    return False
    return True


def _has_window(call: Call) -> bool:
    """Return whether a call reads or writes a window that may be in a chain."""
    return call.window or written_shape(call) is not None


def _is_one_row(call: Call) -> bool:
    """Return whether a matrix product is a row times a matrix, or a batch of these.

    A separate call is twice as fast as a call in a chain, because tiles of a chain read the matrix
    by columns.
    """
    y, out = call.ins[1].type, call.outs[0].type
    is_batch = y.ndim > 2 and out.dtype.is_inexact
    rows = out.shape[-2:-1] if is_batch else out.shape[:-1]
    return math.prod(rows) == 1


def _makes_whole(unit: Unit, use: Use, policy: FusionPolicy) -> bool:
    """Return whether a call of the unit, not a reduction, computes the value with that type."""
    return any(
        use in call.outs
        and call.op is not None
        and (policy.links(call.op) or call.window or (policy.native and call.op.heads))
        for call in reversed(unit.calls)
    )


def _domain_of(call: Call, policy: FusionPolicy) -> Shape | None:
    """Return the shape over which the call iterates, if it may follow a call in a chain."""
    op = call.op
    if op is None:
        return None
    out = call.outs[0].type
    if policy.native and _has_window(call):
        return out.shape if call.window else written_shape(call)
    if policy.links(op) and not out.dtype.is_storage:  # array items are not elements
        return out.shape
    if (
        not policy.native
        and op.reduces
        and "axis" in op.attributes
        and call.ins[0].type.size <= BLOCK_SIZE
    ):
        return call.ins[0].type.shape  # in one block, as in a separate call
    return None


def chain_of(run: Run) -> Chain:
    """Return the chain that runs the unit.

    It stores the values that the run writes; all other values stay in temporaries. A write into a
    window of a tensor that is not read again is omitted.
    """
    unit, outs, ins = run.unit, run.outs, run.ins
    numbers: dict[Use, int] = {use: number for number, use in enumerate([*outs, *ins])}
    scratch = _Scratch()
    read = {use for call in unit.calls for use in call.ins}
    calls = [
        call
        for call in unit.calls
        if written_shape(call) is None or call.outs[0] in numbers or call.outs[0] in read
    ]
    last_read = {use: i for i, call in enumerate(calls) for use in call.ins}
    links = []
    windows = {call.outs[0] for call in calls if call.window}
    for i, call in enumerate(calls):
        assert call.op is not None  # only ops are in chains
        [out] = call.outs
        sources = tuple([numbers[use] for use in call.ins])
        # Sorted, so that every process numbers them equally.
        ended = [
            use
            for use in dict.fromkeys(call.ins)
            if last_read[use] == i and numbers[use] < 0 and use not in windows
        ]
        if call.op.in_place:
            scratch.put_back(ended, numbers)
        if out in windows:
            scratch.count += 1
            numbers[out] = -scratch.count
        elif out not in numbers:
            numbers[out] = scratch.take(out.type)
            if out not in last_read:
                ended.append(out)
        if not call.op.in_place:
            scratch.put_back(ended, numbers)
        links.append(Link(call.op, numbers[out], sources, call.attributes))
    return Chain(links, len(outs))


class _Scratch:
    """Allocator of numbers for temporaries, which are reused for values of the same type."""

    def __init__(self) -> None:
        self.count = 0
        self.free: dict[TensorType, list[int]] = {}

    def take(self, type: TensorType) -> int:
        stock = self.free.setdefault(type, [])
        if stock:
            return stock.pop()
        self.count += 1
        return -self.count

    def put_back(self, uses: Iterable[Use], numbers: dict[Use, int]) -> None:
        for use in uses:
            self.free.setdefault(use.type, []).append(numbers[use])
