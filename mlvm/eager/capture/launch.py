"""Launch a captured program: scratch memory, hoisted values, operands, and outputs.

In: a `Launch`, which is the planned program with all operands except the tensors of a call. From
the call: the inputs, the outputs (allocated by the caller) and the scalar inputs. Out: None; the
outputs and the updated states are written, possibly later if the VM is remote.

Invariants:

- The operands have the types of the trace; the signature or the C pattern has checked them.

- Scratch memory belongs to one captured function on one VM. It is as large as the largest plan, and
  shared by the function's programs. The `Scratch` lock is therefore held from before the handles
  are read until the launch is sent.

- Hoisted values are refreshed before the launch. The VM's lock is held from then until the launch
  is sent.

Callers: `Captured` for each call; `drain` for each element of a queue. An error is reported with
the user's line; an operand that was freed raises `StaleTensorError`.
"""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from mlvm.arena.arena import Arena, trim_arenas
from mlvm.arena.writes import may_count
from mlvm.core.collecting import uncollected
from mlvm.core.errors import BudgetError, HandleError, MlvmError, OutOfMemoryError
from mlvm.core.locks import cached_property, is_mine, new_lock
from mlvm.core.observe import explaining
from mlvm.core.program.program import Program, Variant
from mlvm.core.protocol import StorageHandle, TensorHandle, VMProtocol
from mlvm.core.types import Array, TensorType
from mlvm.eager.capture.hoisted import HoistedValues, as_type, is_shared
from mlvm.eager.capture.trace import TracedCall
from mlvm.eager.recording import debug
from mlvm.eager.tensor.reading import explain, values_of
from mlvm.eager.tensor.tensor import Tensor
from mlvm.input.queue import QueueTensor
from mlvm.input.queue_get import taken_ahead
from mlvm.machines.native.extension import EXTENSION
from mlvm.step.compile import Planned
from mlvm.step.replacement import Types
from mlvm.step.saved import SavedStep

_ROLES: Final = "input", "output", "state"


class ScalarInputs(NamedTuple):
    """Python numbers of a call, in the form that a program needs.

    args: the numbers of the signature. values: all numbers that Python computes from them. arrays:
    the numbers that ops use, each with the tensor to which it is copied.
    """

    args: list[float]
    values: list[Any]
    arrays: list[tuple[Tensor, Array]]


class Scratch:
    """Scratch memory of a captured function on one VM, as large as the largest plan.

    The `lock` is held while a program uses the memory. is_nested: True for the memory of a launch
    inside an outer launch.
    """

    def __init__(self, *, is_nested: bool = False) -> None:
        self.is_nested = is_nested
        self.lock = new_lock()
        self.nbytes = 0
        self.storage: StorageHandle | None = None

    def is_in_use(self, vm: VMProtocol) -> bool:
        """Return whether this thread is inside a launch that may use the scratch memory.

        Return True also inside any other call of the VM, as in a signal handler, a finalizer or a
        host function. There the thread must not wait for the lock, because the thread that holds
        the lock may wait for the VM."""
        return not self.is_nested and (is_mine(self.lock) or is_mine(vm.lock))

    def reserve(self, vm: VMProtocol, launch: Launch) -> tuple[TensorHandle, ...]:
        """Return the handles of the program's temporaries.

        The caller holds the lock."""
        launch = launch.owner or launch
        nbytes = launch.planned.plan.nbytes
        if self.storage is None or nbytes > self.nbytes:
            self.release(vm)
            try:
                self.storage = vm.alloc_storage(nbytes)
            except OutOfMemoryError:
                trim_arenas(vm)
                self.storage = vm.alloc_storage(nbytes)
            self.nbytes = nbytes
        if launch.storage != self.storage:
            launch.temporaries = tuple(
                vm.tensor_from_storage(self.storage, argument.type, argument.place)
                for argument in launch.planned.arguments
                if argument.role == "scratch"
            )
            launch.storage = self.storage
        return launch.temporaries

    def drop(self, vm: VMProtocol, launch: Launch) -> None:
        """Free the handles of an evicted program."""
        with self.lock:
            if self.storage is not None and launch.storage == self.storage:
                launch.storage = None
                for handle in launch.temporaries:
                    vm.dealloc_tensor(handle)

    def release(self, vm: VMProtocol) -> None:
        """Free the memory.

        The caller holds the lock."""
        if self.storage is not None:
            vm.dealloc_storage(self.storage)
        self.storage, self.nbytes = None, 0


