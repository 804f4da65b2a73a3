"""Linker, which prepares a program once for the machine's loop.

It resolves function names to bindings in the function table, and labels to steps. It combines two
frequent sequences into one step each:

    push_str name; cfunc ...                    ->  CALL binding
    load_arg i; ...; load_arg j; CALL x.out     ->  CALL_ON_ARGS binding, (i, ..., j)

A program without branches becomes a list of kernels with argument indices. `bind` replaces the
numbers by the arrays of a launch. The launch then calls the kernels in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

from mlvm.core.machine import fused
from mlvm.core.machine.callee import Fused, UserFunction, WritesInto
from mlvm.core.machine.decode import Code, Decoded, argument_of, decode
from mlvm.core.machine.functions import FunctionTable
from mlvm.core.machine.verify import Verdict
from mlvm.core.op import NO_ATTRIBUTES, Attributes
from mlvm.core.ops.half import OnHalves, have_halves
from mlvm.core.program.program import STAR, Count, Function, Instruction, Opcode, Program
from mlvm.core.types import Array

# Codes of steps with stack effects. The linker creates a step from the instruction of the
# same name. `run` has a branch for each code, the most frequent first.
CALL_ON_ARGS: Final = 0  # ( -- )                    a kernel on arguments of the launch
HALT: Final = 1  # ( ... -- )                        the values above base are the results
LOAD_ARG: Final = 2  # ( -- t )
CALL: Final = 3  # ( p1..pn -- r1..rm )              a function of the table
PUSH: Final = 4  # ( -- v )                          an Int, a Str or a constant
GET: Final = 5  # ( -- v )
SET: Final = 6  # ( v -- )
JUMP_IF_FALSE: Final = 7  # ( c -- )
JUMP: Final = 8  # ( -- )
CALL_FUNCTION: Final = 9  # ( p1..pn -- p1..pn )     a new frame above the parameters
RETURN: Final = 10  # ( p1..pn ... r1..rm -- r1..rm ) the caller's frame again
POP: Final = 11  # ( v1..vn -- )
LOAD_GLOBAL: Final = 12  # ( h -- t )
STORE_GLOBAL: Final = 13  # ( t h -- )
CALL_NAMED: Final = 14  # ( p1..pn name -- r1..rm )  a name that the program computed
CALL_DEFERRED: Final = 15  # ( p1..pn -- r1..rm )    by the scheduler, in parallel with the program
UNREACHED: Final = 16  # ( -- )                      proven unreachable by the verifier

ALL: Final = -1
"""Number of parameters of a call that pops everything above base."""

Step: TypeAlias = tuple[int, Any, Any, Any]
"""Step of the loop: a code from above, a value or binding, a number, and details.

