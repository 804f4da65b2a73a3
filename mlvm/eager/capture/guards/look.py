"""A look at all that a captured function reaches: a flat list of reads, and a key of them by value.

A program is for what the function found around it when it was recorded. So everything that the
function reaches is looked into, as deep as its code may read. `reads` tell fast whether another look
would find the same (`Checklist`). `key` compares what two looks have found: by value where that is
possible, or else by identity. An object that does not show all of its state is refused, unless it
cannot change (`layout`). Only what no reached code may read is left out (`code`).
"""

from __future__ import annotations

import abc
import functools
import importlib.util
import os
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, NoReturn, cast

import numpy as np

from mlvm.core.errors import CaptureError
from mlvm.eager.capture.guards.code import (
    ALL,
    COMPARISONS,
    CONSTRUCTORS,
    TEXTS,
    Named,
    is_special,
    named_by,
    named_by_builtin,
)
from mlvm.eager.capture.guards.layout import (
    ARRAYS,
    BY_VALUE,
    MAPPINGS,
    PLAIN,
    Layout,
    content_of_array,
    is_library,
    layout_of,
    reads_special_only,
    stateful_names,
)
from mlvm.eager.capture.guards.read import MISSING, Checklist, Read
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tree import Node, holds_tensors

CALLED: Final = frozenset({"keys", "send", "throw", "close", "__getattr__"})
"""What Python calls without naming it, besides special methods of classes."""

ASKS_CLASS: Final = "__class__"
"""The name that code reads which may ask for an object's class, as `type` does."""

NUMBERS: Final = frozenset({int, float})
NO_FIELDS: Final[Mapping[int, set[str]]] = {}

_FEW: Final = 8
_OUTSIDE: Final = "use it outside, and give what comes of it as an argument"
_OF_EVERY_MODULE: Final = frozenset({"__builtins__", *vars(types.ModuleType("module"))})
_CACHED: Final = functools._lru_cache_wrapper


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
            items = list(self.value)
            items[self.item] = value
            value = tuple(items)
        dict_of(self.owner)[self.name] = value


def look(
    fn: Callable[..., Any],
    names: frozenset[str] = CALLED,
    rebound: Mapping[int, set[str]] = NO_FIELDS,
    objects: Sequence[Any] = (),
) -> Look:
    """A look that has followed all names that the reached code has, and these."""
    while True:
        found = Look(fn, names, rebound, objects)
        if found.names == names:
            return found
        names = found.names


