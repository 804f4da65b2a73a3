"""A look at all that a captured function reaches: a flat list of reads, and a key of them by value.

A program is for what the function found around it when it was recorded. So all that the function
reaches is looked into, as deep as its code may read. `reads` tell fast whether another look would
find the same (`Checklist`). `key` compares what two looks have found: by value where that is
possible, or else by identity. An object that does not show all of its state is refused, unless it
cannot change (`layout`). Only what no reached code may read is left out (`code`).
"""

from __future__ import annotations

import abc
import functools
import importlib.util
import operator
import os
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, NoReturn, TypeAlias, cast

import numpy as np

from mlvm.core.errors import CaptureError
from mlvm.eager.capture.guards import layout
from mlvm.eager.capture.guards.code import ALL, Named, is_implicit, named_by, named_by_builtin
from mlvm.eager.capture.guards.layout import Layout, is_library, layout_of
from mlvm.eager.capture.guards.read import CELL, MISSING, Checklist, Read, content_of_slot
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tree import MARKS, holds_tensors

CALLED: Final = frozenset({"keys", "send", "throw", "close", "__getattr__"})
"""What Python calls without naming it, besides special methods of classes."""

ASKS_CLASS: Final = "__class__"
"""The name that code reads which may ask for an object's class, as `type` does."""

NUMBERS: Final = frozenset({int, float})
_FEW: Final = 8
_OUTSIDE: Final = "use it outside, and give what comes of it as an argument"
_GENERATORS: Final = (random.Random, np.random.Generator, np.random.RandomState)
_DRAWS: Final = f"draw with ml.random, whose keys go on, or {_OUTSIDE}"
_OF_EVERY_MODULE: Final = frozenset({"__builtins__", *vars(types.ModuleType("module"))})
_BUILTINS: Final = frozenset({"builtins", "io", "_io"})  # `open` is of io
_CACHED: Final = functools._lru_cache_wrapper
_Way: TypeAlias = "Callable[[Look, Any], None]"


class Field(NamedTuple):
    """A field of a Module or an optimizer; with `item`, that item of the tuple in it."""

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


