"""Abstract evaluation of a step's program on types, for the loop in C.

In Python the loop resolves a call with parameters on the stack when it first sees the parameter
types, and caches the result. Here functions are evaluated on argument types, once for each
combination, and all resolved calls are tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NamedTuple, TypeAlias

from mlvm.build.lane_code import LaneCode
from mlvm.build.lower import Bound, Calls, Temporary, lowered
from mlvm.build.targets import CannotBuild
from mlvm.core.errors import MlvmError, with_article
from mlvm.core.machine import link as linker
from mlvm.core.machine.callee import UserFunction, WritesInto
from mlvm.core.machine.functions import Binding
from mlvm.core.machine.link import CallDetails, LinkedCode, link
from mlvm.core.machine.verify import MAX_TYPED_CONTEXTS, verify
from mlvm.core.op import NO_ATTRIBUTES, Attributes
from mlvm.core.program.program import Program
from mlvm.core.types import TensorType
from mlvm.machines import lane_runs, residuals
from mlvm.machines.lane_link import program_of
from mlvm.machines.local import LocalVM
from mlvm.machines.native._native import KernelCall
from mlvm.machines.native.loop import CallSite, call_of
from mlvm.machines.native.types import native_type

RECORDS: Final = {
    residuals.BEGIN: ("RECORDS_BEGIN", slice(0, 0)),
    residuals.PUSH: ("RECORDS_PUSH", slice(0, 1)),
    residuals.READ: ("RECORDS_READ", slice(None, -1)),
    residuals.READ_ROWS: ("RECORDS_READ_ROWS", slice(None, -1)),
    residuals.ADD: ("RECORDS_ADD", slice(0, 1)),
    residuals.END: ("RECORDS_END", slice(0, 0)),
}
"""Functions of residuals: the C names, and the parameters that they write."""

_OPEN: Final = (
    "a step with lengths is built without functions, ml.auto_batch and gradients of loops of "
    "unknown length; `mlvm run` runs it, and with dynamic_axes=False it is built at one size"
)
_OF_LENGTHS: Final = frozenset(
    {linker.HALT, linker.UNREACHED, linker.LOAD_ARG, linker.JUMP, linker.JUMP_IF_FALSE}
)
"""Steps that a step with lengths may have besides calls of kernels on arguments."""


class Case(NamedTuple):
    """Resolved call for parameters of these types (see `plan/loop.h`)."""

    types: tuple[TensorType, ...]
    call: KernelCall
    out: TensorType | None
    over: tuple[int, ...]


class KernelRun(NamedTuple):
    """Call of a kernel with parameters: numbers of arguments, or temporaries.

    `scratch`: the offset of the call's scratch memory in the step's scratch memory.
    """

    call: KernelCall
    parameters: tuple[int | Temporary, ...]
    scratch: int = 0


class SourceOp(NamedTuple):
    """Op and line in Python of a step."""

    op: str
    line: str

    def refusal(self, why: str) -> CannotBuild:
        """Return the error for a step that cannot be built."""
        return CannotBuild(f"{self.op}, at {self.line}, cannot be built: {why}")


@dataclass
class LoopStep:
    """Step of the loop, with the name of the code."""

    code: str
    place: SourceOp
    number: int = 0
    nparams: int = 0
    run: KernelRun | None = None
    records: str = ""
    lanes: LaneCode | None = None
    cases: dict[tuple[TensorType, ...], Case] = field(default_factory=dict)


@dataclass
class LoopFunction:
    """Function of a step.

    `begins`: for each step of the linker, the index of the first step here.
    `height`: maximum number of values on the stack, without called functions.
    `nbytes`: of the tensors that it allocates.
    `calls`: numbers of the functions that it calls.
    """

    steps: list[LoopStep]
    begins: list[int]
    height: int = 0
    nbytes: int = 0
    calls: set[int] = field(default_factory=set)


class StackSlot(NamedTuple):
    """Value on the stack: a tensor's type, None for an Int; the arguments that it may alias."""

    type: TensorType | None
    arguments: frozenset[int] = frozenset()


Stack: TypeAlias = tuple[StackSlot, ...]


