"""Reads: what a look at a function has found, and whether another look would find the same.

A read is a path, a kind and a value: `name` of the `owner` led to the `value`. If all reads still
lead to the very same values, the whole look is the same. A `Checklist` tells that fast, kind by
kind; `changing` says in words which do not.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, repeat
from typing import Any, Final, NamedTuple

from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tree import holds_tensors
from mlvm.machines.native.extension import EXTENSION

MISSING: Final = object()
"""The value of a name that there is not."""


class Read(NamedTuple):
    """The kinds are those of `_FOLLOW` and `_VIEWS`, compared by identity, and these:

    equal: the name is a function; what it says of the owner, by value.
    number, tensor: in a dict; only the class counts.
    plain, unread: a Module's field; it counts once it holds tensors, a plain one if replaced.
    """

    kind: str
    owner: Any
    name: Any
    value: Any


def content_of_slot(owner: Any, slot: Any) -> Any:
    try:
        return slot.__get__(owner)
    except (AttributeError, ValueError):  # it has no value
        return MISSING


CELL: Final = types.CellType.__dict__["cell_contents"]
"""The slot of a variable's cell."""


_FOLLOW: Final[dict[str, Callable[[Sequence[Any], Sequence[Any]], Iterator[Any]]]] = {
    "item": lambda owners, names: map(dict.get, owners, names, repeat(MISSING)),
    "entry": lambda owners, names: map(types.MappingProxyType.get, owners, names, repeat(MISSING)),
    "attribute": lambda owners, names: map(getattr, owners, names),
    "class": lambda owners, _: map(type, owners),
    "fields": lambda owners, _: map(object.__getattribute__, owners, repeat("__dict__")),
    "slot": lambda owners, names: map(content_of_slot, owners, names),
}
"""What names lead to now: in a dict and in a class's dict, of an object of a class of Python's own;
an object's class, its dict, and what is in its slot, of which the name is the descriptor."""

_VIEWS: Final[dict[str, Callable[[Any], Any]]] = {
    "keys": lambda owner: dict.keys(owner) if isinstance(owner, dict) else owner.keys(),
    "values": dict.values,
    "items": lambda owner: owner,
}
"""What containers hold now: dicts, lists and sets; there is no name."""


class Checklist:
    """Reads in columns, kind by kind."""

    def __init__(self, reads: Iterable[Read]) -> None:
        rows: dict[str, list[Read]] = {}
        for read in reads:
            rows.setdefault(read.kind, []).append(read)

        def columns(kind: str) -> Any:
            return [[read[i] for read in rows.get(kind, ())] for i in (1, 2, 3)]

        self._followed = [(_FOLLOW[kind], *columns(kind)) for kind in _FOLLOW if kind in rows]
        held = [read for kind in _VIEWS for read in rows.get(kind, ())]
        self._containers = [_VIEWS[read.kind](read.owner) for read in held]
        self._lengths = [len(read.value) for read in held]
        self._held = list(chain.from_iterable(read.value for read in held))
        self._unread = [columns(kind) for kind in ("plain", "unread") if kind in rows]
        self._equal = rows.get("equal", ())
        self._native = None if EXTENSION is None else EXTENSION.Checklist(MISSING, _flat(rows))
        self._numbers, self._tensors = columns("number"), columns("tensor")

    def holds(self) -> bool:
        """Whether all reads lead where they led."""
        if self._native is not None and self._native.holds():
            return True
        try:
            return self._holds()
        except (AttributeError, ValueError, RuntimeError):  # gone, or changed by another thread
            return False

    def _holds(self) -> bool:
        for follow, owners, names, values in self._followed:
            if not all(map(operator.is_, follow(owners, names), values)):
                return False
        if list(map(len, self._containers)) != self._lengths:
            return False
        if not all(map(operator.is_, chain.from_iterable(self._containers), self._held)):
            return False
        for owners, names, values in self._unread:
            now = list(map(dict.get, owners, names, repeat(MISSING)))
            if not all(map(operator.is_, now, values)) and any(map(_counts, now)):
                return False
        return all(name(owner) == value for _, owner, name, value in self._equal)

    def values(self) -> tuple[list[Tensor], list[float]] | None:
        """The tensors and the numbers; None if they are of other classes than they were."""
        (*of_tensors, _), (*of_numbers, kinds) = self._tensors, self._numbers
        tensors: list[Any] = list(map(dict.get, *of_tensors))
        numbers: list[Any] = list(map(dict.get, *of_numbers))
        same = all(map(operator.is_, map(type, tensors), repeat(Tensor)))
        return (tensors, numbers) if same and list(map(type, numbers)) == kinds else None


def _flat(rows: dict[str, list[Read]]) -> tuple[Any, ...]:
    """The reads for the walk in C, which takes a plain field for an unread one."""
    return tuple(
        (("unread" if kind == "plain" else kind), read.owner, read.name, read.value)
        for kind in (*_FOLLOW, *_VIEWS, "plain", "unread", "equal")
        for read in rows.get(kind, ())
    )


def _counts(field: Any) -> bool:
    """Whether a field that was unread is now part of the tree."""
    return field is MISSING or holds_tensors(field)
