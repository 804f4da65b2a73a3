"""The host functions that a program calls: names, and written arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

from mlvm.arena.writes import reads_of
from mlvm.core.errors import listed
from mlvm.core.machine.callee import OUT
from mlvm.core.machine.decode import decode
from mlvm.core.memo import Memo
from mlvm.core.program.program import Program
from mlvm.machines.accesses import accesses

T = TypeVar("T")


def calls_in(program: Program) -> list[tuple[int, str]]:
    """Return the pc and the name of each call of a host function in main.

    Without jumps and functions they run in this order.
    """
    return [
        (each.pc, each.name or "")
        for each in decode(program)["main"].instructions()
        if each.kind == "cfunc"
    ]


def is_straight(program: Program) -> bool:
    """Return whether all calls of main run in order, each once."""
    leaving = "jump", "jump_if_false", "call"
    return not any(each.kind in leaving for each in decode(program)["main"].instructions())


def label_of(name: str, attributes: Any) -> str:
    """Return the name of a call: the op, or the ops of the chain."""
    chain = attributes.get("chain") if isinstance(attributes, Mapping) else None
    if isinstance(chain, (list, tuple)) and chain:
        return name_of([str(link[0]) for link in chain if isinstance(link, (list, tuple)) and link])
    return name.removesuffix(OUT)


def name_of(names: Iterable[str]) -> str:
    """Join the distinct names; of many, list the first and count the others."""
    return listed(list(dict.fromkeys(names)), 3) or "no calls"


class ProgramCache(Generic[T]):
    """Cache of a value derived from each program.

    The keys are identities, because different programs often have equal hashes.
    """

    def __init__(self, derive: Callable[[Program], T]) -> None:
        self._derive = derive
        self._entries: Memo[int, tuple[Program, T]] = Memo(10_000, "show")

    def __getitem__(self, program: Program) -> T:
        return self._entries.get(id(program), lambda: (program, self._derive(program)))[1]

    def clear(self) -> None:
        self._entries.clear()


Writes = dict[int, tuple[str, int]]
"""Name and pc of the first call that writes each argument, by the argument's number."""


def writes_in(program: Program) -> Writes:
    """Find the arguments of a launch that the program writes.

    Each is paired with the first call in main that writes it.

    Calls are numbered in program order. For a call inside a function of the program, the name is
    the op name, and the pc is the pc of the function's call. A host function that is not an op may
    write all operands.
    """
    writes: Writes = {}
    for pc, call, _, numbers in accesses(program, reads_of):
        name = label_of(call.name or str(call.callee or call.kind), call.attributes)
        writes.update((n, (name, pc)) for n in numbers if n is not None and n not in writes)
    return writes