class Steps:
    """Functions of a linked program, `main` first.

    `written`: numbers of arguments that are written.
    `pushed`: numbers of arguments that are pushed on the stack.
    `lanes`: programs for rows, by attributes.
    `scratch_of`: the bytes of scratch memory of a call.
    `attributes_at`: with sizes, the attributes of the call at a pc.
    `bound`: with sizes, the largest value of a size.

    Raises `CannotBuild`.
    """

    def __init__(
        self,
        main: LinkedCode,
        arguments: Sequence[TensorType],
        lines: Mapping[tuple[str, int], str],
        scratch_of: Callable[[KernelCall], int],
        attributes_at: Callable[[int], Attributes] | None = None,
        bound: Bound | None = None,
    ) -> None:
        self.arguments = arguments
        self._attributes_at, self._bound = attributes_at, bound
        self.written: set[int] = set()
        self.pushed: dict[int, int] = {}
        self._lines = lines
        self._scratch_of = scratch_of
        self.lanes: dict[object, LaneCode] = {}
        self._codes: list[LinkedCode] = [main]
        self._visited: dict[tuple[int, Stack], None] = {}
        self.functions = [self._function(main)]
        self._follow(0, ())

    def _index(self, code: LinkedCode) -> int:
        for i, other in enumerate(self._codes):
            if other is code:
                return i
        self._codes.append(code)
        self.functions.append(self._function(code))
        return len(self._codes) - 1

    # --- one step after the other ---

    def _function(self, code: LinkedCode) -> LoopFunction:
        """Translate the steps of a function; jumps go to steps of this list."""
        steps: list[LoopStep] = []
        begins: list[int] = []
        for number in range(len(code.steps)):
            begins.append(len(steps))
            steps += self._steps(code, number)
        for step in steps:
            if step.code in ("JUMP", "JUMP_IF_FALSE"):
                step.number = begins[step.number]
        return LoopFunction(steps, begins)

    def _place(self, code: LinkedCode, number: int) -> SourceOp:
        kind, value, _, _ = code.steps[number]
        op = value.name if isinstance(value, Binding) else _NAMES.get(kind, "?").lower()
        pcs = range(code.starts[number], code.ends[number] + 1)
        lines = [self._lines.get((code.function.name, pc)) for pc in reversed(pcs)]
        return SourceOp(op.removesuffix(".out"), next(filter(None, lines), "an unknown line"))

    def _steps(self, code: LinkedCode, number: int) -> list[LoopStep]:
        kind, value, count, rest = code.steps[number]
        place = self._place(code, number)
        if kind == linker.CALL_ON_ARGS:
            return self._on_arguments(code, number, place)
        if self._attributes_at is not None and kind not in _OF_LENGTHS:
            raise place.refusal(_OPEN)
        name = _NAMES.get(kind)
        if name is None:
            raise place.refusal(
                "the called function is known only at run time; call the function directly"
            )
        step = LoopStep(name, place, count if isinstance(count, int) else 0)
        if kind == linker.CALL and isinstance(value.callee, UserFunction):
            if value.name == lane_runs.RUN:
                step.lanes = self._lanes(rest.attributes.get("program", ""), place)
            elif value.name in RECORDS:
                step.records = RECORDS[value.name][0]
            else:
                raise place.refusal("a host function runs in Python; use ops instead")
        elif kind == linker.PUSH and not isinstance(value, int):
            raise place.refusal(
                f"the step pushes {with_article(type(value).__name__)}, expected an int; use an int"
            )
        elif kind == linker.PUSH:
            step.number = value
        elif kind == linker.CALL_FUNCTION:
            step.nparams = count
        elif kind == linker.LOAD_ARG:
            step.number = self.pushed.setdefault(count, len(self.pushed))
        elif kind in (linker.LOAD_GLOBAL, linker.STORE_GLOBAL):
            raise place.refusal("the step uses global tensors of a VM; pass them as arguments")
        return [step]

    def _lanes(self, attribute: object, place: SourceOp) -> LaneCode:
        functions = LocalVM(native=True).functions

        def runs(program: Program, types: Sequence[TensorType]) -> Calls:
            code = link(program, functions, verify(program, functions, types))
            places = {
                (f.name, pc): place.line
                for f in program.functions.values()
                for pc in range(len(f.code))
            }
            inner = Steps(code, types, places, self._scratch_of).functions[0].steps
            if any(step.code not in ("RUN", "HALT") for step in inner):
                raise place.refusal(
                    "a lane calls a function without a kernel in C; use ops that have one"
                )
            return [(step.run.call, step.run.parameters) for step in inner if step.run is not None]

        if attribute not in self.lanes:
            try:
                lanes = program_of(attribute)
                self.lanes[attribute] = LaneCode(lanes, functions, runs, self._scratch_of)
            except CannotBuild:
                raise
            except (MlvmError, AttributeError, LookupError, ValueError, TypeError) as error:
                raise place.refusal(f"expected a valid program for rows: {error!r}") from error
        return self.lanes[attribute]

    def _on_arguments(self, code: LinkedCode, number: int, place: SourceOp) -> list[LoopStep]:
        _, binding, numbers, rest = code.steps[number]
        attributes = rest or NO_ATTRIBUTES
        opened = self._attributes_at and self._attributes_at(code.ends[number])
        types = [self.arguments[i] for i in numbers]
        callee = binding.callee
        assert isinstance(callee, WritesInto)
        self.written.update(numbers[: callee.writes(attributes)])
        call = call_of(callee.kernel, types, attributes) if opened is None else None
        runs: Calls | None = [(call, tuple(numbers))] if call else None
        if runs is None:
            runs = lowered(callee, types, numbers, opened or attributes, self._bound)
        if runs is None:
            spelled = ", ".join(map(str, types))
            raise place.refusal(
                f"expected an op with a kernel in C for ({spelled}); replace the op"
            )
        return [LoopStep("RUN", place, run=KernelRun(*each)) for each in runs]

    def runs(self) -> Iterator[tuple[int, list[LoopStep]]]:
        """Yield the calls of kernels on arguments: the pc in `main`, and the steps of each."""
        main, code = self.functions[0], self._codes[0]
        for number, (begin, end) in enumerate(pairwise([*main.begins, len(main.steps)])):
            if code.steps[number][0] == linker.CALL_ON_ARGS:
                yield code.ends[number], main.steps[begin:end]

    # --- types ---

    def _follow(self, index: int, params: Stack) -> None:
        """Evaluate a function for such parameters, and the functions that it calls."""
        todo = [(index, params)]
        while todo:
            key = todo.pop()
            if key in self._visited:
                continue
            self._visited[key] = None
            if len(self._visited) > MAX_TYPED_CONTEXTS:
                raise CannotBuild(
                    f"expected at most {MAX_TYPED_CONTEXTS} combinations of functions and types, "
                    "got more; call functions with fewer types"
                )
            todo += _Walk(self, *key).run()


