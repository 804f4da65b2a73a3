"""Analysis of the calls that may be the first in a launch to read or write an argument.

The analysis tracks, for each value on the stack, the set of arguments that it may be. A set has
more than one element where paths join, and for the result of a call. `None` in a set stands for any
tensor that a program refers to by handle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, TypeAlias

from mlvm.core.errors import MlvmError
from mlvm.core.machine.callee import OUT, Fused, UserFunction, WritesInto
from mlvm.core.machine.decode import Decoded, Ref, Result, argument_of, decode
from mlvm.core.machine.functions import FunctionTable
from mlvm.core.machine.verify import verify
from mlvm.core.op import OPS, Attributes
from mlvm.core.program.program import OPCODES, Program

ALL: Final = slice(0, None)

Arguments: TypeAlias = frozenset[int | None]
"""Numbers of arguments; in a function, negative numbers are parameters, as for `get`."""

Reads: TypeAlias = Callable[[str, Attributes], slice | None]
"""Returns which operands a host function only reads. None: it may write to any."""


class Access(NamedTuple):
    """Arguments that no call before `call` may have read or written.

    `pc` is the instruction in main: the call itself, or the call of a function that leads to it.
    """

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
    is_op = name.removesuffix(OUT) in OPS
    return slice(int(name.endswith(OUT)), None) if is_op else None


def accesses(program: Program, reads: Reads = reads_by_name) -> list[Access]:
    """Return the first accesses of a launch to its arguments, in the order of main's code.

    An unknown access counts as a write.
    """
    return _Analysis(program, reads).summary("main")[0]


def uses_of(program: Program, functions: FunctionTable, nargs: int) -> Uses:
    """Return how a launch first uses each argument; "overwritten" if the analysis fails."""

    def reads(name: str, attributes: Attributes) -> slice | None:
        callee = functions.binding(name).callee
        if isinstance(callee, WritesInto):
            return slice(callee.writes(callee.bind(attributes)), None)
        return callee.reads if isinstance(callee, UserFunction) else ALL

    everything = frozenset(range(nargs))
    try:
        verify(program, functions)
        entries = accesses(program, reads)
    except MlvmError:
        return Uses(frozenset(), everything)
    makes: dict[int | None, bool] = {}
    for each in entries:
        for numbers, is_write in ((each.reads, False), (each.writes, True)):
            for number in numbers:
                makes.setdefault(number, is_write)
    read, written = (
        frozenset(i for i in makes if i is not None and makes[i] is is_write)
        for is_write in (False, True)
    )
    return Uses(read, everything - read if any(None in x.writes for x in entries) else written)


class _Analysis:
    def __init__(self, program: Program, reads: Reads) -> None:
        self._codes, self._reads = decode(program), reads
        code = [each for function in program.functions.values() for each in function.code]
        has_global = any(each.opcode is OPCODES["load_global"] for each in code)
        numbers = {argument_of(each) for each in code} - {None}
        self._loaded: Arguments = frozenset({*numbers, None} if has_global else numbers)
        self._summaries: dict[str, tuple[list[Access], Arguments] | None] = {}

    def summary(self, name: str) -> tuple[list[Access], Arguments]:
        """Return the accesses of a function, and the arguments that it may return.

        The code is read repeatedly until the contents of the slots no longer change.
        """
        self._summaries[name] = None  # it may call itself
        # the possible values of slots at the start of a block
        contents, size = frozenset[int | None](), -1
        while size < len(contents):
            size, entries, returned = len(contents), list[Access](), set[int | None]()
            recorded: set[tuple[bool, int | None]] = set()
            for block in self._codes[name]:
                results: dict[int, Arguments] = {}
                remaining = [*block.pushed, *[ref for _, ref in block.changed]]
                for each in block.code:
                    row = _values(
                        remaining if each.kind == "halt" else each.operands or (), contents, results
                    )
                    if each.kind == "halt":
                        row.append(contents)
                    elif each.operands is None:
                        row = [self._loaded.union(range(-self._codes[name].function.nparams, 0))]
                    inner, results[each.pc] = self._step(each, row)
                    returned |= set().union(*row) if each.kind == "return_" else set()
                    for call, reads, writes in inner:
                        reads = frozenset(i for i in reads if (False, i) not in recorded)
                        writes = frozenset(i for i in writes if (True, i) not in recorded)
                        if reads or writes:
                            recorded |= {(False, i) for i in reads} | {(True, i) for i in writes}
                            entries.append(Access(each.pc, call, reads, writes))
                many = results.values() if block.many or block.is_open else ()
                contents = contents.union(*_values(remaining, contents, results), *many)
        self._summaries[name] = entries, frozenset(returned)
        return entries, frozenset(returned)

    def _step(
        self, each: Decoded, row: Sequence[Arguments]
    ) -> tuple[list[tuple[Decoded, Arguments, Arguments]], Arguments]:
        """Return the accesses of an instruction, and the arguments that the results may be."""
        nothing: Arguments = frozenset()
        union = nothing.union(*row)
        if each.fault is not None:
            return [(each, self._loaded, self._loaded)], union
        if each.kind == "cfunc":
            read = None if each.name is None else self._reads(each.name, each.attributes)
            places = range(0) if read is None else range(len(row))[read]
            if each.operands is None and read != ALL:
                places = range(0)
            reads = nothing.union(*[row[i] for i in places])
            writes = nothing.union(*[x for i, x in enumerate(row) if i not in places])
            return [(each, reads, writes)], union
        if each.kind == "call":
            if each.callee in self._summaries and self._summaries[each.callee] is None:
                return [(each, union, union)], union | self._loaded
            entries, returned = self._summaries.get(each.callee) or self.summary(each.callee)

            def outer(numbers: Iterable[int | None]) -> Arguments:
                return nothing.union(*[[i] if i is None or i >= 0 else row[i] for i in numbers])

            return [(call, outer(x), outer(y)) for _, call, x, y in entries], outer(returned)
        if each.kind == "load_global":
            return [], nothing.union([None])
        if each.kind == "store_global":
            return [(each, union, nothing.union([None]))], nothing
        return [(each, nothing if each.kind == "set" else union, nothing)], nothing


def _values(
    refs: Sequence[Ref], contents: Arguments, results: dict[int, Arguments]
) -> list[Arguments]:
    """Return the arguments that each operand may be."""
    return [
        contents.union([ref] if ref < 0 else ())
        if isinstance(ref, int)
        else results[ref.pc]
        if isinstance(ref, Result)
        else frozenset({argument_of(ref)} - {None})
        for ref in refs
    ]
