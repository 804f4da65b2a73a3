"""Values that change by themselves warn where a captured function reads them, and nothing else
does."""

from __future__ import annotations

import builtins
import datetime
import email.utils
import gc
import inspect
import io
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import types
import uuid
import warnings
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

import numpy as np
import numpy.random as npr
import pytest

import mlvm.eager as ml
from mlvm.eager.capture.guards import frozen
from tests.brief import Patch, cases, refuses

pytestmark = pytest.mark.freezes


@pytest.fixture(autouse=True)
def anew(monkeypatch: Patch) -> None:
    monkeypatch.setattr(frozen, "_warned", set())
    monkeypatch.setattr(sys, "stdin", io.StringIO("3\n3\n"))


class Timed(ml.nn.Module):
    def __init__(self) -> None:
        self.w = ml.ones(2)

    def noise(self) -> float:
        return float(np.random.uniform())

    def __call__(self, x: ml.Tensor) -> ml.Tensor:
        return x * self.w * self.noise()


def local(x: ml.Tensor) -> ml.Tensor:
    import time as clock
    from os import urandom

    return x * urandom(1)[0] * clock.time()


def within(x: ml.Tensor) -> ml.Tensor:
    return x * sum(time.time_ns() for _ in range(2))


HERE, ECHO = Path(__file__), (sys.executable, "-c", "print(1)")
LOCK = threading.Lock()
CLOCKS = types.SimpleNamespace(now=time.perf_counter)


class Loaded(ml.nn.Module):
    """Module with a method that loads a file, which `__call__` does not call."""

    def __init__(self) -> None:
        self.w = ml.ones(2)

    def load(self, file: str) -> None:
        self.w = ml.asarray(np.load(file))

    def __call__(self, x: ml.Tensor) -> ml.Tensor:
        return x * self.w


def file_length() -> int:
    with open(__file__) as file:
        return len(file.read())


def around() -> Callable[[ml.Tensor], ml.Tensor]:
    numbers = np.random
    return lambda x: x * numbers.rand()


