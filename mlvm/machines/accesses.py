"""What a launch reads and writes: for each of its arguments, the calls that may do so first.

A value on the stack may be one of several arguments: where paths meet, and as the result of a call
on them. `None` in a set of arguments is any tensor that a program names by its handle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from mlvm.core.errors import MlvmError
from mlvm.core.machine.callee import OUT, Fused, UserFunction, WritesInto
from mlvm.core.machine.decode import Code, Decoded, Ref, Result, argument_of, decode
from mlvm.core.machine.functions import FunctionTable
from mlvm.core.machine.verify import verify
from mlvm.core.op import OPS, Attributes
from mlvm.core.program.program import Program

ALL: Final = slice(0, None)

Arguments: TypeAlias = Set[int | None]
"""Numbers of arguments; in a function those below 0 are its parameters, as for `get`."""

Reads: TypeAlias = Callable[[str, Attributes], slice | None]
"""Returns which operands a host function only reads. None: it may write to any."""


class Access(NamedTuple):
    """Arguments that no call before `call` may have read or written. `pc` is its place in main, or
    that of the call of a function which leads there."""

    pc: int
    call: Decoded
    reads: Arguments
    writes: Arguments


class Uses(NamedTuple):
    """First use of a launch's arguments: old values of `reads` matter; `makes` are overwritten."""

    reads: frozenset[int]
    makes: frozenset[int]


def reads_by_name(name: str, attributes: Attributes) -> slice | None:
    """Return which operands an op or `fused` only reads; None for any other function."""
    if name == Fused.name:
        outputs = attributes.get("outputs")
        return None if outputs is None else slice(outputs, None)
    if name.removesuffix(OUT) in OPS:
        return slice(1, None) if name.endswith(OUT) else ALL
    return None


def accesses(program: Program, reads: Reads = reads_by_name) -> list[Access]:
    """Return the first accesses of a launch to its arguments, in the order of main's code. An
    unknown access counts as a write."""
    return _Summaries(decode(program), reads).of("main").accesses


def uses_of(program: Program, functions: FunctionTable, nargs: int) -> Uses:
    """Return how a launch first uses each argument; as overwritten, if that cannot be inferred."""

    def reads(name: str, attributes: Attributes) -> slice | None:
        callee = functions.binding(name).callee
        if isinstance(callee, WritesInto):
            return slice(callee.writes(callee.bind(attributes)), None)
        return callee.reads if isinstance(callee, UserFunction) else ALL

    try:
        verify(program, functions)
        found = accesses(program, reads)
    except MlvmError:
        return Uses(frozenset(), frozenset(range(nargs)))
    is_made: dict[int | None, bool] = {}
    for each in found:
        for numbers, makes in ((each.reads, False), (each.writes, True)):
            for number in numbers:
                is_made.setdefault(number, makes)
    read = frozenset(i for i, makes in is_made.items() if i is not None and not makes)
    if is_made.get(None) or any(None in each.writes for each in found):
        return Uses(read, frozenset(range(nargs)) - read)
    return Uses(read, frozenset(i for i, makes in is_made.items() if i is not None and makes))


@dataclass
class _Summary:
    """Accesses of one function, and the arguments that it may return."""

    accesses: list[Access] = field(default_factory=list)
    returned: set[int | None] = field(default_factory=set)
    read: set[int | None] = field(default_factory=set)
    written: set[int | None] = field(default_factory=set)

    def add(self, pc: int, call: Decoded, reads: Arguments, writes: Arguments) -> None:
        reads, writes = reads - self.read, writes - self.written
        if reads or writes:
            self.read |= reads
            self.written |= writes
            self.accesses.append(Access(pc, call, reads, writes))


