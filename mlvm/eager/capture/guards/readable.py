"""The state of an object that guards can read, and the modules that belong to libraries."""

from __future__ import annotations

import abc
import array
import collections
import functools
import hashlib
import io
import logging
import os
import sys
import sysconfig
import types
import weakref
from inspect import get_annotations
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from mlvm.core.memo import memoized
from mlvm.eager.nn.module import Module
from mlvm.eager.optim.optimizer import Group, Optimizer
from mlvm.eager.tensor.values import module_of
from mlvm.eager.tree import Node

SMALL: Final = 1 << 10
"""Maximum size in bytes of an array that is compared directly; comparing it needs no more time than
computing a digest."""

PLAIN: Final = frozenset({bool, int, float, complex, str, bytes, type(None)})
MAPPINGS: Final = (collections.OrderedDict, dict, types.MappingProxyType)
ARRAYS: Final = (np.ndarray, np.generic, bytearray, array.array)
BASES: Final[tuple[type, ...]] = (
    *(*MAPPINGS, *ARRAYS, list, tuple, set, frozenset, collections.deque),
    *(int, float, complex, str, bytes, property),
)
"""Builtin classes with objects that expose all state, also in subclasses."""
BY_VALUE: Final = frozenset(
    {*BASES, *np.sctypeDict.values(), slice, range, types.MethodType, functools.partial}
)
"""Classes of objects that are compared only by value."""

_IMMUTABLE: Final = """
builtins.builtin_function_or_method builtins.classmethod_descriptor builtins.code
builtins.getset_descriptor builtins.member_descriptor builtins.method_descriptor
builtins.wrapper_descriptor types.GenericAlias types.UnionType
typing.NewType typing.ParamSpec typing.TypeAliasType typing.TypeVar typing.TypeVarTuple
typing.Union typing._Final datetime.date datetime.time datetime.timedelta datetime.timezone
decimal.Decimal enum.Enum fractions.Fraction inspect.Parameter inspect.Signature
ipaddress._IPAddressBase operator.attrgetter operator.itemgetter operator.methodcaller
pathlib.PurePath pathlib._local.PurePath re.Pattern uuid.UUID zoneinfo.ZoneInfo _abc._abc_data
_collections._tuplegetter collections._tuplegetter
_thread.RLock _thread.lock numpy._ArrayFunctionDispatcher numpy.dtype numpy.generic numpy.ufunc
"""
"""Classes of objects that never change, or change only in state that no step reads."""

_LOGGERS: Final = (logging.Logger, logging.LoggerAdapter)
"""Classes of objects to which a step writes but from which it reads nothing; includes subclasses.
"""

_SELF: Final = __name__.partition(".")[0]
_LANGUAGE: Final = tuple(
    f"{_SELF}.eager.{part}"
    for part in ("control.", "nn.", "optim.", "transform.", "tensor.autocast")
)
"""Packages of mlvm with objects that contain users' hyperparameters, rules or functions.

Such an object is treated like a user's object, and all fields are compared.
"""
_LAYERS: Final = f"{_SELF}.eager.nn."
_OF_ARRAYS: Final = frozenset({"einops", "opt_einsum", "array_api_compat", "array_api_extra"})
_ASSUMED: Final = frozenset({_SELF, "numpy", *_OF_ARRAYS})
"""Libraries in addition to Python's standard library.

The caches and lists of array libraries do not change the results."""

_SPECIAL_ONLY: Final = """
numpy builtins abc bisect cmath collections contextlib datetime decimal enum fractions functools
heapq itertools logging math numbers os pathlib posix posixpath random re statistics struct sys
threading time types typing warnings _abc _bisect _collections _collections_abc _datetime
_decimal _functools _heapq _operator _random _statistics _struct _thread _warnings
"""
"""Libraries other than mlvm that read no fields of arguments, and call only special methods.
"""

_READING_SPECIAL_ONLY: Final = frozenset({_SELF, *_OF_ARRAYS, *_SPECIAL_ONLY.split()})
_MIXINS: Final = frozenset({"abc", "typing", "collections.abc", "typing_extensions"})
"""Modules other than those of mlvm with classes that read no fields of subclasses."""
_PATHS: Final = "stdlib", "platstdlib"


class ReadableState(NamedTuple):
    """Description of the state that objects of a class expose.

    Attributes:
        how: the state that is compared. `object`: the fields that code names. `node`, `optimizer`:
            also the fields that mlvm reads. `identical`: only the identity. `hidden`: a part cannot
            be read.
        open: whether all fields are compared, because library code reads them.
        base: the builtin class that defines the contents of the object.
        slots: fields in slots, as the index of a class in the method resolution order, and the
            name.
        overrides: names of library classes that the class overrides.
        names: names of fields that code of mlvm's layers reads.
    """

    how: Literal["identical", "object", "node", "optimizer", "hidden"]
    open: bool
    base: type | None
    slots: tuple[tuple[int, str], ...]
    overrides: frozenset[str]
    names: frozenset[str] = frozenset()


_by_class: weakref.WeakKeyDictionary[type, ReadableState] = weakref.WeakKeyDictionary()


def readable_state(kind: type) -> ReadableState:
    state = _by_class.get(kind)
    if state is None:
        state = _by_class[kind] = _read_class(kind)
    return state


