"""Warnings for values that a trace freezes: clocks, numpy's random draws, files, user input.

They are found in the instructions of the functions that a captured function reaches.
"""

from __future__ import annotations

import builtins
import datetime
import dis
import io
import os
import pathlib
import random
import sys
import threading
import types
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from mlvm.core.errors import CaptureError
from mlvm.eager.capture.guards.checker import CELL, MISSING, content_of_slot
from mlvm.eager.capture.guards.guard_set import GuardSet
from mlvm.eager.capture.guards.readable import is_library
from mlvm.eager.tensor.warn import warn_at

_CLOCKS: Final = frozenset(
    [f"time.{name}{unit}" for name in ("time", "perf_counter", "monotonic") for unit in ("", "_ns")]
    + [f"time.{name}{unit}" for name in ("process_time", "thread_time") for unit in ("", "_ns")]
    + [f"time.clock_gettime{unit}" for unit in ("", "_ns")]
    + [f"{module}.times" for module in ("posix", "nt")]
    + ["resource.getrusage"]
)
_COUNTERS: Final = frozenset(
    {f"gc.get_{name}" for name in ("count", "freeze_count", "objects", "referrers", "stats")}
    | {f"sys.{name}" for name in ("getrefcount", "getallocatedblocks", "_current_frames")}
    | {f"inspect.{name}" for name in ("stack", "currentframe", "trace")}
    | {f"traceback.{name}" for name in ("extract_stack", "format_stack")}
    | {f"threading.{name}" for name in ("active_count", "enumerate")}
    | {f"_tracemalloc.{name}" for name in ("get_traced_memory", "get_tracemalloc_memory")}
    | {"gc.isenabled", "sys._getframe", "tracemalloc.take_snapshot", "lock.locked", "RLock.locked"}
    | {f"{os.name}.getloadavg", "shutil.disk_usage", "multiprocessing.process.active_children"}
    | {"sys.exc_info", "sys.exception", "_contextvars.copy_context"}
)
"""Functions that count what the process and the machine do."""
_SET_ELSEWHERE: Final = frozenset(
    {f"{os.name}.{name}" for name in ("getpriority", "nice", "sched_getaffinity", "umask")}
    | {f"{os.name}.{name}" for name in ("sched_getparam", "sched_getscheduler")}
    | {f"mimetypes.guess_{name}" for name in ("type", "extension", "all_extensions")}
    | {"signal.getsignal", "signal.getitimer", "resource.getrlimit", "_thread.stack_size"}
)
"""Functions that read a setting which depends on the argument, and which no guard compares."""
_UNLESS_GIVEN: Final = {
    **{f"time.{name}": 0 for name in ("localtime", "gmtime", "ctime", "asctime")},
    "time.strftime": 1,
    "email.utils.localtime": 0,
    "email.utils.formatdate": 0,
}
"""Clocks that convert a time if one is passed, with the position of that argument."""
_NOW: Final = frozenset({"now", "utcnow", "today"})  # class methods of `datetime`
_ENTROPY: Final = frozenset(
    {"posix.urandom", "nt.urandom", "posix.getrandom"} | {f"uuid.uuid{i}" for i in (1, 4, 6, 7)}
)
_SEEDED: Final = (
    *(random.Random, random.SystemRandom),
    *(np.random.default_rng, np.random.RandomState, np.random.SeedSequence),
    *np.random.BitGenerator.__subclasses__(),
)
"""Functions and classes that start from entropy unless a seed is passed."""
_SEEDS: Final = frozenset({"seed", "set_state"})

