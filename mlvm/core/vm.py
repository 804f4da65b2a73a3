"""A VM in this process: a free store, a function table, and a machine behind one lock."""

from __future__ import annotations

import contextvars
import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from mlvm.core.collecting import uncollected
from mlvm.core.errors import (
    HandleError,
    LimitExceeded,
    MachineError,
    MlvmError,
    ProgramError,
    ShapeError,
    brief,
    takes,
)
from mlvm.core.locks import after_fork, is_mine, new_lock
from mlvm.core.machine import run as machine
from mlvm.core.machine.callee import (
    NO_KERNELS,
    OUT,
    Callee,
    Fused,
    Kernels,
    ResultRule,
    UserFunction,
    Value,
    is_tensor,
)
from mlvm.core.machine.frame import HostFunction, PythonFunction
from mlvm.core.machine.functions import FunctionTable, Instrument
from mlvm.core.machine.fused import Workspace
from mlvm.core.machine.link import Code, bind, link, nargs_of, recheck_calls
from mlvm.core.machine.run import Run, Scheduler
from mlvm.core.machine.verify import verify
from mlvm.core.memory import HOST, Memory
from mlvm.core.op import OPS, Attributes
from mlvm.core.program.program import Program, Variant, is_whole
from mlvm.core.protocol import Estimate, Identity, StorageHandle, TensorHandle
from mlvm.core.store import FreeStore
from mlvm.core.types import Array, TensorType, check_array, check_out

_MOST_LAUNCHES: Final = 50
# Instructions remembered for each program: linked, over all tuples of types; bound, of operands.
_MOST_LINKED: Final = 1 << 13
_MOST_BOUND: Final = 1 << 18
_FEW: Final = 16  # tuples of either, for which the largest program is remembered
_numbers = itertools.count()
_vms: Final = weakref.WeakSet["VM"]()


