"""What changes by itself, and is part of a program once a captured function has read it: clocks,
draws of others, what somebody types. The code of the functions that were reached is looked
through for it.
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

from mlvm.eager.capture.guards.layout import is_library
from mlvm.eager.capture.guards.look import Look
from mlvm.eager.capture.guards.read import CELL, MISSING, content_of_slot
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

_told: set[tuple[str, str]] = set()  # lines, and what they read


class FrozenWarning(UserWarning):
    """A captured function reads a clock, draws from numpy's generators or asks somebody. It does so
    once, while it is recorded: all later calls have the same. The text says what to write.

        >>> import time, warnings
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     _ = ml.capture(lambda x: x * time.time())(ml.ones(3))
        >>> caught[0].category.__name__, str(caught[0].message).partition(" ")[0]
        ('FrozenWarning', 'time.time()')
    """


class Reading(NamedTuple):
    """A name that code loads, `path` with what is read of it, and the line. A name that the code
    imports by itself is `imported`: a module, and a name in it. `bare` is a call without arguments.
    """

    path: tuple[str, ...]
    imported: tuple[str, ...]
    line: int
    bare: bool


_known: weakref.WeakKeyDictionary[types.CodeType, list[Reading]] = weakref.WeakKeyDictionary()


def warn_of_frozen(look: Look, name: str) -> None:
    """Issue a `FrozenWarning` for each line of what the captured function of that name reaches
    that reads what changes by itself; for a line once."""
    for fn in look.held:
        if type(fn) is not types.FunctionType or is_library(str(fn.__globals__.get("__name__"))):
            continue
        for code, reading in _readings(fn.__code__):
            remedy = _remedy(_value_of(reading, fn), bare=reading.bare)
            where, what = f"{code.co_filename}:{reading.line}", ".".join(reading.path)
            if remedy is not None and (where, what) not in _told:
                warn_at(
                    where,
                    f"{what}() is read once, while {name} is recorded, and is the same in all "
                    f"later calls; {remedy}",
                    FrozenWarning,
                )
                _told.add((where, what))


def _remedy(value: Any, *, bare: bool) -> str | None:
    """What to write in the place of a call of this, if it changes by itself."""
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
    """What the names lead to; `MISSING` where they lead nowhere, or where to follow them may call
    code."""
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
    """What the code reads by names, and the code inside of it."""
    if code not in _known:
        _known[code] = list(_readings_of(code))
    yield from ((code, each) for each in _known[code])
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
            found = imported.get(step.argval, ())
            if found or not step.opname.startswith("LOAD_FAST"):
                yield Reading(path, found, line or code.co_firstlineno, bare)
