"""Settings of the process that functions of the standard library and numpy read.

Examples are the recursion limit, the locale, the decimal context, the current folder, the time zone
and the levels of loggers. A guard reads a setting again and compares the value, so a captured
function that reads it is retraced after each change.
"""

from __future__ import annotations

import dis
import logging
import operator
import os
import sys
import threading
import time
import types
from collections.abc import Callable, Set
from typing import Any, Final

import numpy as np

from mlvm.core.memo import memoized
from mlvm.eager.capture.guards.code import names_in
from mlvm.eager.capture.guards.readable import PLAIN, is_standard
from mlvm.eager.recording.reads import TEXTS
from mlvm.eager.tensor.values import module_of

_ENVIRONMENT: Final = frozenset({"environ", "environb"})
_OF_LOGGERS: Final = frozenset(
    {"level", "disable", "disabled", "isEnabledFor", "getEffectiveLevel"}
)
"""Names by which code reads the level of a logger."""
_RELATIVES: Final = frozenset({"getChild", "getChildren", "manager", "parent", "root"})
"""Names by which code reads a logger from another logger."""
_LOGGERS: Final = (logging.Logger, logging.LoggerAdapter)


def _decimal_context(_: object) -> tuple[Any, ...]:
    import decimal  # as `locale` below, imported here because most functions do not use it

    context = decimal.getcontext()
    numbers = context.prec, context.Emin, context.Emax, context.capitals, context.clamp
    return *numbers, context.rounding, *context.traps.values()


def _time_zone(_: object) -> tuple[Any, ...]:
    rules = os.environ.get("TZ")  # zones with the same names may differ in the dates of a change
    return time.tzname, time.timezone, time.altzone, time.daylight, rules


def result_of(fn: Any) -> Any:
    """Return the result of the function, as text if it may change in place."""
    result = fn()
    return result if type(result) in PLAIN or callable(result) else repr(result)


def _folder(_: object) -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed, or it cannot be read
        return ""


def _locale(_: object) -> str:
    import locale

    return locale.setlocale(locale.LC_ALL)


def _time_format(_: object) -> tuple[Any, ...]:
    return *_time_zone(_), _locale(_)


def _thread(_: object) -> tuple[int, str]:
    return threading.get_ident(), threading.current_thread().name


def _process(_: object) -> tuple[int, str]:
    module = sys.modules.get("multiprocessing")
    return os.getpid(), "" if module is None else module.current_process().name


def _printing(_: object) -> tuple[Any, ...]:
    options: dict[str, Any] = {**np.get_printoptions()}
    formatter = options.pop("formatter")  # a dict
    return *options.values(), None if formatter is None else repr(formatter)


def _level_names(_: object) -> tuple[Any, ...]:
    return tuple(logging.getLevelNamesMapping().items())


def _level(value: Any) -> tuple[Any, ...]:
    while isinstance(value, logging.LoggerAdapter):
        value = value.logger
    if not isinstance(value, logging.Logger):
        return ()
    return value.manager.disable, value.disabled, value.level, value.getEffectiveLevel()


def _levels(_: object) -> tuple[Any, ...]:
    """Return the levels of all loggers, without the loggers that inherit their level."""
    manager = logging.root.manager
    loggers = [*manager.loggerDict.values(), logging.root]  # another thread may add loggers
    own = [
        (each.name, each.level, each.disabled)
        for each in loggers
        if isinstance(each, logging.Logger) and (each.level or each.disabled)
    ]
    return manager.disable, *sorted(own)


_READERS: Final[dict[str, Callable[[Any], Any]]] = {
    **dict.fromkeys(["decimal", "_decimal", "_pydecimal"], _decimal_context),
    **dict.fromkeys(["locale", "_locale"], _locale),
    **{f"{os.name}.{name}": _folder for name in ("getcwd", "getcwdb")},
    **{f"{os.path.__name__}.{name}": _folder for name in ("abspath", "realpath", "relpath")},
    **{f"pathlib.{name}": _folder for name in ("absolute", "cwd", "resolve")},
    **{f"time.{name}": _time_zone for name in ("localtime", "mktime", "ctime")},
    **{f"datetime.{name}": _time_zone for name in ("astimezone", "ctime", "fromtimestamp")},
    "datetime.timestamp": _time_zone,
    **{f"{module}.strftime": _time_format for module in ("time", "datetime")},
    "threading.current_thread": _thread,
    **{f"_thread.{name}": _thread for name in ("get_ident", "get_native_id")},
    **{f"{os.name}.{name}": _process for name in ("getpid", "getppid")},
    "multiprocessing.current_process": _process,
    **{f"logging.{name}": _level_names for name in ("getLevelName", "getLevelNamesMapping")},
    **{f"numpy.{name}": _printing for name in ("array2string", "array_repr", "array_str")},
    **{f"_csv.{name}": result_of for name in ("field_size_limit", "list_dialects")},
    "_tracemalloc.is_tracing": result_of,
    "faulthandler.is_enabled": result_of,
    "tempfile.gettempdir": result_of,
}
"""Functions that read a setting again, by the module or function that reads it."""

_OF_TEXTS: Final[dict[str, Callable[[Any], Any]]] = {
    "numpy": _printing,
    "datetime": _time_format,
}
"""Readers of the settings that text of objects of the module depends on."""

