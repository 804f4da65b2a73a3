"""Execution of a program op by op, forwards and backwards.

    execution = Execution(program, inputs)
    while (op := execution.step()) is not None:
        print(op, execution.value(op.results[0]))

A step back continues from the latest earlier snapshot. A position is the number of ops executed so
far, so each iteration of a loop has different positions. Two executions to the same position have
equal bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from mlvm.core.errors import ArgumentError, ProgramError, UnknownFunctionError
from mlvm.core.protocol import VMProtocol
from mlvm.core.types import Array, TensorType
from mlvm.core.vm import VM
from mlvm.eager.runs.executed import Address, Executed, Level, Named, Ref
from mlvm.eager.runs.interpreter import Content, ExecutionState, Names, OpInterpreter
from mlvm.eager.runs.ops import OpProgram
from mlvm.machines import printing
from mlvm.machines.local import LocalVM
from mlvm.step.flow import Location

__all__ = ["Executed", "Execution", "Level", "Named", "Ref", "silent_vm", "vm_like"]

_SNAPSHOTS: Final = 32
"""The maximum number of snapshots of an execution; beyond it, every second one is dropped."""


class Execution:
    """Execution of a program on a VM of this process, by default on a new VM.

    If the program saves residuals, no other program may use the VM. `inputs` are arrays of
    the step's input types; f64, numpy's default, becomes narrower.

    Raises `ProgramError` for a wrong number of inputs, and `ShapeError` for inputs of wrong types.
    """

    def __init__(
        self, program: OpProgram, inputs: Sequence[Array], *, vm: VM | None = None
    ) -> None:
        self.program = program
        self.vm = LocalVM("execution") if vm is None else vm
        self._machine = OpInterpreter(program, self.vm)
        self._ops: list[Executed] = []
        self._end: int | None = None
        step = program.step
        if len(inputs) != len(step.inputs):
            raise ProgramError(f"execution: expected {len(step.inputs)} inputs, got {len(inputs)}")
        constants = [*step.planned.program.constants.values()]
        for kind, arrays, types in (
            ("input", inputs, step.inputs),
            ("state", step.states, map(TensorType.of, step.states)),
            ("constant", constants, map(TensorType.of, constants)),
        ):
            for i, (array, type) in enumerate(zip(arrays, types, strict=True)):
                self._machine.enter(Ref(kind, i), array, type)
        self._snapshots: dict[int, ExecutionState] = {}
        self._spacing = 16
        self._arrive()

    # --- positions --------------------------------------------------------------------------

    @property
    def position(self) -> int:
        """The number of ops executed so far."""
        return self._machine.state.position

    @property
    def is_finished(self) -> bool:
        """True after the last op."""
        return self._end == self.position

    @property
    def length(self) -> int:
        """The number of ops of the execution; if it is not known, the execution runs to the end."""
        if self._end is None:
            with self._restored():
                self.run()
        assert self._end is not None  # the end was reached
        return self._end

    def step(self) -> Executed | None:
        """Execute the next op and return it; return None after the last op.

        Raises the errors of the op; the position is then before the op.
        """
        if not self._machine.advance():
            return None
        op = self._machine.execute()
        if op.position == len(self._ops):
            self._ops.append(op)
        self._arrive()
        named = self.named(op.position + 1).items()
        keys = [key for key, x in named if x is not None and x.ref in op.results]
        keys.sort(key=lambda key: op.line is None or key[0] != op.line.function)
        names = tuple(dict.fromkeys([name for _, name in keys]))
        op = self._ops[op.position] = op._replace(names=names)
        return op

    def run(self, to: int | None = None) -> int:
        """Go to a position, forwards or backwards, by default to the end; return the position.

        A position beyond the end means the end.

        Raises `ArgumentError` for a negative position.
        """
        if to is not None and to < 0:
            raise ArgumentError(f"run: expected a position of 0 or more, got {to}")
        if to is not None and to < self.position:
            start = max(each for each in self._snapshots if each <= to)
            self._machine.state = self._snapshots[start].copy()
        while (to is None or self.position < to) and self.step() is not None:
            pass
        return self.position

    def op_at(self, position: int) -> Executed | None:
        """Return the op that is executed at a position; None at and beyond the end.

        If the execution has not reached the position, the ops before it are executed. The current
        position does not change.

        Raises `ArgumentError` for a negative position, and the errors of the ops before it.
        """
        if position < 0:
            raise ArgumentError(f"op_at: expected a position of 0 or more, got {position}")
        if position < len(self._ops):
            return self._ops[position]
        if position == self.position:
            return self.next_op()
        with self._restored():
            return self.next_op() if self.run(position) == position else None

    def next_op(self) -> Executed | None:
        """Return the op that `step` will execute, without executing it; None at the end.

        The results have no content yet.
        """
        return self._machine.described() if self._machine.advance() else None

    @property
    def executed(self) -> Sequence[Executed]:
        """The ops up to the latest position reached, even if the current position is earlier."""
        return self._ops

    def named(self, position: int) -> Names:
        """Return the names that get a value at a position, by function and variable.

        The position must have been reached. The value None removes a name."""
        return self._machine.named.get(position, {})

    # --- values -----------------------------------------------------------------------------

    def value(self, ref: Ref) -> Array:
        """Return a copy of a value.

        A result that was overwritten, or that is computed later, is computed again. The position
        does not change.

        Raises `ArgumentError` for a reference that has no value.
        """
        content = self._find(ref)
        if content is None:
            with self._restored():
                self.run(ref.number + 1 if ref.kind == "result" else 0)
                content = self._find(ref)
        if content is None:
            raise ArgumentError(f"value: expected an input, state, constant or result, got {ref}")
        return content.array.copy()

    def _find(self, ref: Ref) -> Content | None:
        """Return the memory content that is the value, if it is currently stored."""
        state = self._machine.state
        contents = (*state.latest, *state.memory.values())
        return next((each for each in contents if each.ref == ref), None)

    def is_held(self, ref: Ref) -> bool:
        """Return whether the value is currently stored in memory."""
        return self._find(ref) is not None

    def at(self, location: Location) -> tuple[Ref, Array]:
        """Return the present value at a location of the plan, and the origin of the value."""
        x = Address(*location)
        return self._machine.content(x).ref, self._machine.array(x).copy()

    def results(self) -> list[Array]:
        """Return the current values of the step's results; at the end, the results of the call."""
        return [self.at(each)[1] for each in self.program.step.results]

    def states(self) -> list[Array]:
        """Return the present values of the step's states."""
        types = [TensorType.of(x) for x in self.program.step.states]
        return [self.at(Location("state", i, type))[1] for i, type in enumerate(types)]

    # --- the machine ------------------------------------------------------------------------

    @contextmanager
    def _restored(self) -> Iterator[None]:
        """Restore the position after the block."""
        state = self._machine.state
        self._machine.state = state.copy()
        try:
            yield
        finally:
            self._machine.state = state

    def _arrive(self) -> None:
        """Move to the next op and keep a snapshot at some positions.

        Drop every second snapshot if there are more than `_SNAPSHOTS`.
        """
        position = self.position
        if not self._machine.advance():
            self._end = position
        if position % self._spacing == 0 and position not in self._snapshots:
            self._snapshots[position] = self._machine.state.copy()
            if len(self._snapshots) > _SNAPSHOTS:
                self._spacing *= 2
                for each in [each for each in self._snapshots if each % self._spacing]:
                    del self._snapshots[each]


def silent_vm() -> LocalVM:
    """Return a new VM without output of `ml.debug.print` and without series of `watch`."""
    vm = LocalVM("execution")
    printing.register_silent(vm)
    return vm


def vm_like(vm: VMProtocol, program: OpProgram, *, is_silent: bool = False) -> LocalVM:
    """Return a new VM for an execution, with the host functions that the program calls."""
    new = silent_vm() if is_silent else LocalVM("execution")
    if isinstance(vm, VM):
        for name in program.host_functions():
            try:
                new.functions.binding(name)
            except UnknownFunctionError:
                new.register_callees({name: vm.functions.binding(name).callee})
    return new