class ScratchMemories:
    """Scratch memory of a captured function, by VM, freed together with the function."""

    def __init__(self, owner: object) -> None:
        self._lock = new_lock()  # guards the dict
        self._by_vm: weakref.WeakKeyDictionary[VMProtocol, Scratch] = weakref.WeakKeyDictionary()
        # Not `__del__`: the garbage collector clears weak references before it calls that.
        weakref.finalize(owner, _release, self._by_vm).atexit = False

    def of(self, vm: VMProtocol) -> Scratch:
        scratch = self._by_vm.get(vm)
        if scratch is None:
            with self._lock:
                scratch = self._by_vm.setdefault(vm, Scratch())
        return scratch

    def release(self) -> None:
        """Wait for running calls, and free all scratch memory."""
        with self._lock:
            by_vm = dict(self._by_vm)
        _release(by_vm)


def _release(by_vm: Any) -> None:
    for vm, scratch in list(by_vm.items()):
        with scratch.lock:
            scratch.release(vm)


class Launch:
    """A planned program with all operands except the tensors of a call.

    Attributes:
        planned: the program and the plan.
        hoisted: the hoisted values that the program uses, if there are any.
        states: tensors that the function reads from the environment, then hoisted values.
        updates: role and number of each input and state that the program writes.
        queues: queues from which an element is taken before a launch; the element is an input.
        first_queue: the queue from which the program itself takes an element first, if any.
        operands: role, number and type of each operand, before temporaries.
        has_temporaries: whether scratch memory follows these operands.
        storage, temporaries: the scratch memory of the last launch, and the handles.
        replay: launches of the program on known tensors, in C.
        owner: the launch that provides the temporaries, if this launch does not.
        program: the planned program or a variant of it.
    """

    def __init__(self, planned: Planned, call: TracedCall, hoisted: HoistedValues | None) -> None:
        record = call.record
        self.hoisted, self._vm = hoisted, record.vm
        self.states = [*record.outside.states, *(hoisted.values if hoisted is not None else ())]
        written = {use.value.home for each in call.flow.calls for use in each.outs}
        self.updates = [
            (home.role, home.index)
            for home in written - record.outside.queue_homes
            if home and home.role in ("input", "state")
        ]
        self.queues = record.outside.queues
        self.owner: Launch | None = None
        self._held_queues = [x for x in record.outside.keepalive if isinstance(x, QueueTensor)]
        self._use(planned)

    _make_planned: Callable[[], Planned | None]
    program: Program

    @cached_property
    def planned(self) -> Planned:
        """The program and the plan."""
        planned = self._make_planned()
        assert planned is not None  # the caller has checked that the values are within the plan
        return planned

    def _use(self, planned: Planned) -> None:
        self.planned, arguments = planned, planned.arguments
        self.program, self.note_line = planned.program, planned.note_line
        self.operands = operands_of(planned, [a.type for a in arguments])
        first = planned.first_queue
        self.first_queue = next((x for x in self._held_queues if x.handle == first), None)
        self.has_temporaries = any(a.role == "scratch" for a in arguments)
        self.storage: StorageHandle | None = None
        self.temporaries: tuple[TensorHandle, ...] = ()
        self._looped: Program | None = None
        self.replay = self._new_replay()

    def _new_replay(self) -> Any:
        """Return the C object that launches the program; None if the extension is missing."""
        if EXTENSION is None:
            return None
        vm, program, hoisted, updates = self._vm, self.program, self.hoisted, bool(self.updates)

        def may_replay(handles: tuple[TensorHandle, ...]) -> bool:
            """Return whether no value must be computed before a launch or counted after it.

            The caller holds the VM's lock."""
            if hoisted is not None and not hoisted.is_current():
                return False
            return not (updates and may_count(vm, program, handles))

        check = may_replay if hoisted is not None or updates else None
        return EXTENSION.Replay(tuple(self.operands), self.states, check)

    def with_program(self, planned: Planned) -> Launch:
        """Return a launch of a second program without hoisted values, with the same operands."""
        other = copy.copy(self)
        other.hoisted = other.owner = None
        other._use(planned)
        return other

    def variant(
        self,
        program: Variant,
        operands: list[tuple[int, int, TensorType]],
        owner: Launch,
        make_planned: Callable[[], Planned | None],
    ) -> Launch:
        """Return a launch of a variant of the program on operands of these types.

        It uses the temporaries of the owner."""
        other = copy.copy(self)
        other.storage, other.temporaries, other._looped = None, (), None
        other.program, other.operands, other.owner = program, operands, owner
        vars(other).pop("planned", None)
        other._make_planned, other.replay = make_planned, other._new_replay()
        return other

    def replayed(self, arena: Arena, inputs: Sequence[Tensor], types: Types) -> list[Tensor] | None:
        """Launch the program in C and return its outputs in the arena, or return None.

        None means that the program has not run on these tensors before, and was not launched; the
        caller then calls `run`. The outputs have these types."""
        try:
            return self.replay.run(arena, inputs, types)  # type: ignore[no-any-return]
        except Exception as error:
            self.note_line(error)
            raise

    def looped(self) -> Program:
        """Return the program in a loop that runs while the queue has elements.

        Raises `ProgramError` unless the program takes elements from exactly one queue."""
        self._looped = self._looped or self.planned.looped()
        return self._looped

    def run(
        self,
        scratch: Scratch,
        scalars: ScalarInputs,
        vm: VMProtocol,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        program: Program | None = None,
        *,
        arena: Arena | None = None,
        is_ahead: bool = False,
    ) -> None:
        """Launch the program, or the given `program` instead, on the tensors of a call.

        With the `arena` of the outputs, `replayed` may launch the same call next time. `is_ahead`:
        the element of the first queue has been taken already."""
        if scratch.is_in_use(vm):
            _run_nested(self, scalars, vm, inputs, outputs, program, is_ahead=is_ahead)
            return
        if self.first_queue is not None and not is_ahead:
            with taken_ahead(self.first_queue):
                self.run(scratch, scalars, vm, inputs, outputs, program, is_ahead=True)
            return
        program = program or self.program
        if self.queues:
            inputs = [*inputs, *[x for queue in self.queues for x in queue.get(kind=Tensor)]]
        tensors = inputs, outputs, self.states  # in the order of _ROLES
        hoisted = self.hoisted
        explains: Callable[[Exception], None] = self.note_line
        token = explaining.set(self.note_line)
        try:
            # Entering the same lock twice is cheaper than a context manager that does nothing.
            with scratch.lock, scratch.lock if hoisted is None else vm.lock:
                if hoisted is not None:
                    explains = hoisted.note_line
                    hoisted.refresh()
                    explains = self.note_line
                temporaries = scratch.reserve(vm, self) if self.has_temporaries else ()
                handles = None
                if self.replay is not None:
                    handles = self.replay.handles(inputs, outputs, temporaries)
                if handles is None:
                    used = [as_type(tensors[role][i], type) for role, i, type in self.operands]
                    handles = (*[x.handle for x in used], *temporaries)
                for x, array in scalars.arrays:  # another thread may have written other numbers
                    vm.write(x.handle, array)
                if debug.is_watched(vm):
                    updated = [tensors[_ROLES.index(role)][i].root for role, i in self.updates]
                    saved = partial(self._saved, inputs, outputs)
                    try:
                        debug.launch_watched(vm, program, handles, updated, saved)
                    except MlvmError as error:
                        error.late = False  # the caller waits for each call of it
                        raise
                    return
                vm.launch(program, handles)
                if arena is not None:
                    self.replay.learn(arena, program, handles)
        except Exception as error:
            if getattr(error, "late", False):
                raise
            if isinstance(error, HandleError):
                operands = [tensors[role][i] for role, i, _ in self.operands]
                raise explain(error, vm, operands) from None
            explains(error)
            raise
        finally:
            explaining.reset(token)

    def _saved(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> tuple[SavedStep, list[Array]]:
        """Return the step with the current state and the input values, for a file."""
        types = [tuple([x.root.type for x in each]) for each in (inputs, outputs)]
        step = SavedStep(self.planned, types[0], types[1], (), tuple(map(values_of, self.states)))
        return step, [values_of(x.root) for x in inputs]


def operands_of(planned: Planned, types: Sequence[Any]) -> list[tuple[int, int, Any]]:
    """Return the operands of a program that precede the temporaries, as for `Launch`.

    `types` are the types of the program's arguments."""
    arguments = [(*each[:2], type) for each, type in zip(planned.arguments, types, strict=True)]
    return [(k, *rest) for k, role in enumerate(_ROLES) for own, *rest in arguments if own == role]


def _run_nested(
    launch: Launch, scalars: ScalarInputs, vm: VMProtocol, *call: Any, **options: Any
) -> None:
    """Run a launch inside an outer launch of this thread, possibly of the same function.

    It uses separate scratch memory, and restores the numbers of the outer launch."""
    # other launches read the handles of the original
    own, launch = Scratch(is_nested=True), copy.copy(launch)
    if launch.owner is not None:
        launch.owner = copy.copy(launch.owner)
    numbers = [(x, vm.read(x.handle)) for x, _ in scalars.arrays]
    try:
        launch.run(own, scalars, vm, *call, **options)
    finally:
        own.release(vm)
        for x, array in numbers:
            vm.write(x.handle, array)


class Variants:
    """Programs for one signature: with hoisted values and, if needed, without.

    The second program is compiled once the weights change before each call. hoisting: the first
    program. last: the program of the last call.
    """

    def __init__(self, launch: Launch, compile_unhoisted: Callable[..., Planned]) -> None:
        self.hoisting = self.last = launch
        may_change = launch.hoisted is not None and launch.hoisted.may_change
        self._compile = compile_unhoisted if may_change else None  # keeps all calls alive
        self._unhoisted: Launch | None = None
        self._writes = -1  # the write count at the last call with stale hoisted values
        self._stale_calls = 0  # successive calls before which weights had changed

    def drop(self, scratch: Scratch, vm: VMProtocol) -> None:
        """Free the handles of the programs, which are evicted."""
        for launch in (self.hoisting, self._unhoisted):
            if launch is not None:
                scratch.drop(vm, launch)

    def select(self, *, in_loop: bool = False) -> Launch:
        """Return the program for the next call.

        It is the program without hoisted values if the weights have changed since the last call,
        and did so often before, or if writes are not counted."""
        launch = self.hoisting
        hoisted = launch.hoisted
        if hoisted is not None and not in_loop:
            uncounted = is_shared(hoisted.vm)
            if not (hoisted.is_stale or uncounted):
                self._stale_calls = 0
            else:
                with hoisted.vm.lock:
                    before, self._writes = self._writes, hoisted.writes()
                if before != self._writes or uncounted:
                    # Number of successive calls that refresh hoisted values before a program
                    # without hoisted values is compiled.
                    is_often = self._stale_calls >= 2 or uncounted
                    if is_often and self._compile is not None:
                        self._unhoisted, self._compile = self._compiled(hoisted), None
                    self._stale_calls += 1
                    launch = self._unhoisted or launch
        self.last = launch
        return launch

    def _compiled(self, hoisted: HoistedValues) -> Launch | None:
        """Return the program without hoisted values, or None if it exceeds the budget.

        The plan includes the bytes of the hoisted values, which stay allocated.
        """
        assert self._compile is not None
        try:
            with uncollected():
                planned = self._compile(reserved=hoisted.part.nbytes)
        except BudgetError:
            return None
        plan = planned.plan._replace(hoisted_nbytes=hoisted.part.nbytes)
        return self.hoisting.with_program(dataclasses.replace(planned, plan=plan))