_PACKAGES: Final = frozenset(
    {"sys", "gc", "threading", "_socket", "logging", "numpy", "os", "posix"}
)
"""Modules in which a function `getx` without arguments reads what a function `setx` sets."""


def reader_of(value: Any, names: Set[str]) -> Callable[[Any], Any] | None:
    """Return the reader of the setting that a library function, class or object reads, or None.

    `names` are the names that code reads. It may read levels of loggers, or convert objects to
    text."""
    if isinstance(value, _LOGGERS) or value is logging.getLogger:
        if names.isdisjoint(_OF_LOGGERS):
            return None
        is_one = value is not logging.getLogger and names.isdisjoint(_RELATIVES)
        return _level if is_one else _levels
    fn = getattr(value, "__func__", value)
    owner = getattr(fn, "__self__", None)
    kind = owner if isinstance(owner, type) else getattr(fn, "__objclass__", fn)
    module, name = getattr(kind, "__module__", None), getattr(fn, "__name__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        return None
    if not (module == "numpy" or is_standard(module)):
        return None
    top = module.partition(".")[0]
    reader = _READERS.get(f"{top}.{name}") or _READERS.get(top)
    if reader is None and _has_setter(module, name):
        return result_of
    return _OF_TEXTS.get(top) if reader is None and not names.isdisjoint(TEXTS) else reader


_COUNTERS: Final = frozenset({"closed", "high_water", "signatures", "used", "views_created"})
_COUNTING: Final = frozenset({"consumed_size_in_mib", "empty", "full", "memory_used", "qsize"})
"""Fields and methods of arenas, VMs, queues and captured functions with values that change."""


def counters_of(value: Any, names: Set[str]) -> list[Callable[[Any], Any]]:
    """Return functions that read the counters of an object of mlvm that code names."""
    kind = type(value)
    methods = [getattr(kind, name, None) for name in sorted(names & _COUNTING)]
    fields = [name for name in sorted(names & _COUNTERS) if hasattr(value, name)]
    return [each for each in methods if callable(each)] + [*map(operator.attrgetter, fields)]


def reads_value(reader: Callable[[Any], Any] | None) -> bool:
    """Return whether the result of a reader depends on the function or object that it is for."""
    return reader in (result_of, _level)


@memoized(1024)
def _has_setter(module: str, name: str) -> bool:
    """Return whether a function without arguments reads a setting that another function sets."""
    if module not in _PACKAGES or "get" not in name:
        return False
    variables = vars(sys.modules[module])
    if not callable(variables.get(name.replace("get", "set", 1))):
        return False
    try:
        variables[name]()
    except Exception:
        return False  # it has arguments
    return True


def reads_environment(value: Any) -> bool:
    """Return whether a standard-library function reads the environment variables.

    It may do so itself, or call functions that do."""
    fn = _function_of(value)
    if fn is None or fn.__name__ in ("home", "expanduser"):
        return fn is not None  # methods of paths, which call methods of other classes
    if module_of(fn).partition(".")[0] == "numpy":
        return False
    return any(not _ENVIRONMENT.isdisjoint(names) for _, names in _names_below(fn))


def assigned_variables(value: Any) -> list[tuple[dict[str, Any], str]]:
    """Return the variables that a standard-library function reads and that a function assigns.

    Each variable is a name in the dict of its module. An example is the text domain of `gettext`.
    The function may read it itself, or call functions that do."""
    fn = _function_of(value)
    if fn is None or not is_standard(fn.__module__ or ""):
        return []
    return [
        (variables, name)
        for variables, names in _names_below(fn)
        for name in sorted(_assigned_in(str(variables.get("__name__"))) & names)
        if name in variables
    ]


def _function_of(value: Any) -> types.FunctionType | None:
    """Return the Python function of a function or method; None for any other object."""
    kind = type(value)
    fn = value.__func__ if kind in (classmethod, staticmethod, types.MethodType) else value
    return fn if type(fn) is types.FunctionType else None


@memoized(1024)
def _names_below(
    fn: types.FunctionType, depth: int = 3
) -> tuple[tuple[dict[str, Any], frozenset[str]], ...]:
    """Return the names that a function, and functions that it calls, read, with the globals."""
    named, variables = names_in(fn.__code__), fn.__globals__
    names = frozenset(named.globals) | named.fields
    called = [variables.get(name) for name in named.globals]
    for module in [each for each in called if type(each) is types.ModuleType]:
        called += [vars(module).get(name) for name in named.fields]
    functions = [each for each in called if type(each) is types.FunctionType]
    below = [each for x in functions if depth > 0 for each in _names_below(x, depth - 1)]
    return (variables, names), *below


@memoized(1024)
def _assigned_in(module: str) -> frozenset[str]:
    """Return the global variables that the functions of a module assign."""
    variables = getattr(sys.modules.get(module), "__dict__", {})
    functions = [x for x in variables.values() if type(x) is types.FunctionType]
    return frozenset(
        each.argval
        for fn in functions
        if fn.__module__ == module
        for each in dis.get_instructions(fn.__code__)
        if each.opname == "STORE_GLOBAL"
    )