class Look:
    """One look at what a function reaches, and then at `objects` among its arguments.

    The variables around it count, its defaults and globals, and so on from each of them. All
    functions are looked into, except those of libraries (`layout.is_library`). Containers and
    arrays are known by what they hold; objects, classes and modules by identity and by the fields
    that the code may read. `names` are these fields, for all code that is reached.

    Tensors are known by identity; `tensors` has their ids. But a Module's field that is in
    `rebound`, which has names by the id of the Module, counts as an argument: `fields` are those.
    Of Python's numbers in fields of Modules and optimizers only the class counts; `numbers` says
    where they are, and `in_tuples` has the values of the last of them.

    `held` keeps alive what the key knows by identity. `places` are the dicts, lists and cells that
    were met, by their ids, each with a text that says what a name there is.

    Raises `CaptureError` for what cannot be compared; it says what that is, and where.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        names: frozenset[str],
        rebound: Mapping[int, set[str]],
        objects: Sequence[Any],
    ) -> None:
        self.names = names
        self.reads: list[Read] = []
        self.tensors: set[int] = set()
        self.fields: list[Field] = []
        self.in_tuples: list[float] = []
        self.held: list[Any] = []
        self.places: dict[int, tuple[Any, str]] = {}
        self.ordinals: dict[int, int] = {}  # of what was met, by id: negative, which ids are not
        self._numbers: list[Field] = []
        self._numbers_in_tuples: list[Field] = []
        self._rebound = rebound
        self._every = ALL in names
        self._blind = False
        self._parts: list[Any] = []
        self._found: dict[int, tuple[Any, Any]] = {}  # by id: where, and by what name
        self._queue: deque[tuple[Any, Callable[[Look, Any], None] | None]] = deque()
        self._turn: Any = None  # what is looked into now
        self._steady: set[int] = set()
        self._namespaces: list[types.SimpleNamespace] = []
        for value in (fn, *objects):
            self._turn = None
            self._count(None, value)
            self._walk()
        self.numbers = self._numbers + self._numbers_in_tuples
        self.key = _Key(self._parts)
        self.checklist = Checklist(self.reads)

    def holds(self) -> bool:
        """Whether another look would find the same; False also if that cannot be told."""
        return not self._blind and self.checklist.holds()

    def values(self) -> tuple[list[Tensor], list[float]] | None:
        """The present tensors of `fields`, and numbers; None if there is something else."""
        tensors, numbers = self.checklist.tensors(), self.checklist.numbers()
        if tensors is None or numbers is None:
            return None
        return tensors, numbers + self.in_tuples

    def _count(self, name: Any, value: Any) -> None:
        """Make the value that the name leads to part of the key. What it holds follows when its
        turn comes; a value that is met again is known by its ordinal."""
        kind, key = type(value), id(value)
        part: Any
        if kind in PLAIN:
            part = kind, repr(value) if kind is float or kind is complex else value
        elif kind is Tensor:
            self.tensors.add(key)
            self.held.append(value)
            part = key
        else:
            part = self._meet(key, name, value) or (kind if kind in BY_VALUE else key)
        self._parts.append((name if type(name) is str else None, part))

    def _meet(
        self, key: int, name: Any, value: Any, look: Callable[[Look, Any], None] | None = None
    ) -> int | None:
        """The ordinal of what was met before under that key; otherwise it gets its turn."""
        ordinal = self.ordinals.get(key)
        if ordinal is None:
            self.ordinals[key] = ~len(self.ordinals)
            self._found.setdefault(id(value), (self._turn, name))
            self.held.append(value)
            self._queue.append((value, look))
        return ordinal

    def _walk(self) -> None:
        while self._queue:
            value, look = self._queue.popleft()
            kind = type(value)
            self._turn = value
            self._parts.append(None)
            if look is None:
                look = _LOOKS.get(kind)
            if look is None:  # isinstance might call what is looked into
                look = Look._class if issubclass(kind, type) else Look._object
            look(self, value)

    def _read(self, kind: str, owner: Any, name: Any, value: Any) -> None:
        self.reads.append(Read(kind, owner, name, value))
        self._count(name, value)

    def _note(self, kind: str, owner: Any, name: Any, value: Any) -> None:
        """A read whose value is no part of the key."""
        self.reads.append(Read(kind, owner, name, value))

    def _attributes(self, owner: Any, *names: str) -> None:
        for name in names:
            self._read("attribute", owner, name, getattr(owner, name))

    def _item(self, owner: dict[str, Any], name: str) -> None:
        if name in owner:
            self._read("item", owner, name, owner[name])
        else:
            self._note("item", owner, name, MISSING)

    def _place(self, place: Any, text: str) -> None:
        self.places[id(place)] = place, text

    def _may_read(self, named: Named) -> None:
        if not named.fields <= self.names:
            self.names |= named.fields
        if named.unbounded:
            self._refuse(f"{named.unbounded[0]}, which may read any variable", "name what it reads")

    def _library(self, name: str) -> None:
        """Make all fields count, if the library may read any field of what it is given."""
        if not reads_special_only(name):
            self.names |= {ALL}

    # --- functions -------------------------------------------------------------------------

    def _function(self, fn: types.FunctionType) -> None:
        """Its code, the variables around it, its defaults and its globals."""
        code, variables = fn.__code__, fn.__globals__
        for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
            self._place(cell, f"variable {name!r}")
            value = _content(cell)
            self._blind |= value is MISSING
            self._note("attribute", cell, "cell_contents", value)
            self._count(name, None if value is MISSING else value)
        home = str(variables.get("__name__", ""))
        if is_library(home):
            if "__wrapped__" not in fn.__dict__:  # or it reads what the wrapped one does
                self._library(home)
            return
        self._place(variables, "global {!r}")
        self.held.append(code)
        self._parts.append(id(code))
        self._note("attribute", fn, "__code__", code)
        self._attributes(fn, "__defaults__", "__kwdefaults__")
        named = named_by(code)
        self._may_read(named)
        for name in named.globals:
            self._item(variables, name)
        for level, name in named.imports:
            if level:
                package = variables.get("__package__") or home
                name = importlib.util.resolve_name("." * level + name, package)
            self._item(sys.modules, name)
        self._note("attribute", fn, "__dict__", fn.__dict__)
        self._fields(fn, fn.__dict__)

    def _builtin(self, fn: types.BuiltinFunctionType) -> None:
        """What it may read, and the object that it is a method of, if it is one's."""
        home = fn.__module__ or "builtins"
        self._library(home)
        if home == "builtins":
            self._may_read(named_by_builtin(fn.__name__))
        if type(fn.__self__) is not types.ModuleType:
            self._attributes(fn, "__self__")

    def _special(self, method: types.MethodWrapperType) -> None:
        """A special method of an object, such as `items.__len__`."""
        self._may_read(named_by_builtin(method.__name__))
        self._attributes(method, "__self__")

    def _cached(self, fn: Any) -> None:
        """A function with a cache of results. These may come from values that have changed since,
        so the function may read nothing that changes."""
        self._blind = True
        self._require_steady("its function", fn)
        self._attributes(fn, "__wrapped__")

    def _require_steady(self, name: str, value: Any) -> None:
        kind = type(value)
        if id(value) in self._steady:
            return
        self._steady.add(id(value))
        if kind is _CACHED:
            self._require_steady(name, value.__wrapped__)
        elif kind is types.FunctionType:
            variables = value.__globals__
            if not is_library(str(variables.get("__name__", ""))):
                around = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
                for each, cell in around:
                    self._require_steady(each, _content(cell))
                for each in named_by(value.__code__).globals:
                    if each in variables:
                        self._require_steady(each, variables[each])
        elif not _is_of_library(value):
            self._refuse(
                f"{name!r} within a function with a cache, whose results may be of an older value",
                "give it to that function as an argument",
            )

    # --- what holds other things --------------------------------------------------------------

    def _mapping(self, value: Any, base: Any = dict) -> None:
        if base is dict:
            self._note("keys", value, None, tuple(dict.keys(value)))
            self._note("values", value, None, tuple(dict.values(value)))
        else:
            self._blind = True
        if base is not types.MappingProxyType:
            self._place(value, "item {!r} of a dict")
        items = value.items() if base is types.MappingProxyType else base.items(value)
        for key, each in list(items):
            self._count(None, key)
            self._count(key, each)

    def _sequence(self, value: Any, base: Any = list) -> None:
        items = list(base.__iter__(value))
        if type(value) in (list, set):
            self._note("items", value, None, tuple(items))
        elif base not in (tuple, frozenset):
            self._blind = True
        if base is list:
            self._place(value, "item {} of a list")
        for each in items:
            self._count(None, each)

    def _reference(self, reference: weakref.ref[Any]) -> None:
        self._blind = True
        self._count(None, reference())

    def _module(self, module: types.ModuleType) -> None:
        name, variables = module.__name__, vars(module)
        self._note("class", module, None, type(module))
        if not is_library(name):
            self._fields(module, variables, but=_OF_EVERY_MODULE)
            return
        self._library(name)
        for each in stateful_names(name):
            if each in self.names:
                self._item(variables, each)

    # --- classes and objects -------------------------------------------------------------------

    def _class(self, kind: type, *, made: bool = True) -> None:
        """Its fields and its bases. A constructor counts if an object may be `made`. A method that
        overrides a library's counts, as the library may call it."""
        if issubclass(type(kind), abc.ABCMeta):  # `register` makes others count as of the class
            self._note("equal", None, _registered, token := _registered(None))
            self._parts.append(token)
        if is_library(kind.__module__):
            self._library(kind.__module__)
            return
        names, layout, of_class = self.names, layout_of(kind), vars(kind)
        self._note("class", kind, None, type(kind))
        self._note("keys", of_class, None, tuple(of_class))
        self._note("attribute", kind, "__bases__", kind.__bases__)
        every = self._every or (layout.how == "object" and layout.open)
        made = made or every or "__init__" in names or "__class__" in names
        for name, field in list(of_class.items()):
            if name not in names and not every:
                if name in CONSTRUCTORS or _is_generated(kind, name, field):
                    if not made:
                        continue
                elif name in TEXTS or not (is_special(name) or name in layout.overrides):
                    continue
            if type(field) is types.MemberDescriptorType:  # a slot, which is the object's
                self._note("entry", of_class, name, field)
            else:
                self._read("entry", of_class, name, field)
        for each in (*kind.__bases__, type(kind)):
            if not is_library(each.__module__):
                self._base(each, made=made)

    def _base(self, kind: type, *, made: bool = False) -> None:
        """The class of an object, or of a class."""
        made = made or ("__dataclass_params__" in vars(kind) and -id(kind) in self.ordinals)
        look = Look._class if made else _class_of_object
        self._parts.append(
            self._meet(id(kind) if made else -id(kind), None, kind, look) or id(kind)
        )

    def _object(self, value: Any) -> None:
        """What it holds as an object of its base, its fields, and its class."""
        kind = type(value)
        layout = layout_of(kind)
        how, base = layout.how, layout.base
        if how == "hidden":
            self._refuse(f"an object of {kind.__name__}, whose state is hidden", _OUTSIDE)
        if base in MAPPINGS:
            self._mapping(value, base)
        elif base in ARRAYS:
            self._read("equal", value, content_of_array, content_of_array(value))
            if issubclass(kind, np.ndarray) and (self._every or "base" in self.names):
                self._count("base", value.base)
        elif base in PLAIN:
            self._parts.append(cast(Any, base).__repr__(value))
        elif base is not None:
            self._sequence(value, base)
            self._parts.append(value.maxlen if base is deque else None)
        if how == "identical":
            self._identical(value)
        else:
            self._note("class", value, None, kind)
            if layout.slots:
                self._slots(value, layout)
            if kind is types.SimpleNamespace:
                self._namespace(value)
            if kind.__dictoffset__ != 0:
                fields = dict_of(value)
                self._blind |= dict_of(value) is not fields
                self._note("fields", value, None, fields)
                self._fields(value, fields, layout)
        if layout.by_user:
            self._base(kind)

    def _identical(self, value: Any) -> None:
        """An object without state. It may stand for a function or class, or read fields."""
        if isinstance(value, np.ufunc) and value.__name__.endswith(" (vectorized)"):
            self._refuse(f"{value.__name__}, a function that np.frompyfunc hides", _OUTSIDE)
        self._library(type(value).__module__)
        fields = dict_of(value)
        for name in ("__wrapped__", "__origin__"):
            if name in fields:
                self._item(fields, name)

    def _slots(self, value: Any, layout: Layout) -> None:
        """An object's fields in slots."""
        self._blind |= layout.how == "node"  # more than names decides what counts
        for number, name in layout.slots:
            of_class = vars(type(value).__mro__[number])
            slot = of_class[name]
            self._note("entry", of_class, name, slot)
            try:
                field = slot.__get__(value)
            except AttributeError:  # it has no value yet
                field = MISSING
            self._note("slot", value, slot, field)
            if field is not MISSING and (
                layout.open or self._every or name in self.names or holds_tensors(field)
            ):
                self._count(name, field)

    def _namespace(self, value: types.SimpleNamespace) -> None:
        if self._namespaces or "__repr__" in self.names:  # several may be compared
            for each in (*self._namespaces, value):
                self.names |= dict_of(each).keys()
        self._namespaces.append(value)

    def _fields(
        self,
        owner: Any,
        fields: dict[str, Any],
        layout: Layout | None = None,
        *,
        but: Container[str] = (),
    ) -> None:
        """The fields that code names. Of a Module also those that are part of its tree; of an
        optimizer all but its own dicts, which hold only tensors that it updates."""
        how = layout.how if layout is not None else "object"
        every = self._every or (layout is not None and layout.open)
        rebound = self._rebound.get(id(owner), ()) if how == "node" else ()
        self._note("keys", fields, None, tuple(fields))
        self._place(fields, _text_of(owner))
        for name, field in list(fields.items()):
            kind = type(field)
            counts = name in self.names or (every and how != "optimizer")
            if name in rebound and kind is Tensor:
                self._parts.append(name)
                self.fields.append(Field(owner, name))
                self._note("tensor", fields, name, None)
            elif how == "object":
                if counts and name not in but:
                    self._read("item", fields, name, field)
            elif not counts and not (holds_tensors(field) if how == "node" else kind is not dict):
                if how == "optimizer":
                    self._note("item", fields, name, field)
                elif kind in PLAIN:
                    self._note("plain", fields, name, field)
                else:
                    self._note("unread", fields, name, None)
            elif kind in NUMBERS:
                self._parts.append((name, kind))
                self._note("number", fields, name, kind)
                self._numbers.append(Field(owner, name))
            elif kind is tuple and len(field) <= _FEW and NUMBERS.issuperset(map(type, field)):
                self._parts.append((name, kind, *map(type, field)))
                self._note("item", fields, name, field)
                self.in_tuples += field
                self._numbers_in_tuples += [Field(owner, name, i) for i in range(len(field))]
            else:
                self._read("item", fields, name, field)

    def _refuse(self, what: str, remedy: str) -> NoReturn:
        """Raise `CaptureError`, which says how the function reaches it."""
        way, value = [], self._turn
        while value is not None:
            owner, name = self._found[id(value)]
            way.append(_described(value, name))
            value = owner
        raise CaptureError(f"a captured function reaches {what}, by {' of '.join(way)}: {remedy}")


