"""Guards on all state that a captured function reaches: a flat list, and a key by value.

In: the function, and objects among the arguments. Out: a `GuardSet`.

A program is specialised to the state that the function reached while it was traced. The walk
therefore visits all of this state, as deeply as the reached code may read (`code`), and calls no
user code. `checker` determines fast whether a new walk would have the same result. `key` compares
two walks: by value where possible, otherwise by identity. An object with hidden state raises
`CaptureError`, unless it cannot change (`readable`).

Callers: `Signatures`, for the first call with given objects, and after a guard has failed. No lock
is held: two threads may walk simultaneously, and each builds a separate set.
"""

from __future__ import annotations

import abc
import copyreg
import functools
import importlib.util
import operator
import os
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from inspect import get_annotations
from typing import Any, Final, NamedTuple, NoReturn, TypeAlias, cast

import numpy as np

from mlvm.core.errors import CaptureError, with_article
from mlvm.core.memo import bits_of
from mlvm.eager.capture.guards import readable
from mlvm.eager.capture.guards.checker import CELL, MISSING, Guard, GuardChecker, content_of_slot
from mlvm.eager.capture.guards.code import (
    ALL,
    FORMATTERS,
    CodeNames,
    is_implicit,
    names_in,
    names_in_builtin,
    names_of_format,
)
from mlvm.eager.capture.guards.readable import ReadableState, is_library, readable_state
from mlvm.eager.capture.guards.settings import (
    assigned_variables,
    counters_of,
    reader_of,
    reads_environment,
    reads_value,
)
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.values import module_of
from mlvm.eager.tree import MARKS, holds_tensors

CALLED: Final = frozenset({"keys", "send", "throw", "close", "__getattr__"})
"""Methods that Python calls implicitly, in addition to the special methods of classes."""

ASKS_CLASS: Final = "__class__"
"""Name that is added for code which may read the class of an object, as `type` does."""

NUMBERS: Final = frozenset({int, float})
_ADDRESS: Final = 1 << 32
"""Ids and hashes of tensors are larger."""

_OUTSIDE: Final = "use it outside, and pass the result as an argument"
_GENERATORS: Final = (random.Random, np.random.Generator, np.random.RandomState)
_DRAWS: Final = f"draw with ml.random, whose keys change at each call, or {_OUTSIDE}"
_OF_EVERY_MODULE: Final = frozenset({"__builtins__", *vars(types.ModuleType("module"))})
_BUILTINS: Final = frozenset({"builtins", "io", "_io"})  # `open` belongs to io
CACHED: Final = functools._lru_cache_wrapper
_NAMED_FIELDS: Final = ReadableState("object", False, None, (), frozenset())
_OF_CLASSES: Final = frozenset({"__name__", "__qualname__"})
_OF_FUNCTIONS: Final = _OF_CLASSES | {"__annotations__", "__doc__", "__module__"}
"""Attributes that are not in the dict of a class or function; they are read if code names them."""
_READ_ANNOTATIONS: Final = frozenset({"get_type_hints", "get_annotations"})
_Visitor: TypeAlias = "Callable[[GuardSet, Any], None]"


class Field(NamedTuple):
    """A field of a Module or an optimizer; with `item`, one item of the tuple in that field."""

    owner: Any
    name: str
    item: int | None = None

    @property
    def value(self) -> Any:
        return dict_of(self.owner).get(self.name)

    def set(self, value: Any) -> None:
        if self.item is not None:
            value = (*self.value[: self.item], value, *self.value[self.item + 1 :])
        dict_of(self.owner)[self.name] = value


