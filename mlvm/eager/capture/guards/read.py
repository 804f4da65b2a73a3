"""Reads: what a look at a function has found, and whether another look would find the same.

A read is a path, a kind and a value: from its owner, the name led to the value. If all reads still
lead to the very same values, the whole look is the same. `Checklist` tells that fast, kind by kind;
`explain` in `changing` says which do not.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, repeat
from typing import Any, Final, NamedTuple

from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tree import holds_tensors

MISSING: Final = object()
"""The value of a name that there is not."""


class Read(NamedTuple):
    """That `name` of the `owner` led to the `value`.

    Followed by identity, as `FOLLOW` says how: an `item` of a dict, an `entry` of a class's dict,
    an `attribute` of an object of a class of Python's own, a `slot` (the name is its descriptor), an
    object's `class` and its dict of `fields`. All of a container, by the identity of each: its
    `keys`, `values` or `items`. By value: what the name, a function, says of the owner is `equal`.
    Of a `number` in a dict its class counts, of a `tensor` that it is one; an `unread` one of a
    Module counts when it holds tensors, and so does a `plain` one when it has changed.
    """

    kind: str
    owner: Any
    name: Any
    value: Any


def _slot(owner: Any, slot: Any) -> Any:
    try:
        return slot.__get__(owner)
    except AttributeError:  # it has no value
        return MISSING


FOLLOW: Final[dict[str, Callable[[Sequence[Any], Sequence[Any]], Iterator[Any]]]] = {
    "item": lambda owners, names: map(dict.get, owners, names, repeat(MISSING)),
    "entry": lambda owners, names: map(types.MappingProxyType.get, owners, names, repeat(MISSING)),
    "attribute": lambda owners, names: map(getattr, owners, names),
    "class": lambda owners, _: map(type, owners),
    "fields": lambda owners, _: map(object.__getattribute__, owners, repeat("__dict__")),
    "slot": lambda owners, names: map(_slot, owners, names),
}
"""What names of owners lead to now."""

VIEWS: Final[dict[str, Callable[[Any], Iterable[Any]]]] = {
    "keys": lambda owner: dict.keys(owner) if isinstance(owner, dict) else owner.keys(),
    "values": dict.values,
    "items": lambda owner: owner,
}
"""What containers hold now."""


class Checklist:
    """Reads in columns, one set for each kind."""

    def __init__(self, reads: Iterable[Read]) -> None:
        rows: dict[str, list[Read]] = {}
        for read in reads:
            rows.setdefault(read.kind, []).append(read)

        def columns(kind: str) -> tuple[list[Any], list[Any], list[Any]]:
            of_kind = rows.get(kind, ())
            return [r.owner for r in of_kind], [r.name for r in of_kind], [r.value for r in of_kind]

        self._followed = [
            (follow, *columns(kind)) for kind, follow in FOLLOW.items() if kind in rows
        ]
        held = [read for kind in VIEWS for read in rows.get(kind, ())]
        self._containers = [VIEWS[read.kind](read.owner) for read in held]
        self._lengths = [len(read.value) for read in held]
        self._held = list(chain.from_iterable(read.value for read in held))
        self._unread = [columns(kind) for kind in ("plain", "unread") if kind in rows]
        self._equal = rows.get("equal", [])
        self._numbers = columns("number")
        self._tensors = columns("tensor")

    def holds(self) -> bool:
        """Whether all reads lead where they led."""
        try:
            return self._holds()
        except (AttributeError, ValueError, RuntimeError):  # gone, or changed by another thread
            return False

    def _holds(self) -> bool:
        for follow, owners, names, values in self._followed:
            if not all(map(operator.is_, follow(owners, names), values)):
                return False
        if list(map(len, self._containers)) != self._lengths:  # type: ignore[arg-type]
            return False
        if not all(map(operator.is_, chain.from_iterable(self._containers), self._held)):
            return False
        for owners, names, values in self._unread:
            now = list(map(dict.get, owners, names, repeat(MISSING)))
            if not all(map(operator.is_, now, values)) and any(map(_counts, now)):
                return False
        return all(name(owner) == value for _, owner, name, value in self._equal)

    def numbers(self) -> list[float] | None:
        """The numbers, or None if some are of another class than they were."""
        owners, names, kinds = self._numbers
        now: list[Any] = list(map(dict.get, owners, names))
        return now if all(map(operator.is_, map(type, now), kinds)) else None

    def tensors(self) -> list[Tensor] | None:
        """The tensors, or None if there is something else."""
        owners, names, _ = self._tensors
        now: list[Any] = list(map(dict.get, owners, names))
        return now if all(type(each) is Tensor for each in now) else None


def _counts(field: Any) -> bool:
    """Whether a field that was unread is now part of the tree."""
    return field is MISSING or holds_tensors(field)
