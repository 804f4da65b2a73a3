"""What a program calls: which functions, what these are called, and what they write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Generic, TypeVar

from mlvm.core.machine.callee import OUT, Fused
from mlvm.core.op import OPS
from mlvm.core.program.program import Function, Opcode, Program

T = TypeVar("T")

_MOST_KNOWN: Final = 10_000  # programs
_MOST_NAMES: Final = 3  # of ops that name a program or a chain


def calls_in(program: Program) -> list[tuple[int, str]]:
    """The pc and the name of each call of a host function in main; without jumps and functions
    they run in this order."""
    code = program.main.code
    return [
        (pc, code[pc - 1].immediates[0] if pc and code[pc - 1].opcode is Opcode.push_str else "")
        for pc, each in enumerate(code)
        if each.opcode is Opcode.cfunc
    ]


def is_straight(program: Program) -> bool:
    """Whether all calls of main run in their order, each once."""
    leaving = Opcode.jump, Opcode.jump_if_false, Opcode.call
    return not any(each.opcode in leaving for each in program.main.code)


def label_of(name: str, attributes: Any) -> str:
    """What a call is called: its op, or those of its chain."""
    chain = attributes.get("chain") if isinstance(attributes, Mapping) else None
    if isinstance(chain, (list, tuple)) and chain:
        return name_of([str(link[0]) for link in chain if isinstance(link, (list, tuple)) and link])
    return name.removesuffix(OUT)


def name_of(names: Iterable[str]) -> str:
    """The names in a row, as far as they are few."""
    few = list(dict.fromkeys(names))
    more = f" and {len(few) - _MOST_NAMES} more" if len(few) > _MOST_NAMES else ""
    return (", ".join(few[:_MOST_NAMES]) or "no calls") + more


class OfPrograms(Generic[T]):
    """What `made` makes of each program, made once. They are told apart by identity: programs that
    differ often hash alike. Of very many the latest are kept."""

    def __init__(self, made: Callable[[Program], T]) -> None:
        self._made = made
        self._known: dict[int, tuple[Program, T]] = {}

    def __getitem__(self, program: Program) -> T:
        known = self._known.get(id(program))
        if known is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            known = self._known[id(program)] = program, self._made(program)
        return known[1]

    def clear(self) -> None:
        self._known.clear()


Writes = dict[int, tuple[str, int]]
"""What the first call is called that writes each argument, and its pc."""


def writes_in(program: Program) -> Writes:
    """Which arguments of a launch the program writes: by number the first call in main that does.

    Calls count in the order in which they stand. For a function of the program the name is that of
    the op in it, the pc that of the function's call. A host function that is no op may write all
    that it is given.
    """
    return {place: call for place, call in _writes(program, program.main, {}).items() if place >= 0}


def _writes(program: Program, function: Function, known: dict[str, Writes]) -> Writes:
    """As `writes_in`, for one function. A number below 0 is one of its parameters, as for `get`."""
    found = known[function.name] = Writes()  # nothing yet, for one that calls itself
    stack: list[int | str | None] = []  # numbers of arguments and parameters, and texts

    def take(count: Any) -> list[int | str | None]:
        number = count if isinstance(count, int) else len(stack)
        taken = [stack.pop() if stack else None for _ in range(number)]
        return taken[::-1]

    def write(place: int | str | None, name: str, pc: int) -> None:
        if isinstance(place, int):
            found.setdefault(place, (name, pc))

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
            if callee.name not in known:
                _writes(program, callee, known)
            for inner, (name, _) in known[callee.name].items():
                is_parameter = -len(operands) <= inner < 0
                write(operands[inner] if is_parameter else inner, name, pc)
            _leave(stack, callee.nresults)
        elif opcode is Opcode.cfunc:
            nparams, nresults, attributes = (*immediates, {})[:3]
            [called] = take(1)
            operands = take(nparams)
            if isinstance(called, str):
                for place in operands[: _written(called, attributes, len(operands))]:
                    write(place, label_of(called, attributes), pc)
            _leave(stack, nresults)
    return found


def _written(name: str, attributes: Mapping[str, Any], nparams: int) -> int:
    """How many of its first parameters a host function may write."""
    if name == Fused.name:
        outputs = attributes.get("outputs")
        return outputs if isinstance(outputs, int) else 1
    if name in OPS:
        return 0
    return 1 if name.endswith(OUT) and name.removesuffix(OUT) in OPS else nparams


def _leave(stack: list[int | str | None], nresults: Any) -> None:
    stack.extend([None] * (nresults if isinstance(nresults, int) else 0))
