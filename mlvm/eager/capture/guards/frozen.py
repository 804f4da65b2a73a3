"""Warnings of values that a trace freezes: clocks, numpy's random draws, input from a user.

They are found in the instructions of the functions that a captured function reaches.
"""

from __future__ import annotations

import builtins
import datetime
import dis
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np

from mlvm.eager.capture.guards.checker import CELL, MISSING, content_of_slot
from mlvm.eager.capture.guards.guard_set import GuardSet
from mlvm.eager.capture.guards.layout import is_library
from mlvm.eager.tensor.warn import warn_at

_CLOCKS: Final = frozenset(
    [f"time.{name}{unit}" for name in ("time", "perf_counter", "monotonic") for unit in ("", "_ns")]
    + [f"time.{name}{unit}" for name in ("process_time", "thread_time") for unit in ("", "_ns")]
)
_NOW: Final = frozenset({"now", "utcnow", "today"})  # of `datetime`'s classes
_ENTROPY: Final = frozenset({"posix.urandom", "nt.urandom", "uuid.uuid1", "uuid.uuid4"})
_SEEDS: Final = frozenset({"seed", "get_state", "set_state"})

_AS_ARGUMENT: Final = "give it as an argument"
_WITH_KEY: Final = f"{_AS_ARGUMENT}, or draw with ml.random, which has a key and goes on"
_FUNCTIONS: Final = frozenset(
    {types.FunctionType, types.BuiltinFunctionType, types.MethodType, type(np.random.default_rng)}
)
_LOADS: Final = frozenset(
    {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"}
    | {f"LOAD_FAST{how}" for how in ("", "_CHECK", "_BORROW")}
)
_NO_STEPS: Final = frozenset({"PRECALL", "PUSH_NULL", "CACHE", "EXTENDED_ARG"})

_warned: set[tuple[str, str]] = set()  # lines, each with the function that it calls


class FrozenWarning(UserWarning):
    """A captured function reads a clock, draws from numpy's generators or reads a user's input. It
    does so once, in its trace: all later calls have the same value. The text has the remedy.

        >>> import time, warnings
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     _ = ml.capture(lambda x: x * time.time())(ml.ones(3))
        >>> caught[0].category.__name__, str(caught[0].message).partition(" ")[0]
        ('FrozenWarning', 'time.time()')
    """


class Reading(NamedTuple):
    """A name that code loads.

    path: the name, and the attributes that are read of it.
    imported: the module, and a name in it, if the code imports the name itself.
    line: of the code's file.
    bare: whether it is called without arguments.
    """

    path: tuple[str, ...]
    imported: tuple[str, ...]
    line: int
    bare: bool


_by_code: weakref.WeakKeyDictionary[types.CodeType, list[Reading]] = weakref.WeakKeyDictionary()


def warn_of_frozen(guards: GuardSet, name: str) -> None:
    """Issue a `FrozenWarning` for each line of reached code that reads a clock, entropy or input;
    for a line once. `name` is the captured function's."""
    for fn in guards.keepalive:
        if type(fn) is not types.FunctionType or is_library(str(fn.__globals__.get("__name__"))):
            continue
        for code, reading in _readings(fn.__code__):
            remedy = _remedy(_value_of(reading, fn), bare=reading.bare)
            where, what = f"{code.co_filename}:{reading.line}", ".".join(reading.path)
            if remedy is not None and (where, what) not in _warned:
                warn_at(
                    where,
                    f"{what}() is read once, while {name!r} is recorded, and is the same in all "
                    f"later calls; {remedy}",
                    FrozenWarning,
                )
                _warned.add((where, what))


def _remedy(value: Any, *, bare: bool) -> str | None:
    """Return the remedy for a call of a function whose value a trace freezes; None for others."""
    if type(value) not in _FUNCTIONS:  # of others, to ask for a name may call code
        return None
    owner: Any = getattr(value, "__self__", None)
    if type(owner) is np.random.RandomState:
        return _WITH_KEY if value.__name__ not in _SEEDS else None
    if issubclass(type(owner), type) and issubclass(owner, datetime.date):
        return _AS_ARGUMENT if value.__name__ in _NOW else None
    if type(value) is types.MethodType:
        return None
    if value is np.random.default_rng:
        return f"{_WITH_KEY}; with a seed it is the same in eager calls, too" if bare else None
    full = f"{value.__module__}.{value.__name__}"
    if full in _ENTROPY or full.startswith("secrets."):
        return _WITH_KEY
    return _AS_ARGUMENT if full in _CLOCKS or full == "builtins.input" else None


def _value_of(reading: Reading, fn: types.FunctionType) -> Any:
    """Return the value that is read; `MISSING` without one, or where reading it may call code."""
    first, *rest = reading.path
    value: Any = MISSING
    if reading.imported:
        module, *names = reading.imported
        value, rest = sys.modules.get(module, MISSING), [*names, *rest]
    elif first in fn.__code__.co_freevars:
        cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
        value = content_of_slot(cells[first], CELL)
    else:
        value = fn.__globals__.get(first, getattr(builtins, first, MISSING))
    for name in rest:
        if not issubclass(type(value), (types.ModuleType, type)):
            return MISSING
        value = getattr(value, name, MISSING)
    return value


def _readings(code: types.CodeType) -> Iterator[tuple[types.CodeType, Reading]]:
    """Yield the names that the code, and code inside of it, loads."""
    if code not in _by_code:
        _by_code[code] = list(_readings_of(code))
    yield from ((code, each) for each in _by_code[code])
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _readings(inner)


def _readings_of(code: types.CodeType) -> Iterator[Reading]:
    steps = [each for each in dis.get_instructions(code) if each.opname not in _NO_STEPS]
    imported: dict[str, tuple[str, ...]] = {}
    module = ""
    for i, step in enumerate(steps):
        before = steps[i - 1]
        if step.opname == "IMPORT_NAME":
            module = step.argval
        elif step.opname.startswith("STORE_") and before.opname == "IMPORT_NAME":
            imported[step.argval] = (module.partition(".")[0],)
        elif step.opname.startswith("STORE_") and before.opname == "IMPORT_FROM":
            imported[step.argval] = module, before.argval
        elif step.opname in _LOADS:
            end = i + 1
            while end < len(steps) and steps[end].opname in ("LOAD_ATTR", "LOAD_METHOD"):
                end += 1
            path = tuple([each.argval for each in steps[i:end]])
            bare = end < len(steps) and steps[end].opname == "CALL" and steps[end].arg == 0
            line = step.positions.lineno if step.positions else None
            source = imported.get(step.argval, ())
            if source or not step.opname.startswith("LOAD_FAST"):
                yield Reading(path, source, line or code.co_firstlineno, bare)
