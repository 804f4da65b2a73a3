"""Stacks of which many copies are kept: a tree whose copies share all that they have in common.

A copy costs nothing, a change of one place, or of the top, the nodes above it: as in Bagwell, Ideal
Hash Trees (2001), and Clojure's vectors. A node has up to 32 children, a leaf up to 32 values.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeAlias, TypeVar

T = TypeVar("T")
Node: TypeAlias = tuple[Any, ...]

_WIDTH: Final = 32


class Slots(NamedTuple, Generic[T]):
    """Values that do not change. Equal ones, made in whatever way, have trees of one form."""

    height: int = 0
    levels: int = 0  # of nodes above the leaves
    root: Node = ()

    def at(self, i: int) -> T:
        value: T = self._leaf(i // _WIDTH)[i % _WIDTH]
        return value

    def with_at(self, i: int, value: T) -> Slots[T]:
        """A copy that has another value at place i."""
        leaf = self._leaf(i // _WIDTH)
        at = i % _WIDTH
        return self._with_leaf(i // _WIDTH, (*leaf[:at], value, *leaf[at + 1 :]), self.height)

    def with_more(self, values: Sequence[T]) -> Slots[T]:
        """A copy with more values on top."""
        slots, done = self, 0
        while done < len(values):
            number, used = divmod(slots.height, _WIDTH)
            more = values[done : done + _WIDTH - used]
            leaf = (*slots._leaf(number), *more) if used else tuple(more)
            slots = slots._with_leaf(number, leaf, slots.height + len(more))
            done += len(more)
        return slots

    def lowest(self, height: int) -> Slots[T]:
        """Return the lowest `height` values."""
        if height >= self.height:
            return self
        levels, root = self.levels, _cut(self.root, self.levels, height)
        while levels and len(root) <= 1:
            levels, root = levels - 1, root[0] if root else ()
        return Slots(height, levels, root)

    def above(self, start: int) -> Iterator[T]:
        """The values from place `start` up."""
        while start < self.height:
            yield from self._leaf(start // _WIDTH)[start % _WIDTH :]
            start += _WIDTH - start % _WIDTH

    def _leaf(self, number: int) -> Node:
        node = self.root
        for level in range(self.levels - 1, -1, -1):
            node = node[number // _WIDTH**level % _WIDTH]
        return node

    def _with_leaf(self, number: int, leaf: Node, height: int) -> Slots[T]:
        levels, root = self.levels, self.root
        if number and number == _WIDTH**levels:
            levels, root = levels + 1, (root,)
        return Slots(height, levels, _put(root, levels, number, leaf))


def _put(node: Node, levels: int, number: int, leaf: Node) -> Node:
    if not levels:
        return leaf
    i, rest = divmod(number, _WIDTH ** (levels - 1))
    child = node[i] if i < len(node) else ()
    return (*node[:i], _put(child, levels - 1, rest, leaf), *node[i + 1 :])


def _cut(node: Node, levels: int, height: int) -> Node:
    """Return the node cut to its lowest `height` values."""
    if not levels:
        return node[:height]
    whole, rest = divmod(height, _WIDTH**levels)
    return (*node[:whole], _cut(node[whole], levels - 1, rest)) if rest else node[:whole]


def merged(x: Slots[T], y: Slots[T], merge: Callable[[int, T, T], T]) -> Slots[T]:
    """`merge(place, a, b)` of the values of two of one height; x itself if it changes none. What
    both share is passed over: merge(a, a) is a."""

    def of(a: Node, b: Node, levels: int, place: int) -> Node:
        if a is b or (not levels and a == b):
            return a
        step, pairs = _WIDTH**levels, enumerate(zip(a, b, strict=True))
        if levels:
            parts: list[Any] = [of(p, q, levels - 1, place + i * step) for i, (p, q) in pairs]
        else:
            parts = [p if p is q else merge(place + i, p, q) for i, (p, q) in pairs]
        return a if all(map(operator.is_, a, parts)) else tuple(parts)

    return x._replace(root=of(x.root, y.root, x.levels, 0))


class Finder(Generic[T]):
    """Tells whether any value from some place up is such a one; what it has looked through without
    finding one, it knows again."""

    def __init__(self, matches: Callable[[T], bool]) -> None:
        self._matches = matches
        self._excluded: dict[int, Node] = {}

    def any_above(self, slots: Slots[T], start: int) -> bool:
        return self._any(slots.root, slots.levels, start)

    def _any(self, node: Node, levels: int, start: int) -> bool:
        if id(node) in self._excluded:
            return False
        if not levels:
            has_match = any(map(self._matches, node[max(start, 0) :]))
        else:
            step = _WIDTH**levels
            first = max(start, 0) // step
            has_match = any(
                self._any(child, levels - 1, start - i * step)
                for i, child in enumerate(node[first:], first)
            )
        if not has_match and start <= 0:
            self._excluded[id(node)] = node  # which keeps the number its own
        return has_match


class Stack(Generic[T]):
    """A stack in hand: shared values below, and on top a list of those that came since."""

    def __init__(self, below: Slots[T]) -> None:
        self._below = below
        self._near: list[T] = []

    def __len__(self) -> int:
        return self._below.height + len(self._near)

    def extend(self, values: Sequence[T]) -> None:
        self._near.extend(values)

    def pop(self, n: int) -> list[T]:
        """Take n values off the top."""
        if n > len(self._near):
            start = (len(self) - n) // _WIDTH * _WIDTH
            self._near[:0] = self._below.above(start)
            self._below = self._below.lowest(start)
        at = len(self._near) - n
        values = self._near[at:]
        del self._near[at:]
        return values

    def at(self, i: int) -> T:
        height = self._below.height
        return self._near[i - height] if i >= height else self._below.at(i)

    def put(self, i: int, value: T) -> None:
        height = self._below.height
        if i >= height:
            self._near[i - height] = value
        else:
            self._below = self._below.with_at(i, value)

    def shared(self) -> Slots[T]:
        """All values, to be kept."""
        if self._near:
            self._below, self._near = self._below.with_more(self._near), []
        return self._below
