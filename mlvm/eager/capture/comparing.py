"""`capture(check=n)`: compare a program with a new trace of the function.

In: the `TracedCall` that a program was compiled from, and a new trace of a call that is about to
launch the program. Out: None, or `StaleProgramError` with the first line and value that differ.

Without a guard for a value that the function reads, a program would still be launched after this
value has changed. Both traces have the same signature, so any difference between them is such a
change. Calls are compared in order: functions, attributes, types and operands. Operands are equal
if they are the same value of the flow, the same tensor from outside, or constants with equal bits.

Callers: `Captured` at each n-th call that has a program.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Final, NamedTuple, TypeAlias, cast

import numpy as np

from mlvm.core.errors import StaleProgramError, brief, with_article
from mlvm.core.memo import exact_repr
from mlvm.eager.capture.cache import CacheEntry
from mlvm.eager.capture.guards.guard_set import dict_of, is_mutable
from mlvm.eager.capture.guards.readable import ARRAYS, PLAIN, content_of
from mlvm.eager.capture.guards.signature import Signature
from mlvm.eager.capture.opened import OpenTrace
from mlvm.eager.capture.trace import ObjectTemplate, TracedCall
from mlvm.eager.tensor.constants import scalar_array
from mlvm.eager.tensor.copying import Leaf, NumberLeaf, OutsideLeaf, ResultLeaf
from mlvm.eager.tensor.reading import values_of
from mlvm.eager.tensor.values import items_of
from mlvm.step.flow import Block, Call, Home, Procedure, Value

_REMEDY: Final = (
    "a value that the function reads has changed, and no guard compares it. Give it as an "
    "argument, or keep it in a field, a list or a dict that the function names"
)

_NUMBER: Final = re.compile(r"(?<=ResultLeaf)\(\d+\)")
"""Number of a result in the text of a set's element."""

Place: TypeAlias = tuple[str, str]
"""A Python line, and the part of a call as text."""


class Source(NamedTuple):
    """One of the two traces to compare: the program's trace or the new trace.

    call: the recorded calls. values: the Python numbers and sizes of the compared call.
    """

    call: TracedCall
    values: Sequence[Any]


Again: TypeAlias = Callable[..., TracedCall]
"""Function that traces a call again, with these numbers free and these lengths dynamic."""


def sources_of(
    call: TracedCall, entry: CacheEntry, signature: Signature, again: Again
) -> tuple[Source, Source]:
    """Return the trace of an entry, for the numbers of the entry's last call, and a new trace."""
    other = again(call.free)
    return Source(call, entry.scalars.values), Source(other, other.numbers.values)


def open_sources_of(
    opened: OpenTrace, lengths: tuple[int, ...], signature: Signature, again: Again
) -> tuple[Source, Source]:
    """Return a trace with dynamic sizes, evaluated at the sizes of a call, and a new trace."""
    values = opened.values(signature, lengths)
    assert values is not None  # the entry was found for these sizes
    other = again(opened.call.free, opened.open)
    return _source_at(opened.call, values), _source_at(other, other.numbers.values)


def _source_at(call: TracedCall, values: Sequence[Any]) -> Source:
    assert call.template is not None
    return Source(call.at(values, call.template.flow(values)), values)


class _Fact:
    """Part of a trace: compared by the key, and shown as the text or the value."""

    def __init__(self, key: object, value: Any, text: str = "") -> None:
        self._key, self.value, self._text = key, value, text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Fact) and self._key == other._key

    def __repr__(self) -> str:
        is_array = isinstance(self.value, (np.ndarray, np.generic))
        return self._text or brief(self.value.tolist() if is_array else self.value)


def _bits(array: Any) -> _Fact:
    """Return a constant operand, which is compared by type and bits."""
    return _Fact(content_of(array), array)


def _plain(value: Any) -> _Fact:
    """Return a value that is compared by class and text, so that 1, 1.0 and True differ."""
    return _Fact((type(value), exact_repr(value)), value)


def _named(value: Any, text: str) -> _Fact:
    """Return an object that is compared by identity, or a function or class of this trace."""
    key: object = id(value)
    if type(value) is FunctionType:
        key = value.__code__
    elif isinstance(value, type):
        key = value.__module__, value.__qualname__
    return _Fact(key, value, text)


def require_same(fn: Any, title: str, ours: Source, present: Source) -> None:
    """Raise `StaleProgramError` unless both traces of a function produce the same program."""
    before, now = _Facts(ours), _Facts(present)
    end: tuple[Place, Any] = ("", "the number of calls"), None
    facts, others = [*before.facts(), end], [*now.facts(), end]
    for (place, fact), (other_place, other) in zip(facts, others, strict=False):
        if fact != other or place[1] != other_place[1]:
            line, what = other_place[0] or place[0], other_place[1]
            code = getattr(fn, "__code__", None)
            if not line and code is not None:
                line = f"{code.co_filename}:{code.co_firstlineno}"
            where = f"{line}: " if line else ""
            if place[1] != other_place[1]:
                what = "the next call"
                fact, other = (_Fact(0, 0, each[1]) for each in (place, other_place))
            raise StaleProgramError(
                f"{where}capture(check=): the program of {title!r} is out of date: {what} was "
                f"{brief(fact)} when it was compiled, and is {brief(other)} now; {_REMEDY}"
            )


