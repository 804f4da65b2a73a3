"""Interruptions between two lines: a race that always has the same outcome."""

from __future__ import annotations

import dis
import gc
import sys
import threading
import weakref
from collections.abc import Callable
from contextvars import copy_context
from types import FrameType
from typing import Any


def with_each_line_interrupted(
    function: Callable[..., Any], make: Callable[[], tuple[Callable[[], Any], Callable[[], Any]]]
) -> int:
    """Call the first of what `make` returns, for n = 1, 2, ..., with the second called before the
    n-th line of `function`, as another thread might; how many lines there were."""

    n = line = 0
    before = sys.gettrace()

    def tracer(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal line
        if frame.f_code is function.__code__ and event == "line":
            line += 1
            if line == n:
                sys.settrace(None)
                interrupt()
        return tracer

    while line == n:
        n, line = n + 1, 0
        run, interrupt = make()
        sys.settrace(tracer)
        try:
            run()
        finally:
            sys.settrace(before)
    return line


def interrupted(function: Callable[[], Any], n: int) -> bool:
    """Call the function, with Ctrl-C where Python looks for signals the n-th time; whether it
    got so far."""
    visits = 0

    def look(frame: FrameType, event: str, _: Any) -> None:
        nonlocal visits
        here = event in ("call", "c_return") and frame.f_code.co_filename != weakref.__file__
        visits += here  # an error of what is called as something dies goes nowhere
        if here and visits == n:
            sys.setprofile(None)
            raise KeyboardInterrupt

    before = sys.getprofile()
    gc.disable()
    sys.setprofile(look)
    try:
        function()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(before)
        gc.enable()
    return False


def interrupted_at_line(function: Callable[[], Any], n: int, folder: str) -> bool:
    """Call the function, with Ctrl-C before the n-th line that it runs in files of that folder,
    finalizers included; return whether it got so far. The end of a `with` and the line of a `try`,
    where Python looks for no signals, are left alone."""
    return lines_run(function, folder, n) >= n


def lines_run(function: Callable[[], Any], folder: str, n: int = 0) -> int:
    """Call the function, and return how many lines it runs in files of that folder; with Ctrl-C
    before the n-th of them.

    It runs on a thread: an error that a trace raises between two instructions of an `except` stays
    the one that its thread handles, with all that its traceback holds.
    """
    visits = 0
    errors: list[BaseException] = []

    def tracer(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal visits
        if folder not in frame.f_code.co_filename:
            return None
        if event == "line" and not _is_uninterruptible(frame):
            visits += 1
            if visits == n:
                raise KeyboardInterrupt
        return tracer

    def report(problem: Any) -> None:
        """Report what a finalizer raised; one that is interrupted is no problem."""
        if not isinstance(problem.exc_value, KeyboardInterrupt):
            hook(problem)

    def run() -> None:
        sys.settrace(tracer)
        try:
            function()
        except KeyboardInterrupt:
            pass
        except BaseException as error:
            errors.append(error)
        finally:
            sys.settrace(None)

    hook = sys.unraisablehook
    gc.disable()
    sys.unraisablehook = report
    try:
        thread = threading.Thread(target=copy_context().run, args=(run,))
        thread.start()
        thread.join()
    finally:
        sys.unraisablehook = hook
        gc.enable()
    if errors:
        raise errors.pop()
    return visits


def _is_uninterruptible(frame: FrameType) -> bool:
    """Return whether Python looks for no signals here: the frame is about to call `__exit__` with
    three times None, or at the no-op of a `try`, which no `with` around it covers."""
    code = frame.f_code.co_code[frame.f_lasti : frame.f_lasti + 8 : 2]
    return bytes([dis.opmap["LOAD_CONST"]] * 3) in code or code[0] == dis.opmap["NOP"]
