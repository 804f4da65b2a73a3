"""The process of one contender: `python -m bench.child MODULE CONTENDER FD QUICK`.

Over the connection on file descriptor FD it sends its cases' names, then, for each name
it receives, the metrics of one round. Every message to the parent is a pair (error, answer),
one of which is None. It ends when the parent closes the connection.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from bench.harness import Suite


def main(module: str, contender: str, descriptor: str, quick: str) -> None:
    with Connection(int(descriptor)) as parent:
        suite: Suite = importlib.import_module(module).SUITE
        prepare = next(c.prepare for c in suite.contenders if c.name == contender)
        cases = _answer(parent, lambda: prepare(bool(int(quick))), list)
        while True:
            try:
                case = parent.recv()
            except EOFError:
                return
            _answer(parent, cases[case], dict)


def _answer(parent: Connection, work: Callable[[], Any], form: Callable[[Any], object]) -> Any:
    """Do the work, send `form(result)` to the parent, and return the result."""
    try:
        result = work()
    except Exception as error:
        traceback.print_exc()
        parent.send((f"{type(error).__name__}: {error}", None))
        sys.exit(1)
    parent.send((None, form(result)))
    return result


if __name__ == "__main__":
    main(*sys.argv[1:])
