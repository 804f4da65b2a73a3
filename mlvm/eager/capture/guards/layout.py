"""How an object can be looked into, by its class; and what is taken for a library."""

from __future__ import annotations

import array
import collections
import collections.abc
import contextvars
import functools
import hashlib
import io
import logging
import operator
import sys
import threading
import types
import weakref
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from mlvm.eager.nn.module import Module
from mlvm.eager.optim.optimizer import Group, Optimizer
from mlvm.eager.tree import Node

PLAIN: Final = frozenset({bool, int, float, complex, str, bytes, type(None)})
MAPPINGS: Final = (collections.OrderedDict, dict, types.MappingProxyType)
ARRAYS: Final = (np.ndarray, np.generic, bytearray, array.array)
BASES: Final[tuple[type, ...]] = (
    *(*MAPPINGS, *ARRAYS, list, tuple, set, frozenset, collections.deque),
    *(int, float, complex, str, bytes),
)
"""Python shows all that an object of these classes, or of their subclasses, holds."""
BY_VALUE: Final = frozenset(
    {*BASES, *np.sctypeDict.values(), slice, range, types.MethodType, functools.partial}
)
"""What is known by value alone."""

_SELF: Final = __name__.partition(".")[0]
_OF_ARRAYS: Final = frozenset({"einops", "opt_einsum", "array_api_compat", "array_api_extra"})
"""Libraries of functions of arrays, whose caches and lists do not change what they compute."""

_LIBRARIES: Final = frozenset({_SELF, "numpy", *_OF_ARRAYS, *sys.stdlib_module_names})
_SPECIAL_ONLY: Final = """
numpy builtins abc bisect cmath collections contextlib datetime decimal enum fractions functools
heapq itertools logging math numbers os pathlib posix posixpath random re statistics string struct
sys threading time types typing warnings _abc _bisect _collections _collections_abc _datetime
_decimal _functools _heapq _operator _random _statistics _struct _thread _warnings
"""
"""Libraries besides these and mlvm that read no fields of the objects they are given, and call only
their special methods."""

_READING_SPECIAL_ONLY: Final = frozenset({_SELF, *_OF_ARRAYS, *_SPECIAL_ONLY.split()})
_MIXINS: Final = frozenset({_SELF, "abc", "typing", "collections.abc", "typing_extensions"})
"""Libraries whose classes read no fields of their subclasses."""

_IDENTICAL: Final = (
    *(logging.Logger, logging.LoggerAdapter, type(threading.Lock()), type(threading.RLock())),
    *(np.ufunc, type(np.mean), type(vars(collections.abc.Hashable)["_abc_impl"])),
    *(operator.itemgetter, operator.attrgetter, operator.methodcaller),
)
"""Classes of what never changes, and of what a step may write to but reads nothing from."""

_POINTER: Final = tuple.__itemsize__


class Layout(NamedTuple):
    """How an object is looked into.

    `how` says what counts:
    - `identical`: its identity alone.
    - `named`: the fields that code names.
    - `open`: all fields, as a library's code reads them.
    - `node`, `optimizer`: the fields that mlvm reads. `open node`: all of a Module's fields.
    - `hidden`: a part of it cannot be seen.

    Besides its fields the object holds what its `base` holds. `slots` are fields in slots: the
    number of a class in the order of resolution, and the name. `by_user`: a user wrote the class,
    which `overrides` these names of libraries' classes.
    """

    how: Literal["identical", "named", "open", "node", "open node", "optimizer", "hidden"]
    base: type | None
    has_dict: bool
    slots: tuple[tuple[int, str], ...]
    by_user: bool
    overrides: frozenset[str]


_known: dict[int, tuple[weakref.ref[type], Layout]] = {}


def layout_of(kind: type) -> Layout:
    known = _known.get(id(kind))
    if known is None or known[0]() is not kind:
        if len(_known) >= 4096:
            _known.clear()
        known = _known[id(kind)] = weakref.ref(kind), _layout(kind)
    return known[1]