class _Visits:
    """Objects that a walk has visited or will visit, each with the object that led to it.

    current: the object that the walk visits now.
    starts: each visited object, after the number of parts before it.
    namespaces: the visited `types.SimpleNamespace` objects.
    """

    def __init__(self) -> None:
        self.current: Any = None
        self.starts: list[tuple[int, Any]] = []
        self.namespaces: list[Any] = []
        self._queue: deque[tuple[Any, _Visitor | None]] = deque()
        self._by_key: dict[int, tuple[int, Any, Any]] = {}  # ordinal, owner and name

    def __contains__(self, key: int) -> bool:
        return key in self._by_key

    def ordinal(self, key: int) -> int:
        """Return the number of a visit. It is negative, and ids are not."""
        return self._by_key[key][0]

    def enqueue(self, key: int, name: Any, value: Any, visitor: _Visitor | None) -> None:
        self._by_key[key] = ~len(self._by_key), self.current, name
        self._queue.append((value, visitor))

    def __iter__(self) -> Iterator[tuple[Any, _Visitor | None]]:
        """Remove each object from the queue and yield it, also objects that are added meanwhile."""
        while self._queue:
            value, visitor = self._queue.popleft()
            self.current = value
            yield value, visitor

    def path(self, value: Any) -> str:
        """Describe how the walk reached an object."""
        path = []
        while value is not None:
            visits = filter(None, map(self._by_key.get, (id(value), -id(value))))
            _, owner, name = max(visits, key=operator.itemgetter(0))  # the first visit
            path.append(_described(value, name))
            value = owner
        return " -> ".join(reversed(path))


