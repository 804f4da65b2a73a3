"""Execution of a program op by op, forwards and backwards.

    execution = Execution(program, inputs)
    while (op := execution.step()) is not None:
        print(op, execution.value(op.results[0]))

An `Execution` follows the instructions of the machine (`mlvm.core.program`). Jumps, frames and the
stack are followed here; each op is launched on the VM as a one-op program. Each result gets memory
of its own, so values are immutable: a state is a table of references, and a copy of it a snapshot.
A step back continues from the latest snapshot before. Positions count the ops executed so far, so
each turn of a loop has positions of its own. Two executions to one position have equal bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from mlvm.arena.writes import count_written
from mlvm.core.errors import (
    ArgumentError,
    MlvmError,
    ProgramError,
    ShapeError,
    UnknownFunction,
)
from mlvm.core.machine.callee import OUT, UserFunction
from mlvm.core.op import NO_ATTRIBUTES, OPS, Attributes
from mlvm.core.ops.half import are_true, cast
from mlvm.core.program.program import STAR, Function, Instruction, Opcode, Program
from mlvm.core.protocol import StorageHandle, TensorHandle, VMProtocol
from mlvm.core.types import Array, TensorType, f64
from mlvm.core.vm import VM
from mlvm.eager.runs.blocks import BRANCH, LOOP, Region, regions_of
from mlvm.eager.runs.ops import OpProgram
from mlvm.eager.runs.source import Line
from mlvm.machines import residuals
from mlvm.machines.local import LocalVM
from mlvm.step.flow import Location

_SNAPSHOTS: Final = 32
"""The number of snapshots of an execution; of more, every second one is dropped."""

_MACHINERY: Final = frozenset({"zeros", "reshape", residuals.BEGIN, residuals.END})
"""Functions that a program calls for its frames and stacks, which count as no ops. The forms of
`zeros` and `reshape` that leave results are not recorded for a user's call."""


class Ref(NamedTuple):
    """Reference to a value.

    kind: `input`, `state` or `constant`, or `result` of an op; `scratch` for memory that nothing
        has written to.
    number: that of the input, state or constant, or the position of the op.
    output: the number among the results of the op.
    """

    kind: str
    number: int
    output: int = 0

    def __str__(self) -> str:
        if self.kind != "result":
            return f"{self.kind} {self.number}"
        return f"%{self.number}" + (f".{self.output}" if self.output else "")


class Level(NamedTuple):
    """Part of the path to an op: a function, a turn of a loop, or a side of a branch.

    kind: `function`, `loop` or `branch`.
    line: the line that calls the function or begins the loop or branch, if it is known.
    name: of the function; `true` or `false` of a branch.
    turn: of the loop, from 0.
    pc: of the call, or of the test of the loop or branch.
    """

    kind: str
    line: Line | None
    name: str = ""
    turn: int = 0
    pc: int = 0

    def __str__(self) -> str:
        what = f"turn {self.turn}" if self.kind == LOOP else self.name
        return f"{self.kind} {what}" + (f" at {self.line}" if self.line else "")


class Executed(NamedTuple):
    """An op of an execution.

    position: the number of ops executed before it.
    place: its function and pc in the program.
    name, attributes: of the op.
    operands: the values that it reads, in order.
    results: the values that it writes.
    operand_types, types: their types.
    line: the user's line.
    path: the functions, loops and branches around it, outermost first.
    names: the names that the user's line assigns to the results.
    locations: where the plan places the results; None for the tensors of a function's frame.
    """

    position: int
    place: tuple[str, int]
    name: str
    attributes: Attributes
    operands: tuple[Ref, ...]
    results: tuple[Ref, ...]
    operand_types: tuple[TensorType, ...]
    types: tuple[TensorType, ...]
    line: Line | None
    path: tuple[Level, ...]
    names: tuple[str, ...]
    locations: tuple[Location | None, ...]

    def __str__(self) -> str:
        results = ", ".join(map(str, self.results))
        operands = ", ".join(map(str, self.operands))
        types = ", ".join(map(str, self.types))
        return f"{results} = {self.name}({operands})" + (f" : {types}" if types else "")


