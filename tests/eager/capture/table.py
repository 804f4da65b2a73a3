"""Tables of functions with operands: captured calls are the eager ones, and a known call launches
one program.

A row calls functions that `wrap` has made, and yields what comes of each call together with what
the function may have changed. It runs twice, eagerly and captured, on operands of its own. All that
it yields must be the same: the bits and types of tensors, which tensors are one object, which share
memory, and the classes and values of everything else.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeAlias

import numpy as np

import mlvm.eager as ml
from mlvm.core.observe import observed
from mlvm.eager import nn, optim
from mlvm.eager.capture.launch import Launch
from mlvm.eager.tensor.context import current_arena
from mlvm.machines.native.extension import EXTENSION
from tests.brief import Fn, Patch, count_calls

Wrap: TypeAlias = Callable[..., Fn]
"""A function that captures a function, with options, or returns it as it is."""

Run: TypeAlias = Callable[[Wrap], Iterator[Any]]


class Row(NamedTuple):
    """A row: `run` yields what there is after each call.

    programs: how many programs there are after all calls, if it matters.
    launches: of a call whose program is known; None if that differs.
    is_in_c: whether the last call starts without Python.
    """

    run: Run
    programs: int | None = None
    launches: int | None = 1
    is_in_c: bool = False


class Table(dict[str, Row]):
    """Rows by name."""

    def row(self, **expected: Any) -> Callable[[Run], Run]:
        """Return a decorator that adds a row under the function's name."""

        def add(run: Run) -> Run:
            self[run.__name__.replace("_", " ")] = Row(run, **expected)
            return run

        return add

    def rows(self, name: str, fns: list[Fn], build: Callable[[Fn], Run], **expected: Any) -> None:
        """Add a row for each function, which `build` makes of it."""
        for fn in fns:
            line = fn.__code__.co_firstlineno
            self[f"{name}, line {line}"] = Row(build(fn), **expected)

    def check(self, name: str, monkeypatch: Patch, **options: Any) -> None:
        """Run a row eagerly and captured with these options, and compare what it yields."""
        row, captured = self[name], list[Captured]()
        counts = count_calls(monkeypatch, Launch, "run")

        def capture(fn: Fn, **more: Any) -> Captured:
            captured.append(Captured(fn, row, counts, {**options, **more}))
            return captured[-1]

        def plain(fn: Fn, **more: Any) -> Fn:
            return fn

        with np.errstate(all="ignore"):
            expected = [
                *map(seen, row.run(plain))
            ]  # not in turns: a row may yield inside a context
            for i, (eager, result) in enumerate(
                zip(expected, map(seen, row.run(capture)), strict=True)
            ):
                assert result == eager, f"what was yielded {i} times before"
        if row.programs is not None:
            assert sum(each.step.signatures for each in captured) == row.programs
        if row.is_in_c and EXTENSION is not None:
            assert all(each.sent == 0 for each in captured)


def seen(tree: Any) -> Any:
    """Return a form of the tree that compares: one nan is another, 0.0 is not -0.0."""
    objects: dict[int, int] = {}
    memories: dict[int, int] = {}

    def look(x: Any) -> Any:
        if isinstance(x, ml.Tensor):
            same = objects.setdefault(id(x), len(objects))
            memory = memories.setdefault(id(x.root), len(memories))
            return str(x.type), same, memory, look(x.numpy())
        if isinstance(x, np.ndarray):
            if x.dtype.kind == "f":
                x = np.where(np.isnan(x), x.dtype.type(np.nan), x)
            return x.dtype, x.shape, x.tobytes()
        if isinstance(x, dict):
            return type(x).__name__, [(name, look(each)) for name, each in x.items()]
        if isinstance(x, (list, tuple)):
            return type(x).__name__, [*map(look, x)]
        if isinstance(x, (nn.Module, optim.Optimizer)) or dataclasses.is_dataclass(x):
            return type(x).__name__, look(vars(x))
        return type(x), repr(x)

    return look(tree)


def tried(fn: Fn, *args: Any, **named: Any) -> Any:
    """Return what a call returns, or its error."""
    try:
        return fn(*args, **named)
    except Exception as error:
        return type(error), str(error)


class Captured:
    """A captured function. Every other call checks how often it launches a program.

    sent: how many launches the last of the other calls has sent from Python, of all in `counts`.
    """

    def __init__(self, fn: Fn, row: Row, counts: Counter[str], options: dict[str, Any]) -> None:
        self.step: Any = ml.capture(fn, **options)
        self.launches = row.launches
        self.counts = counts
        self.count = self.sent = 0

    def __call__(self, *args: Any, **named: Any) -> Any:
        self.count += 1
        programs, launched = self.step.signatures, list[object]()

        def launch(proceed: Any, program: Any, *rest: Any, **options: Any) -> Any:
            launched.append(program)
            return proceed(program, *rest, **options)

        is_looked_at = self.count % 2 == 0 and self.launches is not None
        before = self.counts["run"]
        with observed(current_arena().vm, launch=launch) if is_looked_at else nullcontext():
            result = self.step(*args, **named)
        if not is_looked_at:
            self.sent = self.counts["run"] - before
        elif programs == self.step.signatures:
            assert len(launched) == self.launches
        return result

    def __get__(self, instance: object, owner: type) -> Any:
        return lambda *args, **named: self(instance, *args, **named)
