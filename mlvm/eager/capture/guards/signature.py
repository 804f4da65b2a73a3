"""What decides which of a captured function's programs a call gets: its signature.

A program is for arguments of certain types, and for what the function found around it when it was
recorded. If any of that differs, the signature differs.

Everything that the function reaches is looked into, and compared by value where that is possible.
An object that does not show all of its state is refused, unless it cannot change. Only what no
reached code may read is left out; `reads` says what code may read.
"""

from __future__ import annotations

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

from mlvm.arena.scratch_pad import ScratchPad
from mlvm.core.errors import CaptureError
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
from mlvm.eager.capture.guards.reads import (
    ALL,
    COMPARISONS,
    CONSTRUCTORS,
    TEXTS,
    Reads,
    is_special,
    reads_of,
    reads_of_builtin,
)
from mlvm.eager.capture.guards.surroundings import Field, dict_of
from mlvm.eager.capture.guards.watch import Watch
from mlvm.eager.tensor.tensor import Tensor
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
    globals, and so on from each of them. All functions are looked into, except those of libraries
    (`layout.is_library`). Containers and arrays are known by what they hold; objects, classes
    and modules by identity and by the fields that the code may read. `names` are these fields, for
    all code that is reached. If they are more than the signature was made with, it has not seen
    everything.

    `objects` are those among the arguments. They are looked into, too, when the signature is made;
    `of_call` gives the signature of one call, and `of_arguments` adds its arguments to that.

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
        objects: Sequence[Any] = (),
    ) -> None:
        self.tensors: list[Tensor]
        self.inputs: list[Tensor]
        self.fields: list[tuple[Field, Tensor]]
        self.numbers: list[float]
        self.places: list[Place | None]
        self._numbers: dict[int, int]
        self._roots: dict[int, int]
        self.held: list[Any] = []
        self.watch = Watch()
        self.names = names
        self._rebound = rebound
        self._reached: set[int] = set()
        self._every = ALL in names
        self._fields_rebound: list[Field] = []
        self._numbers_in_tuples: list[float] = []
        self._places_in_fields: list[Place | None] = []
        self._places_in_tuples: list[Place | None] = []
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
        self._owner = None
        for value in objects:
            self._add(value)
        self._walk()
        self.key = _Key(self._parts)
        self.watch.close()

    def of_call(self, *, checked: bool = True) -> Signature | None:
        """The signature of a call, without its arguments; None if it is `checked` and what the
        function reaches may have changed."""
        if checked and not self.watch.holds():
            return None
        numbers, tensors = self.watch.numbers_now(), self.watch.tensors_now()
        if numbers is None or tensors is None:
            return None
        call = object.__new__(Signature)
        vars(call).update(vars(self))
        call.numbers = numbers + self._numbers_in_tuples
        call.places = self._places_in_fields + self._places_in_tuples
        call.tensors = []
        call.inputs = []
        call.fields = list(zip(self._fields_rebound, tensors, strict=True))
        call._numbers = {}
        call._roots = {}
        return call

    def of_arguments(self, *arguments: Any) -> tuple[Any, ...]:
        """The structure and tensors of the arguments, and their values. Raises `CaptureError` for a
        tensor of a scratch pad."""
        fields = [self._of_argument(x) for _, x in self.fields]
        return self.key, *fields, *map(self._of_argument, arguments)

    def is_reached(self, x: Tensor) -> bool:
        """Whether the function reaches this very tensor by itself, and not only as an argument."""
        return id(x) in self._reached

    def _of_argument(self, value: Any, *, key: bool = False) -> Any:
        kind = type(value)
        if kind is Tensor or isinstance(value, Tensor):
            if id(value) in self._reached:
                return Tensor, id(value)
            root = value if value.base is None else value.base
            if isinstance(root.arena, ScratchPad):
                raise CaptureError(
                    f"a captured function was given a {value.type} of scratch pad "
                    f"{value.arena.name!r}, which may lie over other tensors; give it a copy"
                )
            number = self._numbers.setdefault(id(value), len(self.tensors))
            if number == len(self.tensors):
                self.tensors.append(value)
            place = self._roots.setdefault(id(root), len(self.inputs))
            if place == len(self.inputs):
                self.inputs.append(value)
            return value.type, number, place, root is value
        if kind in _NUMBERS and not key:
            self.numbers.append(value)
            self.places.append(None)
            return kind
        if kind in PLAIN:
            return kind, repr(value) if kind is float or kind is complex else value
        if isinstance(value, (list, tuple)):
            more = self._besides(value)
            return kind, more, tuple([self._of_argument(each, key=key) for each in value])
        if isinstance(value, dict):
            items = [
                (self._of_argument(name, key=True), self._of_argument(each, key=key))
                for name, each in value.items()
            ]
            return kind, self._besides(value), tuple(items)
        return self._seen[id(value)]

    def _besides(self, container: Any) -> tuple[int, ...]:
        return tuple([self._seen[id(each)] for each in _besides(container)])

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

    def _add_field(self, owner: Any, fields: dict[str, Any], name: str, value: Any) -> None:
        """A field of a Module or an optimizer, of which a number is no part of the structure."""
        kind = type(value)
        if kind in _NUMBERS:
            self._parts.append(kind)
            self.watch.numbers.append((fields, name, kind))
            self._places_in_fields.append(Place(owner, name, None))
            return
        self.watch.item(fields, name, value)
        if kind is tuple and len(value) <= _FEW and _NUMBERS.issuperset(map(type, value)):
            self._parts.append((kind, *map(type, value)))
            self._numbers_in_tuples += value
            self._places_in_tuples += [Place(owner, name, i) for i in range(len(value))]
        else:
            self._add(value)

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
        add, parts, watch = self._add, self._parts, self.watch
        for cell in fn.__closure__ or ():
            add(self._content(cell))
        variables = fn.__globals__
        if is_library(home := str(variables.get("__name__", ""))):
            if "__wrapped__" not in fn.__dict__:  # or it reads what the wrapped one does
                self._library(home)
            return
        code = fn.__code__
        self.held.append(code)
        parts.append(id(code))
        for name in ("__code__", "__defaults__", "__kwdefaults__"):
            watch.attribute(fn, name, getattr(fn, name))
        add(fn.__defaults__)
        add(fn.__kwdefaults__)
        reads = reads_of(code)
        self._may_read(reads)
        for name in reads.globals:
            if name in variables:
                parts.append(name)
                watch.item(variables, name, variables[name])
                add(variables[name])
            else:
                watch.item(variables, name)
        for level, name in reads.imports:
            if level:
                package = variables.get("__package__") or home
                name = importlib.util.resolve_name("." * level + name, package)
            if name in sys.modules:
                parts.append(name)
                watch.item(sys.modules, name, sys.modules[name])
                add(sys.modules[name])
            else:
                watch.item(sys.modules, name)
        parts.append(None)
        watch.attribute(fn, "__dict__", fn.__dict__)
        watch.names(fn.__dict__)
        if fn.__dict__:
            self._fields(fn.__dict__)

    def _content(self, cell: types.CellType) -> Any:
        try:
            value = cell.cell_contents
        except ValueError:  # a variable that has no value yet
            self.watch.blind = True
            return None
        self.watch.attribute(cell, "cell_contents", value)
        return value

    def _method(self, method: types.MethodType) -> None:
        self._add(method.__self__)
        self._add(method.__func__)

    def _partial(self, call: functools.partial[Any]) -> None:
        for name in ("func", "args", "keywords"):
            part = getattr(call, name)
            self.watch.attribute(call, name, part)
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
        self.watch.blind = True
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
        if kind is dict:
            self.watch.content(value, dict)
        else:
            self.watch.blind = True
        items = list(value.items() if kind is types.MappingProxyType else kind.items(value))
        self._parts.append(len(items))
        for key, each in items:
            add(key)
            add(each)

    def _sequence(self, value: Any, kind: Any = list) -> None:
        add, items = self._add, list(kind.__iter__(value))
        self.watch.content(value, kind)
        self._parts.append(len(items))
        for each in items:
            add(each)

    def _bounds(self, value: slice | range) -> None:
        for part in (value.start, value.stop, value.step):
            self._add(part)

    def _reference(self, reference: weakref.ref[Any]) -> None:
        self.watch.blind = True
        self._add(reference())

    def _module(self, module: types.ModuleType) -> None:
        name = module.__name__
        self.watch.object(module, None)
        if not is_library(name):
            self.watch.names(vars(module))
            self._fields(vars(module), but=_OF_EVERY_MODULE)
            return
        self._library(name)
        for each in stateful_names(name):
            if each in self.names:
                self._parts.append(each)
                self.watch.item(vars(module), each, getattr(module, each))
                self._add(getattr(module, each))
        self._parts.append(None)

    def _class(self, kind: type, *, made: bool = False) -> None:
        """Its fields and its bases. A constructor counts if an object may be `made`. A method that
        overrides a library's counts, as the library may call it."""
        if is_library(kind.__module__):
            self._library(kind.__module__)
            return
        names, parts, layout = self.names, self._parts, self._layout(kind)
        of_class = vars(kind)
        self.watch.object(kind, None)
        self.watch.names(of_class)
        self.watch.attribute(kind, "__bases__", kind.__bases__)
        every = self._every or layout.how == "open"
        made = made or every or "__init__" in names or "__class__" in names
        for name, field in list(of_class.items()):
            if name not in names and not every:
                if name in CONSTRUCTORS or _is_generated(kind, name, field):
                    if not made:
                        continue
                elif name in TEXTS or not (is_special(name) or name in layout.overrides):
                    continue
            self.watch.item(of_class, name, field)
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
        fields = dict_of(value) if layout.has_dict else None
        if fields is not None and dict_of(value) is not fields:
            self.watch.blind = True
        if how != "identical":
            self.watch.object(value, fields)
        if base in MAPPINGS:
            self._mapping(value, base)
        elif base in ARRAYS:
            content = content_of_array(value)
            self.watch.array(content_of_array, value, content)
            self._add(content)
        elif base in PLAIN:
            self._parts.append(cast(Any, base).__repr__(value))
        elif base is not None:
            self._sequence(value, base)
            self._parts.append(getattr(value, "maxlen", None) if base is deque else None)
        if how == "identical":
            self._identical(value)
        else:
            if layout.slots:
                self._slots(value, layout, open=how not in ("named", "node"))
            if type(value) is types.SimpleNamespace:
                self._namespace(value)
            if fields is not None and how == "node":
                self._node(value, fields)
            elif fields is not None and how == "optimizer":
                self._optimizer(value, fields)
            elif fields is not None:
                self._fields(fields, open=how != "named")
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
                self.watch.item(fields, name, fields[name])
                self._add(fields[name])

    def _slots(self, value: Any, layout: Layout, *, open: bool) -> None:
        """An object's fields in slots."""
        self.watch.blind |= layout.how == "node"  # more than names decides what counts
        for number, name in layout.slots:
            kind = type(value).__mro__[number]
            slot = vars(kind)[name]
            self.watch.item(vars(kind), name, slot)
            try:
                field = slot.__get__(value)
            except AttributeError:  # it has no value yet
                self.watch.slot(slot, value)
                continue
            self.watch.slot(slot, value, field)
            if open or self._every or name in self.names or holds_tensors(field):
                self._parts.append(name)
                self._add(field)
        self._parts.append(None)

    def _namespace(self, value: types.SimpleNamespace) -> None:
        if self._namespaces or "__repr__" in self.names:  # several may be compared
            for each in (*self._namespaces, value):
                self.names |= dict_of(each).keys()
        self._namespaces.append(value)

    def _optimizer(self, value: Any, fields: dict[str, Any]) -> None:
        """Its own dicts hold only tensors that it updates."""
        for name, field in list(fields.items()):
            if name in self.names or type(field) is not dict:
                self._parts.append(name)
                self._add_field(value, fields, name, field)
            else:
                self.watch.item(fields, name, field)
        self._parts.append(None)

    def _node(self, node: Any, fields: dict[str, Any]) -> None:
        """The fields of a Module that code names, and those that are part of its tree."""
        names, parts, held, every = self.names, self._parts, self.held, self._every
        reached, watch = self._reached, self.watch
        rebound = self._rebound.get(id(node), ())
        for name, field in list(fields.items()):
            if type(field) is Tensor:
                parts.append(name)
                if name in rebound:
                    self._fields_rebound.append(Field(node, name))
                    watch.tensors.append((fields, name))
                else:
                    reached.add(id(field))
                    held.append(field)
                    parts.append(id(field))
                    watch.item(fields, name, field)
            elif every or name in names or holds_tensors(field):
                parts.append(name)
                self._add_field(node, fields, name, field)
            else:
                watch.unread(fields, name, field)
        parts.append(None)

    def _fields(
        self, fields: dict[str, Any], *, open: bool = False, but: Container[str] = ()
    ) -> None:
        names, parts, every = self.names, self._parts, open or self._every
        for name, field in list(fields.items()):
            if (every or name in names) and name not in but:
                parts.append(name)
                self.watch.item(fields, name, field)
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


class _Key:
    """Parts of a signature, of which the hash is computed once."""

    __slots__ = ("_hash", "_parts")

    def __init__(self, parts: Iterable[Any]) -> None:
        self._parts = tuple(parts)
        self._hash = hash(self._parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._parts == other._parts


def _besides(container: Any) -> list[Any]:
    """What a list, tuple or dict of a subclass holds besides its items."""
    if type(container) in (list, tuple, dict):
        return []
    more = dict_of(container), getattr(container, "default_factory", None)
    return [each for each in more if each]


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
