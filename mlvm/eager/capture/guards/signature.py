"""The signature of a call: what its arguments are, and what the function reaches around them.

It decides which of a captured function's programs the call gets.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mlvm.arena.scratch_pad import ScratchPad
from mlvm.core.errors import CaptureError
from mlvm.eager.capture.guards.layout import PLAIN
from mlvm.eager.capture.guards.look import NUMBERS, Field, Look, dict_of
from mlvm.eager.tensor.tensor import Tensor


class Signature:
    """A call's arguments: their structure, the types of their tensors, and all else by value, or
    where that cannot be compared, by identity. What the function reaches is as in `look`, of which
    `values` are the present tensors and numbers in fields.

    `tensors` are each once; `inputs` has the first over each memory, and its order numbers the
    inputs. An argument that the function also reaches by itself is no input: it is known by
    identity. Of `numbers` only the class counts.

    Raises `CaptureError` for a tensor of a scratch pad.
    """

    def __init__(
        self, look: Look, values: tuple[list[Tensor], list[float]], arguments: Iterable[Any]
    ) -> None:
        self.look = look
        self.tensors: list[Tensor] = []
        self.inputs: list[Tensor] = []
        self.in_fields, self.numbers = values
        self._ordinals: dict[int, int] = {}  # of tensors, and of memories
        self._roots: dict[int, int] = {}
        self.key = (look.key, *map(self._part, self.in_fields), *map(self._part, arguments))

    @property
    def places(self) -> list[Field | None]:
        """The field that each of the numbers is in, and None for an argument."""
        known = self.look.numbers
        return [*known, *[None] * (len(self.numbers) - len(known))]

    @property
    def fields(self) -> list[tuple[Field, Tensor]]:
        """The fields that count as arguments, with their tensors."""
        return list(zip(self.look.fields, self.in_fields, strict=True))

    def is_reached(self, x: Tensor) -> bool:
        """Whether the function reaches this very tensor by itself, and not only as an argument."""
        return id(x) in self.look.tensors

    def _part(self, value: Any, *, of_key: bool = False) -> Any:
        kind = type(value)
        if kind is Tensor or isinstance(value, Tensor):
            return self._tensor(value)
        if kind in NUMBERS and not of_key:
            self.numbers.append(value)
            return kind
        if kind in PLAIN:
            return kind, repr(value) if kind is float or kind is complex else value
        if isinstance(value, (list, tuple)):
            items = [self._part(each, of_key=of_key) for each in value]
        elif isinstance(value, dict):
            items = [
                (self._part(name, of_key=True), self._part(each, of_key=of_key))
                for name, each in value.items()
            ]
        else:
            return self.look.ordinals[id(value)]
        return kind, tuple([self.look.ordinals[id(x)] for x in _besides(value)]), tuple(items)

    def _tensor(self, x: Tensor) -> Any:
        if id(x) in self.look.tensors:
            return Tensor, id(x)
        root = x if x.base is None else x.base
        if isinstance(root.arena, ScratchPad):
            raise CaptureError(
                f"a captured function was given a {x.type} of scratch pad "
                f"{x.arena.name!r}, which may lie over other tensors; give it a copy"
            )
        ordinal = self._ordinals.setdefault(id(x), len(self.tensors))
        if ordinal == len(self.tensors):
            self.tensors.append(x)
        place = self._roots.setdefault(id(root), len(self.inputs))
        if place == len(self.inputs):
            self.inputs.append(x)
        return x.type, ordinal, place, root is x


def objects_in(arguments: Iterable[Any]) -> list[Any]:
    """The objects among arguments, and in lists, tuples and dicts there, that are neither tensors
    nor plain values, each once."""
    found: dict[int, Any] = {}
    waiting = [each for each in arguments if type(each) is not Tensor]
    while waiting:
        value = waiting.pop()
        kind = type(value)
        if kind is Tensor or kind in PLAIN:
            continue
        if isinstance(value, (list, tuple, dict)):
            found.update({id(each): each for each in _besides(value)})
            waiting += value
            if isinstance(value, dict):
                waiting += value.values()
        elif not isinstance(value, Tensor):
            found[id(value)] = value
    return list(found.values())


def _besides(container: Any) -> list[Any]:
    """What a list, tuple or dict of a subclass holds besides its items."""
    if type(container) in (list, tuple, dict):
        return []
    more = dict_of(container), getattr(container, "default_factory", None)
    return [each for each in more if each]
