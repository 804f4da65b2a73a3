"""VM in this process: a free store, a function table and a machine, protected by one lock."""

from __future__ import annotations

import contextvars
import itertools
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from mlvm.core.collecting import uncollected
from mlvm.core.errors import (
    HandleError,
    LimitExceededError,
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
from mlvm.core.machine.link import LinkedCode, bind, link, nargs_of, recheck_calls
from mlvm.core.machine.run import Run, Scheduler
from mlvm.core.machine.verify import verify
from mlvm.core.memory import HOST, Memory
from mlvm.core.op import OPS, Attributes
from mlvm.core.program.program import Program, Variant, is_whole
from mlvm.core.protocol import Estimate, StorageHandle, TensorHandle, VMIdentity
from mlvm.core.store import FreeStore
from mlvm.core.types import Array, TensorType, check_array, check_out

_MOST_BOUND: Final = 1 << 18  # instructions of a program that are bound to handles
_numbers = itertools.count()
_vms: Final = weakref.WeakSet["VM"]()


class VM(VMIdentity):
    """Virtual machine that runs programs on one device of this process.

    `name`: name for messages; by default a new one.
    `checked`: False skips checks. Programs are not verified, arrays are not compared with the
        tensor's type when they are written, and the effect of a mistake is undefined.
    `kernels`: kernels by op name that replace the reference kernels.
    `run`: interpreter loop with the signature of `mlvm.core.machine.run.run`, which it replaces.
    `scheduler`: runs ops asynchronously on workers; None runs them in the program's order.
    `memory`: memory that holds the tensors, such as the memory of a GPU.

    Raises `UnknownFunctionError` if `kernels` names an unknown op.

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
        self._lock = self._new_lock()
        self.instrument: Instrument | None = None
        self._run = run
        self._scheduler = scheduler
        self._linked: dict[int, _Linked] = {}
        self._workspace = Workspace()
        self.depth = 0  # nesting depth of launches that host functions make
        self.shared = False  # True once `share` has given tensors to a different VM
        self._context = contextvars.Context()
        self._context.run(np.seterr, all="ignore")
        _vms.add(self)

    def _new_lock(self) -> threading.RLock:
        return new_lock()

    def _new_store(self) -> FreeStore:
        return FreeStore(self.memory)

    @property
    def on_host(self) -> bool:
        """True if the tensors are in this process's memory, where they can be lent and borrowed."""
        return self.memory is HOST

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Return the lock of the VM; while a thread holds it, calls of other threads wait."""
        return self._lock

    # --- tensors ---

    def alloc_tensor(self, type: TensorType) -> TensorHandle:
        """Allocate a tensor of zeros, in a new storage aligned to 64 bytes."""
        with self._lock:
            return self._store.alloc_tensor(type)

    def dealloc_tensor(self, handle: TensorHandle) -> None:
        """Free the handle, and the storage unless the tensor is a view. Raises `HandleError`.

        Invalid calls:
            vm.dealloc_tensor(99)  # HandleError
        """
        with self._lock:
            self._store.dealloc_tensor(handle)

    def type_of(self, handle: TensorHandle) -> TensorType:
        """Return the type of the tensor. Raises `HandleError`.

        Invalid calls:
            vm.type_of(99)  # HandleError
        """
        return self._store.entry(handle).type

    def read(self, handle: TensorHandle, out: Array | None = None) -> Array:
        """Copy the tensor into `out`, or into a new array, and return that array.

        `out` must be a writable array of the tensor's type. Raises `HandleError`; for another
        `out`, `DTypeError`, `ShapeError` or `ArgumentError`.

        Invalid calls:
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
        """Copy an array of the tensor's own dtype and shape into the tensor.

        Raises `HandleError`, or `DTypeError` and `ShapeError` for an array of a different type.

        Invalid calls:
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
        """Return the tensor's own memory as an array, without a copy; valid until the next launch.

        Only a VM in this process can lend memory. Raises `HandleError`.

        Invalid calls:
            vm.borrow(99)  # HandleError
        """
        return self.array_of(handle).view()

    def array_of(self, handle: TensorHandle) -> Array:
        """Return the tensor's array in the VM's memory, after pending writes of the workers."""
        array = self._store.entry(handle).array
        if self._scheduler is not None:
            self._scheduler.wait([array])
        return array

    def synchronize(self) -> None:
        """Wait until the workers have finished all pending work.

        Raises the first error of the workers that was not raised before.
        """
        if self._scheduler is not None:
            self._scheduler.synchronize()

    def swap(self, h1: TensorHandle, h2: TensorHandle) -> None:
        """Exchange the tensors of two handles of the same type, without a copy."""
        with self._lock:
            self._store.swap(h1, h2)

    # --- storages ---

    def alloc_storage(self, nbytes: int) -> StorageHandle:
        """Allocate a storage of `nbytes` zeros, aligned to 64 bytes."""
        with self._lock:
            return self._store.alloc_storage(nbytes)

    def storage_over(self, memory: Array) -> StorageHandle:
        """Create a storage over the caller's u8 array, which the caller may write to.

        The caller calls `make_writable` before each write. The storage keeps the array alive.
        Raises `ShapeError` or `DTypeError` for any other array, `HandleError` for this VM's memory.

        Invalid calls:
            vm.storage_over(array)  # DTypeError
            vm.storage_over(bytes_of_vm)  # HandleError
            vm.storage_over(np.ones((2, 2), np.uint8))  # ShapeError
        """
        with self._lock:
            return self._store.storage_over(memory)

    def make_writable(self, handles: Sequence[TensorHandle]) -> None:
        """Wait until no worker uses the tensors, which the caller is about to overwrite.

        It does not wait for a running launch. A VM with workers raises `HandleError`.

        Invalid calls:
            ml.VM(workers=1).make_writable([99])  # HandleError
        """
        if self._scheduler is not None:
            for handle in handles:
                self._scheduler.overwrite(self._store.entry(handle).array)

    def dealloc_storage(self, handle: StorageHandle) -> None:
        """Free the storage and every tensor in it. Raises `HandleError`.

        Invalid calls:
            vm.dealloc_storage(99)  # HandleError
        """
        with self._lock:
            self._store.dealloc_storage(handle)

    def tensor_from_storage(
        self, storage: StorageHandle, type: TensorType, offset: int
    ) -> TensorHandle:
        """Create a tensor that views the storage from byte `offset`, without a copy.

        Raises `HandleError`, or `ShapeError` if the tensor exceeds the storage or is not aligned.

        Invalid calls:
            vm.tensor_from_storage(99, v.type, 0)  # HandleError
            vm.tensor_from_storage(vm.alloc_storage(4), v.type, 0)  # ShapeError
        """
        if not isinstance(type, TensorType) or not isinstance(offset, int):
            raise ShapeError(
                f"expected a TensorType and an int offset, got {type!r} and {offset!r}"
            )
        with self._lock:
            return self._store.tensor_from_storage(storage, type, offset)

    def consumed_size_in_mib(self) -> float:
        """Return the exact size of all storages, in units of 2**20 bytes."""
        return self._store.consumed / 2**20

    def share(self, handle: TensorHandle, other: VM) -> TensorHandle:
        """Create a handle for the tensor on a different VM of this process, without a copy.

        Both VMs count the whole storage, and each sees the writes of the other; the caller must
        order these writes. Raises `HandleError`.

        Invalid calls:
            vm.share(99, dry)  # HandleError
        """
        if not isinstance(other, VM):
            raise HandleError(f"share: expected a VM of this process, got {other!r}")
        if other.memory.device != self.memory.device:
            here, there = self.memory.device, other.memory.device
            raise HandleError(
                f"share: the VMs are on {here} and {there} ({other.name}); copy the tensor"
            )
        self.array_of(handle)
        with other._lock:
            self.shared = other.shared = True
            return other._store.adopt(self._store.entry(handle))

    def keep(self, nbytes: int) -> None:
        """Account for bytes that a host function allocates outside of tensors, or frees (< 0).

        Only a launch of a VM with limits counts them.
        """

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
        """Register `fn` as the host function of that name, replacing an earlier host function.

        `name`: name that programs call; names of mlvm's ops are not allowed.
        `fn`: function of a `Frame`.
        `nparams`: number of parameters, None for any; the verifier and the machine check each call.
        `nresults`: number of results, None for any; also checked for each call.
        `result`: type rule, a function of the operands' types, with the attributes as keyword
            arguments, that returns the type of the result or a tuple of types. `ml.host_call` needs
            it in captured functions and transformations. Each call checks the results against it.

        Programs use the new function from the next call on.
        """
        if not isinstance(name, str):
            raise MachineError(f"register: expected a name as str, got {brief(name)}")
        if name.removesuffix(OUT) in OPS or name == Fused.name:
            raise MachineError(f"register: {name!r} is an op of mlvm; choose a different name")
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
        """Return the types of a host function's results by the type rule; None if it has no rule.

        Raises `UnknownFunctionError`, or `MachineError` if the rule fails.

        Invalid calls:
            vm.result_types("nothing", (), {})  # UnknownFunctionError
        """
        callee = self.functions.binding(name).callee
        if not isinstance(callee, UserFunction):
            return None
        return callee.result_types(operands, attributes)

    def register_callees(self, callees: Mapping[str, Callee]) -> None:
        """Register functions of any kind by name, as `register` does for Python functions."""
        with self._lock:
            for name, callee in callees.items():
                self.functions.register(name, callee)
            self._forget_links()

    def remove(self, name: str) -> None:
        """Remove the function of that name from the table. Raises `UnknownFunctionError`.

        Invalid calls:
            vm.remove("nothing")  # UnknownFunctionError
        """
        with self._lock:
            self.functions.remove(name)
            self._forget_links()

    @contextmanager
    def instrumented(self, instrument: Instrument) -> Iterator[None]:
        """Call the instrument before and after each function inside the block.

        The instrument may replace results. Raises `MachineError` in an outer block of this kind.

        Invalid calls:
            within(vm.instrumented(v), lambda: within(vm.instrumented(v), v.item))  # MachineError
        """
        with self._lock:
            if self.instrument is not None:
                raise MachineError(f"{self.name} already has an instrument; leave its block first")
            self.instrument = instrument
            self._watch(instrument)
        try:
            yield
        finally:
            self.quiesce()
            with self._lock:
                self.instrument = None
                self._watch(None)

    def _watch(self, instrument: Instrument | None) -> None:
        self.functions.watch(instrument)

    def close(self) -> None:
        """Finish the workers' pending work, then free all tensors, storages and attached objects.

        Later uses, and calls that wait for a queue of this VM, raise an error that names the VM.
        Freeing a handle does nothing. Idempotent.
        """
        fast_path = getattr(self, "fast_path", None)  # of a native VM
        with self._lock:
            if self.depth or (fast_path is not None and fast_path.is_running()):
                raise MachineError(
                    f"{self.name} cannot be closed during a launch; close it afterwards"
                )
        if self._scheduler is not None:
            self._scheduler.close()
        why = f"VM {self.name!r} was closed"
        with self._lock:
            if fast_path is not None:
                fast_path.closed = True
            self._linked.clear()
            self._store.close(why)
        self._close_attached(why)
        self._attached.clear()

    def require_open(self) -> None:
        """Raise `MachineError` if the VM was closed.

        Invalid calls:
            closed_vm.require_open()  # MachineError
        """
        self._store.require_open()

    def quiesce(self) -> None:
        """Wait until the workers have finished all pending work; do not raise its errors."""
        if self._scheduler is not None:
            self._scheduler.drain()

    # --- launch ---

    def launch(
        self, program: Program, args: Sequence[TensorHandle] = (), *, max_steps: int | None = None
    ) -> list[Array]:
        """Run the program on the tensors `args`; return copies of the outputs.

        A launch waits while the VM is busy. A program is verified once per combination of argument
        types. After an error the VM holds as many bytes as before, but completed writes remain.

        Raises `HandleError`, errors of `verify`, ops and host functions, and `LimitExceededError`
        after `max_steps` instructions.

        Invalid calls:
            vm.launch(returning, [99])  # HandleError
            vm.launch(endless_program, max_steps=9)  # LimitExceededError
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
                except TypeError:  # `args` are not iterable, or not hashable
                    raise HandleError(
                        f"launch: expected tensor handles, got {brief(args)}"
                    ) from None
                if max_steps is not None and not isinstance(max_steps, int):
                    raise MachineError(f"expected max_steps as an int or None, got {max_steps!r}")
                if depth > 50:  # below Python's limit of recursion
                    raise LimitExceededError(
                        f"launches are nested more than {depth - 1} deep; do not launch "
                        "from host functions"
                    )
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

        A loop counts as one iteration, a function for each call that is not recursive, and both
        branches of a jump. Value-dependent costs are not counted. Raises the errors of `verify`.
        """
        types = tuple(arg_types) if isinstance(arg_types, Sequence) else (arg_types,)
        if not isinstance(program, Program) or not all(isinstance(t, TensorType) for t in types):
            raise ProgramError(
                f"estimate: expected a Program and types, got {program!r} and {types!r}"
            )
        return Estimate(*verify(program, self.functions, types, by_type=True).cost)

    def _outputs(self, stack: list[Value]) -> list[Array]:
        """Return copies of the Tensors on the stack."""
        arrays = list(filter(is_tensor, stack))
        if self._scheduler is not None:
            self._scheduler.wait(arrays)
        return list(map(self.memory.read, arrays))

    def _bind(
        self, program: Program, args: tuple[TensorHandle, ...]
    ) -> tuple[LinkedCode, tuple[Array, ...]]:
        """Return the linked program for the argument types and the argument arrays, both cached."""
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
            if len(linked.codes) >= max((1 << 13) // (linked.size + 1), 16):
                linked.codes.clear()
            linked.codes[types] = code
        assert linked is not None
        if not self.checked and linked.nargs > len(args):
            raise ProgramError(
                f"expected {linked.nargs} arguments, which the program loads, got {len(args)}"
            )
        operands = tuple([entry.array for entry in entries[: linked.nargs]])
        try:
            bound = next(reversed(linked.bound.values()), None)
        except RuntimeError:  # a finalizer in the garbage collector has cleared it
            bound = None
        code = bind(code, operands, self._workspace, checked=self.checked, bound=bound)
        if len(linked.bound) >= max(_MOST_BOUND // (linked.size + 1), 16):
            linked.bound.clear()
        linked.bound[args] = code, operands
        self._store.caches[id(program)] = linked.bound
        return code, operands

    def _bind_variant(
        self, program: Variant, args: tuple[TensorHandle, ...]
    ) -> tuple[LinkedCode, tuple[Array, ...]]:
        """Bind as `_bind` does, for a program that the C loop has prepared except for integers."""
        operands = tuple([each.array for each in map(self._store.entry, args)])
        bind_variant = self._run.bind_variant  # type: ignore[attr-defined]
        code: LinkedCode = bind_variant(program, operands, self.functions, self._workspace)
        linked = self._linked.get(id(program)) or self._remember(program)
        if len(linked.bound) >= 16:
            linked.bound.clear()
        linked.bound[args] = code, operands
        self._store.caches[id(program)] = linked.bound
        return code, operands

    def _remember(self, program: Program) -> _Linked:
        """Create a cache entry for the program, which is removed when the program is freed."""
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
        """Discard linked code, because names may refer to other functions now."""
        for linked in list(self._linked.values()):  # programs may be freed meanwhile
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
    """Abandon the launches of other threads, which do not exist in a forked process."""
    for vm in _vms:
        if vm.depth and not is_mine(vm._lock):
            vm.depth, vm._context = 0, vm._context.copy()


@dataclass(slots=True)
class _Linked:
    """Cache of a program's launches on a VM.

    `size`: number of instructions of the program.
    `nargs`: number of arguments that it uses; a `Variant` uses neither.
    `program`: weak reference to the program.
    `codes`: linked code by argument types.
    `bound`: code and operands by handles, until a handle may refer to a different array.
    """

    size: int
    nargs: int
    program: weakref.ref[Program]
    codes: dict[tuple[TensorType, ...], LinkedCode] = field(default_factory=dict)
    bound: dict[tuple[int, ...], tuple[LinkedCode, tuple[Array, ...]]] = field(default_factory=dict)
