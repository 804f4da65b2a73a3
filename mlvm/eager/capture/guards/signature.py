"""The signature of a call decides which of a captured function's programs it gets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from mlvm.arena.scratch_pad import ScratchPad
from mlvm.core.errors import CaptureError
from mlvm.core.types import TensorType
from mlvm.eager.capture.guards.layout import PLAIN
from mlvm.eager.capture.guards.look import NUMBERS, Field, Look, dict_of
from mlvm.eager.tensor.tensor import Tensor


class Arguments:
    """The `structure` of a call's arguments, with all plain values but numbers; and in order what
    it leaves out: `tensors`, `numbers` and, each once, other `objects`."""

    def __init__(self, arguments: Iterable[Any]) -> None:
        self.tensors: list[Tensor] = []
        self.numbers: list[float] = []
        self.objects: dict[int, tuple[int, Any]] = {}  # by id, with the ordinal
        self.structure = tuple([self._part(each) for each in arguments])

    def _part(self, value: Any, *, of_key: bool = False) -> Any:
        kind = type(value)
        if kind is Tensor or isinstance(value, Tensor):
            self.tensors.append(value)
            return Tensor
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
            return self._object(value)
        if kind in (list, tuple, dict):
            return kind, tuple(items)
        besides = dict_of(value), getattr(value, "default_factory", None)
        return kind, tuple(items), *[self._object(each) for each in besides if each]

    def _object(self, value: Any) -> int:
        return self.objects.setdefault(id(value), (len(self.objects), value))[0]


class Signature:
    """What a call's arguments are: their structure, the types of their tensors, and all else by
    value, or where that cannot be compared, by identity. What the function reaches is as in `look`;
    `values` are the present tensors and numbers in fields, which come before those of arguments.

    `tensors` are each once; `inputs` has the first over each memory, and its order numbers the
    inputs. An argument that the function also reaches by itself is no input: it is known by
    identity. Of `numbers` only the class counts; those in fields come first.

    Raises `CaptureError` for a tensor of a scratch pad.
    """

    def __init__(
        self, look: Look, values: tuple[list[Tensor], list[float]], arguments: Arguments
    ) -> None:
        self.in_fields, numbers = values
        self.look = look
        self.tensors: list[Tensor] = []
        self.inputs: list[Tensor] = []
        self.numbers = numbers + arguments.numbers
        self._ordinals: dict[int, int] = {}  # of tensors, and of memories
        self._roots: dict[int, int] = {}
        tensors = [self._tensor(x) for x in (*self.in_fields, *arguments.tensors)]
        self.key = (look.key, arguments.structure, *tensors)

    @property
    def fields(self) -> list[tuple[Field, Tensor]]:
        """The fields that count as arguments, with their tensors."""
        return list(zip(self.look.fields, self.in_fields, strict=True))

    def is_reached(self, x: Tensor) -> bool:
        """Whether the function reaches this very tensor by itself, and not only as an argument."""
        return id(x) in self.look.tensors

    def place_of(self, x: Tensor) -> tuple[TensorType, int, int, bool]:
        """A tensor's type, its ordinal, the place of its memory, and whether it is no view."""
        root = x if x.base is None else x.base
        return x.type, self._ordinals[id(x)], self._roots[id(root)], root is x

    def _tensor(self, x: Tensor) -> Any:
        if id(x) in self.look.tensors:
            return id(x)
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


TENSOR, NUMBER, PLAIN_VALUE, LIST, TUPLE, DICT = range(6)
"""The kinds of parts of a pattern, as `language/guards.c` has them."""

_CONTAINERS: Final[dict[type, int]] = {list: LIST, tuple: TUPLE, dict: DICT}


class _Parts:
    """The arguments of a call as a list of parts, one after the other."""

    def __init__(self, signature: Signature) -> None:
        self.parts: list[tuple[int, Any, int, int, bool]] = []
        self._signature = signature
        self._numbers = len(signature.look.numbers)

    def add(self, value: Any) -> bool:
        """Whether the value could be added."""
        kind = type(value)
        if kind is Tensor and not self._signature.is_reached(value):
            type_, ordinal, place, is_root = self._signature.place_of(value)
            self.parts.append((TENSOR, type_, ordinal, place, is_root))
        elif kind in NUMBERS:
            self.parts.append((NUMBER, None, 0, self._numbers, False))
            self._numbers += 1
        elif kind in _CONTAINERS:
            names = tuple(value) if kind is dict else None
            if not all(type(name) in (str, int) for name in names or ()):
                return False
            self.parts.append((_CONTAINERS[kind], names, len(value), 0, False))
            return all(map(self.add, value.values() if kind is dict else value))
        elif isinstance(value, (Tensor, *_CONTAINERS)):
            return False
        else:
            self.parts.append((PLAIN_VALUE, value, 0, 0, False))
        return True


def parts_of(signature: Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The arguments of a call with that signature as a flat list of parts, for a `Pattern` in C:
    kind, type or value, count or ordinal, place, whether it is no view. None where one of them is
    neither a tensor, a number, a plain value, an object known by identity, nor a plain container.
    """
    parts = _Parts(signature)
    return tuple(parts.parts) if parts.add(tuple(args)) and parts.add(dict(kwargs)) else None