class _Held:
    """Memory of one value on the VM, freed with the last reference."""

    __slots__ = ("_handles", "_storage", "nbytes", "vm")

    def __init__(self, vm: VM, nbytes: int) -> None:
        self.vm, self.nbytes = vm, nbytes
        self._handles: dict[TensorType, TensorHandle] = {}
        self._storage: StorageHandle = vm.alloc_storage(nbytes)

    def handle(self, type: TensorType) -> TensorHandle:
        """Return the handle of the value as a type of its size."""
        if type not in self._handles:
            self._handles[type] = self.vm.tensor_from_storage(self._storage, type, 0)
        return self._handles[type]

    def read(self, type: TensorType) -> Array:
        return self.vm.read(self.handle(type))

    def __del__(self) -> None:
        with suppress(MlvmError, AttributeError):  # the VM was closed, or had no memory
            self.vm.dealloc_storage(self._storage)


class _Content(NamedTuple):
    """Content of a place in memory: a value, and its origin."""

    held: _Held
    ref: Ref


_Key: TypeAlias = tuple[str, int, int]
"""Place in memory: role, number and bytes; of a frame `frame` and the number of the tensor."""


class _Tensor(NamedTuple):
    """Tensor on the stack: a place in memory, used as a type."""

    key: _Key
    type: TensorType
    location: Location | None


@dataclass(slots=True)
class _State:
    """State of an execution between two instructions.

    memory: the contents of places.
    turns: the turn of each loop that runs, by depth of frames and pc of its head.
    created: the number of frames' tensors so far.
    """

    memory: dict[_Key, _Content]
    position: int = 0
    function: str = "main"
    pc: int = 0
    base: int = 0
    nparams: int = 0
    stack: list[Any] = field(default_factory=list)
    frames: list[tuple[str, int, int, int]] = field(default_factory=list)
    turns: dict[tuple[int, int], int] = field(default_factory=dict)
    created: int = 0

    def copy(self) -> _State:
        return _State(
            dict(self.memory),
            self.position,
            self.function,
            self.pc,
            self.base,
            self.nparams,
            [*self.stack],
            [*self.frames],
            dict(self.turns),
            self.created,
        )


