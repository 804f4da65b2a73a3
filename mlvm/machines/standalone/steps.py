"""What the loop in C runs of a step's program, known before it runs.

In Python the loop asks, at a call that takes its parameters from the stack, what to do for
parameters of these types, and remembers the answer. Here the program is followed with the types of
its arguments, once for each combination that a function is called with, and all answers are tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeAlias

from mlvm.core.errors import MlvmError
from mlvm.core.machine import link as linker
from mlvm.core.machine.callee import UserFunction, WritesInto
from mlvm.core.machine.functions import Binding
from mlvm.core.machine.link import CallDetails, Code, link
from mlvm.core.machine.verify import verify
from mlvm.core.op import NO_ATTRIBUTES
from mlvm.core.program.program import Program
from mlvm.core.types import TensorType
from mlvm.machines import lanes, residuals
from mlvm.machines.local import LocalVM
from mlvm.machines.native._native import KernelCall
from mlvm.machines.native.loop import Site, call_of
from mlvm.machines.native.types import native_type
from mlvm.machines.standalone.lanes import LaneCode
from mlvm.machines.standalone.lower import Calls, Temporary, lowered
from mlvm.machines.standalone.targets import CannotBuild

RECORDS: Final = {
    residuals.BEGIN: ("RECORDS_BEGIN", slice(0, 0)),
    residuals.PUSH: ("RECORDS_PUSH", slice(0, 1)),
    residuals.READ: ("RECORDS_READ", slice(None, -1)),
    residuals.READ_ROWS: ("RECORDS_READ_ROWS", slice(None, -1)),
    residuals.ADD: ("RECORDS_ADD", slice(0, 1)),
    residuals.END: ("RECORDS_END", slice(0, 0)),
}
"""The functions of residuals: what C calls them, and which parameters they write."""

_MOST_CONTEXTS: Final = 1000


class Case(NamedTuple):
    """What a call does for parameters of these types (see `plan/loop.h`)."""

    types: tuple[TensorType, ...]
    call: KernelCall
    out: TensorType | None
    over: tuple[int, ...]


class Run(NamedTuple):
    """A kernel's call, and its parameters: numbers of arguments, or temporaries. `scratch`: the
    byte of the step's memory from which on the call may use it."""

    call: KernelCall
    parameters: tuple[int | Temporary, ...]
    scratch: int = 0


@dataclass
class Step:
    """A step of the loop, with the name of its code, and what it belongs to in Python."""

    code: str
    op: str
    line: str
    number: int = 0
    nparams: int = 0
    run: Run | None = None
    records: str = ""
    lanes: LaneCode | None = None
    cases: dict[tuple[TensorType, ...], Case] = field(default_factory=dict)


@dataclass
class Function:
    """A function: its steps, and where those of each of the linker's begin. `height`: values on the
    stack at most while it runs itself. `made`: bytes of the tensors that it makes. `calls`: which
    functions."""

    steps: list[Step]
    begins: list[int]
    height: int = 0
    made: int = 0
    calls: set[int] = field(default_factory=set)


class Slot(NamedTuple):
    """A value on the stack: a tensor's type, None for an Int; the arguments that it may be."""

    type: TensorType | None
    arguments: frozenset[int] = frozenset()


Stack: TypeAlias = tuple[Slot, ...]


