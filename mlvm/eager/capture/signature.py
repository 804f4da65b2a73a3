"""What decides which of a captured function's programs a call gets: its signature.

A program is for arguments of certain types, and for what the function found around it when it was
recorded. If any of that differs, the signature differs.

Everything that the function reaches is looked into, and compared by value where that is possible.
An object that does not show all of its state is refused, unless it cannot change. Only what no
reached code may read is left out; `reads` says what code may read.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple, NoReturn, cast

import numpy as np

from mlvm.arena.scratch_pad import ScratchPad
from mlvm.core.errors import CaptureError
from mlvm.eager.capture.layout import (
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
from mlvm.eager.capture.reads import (
    ALL,
    COMPARISONS,
    CONSTRUCTORS,
    TEXTS,
    Reads,
    is_special,
    reads_of,
    reads_of_builtin,
)
from mlvm.eager.capture.surroundings import Field, dict_of
from mlvm.eager.tensor import Tensor
from mlvm.eager.tree import holds_tensors

CALLED: Final = frozenset({"keys", "send", "throw", "close", "__getattr__"})
"""What Python calls without naming it, besides special methods of classes."""

ASKS_CLASS: Final = "__class__"
"""The name that code reads which may ask for an object's class, as `type` does."""

NO_FIELDS: Final[Mapping[int, set[str]]] = {}

_OUTSIDE: Final = "use it outside, and give what comes of it as an argument"


_NUMBERS: Final = frozenset({int, float})
_FEW: Final = 8


class Place(NamedTuple):
    """Where a number was found: in a Module's or optimizer's field, or there in a tuple."""

    owner: Any
    name: str
    item: int | None

    def set(self, number: Any) -> None:
        fields = dict_of(self.owner)
        if self.item is not None:
            items = list(fields[self.name])
            items[self.item] = number
            number = tuple(items)
        fields[self.name] = number