class _Key:
    """Parts of a key, of which the hash is computed once."""

    __slots__ = ("_hash", "_parts")

    def __init__(self, parts: Iterable[Any]) -> None:
        self._parts = tuple(parts)
        self._hash = hash(self._parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._parts == other._parts


def dict_of(value: Any) -> dict[str, Any]:
    """An object's fields, without calling anything of its own."""
    try:
        fields = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return fields if type(fields) is dict else {}


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return MISSING


def _registered(_: object) -> object:
    """Changes when an abstract class gets another class by `register`."""
    return abc.get_cache_token()


def _is_of_library(value: Any) -> bool:
    """Whether this is a library's module, class or function, or nothing."""
    kind = type(value)
    if kind is types.ModuleType:
        return is_library(value.__name__)
    if kind is types.BuiltinFunctionType:
        return type(value.__self__) is types.ModuleType
    if issubclass(kind, type):
        return is_library(value.__module__)
    return layout_of(kind).how == "identical" and callable(value)


def _is_generated(kind: type, name: str, field: Any) -> bool:
    """Whether `dataclass` wrote this comparison, which compares objects of just this class."""
    if name not in COMPARISONS or "__dataclass_params__" not in vars(kind):
        return False
    return isinstance(field, types.FunctionType) and field.__code__.co_filename == "<string>"


def _text_of(owner: Any) -> str:
    """What a name among the owner's fields is."""
    if issubclass(type(owner), types.ModuleType):
        return "global {!r} of " + owner.__name__
    word = "field" if issubclass(type(owner), Node) else "attribute"
    return f"{word} {{!r}} of {type(owner).__name__}"


def _described(value: Any, name: Any) -> str:
    """A value on the way to what was refused: by what it is, or the name that led to it."""
    if type(value) is types.FunctionType:
        file, line = value.__code__.co_filename, value.__code__.co_firstlineno
        return f"{value.__qualname__} ({os.path.basename(file)}:{line})"
    if type(name) is str and not is_special(name):
        return repr(name)
    return value.__qualname__ if issubclass(type(value), type) else f"a {type(value).__qualname__}"


def _attributes(*names: str) -> Callable[[Look, Any], None]:
    return lambda look, value: look._attributes(value, *names)


_class_of_object: Final = functools.partial(Look._class, made=False)

_LOOKS: Final[dict[type, Callable[[Look, Any], None]]] = {
    dict: Look._mapping,
    list: Look._sequence,
    tuple: functools.partial(Look._sequence, base=tuple),
    slice: _attributes("start", "stop", "step"),
    range: _attributes("start", "stop", "step"),
    types.FunctionType: Look._function,
    types.MethodType: _attributes("__self__", "__func__"),
    types.BuiltinFunctionType: Look._builtin,
    types.MethodWrapperType: Look._special,
    super: _attributes("__self__"),
    types.ModuleType: Look._module,
    functools.partial: _attributes("func", "args", "keywords"),
    _CACHED: Look._cached,
    property: _attributes("fget", "fset", "fdel"),
    staticmethod: _attributes("__func__"),
    classmethod: _attributes("__func__"),
    weakref.ReferenceType: Look._reference,
}
