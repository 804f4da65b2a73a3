"""Messages for tensors and arenas of a closed VM, which name that VM."""

from __future__ import annotations

from functools import partial

import pytest

import mlvm.eager as ml
from tests.brief import refuses

pytestmark = pytest.mark.local(reason="a VM of this process is closed")

CLOSED = "VM 'mine' was closed"


def test_errors_name_the_tensor_and_the_closed_vm() -> None:
    vm = ml.VM("mine")
    arena = ml.Arena(vm, "weights")
    w = arena.keep(ml.ones(3, device=vm))
    with ml.use(vm):
        model, x = ml.nn.Linear(3, 2), ml.ones((1, 3))
    vm.close()
    expected = f"<f32[3], arena='weights': {CLOSED}>"
    assert repr(w) == expected
    refuses(ml.errors.HandleError, rf"f32\[3\] has ended: {CLOSED}", w.tolist)
    refuses(ml.errors.HandleError, rf"f32\[3\] has ended: {CLOSED}", lambda: w + 1)
    refuses(ml.errors.MlvmError, CLOSED, model, x)
    for block in (arena, arena.allocating()):
        refuses(ml.errors.MachineError, f"arena 'weights': {CLOSED}", block.__enter__)
    refuses(ml.errors.MachineError, f"arena 'default': {CLOSED}", ml.ones, 3, device=vm)
    assert repr(w) == expected


def test_a_reset_after_the_end_of_the_vm_keeps_the_reason() -> None:
    vm = ml.VM("mine")
    arena = ml.Arena(vm, "batch")
    with arena:
        x = ml.ones(3)
        vm.close()
    refuses(ml.errors.StaleTensorError, f"'batch' was freed: {CLOSED}", x.tolist)


def test_tensors_that_were_never_read_name_the_closed_vm() -> None:
    """C code allocates them without a handle."""
    vm = ml.VM("mine")
    with ml.use(vm):
        tensors = ml.asarray(1.5), ml.zeros((1, 1)), ml.sum(ml.ones(3) + 1), ml.ones(1)[0]
    vm.close()
    for x in tensors:
        assert repr(x) == f"<{x.type}: {CLOSED}>"
        for read in (x.numpy, x.item, x.tolist, x.__float__, partial(ml.sum, x)):
            refuses(ml.errors.HandleError, f"has ended: {CLOSED}", read)