The number of a CALL_ON_ARGS is a tuple: the argument indices, and after `bind` the arrays.
"""

_CODES: Final = {
    Opcode.halt: HALT,
    Opcode.load_global: LOAD_GLOBAL,
    Opcode.store_global: STORE_GLOBAL,
    Opcode.load_arg: LOAD_ARG,
    Opcode.get: GET,
    Opcode.set: SET,
    Opcode.pop: POP,
    Opcode.return_: RETURN,
    Opcode.jump: JUMP,
    Opcode.jump_if_false: JUMP_IF_FALSE,
}
"""Codes by opcode, for opcodes with at most one immediate, a number."""


class CallDetails(NamedTuple):
    """Details of a call's step.

    If the call is `unproven`, the machine checks every parameter at run time. If it only
    `may_alias`, the machine checks that no result overwrites an operand.
    """

    attributes: Attributes
    nresults: Count
    unproven: bool
    may_alias: bool = False


@dataclass(slots=True, eq=False)
class LinkedCode:
    """Linked function.

    `starts`, `ends`: the first and last pc of each step.
    `prepared`: the form of the function for a loop other than the reference loop.
    `of`: for code with arrays, the linked code.
    `like`: for code with arrays, the prepared form of other code, and the steps that differ.
    """

    function: Function
    steps: list[Step]
    starts: list[int]
    ends: list[int]
    prepared: Any = None
    of: LinkedCode | None = None
    like: tuple[Any, Sequence[int]] | None = None


def link(
    program: Program,
    functions: FunctionTable,
    verdict: Verdict | None = None,
    *,
    deferred: bool = False,
) -> LinkedCode:
    """Link `main` and all functions that it calls.

    A call that the verifier left unproven checks the parameters at run time. Unreachable
    instructions are left out. Without a verdict, as on a raw VM, no check is made. With
    `deferred`, calls go to the VM's scheduler. Raises `UnknownFunctionError` and `ArgumentError`.
    """
    codes = {f.name: LinkedCode(f, [], [], []) for f in program.functions.values()}
    decoded = decode(program) if verdict is None else verdict.decoded
    for name, code in codes.items():
        _Linker(program, functions, verdict, codes, code, decoded[name], deferred).run()
    return codes["main"]


def recheck_calls(main: LinkedCode) -> None:
    """Make every call of a linked program check the parameters.

    A change of the function table during a launch invalidates the proven types.
    """
    todo, visited = [main.steps], set()
    while todo:
        steps = todo.pop()
        if id(steps) in visited:
            continue
        visited.add(id(steps))
        for i, (code, value, number, rest) in enumerate(steps):
            if code == CALL_FUNCTION:
                todo.append(value.steps)
            elif isinstance(rest, CallDetails):
                steps[i] = code, value, number, rest._replace(unproven=True)


@dataclass
class _Linker:
    """Linker of a function, which becomes `code`; `codes` are all functions of the program."""

    program: Program
    functions: FunctionTable
    verdict: Verdict | None
    codes: dict[str, LinkedCode]
    code: LinkedCode
    decoded: Code
    deferred: bool

    def run(self) -> None:
        function, ends = self.code.function, self.code.ends
        again = Instruction(Opcode.call, ("main",))
        self.folds = function.name == "main" and not (
            self.deferred or any(again in each.code for each in self.program.functions.values())
        )
        step_of: dict[int, int] = {}
        reached = self.decoded.blocks
        blocks = self.decoded if self.verdict is None else [reached[pc] for pc in sorted(reached)]
        for block in blocks:
            self.singly(block.start, is_reached=False)
            step_of[block.start] = len(ends)
            end = block.end
            if self.verdict is not None:
                end = self.verdict.ends[function.name, block.start]
            for each in block.code:
                if each.pc < end and each.name is not None:
                    self.call(each, each.name)
            self.singly(end)
        self.singly(len(function.code), is_reached=False)
        for i, (code, value, number, rest) in enumerate(self.code.steps):
            if code in (JUMP, JUMP_IF_FALSE):
                self.code.steps[i] = code, value, step_of[number], rest

    def add(self, start: int, end: int, step: Step) -> None:
        self.code.steps.append(step)
        self.code.starts.append(start)
        self.code.ends.append(end)

    def singly(self, end: int, *, is_reached: bool = True) -> None:
        """Create a step for each instruction after the last step and before `end`."""
        for pc in range(self.code.ends[-1] + 1 if self.code.ends else 0, end):
            instruction = self.code.function.code[pc]
            self.add(pc, pc, self.step(instruction) if is_reached else (UNREACHED, None, 0, None))

    def step(self, instruction: Instruction) -> Step:
        opcode, immediates = instruction
        if opcode in _CODES:
            return _CODES[opcode], None, immediates[0] if immediates else 0, None
        if opcode is Opcode.push_const:
            constant = self.program.constants[immediates[0]]
            return PUSH, self.functions.memory.constant(constant), 0, None
        if opcode is Opcode.call:
            called = self.codes[immediates[0]]
            return CALL_FUNCTION, called, called.function.nparams, None
        if opcode is Opcode.cfunc:
            nparams, nresults, *rest = immediates
            attributes = dict(rest[0]) if rest else {}
            details = CallDetails(attributes, nresults, unproven=self.verdict is not None)
            return CALL_NAMED, None, ALL if nparams == STAR else nparams, details
        return PUSH, immediates[0], 0, None

    def call(self, each: Decoded, name: str) -> None:
        """Combine a call and the push of the function name right before it into one step.

        In main, the step includes the pushes of operands if all are arguments of the launch and the
        callee is a kernel that has no results.
        """
        pc, code, nresults = each.pc, self.code.function.code, each.at
        if pc - 1 < each.start or code[pc - 1] is not each.callee:
            return
        place = self.code.function.name, pc
        binding = self.functions.binding(name)
        callee = binding.callee
        unproven = self.verdict is not None and place in self.verdict.unproven
        proven = None if self.verdict is None else self.verdict.bound.get(place)
        bound = proven[1] if proven and proven[0] is callee else callee.bind(each.attributes)
        if isinstance(callee, UserFunction):
            # read-only, because the user function receives them
            bound = MappingProxyType(dict(bound))
        if nresults == STAR and callee.nresults is not None:
            nresults = callee.nresults  # `register` checks replacements in the same way
        numbers = each.arguments if self.folds and callee.kernel is not None else None
        if numbers is not None and not unproven and nresults in (STAR, 0):
            first = pc - 1 - len(numbers)
            if first >= each.start and code[first : pc - 1] == each.operands:
                self.singly(first)
                self.add(first, pc, (CALL_ON_ARGS, binding, tuple(numbers), bound or None))
                return
        self.singly(pc - 1)
        may_alias = self.verdict is not None and isinstance(callee, WritesInto)
        number = code[pc].immediates[0]
        details = CallDetails(bound, nresults, unproven, may_alias)
        kind = CALL_DEFERRED if self.deferred else CALL
        self.add(pc - 1, pc, (kind, binding, ALL if number == STAR else number, details))


def bind(
    code: LinkedCode,
    operands: tuple[Array, ...],
    workspace: fused.Workspace,
    *,
    checked: bool,
    bound: tuple[LinkedCode, tuple[Array, ...]] | None = None,
) -> LinkedCode:
    """Return the linked `main` with the arrays of a launch in the calls.

    The reference kernel of chains is bound to the arrays as well; all chains share the workspace.
    `bound` is an earlier result with the operands; unchanged steps are reused. If `checked`, raises
    `MachineError` for a call that would overwrite an operand that it still reads.
    """
    calls = [i for i, step in enumerate(code.steps) if step[0] == CALL_ON_ARGS]
    if not calls:
        return code
    steps, like = code.steps.copy(), None
    if bound is not None and bound[0].of is code:
        earlier, others = bound
        new = {i for i, (x, y) in enumerate(zip(operands, others, strict=True)) if x is not y}
        calls = [i for i in calls if not new.isdisjoint(code.steps[i][2])]
        steps, like = earlier.steps.copy(), earlier.prepared and (earlier.prepared, calls)
    for place in calls:
        kind, binding, number, rest = code.steps[place]
        arrays = tuple([operands[i] for i in number])
        if checked and isinstance(binding.callee, WritesInto):
            binding.callee.check_aliasing(arrays, rest or NO_ATTRIBUTES)
        if isinstance(binding.callee, Fused) and binding.callee.kernel is fused.run:
            rest = {"chain": fused.bound(rest["chain"], arrays, workspace)}
        elif have_halves(arrays):
            binding = OnHalves(binding, arrays)
        steps[place] = kind, binding, arrays, rest
    return LinkedCode(code.function, steps, code.starts, code.ends, of=code, like=like or None)


def nargs_of(program: Program) -> int:
    """Return the number of arguments that the program loads."""
    codes = [function.code for function in program.functions.values()]
    numbers = [argument_of(each) for code in codes for each in code]
    return max([n for n in numbers if n is not None], default=-1) + 1
