"""A VM in this process: a free store, a function table, and a machine behind one lock."""

from __future__ import annotations

import contextvars
import itertools
import threading
import weakref
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from mlvm.core import machine
from mlvm.core.errors import DTypeError, HandleError, ShapeError
from mlvm.core.functions import FunctionTable, Value
from mlvm.core.machine import Linked
from mlvm.core.program import Program
from mlvm.core.protocol import StorageHandle, TensorHandle
from mlvm.core.store import FreeStore
from mlvm.core.types import Array, TensorType
from mlvm.core.verify import verify

_BOUND_LIMIT: Final = 4096  # operand tuples remembered for each program
_numbers = itertools.count()


class VM:
    """One machine, serving one processor.

    `attachments` is for the layers above: what they keep there ends with the VM.
    `checked=False` is the raw machine: programs are not verified, arrays written are not
    compared with the tensor's type, and a mistake does whatever numpy makes of it.
    """

    def __init__(self, name: str | None = None, *, checked: bool = True) -> None:
        self.name: str = name or f"vm{next(_numbers)}"
        self.checked = checked
        self.attachments: dict[str, Any] = {}
        self.functions = FunctionTable()
        self._store = self._new_store()
        self._lock = threading.RLock()
        self._linked: dict[int, Linked] = {}
        self._with_bindings: dict[int, Linked] = {}
        self._running = False
        self._context = contextvars.Context()
        self._context.run(np.seterr, all="ignore")

    def _new_store(self) -> FreeStore:
        return FreeStore()

    # --- tensors ---

    def alloc_tensor(self, type: TensorType) -> TensorHandle:
        """A new tensor of zeros, in a storage of its own aligned to 64 bytes."""
        with self._lock:
            return self._store.alloc_tensor(type)

    def dealloc_tensor(self, handle: TensorHandle) -> None:
        """End the handle, and its storage unless it is a view. Raises `HandleError`."""
        with self._lock:
            self._store.dealloc_tensor(handle)
            self._forget_bindings()

    def type_of(self, handle: TensorHandle) -> TensorType:
        """The type of the tensor. Raises `HandleError`."""
        return self._store.entry(handle).type

    def read(self, handle: TensorHandle) -> Array:
        """A copy of the tensor. Raises `HandleError`."""
        with self._lock:
            return self._store.entry(handle).array.copy()

    def write(self, handle: TensorHandle, array: Array) -> None:
        """Copy an array of the tensor's own dtype and shape into it.

        Raises `HandleError`, or `DTypeError` and `ShapeError` for an array of another type.
        """
        with self._lock:
            entry = self._store.entry(handle)
            if self.checked:
                check_write(entry.type, array)
            np.copyto(entry.array, array)

    def borrow(self, handle: TensorHandle) -> Array:
        """The tensor's own memory as an array, without a copy, valid until the next launch.

        Only a VM of this process can lend it. Raises `HandleError`.
        """
        return self._store.entry(handle).array.view()

    def swap(self, h1: TensorHandle, h2: TensorHandle) -> None:
        """Exchange what two handles of one type name, without a copy."""
        with self._lock:
            self._store.swap(h1, h2)
            self._forget_bindings()

    # --- storages ---

    def alloc_storage(self, nbytes: int) -> StorageHandle:
        """A new storage of zero bytes, aligned to 64."""
        with self._lock:
            return self._store.alloc_storage(nbytes)

    def dealloc_storage(self, handle: StorageHandle) -> None:
        """End the storage and every tensor in it. Raises `HandleError`."""
        with self._lock:
            self._store.dealloc_storage(handle)
            self._forget_bindings()

    def tensor_from_storage(
        self, storage: StorageHandle, type: TensorType, offset: int
    ) -> TensorHandle:
        """A tensor that views the storage from byte `offset` on; nothing is copied.

        Raises `HandleError`, or `ShapeError` when it would leave the storage or lie askew.
        """
        with self._lock:
            return self._store.tensor_from_storage(storage, type, offset)

    def consumed_size_in_mib(self) -> float:
        """The bytes of all storages, exactly, in units of 2**20."""
        return self._store.consumed / 2**20

    # --- launch ---

    def launch(self, program: Program, args: Sequence[TensorHandle] = ()) -> list[Array]:
        """Run the program on the tensors `args`; copies of what it leaves are returned.

        A launch on a busy VM waits. A program is verified for each combination of argument
        types it first comes with. Raises `HandleError`, and what `verify` and ops raise;
        whatever it raises, the VM is as before.
        """
        self._lock.acquire()  # half the price of `with`
        try:
            linked = self._linked.get(id(program)) or self._link(program)
            try:
                args = tuple(args)
                operands = linked.bound.get(args)
            except TypeError:  # not iterable, or not hashable
                raise HandleError(f"launch takes tensor handles, not {args!r}") from None
            if not operands:
                operands = self._bind(linked, program, args)
            if self._running:  # a host function launches again
                outputs = machine.run(linked.steps, operands, self._store)
            else:
                self._running = True
                try:
                    outputs = self._context.run(machine.run, linked.steps, operands, self._store)
                finally:
                    self._running = False
            return _copies(outputs) if outputs else []
        finally:
            self._lock.release()

    def _link(self, program: Program) -> Linked:
        if self.checked:
            verify(program, self.functions)
        linked = self._linked[id(program)] = machine.link(program, self.functions)
        key, me = id(program), weakref.ref(self)

        def forget(_: weakref.ref[Program]) -> None:
            vm = me()
            if vm is not None:
                del vm._linked[key]
                vm._with_bindings.pop(key, None)

        linked.program = weakref.ref(program, forget)
        return linked

    def _bind(
        self, linked: Linked, program: Program, args: tuple[TensorHandle, ...]
    ) -> tuple[Array, ...]:
        entries = [self._store.entry(handle) for handle in args]
        if self.checked:
            types = tuple([entry.type for entry in entries])
            if types not in linked.admitted:
                verify(program, self.functions, types)
                linked.admitted.add(types)
        operands = tuple([entry.array for entry in entries[: linked.nargs]])
        if len(linked.bound) >= _BOUND_LIMIT:
            linked.bound.clear()
        linked.bound[args] = operands
        self._with_bindings[id(program)] = linked
        return operands

    def _forget_bindings(self) -> None:
        """Handles may name other arrays now, and arrays that ended must not be kept alive."""
        with_bindings, self._with_bindings = self._with_bindings, {}
        for linked in with_bindings.values():
            linked.bound.clear()


def check_write(type: TensorType, array: Array) -> None:
    """Raise `DTypeError` or `ShapeError` unless the array is of the tensor's own type."""
    if not isinstance(array, (np.ndarray, np.generic)):
        raise DTypeError(f"write to {type}: an array is wanted, not a {array.__class__.__name__}")
    if array.dtype != type.dtype.numpy:
        raise DTypeError(f"write to {type}: the array's dtype is {array.dtype}")
    if array.shape != type.shape:
        raise ShapeError(f"write to {type}: the array's shape is {array.shape}")


def _copies(stack: list[Value]) -> list[Array]:
    return [np.array(value, order="C") for value in stack if isinstance(value, np.ndarray)]