def _read_class(kind: type) -> ReadableState:
    base = next((each for each in BASES if issubclass(kind, each)), None)
    libraries = [c for c in kind.__mro__ if is_library(c) and c not in (object, base)]
    slots = [
        (i, name)
        for i, each in enumerate(kind.__mro__)
        for name, field in vars(each).items()
        if isinstance(field, types.MemberDescriptorType) and name != "__dict__"
    ]
    immutable = (
        any(f"{_home(c)}.{c.__qualname__}" in _IMMUTABLE.split() for c in kind.__mro__)
        and kind is not np.dtypes.VoidDType
    )
    open = not all(module_of(c) in _MIXINS or is_of_machine(c) for c in libraries)
    steady = is_of_machine(kind) or (immutable and base is None)
    how: Any = "object"
    names = frozenset[str]()
    if issubclass(kind, (Optimizer, Group)):
        how, open = "optimizer", False
    elif issubclass(kind, Node):
        layers = [each for each in libraries if each not in (Module, Node)]
        how, open = "node", not all(module_of(each).startswith(_LAYERS) for each in layers)
        if layers:  # the modules of layers have been imported
            modules = {name for name in [*sys.modules] if name.startswith(_LAYERS)}
            names = _names_in(frozenset(modules - {Module.__module__}))
    elif issubclass(kind, _LOGGERS) or (steady and is_library(kind)):
        how = "identical"
    elif not immutable and _hides(kind, base or object, len(slots)):
        how = "hidden"
    overrides = frozenset(name for each in libraries for name in vars(each) if name[:2] != "__")
    open = open and kind is not types.SimpleNamespace
    return ReadableState(how, open, base, tuple(slots), overrides, names)


@functools.cache
def _names_in(modules: frozenset[str]) -> frozenset[str]:
    """Return all names that the code of these modules of layers may read from a layer."""
    names: set[str] = set()
    pending = [
        value
        for name in modules
        for value in vars(sys.modules[name]).values()
        if module_of(value).startswith(_LAYERS)
    ]
    while pending:
        value = pending.pop()
        if isinstance(value, type):
            pending += [*vars(value).values(), *vars(value), *get_annotations(value)]
        elif isinstance(value, (property, staticmethod, classmethod)):
            pending += [getattr(value, name, None) for name in ("fget", "__func__")]
        elif isinstance(value, types.FunctionType):
            pending += [value.__code__, getattr(value, "__wrapped__", None)]
        elif isinstance(value, (tuple, frozenset)):
            pending += value
        elif isinstance(value, types.CodeType):
            names.update(value.co_names)
            pending += value.co_consts
        elif isinstance(value, str) and value.isidentifier():
            names.add(value)
    return frozenset(names)


def _home(kind: type) -> str:
    return module_of(kind).partition(".")[0]


def is_of_machine(kind: type) -> bool:
    """Return whether a class belongs to mlvm and instances contain no state of the user."""
    return _home(kind) == _SELF and not module_of(kind).startswith(_LANGUAGE)


def _hides(kind: type, base: type, slots: int) -> bool:
    """Return whether an object has memory other than base, slots, dict and weak references."""
    pointers = slots
    # -1: stored outside the object
    pointers += kind.__dictoffset__ not in (0, -1) and base.__dictoffset__ == 0
    pointers += kind.__weakrefoffset__ > 0 and base.__weakrefoffset__ == 0
    if kind.__itemsize__ and not base.__itemsize__:
        return True
    return kind.__basicsize__ > base.__basicsize__ + pointers * tuple.__itemsize__


def is_library(part: str | type) -> bool:
    """Return whether a class, or the module with this name, belongs to a library.

    Libraries are assumed not to change. A class created by `types.new_class` belongs to the caller.
    """
    if isinstance(part, str):
        return part.partition(".")[0] in _ASSUMED or is_standard(part)
    is_new = module_of(part) == "types" and getattr(types, part.__name__, None) is not part
    return not is_new and is_library(module_of(part))


def is_standard(module: str) -> bool:
    """Return whether a module belongs to the standard library and is not a user's file."""
    top = module.partition(".")[0]
    return top in sys.stdlib_module_names and _comes_with_python(sys.modules.get(top))


_STANDARD: Final = tuple({os.path.realpath(sysconfig.get_path(name)) + os.sep for name in _PATHS})
_by_module: weakref.WeakKeyDictionary[types.ModuleType, bool] = weakref.WeakKeyDictionary()


def _comes_with_python(module: Any) -> bool:
    if type(module) is not types.ModuleType:
        return True  # the module is not imported
    if module not in _by_module:
        file = getattr(module, "__file__", None)
        if isinstance(file, str):
            file = os.path.realpath(file)
            standard = file.startswith(_STANDARD) and "site-packages" not in file
        else:  # a builtin or frozen module, or a folder
            standard = not hasattr(module, "__path__")
        _by_module[module] = standard
    return _by_module[module]


def reads_special_only(module: str) -> bool:
    """Return whether a library module calls only special methods of arguments."""
    return module.partition(".")[0] in _READING_SPECIAL_ONLY and is_library(module)


@memoized(1024)
def stateful_names(module: str) -> tuple[str, ...]:
    """Return the names of objects in a standard-library module that may change, such as `environ`.

    They include abstract classes, because other classes may be registered with them."""
    if module.partition(".")[0] in (_SELF, "numpy") or module not in sys.modules:
        return ()
    steady: Any = (io.IOBase, type, types.ModuleType, types.FunctionType, *PLAIN)
    return tuple(
        name
        for name, value in vars(sys.modules[module]).items()
        if name[:2] != "__"
        and (isinstance(value, abc.ABCMeta) or not isinstance(value, steady))
        and not isinstance(getattr(value, "__self__", None), types.ModuleType)
    )


def content_of(value: Any) -> tuple[Any, ...]:
    """Return the dtype, the shape, and the bytes of an array; above `SMALL` bytes a digest."""
    array = np.asarray(value)
    dtype, data = array.dtype, array.tobytes()
    named = str(dtype) if dtype.kind == "V" else dtype.str  # `dtype.str` is faster
    part = data if len(data) <= SMALL else hashlib.sha256(data).digest()
    return named, array.shape, part, dtype.hasobject and array.tolist()