class _Summaries:
    def __init__(self, codes: dict[str, Code], reads: Reads) -> None:
        self._codes, self._reads = codes, reads
        self._of: dict[str, _Summary | None] = {}
        loads = [argument_of(each) for code in codes.values() for each in code.function.code]
        self.anything: set[int | None] = {None, *loads}

    def of(self, name: str) -> _Summary:
        """Return the summary of a function."""
        summary = self._of.get(name)
        if summary is None:
            self._of[name] = None  # it may call itself
            summary = self._of[name] = _Walk(self._codes[name], self).run()
        return summary

    def is_open(self, name: str) -> bool:
        """Return whether the function is being summarized."""
        return name in self._of and self._of[name] is None

    def split(
        self, call: Decoded, row: Sequence[Arguments]
    ) -> tuple[Sequence[Arguments], Sequence[Arguments]]:
        """Return what a host call reads of its operands, and what it may write to."""
        read = None if call.name is None else self._reads(call.name, call.attributes)
        if read is None or call.operands is None:
            return ([], row) if read != ALL else (row, [])
        places = range(len(row))[read]
        return [row[i] for i in places], [x for i, x in enumerate(row) if i not in places]


class _Walk:
    """Walk over a function's code from first to last, again until its slots hold no more."""

    def __init__(self, code: Code, summaries: _Summaries) -> None:
        self._code, self._summaries = code, summaries
        self._slots: dict[int, set[int | None]] = defaultdict(set)
        self._everywhere: set[int | None] = set()  # what any slot may hold
        for i in range(-code.function.nparams, 0):
            self._slots[i].add(i)

    def run(self) -> _Summary:
        while True:
            before = sum(map(len, self._slots.values())) + len(self._everywhere)
            summary = _Summary()
            for block in self._code:
                results: dict[int, set[int | None]] = {}
                for each in block.code:
                    results[each.pc] = self._follow(each, results, summary)
                for i, ref in (*block.changed, *enumerate(block.left, block.low)):
                    self._slots[i] |= self._value(ref, results)
                if block.many or block.is_open:
                    self._everywhere.update(*results.values())
            if sum(map(len, self._slots.values())) + len(self._everywhere) == before:
                return summary

    def _value(self, ref: Ref, results: dict[int, set[int | None]]) -> Arguments:
        """Return the arguments that an operand may be."""
        if isinstance(ref, int):
            return self._slots[ref] | self._everywhere
        if isinstance(ref, Result):
            return results[ref.pc]
        number = argument_of(ref)
        return frozenset() if number is None else frozenset([number])

    def _follow(
        self, each: Decoded, results: dict[int, set[int | None]], summary: _Summary
    ) -> set[int | None]:
        """Add the accesses of one instruction. Return the arguments that its results may be."""
        if each.operands is None or each.fault is not None:
            row: list[Arguments] = [
                self._everywhere.union(*self._slots.values(), *results.values())
            ]
        else:
            row = [self._value(ref, results) for ref in each.operands]
        union: set[int | None] = set().union(*row)
        if each.fault is not None:
            summary.add(each.pc, each, union, {*union, None})
        elif each.kind == "cfunc":
            read, written = self._summaries.split(each, row)
            summary.add(each.pc, each, set().union(*read), set().union(*written))
        elif each.kind == "call" and self._summaries.is_open(each.callee):
            summary.add(each.pc, each, union, union)
            return union | self._summaries.anything
        elif each.kind == "call":
            inner = self._summaries.of(each.callee)

            def outer(numbers: Iterable[int | None]) -> Arguments:
                return set().union(*[row[i] if i is not None and i < 0 else {i} for i in numbers])

            for _, call, reads, writes in inner.accesses:
                summary.add(each.pc, call, outer(reads), outer(writes))
            return {*outer(inner.returned)}
        elif each.kind == "return":
            summary.returned |= union
        elif each.kind == "load_global":
            return {None}
        elif each.kind == "store_global":
            summary.add(each.pc, each, union, {None})
        else:  # halt, jump_if_false, set and jump
            summary.add(each.pc, each, union if each.kind != "set" else set(), set())
        return union
