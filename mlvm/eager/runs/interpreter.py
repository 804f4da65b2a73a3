"""Interpreter of a program op by op: the instructions between ops, and the call of each op.

It follows jumps, frames and the stack of the machine (`mlvm.core.program`), and calls each op by
the VM's function table. Each result gets separate memory, so a value never changes. A snapshot of
the state therefore only copies references.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from mlvm.arena.writes import reads_of
from mlvm.core.errors import LimitExceededError, MlvmError, OpError, ProgramError, ShapeError
from mlvm.core.machine.callee import OUT, UserFunction
from mlvm.core.machine.run import MAX_DEPTH, truth
from mlvm.core.machine.verify import verify
from mlvm.core.op import NO_ATTRIBUTES, Attributes
from mlvm.core.ops.half import cast
from mlvm.core.program.program import STAR, Function, Opcode
from mlvm.core.types import Array, TensorType, f64
from mlvm.core.vm import VM
from mlvm.eager.runs.executed import Address, Executed, Key, Level, Named, Ref
from mlvm.eager.runs.nesting import LOOP, CodeSpan, spans_of
from mlvm.eager.runs.ops import OpProgram
from mlvm.machines import printing, residuals

_MACHINERY: Final = frozenset({"zeros", "reshape", residuals.BEGIN, residuals.END})
"""Functions that a program calls for frames and stacks, which are not treated as ops.