class _Walk:
    """Evaluator of a function for parameters of certain types."""

    def __init__(self, steps: Steps, index: int, params: Stack) -> None:
        self.all = steps
        self.code = steps._codes[index]
        self.function = steps.functions[index]
        self.base = len(params)
        self.called: list[tuple[int, Stack]] = []
        self.states: dict[int, Stack] = {}
        self.todo: list[tuple[int, Stack]] = [(0, params)]
        self.nbytes = 0

    def run(self) -> list[tuple[int, Stack]]:
        """Evaluate the function; return the functions that it calls, with parameters."""
        while self.todo:
            number, stack = self.todo.pop()
            before = self.states.get(number)
            if before is not None:
                stack = self._merged(number, before, stack)
                if stack == before:
                    continue
            self.states[number] = stack
            after = self._after(number, stack)
            self.function.height = max(self.function.height, len(stack) + 1, len(after or ()))
            if after is not None:
                self.todo.append((number + 1, after))
        self.function.nbytes = max(self.function.nbytes, self.nbytes)
        return self.called

    def _merged(self, number: int, before: Stack, stack: Stack) -> Stack:
        place = self.all._place(self.code, number)
        if len(before) != len(stack) or any(
            x.type is not y.type for x, y in zip(before, stack, strict=True)
        ):
            raise place.refusal(
                "the types on the stack depend on the path to this step; "
                "call the same ops on each path",
            )
        pairs = zip(before, stack, strict=True)
        return tuple([StackSlot(x.type, x.arguments | y.arguments) for x, y in pairs])

    def _own(self, number: int) -> LoopStep:
        """Return the step of the loop for a step of the linker that is no kernel on arguments."""
        return self.function.steps[self.function.begins[number]]

    def _after(self, number: int, stack: Stack) -> Stack | None:
        """Return the stack after a step; None if the next step is not reached from it."""
        kind, value, count, rest = self.code.steps[number]
        match kind:
            case linker.CALL_ON_ARGS:
                return stack
            case linker.LOAD_ARG:
                return (*stack, StackSlot(self.all.arguments[count], frozenset([count])))
            case linker.PUSH:
                return (*stack, StackSlot(None))
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
                    raise place.refusal(
                        f"{value.function.name} returns values; "
                        "a built function writes to its operands instead",
                    )
                return stack[:first]
            case linker.CALL:
                first = self.base if count == linker.ALL else len(stack) - count
                return (*stack[:first], *self._called(number, stack[first:], value, rest))
            case _:  # halt, return, and unreached steps
                return None

    def _called(
        self, number: int, params: Stack, binding: Binding, details: CallDetails
    ) -> list[StackSlot]:
        """Return the results of a call of an op, a residual instruction or lanes."""
        place = self.all._place(self.code, number)
        types = [slot.type for slot in params]
        if binding.name in RECORDS:
            self._write(params[RECORDS[binding.name][1]])
            return []
        code = self._own(number).lanes
        if code is not None:
            if not code.takes(types):
                raise place.refusal(
                    "the operand types do not match the code of the lanes; save the step again"
                )
            self._write(params[: len(code.returned) + code.nsums])
            return []
        tensors = [type for type in types if type is not None]
        if len(tensors) < len(types):
            raise place.refusal("expected tensors as operands, got an Int; push a constant")
        call, out, over = CallSite(binding, details).resolve(
            [native_type(type) for type in tensors]
        )
        if call is None:
            spelled = ", ".join(map(str, tensors))
            raise place.refusal(
                f"expected an op with a kernel in C for ({spelled}); replace the op"
            )
        self._write(params[: len(over)])
        fresh = None if out is None else out.tensor_type
        self._own(number).cases[tuple(tensors)] = Case(tuple(tensors), call, fresh, over)
        if fresh is None:
            return []
        self.nbytes += fresh.nbytes + 192
        return [StackSlot(fresh)]

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