class Look:
    """What a function reaches, and then what `objects` among its arguments do: the variables around
    it, its defaults and globals, and so on from each of them, but not from functions of libraries.

    Containers and arrays are known by what they hold; objects, classes and modules by identity and
    by the fields in `names`, which all reached code may read; `tensors`, a set of ids, by identity.
    But a Module's field that is in `rebound`, which has names by the id of the Module, counts as an
    argument: `fields` are those. Of Python's numbers in fields of Modules and optimizers only the
    class counts; `numbers` says where they are.

    `held` keeps alive what the key knows by identity. `places` are the dicts, lists and cells among
    it, by id, each with a text that says what a name there is.

    Raises `CaptureError` for what cannot be compared; it says what that is, and where.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        names: frozenset[str] = CALLED,
        rebound: Mapping[int, set[str]] = types.MappingProxyType({}),
        objects: Sequence[Any] = (),
    ) -> None:
        self.names, before = names, None
        self._rebound = rebound
        while self.names != before:  # more names let more be read
            before = self.names
            self._every = ALL in before
            self.reads: list[Read] = []
            self.tensors: set[int] = set()
            self.fields: list[Field] = []
            self.numbers: list[Field] = []
            self.held: list[Any] = []
            self.places: dict[int, tuple[Any, str]] = {}
            self._in_tuples: list[Field] = []
            self._blind = False
            self._parts: list[Any] = []
            self._found: dict[int, tuple[int, Any, Any]] = {}  # by id: ordinal, where, by what name
            self._queue: deque[tuple[Any, _Way | None]] = deque()
            self._namespaces: list[Any] = []
            for value in (fn, *objects):
                self._turn: Any = None
                self._count(None, value)
                self._walk()
        self.numbers += self._in_tuples
        self.key = frozenset([tuple(self._parts)])  # which computes its hash once
        self.checklist = Checklist(self.reads)

    @property
    def is_flat(self) -> bool:
        """Whether `checklist` tells all of another look, but for numbers."""
        return not (self._blind or self.fields)

    def values(self, *, checked: bool = True) -> tuple[list[Tensor], list[float]] | None:
        """The present tensors of `fields`, and `numbers`. None if there is something else, or if
        it is `checked` and another look would, or might, find something else."""
        found = None
        if not checked or (not self._blind and self.checklist.holds()):
            found = self.checklist.values()
        if found is not None:
            found[1].extend([x.value[x.item] for x in self._in_tuples])
        return found

    def _count(self, name: Any, value: Any) -> None:
        """Make the value that the name leads to part of the key. What it holds follows when its
        turn comes; a value that is met again is known by its ordinal."""
        kind, key = type(value), id(value)
        part: Any
        if kind in layout.PLAIN:
            part = kind, repr(value) if kind is float or kind is complex else value
        elif kind is Tensor:
            self.tensors.add(key)
            self.held.append(value)
            part = key
        else:
            part = self._meet(key, name, value) or (kind if kind in layout.BY_VALUE else key)
        self._parts.append((name if type(name) is str else None, part))

    def _meet(self, key: int, name: Any, value: Any, way: _Way | None = None) -> int | None:
        """The ordinal of what was met before under that key; otherwise it gets its turn. Ordinals
        are negative, which ids are not."""
        if key in self._found:
            return self._found[key][0]
        self._found[key] = ~len(self._found), self._turn, name
        self.held.append(value)
        self._queue.append((value, way))
        return None

    def _walk(self) -> None:
        while self._queue:
            value, way = self._queue.popleft()
            kind = type(value)  # isinstance might call what is looked into
            self._turn = value
            self._parts.append(None)
            other = Look._class if issubclass(kind, type) else Look._object
            (way or _WAYS.get(kind, other))(self, value)

    def _note(self, kind: str, owner: Any, name: Any, value: Any) -> None:
        """A read whose value is no part of the key."""
        self.reads.append(Read(kind, owner, name, value))

    def _read(self, kind: str, owner: Any, name: Any, value: Any) -> None:
        self.reads.append(Read(kind, owner, name, value))
        if value is not MISSING:
            self._count(name, value)

    def _attributes(self, owner: Any, *names: str) -> None:
        for name in names:
            self._read("attribute", owner, name, getattr(owner, name))

    def _may_read(self, named: Named) -> None:
        self.names |= named.fields
        if named.unbounded:
            name = min(named.unbounded)
            remedy = f"name what it reads, or {_OUTSIDE}"
            self._refuse(f"{name}, which may read any variable", remedy)

    def _library(self, name: str) -> None:
        """Make all fields count, if the library may read any field of what it is given."""
        if not layout.reads_special_only(name):
            self.names |= {ALL}

    def _refuse(self, what: str, remedy: str) -> NoReturn:
        """Raise `CaptureError`, which says how the function reaches it."""
        way, value = [], self._turn
        while value is not None:
            met = filter(None, map(self._found.get, (id(value), -id(value))))
            _, owner, name = max(met, key=operator.itemgetter(0))  # as it was met first
            way.append(_described(value, name))
            value = owner
        raise CaptureError(f"a captured function reaches {what}, by {' of '.join(way)}: {remedy}")

    def _function(self, fn: types.FunctionType) -> None:
        """Its code, the variables around it, its defaults and its globals."""
        code, variables = fn.__code__, fn.__globals__
        for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
            value = content_of_slot(cell, CELL)
            self.places[id(cell)] = cell, f"variable {name!r}"
            self._note("attribute", cell, "cell_contents", value)
            self._count(name, None if value is MISSING else value)
        home = str(variables.get("__name__", ""))
        if is_library(home):
            if "__wrapped__" not in fn.__dict__:  # or it reads what the wrapped one does
                self._library(home)
            return
        self.held.append(code)
        self._parts.append(id(code))
        self._note("attribute", fn, "__code__", code)
        self._attributes(fn, "__defaults__", "__kwdefaults__")
        self.places[id(variables)] = variables, "global {!r}"
        named = named_by(code)
        self._may_read(named)
        for name in named.globals:
            self._global(fn, name)
        for level, name in named.imports:
            if level:
                package = variables.get("__package__") or home
                name = importlib.util.resolve_name("." * level + name, package)
            self._read("item", sys.modules, name, sys.modules.get(name, MISSING))
        self._note("attribute", fn, "__dict__", fn.__dict__)
        self._fields(fn, fn.__dict__)

    def _global(self, fn: types.FunctionType, name: str) -> None:
        """Read a global or, where the function's module has none of that name, a builtin. Of
        Python's own builtins only the identity counts, which is no part of the key."""
        value = fn.__globals__.get(name, MISSING)
        self._read("item", fn.__globals__, name, value)
        if value is not MISSING:
            return
        value = fn.__builtins__.get(name, MISSING)
        if _is_of_python(value):
            self._note("item", fn.__builtins__, name, value)
        else:
            self.places[id(fn.__builtins__)] = fn.__builtins__, "builtin {!r}"
            self._read("item", fn.__builtins__, name, value)

    def _builtin(self, fn: types.BuiltinFunctionType | types.MethodWrapperType) -> None:
        """What it may read, and the object that it is a method of, if it is one's."""
        home = getattr(fn, "__module__", None) or "builtins"
        self._library(home)
        if home == "builtins":
            self._may_read(named_by_builtin(fn.__name__))
        if type(fn.__self__) is not types.ModuleType:
            self._attributes(fn, "__self__")

    def _cached(self, fn: Any) -> None:
        """A function with a cache of results. These may come from values that have changed since,
        so the function may read nothing that changes."""
        self._blind = True
        self._meet(-id(fn), None, fn, Look._require_steady)
        self._attributes(fn, "__wrapped__")

    def _require_steady(self, fn: Any) -> None:
        while type(fn) is _CACHED:
            fn = fn.__wrapped__
        for name, value in _variables(fn):
            if type(value) in (types.FunctionType, _CACHED):
                self._meet(-id(value), name, value, Look._require_steady)
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
            self._note("keys", value, None, tuple(dict.keys(value)))
            self._note("values", value, None, tuple(dict.values(value)))
        self._blind |= base is not dict
        for key, each in list(value.items() if proxy else base.items(value)):
            self._count(None, key)
            self._count(key, each)

    def _sequence(self, value: Any, base: Any = list) -> None:
        items = tuple(base.__iter__(value))
        if base is list:
            self.places[id(value)] = value, "item {} of a list"
        if type(value) in (list, set):
            self._note("items", value, None, items)
        else:
            self._blind |= base not in (tuple, frozenset)
        for each in items:
            self._count(None, each)

    def _reference(self, reference: weakref.ref[Any]) -> None:
        self._blind = True
        self._count(None, reference())

    def _module(self, module: types.ModuleType) -> None:
        name, variables = module.__name__, vars(module)
        self._note("class", module, None, type(module))
        if not is_library(name):
            self._fields(module, variables)
            return
        self._library(name)
        for each in filter(self.names.__contains__, layout.stateful_names(name)):
            self._read("item", variables, each, variables.get(each, MISSING))

    def _class(self, kind: type, *, made: bool = True) -> None:
        """Its fields and its bases. A constructor counts if an object may be `made`. A method that
        overrides a library's counts, as the library may call it."""
        if issubclass(type(kind), abc.ABCMeta):  # `register` changes what is an instance of it
            self._note("equal", None, _registered, token := _registered(None))
            self._parts.append(token)
        if is_library(kind.__module__):
            self._library(kind.__module__)
            return
        names, shown, fields = self.names, layout_of(kind), vars(kind)
        self._note("class", kind, None, type(kind))
        self._note("keys", fields, None, tuple(fields))
        self._note("attribute", kind, "__bases__", kind.__bases__)
        every = self._every or (shown.how == "object" and shown.open)
        made = made or every or "__init__" in names or "__class__" in names
        for name, field in list(fields.items()):
            implicit = is_implicit(name, field, fields, made=made) or name in shown.overrides
            if type(field) is types.MemberDescriptorType:  # a slot, which is the object's
                self._note("entry", fields, name, field)
            elif every or name in names or implicit:
                self._read("entry", fields, name, field)
        for each in (*kind.__bases__, type(kind)):
            if not is_library(each.__module__):
                self._base(each, made=made)

    def _base(self, kind: type, *, made: bool = False) -> None:
        """The class of an object, or of a class. There may be two objects of it to compare."""
        made = made or ("__dataclass_params__" in vars(kind) and -id(kind) in self._found)
        key, way = (id(kind), Look._class) if made else (-id(kind), _CLASS_OF_OBJECT)
        self._parts.append(self._meet(key, None, kind, way) or id(kind))

    def _object(self, value: Any) -> None:
        """What it holds as an object of its base, its fields, and its class."""
        kind = type(value)
        # Of a dtype, only the names of fields can change.
        plain = kind is np.dtypes.VoidDType and value.fields is value.subdtype is None
        shown = layout_of(np.dtype if plain else kind)
        base = shown.base
        if shown.how == "hidden":
            remedy = _DRAWS if issubclass(kind, _GENERATORS) else _OUTSIDE
            self._refuse(f"an object of {kind.__name__}, whose state is hidden", remedy)
        if base in layout.MAPPINGS:
            self._mapping(value, base)
        elif base in layout.ARRAYS:
            self._read("equal", value, layout.content_of, layout.content_of(value))
            if issubclass(kind, np.ndarray) and (self._every or "base" in self.names):
                self._count("base", value.base)
        elif base in layout.PLAIN:
            self._parts.append(cast(Any, base).__repr__(value))
        elif base is property:
            self._attributes(value, "fget", "fset", "fdel")
        elif base is not None:
            self._parts.append(value.maxlen if base is deque else None)
            self._sequence(value, base)
        if shown.how == "identical":
            self._identical(value)
        else:
            self._note("class", value, None, kind)
            self._slots(value, shown)
            if kind.__dictoffset__ != 0:
                fields = dict_of(value)
                self._blind |= dict_of(value) is not fields
                self._note("fields", value, None, fields)
                if kind is types.SimpleNamespace:  # several may be compared
                    self._namespaces.append(value)
                    if len(self._namespaces) > 1 or "__repr__" in self.names:
                        self.names |= {name for each in self._namespaces for name in vars(each)}
                self._fields(value, fields, shown.how, shown.open)
        if not is_library(kind.__module__):
            self._base(kind)

    def _identical(self, value: Any) -> None:
        """An object without state. It may stand for a function or class, or read fields."""
        if isinstance(value, np.ufunc) and value.__name__.endswith(" (vectorized)"):
            self._refuse(f"{value.__name__}, a function that np.frompyfunc hides", _OUTSIDE)
        self._library(type(value).__module__)
        fields = dict_of(value)
        for name in ("__wrapped__", "__origin__"):
            if name in fields:
                self._read("item", fields, name, fields[name])

    def _methodcaller(self, value: Any) -> None:
        self._identical(value)
        self._count(None, value.__reduce__())  # with what it gives to the method

    def _slots(self, value: Any, shown: Layout) -> None:
        for number, name in shown.slots:
            slot = vars(type(value).__mro__[number])[name]
            field = content_of_slot(value, slot)
            self._note("slot", value, slot, field)
            self._blind |= shown.how == "node"  # more than names decides what counts
            counts = shown.open or self._every or name in self.names or holds_tensors(field)
            if counts and field is not MISSING:
                self._count(name, field)

    def _fields(
        self, owner: Any, fields: dict[str, Any], how: str = "object", open: bool = False
    ) -> None:
        """The fields that code names. Of a Module also those that are part of its tree; of an
        optimizer all but its own dicts, which hold only tensors that it updates."""
        but = frozenset[str]()
        rebound = self._rebound.get(id(owner), ()) if how == "node" else ()
        text = f"{'field' if how == 'node' else 'attribute'} {{!r}} of {type(owner).__name__}"
        if issubclass(type(owner), types.ModuleType):
            text, but = "global {!r} of " + owner.__name__, _OF_EVERY_MODULE
        self.places[id(fields)] = fields, text
        self._note("keys", fields, None, tuple(fields))
        for name, field in list(fields.items()):
            kind = type(field)
            counts = name in self.names
            if how == "optimizer":
                counts = counts or kind is not dict
            elif not counts:
                counts = self._every or open
                counts = counts or (how == "node" and (name in MARKS or holds_tensors(field)))
            if name in but or (not counts and how == "object"):
                continue
            if name in rebound and kind is Tensor:
                self._parts.append(name)
                self._note("tensor", fields, name, None)
                self.fields.append(Field(owner, name))
            elif not counts and how == "node":
                plain = kind in layout.PLAIN
                self._note("plain" if plain else "unread", fields, name, field if plain else None)
            elif not counts:
                self._note("item", fields, name, field)
            elif how == "object" or not _is_numeric(field):
                self._read("item", fields, name, field)
            elif kind is tuple:
                self._parts.append((name, *map(type, field)))
                self._note("item", fields, name, field)
                self._in_tuples += [Field(owner, name, i) for i in range(len(field))]
            else:
                self._parts.append((name, kind))
                self._note("number", fields, name, kind)
                self.numbers.append(Field(owner, name))


