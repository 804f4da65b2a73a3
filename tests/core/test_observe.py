"""Layers around a VM's methods."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from mlvm.core.errors import HandleError
from mlvm.core.observe import Layer, observe, observed
from mlvm.core.program.program import Program
from mlvm.core.vm import VM
from tests.brief import refuses
from tests.core.programs import ADD_INTO, f32s, put
from tests.threads import PATIENCE, start

NEGATE = Program.of_op("negative", 1, {}, 1)


def listed(launches: list[object]) -> Layer:
    """A layer around `launch` that lists programs and arguments."""

    def launch(
        proceed: Callable[..., Any], program: Program, args: Any = (), **options: Any
    ) -> Any:
        launches.append((program, tuple(args)))
        return proceed(program, args, **options)

    return launch


def test_a_layer_sees_what_is_called_inside_the_block_and_passes_it_on(vm: VM) -> None:
    x, y = put(vm, f32s(1)), put(vm, f32s(2))
    launches: list[object] = []
    with observed(vm, launch=listed(launches)):
        vm.launch(ADD_INTO, [x, x, y])
        assert vm.launch(NEGATE, (x,)) == [-3]
    vm.launch(NEGATE, [y])
    assert launches == [(ADD_INTO, (x, x, y)), (NEGATE, (x,))]


def test_the_latest_layer_is_the_outermost_and_may_answer_itself(vm: VM) -> None:
    x = put(vm, f32s(1))

    def twice(proceed: Callable[..., Any], handle: int) -> Any:
        return 2 * proceed(handle)

    def less(proceed: Callable[..., Any], handle: int) -> Any:
        return proceed(handle) - 1

    with observed(vm, read=twice), observed(vm, read=less):
        assert vm.read(x) == [1]
    with observed(vm, read=less), observed(vm, read=twice):
        assert vm.read(x) == [0]
    with observed(vm, read=lambda proceed, handle: "nothing"):
        assert vm.read(x) == "nothing"
    assert vm.read(x) == [1]


def test_blocks_may_overlap_and_end_in_any_order(vm: VM) -> None:
    x = put(vm, f32s(1))
    first: list[object] = []
    second: list[object] = []
    one, two = observed(vm, launch=listed(first)), observed(vm, launch=listed(second))
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)
    vm.launch(NEGATE, [x])
    two.__exit__(None, None, None)
    vm.launch(NEGATE, [x])
    assert (len(first), len(second)) == (0, 1)


def test_an_error_passes_through_and_ends_the_block(vm: VM) -> None:
    launches: list[object] = []
    method = vm.launch
    with pytest.raises(HandleError), observed(vm, launch=listed(launches)):
        vm.launch(NEGATE, [0])
    assert len(launches) == 1
    assert vm.launch == method


def test_a_vm_without_that_method_is_left_as_it_was(vm: VM) -> None:
    method = vm.launch
    refuses(AttributeError, "fly", lambda: observe(vm, launch=listed([]), fly=listed([])))
    assert vm.launch == method


def test_another_vm_and_the_vms_end_are_not_concerned() -> None:
    vm, other = VM(), VM()
    launches: list[object] = []
    observe(vm, launch=listed(launches))
    other.launch(NEGATE, [put(other, f32s(1))])
    assert launches == []
    reference = weakref.ref(vm)
    del vm
    gc.collect()
    assert reference() is None


def test_threads_may_come_and_go_while_others_launch(vm: VM) -> None:
    x = put(vm, f32s(1))
    stop = threading.Event()

    def launch() -> None:
        while not stop.is_set():
            assert vm.launch(NEGATE, [x]) == [-1]

    launching = [start(launch) for _ in range(2)]
    for _ in range(300):
        with observed(vm, launch=listed([])):
            pass
    stop.set()
    for each in launching:
        each.result(PATIENCE)
