"""The loop: what each instruction does, frames, and the limits."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from mlvm.core.collecting import uncollected
from mlvm.core.errors import HandleError, MachineError
from mlvm.core.machine.frame import Frame
from mlvm.core.machine.link import nargs_of
from mlvm.core.program.program import STAR, Program
from mlvm.core.store import FreeStore
from mlvm.core.types import Array, TensorType, f32
from mlvm.core.vm import VM
from tests.brief import cases, refuses
from tests.cases.claim_tests import claims
from tests.core.programs import asm, f32s, put, run, straight


@cases("order", (0, 1, 2), (0, 2, 1), (2, 1, 0), (0, 1, 1), (1, 1, 2))
@cases("count", 3, STAR)
def test_arguments_reach_a_kernel_in_the_order_they_are_loaded(order: Any, count: Any) -> None:
    program = straight(
        *(("load_arg", i) for i in order), ("push_str", "subtract.out"), ("cfunc", count, 0), "halt"
    )
    operands = [f32s(1), f32s(20), f32s(300)]
    expected = [x.copy() for x in operands]
    z, x, y = (expected[i] for i in order)
    np.subtract(x, y, z)
    assert run(program, *operands[: nargs_of(program)]) == []
    np.testing.assert_array_equal(operands, expected)


def test_attributes_reach_the_kernel() -> None:
    x = f32s(1, 2, 3).reshape(1, 3)
    for attributes, expected in (({"axis": [1]}, [6]), ({"axis": 0, "keepdims": True}, x)):
        program = Program.of_op("sum", 1, attributes, 1)
        np.testing.assert_array_equal(run(program, x), [expected])


def test_nothing_after_halt_runs_or_is_looked_at() -> None:
    assert run(straight("halt", ("push_int", 1), ("load_arg", 5))) == []


def test_load_global_names_a_tensor_of_the_store() -> None:
    store = FreeStore()
    handle = store.alloc_tensor(TensorType(f32, (2,)))
    program = straight(("push_int", handle), "load_global", "halt")
    assert run(program, store=store)[0] is store.entry(handle).array
    store.dealloc_tensor(handle)
    refuses(HandleError, r"f32\[2\], freed by dealloc_tensor", run, program, store=store)


# --- each instruction -----------------------------------------------------------------


@cases("array", f32s(1, 2), f32s(), np.zeros((2, 0), np.int32))
def test_a_condition_has_one_element(array: Array, vm: VM) -> None:
    program = asm(
        '.func main 0 * | load_arg 0 | push_str "nonzero_indices" | cfunc 1 1 | '
        "jump_if_false end | end: | halt"
    )
    size = np.argwhere(array).size
    with pytest.raises(MachineError, match="a condition as an Int or a Tensor of one element"):
        vm.launch(program, [put(vm, array)])
    assert size != 1


def test_an_error_keeps_no_tensor_alive_once_it_is_forgotten(vm: VM) -> None:
    arrays: list[weakref.ref[Any]] = []

    def fail(frame: Frame) -> None:
        array = frame.new_tensor(TensorType("f32", (4,)))
        arrays.append(weakref.ref(array))
        raise ValueError("on purpose")

    vm.register("fail", fail)
    gc.collect()
    with uncollected():
        refuses(ValueError, "on purpose", vm.launch, Program.of_op("fail", 0, {}, 0))
        assert arrays[0]() is None


test_rows = claims("run", globals())
