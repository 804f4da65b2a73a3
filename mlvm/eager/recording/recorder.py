"""Recorder: an abstract VM on which a function's launches are recorded instead of run.

In: launches of one-op programs on handles, from eager code; blocks and calls from control flow.
Out: `calls`, a list of `step.flow.Call` on `Value`s; each block and function has such a list. A
value is the content of a tensor between two writes; a home is memory that the tensor keeps across
writes.

Results are allocated in the recorder's arena, which has types but no bytes. The bytes of a tensor
from outside do not move: an update is recorded as a write to the tensor's home. A launch that a
later call could not repeat raises `CaptureError` with the user's line. An update that needs an old
value elsewhere raises `RetryAfterCopy`, and the caller records again.

Callers: `capture`, `control`, `transform`, `measure` and `summary`, by `recording_of`. No lock is
held: a recorder is active in one thread or task; other threads may record at the same time.
"""

from __future__ import annotations

import itertools
import weakref
from bisect import bisect
from collections import ChainMap
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, TypeAlias, TypeVar, cast

from mlvm.arena.arena import (
    STALE,
    Allocation,
    Arena,
    ViewLog,
    exchange,
    rebase,
    regions,
    scope,
    view_logs,
    vms,
)
from mlvm.arena.context import Tape, context, current
from mlvm.arena.placement import rounded
from mlvm.arena.scratch_pad import ScratchPad
from mlvm.core.errors import ArgumentError, CaptureError, GradientError, HandleError
from mlvm.core.machine.callee import OUT
from mlvm.core.machine.decode import decode
from mlvm.core.observe import Layer, observed
from mlvm.core.op import NO_ATTRIBUTES, OPS, Attributes, Op
from mlvm.core.program.program import Program
from mlvm.core.protocol import StorageHandle, TensorHandle, VMProtocol
from mlvm.core.types import Array, TensorType, i64
from mlvm.eager.functions import random
from mlvm.eager.functions.remedies import FROM_BODY, Read
from mlvm.eager.recording.lines import user_line
from mlvm.eager.recording.reads import read_here, text_here
from mlvm.eager.tensor.apply import COPY, OneOp, Tensors, Types, apply, untracked
from mlvm.eager.tensor.constants import prepare_constants
from mlvm.eager.tensor.context import overriding
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.update import live_tapes, overwrite
from mlvm.machines import residuals
from mlvm.machines.checks import CHECK
from mlvm.step.blocks import free_variables, outer_index, with_blocks
from mlvm.step.flow import Block, Call, Home, Procedure, Role, Use, Value

if TYPE_CHECKING:  # eager calls with new numbers need this file, but no queues
    from mlvm.input.queue import QueueTensor


def current_recorder() -> Recorder | None:
    """Return the active recorder of this thread or task."""
    return cast("Recorder | None", current().recorder)


Reference: TypeAlias = weakref.ref[Allocation]
_Operand: TypeAlias = tuple[Reference, TensorType]
_Views: TypeAlias = dict[int, Reference]  # by id

Reader: TypeAlias = Callable[[Tensor], list[Tensor]]
"""Function that reads a record of residuals by number."""

_ENDED: Final = Value(0)
"""Marks the value of a block's tensor after the block has finished."""

_COPY: Final = Program.of_op(f"copy{OUT}", 2, NO_ATTRIBUTES, 0)
_handles = itertools.count(1 << 62)  # greater than the handles that a VM issues
_REPLACED: Final = ("launch", "read", "write", "alloc_tensor", "swap")


class RetryAfterCopy(BaseException):
    """Raised for an update of a tensor if the old value is needed outside.

    The recording is discarded; the tensor is moved, and the function or block is recorded again.

    x: the tensor. depth: the number of blocks around the block to record again; None for the whole
    function.
    """

    def __init__(self, x: Allocation, depth: int | None = None) -> None:
        super().__init__()
        self.x = x
        self.depth = depth


class RetryWithCarry(BaseException):
    """Raised for an update, in a block, of an outer tensor through which a gradient flows.

    The block is recorded again and carries the tensor: it receives the value, and returns a new
    value.

    x: the tensor. depth: the number of blocks around the block to record again.
    """

    def __init__(self, x: Tensor, depth: int) -> None:
        super().__init__()
        self.x = x
        self.depth = depth


class _Open(NamedTuple):
    """An open block, and the state when it was opened.

    depth: the number of blocks around it. tape: the current tape. nodes: numbers of nodes, by tape.
    nviews: the number of earlier views. carried: tensors that the block carries.
    """

    block: Block
    depth: int
    tape: Tape | None
    nodes: dict[Tape, int]
    nviews: int
    carried: Sequence[Tensor]


class _Scopes:
    """Open blocks and functions.

    Attributes:
        open: the open blocks, outermost first.
        frames: for each open function, the number of blocks around it.
        callees: functions that the outermost open function calls.
        cells: ids of references to variables that functions may update.
        writes: for each closed block, ids of references to outer tensors that it has written.
        views: views created since the recording began, in order.
        closed_views: for the views created in closed blocks, the first number and the next number.
        layer_paths: paths of layers, for lines; see `mlvm.eager.nn.layer`.
        refused: the error of the last read of a value, or empty.
    """

    def __init__(self) -> None:
        self.open: list[_Open] = []
        self.frames: list[int] = []
        self.callees: list[Procedure] = []
        self.cells: set[int] = set()
        self.writes: dict[Block, list[int]] = {}
        self.views = ViewLog()
        self.closed_views: list[tuple[int, int]] = []
        self.layer_paths: dict[Any, Any] = {}
        self.refused = ""