class Steps:
    """The functions of a linked program, `main` first; which arguments are `written`, and which go
    over the stack (`pushed`); the codes of `lanes`. `beside` says what scratch memory a call needs.
    Raises `CannotBuild`."""

    def __init__(
        self,
        main: Code,
        arguments: Sequence[TensorType],
        lines: Mapping[tuple[str, int], str],
        beside: Callable[[KernelCall], int],
    ) -> None:
        self.arguments = arguments
        self.written: set[int] = set()
        self.pushed: dict[int, int] = {}
        self._lines = lines
        self._beside = beside
        self.lanes: dict[str, LaneCode] = {}
        self._codes: list[Code] = [main]
        self._seen: dict[tuple[int, Stack], None] = {}
        self.functions = [self._function(main)]
        self._follow(0, ())

    def _index(self, code: Code) -> int:
        for i, known in enumerate(self._codes):
            if known is code:
                return i
        self._codes.append(code)
        self.functions.append(self._function(code))
        return len(self._codes) - 1

    # --- one step after the other ---

    def _function(self, code: Code) -> Function:
        """The steps as they stand; jumps go to steps of this list."""
        steps: list[Step] = []
        begins: list[int] = []
        for number in range(len(code.steps)):
            begins.append(len(steps))
            steps += self._steps(code, number)
        for step in steps:
            if step.code in ("JUMP", "JUMP_IF_FALSE"):
                step.number = begins[step.number]
        return Function(steps, begins)

    def _place(self, code: Code, number: int) -> tuple[str, str]:
        """The op's name and the line of a step."""
        kind, value, _, _ = code.steps[number]
        op = value.name if isinstance(value, Binding) else _NAMES.get(kind, "?").lower()
        pcs = range(code.starts[number], code.ends[number] + 1)
        found = [self._lines.get((code.function.name, pc)) for pc in reversed(pcs)]
        return op.removesuffix(".out"), next(filter(None, found), "an unknown line")

    def _refuse(self, op: str, line: str, why: str) -> CannotBuild:
        return CannotBuild(f"{op}, at {line}, cannot be built: {why}")

    def _steps(self, code: Code, number: int) -> list[Step]:
        kind, value, count, rest = code.steps[number]
        op, line = self._place(code, number)
        if kind == linker.CALL_ON_ARGS:
            return self._on_arguments(value, count, rest or NO_ATTRIBUTES, op, line)
        name = _NAMES.get(kind)
        if name is None:
            raise self._refuse(op, line, "its function is known when it runs only")
        step = Step(name, op, line, count if isinstance(count, int) else 0)
        if kind == linker.CALL and isinstance(value.callee, UserFunction):
            if value.name == lanes.RUN:
                step.lanes = self._lanes(str(rest.attributes.get("program", "")), op, line)
            elif value.name in RECORDS:
                step.records = RECORDS[value.name][0]
            else:
                raise self._refuse(op, line, "it is a host function, which runs in Python")
        elif kind == linker.PUSH and not isinstance(value, int):
            raise self._refuse(op, line, f"it pushes a {type(value).__name__}")
        elif kind == linker.PUSH:
            step.number = value
        elif kind == linker.CALL_FUNCTION:
            step.nparams = count
        elif kind == linker.LOAD_ARG:
            step.number = self.pushed.setdefault(count, len(self.pushed))
        elif kind in (linker.LOAD_GLOBAL, linker.STORE_GLOBAL):
            raise self._refuse(op, line, "it reaches into a VM's free store")
        return [step]

    def _lanes(self, text: str, op: str, line: str) -> LaneCode:
        functions = LocalVM(native=True).functions

        def runs(program: Program, types: Sequence[TensorType]) -> Calls:
            code = link(program, functions, verify(program, functions, types))
            places = {
                (f.name, pc): line for f in program.functions.values() for pc in range(len(f.code))
            }
            inner = Steps(code, types, places, self._beside).functions[0].steps
            if any(step.code not in ("RUN", "HALT") for step in inner):
                raise self._refuse(op, line, "a lane does what is no kernel in C")
            return [(step.run.call, step.run.parameters) for step in inner if step.run is not None]

        if text not in self.lanes:
            try:
                self.lanes[text] = LaneCode(text, functions, runs, self._beside)
            except CannotBuild:
                raise
            except (MlvmError, AttributeError, LookupError, ValueError, TypeError) as error:
                raise self._refuse(op, line, f"this is no program for rows: {error!r}") from error
        return self.lanes[text]

    def _on_arguments(
        self, binding: Binding, numbers: Sequence[int], attributes: Any, op: str, line: str
    ) -> list[Step]:
        types = [self.arguments[i] for i in numbers]
        callee = binding.callee
        assert isinstance(callee, WritesInto)
        self.written.update(numbers[: callee.writes(attributes)])
        call = call_of(callee.kernel, types, attributes)
        runs = [(call, tuple(numbers))] if call else lowered(callee, types, numbers, attributes)
        if runs is None:
            told = ", ".join(map(str, types))
            raise self._refuse(op, line, f"there is no kernel in C for ({told})")
        return [Step("RUN", op, line, run=Run(*each)) for each in runs]

    def runs(self) -> Iterator[tuple[int, list[Step]]]:
        """The calls of kernels on arguments: each's pc in `main`, and the steps that it became."""
        main, code = self.functions[0], self._codes[0]
        for number, (begin, end) in enumerate(pairwise([*main.begins, len(main.steps)])):
            if code.steps[number][0] == linker.CALL_ON_ARGS:
                yield code.ends[number], main.steps[begin:end]

    # --- types ---

    def _follow(self, index: int, params: Stack) -> None:
        """Follow a function for such parameters, and what it calls."""
        todo = [(index, params)]
        while todo:
            key = todo.pop()
            if key in self._seen:
                continue
            self._seen[key] = None
            if len(self._seen) > _MOST_CONTEXTS:
                raise CannotBuild("functions are called with too many combinations of types")
            todo += _Walk(self, *key).run()