class Signature:
    """The structure of a call's arguments, the types of their tensors, and all else by value, or
    where that cannot be compared, by identity.

    What the function reaches by itself is part of it: the variables around it, its defaults and
    globals, and so on from each of them. All functions are looked into, except those of numpy, the
    standard library and mlvm. Containers and arrays are known by what they hold; objects, classes
    and modules by identity and by the fields that the code may read. `names` are these fields, for
    all code that is reached. If they are more than the signature was made with, it has not seen
    everything.

    `tensors` are the arguments' tensors, each once. Other tensors, such as those in Modules, are
    known by identity. But a Module's field that is in `rebound`, which has names by the id of the
    Module, counts as an argument: `fields` are those. `inputs` has the first tensor over each
    memory; its order numbers the inputs. An argument that the function also reaches by itself is no
    input: it is known by identity. `held` keeps alive what is known by identity.

    `numbers` are Python's numbers among the arguments and in fields of Modules and optimizers; only
    that they are there is part of the structure, and their class. `places` has where each was
    found, and None for an argument.

    Raises `CaptureError` for what cannot be compared; it says what that is, and where.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        names: frozenset[str],
        rebound: Mapping[int, set[str]] = NO_FIELDS,
    ) -> None:
        self.tensors: list[Tensor] = []
        self.inputs: list[Tensor] = []
        self.fields: list[tuple[Field, Tensor]] = []
        self.held: list[Any] = []
        self.numbers: list[float] = []
        self.places: list[Place | None] = []
        self._rebound = rebound
        self._numbers: dict[int, int] = {}
        self._reached: set[int] = set()
        self.names = names
        self._every = ALL in names
        self._roots: dict[int, int] = {}
        # When a value is found, `_parts` gets what it is; when its turn in `_queue` comes, what it
        # holds. A value that is found again is known by its number, which is negative; ids are not.
        self._parts: list[Any] = []
        self._queue: list[Any] = []
        self._seen: dict[int, int] = {}
        self._layouts: dict[type, Layout] = {}
        self._steady: set[int] = set()
        self._namespaces: list[types.SimpleNamespace] = []
        self._owner: Any = None
        self._found: dict[int, Any] = {}
        self._add(fn)
        self._walk()

    @property
    def function(self) -> tuple[Any, ...]:
        """What the function reaches, and what the arguments hold besides tensors."""
        return tuple(self._parts)

    def of_arguments(self, *arguments: Any) -> tuple[Any, ...]:
        """The arguments' structure and tensors; `function` then has what else they hold. Raises
        `CaptureError` for a tensor of a scratch pad."""
        self._owner = None
        for value in arguments:
            self._add_argument(value)
        self._walk()
        return tuple(map(self._of_argument, arguments))

    def is_reached(self, x: Tensor) -> bool:
        """Whether the function reaches this very tensor by itself, and not only as an argument."""
        return id(x) in self._reached

    def _add_argument(self, value: Any, *, key: bool = False) -> None:
        """What an argument holds besides tensors and numbers. A number that is a `key` counts."""
        if type(value) not in (list, tuple, dict) and isinstance(value, (list, tuple, dict)):
            self._fields(list(dict_of(value).items()), open=True)
            self._add(getattr(value, "default_factory", None))
        if isinstance(value, (list, tuple)):
            for each in value:
                self._add_argument(each, key=key)
        elif isinstance(value, dict):
            for name, each in value.items():
                self._add_argument(name, key=True)
                self._add_argument(each, key=key)
        elif not isinstance(value, Tensor) and (key or type(value) not in _NUMBERS):
            self._add(value)

    def _of_argument(self, value: Any, *, key: bool = False) -> Any:
        if isinstance(value, Tensor):
            if self.is_reached(value):
                return Tensor, id(value)
            if isinstance(value.arena, ScratchPad):
                raise CaptureError(
                    f"a captured function was given a {value.type} of scratch pad "
                    f"{value.arena.name!r}, which may lie over other tensors; give it a copy"
                )
            number = self._numbers.setdefault(id(value), len(self.tensors))
            if number == len(self.tensors):
                self.tensors.append(value)
            place = self._roots.setdefault(id(value.root), len(self.inputs))
            if place == len(self.inputs):
                self.inputs.append(value)
            return Tensor, value.type, number, place, value.base is None
        kind = type(value)
        if isinstance(value, (list, tuple)):
            return kind, tuple([self._of_argument(each, key=key) for each in value])
        if isinstance(value, dict):
            return kind, tuple(
                [
                    (self._of_argument(name, key=True), self._of_argument(each, key=key))
                    for name, each in value.items()
                ]
            )
        if kind not in _NUMBERS or key:
            return None
        self.numbers.append(value)
        self.places.append(None)
        return kind

    # --- the walk ------------------------------------------------------------------------

    def _add(self, value: Any) -> None:
        kind = type(value)
        parts = self._parts
        if kind in PLAIN:
            parts.append(kind)
            parts.append(repr(value) if kind is float or kind is complex else value)
            return
        key = id(value)
        if kind is Tensor:
            self._reached.add(key)
            self.held.append(value)
            parts.append(key)
            return
        number = self._seen.get(key)
        if number is not None:
            parts.append(number)
            return
        self._seen[key] = ~len(self._seen)
        self._found[key] = self._owner
        self.held.append(value)
        parts.append(kind if kind in BY_VALUE else key)
        self._queue.append(value)

    def _add_field(self, owner: Any, name: str, value: Any) -> None:
        """A field of a Module or an optimizer, of which a number is no part of the structure."""
        kind = type(value)
        if kind in _NUMBERS:
            found: list[tuple[int | None, float]] = [(None, value)]
        elif kind is tuple and len(value) <= _FEW and _NUMBERS.issuperset(map(type, value)):
            found = [*enumerate(value)]
        else:
            self._add(value)
            return
        if dict_of(owner).get(name) is not value:  # it is in a slot
            self._add(value)
            return
        self._parts.append((kind, *[type(each) for _, each in found]))
        for item, each in found:
            self.numbers.append(each)
            self.places.append(Place(owner, name, item))

    def _walk(self) -> None:
        while self._queue:
            queue, self._queue = self._queue, []
            for value in queue:
                self._owner = value
                look = _LOOKS.get(type(value))
                if look is not None:
                    look(self, value)
                elif issubclass(type(value), type):  # isinstance might call what is looked into
                    self._class(value, made=True)
                else:
                    self._object(value)

    def _may_read(self, reads: Reads) -> None:
        if not reads.names <= self.names:
            self.names |= reads.names
        if reads.unbounded:
            self._refuse(f"{reads.unbounded[0]}, which may read any variable", "name what it reads")

    def _library(self, name: str) -> None:
        """Make all fields count, if the library may read any field of what it is given."""
        if not reads_special_only(name):
            self.names |= {ALL}

    # --- functions -------------------------------------------------------------------------

    def _function(self, fn: types.FunctionType) -> None:
        """Its code, the variables around it, its defaults and its globals."""
        add, parts = self._add, self._parts
        for cell in fn.__closure__ or ():
            add(_content(cell))
        variables = fn.__globals__
        if is_library(home := str(variables.get("__name__", ""))):
            if "__wrapped__" not in fn.__dict__:  # or it reads what the wrapped one does
                self._library(home)
            return
        code = fn.__code__
        self.held.append(code)
        parts.append(id(code))
        add(fn.__defaults__)
        add(fn.__kwdefaults__)
        reads = reads_of(code)
        self._may_read(reads)
        for name in reads.globals:
            if name in variables:
                parts.append(name)
                add(variables[name])
        for level, name in reads.imports:
            if level:
                package = variables.get("__package__") or home
                name = importlib.util.resolve_name("." * level + name, package)
            if name in sys.modules:
                parts.append(name)
                add(sys.modules[name])
        parts.append(None)
        if fn.__dict__:
            self._fields(list(fn.__dict__.items()))

    def _method(self, method: types.MethodType) -> None:
        self._add(method.__self__)
        self._add(method.__func__)

    def _partial(self, call: functools.partial[Any]) -> None:
        for part in (call.func, call.args, call.keywords):
            self._add(part)

    def _builtin(self, fn: types.BuiltinFunctionType) -> None:
        """What it may read, and the object that it is a method of, if it is one's."""
        home = fn.__module__ or "builtins"
        self._library(home)
        if home == "builtins":
            self._may_read(reads_of_builtin(fn.__name__))
        if type(fn.__self__) is not types.ModuleType:
            self._add(fn.__self__)

    def _wrapper(self, method: types.MethodWrapperType) -> None:
        """A special method of an object, such as `items.__len__`."""
        self._may_read(reads_of_builtin(method.__name__))
        self._add(method.__self__)

    def _super(self, value: Any) -> None:
        self._add(super.__getattribute__(value, "__self__"))

    def _property(self, field: property) -> None:
        for fn in (field.fget, field.fset, field.fdel):
            self._add(fn)

    def _wrapped(self, field: Any) -> None:
        self._add(field.__func__)

    def _cached(self, fn: Any) -> None:
        """A function with a cache of results. These may come from values that have changed since,
        so the function may read nothing that changes."""
        self._require_steady("its function", fn)
        self._add(fn.__wrapped__)

    def _require_steady(self, name: str, value: Any) -> None:
        if id(value) in self._steady:
            return
        self._steady.add(id(value))
        if type(value) is _CACHED:
            self._require_steady(name, value.__wrapped__)
        elif type(value) is types.FunctionType:
            if is_library(str(value.__globals__.get("__name__", ""))):
                return
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                self._require_steady(name, _content(cell))
            for name in reads_of(value.__code__).globals:
                if name in value.__globals__:
                    self._require_steady(name, value.__globals__[name])
        elif not self._is_of_library(value):
            self._refuse(
                f"{name!r} within a function with a cache, whose results may be of an older value",
                "give it to that function as an argument",
            )

    def _is_of_library(self, value: Any) -> bool:
        """Whether this is a library's module, class or function."""
        if type(value) is types.ModuleType:
            return is_library(value.__name__)
        if type(value) is types.BuiltinFunctionType:
            return type(value.__self__) is types.ModuleType
        if issubclass(type(value), type):
            return is_library(value.__module__)
        return self._layout(type(value)).how == "identical" and callable(value)

    # --- what holds other things --------------------------------------------------------------

    def _mapping(self, value: Any, kind: Any = dict) -> None:
        add = self._add
        items = list(value.items() if kind is types.MappingProxyType else kind.items(value))
        self._parts.append(len(items))
        for key, each in items:
            add(key)
            add(each)

    def _sequence(self, value: Any, kind: Any = list) -> None:
        add, items = self._add, list(kind.__iter__(value))
        self._parts.append(len(items))
        for each in items:
            add(each)

    def _bounds(self, value: slice | range) -> None:
        for part in (value.start, value.stop, value.step):
            self._add(part)

    def _reference(self, reference: weakref.ref[Any]) -> None:
        self._add(reference())

    def _module(self, module: types.ModuleType) -> None:
        name = module.__name__
        if not is_library(name):
            fields = list(vars(module).items())
            self._fields([each for each in fields if each[0] not in _OF_EVERY_MODULE])
            return
        self._library(name)
        for each in stateful_names(name):
            if each in self.names:
                self._parts.append(each)
                self._add(getattr(module, each))
        self._parts.append(None)

    def _class(self, kind: type, *, made: bool = False) -> None:
        """Its fields and its bases. A constructor counts if an object may be `made`. A method that
        overrides a library's counts, as the library may call it."""
        if is_library(kind.__module__):
            self._library(kind.__module__)
            return
        names, parts, layout = self.names, self._parts, self._layout(kind)
        every = self._every or layout.how == "open"
        made = made or every or "__init__" in names or "__class__" in names
        for name, field in list(vars(kind).items()):
            if name not in names and not every:
                if name in CONSTRUCTORS or _is_generated(kind, name, field):
                    if not made:
                        continue
                elif name in TEXTS or not (is_special(name) or name in layout.overrides):
                    continue
            if type(field) is not types.MemberDescriptorType:  # a slot, which is the object's
                parts.append(name)
                self._add(field)
        parts.append(None)
        for each in (*kind.__bases__, type(kind)):
            if not is_library(each.__module__):
                self._base(each, made=made)

    def _base(self, kind: type, *, made: bool = False) -> None:
        """The class of an object, or of a class."""
        self._parts.append(id(kind))
        key = id(kind) if made else -id(kind)
        if key not in self._seen:
            self._seen[key] = ~len(self._seen)
            self.held.append(kind)
            self._class(kind, made=made)
        elif not made and "__dataclass_params__" in vars(kind):
            self._base(kind, made=True)  # there may be two to compare

    # --- classes and objects -------------------------------------------------------------------

    def _object(self, value: Any) -> None:
        """What it holds as an object of its base, its fields, and its class."""
        kind = type(value)
        layout = self._layout(kind)
        how, base = layout.how, layout.base
        if how == "hidden":
            self._refuse(f"an object of {kind.__name__}, whose state is hidden", _OUTSIDE)
        if base in MAPPINGS:
            self._mapping(value, base)
        elif base in ARRAYS:
            self._add(content_of_array(value))
        elif base in PLAIN:
            self._parts.append(cast(Any, base).__repr__(value))
        elif base is not None:
            self._sequence(value, base)
            self._parts.append(getattr(value, "maxlen", None) if base is deque else None)
        if how == "identical":
            self._identical(value)
        elif how == "node":
            self._node(value, self._fields_of(value, layout))
        elif how == "optimizer":
            for name, field in self._fields_of(value, layout):
                self._parts.append(name)
                self._add_field(value, name, field)
            self._parts.append(None)
        elif layout.has_dict or layout.slots:
            self._fields(self._fields_of(value, layout), open=how != "named")
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
                self._add(fields[name])

    def _fields_of(self, value: Any, layout: Layout) -> list[tuple[str, Any]]:
        """An object's fields, also those in slots."""
        fields = list(dict_of(value).items()) if layout.has_dict else []
        if layout.how == "optimizer":
            names = self.names  # its own dicts hold only tensors that it updates
            fields = [(x, field) for x, field in fields if x in names or type(field) is not dict]
        for number, name in layout.slots:
            slot = vars(type(value).__mro__[number])[name]
            with contextlib.suppress(AttributeError):  # it has no value yet
                fields.append((name, slot.__get__(value)))
        if type(value) is types.SimpleNamespace:
            if self._namespaces or "__repr__" in self.names:  # several may be compared
                for each in (*self._namespaces, value):
                    self.names |= dict_of(each).keys()
            self._namespaces.append(value)
        return fields

    def _node(self, node: Any, fields: Iterable[tuple[str, Any]]) -> None:
        """The fields of a Module that code names, and those that are part of its tree."""
        names, parts, held, every = self.names, self._parts, self.held, self._every
        reached = self._reached
        rebound = self._rebound.get(id(node), ())
        for name, field in fields:
            if type(field) is Tensor:
                parts.append(name)
                if name in rebound:
                    self.fields.append((Field(node, name), field))
                    parts.append(self._of_argument(field))
                else:
                    reached.add(id(field))
                    held.append(field)
                    parts.append(id(field))
            elif every or name in names or holds_tensors(field):
                parts.append(name)
                self._add_field(node, name, field)
        parts.append(None)

    def _fields(self, fields: Iterable[tuple[str, Any]], *, open: bool = False) -> None:
        names, parts, every = self.names, self._parts, open or self._every
        for name, field in fields:
            if every or name in names:
                parts.append(name)
                self._add(field)
        parts.append(None)

    def _layout(self, kind: type) -> Layout:
        layout = self._layouts.get(kind)
        if layout is None:
            layout = self._layouts[kind] = layout_of(kind)
        return layout

    def _refuse(self, what: str, remedy: str) -> NoReturn:
        """Raise `CaptureError`, which says how the function reaches it."""
        place, owner = [], self._owner
        while owner is not None:
            value = owner
            owner = self._found.get(id(owner))
            place.append(_described(value, owner))
        raise CaptureError(f"a captured function reaches {what}, by {' of '.join(place)}: {remedy}")