def _layout(kind: type) -> Layout:
    base = next((each for each in BASES if issubclass(kind, each)), None)
    libraries = [c for c in kind.__mro__ if is_library(c.__module__) and c not in (object, base)]
    slots = [
        (i, name)
        for i, each in enumerate(kind.__mro__)
        for name, field in vars(each).items()
        if isinstance(field, types.MemberDescriptorType) and name != "__dict__"
    ]
    by_user = not is_library(kind.__module__)
    has_dict = kind.__dictoffset__ != 0
    how: Any = "named"
    if issubclass(kind, (Optimizer, Group)):
        how = "optimizer"
    elif issubclass(kind, Node):
        how = "node" if all(each in (Module, Node) for each in libraries) else "open node"
    elif issubclass(kind, _IDENTICAL) or (not by_user and _is_steady(kind, base)):
        how = "identical"
    elif _hides(kind, base or object, len(slots)) and not any(map(_cannot_change, libraries)):
        how = "hidden"
    elif kind is types.SimpleNamespace:
        how = "named"
    elif not all(each.__module__ in _MIXINS or _home(each) == _SELF for each in libraries):
        how = "open"
    overrides = frozenset(name for each in libraries for name in vars(each) if name[:2] != "__")
    return Layout(how, base, has_dict, tuple(slots), by_user, overrides)


def _home(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _is_steady(kind: type, base: type | None) -> bool:
    """Whether an object of a library's class is known by identity."""
    return _home(kind) == _SELF or (base is None and _cannot_change(kind))


def _cannot_change(kind: type) -> bool:
    """Whether an object of a library's class never changes. One with a hash of its own does not,
    as the hash must stay; nor does a descriptor without a dict."""
    if issubclass(kind, (weakref.ref, contextvars.ContextVar, memoryview)):
        return False
    if kind.__hash__ not in (None, object.__hash__):
        return True
    return hasattr(kind, "__get__") and kind.__dictoffset__ == 0


def _hides(kind: type, base: type, slots: int) -> bool:
    """Whether an object has more memory than what is known to be there: its base, its slots, and
    its pointers to a dict and to weak references."""
    pointers = slots
    pointers += kind.__dictoffset__ not in (0, -1) and base.__dictoffset__ == 0  # -1: not within
    pointers += kind.__weakrefoffset__ > 0 and base.__weakrefoffset__ == 0
    if kind.__itemsize__ and not base.__itemsize__:
        return True
    return kind.__basicsize__ > base.__basicsize__ + pointers * _POINTER


@functools.lru_cache(maxsize=4096)
def is_library(module: str) -> bool:
    """Whether the module is one of numpy, the standard library, mlvm or the libraries of arrays:
    these are taken not to change."""
    return module.partition(".")[0] in _LIBRARIES


def reads_special_only(module: str) -> bool:
    """Whether a library reads no fields of the objects it is given, and calls only their special
    methods."""
    return module.partition(".")[0] in _READING_SPECIAL_ONLY


@functools.lru_cache(maxsize=1024)
def stateful_names(module: str) -> tuple[str, ...]:
    """The names of objects that may change in a module of the standard library, as `environ`."""
    if module.partition(".")[0] in (_SELF, "numpy"):
        return ()
    steady: Any = (io.IOBase, type, types.ModuleType, types.FunctionType, *PLAIN)
    return tuple(
        name
        for name, value in vars(sys.modules[module]).items()
        if name[:2] != "__"
        and not isinstance(value, steady)
        and not isinstance(getattr(value, "__self__", None), types.ModuleType)
    )


def content_of_array(value: Any) -> tuple[Any, ...]:
    """An array's dtype, its shape, and a digest of its bytes."""
    seen = np.asarray(value)
    digest = hashlib.sha256(seen.tobytes()).digest()
    return str(seen.dtype), seen.shape, digest, seen.dtype.hasobject and seen.tolist()
