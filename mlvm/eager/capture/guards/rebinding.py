"""Detection of names that a captured function rebinds while it is traced.

The function may rebind a field of a Module from one tensor to another of the same type; a replay
repeats this. A replay rebinds no other name, so no other name may refer to a tensor of the trace.
"""

from __future__ import annotations

import copy
import dis
import functools
import gc
import operator
import types
from array import array
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from mlvm.core.errors import CaptureError
from mlvm.core.types import TensorType
from mlvm.eager.capture.guards.checker import CELL, MISSING, content_of_slot
from mlvm.eager.capture.guards.guard_set import CACHED, Field, GuardSet, dict_of
from mlvm.eager.capture.guards.readable import PLAIN, is_library, readable_state
from mlvm.eager.tensor.number import Number, plain
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.values import items_of, module_of
from mlvm.eager.tree import Node, like


class NamespaceSnapshot:
    """Snapshot of the guarded fields, variables and items, with the present values."""

    def __init__(self, guards: GuardSet) -> None:
        nodes = [each for each in guards.keepalive if issubclass(type(each), Node)]
        named = [(Field(node, name), x) for node in nodes for name, x in dict_of(node).items()]
        self._fields = [(field, x) for field, x in named if isinstance(x, Tensor)]
        self._places = [(place, text, contents(place)) for place, text in guards.places.values()]
        self._globals = {(id(x.owner), x.name) for x in guards.guards if x.kind == "item"}
        self._lent: list[tuple[Field, Any, Any]] = []
        self._cached = [each for each in guards.keepalive if type(each) is CACHED]
        self._contents: list[tuple[Any, Any]] = []
        self._slots: list[tuple[Any, Any, Any]] = []

    def note_contents(self, guards: GuardSet) -> None:
        """Let `undo` also restore the contents of sets, deques, arrays and slots."""
        for each in guards.keepalive:
            kind = type(each)
            if issubclass(kind, (set, deque)):
                self._contents.append((each, [*each]))
            elif issubclass(kind, (bytearray, array)) or (
                issubclass(kind, np.ndarray) and each.flags.writeable
            ):
                self._contents.append((each, copy.copy(each)))
            elif not (issubclass(kind, type) or is_library(module_of(kind))):
                self._slots += [
                    (each, slot, content_of_slot(each, slot))
                    for slot in slots_of(kind)
                    if type(slot) is types.MemberDescriptorType
                ]

    def lend(self, places: Sequence[Field], numbers: Sequence[Any]) -> None:
        """Replace numbers in fields by placeholders, until `restore`."""
        pairs = [(place, x) for place, x in zip(places, numbers, strict=False) if type(x) is Number]
        before = {(id(each.owner), each.name): (each, each.value) for each, _ in pairs}
        for place, number in pairs:
            place.set(number)
        self._lent = [(place, was, place.value) for place, was in before.values()]

    def rebound(self) -> Iterator[tuple[Field, Tensor]]:
        """Yield the fields that got a new tensor of the same type, each with the new tensor."""
        for field, x in self._fields:
            now = field.value
            if now is not x and isinstance(now, Tensor) and now.type is x.type:
                yield field, now

    def settle_numbers(self) -> None:
        """Replace placeholders by numbers in variables, fields and containers.

        The function has stored these placeholders there. Each value of such a number gets a
        separate program."""
        visited: set[int] = set()
        lent = {(id(dict_of(field.owner)), field.name): value for field, _, value in self._lent}
        for place, _, before in self._places:
            for name, value in contents(place).items():
                is_new = name not in before or before[name] is not value
                if is_new and lent.get((id(place), name), MISSING) is not value:
                    after = settled(value, visited)
                    if type(name) is Number:
                        del place[name]
                        _put(place, name.keep(), after)
                    elif after is not value:
                        _put(place, name, after)

    def restore(self, *, failed: bool) -> None:
        """Restore rebound fields, and numbers that the function has not replaced.

        If the function failed, restore all fields that contained a tensor or a number."""
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

    def undo(self) -> None:
        """Restore the items and names that the function has changed.

        For modules, only the names that the function reads."""
        for place, _, before in self._places:
            now = contents(place)
            changed = [
                name
                for name in {**before, **now}
                if now.get(name, MISSING) is not before.get(name, MISSING)
                and ("__builtins__" not in now or (id(place), name) in self._globals)
            ]
            if changed:
                _restore(place, before, changed)
        for value, content in self._contents:
            if not issubclass(type(value), (set, deque)):
                value[... if issubclass(type(value), np.ndarray) else slice(None)] = content
            elif [*map(id, value)] != [*map(id, content)]:
                value.clear()
                (value.update if issubclass(type(value), set) else value.extend)(content)
        for owner, slot, content in self._slots:
            if content_of_slot(owner, slot) is not content:
                slot.__delete__(owner) if content is MISSING else slot.__set__(owner, content)

    def require_no_id(self, placeholders: Iterable[Tensor]) -> None:
        """Raise `CaptureError` if the function has stored the id or the hash of a placeholder."""
        ids = {number for x in placeholders for number in (id(x), hash(x))}
        for place, text, before in self._places:
            for name, value in contents(place).items():
                is_new = name not in before or before[name] is not value
                if is_new and any(type(x) is int and x in ids for x in (name, value)):
                    where = text.format("id(x)" if name in ids else name)
                    raise CaptureError(
                        f"a captured function stores the id or hash of an argument in {where}; "
                        f"during the trace the argument is a different object. Store the tensor "
                        f"itself outside of the function"
                    )

    def find(self, escaped: Collection[Tensor]) -> tuple[Tensor, str, Any] | None:
        """Return the first of these tensors that a name still refers to, or None.

        Also return the name, and the value that it had before the trace.

        Restore all names that refer to one of them, and clear the caches that do."""
        ids = set(map(id, escaped))
        first: tuple[Tensor, str, Any] | None = None
        for place, text, before in self._places:
            keeping = {
                name: x
                for name, value in contents(place).items()
                if name not in before or before[name] is not value
                for x in _tensors(value)
                if id(x) in ids
            }
            for name, x in keeping.items():
                first = first or (x, text.format(name), before.get(name))
            if keeping:
                _restore(place, before, keeping)
        for fn in self._cached:
            for x in _tensors_of_cache(fn):
                if id(x) in ids:
                    fn.cache_clear()
                    name = getattr(fn, "__name__", "a function")
                    first = first or (x, f"the cache of {name!r}", None)
                    break
        return first


