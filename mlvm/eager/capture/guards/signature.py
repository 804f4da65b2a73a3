"""Signature of a call, by which the cache finds the program for the call.

`Arguments` is the only description of a call's arguments. The key of a signature contains it, and
`parts_of` builds from it the pattern that C compares with calls.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Set
from itertools import count
from typing import Any, Final, TypeAlias

from mlvm.arena.scratch_pad import ScratchPad
from mlvm.core.errors import CaptureError, with_article
from mlvm.core.locks import new_lock
from mlvm.core.memo import Memo, bits_of
from mlvm.core.protocol import VMProtocol
from mlvm.core.types import TensorType
from mlvm.eager.capture.capture_limits import LIMITS
from mlvm.eager.capture.guards.checker import MISSING, Guard
from mlvm.eager.capture.guards.guard_set import CALLED, NUMBERS, Field, GuardSet, dict_of
from mlvm.eager.capture.guards.readable import PLAIN
from mlvm.eager.recording import debug
from mlvm.eager.tensor.autocast import autocast_dtype
from mlvm.eager.tensor.default import default_float
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.values import items_of, members_of
from mlvm.eager.tree import Node
from mlvm.parallel.membership import Membership, place_of, sharding_here


class Arguments:
    """Arguments of a call, decomposed.

    structure: the tree of arguments, with all plain values except numbers. tensors, numbers: the
    tensors and numbers in order. objects: all other objects by id, each once, with the ordinal.
    """

    def __init__(self, arguments: Iterable[Any]) -> None:
        self.tensors: list[Tensor] = []
        self.numbers: list[float] = []
        self.objects: dict[int, tuple[int, Any]] = {}  # by id, with the ordinal
        self.structure = tuple([self._part(each) for each in arguments])

    def _part(self, value: Any, *, of_key: bool = False) -> Any:
        kind = type(value)
        if kind is Tensor or issubclass(kind, Tensor):
            self.tensors.append(value)
            return Tensor
        if kind in NUMBERS and not of_key:
            self.numbers.append(value)
            return kind
        if kind in PLAIN:
            return kind, bits_of(value) if kind is float or kind is complex else value
        if issubclass(kind, (list, tuple)):
            items = [self._part(each, of_key=of_key) for each in members_of(value)]
        elif issubclass(kind, dict):
            items = [
                (self._part(name, of_key=True), self._part(each, of_key=of_key))
                for name, each in items_of(value)
            ]
        else:
            return self._object(value)
        if kind in (list, tuple, dict):
            return kind, tuple(items)
        factory = value.default_factory if issubclass(kind, defaultdict) else None
        besides = kind, dict_of(value), factory  # methods of the class may read any of these
        return kind, tuple(items), *[self._object(each) for each in besides if each]

    def _object(self, value: Any) -> int:
        return self.objects.setdefault(id(value), (len(self.objects), value))[0]


class Signature:
    """Signature of a call: all properties of arguments and state that select a program.

    It consists of the structure of the arguments, the types of tensors, and all other objects, by
    value where they can be compared, otherwise by identity.

    Attributes:
        guards: guards on all state that the function reads in addition to the arguments.
        arguments: the arguments, decomposed.
        in_fields: tensors of fields that are treated as arguments; they precede the tensors of
        arguments.
        tensors: each tensor once, except those that the function also reads from the environment.
        inputs: the first tensor in each memory region, in the order of the inputs of a program.
        numbers: Python numbers, those in fields first; the key contains only the class of a number.
        key: a hashable value; calls that can share a program have equal keys.

    Raises `CaptureError` for a tensor of a scratch pad.
    """

    def __init__(
        self, guards: GuardSet, values: tuple[list[Tensor], list[float]], arguments: Arguments
    ) -> None:
        self.in_fields, numbers = values
        self.guards, self.arguments = guards, arguments
        self.tensors: list[Tensor] = []
        self.inputs: list[Tensor] = []
        self.numbers = numbers + arguments.numbers
        self._ordinals: dict[int, int] = {}  # of tensors and memory regions
        self._roots: dict[int, int] = {}
        tensors = [self._tensor(x) for x in (*self.in_fields, *arguments.tensors)]
        self.key = (guards.key, arguments.structure, *tensors)

    @property
    def fields(self) -> list[tuple[Field, Tensor]]:
        """Fields that are treated as arguments, with the tensors."""
        return list(zip(self.guards.fields, self.in_fields, strict=True))

    def is_reached(self, x: object) -> bool:
        """Return whether the function reads this very tensor from the environment."""
        return id(x) in self.guards.tensors

    def place_of(self, x: Tensor) -> tuple[TensorType, int, int, bool]:
        """Return the type, the ordinal and the memory index of a tensor, and whether it is a root.

        A root is a tensor that is not a view."""
        root = x if x.base is None else x.base
        return x.type, self._ordinals[id(x)], self._roots[id(root)], root is x

    def _tensor(self, x: Tensor) -> Any:
        if id(x) in self.guards.tensors:
            return id(x)
        root = x if x.base is None else x.base
        if isinstance(root.arena, ScratchPad):
            raise CaptureError(
                f"an argument of a captured function is {with_article(x.type)} of scratch pad "
                f"{x.arena.name!r}, which may overlap other tensors; pass ml.copy(x)"
            )
        if self.guards.knows_id(x):
            raise CaptureError(
                f"a captured function looks up {with_article(x.type)} among its arguments by id or "
                f"hash, but during the trace the argument is a different object; use the tensor "
                f"itself as the key: d[x] instead of d[id(x)]"
            )
        ordinal = self._ordinals.setdefault(id(x), len(self.tensors))
        if ordinal == len(self.tensors):
            self.tensors.append(x)
        place = self._roots.setdefault(id(root), len(self.inputs))
        if place == len(self.inputs):
            self.inputs.append(x)
        return x.type, ordinal, place, root is x


def context_of(vm: VMProtocol) -> Any:
    """Return the global state of mlvm that programs depend on, in addition to guarded state."""
    dtypes = autocast_dtype(), default_float()
    return id(vm), debug.is_watched(vm), place_of(vm), sharding_here(), *dtypes


def context_guards(vm: VMProtocol) -> list[Guard]:
    """Return guards on the state of `context_of`, except for the VM itself."""
    membership = vm.attached(Membership)
    return [
        Guard("item", debug.watched, vm, debug.watched.get(vm, MISSING)),
        Guard("attribute", membership, "member", membership.member),
        Guard("equal", None, sharding_here, sharding_here(None)),
        Guard("context", None, "autocast_dtype", autocast_dtype()),
        Guard("context", None, "default_dtype", default_float()),
    ]


class Signatures:
    """Computes the signatures of a function's calls.

    It keeps a guard set for each tuple of objects among the arguments, and walks the state again
    after a guard has failed."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        self._lock = new_lock()
        self._names = CALLED
        self._rebound: dict[int, set[str]] = {}  # names of fields, by the id of the Module
        self._flattened: set[int] = set()  # ids of Modules of which a trace has read all children
        self._read_by_name: set[int] = set()  # ids of Modules of which traces have read some fields
        self._read_by_name_before: Set[int] = frozenset()
        # by the ids of objects in arguments
        self._guard_sets = Memo[tuple[int, ...], GuardSet](LIMITS.guard_sets, "capture: guards")

    def of(
        self, vm: VMProtocol, args: Any, kwargs: Any, *, reduced: bool = True
    ) -> tuple[Signature, Any]:
        """Return a call's signature, and the key of the programs in the cache.

        Unless it is `reduced`, it contains all children of Modules that it contained before the
        last trace."""
        arguments = Arguments((*args, *kwargs.values()))
        ids = tuple(arguments.objects)
        guards = self._guard_sets.entries.get(ids)
        values = guards.values() if guards is not None else None
        while guards is None or values is None:
            objects = [value for _, value in arguments.objects.values()]
            by_name = self._read_by_name if reduced else self._read_by_name_before
            guards = GuardSet(self._fn, self._names, self._rebound, objects, by_name)
            values = guards.values(checked=False)
            self._names = guards.names
            if guards.is_repeated or not reduced:
                continue
            with self._lock:
                self._guard_sets.pop(ids)
                self._guard_sets[ids] = guards
        signature = Signature(guards, values, arguments)
        return signature, (*context_of(vm), len(args), *kwargs, *signature.key)

    def count_as_arguments(self, fields: Iterable[Field]) -> None:
        """Treat fields that a trace has rebound as arguments from now on."""
        with self._lock:
            for field in fields:
                self._rebound.setdefault(id(field.owner), set()).add(field.name)
                self._guard_sets.clear()

    def note_flattened(self, guards: GuardSet, flattened: Set[int]) -> bool:
        """Record the Modules of which a trace has read all children.

        From now on, walks skip the fields of all other Modules that no code names. Return whether
        this applies to more Modules than before."""
        with self._lock:
            previous = self._read_by_name
            self._read_by_name_before = previous - flattened
            self._flattened |= flattened
            nodes = {id(each) for each in guards.keepalive if issubclass(type(each), Node)}
            self._read_by_name = (previous | nodes) - self._flattened
            if self._read_by_name != previous:
                self._guard_sets.clear()
            return self._read_by_name != self._read_by_name_before

    def keep_only(self, guards: GuardSet) -> None:
        """Forget the guard sets for other objects among arguments, which may have been deleted."""
        with self._lock:
            sets = self._guard_sets.entries
            for ids in [ids for ids, each in sets.items() if each is not guards]:
                self._guard_sets.pop(ids)

    def forget_modules(self) -> None:
        """Forget the facts recorded by the ids of Modules, because some Modules were deleted."""
        with self._lock:
            self._read_by_name.clear()

    def clear(self) -> None:
        with self._lock:
            self._rebound.clear()
            self._flattened.clear()
            self._read_by_name.clear()
            self._guard_sets.clear()


