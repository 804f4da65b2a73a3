"""Fields, variables and items around a captured function, before it is called and after.

A captured function may rebind a Module's field that holds a tensor to another one of its type: a
replay does so too. A replay gives no other name a new tensor, so no other name may keep one that
the function has made.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple, cast

from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tree import Node


class Field(NamedTuple):
    """A field of a Module."""

    node: Node
    name: str

    @property
    def value(self) -> Any:
        return vars(self.node).get(self.name)

    def set(self, value: Any) -> None:
        vars(self.node)[self.name] = value


class Surroundings:
    """The fields, variables and items that a function reaches, and their present values."""

    def __init__(self, reached: Iterable[object]) -> None:
        distinct = {id(value): value for value in reached}
        nodes = [cast(Node, each) for each in distinct.values() if issubclass(type(each), Node)]
        self._fields = [
            (Field(node, name), value)
            for node in nodes
            for name, value in vars(node).items()
            if isinstance(value, Tensor)
        ]
        names = {id(each.owner): each for value in distinct.values() for each in names_of(value)}
        self._names = [(each, each.read()) for each in names.values()]

    def rebound(self) -> Iterator[tuple[Field, Tensor]]:
        """The fields that held a tensor and now hold another of its type, with that one."""
        for field, x in self._fields:
            now = field.value
            if now is not x and isinstance(now, Tensor) and now.type is x.type:
                yield field, now

    def put_back(self, *, failed: bool) -> None:
        """Give the rebound fields their old values; if the function has failed, also all other
        fields that held a tensor."""
        for field, x in self._fields:
            now = field.value
            if failed or (isinstance(now, Tensor) and now.type is x.type):
                field.set(x)

    def find(self, kept: Collection[Tensor]) -> tuple[Tensor, str] | None:
        """One of these tensors and the name that keeps it, or None. All names that keep one get
        their old values."""
        ids = set(map(id, kept))
        found: tuple[Tensor, str] | None = None
        for names, before in self._names:
            keeping = {
                key: x
                for key, value in names.read().items()
                if before.get(key, names) is not value
                for x in _tensors(value)
                if id(x) in ids
            }
            if keeping:
                key, x = next(iter(keeping.items()))
                found = found or (x, names.text.format(key))
                names.put_back(before, keeping)
        return found


class Names(NamedTuple):
    """The names of one owner, such as a dict. `read` gives their values, and
    `put_back(before, changed)` gives changed ones their old values. `text` says what a name is."""

    owner: object
    text: str
    read: Callable[[], dict[Any, Any]]
    put_back: Callable[[dict[Any, Any], Iterable[Any]], None]


def names_of(value: Any) -> Iterator[Names]:
    """The names by which a Python value refers to others."""
    kind = type(value)  # isinstance might call what is looked into
    if kind is types.FunctionType:
        yield _in_dict(value.__globals__, "global {!r}")
        yield from map(_of_cell, value.__code__.co_freevars, value.__closure__ or ())
    elif issubclass(kind, dict):
        yield _in_dict(value, "item {!r} of a dict")
    elif issubclass(kind, list):
        yield _of_list(value)
    elif issubclass(kind, types.ModuleType):
        yield _in_dict(vars(value), "global {!r} of " + value.__name__)
    elif fields := dict_of(value):
        word = "field" if issubclass(kind, Node) else "attribute"
        yield _in_dict(fields, f"{word} {{!r}} of {kind.__name__}")


def dict_of(value: Any) -> dict[str, Any]:
    """An object's fields, without calling anything of its own."""
    try:
        fields = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return fields if type(fields) is dict else {}


def _in_dict(named: dict[Any, Any], text: str) -> Names:
    def put_back(before: dict[Any, Any], changed: Iterable[Any]) -> None:
        for key in changed:
            if key in before:
                named[key] = before[key]
            else:
                del named[key]

    return Names(named, text, lambda: dict(named), put_back)


def _of_list(items: list[Any]) -> Names:
    def put_back(before: dict[Any, Any], changed: Iterable[Any]) -> None:
        items[:] = before.values()

    return Names(items, "item {} of a list", lambda: dict(enumerate(items)), put_back)


def _of_cell(name: str, cell: types.CellType) -> Names:
    def read() -> dict[Any, Any]:
        try:
            return {name: cell.cell_contents}
        except ValueError:  # a variable that has no value yet
            return {}

    def put_back(before: dict[Any, Any], changed: Iterable[Any]) -> None:
        if before:
            cell.cell_contents = before[name]
        else:
            del cell.cell_contents

    return Names(cell, "variable {!r}", read, put_back)


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
