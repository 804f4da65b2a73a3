"""A captured function sees each change of a setting of the process."""

from __future__ import annotations

import calendar
import csv
import datetime
import decimal
import faulthandler
import gc
import importlib
import json
import locale
import logging
import math
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.eager.capture.guards import frozen, settings
from tests.brief import Patch, cases, run_python

LOG = logging.getLogger("tests.settings")
ADAPTER = logging.LoggerAdapter(LOG, {})
ONE = Decimal(1)
HERE = Path("a")
THIRD = np.array([1 / 3])
DAY = datetime.date(2025, 3, 14)


@pytest.fixture(autouse=True)
def restored(monkeypatch: Patch, tmp_path: Path) -> Iterator[None]:
    """Restore the settings that the tests change."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    monkeypatch.chdir(tmp_path)
    vars(json)["rate"] = 2.0
    threshold, limit, switch = gc.get_threshold(), sys.getrecursionlimit(), sys.getswitchinterval()
    language = locale.setlocale(locale.LC_ALL)
    digits, fields, place = sys.get_int_max_str_digits(), csv.field_size_limit(), tempfile.tempdir
    with np.errstate(), np.printoptions(), decimal.localcontext(), monkeypatch.context() as patch:
        patch.setattr(threading.current_thread(), "name", "first")
        patch.setattr(math, "sqrt", math.sqrt)
        patch.setattr(sys, "displayhook", sys.displayhook)
        yield
    for undo in (monkeypatch.undo, time.tzset, tracemalloc.stop):
        undo()
    del vars(json)["rate"]
    gc.set_threshold(*threshold)
    sys.setrecursionlimit(limit)
    sys.setswitchinterval(switch)
    sys.set_int_max_str_digits(digits)
    csv.field_size_limit(fields)
    tempfile.tempdir = place
    calendar.setfirstweekday(0)
    socket.setdefaulttimeout(None)
    logging.disable(logging.NOTSET)
    for each in (LOG, logging.getLogger("tests.other")):
        each.setLevel(logging.NOTSET)
    locale.setlocale(locale.LC_ALL, language)


def set_zone(zone: str = "EST5") -> None:
    os.environ["TZ"] = zone
    time.tzset()


def as_decimal(x: ml.Tensor) -> ml.Tensor:
    return x * float(ONE / 3)


def in_place(module: Any, name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(module, name, value)


@cases(
    "fn, change",
    (lambda x: x * len(locale.setlocale(locale.LC_ALL)), lambda: to_utf8()),
    (lambda x: x * decimal.getcontext().prec, lambda: set_precision()),
    (lambda x: x * float(Decimal(1) / Decimal(3)), lambda: set_precision()),
    (as_decimal, lambda: set_precision()),
    (lambda x: x * LOG.level, lambda: LOG.setLevel(10)),
    (lambda x: x * LOG.isEnabledFor(30), lambda: logging.disable()),
    (lambda x: x * ADAPTER.isEnabledFor(10), lambda: LOG.setLevel(10)),
    (lambda x: x * LOG.manager.disable, lambda: logging.disable(30)),
    (lambda x: x * LOG.getEffectiveLevel(), lambda: logging.getLogger("tests").setLevel(5)),
    (lambda x: x * logging.getLogger("tests.other").level, lambda: set_level()),
    (lambda x: x * len(logging.getLevelName(77)), lambda: logging.addLevelName(77, "odd")),
    (lambda x: x * gc.get_threshold()[0], lambda: gc.set_threshold(123)),
    (lambda x: x * sys.getrecursionlimit(), lambda: sys.setrecursionlimit(3456)),
    (lambda x: x * sys.getswitchinterval(), lambda: sys.setswitchinterval(0.01)),
    (lambda x: x * sys.get_int_max_str_digits(), lambda: sys.set_int_max_str_digits(5000)),
    (lambda x: x * (sys.displayhook is print), in_place(sys, "displayhook", print)),
    (lambda x: x * len(threading.current_thread().name), lambda: set_name()),
    (lambda x: x * tracemalloc.is_tracing(), tracemalloc.start),
    (lambda x: x * (socket.getdefaulttimeout() or 0), lambda: socket.setdefaulttimeout(7)),
    (lambda x: x * csv.field_size_limit(), lambda: csv.field_size_limit(99)),
    (lambda x: x * len(os.getcwd()), lambda: os.chdir("/")),
    (lambda x: x * len(os.path.abspath("a")), lambda: os.chdir("/")),
    (lambda x: x * len(str(Path.cwd())), lambda: os.chdir("/")),
    (lambda x: x * len(str(HERE.absolute())), lambda: os.chdir("/")),
    (lambda x: x * len(tempfile.tempdir or ""), in_place(tempfile, "tempdir", "/odd")),
    (lambda x: x * len(tempfile.gettempdir()), in_place(tempfile, "tempdir", "/odd")),
    (lambda x: x * time.timezone, set_zone),
    (lambda x: x * time.localtime(0).tm_hour, set_zone),
    (lambda x: x * datetime.datetime.fromtimestamp(0).hour, set_zone),
    (lambda x: x * len(np.geterr()["over"]), lambda: np.seterr(over="raise")),
    (lambda x: x * np.get_printoptions()["precision"], lambda: set_printing()),
    (lambda x: x * len(np.array2string(np.array(1 / 3))), lambda: set_printing()),
    (lambda x: x * len(str(THIRD)), lambda: set_printing()),
    (lambda x: x * len(repr(THIRD)), lambda: set_printing()),
    (lambda x: x * len(f"{THIRD}"), lambda: set_printing()),
    (lambda x: x * len("{}".format(THIRD)), lambda: set_printing()),  # noqa: UP032
    (lambda x: x * len("%s" % THIRD), lambda: set_printing()),  # noqa: UP031
    (lambda x: x * len(str(np.full(1, 1 / 3))), lambda: set_printing()),
    (lambda x: x * int(f"{DAY:%s}"), set_zone),
    (lambda x: x * int(format(DAY, "%s")), set_zone),
    (lambda x: x * calendar.firstweekday(), lambda: calendar.setfirstweekday(3)),
    (lambda x: x * json.rate, in_place(json, "rate", 3.0)),  # type: ignore[attr-defined]
    (lambda x: x * math.sqrt(4.0), in_place(math, "sqrt", lambda _: 7.0)),
)
def test_a_change_of_a_setting_is_seen(fn: Callable[..., Any], change: Callable[[], Any]) -> None:
    """Each used to be frozen at the trace."""
    x = ml.ones(2, dtype=ml.float64)
    step = ml.capture(fn)
    before = step(x).tolist()
    assert step(x).tolist() == before
    assert step.signatures == 1
    change()
    now = fn(x).tolist()
    assert step(x).tolist() == now != before
    assert step.signatures == 2


def to_utf8() -> None:
    locale.setlocale(locale.LC_ALL, "C.UTF-8")


def set_precision() -> None:
    decimal.getcontext().prec = 5


def set_level() -> None:
    logging.getLogger("tests.other").setLevel(10)


def set_name() -> None:
    threading.current_thread().name = "another"


def set_printing() -> None:
    np.set_printoptions(precision=3)


@cases("name", "csv", "decimal", "gc", "locale", "logging", "socket", "sys", "threading", "time")
def test_what_another_function_sets_is_read_again(name: str) -> None:
    """A function `getx` beside a function `setx` is guarded, or warns, or is listed here."""
    harmless = {"getLoggerClass", "gethostname", "getprofile_all_threads", "gettrace_all_threads"}
    module = importlib.import_module(name)
    for each, value in vars(module).items():
        setter = each.replace("get", "set", 1)
        if "get" in each and callable(value) and callable(vars(module).get(setter)):
            is_read = settings.reader_of(value, frozenset()) is not None
            is_frozen = frozen._remedy(value, ()) is not None
            assert is_read or is_frozen or each in harmless, each


def test_other_rules_of_a_time_zone_are_seen() -> None:
    """The names and the offsets are the same."""
    set_zone("EST5EDT,M3.2.0,M11.1.0")
    step = ml.capture(lambda x: x * time.localtime(1742400000).tm_hour)
    assert step(ml.ones(1)).tolist() == [12.0]
    set_zone("EST5EDT,M4.1.0,M10.5.0")
    assert step(ml.ones(1)).tolist() == [11.0]


def test_functions_of_signals_and_faults_are_known() -> None:
    assert frozen._remedy(signal.getsignal, ()) is not None
    assert frozen._remedy(threading.stack_size, ()) is not None
    assert settings.reader_of(faulthandler.is_enabled, frozenset()) is not None


def test_a_function_of_no_module_is_read() -> None:
    """Source text that `exec` runs has no module; reading it raised an AttributeError."""
    names: dict[str, Any] = {}
    exec("def double(x):\n    return x * 2.0", names)
    double = names["double"]
    assert double.__module__ is None
    step = ml.capture(lambda x: double(x))
    assert [float(step(ml.asarray(3.0))) for _ in range(2)] == [6.0, 6.0]


def test_a_module_that_is_not_registered_is_read(monkeypatch: Patch) -> None:
    """The function and the module raised a KeyError."""
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    colors = importlib.import_module("colorsys")
    monkeypatch.delitem(sys.modules, "colorsys")
    convert = colors.rgb_to_hsv
    step = ml.capture(lambda x: x * convert(1, 2, 4)[2] * colors.rgb_to_yiq(1, 1, 1)[0])
    assert float(step(ml.asarray(3.0))) == 12.0


def test_a_first_call_does_not_import_modules_of_settings() -> None:
    code = "import sys, mlvm.eager as ml; ml.capture(ml.exp)(ml.ones(2)); print(*sys.modules)"
    unused = {"decimal", "locale", "multiprocessing", "selectors"}
    assert unused.isdisjoint(run_python("-c", code).stdout.split())


def test_the_level_of_another_logger_is_not_compared() -> None:
    step = ml.capture(lambda x: x * LOG.isEnabledFor(10))
    step(ml.ones(2))
    logging.getLogger("tests.other").setLevel(10)
    step(ml.ones(2))
    assert step.signatures == 1
    unregistered = logging.Logger("tests.settings")
    step = ml.capture(lambda x: x * (LOG.level + 2 * unregistered.level))
    step(ml.ones(2))
    unregistered.setLevel(7)
    assert step(ml.ones(2)).tolist() == [14.0, 14.0]
