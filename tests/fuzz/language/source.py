"""A program in the eager language as text: to be run, cut down, and pasted into a test."""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, TypeAlias

IMPORTS: Final = """\
import numpy as np

import mlvm.eager as ml
from tests.fuzz.language.trying import require_same
from tests.fuzz.language.world import Box, World, tensor, values
"""

Node: TypeAlias = "str | Block"


class Block(NamedTuple):
    """A statement with others inside: its first line, these, and what closes it."""

    head: str
    body: tuple[Node, ...]
    foot: str = ""


class Call(NamedTuple):
    """A call of a step: its arguments, and the statements that make them."""

    making: tuple[Node, ...]
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Source:
    """A program: state, a step that uses it, and the arguments of each step.

    Step i is called as `calls[order[i]]` says. `setup` makes the state, `state` names it. With
    `resets` the arena of arguments and results is reset after each step.
    """

    setup: tuple[Node, ...]
    parameters: tuple[str, ...]
    body: tuple[Node, ...]
    results: tuple[str, ...]
    calls: tuple[Call, ...]
    order: tuple[int, ...]
    state: tuple[str, ...]
    resets: bool

    def text(self, imports: str = IMPORTS) -> str:
        """The program as Python, whose function `build` makes a `World`."""
        arguments: list[Node] = []
        for number, call in enumerate(self.calls):
            body = (*call.making, _returned(call.arguments, "()"))
            steps = tuple([i for i, each in enumerate(self.order) if each == number])
            arguments += body if len(self.calls) == 1 else [Block(f"if i in {steps}:", body)]
        step = (*self.body, _returned(self.results, "[]"))
        build: list[Node] = [
            *self.setup,
            Block(f"def step({', '.join(self.parameters)}):", step),
            Block("def arguments(i):", tuple(arguments)),
            Block("def state():", (_returned(self.state, "[]"),)),
            f"return World(step, arguments, state, steps={len(self.order)}, resets={self.resets})",
        ]
        if any("ml.subroutine(" in line or "def again" in line for line in rendered(self.body)):
            build[-1] = f"{build[-1][:-1]}, cycles=True)"
        lines = rendered([Block("def build():", tuple(build))])
        return f"{imports}\n\n" + "\n".join(lines) + "\n"

    def cuts(self) -> Iterator[Source]:
        """The program with one part less, the larger and later parts first."""
        for n in range(1, len(self.order)):
            yield replace(self, order=self.order[:n])
            yield replace(self, order=self.order[n:])
        if len(self.calls) > 1:
            for call in self.calls:
                yield replace(self, calls=(call,), order=(0,) * len(self.order))
        for body in without_one(self.body):
            yield replace(self, body=body)
        for i in reversed(range(len(self.results))):
            yield replace(self, results=_without(self.results, i))
        for i in reversed(range(len(self.parameters))):
            fewer = [each._replace(arguments=_without(each.arguments, i)) for each in self.calls]
            yield replace(self, parameters=_without(self.parameters, i), calls=tuple(fewer))
        for i, call in enumerate(self.calls):
            for making in without_one(call.making):
                changed = call._replace(making=making)
                yield replace(self, calls=(*self.calls[:i], changed, *self.calls[i + 1 :]))
        for i in reversed(range(len(self.state))):
            yield replace(self, state=_without(self.state, i))
        for setup in without_one(self.setup):
            yield replace(self, setup=setup)


def without_one(nodes: tuple[Node, ...]) -> Iterator[tuple[Node, ...]]:
    """The statements without one of them or of those inside, the last first. What a function
    returns stays: a branch has to make what the others do."""
    for i in reversed(range(len(nodes))):
        node = nodes[i]
        if isinstance(node, str) and node.startswith("return "):
            continue
        yield _without(nodes, i)
        if isinstance(node, Block):
            for body in without_one(node.body):
                yield (*nodes[:i], node._replace(body=body), *nodes[i + 1 :])


def _without(items: tuple[Any, ...], i: int) -> tuple[Any, ...]:
    return items[:i] + items[i + 1 :]


def _returned(items: Sequence[str], brackets: str) -> Block:
    """A return of a list or tuple, an item a line."""
    return Block(f"return {brackets[0]}", tuple([f"{item}," for item in items]), brackets[1])


def rendered(nodes: Sequence[Node], indent: str = "") -> Iterator[str]:
    """The statements as lines of Python."""
    for node in nodes:
        if isinstance(node, str):
            yield indent + node
            continue
        yield indent + node.head
        if node.head.endswith(":") and not node.body:
            yield f"{indent}    pass"
        yield from rendered(node.body, f"{indent}    ")
        if node.foot:
            yield indent + node.foot


_numbers: Final = itertools.count()


def built_by(text: str) -> Callable[[], Any]:
    """The program's `build`, whose lines tracebacks and errors show."""
    name = f"<program {next(_numbers)}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {"__name__": name}
    try:
        exec(compile(text, name, "exec"), namespace)
    finally:
        linecache.cache.pop(name, None)
    return namespace["build"]
