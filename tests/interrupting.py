"""What comes in between two lines: a race that always has the same outcome."""

from __future__ import annotations

import sys
from collections.abc import Callable
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
