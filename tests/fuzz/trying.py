"""Launches of programs, and the host functions that these call."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import numpy as np

from mlvm.core.errors import MachineError, MlvmError
from mlvm.core.machine.callee import Value
from mlvm.core.machine.frame import Frame
from mlvm.core.program.program import Instruction, Opcode, Program
from mlvm.core.protocol import TensorHandle, VMProtocol
from mlvm.core.types import Array
from mlvm.machines.local import LocalVM as VM
from tests.brief import replace_op
from tests.core.programs import ADD_INTO, f32s, put
from tests.fuzz.making import GLOBALS

MAX_STEPS: Final = 100


class Found(Exception):
    """The machine did what it may not."""


class TimeIsUp(Exception):
    """A program that ran for too long."""


# --- host functions -------------------------------------------------------------------


def leave_all(frame: Frame) -> None:
    """As many results as parameters, in the other order."""
    for i in reversed(range(frame.nparams)):
        frame.push(frame.param(i))


def leave_one_of_any_kind(frame: Frame) -> None:
    values: list[Value] = [3, 0, "add", "host.all", "", f32s(1, 2), np.array(0)]
    frame.push(values[frame.nparams % len(values)])


def leave_names(frame: Frame) -> None:
    for name in ("negative", "sum", "add.out", "no such"):
        frame.push(name)


def fail(frame: Frame) -> None:
    raise MachineError("host.fail fails")


class Table:
    """A VM's function table: `changed` once a program has registered functions."""

    def __init__(self, vm: VMProtocol) -> None:
        self.changed = False


def new_vm(**options: Any) -> VM:
    vm = VM(**options)
    vm.register("host.all", leave_all)
    vm.register("host.any", leave_one_of_any_kind, nresults=1)
    vm.register("host.names", leave_names)
    vm.register("host.fail", fail, nparams=1, nresults=1)

    def change(frame: Frame) -> None:
        replace_op(vm, "negative", leave_all)
        replace_op(vm, "add", leave_one_of_any_kind, nresults=1)
        vm.attached(Table).changed = True

    vm.register("host.change", change, nresults=0)
    return vm


# --- trying them ----------------------------------------------------------------------


def with_handles(program: Program, handles: list[TensorHandle]) -> Program:
    """The program with a VM's handles in place of `GLOBALS`."""
    names = dict(zip(GLOBALS, handles, strict=True))

    def replaced(instruction: Instruction) -> Instruction:
        if instruction.opcode is Opcode.push_int and instruction.immediates:
            n = instruction.immediates[0]
            if isinstance(n, int):
                return Instruction(Opcode.push_int, (names.get(n, n), *instruction.immediates[1:]))
        return instruction

    return Program(
        [
            f._replace(code=tuple(map(replaced, f.code))) if isinstance(f.code, tuple) else f
            for f in program.functions.values()
        ],
        program.constants,
    )


class Launched(NamedTuple):
    """Outcome of a launch: outputs, arguments and globals, and the error, if it raised one.
    `handles` were those of the globals."""

    outputs: list[Array]
    after: list[Array]
    error: MlvmError | None
    handles: list[TensorHandle]


def launch(
    vm: VM, program: Program, arrays: tuple[Array, ...], max_steps: int | None = MAX_STEPS
) -> Launched:
    """Launch the program once. Raises `Found` for bytes lost, or a tensor that cannot be read."""
    if vm.consumed_size_in_mib():
        raise Found("there are bytes before the launch")
    args = [put(vm, array) for array in arrays]
    others = [put(vm, array) for array in (f32s(7, 8), np.array(2))]
    before, outputs, failed = vm.consumed_size_in_mib(), [], None
    program = with_handles(program, others)
    try:
        outputs = vm.launch(program, args, max_steps=max_steps)
    except MlvmError as error:
        failed = error
        str(error)
    stores = any(
        i.opcode is Opcode.store_global for f in program.functions.values() for i in f.code
    )
    if vm.consumed_size_in_mib() != before and not stores:
        raise Found(f"{before} MiB before and {vm.consumed_size_in_mib()} after")
    after = [vm.read(handle) for handle in [*args, *others]]
    for handle in [*args, *others]:
        vm.dealloc_tensor(handle)
    if vm.consumed_size_in_mib():
        raise Found(f"{vm.consumed_size_in_mib()} MiB are held by nobody")
    return Launched(outputs, after, failed, others)


def computes(vm: VM) -> bool:
    handles = [put(vm, f32s(i, 2 * i)) for i in range(3)]
    vm.launch(ADD_INTO, handles)
    result: list[float] = vm.read(handles[0]).tolist()
    for handle in handles:
        vm.dealloc_tensor(handle)
    return result == [3, 6]


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise `TimeIsUp` in the block after so long, where the system can."""

    def stop(*_: object) -> None:
        raise TimeIsUp(f"it ran for more than {seconds} s")

    if not hasattr(signal, "setitimer"):
        yield
        return
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