_FILES: Final = frozenset(
    {"_io.open", "io.open", "glob.glob", "glob.iglob", "linecache.getline", "linecache.getlines"}
    | {f"numpy.{name}" for name in ("load", "loadtxt", "genfromtxt", "fromfile", "memmap")}
    | {f"genericpath.{name}" for name in ("exists", "isfile", "isdir", "islink", "lexists")}
    | {f"genericpath.get{name}" for name in ("size", "mtime", "atime", "ctime")}
    | {f"{os.path.__name__}.{name}" for name in ("islink", "lexists", "ismount", "realpath")}
    | {f"{os.name}.{name}" for name in ("listdir", "read", "scandir", "stat", "lstat", "fstat")}
    | {f"{os.name}.{name}" for name in ("access", "readlink", "statvfs")}
    | {"os.walk", "shutil.which", "pkgutil.get_data", "tempfile.mkdtemp", "tempfile.mkstemp"}
    | {"tempfile.mktemp", "tempfile.NamedTemporaryFile", "tempfile.TemporaryFile"}
    | {"mlvm.eager.files.checkpoints.load", "mlvm.onnx.model.load"}
)
_PROGRAMS: Final = frozenset(
    {f"subprocess.{name}" for name in ("run", "call", "check_call", "check_output", "Popen")}
    | {"subprocess.getoutput", "subprocess.getstatusoutput", "os.popen", f"{os.name}.system"}
    | {"urllib.request.urlopen", "runpy.run_path", "runpy.run_module"}
)
"""Functions and classes that run other programs or connect to them."""
_READS: Final = frozenset({"read", "readline", "readlines", "readinto"})
"""Methods of a stream that read it."""
_PATHS: Final = frozenset(
    {"read_text", "read_bytes", "open", "exists", "is_file", "is_dir", "is_symlink", "iterdir"}
    | {"glob", "rglob", "walk", "stat", "lstat", "readlink", "resolve", "samefile"}
)
"""Methods of a path that read a file or a folder."""

_FROZEN: Final = _CLOCKS | _COUNTERS | _SET_ELSEWHERE | _PROGRAMS | {"builtins.input"}

_AS_ARGUMENT: Final = "give it as an argument"
_WITH_KEY: Final = f"{_AS_ARGUMENT}, or draw with ml.random, which has a key and goes on"
_FUNCTIONS: Final = frozenset(
    {types.FunctionType, types.BuiltinFunctionType, types.MethodType, type(np.random.default_rng)}
    | {types.MethodDescriptorType}
)
_LOCKS: Final = (type(threading.Lock()), type(threading.RLock()))
_UNKNOWN: Final = object()
"""Represents an argument that is not a constant in the code."""