def dict_of(value: Any) -> dict[str, Any]:
    """An object's fields, without calling anything of its own."""
    try:
        fields = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return fields if type(fields) is dict else {}


def _registered(_: object) -> tuple[object]:
    return (abc.get_cache_token(),)


def _is_numeric(field: Any) -> bool:
    """Whether a field has a number, or a few in a tuple."""
    few = field if type(field) is tuple and len(field) <= _FEW else (field,)
    return NUMBERS.issuperset(map(type, few))


def _is_of_python(value: Any) -> bool:
    """Return whether the value is a function or class of Python's own `builtins`."""
    kind = type(value)
    return kind in (types.BuiltinFunctionType, type) and value.__module__ in _BUILTINS


def _is_of_library(value: Any) -> bool:
    """Whether this is a library's module, class or function."""
    kind = type(value)
    if issubclass(kind, (types.ModuleType, type)):
        return is_library(value.__module__ if issubclass(kind, type) else value.__name__)
    bound = kind is types.BuiltinFunctionType and type(value.__self__) is not types.ModuleType
    return callable(value) and layout_of(kind).how == "identical" and not bound


def _variables(fn: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The variables that a function reads, if it is no library's."""
    if not is_library(str(fn.__globals__.get("__name__", ""))):
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            yield name, content_of_slot(cell, CELL)
        for name in named_by(fn.__code__).globals:
            for names in (fn.__globals__, fn.__builtins__):
                if name in names:
                    yield name, names[name]
                    break


def _described(value: Any, name: Any) -> str:
    """A value on the way to what was refused: by what it is, or the name that led to it."""
    kind = type(value)
    if kind is types.FunctionType:
        file, line = value.__code__.co_filename, value.__code__.co_firstlineno
        return f"{value.__qualname__} ({os.path.basename(file)}:{line})"
    if type(name) is str and name[:2] != "__":
        return repr(name)
    return str(value.__qualname__) if issubclass(kind, type) else f"a {kind.__qualname__}"


def _attributes(*names: str) -> _Way:
    return lambda look, value: look._attributes(value, *names)


_CLASS_OF_OBJECT: Final = functools.partial(Look._class, made=False)
_BOUNDS: Final = _attributes("start", "stop", "step")
_WAYS: Final[dict[type, _Way]] = {
    dict: Look._mapping,
    list: Look._sequence,
    tuple: functools.partial(Look._sequence, base=tuple),
    slice: _BOUNDS,
    range: _BOUNDS,
    types.FunctionType: Look._function,
    types.MethodType: _attributes("__self__", "__func__"),
    types.BuiltinFunctionType: Look._builtin,
    types.MethodWrapperType: Look._builtin,
    super: _attributes("__self__"),
    types.ModuleType: Look._module,
    functools.partial: _attributes("func", "args", "keywords"),
    _CACHED: Look._cached,
    operator.methodcaller: Look._methodcaller,
    staticmethod: _attributes("__func__"),
    classmethod: _attributes("__func__"),
    weakref.ReferenceType: Look._reference,
}
