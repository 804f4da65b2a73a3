"""What a captured function binds to other values while it is recorded.

A captured function may rebind a Module's field that holds a tensor to another one of its type: a
replay does so too. A replay gives no other name a new tensor, so no other name may keep one that
the function has made.
"""

from __future__ import annotations

import types
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from mlvm.eager.capture.guards.look import Field, Look, dict_of
from mlvm.eager.capture.guards.read import CELL, MISSING, content_of_slot
from mlvm.eager.tensor.number import Number, plain
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tree import Node


class Surroundings:
    """The fields, variables and items that a look has met, with the values that they have now."""

    def __init__(self, look: Look) -> None:
        nodes = [each for each in look.held if issubclass(type(each), Node)]
        named = [(Field(node, name), x) for node in nodes for name, x in dict_of(node).items()]
        self._fields = [(field, x) for field, x in named if isinstance(x, Tensor)]
        self._places = [(place, text, contents(place)) for place, text in look.places.values()]
        self._lent: list[tuple[Field, Any, Any]] = []

    def lend(self, places: Sequence[Field], numbers: Sequence[Any]) -> None:
        """Put what stands for numbers into their fields, until these are put back."""
        pairs = [(place, x) for place, x in zip(places, numbers, strict=False) if type(x) is Number]
        before = {(id(each.owner), each.name): (each, each.value) for each, _ in pairs}
        for place, number in pairs:
            place.set(number)
        self._lent = [(place, was, place.value) for place, was in before.values()]

    def rebound(self) -> Iterator[tuple[Field, Tensor]]:
        """The fields that held a tensor and now hold another of its type, with that one."""
        for field, x in self._fields:
            now = field.value
            if now is not x and isinstance(now, Tensor) and now.type is x.type:
                yield field, now

    def put_back(self, *, failed: bool) -> None:
        """Give the rebound fields their old values, and others their numbers, unless the function
        has assigned new ones; if it has failed, all fields that held a tensor or a number."""
        for field, x in self._fields:
            now = field.value
            if failed or (isinstance(now, Tensor) and now.type is x.type):
                field.set(x)
        for field, was, lent in self._lent:
            if failed or field.value is lent:
                dict_of(field.owner)[field.name] = was
            elif field.name in dict_of(field.owner):
                dict_of(field.owner)[field.name] = plain(field.value)
        self._lent.clear()

    def find(self, kept: Collection[Tensor]) -> tuple[Tensor, str] | None:
        """One of these tensors and the name that keeps it, or None. All names that keep one get
        their old values."""
        ids = set(map(id, kept))
        found: tuple[Tensor, str] | None = None
        for place, text, before in self._places:
            keeping = {
                name: x
                for name, value in contents(place).items()
                if name not in before or before[name] is not value
                for x in _tensors(value)
                if id(x) in ids
            }
            for name, x in keeping.items():
                found = found or (x, text.format(name))
            if keeping:
                _put_back(place, before, keeping)
        return found


def contents(place: Any) -> dict[Any, Any]:
    """What the names in a dict, a list or a variable's cell lead to now."""
    if type(place) is types.CellType:
        value = content_of_slot(place, CELL)
        return {} if value is MISSING else {None: value}
    return dict.copy(place) if isinstance(place, dict) else dict(enumerate(place))


def _put_back(place: Any, before: dict[Any, Any], changed: Collection[Any]) -> None:
    if isinstance(place, list):
        place[:] = before.values()
    elif isinstance(place, dict):
        for name in changed:
            if name in before:
                place[name] = before[name]
            else:
                del place[name]
    elif before:
        place.cell_contents = before[None]
    else:
        del place.cell_contents


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors that a value is or holds, in containers or fields."""
    seen: set[int] = set()
    found = [value]
    while found:
        part = found.pop()
        if isinstance(part, Tensor):
            yield part
        elif id(part) not in seen:
            seen.add(id(part))
            if isinstance(part, (list, tuple, set, frozenset)):
                found += part
            else:
                found += (part if isinstance(part, dict) else dict_of(part)).values()
