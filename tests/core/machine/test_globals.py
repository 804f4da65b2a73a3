"""Handles from within a program: `load_global` and `store_global`."""

from __future__ import annotations

import numpy as np
import pytest

from mlvm.core.errors import DTypeError, HandleError
from mlvm.core.program.program import Program
from mlvm.core.types import TensorType, f32
from mlvm.core.vm import VM
from tests.brief import refuses
from tests.core.programs import NEGATIVE, C, asm, f32s, main_of, put


def store_into(handle: int, value: str) -> Program:
    return main_of(f"{value} | push_int {handle} | store_global")


def test_a_handle_names_what_is_stored_under_it(vm: VM) -> None:
    x, y = put(vm, f32s(1)), put(vm, f32s(2))
    assert vm.launch(NEGATIVE, [x]) == [-1]
    vm.launch(store_into(x, f'push_int {y} | load_global | push_str "negative" | cfunc 1 1'))
    assert vm.read(x) == -2
    assert vm.launch(NEGATIVE, [x]) == [2]
    assert vm.consumed_size_in_mib() * 2**20 == 8


def test_a_stored_tensor_may_be_of_another_type(vm: VM) -> None:
    x = put(vm, f32s(1, 2))
    assert vm.launch(NEGATIVE, [x])[0].tolist() == [-1, -2]
    vm.launch(store_into(x, 'push_const one | push_str "logical_not" | cfunc 1 1'))
    assert vm.type_of(x) is TensorType("bool", (1, 1))
    assert vm.consumed_size_in_mib() * 2**20 == 1
    refuses(DTypeError, "", vm.launch, NEGATIVE, [x])
    vm.write(x, np.array([[True]]))


def test_what_a_launch_has_loaded_stays_as_it_was(vm: VM) -> None:
    x = put(vm, f32s(1, 2))
    program = main_of(
        f"load_arg 0 | push_int {x} | load_global | push_const zero | push_int {x} | store_global"
        f"| load_arg 0 | push_int {x} | load_global"
    )
    first, second, third, fourth = vm.launch(program, [x])
    assert [list(a) for a in (first, second, third)] == [[1, 2]] * 3
    assert fourth == 0


def test_a_stored_constant_is_copied(vm: VM) -> None:
    x = put(vm, f32s(0))
    program = store_into(x, "push_const c")
    vm.launch(program)
    vm.write(x, f32s(5, 6))
    vm.launch(Program.of_op("negative.out", 2, {}, 0), [x, x])
    np.testing.assert_array_equal(vm.read(x), [-5, -6])
    np.testing.assert_array_equal(program.constants["c"], C)
    assert vm.borrow(x).ctypes.data % 64 == 0


def test_one_storage_under_two_handles(vm: VM) -> None:
    x, y = put(vm, f32s(1, 2)), put(vm, f32s(3, 4, 5))
    vm.launch(store_into(y, f"push_int {x} | load_global"))
    assert vm.consumed_size_in_mib() * 2**20 == 8
    vm.write(x, f32s(7, 8))
    np.testing.assert_array_equal(vm.read(y), [7, 8])
    vm.dealloc_tensor(x)
    assert vm.consumed_size_in_mib() * 2**20 == 8
    np.testing.assert_array_equal(vm.read(y), [7, 8])
    vm.dealloc_tensor(y)
    assert vm.consumed_size_in_mib() == 0


def test_a_global_grows_in_a_loop(vm: VM) -> None:
    """Each round doubles it: only the last one is held, and counted, in the end."""
    x, n = put(vm, f32s(1)), put(vm, np.array(6))
    program = asm(
        f".const one i64[] 1 | .func main 0 * | again: | load_arg 0 | jump_if_false done | "
        f'push_int {x} | load_global | get 0 | push_str "concat" | cfunc 2 1 | push_int {x} | '
        f'store_global | load_arg 0 | load_arg 0 | push_const one | push_str "subtract.out" | '
        f"cfunc 3 0 | jump again | done: | halt"
    )
    assert vm.launch(program, [n]) == []
    assert vm.type_of(x) is TensorType(f32, (64,))
    assert vm.consumed_size_in_mib() * 2**20 == 64 * 4 + 8


def test_a_failed_launch_keeps_what_it_had_stored(vm: VM) -> None:
    """Stores are effects, as writes are: those before the error stay, and are counted."""
    x = put(vm, f32s(1))
    program = main_of(f"push_const c | push_int {x} | store_global | push_int 0 | load_global")
    refuses(HandleError, "", vm.launch, program)
    np.testing.assert_array_equal(vm.read(x), C)
    assert vm.consumed_size_in_mib() * 2**20 == 8
    storage = vm.alloc_storage(4)
    with pytest.raises(HandleError, match="refers to a storage, not to a tensor"):
        vm.launch(store_into(storage, "push_const c"))
