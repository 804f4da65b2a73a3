"""What a look at everything that a function reaches has read, to tell in a short time whether
another look would read just the same.

A look follows references: the value of a name in a dict, the items of a list, the class of an
object. If each of them still leads to the very same object, the whole look is the same. So there is
a list for each way to follow one, and `holds` runs through these. What cannot be told so makes
the watch `blind`: then one looks again.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Mapping
from itertools import chain, repeat
from typing import Any, Final

from mlvm.eager.capture.guards.layout import PLAIN
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tree import holds_tensors

_MISSING: Final = object()
_SEQUENCES: Final = (list, set)
_of_object: Final = object.__getattribute__


class Watch:
    """References that were read, each with what it led to.

    `numbers` are Python numbers in fields, of which the class counts and not the value, and
    `tensors` fields with a tensor, which may be another one each time.
    """

    def __init__(self) -> None:
        self.blind = False
        self._items: list[tuple[dict[str, Any], str, Any]] = []
        self._of_classes: list[tuple[Mapping[str, Any], str, Any]] = []
        self._attributes: list[tuple[Any, str, Any]] = []
        self._names: list[tuple[Any, tuple[Any, ...]]] = []
        self._contents: list[tuple[Any, tuple[Any, ...]]] = []
        self._objects: list[tuple[Any, type]] = []
        self._dicts: list[tuple[Any, dict[str, Any]]] = []
        self._slots: list[tuple[Any, Any, Any]] = []
        self._unread: list[tuple[dict[str, Any], str]] = []
        self._unread_plain: list[tuple[dict[str, Any], str, Any]] = []
        self._arrays: list[tuple[Callable[[Any], Any], Any, Any]] = []
        self.numbers: list[tuple[dict[str, Any], str, type]] = []
        self.tensors: list[tuple[dict[str, Any], str]] = []

    # --- what is noted ---------------------------------------------------------------------

    def item(self, owner: Any, name: str, value: Any = _MISSING) -> None:
        """The value of a name in a dict, or that there is none."""
        (self._items if type(owner) is dict else self._of_classes).append((owner, name, value))

    def attribute(self, owner: Any, name: str, value: Any) -> None:
        """An attribute of an object of a class of Python's own."""
        self._attributes.append((owner, name, value))

    def names(self, owner: Any) -> None:
        """Which names a dict has, or a class."""
        self._names.append((owner, tuple(owner)))

    def content(self, value: Any, kind: type) -> None:
        """All that a container of that class, or a subclass of it, holds."""
        if kind is dict:
            self.names(dict.keys(value))
            self._contents.append((dict.values(value), tuple(dict.values(value))))
        elif kind in _SEQUENCES and type(value) is kind:
            self._contents.append((value, tuple(value)))
        elif kind not in (tuple, frozenset):
            self.blind = True

    def object(self, value: Any, fields: dict[str, Any] | None) -> None:
        """The class of an object, and the dict of its fields if it has one."""
        self._objects.append((value, type(value)))
        if fields is not None:
            self._dicts.append((value, fields))
            self.names(fields)

    def slot(self, slot: Any, value: Any, content: Any = _MISSING) -> None:
        """A field in a slot, or that it has no value."""
        self._slots.append((slot, value, content))

    def unread(self, owner: dict[str, Any], name: str, value: Any) -> None:
        """That a Module's field holds no tensors."""
        if type(value) in PLAIN:
            self._unread_plain.append((owner, name, value))
        else:
            self._unread.append((owner, name))

    def array(self, content_of: Callable[[Any], Any], value: Any, content: Any) -> None:
        """What an array holds, compared by value."""
        self._arrays.append((content_of, value, content))

    # --- whether it is still so ---------------------------------------------------------------

    def close(self) -> None:
        """Nothing more is noted: put what there is in the order in which it is compared."""
        both = self._names + self._contents
        self._containers = [owner for owner, _ in both]
        self._lengths = [len(held) for _, held in both]
        self._held = list(chain.from_iterable(held for _, held in both))
        self._plain = _columns(self._unread_plain, 3)
        self._numbers = _columns(self.numbers, 3)
        ways: list[tuple[Callable[..., Any], list[Any], tuple[Any, ...]]] = [
            (dict.get, self._items, (_MISSING,)),
            (types.MappingProxyType.get, self._of_classes, (_MISSING,)),
            (getattr, self._attributes, ()),
            (type, self._objects, ()),
            (_of_object, self._dicts, ("__dict__",)),
        ]
        self._checks = []
        for follow, rows, more in ways:
            if rows:
                *operands, values = _columns(rows, len(rows[0]))
                self._checks.append((follow, (*operands, *map(repeat, more)), values))

    def holds(self) -> bool:
        """Whether another look would find the same."""
        if self.blind:
            return False
        try:
            return self._holds()
        except (AttributeError, ValueError, RuntimeError):  # gone, or changed by another thread
            return False

    def _holds(self) -> bool:
        for follow, operands, values in self._checks:
            if not all(map(operator.is_, map(follow, *operands), values)):
                return False
        if list(map(len, self._containers)) != self._lengths:
            return False
        if not all(map(operator.is_, chain.from_iterable(self._containers), self._held)):
            return False
        return not (
            (self._unread_plain and self._reads_more_plain())
            or (
                self._unread and any(_counts(fields.get(x, _MISSING)) for fields, x in self._unread)
            )
            or (self._slots and any(_of_slot(slot, x) is not was for slot, x, was in self._slots))
            or (self._arrays and any(content(x) != was for content, x, was in self._arrays))
        )

    def _reads_more_plain(self) -> bool:
        """Whether a field that held a plain value now counts."""
        owners, names, values = self._plain
        now = list(map(dict.get, owners, names, repeat(_MISSING)))
        return not all(map(operator.is_, now, values)) and any(map(_counts, now))

    def numbers_now(self) -> list[float] | None:
        """The numbers, or None if some are of another class than they were."""
        owners, names, kinds = self._numbers
        if not owners:
            return []
        now: list[Any] = list(map(dict.get, owners, names))
        return now if all(map(operator.is_, map(type, now), kinds)) else None

    def tensors_now(self) -> list[Tensor] | None:
        """The tensors in fields, or None if there is something else."""
        if not self.tensors:
            return []
        now: list[Any] = [owner.get(name) for owner, name in self.tensors]
        return now if all(type(each) is Tensor for each in now) else None


def _columns(rows: list[Any], width: int) -> Any:
    return tuple(map(list, zip(*rows, strict=True))) or tuple([[] for _ in range(width)])


def _counts(field: Any) -> bool:
    """Whether a field that was unread is now part of the tree."""
    return field is _MISSING or holds_tensors(field)


def _of_slot(slot: Any, value: Any) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:
        return _MISSING