class _Values:
    """Values by the id of a tensor's reference, with a layer of changes for each open block.

    `layers` begins with the outermost. The layers before a block have the values from its start.
    `order`: for each tensor, the number of tensors that had a value earlier.
    `closed`: the last value of each tensor of a closed block, and the line of the block's call.
    """

    def __init__(self) -> None:
        self.layers: list[dict[int, Value]] = [{}]
        self.order: dict[int, int] = {}
        self.closed: dict[int, tuple[Value, str | None]] = {}

    def at(self, key: int, depth: int | None = None) -> Value | None:
        """Return the present value; with `depth`, the value outside of the block at that depth."""
        for layer in reversed(self.layers if depth is None else self.layers[: depth + 1]):
            if key in layer:
                return layer[key]
        return None

    def set(self, key: int, value: Value, depth: int = -1) -> None:
        """Set the value, by default in the innermost block."""
        self.order.setdefault(key, len(self.order))
        self.layers[depth][key] = value

    def close(self) -> list[int]:
        """Restore the values before the innermost block; return the outer tensors it has written.

        The block's own tensors get the value `_ENDED`."""
        written, line = [], user_line()
        top = self.layers.pop()
        for key in sorted(top, key=self.order.__getitem__):
            before = self.at(key)
            if before is None:
                self.layers[-1][key], self.closed[key] = _ENDED, (top[key], line)
            elif before is not top[key]:
                written.append(key)
        return written

    def with_any(self, values: Container[Value]) -> list[int]:
        """Return the tensors that currently have one of these values, oldest first."""
        now = ChainMap(*reversed(self.layers))
        return sorted([k for k, v in now.items() if v in values], key=self.order.__getitem__)


class _Memory:
    """Values of tensors, by the id of the reference to the holder of the region.

    Attributes:
        regions: the regions of the VM, by handle.
        references: the references in use.
        values: the present value of each tensor.
        homes: the memory that a tensor keeps, for tensors with fixed memory.
        nscratch: the number of homes in scratch memory.
    """

    def __init__(self, vm: VMProtocol) -> None:
        self.regions = regions(vm)
        self.references: dict[int, Reference] = {}
        self.values = _Values()
        self.homes: dict[int, Home] = {}
        self.nscratch = 0


class _Outside:
    """Tensors and queues from before the recording, and objects that must live as long as it.

    Attributes:
        holders: references to all tensors, by id.
        views: all views.
        states: tensors that the function uses and that are not arguments.
        state_views: references to views by which the function may have reached a state, with the
            state.
        keepalive: objects that must live as long as the recorded calls.
        queues: queues with an element that is an input, after the other inputs.
        queue_homes: the memory of these elements.
        constants: tensors with values that the function writes, by type and bytes.
    """

    def __init__(self, vm: VMProtocol, all_regions: Any) -> None:
        self.holders: dict[int, Reference] = {
            id(holder): holder
            for region in all_regions.once()
            if (holder := region.holder) is not None
        }
        self.views = _all_views(vm)
        self.states: list[Allocation] = []
        self.state_views: list[tuple[Reference, Allocation]] = []
        self.keepalive: list[object] = []
        self.queues: list[QueueTensor] = []
        self.queue_homes: set[Home] = set()
        self.constants: dict[tuple[TensorType, bytes], Tensor] = {}


class _Placeholders:
    """Abstract tensors that the function gets instead of arguments.

    Attributes:
        arena: the arena that contains them.
        by_original: placeholders by the id of the tensor.
        originals: tensors by the id of the placeholder.
        inputs: the number of each input by the id of the tensor.
        aliases: references to placeholders, by the id of the reference to an input that the
            function also reads from the environment.
        aliased_inputs: the numbers of these inputs.
        aliased: ids of the references to the placeholders of these inputs.
        types: the numbers of the inputs that have no tensor.
        narguments: number of arguments.
        nelements: number of elements of queues.
    """

    def __init__(self, arena: Arena, inputs: Sequence[Tensor]) -> None:
        self.arena = arena
        self.by_original: dict[int, Tensor] = {}
        self.originals: dict[int, Allocation] = {}
        self.inputs = {id(x.root): i for i, x in enumerate(inputs)}
        self.aliases: dict[int, Reference] = {}
        self.aliased_inputs: set[int] = set()
        self.aliased: set[int] = set()
        self.types: set[int] = set()
        self.narguments = self.nelements = 0

    def clear(self) -> None:
        self.by_original.clear()
        self.originals.clear()
        self.aliased.clear()


class _Storages:
    """Storages without bytes.

    used: the number of used bytes of each storage. of_arguments: the storages of arguments.
    allocating: the set to which a new storage is added.
    """

    def __init__(self) -> None:
        self.used: dict[StorageHandle, int] = {}
        self.of_arguments: set[StorageHandle] = set()
        self.allocating: set[StorageHandle] = set()


