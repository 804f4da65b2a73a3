"""Planner of offsets for tensors with known lifetimes in a small storage.

`plan` places blocks one after the other. Each goes into the smallest gap between the placed blocks
that are live at the same time: best fit, as in XLA's heap simulator
(`GlobalDecreasingSizeBestFitHeap`). The result depends on the order of the blocks. So `plan` tries
several orders and keeps the smallest result. They include the decreasing size of TensorFlow Lite
Micro's `greedy_memory_planner.cc` and the breadth of Pisarchyk and Lee, "Efficient Memory
Management for Deep Neural Net Inference" (arXiv 2001.03288).

If no order reaches the lower bound, `mlvm.arena.search` searches for a plan that does, and then for
plans smaller than the best. The number of search nodes is limited, so the result does not depend on
timing.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mlvm.arena.search import FOUND, Search, breadth
from mlvm.core.errors import ArenaError, ArgumentError, MlvmError, brief
from mlvm.core.sizes import MAX_TERM
from mlvm.core.tables import table
from mlvm.core.types import ALIGNMENT
from mlvm.machines.native.extension import EXTENSION
from mlvm.renamed import OldAttribute

_PLAIN: Final = 2**48
_PAGE: Final = 2**12
"""Limits for the fast check: of sizes and times, and of alignments."""
_RETRIES: Final = 50
_PLACEMENTS: Final = 20_000
"""Limits of the search after the orders: placements of all blocks, and placed blocks."""

_IMPROVED: Final = ", improved"
_SEARCHED: Final = "search"

WORK: Final = 2**18
"""Limit of the search at effort 1: the number of nodes times the number of blocks."""

MOST_EFFORT: Final = 2**32

Ints = NDArray[np.int64]


class Block(NamedTuple):
    """Memory block with a size in bytes, live at the times `start` .. `end - 1`."""

    nbytes: int
    start: int
    end: int


class PeakValue(NamedTuple):
    """Value in memory at the peak of a captured step.

    `type`: the type of the uses, such as `f32[64,10]`.
    `nbytes`: size in bytes.
    `op`: the op that computes it.
    `line`, `last_line`: the lines that compute it and use it last, or empty texts.
    `again`: estimated seconds to compute it again after the peak; None if that is impossible.
    """

    type: str
    nbytes: int
    op: str
    line: str
    last_line: str
    again: float | None


class PeakTable(tuple[PeakValue, ...]):
    """Values at the peak of a captured step, the largest first. Prints as a table."""

    def __repr__(self) -> str:
        rows = [("bytes", "type", "op", "made at", "last used at", "again, us", "frees")]
        for x in self:
            again = "-" if x.again is None else f"{1e6 * x.again:,.1f}"
            frees = "0" if x.again is None else f"{x.nbytes:,}"
            rows.append((f"{x.nbytes:,}", x.type, x.op, x.line, x.last_line, again, frees))
        return "\n".join(table(rows, right={0, 5, 6}))


class Plan(NamedTuple):
    """Memory plan: an offset for each block such that simultaneously live blocks do not overlap.

    `offsets`: of the blocks, in bytes.
    `nbytes`: size of the storage.
    `lower_bound`: maximum number of simultaneously live bytes; no plan is smaller.
    `order`: the order of placement that gave this plan.
    `unfused`: for a captured step, the lower bound of its recorded calls, or None.
    `hoisted_nbytes`: for a captured step, bytes of hoisted values, which are not in `nbytes`.
    `used`: for a step with dynamic sizes, the peak use in bytes at the sizes of the last call,
        or None.
    `peak`: for a captured step, the values in memory at the peak, the largest first.

    Prints as `12,345 bytes, lower bound 12,000 (1.03), unfused 15,000, by size`.

    `unfused` assumes that every call with a result that is read runs separately and once. The order
    is the recorded order or the order of `mlvm.step.order`, whichever needs less memory. A result
    may also reuse the memory of an operand that is not used later.
    """

    offsets: tuple[int, ...]
    nbytes: int
    lower_bound: int
    order: str
    unfused: int | None = None
    hoisted_nbytes: int = 0
    used: int | None = None
    peak: tuple[PeakValue, ...] = ()

    def why(self, count: int = 5) -> PeakTable:
        """Return the largest values in memory at the peak of a captured step.

        count: maximum number of values, 1 or more

        Each value has the lines that compute it and use it last. A value that is not used at the
        peak could be computed again after it: `again` is the estimated time. Hoisted values are
        always in memory; the name of their op has the suffix " (hoisted)".

        A plan of blocks and the plan of a saved step have no such values. Raises `ArgumentError`
        unless `count` is an int of 1 or more.

        Invalid calls:
            ml.measure(ml.tanh, v).plan.why(0)  # ArgumentError
        """
        if type(count) is not int or count < 1:
            raise ArgumentError(f"why: expected a count of 1 or more, got {count!r}")
        return PeakTable(self.peak[:count])

    def __str__(self) -> str:
        ratio = self.nbytes / self.lower_bound if self.lower_bound else 1.0
        bound = f"lower bound {self.lower_bound:,} ({ratio:.2f})"
        unfused = "" if self.unfused is None else f", unfused {self.unfused:,}"
        n = self.hoisted_nbytes
        hoisted = f"; {n:,} bytes are computed before the first launch" if n else ""
        used = "" if self.used is None else f"; at most {self.used:,} in use at a call's lengths"
        return f"{self.nbytes:,} bytes, {bound}{unfused}, by {self.order}{hoisted}{used}"

    def __repr__(self) -> str:
        return f"<Plan of {len(self.offsets):,} blocks: {self}>"


if not TYPE_CHECKING:
    Plan.ahead = OldAttribute("Plan", "ahead")


class SearchedPlan(NamedTuple):
    """Plan, and the number of search nodes that were visited."""

    plan: Plan
    nodes: int


def plan(
    blocks: Sequence[Block], *, alignment: int = ALIGNMENT, enough: int = 0, effort: int = 1
) -> Plan:
    """Plan offsets, multiples of `alignment`, for blocks with sizes rounded up to it.

    enough: if the search for the lower bound fails, a plan of at most this many bytes, and at most
        1/64 above the bound, is not improved.
    effort: factor of the limit of search nodes.

    The same blocks always get the same plan. Raises `ArenaError` for a negative size, an end before
    the start, an alignment or an effort below 1, or a value that is not an integer.
    """
    return plan_within(blocks, None, alignment=alignment, effort=effort, enough=enough).plan


def check_effort(effort: object, where: str, error: type[MlvmError]) -> None:
    """Raise the error unless the effort is an int from 1 to `MOST_EFFORT`."""
    if type(effort) is not int or not 1 <= effort <= MOST_EFFORT:
        raise error(
            f"{where}: expected effort as an int from 1 to {MOST_EFFORT}, got {brief(effort)}"
        )


def plan_within(
    blocks: Sequence[Block],
    capacity: int | None,
    *,
    alignment: int = ALIGNMENT,
    effort: int = 1,
    enough: int = 0,
) -> SearchedPlan:
    """Plan offsets as `plan` does, until the plan has at most `capacity` bytes.

    With None, return the smallest plan found. If the effort does not suffice, the plan may exceed
    the capacity. Raises `ArenaError` as `plan` does.
    """
    check_effort(effort, "plan", ArenaError)
    size, start, end = _columns(blocks, alignment)
    bound = _largest_total(size, start, end)
    needed = np.flatnonzero((size > 0) & (start < end))  # empty blocks fit anywhere
    least = max(bound, min(enough, bound + bound // 64))
    order, placed, visited = _best(
        size[needed], start[needed], end[needed], bound, least, capacity, effort * WORK
    )
    offsets = np.zeros_like(size)
    offsets[needed] = placed
    planned = Plan(tuple(offsets.tolist()), _height(offsets, size), bound, order)
    return SearchedPlan(planned, visited)


def lower_bound(blocks: Sequence[Block], *, alignment: int = ALIGNMENT) -> int:
    """Return the largest total of simultaneously live bytes, with sizes rounded up.

    Sizes are rounded up to the alignment. Raises `ArenaError` as `plan` does.
    """
    return _largest_total(*_columns(blocks, alignment))


def _columns(blocks: Sequence[Block], alignment: int) -> tuple[Ints, Ints, Ints]:
    """Check the blocks; return lists of sizes, starts and ends."""
    if not isinstance(alignment, int) or alignment < 1:
        raise ArenaError(f"plan: expected an alignment >= 1, got {alignment!r}")
    columns = _whole(blocks) if alignment <= _PAGE else None
    if columns is not None:
        size, start, end = columns
        return -(-size // alignment) * alignment, start, end
    rows = []
    total = 0
    for i, block in enumerate(blocks):
        try:
            nbytes, start, end = map(operator.index, block)
        except (TypeError, ValueError):
            raise ArenaError(
                f"block {i}: expected integers nbytes, start, end, got {block!r}"
            ) from None
        if nbytes < 0:
            raise ArenaError(f"block {i}: expected a size >= 0, got {nbytes:,}")
        if end < start:
            raise ArenaError(f"block {i}: expected end >= start, got start {start} and end {end}")
        nbytes = -(-nbytes // alignment) * alignment
        total += nbytes
        if total > MAX_TERM or max(-start, end) > MAX_TERM:
            raise ArenaError(
                f"block {i}: expected sizes, their sum and times of at most 2**62, got {block}"
            )
        rows.append((nbytes, start, end))
    columns = np.array(rows, np.int64).reshape(-1, 3).T.copy()
    return columns[0], columns[1], columns[2]


def _whole(blocks: Sequence[Block]) -> Ints | None:
    """Check all blocks in one pass; return the columns, or None if the slow check is needed."""
    try:
        rows = np.array(blocks)
    except (TypeError, ValueError, OverflowError):
        return None
    if rows.dtype != np.int64 or rows.ndim != 2 or rows.shape[1] != 3:
        return None
    columns: Ints = rows.T.copy()
    size, start, end = columns
    whole = (end >= start).all() and columns.min() >= 0 and columns.max() < _PLAIN
    return columns if whole and size.sum() < _PLAIN else None


def _largest_total(size: Ints, start: Ints, end: Ints) -> int:
    """Return the maximum over time of the total size of live blocks."""
    moments = np.concatenate([end, start])  # at equal times, frees precede allocations
    change = np.concatenate([-size, size])[np.argsort(moments, kind="stable")]
    return int(np.cumsum(change).max(initial=0))


def _best(
    size: Ints, start: Ints, end: Ints, bound: int, enough: int, goal: int | None, work: int
) -> tuple[str, Ints, int]:
    """Return the name of the best order, the offsets, and the number of search nodes visited.

    If no order gives at most `goal` bytes, a search tries to. Without a goal, half of the work is
    for a search at the lower bound. If that fails, and the plan has more than `enough` bytes, the
    orders are improved, and the other half is for the smallest height that can be found.
    """
    tried: list[_Tried] = []
    for name, sequence in _orders(size, start, end):
        offsets = _place(sequence, size, start, end)
        tried.append(_Tried(_height(offsets, size), name, sequence, offsets))
        if tried[-1].height <= max(bound, goal or 0):
            return name, offsets, 0
    tried.sort(key=lambda each: each.height)
    best = tried[0]
    search = Search(size, start, end, best.offsets)
    for each in tried:
        search.keep_lower(each.offsets)
    status = search.fit(bound, work // 2) if goal is None else search.fit(max(bound, goal), work)
    if status != FOUND and best.height > enough:
        best = _improved(tried, size, start, end, enough)
        search.keep_lower(best.offsets)
        if goal is None:
            unit = int(np.gcd.reduce(size))
            _narrow(search, bound // unit + 1, unit, work - work // 2)
    if search.height < best.height:
        return _SEARCHED, search.offsets, search.nodes
    return best.name, best.offsets, search.nodes


class _Tried(NamedTuple):
    """Tested order: the name, the blocks in this order, the offsets, and the height."""

    height: int
    name: str
    sequence: Ints
    offsets: Ints


def _improved(tried: Sequence[_Tried], size: Ints, start: Ints, end: Ints, enough: int) -> _Tried:
    """Improve each order, the best one first; return the best result.

    The blocks with the highest tops are moved to the front, and all blocks are placed again. This
    repeats until an order recurs, or a limit is reached.
    """
    best = tried[0]
    retries = min(_RETRIES, _PLACEMENTS // len(size))
    tried_orders: set[bytes] = set()
    for _, name, sequence, offsets in tried:
        while retries and best.height > enough:
            highest = (offsets + size)[sequence] == _height(offsets, size)
            sequence = np.concatenate([sequence[highest], sequence[~highest]])
            if sequence.tobytes() in tried_orders:
                break
            tried_orders.add(sequence.tobytes())
            retries -= 1
            offsets = _place(sequence, size, start, end)
            height = _height(offsets, size)
            if height < best.height:
                best = _Tried(height, f"{name}{_IMPROVED}", sequence, offsets)
    return best


def _narrow(search: Search, low: int, unit: int, work: int) -> None:
    """Search by bisection for the smallest height between `low` and the search's height.

    Heights are multiples of `unit`. Each iteration may do half of the remaining work.
    """
    high, last = search.height // unit, search.work + work
    while low < high and search.work < last:
        half = (low + high) // 2
        if search.fit(half * unit, (last - search.work + 1) // 2) == FOUND:
            high = search.height // unit
        else:
            low = half + 1


def _orders(size: Ints, start: Ints, end: Ints) -> Iterator[tuple[str, Ints]]:
    """Yield names of orders, and the block indices in each. Ties are broken by size, then use."""
    life = end - start
    keys = {
        "size": (-size, -life, start),
        "first use": (start, -size, -life),
        "size * lifetime": (-size.astype(np.float64) * life, -size, start),
        "lifetime": (-life, -size, start),
        "breadth": (-breadth(size, start, end), -size, start),
        "last use": (-end, -size, -life),
    }
    for name, key in keys.items():
        yield name, np.lexsort(key[::-1])


def _place(sequence: Ints, size: Ints, start: Ints, end: Ints) -> Ints:
    """Place the blocks in that sequence, each by best fit, and return the offsets.

    A gap is between two blocks that are live at the same time as the block to place. If several
    gaps are equally small, the lowest is used; a block that fits into no gap is placed on top.
    """
    offsets = np.zeros_like(size)
    if EXTENSION is not None:
        EXTENSION.place_best_fit(len(size), sequence, size, start, end, offsets)
        return offsets
    # rows: bottom, top, start and end; sorted by bottom
    placed = np.empty((4, len(size)), np.int64)
    blocks = np.stack([sequence, size[sequence], start[sequence], end[sequence]], axis=1).tolist()
    for k, (i, nbytes, begin, until) in enumerate(blocks):
        bottom, top, begins, ends = placed[:, :k]
        at_once = ((begins < until) & (ends > begin)).nonzero()[0]  # faster than flatnonzero
        floor = np.zeros(len(at_once) + 1, np.int64)
        np.maximum.accumulate(top[at_once], out=floor[1:])
        gap = bottom[at_once] - floor[:-1]
        fits = (gap >= nbytes).nonzero()[0]
        offset = floor[fits[gap[fits].argmin()]] if len(fits) else floor[-1]
        at = int(bottom.searchsorted(offset))
        placed[:, at + 1 : k + 1] = placed[:, at:k]
        placed[:, at] = offset, offset + nbytes, begin, until
        offsets[i] = offset
    return offsets


def _height(offsets: Ints, size: Ints) -> int:
    return int((offsets + size).max(initial=0))