class VM(Identity):
    """One machine, serving one processor.

    `checked=False` is the raw machine: programs are not verified, arrays written are not
    compared with the tensor's type, and a mistake does whatever numpy makes of it.

    Other machines come in by two doors. `kernels` take the place of the reference kernels, by op
    name. `run` takes the place of the reference loop, `mlvm.core.machine.run.run`, and has its
    signature. Besides, a `scheduler` may run ops beside the program, and tensors may lie in the
    `memory` of a device. Raises `UnknownFunction` for a kernel of no op.

        >>> from mlvm.core.vm import VM
        >>> vm = VM("reference")
        >>> handle = vm.alloc_tensor(ml.TensorType("f32", (2, 3)))
        >>> vm.read(handle).shape, vm.consumed_size_in_mib() * 2**20
        ((2, 3), 24.0)
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        checked: bool = True,
        kernels: Kernels = NO_KERNELS,
        run: Run = machine.run,
        scheduler: Scheduler | None = None,
        memory: Memory = HOST,
    ) -> None:
        super().__init__()
        self.memory = memory
        self.name: str = name or f"vm{next(_numbers)}"
        self.checked = checked
        self.functions = FunctionTable(kernels, memory)
        self._store = self._new_store()
        self._lock = new_lock()
        self._run = run
        self._scheduler = scheduler
        self._linked: dict[int, _Linked] = {}
        self._workspace = Workspace()
        self.depth = 0  # of launches within launches, by host functions
        self.shared = False  # whether `share` lets others write to its tensors
        self._context = contextvars.Context()
        self._context.run(np.seterr, all="ignore")
        _vms.add(self)

    def _new_store(self) -> FreeStore:
        return FreeStore(self.memory)

    @property
    def on_host(self) -> bool:
        """True if tensors are in this process's memory, so that they can be lent and borrowed."""
        return self.memory is HOST

    @property
    def lock(self) -> AbstractContextManager[object]:
        """The lock of the VM: its holder's calls are not interleaved with other threads'."""
        return self._lock

    # --- tensors ---

    def alloc_tensor(self, type: TensorType) -> TensorHandle:
        """Allocate a tensor of zeros, in a new storage aligned to 64 bytes."""
        with self._lock:
            return self._store.alloc_tensor(type)

    def dealloc_tensor(self, handle: TensorHandle) -> None:
        """End the handle, and its storage unless it is a view. Raises `HandleError`.

        Refuses:
            vm.dealloc_tensor(99)  # HandleError
        """
        with self._lock:
            self._store.dealloc_tensor(handle)

    def type_of(self, handle: TensorHandle) -> TensorType:
        """The type of the tensor. Raises `HandleError`.

        Refuses:
            vm.type_of(99)  # HandleError
        """
        return self._store.entry(handle).type

    def read(self, handle: TensorHandle, out: Array | None = None) -> Array:
        """Copy the tensor into `out`, a writable array of its type, or a new array; return that.

        Raises `HandleError`, or `DTypeError`, `ShapeError` and `ArgumentError` for an `out` of
        another type or one that is read-only.

        Refuses:
            vm.read(vm.alloc_tensor(v.type), np.broadcast_to(array[:1], (2,)))  # ArgumentError
            vm.read(vm.alloc_tensor(v.type), np.ones(2))  # DTypeError
            vm.read(99)  # HandleError
            vm.read(vm.alloc_tensor(v.type), array[:1])  # ShapeError
        """
        with self._lock:
            if out is None:
                return self.memory.read(self.array_of(handle))
            check_out(out, self._store.entry(handle).type)
            array = self.array_of(handle)
            np.copyto(out, array if self.on_host else self.memory.read(array))
            return out

    def write(self, handle: TensorHandle, array: Array) -> None:
        """Copy an array of the tensor's own dtype and shape into it.

        Raises `HandleError`, or `DTypeError` and `ShapeError` for an array of another type.

        Refuses:
            vm.write(vm.alloc_tensor(v.type), np.ones(2))  # DTypeError
            vm.write(99, array)  # HandleError
            vm.write(vm.alloc_tensor(v.type), array[:1])  # ShapeError
        """
        with self._lock:
            entry = self._store.entry(handle)
            if self.checked:
                check_array(array, entry.type, f"write to {entry.type}")
            if self._scheduler is not None:
                self._scheduler.overwrite(entry.array)
            self.memory.write(entry.array, array)

    def borrow(self, handle: TensorHandle) -> Array:
        """The tensor's own memory as an array, without a copy, valid until the next launch.

        Only a VM of this process can lend it. Raises `HandleError`.

        Refuses:
            vm.borrow(99)  # HandleError
        """
        return self.array_of(handle).view()

    def array_of(self, handle: TensorHandle) -> Array:
        """The tensor's array in the VM's own memory, once the workers have written it."""
        array = self._store.entry(handle).array
        if self._scheduler is not None:
            self._scheduler.wait([array])
        return array

    def synchronize(self) -> None:
        """Wait until the workers have done all they were given, if there are any.

        Raises the first error that no reader has met yet.
        """
        if self._scheduler is not None:
            self._scheduler.synchronize()

    def swap(self, h1: TensorHandle, h2: TensorHandle) -> None:
        """Exchange what two handles of one type name, without a copy."""
        with self._lock:
            self._store.swap(h1, h2)

    # --- storages ---

    def alloc_storage(self, nbytes: int) -> StorageHandle:
        """A new storage of `nbytes` zeros, aligned to 64 bytes."""
        with self._lock:
            return self._store.alloc_storage(nbytes)

    def storage_over(self, memory: Array) -> StorageHandle:
        """Make a storage over the caller's u8 array, which the caller may write to.

        Before each write the caller calls `make_writable`. The storage keeps the array. Raises
        `ShapeError` or `DTypeError` for any other array, `HandleError` for memory that is a storage
        of this VM already.

        Refuses:
            vm.storage_over(array)  # DTypeError
            vm.storage_over(bytes_of_vm)  # HandleError
            vm.storage_over(np.ones((2, 2), np.uint8))  # ShapeError
        """
        with self._lock:
            return self._store.storage_over(memory)

    def make_writable(self, handles: Sequence[TensorHandle]) -> None:
        """Wait until no worker uses the tensors, whose memory the caller is about to overwrite.
        A running launch is not waited for. With workers it raises `HandleError`.

        Refuses:
            ml.VM(workers=1).make_writable([99])  # HandleError
        """
        if self._scheduler is not None:
            for handle in handles:
                self._scheduler.overwrite(self._store.entry(handle).array)

    def dealloc_storage(self, handle: StorageHandle) -> None:
        """End the storage and every tensor in it. Raises `HandleError`.

        Refuses:
            vm.dealloc_storage(99)  # HandleError
        """
        with self._lock:
            self._store.dealloc_storage(handle)

    def tensor_from_storage(
        self, storage: StorageHandle, type: TensorType, offset: int
    ) -> TensorHandle:
        """A tensor that views the storage from byte `offset` on; nothing is copied.

        Raises `HandleError`, or `ShapeError` if it leaves the storage or is not aligned.

        Refuses:
            vm.tensor_from_storage(99, v.type, 0)  # HandleError
            vm.tensor_from_storage(vm.alloc_storage(4), v.type, 0)  # ShapeError
        """
        if not isinstance(type, TensorType) or not isinstance(offset, int):
            raise ShapeError(f"a view is of a TensorType at an int, not of {type!r} at {offset!r}")
        with self._lock:
            return self._store.tensor_from_storage(storage, type, offset)

    def consumed_size_in_mib(self) -> float:
        """The bytes of all storages, exactly, in units of 2**20."""
        return self._store.consumed / 2**20

    def share(self, handle: TensorHandle, other: VM) -> TensorHandle:
        """A handle on another VM of this process for the same memory, without a copy.

        Both VMs count the whole storage it lies in, and see each other's writes: whoever shares
        takes care of the order. Raises `HandleError`.

        Refuses:
            vm.share(99, dry)  # HandleError
        """
        if not isinstance(other, VM):
            raise HandleError(f"a tensor is shared with a VM of this process, not with {other!r}")
        if other.memory.device != self.memory.device:
            here, there = self.memory.device, other.memory.device
            raise HandleError(f"a tensor on {here} is not shared with {other.name} on {there}")
        self.array_of(handle)
        with other._lock:
            self.shared = other.shared = True
            return other._store.adopt(self._store.entry(handle))

    def keep(self, nbytes: int) -> None:
        """Account for bytes that a host function keeps beside tensors, or frees (< 0), in a launch
        of a VM that has limits."""

    # --- functions ---

    def register(
        self,
        name: str,
        fn: HostFunction,
        *,
        nparams: int | None = None,
        nresults: int | None = None,
        result: ResultRule | None = None,
    ) -> None:
        """Make `fn` the host function of that name, in place of any host function that had it.

        It is called with a `Frame`. Where `nparams` or `nresults` are given, the verifier and
        the machine hold every call to them. Programs see the change with their next call.

        `result` is its type rule: a function from the types of its operands, and its attributes as
        keywords, to the type of its result or a tuple of types. With it `ml.call` works in captured
        functions and transformations. Each call checks the results against it.
        """
        if not isinstance(name, str):
            raise MachineError(f"register: expected a name as str, got {brief(name)}")
        if name.removesuffix(OUT) in OPS or name == Fused.name:
            raise MachineError(f"register: {name!r} is an op of mlvm; choose another name")
        if isinstance(fn, np.ufunc):
            raise MachineError(
                f"{name}: expected a function of a frame, got numpy's {fn.__name__}; write "
                f"lambda frame: frame.push(np.{fn.__name__}(frame.param(0)))"
            )
        if not takes(fn, 1):
            raise MachineError(f"{name}: expected a function of a frame, got {brief(fn)}")
        for number in (nparams, nresults):
            if number is not None and not is_whole(number):
                raise MachineError(f"{name}: expected a number of values or None, got {number!r}")
        if result is not None and (not callable(result) or isinstance(result, TensorType)):
            raise MachineError(
                f"{name}: expected a function of types as result, got {brief(result)}; write "
                f"result=lambda x: ..."
            )
        callee = PythonFunction(name, fn, nparams, nresults)
        callee.result = result
        self.register_callees({name: callee})

    def result_types(
        self, name: str, operands: Sequence[TensorType], attributes: Attributes
    ) -> tuple[TensorType, ...] | None:
        """Return the types of a host function's results by its type rule; None if it has none.
        Raises `UnknownFunction`, `MachineError` if the rule fails.

        Refuses:
            vm.result_types("nothing", (), {})  # UnknownFunction
        """
        callee = self.functions.binding(name).callee
        if not isinstance(callee, UserFunction):
            return None
        return callee.result_types(operands, attributes)

    def register_callees(self, callees: Mapping[str, Callee]) -> None:
        """Register functions of any kind under their names, as `register` does for Python's."""
        with self._lock:
            for name, callee in callees.items():
                self.functions.register(name, callee)
            self._forget_links()

    def remove(self, name: str) -> None:
        """Take the function of that name out of the table. Raises `UnknownFunction`.

        Refuses:
            vm.remove("nothing")  # UnknownFunction
        """
        with self._lock:
            self.functions.remove(name)
            self._forget_links()

    @contextmanager
    def instrumented(self, instrument: Instrument) -> Iterator[None]:
        """Inside the block the instrument is called before and after each function, and may give
        results in its place. Raises `MachineError` inside another such block.

        Refuses:
            within(vm.instrumented(v), lambda: within(vm.instrumented(v), v.item))  # MachineError
        """
        with self._lock:
            if self.functions.instrument is not None:
                raise MachineError(f"{self.name} has an instrument already")
            self._watch(instrument)
        try:
            yield
        finally:
            self.quiesce()
            with self._lock:
                self._watch(None)

    def _watch(self, instrument: Instrument | None) -> None:
        self.functions.watch(instrument)

    def close(self) -> None:
        """End the workers after their work, all tensors and storages, and what is attached. Later
        uses raise an error that names the VM; to free does nothing. Idempotent."""
        fast_path = getattr(self, "fast_path", None)  # of a native VM
        with self._lock:
            if self.depth or (fast_path is not None and fast_path.is_running()):
                raise MachineError(f"{self.name} cannot be closed in a launch; close it after")
        if self._scheduler is not None:
            self._scheduler.close()
        with self._lock:
            self._linked.clear()
            self._store.close(f"VM {self.name!r} was closed")
            self._attached.clear()

    def require_open(self) -> None:
        """Raise `MachineError` if the VM was closed.

        Refuses:
            closed_vm.require_open()  # MachineError
        """
        self._store.require_open()

    def quiesce(self) -> None:
        """Wait until the workers have done all they were given, and raise none of their errors."""
        if self._scheduler is not None:
            self._scheduler.drain()

    # --- launch ---

    def launch(
        self, program: Program, args: Sequence[TensorHandle] = (), *, max_steps: int | None = None
    ) -> list[Array]:
        """Run the program on the tensors `args`; return copies of its outputs.

        A launch on a busy VM waits. A program is verified once for each combination of argument
        types. Raises `HandleError`, errors of `verify`, ops and host functions, and `LimitExceeded`
        after `max_steps` instructions. After an error the VM holds as many bytes as before, and
        completed writes stay.

        Refuses:
            vm.launch(returning, [99])  # HandleError
            vm.launch(endless_program, max_steps=9)  # LimitExceeded
        """
        with self._lock:
            self.depth = depth = self.depth + 1
            try:
                try:
                    handles = tuple(args)
                    code, operands = self._linked[id(program)].bound[handles]
                except KeyError:
                    try:
                        code, operands = self._bind(program, handles)
                    except MlvmError as error:
                        raise error.with_traceback(None) from None
                except TypeError:  # not iterable, or not hashable
                    raise HandleError(
                        f"launch: expected tensor handles, got {brief(args)}"
                    ) from None
                if max_steps is not None and not isinstance(max_steps, int):
                    raise MachineError(f"max_steps is an int or None, not {max_steps!r}")
                if depth > _MOST_LAUNCHES:
                    raise LimitExceeded(f"{_MOST_LAUNCHES} launches lie within each other")
                context = self._context if depth == 1 else self._context.copy()
                outputs = context.run(
                    self._run,
                    code,
                    operands,
                    self._store,
                    self.functions,
                    max_steps,
                    self._scheduler,
                )
                return self._outputs(outputs) if outputs else []
            finally:
                self.depth = depth - 1

    def estimate(self, program: Program, arg_types: Sequence[TensorType] = ()) -> Estimate:
        """Estimate the cost of a launch on arguments of these types, without running it.

        A loop counts as one round, and both sides of a jump count. A function counts for each call
        that does not come from within itself. What depends on values counts nothing. Raises what
        `verify` raises.
        """
        types = tuple(arg_types) if isinstance(arg_types, Sequence) else (arg_types,)
        if not isinstance(program, Program) or not all(isinstance(t, TensorType) for t in types):
            raise ProgramError(f"an estimate is of a Program and types, not {program!r}, {types!r}")
        return Estimate(*verify(program, self.functions, types, by_type=True).cost)

    def _outputs(self, stack: list[Value]) -> list[Array]:
        """Copies of the Tensors on the stack."""
        arrays = list(filter(is_tensor, stack))
        if self._scheduler is not None:
            self._scheduler.wait(arrays)
        return list(map(self.memory.read, arrays))

    def _bind(
        self, program: Program, args: tuple[TensorHandle, ...]
    ) -> tuple[Code, tuple[Array, ...]]:
        """The program linked for these arguments' types, and their arrays; both remembered."""
        if not args:
            self._store.require_open()
        if isinstance(program, Variant):
            return self._bind_variant(program, args)
        entries = [self._store.entry(handle) for handle in args]
        types = tuple([entry.type for entry in entries])
        linked = self._linked.get(id(program))
        code = linked.codes.get(types) if linked is not None else None
        if code is None:
            if not isinstance(program, Program):
                raise ProgramError(f"launch: expected a Program, got {program!r}")
            with uncollected():
                verdict = verify(program, self.functions, types) if self.checked else None
                code = link(program, self.functions, verdict, deferred=self._scheduler is not None)
            linked = linked or self._remember(program)
            if len(linked.codes) >= max(_MOST_LINKED // (linked.size + 1), _FEW):
                linked.codes.clear()
            linked.codes[types] = code
        assert linked is not None
        if not self.checked and linked.nargs > len(args):
            raise ProgramError(f"the program loads {linked.nargs} arguments of {len(args)}")
        operands = tuple([entry.array for entry in entries[: linked.nargs]])
        try:
            bound = next(reversed(linked.bound.values()), None)
        except RuntimeError:  # the garbage collector ran a finalizer, which has cleared it
            bound = None
        code = bind(code, operands, self._workspace, checked=self.checked, bound=bound)
        if len(linked.bound) >= max(_MOST_BOUND // (linked.size + 1), _FEW):
            linked.bound.clear()
        linked.bound[args] = code, operands
        self._store.caches[id(program)] = linked.bound
        return code, operands

    def _bind_variant(
        self, program: Variant, args: tuple[TensorHandle, ...]
    ) -> tuple[Code, tuple[Array, ...]]:
        """As `_bind`, for a program that the loop in C has made ready but for its integers."""
        operands = tuple([each.array for each in map(self._store.entry, args)])
        bind_variant = self._run.bind_variant  # type: ignore[attr-defined]
        code: Code = bind_variant(program, operands, self.functions, self._workspace)
        linked = self._linked.get(id(program)) or self._remember(program)
        if len(linked.bound) >= _FEW:
            linked.bound.clear()
        linked.bound[args] = code, operands
        self._store.caches[id(program)] = linked.bound
        return code, operands

    def _remember(self, program: Program) -> _Linked:
        """A new entry for the program, forgotten when the program dies."""
        key, me = id(program), weakref.ref(self)

        def forget(_: weakref.ref[Program]) -> None:
            vm = me()
            if vm is not None:
                vm._linked.pop(key, None)
                vm._store.caches.pop(key, None)

        size = nargs = 0
        if not isinstance(program, Variant):
            size = sum(len(function.code) for function in program.functions.values())
            nargs = nargs_of(program)
        linked = self._linked[key] = _Linked(size, nargs, weakref.ref(program, forget))
        return linked

    def _forget_links(self) -> None:
        """Names may mean other functions now."""
        for linked in list(self._linked.values()):  # programs may die meanwhile
            if self.depth and self.checked:
                bound = list(linked.bound.values())  # a finalizer may clear it meanwhile
                for code in [*linked.codes.values(), *(code for code, _ in bound)]:
                    recheck_calls(code)
            linked.codes.clear()
            linked.bound.clear()


def live_vms() -> list[VM]:
    """Return the VMs of this process that have not been freed."""
    return list(_vms)


@after_fork
def _leave_others() -> None:
    """In a forked process: what other threads ran is over."""
    for vm in _vms:
        if vm.depth and not is_mine(vm._lock):
            vm.depth, vm._context = 0, vm._context.copy()


@dataclass(slots=True)
class _Linked:
    """Cache of a program's launches on a VM.

    `size`: how many instructions it has. `nargs`: how many arguments it uses. A `Variant` has no
    use for them. `program` refers to it without keeping it. `codes`: the program linked, by
    argument types. `bound`: code and operands by handles, until one may name another array.
    """

    size: int
    nargs: int
    program: weakref.ref[Program]
    codes: dict[tuple[TensorType, ...], Code] = field(default_factory=dict)
    bound: dict[tuple[int, ...], tuple[Code, tuple[Array, ...]]] = field(default_factory=dict)