The forms of `zeros` and `reshape` that leave results on the stack are not recorded for a user's
call."""

_CALLED_ONCE: Final = frozenset({residuals.PUSH, residuals.ADD, printing.PRINT, printing.WATCH})


Names: TypeAlias = dict[tuple[str, str], Named | None]
"""Values by function and variable; None for a variable without a tensor."""


class Content(NamedTuple):
    """Content of an address: an array that never changes, and the origin of the value."""

    array: Array
    ref: Ref


@dataclass(slots=True)
class ExecutionState:
    """State of an execution between two instructions.

    Attributes:
        memory: the contents of addresses.
        turns: the iteration of each running loop, by depth of frames and pc of the loop head.
        created: the number of frames' tensors so far.
        names: the named values; a change replaces the dict.
        latest: the results of the op that was executed last.
    """

    memory: dict[Key, Content]
    position: int = 0
    function: str = "main"
    pc: int = 0
    base: int = 0
    nparams: int = 0
    stack: list[Any] = field(default_factory=list)
    frames: list[tuple[str, int, int, int, Names]] = field(default_factory=list)
    turns: dict[tuple[int, int], int] = field(default_factory=dict)
    created: int = 0
    names: Names = field(default_factory=dict)
    latest: tuple[Content, ...] = ()

    def copy(self) -> ExecutionState:
        """Return a copy; later changes of one do not affect the other."""
        parts = {"memory": dict(self.memory), "stack": [*self.stack], "frames": [*self.frames]}
        return replace(self, **parts, turns=dict(self.turns))  # type: ignore[arg-type]


class OpInterpreter:
    """Interpreter of a program on a VM.

    state: the state, which may be replaced by a copy from a different position.
    named: the names that get a value between the ops before and at each position.
    """

    def __init__(self, program: OpProgram, vm: VM) -> None:
        self.program, self.vm = program, vm
        self.state = ExecutionState({})
        self._planned = program.step.planned
        arguments = [each.type for each in self._planned.arguments]
        verify(self._planned.program, vm.functions, arguments)
        self._functions: Mapping[str, Function] = self._planned.program.functions
        self._spans = {name: spans_of(each) for name, each in self._functions.items()}
        self.named: dict[int, Names] = {}
        self._variables = program.variables
        self._bound: dict[tuple[str, int], Attributes] = {}  # by function and pc
        # results of functions that are called only once, by position
        self._called: dict[int, tuple[list[Array], Sequence[Any]]] = {}
        # starts the first record of residuals, even if none is saved
        vm.functions.binding(residuals.BEGIN).call((), NO_ATTRIBUTES)

    def enter(self, what: Ref, array: Array, type: TensorType) -> None:
        """Store a copy of an input, state or constant in memory. Raises `ShapeError`."""
        if array.dtype == np.float64 and type.dtype.is_float and type.dtype is not f64:
            array = cast(array, type.dtype)
        if TensorType.of(array) is not type:
            raise ShapeError(f"execution: expected {what} as {type}, got {TensorType.of(array)}")
        key = what.kind, what.number, type.nbytes
        self.state.memory[key] = Content(self.vm.memory.copy(array), what)
        names = {"input": self.program.inputs, "state": self.program.states}.get(what.kind)
        if names is not None and names[what.number]:
            self._name(("", names[what.number]), Named(what, type))

    def _name(self, name: tuple[str, str], value: Named | None) -> None:
        """Give a variable of a function a value."""
        state = self.state
        if name not in state.names or state.names[name] != value:
            state.names = {**state.names, name: value}
            self.named.setdefault(state.position, {})[name] = value

    def content(self, x: Address) -> Content:
        content = self.state.memory.get(x.key)
        if content is None:  # scratch memory that was never written
            content = Content(self.vm.memory.new(x.type), Ref("scratch", x.place))
            self.state.memory[x.key] = content
        return content

    def array(self, x: Address) -> Array:
        """Return the array at an address, with the type of the address."""
        return x.type.over(self.content(x).array)

    def advance(self) -> bool:
        """Follow instructions until the next op.

        Return False at the end. Raises `LimitExceededError` for a loop without ops."""
        state, most = self.state, 1_000_000
        for _ in range(most):
            code = self._functions[state.function].code
            opcode, immediates = code[state.pc]
            if opcode is Opcode.cfunc:
                call = self._call()
                if not call.is_machinery:
                    return True
                self._run_machinery(call)
            elif opcode is Opcode.halt:
                return False
            else:
                self._follow(opcode, immediates)
        raise LimitExceededError(
            f"execution: expected an op within {most:,} instructions, got none"
        )

    def _follow(self, opcode: Opcode, immediates: tuple[Any, ...]) -> None:
        """Follow an instruction other than a call of a host function."""
        state = self.state
        stack = state.stack
        state.pc += 1
        if opcode is Opcode.load_arg:
            stack.append(Address(*self._planned.arguments[immediates[0]]))
        elif opcode is Opcode.push_const:
            constants = self._planned.program.constants
            number = [*constants].index(immediates[0])
            type = TensorType.of(constants[immediates[0]])
            stack.append(Address("constant", number, type))
        elif opcode in (Opcode.push_int, Opcode.push_str):
            stack.append(immediates[0])
        elif opcode is Opcode.get:
            stack.append(stack[state.base + immediates[0]])
        elif opcode is Opcode.set:
            stack[state.base + immediates[0]] = stack.pop()
        elif opcode is Opcode.pop:
            if stack and stack[-1] in range(len(self._variables)):
                self._name_operand(*stack[-1 : -1 - immediates[0] : -1])
            del stack[len(stack) - immediates[0] :]
        elif opcode is Opcode.jump:
            self._jump(immediates[0])
        elif opcode is Opcode.jump_if_false:
            condition = stack.pop()
            if isinstance(condition, Address):
                condition = self.array(condition)
            if not truth(condition):
                self._jump(immediates[0])
        elif opcode is Opcode.call:
            callee = self._functions[immediates[0]]
            if len(state.frames) >= MAX_DEPTH:
                raise LimitExceededError(
                    f"execution: expected a call depth of at most {MAX_DEPTH:,}, got a "
                    "deeper recursion"
                )
            frame = state.function, state.pc, state.base, state.nparams, state.names
            state.frames.append(frame)
            state.function, state.pc = callee.name, 0
            state.base, state.nparams = len(stack), callee.nparams
        elif opcode is Opcode.return_:
            self._return(immediates[0])
        else:
            raise ProgramError(f"execution: expected a captured step, got {opcode.text}")

    def _return(self, nresults: int) -> None:
        state = self.state
        depth, results = len(state.frames), state.stack[len(state.stack) - nresults :]
        returned = {x.key for x in results if isinstance(x, Address)}
        for x in state.stack[state.base :]:
            if isinstance(x, Address) and x.role == "frame" and x.key not in returned:
                state.memory.pop(x.key, None)
        state.stack[state.base - state.nparams :] = results
        state.turns = {key: turn for key, turn in state.turns.items() if key[0] != depth}
        callee = state.function
        state.function, state.pc, state.base, state.nparams, names = state.frames.pop()
        if callee in (state.function, *[frame[0] for frame in state.frames]):  # a recursion
            for name, value in names.items():
                self._name(name, value)

    def _name_operand(self, number: int, x: Address | None = None) -> None:
        """Name the value that an address contains now; without an address, remove the name."""
        function, _, name = self._variables[number].partition(" ")
        value = None if x is None else Named(self._ref(x), x.type)
        is_value = value is not None and value.ref.kind != "scratch"
        self._name((function, name), value if is_value else None)

    def _jump(self, target: int) -> None:
        """Jump from the previous instruction; count the iterations of the loops around it."""
        state = self.state
        depth = len(state.frames)
        for span in self._around(state.function, state.pc - 1):
            if span.kind != LOOP:
                continue
            if span.start == target:  # the next iteration
                state.turns[depth, target] = state.turns.get((depth, target), 0) + 1
            elif not span.start <= target < span.end:
                state.turns.pop((depth, span.start), None)
        state.pc = target

    def _around(self, function: str, pc: int) -> list[CodeSpan]:
        return [each for each in self._spans[function] if each.start <= pc < each.end]

    def _run_machinery(self, call: _Call) -> None:
        state = self.state
        del state.stack[len(state.stack) - len(call.params) - 1 :]
        if call.name == "zeros":
            type = TensorType(call.attributes["dtype"], call.attributes["shape"])
            state.created += 1
            state.stack.append(Address("frame", state.created, type))
        elif call.name == "reshape":
            [x] = call.params
            state.stack.append(x._replace(type=TensorType(x.type.dtype, call.attributes["shape"])))
        state.pc += 1

    def _call(self) -> _Call:
        """Return the call of the present instruction."""
        state = self.state
        immediates = self._functions[state.function].code[state.pc].immediates
        nparams, nresults, attributes = (*immediates, NO_ATTRIBUTES)[:3]
        last = len(state.stack) - 1
        name, params = state.stack[-1], state.stack[state.base : last]
        if nparams != STAR:
            params = state.stack[last - nparams : last]
        if not all(isinstance(x, Address) for x in params):
            raise ProgramError(f"execution: expected tensors as operands of {name}, got {params}")
        written, is_update = self._written(name, len(params), attributes)
        if nresults != 0:  # a user's function, which pushes results
            written, is_update = (), False
        return _Call(name, params, nresults, attributes, written, is_update)

    def _written(
        self, name: str, nparams: int, attributes: Attributes
    ) -> tuple[tuple[int, ...], bool]:
        """Return the parameters that a call writes to, by number, and whether it may read them."""
        reads, callee = reads_of(name, attributes), self.vm.functions.binding(name).callee
        if reads is None and isinstance(callee, UserFunction):
            reads = callee.reads
        read = set() if reads is None else set(range(nparams)[reads])
        return tuple([i for i in range(nparams) if i not in read]), reads is None

    def described(self, call: _Call | None = None) -> Executed:
        """Describe the call of the present op, without executing it."""
        call = self._call() if call is None else call
        state = self.state
        place = state.function, state.pc
        written = [call.params[i] for i in call.written]
        read = [x for i, x in enumerate(call.params) if i not in call.written]
        if call.is_update:
            read = [x for x in call.params if x.key in state.memory]
        nresults = len(written) or (call.nresults if isinstance(call.nresults, int) else 0)
        return Executed(
            state.position,
            place,
            call.name.removesuffix(OUT),
            call.attributes,
            tuple([self._ref(x) for x in read]),
            tuple([Ref("result", state.position, j) for j in range(nresults)]),
            tuple([x.type for x in read]),
            self.program.lines.get(place),
            self._path(),
            (),
            tuple(written),
        )

    def _ref(self, x: Address) -> Ref:
        content = self.state.memory.get(x.key)
        return Ref("scratch", x.place) if content is None else content.ref

    def _names(self) -> tuple[str, ...]:
        """Return the names of the results of the present op.

        The result of a function gets the name of the call. Only files of earlier versions have
        such names.
        """
        state = self.state
        function, pc = state.function, state.pc
        if state.frames and self._functions[function].code[pc + 1].opcode is Opcode.return_:
            function, pc = state.frames[-1][0], state.frames[-1][1] - 1
        return self.program.values.get((function, pc), ())

    def _path(self) -> tuple[Level, ...]:
        """Return the functions, loops and branches around the present instruction."""
        state, levels = self.state, list[Level]()
        lines = self.program.lines
        frames = [*[frame[:2] for frame in state.frames], (state.function, state.pc)]
        for depth, (function, pc) in enumerate(frames):
            at = pc if depth == len(state.frames) else pc - 1  # the pc of the call
            for span in self._around(function, at):
                turn = state.turns.get((depth, span.start), 0) if span.kind == LOOP else 0
                line = lines.get((function, span.test))
                levels.append(Level(span.kind, line, span.side, turn, span.test))
            if depth < len(state.frames):
                callee, line = frames[depth + 1][0], lines.get((function, at))
                levels.append(Level("function", line, callee, pc=at))
        return tuple(levels)

    def execute(self) -> Executed:
        """Execute the current op and move past it."""
        state, call = self.state, self._call()
        op = self.described(call)
        try:
            outs, results = self._results(op, call)
        except MlvmError as error:
            if isinstance(error, OpError):
                error.at(op.name, op.operand_types)
            if op.line is not None:
                error.add_note(f"recorded at {op.line}")
            raise
        written = [call.params[i] for i in call.written]
        del state.stack[len(state.stack) - 1 - len(call.params) :]
        for array in results:
            state.created += 1
            state.stack.append(Address("frame", state.created, TensorType.of(array)))
            written.append(state.stack[-1])
        state.latest = tuple(map(Content, [*outs, *results], op.results))
        names = self._names() if op.results else ()
        old = [self._ref(each) for each in written]
        state.memory.update(zip([each.key for each in written], state.latest, strict=True))
        state.pc += 1
        state.position += 1
        for name in names:
            function = "" if op.line is None else op.line.function
            self._name((function, name), Named(op.results[0], written[0].type))
        for ref, new, x in zip(old, op.results, written, strict=True):
            for key, value in state.names.items() if x.role in ("input", "state") else ():
                if value is not None and value.ref == ref:
                    self._name(key, value._replace(ref=new))
        return op._replace(addresses=tuple(written))

    def _results(self, op: Executed, call: _Call) -> tuple[list[Array], Sequence[Any]]:
        """Call a function; return the results written into operands and the pushed results.

        All results are in new memory. An op that saves residuals is called once per position,
        since the stack of residuals only grows. A function of the user, which may have effects, is
        also called once.
        """
        is_once = call.name in _CALLED_ONCE or call.nresults != 0
        if is_once and op.position in self._called:
            return self._called[op.position]
        binding, memory = self.vm.functions.binding(call.name), self.vm.memory
        if op.place not in self._bound:
            self._bound[op.place] = binding.callee.bind(call.attributes)
        params = [*map(self.array, call.params)]
        for i in call.written:
            params[i] = (
                memory.copy(params[i]) if call.is_update else memory.new(call.params[i].type)
            )
        with np.errstate(all="ignore"):
            results = binding.call(params, self._bound[op.place])
        outs = [params[i] for i in call.written]
        if is_once:
            self._called[op.position] = outs, results
        return outs, results


class _Call(NamedTuple):
    """Call of a host function.

    written: the numbers of the parameters to which it writes. is_update: whether it may also read
    these parameters and write only a part of them.
    """

    name: str
    params: list[Address]
    nresults: Any
    attributes: Attributes
    written: tuple[int, ...]
    is_update: bool

    @property
    def is_machinery(self) -> bool:
        """True if the call only prepares frames and stacks, so that it is not an op."""
        is_pushed = self.nresults != 0 or self.name.startswith("residuals.")
        return self.name in _MACHINERY and is_pushed