class Recorder:
    """Abstract VM: it knows types, holds no bytes, and records launches instead of running them.

    Attributes:
        calls: the calls recorded so far, of the innermost open block.
        scopes: open blocks and functions.
        memory: the present values of tensors.
        outside: tensors and queues from before, and objects to keep alive.
        placeholders: abstract tensors for `inputs`, one per memory region.
        storages: memory that the function allocates.
        stack: the identity of the stack to which it pushes residuals.
        recomputing: whether calls recompute values of the forward pass.
        high_water: once it is closed, the largest total bytes of simultaneously live tensors.
    """

    what = "a captured function"
    no_value = "it is traced once, so later calls would reuse this value"
    no_repeat = "later calls would not repeat it"
    outer: Mapping[Tape, int] = MappingProxyType({})
    memory_limit = None

    def __init__(
        self,
        vm: VMProtocol,
        inputs: Sequence[Tensor] = (),
        types: Mapping[int, TensorType] = MappingProxyType({}),
    ) -> None:
        prepare_constants(vm)  # before it records the existing values
        random.prepare(vm)
        self.vm, self.name, self.stands_for = vm, vm.name, vm.stands_for
        self.is_same, self.attached = vm.is_same, vm.attached
        self.consumed_size_in_mib, self.estimate = vm.consumed_size_in_mib, vm.estimate
        self.synchronize, self.lock = vm.synchronize, vm.lock
        self.calls: list[Call] = []
        self.stack: Final = object()  # identity of the stack that it pushes residuals to
        self.recomputing = False
        self.high_water = 0
        self.arena = Arena(self, "captured")
        self.scopes = _Scopes()
        self.memory = _Memory(vm)
        self.outside = _Outside(vm, self.memory.regions)
        self.placeholders = _Placeholders(Arena(self, "arguments"), inputs)
        self.storages = _Storages()
        for x in inputs:
            placeholder = self._argument(types.get(id(x), x.root.type))
            self.placeholders.by_original[id(x.root)] = placeholder
            self.placeholders.originals[id(placeholder)] = x.root
            self.placeholder(x, types.get(id(x), x.type))

    @property
    def recorders(self) -> list[Recorder]:
        """This recorder and the enclosing recorders, innermost first."""
        return [self, *(self.vm.recorders if isinstance(self.vm, Recorder) else ())]

    # --- the VM that the function runs on ---------------------------------------------

    def alloc_storage(self, nbytes: int) -> StorageHandle:
        handle = next(_handles)
        self.storages.allocating.add(handle)
        return handle

    def dealloc_storage(self, handle: StorageHandle) -> None:
        """Do nothing: it has no bytes."""

    def tensor_from_storage(
        self, storage: StorageHandle, type: TensorType, offset: int
    ) -> TensorHandle:
        if storage not in self.storages.of_arguments:
            end = offset + rounded(type.nbytes)
            self.storages.used[storage] = max(self.storages.used.get(storage, 0), end)
        return next(_handles)

    def dealloc_tensor(self, handle: TensorHandle) -> None:
        """Do nothing: it has no bytes."""

    def require_open(self) -> None:
        """Do nothing: a recorder is never closed."""

    def launch(
        self, program: Program, args: Sequence[TensorHandle] = (), *, max_steps: int | None = None
    ) -> list[Array]:
        """Record the program's call.

        Raises `CaptureError` if the program is not a single call, or has outputs."""
        name, op, numbers, attributes = _only_call(program)
        params = [self._operand(args[i]) for i in numbers]
        line = user_line()
        if op is not None:
            self._require_writable(op, params)
            out, *operands = params
            ins = [Use(self._value(reference), type) for reference, type in operands]
            if self.scopes.open and self._is_before(id(out[0])):
                self._require_own(out[0])
                self._fix_home(*out)
            outs = [Use(self._new_value(*out), out[1])]
        else:
            for each in params:
                self._fix_home(*each)
            before = [(self.memory.values.at(id(r)), type) for r, type in params]
            ins = [Use(value, type) for value, type in before if value is not None]
            values = {id(r): self._new_value(r, type) for r, type in params}
            outs = [Use(values[id(r)], type) for r, type in params]
        again = self.recomputing and not self.scopes.open  # the position of a block is fixed
        self.calls.append(Call(name, op, attributes, outs, ins, line, again=again))
        return []

    def read(self, handle: TensorHandle, out: Array | None = None) -> Array:
        self._require_live(handle)
        self._refuse_read(read_here())

    def _refuse_read(self, read: Read) -> NoReturn:
        needed = f", which `{read.code}` needs" if read.code else ""
        self.scopes.refused = (
            f"{read.where or user_line()}: cannot read a tensor's value inside {self.what}{needed}:"
            f" {self.no_value}. {read.remedy}"
        )
        raise CaptureError(self.scopes.refused)

    def forget_read(self) -> None:
        """Accept that mlvm itself has caught the error of the last read."""
        self.scopes.refused = ""

    def accept_text(self) -> None:
        """Accept the text of a tensor, which contains no value, where it is only shown.

        Raises `CaptureError` where the program may depend on it."""
        read = text_here()
        self.forget_read()
        if read is not None:
            self._refuse_read(read)

    def require_no_caught_read(self) -> None:
        """Raise `CaptureError` if the function caught the error of a read and continued.

        It would continue differently without the recorder."""
        text = self.scopes.refused
        self.forget_read()
        if text:
            raise CaptureError(f"{text}. The function caught this error and continued")

    def lifted(self, xs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the tensors that the function uses instead of these.

        See `mlvm.eager.transform.trace`."""
        return xs

    def stopped(self, x: Tensor) -> Tensor:
        """Return an alias of the tensor through which no derivative flows."""
        return untracked(x)

    def write(self, handle: TensorHandle, array: Array) -> None:
        """Record a copy of constant values.

        Each launch copies them from a tensor that lives as long as the recorded calls."""
        if scope() is prepare_constants(self.vm).arena:
            self.vm.__class__.write(self.vm, handle, array)
            return
        key = TensorType.of(array), array.tobytes()
        if key not in self.outside.constants:
            recorders = self.recorders
            vm = recorders[-1].vm
            x = Arena(vm, "constant", capacity=array.nbytes).alloc(key[0], Tensor)
            x.prepare()
            vm.__class__.write(vm, x.handle, array)
            self.outside.constants[key] = x
            for each in recorders:
                each.outside.holders[id(_reference_to(x))] = _reference_to(x)
        self.launch(_COPY, (handle, self.outside.constants[key].handle))

    def alloc_tensor(self, type: TensorType) -> TensorHandle:
        raise _refused("allocate a tensor without an arena", ". Use ml.zeros or ml.empty")

    def swap(self, h1: TensorHandle, h2: TensorHandle) -> None:
        raise _refused("swap two tensors", ". Assign new values instead: x[...] = y")

    # --- placeholders -----------------------------------------------------------------

    def placeholder(self, x: Tensor, type: TensorType | None = None) -> Tensor:
        """Return the placeholder of a tensor in the memory of an input.

        Each tensor has one placeholder, which is a view if the tensor is a view. The first call may
        give it a dynamic type."""
        view = self.placeholders.by_original.get(id(x))
        if view is None:
            root = self.placeholders.by_original[id(x.root)]
            view = self.placeholders.arena.view(root, x.type if type is None else type, Tensor)
            view.prepare()
            self.placeholders.by_original[id(x)] = view
            self.placeholders.originals[id(view)] = x
        return view

    def placeholder_of(self, type: TensorType) -> Tensor:
        """Return a placeholder for an additional input that has no tensor."""
        self.placeholders.types.add(self.placeholders.narguments)
        x = self._argument(type)
        self.placeholders.by_original[id(x)] = x
        return x

    def _argument(self, type: TensorType) -> Tensor:
        x = self._argument_tensor(type)
        self._settle(x, "input", self.placeholders.narguments)
        self.placeholders.narguments += 1
        return x

    def _argument_tensor(self, type: TensorType) -> Tensor:
        with overriding(self.storages, "allocating", self.storages.of_arguments):
            x = self.placeholders.arena.alloc(type, Tensor)
        x.tape = None
        return x

    def take(self, queue: QueueTensor) -> tuple[Tensor, ...]:
        """Return placeholders for the next element of the queue, which each launch takes."""
        from mlvm.input.queue_get import NAME

        if self.scopes.frames:
            raise _refused(
                "take an element of a queue in an ml.subroutine", ". Pass it as an argument"
            )
        home = queue.arena.vm
        if home is not self.vm:
            raise CaptureError(
                f"{user_line() or 'here'}: cannot take an element of queue {queue.arena.name!r} "
                f"inside a captured function on another VM: the queue is on {home.name}, the "
                f"function runs on {self.name}. Call it inside `with arena:`, with an arena of "
                f"{home.name}"
            )
        if not queue.in_programs:
            return self._take_ahead(queue)
        element = tuple([self._argument_tensor(type) for type in queue.types])
        for number, x in enumerate(element, self.placeholders.nelements):
            self._settle(x, "element", number)
        self.placeholders.nelements += len(element)
        outs = [self.use(x) for x in element]
        attributes = {"raises": True}
        line = user_line()
        self.calls.append(Call(NAME, None, attributes, outs, [], line, queue=queue.handle))
        self.outside.keepalive.append(queue)
        return element

    def _take_ahead(self, queue: QueueTensor) -> tuple[Tensor, ...]:
        """Return placeholders for an element that this process takes before each launch.

        The element is an input of the launch. Raises `CaptureError` in a block and after an update,
        where the order of effects would differ."""
        homes = [use.value.home for call in self.calls for use in call.outs]
        updated = any(home is not None and home.role in ("input", "state") for home in homes)
        if self.scopes.open or updated:
            where = "in a branch or loop" if self.scopes.open else "after an update"
            raise CaptureError(
                f"{user_line() or 'here'}: cannot take an element {where}: {self.name} has "
                f"separate memory, so elements are taken before the launch. Take it at the start "
                f"of the captured function, or outside, and pass it as an argument"
            )
        element = tuple([self._argument(type) for type in queue.types])
        self.outside.queues.append(queue)
        self.outside.queue_homes.update(map(self.home_of, element))
        self.outside.keepalive.append(queue)
        return element

    # --- updates ----------------------------------------------------------------------

    def update(
        self, call: OneOp, operands: Tensors, types: Types, out: Tensor, tapes: Sequence[Tape]
    ) -> None:
        """Assign a result to `out`, while views or tapes need the old value.

        A view moves to new memory. Any other tensor stays in place, because it may be an argument
        or a state that the caller reads; views of it move to memory with the old value. Raises
        `RetryAfterCopy` if the old value is needed outside of the function or a block.
        """
        views = out.views() if out.base is None else [out]
        for view in views:
            self._require_inside(view, out)
        for depth, opened in enumerate(self.scopes.open):
            needed = any(self._is_from_before(view, opened) for view in views)
            if out.base is None and not needed:
                needed = any(tape.keeps(out, opened.nodes.get(tape, 0)) for tape in tapes)
            if needed:
                raise RetryAfterCopy(out, depth)
        if out.base is not None:
            with self.arena.allocating():
                new = apply(call, *operands)
            self._give(out.arena.view(out, out.type, Tensor), out, (), tapes)
            rebase(out, new)
            out.tape, out.node = new.tape, getattr(new, "node", 0)
        else:
            old = self._old(out)
            self._give(old, out, views, tapes)
            operands = tuple([old if x is out else x for x in operands])
            overwrite(out, call, *operands)
            tape = current().tape
            if tape is None:
                out.tape = None
            else:
                tape.record(call, operands, types, out)

    def make_exclusive(self, x: Tensor) -> None:
        """Give a tensor memory that it does not share with views, tapes or other tensors."""
        tapes = [each for each in live_tapes.copy() if each.within is self]
        if x.base is None:
            self._give(self._copied(x), x, x.views(), tapes)
            return
        new = self._copied(x)
        self._give(x.arena.view(x, x.type, Tensor), x, (), tapes)
        value = self.memory.values.at(id(_reference_to(new)))
        assert value is not None  # the value has just been copied
        exchange(x, new)
        reference = _reference_to(x)
        self.memory.references[id(reference)] = reference
        self.memory.values.set(id(reference), value)

    def _give(
        self, old: Tensor, x: Tensor, views: Sequence[Allocation], tapes: Sequence[Tape]
    ) -> None:
        """Replace x by `old`, a tensor with the old value, in views and tapes."""
        old.tape, old.node = x.tape, getattr(x, "node", 0)
        for view in views:
            rebase(view, old)
        for tape in tapes:  # before the node of an update, which may save the new value
            tape.exchange({id(x): old}, old)

    def _require_inside(self, view: Allocation, updated: Tensor) -> None:
        """Raise `RetryAfterCopy` for a view from outside or a placeholder of the view."""
        if _is_among(view, self.outside.views) or id(view) in self.placeholders.originals:
            raise RetryAfterCopy(self.placeholders.originals.get(id(updated), updated))

    def _old(self, x: Tensor) -> Tensor:
        """Return a tensor with the present value of x, for an update of x."""
        reference = self._reference(x.handle)
        value = self._value(reference)
        if value.home is not None or (self.scopes.open and self._is_before(id(reference))):
            return self._copied(x)
        old, reference = self._new_tensor(x.type)
        self.memory.values.set(id(reference), value)
        return old

    def _copied(self, x: Tensor) -> Tensor:
        """Return a copy that no tape tracks."""
        with context(tape=None), self.arena.allocating():
            return apply(COPY, x)

    def require_own_tape(self, x: Tensor, tape: Tape) -> None:
        """Check an update, in a block, of a tensor that an outer tape tracks.

        Raise `RetryWithCarry` if the tensor is from outside and the block does not carry it,
        because blocks may run never or repeatedly. Raise `GradientError` if the block belongs to a
        function."""
        opened = self.scopes.open[-1] if self.scopes.open else None
        if opened is None or opened.tape is not tape or self._is_new(x):
            return
        if any(each is x for each in opened.carried):
            return
        if not self.scopes.frames or opened.depth != self.scopes.frames[-1]:
            raise RetryWithCarry(x, self.depth - 1)
        raise GradientError(
            f"{user_line() or 'here'}: cannot differentiate an ml.subroutine that updates a "
            f"{x.type} from outside. Pass the tensor as an argument, and return it"
        )

    def _is_new(self, x: Tensor) -> bool:
        """Return whether the tensor was created in the innermost open block."""
        if x.base is not None:
            return not self._is_from_before(x, self.scopes.open[-1])
        return not self._is_before(id(self._reference(x.handle)))

    def _is_before(self, key: int, depth: int = -1) -> bool:
        """Return whether the tensor had a value before that open block, or the innermost block."""
        return self.memory.values.at(key, self.scopes.open[depth].depth) is not None

    def _is_from_before(self, view: Allocation, opened: _Open) -> bool:
        """Return whether the view was created before the open block, and not in a closed block."""
        number = self.scopes.views.numbers.get(id(view), -1)
        place = bisect(self.scopes.closed_views, (number + 1,))
        is_closed = place > 0 and number < self.scopes.closed_views[place - 1][1]
        return number < opened.nviews and not is_closed

    # --- control flow -----------------------------------------------------------------

    @contextmanager
    def block(self, carried: Sequence[Tensor] = ()) -> Iterator[Block]:
        """Record calls into a block, which `control` then runs.

        Tensors of the block cannot be used outside of it. It may update outer tensors in place; a
        tape tracks such an update only if the tensor is `carried`."""
        calls, elements, depth = self.calls, self.placeholders.nelements, self.depth
        block = Block()
        self.calls = block.calls
        nodes = {tape: len(tape.nodes) for tape in live_tapes.copy() if tape.within is self}
        nviews, closed = self.scopes.views.count, self.scopes.closed_views
        opened = _Open(block, depth, current().tape, nodes, nviews, carried)
        self.scopes.open.append(opened)
        self.memory.values.layers.append({})
        try:
            yield block
        finally:
            self.scopes.open.pop()
            self.calls, self.placeholders.nelements = calls, elements
            while closed and closed[-1][0] >= nviews:
                closed.pop()
            closed.append((nviews, self.scopes.views.count))
            written = self.memory.values.close()
            if written:
                self.scopes.writes[block] = written

    @contextmanager
    def function(self, procedure: Procedure) -> Iterator[None]:
        """Record calls into the block of a function."""
        with self.block() as block:
            procedure.block = block
            self.scopes.frames.append(self.depth - 1)
            try:
                yield
            finally:
                self.scopes.frames.pop()

    @property
    def depth(self) -> int:
        """The number of open blocks."""
        return len(self.scopes.open)

    def home_of(self, x: Tensor) -> Home:
        return self.memory.homes[id(_reference_to(x))]

    def as_cell(self, x: Tensor) -> Tensor:
        """Allow functions to update a variable, and return it."""
        self.scopes.cells.add(key := id(_reference_to(x)))
        self.memory.homes[key].shared = True
        return x

    def control(self, name: str, blocks: Sequence[Block], condition: Tensor | None = None) -> None:
        """Record a call that runs blocks: see `Call`."""
        ins = [] if condition is None else [self.use(condition)]
        ins += free_variables(blocks)
        outs: list[Use] = []
        for key in dict.fromkeys(
            key for block in blocks for key in self.scopes.writes.pop(block, [])
        ):
            home = self.memory.homes[key]
            before, after = self.memory.values.at(key), Value(home.type.nbytes, home)
            assert before is not None  # the value is from outside of the blocks
            ins.append(Use(before, home.type))
            self.memory.values.set(key, after)
            outs.append(Use(after, home.type))
        ins = list(dict.fromkeys(ins))
        line = user_line()
        self.calls.append(Call(name, None, NO_ATTRIBUTES, outs, ins, line, blocks=tuple(blocks)))

    def parameter(self, type: TensorType) -> Tensor:
        """Return a tensor for an operand of the open function: memory of the caller."""
        x, reference = self._new_tensor(type)
        home = self.memory.homes[id(reference)] = Home("outer", next(outer_index), type)
        self.scopes.open[-1].block.homes.add(home)
        self._new_value(reference, type)
        return x

    def call(
        self, callee: Procedure, results: Sequence[TensorType], args: Sequence[Tensor]
    ) -> list[Tensor]:
        """Call a function from within the function itself, or from a function that it calls."""
        outputs = self._called("call", results, args)
        call = self.calls[-1]
        call.callee, call.passed = callee, [*call.outs, *call.ins]
        return outputs

    def call_from_outside(
        self, procedures: Sequence[Procedure], results: Sequence[TensorType], args: Sequence[Tensor]
    ) -> list[Tensor]:
        """Call the first of these functions, which calls the remaining functions."""
        outputs = [self.variable(type) for type in results]
        passed = [self.use(x) for x in (*outputs, *args)]
        self.control("call", [procedure.block for procedure in procedures])
        call = self.calls[-1]
        for i, x in enumerate(outputs):
            passed[i] = Use(self._new_value(_reference_to(x), x.type), x.type)
        call.outs += passed[: len(outputs)]
        call.ins = list(dict.fromkeys([*call.ins, *passed[len(outputs) :]]))
        call.callee, call.passed, call.procedures = procedures[0], passed, procedures
        return [self.released(x) for x in outputs]

    def variable(self, type: TensorType, *, outside: bool = False) -> Tensor:
        """Return a tensor for blocks to write, initially without a value.

        With `outside` it belongs to the scope around the open block."""
        x, reference = self._new_tensor(type)
        self._fix_home(reference, type)
        value = self._new_value(reference, type)
        if outside:
            self.memory.values.set(id(reference), value, -2)
        if len(self.scopes.open) > outside:
            self.scopes.open[-1 - outside].block.homes.add(self.memory.homes[id(reference)])
        return x

    def use(self, x: Tensor) -> Use:
        """Return the use of the tensor's present value with the tensor's type."""
        return Use(self.value_of(x), x.type)

    def present_use(self, x: Allocation) -> Use | None:
        """Return the use as `use`, or None if the function has no value for the tensor."""
        reference = None if x.root.region is None else x.root.region.holder
        reference = self.placeholders.aliases.get(id(reference), reference)
        value = self.memory.values.at(id(reference))
        return None if value is None or value is _ENDED else Use(value, x.type)

    def push(self, xs: Sequence[Tensor]) -> Tensor:
        """Save copies of the tensors in a record of residuals, and return the record's number."""
        [number] = self._called(residuals.PUSH, [TensorType(i64)], xs)
        return number

    def pull(
        self, number: Tensor, types: Sequence[TensorType], outside: Reader | None = None
    ) -> list[Tensor]:
        """Return the tensors of a record; for an array of numbers, row i is from record i.

        A record of a different recorder belongs to the same program; a trace reads it with
        `outside`.
        """
        name = residuals.READ_ROWS if number.ndim else residuals.READ
        return self._called(name, types, [number])

    def summed(self, x: Tensor, y: Tensor) -> Tensor:
        """Add records of cotangents, given by number; return the numbers of the sums."""
        [number] = self._called(residuals.ADD, [x.type], [x, y])
        return number

    def _called(self, name: str, types: Sequence[TensorType], xs: Sequence[Tensor]) -> list[Tensor]:
        return self.host_call(name, NO_ATTRIBUTES, types, [self.use(x) for x in xs])

    def host_call(
        self, name: str, attributes: Attributes, types: Sequence[TensorType], ins: list[Use]
    ) -> list[Tensor]:
        """Call a host function that only writes results of these types, and only reads `ins`."""
        results = [self._new_tensor(type) for type in types]
        outs = [Use(self._new_value(reference, x.type), x.type) for x, reference in results]
        self.calls.append(Call(name, None, attributes, outs, ins, user_line(), orderly=True))
        return [x for x, _ in results]

    def call_user(
        self,
        name: str,
        attributes: Attributes,
        types: Sequence[TensorType],
        operands: Sequence[Tensor],
    ) -> list[Tensor]:
        """Call a user's host function, which pushes results of these types."""
        results = self.host_call(name, attributes, types, [self.use(x) for x in operands])
        self.calls[-1].may_raise = self.calls[-1].pushes = True
        return results

    def check(self, condition: Tensor, message: str) -> None:
        """Let each launch raise `CheckError` unless the condition holds."""
        attributes, ins = {"message": message}, [self.use(condition)]
        call = Call(CHECK, None, attributes, [], ins, user_line(), orderly=True, may_raise=True)
        self.calls.append(call)

    def _new_tensor(self, type: TensorType) -> tuple[Tensor, Reference]:
        """Return a new tensor without a value, and the reference to it."""
        x = self.arena.alloc(type, Tensor)
        x.prepare()
        reference = _reference_to(x)
        self.memory.references[id(reference)] = reference
        return x, reference

    def released(self, x: Tensor) -> Tensor:
        """Return a tensor with the variable's value, and invalidate the variable."""
        old, (other, new) = _reference_to(x), self._new_tensor(x.type)
        self.memory.homes[id(new)] = self.memory.homes[id(old)]
        value = self.memory.values.at(id(old))
        assert value is not None  # a variable has one from the start
        self.memory.values.set(id(new), value)
        self.memory.values.set(id(old), _ENDED)
        self.memory.values.closed[id(old)] = value, user_line()
        return other

    def holder_of(self, value: Value) -> Tensor:
        """Return the tensor that currently has that value."""
        [key, *_] = self.memory.values.with_any({value})
        x = self.memory.references[key]()
        assert isinstance(x, Tensor)  # the caller has just read it
        return x

    def is_inside(self, x: Tensor) -> bool:
        """Return whether the tensor was created in the open block, or updated there."""
        key, values = id(self._reference(x.root.handle)), self.memory.values
        before = values.at(key, self.depth - 1)
        return before is None or values.at(key) is not before

    def read_in_blocks(self, ncalls: int) -> list[Tensor]:
        """Return the function's tensors that recent calls of the open block only read.

        These are the calls with numbers of at least `ncalls`."""
        calls = self.calls[ncalls:] if self.scopes.open else []
        written = {use.value for call in calls for use in call.outs}
        read = {use.value for call in calls for use in call.ins} - written
        keys = self.memory.values.with_any(read)
        tensors = [self.memory.references[key]() for key in keys]
        return [x for x in tensors if isinstance(x, Tensor) and x.arena is self.arena]

    @contextmanager
    def substituting(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
        """Let the first tensor of each pair have the value of the second inside the block."""
        values = {id(self._reference(x.handle)): self.use(y).value for x, y in pairs}
        before = {key: self.memory.values.at(key) for key in values}
        for key, value in values.items():
            self.memory.values.set(key, value)
        try:
            yield
        finally:
            for key, old in before.items():
                self.memory.values.set(key, old or _ENDED)

    def value_of(self, x: Tensor) -> Value:
        """Return the tensor's present value. Raises `CaptureError` if it has none."""
        return self._value(self._reference(x.handle))

    def tapes_kept(self) -> AbstractContextManager[None]:
        """Restore the tape entries of tensors from outside after the block."""
        references = *self.outside.holders.values(), *self.outside.views.values()
        outside = [reference() for reference in references]
        # A tensor that another thread is making has no tape yet.
        return entries_kept(
            [x for x in outside if isinstance(x, Tensor) and getattr(x, "tape", None)]
        )

    def escaped_tensors(self) -> list[Tensor]:
        """Return the function's tensors and placeholders that are still alive.

        The recorder first drops all references to placeholders, so only those to which user code
        refers remain.
        """
        self.placeholders.clear()
        alive: list[Allocation] = []
        for key, reference in self.memory.references.items():
            x = reference()
            if (
                x is not None
                and x.region is not None
                and self.outside.holders.get(key) is not reference
            ):
                alive += [x, *x.region.views]
        return [x for x in alive if isinstance(x, Tensor)]

    def line_of(self, x: Tensor) -> str | None:
        """Return the Python line that computed the tensor; None for a placeholder."""
        return self._line_of(id(_reference_to(x)))

    def is_of_body(self, x: Tensor) -> bool:
        """Return whether a block that has been closed created the tensor."""
        return self.memory.values.at(id(_reference_to(x))) is _ENDED

    def _line_of(self, key: int) -> str | None:
        value, of_block = self.memory.values.at(key), None
        if value is _ENDED:
            value, of_block = self.memory.values.closed.get(key, (value, None))
        opened = [call for each in self.scopes.open for call in each.block.calls]
        calls = with_blocks([*self.calls, *opened])
        lines = (call.line for call in calls for use in call.outs if use.value is value)
        return next((line for line in lines if line), of_block)

    def close(self) -> None:
        """Invalidate all tensors of the function."""
        self.high_water = self.arena.high_water
        self.placeholders.clear()
        self.arena.close()
        self.placeholders.arena.close()
        del self.arena, self.placeholders.arena  # these refer to the recorder: break the cycle

    def drop_flow(self) -> None:
        """Drop the recorded calls and values, and thereby the types of the trace."""
        self.calls = []
        self.memory.values = _Values()
        for each in (self.memory.homes, self.scopes.writes):
            each.clear()

    def _require_writable(self, op: Op, params: Sequence[_Operand]) -> None:
        """Raise `ArgumentError` for an op that overwrites an argument that it also reads as state.

        In eager code the two are one tensor. Here they are two tensors in different memory."""
        (out, _), *others = params
        if id(out) in self.placeholders.aliased and any(
            each is out for each, _ in others[op.in_place :]
        ):
            raise ArgumentError(
                "out is an operand; only elementwise ops work in place; omit out="
            ).at(op.name, [type for _, type in others])

    def _require_own(self, reference: Reference) -> None:
        """Raise `CaptureError` for an update of a tensor from outside of a function.

        The variables in `cells` are exempt."""
        if (
            self.scopes.frames
            and self._is_before(id(reference), self.scopes.frames[-1])
            and id(reference) not in self.scopes.cells
        ):
            raise _refused(
                "update a tensor from outside of an ml.subroutine (possibly the state of the "
                "random keys) in place",
                ". Return the new value, and update the tensor outside",
            )

    # --- the tensor of a handle ---------------------------------------------------------

    def _reference(self, handle: TensorHandle) -> Reference:
        """Return the reference to the tensor that holds the handle's region.

        It is the key under which the tensor's values are stored."""
        return self._operand(handle)[0]

    def _operand(self, handle: TensorHandle) -> _Operand:
        """Return the reference to the tensor that holds the handle's region, and the type."""
        self._require_live(handle)
        weak = self.memory.regions.data.get(handle)
        region = weak() if weak is not None else None
        reference = region.holder if region is not None else None
        holder = reference() if reference is not None else None
        if region is None or reference is None or holder is None:
            raise _refused(
                f"use a tensor of another VM, or outside of the arenas of {self.name} (handle "
                f"{handle}),",
                f". The function runs on {self.name}: call it inside `with arena:`, with an arena "
                f"on the VM of its tensors",
            )
        if id(reference) not in self.memory.references:
            self._note_outside(reference, holder)
        reference = self.placeholders.aliases.get(id(reference), reference)
        for type, each in region.handles.items():
            if each == handle:
                return reference, type
        raise HandleError(f"tensor handle {handle} does not exist; it was freed")

    def _note_outside(self, reference: Reference, holder: Allocation) -> None:
        """Record the first use of a tensor from outside."""
        if isinstance(holder.arena, ScratchPad):
            raise _refused(
                "use a tensor of a scratch pad, which may overlap other tensors,",
                ". Pass ml.copy(x)",
            )
        self.memory.references[id(reference)] = reference
        if holder.arena is prepare_constants(self.vm).arena:  # the tensor may be a new constant
            self.outside.holders[id(reference)] = reference
        if self.outside.holders.get(id(reference)) is reference:
            for view in holder.views():
                if _is_among(view, self.outside.views):
                    self.outside.state_views.append((weakref.ref(view), holder))
            number = self.placeholders.inputs.get(id(holder))
            if number is not None:  # an argument that the function also reaches as a state
                self.placeholders.aliased_inputs.add(number)
                own = _reference_to(self.placeholders.by_original[id(holder)])
                self.placeholders.aliased.add(id(own))
                self.placeholders.aliases[id(reference)] = own
                return
            self._settle(holder, "state", len(self.outside.states))
            self.outside.states.append(holder)

    def _require_live(self, handle: TensorHandle) -> None:
        if handle == STALE:
            raise HandleError("a tensor was freed")  # `explain` adds the type and the reason

    def _settle(self, x: Allocation, role: Role, index: int) -> None:
        """Set the tensor's home outside, given by a role and an index."""
        reference = _reference_to(x)
        home = self.memory.homes[id(reference)] = Home(role, index, x.type)
        depth = -1 if role == "element" else 0
        self.memory.values.set(id(reference), Value(x.type.nbytes, home), depth)
        self.memory.references[id(reference)] = reference

    def _fix_home(self, reference: Reference, type: TensorType) -> None:
        """Assign fixed memory to a tensor that a host function or a block updates in place."""
        value = self.memory.values.at(id(reference))
        if value is _ENDED:
            self._value(reference)
        if id(reference) not in self.memory.homes:
            home = self.memory.homes[id(reference)] = Home("scratch", self.memory.nscratch, type)
            self.memory.nscratch += 1
            if value is not None:
                value.home = home

    def _value(self, reference: Reference) -> Value:
        value = self.memory.values.at(id(reference))
        if value is None:
            x = reference()
            if x is not None and x.arena.vm is not self:
                remedy = ". Compute it in the thread that called the function, or before the call"
                raise _refused(
                    "use a tensor that a different thread has computed during the trace", remedy
                )
            raise _refused("read a tensor before its first write", ". Write it first")
        if value is _ENDED:
            line = self._line_of(id(reference)) or user_line() or "here"
            raise CaptureError(
                f"{line}: cannot use a tensor that was created in a loop body, a branch or an "
                f"ml.subroutine outside of it. {FROM_BODY}"
            )
        key, frames = id(reference), self.scopes.frames
        if (
            len(frames) > 1
            and self._is_before(key, frames[-1])
            and not self._is_before(key, frames[0])
            and key not in self.scopes.cells
        ):
            remedy = ". Pass it as an argument"
            raise _refused("use a tensor of an ml.subroutine in another that it calls", remedy)
        return value

    def _new_value(self, reference: Reference, type: TensorType) -> Value:
        home = self.memory.homes.get(id(reference))
        value = Value(type.nbytes, home)
        self.memory.values.set(id(reference), value)
        return value


def _reference_to(x: Allocation) -> Reference:
    region = x.root.region
    if region is None or region.holder is None:
        raise x.stale()
    return region.holder


def _all_views(vm: VMProtocol) -> _Views:
    """Return all views on a VM by weak references, since other threads may free views."""
    return {id(view): weakref.ref(view) for region in regions(vm).once() for view in region.views}


def _is_among(x: Allocation, views: _Views) -> bool:
    reference = views.get(id(x))
    return reference is not None and reference() is x


def _only_call(program: Program) -> tuple[str, Op | None, list[int], Attributes]:
    """Return the call of a one-call program: function, op, argument indices, and attributes.

    Raises `CaptureError` for any other program, and for one with outputs."""
    if not hasattr(program, "single"):
        decoded = [each for code in decode(program).values() for each in code.instructions()]
        loads = decoded[0].arguments if [x.kind for x in decoded] == ["cfunc", "halt"] else None
        only = decoded[0] if decoded else None
        if only is None or only.name is None or loads is None or only.pc != len(loads) + 1:
            raise _refused("launch a program of several calls", ". Launch it outside")
        name = only.name
        if only.at != 0:
            if name in OPS:
                code = read_here().code
                called = f"`{code}`" if code else name
                call = f"call {called}, whose result types depend on values,"
                raise _refused(call, ". Call it outside, or keep the shape, as where(mask, x, 0)")
            rule = f"vm.register({name!r}, fn, result=lambda x: x)"
            raise _refused(
                f"call {name}, a host function without a type rule,",
                f". Register it with a function from operand types to result types, as in "
                f"{rule}, or call it outside",
            )
        op = OPS.get(name.removesuffix(OUT)) if name.endswith(OUT) else None
        program.single = name, op, loads, only.attributes
    return program.single  # type: ignore[no-any-return]


def _refused(what: str, remedy: str = "") -> CaptureError:
    recorder = current_recorder() or Recorder
    where = user_line() or "here"
    return CaptureError(
        f"{where}: cannot {what} inside {recorder.what}: {recorder.no_repeat}{remedy}"
    )


def recording_of(
    vm: VMProtocol,
    inputs: Sequence[Tensor] = (),
    types: Mapping[int, TensorType] = MappingProxyType({}),
) -> AbstractContextManager[Recorder]:
    """Record this thread's launches on the VM inside the block, instead of running them.

    Results have no bytes. Launches on a different VM raise `CaptureError`. Other threads are not
    affected, and may record simultaneously."""
    return recorded_by(Recorder(vm, inputs, types))


R = TypeVar("R", bound=Recorder)


@contextmanager
def recorded_by(recorder: R) -> Iterator[R]:
    """Record like `recording_of`, with that recorder."""
    view_logs.append(recorder.scopes.views)
    try:
        layers = {name: _layer(recorder, name) for name in _REPLACED}
        with context(recorder=recorder), ExitStack() as stack:
            for other in vms():
                if not recorder.vm.is_same(other):
                    refusal = _refusal(recorder, other)
                    layered = observed(other, launch=refusal, read=refusal, write=refusal)
                    stack.enter_context(layered)
            for each in recorder.recorders:
                stack.enter_context(observed(each.vm, **layers))
            stack.enter_context(recorder.arena.allocating())
            yield recorder
            recorder.require_no_caught_read()
    except ValueError as error:
        if isinstance(error.__cause__, CaptureError) and "setting an array element" in str(error):
            raise error.__cause__ from None  # numpy has replaced the error of the read
        raise
    finally:
        view_logs[:] = [each for each in view_logs if each is not recorder.scopes.views]
        recorder.close()


def _layer(recorder: Recorder, name: str) -> Layer:
    """Return a layer that calls the recorder's method of that name in recorded threads."""

    def layer(proceed: Callable[..., Any], *args: Any, **options: Any) -> Any:
        is_recorded = current().recorder is recorder
        return (getattr(recorder, name) if is_recorded else proceed)(*args, **options)

    return layer


def _refusal(recorder: Recorder, other: VMProtocol) -> Layer:
    """Return a layer that rejects tensors of a different VM in recorded threads.

    Handles that the VM has for tensors of a remote VM are not tensors of this VM."""

    def refuse(proceed: Callable[..., Any], first: Any, *args: Any, **options: Any) -> Any:
        handles = (first,) if isinstance(first, int) else args[0] if args else ()
        if current().recorder is recorder and any(each in regions(other) for each in handles):
            raise CaptureError(
                f"{user_line() or 'here'}: cannot use a tensor of VM {other.name!r} inside a "
                f"captured function on VM {recorder.name!r}: later calls would not repeat it. "
                f"Use it outside, and pass its value to the function as an argument"
            )
        return proceed(first, *args, **options)

    return refuse


def refuse_captured(what: str, remedy: str = "") -> None:
    """Raise `CaptureError` if this is called inside a captured function."""
    if current().recorder is not None:
        raise _refused(what, remedy)


@contextmanager
def entries_kept(xs: Sequence[Tensor]) -> Iterator[None]:
    """Restore the tape entries of tensors after the block."""
    entries = [(x, x.tape, getattr(x, "node", 0)) for x in xs]
    try:
        yield
    finally:
        for x, tape, node in entries:
            x.tape, x.node = tape, node


def recomputing() -> AbstractContextManager[None]:
    """Mark calls that a captured function records inside the block as recomputation."""
    recorder = current().recorder
    return nullcontext() if recorder is None else overriding(recorder, "recomputing", True)
