"""The dry VM refuses and counts as the real one does, and holds no bytes."""

from __future__ import annotations

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import DTypeError, HandleError, ProgramError, ShapeError
from mlvm.core.program.program import Program
from mlvm.core.types import MAX_NBYTES, TensorType, f32
from mlvm.core.vm import VM
from mlvm.machines.dry import DryVM
from tests.brief import cases, refuses, traced_memory
from tests.core.programs import ADD_INTO, f32s, put, straight

VECTOR = TensorType(f32, (2,))


@cases("kind", VM, DryVM)
def test_it_counts_as_the_real_one(kind: type[VM]) -> None:
    vm = kind()
    tensor, storage = vm.alloc_tensor(VECTOR), vm.alloc_storage(256)
    view = vm.tensor_from_storage(storage, VECTOR, 64)
    assert vm.consumed_size_in_mib() * 2**20 == 8 + 256
    vm.swap(tensor, view)
    vm.dealloc_tensor(view)  # names the tensor of its own storage now
    assert vm.consumed_size_in_mib() * 2**20 == 256
    vm.dealloc_storage(storage)
    assert vm.consumed_size_in_mib() == 0
    refuses(HandleError, "freed with storage", vm.type_of, tensor)
    with pytest.raises(ShapeError, match="ends at byte 68, but the storage has 64"):
        vm.tensor_from_storage(vm.alloc_storage(64), VECTOR, 60)


def test_what_no_machine_could_hold_costs_nothing() -> None:
    vm = DryVM()
    with traced_memory() as peak:
        huge = TensorType("u8", (MAX_NBYTES,))
        handles = [vm.alloc_tensor(huge) for _ in range(3)]
        vm.launch(Program.of_op("add.out", 3, {}, 0), handles)
        assert peak() < 2**20
    assert vm.consumed_size_in_mib() * 2**20 == 3 * MAX_NBYTES


def test_a_launch_is_verified_and_not_run() -> None:
    vm = DryVM()
    handles = [vm.alloc_tensor(VECTOR) for _ in range(3)]
    assert vm.launch(ADD_INTO, handles) == []
    add, longer = Program.of_op("add", 2, {}, 1), vm.alloc_tensor(TensorType(f32, (3,)))
    refuses(
        HandleError, "is a dry VM, which computes no values to return", vm.launch, add, handles[:2]
    )
    refuses(ShapeError, "shapes do not broadcast", vm.launch, ADD_INTO, [*handles[:2], longer])
    endless = straight(("load_arg", 0))
    refuses(
        ProgramError, "execution can reach the end of the function", vm.launch, endless, handles
    )
    vm.dealloc_tensor(handles[0])
    refuses(HandleError, "freed by dealloc_tensor", vm.launch, ADD_INTO, handles)


def test_writes_are_checked_and_dropped() -> None:
    vm = DryVM()
    handle = put(vm, f32s(1, 2))
    refuses(DTypeError, "expected an array of dtype .*, got float64", vm.write, handle, np.zeros(2))
    refuses(
        ShapeError, r"expected an array of shape .*, got \(3,\)", vm.write, handle, f32s(1, 2, 3)
    )


def test_there_is_nothing_to_read() -> None:
    vm = DryVM("plan")
    handle = vm.alloc_tensor(VECTOR)
    for read in (vm.read, vm.borrow):
        refuses(HandleError, r"plan is a dry VM: f32\[2\] has no values to read", read, handle)


def test_its_tensors_have_no_addresses() -> None:
    """C writes numbers, fills and copies to addresses."""
    arena = ml.Arena(ml.DryVM("dry"), "weights")
    with arena.allocating():
        for n in range(2, 40):
            x = ml.ones((n, 3)) * 2.5 + ml.full(n, 1.5)[:, None]
            assert (x[1:].type, ml.asarray([1.0] * n).type) == (
                ml.TensorType("f32", (n - 1, 3)),
                ml.TensorType("f32", (n,)),
            )
    assert arena.fast_path is None
