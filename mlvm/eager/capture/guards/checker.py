"""Guards on the reads of a traced function, and the check that all of them still hold.

A guard holds if `name` of the `owner` is still the identical `value`, read as its kind prescribes.
In: guards. Out: `holds`, and the present `values` of fields that are treated as arguments. If all
guards hold, a new walk over the function's state would have the same result. The check processes
one kind after the other, in C if the extension is built. `changing` describes as text the guards
that do not hold.

Callers: `GuardSet.values` and the fast path, at each call, without a lock.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, repeat
from typing import Any, Final, NamedTuple

from mlvm.arena.context import current
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tree import holds_tensors
from mlvm.machines.native.extension import EXTENSION

MISSING: Final = object()
"""Marks a name without a value."""


class Guard(NamedTuple):
    """One read of the trace: `name` of the `owner` was the `value`.

    The kinds in `_FOLLOW` and `_VIEWS` compare by identity. The other kinds are:

    Attributes:
        equal: the name is a function; the result for the owner is compared by value.
        number, tensor: an item of a dict; only its class is compared.
        plain, unread: a field of a Module. An unread field is compared once it contains tensors, a
            plain field once it is replaced.
    """

    kind: str
    owner: Any
    name: Any
    value: Any


def content_of_slot(owner: Any, slot: Any) -> Any:
    try:
        return slot.__get__(owner)
    except (AttributeError, ValueError):  # the name has no value
        return MISSING


CELL: Final = types.CellType.__dict__["cell_contents"]
"""Descriptor of the slot of a variable's cell."""


_FOLLOW: Final[dict[str, Callable[[Sequence[Any], Sequence[Any]], Iterator[Any]]]] = {
    "item": lambda owners, names: map(dict.get, owners, names, repeat(MISSING)),
    "entry": lambda owners, names: map(types.MappingProxyType.get, owners, names, repeat(MISSING)),
    "attribute": lambda owners, names: map(getattr, owners, names),
    "class": lambda owners, _: map(type, owners),
    "fields": lambda owners, _: map(object.__getattribute__, owners, repeat("__dict__")),
    "slot": lambda owners, names: map(content_of_slot, owners, names),
    "context": lambda _, names: map(getattr, repeat(current()), names),
}
"""Functions that read the present value of a name, by kind: items of dicts and of class dicts,
attributes of objects of builtin classes, the class, the dict and the slots of an object (the name
of a slot is the descriptor), and fields of the present context."""

_VIEWS: Final[dict[str, Callable[[Any], Any]]] = {
    "keys": lambda owner: dict.keys(owner) if isinstance(owner, dict) else owner.keys(),
    "values": dict.values,
    "items": lambda owner: owner,
}
"""Functions that read the present contents of a container: dict, list or set.

These guards have no name."""


class GuardChecker:
    """Checker of guards, stored as columns of owners, names and values for each kind.

    native: the check in C, None without the extension. It may return False where `holds` returns
    True.
    """

    def __init__(self, guards: Iterable[Guard]) -> None:
        by_kind: dict[str, list[Guard]] = {}
        for guard in guards:
            by_kind.setdefault(guard.kind, []).append(guard)

        def columns(kind: str) -> Any:
            return [[guard[i] for guard in by_kind.get(kind, ())] for i in (1, 2, 3)]

        self._followed = [(_FOLLOW[kind], *columns(kind)) for kind in _FOLLOW if kind in by_kind]
        containers = [guard for kind in _VIEWS for guard in by_kind.get(kind, ())]
        self._containers = [_VIEWS[guard.kind](guard.owner) for guard in containers]
        self._lengths = [len(guard.value) for guard in containers]
        self._items = list(chain.from_iterable(guard.value for guard in containers))
        self._unread = [columns(kind) for kind in ("plain", "unread") if kind in by_kind]
        self._equal = by_kind.get("equal", ())
        self.native = None if EXTENSION is None else EXTENSION.Checklist(MISSING, _flat(by_kind))
        self._numbers, self._tensors = columns("number"), columns("tensor")

    def holds(self) -> bool:
        """Return whether all guards hold."""
        if self.native is not None and self.native.holds():
            return True
        try:
            return self._holds()
        except (AttributeError, ValueError, RuntimeError):  # deleted, or changed by another thread
            return False

    def _holds(self) -> bool:
        for follow, owners, names, values in self._followed:
            if not all(map(operator.is_, follow(owners, names), values)):
                return False
        if list(map(len, self._containers)) != self._lengths:
            return False
        if not all(map(operator.is_, chain.from_iterable(self._containers), self._items)):
            return False
        for owners, names, values in self._unread:
            now = list(map(dict.get, owners, names, repeat(MISSING)))
            if not all(map(operator.is_, now, values)) and any(map(_counts, now)):
                return False
        return all(name(owner) == value for _, owner, name, value in self._equal)

    def numbers_at(self, numbers: Iterable[float]) -> list[Guard]:
        """Return guards on the numbers that are treated as arguments: the first of `numbers`."""
        owners, names, _ = self._numbers
        return [Guard("item", *read) for read in zip(owners, names, numbers, strict=False)]

    def values(self) -> tuple[list[Tensor], list[float]] | None:
        """Return the present tensors and numbers; None if a class has changed."""
        (*of_tensors, _), (*of_numbers, kinds) = self._tensors, self._numbers
        tensors: list[Any] = list(map(dict.get, *of_tensors))
        numbers: list[Any] = list(map(dict.get, *of_numbers))
        same = all(map(operator.is_, map(type, tensors), repeat(Tensor)))
        return (tensors, numbers) if same and list(map(type, numbers)) == kinds else None


def _flat(by_kind: dict[str, list[Guard]]) -> tuple[Any, ...]:
    """Return the guards for the C check, which treats plain fields like unread ones."""
    return tuple(
        (("unread" if kind == "plain" else kind), guard.owner, guard.name, guard.value)
        for kind in (*_FOLLOW, *_VIEWS, "plain", "unread", "equal")
        for guard in by_kind.get(kind, ())
    )


def _counts(field: Any) -> bool:
    """Return whether an unread field has become a part of the tree."""
    return field is MISSING or holds_tensors(field)