class Execution:
    """Execution of a program on a VM of this process, a new one unless it is given.

    The VM must be for the execution alone if the program saves residuals. `inputs` are arrays of
    the step's input types; f64, numpy's default, becomes narrower. With `states` they take the
    place of the program's.

    Raises `ProgramError` for another number of inputs, and `ShapeError` for inputs of other types.
    """

    def __init__(
        self,
        program: OpProgram,
        inputs: Sequence[Array],
        *,
        states: Sequence[Array] | None = None,
        vm: VM | None = None,
    ) -> None:
        self.program = program
        self.vm = LocalVM("execution") if vm is None else vm
        self._step = program.step
        self._functions: Mapping[str, Function] = self._step.planned.program.functions
        self._regions = {name: regions_of(each) for name, each in self._functions.items()}
        self._one_op: dict[tuple[str, int], Program] = {}
        self._records: dict[int, list[_Held]] = {}  # results of ops that save residuals
        self._ops: list[Executed] = []
        self._end: int | None = None
        states = self._step.states if states is None else states
        memory: dict[_Key, _Content] = {}
        for kind, arrays, types in (
            ("input", inputs, self._step.inputs),
            ("state", states, [TensorType.of(x) for x in self._step.states]),
        ):
            if len(arrays) != len(types):
                raise ProgramError(f"execution: expected {len(types)} {kind}s, got {len(arrays)}")
            for i, (array, type) in enumerate(zip(arrays, types, strict=True)):
                held = self._stored(f"{kind} {i}", array, type)
                memory[kind, i, type.nbytes] = _Content(held, Ref(kind, i))
        for i, array in enumerate(self._step.planned.program.constants.values()):
            type = TensorType.of(array)
            held = self._stored(f"constant {i}", array, type)
            memory["constant", i, type.nbytes] = _Content(held, Ref("constant", i))
        self._state = _State(memory)
        self._spacing = 16
        if any(self._calls(residuals.BEGIN)):
            self._launch_named(residuals.BEGIN)
        self._advance()
        self._snapshots: dict[int, _State] = {0: self._state.copy()}

    # --- positions --------------------------------------------------------------------------

    @property
    def position(self) -> int:
        """The number of ops executed so far."""
        return self._state.position

    @property
    def is_finished(self) -> bool:
        """True after the last op."""
        return self._end == self.position

    @property
    def length(self) -> int:
        """The number of ops of the execution. It is executed to its end if that is not known."""
        if self._end is None:
            with self._restored():
                self.run()
        assert self._end is not None  # it has reached it
        return self._end

    def step(self) -> Executed | None:
        """Execute the next op and return it; None after the last one.

        Raises what the op raises; the position is then that before the op.
        """
        state = self._state
        if self._end == state.position:
            return None
        op = self._execute()
        state.position += 1
        self._advance()
        if state.position % self._spacing == 0 and state.position not in self._snapshots:
            self._keep()
        return op

    def run(self, to: int | None = None) -> int:
        """Go to a position, forwards or backwards; by default to the end. Return the position,
        which is that of the end for a later one.

        Raises `ArgumentError` for a position below 0.
        """
        if to is not None and to < 0:
            raise ArgumentError(f"run: expected a position of 0 or more, got {to}")
        if to is not None and to < self.position:
            start = max(each for each in self._snapshots if each <= to)
            self._state = self._snapshots[start].copy()
        while (to is None or self.position < to) and self.step() is not None:
            pass
        return self.position

    def op_at(self, position: int) -> Executed | None:
        """Return the op that is executed at a position; None at the end and after it. An op that
        was not reached yet is executed, and the position stays.

        Raises `ArgumentError` for a position below 0.
        """
        if position < 0:
            raise ArgumentError(f"op_at: expected a position of 0 or more, got {position}")
        if position >= len(self._ops) and self._end is None:
            with self._restored():
                self.run(position + 1)
        return self._ops[position] if position < len(self._ops) else None

    def next_op(self) -> Executed | None:
        """Return the op that `step` will execute, without executing it; None at the end. Its
        results have no content yet."""
        return None if self.is_finished else self._described(self._call())

    @property
    def executed(self) -> Sequence[Executed]:
        """The ops up to the latest position that was reached, also where it is later than the
        present one."""
        return self._ops

    # --- values -----------------------------------------------------------------------------

    def value(self, ref: Ref, type: TensorType | None = None) -> Array:
        """Return a copy of a value, as a type of its size. A result that was overwritten, or that
        is computed later, is computed again; the position stays.

        Raises `ArgumentError` for a reference to nothing.
        """
        if ref.kind != "result":
            return self._initial(ref, type)
        op = self.op_at(ref.number)
        if op is None or not 0 <= ref.output < len(op.results):
            raise ArgumentError(f"value: expected a reference to a result, got {ref}")
        type = op.types[ref.output] if type is None else type
        for content in self._state.memory.values():
            if content.ref == ref:
                return content.held.read(type)
        with self._restored():
            self.run(ref.number + 1)
            for content in self._state.memory.values():
                if content.ref == ref:
                    return content.held.read(type)
        raise ArgumentError(f"value: {ref} has no content after its op")

    def is_held(self, ref: Ref) -> bool:
        """Return whether the value is in memory now."""
        return any(content.ref == ref for content in self._state.memory.values())

    def at(self, location: Location) -> tuple[Ref, Array]:
        """Return the present value at a location of the plan, and where it comes from."""
        content = self._content(_Tensor(_key_of(location), location.type, location))
        return content.ref, content.held.read(location.type)

    def results(self) -> list[Array]:
        """Return the present values of the step's results; those of the call at the end."""
        return [self.at(each)[1] for each in self._step.results]

    def states(self) -> list[Array]:
        """Return the present values of the step's states."""
        types = [TensorType.of(x) for x in self._step.states]
        return [self.at(Location("state", i, type))[1] for i, type in enumerate(types)]

    def _initial(self, ref: Ref, type: TensorType | None) -> Array:
        for content in self._snapshots[0].memory.values():
            if content.ref == ref:
                types: Mapping[str, Sequence[TensorType]] = {
                    "input": self._step.inputs,
                    "state": [TensorType.of(x) for x in self._step.states],
                    "constant": [
                        TensorType.of(x) for x in self._step.planned.program.constants.values()
                    ],
                }
                return content.held.read(type or types[ref.kind][ref.number])
        raise ArgumentError(f"value: expected an input, state, constant or result, got {ref}")

    # --- the machine ------------------------------------------------------------------------

    def _calls(self, name: str) -> Iterator[tuple[str, int]]:
        for function in self._functions.values():
            for pc, each in enumerate(function.code):
                if each.opcode is Opcode.push_str and each.immediates[0] == name:
                    yield function.name, pc

    def _restored(self) -> _Restored:
        return _Restored(self)

    def _keep(self) -> None:
        """Keep a snapshot of the present state, and drop every second one of too many."""
        self._snapshots[self.position] = self._state.copy()
        if len(self._snapshots) > _SNAPSHOTS:
            self._spacing *= 2
            for each in [each for each in self._snapshots if each % self._spacing]:
                del self._snapshots[each]

    def _stored(self, what: str, array: Array, type: TensorType) -> _Held:
        if not isinstance(array, np.ndarray):
            raise ShapeError(f"execution: expected {what} as an array of {type}")
        if array.dtype == np.float64 and type.dtype.is_float and type.dtype is not f64:
            array = cast(array, type.dtype)
        if TensorType.of(array) is not type:
            raise ShapeError(f"execution: expected {what} as {type}, got {TensorType.of(array)}")
        held = _Held(self.vm, type.nbytes)
        self.vm.write(held.handle(type), array)
        return held

    def _content(self, x: _Tensor) -> _Content:
        content = self._state.memory.get(x.key)
        if content is None:  # scratch memory that nothing has written to
            content = _Content(_Held(self.vm, x.type.nbytes), Ref("scratch", x.key[1]))
            self._state.memory[x.key] = content
        return content

    def _advance(self) -> None:
        """Follow instructions up to the next op, or to the end."""
        state = self._state
        while True:
            code = self._functions[state.function].code
            opcode, immediates = instruction = code[state.pc]
            self._enter_loops()
            if opcode is Opcode.cfunc:
                if not self._is_machinery(instruction):
                    return
                self._run_machinery(instruction)
                state.pc += 1
            elif opcode is Opcode.halt:
                self._end = state.position
                return
            else:
                self._follow(opcode, immediates)

    def _follow(self, opcode: Opcode, immediates: tuple[Any, ...]) -> None:
        """Follow an instruction that is no call of a host function."""
        state = self._state
        stack = state.stack
        state.pc += 1
        if opcode is Opcode.load_arg:
            location = self._step.planned.arguments[immediates[0]]
            stack.append(_Tensor(_key_of(location), location.type, location))
        elif opcode is Opcode.push_const:
            constants = self._step.planned.program.constants
            type = TensorType.of(constants[immediates[0]])
            number = [*constants].index(immediates[0])
            stack.append(_Tensor(("constant", number, type.nbytes), type, None))
        elif opcode in (Opcode.push_int, Opcode.push_str):
            stack.append(immediates[0])
        elif opcode is Opcode.get:
            stack.append(stack[state.base + immediates[0]])
        elif opcode is Opcode.set:
            stack[state.base + immediates[0]] = stack.pop()
        elif opcode is Opcode.pop:
            del stack[len(stack) - immediates[0] :]
        elif opcode is Opcode.jump:
            self._jump(immediates[0])
        elif opcode is Opcode.jump_if_false:
            if not self._is_true(stack.pop()):
                self._jump(immediates[0])
        elif opcode is Opcode.call:
            callee = self._functions[immediates[0]]
            state.frames.append((state.function, state.pc, state.base, state.nparams))
            state.function, state.pc = callee.name, 0
            state.base, state.nparams = len(stack), callee.nparams
        elif opcode is Opcode.return_:
            self._return(immediates[0])
        else:
            raise ProgramError(f"execution: expected a captured step, got {opcode.text}")

    def _return(self, nresults: int) -> None:
        state = self._state
        depth, results = len(state.frames), state.stack[len(state.stack) - nresults :]
        kept = {x.key for x in results if isinstance(x, _Tensor)}
        for x in state.stack[state.base :]:
            if isinstance(x, _Tensor) and x.key[0] == "frame" and x.key not in kept:
                state.memory.pop(x.key, None)
        state.stack[state.base - state.nparams :] = results
        state.turns = {key: turn for key, turn in state.turns.items() if key[0] != depth}
        state.function, state.pc, state.base, state.nparams = state.frames.pop()

    def _is_true(self, x: Any) -> bool:
        if not isinstance(x, _Tensor):
            return bool(x)
        return bool(are_true(self._content(x).held.read(x.type)).all())

    def _jump(self, target: int) -> None:
        state = self._state
        key = len(state.frames), target
        if target < state.pc:  # the next turn of a loop
            state.turns[key] = state.turns.get(key, 0) + 1
        state.pc = target

    def _enter_loops(self) -> None:
        """Begin the loops that the present instruction is in, and end the others of the frame."""
        state = self._state
        depth, around = len(state.frames), self._around(state.function, state.pc)
        heads = {each.start for each in around if each.kind == LOOP}
        for key in [key for key in state.turns if key[0] == depth and key[1] not in heads]:
            del state.turns[key]
        for head in heads:
            state.turns.setdefault((depth, head), 0)

    def _around(self, function: str, pc: int) -> list[Region]:
        return [each for each in self._regions[function] if each.start <= pc < each.end]

    def _is_machinery(self, call: Instruction) -> bool:
        name, nresults = self._state.stack[-1], call.immediates[1]
        return name in _MACHINERY and (nresults != 0 or name.startswith("residuals."))

    def _run_machinery(self, call: Instruction) -> None:
        state = self._state
        nparams, _, attributes = (*call.immediates, NO_ATTRIBUTES)[:3]
        name, params = self._params(nparams)
        del state.stack[len(state.stack) - nparams - 1 :]
        if name == "zeros":
            shape, dtype = attributes["shape"], attributes["dtype"]
            type = TensorType(dtype, shape)
            state.created += 1
            state.stack.append(_Tensor(("frame", state.created, type.nbytes), type, None))
        elif name == "reshape":
            [x] = params
            state.stack.append(x._replace(type=TensorType(x.type.dtype, attributes["shape"])))

    def _params(self, nparams: Any) -> tuple[str, list[Any]]:
        stack = self._state.stack
        count = len(stack) - 1 - self._state.base if nparams == STAR else nparams
        return stack[-1], stack[len(stack) - 1 - count : len(stack) - 1]

    def _call(self) -> _Call:
        """Return the call of the present op."""
        state = self._state
        immediates = self._functions[state.function].code[state.pc].immediates
        nparams, nresults, attributes = (*immediates, NO_ATTRIBUTES)[:3]
        name, params = self._params(nparams)
        if not all(isinstance(x, _Tensor) for x in params):
            raise ProgramError(f"execution: expected tensors as operands of {name}, got {params}")
        return _Call(
            name, params, nresults, attributes, self._written(name, len(params), attributes)
        )

    def _written(self, name: str, nparams: int, attributes: Attributes) -> tuple[int, ...]:
        """Return the numbers of the parameters that a call may write to."""
        count = count_written(name, attributes)
        if count is not None:
            return tuple(range(count))
        callee = self.vm.functions.binding(name).callee
        reads = callee.reads if isinstance(callee, UserFunction) else None
        read = set() if reads is None else set(range(nparams)[reads])
        return tuple([i for i in range(nparams) if i not in read])

    def _described(self, call: _Call) -> Executed:
        """Describe the call of the present op, without executing it."""
        state = self._state
        place = state.function, state.pc
        is_op = call.name.removesuffix(OUT) in OPS or call.name == "fused"
        written = [call.params[i] for i in call.written]
        read = [x for i, x in enumerate(call.params) if i not in call.written or not is_op]
        read = [x for x in read if is_op or x.key in state.memory]
        nresults = len(written) or (call.nresults if isinstance(call.nresults, int) else 0)
        return Executed(
            state.position,
            place,
            call.name.removesuffix(OUT),
            call.attributes,
            tuple([self._ref(x) for x in read]),
            tuple([Ref("result", state.position, j) for j in range(nresults)]),
            tuple([x.type for x in read]),
            tuple([x.type for x in written]),
            self.program.lines.get(place),
            self._path(),
            self.program.values.get(place, ()),
            tuple([x.location for x in written]),
        )

    def _ref(self, x: _Tensor) -> Ref:
        content = self._state.memory.get(x.key)
        return Ref("scratch", x.key[1]) if content is None else content.ref

    def _path(self) -> tuple[Level, ...]:
        """Return the functions, loops and branches around the present instruction."""
        state, levels = self._state, list[Level]()
        lines = self.program.lines
        frames = [*state.frames, (state.function, state.pc, state.base, state.nparams)]
        for depth, (function, pc, *_) in enumerate(frames):
            at = pc if depth == len(state.frames) else pc - 1  # that of the call
            for region in self._around(function, at):
                turn = state.turns.get((depth, region.start), 0) if region.kind == LOOP else 0
                line = lines.get((function, region.test))
                levels.append(Level(region.kind, line, region.side, turn, region.test))
            if depth < len(state.frames):
                callee, line = frames[depth + 1][0], lines.get((function, at))
                levels.append(Level("function", line, callee, pc=at))
        return tuple(levels)

    def _execute(self) -> Executed:
        """Execute the present op and move behind it."""
        state, call = self._state, self._call()
        op = self._described(call)
        held = {i: self._content(x).held for i, x in enumerate(call.params)}
        try:
            outs, results = self._launch(op, call, held)
        except MlvmError as error:
            if op.line is not None:
                error.add_note(f"recorded at {op.line}")
            raise
        for j, i in enumerate(call.written):
            state.memory[call.params[i].key] = _Content(outs[j], op.results[j])
        del state.stack[len(state.stack) - 1 - len(call.params) :]
        types = op.types
        for j, array in enumerate(results):
            type = TensorType.of(array)
            key = "frame", state.created + 1, type.nbytes
            state.created += 1
            state.stack.append(_Tensor(key, type, None))
            content = _Content(self._stored("result", array, type), Ref("result", op.position, j))
            state.memory[key] = content
            types = (*types, type)
        op = op._replace(types=types, locations=(*op.locations, *[None for _ in results]))
        state.pc += 1
        if op.position == len(self._ops):
            self._ops.append(op)
        return op

    def _launch(
        self, op: Executed, call: _Call, held: Mapping[int, _Held]
    ) -> tuple[list[_Held], list[Array]]:
        """Launch a call. Return its results in new memory: those that it writes into operands, and
        those that it pushes. What saves residuals is launched once, since a stack only grows."""
        saves = call.name in (residuals.PUSH, residuals.ADD)
        if saves and op.position in self._records:
            return self._records[op.position], []
        is_op = call.name.removesuffix(OUT) in OPS or call.name == "fused"
        outs: list[_Held] = []
        handles = {i: each.handle(call.params[i].type) for i, each in held.items()}
        for i in call.written:
            type = call.params[i].type
            outs.append(_Held(self.vm, type.nbytes))
            if not is_op:  # it may read its operands, and write a part of them
                self.vm.write(outs[-1].handle(type), held[i].read(type))
            handles[i] = outs[-1].handle(type)
        if op.place not in self._one_op:
            arity = call.name, len(call.params), call.attributes, call.nresults
            self._one_op[op.place] = Program.of_op(*arity)
        results = self.vm.launch(self._one_op[op.place], [handles[i] for i in sorted(handles)])
        self.vm.synchronize()
        if saves:
            self._records[op.position] = outs
        return outs, results

    def _launch_named(self, name: str) -> None:
        self.vm.launch(Program.of_op(name, 0, NO_ATTRIBUTES, 0))


class _Call(NamedTuple):
    """Call of a host function: its parameters, and the numbers of those that it may write to."""

    name: str
    params: list[_Tensor]
    nresults: Any
    attributes: Attributes
    written: tuple[int, ...]


class _Restored:
    """Context that restores the state of an execution after the block."""

    def __init__(self, execution: Execution) -> None:
        self._execution = execution

    def __enter__(self) -> None:
        self._state = self._execution._state
        self._execution._state = self._state.copy()

    def __exit__(self, *_: object) -> None:
        self._execution._state = self._state


def vm_like(vm: VMProtocol, program: OpProgram) -> LocalVM:
    """Return a new VM for an execution, with the host functions of a VM that the program calls."""
    new = LocalVM("execution")
    if isinstance(vm, VM):
        for function in program.step.planned.program.functions.values():
            for opcode, immediates in function.code:
                if opcode is Opcode.push_str:
                    [name] = immediates
                    try:
                        new.functions.binding(name)
                    except UnknownFunction:
                        new.register_callees({name: vm.functions.binding(name).callee})
    return new


def _key_of(location: Location) -> _Key:
    return location.role, location.place, location.type.nbytes


__all__ = ["BRANCH", "LOOP", "Executed", "Execution", "Level", "Ref"]