TENSOR, NUMBER, PLAIN_VALUE, LIST, TUPLE, DICT = range(6)
"""The kinds of parts of a pattern; must match `language/guards.c`."""

_CONTAINERS: Final[dict[Any, int]] = {list: LIST, tuple: TUPLE, dict: DICT}

_Part: TypeAlias = tuple[int, Any, int, int, bool]
"""Kind, type or value, ordinal or length, index of the memory, ownership: the layout that C parses.
"""


def parts_of(signature: Signature, nargs: int, names: Iterable[str]) -> tuple[_Part, ...] | None:
    """Return a call's arguments for a `Pattern` in C: positional ones, then those with these names.

    Return None if one is not an exact list, tuple or dict of tensors, numbers, plain values and
    objects."""
    arguments = signature.arguments
    structure, names = arguments.structure, tuple(names)
    tensors = iter(arguments.tensors)
    numbers = count(len(signature.guards.numbers))
    objects = [value for _, value in arguments.objects.values()]
    try:
        by_position = _parts((tuple, structure[:nargs]), signature, tensors, numbers, objects)
        parts = [*by_position, (DICT, names, len(names), 0, False)]
        for part in structure[nargs:]:
            parts += _parts(part, signature, tensors, numbers, objects)
    except _NoPattern:
        return None
    return tuple(parts)