class GuardSet:
    """Guards on the state that a function, and `objects` among the arguments, reach.

    The walk starts at the variables of the enclosing scopes, the defaults and the globals of the
    function, and continues from each of them, but not from library functions. Containers and arrays
    are compared by contents; objects, classes and modules by identity and by the fields in `names`.
    Children of a Module are also compared, unless the id of the Module is in `read_by_name`.

    Attributes:
        names: the fields that any reached code may read.
        guards: one guard per read, in the order of the walk.
        checker: checks the guards fast.
        key: a hashable value, equal for two walks with the same result.
        parts: the same as a tuple, in the order of the walk.
        tensors: the ids of reached tensors, which are compared by identity.
        reads_ids: whether any reached code calls `id` or `hash`.
        addresses: large ints in the state, which may be ids or hashes of tensors; without such
            calls, empty.
        fields: the Module fields in `rebound` (names by the id of the Module); they are treated as
            arguments.
        numbers: the fields of Modules and optimizers that contain a Python number; only its class
            is compared.
        keepalive: the objects that the key identifies by `id`.
        weak: references to objects that the function itself reaches only by a weak reference, by
            id.
        places: reached dicts, lists and cells by id, each with a text that describes a name in it.

    Raises `CaptureError` for an object that cannot be compared, with the path to it.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        names: frozenset[str] = CALLED,
        rebound: Mapping[int, set[str]] = types.MappingProxyType({}),
        objects: Sequence[Any] = (),
        read_by_name: Set[int] = frozenset(),
    ) -> None:
        self.names, before = names, None
        self._rebound, self._read_by_name = rebound, read_by_name
        while self.names != before:  # additional names allow further reads
            before = self.names
            self.guards: list[Guard] = []
            self.tensors: set[int] = set()
            self.addresses: set[int] = set()
            self.reads_ids = False
            self.fields: list[Field] = []
            self.numbers: list[Field] = []
            self.keepalive: list[Any] = []
            self.weak: dict[int, weakref.ref[Any]] = {}
            self.places: dict[int, tuple[Any, str]] = {}
            self._in_tuples: list[Field] = []
            self._needs_rescan = False
            self._parts: list[Any] = []
            self._parts_seen: set[object] = set()
            self._visits = _Visits()
            for value in (fn, *objects):
                self._visits.current = None
                self._add_part(None, value)
                self._walk()
        self.numbers += self._in_tuples
        if not self.reads_ids:
            self.addresses.clear()
        self.parts = tuple(self._parts)
        self.key = frozenset([self.parts])  # a frozenset computes the hash only once
        self.checker = GuardChecker(self.guards)

    def identities(self) -> list[Any]:
        """Return the objects that the key identifies by `id`; they must live as long as the key."""
        return [
            each
            for each in self.keepalive
            if type(each) not in readable.BY_VALUE and id(each) not in self.weak
        ]

    def reached(self) -> dict[int, Any]:
        """Return the objects that the function reaches, by id."""
        reached = {id(value): value for value in self.keepalive}
        return reached | {key: place for key, (place, _) in self.places.items()}

    def knows_id(self, x: Tensor) -> bool:
        """Return whether the state contains the id or the hash of the tensor as an int."""
        return bool(self.addresses) and not self.addresses.isdisjoint((id(x), hash(x)))

    @property
    def _reads_all(self) -> bool:
        return ALL in self.names

    @property
    def is_repeated(self) -> bool:
        """True if each call needs a new walk, because no guard can compare some of the state."""
        return self._needs_rescan

    @property
    def is_flat(self) -> bool:
        """True if `checker` decides, except for numbers, whether the walk is still valid."""
        return not (self._needs_rescan or self.fields)

    def values(self, *, checked: bool = True) -> tuple[list[Tensor], list[float]] | None:
        """Return the present tensors of `fields`, and the present `numbers`.

        Return None if a class differs or, with `checked`, if a new walk may have a different
        result."""
        values = None
        if not checked or (not self._needs_rescan and self.checker.holds()):
            values = self.checker.values()
        if values is not None:
            values[1].extend([x.value[x.item] for x in self._in_tuples])
        return values

    def numbers_check(self, numbers: Iterable[float]) -> Any:
        """Return a C check that `numbers` start with these values, valid while the guards hold."""
        rest = iter(numbers)
        guards = self.checker.numbers_at(rest)
        guards += [Guard("entry", x.value, x.item, next(rest)) for x in self._in_tuples]
        return GuardChecker(guards).native

    def _add_part(self, name: Any, value: Any) -> None:
        """Add the value of a name to the key.

        The contents are added when the walk visits the value. For a value that was visited before,
        the part is its ordinal."""
        kind, key = type(value), id(value)
        part: Any
        if kind in readable.PLAIN:
            part = kind, bits_of(value) if kind is float or kind is complex else value
            if kind is int and value > _ADDRESS:
                self.addresses.add(value)
        elif kind is Tensor:
            self.tensors.add(key)
            self.keepalive.append(value)
            part = key
        else:
            part = self._enqueue(key, name, value) or (kind if kind in readable.BY_VALUE else key)
        self._parts.append((name if type(name) is str else None, part))

    def _enqueue(
        self, key: int, name: Any, value: Any, visitor: _Visitor | None = None
    ) -> int | None:
        """Enqueue a value; return its ordinal instead if the key was visited before."""
        if key in self._visits:
            return self._visits.ordinal(key)
        self._visits.enqueue(key, name, value, visitor)
        self.keepalive.append(value)
        return None

    def _walk(self) -> None:
        for value, visitor in self._visits:
            kind = type(value)  # isinstance might run user code
            self._visits.starts.append((len(self._parts), value))
            self._parts.append(None)
            other: _Visitor = GuardSet._object
            if issubclass(kind, type):
                other = GuardSet._class
            elif issubclass(kind, types.ModuleType):
                other = GuardSet._lazy_module
            (visitor or _VISITORS.get(kind, other))(self, value)

    def _guard_only(self, kind: str, owner: Any, name: Any, value: Any) -> None:
        """Add a guard with a value that is not a part of the key."""
        self.guards.append(Guard(kind, owner, name, value))

    def _guard(self, kind: str, owner: Any, name: Any, value: Any) -> None:
        self.guards.append(Guard(kind, owner, name, value))
        if value is not MISSING:
            self._add_part(name, value)

    def _attributes(self, owner: Any, *names: str) -> None:
        for name in names:
            self._guard("attribute", owner, name, getattr(owner, name))

    def _may_read(self, named: CodeNames) -> None:
        self.names |= named.fields
        if named.unbounded:
            name = min(named.unbounded)
            remedy = f"name what it reads, or {_OUTSIDE}"
            self._refuse(f"{name}, which may read any variable", remedy)

    def _library(self, name: str) -> None:
        """Compare all fields from now on, if the library may read any field of the arguments."""
        if not readable.reads_special_only(name):
            self.names |= {ALL}

    def _refuse(self, what: str, remedy: str) -> NoReturn:
        """Raise `CaptureError` with the path from the function to the object."""
        path = self._visits.path(self._visits.current)
        raise CaptureError(f"a captured function reaches {what}: {path}; {remedy}")

    def path_of_difference(self, parts: Sequence[Any]) -> str | None:
        """Return the path to the first object that differs from another walk with these parts."""
        pairs = enumerate(zip(self.parts, parts, strict=False))
        first = next((i for i, (part, other) in pairs if part != other), None)
        if first is None and len(parts) == len(self.parts):
            return None
        first = min(len(parts), len(self.parts)) - 1 if first is None else first
        value = next(value for start, value in reversed(self._visits.starts) if start <= first)
        return self._visits.path(value)

    def _function(self, fn: types.FunctionType) -> None:
        """Visit a function: code, enclosing variables, defaults and globals."""
        code, variables = fn.__code__, fn.__globals__
        for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
            value = content_of_slot(cell, CELL)
            self.places[id(cell)] = cell, f"variable {name!r}"
            self._guard_only("attribute", cell, "cell_contents", value)
            self._add_part(name, None if value is MISSING else value)
        home = str(variables.get("__name__", ""))
        if is_library(home):
            if "__wrapped__" not in fn.__dict__:  # a wrapper reads the same as the wrapped function
                self._library(home)
            self._settings([fn])
            return
        self.keepalive.append(code)
        self._parts.append(id(code))
        self._guard_only("attribute", fn, "__code__", code)
        self._attributes(fn, "__defaults__", "__kwdefaults__")
        self.places[id(variables)] = variables, "global {!r}"
        named = names_in(code)
        self._may_read(named)
        for name in named.formats:
            cells = dict(zip(code.co_freevars, fn.__closure__ or (), strict=True))
            text = content_of_slot(cells[name], CELL) if name in cells else variables.get(name)
            self.names |= {*names_of_format(text)}
        for name in named.globals:
            self._global(fn, name)
        for level, name in named.imports:
            if level:
                package = variables.get("__package__") or home
                name = importlib.util.resolve_name("." * level + name, package)
            self._guard("item", sys.modules, name, sys.modules.get(name, MISSING))
        self._attributes(fn, *sorted(self.names & _OF_FUNCTIONS))
        self._guard_only("attribute", fn, "__dict__", fn.__dict__)
        self._fields(fn, fn.__dict__)

    def _global(self, fn: types.FunctionType, name: str) -> None:
        """Read a global or, if the function's module does not define the name, a builtin.

        Python's own builtins are guarded only by identity, and are not a part of the key."""
        value = fn.__globals__.get(name, MISSING)
        self._guard("item", fn.__globals__, name, value)
        if value is not MISSING:
            return
        builtins = _builtins_of(fn)
        self.places[id(builtins)] = builtins, "builtin {!r}"
        value = builtins.get(name, MISSING)
        self._note_ids(value)
        if _is_of_python(value):
            self._guard_only("item", builtins, name, value)
        else:
            self._guard("item", builtins, name, value)

    def _note_ids(self, fn: Any) -> None:
        self.reads_ids |= fn is id or fn is hash

    def _builtin(self, fn: types.BuiltinFunctionType | types.MethodWrapperType) -> None:
        """Visit a builtin function: the names that it may read, and the object of a method."""
        home = getattr(fn, "__module__", None) or "builtins"
        self._note_ids(fn)
        self._library(home)
        self._settings([fn])
        if home == "builtins":
            self._may_read(names_in_builtin(fn.__name__))
        if type(fn.__self__) is not types.ModuleType:
            self._attributes(fn, "__self__")
            if fn.__name__ in FORMATTERS:
                self.names |= {*names_of_format(fn.__self__)}

    def _cached(self, fn: Any) -> None:
        """Visit a function with a cache of results.

        The cached results may depend on values that have changed since, so the function must read
        only values that never change."""
        self._needs_rescan = True
        self._enqueue(-id(fn), None, fn, GuardSet._require_steady)
        self._attributes(fn, "__wrapped__")

    def _require_steady(self, fn: Any) -> None:
        while type(fn) is CACHED:
            fn = fn.__wrapped__
        for name, value in _variables(fn):
            if type(value) in (types.FunctionType, CACHED):
                self._enqueue(-id(value), name, value, GuardSet._require_steady)
            elif not _is_of_library(value):
                self._refuse(
                    f"{name!r} in a function with a cache, whose results may be of an older value",
                    "give it to that function as an argument",
                )

    def _mapping(self, value: Any, base: Any = dict) -> None:
        proxy = base is types.MappingProxyType
        if not proxy:
            self.places[id(value)] = value, "item {!r} of a dict"
        if base is dict:
            self._guard_only("keys", value, None, tuple(dict.keys(value)))
            self._guard_only("values", value, None, tuple(dict.values(value)))
        self._needs_rescan |= base is not dict
        for key, each in list(value.items() if proxy else base.items(value)):
            self._add_part(None, key)
            self._add_part(key, each)

    def _sequence(self, value: Any, base: Any = list) -> None:
        items = tuple(base.__iter__(value))
        if base is list:
            self.places[id(value)] = value, "item {} of a list"
        if type(value) in (list, set):
            self._guard_only("items", value, None, items)
        else:
            self._needs_rescan |= base not in (tuple, frozenset)
        for each in items:
            self._add_part(None, each)

    def _reference(self, reference: weakref.ref[Any]) -> None:
        self._needs_rescan = True
        value = reference()
        if value is not None and id(value) not in self._visits:
            self.weak[id(value)] = reference
        self._add_part(None, value)

    def _module(self, module: types.ModuleType) -> None:
        name, variables = module.__name__, vars(module)
        self._guard_only("class", module, None, type(module))
        if not is_library(name):
            self._fields(module, variables)
            return
        self._library(name)
        stateful, is_standard = readable.stateful_names(name), readable.is_standard(name)
        for each in filter(self.names.__contains__, stateful):
            self._guard("item", variables, each, variables.get(each, MISSING))
        named = sorted(self.names & variables.keys()) if is_standard or name == "numpy" else ()
        self._settings([variables[each] for each in named])
        for each in named if is_standard else ():
            self._variable(variables, each, variables[each])

    def _variable(self, variables: dict[str, Any], name: str, value: Any) -> None:
        """Guard a variable of a standard module, and the contents of a function of the user."""
        kind = type(value)
        home = value.__globals__.get("__name__") if kind is types.FunctionType else __name__
        if kind is types.ModuleType and readable.is_standard(value.__name__):
            self._add_part(None, value)
        elif kind in readable.PLAIN or not is_library(str(home)):
            self._guard("item", variables, name, value)
        else:
            self._guard_only("item", variables, name, value)
            self._parts.append(id(value))

    def _lazy_module(self, module: types.ModuleType) -> None:
        """Visit an instance of a subclass of module, for example a lazy module, and the subclass.

        The methods of the class determine how names are found."""
        self._module(module)
        _CLASS_OF_OBJECT(self, type(module))

    def _settings(self, values: Iterable[Any]) -> None:
        """Guard the settings of the process that functions or objects of libraries read."""
        for value in values:
            if issubclass(type(value), type):
                kinds = [
                    vars(each) for each in value.__mro__ if readable.is_standard(module_of(each))
                ]
                self._settings(each[name] for each in kinds for name in self.names & each.keys())
            if "environ" not in self._parts_seen and reads_environment(value):
                self._parts_seen.add("environ")
                self._guard("item", vars(os), "environ", os.environ)
            if getattr(value, "__name__", "") in _READ_ANNOTATIONS:
                self.names |= {"__annotations__"}
            for variables, name in assigned_variables(value):
                if (id(variables), name) not in self._parts_seen:
                    self._parts_seen.add((id(variables), name))
                    self._variable(variables, name, variables[name])
            reader = reader_of(value, self.names)
            token = reader, id(value) if reads_value(reader) else 0
            if reader is not None and token not in self._parts_seen:
                self._parts_seen.add(token)
                self._guard_only("equal", value, reader, setting := reader(value))
                self._parts.append(setting)

    def _class(self, kind: type, *, may_construct: bool = True) -> None:
        """Visit a class: the fields and the bases.

        A constructor is visited if reached code `may_construct` an object. A method that overrides
        a library's method is visited, because the library may call it."""
        if issubclass(type(kind), abc.ABCMeta):  # `register` changes the result of `isinstance`
            self._guard_only("equal", None, _registered, token := _registered(None))
            self._parts.append(token)
        if is_library(kind):
            self._library(module_of(kind))
            self._settings([kind])
            return
        if "_is_protocol" in vars(kind):  # `isinstance` may read the members of an object
            members = [{*vars(each), *get_annotations(each)} for each in kind.__mro__[:-1]]
            self.names |= {name for each in members for name in each if name[:2] != "__"}
        copyreg._slotnames(kind)  # type: ignore[attr-defined]  # adds a name, as the first copy does
        names, shown, fields = self.names, readable_state(kind), vars(kind)
        self._guard_only("class", kind, None, type(kind))
        self._guard_only("keys", fields, None, tuple(fields))
        self._guard_only("attribute", kind, "__bases__", kind.__bases__)
        self._attributes(kind, *sorted(names & _OF_CLASSES))
        every = self._reads_all or (shown.how == "object" and shown.open)
        may_construct = may_construct or every or "__init__" in names or "__class__" in names
        for name, field in list(fields.items()):
            implicit = name in shown.overrides or is_implicit(
                name, field, fields, may_construct=may_construct
            )
            if type(field) is types.MemberDescriptorType:  # the slot belongs to the object
                self._guard_only("entry", fields, name, field)
            elif every or name in names or implicit:
                self._guard("entry", fields, name, field)
        for each in (*kind.__bases__, type(kind)):
            if not is_library(each):
                self._base(each, may_construct=may_construct)

    def _base(self, kind: type, *, may_construct: bool = False) -> None:
        """Enqueue the class of an object or a class.

        Two objects of this class may be compared."""
        may_construct |= "__dataclass_params__" in vars(kind) and -id(kind) in self._visits
        key, visitor = -id(kind), _CLASS_OF_OBJECT
        if may_construct:
            key, visitor = id(kind), GuardSet._class
        self._parts.append(self._enqueue(key, None, kind, visitor) or id(kind))

    def _object(self, value: Any) -> None:
        """Visit an object: the fields, the class, and the contents defined by the base class."""
        kind = type(value)
        # Only the names of a dtype's fields can change.
        plain = kind is np.dtypes.VoidDType and value.fields is value.subdtype is None
        shown = readable_state(np.dtype if plain else kind)
        base = shown.base
        if shown.how == "hidden":
            remedy = _DRAWS if issubclass(kind, _GENERATORS) else _OUTSIDE
            self._refuse(f"an object of {kind.__name__}, whose state is hidden", remedy)
        if base in readable.MAPPINGS:
            self._mapping(value, base)
        elif base in readable.ARRAYS:
            self._guard("equal", value, readable.content_of, readable.content_of(value))
            self._settings([np.ndarray])  # code may convert the array to text
            if "flags" in self.names and issubclass(kind, np.ndarray):
                self._guard("equal", value, _flags_of, _flags_of(value))
            if issubclass(kind, np.ndarray) and (self._reads_all or "base" in self.names):
                self._add_part("base", value.base)
        elif base in readable.PLAIN:
            self._parts.append(cast(Any, base).__repr__(value))
        elif base is property:
            self._attributes(value, "fget", "fset", "fdel")
        elif base is not None:
            self._parts.append(value.maxlen if base is deque else None)
            self._sequence(value, base)
        if shown.how == "identical":
            self._identical(value)
        else:
            self._guard_only("class", value, None, kind)
            self._slots(value, shown)
            if kind.__dictoffset__ != 0:
                fields = dict_of(value)
                self._needs_rescan |= dict_of(value) is not fields
                self._guard_only("fields", value, None, fields)
                if kind is types.SimpleNamespace:  # code may compare two namespaces
                    self._visits.namespaces.append(value)
                    if len(self._visits.namespaces) > 1 or "__repr__" in self.names:
                        self.names |= {
                            name for each in self._visits.namespaces for name in vars(each)
                        }
                self._fields(value, fields, shown)
        if not is_library(kind):
            self._base(kind)

    def _identical(self, value: Any) -> None:
        """Visit an object without state, which may wrap a function or class, or read fields."""
        if isinstance(value, np.ufunc) and value.__name__.endswith(" (vectorized)"):
            self._refuse(f"{value.__name__}, a function that np.frompyfunc hides", _OUTSIDE)
        self._library(module_of(type(value)))
        self._settings([type(value), value])
        for counter in (
            counters_of(value, self.names) if readable.is_of_machine(type(value)) else ()
        ):
            self._guard_only("equal", value, counter, now := counter(value))
            self._parts.append(now)
        if type(value) is types.MethodDescriptorType and value.__name__ in FORMATTERS:
            self.names |= {ALL}
        fields = dict_of(value)
        for name in ("__wrapped__", "__origin__"):
            if name in fields:
                self._guard("item", fields, name, fields[name])

    def _methodcaller(self, value: Any) -> None:
        self._identical(value)
        self._add_part(None, value.__reduce__())  # includes the arguments of the method

    def _slots(self, value: Any, shown: ReadableState) -> None:
        for number, name in shown.slots:
            slot = vars(type(value).__mro__[number])[name]
            field = content_of_slot(value, slot)
            self._guard_only("slot", value, slot, field)
            # the names alone do not determine which fields are compared
            self._needs_rescan |= shown.how == "node"
            counts = shown.open or self._reads_all or name in self.names or holds_tensors(field)
            if counts and field is not MISSING:
                self._add_part(name, field)

    def _fields(
        self, owner: Any, fields: dict[str, Any], shown: ReadableState = _NAMED_FIELDS
    ) -> None:
        """Visit the fields that code names.

        For a Module, also visit the fields that are part of the tree. For an optimizer, visit all
        fields except the state dicts, which contain only tensors that the optimizer updates."""
        but, how = frozenset[str](), shown.how
        is_tree = how == "node" and id(owner) not in self._read_by_name
        rebound = self._rebound.get(id(owner), ()) if how == "node" else ()
        text = f"{'field' if how == 'node' else 'attribute'} {{!r}} of {type(owner).__name__}"
        if issubclass(type(owner), types.ModuleType):
            text, but = "global {!r} of " + owner.__name__, _OF_EVERY_MODULE
        self.places[id(fields)] = fields, text
        self._guard_only("keys", fields, None, tuple(fields))
        for name, field in list(fields.items()):
            kind = type(field)
            counts = name in self.names or name in shown.names
            if how == "optimizer":
                counts = counts or kind is not dict
            elif not counts:
                counts = self._reads_all or shown.open
                counts = counts or (is_tree and (name in MARKS or holds_tensors(field)))
            if name in but or (not counts and how == "object"):
                continue
            if name in rebound and kind is Tensor:
                self._parts.append(name)
                self._guard_only("tensor", fields, name, None)
                self.fields.append(Field(owner, name))
            elif not counts and how == "node" and not is_tree:
                continue
            elif not counts and how == "node":
                plain = kind in readable.PLAIN
                self._guard_only(
                    "plain" if plain else "unread", fields, name, field if plain else None
                )
            elif not counts:
                self._guard_only("item", fields, name, field)
            elif how == "object" or not _is_numeric(field):
                self._guard("item", fields, name, field)
            elif kind is tuple:
                self._parts.append((name, *map(type, field)))
                self._guard_only("item", fields, name, field)
                self._in_tuples += [Field(owner, name, i) for i in range(len(field))]
            else:
                self._parts.append((name, kind))
                self._guard_only("number", fields, name, kind)
                self.numbers.append(Field(owner, name))


