"""The host functions that a program calls: their names, and the arguments that they write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Generic, TypeVar

from mlvm.arena.writes import count_written
from mlvm.core.machine.callee import OUT
from mlvm.core.memo import Memo
from mlvm.core.program.program import Function, Opcode, Program

T = TypeVar("T")

_MOST_ENTRIES: Final = 10_000  # of a cache
_MOST_NAMES: Final = 3  # of ops that name a program or a chain


def calls_in(program: Program) -> list[tuple[int, str]]:
    """Return the pc and the name of each call of a host function in main; without jumps and
    functions they run in this order."""
    code = program.main.code
    return [
        (pc, code[pc - 1].immediates[0] if pc and code[pc - 1].opcode is Opcode.push_str else "")
        for pc, each in enumerate(code)
        if each.opcode is Opcode.cfunc
    ]


def is_straight(program: Program) -> bool:
    """Return whether all calls of main run in their order, each once."""
    leaving = Opcode.jump, Opcode.jump_if_false, Opcode.call
    return not any(each.opcode in leaving for each in program.main.code)


def label_of(name: str, attributes: Any) -> str:
    """Return the name of a call: its op, or the ops of its chain."""
    chain = attributes.get("chain") if isinstance(attributes, Mapping) else None
    if isinstance(chain, (list, tuple)) and chain:
        return name_of([str(link[0]) for link in chain if isinstance(link, (list, tuple)) and link])
    return name.removesuffix(OUT)


def name_of(names: Iterable[str]) -> str:
    """Join the distinct names; of many, list the first and count the others."""
    distinct = list(dict.fromkeys(names))
    more = f" and {len(distinct) - _MOST_NAMES} more" if len(distinct) > _MOST_NAMES else ""
    return (", ".join(distinct[:_MOST_NAMES]) or "no calls") + more


class ProgramCache(Generic[T]):
    """Cache of a value derived from each program. Its keys are identities: different programs often
    have equal hashes."""

    def __init__(self, derive: Callable[[Program], T]) -> None:
        self._derive = derive
        self._entries: Memo[int, tuple[Program, T]] = Memo(_MOST_ENTRIES, "show")

    def __getitem__(self, program: Program) -> T:
        return self._entries.get(id(program), lambda: (program, self._derive(program)))[1]

    def clear(self) -> None:
        self._entries.clear()


Writes = dict[int, tuple[str, int]]
"""Name and pc of the first call that writes each argument, by the argument's number."""


def writes_in(program: Program) -> Writes:
    """Find the arguments of a launch that the program writes, each with the first call in main that
    does.

    Calls count in program order. In a function of the program, the name is the op's, and the pc
    that of the function's call. A host function that is no op may write all its operands.
    """
    return {place: call for place, call in _writes(program, program.main, {}).items() if place >= 0}


def _writes(program: Program, function: Function, writes_of: dict[str, Writes]) -> Writes:
    """Return the writes of one function. A number below 0 is a parameter, as for `get`."""
    writes = writes_of[function.name] = Writes()  # nothing yet, for one that calls itself
    stack: list[int | str | None] = []  # numbers of arguments and parameters, and texts

    def take(count: Any) -> list[int | str | None]:
        number = count if isinstance(count, int) else len(stack)
        return [stack.pop() if stack else None for _ in range(number)][::-1]

    def write(place: int | str | None, name: str, pc: int) -> None:
        if isinstance(place, int):
            writes.setdefault(place, (name, pc))

    for pc, (opcode, immediates) in enumerate(function.code):
        if opcode in (Opcode.load_arg, Opcode.push_str):
            stack.append(immediates[0])
        elif opcode in (Opcode.push_int, Opcode.push_const):
            stack.append(None)
        elif opcode is Opcode.get:
            slot = immediates[0]
            stack.append(slot if slot < 0 else stack[slot] if slot < len(stack) else None)
        elif opcode is Opcode.set:
            [value] = take(1)
            if 0 <= immediates[0] < len(stack):
                stack[immediates[0]] = value
        elif opcode is Opcode.load_global:
            take(1)
            stack.append(None)
        elif opcode is Opcode.store_global:
            take(2)
        elif opcode is Opcode.jump_if_false:
            take(1)
        elif opcode is Opcode.pop:
            take(immediates[0])
        elif opcode is Opcode.call:
            callee = program.functions[immediates[0]]
            operands = take(callee.nparams)
            if callee.name not in writes_of:
                _writes(program, callee, writes_of)
            for inner, (name, _) in writes_of[callee.name].items():
                is_parameter = -len(operands) <= inner < 0
                write(operands[inner] if is_parameter else inner, name, pc)
            _leave(stack, callee.nresults)
        elif opcode is Opcode.cfunc:
            nparams, nresults, attributes = (*immediates, {})[:3]
            [called] = take(1)
            operands = take(nparams)
            if isinstance(called, str):
                for place in operands[: count_written(called, attributes)]:
                    write(place, label_of(called, attributes), pc)
            _leave(stack, nresults)
    return writes


def _leave(stack: list[int | str | None], nresults: Any) -> None:
    stack.extend([None] * (nresults if isinstance(nresults, int) else 0))