class _NoPattern(Exception):
    """Raised for arguments that a C pattern cannot describe."""


def _parts(
    part: Any,
    signature: Signature,
    tensors: Iterator[Tensor],
    numbers: Iterator[int],
    objects: list[Any],
) -> Iterator[_Part]:
    """Yield a part of a structure and the parts inside it, depth first. Raises `_NoPattern`."""
    if part is Tensor:
        x = next(tensors)
        if type(x) is not Tensor or signature.is_reached(x) or signature.guards.addresses:
            raise _NoPattern
        yield TENSOR, *signature.place_of(x)
    elif part is int or part is float:
        yield NUMBER, None, 0, next(numbers), False
    elif type(part) is int:
        yield PLAIN_VALUE, objects[part], 0, 0, False
    elif part[0] in PLAIN:  # a complex number becomes text, which C never finds equal
        yield PLAIN_VALUE, part[1], 0, 0, False
    elif part[0] not in _CONTAINERS:  # a subclass of a container
        raise _NoPattern
    else:
        kind, items = part
        names = None
        if kind is dict:
            if not all(type(name) is tuple and name[0] in (str, int) for name, _ in items):
                raise _NoPattern
            names = tuple([name[1] for name, _ in items])
            items = [each for _, each in items]
        yield _CONTAINERS[kind], names, len(items), 0, False
        for each in items:
            yield from _parts(each, signature, tensors, numbers, objects)