def contents(place: Any) -> dict[Any, Any]:
    """Return the present values of the names in a dict, a list or the cell of a variable."""
    if type(place) is types.CellType:
        value = content_of_slot(place, CELL)
        return {} if value is MISSING else {None: value}
    return dict.copy(place) if isinstance(place, dict) else dict(enumerate(place))


def _restore(place: Any, before: dict[Any, Any], changed: Collection[Any]) -> None:
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


def _put(place: Any, name: Any, value: Any) -> None:
    if type(place) is types.CellType:
        place.cell_contents = value
    else:
        (list if isinstance(place, list) else dict).__setitem__(place, name, value)


def settled(value: Any, visited: set[int]) -> Any:
    """Return the value with placeholders replaced by numbers.

    Lists, dicts, variables and fields are changed in place; tuples, sets and slices are replaced.
    """
    kind = type(value)
    if kind is Number:
        return value.keep()
    if kind in PLAIN or issubclass(type(value), Tensor) or id(value) in visited:
        return value
    visited.add(id(value))
    if kind is TensorType:
        is_open = value.is_open
        return TensorType(value.dtype, settled(value.shape, visited)) if is_open else value
    if kind is slice:
        parts = value.start, value.stop, value.step
        items = [settled(each, visited) for each in parts]
        return value if all(map(operator.is_, items, parts)) else slice(*items)
    if issubclass(kind, (tuple, set, frozenset)):
        items = [settled(each, visited) for each in value]
        if all(map(operator.is_, items, value)):
            return value
        return like(value, items) if issubclass(type(value), tuple) else kind(items)
    if kind is types.FunctionType:
        for cell in value.__closure__ or ():
            before = content_of_slot(cell, CELL)
            if before is not (after := settled(before, visited)):
                cell.cell_contents = after
        value.__defaults__ = value.__defaults__ and settled(value.__defaults__, visited)
        return value
    if kind in (types.MethodType, functools.partial):
        parts = (value.__self__,) if kind is types.MethodType else (value.func, *value.args)
        for each in parts:
            settled(each, visited)
        inner: Any = {} if kind is types.MethodType else value.keywords
    else:
        inner = value if issubclass(type(value), (dict, list, deque)) else dict_of(value)
    is_dict = issubclass(type(inner), dict)
    for name, each in list(items_of(inner) if is_dict else enumerate(inner)):
        after = settled(each, visited)
        if after is not each:
            inner[name] = after
    if is_dict and any(type(name) is Number for name in inner):
        items = [(settled(name, visited), each) for name, each in items_of(inner)]
        inner.clear()
        inner.update(items)
    return value