def is_mutable(value: Any) -> bool:
    """Return whether an object may be changed in place, or contains an object that may."""
    kind = type(value)
    if kind in readable.PLAIN or kind in _VISITORS or issubclass(kind, type):
        return kind in (dict, list, tuple, functools.partial)
    shown = readable_state(kind)
    if shown.how == "identical" or (shown.base in readable.PLAIN and not dict_of(value)):
        return False
    return shown.base is not None or shown.how == "hidden" or bool(shown.slots or dict_of(value))


def dict_of(value: Any) -> dict[str, Any]:
    """Return the dict of an object's fields, without running user code."""
    try:
        fields = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return fields if type(fields) is dict else {}


def _builtins_of(fn: Any) -> dict[str, Any]:
    """Return the builtins of a function (missing in mypy's FunctionType)."""
    return fn.__builtins__  # type: ignore[no-any-return]


def _registered(_: object) -> tuple[object]:
    return (abc.get_cache_token(),)


def _flags_of(array: Any) -> str:
    return str(array.flags)


def _is_numeric(field: Any) -> bool:
    """Return whether a field contains a number, or a short tuple of numbers."""
    # items of a tuple of numbers
    items = field if type(field) is tuple and len(field) <= 8 else (field,)
    return NUMBERS.issuperset(map(type, items))


