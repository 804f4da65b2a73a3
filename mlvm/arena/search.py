"""Search for offsets of blocks with fixed lifetimes below a capacity.

The algorithm follows Moffitt, "MiniMalloc: A Lightweight Memory Allocator for Hardware-Accelerated
Machine Learning" (ASPLOS 2023, doi 10.1145/3623278.3624752):

- **Canonical positions.** Every placement can be pushed down until each block is at 0 or on top of
  a block. The search visits only such placements.
- **Sections.** Only the times at which the set of live blocks is locally largest matter: one for
  each run of starts before an end. A lifetime becomes a range of these sections.
- **Parts.** Groups of blocks that share no section are solved separately, at the start and after
  each choice. If a part has no solution, the choice that separated it has none.
- **Lower bounds.** A block without an offset is above the floor of every section that it spans; a
  floor is the top of the blocks placed in the section. In each section, the blocks are stacked in
  the order of these heights. No placement has a lower top in this section. A choice is dropped if a
  stack exceeds the capacity.
- **Dominance.** Among blocks with the same size and sections, the first is placed lowest.

The choice at a node differs from the paper. MiniMalloc chooses among all blocks by increasing
offsets. Here a node chooses one section in a *valley*, a range of sections with equal floors
between higher ones. Either one of the blocks that fit into the valley is at the floor of this
section, or the lowest block of this section is higher. The search therefore continues where it is
most likely to fail: in the section with the least slack or with the fewest such blocks. States
without a solution are kept in a hash table: the blocks of a part with the lowest offsets. A state
is hashed as a sum of products with random 64-bit numbers.

`Search.fit` tries several rules for the order of blocks and the choice of sections, forwards and
backwards in time, with a limit of nodes that doubles. Results depend only on the blocks and the
limit of nodes, never on timing. The search runs in C if the native extension is available,
otherwise in `_searched`, with the same results.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mlvm.core.splitmix import generated
from mlvm.machines.native.extension import EXTENSION

Ints = NDArray[np.int64]

FOUND, NONE, LIMIT = range(3)
"""Results of a search: offsets, a proof that there are none, or the limit of nodes was reached."""

_BITS: Final = 14
"""Initial number of bits for entries in the table of failed states; it grows with the nodes."""

_MASK: Final = 2**64 - 1

_RULES: Final = (
    (True, "lifetime area load"),
    (False, "load sections area"),
    (False, "load area lifetime"),
    (True, "load size area"),
)
"""Rules of the search.