@cases(
    "fn, read",
    (lambda x: x * np.random.rand(), "np.random.rand()"),
    (lambda x: x * npr.normal(), "npr.normal()"),
    (lambda x: x * np.random.default_rng().normal(), "np.random.default_rng()"),
    (lambda x: x * np.random.default_rng(None).normal(), "np.random.default_rng()"),
    (lambda x: x * np.random.RandomState().rand(), "np.random.RandomState()"),
    (lambda x: x * np.random.Generator(np.random.PCG64()).normal(), "np.random.PCG64()"),
    (lambda x: x * time.localtime().tm_sec, "time.localtime()"),
    (lambda x: x * time.gmtime(None).tm_sec, "time.gmtime()"),
    (lambda x: x * len(time.ctime()), "time.ctime()"),
    (lambda x: x * float(time.strftime("%S")), "time.strftime()"),
    (lambda x: x * time.clock_gettime(time.CLOCK_MONOTONIC), "time.clock_gettime()"),
    (lambda x: x * float(np.datetime64("now").astype(int)), "np.datetime64()"),
    (lambda x: x * len(email.utils.formatdate()), "email.utils.formatdate()"),
    (lambda x: x * (os.getrandom(1)[0] if hasattr(os, "getrandom") else 1), "os.getrandom()"),
    (lambda x: x * CLOCKS.now(), "time.perf_counter()"),
    (partial(lambda now, x: x * now(), time.time), "time.time()"),
    (lambda x: x * time.time(), "time.time()"),
    (lambda x: x * perf_counter(), "perf_counter()"),
    (lambda x: x * time.monotonic_ns(), "time.monotonic_ns()"),
    (lambda x: x * datetime.datetime.now().microsecond, "datetime.datetime.now()"),
    (lambda x: x * date.today().day, "date.today()"),
    (lambda x: x * os.urandom(1)[0], "os.urandom()"),
    (lambda x: x * len(tempfile.mktemp()), "tempfile.mktemp()"),
    (lambda x: x * (uuid.uuid4().int % 7), "uuid.uuid4()"),
    (lambda x: x * secrets.randbelow(5), "secrets.randbelow()"),
    (lambda x: x * int(input()), "input()"),
    (lambda x: x * int(sys.stdin.readline()), "sys.stdin.readline()"),
    (lambda x: x * len(subprocess.check_output([*ECHO])), "subprocess.check_output()"),
    (lambda x: x * (subprocess.Popen("") if np.isnan(2.0) else 1), "subprocess.Popen()"),
    (lambda x: x * (os.popen("") if np.isnan(2.0) else 1), "os.popen()"),
    (lambda x: x * (shutil.which("python") is None), "shutil.which()"),
    (lambda x: x * Random().random(), "Random()"),
    (lambda x: x * (sys.exc_info()[0] is None), "sys.exc_info()"),
    (lambda x: x * (open(__file__) if np.isnan(2.0) else 1), "open()"),  # noqa: SIM115
    (lambda x: x * len(HERE.read_text()), "HERE.read_text()"),
    (lambda x: x * os.path.exists(__file__), "os.path.exists()"),
    (lambda x: x * len(os.listdir("/")), "os.listdir()"),
    (lambda x: x * len(str(HERE.resolve())), "HERE.resolve()"),
    (lambda x: x * HERE.parent.is_dir(), "HERE.parent.is_dir()"),
    (lambda x: x * Path(__file__).exists(), "exists()"),
    (lambda x: x * (HERE / "a").is_file(), "is_file()"),
    (lambda x: x * os.access(__file__, os.R_OK), "os.access()"),
    (lambda x: x * gc.get_count()[0], "gc.get_count()"),
    (lambda x: x * sys.getrefcount(x), "sys.getrefcount()"),
    (lambda x: x * threading.active_count(), "threading.active_count()"),
    (lambda x: x * len(inspect.stack()), "inspect.stack()"),
    (lambda x: x * os.getpriority(os.PRIO_PROCESS, 0), "os.getpriority()"),
    (lambda x: x * LOCK.locked(), "LOCK.locked()"),
    (lambda x: x * len(np.random.get_state()), "np.random.get_state()"),
    (lambda x: x * (np.load(__file__) if np.isnan(2.0) else 1), "np.load()"),
    (lambda x: x * file_length(), "open()"),
    (Timed(), "np.random.uniform()"),
    (within, "time.time_ns()"),
    (around(), "numbers.rand()"),
)
def test_what_changes_by_itself_is_told(fn: Callable[..., Any], read: str) -> None:
    """It used to be frozen at the recording, without a warning."""
    step = ml.capture(fn)
    with pytest.warns(ml.FrozenWarning) as warnings_raised:
        first = step(ml.ones(2))
    assert step(ml.ones(2)).tolist() == first.tolist()  # no second word
    [warning] = warnings_raised
    assert str(warning.message).startswith(f"{read} is read once, while ")
    assert "give it as an argument" in str(warning.message)
    with open(__file__) as file:
        line = file.read().splitlines()[warning.lineno - 1]
    assert warning.filename == __file__
    assert read.partition("()")[0] in line


def test_what_a_function_imports_is_told_line_by_line() -> None:
    with pytest.warns(ml.FrozenWarning) as warnings_raised:
        ml.capture(local)(ml.ones(2))
    words = sorted(str(each.message).partition(" ")[0] for each in warnings_raised)
    assert words == ["clock.time()", "urandom()"]


class Fields:
    """Names of clocks that are none."""

    time = perf_counter = 2.0

    def now(self) -> float:
        return 3.0

    @property
    def today(self) -> float:
        return 1.0


FIELDS = Fields()


@cases(
    "fn",
    lambda x: x * FIELDS.time * FIELDS.perf_counter,
    lambda x: x * FIELDS.now() * FIELDS.today,
    lambda x: x * np.random.default_rng(0).normal(),
    lambda x: x * datetime.date(2000, 1, 2).day,
    lambda x: [time.sleep, x][1],
    lambda x: x * len(os.environ.get("HOME", "")) * os.getpid(),
    lambda x: x * ml.random.uniform(2),
    lambda x: x * builtins.len("ab"),
    lambda x: x if x.shape else open(os.devnull, "w"),  # noqa: SIM115
    lambda x: x if x.shape else open(os.devnull, mode="w"),  # noqa: SIM115
    lambda x: x if x.shape else open(os.devnull, "r+"),  # noqa: SIM115
    lambda x: x if x.shape else HERE.open("a"),
    Loaded(),
    Loaded().__call__,
)
def test_what_stays_the_same_is_not_told(fn: Callable[..., Any]) -> None:
    with warnings.catch_warnings(action="error"):
        ml.capture(fn)(ml.ones(2))


def test_a_function_that_raises_tells_nothing_besides() -> None:
    with warnings.catch_warnings(action="error"):
        refuses(ml.errors.ShapeError, "", ml.capture(lambda x: x * time.time() @ x[:1]), ml.ones(2))
