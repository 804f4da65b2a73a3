"""Host function `queue.get`: a program loops over a queue without Python.

    queue.get  ( q -- t1 .. tn ok )      q: the queue's handle, an Int or a one-element Tensor

It waits for an element and pushes the tensors and 1. When the queue is closed and drained, it
pushes empty tensors and 0, so the stack has the same height on both paths:

    next:
        push_int 7                 ; images = QueueTensor(...); images.handle is 7
        push_str "queue.get"
        cfunc 1 3                  ; images labels ok
        jump_if_false end
        ...
        pop 2
        jump next
    end:
        pop 2
        halt

`cfunc 1 2 {"raises": true}` pushes only the tensors, and raises `QueueClosedError` at the end.
`cfunc 1 3 {"wait": false}` does not wait: without an element, it also pushes 0. The tensors share
the slot's memory. The slot is free again when neither the program nor a worker uses them.

While a program waits, the launch holds the VM's lock, so producers must not need this lock.
Instead, a caller may wait before the launch, without the lock: `taken_ahead`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any, Final, Protocol

import numpy as np

from mlvm.arena.arena import Allocation
from mlvm.core.errors import (
    ArgumentError,
    HandleError,
    MachineError,
    QueueClosedError,
    QueueEmptyError,
    brief,
)
from mlvm.core.machine.callee import Value, describe
from mlvm.core.machine.frame import Frame
from mlvm.core.protocol import LocalVMProtocol, StorageHandle, VMProtocol
from mlvm.core.types import Array, TensorType
from mlvm.input.slot_memory import SlotMemory
from mlvm.input.slots import Claim, SlotArena

NAME: Final = "queue.get"


class Queue(Protocol):
    """Interface of a queue tensor for programs."""

    name: str
    types: tuple[TensorType, ...]
    memory: SlotMemory
    arena: SlotArena
    handle: StorageHandle

    def next_slot(self, timeout: float | None = None) -> Claim: ...


class Queues(weakref.WeakValueDictionary[StorageHandle, Queue]):
    """Queues of a VM's programs, by handle.

    `claims` contains elements that were taken before a launch, by thread and queue.
    """

    def __init__(self, vm: VMProtocol) -> None:
        super().__init__()
        self.claims: dict[tuple[int, StorageHandle], Claim] = {}


def register(vm: LocalVMProtocol, queue: Queue) -> None:
    """Register the queue by handle for the VM's programs, until it is deleted."""
    queues = vm.attached(Queues)
    vm.register(NAME, partial(_get, queues), nparams=1)
    queues[queue.handle] = queue


@contextmanager
def taken_ahead(queue: Queue) -> Iterator[None]:
    """Take the next element of the queue.

    Inside the block, the first program of this thread that takes an element gets this element.
    Without such a program, the element is dropped. Raises the errors of the queue's `get`.
    """
    vm, mine = queue.arena.lender, (get_ident(), queue.handle)
    assert vm is not None  # programs read only from queues with a VM
    claims = vm.attached(Queues).claims
    try:
        claims[mine] = queue.next_slot()
        yield
    finally:
        claim = claims.pop(mine, None)
        if claim is not None:
            claim.give_back()


def _get(queues: Queues, frame: Frame) -> None:
    raises, wait, *others = {"raises": False, "wait": True, **frame.attributes}.values()
    if others or not isinstance(raises, bool) or not isinstance(wait, bool):
        given = brief(dict(frame.attributes))
        raise ArgumentError(f"expected the attributes raises and wait as bools, got {given}").at(
            NAME, ()
        )
    queue = _named(frame.param(0), queues)
    claim = queues.claims.pop((get_ident(), queue.handle), None)
    try:
        claim = claim or queue.next_slot(None if wait else 0)
    except (QueueClosedError, QueueEmptyError) as error:
        if raises or (wait and isinstance(error, QueueEmptyError)):
            raise
        for type in queue.types:
            frame.push(frame.new_tensor(TensorType(type.dtype, (0,))))
        frame.push(0)
        return
    assert claim.slot is not None
    arrays = queue.memory.slots[claim.slot.index]
    for array, tensor in zip(arrays, queue.arena.lend(claim, Allocation), strict=True):
        frame.lend(np.asarray(_Memory(array, tensor)))
    if not raises:
        frame.push(1)


class _Memory:
    """Owner of a tensor's memory, for numpy.

    Every array over the memory keeps the owner, and therefore the tensor and the slot, alive.
    """

    __slots__ = ("__array_interface__", "tensor")

    def __init__(self, array: Array, tensor: Allocation) -> None:
        self.__array_interface__: dict[str, Any] = array.__array_interface__
        self.tensor = tensor


def _named(handle: Value, queues: Queues) -> Queue:
    """Return the queue with a handle."""
    if isinstance(handle, np.ndarray) and handle.size == 1 and handle.dtype.kind in "iu":
        handle = int(handle.item())
    if not isinstance(handle, int):
        raise MachineError(f"{NAME}: expected a queue's handle, an Int, got {describe([handle])}")
    queue = queues.get(handle)
    if queue is None:
        raise HandleError(
            f"{NAME}: expected the handle of a live queue tensor of this VM, got {handle}"
        )
    return queue