The first value selects the section with the fewest candidates instead of the least slack. The
second orders the candidates, the largest values first.
"""


class Sections(NamedTuple):
    """Lifetimes as ranges of sections.

    first, last: the sections of each block.
    part: the part of each block; parts are numbered from 0.
    """

    first: Ints
    last: Ints
    part: Ints


def sections_of(start: Ints, end: Ints) -> Sections:
    """Return the sections of lifetimes, none of which is empty."""
    moments = np.concatenate([end, start])  # at the same time, process frees first
    is_start = np.arange(len(moments)) >= len(end)
    order = np.argsort(moments, kind="stable")
    moments, is_start = moments[order], is_start[order]
    largest = moments[:-1][is_start[:-1] & ~is_start[1:]]  # the last event is always an end
    first, last = largest.searchsorted(start), largest.searchsorted(end) - 1
    joined = np.zeros(len(largest) + 1, np.int64)
    np.add.at(joined, first, 1)
    np.subtract.at(joined, last, 1)
    part = np.concatenate([[0], np.cumsum(np.cumsum(joined[: len(largest)]) == 0)])
    return Sections(first, last, part[first])


def breadth(size: Ints, start: Ints, end: Ints) -> Ints:
    """Return for each block the maximum number of live bytes during the lifetime of the block."""
    moments = np.sort(np.concatenate([start, end]))
    # np.unique would import np.ma
    moments = moments[np.diff(moments, prepend=moments[:1] - 1) != 0]
    first, last = np.searchsorted(moments, start), np.searchsorted(moments, end)
    change = np.zeros(len(moments), np.int64)
    np.add.at(change, first, size)
    np.subtract.at(change, last, size)
    spans = np.stack([first, last], axis=1).ravel()  # reduceat also reduces the ranges in between
    return np.maximum.reduceat(np.cumsum(change), spans)[::2] if len(spans) else change


class Search:
    """Search for offsets of blocks below a capacity.

    `offsets`: the best known offset of each block.
    `height`: height of the storage with these offsets.
    `nodes`: number of nodes visited so far.
    `work`: sum of the blocks of the part over these nodes.
    """

    def __init__(self, size: Ints, start: Ints, end: Ints, offsets: Ints) -> None:
        """Prepare a search. `offsets` are valid offsets."""
        self.offsets, self.nodes, self.work, self._size = offsets.copy(), 0, 0, size
        sections = sections_of(start, end)
        order = np.argsort(sections.part, kind="stable")
        bounds = np.flatnonzero(np.diff(sections.part[order])) + 1
        self._parts = [
            _Part.of(blocks, size[blocks], (end - start)[blocks], sections)
            for blocks in np.split(order, bounds)
            if len(blocks)
        ]

    @property
    def height(self) -> int:
        return int((self.offsets + self._size).max(initial=0))

    def keep_lower(self, offsets: Ints) -> None:
        """Keep these offsets for the parts that are lower with them."""
        for part in self._parts:
            ends = offsets[part.blocks] + part.size
            if ends.max() < (self.offsets[part.blocks] + part.size).max():
                self.offsets[part.blocks] = offsets[part.blocks]

    def fit(self, capacity: int, work: int) -> int:
        """Search for offsets below the capacity, in the parts that are higher.

        Return FOUND, NONE or LIMIT. The offsets of solved parts are kept. `work` limits the product
        of the nodes and the blocks of the searched part, which is about proportional to the time.
        """
        left = work
        for part in self._parts:
            ends = self.offsets[part.blocks] + part.size
            if ends.max() <= capacity:
                continue
            status, offsets, visited = part.fit(capacity, left // len(ends))
            left -= visited * len(ends)
            self.nodes += visited
            self.work += visited * len(ends)
            if status != FOUND:
                return status
            self.offsets[part.blocks] = offsets
        return FOUND


@dataclass
class _Part:
    """Blocks of a part, and the arrays of a search; `Buffers` in offsets.h has the same fields."""

    blocks: Ints
    size: Ints
    first: Ints
    last: Ints
    twin: Ints
    hash: NDArray[np.uint64]
    ranks: list[Ints]
    sections: int

    @staticmethod
    def of(blocks: Ints, size: Ints, lifetime: Ints, sections: Sections) -> _Part:
        first, last = sections.first[blocks], sections.last[blocks]
        least = first.min()
        first, last = first - least, last - least
        area, load = size.astype(np.float64) * lifetime, breadth(size, first, last + 1)
        keys = {"lifetime": lifetime, "area": area, "load": load, "size": size}
        keys["sections"] = last - first
        ranks = []
        for _, rule in _RULES:
            rank = np.empty(len(blocks), np.int64)
            rank[np.lexsort([-keys[key] for key in rule.split()[::-1]])] = np.arange(len(blocks))
            ranks.append(rank)
        same: dict[tuple[int, ...], int] = {}
        twin = np.full(len(blocks), -1)
        for i, row in enumerate(zip(size.tolist(), first.tolist(), last.tolist(), strict=True)):
            twin[i] = same.get(row, -1)
            same[row] = i
        hash = generated(len(blocks)) | np.uint64(1)  # odd numbers
        return _Part(blocks, size, first, last, twin, hash, ranks, int(last.max()) + 1)

    @property
    def _tries(self) -> Iterator[tuple[tuple[bool, str], Ints, tuple[Ints, Ints]]]:
        """Yield each rule, forwards and backwards in time."""
        backwards = self.sections - 1 - self.last, self.sections - 1 - self.first
        for rule, rank in zip(_RULES, self.ranks, strict=True):
            yield rule, rank, (self.first, self.last)
            yield rule, rank, backwards

    def fit(self, capacity: int, nodes: int) -> tuple[int, Ints, int]:
        """Search for offsets below the capacity; return the status, offsets and visited nodes."""
        if nodes < len(self.size):  # each block needs at least one node
            return LIMIT, self.size, 0
        bits = min(max(nodes.bit_length(), _BITS), 20)  # at most 8 MiB
        failed = np.zeros(1 << bits, np.uint64)
        offsets = np.zeros_like(self.size)
        visited, limit = 0, 2 * len(self.size)
        while True:
            for (fewest, _), rank, (first, last) in self._tries:
                least = min(limit, nodes - visited)
                search = _searched if EXTENSION is None else EXTENSION.search_offsets
                status, count = search(
                    self.size, first, last, self.twin, self.hash, rank, failed, offsets,
                    len(self.size), self.sections, capacity, least, bits, fewest,
                )  # fmt: skip
                visited += count
                if status != LIMIT or visited >= nodes:
                    return status, offsets, visited
            limit *= 2


class _Open(NamedTuple):
    """Part of a search that is not solved.

    It has blocks in the sections `low` .. `high - 1`. `origin` is the node that created it, `next`
    the part to solve after it.
    """

    low: int
    high: int
    blocks: list[int]
    origin: int
    next: _Open | None


class _Choice:
    """Node: the blocks that may be the lowest in `section`, which is in a valley.

    at: index of the next candidate; after the last candidate, no block is at the floor.
    raised: number of changes of floors before the node's choice.
    """

    __slots__ = (
        "at", "candidates", "key", "left", "part", "placed", "raised", "right", "section",
    )  # fmt: skip

    def __init__(self, part: _Open, key: int, raised: int) -> None:
        self.part, self.key, self.at, self.placed, self.raised = part, key, 0, -1, raised
        self.section = self.left = self.right = -1
        self.candidates: list[int] = []


def _searched(
    size_: Ints, first_: Ints, last_: Ints, twin_: Ints, hash_: NDArray[np.uint64], rank_: Ints,
    failed: NDArray[np.uint64], offsets: Ints,
    count: int, sections: int, capacity: int, limit: int, bits: int, fewest: bool,
) -> tuple[int, int]:  # fmt: skip
    """Search as `search_offsets` of the extension does, with the same arguments and results."""
    size, first, last, twin = size_.tolist(), first_.tolist(), last_.tolist(), twin_.tolist()
    hashes, rank, shift = hash_.tolist(), rank_.tolist(), 64 - bits
    floor, top = [0] * sections, [0] * sections
    placed, nodes = [False] * count, list[_Choice]()
    raised: list[tuple[int, int, list[int]]] = []

    def raise_floor(low: int, high: int, height: int) -> None:
        raised.append((low, high, floor[low:high]))
        floor[low:high] = [height] * (high - low)

    def lowest(i: int) -> int:
        return max(floor[first[i] : last[i] + 1])

    def stack_up(low: int, high: int, blocks: Sequence[int]) -> list[tuple[int, int]] | None:
        """Return the blocks with the lowest possible offsets, sorted by offset.

        Return None if the stack of a section exceeds the capacity.
        """
        top[low:high] = [0] * (high - low)
        stack = sorted([(lowest(i), i) for i in blocks])
        for offset, i in stack:
            for x in range(first[i], last[i] + 1):
                top[x] = max(top[x], offset) + size[i]
                if top[x] > capacity:
                    return None
        return stack

    def valleys(part: _Open) -> Iterator[tuple[int, int, int]]:
        """Yield the first and last section of each valley, and the height of the lower side."""
        left = part.low
        while left < part.high:
            right = left
            while right + 1 < part.high and floor[right + 1] == floor[left]:
                right += 1
            sides = [*floor[left - 1 : left]] if left > part.low else []
            sides += floor[right + 1 : right + 2] if right + 1 < part.high else []
            up = min(sides, default=_MASK) - floor[left]
            if up > 0:
                yield left, right, up
            left = right + 1

    def fill_valleys(part: _Open, stack: Sequence[tuple[int, int]]) -> list[int]:
        """Raise the floors of valleys without candidates to the height of the lower side.

        Repeat this until none remain. It changes no lowest offset. Return the number of candidates
        in each section.
        """
        while True:
            has_changed, candidates = False, [0] * sections
            for offset, i in stack:
                for x in range(first[i], last[i] + 1):
                    candidates[x] += floor[x] == offset
            for left, right, up in valleys(part):
                if not any(candidates[left : right + 1]):
                    has_changed = True
                    raise_floor(left, right + 1, floor[left] + up)
            if not has_changed:
                return candidates

    def open_node(part: _Open) -> bool:
        """Open a node for a part; return False if the part is known to have no solution."""
        stack = stack_up(part.low, part.high, part.blocks)
        assert stack is not None  # `divide` has dropped such parts
        key = 1 + capacity
        for offset, i in stack:
            key += hashes[i] * (offset + 1)
        key &= _MASK
        if int(failed[key >> shift]) == key:
            return False
        candidates = fill_valleys(part, stack)
        node = _Choice(part, key, len(raised))
        best: tuple[int, int] | None = None
        for left, right, _ in valleys(part):
            for x in range(left, right + 1):
                rule = candidates[x] if fewest else 0, -top[x]
                if best is None or rule < best:
                    best, node.section, node.left, node.right = rule, x, left, right
        node.candidates = sorted(
            [
                i
                for i in part.blocks
                if node.left <= first[i] <= node.section <= last[i] <= node.right
            ],
            key=rank.__getitem__,
        )
        nodes.append(node)
        return True

    def next_floor(node: _Choice) -> int | None:
        """Return the lowest offset in the node's section, if no block is at the floor.

        Each block is above the floors of the sections that it spans, or on a block outside this
        section.
        """
        lows = []
        for i in node.part.blocks:
            if not first[i] <= node.section <= last[i]:
                continue
            if first[i] < node.left or node.right < last[i]:
                lows.append(lowest(i))
            else:
                lows += [
                    lowest(j) + size[j]
                    for j in node.part.blocks
                    if first[j] <= last[i]
                    and first[i] <= last[j]
                    and not first[j] <= node.section <= last[j]
                ]
        return min(lows, default=None)

    def choose(node: _Choice) -> bool:
        """Make the next choice of a node; return False if none remains."""
        at, height = node.at, floor[node.section]
        node.at += 1
        if at == len(node.candidates):
            floor_after = next_floor(node)
            if floor_after is None or floor_after > capacity:
                return False
            raise_floor(node.section, node.section + 1, floor_after)
            return True
        i = node.placed = node.candidates[at]
        placed[i] = True
        offsets[i] = height
        raise_floor(first[i], last[i] + 1, height + size[i])
        return True

    def divide(origin: int) -> tuple[bool, _Open | None]:
        """Divide the blocks without an offset into parts.

        Return whether they may fit, and the first part to solve.
        """
        node = nodes[origin]
        low, high, blocks, _, todo = node.part
        blocks = [i for i in blocks if i != node.placed]
        stack = stack_up(low, high, blocks)
        if stack is None:
            return False, None
        joined = [False] * sections
        for i in blocks:
            joined[first[i] : last[i]] = [True] * (last[i] - first[i])
        while high > low:
            left = high - 1
            while left > low and joined[left - 1]:
                left -= 1
            inside = [i for _, i in stack if left <= first[i] < high]
            if inside:
                todo = _Open(left, high, inside, origin, todo)
            high = left
        return True, todo

    def undo(node: _Choice) -> None:
        while len(raised) > node.raised:
            low, high, floors = raised.pop()
            floor[low:high] = floors
        if node.placed >= 0:
            placed[node.placed] = False
        node.placed = -1

    def unwind(origin: int) -> None:
        """Return to the node that created a part without a solution."""
        while len(nodes) > origin + 1:
            undo(nodes.pop())

    visited = 0
    whole = _Open(0, sections, list(range(count)), -1, None)
    if stack_up(0, sections, whole.blocks) is None or not open_node(whole):
        return NONE, visited
    while nodes:
        node = nodes[-1]
        undo(node)
        if node.at > len(node.candidates):
            failed[node.key >> shift] = node.key
            unwind(node.part.origin)
            continue
        if node.at < len(node.candidates):
            first_of_twins = twin[node.candidates[node.at]]
            if first_of_twins >= 0 and not placed[first_of_twins]:
                node.at += 1
                continue
        if visited == limit:
            return LIMIT, visited
        visited += 1
        if not choose(node):
            continue
        fits, todo = divide(len(nodes) - 1)
        if fits and todo is None:
            return FOUND, visited
        if todo is not None and not open_node(todo):
            unwind(todo.origin)
    return NONE, visited