class _Facts:
    """Facts of a trace in call order: each is a place with a value."""

    def __init__(self, source: Source) -> None:
        self._call, self._values = source
        record = self._call.record
        self._states = record.outside.states
        numbers = self._call.numbers.tensors.items()
        self._numbers = {id(x): (place, dtype) for (place, dtype), x in numbers}
        self._constants = {id(x) for x in record.outside.constants.values()}
        self._ordinals: dict[Value, int] = {}
        self._homes: dict[Home, int] = {}
        self._procedures: dict[int, int] = {}

    def facts(self) -> Iterator[tuple[Place, Any]]:
        flow, outcome = self._call.flow, self._call.outcome
        yield from self._calls(flow.calls)
        pairs = zip(flow.results, outcome.results, strict=True)
        results = [(self._operand(value), x.type, x.argument) for value, x in pairs]
        for what, part in _parts(outcome.tree, self._values, "the result"):
            yield ("", what), part
            numbers = sorted(_results_of_sets(part))  # a set has no order of its own
            facts = sorted([results[n] for n in numbers], key=repr)
            for n, fact in zip(numbers, facts, strict=True):
                results[n] = fact
        yield from ((("", f"result {i}"), fact) for i, fact in enumerate(results))
        fields = [(f"{type(field.owner).__name__}.{field.name}", n) for field, n in outcome.rebound]
        yield ("", "the fields that the function assigns"), fields

    def _calls(self, calls: Sequence[Call]) -> Iterator[tuple[Place, Any]]:
        for call in calls:
            line, name = call.line or "", call.name.removesuffix(".out")
            yield (line, f"the call of {name}"), len(call.ins)
            for key, attribute in call.attributes.items():
                for what, part in _parts(attribute, self._values, f"attribute {key!r} of {name}"):
                    yield (line, what), part
            for i, use in enumerate(call.ins):
                yield (line, f"operand {i} of {name}"), self._operand(use.value)
                yield (line, f"the type of operand {i} of {name}"), use.type
            if call.queue is not None:
                yield (line, f"the queue of {name}"), call.queue
            for procedure in (*call.procedures, *([call.callee] if call.callee else ())):
                yield from self._procedure(procedure)
            for block in call.blocks:
                yield from self._block(block)
            for i, use in enumerate(call.outs):
                yield (line, f"the type of result {i} of {name}"), use.type
                yield (line, f"the memory of result {i} of {name}"), self._home(use.value.home)
                self._ordinals[use.value] = len(self._ordinals)

    def _block(self, block: Block) -> Iterator[tuple[Place, Any]]:
        yield from self._calls(block.calls)
        if block.result is not None:
            yield ("", "the condition of a loop"), self._operand(block.result.value)

    def _procedure(self, procedure: Procedure) -> Iterator[tuple[Place, Any]]:
        is_new = id(procedure) not in self._procedures
        number = self._procedures.setdefault(id(procedure), len(self._procedures))
        yield ("", f"the function {procedure.name!r}"), number
        if is_new:
            yield from self._block(procedure.block)

    def _home(self, home: Home | None) -> Any:
        if home is None or home.role not in ("input", "state", "element"):
            return None
        return self._outside(home)

    def _operand(self, value: Value) -> Any:
        if value in self._ordinals or value.home is None:
            return self._ordinals.setdefault(value, len(self._ordinals))
        return self._outside(value.home)

    def _outside(self, home: Home) -> Any:
        if home.role != "state":
            return home.role, self._homes.setdefault(home, len(self._homes))
        x: Any = self._states[home.index]
        number = self._numbers.get(id(x))
        if number is not None:
            return _bits(scalar_array(self._values[number[0]], number[1]))
        if id(x) in self._constants:
            return _bits(values_of(x))
        if x.arena.name == "constants" and x.base is None and not x.type.shape:
            return _bits(values_of(x))
        return _named(x, f"a tensor {x.type}")


def _results_of_sets(part: Any, *, is_inside: bool = False) -> Iterator[int]:
    """Yield the numbers of the results in a set, and in the tuples and sets that it contains."""
    value = part.value if isinstance(part, _Fact) else part
    if isinstance(value, ResultLeaf) and is_inside:
        yield value.value
    elif isinstance(value, (set, frozenset)) or (is_inside and isinstance(value, tuple)):
        for each in value:
            yield from _results_of_sets(each, is_inside=True)


def _parts(
    value: Any, numbers: Sequence[Any], where: str, above: tuple[int, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a tree, template or attribute, each with a text that locates it."""
    kind, of = type(value), partial(_parts, numbers=numbers, above=(*above, id(value)))
    if kind in PLAIN:
        yield where, _plain(value)
    elif kind is NumberLeaf:
        yield from _parts(numbers[value.value], numbers, where)
    elif kind is ObjectTemplate:
        yield from of(value.template, where=where)
    elif kind is OutsideLeaf:
        yield where, _named(value.value, with_article(type(value.value).__name__))
    elif issubclass(kind, Leaf):
        yield where, (kind, value.value)
    elif kind is MethodType:
        yield from of((value.__func__, value.__self__), where=where)
    elif id(value) in above:
        yield where, _plain("...")
    elif issubclass(kind, ARRAYS):
        yield where, _bits(np.asarray(value))
    elif issubclass(kind, (dict, list, tuple)):
        items = [*(items_of(value) if issubclass(kind, dict) else enumerate(value))]
        yield f"the class of {where}", _named(kind, kind.__name__)
        yield f"the number of items in {where}", _plain(len(items))
        for key, each in items:
            if issubclass(kind, dict):
                yield from of(key, where=f"a key of {where}")
            yield from of(each, where=f"{where}[{brief(key)}]")
    elif issubclass(kind, (set, frozenset)):
        yield where, _Fact(sorted([_NUMBER.sub("", repr(x)) for x in value]), value)
    elif cast("Any", kind).__eq__ is not object.__eq__ and not dict_of(value):
        yield where, _plain(value)
    elif is_mutable(value):
        yield f"the class of {where}", _named(kind, kind.__name__)
        for name, each in dict_of(value).items():
            yield from of(each, where=f"{where}.{name}")
    else:
        yield where, _named(value, with_article(kind.__name__))