def _tensors_of_cache(fn: Any) -> Iterator[Tensor]:
    """Yield the tensors among the arguments and results that a `functools.cache` contains."""
    pending, visited = gc.get_referents(fn), {id(fn.__dict__)}
    while pending:
        part = pending.pop()
        if issubclass(type(part), Tensor):
            yield part
        elif id(part) not in visited and module_of(type(part)) in ("builtins", "functools"):
            visited.add(id(part))
            if not issubclass(type(part), (type, types.FunctionType, types.ModuleType, CACHED)):
                pending += gc.get_referents(part)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value, and in containers and fields of the value."""
    visited: set[int] = set()
    stack = [value]
    while stack:
        part = stack.pop()
        if issubclass(type(part), Tensor):
            yield part
        elif id(part) not in visited:
            visited.add(id(part))
            stack += parts_of(part)


def parts_of(value: Any) -> list[Any]:
    """Return the objects in a container or in the fields of an object."""
    kind = type(value)
    if issubclass(type(value), (list, tuple, set, frozenset, deque)):
        return [*value]
    if issubclass(type(value), dict):
        return [*value.values()]
    if kind is functools.partial:
        return [value.func, *value.args, *value.keywords.values()]
    if kind is types.MethodType:
        return [value.__self__]
    if issubclass(kind, (type, types.ModuleType, types.FunctionType)):
        return []
    return [*dict_of(value).values(), *[content_of_slot(value, slot) for slot in slots_of(kind)]]


def slots_of(kind: type) -> list[Any]:
    """Return the descriptors of the slots of a class."""
    return [vars(kind.__mro__[i])[name] for i, name in readable_state(kind).slots]


def variables_of(value: Any) -> list[Any]:
    """Return the contents of the variables of a function or class of the user.

    A variable that the function assigns is represented by its cell."""
    while type(value) is CACHED:
        value = value.__wrapped__
    kind = type(value)
    if kind is types.BuiltinFunctionType:
        return [] if type(value.__self__) is types.ModuleType else [value.__self__]
    if not issubclass(kind, (types.FunctionType, type)) or is_library(module_of(value)):
        return []
    if issubclass(kind, type):
        fields = [x for name, x in vars(value).items() if name[0] != "_"]
        return [x for x in fields if type(x) in (list, dict, set)]
    instructions = dis.get_instructions(value.__code__)
    assigned = {each.argval for each in instructions if each.opname == "STORE_DEREF"}
    cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
    return [
        *[cell if name in assigned else content_of_slot(cell, CELL) for name, cell in cells],
        *[*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()],
        *vars(value).values(),
    ]