_LOADS: Final = frozenset(
    {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"}
    | {f"LOAD_FAST{how}" for how in ("", "_CHECK", "_BORROW")}
)
_ATTRIBUTES: Final = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_NO_STEPS: Final = frozenset({"PRECALL", "PUSH_NULL", "CACHE", "EXTENDED_ARG"})

_warned: set[tuple[str, str]] = set()  # lines that were reported, each with the called function


class FrozenWarning(UserWarning):
    """Warning for a captured function that reads a clock, entropy, a file or user input.

    The function does so only once, while it is traced, so all later calls use the same value. The
    text contains the remedy.

        >>> import time, warnings
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     _ = ml.capture(lambda x: x * time.time())(ml.ones(3))
        >>> caught[0].category.__name__, str(caught[0].message).partition(" ")[0]
        ('FrozenWarning', 'time.time()')
    """


class Reading(NamedTuple):
    """A name that code loads.

    `path`: the name, and the attributes that are read from it. The name of a computed object is
        empty.
    `imported`: the module, and a name in it, if the code imports the name itself.
    `line`: the line in the file.
    `args`: the arguments of the call, if they are constants and names; otherwise None.
    """

    path: tuple[str, ...]
    imported: tuple[str, ...]
    line: int
    args: tuple[Any, ...] | None


_by_code: weakref.WeakKeyDictionary[types.CodeType, list[Reading]] = weakref.WeakKeyDictionary()


def warn_of_frozen(guards: GuardSet, name: str) -> None:
    """Issue one `FrozenWarning` per line of reached code that reads what a trace freezes."""
    for where, what, remedy in _frozen(guards, name):
        if (where, what) not in _warned:
            warn_at(
                where,
                f"{what}() is read once, while {name!r} is recorded, and is the same in all later "
                f"calls; {remedy}",
                FrozenWarning,
            )
            _warned.add((where, what))


def refuse_draws(guards: GuardSet, name: str) -> None:
    """Raise `CaptureError` for a line of reached code that draws random numbers without keys."""
    for where, what, remedy in _frozen(guards, name, is_called=True):
        if "random" in what:
            raise CaptureError(f"{where}: {what}() would be the same in all calls; {remedy}")


def _frozen(
    guards: GuardSet, name: str, *, is_called: bool = False
) -> Iterator[tuple[str, str, str]]:
    """Yield the lines that read what a trace freezes, with the called function and the remedy.

    With `is_called`, only in functions that are called by name.
    Lines that read files count only in functions that are called by name: classes and modules often
    have functions that load files beside the captured function `name`."""
    functions = [
        each
        for each in guards.keepalive
        if type(each) is types.FunctionType
        and not is_library(str(each.__globals__.get("__name__")))
    ]
    named: set[int] = set()  # ids of functions that a line refers to by name
    called: set[types.FunctionType] | None = None
    for fn in functions:
        readings = [(code, each, _value_of(each, fn)) for code, each in _readings(fn.__code__)]
        has_paths = any(map(_is_of_path, [value for _, _, value in readings]))
        for code, reading, value in readings:
            if not reading.path[0]:  # a method of a computed object
                if not has_paths:
                    continue
                value = getattr(pathlib.Path, reading.path[1], MISSING)
            named.add(id(value))
            where, what = f"{code.co_filename}:{reading.line}", ".".join(filter(None, reading.path))
            if is_called or _reads_file(value):
                called = _called(functions, name) if called is None else called
                if fn not in called:
                    continue
            if remedy := _remedy(value, reading.args):
                yield where, what, remedy
    # functions in a field, or in a partial call
    for value in guards.keepalive if functions else ():
        if type(value) is types.BuiltinFunctionType and id(value) not in named:
            code = functions[0].__code__
            where = f"{code.co_filename}:{code.co_firstlineno}"
            what = f"{value.__module__}.{value.__name__}"
            if remedy := _remedy(value, None):
                yield where, what, remedy


def _called(functions: Sequence[types.FunctionType], name: str) -> set[types.FunctionType]:
    """Return the functions that the captured function calls by name, directly or indirectly."""
    called = {fn for fn in functions if fn.__name__ in (name, "__call__")} or {*functions}
    while True:
        names = {each for fn in called for each in _names(fn.__code__)}
        more = {fn for fn in functions if fn.__name__ in names} - called
        if not more:
            return called
        called |= more


def _names(code: types.CodeType) -> set[str]:
    """Return the global names, free variables and attributes that code, or nested code, uses."""
    nested = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return {*code.co_names, *code.co_freevars}.union(*map(_names, nested))


def _full_name(value: Any) -> str:
    owner = getattr(value, "__objclass__", None)
    return f"{owner.__name__ if owner else value.__module__}.{value.__name__}"


def _reads_file(value: Any) -> bool:
    if type(value) not in _FUNCTIONS:
        return False
    if issubclass(getattr(value, "__objclass__", object), io.IOBase):
        return value.__name__ in _READS
    full = _full_name(value)
    is_of_path = full.startswith(("pathlib.", "importlib.resources."))
    return full in _FILES or (is_of_path and value.__name__ in _PATHS)


def _is_of_path(value: Any) -> bool:
    kind = value if issubclass(type(value), type) else type(value)
    is_method = kind is types.FunctionType and str(value.__module__).partition(".")[0] == "pathlib"
    return is_method or issubclass(kind, pathlib.PurePath)


def _is_read_mode(full: str, args: tuple[Any, ...] | None) -> bool:
    """Return whether the constant arguments of an `open` are for reading only."""
    position = 0 if full.startswith("pathlib.") else 1
    mode = "r" if args is None or len(args) <= position else args[position]
    return args is not None and isinstance(mode, str) and mode.strip("bt") == "r"


def _remedy(value: Any, args: tuple[Any, ...] | None) -> str | None:
    """Return the remedy for a call of a function with a value that a trace freezes, or None."""
    if value is np.datetime64:
        return _AS_ARGUMENT if args and args[0] in ("now", "today") else None
    if any(value is each for each in _SEEDED):
        is_bare = args is not None and (not args or args[0] is None)
        return f"{_WITH_KEY}; with a seed it is the same in eager calls, too" if is_bare else None
    if isinstance(value, type) and f"{value.__module__}.{value.__name__}" in _PROGRAMS:
        return _AS_ARGUMENT
    if type(value) not in _FUNCTIONS:  # reading the name of any other object may run user code
        return None
    owner: Any = getattr(value, "__self__", None)
    if type(owner) is np.random.RandomState:
        return _WITH_KEY if value.__name__ not in _SEEDS else None
    if issubclass(type(owner), type) and issubclass(owner, datetime.date):
        return _AS_ARGUMENT if value.__name__ in _NOW else None
    if type(value) is types.MethodType:
        return None
    full = _full_name(value)
    if full in _UNLESS_GIVEN:
        position = _UNLESS_GIVEN[full]
        is_given = args is None or (len(args) > position and args[position] is not None)
        return None if is_given else _AS_ARGUMENT
    if full in _ENTROPY or full.startswith("secrets."):
        return _WITH_KEY
    if _reads_file(value):
        return _AS_ARGUMENT if value.__name__ != "open" or _is_read_mode(full, args) else None
    return _AS_ARGUMENT if full in _FROZEN else None


def _value_of(reading: Reading, fn: types.FunctionType) -> Any:
    """Return the value that is read; `MISSING` if there is none or reading it may run user code."""
    first, *rest = reading.path
    value: Any = MISSING
    if not first:
        return value
    if reading.imported:
        module, *names = reading.imported
        value, rest = sys.modules.get(module, MISSING), [*names, *rest]
    elif first in fn.__code__.co_freevars:
        cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
        value = content_of_slot(cells[first], CELL)
    else:
        value = fn.__globals__.get(first, getattr(builtins, first, MISSING))
    for name in rest:
        if issubclass(type(value), (pathlib.PurePath, io.IOBase, *_LOCKS)):
            value = type(value)
        if not issubclass(type(value), (types.ModuleType, type)):
            return MISSING
        kind, value = value, getattr(value, name, MISSING)
        if type(value) is property and issubclass(kind, pathlib.PurePath):  # such as `parent`
            value = kind
    return value


def _readings(code: types.CodeType) -> Iterator[tuple[types.CodeType, Reading]]:
    """Yield the names that the code, including nested code, loads."""
    if code not in _by_code:
        _by_code[code] = list(_readings_of(code))
    yield from ((code, each) for each in _by_code[code])
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _readings(inner)


def _readings_of(code: types.CodeType) -> Iterator[Reading]:
    steps = [each for each in dis.get_instructions(code) if each.opname not in _NO_STEPS]
    imported: dict[str, tuple[str, ...]] = {}
    module, end = "", 0
    for i, step in enumerate(steps):
        before = steps[i - 1]
        if step.opname == "IMPORT_NAME":
            module = step.argval
        elif step.opname.startswith("STORE_") and before.opname == "IMPORT_NAME":
            imported[step.argval] = (module.partition(".")[0],)
        elif step.opname.startswith("STORE_") and before.opname == "IMPORT_FROM":
            imported[step.argval] = module, before.argval
        line = step.positions.lineno if step.positions else None
        line = line or code.co_firstlineno
        if step.opname in _LOADS:
            source = imported.get(step.argval, ())
            if source or not step.opname.startswith("LOAD_FAST"):
                end = i + 1
                while end < len(steps) and steps[end].opname in _ATTRIBUTES:
                    end += 1
                path = tuple([each.argval for each in steps[i:end]])
                yield Reading(path, source, line, _arguments(steps[end : end + 4]))
        elif i >= end and step.opname in _ATTRIBUTES and step.argval in _PATHS:
            yield Reading(("", step.argval), (), line, _arguments(steps[i + 1 : i + 5]))


def _arguments(steps: Sequence[dis.Instruction]) -> tuple[Any, ...] | None:
    """Return the arguments of the call that these instructions make, or None.

    It is None if they make no call, or compute an argument."""
    for count, step in enumerate(steps):
        if step.opname == "CALL":
            constants = [each.opname == "LOAD_CONST" for each in steps[:count]]
            values = zip(steps, constants, strict=False)
            args = tuple([each.argval if is_known else _UNKNOWN for each, is_known in values])
            return args if step.arg == count else None
        if not step.opname.startswith("LOAD_") or step.opname in _ATTRIBUTES:
            return None
    return None