def _is_of_python(value: Any) -> bool:
    """Return whether the value is a function or class of Python's `builtins`."""
    kind = type(value)
    return kind in (types.BuiltinFunctionType, type) and module_of(value) in _BUILTINS


def _is_of_library(value: Any) -> bool:
    """Return whether the value is a module, class or function of a library."""
    kind = type(value)
    if issubclass(kind, (types.ModuleType, type)):
        return is_library(value if issubclass(kind, type) else value.__name__)
    bound = kind is types.BuiltinFunctionType and type(value.__self__) is not types.ModuleType
    return callable(value) and readable_state(kind).how == "identical" and not bound


def _variables(fn: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the variables that a function reads, unless it belongs to a library."""
    if not is_library(str(fn.__globals__.get("__name__", ""))):
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            yield name, content_of_slot(cell, CELL)
        for name in names_in(fn.__code__).globals:
            for names in (fn.__globals__, _builtins_of(fn)):
                if name in names:
                    yield name, names[name]
                    break


def _described(value: Any, name: Any) -> str:
    """Describe a value on the path to a rejected object, by name or kind."""
    kind = type(value)
    if kind is types.FunctionType:
        file, line = value.__code__.co_filename, value.__code__.co_firstlineno
        return f"{value.__qualname__} ({os.path.basename(file)}:{line})"
    if type(name) is str and name[:2] != "__":
        return repr(name)
    return str(value.__qualname__) if issubclass(kind, type) else with_article(kind.__qualname__)


def _attributes(*names: str) -> _Visitor:
    return lambda guards, value: guards._attributes(value, *names)


_CLASS_OF_OBJECT: Final[_Visitor] = functools.partial(GuardSet._class, may_construct=False)
_BOUNDS: Final = _attributes("start", "stop", "step")
_VISITORS: Final[dict[type, _Visitor]] = {
    dict: GuardSet._mapping,
    list: GuardSet._sequence,
    tuple: functools.partial(GuardSet._sequence, base=tuple),
    slice: _BOUNDS,
    range: _BOUNDS,
    types.FunctionType: GuardSet._function,
    types.MethodType: _attributes("__self__", "__func__"),
    types.BuiltinFunctionType: GuardSet._builtin,
    types.MethodWrapperType: GuardSet._builtin,
    super: _attributes("__self__"),
    types.ModuleType: GuardSet._module,
    functools.partial: _attributes("func", "args", "keywords"),
    CACHED: GuardSet._cached,
    operator.methodcaller: GuardSet._methodcaller,
    staticmethod: _attributes("__func__"),
    classmethod: _attributes("__func__"),
    weakref.ReferenceType: GuardSet._reference,
}