class _Walk:
    """Follows one function for parameters of certain types."""

    def __init__(self, steps: Steps, index: int, params: Stack) -> None:
        self.all = steps
        self.code = steps._codes[index]
        self.function = steps.functions[index]
        self.base = len(params)
        self.called: list[tuple[int, Stack]] = []
        self.states: dict[int, Stack] = {}
        self.todo: list[tuple[int, Stack]] = [(0, params)]
        self.made = 0

    def run(self) -> list[tuple[int, Stack]]:
        """The functions that it calls, and with what."""
        while self.todo:
            number, stack = self.todo.pop()
            known = self.states.get(number)
            if known is not None:
                stack = self._merged(number, known, stack)
                if stack == known:
                    continue
            self.states[number] = stack
            after = self._after(number, stack)
            self.function.height = max(self.function.height, len(stack) + 1, len(after or ()))
            if after is not None:
                self.todo.append((number + 1, after))
        self.function.made = max(self.function.made, self.made)
        return self.called

    def _merged(self, number: int, known: Stack, stack: Stack) -> Stack:
        place = self.all._place(self.code, number)
        if len(known) != len(stack) or any(
            x.type is not y.type for x, y in zip(known, stack, strict=True)
        ):
            raise self.all._refuse(*place, "what lies on the stack depends on how one comes here")
        pairs = zip(known, stack, strict=True)
        return tuple([Slot(x.type, x.arguments | y.arguments) for x, y in pairs])

    def _own(self, number: int) -> Step:
        """The step of the loop for a step of the linker that is no kernel on arguments."""
        return self.function.steps[self.function.begins[number]]

    def _after(self, number: int, stack: Stack) -> Stack | None:
        """The stack behind a step; None where nothing follows."""
        kind, value, count, rest = self.code.steps[number]
        match kind:
            case linker.CALL_ON_ARGS:
                return stack
            case linker.LOAD_ARG:
                return (*stack, Slot(self.all.arguments[count], frozenset([count])))
            case linker.PUSH:
                return (*stack, Slot(None))
            case linker.GET:
                return (*stack, stack[self.base + count])
            case linker.SET:
                changed = [*stack[:-1]]
                changed[self.base + count] = stack[-1]
                return tuple(changed)
            case linker.POP:
                return stack[: len(stack) - count]
            case linker.JUMP:
                self.todo.append((count, stack))
                return None
            case linker.JUMP_IF_FALSE:
                self.todo.append((count, stack[:-1]))
                return stack[:-1]
            case linker.CALL_FUNCTION:
                first = len(stack) - count
                index = self.all._index(value)
                self._own(number).number = index
                self.function.calls.add(index)
                self.called.append((index, stack[first:]))
                if value.function.nresults != 0:
                    place = self.all._place(self.code, number)
                    raise self.all._refuse(*place, f"{value.function.name} returns values")
                return stack[:first]
            case linker.CALL:
                first = self.base if count == linker.ALL else len(stack) - count
                return (*stack[:first], *self._called(number, stack[first:], value, rest))
            case _:  # halt, return, and what is never reached
                return None

    def _called(
        self, number: int, params: Stack, binding: Binding, details: CallDetails
    ) -> list[Slot]:
        """The results of an op's call, or of residuals'."""
        place = self.all._place(self.code, number)
        types = [slot.type for slot in params]
        if binding.name in RECORDS:
            self._write(params[RECORDS[binding.name][1]])
            return []
        code = self._own(number).lanes
        if code is not None:
            if not code.takes(types):
                raise self.all._refuse(*place, "its operands are not those of its code")
            self._write(params[: len(code.returned) + code.nsums])
            return []
        known = [type for type in types if type is not None]
        if len(known) < len(types):
            raise self.all._refuse(*place, "it takes an Int")
        call, out, over = Site(binding, details).resolve([native_type(type) for type in known])
        if call is None:
            told = ", ".join(map(str, known))
            raise self.all._refuse(*place, f"there is no kernel in C for ({told})")
        self._write(params[: len(over)])
        made = None if out is None else out.tensor_type
        self._own(number).cases[tuple(known)] = Case(tuple(known), call, made, over)
        if made is None:
            return []
        self.made += made.nbytes + 192
        return [Slot(made)]

    def _write(self, slots: Stack) -> None:
        for slot in slots:
            self.all.written |= slot.arguments


_NAMES: Final = {
    getattr(linker, name): name
    for name in (
        *("HALT", "LOAD_ARG", "CALL", "PUSH", "GET", "SET", "JUMP_IF_FALSE", "JUMP"),
        *("CALL_FUNCTION", "RETURN", "POP", "LOAD_GLOBAL", "STORE_GLOBAL"),
    )
} | {linker.UNREACHED: "UNKNOWN"}