def _is_generated(kind: type, name: str, field: Any) -> bool:
    """Whether `dataclass` wrote this comparison, which compares objects of just this class."""
    if name not in COMPARISONS or "__dataclass_params__" not in vars(kind):
        return False
    return isinstance(field, types.FunctionType) and field.__code__.co_filename == "<string>"


def _described(value: Any, owner: Any) -> str:
    """A value on the way to what was refused: its name in the owner where it was found."""
    if isinstance(value, types.FunctionType):
        file, line = value.__code__.co_filename, value.__code__.co_firstlineno
        return f"{value.__qualname__} ({os.path.basename(file)}:{line})"
    inside = dict(dict_of(owner))
    if isinstance(owner, types.FunctionType):
        names = owner.__code__.co_freevars
        around = [_content(cell) for cell in owner.__closure__ or ()]
        inside = {**owner.__globals__, **inside, **dict(zip(names, around, strict=True))}
    found = next((name for name, each in inside.items() if each is value), None)
    kind = getattr(value, "__qualname__", None) or f"a {type(value).__qualname__}"
    return f"{found!r}" if found else str(kind)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return None


_OF_EVERY_MODULE: Final = frozenset({"__builtins__", *vars(types.ModuleType("module"))})
_CACHED: Final = functools._lru_cache_wrapper

_LOOKS: Final[dict[type, Callable[[Signature, Any], None]]] = {
    dict: Signature._mapping,
    list: Signature._sequence,
    tuple: functools.partial(Signature._sequence, kind=tuple),
    slice: Signature._bounds,
    range: Signature._bounds,
    types.FunctionType: Signature._function,
    types.MethodType: Signature._method,
    types.BuiltinFunctionType: Signature._builtin,
    types.MethodWrapperType: Signature._wrapper,
    super: Signature._super,
    types.ModuleType: Signature._module,
    functools.partial: Signature._partial,
    _CACHED: Signature._cached,
    property: Signature._property,
    staticmethod: Signature._wrapped,
    classmethod: Signature._wrapped,
    weakref.ReferenceType: Signature._reference,
}
